"""The dispatcher reads the log and writes consume queues and index (``ReputMessageService``).

The dispatcher reads many frames at once (a run), in the log's order. Then it writes the queue
entries and index keys of these frames, and calls the arrival listeners
(``MessageArrivingListener``). The dispatcher stops if a frame cannot be read, or if the frame's
entry would leave a gap in its queue. Instead of stopping, Java would skip the rest of its buffer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from logquarry.config import StoreConfig
from logquarry.disk.mapped_file import MappedFile
from logquarry.disk.mapped_file_queue import MappedFileQueue
from logquarry.disk.service import Flag, Health, Refusal, RunningFlags, Service
from logquarry.errors import CorruptFrame, StoreError, StoreUnavailable, UsageError
from logquarry.format import frame
from logquarry.format.arrays import BLANK, NEED_MORE, REACHED_STOP, TABLE_FULL, Int64
from logquarry.format.frame import DamageKind
from logquarry.log import codec
from logquarry.log.codec import Window
from logquarry.log.follow import DispatchRequests, Followed, Follower
from logquarry.read.log_queues import QueueKey
from logquarry.write import index_writer, queue_writer

logger = logging.getLogger(__name__)


class MessageArrival(NamedTuple):
    """New messages in a queue. ``next_offset`` is the queue offset after the last of these
    messages.

    ``store_timestamp`` is the store time of the last message, in milliseconds. ``tags_codes`` is
    None if the queue is a batch queue, or if a run has more than 1,024 messages of the queue.
    """

    topic: str
    queue_id: int
    next_offset: int
    messages: int
    store_timestamp: int
    tags_codes: frozenset[int] | None = None


Listener = Callable[[MessageArrival], None]


class ArrivalListeners:
    """The arrival listeners of one store. Any thread may add or remove listeners."""

    def __init__(self) -> None:
        # Each change replaces the tuple, so tell() can read it without a lock.
        self._listeners: tuple[Listener, ...] = ()
        self._change = threading.Lock()

    def add(self, listener: Listener) -> None:
        """Call a listener at each arrival. If a listener is added twice, it is still called only
        once per arrival.
        """
        with self._change:
            if listener not in self._listeners:
                self._listeners = (*self._listeners, listener)

    def remove(self, listener: Listener) -> None:
        """Stop calling a listener."""
        with self._change:
            self._listeners = tuple(other for other in self._listeners if other != listener)

    def tell(self, requests: DispatchRequests, groups: Groups) -> None:
        """Call each listener once for each queue that received messages in a run. The dispatcher
        calls this method.
        """
        if not self._listeners:
            return
        for (topic, queue_id), part in groups.items():
            counts = part.counts
            codes: frozenset[int] | None = None
            if counts is None and len(part.units) <= _MOST_CODES:
                codes = frozenset(part.units["tags_code"].tolist())
            arrival = MessageArrival(
                topic,
                queue_id,
                int(part.offsets[-1]) + (1 if counts is None else int(counts[-1])),
                len(part.offsets) if counts is None else int(counts.sum()),
                int(requests.store_timestamp[part.rows[-1]]),
                codes,
            )
            for listener in self._listeners:
                try:
                    listener(arrival)
                except (Exception, SystemExit):
                    logger.exception("a listener failed at %s", arrival)


Groups = Mapping[QueueKey, queue_writer.QueuePart]
WriterOf = Callable[[QueueKey], queue_writer.ConsumeQueueWriter | None]
PutKeys = Callable[[Int64, Int64, Int64, Int64], None]
Dispatched = Callable[[DispatchRequests, Groups], None]

_MOST_CODES: Final = 1_024
_MOST_BYTES: Final = 8 << 20
RUN_SPAN: Final = 2 * _MOST_BYTES
"""Maximum bytes of the frames that the dispatcher reads at once."""
_INTERVAL_MS: Final = 1_000
_PAUSES: Final = 0.001, 0.02
"""Minimum and maximum seconds of the pause between two runs. With a pause, each run has more
frames.
"""
_PAUSE_SHARE: Final = 4
"""Length of a pause, in multiples of the last run's time. In the pause, puts get processor time."""


def load_kernels() -> None:
    """Load the kernels for dispatching before the first put.

    If the kernels were loaded during puts, loading would take half a second, because the import and
    the puts would wait for each other.
    """
    if codec.kernels_enabled():
        window = Window.of(b"", 0, frame.BLANK.size)
        Follower(()).follow(window, 0)
        queue_writer.load_kernel()
        index_writer.load_kernel()


