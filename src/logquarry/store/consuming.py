"""Consuming an open store: what users call, and how consumers read it."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from logquarry.errors import StoreUnavailable
from logquarry.format import java
from logquarry.read.consume_queue import ConsumeQueue, Queue, StoreTime
from logquarry.read.get_message import LEAST_UNITS, GetResult
from logquarry.read.log_queues import QueueKey

if TYPE_CHECKING:
    from logquarry.disk.config_file import ConsumerOffsets
    from logquarry.disk.service import Health
    from logquarry.message import Message
    from logquarry.store.consumer.consumer import Consumer
    from logquarry.store.consumer.progress import Progress
    from logquarry.store.consumer.registry import Consumers
    from logquarry.store.consumer.source import QueueBatch
    from logquarry.write.dispatcher import ArrivalListeners, MessageArrival
    from logquarry.write.put_result import PutResult

_NEW_FILES_SECONDS: Final = 1.0
_PAUSE_PER_REFRESH: Final = 300.0
"""How much longer than it took the pause after a look at all folders of a store is."""

ReadQueue = Callable[[Queue, int, int, frozenset[str] | None], GetResult]
"""(queue, offset, most messages, tags) -> what a ``get`` without its caps gives."""


class Consuming(ABC):
    """The consumers of an open store."""

    def __init__(self) -> None:
        self._consumers_lock = threading.Lock()
        self._made_consumers: Consumers | None = None
        self._has_closed_consumers = False

    @abstractmethod
    def _make_consumers(self) -> Consumers:
        """What keeps the consumers of this store."""

    @abstractmethod
    def _require_open(self) -> None:
        """Raise StoreUnavailable if the store was closed."""

    @abstractmethod
    def _require_consumable(self, topics: Iterable[str]) -> None:
        """Raise UnsupportedStore if consumers of these topics would get nothing, or too much."""

    @property
    def _consumers(self) -> Consumers:
        # Two of them would give a queue to two consumers.
        with self._consumers_lock:
            if self._has_closed_consumers:
                # The store may take minutes to close; nobody would end what was made meanwhile.
                raise StoreUnavailable("the store was closed")
            if self._made_consumers is None:
                self._made_consumers = self._make_consumers()
            return self._made_consumers

    def _close_consumers(self) -> None:
        """End all consumers; there will be no more. Who was interrupted calls it once more."""
        with self._consumers_lock:
            self._has_closed_consumers = True
            consumers = self._made_consumers
        if consumers is not None:
            consumers.close()

    def consumer(
        self,
        group: str,
        topics: str | Iterable[str],
        *,
        tags: str | None = None,
        sql: str | None = None,
        start: str | int = "earliest",
        timestamp: int | None = None,
        auto_commit: bool = True,
        timeout: float | None = None,
        max_reconsume_times: int = 16,
    ) -> Consumer:
        """A consumer of a group: an iterator over the messages that the group has not had yet.

        Each message comes at least once to one consumer of the group. It counts as handled when the
        next is asked for; what was handled is written to ``config/consumerOffset.json`` every
        ``flush_consumer_offset_interval`` and when the consumer or the store is closed, or at
        :meth:`~logquarry.store.consumer.consumer.Consumer.commit`. Of a store that is open for
        reading nothing is written: the group goes on from where the file says, and its offsets stay
        in memory.

        Consumers of one group in this process share the queues. The group's retry topic is consumed
        along with the others.

        Args:
            group: the group's name: letters, digits, ``%``, ``|``, ``-`` and ``_``.
            topics: the topics, which need not be there yet.
            tags: a subscription: ``paid``, ``paid || sent``; None or ``*`` for all.
            sql: or an SQL92 filter over the properties: ``a > 3 AND b = 'x'``.
            start: where a group without offsets in a topic begins: ``earliest``, ``latest``,
                ``timestamp``, or a store time in milliseconds.
            timestamp: the store time of ``start="timestamp"``, in milliseconds.
            auto_commit: whether what was handled is committed by itself.
            timeout: seconds without a message after which iterating ends; None for never.
            max_reconsume_times: how often a message that is sent back comes again.

        Raises:
            UsageError: if a name or a start makes no sense.
            BadFilter: if the filter cannot be understood.
            UnsupportedStore: if the store keeps what a consumer needs in a way that is not read.
            StoreUnavailable: if the store was closed.
        """
        self._require_open()
        self._require_consumable([topics] if isinstance(topics, str) else (topics := list(topics)))
        return self._consumers.consumer(
            group,
            topics,
            tags=tags,
            sql=sql,
            start=start,
            timestamp=timestamp,
            auto_commit=auto_commit,
            timeout=timeout,
            max_reconsume_times=max_reconsume_times,
        )


class QueueAccess(NamedTuple):
    """How the queues of a store are reached.

    Attributes:
        names: (topic, queue id) of all.
        queue: one of them.
        read: messages of one.
        store_time: when a message of the log was stored.
    """

    names: Callable[[], Sequence[QueueKey]]
    queue: Callable[[str, int], Queue | None]
    read: ReadQueue
    store_time: StoreTime


class LiveQueueReader:
    """The queues of a store that this process writes: any thread may ask."""

    def __init__(self, access: QueueAccess) -> None:
        self._access = access
        self._lock: AbstractContextManager[object] = nullcontext()

    def queue_ids(self, topic: str) -> Sequence[int]:
        """See :class:`logquarry.store.consumer.source.QueueReader`."""
        with self._lock:
            return sorted(queue_id for name, queue_id in self._access.names() if name == topic)

    def bounds(self, topic: str, queue_id: int) -> tuple[int, int]:
        """See :class:`logquarry.store.consumer.source.QueueReader`."""
        with self._lock:
            queue = self._access.queue(topic, queue_id)
            return (0, 0) if queue is None else queue.bounds()

    def read(
        self, topic: str, queue_id: int, offset: int, max_count: int, tags: frozenset[str] | None
    ) -> QueueBatch:
        """See :class:`logquarry.store.consumer.source.QueueReader`."""
        from logquarry.store.consumer.source import QueueBatch, batch_of

        with self._lock:
            queue = self._ready_queue(topic, queue_id, offset, max_count)
            if queue is None:
                return QueueBatch((), (), offset)
            return batch_of(queue, offset, self._access.read(queue, offset, max_count, tags))

    def _ready_queue(self, topic: str, queue_id: int, offset: int, max_count: int) -> Queue | None:
        """A queue, with what it names from an offset on in sight."""
        return self._access.queue(topic, queue_id)

    def first_since(self, topic: str, queue_id: int, timestamp_ms: int) -> int:
        """See :class:`logquarry.store.consumer.source.QueueReader`."""
        with self._lock:
            queue = self._access.queue(topic, queue_id)
            if queue is None:
                return 0
            offsets = range(*queue.bounds())

            def time_of(offset: int) -> int:
                place, size, _ = queue.units(offset, offset + 1)[0].item()
                found = self._access.store_time(place, size)
                # A message that is lost says nothing: one begins too early rather than too late.
                return java.LONG_MAX if found < 0 else found

            return offsets.start + bisect_left(offsets, timestamp_ms, key=time_of)


class PolledQueueReader(LiveQueueReader):
    """The queues of a store that another process may write: looked at again to see what is new.

    One thread at a time has the store.

    Args:
        access: how the queues are reached.
        refresh: looks at all folders again.
        log_end: where the files of the log end that are known.
    """

    def __init__(
        self, access: QueueAccess, refresh: Callable[[], None], log_end: Callable[[], int]
    ) -> None:
        super().__init__(access)
        self._lock = threading.RLock()
        self._refresh = refresh
        self._log_end = log_end
        self._refresh_at = 0.0
        self._refreshed_for = -1

    def look(self, topics: Iterable[str]) -> Hashable:
        """How far the queues of some topics reach now: another thing when there is more."""
        with self._lock:
            now = time.monotonic()
            if now >= self._refresh_at:
                self._refresh()
                took = time.monotonic() - now
                pause = max(_NEW_FILES_SECONDS, took * _PAUSE_PER_REFRESH)
                self._refresh_at = now + took + pause
            ends: list[tuple[str, int, int]] = []
            for topic in sorted(topics):
                for queue_id in self.queue_ids(topic):
                    queue = self._access.queue(topic, queue_id)
                    if isinstance(queue, ConsumeQueue):
                        queue.refresh()
                    if queue is not None:
                        ends.append((topic, queue_id, queue.max_offset))
            return tuple(ends)

    def _ready_queue(self, topic: str, queue_id: int, offset: int, max_count: int) -> Queue | None:
        queue = self._access.queue(topic, queue_id)
        if queue is not None:
            units = queue.units(max(0, offset), offset + max(LEAST_UNITS, max_count))
            end = int(np.max(units["physical_offset"], initial=-1))
            # A file of the log that is younger than our look at the folder is not one that expired.
            if end >= self._log_end() and end > self._refreshed_for:
                self._refreshed_for = end
                self._refresh()
                queue = self._access.queue(topic, queue_id)
        return queue


def consumers_of_a_writer(
    access: QueueAccess,
    listeners: ArrivalListeners,
    offsets: ConsumerOffsets,
    root: Path,
    put: Callable[[Message], PutResult],
    *,
    health: Health,
    interval_ms: int,
) -> Consumers:
    """The consumers of a store that this process writes.

    Args:
        access: how the queues are reached.
        listeners: are told of what was dispatched.
        offsets: of all groups.
        root: the store's folder.
        put: puts what is sent back.
        health: of the store.
        interval_ms: how often offsets are written.
    """
    from logquarry.store.consumer.registry import Consumers
    from logquarry.store.consumer.source import ToldArrivals

    reader = LiveQueueReader(access)
    arrivals = ToldArrivals()
    made = Consumers(
        reader,
        arrivals,
        _progress(offsets, reader, access, root),
        put=put,
        health=health,
        interval_ms=interval_ms,
    )

    def arrived(arrival: MessageArrival) -> None:
        if arrival.topic in made.topics:
            arrivals.wake()

    listeners.add(arrived)
    return made


def consumers_of_a_reader(
    access: QueueAccess,
    refresh: Callable[[], None],
    log_end: Callable[[], int],
    root: Path,
    put: Callable[[Message], PutResult],
) -> Consumers:
    """The consumers of a store that another process may write: their offsets stay in memory.

    Args:
        access: how the queues are reached.
        refresh: looks at all folders again.
        log_end: where the files of the log end that are known.
        root: the store's folder.
        put: refuses what is sent back.
    """
    from logquarry.disk.config_file import ConsumerOffsets
    from logquarry.disk.disk import LocalDisk
    from logquarry.store.consumer.registry import Consumers
    from logquarry.store.consumer.source import PolledArrivals

    disk = LocalDisk()
    reader = PolledQueueReader(access, refresh, log_end)
    offsets = ConsumerOffsets(disk, root)
    made = Consumers(
        reader,
        PolledArrivals(lambda: reader.look(made.topics)),
        _progress(offsets, reader, access, root),
        put=put,
        health=disk.health,
        interval_ms=None,
    )
    return made


def _progress(
    offsets: ConsumerOffsets, reader: LiveQueueReader, access: QueueAccess, root: Path
) -> Progress:
    """The offsets of a store's groups, with what is left of lost ones."""
    from logquarry.store.consumer.progress import LostOffsets, Progress

    def topics() -> set[str]:
        return {topic for topic, _ in access.names()}

    lost = LostOffsets(root, has_offsets=offsets.found is not None, topics=topics)
    return Progress(offsets, reader, lost)
