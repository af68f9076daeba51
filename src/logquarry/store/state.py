"""Reads the current state of a store: offsets, bytes per topic, lag, disk use, open transactions.

Any process can read this state, even while another process writes the store. RocketMQ has similar
numbers in its runtime info (``DefaultMessageStore.getRuntimeInfo``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from logquarry.config import StoreConfig
from logquarry.dialect31.open_transactions import open_in, read_table
from logquarry.disk.config_file import consumer_offsets, delay_offsets
from logquarry.format import java
from logquarry.format import properties as props
from logquarry.log.filesystem import LocalFileSystem
from logquarry.log.layout import StoreLayout
from logquarry.log.store_files import BATCH_QUEUE, COMMIT_LOG, CONSUME_QUEUE, INDEX
from logquarry.read.commit_log import CommitLog
from logquarry.read.log_queues import QueueKey, RetainedCounter
from logquarry.read.queue import Queue
from logquarry.read.rocksdb_queue import rocksdb_folders
from logquarry.store.retention.rules import least_used
from logquarry.store.transaction.half import GROUP, HALF_TOPIC, HalfCounter
from logquarry.text import document

State = Literal["closed", "live", "crashed"]
"""``closed``: shut down cleanly; ``live``: a process has the store open; ``crashed``: neither."""


class StateSource(Protocol):
    """A store whose state can be read."""

    @property
    def layout(self) -> StoreLayout:
        """The store's files."""

    @property
    def config(self) -> StoreConfig:
        """The store's settings."""

    @property
    def is_live(self) -> bool:
        """Whether a process holds the store's lock."""

    @property
    def has_abort(self) -> bool:
        """Whether the store is in use, or was not shut down cleanly."""

    @property
    def min_offset(self) -> int:
        """Physical offset at which the log starts."""

    @property
    def max_offset(self) -> int:
        """Physical offset at which the log ends."""

    def queues(self) -> tuple[QueueKey, ...]:
        """Return topic and queue id of each queue."""

    def queue(self, topic: str, queue_id: int) -> Queue | None:
        """Return one queue; None if there is no such queue."""


def condition(store: StateSource) -> State:
    """Return whether a store is closed, open in some process, or has crashed."""
    return "live" if store.is_live else "crashed" if store.has_abort else "closed"


class TopicStats(NamedTuple):
    """Messages of a topic, and their bytes in the log."""

    messages: int
    bytes: int


class GroupLag(NamedTuple):
    """The number of messages in a topic that a consumer group has not committed."""

    group: str
    topic: str
    messages: int


class DelayLevel(NamedTuple):
    """The progress of the delivery of one delay level (``scheduleMessageOffset_N``).

    ``level`` begins with 1. ``delivered`` is the queue offset of the next message to deliver;
    ``max_offset`` is the queue offset after the last delayed message.
    """

    level: int
    delivered: int
    max_offset: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StoreState:
    """The current state of a store. None means that a value is unknown.

    Attributes:
        state: see :data:`State`.
        min_offset: physical offset where the log begins (``commitLogMinOffset``).
        max_offset: physical offset where the log ends (``commitLogMaxOffset``).
        first_timestamp: store time of the log's first message, in milliseconds.
        reserve_time_ms: age of the log's first message, in milliseconds.
        file_bytes: total size of the files in ``commitlog``, ``consumequeue``, ``index``, and in
            further folders of queues.
        commit_log_disk_ratio: used share of the log's disk, from 0 to 1
            (``commitLogDiskRatio``). If the log is on several disks, the disk with the most free
            space counts.
        consume_queue_disk_ratio: used share of the queues' disk (``consumeQueueDiskRatio``).
        dispatch_behind: bytes of the log that are in no queue yet. If another process writes the
            store, all bytes after the last queued message count, including a blank.
        flush_behind: bytes of the log that are not known to be on the disk; None without a durable
            offset.
        retained: for each topic, the messages of its queues that are still in the log. With
            multi-dispatch, a message counts in each topic that has an entry of the message.
        consumer_lag: the lag of each group and topic in ``config/consumerOffset.json``.
        delay_levels: the progress of each delay level that has a queue.
        half_messages: by topic, the number of messages whose transaction is open.
    """

    state: State = "closed"
    min_offset: int = 0
    max_offset: int = 0
    first_timestamp: int | None = None
    reserve_time_ms: int | None = None
    file_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    commit_log_disk_ratio: float | None = None
    consume_queue_disk_ratio: float | None = None
    dispatch_behind: int | None = None
    flush_behind: int | None = None
    retained: Mapping[str, TopicStats] = dataclasses.field(default_factory=dict)
    consumer_lag: tuple[GroupLag, ...] = ()
    delay_levels: tuple[DelayLevel, ...] = ()
    half_messages: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the state as a JSON document."""
        return document(self) | {
            "retained": {name: topic._asdict() for name, topic in self.retained.items()},
            "consumer_lag": [lag._asdict() for lag in self.consumer_lag],
            "delay_levels": [level._asdict() for level in self.delay_levels],
        }


class StateReader:
    """Reads the state of one store, with a cache for the next reading. Any thread may read."""

    def __init__(self, store: StateSource) -> None:
        self._store = store
        self._retained = RetainedCounter()
        self._halves = HalfCounter()

    def read(
        self,
        now: Callable[[], int],
        *,
        queues: list[Queue] | None = None,
        behind: tuple[int, int] | None = None,
    ) -> StoreState:
        """Return the store's current state.

        If this process writes the store, ``behind`` has ``dispatch_behind`` and ``flush_behind``.
        """
        store = self._store
        layout = StoreLayout(store.layout.filesystem, store.config)
        state = condition(store)
        start, end = store.min_offset, store.max_offset
        if queues is None:
            queues = [queue for name in store.queues() if (queue := store.queue(*name)) is not None]
        retained = _retained(self._retained, queues, start, end)
        first = _first_timestamp(layout, start) if end > start else None
        dispatch, flush = behind or _behind(layout, queues, start, end, state)
        return StoreState(
            state=state,
            min_offset=start,
            max_offset=end,
            first_timestamp=first,
            reserve_time_ms=None if first is None else max(0, now() - first),
            file_bytes=file_bytes(layout),
            commit_log_disk_ratio=_disk_ratio(layout, layout.log_folders.paths),
            consume_queue_disk_ratio=_disk_ratio(layout, (CONSUME_QUEUE,)),
            dispatch_behind=dispatch,
            flush_behind=flush,
            retained=retained,
            consumer_lag=_consumer_lag(layout, queues),
            delay_levels=_delay_levels(layout, queues),
            half_messages=_half_messages(layout, queues, self._halves, start),
        )


def _retained(
    counter: RetainedCounter, queues: list[Queue], start: int, end: int
) -> dict[str, TopicStats]:
    found: dict[str, TopicStats] = {}
    for (topic, _), count in counter.count(queues, start, end).items():
        before = found.get(topic, TopicStats(0, 0))
        found[topic] = TopicStats(before.messages + count.messages, before.bytes + count.bytes)
    return dict(sorted(found.items()))


def _first_timestamp(layout: StoreLayout, start: int) -> int | None:
    """Return the time of the log's first message; None if damage or a blank is first."""
    first = CommitLog(layout).sound_frame_at(start, check_crc=False)
    return None if first is None else first.store_timestamp


