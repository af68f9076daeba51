"""Numbers of a store for monitoring.

:class:`StoreState` is read from the files: offsets, bytes per topic, lag, disk use, open
transactions. :class:`StoreStats` counts the calls of an open store, with their times and rates
(``StoreStatsService``).
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Protocol

import numpy as np

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
from logquarry.store.call_counts import BUCKETS, SIZES, CallCounter, CallCounts
from logquarry.store.retention.rules import least_used
from logquarry.store.schedule.delivery import Delays
from logquarry.store.transaction.half import GROUP, HALF_TOPIC, HalfCounter
from logquarry.text import document
from logquarry.write.put_many import PutManyResult

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


Clock = Callable[[], float]

WINDOWS: Final = (10, 60, 600)
"""Seconds over which rates are computed."""
_MS: Final = 1_000


class Rates(NamedTuple):
    """Rates per second over the last 10, 60 and 600 seconds, or since the store was opened."""

    last_10_s: float
    last_60_s: float
    last_600_s: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StoreStats:
    """The counts, times and rates of a store object.

    Attributes:
        seconds: seconds since the store was opened.
        put_messages: number of messages that were put; each message of a batch counts.
        put_bytes: bytes of put messages in the log.
        put_failed: number of puts that were refused (``putMessageFailedTimes``).
        put_times: number of puts in each class of durations; a duration includes the waits for
            flush and replica (``putMessageDistributeTime``).
        put_longest_ms: the longest duration of a put (``putMessageEntireTimeMax``).
        lock_longest_ms: the longest time that a put held the log's lock.
        put_rates: rates of put messages.
        topics: number of put messages by topic, and their bytes.
        get_found: number of gets that returned messages.
        get_missed: number of gets that returned no message.
        get_messages: number of messages returned by gets.
        get_rates: rates of messages returned by gets (``getTransferedTps``).
        get_found_rates: rates of gets that returned messages (``getFoundTps``).
        get_missed_rates: rates of gets that returned no message (``getMissTps``).
        get_longest_ms: the longest get (``getMessageEntireTimeMax``).
        dispatch_behind: bytes of the log that are in no queue yet (``dispatchBehindBytes``).
        flush_behind: bytes of the log that are not known to be on the disk.
        sizes: number of put messages in each class of :data:`SIZES` (sizes of frames), and in a
            last class of larger frames. The frames of a batch are counted with their average size.
        delays: for each topic, the delays of its delivered messages, counted from their born time
            (:class:`Delays`).
        state: the store's current state; empty after the store was closed.
    """

    seconds: float
    put_messages: int
    put_bytes: int
    put_failed: int
    put_times: Mapping[str, int]
    put_longest_ms: float
    lock_longest_ms: float
    put_rates: Rates
    topics: Mapping[str, TopicStats]
    get_found: int
    get_missed: int
    get_messages: int
    get_rates: Rates
    get_found_rates: Rates
    get_missed_rates: Rates
    get_longest_ms: float
    dispatch_behind: int
    flush_behind: int
    sizes: tuple[int, ...]
    delays: Mapping[str, Delays]
    state: StoreState

    @property
    def put_average_size(self) -> float:
        """Average bytes of a frame (``putMessageAverageSize``)."""
        return self.put_bytes / self.put_messages if self.put_messages else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the statistics as a JSON document."""
        rates = ("put_rates", "get_rates", "get_found_rates", "get_missed_rates")
        return document(self) | {
            "topics": {name: found._asdict() for name, found in self.topics.items()},
            **{name: getattr(self, name)._asdict() for name in rates},
        }


class _Sample(NamedTuple):
    time: float
    put: int
    get_messages: int
    get_found: int
    get_missed: int


class StatsRecorder(CallCounter):
    """Counts the puts and gets of a store. Any thread may call the methods."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._began = clock()
        self._samples: deque[_Sample] = deque([_Sample(self._began, 0, 0, 0, 0)])

    def put_many(self, result: PutManyResult, seconds: float) -> None:
        """Count messages of one bulk put. The time in the log's lock is unknown."""
        counts = self.counts()
        for topic, (messages, size) in result.topics.items():
            counts.add_topic(topic, messages, size)
        large = result.size[result.size > SIZES[0]]
        if len(large):
            found = np.bincount(np.searchsorted(SIZES, large), minlength=len(counts.sizes))
            counts.sizes = [a + b for a, b in zip(counts.sizes, found.tolist(), strict=True)]
        counts.whole(seconds)

    def loaded(self, topic: str, messages: int, size: int) -> None:
        """Count messages of a load. The time and the size of each message are unknown."""
        self.counts().add_topic(topic, messages, size)

    def sample(self) -> None:
        """Record the present counts, to compute rates. A thread calls this about once a second."""
        entry = self._entry(self.total())
        self._samples.append(entry)
        # Keep one sample that is older than the longest window.
        while len(self._samples) > 2 and self._samples[1][0] <= entry[0] - WINDOWS[-1]:
            self._samples.popleft()

    def _entry(self, total: CallCounts) -> _Sample:
        put = sum(found.messages for found in total.topics.values())
        gets = total.get_messages, total.get_found, total.get_missed
        return _Sample(self._clock(), put, *gets)

    def snapshot(
        self,
        *,
        dispatch_behind: int = 0,
        flush_behind: int = 0,
        delays: Mapping[str, Delays] | None = None,
        state: StoreState | None = None,
    ) -> StoreStats:
        """Return the present counts."""
        total = self.total()
        now = self._entry(total)
        samples = list(self._samples)
        return StoreStats(
            seconds=now.time - self._began,
            put_messages=now.put,
            put_bytes=sum(found.size for found in total.topics.values()),
            put_failed=total.failed,
            put_times={
                label: count for (label, _), count in zip(BUCKETS, total.all_times(), strict=True)
            },
            put_longest_ms=total.longest * _MS,
            lock_longest_ms=total.lock_longest_ms,
            put_rates=_rates(samples, now, 1),
            topics={
                name: TopicStats(found.messages, found.size)
                for name, found in sorted(total.topics.items())
            },
            get_found=total.get_found,
            get_missed=total.get_missed,
            get_messages=total.get_messages,
            get_rates=_rates(samples, now, 2),
            get_found_rates=_rates(samples, now, 3),
            get_missed_rates=_rates(samples, now, 4),
            get_longest_ms=total.get_longest * _MS,
            dispatch_behind=dispatch_behind,
            flush_behind=flush_behind,
            sizes=(max(0, now.put - sum(total.sizes[1:])), *total.sizes[1:]),
            delays=dict(delays or {}),
            state=StoreState() if state is None else state,
        )


def _rates(samples: list[_Sample], now: _Sample, which: int) -> Rates:
    return Rates(*(_rate(samples, now, which, window) for window in WINDOWS))


def _rate(samples: list[_Sample], now: _Sample, which: int, window: int) -> float:
    """Compute the rate since the newest sample that is at least as old as the window."""
    since = samples[0]
    for sample in samples:
        if sample[0] > now[0] - window:
            break
        since = sample
    seconds = now[0] - since[0]
    return (now[which] - since[which]) / seconds if seconds > 0 else 0.0
