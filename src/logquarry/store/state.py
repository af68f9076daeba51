"""Reads the present state of a store: offsets, bytes per topic, lag, disk use, open transactions.

Any process can read this state, even while another process writes the store. RocketMQ has similar
numbers in its runtime info (``DefaultMessageStore.getRuntimeInfo``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

from logquarry.dialect31.open_transactions import (
    TransactionBook,
    open_in,
    read_table,
    transaction_frames,
)
from logquarry.disk.config_file import consumer_offsets, delay_offsets
from logquarry.format import frame, java, sys_flag
from logquarry.format import properties as props
from logquarry.log.filesystem import LocalFileSystem
from logquarry.log.layout import StoreLayout
from logquarry.log.store_files import BATCH_QUEUE, COMMIT_LOG, CONSUME_QUEUE, INDEX
from logquarry.log.walk import LogReader, Run
from logquarry.read.commit_log import CommitLog
from logquarry.read.log_queues import RetainedCounter
from logquarry.read.queue import Queue
from logquarry.read.rocksdb_queue import rocksdb_folders
from logquarry.store.consumer.group import lag_of
from logquarry.store.reads import StoreReads
from logquarry.store.retention.rules import least_used
from logquarry.store.transaction.transaction import (
    GROUP,
    HALF_TOPIC,
    OP_TOPIC,
    HalfCounter,
    ended_by,
)
from logquarry.text import document

ConsumerTable = Mapping[tuple[str, str], Mapping[int, int]]
"""Consumer offsets: (topic, group) -> queue id -> queue offset."""

State = Literal["closed", "live", "crashed"]
"""``live``: a process has the store open for writing. ``crashed``: the store is not live, but has
an abort file. ``closed``: it was shut down cleanly.
"""


def condition(store: StoreReads) -> State:
    """Return the state of a store (see :data:`State`)."""
    return "live" if store.is_live else "crashed" if store.has_abort else "closed"


class TopicStats(NamedTuple):
    """The number of messages of a topic, and their total size in the log in bytes."""

    messages: int
    bytes: int


class GroupLag(NamedTuple):
    """The number of messages in a topic that a consumer group has not committed."""

    group: str
    topic: str
    messages: int


class DelayLevel(NamedTuple):
    """The progress of the delivery of one delay level (``scheduleMessageOffset_N``).

    ``level`` begins with 1. ``delivered`` is the queue offset of the next message to deliver, and
    ``max_offset`` is the end of the level's queue.
    """

    level: int
    delivered: int
    max_offset: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StoreState:
    """The state of a store at the time of reading. None means that a value is unknown.

    Attributes:
        state: see :data:`State`.
        min_offset: physical offset where the log begins (``commitLogMinOffset``).
        max_offset: physical offset where the log ends (``commitLogMaxOffset``).
        first_timestamp: store time of the log's first message, in milliseconds.
        reserve_time_ms: time since the log's first message was stored, in milliseconds.
        file_bytes: for each of the folders ``commitlog``, ``consumequeue``, ``index`` and further
            folders of queues, the total size of its files.
        commit_log_disk_ratio: the used part of the disk that holds the log, from 0 to 1
            (``commitLogDiskRatio``). If several disks hold the log, it is the value of the least
            full disk.
        consume_queue_disk_ratio: the used part of the disk that holds the queues
            (``consumeQueueDiskRatio``).
        dispatch_behind: number of bytes at the log's end that are not dispatched to the queues yet.
            If another process writes the store, all bytes after the last dispatched message are
            counted, even if they are only a blank.
        flush_behind: number of bytes at the log's end that are not known to be synced; None if the
            store has no record of the durable offset and ``state`` is not ``closed``.
        retained: for each topic, the number of messages in its queues that are still in the log,
            and their bytes. With multi-dispatch, a message has entries in several queues, and is
            counted in the topic of each queue.
        consumer_lag: for each group and topic in ``config/consumerOffset.json``, the number of
            messages that the group has not committed.
        delay_levels: for each delay level with a queue, the progress of its delivery.
        half_messages: for each topic, the number of messages in transactions that are still open.
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
        return document(self)


