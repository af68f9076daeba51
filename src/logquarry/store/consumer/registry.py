"""All consumers of one store: makes them, forms their groups, and saves offsets periodically.

The classes here that read queues implement the interface in :mod:`.source`.
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import date, datetime
from pathlib import Path
from typing import Final, Protocol

import numpy as np

from logquarry import arguments
from logquarry.disk.config_file import ConsumerOffsets
from logquarry.disk.disk import LocalDisk
from logquarry.disk.service import Health, Service
from logquarry.errors import StoreError, StoreUnavailable
from logquarry.format import java
from logquarry.message import Message
from logquarry.read.get_kernel import MessageGetter
from logquarry.read.get_message import LEAST_UNITS
from logquarry.read.log_queues import QueueKey
from logquarry.read.queue import FileQueue, Queue
from logquarry.store.consumer.consumer import Consumer, ConsumerParts
from logquarry.store.consumer.progress import LostOffsets, Progress, Start
from logquarry.store.consumer.source import (
    Arrivals,
    PolledArrivals,
    QueueBatch,
    QueueReader,
    ToldArrivals,
    batch_of,
)
from logquarry.store.consumer.subscription import MAX_RECONSUME_TIMES, ConsumerGroup, Subscription
from logquarry.write.dispatcher import ArrivalListeners, MessageArrival
from logquarry.write.put_result import PutResult

logger = logging.getLogger(__name__)


class Consumers:
    """The consumers of one store. Any thread may request a consumer.

    Args:
        interval_ms: how often offsets are written (``flushConsumerOffsetInterval``); None if they
            stay in memory because another process writes the store.
    """

    def __init__(
        self,
        reader: QueueReader,
        arrivals: Arrivals,
        progress: Progress,
        *,
        put: Callable[[Message], PutResult],
        health: Health,
        interval_ms: int | None,
    ) -> None:
        self.arrivals = arrivals
        self._reader = reader
        self._progress = progress
        self._put = put
        self._health = health
        self._interval_ms = interval_ms
        self._lock = threading.Lock()
        self._groups: dict[str, ConsumerGroup] = {}
        self._open: list[Consumer] = []
        self._topics: frozenset[str] = frozenset()
        self._saver: _Saver | None = None
        self._is_closed = False

    @property
    def topics(self) -> frozenset[str]:
        """The topics that consumers of this store subscribe to."""
        return self._topics

    def consumer(
        self,
        group: str,
        topics: str | Iterable[str],
        *,
        tags: str | None = None,
        sql: str | None = None,
        start: str | int | datetime = "earliest",
        timestamp: int | str | date | None = None,
        auto_commit: bool = True,
        timeout: float | None = None,
        max_reconsume_times: int = MAX_RECONSUME_TIMES,
    ) -> Consumer:
        """Make a consumer; see :meth:`logquarry.store.reads.StoreReads.consumer`."""
        subscription = Subscription.of(group, topics, tags, sql)
        begins = Start.of(start, timestamp)
        auto_commit = arguments.flag(auto_commit, "auto_commit")
        timeout = arguments.optional(arguments.seconds, timeout, "timeout")
        max_reconsume_times = arguments.count(max_reconsume_times, "max_reconsume_times", least=0)
        self._progress.begin(group, subscription.all_topics, begins)
        with self._lock:
            self._require_open()
            self._topics |= frozenset(subscription.all_topics)
            shared = self._groups.get(group)
            if shared is None:
                shared = ConsumerGroup(group, self._reader.queue_ids, self.arrivals.wake)
                self._groups[group] = shared
            if self._saver is None and self._interval_ms is not None:
                self._saver = _Saver(self._save_handled, self._health, self._interval_ms)
                self._saver.start()
        parts = ConsumerParts(
            reader=self._reader,
            arrivals=self.arrivals,
            progress=self._progress,
            put=self._put,
            save=self.save,
            closed=self._closed,
        )
        made = Consumer(
            subscription,
            shared,
            parts,
            auto_commit=auto_commit,
            timeout=timeout,
            max_reconsume_times=max_reconsume_times,
        )
        with self._lock:
            self._open.append(made)
        try:
            # A concurrent close() closes the consumers in the list; it may have run before.
            self._require_open()
        except StoreUnavailable:
            made.close()
            raise
        return made

    def _require_open(self) -> None:
        if self._is_closed:
            raise StoreUnavailable("the store was closed")

    def save(self) -> None:
        """Write the committed offsets."""
        if self._interval_ms is not None:
            self._health.require_writable()
            self._progress.offsets.save()

    def _save_handled(self) -> None:
        for consumer in tuple(self._open):
            consumer.commit_handled()
        self.save()

    def _closed(self, consumer: Consumer) -> None:
        with self._lock:
            self._open = [other for other in self._open if other is not consumer]
        try:
            self.save()
        except StoreError as error:
            logger.warning("group %s: offsets not written: %s", consumer.group, error)

    def close(self) -> None:
        """Close all consumers, and write their offsets."""
        with self._lock:
            self._is_closed = True
            consumers = tuple(self._open)
        for consumer in consumers:
            consumer.close()
        if self._saver is not None:
            self._saver.stop()


class _Saver(Service):
    """Writes the offsets periodically (``BrokerController``: every 5 s)."""

    def __init__(self, save: Callable[[], None], health: Health, interval_ms: int) -> None:
        super().__init__("consumer-offsets", health, interval_ms=interval_ms)
        self._save = save

    def run_once(self) -> None:
        """Write the offsets; after a failure the next run tries again."""
        try:
            self._save()
        except StoreError as error:
            # Raise if the store is poisoned: otherwise the warning below would repeat forever.
            self.health.require_writable()
            logger.warning("consumer offsets not written: %s", error)


_NEW_FILES_SECONDS: Final = 1.0
_PAUSE_PER_REFRESH: Final = 300.0
"""The pause after listing all folders of a store, in multiples of the listing's duration."""


