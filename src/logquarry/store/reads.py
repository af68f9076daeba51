"""The read API that readers and writers share: get, query, scan, offsets, state.

Two classes in :mod:`logquarry.store.reader` implement it: ``BaseReader`` reads the store's files,
``LiveStore`` reads the files that this process has open for writing.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from datetime import date, datetime
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self

from logquarry import arguments
from logquarry.errors import CorruptFile, LogquarryError, StoreUnavailable
from logquarry.format import java
from logquarry.format.checkpoint import Checkpoint
from logquarry.log.layout import StoreLayout
from logquarry.log.store_files import CHECKPOINT
from logquarry.read.commit_log import CommitLog
from logquarry.read.features import StoreFeatures, find_features
from logquarry.read.fence import other_queues, require_consumable
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
    from logquarry.store.state import StateReader
    from logquarry.store.stats import StoreStats


Time = int | str | date
"""A time: milliseconds since 1970, a date or datetime, or ISO 8601 text. Without a zone, it is
UTC.
"""


class QueueOffsets(NamedTuple):
    """The range of a queue: its first queue offset, and one past its last."""

    min: int
    max: int


class StoreReads(LogReads):
    """The methods of a store that read.

    Args:
        layout: the store's files.
        log: its log.
        broker: name of the store, which each of its messages has as ``broker``.
    """

    def __init__(self, layout: StoreLayout, log: CommitLog, *, broker: str) -> None:
        super().__init__(layout, log, broker=broker)
        self.config = layout.config
        self._is_open = True
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

    @abstractmethod
    def stats(self) -> StoreStats:
        """The store's current contents, and this object's counts: see :class:`StoreStats`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.root!r}, {self._shown_state()}>"

    _mode: ClassVar[str] = "r"

    def _shown_state(self) -> str:
        if not self._is_open:
            return "closed"
        mode = self._mode
        try:
            # Without queue files a reader would read the whole log to find its end.
            end = self.max_offset if self.has_queue_files else "unknown"
            return f"mode {mode!r}, physical offsets {self.min_offset} to {end}"
        except (LogquarryError, OSError) as error:
            return f"mode {mode!r}, offsets unknown: {error}"

    def __dir__(self) -> list[str]:
        return sorted(set(super().__dir__()) - NOT_FOR_USERS)

    def _require_open(self) -> None:
        if not self._is_open:
            raise StoreUnavailable(f"{self.layout.root}: the store was closed")

    def _look_again(self) -> None:
        if self.has_queue_files:
            self.refresh()

    @cached_property
    def _state(self) -> StateReader:
        # Import here: it takes 0.1 s, which a reader of a few messages need not wait for.
        from logquarry.store.state import StateReader

        return StateReader(self)

    @property
    def has_abort(self) -> bool:
        """Whether the store is in use, or was not shut down cleanly."""
        return self.layout.has_abort

    @property
    def is_live(self) -> bool:
        """Whether a process holds the store's lock."""
        return self.layout.is_live()

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The checkpoint, None if there is none.

        Raises:
            CorruptFile: if the file is too short for a checkpoint.
        """
        try:
            return self.layout.read_checkpoint()
        except ValueError as error:
            path = self.layout.filesystem.full_path(CHECKPOINT)
            raise CorruptFile(path, 0, str(error), kind="checkpoint") from error

    @property
    def features(self) -> StoreFeatures:
        """The features of the store: kinds of queues, RocksDB, timers, the writer's version.

        Each call reads the files. docs/rocketmq-5.md lists the calls that each feature forbids.
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
        """(topic, queue id) of each queue, sorted."""

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics that have queues, sorted."""
        return tuple(dict.fromkeys(topic for topic, _ in self.queues()))

    @abstractmethod
    def queue(self, topic: str, queue_id: int) -> Queue | None:
        """One queue; None if the store does not have it."""

    def _readable_queue(self, topic: str, queue_id: int) -> Queue | None:
        """One queue; raises UnsupportedStore if it cannot be read by queue offset."""
        return self.queue(topic, queue_id)

    def queue_offsets(self, topic: str, queue_id: int) -> QueueOffsets:
        """The range of a queue; (0, 0) if the store has no such queue."""
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
        """Messages from a queue offset on, as RocketMQ's ``getMessage`` gives them.

        Args:
            topic: the topic.
            queue_id: the queue.
            offset: queue offset of the first message.
            max_count: maximum number of messages; the settings ``max_transfer_...`` limit them too,
                and a result does not cross the end of a queue file. If there is a message, the
                result has at least one.
            tag: a subscription: ``paid``, ``paid || sent``; None or ``*`` for all.

        Raises:
            CorruptFrame: if the first message is damaged. If a later message is damaged, the result
                ends before that message.
        """

    def offset_by_time(self, topic: str, queue_id: int, timestamp_ms: Time) -> int:
        """The queue offset of the message stored nearest to a time (``getOffsetInQueueByTime``).

        For a time after the last message, it is the last message's offset. If the queue has no
        message, it is 0.

        Args:
            topic: the topic.
            queue_id: the queue.
            timestamp_ms: a time, as :meth:`scan` takes it.
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
        """Gets messages for consumers, without the caps of a ``get``."""
        # Import here: it takes 0.1 s, which a reader of a few messages need not wait for.
        from logquarry.store.consumer.source import AT_ONCE

        return self._new_getter(AT_ONCE)

    def _new_getter(self, limits: TransferLimits) -> MessageGetter:
        getter = MessageGetter(self._log, limits, self.layout, self.broker)
        self._getters.append(getter)
        return getter

    def _release_bytes(self) -> None:
        """Release the views of files that gets keep open."""
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
        """Messages by key, in the order of the log, as RocketMQ's ``queryMessage`` gives them.

        If more than ``max_count`` messages match, you get the newest messages. You never get more
        than ``max_msgs_num_batch``. If the store has no usable index, the whole log is read.

        Args:
            topic: the topic.
            key: one of its keys: a word of KEYS, or UNIQ_KEY.
            since: earliest store time, as :meth:`scan` takes it; the index keeps whole seconds.
            until: latest store time, inclusive.
            max_count: maximum number of messages.
            exact: leave out messages whose other key only has the same hash, and second entries of
                the same message. RocketMQ returns both.

        If an inner batch of RocketMQ 5 matches, you get those of its messages that have the key. If
        the key is the UNIQ_KEY of the batch (the message id that the producer got), you get all its
        messages. RocketMQ indexes a word of KEYS only if the batch itself has this word;
        :meth:`scan` finds the other keys too.
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
        # More than max_count only if an inner batch has several messages with the key.
        stored = (self._stored(frame) for frame in found)
        messages = [one for message in stored for one in of_key(message, key)]
        return messages[-max_count:] if max_count > 0 else []

    @abstractmethod
    def _index_now(self) -> Index:
        """The index as it is now."""

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
        """Messages in the order of the log; each is decoded when you read it.

        Args:
            topics: a topic, or several (default: all messages of the log, also those in no queue).
            queue_id: a queue's number.
            tags: tags as a consumer gives them: ``paid || sent``.
            keys: words of KEYS, or UNIQ_KEYs; a message must have one of them.
            since: earliest store time: milliseconds since 1970, a datetime, or ISO 8601 text as
                ``--since`` takes it. A time without a zone is UTC.
            until: store time at which to stop; exclusive.
            on_damage: ``default`` raises on damage other than a torn tail; ``stop``, ``skip``,
                ``fail``: see :data:`logquarry.log.batches.OnDamage`.
            damage: a :class:`~logquarry.log.batches.DamageLog` that collects the damage.
            topic: the previous name of ``topics``; deprecated.

        Raises:
            CorruptFrame: on damage, by ``on_damage``.
            UsageError: if an argument is invalid, or the filter can match no message.
        """
        self._require_open()
        # The module imports pyarrow.
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

        Args:
            topics: as for :meth:`scan`.
            queue_id: a queue's number.
            columns: the columns, in their order (default: all of
                :data:`logquarry.log.schema.COLUMNS`). Other columns are not decoded; the CRC of
                bodies is checked only if ``body`` is among the columns.
            tags: as for :meth:`scan`; so are ``keys``, ``since`` and ``until``.
            keys: words of keys.
            since: earliest store time.
            until: store time at which to stop.
            on_damage: policy at damage, as for :meth:`scan`.
            damage: a list that collects the damage.
            decompress: whether bodies are decompressed.

        Raises:
            CorruptFrame: while batches are read, by ``on_damage``.
        """
        self._require_open()
        # The module imports pyarrow.
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
        """The files to read, and the physical offset at which to stop, if there is one."""

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
        """A consumer of a group: an iterator over the messages that the group has not had yet.

        One consumer of the group gets each message at least once. A message counts as handled when
        you request the next one. The store writes the offsets of handled messages to
        ``config/consumerOffset.json`` every ``flush_consumer_offset_interval``, when the consumer
        or the store is closed, and at :meth:`~logquarry.store.consumer.consumer.Consumer.commit`. A
        store that is open for reading writes nothing: its groups start from the offsets in the
        file, and hold their new offsets in memory.

        Consumers of one group in this process share the queues. The group also consumes its retry
        topic.

        Args:
            group: the group's name: letters, digits, ``%``, ``|``, ``-`` and ``_``.
            topics: the topics, which need not exist yet.
            tags: a subscription: ``paid``, ``paid || sent``; None or ``*`` for all.
            sql: instead of ``tags``, an SQL92 filter over the properties: ``a > 3 AND b = 'x'``.
            start: where a group without offsets in a topic begins: ``earliest``, ``latest``,
                ``timestamp``, or a store time: milliseconds or a datetime.
            timestamp: for ``start="timestamp"``, the store time, as :meth:`scan` takes it.
            auto_commit: whether offsets of handled messages are committed without a call.
            timeout: seconds without a message after which the iteration ends; None: it never ends.
            max_reconsume_times: how often a message that is sent back is delivered again.

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
        # Two such objects would assign a queue to two consumers.
        with self._consumers_lock:
            if self._has_closed_consumers:
                # Closing the store may take minutes; a consumer that is made in this time would
                # never end.
                raise StoreUnavailable("the store was closed")
            if self._made_consumers is None:
                self._made_consumers = self._make_consumers()
            return self._made_consumers

    def _close_consumers(self) -> None:
        """Close all consumers, and refuse new ones.

        If a close was interrupted, the next close repeats it.
        """
        with self._consumers_lock:
            self._has_closed_consumers = True
            consumers = self._made_consumers
        if consumers is not None:
            consumers.close()
