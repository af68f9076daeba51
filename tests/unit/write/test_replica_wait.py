"""Puts that wait for a slave: it is in time, too late or silent; also with a wait for the disk."""

from __future__ import annotations

import dataclasses
import threading
import types
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

import logquarry as lq
from logquarry.disk.service import Health, Service
from logquarry.errors import StoreUnavailable
from logquarry.write.flush import GroupCommitService
from logquarry.write.put_result import AppendStatus, PutResult, PutStatus, ReplicaWait, Waiter
from logquarry.write.settling import LogGrowth
from tests.helpers.waiting import wait_for

RESULT = PutResult(PutStatus.PUT_OK, AppendStatus.PUT_OK, bytes(8), 1_000, 0, 100, 1, 0, 0.0, (0,))
END = RESULT.end_offset


class Time:
    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


def replicas(time: Time | None = None) -> ReplicaWait:
    return ReplicaWait(Health(), timeout_ms=3_000, fall_behind_max=500, clock=time or Time())


def test_a_slave_is_there_from_its_connecting_on_unless_it_is_far_behind() -> None:
    waiting = replicas()
    assert not waiting.is_available(0)
    waiting.slave_came()
    assert waiting.is_available(499)
    assert not waiting.is_available(500)
    waiting.acknowledge(1)
    assert waiting.is_available(500)
    waiting.slave_went()
    assert not waiting.is_available(1)


def test_whoever_it_concerns_is_told() -> None:
    waiting = replicas()
    second, first = wait_for(waiting, 200), wait_for(waiting, 100)
    waiting.acknowledge(99)
    assert not first.done() and not second.done()
    waiting.acknowledge(100)
    assert first.result(0) is True and not second.done()
    waiting.acknowledge(50)
    assert waiting.acknowledged == 100
    waiting.acknowledge(1_000)
    assert second.result(0) is True
    assert wait_for(waiting, 1_000).result(0) is True


def test_time_is_over_for_those_who_came_first() -> None:
    time = Time()
    waiting = replicas(time)
    first = wait_for(waiting, 100)
    time.now = 1_000
    second = wait_for(waiting, 50)
    assert waiting.expire() == 2_000
    time.now = 3_000
    assert waiting.expire() == 1_000
    assert first.result(0) is False and not second.done()
    waiting.acknowledge(50)
    assert second.result(0) is True
    assert waiting.expire() is None


@given(st.lists(st.one_of(st.integers(1, 40), st.just(None)), max_size=60))
def test_nothing_is_kept_of_those_who_were_told(steps: list[int | None]) -> None:
    """Each number is an offset to wait for; None lets a second pass."""
    time = Time()
    waiting = replicas(time)
    futures: list[tuple[int, Future[bool]]] = []
    for step in steps:
        if step is None:
            time.now += 1_000
            waiting.expire()
        else:
            futures.append((time.now, wait_for(waiting, step)))
        for at, future in futures:
            assert future.done() == (time.now - at >= 3_000)
    time.now += 10_000
    waiting.expire()
    assert not waiting._waiting
    assert not any(future.result(0) for _, future in futures)


def test_nobody_waits_for_a_store_that_is_closed() -> None:
    waiting = replicas()
    future = wait_for(waiting, 100)
    waiting.end()
    assert future.result(0) is False
    assert wait_for(waiting, 100).result(0) is False


def test_who_began_behind_it_has_not_got_it() -> None:
    waiting = replicas()
    first, second = wait_for(waiting, 400), wait_for(waiting, 600)
    waiting.acknowledge(500, 500)
    waiting.acknowledge(900, 500)
    assert not first.done() and second.result(0) is True
    assert waiting.acknowledged == 900
    assert not wait_for(waiting, 450).done() and wait_for(waiting, 700).result(0) is True
    # Another slave, which is further behind, has it.
    waiting.acknowledge(400, 100)
    assert first.result(0) is True


