"""The services that flush a store: the group commit, which syncs the log while puts wait for the
sync, and the services that flush at an interval.
"""

from __future__ import annotations

import logging
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple, Protocol

from logquarry.config import StoreConfig
from logquarry.disk.mapped_file_queue import MappedFileQueue
from logquarry.disk.page_file import CheckpointFile
from logquarry.disk.service import Clock, Health, Service, SyncDelayed, monotonic_ms
from logquarry.errors import StoreUnavailable
from logquarry.write.put_result import DeadlineWatch, Waiter

logger = logging.getLogger(__name__)

SYNC_FLUSH_TIMEOUT_MS: Final = 5_000
_IDLE_FLUSH_MS: Final = 500


class GroupCommitService(Service):
    """Syncs the log for puts that wait for the disk (``CommitLog.GroupCommitService``).

    If a put begins to wait during a sync, the put waits for the next sync: the current sync
    possibly does not cover the put's message. ``timeout_ms`` is ``syncFlushTimeout``.
    """

    def __init__(
        self,
        queue: MappedFileQueue,
        health: Health,
        *,
        checkpoint: CheckpointFile | None = None,
        timeout_ms: int = SYNC_FLUSH_TIMEOUT_MS,
        clock: Clock = monotonic_ms,
    ) -> None:
        # A put with WAIT=false does not wake the service. The message of such a put is synced
        # at the end of the interval, if not earlier.
        super().__init__("group commit", health, interval_ms=_IDLE_FLUSH_MS)
        self._queue = queue
        self._checkpoint = checkpoint
        self._timeout_ms = timeout_ms
        self._clock = clock
        self._change = threading.Lock()
        self._waiting: list[Waiter] = []
        # The waits that the current sync covers. Only this service and expire() use the list.
        self._covered: list[Waiter] = []
        self._has_ended = False
        self._watch = DeadlineWatch("flush watch", self.expire, health, timeout_ms)

    def start(self) -> None:
        """Start the service's own thread, and a second thread, which ends overdue waits."""
        self._watch.start()
        super().start()

    def stop(self, timeout_s: float = 10.0) -> bool:
        """Sync once more for the puts that still wait, and end the thread. A later call of
        :meth:`add` fails.
        """
        ended = super().stop(timeout_s)
        self._watch.stop(timeout_s)
        return ended

    def add(self, request: Waiter) -> None:
        """Add a wait. The wait ends when the log is on the disk up to its offset, when a sync
        fails, or at its deadline. A later sync still covers a message whose wait ended at the
        deadline.
        """
        request.deadline = self._clock() + self._timeout_ms
        with self._change:
            is_refused = self._has_ended or self.health.reason is not None
            is_first = not self._waiting
            if not is_refused:
                self._waiting.append(request)
        if is_refused:
            self._end(request)
        elif is_first:
            self.wakeup()

    def run_once(self) -> None:
        """Sync the log, and end the waits that existed when the sync began."""
        with self._change:
            self._covered, self._waiting = self._waiting, []
            covered = self._covered
        # Sync even if no put waits, for the messages with WAIT=false.
        try:
            flushed = self._queue.flush(0)
        except SyncDelayed:
            # The next sync can still cover these messages. If the next sync comes too late for a
            # put, the put's wait ends with FLUSH_DISK_TIMEOUT.
            with self._change:
                self._covered, self._waiting = [], covered + self._waiting
            raise
        _note_synced(self._queue, self._checkpoint)
        for request in covered:
            request.resolve(flushed >= request.offset)
        with self._change:
            self._covered = []

    def run_last(self) -> None:
        """Sync once more."""
        self.run_once()

    def ended(self) -> None:
        """Fail the waits that the last sync does not cover."""
        with self._change:
            self._has_ended = True
            left = self._covered + self._waiting
            self._covered, self._waiting = [], []
        for request in left:
            self._end(request)

    def _end(self, request: Waiter) -> None:
        if self._queue.flushed_offset >= request.offset:
            request.resolve(True)
        elif self.health.reason is not None:
            request.fail(self.health.error())
        else:
            why = "the store was closed before the message was on the disk"
            request.fail(StoreUnavailable(why))

    def expire(self) -> int | None:
        """End overdue waits. Return the milliseconds until the next deadline, or None if no put
        waits.
        """
        now = self._clock()
        with self._change:
            # The waits in _covered began before the waits in _waiting, so the joined list is sorted
            # by deadline.
            pending = self._covered + self._waiting
        late = [request for request in pending if request.deadline <= now]
        for request in late:
            request.resolve(False)
        open_ones = (r.deadline for r in pending if r.deadline > now and r.is_open)
        first = next(open_ones, None)
        return None if first is None else first - now


