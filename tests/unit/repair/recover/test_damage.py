"""Damage at a log's end, and what opening a recovered store does about it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.log.layout import StoreLayout
from logquarry.repair.audit.log import KnownBounds, LogAudit
from logquarry.repair.salvage.salvage import salvage_store
from logquarry.store.message_store import StoreWriter
from logquarry.testing.builder import StoreBuilder
from logquarry.testing.clock import FakeClock
from tests.helpers.small_store import NOW, config, opened

COUNT = 60
FILE_SIZE = 16_384
PREPARED = 4


def written(root: Path) -> list[int]:
    """A closed store with more than two log files: the messages' offsets, and the end."""
    with opened(root) as store:
        places = [
            store.put(lq.Message("t", b"%03d" % number * 200, keys=f"k{number}")).physical_offset
            for number in range(COUNT)
        ]
        return [*places, store.max_offset]


def synced_before_stale_frames(root: Path) -> list[int]:
    """A store whose last messages are synced, and lie before frames that a recovery cut off.

    The last message is damaged: the offsets of the last three messages, and the durable offset.
    """
    clock = FakeClock(NOW)
    with StoreWriter.start(root, config=config(), clock=clock) as store:
        old = []
        for number in range(20):
            clock.advance(1_000)
            old.append(store.put(lq.Message("t", b"old %02d" % number)).physical_offset)
    (root / "abort").touch()
    overwrite(root, old[10], old[10] + 8)
    like = config(recovery="rocketmq")
    with StoreWriter.start(root, config=like, clock=clock, accept_loss=1 << 20) as store:
        clock.advance(1_000)
        places = [store.put(lq.Message("t", b"newer %d" % n)).physical_offset for n in range(3)]
        places.append(store.max_offset)
    assert places[0] == old[10]
    overwrite(root, places[2], places[3], b"x")
    (root / "abort").touch()
    return places


def test_synced_messages_before_stale_frames_are_damage(tmp_path: Path) -> None:
    places = synced_before_stale_frames(tmp_path)
    plan = lq.recover(tmp_path, apply=True, config=config(), accept_loss=1 << 20)
    assert plan.log_end == places[3]
    (span,) = plan.damage
    assert (span.offset, span.offset + span.length) == (places[2], places[3])
    assert not lq.recover(tmp_path, config=config()).is_needed
    with opened(tmp_path) as store:
        put = store.put(lq.Message("t", b"new"))
        assert (put.physical_offset, put.queue_offset) == (places[3], 13)


def test_a_salvage_reports_synced_messages_before_stale_frames(tmp_path: Path) -> None:
    places = synced_before_stale_frames(tmp_path / "store")
    found = salvage_store(StoreLayout.open(tmp_path / "store", config()))
    span = found.plan.lost[0]
    assert (span.offset, span.offset + span.length) == (places[2], places[3])


def overwrite(root: Path, start: int, stop: int, byte: bytes = b"\0") -> None:
    while start < stop:
        base = start - start % FILE_SIZE
        count = min(stop, base + FILE_SIZE) - start
        with (root / "commitlog" / f"{base:020d}").open("r+b") as file:
            file.seek(start - base)
            file.write(byte * count)
        start += count


@pytest.mark.parametrize("byte", [b"\0", b"x"])
@pytest.mark.parametrize("queues", ["there", "lost"])
@pytest.mark.parametrize("first", [0, 5, 21, 58])
def test_damage_up_to_the_end(tmp_path: Path, first: int, queues: str, byte: bytes) -> None:
    """Any bad bytes before the durable offset are damage: no other message gets their offsets."""
    places = written(tmp_path)
    overwrite(tmp_path, places[first], places[-1], byte)
    if queues == "lost":
        shutil.rmtree(tmp_path / "consumequeue")
    (tmp_path / "abort").touch()
    plan = lq.recover(tmp_path, apply=True, config=config(), accept_loss=1 << 20)
    assert plan.log_end == places[-1]
    assert sum(span.length for span in plan.damage) == places[-1] - places[first]
    assert not lq.recover(tmp_path, config=config()).is_needed
    for _ in range(2):
        with opened(tmp_path) as store:
            put = store.put(lq.Message("t", b"new"))
            assert put.physical_offset >= places[-1]
            assert put.queue_offset >= (COUNT if queues == "there" else first)
            assert store.wait_dispatched(timeout=60)
            assert store.get("t", 0, put.queue_offset).messages[0].body == b"new"
            assert sum(m.body != b"new" for m in store.scan(on_damage="skip")) == first


def test_two_breaks_behind_the_last_queued_message(tmp_path: Path) -> None:
    """Between the breaks is a message of no queue, so the dispatcher has to pass both."""
    with opened(tmp_path) as store:
        for number in range(3):
            store.put(lq.Message("t", b"%d" % number))
        places = [store.max_offset]
        for _ in range(4):
            store.put(lq.Message("t", b"prepared", sys_flag=PREPARED))
            places.append(store.max_offset)
    overwrite(tmp_path, places[0], places[1])
    overwrite(tmp_path, places[2], places[3])
    for _ in range(2):
        with opened(tmp_path) as store:
            store.put(lq.Message("t", b"new"))
            assert store.wait_dispatched(timeout=60)
            assert store.get("t", 0, 3).messages[0].body == b"new"


