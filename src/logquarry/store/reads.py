"""The read methods of readers and writers: get, query, scan, offsets, state.

``BaseReader`` and ``LiveStore`` in :mod:`logquarry.store.reader` implement the abstract methods.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date, datetime
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self

from logquarry import arguments
from logquarry.errors import CorruptFile, LogquarryError, StoreUnavailable, reason_of
from logquarry.format import java
from logquarry.format.checkpoint import Checkpoint
from logquarry.log.layout import StoreLayout
from logquarry.log.store_files import CHECKPOINT
from logquarry.read.commit_log import CommitLog
from logquarry.read.features import StoreFeatures, find_features, other_queues
from logquarry.read.fence import require_consumable
from logquarry.read.get_kernel import MessageGetter
from logquarry.read.get_message import GetResult, TransferLimits
from logquarry.read.index import Index, has_key, of_key, query_message, search_log
from logquarry.read.queue import Queue
from logquarry.store.log_reads import NOT_FOR_USERS, LogReads, renamed_topic
from logquarry.stored_message import StoredMessage

if TYPE_CHECKING:
    import pyarrow as pa

    from logquarry.log.batches import DamageLog, OnDamage
    from logquarry.store.consumer.consumer import Consumer
    from logquarry.store.consumer.registry import Consumers


Time = int | str | date
"""A time: milliseconds since 1970, a date or datetime, or ISO 8601 text.

