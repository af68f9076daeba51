"""Do stores deliver each message once, and save their progress, whatever happens?"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.disk.disk import Disk
from logquarry.errors import StoreUnavailable
from logquarry.format import broker_json
from logquarry.store.message_store import StoreWriter
from logquarry.store.schedule.delivery import DeliveryService
from logquarry.store.schedule.progress import MARK_FILE, UNKNOWN, DelayProgress, Progress
from logquarry.testing.clock import FakeClock
from tests.helpers.failing_disk import ENOSPC, FaultyDisk, StoppedDisk
from tests.helpers.small_store import config as small_config

NOW = 1_700_000_000_000


# ----------------------------------------------------------------------------------- progress
def progress_of(root: Path, disk: FaultyDisk | None = None) -> DelayProgress:
    return DelayProgress(disk or Disk(), root, lambda: None)


def test_progress_is_saved_with_its_place_in_the_log(tmp_path: Path) -> None:
    assert progress_of(tmp_path).load() is None
    saving = progress_of(tmp_path)
    assert saving.save(Progress({1: 2}, 100))
    assert not saving.save(Progress({1: 2}, 100 + (64 << 20) - 1)), "nothing was delivered"
    assert saving.save(Progress({1: 2}, 100 + (64 << 20)))
    assert progress_of(tmp_path).load() == Progress({1: 2}, 100 + (64 << 20))
    assert saving.save(Progress({1: 2}, 50)), "the log was cut"
    assert progress_of(tmp_path).load() == Progress({1: 2}, 50)


def test_a_place_counts_only_with_the_file_that_it_was_saved_for(tmp_path: Path) -> None:
    saving = progress_of(tmp_path)
    saving.save(Progress({1: 2}, 100))
    path = tmp_path / "config" / "delayOffset.json"
    path.write_text(broker_json.encode_delay_offsets({1: 3}))
    assert progress_of(tmp_path).load() == Progress({1: 3}, UNKNOWN)
    path.unlink()
    assert progress_of(tmp_path).load() == Progress({1: 2}, 100)


def test_whatever_call_a_save_dies_at_the_place_is_that_of_the_file(tmp_path: Path) -> None:
    first, second = Progress({1: 2}, 100), Progress({1: 5}, 300)
    found = []
    for number in range(100):
        root = tmp_path / str(number)
        progress_of(root).save(first)
        dying = progress_of(root, StoppedDisk(number))
        dying.load()
        try:
            dying.save(second)
            break
        except KeyboardInterrupt:
            found.append(progress_of(root).load())
    assert len(found) > 8
    turned = found.index(second)
    assert found == [first] * turned + [second] * (len(found) - turned)


BAD_MARKS = (
    b"",
    b"{",
    b"[1]",
    b'[{"offsets":[],"position":1}]',
    b'[{"position":1}]',
    b"{}",
    b"\xff",
    b'[{"offsets":{},"position":Infinity}]',
    b"[" * 100_000,
)


@pytest.mark.parametrize("harm", BAD_MARKS)
def test_a_mark_that_cannot_be_read_counts_for_nothing(tmp_path: Path, harm: bytes) -> None:
    progress_of(tmp_path).save(Progress({1: 2}, 100))
    (tmp_path / ".logquarry" / MARK_FILE).write_bytes(harm)
    assert progress_of(tmp_path).load() == Progress({1: 2}, UNKNOWN)


# ------------------------------------------------------------------------------------ in a store
def opened(
    root: Path, clock: FakeClock, disk: FaultyDisk | None = None, **settings: object
) -> StoreWriter:
    config = small_config(mapped_file_size_commit_log=65_536, **settings)
    return StoreWriter.start(root, config=config, clock=clock, disk=disk)


def put_delayed(store: lq.StoreWriter, count: int, *, first: int = 0, same: bool = False) -> None:
    store.put_many(
        [
            lq.Message(
                "orders",
                b"same" if same else b"%d" % number,
                queue_id=number % 2,
                delay_level=number % 3 + 1,
            )
            for number in range(first, first + count)
        ]
    )


def delivered_of(store: lq.MessageStore) -> list[bytes]:
    return [message.body for message in store.scan("orders")]


def test_delivered_messages_can_be_had_like_others(tmp_path: Path) -> None:
    clock = FakeClock(NOW)
    with opened(tmp_path, clock) as store:
        store.put(lq.Message("orders", b"x", queue_id=1, tags="paid", keys="k", delay_level=2))
        assert store.deliver_due() == 0
        clock.advance(5_000)
        assert store.deliver_due() == 1
        store.wait_dispatched()
        message = store.get("orders", 1, 0, tag="paid").messages[0]
        assert (message.body, message.store_timestamp) == (b"x", NOW + 5_000)
        assert message.properties["DELAY"] == "2"
        assert [m.topic for m in store.query("orders", "k", exact=True)] == ["orders"]


def test_nothing_is_delivered_unless_somebody_asks(tmp_path: Path) -> None:
    clock = FakeClock(NOW)
    with opened(tmp_path, clock) as store:
        put_delayed(store, 6)
        clock.advance(86_400_000)
    assert not (tmp_path / "config").exists()
    with lq.MessageStore.open(tmp_path) as reader:
        assert delivered_of(reader) == []
        with pytest.raises(StoreUnavailable):
            reader.deliver_due()  # type: ignore[attr-defined]


def test_the_thread_delivers_and_closing_saves_how_far_it_came(tmp_path: Path) -> None:
    clock = FakeClock(NOW)
    arrived = threading.Event()
    with opened(tmp_path, clock, deliver_delayed=True) as store:
        store.start_delivery()
        store.add_arrival_listener(lambda a: arrived.set() if a.topic == "orders" else None)
        put_delayed(store, 3)
        clock.advance(10_000)
        assert arrived.wait(60)
    path = tmp_path / "config" / broker_json.DELAY_OFFSET_FILE
    known = broker_json.decode_delay_offsets(path.read_bytes())
    with opened(tmp_path, clock) as store:
        assert store.deliver_due() == 3 - sum(known.values())
        assert sorted(delivered_of(store)) == [b"0", b"1", b"2"]


def test_progress_goes_on_after_a_restart(tmp_path: Path) -> None:
    clock = FakeClock(NOW)
    for number in range(4):
        with opened(tmp_path, clock) as store:
            put_delayed(store, 9, first=number * 9)
            clock.advance(10_000)
            assert store.deliver_due() == 9
            assert len(delivered_of(store)) == 9 * (number + 1)
    assert "{1:12,2:12,3:12\n" in (tmp_path / "config" / "delayOffset.json").read_text()


@pytest.mark.parametrize("same", [False, True], ids=["told apart", "all alike"])
@pytest.mark.parametrize("lost", ["", "mark", "both"])
def test_what_was_delivered_since_the_last_save_is_in_the_log(
    tmp_path: Path, same: bool, lost: str
) -> None:
    """As after a crash: saved files, and a log with later messages."""
    clock, root = FakeClock(NOW), tmp_path / "store"
    mark, saved = root / ".logquarry" / MARK_FILE, tmp_path / "saved"
    with opened(root, clock) as store:
        put_delayed(store, 30, same=same)
        clock.advance(10_000)
        delivering = store._services.deliveries[0]
        delivering.deliver(clock(), limit=7)
        delivering.save()
        saved.mkdir()
        for path in (mark, root / "config" / "delayOffset.json"):
            shutil.copy(path, saved)
        delivering.deliver(clock(), limit=11)
        store.put(lq.Message("other", b"no delivery \x01DELAY\x01 2"))
    for path in saved.iterdir():
        shutil.copy(path, mark if path.name == MARK_FILE else root / "config" / path.name)
    if lost:
        mark.unlink()
    if lost == "both":
        shutil.rmtree(root / "config")
    with opened(root, clock) as store:
        again = store.deliver_due()
        found = delivered_of(store)
    if lost == "mark":
        # Then nothing shows which messages without a UNIQ_KEY were noted.
        assert again == 30 - 7
    else:
        assert again == 30 - 18
        assert sorted(found) == sorted([b"same"] * 30 if same else [b"%d" % n for n in range(30)])


def test_an_unreadable_file_is_kept_and_the_one_before_serves(tmp_path: Path) -> None:
    clock = FakeClock(NOW)
    path = tmp_path / "config" / "delayOffset.json"
    with opened(tmp_path, clock) as store:
        for _ in range(2):
            put_delayed(store, 9)
            clock.advance(10_000)
            assert store.deliver_due() == 9
    path.write_bytes(b"{")
    with opened(tmp_path, clock) as store:
        assert store.deliver_due() == 0
    assert broker_json.decode_delay_offsets(path.read_bytes()) == {1: 6, 2: 6, 3: 6}
    aside = tmp_path / ".logquarry" / "quarantine" / "config" / path.name
    assert aside.read_bytes() == b"{"


@pytest.mark.parametrize("offset", [-5, 7, 1 << 40])
def test_offsets_outside_the_queue_skip_no_message(tmp_path: Path, offset: int) -> None:
    clock = FakeClock(NOW)
    with opened(tmp_path, clock) as store:
        put_delayed(store, 9)
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "delayOffset.json").write_text(
        broker_json.encode_delay_offsets(dict.fromkeys((1, 2, 3), offset))
    )
    clock.advance(10_000)
    with opened(tmp_path, clock) as store:
        assert store.deliver_due() == 9
        put_delayed(store, 3)
        clock.advance(10_000)
        assert store.deliver_due() == 3


def test_a_file_of_another_store_neither_skips_nor_repeats_messages(tmp_path: Path) -> None:
    clock = FakeClock(NOW)

    def put_three(store: lq.StoreWriter, first: int) -> None:
        for number in range(first, first + 3):
            key = {"UNIQ_KEY": f"id{number}"}
            store.put(lq.Message("orders", b"%d" % number, delay_level=1, properties=key))
        clock.advance(10_000)

    with opened(tmp_path, clock) as store:
        put_three(store, 0)
        assert store.deliver_due() == 3
        put_three(store, 3)
    path = tmp_path / "config" / "delayOffset.json"
    path.write_text(broker_json.encode_delay_offsets({1: 50}))
    with opened(tmp_path, clock) as store:
        assert store.deliver_due() == 3
        put_three(store, 6)
        assert store.deliver_due() == 3
        assert delivered_of(store) == [b"%d" % number for number in range(9)]


def test_closing_saves_what_a_failed_put_ended(tmp_path: Path) -> None:
    clock = FakeClock(NOW)
    with opened(tmp_path, clock) as store:
        put_delayed(store, 9)
        store.wait_dispatched()
        clock.advance(10_000)
        delivering = store._services.deliveries[0]
        put = delivering._put

        def put_some(messages: Sequence[lq.Message]) -> None:
            error = StoreUnavailable("full")
            error.appended = put(messages[:4])
            raise error

        delivering._put = put_some
        with pytest.raises(StoreUnavailable):
            store.deliver_due()
    text = (tmp_path / "config" / "delayOffset.json").read_bytes()
    assert sum(broker_json.decode_delay_offsets(text).values()) == 4


def test_a_full_disk_ends_no_thread(tmp_path: Path) -> None:
    clock, disk = FakeClock(NOW), FaultyDisk()
    with opened(tmp_path, clock, disk) as store:
        put_delayed(store, 9)
        store.wait_dispatched()
        clock.advance(10_000)
        delivering = store._services.deliveries[0]
        ticks = iter(range(0, 1_000, 10))
        service = DeliveryService(
            [delivering],
            disk.health,
            clock=clock,
            dispatched=lambda: store._engine.dispatcher.offset,
            save_interval_ms=1,
            monotonic=lambda: next(ticks),
        )
        disk.failing["open"] = ENOSPC
        service._run_once()
        assert sum(delivering.offsets.values()) == 9, "there was room in the log"
        del disk.failing["open"]
        service.run_once()
        assert sum(delivering.offsets.values()) == 9
    text = (tmp_path / "config" / "delayOffset.json").read_bytes()
    assert sum(broker_json.decode_delay_offsets(text).values()) == 9


def test_an_idle_delivery_does_not_search_the_queues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock(NOW)
    with opened(tmp_path, clock) as store:
        searched: list[int] = []
        delivering = store._services.deliveries[0]
        deliver = delivering.deliver

        def noted(now: int, *, limit: int | None = None) -> int:
            searched.append(now)
            return deliver(now, limit=limit)

        monkeypatch.setattr(delivering, "deliver", noted)
        service = DeliveryService(
            [delivering],
            store._engine.health,
            clock=clock,
            dispatched=lambda: store._engine.dispatcher.offset,
            save_interval_ms=1,
        )
        service.run_once()
        service.run_once()
        assert len(searched) == 1
        put_delayed(store, 9)
        store.wait_dispatched()
        service.run_once()
        assert sum(delivering.offsets.values()) == 0
        clock.advance(10_000)
        service.run_once()
        assert sum(delivering.offsets.values()) == 9, "time has passed, and no message was put"
        searched.clear()
        service.run_once()
        store.wait_dispatched()
        service.run_once()
        service.run_once()
        assert len(searched) <= 2, "the delivered messages are in the log, and no message waits"


def test_progress_is_saved_behind_the_log_only(tmp_path: Path) -> None:
    """A power cut does not lose a delivery that the file has noted."""
    clock, disk = FakeClock(NOW), FaultyDisk()
    with opened(tmp_path, clock, disk) as store:
        put_delayed(store, 9)
        store.wait_dispatched()
        delivering = store._services.deliveries[0]
        clock.advance(10_000)
        delivering.deliver(clock())
        end = store._engine.log.wrote_offset
        flushed: list[int] = []
        replace = disk.replace

        def noting(path: Path, data: bytes) -> None:
            flushed.append(store._engine.log.flushed_offset)
            replace(path, data)

        disk.replace = noting  # type: ignore[method-assign]
        delivering.save()
        assert len(flushed) >= 2 and min(flushed) >= end