def _behind(
    layout: StoreLayout, queues: list[Queue], start: int, end: int, state: State
) -> tuple[int | None, int | None]:
    durable = layout.durable_end
    flush = None if durable is None else max(0, end - durable)
    if state == "closed":
        return 0, 0
    queued = max((queue.last_physical_end or 0 for queue in queues), default=0)
    return max(0, end - max(start, queued)), flush


def file_bytes(layout: StoreLayout) -> dict[str, int]:
    """Return the bytes of the files of log, queues and index, by folder."""
    queues = (file for queue in layout.queue_files() for file in queue.files)
    found = {
        COMMIT_LOG: sum(file.size for file in layout.commit_log.files),
        CONSUME_QUEUE: sum(file.size for file in queues),
    }
    for folder in rocksdb_folders(layout):
        files = (entry for entry in layout.filesystem.list(folder) if not entry.is_dir)
        found[folder] = found.get(folder, 0) + sum(entry.size for entry in files)
    if layout.batch_queue_names:
        batch = (file for queue in layout.batch_queue_files() for file in queue.files)
        found[BATCH_QUEUE] = sum(file.size for file in batch)
    return found | {INDEX: sum(entry.size for entry in layout.index_files)}


def _disk_ratio(layout: StoreLayout, folders: Iterable[str]) -> float | None:
    if not isinstance(layout.filesystem, LocalFileSystem):
        return None
    use = least_used(Path(layout.root) / folder for folder in folders)
    return None if use is None else use.ratio


def _half_messages(
    layout: StoreLayout, queues: list[Queue], counter: HalfCounter, start: int
) -> dict[str, int]:
    frame_at = partial(CommitLog(layout).sound_frame_at, check_crc=False)
    passed = consumer_offsets(layout).get((HALF_TOPIC, GROUP), {})
    found = counter.count(queues, frame_at, passed)
    opened = open_in(read_table(layout)) if layout.has_state_table else {}
    frames = (frame_at(offset) for offset in opened if offset >= start)
    found.update(
        frame.topic.decode("utf-8", java.UTF8_ERRORS) for frame in frames if frame is not None
    )
    return dict(sorted(found.items()))


def _consumer_lag(layout: StoreLayout, queues: list[Queue]) -> tuple[GroupLag, ...]:
    table = consumer_offsets(layout)
    bounds = {(queue.topic, queue.queue_id): queue.bounds() for queue in queues}
    found = []
    for (topic, group), offsets in sorted(table.items()):
        lag = 0
        for queue_id, offset in offsets.items():
            low, high = bounds.get((topic, queue_id), (0, 0))
            lag += max(0, high - max(low, offset))
        found.append(GroupLag(group, topic, lag))
    return tuple(found)


def _delay_levels(layout: StoreLayout, queues: list[Queue]) -> tuple[DelayLevel, ...]:
    table = delay_offsets(layout) or {}
    return tuple(
        DelayLevel(
            queue.queue_id + 1,
            # Do not count expired messages, because they are never delivered.
            max(table.get(queue.queue_id + 1, 0), queue.min_offset),
            queue.max_offset,
        )
        for queue in queues
        if queue.topic == props.SCHEDULE_TOPIC
    )
