"""Recovery mode ``rocketmq``: what it refuses, and quirks that no golden store has."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import struct
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import logquarry as lq
from logquarry.config import StoreConfig
from logquarry.disk.disk import Disk
from logquarry.errors import StoreNotFound, StoreUnavailable
from logquarry.log.readable import probed_by
from logquarry.repair.recover import rocketmq
from logquarry.repair.recover.rocketmq import apply_rocketmq, plan_rocketmq, recover_as_rocketmq
from logquarry.store.message_store import StoreWriter
from logquarry.testing.disk_state import BadBlocks
from logquarry.testing.faulty_disk import FaultyDisk
from tests.helpers.files import bytes_of, overwrite
from tests.helpers.store_maker import StoreMaker
from tests.helpers.waiting import eventually

SIZES: dict[str, Any] = {
    "mapped_file_size_commit_log": 4096,
    "mapped_file_size_consume_queue": 200,
    "max_hash_slot_num": 16,
    "max_index_num": 50,
    "recovery": "rocketmq",
}
CONFIG = StoreConfig(**SIZES)


def made(root: Path, count: int = 100, **options: Any) -> StoreMaker:
    maker = StoreMaker(**options)
    for number in range(count):
        maker.put(queue_id=number % 2, keys=f"k{number}")
    maker.write(root)
    return maker


def patch(root: Path, maker: StoreMaker, number: int, at: int, data: bytes) -> None:
    """Write into a frame of the store."""
    offset = maker.frames[number].physical_offset
    path = root / "commitlog" / f"{offset // 4096 * 4096:020d}"
    overwrite(path, offset % 4096 + at, data)


def refused(root: Path, reason: str, config: StoreConfig = CONFIG) -> None:
    """Plan and opening refuse the store with the reason; the log stays as it is."""
    before = bytes_of(root)
    plan = plan_rocketmq(root, config)
    assert plan.refused is not None
    assert reason in plan.refused
    assert not plan.is_needed
    assert bytes_of(root) == before
    with pytest.raises(StoreUnavailable, match="refus|" + reason.split(maxsplit=1)[0]):
        apply_rocketmq(plan, Disk())
    assert bytes_of(root) == before
    with pytest.raises(StoreUnavailable) as caught:
        lq.MessageStore.open(root, mode="rw", config=config)
    assert plan.refused in str(caught.value)
    log = {name: data for name, data in bytes_of(root).items() if name.startswith("commitlog")}
    assert log == {name: data for name, data in before.items() if name.startswith("commitlog")}
    assert (root / "abort").exists() == ("abort" in before)


@pytest.mark.parametrize("name", ["notes.txt", "00000000000000000000.bak", "4096"])
def test_a_stray_file_in_the_log(tmp_path: Path, name: str) -> None:
    made(tmp_path)
    (tmp_path / "commitlog" / name).write_bytes(bytes(4096))
    refused(tmp_path, f"commitlog/{name}: no file of 4096 bytes can have this name")


@pytest.mark.parametrize("size", [0, 4095, 4097])
def test_a_file_of_a_wrong_size(tmp_path: Path, size: int) -> None:
    made(tmp_path)
    path = sorted((tmp_path / "commitlog").iterdir())[-1]
    path.write_bytes(path.read_bytes().ljust(size, b"\0")[:size])
    refused(tmp_path, f"{size} bytes, instead of a file of 4096 bytes")


def test_a_queue_file_of_a_wrong_size(tmp_path: Path) -> None:
    made(tmp_path)
    (tmp_path / "consumequeue/orders/1/00000000000000000200").write_bytes(bytes(199))
    refused(tmp_path, "199 bytes, instead of a file of 200 bytes")


def test_a_folder_in_the_log(tmp_path: Path) -> None:
    made(tmp_path)
    (tmp_path / "commitlog" / "old").mkdir()
    refused(tmp_path, "commitlog/old: not a file")


@pytest.mark.parametrize(
    "name",
    [
        "commitlog/backup",
        f"commitlog/{999_424:020d}",
        "consumequeue/orders/0/x",
        f"consumequeue/orders/0/{4_000:020d}",
        "consumequeue/other",
        "consumequeue/orders/7",
        "index/20260101000000000",
    ],
)
@pytest.mark.parametrize("target", ["/nowhere/file", "itself"])
def test_a_link_that_leads_to_no_file(tmp_path: Path, name: str, target: str) -> None:
    """A folder with such a link counted as empty: a put then got queue offset 0 a second time."""
    made(tmp_path)
    link = tmp_path / name
    link.symlink_to(link.name if target == "itself" else target)
    before = bytes_of(tmp_path)
    for call in (
        lambda: lq.recover(tmp_path, mode="rocketmq", config=CONFIG),
        lambda: lq.recover(
            tmp_path, mode="rocketmq", config=CONFIG, apply=True, accept_loss=1 << 40
        ),
        lambda: lq.MessageStore.open(tmp_path, mode="rw", config=CONFIG, accept_loss=1 << 40),
    ):
        with pytest.raises(StoreUnavailable, match=f"{name}: it is a link to .*Nothing was chang"):
            call()
        after = bytes_of(tmp_path)
        assert {**after, "lock": b""} == {**before, "lock": b""}
        assert link.is_symlink()


@pytest.mark.parametrize("is_clean", [True, False])
@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        (f"commitlog/{4096:020d}", "keeps the messages after it"),
        (f"consumequeue/orders/1/{800:020d}", "makes the file again"),
        ("index", "makes the file again"),
    ],
)
def test_an_unreadable_block(tmp_path: Path, name: str, remedy: str, is_clean: bool) -> None:
    """The log ended at the block, and the recovery dropped the messages after it."""
    made(tmp_path)
    if not is_clean:
        (tmp_path / "abort").touch()
    if name == "index":
        name = f"index/{min(path.name for path in (tmp_path / name).iterdir())}"
    with probed_by(BadBlocks([(name, 0)])):
        refused(tmp_path, f"{name}: ")
        assert str(plan_rocketmq(tmp_path, CONFIG).refused).endswith(
            f"RocketMQ would end here; a recovery with `--mode safe` {remedy}"
        )
        assert lq.recover(tmp_path, config=CONFIG).log_end == 11_612


def test_a_size_that_is_more_than_memory(tmp_path: Path) -> None:
    maker = made(tmp_path)
    patch(tmp_path, maker, 95, 0, struct.pack(">i", 0x7FFFFFFF))
    refused(tmp_path, "an array of 2147483647 bytes")


def test_a_gap_that_dispatching_would_wait_at(tmp_path: Path) -> None:
    made(tmp_path)
    (tmp_path / "commitlog" / f"{4096:020d}").unlink()
    shutil.rmtree(tmp_path / "consumequeue")
    refused(tmp_path, "RocketMQ would wait without end for a message at 4096")


def test_a_first_queue_offset_that_is_none(tmp_path: Path) -> None:
    maker = made(tmp_path)
    patch(tmp_path, maker, 99, 12, struct.pack(">i", 7))
    patch(tmp_path, maker, 99, 20, struct.pack(">q", -5))
    (tmp_path / "abort").touch()
    refused(tmp_path, "consumequeue/orders/7: the queue offset of its first message")


def test_multi_dispatch_of_a_message_without_properties(tmp_path: Path) -> None:
    maker = StoreMaker()
    for _ in range(3):
        maker.put(properties=b"")
    maker.write(tmp_path)
    (tmp_path / "abort").touch()
    config = StoreConfig(**SIZES, enable_multi_dispatch=True)
    refused(tmp_path, "has no properties", config)
    with lq.MessageStore.open(tmp_path, mode="rw", config=CONFIG) as store:
        assert store.queue_offsets("orders", 0).max == 3


def test_a_plan_says_what_it_does(tmp_path: Path) -> None:
    maker = made(tmp_path)
    (tmp_path / "abort").touch()
    patch(tmp_path, maker, 90, 4, bytes(4))
    end = maker.frames[90].physical_offset
    plan = plan_rocketmq(tmp_path, CONFIG)
    text = "\n".join(plan.lines())
    assert "was not shut down cleanly" in text
    assert "there is no checkpoint" in text
    assert f"the log begins at 0 and will end at {end}" in text
    assert "magic code 00000000" in text
    assert "orders/0 at 900: its messages from there on are after the log's end" in text
    document = plan.to_json()
    assert document["mode"] == "rocketmq"
    assert document["log_end"] == end
    assert {step["kind"] for step in document["steps"]} >= {"cut", "build_index"}


def test_a_first_file_that_is_lost_and_a_gap_between_queue_files(tmp_path: Path) -> None:
    made(tmp_path, 200)
    (tmp_path / "commitlog" / f"{0:020d}").unlink()
    middle = tmp_path / "consumequeue" / "orders" / "0" / f"{1000:020d}"
    middle.unlink()
    with lq.MessageStore.open(tmp_path, mode="rw", config=CONFIG) as store:
        assert store.min_offset == 4096
        assert store.queue_offsets("orders", 0).max == 100
        assert store.get("orders", 0, 99).messages
        assert store.get("orders", 0, 55).status.value == "OFFSET_FOUND_NULL"
        assert store.put(lq.Message("orders", b"more")).queue_offset == 100
    assert not middle.exists()


def test_a_gap_in_the_log_that_all_queues_are_behind_of(tmp_path: Path) -> None:
    maker = made(tmp_path, 200)
    (tmp_path / "commitlog" / f"{8192:020d}").unlink()
    with lq.MessageStore.open(tmp_path, mode="rw", config=CONFIG, accept_loss=1 << 20) as store:
        last = maker.frames[-1]
        assert store.max_offset == last.physical_offset + last.size
        assert store.message_at(last.physical_offset).body == last.body
        put = store.put(lq.Message("orders", b"more"))
        assert store.message_at(put.physical_offset).body == b"more"


def test_offsets_of_light_queues_begin_anew(tmp_path: Path) -> None:
    config = StoreConfig(**SIZES, enable_multi_dispatch=True, enable_lmq=True)
    message = lq.Message("t", b"x", properties={"INNER_MULTI_DISPATCH": "%LMQ%a"})
    with lq.MessageStore.open(tmp_path, mode="rw", config=config) as store:
        for _ in range(3):
            store.put(message)
    with lq.MessageStore.open(tmp_path, mode="rw", config=config) as store:
        assert store.queue_offsets("%LMQ%a", 0).max == 3
        put = store.put(message)
        assert put.queue_offset == 3
        found = store.message_at(put.physical_offset)
        assert found.properties["INNER_MULTI_QUEUE_OFFSET"] == "0"
        store.wait_dispatched()
        assert store.queue_offsets("%LMQ%a", 0).max == 3


def test_dispatching_goes_on_where_lengths_lead(tmp_path: Path) -> None:
    """QUIRK: Java's buffer and its offset part behind a frame whose lengths do not add up."""
    maker = StoreMaker(log_file_size=1 << 16)
    for _ in range(30):
        maker.put()
    maker.write(tmp_path)
    # Only the dispatcher meets it: recovery begins three files later.
    for number in range(1, 5):
        (tmp_path / "commitlog" / f"{number << 16:020d}").write_bytes(bytes(1 << 16))
    bad = maker.frames[10]
    path = tmp_path / "commitlog" / f"{0:020d}"
    with path.open("r+b") as file:
        file.seek(bad.physical_offset)
        file.write(struct.pack(">i", bad.size + 1))
    shutil.rmtree(tmp_path / "consumequeue")
    config = StoreConfig(**SIZES | {"mapped_file_size_commit_log": 1 << 16})
    plan = plan_rocketmq(tmp_path, config)
    assert plan.refused is None
    # The log ends right in the first file that is read, the third-last of five.
    assert plan.log_end == 2 << 16
    with lq.MessageStore.open(tmp_path, mode="rw", config=config) as store:
        queue = store.queue("orders", 0)
        assert queue is not None
        offsets = [entry.physical_offset for _, entry in queue.entries()]
        expected = [made.physical_offset for made in maker.frames if made is not bad]
        assert offsets == expected


