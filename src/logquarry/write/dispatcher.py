"""Who is told when messages can be had from their queues (``MessageArrivingListener``)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from logquarry.config import StoreConfig
from logquarry.disk.mapped_file import MappedFile
from logquarry.disk.mapped_file_queue import MappedFileQueue
from logquarry.disk.service import Flag, Health, Refusal, RunningFlags, Service
from logquarry.errors import CorruptFrame, StoreError, StoreUnavailable, UsageError
from logquarry.format import frame
from logquarry.format.frame import DamageKind
from logquarry.format.rows import BLANK, NEED_MORE, REACHED_STOP, TABLE_FULL
from logquarry.log import codec
from logquarry.log.codec import Window
from logquarry.log.follow import DispatchRequests, Followed, Follower
from logquarry.log.layout import COMMIT_LOG, CONSUME_QUEUE
from logquarry.read.log_queues import QueueKey
from logquarry.write.encode import LONGEST_NAME, name_fault
from logquarry.write.queue_writer import (
    ConsumeQueueMender,
    ConsumeQueueWriter,
    Mending,
    parts_with_copies,
)

if TYPE_CHECKING:
    from logquarry.log.follow import DispatchRequests


logger = logging.getLogger(__name__)


class MessageArrival(NamedTuple):
    """Messages that came to a queue.

    Attributes:
        topic: the queue's topic.
        queue_id: its number.
        next_offset: one past the queue offset of the last of them.
        messages: how many.
        store_timestamp: of the last one, in milliseconds.
    """

    topic: str
    queue_id: int
    next_offset: int
    messages: int
    store_timestamp: int


Listener = Callable[[MessageArrival], None]


class ArrivalListeners:
    """The listeners of one store. Any thread may add and remove; the dispatcher tells."""

    def __init__(self) -> None:
        # Replaced, never changed, so that telling takes no lock; replacing does, or one is lost.
        self._listeners: tuple[Listener, ...] = ()
        self._change = threading.Lock()

    def add(self, listener: Listener) -> None:
        """Tell a listener from now on; one that is there already is told once."""
        with self._change:
            if listener not in self._listeners:
                self._listeners = (*self._listeners, listener)

    def remove(self, listener: Listener) -> None:
        """Tell it no more."""
        with self._change:
            self._listeners = tuple(other for other in self._listeners if other != listener)

    def tell(self, requests: DispatchRequests, groups: Groups) -> None:
        """Tell of what was dispatched: of each queue once."""
        if not self._listeners:
            return
        for (topic, queue_id), (rows, offsets) in groups.items():
            arrival = MessageArrival(
                topic,
                queue_id,
                int(offsets[-1]) + 1,
                len(offsets),
                int(requests.store_timestamp[rows[-1]]),
            )
            for listener in self._listeners:
                try:
                    listener(arrival)
                except (Exception, SystemExit):
                    # The dispatcher is everybody's: what ends a listener ends only that.
                    logger.exception("a listener failed at %s", arrival)


# --------------------------------------------------------------------------------------------------
# Follows the log and tells its consume queues and its index (``ReputMessageService``).
#
# What a frame means for them is told by the scan kernels, for many frames at once
# (:mod:`logquarry.log.follow`). Queues come before the index, as in RocketMQ.
#
# Guarantees: each frame is dispatched in the log's order. The dispatched offset moves only after
# queues and index have what stands before it. A frame that cannot be read, or that leaves a gap in
# its queue, ends the dispatching: nothing is skipped over. (Java skips the rest of its buffer.)

Int64 = npt.NDArray[np.int64]
Groups = Mapping[QueueKey, tuple[Int64, Int64]]
"""Of each queue that a run comes to: the rows of its frames, and their queue offsets."""
Arrived = Callable[[DispatchRequests], None]
Grown = Callable[[DispatchRequests, Groups], None]

_MOST_BYTES: Final = 8 << 20
_INTERVAL_MS: Final = 1_000
_ANY_SAFE_NAME: Final = "store"
_PAUSES: Final = 0.001, 0.02
"""Seconds between two runs while puts come one by one: a run costs much, and each frame little."""
_PAUSE_SHARE: Final = 4
"""How much longer than the run before it a pause is: writers want the processor too."""


def queue_name_fault(topic: str) -> str | None:
    """Why a topic must not name the folder of a queue, None if it may."""
    return name_fault(topic, _ANY_SAFE_NAME, longest=LONGEST_NAME)


class QueueWriters:
    """The consume queues that are written, made when a message for them comes.

    Any thread may ask for one; only the dispatcher writes.

    Args:
        open_files: gives the files of a queue, which end with its last unit.
        mendings: see :class:`~logquarry.write.queue_table.QueueTable`.
    """

    def __init__(
        self,
        open_files: Callable[[str, int], MappedFileQueue],
        mendings: Mapping[QueueKey, Mending] | None = None,
    ) -> None:
        self._open_files = open_files
        self._mendings = mendings or {}
        self._opening = threading.Lock()
        self._writers: dict[QueueKey, ConsumeQueueWriter | None] = {}

    def __iter__(self) -> Iterator[ConsumeQueueWriter]:
        return iter([writer for writer in list(self._writers.values()) if writer is not None])

    def get(self, key: QueueKey) -> ConsumeQueueWriter | None:
        """The writer of a queue; None for a topic that must not name a folder.

        Ours are checked when they are put. Those of a log that somebody else wrote may be any.
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
        """The queues that were asked for."""
        return list(self._writers)

    def __contains__(self, key: object) -> bool:
        return key in self._writers

    def _opened(self, topic: str, queue_id: int) -> ConsumeQueueWriter | None:
        fault = queue_name_fault(topic)
        if fault is not None:
            logger.error("topic %r gets no consume queue: %s", topic, fault)
            return None
        name = f"{CONSUME_QUEUE}/{topic}/{queue_id}"
        files = self._open_files(topic, queue_id)
        mending = self._mendings.get((topic, queue_id))
        if mending is not None:
            return ConsumeQueueMender(files, name, mending)
        return ConsumeQueueWriter(files, name)


