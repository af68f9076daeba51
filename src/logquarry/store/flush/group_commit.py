"""Synchronous flushing: many puts wait for one fdatasync (``CommitLog.GroupCommitService``).

While one sync runs, those who come wait for the next one, which then covers all of them. A
request is a future; its owner waits for it, or hangs a callback to it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

from logquarry.errors import StoreUnavailable
from logquarry.store.disk.checkpoint_file import CheckpointFile
from logquarry.store.disk.health import Health
from logquarry.store.disk.service import Clock, Service, monotonic_ms
from logquarry.store.flush.waiting import Answer, DeadlineWatch, Request, Settled, Waiter, nothing
from logquarry.store.mapped.mapped_file_queue import MappedFileQueue

logger = logging.getLogger(__name__)

SYNC_FLUSH_TIMEOUT_MS: Final = 5_000
_IDLE_FLUSH_MS: Final = 500


class GroupCommitService(Service):
    """Syncs the log for those who wait.

    Args:
        queue: the log's files.
        health: of the store.
        checkpoint: gets the store time up to which the log is on the disk.
        timeout_ms: how long a request waits (``syncFlushTimeout``).
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
        # The interval is for messages that nobody waits for, WAIT=false; mostly they are woken for.
        super().__init__("group commit", health, interval_ms=_IDLE_FLUSH_MS)
        self._queue = queue
        self._checkpoint = checkpoint
        self._timeout_ms = timeout_ms
        self._clock = clock
        self._change = threading.Lock()
        self._waiting: list[Waiter] = []
        # Those whom the sync that is going on covers; only timeouts look at them besides it.
        self._covered: list[Waiter] = []
        self._has_ended = False
        self._watch = DeadlineWatch("flush watch", self.expire, health, timeout_ms)

    def start(self) -> None:
        """Begin."""
        self._watch.start()
        super().start()

    def stop(self, timeout_s: float = 10.0) -> bool:
        """Sync what was asked for, and end. Requests after that fail."""
        ended = super().stop(timeout_s)
        self._watch.stop(timeout_s)
        return ended

    def request(self, offset: int) -> Future[bool]:
        """A future that is done when the log is on the disk up to an offset.

        Its result is True then; False if that took longer than the timeout (put status
        FLUSH_DISK_TIMEOUT; the message is in the log, and on the disk sooner or later). It raises
        StoreUnavailable if the sync failed: nobody knows whether the message is on the disk, and
        the store takes no more.
        """
        future: Future[bool] = Future()
        self.resolve_later(offset, future, bool)
        return future

    def wait(self, offset: int) -> bool:
        """Wait for what :meth:`request` gives a future of."""
        answer = Answer()
        self.add(Request(offset, answer, bool, nothing))
        return answer.result()

    def resolve_later(
        self,
        offset: int,
        future: Settled,
        result_of: Callable[[bool], Any],
        failed: Callable[[], None] = nothing,
    ) -> None:
        """The same with a future of the caller's.

        Args:
            offset: up to where the log is to be on the disk.
            future: is resolved then.
            result_of: makes its result of that of :meth:`request`.
            failed: told if it raises.
        """
        self.add(Request(offset, future, result_of, failed))

    def add(self, request: Waiter) -> None:
        """Tell somebody when the log is on the disk up to where they wait for, or cannot be."""
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
        """Sync the log, and tell those who waited when it began."""
        with self._change:
            self._covered, self._waiting = self._waiting, []
            covered = self._covered
        # Also without requests: there may be messages whose owners do not wait.
        flushed = self._queue.flush(0)
        if self._checkpoint is not None and self._queue.store_timestamp > 0:
            self._checkpoint.physic_timestamp = self._queue.store_timestamp
        for request in covered:
            request.resolve(flushed >= request.offset)
        with self._change:
            self._covered = []

    def run_last(self) -> None:
        """Sync what is left."""
        self.run_once()

    def ended(self) -> None:
        """Whoever waits still is told that nothing more will come."""
        with self._change:
            self._has_ended = True
            left = self._covered + self._waiting
            self._covered, self._waiting = [], []
        for request in left:
            self._end(request)

    def _end(self, request: Waiter) -> None:
        """Tell somebody for whom no sync will come: another one may have covered it."""
        if self._queue.flushed_offset >= request.offset:
            request.resolve(True)
        else:
            request.fail(self._end_error())

    def _end_error(self) -> StoreUnavailable:
        if self.health.reason is not None:
            return self.health.error()
        return StoreUnavailable("the store was closed before the message was on the disk")

    def expire(self) -> int | None:
        """Tell those whose time is over; milliseconds until the next one's is, None for none."""
        now = self._clock()
        with self._change:
            # Both in the order in which they came, and so in that of their deadlines.
            pending = self._covered + self._waiting
        late = [request for request in pending if request.deadline <= now]
        for request in late:
            request.resolve(False)
        open_ones = (r.deadline for r in pending if r.deadline > now and r.is_open)
        first = next(open_ones, None)
        return None if first is None else first - now