A time without a zone is UTC.
"""


@contextmanager
def _importing() -> Iterator[None]:
    """Raise StoreUnavailable if a module cannot be read, for example without free descriptors."""
    try:
        yield
    except OSError as error:
        where = error.filename or "a module"
        raise StoreUnavailable(f"{where}: cannot be read: {reason_of(error)}") from error


class QueueOffsets(NamedTuple):
    """The range of a queue: its first queue offset, and the queue offset of the next message."""

    min: int
    max: int


class StoreReads(LogReads):
    """The read methods of a store."""

    def __init__(self, layout: StoreLayout, log: CommitLog, *, broker: str) -> None:
        super().__init__(layout, log, broker=broker)
        self.config = layout.config
        self._getters: list[MessageGetter] = []
        self._consumers_lock = threading.Lock()
        self._made_consumers: Consumers | None = None
        self._has_closed_consumers = False

    # ------------------------------------------------------------------------------ life and state
    @abstractmethod
    def close(self) -> None:
        """Close the store."""

    @abstractmethod
    def refresh(self) -> None:
        """List the store's folders again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.root!r}, {self._shown_state()}>"

    _mode: ClassVar[str] = "r"

    def _shown_state(self) -> str:
        if not self._is_open:
            return "closed"
        mode = self._mode
        try:
            # If there are no queue files, max_offset would read the whole log.
            end = self.max_offset if self.has_queue_files else "unknown"
            return f"mode {mode!r}, physical offsets {self.min_offset} to {end}"
        except (LogquarryError, OSError) as error:
            return f"mode {mode!r}, offsets unknown: {error}"

    def __dir__(self) -> list[str]:
        return sorted(set(super().__dir__()) - NOT_FOR_USERS)

    def _look_again(self) -> None:
        if self.has_queue_files:
            self.refresh()

    @property
    def has_abort(self) -> bool:
        """Whether a writer has the store open, or did not shut it down cleanly (file ``abort``)."""
        return self.layout.has_abort

    @property
    def is_live(self) -> bool:
        """Whether a process holds the store's lock."""
        return self.layout.is_live()

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The checkpoint; None if there is no checkpoint.

        Raises:
            CorruptFile: if the checkpoint file is too short.
        """
        try:
            return self.layout.read_checkpoint()
        except ValueError as error:
            path = self.layout.filesystem.full_path(CHECKPOINT)
            raise CorruptFile(path, 0, str(error), kind="checkpoint") from error

    @property
    def features(self) -> StoreFeatures:
        """The features of the store, such as RocksDB or timers, and the version of its writer.

        Each access reads the files. docs/rocketmq-5.md lists, for each feature, the calls that
        logquarry refuses if the store has the feature.
        """
        self._require_open()
        return find_features(self.layout)

    # ------------------------------------------------------------------------------------ queues
    @property
    @abstractmethod
    def has_queue_files(self) -> bool:
        """Whether any consume queue has a message."""

    @abstractmethod
    def queues(self) -> tuple[tuple[str, int], ...]:
        """Return topic and queue id of each queue, sorted."""

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics that have queues, sorted."""
        return tuple(dict.fromkeys(topic for topic, _ in self.queues()))

    @abstractmethod
    def queue(self, topic: str, queue_id: int) -> Queue | None:
        """Return one queue; None if the store has no such queue."""

    def _readable_queue(self, topic: str, queue_id: int) -> Queue | None:
        """Like :meth:`queue`, but raises UnsupportedStore if the queue cannot be read by offset."""
        return self.queue(topic, queue_id)

    def queue_offsets(self, topic: str, queue_id: int) -> QueueOffsets:
        """Return the range of a queue; (0, 0) if the store has no such queue."""
        queue = self._readable_queue(*arguments.queue(topic, queue_id))
        if queue is None:
            return QueueOffsets(0, 0)
        return QueueOffsets(queue.min_offset, queue.max_offset)

    @abstractmethod
    def get(
        self,
        topic: str,
        queue_id: int,
        offset: int = 0,
        max_count: int = 32,
        tag: str | None = None,
    ) -> GetResult:
        """Return messages from a queue offset on, like RocketMQ's ``getMessage``.

        Args:
            topic: the topic.
            queue_id: the queue.
            offset: queue offset of the first message.
            max_count: maximum number of messages. The settings ``max_transfer_...`` also limit the
                result. A result never spans two files of a consume queue. If the message at
                ``offset`` is in the log and matches, the result contains it.
            tag: the tags to match, such as ``paid`` or ``paid || sent``; None or ``*`` for all
                messages.

        Raises:
            CorruptFrame: if the first message is damaged. If a later message is damaged, the result
                ends before that message.
        """

    def offset_by_time(self, topic: str, queue_id: int, timestamp_ms: Time) -> int:
        """Return the queue offset of a message that was stored at or near a time.

        If no message has exactly this time, the method searches one queue file for the last message
        before and the first message after the time. It returns the offset of the nearer message, as
        RocketMQ's ``getOffsetInQueueByTime`` does. In a batch queue or a queue in RocksDB, the
        method chooses the first message at or after the time; if there is none, the last message.
        If the queue is empty, the method returns 0. :meth:`scan` describes the types of a time.
        """
        queue = self._readable_queue(*arguments.queue(topic, queue_id))
        timestamp_ms = arguments.time_ms(timestamp_ms, "timestamp_ms")
        if queue is None:
            return 0
        return queue.offset_by_time(
            timestamp_ms, self._log.store_time_at, log_min_offset=self._log.min_offset
        )

    @cached_property
    def _getter(self) -> MessageGetter:
        return self._new_getter(TransferLimits.of(self.config))

    @cached_property
    def _bulk_getter(self) -> MessageGetter:
        """Gets messages for consumers. One call may return more messages than :meth:`get`."""
        # Import late, because the import takes 0.1 s.
        from logquarry.store.consumer.source import AT_ONCE

        return self._new_getter(AT_ONCE)

    def _new_getter(self, limits: TransferLimits) -> MessageGetter:
        getter = MessageGetter(self._log, limits, self.layout, self.broker)
        self._getters.append(getter)
        return getter

    def _release_bytes(self) -> None:
        for getter in self._getters:
            getter.release()

    # ------------------------------------------------------------------------------------- index
    def query(
        self,
        topic: str,
        key: str,
        since: Time | None = None,
        until: Time | None = None,
        max_count: int = 32,
        exact: bool = False,
    ) -> list[StoredMessage]:
        """Return messages with a key, in the order of the log, like RocketMQ's ``queryMessage``.

        If more than ``max_count`` messages match, the newest ones are returned. The result comes
        from at most ``max_msgs_num_batch`` frames. If the store has no usable index, the query
        reads the whole log.

        Args:
            topic: the topic.
            key: one of the message's keys: a word of its property KEYS, or its UNIQ_KEY.
            since: earliest store time, as for :meth:`scan`. The index stores times in whole
                seconds.
            until: latest store time, inclusive.
            max_count: maximum number of messages.
            exact: whether to omit messages that do not have the key, and to return each message
                only once. RocketMQ also returns messages with another key that has the same hash,
                and may return a message twice.

        If an inner batch of RocketMQ 5 (several messages in one frame) matches, the result contains
        only the messages of the batch that have the key. If the key is the UNIQ_KEY of the batch
        itself (the message id that the producer received), the result contains all messages of the
        batch. RocketMQ indexes only the keys of the batch. If only a message in the batch has the
        key, the query does not find this message; use :meth:`scan` instead.
        """
        self._require_open()
        topic, key = arguments.topic(topic), arguments.text(key, "key")
        begin, end = arguments.time_range(since, until)
        begin, end = 0 if begin is None else begin, java.LONG_MAX if end is None else end
        max_count = arguments.count(max_count, least=0)
        exact = arguments.flag(exact, "exact")
        index = self._index_now()
        if index.is_usable:
            found = query_message(index, self._frame_at, topic, key, max_count, begin, end)
            if exact:
                distinct = {frame.physical_offset: frame for frame in found}.values()
                found = [f for f in distinct if has_key(f, topic, key)]
        else:
            most = min(max_count, self.config.max_msgs_num_batch)
            events = self._log_reader().events()
            found = search_log(events, topic, key, most, begin, end)
        # There can be more than max_count messages, because several messages of one batch can
        # match.
        stored = (self._stored(frame) for frame in found)
        messages = [one for message in stored for one in of_key(message, key)]
        return messages[-max_count:] if max_count > 0 else []

    @abstractmethod
    def _index_now(self) -> Index:
        """Return an index that includes the files that exist now."""

    # -------------------------------------------------------------------------------------- bulk
    def scan(
        self,
        topics: str | Iterable[str] | None = None,
        queue_id: int | None = None,
        *,
        tags: str | None = None,
        keys: str | Iterable[str] | None = None,
        since: Time | None = None,
        until: Time | None = None,
        on_damage: OnDamage = "default",
        damage: DamageLog | None = None,
        topic: str | Iterable[str] | None = None,
    ) -> Iterator[StoredMessage]:
        """Yield messages in the order of the log.

        Each message is decoded only when the iteration reaches it.

        Args:
            topics: a topic, or several topics (default: all messages, even those that are in no
                queue).
            queue_id: the id of a queue (default: all queues).
            tags: the tags to match, such as ``paid || sent``.
            keys: words of the property KEYS, or UNIQ_KEYs. Messages with at least one of these keys
                match.
            since: earliest store time: milliseconds since 1970, a datetime, or ISO 8601 text as
                for ``--since``. A time without a zone is UTC.
            until: the messages must be stored before this store time.
            on_damage: with ``default``, damage raises an error, unless it is a torn tail (an
                incomplete last message). :data:`logquarry.log.batches.OnDamage` explains ``stop``,
                ``skip`` and ``fail``.
            damage: a :class:`~logquarry.log.batches.DamageLog`. The scan adds each damage that it
                finds to this object.
            topic: the previous name of ``topics``; deprecated.

        Raises:
            CorruptFrame: if the log is damaged and ``on_damage`` requires an error.
            UsageError: if an argument is invalid, or no message can match the filter.
        """
        self._require_open()
        # Import late, because the module imports pyarrow.
        with _importing():
            from logquarry.read import bulk

        if topic is not None:
            topics = renamed_topic(topic, topics)
        wanted = bulk.message_filter(topics, queue_id, tags, keys, since, until)
        layout, stop = self._bulk_layout()
        bulk.warn_of_unknown_topics([layout], wanted)
        return bulk.messages(layout, self.broker, wanted, on_damage, damage, stop_offset=stop)

    def to_arrow(
        self,
        topics: str | Iterable[str] | None = None,
        queue_id: int | None = None,
        *,
        columns: Sequence[str] | None = None,
        tags: str | None = None,
        keys: str | Iterable[str] | None = None,
        since: Time | None = None,
        until: Time | None = None,
        on_damage: OnDamage = "default",
        damage: DamageLog | None = None,
        decompress: bool = False,
    ) -> pa.RecordBatchReader:
        """Return the messages of a :meth:`scan` as a stream of Arrow record batches.

        :meth:`scan` describes the other arguments.

        Args:
            columns: names of the columns in the wanted order (default: all of
                :data:`logquarry.log.schema.COLUMNS`). Other columns are not decoded. The CRC
                of bodies is checked only if ``body`` is among the columns.
            decompress: whether to decompress bodies.

        Raises:
            CorruptFrame: raised by the returned reader, if the log is damaged and ``on_damage``
                requires an error.
        """
        self._require_open()
        # Import late, because the module imports pyarrow.
        with _importing():
            from logquarry.read import bulk

        wanted = bulk.message_filter(topics, queue_id, tags, keys, since, until)
        layout, stop = self._bulk_layout()
        bulk.warn_of_unknown_topics([layout], wanted)
        return bulk.arrow_reader(
            layout,
            self.broker,
            wanted,
            columns=columns,
            on_damage=on_damage,
            damage=damage,
            decompress=decompress,
            stop_offset=stop,
        )

    @abstractmethod
    def _bulk_layout(self) -> tuple[StoreLayout, int | None]:
        """Return the layout of a bulk read, and the physical offset of its end (None: no limit)."""

    # --------------------------------------------------------------------------------- consumers
    def consumer(
        self,
        group: str,
        topics: str | Iterable[str],
        *,
        tags: str | None = None,
        sql: str | None = None,
        start: str | int | datetime = "earliest",
        timestamp: Time | None = None,
        auto_commit: bool = True,
        timeout: float | None = None,
        max_reconsume_times: int = 16,
    ) -> Consumer:
        """Return a consumer: an iterator over the messages that its group has not handled.

        Each message is delivered at least once, and to only one consumer of the group at a time.
        The consumer marks a message as handled when you request the next message. The store writes
        the offsets of handled messages to ``config/consumerOffset.json`` at these times:

        - every ``flush_consumer_offset_interval``
        - when the consumer or the store is closed
        - at :meth:`~logquarry.store.consumer.consumer.Consumer.commit`

        If the store is open for reading, the consumer starts at the offsets in this file, but keeps
        new offsets only in memory. The queues are divided among the group's consumers in this
        process. The consumers also receive the messages of the group's retry topic.

        Args:
            group: the group's name: letters, digits, ``%``, ``|``, ``-`` and ``_``.
            topics: the topics. A topic that does not exist yet is allowed.
            tags: the tags to match, such as ``paid`` or ``paid || sent``; None or ``*`` for all
                messages.
            sql: an SQL92 filter over the properties, such as ``a > 3 AND b = 'x'``. Cannot be
                combined with ``tags``.
            start: where the group starts in a topic in which it has no offsets: ``earliest``,
                ``latest``, ``timestamp``, or a store time (milliseconds or a datetime).
            timestamp: for ``start="timestamp"``, the store time, as for :meth:`scan`.
            auto_commit: whether the consumer commits the offsets of handled messages without a call
                of ``commit``.
            timeout: if no message arrives for this many seconds, the iteration ends; None for an
                iteration without end.
            max_reconsume_times: how often a message can be sent back for another delivery.

        Raises:
            UsageError: if a name or a start is invalid.
            BadFilter: if the filter is invalid.
            UnsupportedStore: if logquarry cannot read the topic's queues or the groups' offsets.
            StoreUnavailable: if the store was closed.
        """
        self._require_open()
        topics = arguments.names(topics, "topics")
        require_consumable(self.layout, other_queues(self.layout), topics)
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

    @abstractmethod
    def _make_consumers(self) -> Consumers:
        """Return the object that manages the consumers of this store."""

    @property
    def _consumers(self) -> Consumers:
        # All consumers must share one Consumers object, because two such objects would assign the
        # same queue to two consumers.
        with self._consumers_lock:
            if self._has_closed_consumers:
                # Closing the store may take minutes. A consumer made during this time would not be
                # closed, so its iteration would never end.
                raise StoreUnavailable("the store was closed")
            if self._made_consumers is None:
                self._made_consumers = self._make_consumers()
            return self._made_consumers

    def _close_consumers(self) -> None:
        """Close all consumers, and refuse new consumers.

        If an interrupt stops this call, call it again.
        """
        with self._consumers_lock:
            self._has_closed_consumers = True
            consumers = self._made_consumers
        if consumers is not None:
            consumers.close()