class Writers(Protocol):
    """What gives the queues that a dispatcher is to tell."""

    def get(self, key: QueueKey) -> ConsumeQueueWriter | None:
        """The writer of a queue; None to pass it over."""


class KeyWriter(Protocol):
    """What takes the keys of messages."""

    def put(self, offsets: Int64, times: Int64, hashes: Int64, numbers: Int64) -> None:
        """See :meth:`logquarry.write.index_writer.IndexWriter.put`."""


class Lacking:
    """Some of the queues of others."""

    def __init__(self, writers: Writers, keys: Collection[QueueKey]) -> None:
        self._writers = writers
        self._keys = keys

    def get(self, key: QueueKey) -> ConsumeQueueWriter | None:
        """The writer of one of them."""
        return self._writers.get(key) if key in self._keys else None


class Dispatcher:
    """Dispatches what is in the log. One thread does.

    Args:
        files: the log's files.
        queues: the queues to tell.
        index: the index to tell, None if the store keeps none.
        config: the store's settings.
        start: physical offset of the first message that may be new to them.
        arrived: told of each run of frames, after queues and index.
        grown: likewise, with the queues that they went to.
        follow: told of each run behind the queues, before the index: what else follows the log.

    Attributes:
        offset: what stands before it in the log is dispatched.
        limit: no frame that ends behind it is dispatched; None where all are good. For bytes of a
            master that are to be checked first.
    """

    def __init__(
        self,
        files: MappedFileQueue,
        queues: Writers,
        index: KeyWriter | None,
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
        self._queues = queues
        self._index = index
        self._config = config
        self._arrived = arrived
        self._grown = grown
        self._follow = follow
        self._follower = Follower(config.delay_levels_ms, keys=config.index_keys)

    def dispatch_until(self, offset: int | None = None) -> int:
        """Dispatch what is in the log before an offset, or all of it; how far that came.

        Where the log ends within a frame (a master's bytes come as they come), that one waits.

        Raises:
            CorruptFrame: if no frame stands where one should; what is before it is dispatched.
            CorruptFile: if a queue lacks the unit before one of these.
            StoreUnavailable: if a file cannot be made.
        """
        end = self._files.max_offset
        if self.limit is not None:
            end = min(end, self.limit)
        target = end if offset is None else min(offset, end)
        while self.offset < target:
            file = self._files.find(self.offset)
            if file is None and not self.offset:
                # A slave that had nothing, and began with a later file of its master's.
                self.offset = self._files.min_offset
                continue
            if file is None:
                raise CorruptFrame(COMMIT_LOG, self.offset, "there is no file for it")
            if not self._dispatch_from(file):
                break
        return self.offset

    def dispatch_piece(self, start: int, stop: int) -> None:
        """Dispatch all of a stretch of the log, wherever the last one ended.

        Raises:
            StoreUnavailable: if it cannot be read to its end, or a file cannot be made.
        """
        self.offset = start
        reached = self.dispatch_until(stop)
        if reached < stop:
            raise StoreUnavailable(f"{COMMIT_LOG}: the log cannot be read from {reached} on")

    def _dispatch_from(self, file: MappedFile) -> bool:
        """Dispatch the next frames of a file, or go on to the next file; whether one could."""
        position = self.offset - file.base
        data = file.select(position)
        if data is not None and self.limit is not None:
            data = data[: self.limit - self.offset]
        if data is None:
            raise CorruptFrame(str(file.path), self.offset, "there is nothing to read")
        room = file.size - position
        if room < frame.BLANK.size:
            # Too few bytes for a blank: RocketMQ never leaves so few, others may.
            self.offset = file.base + file.size
            return True
        window = Window.of(data, self.offset, room)
        stop = min(window.length, _MOST_BYTES)
        run, after, code = self._follower.follow(window, stop)
        if run is not None:
            self._dispatch(window, run)
            self.offset += after
        elif code == BLANK:
            self.offset = file.base + file.size
        elif code == NEED_MORE:
            return False
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
            writer = self._queues.get(key)
            if writer is not None:
                new = writer.append(part.offsets, part.units)
                if new < len(part.units):
                    logger.debug("%s: had %d units", writer.name, len(part.units) - new)
        if self._follow is not None:
            self._follow(window, run)
        if self._index is not None:
            self._index.put(
                requests.physical_offset,
                requests.store_timestamp,
                run.key_hashes,
                run.key_numbers,
            )
        self._arrived(requests)
        self._grown(requests, {key: (part.rows, part.offsets) for key, part in parts.items()})


class DispatchService(Service):
    """Dispatches in the background, whenever it is told that the log has grown.

    Where that fails the store takes no more messages: their readers would never see them. What
    the disk refuses (it is full) is tried again, and may then be taken.

    Args:
        dispatcher: does it.
        flags: gets LOGICS_QUEUE_ERROR on a failure.
        health: of the store.
    """

    def __init__(self, dispatcher: Dispatcher, flags: RunningFlags, health: Health) -> None:
        super().__init__("dispatch", health, interval_ms=_INTERVAL_MS)
        self._dispatcher = dispatcher
        self._flags = flags
        # One for each who waits. No condition: those are written in Python, and Ctrl-C in the
        # middle of one leaves its lock taken.
        self._waiting: list[Flag] = []
        self._hurry = Flag()
        self._failure: StoreError | None = None
        self._is_over = False

    @property
    def failure(self) -> StoreError | None:
        """What keeps the log from being dispatched."""
        return self._failure

    def run_once(self) -> None:
        """Dispatch all there is."""
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
                logger.warning("dispatching goes on at %d", self._dispatcher.offset)
                self._failure = None
                self._flags.clear(Refusal.LOGICS_QUEUE_ERROR)
        self._tell_waiting()
        if not self.is_stopping and self._dispatcher.offset - start < _MOST_BYTES:
            # RocketMQ pauses for 1 ms.
            least, most = _PAUSES
            self._hurry.take(min(most, max(least, _PAUSE_SHARE * (time.monotonic() - began))))

    def run_last(self) -> None:
        """Dispatch what came in the meantime."""
        self.run_once()

    def stop(self, timeout_s: float = 10.0) -> bool:
        """See :meth:`Service.stop`."""
        self._hurry.set()
        return super().stop(timeout_s)

    def ended(self) -> None:
        """Let go of whoever waits."""
        self._is_over = True
        self._tell_waiting()

    def _tell_waiting(self) -> None:
        for flag in list(self._waiting):
            flag.set()

    def wait_dispatched(self, offset: int, timeout_s: float | None = None) -> bool:
        """Wait until what is in the log before an offset is dispatched; whether it is.

        False where that took longer than the timeout, or the service has ended before.

        Raises:
            StoreError: what ended the dispatching.
            UsageError: if a listener asks: it would wait for itself.
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
            # Looked at behind each flag that is taken: what moves later sets it again.
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