# --------------------------------------------------------------------------------------------------
# Services that flush or commit at an interval; no put waits for them. After a failed sync, the
# store refuses writes, and the service ends. RocketMQ only logs the failure and continues.

SLOW_FLUSH_MS: Final = 500


class Flushable(Protocol):
    """A part of the store that can be synced: topic table, a queue's files, state table, or
    index."""

    def flush(self, least_pages: int) -> object:
        """Sync if at least ``least_pages`` pages have changed; with 0, always sync."""


class Timing(NamedTuple):
    """The settings of a service that flushes: the interval between its runs, the least number of
    changed pages for a flush, and the interval between *thorough* runs. A thorough run flushes all
    changed pages.
    """

    interval_ms: int
    least_pages: int
    thorough_interval_ms: int


class _TimedFlush(Service):
    """Flushes at an interval. The first run (as in Java) and the last run flush all pages."""

    def __init__(
        self,
        name: str,
        health: Health,
        timing: Timing,
        *,
        clock: Clock = monotonic_ms,
        is_timed: bool = False,
    ) -> None:
        super().__init__(name, health, interval_ms=timing.interval_ms, is_timed=is_timed)
        self._timing = timing
        self._clock = clock
        self._thorough_at: int | None = None

    def run_once(self) -> None:
        now = self._clock()
        if self._thorough_at is None or now >= self._thorough_at:
            self.flush(0)
            # If the flush raises SyncDelayed, the next line is not reached, so the next run is
            # thorough too.
            self._thorough_at = now + self._timing.thorough_interval_ms
        else:
            self.flush(self._timing.least_pages)

    def run_last(self) -> None:
        self.flush(0)

    @abstractmethod
    def flush(self, least_pages: int = 0) -> None:
        """Flush the files with at least ``least_pages`` changed pages; with 0, flush all files."""


class FlushRealTimeService(_TimedFlush):
    """Flushes the log at an interval (``ASYNC_FLUSH``).

    If ``is_timed`` (``flushCommitLogTimed``), a wake-up by a put does not shorten the interval.
    """

    def __init__(
        self,
        queue: MappedFileQueue,
        health: Health,
        timing: Timing,
        *,
        checkpoint: CheckpointFile | None = None,
        is_timed: bool = True,
        clock: Clock = monotonic_ms,
    ) -> None:
        super().__init__("flush", health, timing, clock=clock, is_timed=is_timed)
        self._queue = queue
        self._checkpoint = checkpoint

    def flush(self, least_pages: int = 0) -> None:
        """See :meth:`_TimedFlush.flush`."""
        started = self._clock()
        self._queue.flush(least_pages)
        _note_synced(self._queue, self._checkpoint)
        if (spent := self._clock() - started) > SLOW_FLUSH_MS:
            logger.warning("flushing the log took %d ms", spent)


class CommitRealTimeService(_TimedFlush):
    """Writes the buffers of the transient store pool to the log's files.

    The flush service syncs the bytes that this service writes. So stop the flush service after this
    service.
    """

    def __init__(
        self,
        queue: MappedFileQueue,
        health: Health,
        timing: Timing,
        *,
        committed: Callable[[], None],
    ) -> None:
        super().__init__("commit", health, timing)
        self._queue = queue
        self._committed = committed

    def flush(self, least_pages: int = 0) -> None:
        """Commit if at least ``least_pages`` pages are not committed; with 0, commit all pages."""
        before = self._queue.committed_offset
        if self._queue.commit(least_pages) != before:
            self._committed()


