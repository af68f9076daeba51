"""Services get invalid files and arguments: they lose no message, and continue."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import logquarry as lq
from logquarry.errors import MessageRejected, UsageError
from logquarry.store.consumer.source import Arrivals
from logquarry.store.message_store import StoreWriter
from logquarry.store.transaction.checks import CheckReport
from logquarry.store.transaction.transaction import Transaction
from logquarry.testing.clock import FakeClock
from tests.helpers.broker_config import write
from tests.helpers.consumer_stores import fill, numbers, saved
from tests.helpers.transaction_stores import NOW, TIMEOUT, Listener, bodies, leave, message, opened


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(NOW)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


# -------------------------------------------------------------------------------------- files
def test_progress_in_a_delay_queue_that_is_not_there_begins_with_it(
    root: Path, clock: FakeClock
) -> None:
    opened(root, clock).close()
    write(root, "delayOffset.json", '{"offsetTable":{1:1000,2:-9,77:5}}')
    with opened(root, clock) as store:
        store.deliver_due()
        store.put(message(b"delayed", delay_level=1))
        clock.now += 1_000
        assert store.deliver_due() == 1
        assert bodies(store) == [b"delayed"]


def test_a_name_that_has_no_bytes_stops_no_group_from_saving(root: Path, clock: FakeClock) -> None:
    write(root, "consumerOffset.json", '{"offsetTable":{"t\\ud800@other":{0:1}}}')
    with opened(root, clock) as store:
        fill(store, 3)
        with store.consumer("g", "t", timeout=0) as consumer:
            assert numbers(consumer) == [0, 1, 2]
            consumer.commit()
        assert saved(store)["t", "g"] == {0: 3}
        assert saved(store)["t\ud800", "other"] == {0: 1}


# ---------------------------------------------------------------------------------- consumers
@pytest.mark.parametrize("offset", [-1, 2**63, 2**64, 1.5, "1", None])
def test_what_is_no_queue_offset_is_not_sought(root: Path, clock: FakeClock, offset: Any) -> None:
    with opened(root, clock) as store:
        fill(store, 3)
        with store.consumer("g", "t", timeout=0) as consumer:
            with pytest.raises(UsageError):
                consumer.seek("t", 0, offset)
            consumer.seek("t", 0, int(np.int64(1)))
            consumer.seek("t", 0, np.int64(1))  # type: ignore[arg-type]
            assert numbers(consumer) == [1, 2]
        assert saved(store)["t", "g"] == {0: 3}


@pytest.mark.parametrize("timeout", [1e12, float("inf")])
def test_a_wait_may_be_longer_than_any_lock_waits(timeout: float) -> None:
    arrivals = Arrivals()
    waking = threading.Timer(0.1, arrivals.wake)
    waking.start()
    assert arrivals.wait(0, timeout)
    waking.join()


@pytest.mark.parametrize(
    ("times", "level", "topic", "after"),
    [
        (2**31 - 1, None, "%DLQ%g", -(2**31)),  # Java's int overflows
        (-5, None, "%RETRY%g", -4),
        (-5, -1, "%DLQ%g", -4),
    ],
)
def test_reconsume_times_that_no_consumer_made(
    root: Path, clock: FakeClock, times: int, level: int | None, topic: str, after: int
) -> None:
    with opened(root, clock) as store:
        store.put(lq.Message("t", b"0", reconsume_times=times))
        store.wait_dispatched()
        with store.consumer("g", "t", timeout=0) as consumer:
            consumer.retry(next(consumer), level)
        store.wait_dispatched()
        [found] = store.scan(topic)
        assert found.reconsume_times == after


def test_a_delay_level_is_a_whole_number(root: Path, clock: FakeClock) -> None:
    with opened(root, clock) as store:
        fill(store, 1)
        with store.consumer("g", "t", timeout=0) as consumer:
            [given] = consumer.poll()
            for level in ("3", 1.5, 2**31):
                with pytest.raises(UsageError):
                    consumer.retry(given, level)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------- transactions
def test_what_was_committed_and_sent_back_commits_nothing_else(
    root: Path, clock: FakeClock
) -> None:
    """A message that is sent back still has the type COMMIT, and a half message's offset of 0."""
    with opened(root, clock) as store:
        leave(store, "open")  # at 0
        with store.transaction(message(b"done")) as t:
            t.commit()
        store.wait_dispatched()
        with store.consumer("g", "orders", timeout=0) as consumer:
            for found in consumer:
                consumer.retry(found)
    clock.now += TIMEOUT
    with opened(root, clock) as store:
        listener = Listener(open="commit")
        report = store.check_transactions(listener)
        assert (report.noted, report.committed) == (0, 1)
        assert bodies(store) == [b"done", b"open"]


def test_a_half_message_that_the_store_takes_no_more_is_asked_for_where_it_stands(
    root: Path, clock: FakeClock
) -> None:
    large = 20_000
    with opened(root, clock) as store:
        leave(store, "a" * large, "b")
    clock.now += TIMEOUT
    with opened(root, clock, max_message_size=large) as store:
        listener = Listener()
        for _ in range(2):
            assert store.check_transactions(listener).unknown == 1, "the later half messages wait"
        listener.answers["a" * large] = "commit"
        assert store.check_transactions(listener).unknown == 1, "it cannot be committed"
        listener.answers = {"a" * large: "rollback", "b": "commit"}
        report = store.check_transactions(listener)
        assert (report.rolled_back, report.committed) == (1, 1)
        assert bodies(store) == [b"b"]
        assert store.check_transactions(listener) == CheckReport()
    with opened(root, clock) as store:
        assert store.check_transactions(listener) == CheckReport()


def test_a_block_ends_its_own_half_message_that_the_store_takes_no_more(
    root: Path, clock: FakeClock
) -> None:
    """Properties of the maximum length have no room for those that a check adds."""
    with opened(root, clock) as store:
        t = begun_with_full_properties(store)
        clock.now += TIMEOUT
        assert store.check_transactions(Listener()) == CheckReport()
        t.commit()
        clock.now += 1
        store.check_transactions(Listener())
        assert bodies(store) == [b"full"]


def begun_with_full_properties(store: StoreWriter) -> Transaction:
    for room in range(32_767, 32_000, -1):
        t = store.transaction(message(b"full", properties={"a": "x" * room}))
        try:
            return t.__enter__()
        except MessageRejected:
            continue
    raise AssertionError("it never fits")
