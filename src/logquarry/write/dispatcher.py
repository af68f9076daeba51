"""The dispatcher: follows the log and writes consume queues and index (``ReputMessageService``).

:mod:`logquarry.log.follow` decodes many frames at once (a run). The dispatcher writes the queues
before the index, as RocketMQ does, and then calls the arrival listeners
(``MessageArrivingListener``).

Guarantees: frames are dispatched in the log's order. The dispatched offset advances only after
queues and index have the entries of all messages before it. If a frame cannot be read, or would
leave a gap in its queue, the dispatcher stops there and skips no frame. (Java skips the rest of its
buffer.)
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Final, NamedTuple

from logquarry.config import StoreConfig
from logquarry.disk.mapped_file import MappedFile
from logquarry.disk.mapped_file_queue import MappedFileQueue
from logquarry.disk.service import Flag, Health, Refusal, RunningFlags, Service
from logquarry.errors import CorruptFrame, StoreError, StoreUnavailable, UsageError
from logquarry.format import frame
from logquarry.format.arrays import Int64
from logquarry.format.frame import DamageKind
from logquarry.format.rows import BLANK, NEED_MORE, REACHED_STOP, TABLE_FULL
from logquarry.log import codec
from logquarry.log.codec import Window
from logquarry.log.follow import DispatchRequests, Followed, Follower
from logquarry.log.store_files import BATCH_QUEUE, CONSUME_QUEUE
from logquarry.read.log_queues import QueueKey
from logquarry.write import index_writer, queue_writer
from logquarry.write.message_rules import LONGEST_NAME, name_fault
from logquarry.write.queue_writer import (
    BatchQueueWriter,
    ConsumeQueueMender,
    ConsumeQueueWriter,
    Mending,
    QueuePart,
    parts_with_copies,
)

logger = logging.getLogger(__name__)


class MessageArrival(NamedTuple):
    """New messages of a queue.

    Attributes:
        topic: the queue's topic.
        queue_id: the queue's id.
        next_offset: one past the queue offset of the last message.
        messages: the number of messages.
        store_timestamp: store time of the last message, in milliseconds.
        tags_codes: the different tags codes of the messages; None if they are unknown, as in a
            batch queue or in an arrival of more than 1,024 messages.
    """

    topic: str
    queue_id: int
    next_offset: int
    messages: int
    store_timestamp: int
    tags_codes: frozenset[int] | None = None


Listener = Callable[[MessageArrival], None]


class ArrivalListeners:
    """The arrival listeners of one store.

    Any thread may add or remove them; the dispatcher calls them.
    """

    def __init__(self) -> None:
        # The tuple is replaced, never changed, so that calling the listeners takes no lock.
        self._listeners: tuple[Listener, ...] = ()
        self._change = threading.Lock()

    def add(self, listener: Listener) -> None:
        """Call a listener from now on; a listener that is added twice is called once."""
        with self._change:
            if listener not in self._listeners:
                self._listeners = (*self._listeners, listener)

    def remove(self, listener: Listener) -> None:
        """Stop calling a listener."""
        with self._change:
            self._listeners = tuple(other for other in self._listeners if other != listener)

    def tell(self, requests: DispatchRequests, groups: Groups) -> None:
        """Call the listeners once for each queue of a dispatched run."""
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
                    # A failing listener must not end the dispatching.
                    logger.exception("a listener failed at %s", arrival)


# --------------------------------------------------------------------------------------------------
# The consume queues that the dispatcher writes to, and the dispatcher.

Groups = Mapping[QueueKey, QueuePart]
"""Maps each queue of a run to its entries."""
WriterOf = Callable[[QueueKey], ConsumeQueueWriter | None]
PutKeys = Callable[[Int64, Int64, Int64, Int64], None]
Arrived = Callable[[DispatchRequests], None]
Grown = Callable[[DispatchRequests, Groups], None]

_MOST_CODES: Final = 1_024
_MOST_BYTES: Final = 8 << 20
RUN_SPAN: Final = 2 * _MOST_BYTES
"""Maximum bytes of a run. The dispatcher writes the entries of a run queue by queue."""
_INTERVAL_MS: Final = 1_000
_ANY_SAFE_NAME: Final = "store"
_PAUSES: Final = 0.001, 0.02
"""Minimum and maximum seconds between two runs, because a run costs as much for one frame as for
many.
"""
_PAUSE_SHARE: Final = 4
"""A pause is this many times as long as the run before it, so that puts get processor time."""


def queue_name_fault(topic: str) -> str | None:
    """The reason why a topic is not permitted as a folder name; None if it is permitted."""
    return name_fault(topic, _ANY_SAFE_NAME, longest=LONGEST_NAME)


class QueueWriters:
    """The writers of the consume queues, opened with the first message of each queue.

    Any thread may get one; only the dispatcher writes.

    Args:
        mendings: see :class:`~logquarry.write.queue_table.QueueTable`.
    """

    def __init__(
        self,
        open_files: Callable[[str, int], MappedFileQueue],
        mendings: Mapping[QueueKey, Mending] | None = None,
        batch_topics: Collection[str] = (),
    ) -> None:
        self._batch_topics = batch_topics
        self._open_files = open_files
        self._mendings = mendings or {}
        self._opening = threading.Lock()
        self._writers: dict[QueueKey, ConsumeQueueWriter | None] = {}

    def __iter__(self) -> Iterator[ConsumeQueueWriter]:
        return iter([writer for writer in list(self._writers.values()) if writer is not None])

    def get(self, key: QueueKey) -> ConsumeQueueWriter | None:
        """The writer of a queue; None if the topic is not a permitted folder name.

        Puts check the topic, but a log that another program wrote can have any topic.
        """
        try:
            return self._writers[key]
        except KeyError:
            with self._opening:
                if key not in self._writers:
                    self._writers[key] = self._opened(*key)
                return self._writers[key]

    @property
    def known(self) -> list[QueueKey]:
        """The queues that :meth:`get` was called with."""
        return list(self._writers)

    def __contains__(self, key: object) -> bool:
        return key in self._writers

    def _opened(self, topic: str, queue_id: int) -> ConsumeQueueWriter | None:
        fault = queue_name_fault(topic)
        if fault is not None:
            logger.error("topic %r gets no consume queue: %s", topic, fault)
            return None
        files = self._open_files(topic, queue_id)
        mending = self._mendings.get((topic, queue_id))
        if topic in self._batch_topics:
            return BatchQueueWriter(files, f"{BATCH_QUEUE}/{topic}/{queue_id}", mending)
        name = f"{CONSUME_QUEUE}/{topic}/{queue_id}"
        if mending is not None:
            return ConsumeQueueMender(files, name, mending)
        return ConsumeQueueWriter(files, name)


def load_kernels() -> None:
    """Load the kernels that dispatch, from numba's cache.

    If the first run loaded them, other threads would be putting at the same time, and the loading
    would take half a second: each import waits for the GIL, and the puts wait for the imports.
    """
    if codec.kernels_enabled():
        window = Window.of(b"", 0, frame.BLANK.size)
        Follower(()).follow(window, 0)
        queue_writer.load_kernel()
        index_writer.load_kernel()


class Dispatcher:
    """Dispatches the log to queues and index. Not thread-safe.

    Args:
        writer_of: gives the writer of a queue; None to skip the queue.
        put_keys: takes the keys, as :meth:`IndexWriter.put
            <logquarry.write.index_writer.IndexWriter.put>`; None if the store keeps no index.
        start: physical offset of the first message that may be new to queues or index.
        arrived: called with each run of frames, after queues and index.
        grown: called after ``arrived``, with the run and the queues of its frames.
        follow: called with each run between queues and index (for the state table of 3.1).

    Attributes:
        offset: all frames before this physical offset are dispatched.
        limit: physical offset; a frame that ends after it is not dispatched. None if there is no
            limit. A slave uses the limit to check its master's bytes before they are dispatched.
    """

    def __init__(
        self,
        files: MappedFileQueue,
        writer_of: WriterOf,
        put_keys: PutKeys | None,
        config: StoreConfig,
        *,
        start: int,
        arrived: Arrived = lambda _: None,
        grown: Grown = lambda *_: None,
        follow: Callable[[Window, Followed], None] | None = None,
    ) -> None:
        self.offset = start
        self.limit: int | None = None
        self._files = files
        self._folder = str(files.folders[0])
        self._writer_of = writer_of
        self._put_keys = put_keys
        self._config = config
        self._arrived = arrived
        self._grown = grown
        self._follow = follow
        self._follower = Follower(config.delay_levels_ms, keys=config.index_keys)

    def dispatch_until(self, offset: int | None = None) -> int:
        """Dispatch the log up to an offset, or to its end, and return the dispatched offset.

        If the log ends inside a frame, that frame is not dispatched yet. Only bytes from a master
        can end so.

        Raises:
            CorruptFrame: if there is damage; all frames before it are dispatched.
            CorruptFile: if entries before a new entry are missing in a queue.
            StoreUnavailable: if a file cannot be made.
        """
        end = self._files.max_offset
        if self.limit is not None:
            end = min(end, self.limit)
        target = end if offset is None else min(offset, end)
        while self.offset < target:
            file = self._files.find(self.offset)
            if file is None and not self.offset:
                # The store is a slave and was empty; the log of its master starts above 0.
                self.offset = self._files.min_offset
                continue
            if file is None:
                raise CorruptFrame(self._folder, self.offset, "there is no file for it")
            if not self._dispatch_from(file):
                break
        return self.offset

    def dispatch_piece(self, start: int, stop: int) -> None:
        """Dispatch one range of the log, which need not begin at :attr:`offset`.

        Raises:
            StoreUnavailable: if the range cannot be read to its end, or a file cannot be made.
        """
        self.offset = start
        reached = self.dispatch_until(stop)
        if reached < stop:
            raise StoreUnavailable(f"{self._folder}: the log cannot be read from {reached} on")

    def _dispatch_from(self, file: MappedFile, most: int | None = RUN_SPAN) -> bool:
        """Dispatch frames of a file, or move to the next file; return False if both fail."""
        position = self.offset - file.base
        data = file.select(position, most=most)
        is_part = data is not None and len(data) == most
        if data is not None and self.limit is not None:
            data = data[: self.limit - self.offset]
        if data is None:
            raise CorruptFrame(str(file.path), self.offset, "there is nothing to read")
        room = file.size - position
        if room < frame.BLANK.size:
            # Too few bytes are left for a blank. RocketMQ never leaves so few bytes; other programs
            # may.
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
        parts = parts_with_copies(window, run, self._config)
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
        self._arrived(requests)
        self._grown(requests, parts)


class DispatchService(Service):
    """Dispatches in the background whenever the log has grown.

    If dispatching fails, the store accepts no more messages, because readers would never get them.
    After a disk error (for example a full disk) the service tries again, and continues if the disk
    works.

    Args:
        flags: gets LOGICS_QUEUE_ERROR on a failure.
    """

    def __init__(self, dispatcher: Dispatcher, flags: RunningFlags, health: Health) -> None:
        super().__init__("dispatch", health, interval_ms=_INTERVAL_MS)
        self._dispatcher = dispatcher
        self._flags = flags
        # Each waiting thread has a flag. Do not use a Condition: it is written in Python, and
        # Ctrl-C inside it could leave its lock taken.
        self._waiting: list[Flag] = []
        self._hurry = Flag()
        self._failure: StoreError | None = None
        self._is_over = False

    @property
    def failure(self) -> StoreError | None:
        """The error that stopped the dispatching, None if there is none."""
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
            self._flags.set(Refusal.LOGICS_QUEUE_ERROR)
            self._failure = error
        else:
            if self._failure is not None:
                logger.warning("dispatching continues at %d", self._dispatcher.offset)
                self._failure = None
                self._flags.clear(Refusal.LOGICS_QUEUE_ERROR)
        self._tell_waiting()
        if not self.is_stopping and self._dispatcher.offset - start < _MOST_BYTES:
            # RocketMQ pauses for 1 ms.
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
        """Wake the threads that wait."""
        self._is_over = True
        self._tell_waiting()

    def _tell_waiting(self) -> None:
        for flag in list(self._waiting):
            flag.set()

    def wait_dispatched(self, offset: int, timeout_s: float | None = None) -> bool:
        """Wait until the log is dispatched up to an offset.

        Returns:
            Whether the log is dispatched up to there. False after the timeout, or if the service
            ended.

        Raises:
            StoreError: the error that stopped the dispatching.
            UsageError: if a listener calls this method, in the thread that dispatches.
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
            # Reset the flag first, then read the offset: if the offset advances later, the flag is
            # set again.
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