class StateReader:
    """Reads the state of one store. A cache makes the next reading faster. Any thread may read."""

    def __init__(self, store: StoreReads) -> None:
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

        If this process writes the store, the caller passes (``dispatch_behind``, ``flush_behind``)
        as ``behind``.
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
        offsets = consumer_offsets(layout)
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
            consumer_lag=_consumer_lag(offsets, queues),
            delay_levels=_delay_levels(layout, queues),
            half_messages=_half_messages(layout, queues, self._halves, start, offsets),
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
    """Return the store time of the log's first message; None if the log starts with damage or a
    blank.
    """
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
    """Return the total size of the files in each folder of log, queues and index."""
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
    use = least_used(layout.filesystem.local_path(folder) for folder in folders)
    return None if use is None else use.ratio


def _half_messages(
    layout: StoreLayout,
    queues: list[Queue],
    counter: HalfCounter,
    start: int,
    offsets: ConsumerTable,
) -> dict[str, int]:
    frame_at = partial(CommitLog(layout).sound_frame_at, check_crc=False)
    found = counter.count(queues, frame_at, offsets.get((HALF_TOPIC, GROUP), {}))
    opened = open_in(read_table(layout)) if layout.has_state_table else {}
    frames = (frame_at(offset) for offset in opened if offset >= start)
    found.update(one.topic.decode("utf-8", java.UTF8_ERRORS) for one in frames if one is not None)
    return dict(sorted(found.items()))


def _consumer_lag(table: ConsumerTable, queues: list[Queue]) -> tuple[GroupLag, ...]:
    # A store can have a million groups, so do as little as possible for each group.
    bounds: dict[str, dict[int, tuple[int, int]]] = {}
    for queue in queues:
        bounds.setdefault(queue.topic, {})[queue.queue_id] = queue.bounds()
    groups: dict[str, list[str]] = {}
    for topic, group in table:
        groups.setdefault(topic, []).append(group)
    found = []
    for topic in sorted(groups):
        there = bounds.get(topic, {})
        for group in sorted(groups[topic]):
            count = 0
            for queue_id, offset in table[topic, group].items():
                if queue_id in there:
                    count += lag_of(*there[queue_id], offset)
            found.append(GroupLag(group, topic, count))
    return tuple(found)


def _delay_levels(layout: StoreLayout, queues: list[Queue]) -> tuple[DelayLevel, ...]:
    table = delay_offsets(layout) or {}
    return tuple(
        DelayLevel(
            queue.queue_id + 1,
            # Expired messages are never delivered, so count from the first message that the queue
            # still has.
            max(table.get(queue.queue_id + 1, 0), queue.min_offset),
            queue.max_offset,
        )
        for queue in queues
        if queue.topic == props.SCHEDULE_TOPIC
    )


# --------------------------------------------------------------------------------------------------
# The transactions of a store (``info --transactions``): committed, rolled back, open
#
# In a store of 4.x, a half message waits in RMQ_SYS_TRANS_HALF_TOPIC. When a half message is
# committed or rolled back, the broker adds an op message to RMQ_SYS_TRANS_OP_HALF_TOPIC. The op
# message has the tag ``d``, and its body is the queue offset of the half message. A commit also
# leaves a COMMIT frame with the half message's physical offset. While a half message is open, the
# broker's checker may put a copy of the half message at the end of the queue. The checker then
# advances its own consumer offset past the original. So if a half message before this consumer
# offset has no op message, the checker has replaced the half message by a copy, or has abandoned
# it. After too many checks, the checker puts a copy into TRANS_CHECK_MAX_TIME_TOPIC, but no op
# message.
#
# In a store of 3.x, a half message is a PREPARED frame in the log, and no queue has an entry for
# it. The COMMIT or ROLLBACK frame contains the physical offset of the PREPARED frame
# (docs/dialect-3.1.md).


@dataclasses.dataclass(frozen=True, slots=True)
class HalfMessage:
    """An open half message.

    For a PREPARED message of 3.x, ``queue_offset`` is the index of its entry in the state table.
    """

    queue_id: int
    queue_offset: int
    physical_offset: int
    topic: str
    born_timestamp: int
    store_timestamp: int
    check_times: int