class StoreQueues(Protocol):
    """The queues of an open store."""

    def queues(self) -> Sequence[QueueKey]:
        """(topic, queue id) of each queue."""

    def queue(self, topic: str, queue_id: int) -> Queue | None:
        """One queue; None if the store does not have it."""


class PolledStore(StoreQueues, Protocol):
    """A store that another process may write."""

    def refresh(self) -> None:
        """List all folders again."""


class LiveQueueReader:
    """The queues of a store that this process writes. Any thread may use it.

    Args:
        getter: gets messages, without the caps of a ``get``.
    """

    def __init__(self, store: StoreQueues, getter: MessageGetter) -> None:
        self._store = store
        self._getter = getter
        self._lock: AbstractContextManager[object] = nullcontext()

    def queue_ids(self, topic: str) -> Sequence[int]:
        """See :class:`logquarry.store.consumer.source.QueueReader`."""
        with self._lock:
            return sorted(queue_id for name, queue_id in self._store.queues() if name == topic)

    def bounds(self, topic: str, queue_id: int) -> tuple[int, int]:
        """See :class:`logquarry.store.consumer.source.QueueReader`."""
        with self._lock:
            queue = self._store.queue(topic, queue_id)
            if queue is None:
                return 0, 0
            compacted = self._getter.compacted
            return compacted.bounds(queue) if topic in compacted.topics else queue.bounds()

    def read(
        self, topic: str, queue_id: int, offset: int, max_count: int, tags: frozenset[str] | None
    ) -> QueueBatch:
        """See :class:`logquarry.store.consumer.source.QueueReader`."""
        with self._lock:
            queue = self._ready_queue(topic, queue_id, offset, max_count)
            if queue is None:
                return QueueBatch((), (), offset)
            found = self._getter.get(queue, offset, max_count, tags)
            if topic in self._getter.compacted.topics:
                queue = self._getter.compacted.queue_at(queue, offset)
            return batch_of(queue, offset, found)

    def _ready_queue(self, topic: str, queue_id: int, offset: int, max_count: int) -> Queue | None:
        """A queue whose messages from an offset on can be read."""
        return self._store.queue(topic, queue_id)

    def first_since(self, topic: str, queue_id: int, timestamp_ms: int) -> int:
        """See :class:`logquarry.store.consumer.source.QueueReader`."""
        with self._lock:
            queue = self._store.queue(topic, queue_id)
            if queue is None:
                return 0
            offsets = range(*queue.bounds())

            def time_of(offset: int) -> int:
                place, size, _ = queue.units(offset, offset + 1)[0].item()
                found = self._getter.log.store_time_at(place, size)
                # The time of a lost message is unknown. It counts as late: better start too early.
                return java.LONG_MAX if found < 0 else found

            return offsets.start + bisect_left(offsets, timestamp_ms, key=time_of)