class Dispatcher:
    """Dispatches the log to queues and index. Not thread-safe.

    Args:
        writer_of: returns the writer of a queue; None to skip the queue.
        put_keys: puts the keys of messages into the index; None if the store has no index.
        start: physical offset at which dispatching starts. All messages before it must be in queues
            and index.
        dispatched: called with each run, after its queue entries and index keys are written.
        follow: called with each run, after its queue entries are written. Used for the state table
            of RocketMQ 3.1.
        place: called with the entries of each run, grouped by queue; returns the same entries,
            grouped by their right queues. A recovery uses it to move the entries of frames with a
            damaged queue id.

    Attributes:
        offset: physical offset up to which all messages are in queues and index.
        limit: physical offset at which dispatching stops; None if there is no limit. A slave raises
            the limit after it has checked the bytes that its master sent.
    """

    def __init__(
        self,
        files: MappedFileQueue,
        writer_of: WriterOf,
        put_keys: PutKeys | None,
        config: StoreConfig,
        *,
        start: int,
        dispatched: Dispatched = lambda *_: None,
        follow: Callable[[Window, Followed], None] | None = None,
        place: Callable[[Groups], Groups] = lambda parts: parts,
    ) -> None:
        self.offset = start
        self.limit: int | None = None
        self._files = files
        self._folder = str(files.folders[0])
        self._writer_of = writer_of
        self._put_keys = put_keys
        self._config = config
        self._dispatched = dispatched
        self._follow = follow
        self._place = place
        self._follower = Follower(config.delay_levels_ms, keys=config.index_keys)

    def dispatch_until(self, offset: int | None = None) -> int:
        """Dispatch the log up to an offset, or to its end, and return the dispatched offset.

        On a slave, the log can end inside a frame, because the master may send only a part of a
        frame. Such an incomplete frame is not dispatched.

        Raises:
            CorruptFrame: if a frame is damaged. All frames before the damage have been dispatched.
            CorruptFile: if a queue lacks entries before a new entry.
            StoreUnavailable: if a file cannot be created.
        """
        end = self._files.max_offset
        if self.limit is not None:
            end = min(end, self.limit)
        target = end if offset is None else min(offset, end)
        while self.offset < target:
            file = self._files.find(self.offset)
            if file is None and not self.offset:
                # The store is a slave that was empty, and its master's log starts above 0.
                self.offset = self._files.min_offset
                continue
            if file is None:
                raise CorruptFrame(self._folder, self.offset, "there is no file for it")
            if not self._dispatch_from(file):
                break
        return self.offset

    def dispatch_piece(self, start: int, stop: int) -> None:
        """Dispatch one range of the log. Raise StoreUnavailable if the range cannot be read."""
        self.offset = start
        reached = self.dispatch_until(stop)
        if reached < stop:
            raise StoreUnavailable(f"{self._folder}: the log cannot be read from {reached} on")

    def _dispatch_from(self, file: MappedFile, most: int | None = RUN_SPAN) -> bool:
        """Dispatch some frames, or advance to the next file. Return False if the next frame is
        incomplete.
        """
        position = self.offset - file.base
        data = file.select(position, most=most)
        is_part = data is not None and len(data) == most
        if data is not None and self.limit is not None:
            data = data[: self.limit - self.offset]
        if data is None:
            raise CorruptFrame(str(file.path), self.offset, "there is nothing to read")
        room = file.size - position
        if room < frame.BLANK.size:
            # RocketMQ always leaves room for a blank at the end of a file, but another program may
            # have written this file.
            self.offset = file.base + file.size
            return True
        window = Window.of(data, self.offset, room)
        stop = min(window.length, _MOST_BYTES)
        run, after, code = self._follower.follow(window, stop)
        file.require_pages()
        if run is not None:
            self._dispatch(window, run)
            self.offset += after
        elif code == BLANK:
            self.offset = file.base + file.size
        elif code == NEED_MORE:
            return is_part and self._dispatch_from(file, None)
        else:
            assert code not in (REACHED_STOP, TABLE_FULL)
            reason = codec.damage_reason(window, 0, check_crc=False)
            kind = DamageKind(code).label
            raise CorruptFrame(str(file.path), self.offset, reason, kind=kind)
        return True

    def _dispatch(self, window: Window, run: Followed) -> None:
        requests = run.requests
        parts = self._place(queue_writer.parts_with_copies(window, run, self._config))
        for key, part in parts.items():
            writer = self._writer_of(key)
            if writer is not None:
                new = writer.append(part.offsets, part.units)
                if new < len(part.units):
                    logger.debug("%s: had %d entries", writer.name, len(part.units) - new)
        if self._follow is not None:
            self._follow(window, run)
        if self._put_keys is not None:
            self._put_keys(
                requests.physical_offset,
                requests.store_timestamp,
                run.key_hashes,
                run.key_numbers,
            )
        self._dispatched(requests, parts)