def test_a_word_counts_for_those_who_are_about_to_ask() -> None:
    """A slave may acknowledge a message before its put begins to wait."""
    waiting = replicas()
    waiting.acknowledge(1_000, 1_000)  # where another slave begins
    waiting.acknowledge(900, 100)
    assert wait_for(waiting, 800).result(0) is True


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 12), st.integers(0, 12)), max_size=40),
)
def test_nobody_is_told_of_what_no_slave_got(steps: list[tuple[bool, int, int]]) -> None:
    """A step is an acknowledgement of the bytes between two offsets, or one more waiting put."""
    waiting = replicas()
    got: list[tuple[int, int]] = []
    open_ones: list[tuple[int, Future[bool]]] = []
    for is_ack, one, other in steps:
        if is_ack:
            since, offset = min(one, other), max(one, other)
            got.append((since, offset))
            waiting.acknowledge(offset, since)
            still = [entry for entry in open_ones if not since < entry[0] <= offset]
            assert all(entry[1].done() for entry in open_ones if entry not in still)
            open_ones = still
        else:
            future = wait_for(waiting, one)
            if not future.done():
                open_ones.append((one, future))
            else:
                assert any(since < one <= offset for since, offset in got)
        assert not any(future.done() for _, future in open_ones)


# ------------------------------------------------------------------------------- with the disk
class Disk:
    """A flusher whose syncs end when the test ends them; with ``in_time``, at once."""

    def __init__(self, in_time: bool | None = None) -> None:
        self.in_time = in_time
        self.resolve: Callable[[bool], None] = lambda _: None
        self.fail: Callable[[StoreUnavailable], None] = lambda _: None

    def add(self, request: Waiter) -> None:
        assert request.offset == END
        self.resolve = request.resolve
        self.fail = request.fail
        if self.in_time is not None:
            self.resolve(self.in_time)


def settling(disk: Any, waiting: ReplicaWait) -> LogGrowth:
    idle = cast(Service, types.SimpleNamespace(flag=None, wakeup=lambda: None))
    return LogGrowth(idle, idle, cast(GroupCommitService | None, disk), waiting)


OK, LATE_DISK = PutStatus.PUT_OK, PutStatus.FLUSH_DISK_TIMEOUT
LATE_SLAVE, ALONE = PutStatus.FLUSH_SLAVE_TIMEOUT, PutStatus.SLAVE_NOT_AVAILABLE


@pytest.mark.parametrize("slave_first", [False, True])
@pytest.mark.parametrize(
    ("disk_in_time", "slave_in_time", "status"),
    [(True, True, OK), (False, True, LATE_DISK), (True, False, LATE_SLAVE), (0, 0, LATE_SLAVE)],
)
def test_a_future_waits_for_both(
    disk_in_time: bool, slave_in_time: bool, status: PutStatus, slave_first: bool
) -> None:
    disk, time = Disk(), Time()
    done: list[object] = []
    waiting = replicas(time)
    waiting.slave_came()
    waiting.acknowledge(900)
    growth = settling(disk, waiting)
    future = growth.settle_later(RESULT, True, done.append, lambda: done.append("failed"))

    def slave() -> None:
        if slave_in_time:
            waiting.acknowledge(END)
        time.now += 3_000
        waiting.expire()

    def flush() -> None:
        disk.resolve(bool(disk_in_time))

    steps = [slave, flush] if slave_first else [flush, slave]
    steps[0]()
    assert not future.done()
    steps[1]()
    assert future.result(0).status is status and done == [future.result(0)]


@pytest.mark.parametrize("slave_first", [False, True])
def test_a_failed_sync_is_an_error_whatever_the_slave_has(slave_first: bool) -> None:
    disk = Disk()
    told: list[object] = []
    waiting = replicas()
    waiting.slave_came()
    waiting.acknowledge(900)
    growth = settling(disk, waiting)
    future = growth.settle_later(RESULT, True, told.append, lambda: told.append("failed"))
    if slave_first:
        waiting.acknowledge(END)
    disk.fail(StoreUnavailable("EIO"))
    waiting.acknowledge(END)
    with pytest.raises(StoreUnavailable, match="EIO"):
        future.result(0)
    assert told == ["failed"]


