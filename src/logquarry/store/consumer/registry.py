"""All consumers of one store: makes consumers and groups, and saves offsets periodically."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from datetime import date, datetime

from logquarry import arguments
from logquarry.disk.service import Health, Service
from logquarry.errors import StoreError, StoreUnavailable
from logquarry.message import Message
from logquarry.store.consumer.consumer import Consumer
from logquarry.store.consumer.group import MAX_RECONSUME_TIMES, ConsumerGroup, Subscription
from logquarry.store.consumer.offsets import Progress, Start
from logquarry.store.consumer.source import Arrivals, QueueReader
from logquarry.write.put_result import PutResult

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Consumers:
    """The consumers of one store. Thread-safe.

    Offsets are saved every ``interval_ms`` (``flushConsumerOffsetInterval``). If ``interval_ms`` is
    None, the offsets stay in memory, because another process writes the store's files.
    """

    reader: QueueReader
    arrivals: Arrivals
    progress: Progress
    _: KW_ONLY
    put: Callable[[Message], PutResult]
    health: Health
    interval_ms: int | None

    def __post_init__(self) -> None:
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
        """Make a consumer: see :meth:`logquarry.store.reads.StoreReads.consumer`."""
        subscription = Subscription.of(group, topics, tags, sql)
        group = subscription.group
        begins = Start.of(start, timestamp)
        auto_commit = arguments.flag(auto_commit, "auto_commit")
        timeout = arguments.optional(arguments.seconds, timeout, "timeout")
        max_reconsume_times = arguments.count(max_reconsume_times, "max_reconsume_times", least=0)
        self.progress.begin(group, subscription.all_topics, begins)
        with self._lock:
            self._require_open()
            self._topics |= frozenset(subscription.all_topics)
            shared = self._groups.get(group)
            if shared is None:
                shared = ConsumerGroup(group, self.reader.queue_ids, self.arrivals.wake)
                self._groups[group] = shared
            if self._saver is None and self.interval_ms is not None:
                self._saver = _Saver(self._save_handled, self.health, self.interval_ms)
                self._saver.start()
        made = Consumer(
            subscription,
            shared,
            reader=self.reader,
            arrivals=self.arrivals,
            progress=self.progress,
            put=self.put,
            save=self.save,
            closed=self._closed,
            auto_commit=auto_commit,
            timeout=timeout,
            max_reconsume_times=max_reconsume_times,
        )
        with self._lock:
            self._open.append(made)
        try:
            # Check again: if `close` ran before this consumer was in the list, `close` did not
            # close this consumer.
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
        if self.interval_ms is not None:
            self.health.require_writable()
            self.progress.offsets.save()

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

    retried = (StoreError,)

    def __init__(self, save: Callable[[], None], health: Health, interval_ms: int) -> None:
        super().__init__("consumer-offsets", health, interval_ms=interval_ms)
        self._save = save

    def run_once(self) -> None:
        self._save()
