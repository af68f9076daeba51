from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path

import pytest

from logquarry.disk.mapped_file_queue import MappedFileQueue
from logquarry.disk.page_file import CheckpointFile
from logquarry.disk.service import Service
from logquarry.errors import StoreUnavailable
from logquarry.format import checkpoint
from logquarry.format.checkpoint import Checkpoint
from logquarry.format.fields import PAGE_SIZE
from logquarry.write.flush import (
    CommitRealTimeService,
    FlushConsumeQueueService,
    FlushRealTimeService,
    GroupCommitService,
    Timing,
)
from logquarry.write.settling import PutWait
from tests.helpers.failing_disk import EIO, FaultyDisk
from tests.helpers.waiting import eventually, wait_for

SIZE = 1 << 20
PATIENCE_MS = 60_000
"""With the default of 5 s, a wait could end before a busy machine has started all threads."""


class FakeClock:
    def __init__(self) -> None:
        self.now = 1_000_000

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()


@pytest.fixture
def queue(disk: FaultyDisk, tmp_path: Path) -> MappedFileQueue:
    queue = MappedFileQueue(disk, tmp_path / "log", SIZE)
    queue.load()
    return queue


def put(queue: MappedFileQueue, data: bytes, store_timestamp: int = 0) -> int:
    file = queue.writable()
    at = file.append(data)
    assert at is not None
    file.store_timestamp = store_timestamp
    return file.base + at + len(data)