class FlushConsumeQueueService(_TimedFlush):
    """Flushes the consume queues, and then writes the checkpoint.

    A thorough run syncs the log, then the queues and the index, and then writes the checkpoint. So
    the checkpoint never covers messages that are not on the disk. In contrast, RocketMQ writes the
    time of the last dispatched message to the checkpoint even if the queues are not flushed.
    """

    def __init__(
        self,
        queues: Callable[[], Iterable[Flushable]],
        health: Health,
        timing: Timing,
        *,
        log: MappedFileQueue,
        checkpoint: CheckpointFile,
        dispatched_timestamp: Callable[[], int],
        clock: Clock = monotonic_ms,
    ) -> None:
        super().__init__("flush queues", health, timing, clock=clock)
        self._queues = queues
        self._log = log
        self._checkpoint = checkpoint
        self._dispatched_timestamp = dispatched_timestamp
        self._flushing = threading.Lock()
        self._is_over = False

    def flush(self, least_pages: int = 0) -> None:
        """Flush the queues with at least ``least_pages`` changed pages. With 0, flush log, queues
        and index, and write the checkpoint.

        Any thread may call this method. A lock allows only one flush at a time, because each full
        index file must be synced and closed only once. Raises StoreUnavailable after a failed sync
        or :meth:`close`.
        """
        with self._flushing:
            if self._is_over:
                raise StoreUnavailable("the store was closed")
            # Read the time before the flush: the flush possibly does not cover messages that are
            # dispatched after its start.
            timestamp = self._dispatched_timestamp()
            if least_pages == 0:
                self._log.flush(0)
            for queue in self._queues():
                queue.flush(least_pages)
            if least_pages == 0:
                _note_synced(self._log, self._checkpoint)
                if timestamp > 0:
                    self._checkpoint.logics_timestamp = timestamp
                self._checkpoint.flush()

    def close(self) -> None:
        """Refuse further flushes; the files can then be closed."""
        with self._flushing:
            self._is_over = True


def _note_synced(log: MappedFileQueue, checkpoint: CheckpointFile | None) -> None:
    if checkpoint is not None and log.store_timestamp > 0:
        checkpoint.physic_timestamp = log.store_timestamp


# --------------------------------------------------------------------------------------------------
# Create the services that a store needs for its settings.


class FlushServices:
    """The flush services of one store; the store starts and stops the services.

    ``dispatched_timestamp`` returns the store time of the last dispatched message, in milliseconds.

    Attributes:
        group: the group commit; None with ASYNC_FLUSH.
        commit: writes the pool's buffers to the files; None if there is no pool.
        after_put: the service that a put wakes.
    """

    def __init__(
        self,
        log: MappedFileQueue,
        config: StoreConfig,
        health: Health,
        *,
        checkpoint: CheckpointFile,
        has_pool: bool,
        committed: Callable[[], None],
        flushables: Callable[[], Iterable[Flushable]],
        dispatched_timestamp: Callable[[], int],
    ) -> None:
        self.group: GroupCommitService | None = None
        self.log: GroupCommitService | FlushRealTimeService
        if config.flush_disk_type == "SYNC_FLUSH":
            self.log = self.group = GroupCommitService(
                log,
                health,
                checkpoint=checkpoint,
                timeout_ms=config.sync_flush_timeout,
            )
        else:
            self.log = FlushRealTimeService(
                log,
                health,
                Timing(
                    config.flush_interval_commit_log,
                    config.flush_commit_log_least_pages,
                    config.flush_commit_log_thorough_interval,
                ),
                checkpoint=checkpoint,
                is_timed=config.flush_commit_log_timed,
            )
        self.commit: CommitRealTimeService | None = None
        if has_pool:
            self.commit = CommitRealTimeService(
                log,
                health,
                Timing(
                    config.commit_interval_commit_log,
                    config.commit_commit_log_least_pages,
                    config.commit_commit_log_thorough_interval,
                ),
                committed=committed,
            )
        self.after_put = self.log if self.commit is None else self.commit
        self.queues = FlushConsumeQueueService(
            flushables,
            health,
            Timing(
                config.flush_interval_consume_queue,
                config.flush_consume_queue_least_pages,
                config.flush_consume_queue_thorough_interval,
            ),
            log=log,
            checkpoint=checkpoint,
            dispatched_timestamp=dispatched_timestamp,
        )
