"""The read API of every open store: get, query, scan, offsets, state. Reader and writer share it.

:mod:`logquarry.store.reader` reads the files; :mod:`logquarry.store.writer` reads the open files
that this process writes.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

from logquarry.errors import CorruptFile, MessageNotFound, StoreUnavailable
from logquarry.format import java
from logquarry.format import message_id as ids
from logquarry.format.checkpoint import Checkpoint
from logquarry.format.frame import Frame
from logquarry.log.layout import CHECKPOINT, StoreLayout
from logquarry.message import StoredMessage
from logquarry.read.commit_log import CommitLog
from logquarry.read.consume_queue import Queue
from logquarry.read.get_kernel import MessageGetter
from logquarry.read.get_message import GetResult, TransferLimits
from logquarry.read.index import Index

if TYPE_CHECKING:
    import pyarrow as pa

    from logquarry.log.batches import DamageLog, OnDamage
    from logquarry.log.walk import LogReader
    from logquarry.read.features import StoreFeatures
    from logquarry.store.consumer.consumer import Consumer
    from logquarry.store.consumer.registry import Consumers
    from logquarry.store.state import StateReader
    from logquarry.store.stats import StoreStats


class QueueOffsets(NamedTuple):
    """The ends of a queue: its first offset, and one past its last."""

    min: int
    max: int


class StoreReads(ABC):
    """The reading half of a store.

    Args:
        layout: the store's files.
        log: its log.
        broker: name of the store, which messages carry.
    """

    def __init__(self, layout: StoreLayout, log: CommitLog, *, broker: str) -> None:
        self.layout = layout
        self.config = layout.config
        self.broker = broker
        self._log = log
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

    def _require_open(self) -> None:
        if not self._is_open:
            raise StoreUnavailable(f"{self.layout.root}: the store was closed")

    @cached_property
    def _state(self) -> StateReader:
        from logquarry.store.state import StateReader

        return StateReader(self)

    @property
    def root(self) -> str:
        """Path or URL of the store."""
        return self.layout.root

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

        Read from the files at each call; docs/rocketmq-5.md lists what each feature forbids.
        """
        from logquarry.read.features import find_features

        self._require_open()
        return find_features(self.layout)

    # --------------------------------------------------------------------------------------- log
    @property
    def min_offset(self) -> int:
        """Physical offset at which the log starts."""
        self._require_open()
        return self._log.min_offset

    @property
    @abstractmethod
    def max_offset(self) -> int:
        """Physical offset at which the log ends."""

    @property
    @abstractmethod
    def bound(self) -> int | None:
        """Physical offset at which a walk over the log ends; None if there is no bound."""

    def message_at(self, physical_offset: int) -> StoredMessage:
        """The message that starts at a physical offset. Its CRC is checked.

        An inner batch of RocketMQ 5 is one message here; :meth:`StoredMessage.unwrap` gives its
        messages.

        Raises:
            MessageNotFound: if no message starts there: outside the log (bytes after its end are
                no message, sound or not), or inside a message or a blank.
            CorruptFrame: if that place of the log is damaged.
        """
        self._require_open()
        if physical_offset >= self.max_offset and self.has_queue_files:
            self.refresh()
        return self._stored(self._log.message_at(physical_offset))

    def message_by_id(self, message_id: str) -> StoredMessage:
        """The message with an id, as the broker gave it (``MessageDecoder.decodeMessageId``).

        Raises:
            UsageError: if it is no message id.
            MessageNotFound: if the store has no message of that id.
            CorruptFrame: if its place in the log is damaged.
        """
        _, physical_offset = ids.decode(message_id)
        message = self.message_at(physical_offset)
        if message.message_id != message_id.upper():
            raise MessageNotFound(
                f"{self.root}: no message {message_id}: the one at {physical_offset} is "
                f"{message.message_id}"
            )
        return message

    def _stored(self, frame: Frame) -> StoredMessage:
        """A frame of this store's log, as the message that users get."""
        return StoredMessage(frame, broker=self.broker, delay_levels_ms=self.layout.delay_levels_ms)

    def _frame_at(self, physical_offset: int) -> Frame | None:
        """The sound frame at a physical offset; None if there is none."""
        if not self.min_offset <= physical_offset < self.max_offset:
            return None
        outcome = self._log.outcome_at(physical_offset)
        return outcome if isinstance(outcome, Frame) else None

    @abstractmethod
    def _log_reader(self) -> LogReader:
        """A walk over the log as it is now."""

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
        """The ends of a queue; (0, 0) if the store has no such queue."""
        queue = self._readable_queue(topic, queue_id)
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
            max_count: most messages; the settings ``max_transfer_...`` limit them too, and a result
                does not cross the end of a queue file. If there is a message, the result has at
                least one.
            tag: a subscription: ``paid``, ``paid || sent``; None or ``*`` for all.

        Raises:
            CorruptFrame: if the first message is damaged. At later damage the result ends before
                it.
        """

    def offset_by_time(self, topic: str, queue_id: int, timestamp_ms: int) -> int:
        """The queue offset of the message stored nearest to a time (``getOffsetInQueueByTime``).

        After the last message's time it is the last message's offset; 0 if there is no message.
        """
        queue = self._readable_queue(topic, queue_id)
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
        since: int | None = None,
        until: int | None = None,
        max_count: int = 32,
        exact: bool = False,
    ) -> list[StoredMessage]:
        """Messages by key, in the order of the log, as RocketMQ's ``queryMessage`` gives them.

        If more than ``max_count`` messages match, you get the newest messages. You never get more
        than ``max_msgs_num_batch``. If the store has no usable index, the whole log is read.

        Args:
            topic: the topic.
            key: one of its keys: a word of KEYS, or UNIQ_KEY.
            since: store time in milliseconds, inclusive; the index keeps whole seconds.
            until: likewise.
            max_count: most messages.
            exact: leave out messages with another key of the same hash, which RocketMQ returns
                too, and second entries of the same message.

        Of an inner batch of RocketMQ 5 you get the messages with the key; all messages if the key
        is the UNIQ_KEY of the batch, which the producer got as the message id. RocketMQ indexes a
        key of KEYS only if the batch itself has it; :meth:`scan` finds the other keys too.
        """
        self._require_open()
        from logquarry.read import query_message

        begin = 0 if since is None else since
        end = java.LONG_MAX if until is None else until
        index = self._index_now()
        if index.is_usable:
            found = query_message.query_message(
                index, self._frame_at, topic, key, max_count, begin, end
            )
            if exact:
                distinct = {frame.physical_offset: frame for frame in found}.values()
                found = [f for f in distinct if query_message.has_key(f, topic, key)]
        else:
            most = min(max_count, self.config.max_msgs_num_batch)
            events = self._log_reader().events()
            found = query_message.search_log(events, topic, key, most, begin, end)
        # More than max_count only if an inner batch has several messages with the key.
        stored = (self._stored(frame) for frame in found)
        messages = [one for message in stored for one in query_message.of_key(message, key)]
        return messages[-max_count:] if max_count > 0 else []

    @abstractmethod
    def _index_now(self) -> Index:
        """The index as it is now."""

    # -------------------------------------------------------------------------------------- bulk
    def scan(
        self,
        topic: str | Iterable[str] | None = None,
        queue_id: int | None = None,
        *,
        tags: str | None = None,
        keys: str | Iterable[str] | None = None,
        since: int | None = None,
        until: int | None = None,
        on_damage: OnDamage = "default",
        damage: DamageLog | None = None,
    ) -> Iterator[StoredMessage]:
        """Messages in physical order; each is decoded when you read it.

        Args:
            topic: the topics' names (default: all messages of the log, also those in no queue).
            queue_id: a queue's number.
            tags: tags as a consumer gives them: ``paid || sent``.
            keys: words of KEYS, or UNIQ_KEYs; a message must have one of them.
            since: earliest store time in milliseconds.
            until: store time in milliseconds at which to stop; exclusive.
            on_damage: ``default`` raises on damage other than a torn tail; ``stop``, ``skip``,
                ``fail``: see :data:`logquarry.log.batches.OnDamage`.
            damage: a list that collects the damage.

        Raises:
            CorruptFrame: on damage, by ``on_damage``.
        """
        self._require_open()
        from logquarry.read import bulk

        wanted = bulk.message_filter(topic, queue_id, tags, keys, since, until)
        layout, stop = self._bulk_layout()
        return bulk.messages(layout, self.broker, wanted, on_damage, damage, stop_offset=stop)

    def to_arrow(
        self,
        topics: str | Iterable[str] | None = None,
        queue_id: int | None = None,
        *,
        columns: Sequence[str] | None = None,
        tags: str | None = None,
        keys: str | Iterable[str] | None = None,
        since: int | None = None,
        until: int | None = None,
        on_damage: OnDamage = "default",
        damage: DamageLog | None = None,
        decompress: bool = False,
    ) -> pa.RecordBatchReader:
        """The same as :meth:`scan`, as a stream of Arrow record batches.

        Args:
            topics: the topics' names.
            queue_id: a queue's number.
            columns: the columns, in their order (default: all of
                :data:`logquarry.log.schema.COLUMNS`). Other columns are not decoded; the CRC of
                bodies is checked only if ``body`` is among the columns.
            tags: as for :meth:`scan`, like the arguments after it.
            keys: words of keys.
            since: earliest store time in milliseconds.
            until: store time at which to stop.
            on_damage: policy at damage, as for :meth:`scan`.
            damage: a list that collects the damage.
            decompress: whether bodies are decompressed.

        Raises:
            CorruptFrame: while batches are read, by ``on_damage``.
        """
        self._require_open()
        from logquarry.read import bulk

        layout, stop = self._bulk_layout()
        return bulk.arrow_reader(
            layout,
            self.broker,
            bulk.message_filter(topics, queue_id, tags, keys, since, until),
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
        start: str | int = "earliest",
        timestamp: int | None = None,
        auto_commit: bool = True,
        timeout: float | None = None,
        max_reconsume_times: int = 16,
    ) -> Consumer:
        """A consumer of a group: an iterator over the messages that the group has not had yet.

        One consumer of the group gets each message at least once. A message counts as handled when
        you request the next one. The store writes the offsets of handled messages to
        ``config/consumerOffset.json`` every ``flush_consumer_offset_interval``, when the consumer
        or the store is closed, and at :meth:`~logquarry.store.consumer.consumer.Consumer.commit`. A
        store that is open for reading writes nothing: its groups continue from the file's offsets,
        and keep their own in memory.

        Consumers of one group in this process share the queues. The group also consumes its retry
        topic.

        Args:
            group: the group's name: letters, digits, ``%``, ``|``, ``-`` and ``_``.
            topics: the topics, which need not exist yet.
            tags: a subscription: ``paid``, ``paid || sent``; None or ``*`` for all.
            sql: or an SQL92 filter over the properties: ``a > 3 AND b = 'x'``.
            start: where a group without offsets in a topic begins: ``earliest``, ``latest``,
                ``timestamp``, or a store time in milliseconds.
            timestamp: the store time of ``start="timestamp"``, in milliseconds.
            auto_commit: whether offsets of handled messages are committed without a call.
            timeout: seconds without a message after which the iteration ends; None for never.
            max_reconsume_times: how often a message that is sent back is delivered again.

        Raises:
            UsageError: if a name or a start is invalid.
            BadFilter: if the filter is invalid.
            UnsupportedStore: if logquarry cannot read the topic's queues or the groups' offsets.
            StoreUnavailable: if the store was closed.
        """
        from logquarry.read.fence import other_queues, require_consumable

        self._require_open()
        topics = [topics] if isinstance(topics, str) else list(topics)
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
        """The object that keeps the consumers of this store."""

    @property
    def _consumers(self) -> Consumers:
        # Two such objects would assign a queue to two consumers.
        with self._consumers_lock:
            if self._has_closed_consumers:
                # The store may take minutes to close; a consumer made meanwhile would never end.
                raise StoreUnavailable("the store was closed")
            if self._made_consumers is None:
                self._made_consumers = self._make_consumers()
            return self._made_consumers

    def _close_consumers(self) -> None:
        """End all consumers permanently. A close that was interrupted calls this a second time."""
        with self._consumers_lock:
            self._has_closed_consumers = True
            consumers = self._made_consumers
        if consumers is not None:
            consumers.close()


def no_queue(topic: str, queue_id: int) -> Queue:
    """A queue without messages, for a name that the store does not have."""
    from logquarry.read.log_queues import empty_queue

    return empty_queue(topic, queue_id)
