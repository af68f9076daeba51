"""A store, opened: the parts that read it put together. What they do is told there.

How one is written is told in :mod:`logquarry.store.writable_store`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

from logquarry.config import StoreConfig
from logquarry.disk.open_files import OpenFiles
from logquarry.errors import CorruptFile, MessageNotFound, StoreUnavailable, UsageError
from logquarry.format import java, tags
from logquarry.format import message_id as ids
from logquarry.format.checkpoint import Checkpoint
from logquarry.format.frame import Damage, Frame
from logquarry.format.queue_entry import QueueEntry
from logquarry.log.layout import CHECKPOINT, StoreLayout
from logquarry.log.store_names import absolute
from logquarry.message import StoredMessage
from logquarry.read.bulk_reads import BulkReads
from logquarry.read.commit_log import CommitLog
from logquarry.read.consume_queue import ConsumeQueue, Queue
from logquarry.read.get_message import GetResult, TransferLimits, get_message
from logquarry.read.get_message_kernel import GetMessageKernel
from logquarry.read.index import Index
from logquarry.read.log_end import DamageMap, known_damage, last_entries, log_bound, sound_bound
from logquarry.read.log_queues import RetainedCounter
from logquarry.read.messages import read_message
from logquarry.store.consuming import Consuming, QueueAccess, consumers_of_a_reader
from logquarry.store.stats import StatsRecorder, StoreStats
from logquarry.store.store_state import look_at
from logquarry.store.transaction.half import HalfCounter
from logquarry.store.write_api import WriteApi
from logquarry.units import Clock, now_ms

if TYPE_CHECKING:
    from logquarry.log.walk import LogReader
    from logquarry.read.log_queues import LogQueue, QueueKey
    from logquarry.store.consumer.consumers import Consumers

Mode = Literal["r", "rw"]


class QueueOffsets(NamedTuple):
    """The ends of a queue: its first offset, and one past its last."""

    min: int
    max: int


class MessageStore(BulkReads, WriteApi, Consuming):
    """One store directory (``DefaultMessageStore``), open for reading, or for writing too.

    Opening reads little more than a folder; what a question needs is read when it is asked. A
    store can be read beside a live broker: nothing in it is made, locked or touched, and what the
    broker appends is found when it is asked for. One object serves one thread. One that is open
    for writing (:class:`~logquarry.store.writable_store.WritableStore`) serves any number.

    Make one with :meth:`open`, and use it as a context manager.

    Attributes:
        layout: the store's files.
        config: its settings.
        broker: name of the store, which messages carry.
    """

    def __init__(self, layout: StoreLayout, *, broker: str) -> None:
        super().__init__()
        self.layout = layout
        self.config = layout.config
        self.broker = broker
        self._is_open = True
        self._files = OpenFiles(layout)
        self._queues: dict[tuple[str, int], ConsumeQueue] = {}
        self._log = CommitLog(layout, files=self._files, last_entries=self._last_entries)
        self._index = Index(layout, files=self._files)
        self._retained = RetainedCounter()
        self._halves = HalfCounter()

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        mode: Mode = "r",
        config: StoreConfig | None = None,
        clock: Clock | None = None,
        broker: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> MessageStore:
        """The store at a path or URL.

        Args:
            path: the folder that holds ``commitlog/``.
            mode: ``"r"``, or ``"rw"`` to write too: then the store is locked, and made if the
                folder is empty or not there.
            config: what the files do not tell, and what is to be different.
            clock: gives store times in milliseconds, for writing.
            broker: what messages carry as ``broker`` (default: the folder's name).
            storage_options: for a URL, what its file system takes.

        Raises:
            StoreNotFound: if there is no store, or for writing a folder with other things.
            StoreUnavailable: if it cannot be had in that mode: somebody else has it open, or it
                has to be recovered first.
        """
        if mode == "rw":
            from logquarry.store.writable_store import WritableStore

            return WritableStore.start(path, config=config, clock=clock, broker=broker)
        if mode != "r":
            raise UsageError(f'mode is "r" or "rw", not {mode!r}')
        layout = StoreLayout.open(path, config, storage_options)
        name = absolute(path).rstrip("/").rpartition("/")[2] or layout.root
        return cls(layout, broker=name if broker is None else broker)

    # ------------------------------------------------------------------------------ life and state
    def close(self) -> None:
        """Let go of the files. Messages that were read stay good."""
        self._close_consumers()
        self._is_open = False
        self._forget_at_hand()
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def refresh(self) -> None:
        """Look again at what is there: a live broker appends, and deletes what expired.

        Happens by itself where something is asked for that lies beyond what is known, unless the
        queues are made from the log: reading all of that again is for the caller to decide.
        """
        self._require_open()
        self.layout.refresh()
        self._forget_at_hand()
        self._files.close()
        self._log.refresh()
        self._index.refresh()
        for name in ("_log_queues", "bound", "has_queue_files"):
            self.__dict__.pop(name, None)
        for queue in self._queues.values():
            queue.log_min_offset = self._log.min_offset
            queue.refresh()

    def stats(self) -> StoreStats:
        """What the store holds now, and what this object did with it: see :class:`StoreStats`.

        One that is open for reading counts nothing that it does; its ``state`` tells all that can
        be known beside whoever writes it.
        """
        self._require_open()
        state = look_at(self, self._retained, self._halves, now_ms)
        return StatsRecorder().snapshot(
            dispatch_behind=state.dispatch_behind or 0,
            flush_behind=state.flush_behind or 0,
            state=state,
        )

    def _require_open(self) -> None:
        if not self._is_open:
            raise StoreUnavailable(f"{self.layout.root}: the store was closed")

    @property
    def root(self) -> str:
        """Path or URL of the store."""
        return self.layout.root

    @property
    def has_abort(self) -> bool:
        """Whether the store is in use, or was not closed in order."""
        return self.layout.has_abort

    @property
    def is_live(self) -> bool:
        """Whether a process holds the store's lock."""
        return self.layout.is_live()

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The checkpoint, None if there is none.

        Raises:
            CorruptFile: if it is too short to be one.
        """
        try:
            return self.layout.read_checkpoint()
        except ValueError as error:
            path = self.layout.filesystem.full_path(CHECKPOINT)
            raise CorruptFile(path, 0, str(error), kind="checkpoint") from error

    # --------------------------------------------------------------------------------------- log
    @property
    def min_offset(self) -> int:
        """Physical offset at which the log starts."""
        self._require_open()
        return self._log.min_offset

    @property
    def max_offset(self) -> int:
        """Physical offset at which the log ends."""
        self._require_open()
        if not self.has_queue_files:
            # The walk that makes the queues finds the end on its way.
            return self._log_queues[1]
        return self._log.max_offset

    @cached_property
    def bound(self) -> int | None:
        """How far the log is known to reach, for a walk over it (:func:`sound_bound`)."""
        return sound_bound(self.layout, log_bound(self.layout, self._file_queues()))

    def message_at(self, physical_offset: int) -> StoredMessage:
        """The message that starts at a physical offset. Its CRC is checked.

        Raises:
            MessageNotFound: if no message starts there: outside the log (what lies beyond its
                end is no message, sound or not), or within a message or a blank.
            CorruptFrame: if that place of the log is damaged.
        """
        self._require_open()
        if physical_offset >= self.max_offset and self.has_queue_files:
            self.refresh()
        return self._message(self._log.message_at(physical_offset))

    def message_by_id(self, message_id: str) -> StoredMessage:
        """The message of an id, as the broker gave it (``MessageDecoder.decodeMessageId``).

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

    @cached_property
    def _read(self) -> Callable[[bytes, int], StoredMessage | Damage | None]:
        return partial(read_message, self.broker, self.layout.delay_levels_ms)

    def _message(self, frame: Frame) -> StoredMessage:
        return StoredMessage(frame, broker=self.broker, delay_levels_ms=self.layout.delay_levels_ms)

    # ------------------------------------------------------------------------------------ queues
    @cached_property
    def has_queue_files(self) -> bool:
        """Whether any consume queue has a message. Else they are made from the log in memory."""
        return any(queue.last_entry is not None for queue in self._file_queues())

    def queues(self) -> tuple[tuple[str, int], ...]:
        """(topic, queue id) of each queue, sorted."""
        self._require_open()
        if self.has_queue_files:
            return self.layout.queue_names
        return tuple(sorted({*self.layout.queue_names, *self._log_queues[0]}))

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics that have queues, sorted."""
        return tuple(dict.fromkeys(topic for topic, _ in self.queues()))

    def queue(self, topic: str, queue_id: int) -> Queue | None:
        """One queue, None if the store has none of that name."""
        self._require_open()
        if not self.has_queue_files:
            return self._log_queues[0].get((topic, queue_id))
        return self._file_queue(topic, queue_id)

    def _file_queue(self, topic: str, queue_id: int) -> ConsumeQueue | None:
        found = self._queues.get((topic, queue_id))
        # Only names that a listing gave become paths.
        if found is None and (topic, queue_id) in self.layout.queue_names:
            found = self._queues[topic, queue_id] = ConsumeQueue(
                self.layout,
                topic,
                queue_id,
                log_min_offset=self._log.min_offset,
                files=self._files,
            )
        return found

    def _file_queues(self) -> Iterator[ConsumeQueue]:
        for topic, queue_id in self.layout.queue_names:
            if (queue := self._file_queue(topic, queue_id)) is not None:
                yield queue

    def queue_offsets(self, topic: str, queue_id: int) -> QueueOffsets:
        """The ends of a queue; (0, 0) for one that is not there."""
        queue = self.queue(topic, queue_id)
        if queue is None:
            return QueueOffsets(0, 0)
        return QueueOffsets(queue.min_offset, queue.max_offset)

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
            max_count: most messages; the settings ``max_transfer_...`` cap them too, and no
                answer goes beyond the end of a queue file. At least one message comes, if any.
            tag: a subscription: ``paid``, ``paid || sent``; None or ``*`` for all.

        Raises:
            CorruptFrame: if the first message is damaged. Damage further on ends the answer
                before it.
        """
        queue = self.queue(topic, queue_id)
        if self.has_queue_files and self._may_have_grown(queue, offset):
            self.refresh()
            queue = self.queue(topic, queue_id)
        if queue is None:
            queue = _no_queue(topic, queue_id)
        return self._get(self._quick, queue, offset, max_count, tags.parse(tag))

    def _get(
        self,
        quick: GetMessageKernel,
        queue: Queue,
        offset: int,
        max_count: int,
        wanted: frozenset[str] | None,
    ) -> GetResult:
        found = quick.get(queue, offset, max_count, wanted)
        if found is not None:
            return found
        return get_message(
            self._log,
            queue,
            offset,
            max_count,
            tags=wanted,
            limits=quick.limits,
            read=self._read,
            known_damage=self._known_damage,
        )

    @cached_property
    def _known_damage(self) -> DamageMap:
        return known_damage(self.layout)

    @cached_property
    def _quick(self) -> GetMessageKernel:
        return GetMessageKernel(self._log, self._limits, self.broker, self.layout.delay_levels_ms)

    def _forget_at_hand(self) -> None:
        self._quick.forget()
        if "_quick_in_bulk" in self.__dict__:
            self._quick_in_bulk.forget()

    def _may_have_grown(self, queue: Queue | None, offset: int) -> bool:
        """Whether a writer may have made what is asked for since the files were looked at."""
        if queue is None:
            return True
        if offset < queue.max_offset or not isinstance(queue, ConsumeQueue):
            return False
        self._quick.forget()
        queue.refresh()
        return offset < queue.max_offset

    def offset_by_time(self, topic: str, queue_id: int, timestamp_ms: int) -> int:
        """The queue offset of the message stored nearest to a time (``getOffsetInQueueByTime``).

        Beyond the end it is the last message's; 0 where there is none.
        """
        queue = self.queue(topic, queue_id)
        if queue is None:
            return 0
        return queue.offset_by_time(
            timestamp_ms, self._log.store_time_at, log_min_offset=self._log.min_offset
        )

    @cached_property
    def _limits(self) -> TransferLimits:
        return TransferLimits.of(self.config)

    def _last_entries(self) -> list[QueueEntry]:
        return last_entries(self.layout, self._file_queues())

    @cached_property
    def _log_queues(self) -> tuple[Mapping[QueueKey, LogQueue], int]:
        """The queues as the log tells them, and its end."""
        from logquarry.read.log_queues import QueueBuilder

        builder = QueueBuilder(self.config, self.layout.delay_levels_ms).add(
            self._log_reader().events()
        )
        end = self._log.min_offset if builder.log_end is None else builder.log_end
        self._log.max_offset = end
        return builder.queues(), end

    def _log_reader(self) -> LogReader:
        from logquarry.log.walk import LogReader

        return LogReader(self.layout, bound=self.bound, live=self.is_live)

    def _bulk_layout(self) -> tuple[StoreLayout, int | None]:
        return self.layout, None

    # --------------------------------------------------------------------------------- consumers
    @cached_property
    def _quick_in_bulk(self) -> GetMessageKernel:
        from logquarry.store.consumer.reading import AT_ONCE

        return GetMessageKernel(self._log, AT_ONCE, self.broker, self.layout.delay_levels_ms)

    @property
    def _queue_access(self) -> QueueAccess:
        """How consumers reach the queues, without the caps of a ``get``."""
        return QueueAccess(
            names=self.queues,
            queue=self.queue,
            read=partial(self._get, self._quick_in_bulk),
            store_time=self._log.store_time_at,
        )

    def _make_consumers(self) -> Consumers:
        return consumers_of_a_reader(
            self._queue_access,
            self.refresh,
            lambda: self._log.files.end,
            Path(self.root),
            self.put,
        )

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

        The newest ones if there are more than ``max_count`` (and never more than
        ``max_msgs_num_batch``). A store without a usable index is searched from end to end.

        Args:
            topic: the topic.
            key: one of its keys: a word of KEYS, or UNIQ_KEY.
            since: store time in milliseconds, inclusive; the index keeps whole seconds.
            until: likewise.
            max_count: most messages.
            exact: leave out messages of other keys that hash alike, which come along with
                RocketMQ, and messages that the index has twice.
        """
        self._require_open()
        from logquarry.read import query_message

        begin = 0 if since is None else since
        end = java.LONG_MAX if until is None else until
        index = self._index_now()
        if index.is_usable:
            found = query_message.query_message(
                index, self._frame_in_log, topic, key, max_count, begin, end
            )
            if exact:
                distinct = {frame.physical_offset: frame for frame in found}.values()
                found = [f for f in distinct if query_message.has_key(f, topic, key)]
        else:
            most = min(max_count, self.config.max_msgs_num_batch)
            events = self._log_reader().events()
            found = query_message.search_log(events, topic, key, most, begin, end)
        return [self._message(frame) for frame in found]

    def _index_now(self) -> Index:
        return self._index

    def _frame_in_log(self, physical_offset: int) -> Frame | None:
        if not self.min_offset <= physical_offset < self.max_offset:
            return None
        outcome = self._log.outcome_at(physical_offset)
        return outcome if isinstance(outcome, Frame) else None


def _no_queue(topic: str, queue_id: int) -> Queue:
    from logquarry.read.log_queues import empty_queue

    return empty_queue(topic, queue_id)