class PolledQueueReader(LiveQueueReader):
    """The queues of a store that another process may write; it polls for new messages.

    It has a lock, so that only one thread at a time uses the store.
    """

    def __init__(self, store: PolledStore, getter: MessageGetter) -> None:
        super().__init__(store, getter)
        self._lock = threading.RLock()
        self._refresh = store.refresh
        self._refresh_at = 0.0
        self._refreshed_for = -1

    def look(self, topics: Iterable[str]) -> Hashable:
        """The ends of the queues of some topics; the value differs if there are new messages."""
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
                    queue = self._store.queue(topic, queue_id)
                    if isinstance(queue, FileQueue):
                        queue.refresh()
                    if queue is not None:
                        ends.append((topic, queue_id, queue.max_offset))
            return tuple(ends)

    def _ready_queue(self, topic: str, queue_id: int, offset: int, max_count: int) -> Queue | None:
        queue = self._store.queue(topic, queue_id)
        if queue is not None:
            units = queue.units(max(0, offset), offset + max(LEAST_UNITS, max_count))
            end = int(np.max(units["physical_offset"], initial=-1))
            # If a message is beyond the listed files, its file is new: list the files again.
            if end >= self._getter.log.files.end and end > self._refreshed_for:
                self._refreshed_for = end
                self._refresh()
                queue = self._store.queue(topic, queue_id)
        return queue


def consumers_of_a_writer(
    store: StoreQueues,
    getter: MessageGetter,
    listeners: ArrivalListeners,
    offsets: ConsumerOffsets,
    root: Path,
    put: Callable[[Message], PutResult],
    *,
    health: Health,
    interval_ms: int,
) -> Consumers:
    """The consumers of a store that this process writes."""
    reader = LiveQueueReader(store, getter)
    arrivals = ToldArrivals()
    made = Consumers(
        reader,
        arrivals,
        _progress(offsets, reader, store, root),
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
    store: PolledStore,
    getter: MessageGetter,
    root: Path,
    put: Callable[[Message], PutResult],
    known: Mapping[tuple[str, str], Mapping[int, int]] | None,
) -> Consumers:
    """The consumers of a store that another process may write: their offsets stay in memory.

    Args:
        known: the committed offsets, if the broker keeps them in RocksDB.
    """
    disk = LocalDisk()
    reader = PolledQueueReader(store, getter)
    offsets = ConsumerOffsets(disk, root)
    offsets.update(known or {})
    made = Consumers(
        reader,
        PolledArrivals(lambda: reader.look(made.topics)),
        _progress(offsets, reader, store, root, in_rocksdb=known is not None),
        put=put,
        health=disk.health,
        interval_ms=None,
    )
    return made


def _progress(
    offsets: ConsumerOffsets,
    reader: LiveQueueReader,
    store: StoreQueues,
    root: Path,
    *,
    in_rocksdb: bool = False,
) -> Progress:
    def topics() -> set[str]:
        return {topic for topic, _ in store.queues()}

    has_offsets = in_rocksdb or offsets.found is not None
    lost = LostOffsets(root, has_offsets=has_offsets, topics=topics)
    return Progress(offsets, reader, lost)