# ---------------------------------------------------------------------------------- group commit
def test_64_waiters_share_few_syncs(
    disk: FaultyDisk, queue: MappedFileQueue, tmp_path: Path
) -> None:
    times = CheckpointFile(disk, tmp_path / "checkpoint")
    service = GroupCommitService(queue, disk.health, checkpoint=times, timeout_ms=PATIENCE_MS)
    service.start()
    before = disk.counts["fdatasync"]
    disk.gate.clear()
    futures: list[Future[bool]] = []
    lock = threading.Lock()

    def one() -> None:
        with lock:
            futures.append(wait_for(service, put(queue, b"x" * 100, 77)))

    one()
    eventually(lambda: disk.counts["fdatasync"] == before + 1)
    threads = [threading.Thread(target=one) for _ in range(63)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not any(future.done() for future in futures)
    disk.gate.set()
    assert all(future.result(60) for future in futures)
    assert disk.counts["fdatasync"] == before + 2, "the first, and one for all the others"
    assert queue.flushed_offset == 6400
    assert times.physic_timestamp == 77
    assert service.stop()
    queue.close()


def test_a_failed_sync_fails_all_waiters_and_all_later_ones(
    disk: FaultyDisk, queue: MappedFileQueue
) -> None:
    service = GroupCommitService(queue, disk.health, timeout_ms=PATIENCE_MS)
    service.start()
    disk.gate.clear()
    first = wait_for(service, put(queue, b"first"))
    eventually(lambda: disk.counts["fdatasync"] == 1)
    later = [wait_for(service, put(queue, b"later")) for _ in range(5)]
    disk.failing["fdatasync"] = EIO
    # The call that waits at the gate has passed the failure: the second sync meets it.
    disk.gate.set()
    assert first.result(60)
    for future in later:
        with pytest.raises(StoreUnavailable, match="sync failed"):
            future.result(60)
    disk.failing.clear()
    with pytest.raises(StoreUnavailable, match="sync failed"):
        wait_for(service, 10).result(60)
    with pytest.raises(StoreUnavailable, match="sync failed"):
        put(queue, b"more")
    assert disk.counts["fdatasync"] == 2, "never tried again"
    assert bytes(queue.select(0, 5) or b"") == b"first"
    assert service.stop()
    queue.close()
    assert disk.counts["fdatasync"] == 2


def test_a_sync_that_hangs_is_a_timeout_and_no_loss(
    disk: FaultyDisk, queue: MappedFileQueue
) -> None:
    service = GroupCommitService(queue, disk.health, timeout_ms=30)
    service.start()
    disk.gate.clear()
    future = wait_for(service, put(queue, b"slow"))
    assert future.result(60) is False
    disk.gate.set()
    eventually(lambda: queue.flushed_offset == 4)
    # On a busy machine, more calls may take longer than the 30 ms.
    eventually(lambda: wait_for(service, put(queue, b"fast")).result(60))
    assert service.stop()
    queue.close()


def test_timeouts_by_the_clock(disk: FaultyDisk, queue: MappedFileQueue) -> None:
    clock = FakeClock()
    service = GroupCommitService(queue, disk.health, timeout_ms=5_000, clock=clock)
    # The service's thread does not run, so it syncs nothing before run_once below.
    assert service.expire() is None
    first = wait_for(service, put(queue, b"one"))
    clock.now += 2_000
    second = wait_for(service, put(queue, b"two"))
    assert service.expire() == 3_000
    clock.now += 2_999
    assert service.expire() == 1 and not first.done()
    clock.now += 1
    assert service.expire() == 2_000
    assert first.result(0) is False and not second.done()
    service.run_once()
    assert first.result(0) is False and second.result(0) is True
    assert service.expire() is None
    service.stop()
    queue.close()


def test_an_offset_that_is_not_reached_is_a_timeout(
    disk: FaultyDisk, queue: MappedFileQueue
) -> None:
    service = GroupCommitService(queue, disk.health)
    reached, beyond = wait_for(service, put(queue, b"abc")), wait_for(service, 4)
    service.run_once()
    assert reached.result(0) is True and beyond.result(0) is False
    service.stop()
    queue.close()


def test_stopping_syncs_what_was_asked_for(disk: FaultyDisk, queue: MappedFileQueue) -> None:
    service = GroupCommitService(queue, disk.health, timeout_ms=PATIENCE_MS)
    service.start()
    futures = [wait_for(service, put(queue, b"x")) for _ in range(100)]
    assert service.stop()
    assert all(future.result(0) for future in futures)
    with pytest.raises(StoreUnavailable, match="closed"):
        wait_for(service, 101).result(0)
    queue.close()


def test_a_request_that_comes_late_for_what_is_on_the_disk(
    disk: FaultyDisk, queue: MappedFileQueue
) -> None:
    service = GroupCommitService(queue, disk.health, timeout_ms=PATIENCE_MS)
    service.start()
    offset = put(queue, b"x" * 100)
    assert service.stop()
    assert wait_for(service, offset).result(0)
    with pytest.raises(StoreUnavailable, match="closed"):
        wait_for(service, offset + 1).result(0)
    disk.health.poison("a sync has failed")
    assert wait_for(service, offset).result(0)


def test_a_request_that_times_out_just_when_it_is_synced(
    disk: FaultyDisk, queue: MappedFileQueue
) -> None:
    """Either the timeout or the sync settles the request."""
    clock = FakeClock()
    service = GroupCommitService(queue, disk.health, timeout_ms=5, clock=clock)
    told = []

    def heard(is_flushed: bool) -> None:
        told.append(is_flushed)
        if len(told) == 1:
            clock.now += 5
            service.expire()

    service.add(PutWait(put(queue, b"x"), heard, lambda error: None))
    service.run_once()
    assert told == [True]


def test_messages_that_nobody_waits_for_are_flushed_too(
    disk: FaultyDisk, queue: MappedFileQueue
) -> None:
    service = GroupCommitService(queue, disk.health, timeout_ms=PATIENCE_MS)
    service.start()
    end = put(queue, b"x")
    service.wakeup()
    eventually(lambda: queue.flushed_offset == end)
    assert service.stop()
    queue.close()


# ----------------------------------------------------------------------------------------- timed
def test_the_log_is_flushed_by_pages_and_thoroughly_now_and_then(
    disk: FaultyDisk, queue: MappedFileQueue, tmp_path: Path
) -> None:
    clock = FakeClock()
    times = CheckpointFile(disk, tmp_path / "checkpoint")
    service = FlushRealTimeService(
        queue, disk.health, Timing(500, 4, 10_000), checkpoint=times, clock=clock
    )
    put(queue, b"x", 1)
    service.run_once()
    assert queue.flushed_offset == 1, "the first run is thorough"
    assert times.physic_timestamp == 1
    put(queue, bytes(3 * PAGE_SIZE), 2)
    clock.now += 500
    service.run_once()
    assert queue.flushed_offset == 1
    put(queue, bytes(PAGE_SIZE), 3)
    service.run_once()
    assert queue.flushed_offset == 1 + 4 * PAGE_SIZE
    assert times.physic_timestamp == 1, "only thorough flushes tell the checkpoint"
    put(queue, b"x", 4)
    clock.now += 9_499
    service.run_once()
    assert queue.flushed_offset == 1 + 4 * PAGE_SIZE
    clock.now += 1
    service.run_once()
    assert queue.flushed_offset == queue.max_offset
    assert times.physic_timestamp == 4
    put(queue, b"last", 5)
    service.run_last()
    assert queue.flushed_offset == queue.max_offset and times.physic_timestamp == 5
    times.close()
    queue.close()


def test_timed_services_run_and_stop(disk: FaultyDisk, queue: MappedFileQueue) -> None:
    service = FlushRealTimeService(queue, disk.health, Timing(5, 4, 10_000))
    service.start()
    end = put(queue, b"x" * 5 * PAGE_SIZE)
    eventually(lambda: queue.flushed_offset == end)
    disk.failing["fdatasync"] = EIO
    put(queue, b"x" * 5 * PAGE_SIZE)
    eventually(lambda: disk.health.reason is not None)
    assert service.stop()
    assert queue.flushed_offset == end
    queue.close()


def test_commits_wake_the_flusher(disk: FaultyDisk, tmp_path: Path) -> None:
    from logquarry.disk.log_files import AllocateMappedFileService
    from logquarry.disk.write_buffers import TransientStorePool

    allocator = AllocateMappedFileService(disk, pool=TransientStorePool(2, SIZE))
    allocator.start()
    queue = MappedFileQueue(disk, tmp_path / "log", SIZE, allocator=allocator)
    flusher = FlushRealTimeService(queue, disk.health, Timing(60_000, 0, 10_000), is_timed=False)
    commits = CommitRealTimeService(queue, disk.health, Timing(5, 4, 200), committed=flusher.wakeup)
    flusher.start()
    commits.start()
    end = put(queue, b"some text")
    eventually(lambda: queue.flushed_offset == end)
    assert bytes(queue.select(0) or b"") == b"some text"
    put(queue, b", the last")
    assert commits.stop() and flusher.stop() and allocator.stop()
    assert queue.flushed_offset == queue.wrote_offset
    queue.close()


def test_the_checkpoint_is_written_after_what_it_tells_of(
    disk: FaultyDisk, queue: MappedFileQueue, tmp_path: Path
) -> None:
    clock = FakeClock()
    units = MappedFileQueue(disk, tmp_path / "units", SIZE)
    units.load()
    times = CheckpointFile(disk, tmp_path / "checkpoint")
    dispatched = 50
    service = FlushConsumeQueueService(
        lambda: [units],
        disk.health,
        Timing(1_000, 2, 60_000),
        log=queue,
        checkpoint=times,
        dispatched_timestamp=lambda: dispatched,
        clock=clock,
    )
    put(queue, b"message", 60)
    put(units, b"unit")
    disk.order.clear()
    service.run_once()
    assert disk.order == ["fdatasync", "fdatasync", "write", "fdatasync"]
    assert CheckpointFile(disk, tmp_path / "checkpoint").times == Checkpoint(60, 50, 0)

    put(units, b"unit")
    dispatched = 60
    clock.now += 1_000
    disk.order.clear()
    service.run_once()
    assert disk.order == []
    put(units, bytes(2 * PAGE_SIZE))
    disk.order.clear()
    service.run_once()
    assert disk.order == ["fdatasync"]
    assert times.logics_timestamp == 50
    clock.now += 59_000
    put(queue, b"message", 70)
    disk.failing["fdatasync"] = EIO
    with pytest.raises(StoreUnavailable):
        service.run_once()
    assert times.times == Checkpoint(60, 50, 0), "nothing is claimed that is not on the disk"
    times.close()
    units.close()
    queue.close()


def test_a_bug_in_a_service_poisons(disk: FaultyDisk) -> None:
    class Broken(Service):
        def run_once(self) -> None:
            raise ZeroDivisionError

    service = Broken("broken", disk.health, interval_ms=1)
    service.start()
    eventually(lambda: disk.health.reason is not None)
    assert "broken failed" in str(disk.health.error())
    assert service.stop()


# ------------------------------------------------------------------------------------ checkpoint
def test_the_checkpoint_file_is_rocketmqs(disk: FaultyDisk, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    times = CheckpointFile(disk, path)
    assert times.times == Checkpoint()
    times.physic_timestamp, times.logics_timestamp, times.index_timestamp = 3, 2, 1
    assert path.read_bytes() == bytes(4096)
    inode = path.stat().st_ino
    times.flush()
    times.close()
    times.close()
    assert path.read_bytes() == checkpoint.encode(Checkpoint(3, 2, 1))
    assert path.stat().st_ino == inode
    again = CheckpointFile(disk, path)
    assert again.times == Checkpoint(3, 2, 1)
    again.close()


def test_a_short_checkpoint_is_one_of_zeros(disk: FaultyDisk, tmp_path: Path) -> None:
    (tmp_path / "checkpoint").touch()
    times = CheckpointFile(disk, tmp_path / "checkpoint")
    assert times.times == Checkpoint()
    assert (tmp_path / "checkpoint").stat().st_size == 4096
    times.close()


@pytest.mark.parametrize("call", ["write", "fdatasync"])
def test_a_checkpoint_that_fails_poisons(disk: FaultyDisk, tmp_path: Path, call: str) -> None:
    times = CheckpointFile(disk, tmp_path / "checkpoint")
    disk.failing[call] = EIO
    with pytest.raises(StoreUnavailable):
        times.flush()
    assert disk.health.reason is not None
    times.close()