@pytest.mark.parametrize("has_disk", [False, True])
def test_without_a_slave_nobody_waits_for_one(has_disk: bool) -> None:
    disk = Disk(in_time=True)
    growth = settling(disk if has_disk else None, replicas())
    assert growth.settle(RESULT, True).status is ALONE
    assert growth.settle(RESULT, False).status is OK
    disk.in_time = None
    future = growth.settle_later(RESULT, True, lambda _: None, lambda: None)
    disk.resolve(False)
    assert future.result(0).status is ALONE
    future = growth.settle_later(RESULT, False, lambda _: None, lambda: None)
    assert future.result(0).status is OK


def test_a_thread_waits_for_both() -> None:
    waiting = replicas()
    waiting.slave_came()
    waiting.acknowledge(900)
    growth = settling(Disk(in_time=True), waiting)
    threading.Timer(0.05, lambda: waiting.acknowledge(END)).start()
    assert growth.settle(RESULT, True).status is OK


class GoesWhenTold:
    """A slave's connection that ends as soon as the log has grown."""

    def __init__(self, waiting: ReplicaWait) -> None:
        self.waiting = waiting

    def is_unset(self) -> bool:
        return self.waiting.connected > 0

    def set(self) -> None:
        self.waiting.slave_went()


@pytest.mark.parametrize("later", [False, True])
def test_a_slave_that_goes_at_the_message_was_there_when_it_was_put(later: bool) -> None:
    time = Time()
    waiting = replicas(time)
    waiting.slave_came()
    waiting.acknowledge(900)
    growth = settling(None, waiting)
    growth.follow(GoesWhenTold(waiting))
    if later:
        future = growth.settle_later(RESULT, True, lambda _: None, lambda: None)
        assert not waiting.connected and not future.done()
        time.now += 3_000
        waiting.expire()
        assert future.result(0).status is LATE_SLAVE
    else:
        threading.Timer(0.05, waiting.end).start()
        assert growth.settle(RESULT, True).status is LATE_SLAVE


# ------------------------------------------------------------------------------------ in a store
@pytest.mark.parametrize("flush", ["ASYNC_FLUSH", "SYNC_FLUSH"])
def test_the_statuses_of_a_store(flush: str, tmp_path: Path) -> None:
    config = lq.StoreConfig(
        mapped_file_size_commit_log=1 << 16,
        mapped_file_size_consume_queue=2_000,
        max_hash_slot_num=50,
        max_index_num=200,
        broker_role="SYNC_MASTER",
        flush_disk_type=flush,
        slave_timeout=50,
        ha_slave_fallbehind_max=1 << 15,
    )
    with lq.MessageStore.open(tmp_path / "s", config=config, mode="rw") as store:
        slaves = store.log_feed().replicas
        assert store.put(lq.Message("t")).status is ALONE
        slaves.slave_came()
        assert store.put(lq.Message("t")).status is LATE_SLAVE
        assert store.put_async(lq.Message("t")).result(60).status is LATE_SLAVE
        assert store.put(lq.Message("t", wait_store_ok=False)).status is OK
    # From here on slave and disk answer in time, even if this thread has to wait for a core.
    config = dataclasses.replace(config, slave_timeout=600_000, sync_flush_timeout=600_000)
    with lq.MessageStore.open(tmp_path / "s", config=config, mode="rw") as store:
        slaves = store.log_feed().replicas
        slaves.slave_came()
        future = store.put_async(lq.Message("t"))
        slaves.acknowledge(store.max_offset)
        assert future.result(60).status is OK
        assert store.put(lq.Message("t", body=bytes(1 << 15))).status is ALONE
        assert store.put_async(lq.Message("t")).result(60).status is ALONE
        waits = store.put_async(lq.Message("u"))
        slaves.acknowledge(store.max_offset - 1)
        future = store.put_async(lq.Message("u"))
    # The slave's acknowledgement cannot come any more.
    assert waits.result(0).status is ALONE
    assert future.result(0).status is LATE_SLAVE
