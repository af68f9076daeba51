"""What brings the store to the disk without anybody waiting: the timed flushes and commits.

========================== ========== ============ ==================
service                    interval   least pages  all of it at least
========================== ========== ============ ==================
FlushRealTimeService       500 ms     4            every 10 s
CommitRealTimeService      200 ms     4            every 200 ms
FlushConsumeQueueService   1 s        2            every 60 s
========================== ========== ============ ==================

RocketMQ's defaults. A failed sync poisons the store and ends the service; RocketMQ logs it and
goes on as if it had worked.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from logquarry.errors import StoreUnavailable
from logquarry.store.disk.checkpoint_file import CheckpointFile
from logquarry.store.disk.health import Health
from logquarry.store.disk.service import Clock, Service, monotonic_ms
from logquarry.store.mapped.mapped_file_queue import MappedFileQueue

logger = logging.getLogger(__name__)

SLOW_FLUSH_MS: Final = 500


class Flushable(Protocol):
    """A queue's files, or an index file."""

    def flush(self, least_pages: int) -> object:
        """Wait until it is on the disk, if that many pages are due; all of it with 0."""


class _Thorough:
    """Tells when all is due, however little it is."""

    def __init__(self, interval_ms: int, least_pages: int, clock: Clock) -> None:
        self._interval_ms = interval_ms
        self._least_pages = least_pages
        self._clock = clock
        # As in Java, where it is 0: the first run is a thorough one.
        self._last: int | None = None

    def pages(self) -> int:
        """The least pages of the run that begins now."""
        now = self._clock()
        if self._last is None or now >= self._last + self._interval_ms:
            self._last = now
            return 0
        return self._least_pages


class FlushRealTimeService(Service):
    """Flushes the log now and then (``ASYNC_FLUSH``).

    Args:
        queue: the log's files.
        health: of the store.
        checkpoint: gets the store time up to which the log is on the disk, after thorough flushes.
        is_timed: keep to the interval (``flushCommitLogTimed``), also when woken.
    """

    def __init__(
        self,
        queue: MappedFileQueue,
        health: Health,
        *,
        checkpoint: CheckpointFile | None = None,
        interval_ms: int = 500,
        least_pages: int = 4,
        thorough_interval_ms: int = 10_000,
        is_timed: bool = True,
        clock: Clock = monotonic_ms,
    ) -> None:
        super().__init__("flush", health, interval_ms=interval_ms, is_timed=is_timed)
        self._queue = queue
        self._checkpoint = checkpoint
        self._clock = clock
        self._thorough = _Thorough(thorough_interval_ms, least_pages, clock)

    def run_once(self) -> None:
        """Flush what is due."""
        self._flush(self._thorough.pages())

    def run_last(self) -> None:
        """Flush everything."""
        self._flush(0)

    def _flush(self, least_pages: int) -> None:
        started = self._clock()
        self._queue.flush(least_pages)
        if self._checkpoint is not None and self._queue.store_timestamp > 0:
            self._checkpoint.physic_timestamp = self._queue.store_timestamp
        if (spent := self._clock() - started) > SLOW_FLUSH_MS:
            logger.warning("flushing the log took %d ms", spent)


class CommitRealTimeService(Service):
    """Moves what is in the transient store pool to the log's files.

    Args:
        queue: the log's files.
        health: of the store.
        committed: told when something was.
    """

    def __init__(
        self,
        queue: MappedFileQueue,
        health: Health,
        *,
        committed: Callable[[], None] = lambda: None,
        interval_ms: int = 200,
        least_pages: int = 4,
        thorough_interval_ms: int = 200,
        clock: Clock = monotonic_ms,
    ) -> None:
        super().__init__("commit", health, interval_ms=interval_ms)
        self._queue = queue
        self._committed = committed
        self._thorough = _Thorough(thorough_interval_ms, least_pages, clock)

    def run_once(self) -> None:
        """Commit what is due."""
        self._commit(self._thorough.pages())

    def run_last(self) -> None:
        """Commit everything. To be stopped before the flusher is, which then flushes it."""
        self._commit(0)

    def _commit(self, least_pages: int) -> None:
        before = self._queue.committed_offset
        if self._queue.commit(least_pages) != before:
            self._committed()


class FlushConsumeQueueService(Service):
    """Flushes the consume queues, and then writes the checkpoint.

    A thorough run syncs the log first, then the queues and what else is derived from it, and only
    then sets and writes the checkpoint: it never says more than what is on the disk. (In RocketMQ
    its time of the queues is what was dispatched, not what was flushed.)

    Args:
        queues: gives what is to be flushed: the queues, and the index where it is to be.
        health: of the store.
        log: the log's files.
        checkpoint: gets the times; written after each thorough run.
        dispatched_timestamp: gives the store time of the last message whose units are written.
    """

    def __init__(
        self,
        queues: Callable[[], Iterable[Flushable]],
        health: Health,
        *,
        log: MappedFileQueue | None = None,
        checkpoint: CheckpointFile | None = None,
        dispatched_timestamp: Callable[[], int] = int,
        interval_ms: int = 1_000,
        least_pages: int = 2,
        thorough_interval_ms: int = 60_000,
        clock: Clock = monotonic_ms,
    ) -> None:
        super().__init__("flush queues", health, interval_ms=interval_ms)
        self._queues = queues
        self._log = log
        self._checkpoint = checkpoint
        self._dispatched_timestamp = dispatched_timestamp
        self._flushing = threading.Lock()
        self._is_over = False
        self._thorough = _Thorough(thorough_interval_ms, least_pages, clock)

    def run_once(self) -> None:
        """Flush what is due."""
        self.flush(self._thorough.pages())

    def run_last(self) -> None:
        """Flush everything, and write the checkpoint."""
        self.flush(0)

    def flush(self, least_pages: int = 0) -> None:
        """Flush the queues that have so many pages due; with 0 all, and the checkpoint.

        Any thread may: users ask for it too. One flush comes after the other, for each index file
        that is full is to be synced and let go of once.

        Raises:
            StoreUnavailable: if a sync failed, now or before, or the files are closed.
        """
        with self._flushing:
            if self._is_over:
                raise StoreUnavailable("the store was closed")
            self._flush(least_pages)

    def close(self) -> None:
        """Flush no more: the files are about to be closed."""
        with self._flushing:
            self._is_over = True

    def _flush(self, least_pages: int) -> None:
        # Before the flush: what is dispatched while it runs is not covered by it.
        timestamp = self._dispatched_timestamp()
        if least_pages == 0 and self._log is not None:
            self._log.flush(0)
        for queue in self._queues():
            queue.flush(least_pages)
        if least_pages != 0 or self._checkpoint is None:
            return
        if self._log is not None and self._log.store_timestamp > 0:
            self._checkpoint.physic_timestamp = self._log.store_timestamp
        if timestamp > 0:
            self._checkpoint.logics_timestamp = timestamp
        self._checkpoint.flush()