def test_a_queue_of_a_closed_store_knows_further_than_the_mark() -> None:
    known = KnownBounds(durable=100, queued=200, is_closed=True, dispatched_timestamp=None)
    assert known.least == 200
    known = KnownBounds(durable=100, queued=200, is_closed=False, dispatched_timestamp=None)
    assert known.least == 100
    known = KnownBounds(durable=300, queued=200, is_closed=True, dispatched_timestamp=None)
    assert known.least == 300


@pytest.mark.parametrize("later", [-1_000, 1])
def test_a_blank_behind_a_break_tells_nothing(tmp_path: Path, later: int) -> None:
    """After a blank in place of a lost file, older frames do not belong to the log."""
    size, time = 4_096, 1_700_000_000_000
    with StoreBuilder(tmp_path, file_size=size) as builder:
        while builder.offset < 2 * size:
            builder.put("t", b"x" * 500, store_timestamp=time)
        while builder.offset < 4 * size:
            builder.put("t", b"x" * 500, store_timestamp=time + later)
    folder = tmp_path / "commitlog"
    data = bytearray((folder / f"{size:020d}").read_bytes())
    data[:8] = b"rot.rot."
    (folder / f"{size:020d}").write_bytes(bytes(data[:8]) + bytes(size - 8))
    blank = size.to_bytes(4, "big") + bytes.fromhex("bbccddee") + bytes(size - 8)
    (folder / f"{2 * size:020d}").write_bytes(blank)
    layout = StoreLayout.open(tmp_path, lq.StoreConfig(mapped_file_size_commit_log=size))
    unknown = KnownBounds(durable=None, queued=None, is_closed=False, dispatched_timestamp=None)
    found = LogAudit(layout, unknown)
    for _ in found.runs():
        pass
    if later < 0:
        assert found.end == size and not found.damage
    else:
        assert found.end > 3 * size
        assert [span.offset for span in found.damage] == [size, 2 * size]


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"damage": [{"offset": 1e999, "length": 1}]}', '{"damage": 1}', "9"]
)
def test_notes_of_damage_that_cannot_be_read(tmp_path: Path, text: str) -> None:
    written(tmp_path)
    (tmp_path / ".logquarry" / "damage.json").write_text(text)
    (tmp_path / "abort").touch()
    assert lq.recover(tmp_path, apply=True, config=config()).is_needed
    with opened(tmp_path) as store:
        assert len(list(store.scan())) == COUNT


@pytest.mark.parametrize("has_mark", [True, False])
@pytest.mark.parametrize("is_last", [True, False])
def test_a_file_that_ends_within_properties(tmp_path: Path, is_last: bool, has_mark: bool) -> None:
    """No CRC covers properties: the zeros that fill the file must not count as the rest of them."""
    live = tmp_path / "live"
    places = written(live)
    (live / "abort").touch()
    if not has_mark:
        shutil.rmtree(live / ".logquarry")
    number = COUNT - 1 if is_last else max(n for n in range(COUNT) if places[n] < FILE_SIZE)
    base = places[number] - places[number] % FILE_SIZE
    end = places[number + 1] if is_last else None
    data = (live / "commitlog" / f"{base:020d}").read_bytes()
    body_end = data.index(b"%03d" % number * 200) + 600
    first = body_end - 2
    stop = (end - base) if end is not None else data.index(b"KEYS", first) + 40
    lost = 0
    for length in range(first, stop):
        root = tmp_path / str(length)
        shutil.copytree(live, root)
        (root / "commitlog" / f"{base:020d}").write_bytes(data[:length])
        lq.recover(root, apply=True, config=config())
        assert not lq.recover(root, config=config()).is_needed
        with lq.MessageStore.open(root, config=config()) as store:
            for message in store.scan(on_damage="skip"):
                assert 0 not in message.frame.properties
                assert message.keys == f"k{int(message.body[:3])}"
            lost += sum(1 for _ in store.scan(on_damage="skip")) < COUNT
        shutil.rmtree(root)
    assert lost >= 8


@pytest.mark.parametrize(
    ("count", "ending"), [(1, ""), (2, " and in 1 more place"), (3, " and in 2 more places")]
)
def test_the_step_counts_the_damaged_places(tmp_path: Path, count: int, ending: str) -> None:
    places = written(tmp_path)
    for number in range(count):
        overwrite(tmp_path, places[10 * number], places[10 * number] + 8, b"x")
    (step,) = lq.recover(tmp_path, config=config(), accept_loss=1 << 20).steps
    assert step.reason == f"the log is damaged at 0{ending}"