def test_nothing_to_do_changes_nothing(tmp_path: Path) -> None:
    made(tmp_path)
    before = bytes_of(tmp_path)
    done = recover_as_rocketmq(tmp_path, CONFIG, Disk())
    assert done.dispatched_timestamp == 0
    after = bytes_of(tmp_path)
    assert {name: after[name] for name in before} == before


def test_the_clock_names_new_index_files(tmp_path: Path) -> None:
    made(tmp_path)
    shutil.rmtree(tmp_path / "index", ignore_errors=True)
    (tmp_path / "index").mkdir()
    (tmp_path / "abort").touch()
    (tmp_path / "checkpoint").unlink(missing_ok=True)
    lq.recover(
        tmp_path, mode="rocketmq", apply=True, config=CONFIG, clock=lambda: 1_600_000_000_000
    )
    names = [path.name for path in (tmp_path / "index").iterdir()]
    assert names and all(name.startswith("2020") for name in names)


def test_queues_and_index_made_anew_are_those_that_were_lost(tmp_path: Path) -> None:
    """More messages than one run of the scan takes, in several files of log, queues and index."""
    sizes: dict[str, Any] = {
        "mapped_file_size_commit_log": 1 << 20,
        "mapped_file_size_consume_queue": 40_000,
        "max_hash_slot_num": 500,
        "max_index_num": 20_000,
    }
    config = StoreConfig(**sizes, recovery="rocketmq")
    with lq.MessageStore.open(tmp_path, mode="rw", config=config) as store:
        store.put_many(
            lq.Message(f"t{n % 3}", b"x" * (n % 90), queue_id=n % 4, keys=f"k{n}", tags=f"g{n % 7}")
            for n in range(50_000)
        )
    log = bytes_of(tmp_path / "commitlog")
    queues = bytes_of(tmp_path / "consumequeue")
    keys = [path.read_bytes() for path in sorted((tmp_path / "index").iterdir())]
    times = (tmp_path / "checkpoint").read_bytes()[8:24]
    shutil.rmtree(tmp_path / "consumequeue")
    shutil.rmtree(tmp_path / "index")
    (tmp_path / "checkpoint").unlink()
    (tmp_path / "abort").touch()
    with lq.MessageStore.open(tmp_path, mode="rw", config=config) as store:
        assert sum(store.queue_offsets(*key).max for key in store.queues()) == 50_000
    assert bytes_of(tmp_path / "consumequeue") == queues
    assert [path.read_bytes() for path in sorted((tmp_path / "index").iterdir())] == keys
    assert (tmp_path / "checkpoint").read_bytes()[8:24] == times
    assert bytes_of(tmp_path / "commitlog") == log