class DispatchService(Service):
    """Dispatches in the background whenever the log has grown.

    If dispatching fails, the service sets LOGICS_QUEUE_ERROR. Then the store refuses puts, because
    consumers would never get the messages. If the reason is an error of the disk, for example a
    full disk, the service tries again later.
    """

    def __init__(self, dispatcher: Dispatcher, flags: RunningFlags, health: Health) -> None:
        super().__init__("dispatch", health, interval_ms=_INTERVAL_MS)
        self._dispatcher = dispatcher
        self._flags = flags
        # Each waiting thread has its own flag. A Condition is not used, because it is written in
        # Python, and Ctrl-C inside its methods could leave its lock taken.
        self._waiting: list[Flag] = []
        self._hurry = Flag()
        self._failure: StoreError | None = None
        self._is_over = False

    @property
    def failure(self) -> StoreError | None:
        """The error that stopped the dispatching; None if there is no error."""
        return self._failure

    def run_once(self) -> None:
        """Dispatch up to the log's end."""
        if self._failure is not None and not isinstance(self._failure, StoreUnavailable):
            return
        began, start = time.monotonic(), self._dispatcher.offset
        try:
            self._dispatcher.dispatch_until()
        except StoreError as error:
            if self._failure is None:
                logger.error("dispatching stopped at %d: %s", self._dispatcher.offset, error)
            cause = f"the message at physical offset {self._dispatcher.offset}: {error}"
            self._flags.set(Refusal.LOGICS_QUEUE_ERROR, cause)
            self._failure = error
        else:
            if self._failure is not None:
                logger.warning("dispatching continues at %d", self._dispatcher.offset)
                self._failure = None
                self._flags.clear(Refusal.LOGICS_QUEUE_ERROR)
        self._tell_waiting()
        if not self.is_stopping and self._dispatcher.offset - start < _MOST_BYTES:
            # Pause before the next run. The pause of RocketMQ is always 1 ms.
            least, most = _PAUSES
            self._hurry.take(min(most, max(least, _PAUSE_SHARE * (time.monotonic() - began))))

    def run_last(self) -> None:
        """Dispatch the messages that were put since the last run."""
        self.run_once()

    def stop(self, timeout_s: float = 10.0) -> bool:
        """See :meth:`Service.stop`."""
        self._hurry.set()
        return super().stop(timeout_s)

    def ended(self) -> None:
        """Wake the waiting threads."""
        self._is_over = True
        self._tell_waiting()

    def _tell_waiting(self) -> None:
        for flag in list(self._waiting):
            flag.set()

    def wait_dispatched(self, offset: int, timeout_s: float | None = None) -> bool:
        """Wait until the log is dispatched up to an offset; return False after the timeout.

        Raises:
            StoreError: the error that stopped the dispatching.
            UsageError: if a listener calls this method in the dispatcher's thread.
        """
        if self._dispatcher.offset >= offset:
            return True
        if self.is_current:
            raise UsageError("a listener cannot wait for the dispatcher that calls it")
        end = None if timeout_s is None else time.monotonic() + timeout_s
        moved = Flag()
        self._waiting.append(moved)
        try:
            self.wakeup()
            self._hurry.set()
            # Reset the flag before reading the offset. If the offset advances after this read, the
            # flag is set again, and the wait ends at once.
            while self._dispatcher.offset < offset and not self._failure and not self._is_over:
                if not moved.take(None if end is None else max(0.0, end - time.monotonic())):
                    break
        finally:
            self._waiting.remove(moved)
        if self._dispatcher.offset >= offset:
            return True
        if self._failure is not None:
            raise self._failure
        return False