@dataclasses.dataclass(slots=True)
class Transactions:
    """The outcomes of the half messages of a store.

    Attributes:
        committed: number of half messages whose committed message is in the log.
        rolled_back: number of half messages with an op message, but without a committed message in
            the log. In a store of 3.x: number of half messages with a ROLLBACK frame in the log.
        put_back: number of half messages that the checker replaced by a copy, or stopped checking.
        open: the half messages that have not ended.
        unreadable: number of queue entries of the half topic whose message in the log is damaged or
            deleted. In a store of 3.x: number of open transactions whose PREPARED message is
            damaged or deleted.
    """

    committed: int = 0
    rolled_back: int = 0
    put_back: int = 0
    open: list[HalfMessage] = dataclasses.field(default_factory=list)
    unreadable: int = 0


def transactions(store: StoreReads) -> Transactions:
    """Read the outcomes of the half messages in a store."""
    found = _prepared(store) if store.layout.has_state_table else Transactions()
    log = CommitLog(store.layout)
    checked = consumer_offsets(store.layout).get((HALF_TOPIC, GROUP), {})
    halves: dict[int, HalfMessage] = {}
    for topic, queue_id in store.queues():
        queue = store.queue(topic, queue_id) if topic == HALF_TOPIC else None
        if queue is None:
            continue
        ended = ended_by(store.queue(OP_TOPIC, queue_id), log.sound_frame_at, 0)
        for offset, entry in queue.entries():
            if entry.is_filler:
                continue
            half = log.sound_frame_at(entry.physical_offset)
            if half is None:
                found.unreadable += 1
                continue
            message = _half(queue_id, offset, half)
            if offset in ended:
                halves[half.physical_offset] = message
            elif offset < checked.get(queue_id, 0):
                found.put_back += 1
            else:
                found.open.append(message)
    committed = _committed(store, halves)
    found.committed += len(committed)
    found.rolled_back += len(halves) - len(committed)
    return found


def _prepared(store: StoreReads) -> Transactions:
    found = Transactions()
    book = TransactionBook()
    for event in LogReader(store.layout, bound=store.bound).events():
        if not isinstance(event, Run):
            continue
        for taken in transaction_frames(event.window, event.rows):
            change = book.take(taken)
            if change is not None and change.unit is None:
                found.committed += change.state == sys_flag.TRANSACTION_COMMIT
                found.rolled_back += change.state == sys_flag.TRANSACTION_ROLLBACK
    log = CommitLog(store.layout)
    for transaction in book:
        outcome = log.sound_frame_at(transaction.physical_offset)
        if outcome is None:
            found.unreadable += 1
            continue
        found.open.append(
            HalfMessage(
                queue_id=outcome.queue_id,
                queue_offset=transaction.number,
                physical_offset=outcome.physical_offset,
                topic=outcome.topic.decode("utf-8", java.UTF8_ERRORS),
                born_timestamp=outcome.born_timestamp,
                store_timestamp=outcome.store_timestamp,
                check_times=0,
            )
        )
    return found


def _half(queue_id: int, offset: int, half: frame.Frame) -> HalfMessage:
    properties = props.decode_bytes(half.properties)
    times = properties.get(props.TRANSACTION_CHECK_TIMES, "")
    return HalfMessage(
        queue_id=queue_id,
        queue_offset=offset,
        physical_offset=half.physical_offset,
        topic=properties.get(props.REAL_TOPIC, ""),
        born_timestamp=half.born_timestamp,
        store_timestamp=half.store_timestamp,
        check_times=max(0, java.digits(times)),
    )


def _committed(store: StoreReads, halves: dict[int, HalfMessage]) -> set[int]:
    if not halves:
        return set()
    # Import late: the modules import pyarrow, and only this function needs it.
    from logquarry.log import columns
    from logquarry.log.batches import MessageFilter, sound_runs
    from logquarry.read.selection import Selection, plan_read, read_in_order

    topics = frozenset(half.topic for half in halves.values())
    selection = Selection(wanted=MessageFilter(topics=topics), start_offset=min(halves))
    plan = plan_read(store.layout, selection)
    events = read_in_order(store.layout, plan)
    found: set[int] = set()
    for run in sound_runs(events, "skip"):
        values = columns.fixed_fields(
            run.window, run.rows, ["sys_flag", "prepared_transaction_offset"]
        )
        ends = values["sys_flag"] & sys_flag.TRANSACTION_MASK == sys_flag.TRANSACTION_COMMIT
        found.update(values["prepared_transaction_offset"][ends].tolist())
    return found & halves.keys()