def test_a_store_that_is_not_there_is_made(tmp_path: Path) -> None:
    with lq.MessageStore.open(tmp_path / "new", mode="rw", config=CONFIG) as store:
        assert store.put(lq.Message("t", b"x")).queue_offset == 0


class _NotingDisk(Disk):
    """Notes the opened and renamed files."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def open(self, path: Path, *, create: bool = False, exclusive: bool = False) -> int:
        self.calls.append(path.name)
        return super().open(path, create=create, exclusive=exclusive)

    def rename(self, path: Path, to: Path) -> None:
        self.calls.append(f"rename {path.name}")
        super().rename(path, to)


def test_abort_is_made_before_anything_is_changed(tmp_path: Path) -> None:
    """The recovery then still treats the store as cleanly closed."""
    maker = made(tmp_path)
    patch(tmp_path, maker, 50, 4, b"rot.")
    # The last file is removed, and queues are cut.
    disk = _NotingDisk()
    plan = plan_rocketmq(tmp_path, CONFIG)
    with StoreWriter.start(tmp_path, config=CONFIG, disk=disk, accept_loss=1 << 20):
        changes = [call for call in disk.calls if call.startswith("rename") or call == "abort"]
        assert changes[0] == "abort" and len(changes) > 1
        assert (tmp_path / "abort").exists()
    assert not any("not shut down cleanly" in line for line in plan.looked_at)
    assert not (tmp_path / "abort").exists()


@pytest.mark.parametrize("was_closed", [False, True])
def test_a_store_that_is_refused_stays_as_it_was(tmp_path: Path, was_closed: bool) -> None:
    made(tmp_path)
    (tmp_path / "commitlog" / "odd").write_bytes(b"odd")
    if not was_closed:
        (tmp_path / "abort").touch()
    before = bytes_of(tmp_path)
    with pytest.raises(StoreUnavailable, match="odd"):
        StoreWriter.start(tmp_path, config=CONFIG)
    assert bytes_of(tmp_path) == before


def test_notes_of_damage_go_with_the_log_that_they_were_of(tmp_path: Path) -> None:
    """With the new durable offset they would make readers skip sound messages."""
    made(tmp_path)
    note = tmp_path / ".logquarry" / "damage.json"
    note.parent.mkdir()
    note.write_text('{"log_end": 4096, "damage": [{"offset": 0, "length": 4096}]}')
    with StoreWriter.start(tmp_path, config=CONFIG) as store:
        assert not note.exists()
        assert store.get("orders", 0, 0).messages[0].queue_offset == 0
    with lq.MessageStore.open(tmp_path, config=CONFIG) as store:
        assert store.get("orders", 0, 0).messages[0].queue_offset == 0


@pytest.mark.parametrize("way", ["command", "opened"])
def test_what_a_dead_process_left_in_the_page_cache_is_on_the_disk_then(
    tmp_path: Path, way: str
) -> None:
    """A clean state and a durable offset must only stand for bytes on the disk."""
    live = tmp_path / "live"
    live.mkdir()
    disk, config = FaultyDisk(live), dataclasses.replace(CONFIG, recovery="safe")
    # Nothing is flushed while the store is open.
    slow: dict[str, Any] = {
        "flush_interval_commit_log": 60_000,
        "flush_commit_log_thorough_interval": 600_000,
        "flush_interval_consume_queue": 60_000,
        "flush_consume_queue_thorough_interval": 600_000,
    }
    store = StoreWriter.start(live / "s", config=dataclasses.replace(config, **slow), disk=disk)
    for number in range(30):
        store.put(lq.Message("t", b"%d" % number * 50))
    assert store.wait_dispatched(timeout=30)
    # Another thread creates the next log file. If the process died in between, the file could have
    # 0 bytes, and RocketMQ refuses such a store.
    next_file = live / "s" / "commitlog" / f"{store.max_offset // 4096 * 4096 + 4096:020d}"
    eventually(lambda: next_file.exists() and next_file.stat().st_size == 4096)
    disk.stop_at(disk.faults.total + 1)
    with contextlib.suppress(OSError, StoreUnavailable):
        store.close()
    disk.restart()
    if way == "command":
        lq.recover(live / "s", mode="rocketmq", apply=True, config=config, disk=disk)
        state = disk.state()
    else:
        with StoreWriter.start(
            live / "s", config=dataclasses.replace(CONFIG, **slow), disk=disk
        ) as store:
            state = disk.state()
    image = state.synced().write(tmp_path / "image") / "s"
    with lq.MessageStore.open(image, config=config) as reader:
        assert (image / "abort").exists() == (way == "opened")
        assert [message.body for message in reader.scan()] == [b"%d" % n * 50 for n in range(30)]


def test_entries_after_the_end_of_a_log_that_was_cut(tmp_path: Path) -> None:
    """RocketMQ keeps them in the files before a file of zeros, and puts new entries after them."""
    maker = made(tmp_path)
    patch(tmp_path, maker, 30, 4, bytes(4))
    (tmp_path / "abort").touch()
    overwrite(tmp_path / "consumequeue/orders/0" / f"{800:020d}", 0, bytes(200))
    with lq.MessageStore.open(tmp_path, mode="rw", config=CONFIG, accept_loss=1 << 40) as store:
        assert store.max_offset == maker.frames[30].physical_offset
        puts = [store.put(lq.Message("orders", b"new %d" % n)) for n in range(5)]
        assert [put.queue_offset for put in puts] == [41, 42, 43, 44, 45]
        assert store.wait_dispatched(timeout=60)
        found = store.get("orders", 0, 41).messages
        assert [message.body for message in found] == [b"new %d" % n for n in range(5)]


def test_a_log_that_cannot_be_read_for_the_warning_of_a_lost_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lq.MessageStore.open(tmp_path, mode="rw", config=CONFIG) as store:
        store.put(lq.Message("t", b"1", keys="k"))
    shutil.rmtree(tmp_path / "index")
    (tmp_path / "index").mkdir()

    reader = mock.Mock()
    reader.return_value.events.side_effect = StoreNotFound("the log cannot be read")
    monkeypatch.setattr(rocketmq, "LogReader", reader)
    plan = lq.recover(tmp_path, mode="rocketmq", config=CONFIG)
    assert reader.called
    assert not any("files of the index" in line for line in plan.looked_at)


@pytest.mark.parametrize("has_keys", [False, True])
@pytest.mark.parametrize("is_clean", [False, True])
def test_a_lost_index_is_reported(
    tmp_path: Path, is_clean: bool, has_keys: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """RocketMQ does not index old messages again. After a crash, it may dispatch the whole log."""
    with lq.MessageStore.open(tmp_path, mode="rw", config=CONFIG) as store:
        for number in range(50):
            store.put(lq.Message("t", b"%d" % number, keys=f"k{number}" if has_keys else None))
    shutil.rmtree(tmp_path / "index")
    (tmp_path / "index").mkdir()
    if not is_clean:
        (tmp_path / "abort").touch()
    caplog.clear()
    is_lost = is_clean and has_keys
    plan = lq.recover(tmp_path, mode="rocketmq", config=CONFIG)
    assert any("files of the index are missing" in line for line in plan.looked_at) is is_lost
    with lq.MessageStore.open(tmp_path, mode="rw", config=CONFIG) as store:
        assert ("files of the index are missing" in caplog.text) is is_lost
        store.put(lq.Message("t", b"new", keys="new"))
        store.wait_dispatched()
        found = [message.body for message in store.query("t", "k7")]
        assert found == ([b"7"] if has_keys and not is_clean else [])
