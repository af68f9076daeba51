"""What a salvage keeps of a frame, where it puts it, and what it reports about the rest."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import logquarry as lq
from logquarry.errors import StoreNotFound, StoreUnavailable, UsageError
from logquarry.format import broker_json
from logquarry.format.queue_entry import FILLER_SIZE, UNIT_SIZE
from logquarry.log.layout import StoreLayout
from logquarry.repair.salvage.salvage import Salvaged, salvage_store
from logquarry.repair.salvage.target import SalvageTarget
from logquarry.repair.verification import verify_store
from tests.helpers.damage import damaged
from tests.helpers.files import bytes_of, flip, overwrite
from tests.helpers.small_store import at_each_step, config, facts, opened
from tests.helpers.store_maker import FIRST_TIME, StoreMaker

COMMIT, ROLLBACK, PREPARED = 8, 12, 4
SMALL_INDEX: dict[str, Any] = {"max_hash_slot_num": 16, "max_index_num": 50}
"""For a store without an index: an index file of 420 MB would take a second to check."""


def saved(root: Path, into: Path | None, *, include_stale: bool = False, **sizes: Any) -> Salvaged:
    """Salvage a store, and check that the source is unchanged and the new store sound."""
    before = facts(root)
    layout = StoreLayout.open(root, lq.StoreConfig(**sizes))
    found = salvage_store(layout, into, include_stale=include_stale)
    assert facts(root) == before
    if into is not None:
        report = verify_store(StoreLayout.open(into, found.plan.config))
        found_kinds = {f.kind for f in report.findings if f.severity == "damage"}
        # Fields that no CRC covers are kept as they are, and reported.
        assert found_kinds <= {"suspect_text"}, report.findings
        assert report.counts["messages"] == found.plan.messages
        noted = json.loads((into / ".logquarry/salvage.json").read_text())
        assert noted == found.to_json() | {"seconds": noted["seconds"]}
    return found


def messages(root: Path) -> list[lq.StoredMessage]:
    with lq.MessageStore.open(root) as store:
        return list(store.scan(on_damage="skip"))


def content(message: lq.StoredMessage) -> tuple[object, ...]:
    """The fields that a salvage must not change."""
    return (
        message.topic,
        message.queue_id,
        message.queue_offset,
        message.size,
        message.store_timestamp,
        message.born_timestamp,
        message.born_host,
        message.store_host,
        message.sys_flag,
        message.flag,
        message.reconsume_times,
        message.properties_string,
        message.body,
    )


def harm(root: Path, *places: int, size: int = 4096) -> None:
    """Flip one bit of the log at each of these places."""
    for place in places:
        flip(root / f"commitlog/{place - place % size:020d}", place % size)


@dataclass
class Made:
    root: Path
    maker: StoreMaker


def make(root: Path) -> Made:
    """A store of 60 messages in six queues."""
    maker = StoreMaker()
    for number in range(60):
        maker.put(
            f"topic{number % 2}", number % 3, b"body %d" % number * 20, keys=f"k{number}", tags="T"
        )
    return Made(maker.write(root), maker)


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return make(tmp_path / "store")


SIZES: dict[str, Any] = {"max_hash_slot_num": 16, "max_index_num": 50}


def test_a_sound_store_comes_out_the_same(made: Made, tmp_path: Path) -> None:
    found = saved(made.root, tmp_path / "new", **SIZES)
    assert found.plan.is_whole and not found.to_json()["moved"]
    for path in (made.root / "commitlog").iterdir():
        assert (tmp_path / "new/commitlog" / path.name).read_bytes() == path.read_bytes()
    for path in (made.root / "consumequeue").rglob("0*"):
        if path.is_file():
            there = tmp_path / "new" / path.relative_to(made.root)
            assert there.read_bytes() == path.read_bytes()


def test_a_dry_run_says_the_same_and_writes_nothing(made: Made, tmp_path: Path) -> None:
    harm(made.root, made.maker.frames[7].physical_offset + 95)
    names = sorted(tmp_path.rglob("*"))
    dry = saved(made.root, None, **SIZES).to_json()
    assert sorted(tmp_path.rglob("*")) == names
    wet = saved(made.root, tmp_path / "new", **SIZES).to_json()
    assert dry | {"into": None, "seconds": 0} == wet | {"into": None, "seconds": 0}


def test_one_bad_bit_costs_one_message_which_is_named(made: Made, tmp_path: Path) -> None:
    lost = made.maker.frames[30]
    harm(made.root, lost.physical_offset + 95)
    found = saved(made.root, tmp_path / "new", **SIZES)
    whole = {content(m)[:3]: content(m) for m in messages(made.root)}
    there = [content(m) for m in messages(tmp_path / "new")]
    assert there == list(whole.values()) and len(there) == 59
    (span,) = found.to_json()["lost"]
    assert (span["offset"], span["length"], span["kind"]) == (
        lost.physical_offset,
        lost.size,
        "bad_body_crc",
    )
    assert span["file"] == f"commitlog/{lost.physical_offset // 4096 * 4096:020d}"
    (message,) = span["messages"]
    assert message == {
        "topic": lost.topic.decode(),
        "queue_id": lost.queue_id,
        "queue_offset": lost.queue_offset,
        "count": 1,
    }
    counts = {one["topic"]: (one["messages"], one["lost"]) for one in found.to_json()["topics"]}
    assert counts == {"topic0": (29, 1), "topic1": (30, 0)}


def test_without_queues_the_frame_tells_which_message_was_lost(made: Made, tmp_path: Path) -> None:
    shutil.rmtree(made.root / "consumequeue")
    lost = made.maker.frames[-3]
    harm(made.root, lost.physical_offset + 95)
    (span,) = saved(made.root, tmp_path / "new", **SIZES).to_json()["lost"]
    assert [message["queue_offset"] for message in span["messages"]] == [lost.queue_offset]


def test_a_lost_message_leaves_a_unit_and_no_file_at_0(made: Made, tmp_path: Path) -> None:
    """RocketMQ skips the rest of the first file after such an entry, if the file begins at 0."""
    lost = made.maker.frames[30]
    harm(made.root, lost.physical_offset + 95)
    saved(made.root, tmp_path / "new", **SIZES)
    with lq.MessageStore.open(tmp_path / "new") as store:
        queue = store.queue(lost.topic.decode(), lost.queue_id)
        assert queue is not None and store.min_offset == 4096
        unit = queue.units(lost.queue_offset, lost.queue_offset + 1)[0]
        assert unit["size"] == FILLER_SIZE
        got, offset = [], 0
        while offset < 10:
            result = store.get(lost.topic.decode(), lost.queue_id, offset)
            got += [message.queue_offset for message in result.messages]
            assert result.next_offset > offset
            offset = result.next_offset
    assert got == [number for number in range(10) if number != lost.queue_offset]


def test_a_queue_file_never_ends_in_a_unit_that_names_place_0(tmp_path: Path) -> None:
    maker = StoreMaker(queue_file_units=4)
    for number in range(14):
        maker.put(body=b"%d" % number * 100)
    root = maker.write(tmp_path / "store")
    harm(root, *(maker.frames[number].physical_offset + 95 for number in (2, 3, 4, 7)))
    saved(root, tmp_path / "new")
    units = b"".join(
        path.read_bytes() for path in sorted((tmp_path / "new/consumequeue/orders/0").iterdir())
    )
    places = [
        int.from_bytes(units[at : at + 8], "big") for at in range(0, 14 * UNIT_SIZE, UNIT_SIZE)
    ]
    assert [number for number, place in enumerate(places) if place == 0] == [2, 4]
    assert places[3] == places[7] == 4096
    with lq.MessageStore.open(tmp_path / "new") as store:
        assert [m.queue_offset for m in store.scan("orders")] == [
            number for number in range(14) if number not in (2, 3, 4, 7)
        ]


def test_a_copy_without_its_middle(made: Made, tmp_path: Path) -> None:
    paths = sorted((made.root / "commitlog").iterdir())
    assert len(paths) >= 4
    paths[1].unlink()
    paths[2].unlink()
    found = saved(made.root, tmp_path / "new", **SIZES)
    (span,) = found.to_json()["lost"]
    assert (span["kind"], span["offset"], span["length"]) == ("missing_file", 4096, 8192)
    lost = [f for f in made.maker.frames if 4096 <= f.physical_offset < 3 * 4096]
    assert sum(one["count"] for one in span["messages"]) == len(lost)
    assert len(messages(tmp_path / "new")) == 60 - len(lost)


def test_messages_behind_the_log_that_only_queues_know(made: Made, tmp_path: Path) -> None:
    sorted((made.root / "commitlog").iterdir())[-1].unlink()
    (made.root / "abort").touch()
    (made.root / "config").mkdir()
    offsets = {("topic0", "g"): {0: 10, 2: 1}, ("topic1", "other"): {1: 10}}
    text = broker_json.encode_consumer_offsets(offsets)
    (made.root / "config/consumerOffset.json").write_text(text)
    (made.root / "config/topics.json").write_text('{"topicConfigTable":{}}')
    found = saved(made.root, tmp_path / "new", **SIZES)
    (span,) = found.to_json()["lost"]
    assert span["kind"] == "missing_file" and span["messages"]
    with lq.MessageStore.open(tmp_path / "new") as store:
        ends = {key: store.queue_offsets(*key)[1] for key in (("topic0", 0), ("topic1", 1))}
    now = broker_json.decode_consumer_offsets(
        (tmp_path / "new/config/consumerOffset.json").read_bytes()
    )
    assert now == {
        ("topic0", "g"): {0: min(10, ends["topic0", 0]), 2: 1},
        ("topic1", "other"): {1: min(10, ends["topic1", 1])},
    }
    assert {(one.group, one.was) for one in found.progress} <= {("g", 10), ("other", 10)}
    assert found.progress
    kept = tmp_path / "new/.logquarry/salvage/consumerOffset.json"
    assert kept.read_text() == text
    assert (tmp_path / "new/config/topics.json").read_text() == '{"topicConfigTable":{}}'


def test_empty_files_are_copied(made: Made, tmp_path: Path) -> None:
    """A power cut can leave such files."""
    (made.root / "config").mkdir()
    (made.root / "config/notes").touch()
    (made.root / "config/folder").mkdir()
    (made.root / "config/folder/empty").touch()
    found = saved(made.root, tmp_path / "new", **SIZES)
    assert not found.left_behind
    for name in ("notes", "folder/empty"):
        assert (tmp_path / "new/config" / name).read_bytes() == b""


def test_invalid_files_of_config_are_reported(made: Made, tmp_path: Path) -> None:
    """With an invalid file and no backup, groups lose their offsets, or a broker does not start."""
    harmed = {
        "consumerOffset.json": b"",
        "topics.json": bytes(300),
        "consumerFilter.json": b'{"filterDataByTopic":{},}}',
        "delayOffset.json": b'\xef\xbb\xbf{"offsetTable":{}}',
    }
    (made.root / "config").mkdir()
    for name, data in harmed.items():
        (made.root / "config" / name).write_bytes(data)
    (made.root / "config/subscriptionGroup.json").write_text('{"subscriptionGroupTable":{}}')
    preview = lq.salvage(made.root, config=lq.StoreConfig(**SIZES))
    found = lq.salvage(made.root, tmp_path / "new", config=lq.StoreConfig(**SIZES))
    reported = {path for one in found.left_behind for path in one.paths}
    assert reported == {f"config/{name}" for name in harmed}
    assert {one.feature for one in found.left_behind} == {"bad_config"}
    assert not found.is_whole and preview.left_behind == found.left_behind
    for name, data in harmed.items():
        assert (tmp_path / "new/config" / name).read_bytes() == data


def test_all_of_the_log_is_gone(made: Made, tmp_path: Path) -> None:
    shutil.rmtree(made.root / "commitlog")
    found = saved(made.root, tmp_path / "new", **SIZES)
    assert found.plan.messages == 0 and not found.plan.is_whole
    assert sum(topic.lost for topic in found.plan.topics.values()) == 60


def test_times_never_fall_and_ends_name_their_half(tmp_path: Path) -> None:
    maker = StoreMaker()
    maker.put(body=b"x" * 200)
    half = maker.put("half", body=b"half", sys_flag=PREPARED, queue_offset=0)
    lost = maker.put("half", body=b"lost", sys_flag=PREPARED, queue_offset=0)
    maker.put(body=b"early", time=FIRST_TIME - 5_000)
    root = maker.write(tmp_path / "store")
    with opened(
        root, mapped_file_size_commit_log=4096, mapped_file_size_consume_queue=200
    ) as store:
        for place in (half, lost):
            for kind in (COMMIT, ROLLBACK):
                store.put(
                    lq.Message(
                        "ended",
                        b"end",
                        sys_flag=kind,
                        prepared_transaction_offset=place.physical_offset,
                    )
                )
    harm(root, maker.frames[0].physical_offset + 95, lost.physical_offset + 92)
    found = saved(root, tmp_path / "new", **SIZES)
    there = messages(tmp_path / "new")
    moved = next(m for m in there if m.body == b"half")
    ends = [m.prepared_transaction_offset for m in there if m.body == b"end"]
    assert ends == [moved.physical_offset] * 2 + [lost.physical_offset] * 2
    assert found.plan.ends == 2 and moved.physical_offset != half.physical_offset
    times = [m.store_timestamp for m in there]
    assert times == sorted(times)
    assert (found.plan.raised_times, len(found.plan.lowered_times)) == (0, 1)


def test_a_topic_that_was_made_anew_keeps_both_lives(tmp_path: Path) -> None:
    maker = StoreMaker()
    for offset in (5, 6, 7, 0, 1):
        maker.put(queue_offset=offset)
    maker.units["orders", 0] = {}
    root = maker.write(tmp_path / "store")
    saved(root, tmp_path / "new", **SMALL_INDEX)
    assert [m.queue_offset for m in messages(tmp_path / "new")] == [5, 6, 7, 0, 1]
    with lq.MessageStore.open(tmp_path / "new") as store:
        assert store.queue_offsets("orders", 0) == (0, 2)


# Bit 3 makes 9 a 1, which looks like a new life of the topic.
@pytest.mark.parametrize(("which", "bit"), [(4, 3), (4, 40), (4, 62), (9, 40), (9, 62)])
def test_a_rotten_queue_offset_is_set_right(tmp_path: Path, which: int, bit: int) -> None:
    """No CRC covers it. A queue up to the wrong offset would need billions of entries."""
    maker = StoreMaker()
    for number in range(10):
        maker.put(body=b"%d" % number)
    root = maker.write(tmp_path / "store")
    shutil.rmtree(root / "consumequeue")
    place = maker.frames[which].physical_offset + 20 + (63 - bit) // 8
    flip(root / "commitlog" / "0".zfill(20), place, 1 << bit % 8)
    found = saved(root, tmp_path / "new", **SMALL_INDEX)
    assert found.plan.rotten_offsets == 1
    assert [m.queue_offset for m in messages(tmp_path / "new")] == list(range(10))


def stale_store(tmp_path: Path) -> tuple[Path, StoreMaker]:
    """A log of ten messages that a recovery has cut after the sixth, as the queues show."""
    maker = StoreMaker()
    for number in range(10):
        maker.put(body=b"%d" % number)
    root = maker.write(tmp_path / "store")
    harm(root, maker.frames[6].physical_offset + 88)
    queue = root / "consumequeue/orders/0" / "0".zfill(20)
    queue.write_bytes(queue.read_bytes()[: 6 * UNIT_SIZE].ljust(200, b"\0"))
    return root, maker


def test_stale_frames_are_told_apart(tmp_path: Path) -> None:
    root, maker = stale_store(tmp_path)
    without = saved(root, tmp_path / "without")
    assert [m.queue_offset for m in messages(tmp_path / "without")] == list(range(6))
    stale = without.to_json()["stale"]
    assert (stale["messages"], stale["included"]) == (3, False)
    assert stale["spans"][0]["offset"] == maker.frames[7].physical_offset
    found = saved(root, tmp_path / "with", include_stale=True)
    assert found.to_json()["stale"]["included"]
    assert [m.queue_offset for m in messages(tmp_path / "with")] == [*range(6), 7, 8, 9]


def test_a_stale_message_takes_no_place_that_another_has(tmp_path: Path) -> None:
    root, maker = stale_store(tmp_path)
    at = maker.frames[8].physical_offset + 20
    overwrite(root / "commitlog" / "0".zfill(20), at, (2).to_bytes(8, "big"))
    found = saved(root, tmp_path / "new", include_stale=True)
    assert found.plan.stale.moved == 1
    assert [m.queue_offset for m in messages(tmp_path / "new")] == [*range(6), 7, 8, 9]


def test_topics_that_are_no_names_and_no_text_are_kept(tmp_path: Path) -> None:
    maker = StoreMaker()
    maker.put(properties=b"KEYS\x01a\xff\0")
    maker.put("../evil")
    root = maker.write(tmp_path / "store")
    shutil.rmtree(root / "consumequeue")
    layout = StoreLayout.open(root)
    found = salvage_store(layout, tmp_path / "new")
    assert found.plan.messages == 2 and found.plan.is_whole
    assert [m.topic for m in messages(tmp_path / "new")] == ["orders", "../evil"]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        ".logquarry",
        "checkpoint",
        "commitlog",
        "config",
        "consumequeue",
        "index",
    ]
    # A name that gets no queue is not in the list of topics.
    topics = json.loads((tmp_path / "new/config/topics.json").read_text())["topicConfigTable"]
    assert list(topics) == ["orders"]


def test_the_new_store_goes_on(made: Made, tmp_path: Path) -> None:
    harm(made.root, made.maker.frames[-1].physical_offset + 95)
    lost = made.maker.frames[-8]
    harm(made.root, lost.physical_offset + 95)
    found = saved(made.root, tmp_path / "new", **SIZES)
    with lq.MessageStore.open(tmp_path / "new", mode="rw", config=found.plan.config) as store:
        offset = store.put(lq.Message(lost.topic.decode(), b"new", queue_id=lost.queue_id))
    assert offset.queue_offset == max(
        f.queue_offset + 1
        for f in made.maker.frames[:-1]
        if (f.topic, f.queue_id) == (lost.topic, lost.queue_id)
    )


def test_the_new_store_of_a_tiered_one_can_be_written(made: Made, tmp_path: Path) -> None:
    (made.root / "config").mkdir()
    for name in ("tieredStoreMetadata.json", "tieredStoreMetadata.json.bak"):
        (made.root / "config" / name).write_text("{}")
    found = saved(made.root, tmp_path / "new", **SIZES)
    assert [one.feature for one in found.left_behind] == ["tiered"]
    with lq.MessageStore.open(tmp_path / "new", mode="rw", config=found.plan.config) as store:
        store.put(lq.Message("Orders", b"new"))


# --------------------------------------------------------------------------------------- refusals
def test_a_folder_with_something_in_it_is_refused(made: Made, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new/file").touch()
    with pytest.raises(UsageError, match="it holds file"):
        saved(made.root, tmp_path / "new")
    for inside in (made.root, made.root / "new", made.root / "a/../b"):
        with pytest.raises(UsageError, match="within the damaged store"):
            saved(made.root, inside)


def test_an_unfinished_salvage_opens_as_no_store(made: Made, tmp_path: Path) -> None:
    def pause() -> None:
        if (tmp_path / "new/.salvage/commitlog/00000000000000004096").exists():
            raise KeyboardInterrupt

    before = facts(made.root)
    with pytest.raises(KeyboardInterrupt), patch.object(SalvageTarget, "discard"):
        salvage_store(StoreLayout.open(made.root), tmp_path / "new", bars=at_each_step(pause))
    assert facts(made.root) == before
    with pytest.raises(StoreNotFound, match="an unfinished salvage is here"):
        StoreLayout.open(tmp_path / "new")
    with pytest.raises(StoreNotFound, match=r"\.salvage"):
        lq.MessageStore.open(tmp_path / "new", mode="rw")
    with pytest.raises(UsageError, match="remove"):
        saved(made.root, tmp_path / "new")


def test_a_live_store_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path / "store"), pytest.raises(StoreUnavailable, match="has the store open"):
        salvage_store(StoreLayout.open(tmp_path / "store", config()), tmp_path / "new")
    assert not (tmp_path / "new").exists()


# ----------------------------------------------------------------------------------- any damage
@cache
def bodies_and_files() -> tuple[set[bytes], dict[str, bytes]]:
    """Bodies and files of a store, made once: all examples start with the same bytes."""
    with TemporaryDirectory() as folder:
        made = make(Path(folder) / "store")
        files = dict(sorted(bytes_of(made.root).items()))
    return {frame.body for frame in made.maker.frames}, files


def with_first_queue_offset(offset: int) -> dict[str, bytes]:
    """The store's files; its first frame states another queue offset."""
    files = dict(bodies_and_files()[1])
    name = f"commitlog/{0:020d}"
    files[name] = files[name][:20] + offset.to_bytes(8, "big") + files[name][28:]
    return files


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(harmed=st.deferred(lambda: damaged(bodies_and_files()[1])))
@example(harmed=with_first_queue_offset(1 << 48))
def test_any_damage_leaves_a_sound_store_with_what_stands_whole(
    tmp_path: Path, harmed: dict[str, bytes]
) -> None:
    originals, files = bodies_and_files()
    root, new = tmp_path / "harmed", tmp_path / "out"
    for folder in (root, new):
        shutil.rmtree(folder, ignore_errors=True)
    (root / "commitlog").mkdir(parents=True)
    for name, content_ in harmed.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content_)
    found = saved(
        root,
        new,
        **SIZES,
        mapped_file_size_commit_log=4096,
        mapped_file_size_consume_queue=200,
    )
    assert {m.body for m in messages(new)} <= originals
    assert found.plan.messages == len(messages(new))
    log = {name: body for name, body in files.items() if name.startswith("commitlog/")}
    if all(harmed.get(name) == body for name, body in log.items()):
        assert found.plan.messages == 60


def test_one_wrong_store_time_changes_no_other(tmp_path: Path) -> None:
    maker = StoreMaker()
    for number in range(10):
        maker.put(body=b"%d" % number, time=FIRST_TIME + (1 << 46 if number == 4 else number))
    root = maker.write(tmp_path / "store")
    found = saved(root, tmp_path / "new")
    assert (found.plan.raised_times, found.to_json()["lowered_times"]) == (0, 1)
    times = [message.store_timestamp - FIRST_TIME for message in messages(tmp_path / "new")]
    assert times == [0, 1, 2, 3, 5, 5, 6, 7, 8, 9]
