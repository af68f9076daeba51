"""Does a store deliver each timer message once, at its time, whatever happens in between?"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import logquarry as lq
from logquarry.errors import MessageRejected, StoreNotFound, UsageError
from logquarry.format import properties as props
from logquarry.format import timer
from logquarry.format.frame import Frame
from logquarry.log.layout import StoreLayout
from logquarry.read.features import find_features
from logquarry.read.timers import CHECK, timers_of
from logquarry.store.message_store import StoreWriter
from logquarry.testing.clock import FakeClock
from tests.helpers.small_store import config as small_config
from tests.helpers.waiting import eventually

NOW = 1_700_000_000_500
DAY_MS = 24 * 3_600_000


def opened(root: Path, clock: FakeClock, **settings: Any) -> StoreWriter:
    config = small_config(mapped_file_size_timer_log=1_000, **settings)
    return StoreWriter.start(root, config=config, clock=clock)


def bodies(store: StoreWriter, topic: str = "t") -> list[bytes]:
    return sorted(m.body for m in store.scan() if m.topic == topic)


def waiting(root: Path) -> list[tuple[int, str | None]]:
    return [(one.slot_time - NOW, one.keys) for one in timers_of(StoreLayout.open(root)).due()]


def test_a_timer_message_waits_for_its_time(tmp_path: Path) -> None:
    clock = FakeClock(NOW)
    with opened(tmp_path, clock) as store:
        store.put(lq.Message("t", b"at", queue_id=2, deliver_at=NOW + 3_000, keys="k"))
        store.put(lq.Message("t", b"delay", delay_ms=1_500, properties={"a": "b"}))
        store.put(lq.Message("t", b"sec", properties={props.TIMER_DELAY_SEC: "1"}))
        store.put(lq.Message("t", b"past", deliver_at=NOW - 1))
        assert bodies(store) == [b"past"], "a time that is over: no wait, as in RocketMQ"
        store.wait_dispatched()
        assert waiting(tmp_path) == [(500, None), (500, None), (2_500, "k")]
        clock.now = NOW + 1_499
        assert store.deliver_due() == 0
        clock.now = NOW + 1_500
        assert store.deliver_due() == 2
        assert bodies(store) == [b"delay", b"past", b"sec"]
        clock.now = NOW + 3_500
        assert store.deliver_due() == 1 and store.deliver_due() == 0
        (last,) = [m for m in store.scan() if m.topic == "t" and m.body == b"at"]
        assert last.queue_id == 2 and last.properties[props.TIMER_OUT_MS] == str(NOW + 2_500)
        assert last.properties[props.TIMER_DEQUEUE_MS] == str(clock.now)


def test_without_the_wheel_some_messages_may_be_delivered(tmp_path: Path) -> None:
    """An import copies the messages, but not the wheel."""
    clock = FakeClock(NOW)
    with opened(tmp_path, clock) as store:
        for delay in (1_500, 9_000):
            store.put(lq.Message("t", b"x", delay_ms=delay))
        clock.now = NOW + 2_500
        assert store.deliver_due() == 1
    feature = find_features(StoreLayout.open(tmp_path)).get("timers")
    assert feature is not None and feature.detail == "1 timer message waits for its time"
    (tmp_path / timer.WHEEL).unlink()
    (tmp_path / CHECK).unlink()
    feature = find_features(StoreLayout.open(tmp_path)).get("timers")
    assert feature is not None and feature.detail.startswith("at most 2 timer messages wait for")
    assert len(waiting(tmp_path)) == 1


@pytest.mark.parametrize("many", [False, True])
def test_each_way_to_put_delays(tmp_path: Path, many: bool) -> None:
    clock = FakeClock(NOW)
    messages = [
        lq.Message("t", b"1", deliver_at=NOW + 2_000),
        lq.Message("t", b"2", properties_string=f"TIMER_DELIVER_MS\x01{NOW + 2_000}\x02a\x01b"),
        lq.Message("t", b"3", properties_string=b"TIMER_DELAY_MS\x011500"),
        lq.Message("t", b"4"),
    ]
    with opened(tmp_path, clock) as store:
        if many:
            store.put_many(messages)
        else:
            for message in messages:
                store.put(message)
        assert bodies(store) == [b"4"]
        assert [m.body for m in store.scan() if m.topic == timer.TOPIC] == [b"1", b"2", b"3"]


def test_times_that_the_store_refuses(tmp_path: Path) -> None:
    with opened(tmp_path, FakeClock(NOW)) as store:
        for one in (
            lq.Message("t", b"", deliver_at=NOW + 3 * DAY_MS + 1_000),
            lq.Message("t", b"", properties={props.TIMER_DELAY_SEC: "soon"}),
            lq.Message("t", b"", deliver_at=NOW - 1, properties={props.TIMER_DELETE_UNIQ_KEY: "x"}),
        ):
            with pytest.raises(MessageRejected) as caught:
                store.put(one)
            assert caught.value.reason == "delay"
        assert not list(store.scan())
    with pytest.raises(UsageError, match="deliver_at and delay_ms"):
        lq.Message("t", b"", deliver_at=NOW, delay_ms=1)


def test_a_read_that_fails_delays_due_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock(NOW)
    with opened(tmp_path, clock) as store:
        for body in (b"a", b"b"):
            store.put(lq.Message("t", body, delay_ms=1_500))
        store.wait_dispatched()
        assert store.deliver_due() == 0, "the messages are read into the heap"
        clock.now += 5_000
        log = store._open_services.deliveries[1]._log
        found = [log.message]

        def message(offset: int, size: int) -> Frame | None:
            if not found:
                raise StoreNotFound("too many open files")
            return found.pop()(offset, size)

        with monkeypatch.context() as patch:
            patch.setattr(log, "message", message)
            with pytest.raises(StoreNotFound):
                store.deliver_due()
        assert bodies(store) == []
        assert store.deliver_due() == 2 and store.deliver_due() == 0
        assert bodies(store) == [b"a", b"b"]


def test_a_message_that_another_deletes_is_not_delivered(tmp_path: Path) -> None:
    clock = FakeClock(NOW)
    with opened(tmp_path, clock) as store:
        for key in ("A", "B", "C"):
            given = {props.UNIQ_KEY: key}
            store.put(lq.Message("t", key.encode(), deliver_at=NOW + 2_000, properties=given))
        for key in ("A", timer.delete_key("t", "B"), timer.delete_key("u", "C")):
            given = {props.TIMER_DELETE_UNIQ_KEY: key}
            store.put(lq.Message("t", b"del", deliver_at=NOW + 2_000, properties=given))
        clock.now += 3_000
        assert store.deliver_due() == 1
        assert bodies(store) == [b"C"]


@pytest.mark.parametrize("is_killed", [False, True])
@pytest.mark.parametrize("saves", [False, True])
def test_a_new_writer_delivers_the_rest(tmp_path: Path, is_killed: bool, saves: bool) -> None:
    clock = FakeClock(NOW)
    root = tmp_path / "a"
    store = opened(root, clock)
    for second in range(30):
        # The order is not that of their times.
        at = NOW + 1_000 * (2 + second * 7 % 30)
        store.put(lq.Message("t", f"{second:02}".encode(), deliver_at=at))
    clock.now += 12_000
    store._services.deliveries[1].deliver(clock.now, limit=4)
    if saves:
        store._services.deliveries[1].save()
    assert store._services.deliveries[1].deliver(clock.now) > 4
    given = bodies(store)
    assert 4 < len(given) < 30
    if is_killed:
        shutil.copytree(root, tmp_path / "b")
        store.close()
        root = tmp_path / "b"
    else:
        store.close()
        assert len(waiting(root)) == 30 - len(given)
    with opened(root, clock) as store:
        assert store._services.deliveries[1].waiting == 30 - len(given)
        assert store.deliver_due() == 0
        assert bodies(store) == given
        clock.now += 60_000
        store.deliver_due()
        assert bodies(store) == [f"{second:02}".encode() for second in range(30)]
    with opened(root, clock) as store:
        assert store.deliver_due() == 0


def test_equal_messages_are_each_delivered(tmp_path: Path) -> None:
    clock = FakeClock(NOW)
    with opened(tmp_path / "a", clock) as store:
        for _ in range(4):
            store.put(lq.Message("t", b"x", deliver_at=NOW + 2_000, born_timestamp=NOW, queue_id=1))
        clock.now += 3_000
        store._services.deliveries[1].deliver(clock.now, limit=1)
        shutil.copytree(tmp_path / "a", tmp_path / "b")
    with opened(tmp_path / "b", clock) as store:
        assert store.deliver_due() == 3
        assert bodies(store) == [b"x"] * 4


def test_the_progress_of_an_older_state_of_the_log_does_not_count(tmp_path: Path) -> None:
    clock = FakeClock(NOW)
    with opened(tmp_path / "a", clock) as store:
        store.put(lq.Message("t", b"1", deliver_at=NOW + 2_000))
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        clock.now += 3_000
        assert store.deliver_due() == 1
    progress = ".logquarry/timers.json"
    shutil.copy(tmp_path / "a" / progress, tmp_path / "b" / progress)
    with opened(tmp_path / "b", clock) as store:
        assert store.deliver_due() == 1, "the log was cut before its delivery"


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000, '{"position":Infinity,"first":0}'])
def test_invalid_progress_does_not_count(tmp_path: Path, text: str) -> None:
    clock = FakeClock(NOW)
    with opened(tmp_path, clock) as store:
        store.put(lq.Message("t", b"1", deliver_at=NOW + 2_000))
    clock.now += 3_000
    (tmp_path / ".logquarry" / "timers.json").write_text(text)
    with opened(tmp_path, clock) as store:
        assert store.deliver_due() == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [("first", 2**63), ("first", 2), ("first", -(10**15)), ("position", -1), ("read_time", 2**63)],
)
def test_progress_with_impossible_numbers_does_not_count(
    tmp_path: Path, name: str, value: int
) -> None:
    clock = FakeClock(NOW)
    with opened(tmp_path, clock) as store:
        store.put(lq.Message("t", b"1", deliver_at=NOW + 2_000))
        assert store.deliver_due() == 0
    path = tmp_path / ".logquarry" / "timers.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    with opened(tmp_path, clock) as store:
        store.put(lq.Message("t", b"2", deliver_at=NOW + 2_000))
        clock.now += 3_000
        assert store.deliver_due() == 2
        assert bodies(store) == [b"1", b"2"]


def test_a_thread_delivers(tmp_path: Path) -> None:
    clock = FakeClock(NOW)
    with opened(tmp_path, clock, deliver_delayed=True) as store:
        store.put(lq.Message("t", b"soon", delay_ms=1))
        clock.now += 1_000
        eventually(lambda: bodies(store))
        assert bodies(store) == [b"soon"]


def test_a_clock_that_is_set_back_delivers_no_message_again(tmp_path: Path) -> None:
    """The record of deliveries covered times; an earlier waiting message took the cover away."""
    clock = FakeClock(1_800_000_000_000)

    def put(store: StoreWriter, body: bytes, after_ms: int) -> None:
        time = str(clock.now + after_ms)
        store.put(lq.Message("t", body, properties={"TIMER_DELIVER_MS": time}))
        store.wait_dispatched()

    with opened(tmp_path, clock) as store:
        put(store, b"later", 200_000_000)
        put(store, b"one", 1_000)
        clock.advance(5_000)
        assert store.deliver_due() == 1
        clock.advance(-1_000_000)
        put(store, b"two", 5_000)
        assert store.deliver_due() == 0
    clock.advance(2_000_000)
    with opened(tmp_path, clock) as store:
        assert store.deliver_due() == 1
        store.wait_dispatched()
        assert sorted(m.body for m in store.scan() if m.topic == "t") == [b"one", b"two"]
