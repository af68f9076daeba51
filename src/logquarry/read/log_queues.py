"""Builds consume queues in memory from the log. Counts, for each queue, the messages that are still
in the log.

One walk over the log makes the same entries as RocketMQ's dispatcher
(``ConsumeQueue.putMessagePositionInfoWrapper``), because each frame contains its queue and its
queue offset.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

import numpy as np

from logquarry.config import StoreConfig
from logquarry.format import java, queue_entry
from logquarry.format import properties as props
from logquarry.format.arrays import Bools, Int64, consecutive
from logquarry.format.queue_entry import QueueEntry
from logquarry.log.frames import message_counts
from logquarry.log.walk import Event, LogEnd, Run
from logquarry.read.queue import NO_CODE, UNIT_DTYPE, Queue, QueueSegment, Units, has_message
from logquarry.stored_message import StoredMessage

_CHUNK: Final = 1 << 20


class UnitCount(NamedTuple):
    """The messages to which some entries point: their number, their total bytes, and the largest
    size. ``end`` is the physical offset after the last of these messages.
    """

    messages: int = 0
    bytes: int = 0
    largest: int = 0
    end: int = 0

    def plus(self, other: UnitCount) -> UnitCount:
        """Add two counts."""
        return UnitCount(
            self.messages + other.messages,
            self.bytes + other.bytes,
            max(self.largest, other.largest),
            max(self.end, other.end),
        )


def count_units(
    units: Units, min_offset: int, max_offset: int, *, is_batch: bool = False
) -> UnitCount:
    """Count the entries that point to a message between two physical offsets.

    With ``is_batch``, several neighbouring entries may point to the same frame. The bytes of the
    frame are then counted once.
    """
    if is_batch:
        firsts = units[np.append(True, np.diff(units["physical_offset"]) != 0)[: len(units)]]
        frames = count_units(firsts, min_offset, max_offset)
        return frames._replace(messages=count_units(units, min_offset, max_offset).messages)
    found = UnitCount()
    for start in range(0, len(units), _CHUNK):
        part = units[start : start + _CHUNK]
        # Copy the sizes into an array: in the entries, the size fields are 20 bytes
        # apart, which makes checks and sums slower.
        sizes = part["size"].astype(np.int32)
        first, end = int(part["physical_offset"][0]), int(part["physical_offset"][-1])
        whole = min_offset <= first <= end < max_offset and int(sizes.min()) > 0
        if not whole or int(sizes.max()) == queue_entry.FILLER_SIZE:
            offsets = part["physical_offset"]
            inside = has_message(part) & (offsets >= min_offset) & (offsets < max_offset)
            sizes = sizes[inside]
            end = int(offsets[inside][-1]) if len(sizes) else 0
        if len(sizes):
            total, largest = int(sizes.sum(dtype=np.int64)), int(sizes.max())
            found = found.plus(UnitCount(len(sizes), total, largest, end + int(sizes[-1])))
    return found


class _Counted:
    """The count of one queue.

    Attributes:
        files: maps the number of each queue file to the count of its messages.
        until: the queue offset up to which entries were counted.
        last: the entry directly before ``until``; None if there is none. If the queue later has a
            different entry at this queue offset, the topic was deleted and recreated.
    """

    __slots__ = ("files", "last", "until")

    def __init__(self) -> None:
        self.files: dict[int, UnitCount] = {}
        self.until = 0
        self.last: QueueEntry | None = None


class RetainedCounter:
    """Counts the messages in the log, by queue. Any thread may use the object.

    Each call reads the entries that are new since the last call. If retention has moved the log's
    start since then, the call also counts the oldest queue files again, because some of their
    messages have expired.
    """

    def __init__(self) -> None:
        self._counting = threading.Lock()
        self._queues: dict[QueueKey, _Counted] = {}
        self._log_start = 0

    def count(
        self, queues: Iterable[Queue], log_start: int, log_end: int
    ) -> dict[QueueKey, UnitCount]:
        """Count the messages between two physical offsets, by queue. ``queues`` must contain all
        queues of the store: if a queue is missing, this object deletes the queue's counts.
        """
        with self._counting:
            has_moved, self._log_start = log_start != self._log_start, log_start
            found = {}
            for queue in queues:
                key = queue.topic, queue.queue_id
                known = self._queues.setdefault(key, _Counted())
                low, high = queue.bounds()
                is_shorter = high < known.until
                if is_shorter or (
                    low < known.until and queue.entry_before(known.until) != known.last
                ):
                    # The queue no longer has the entries that were counted, because the topic was
                    # deleted and recreated.
                    known = self._queues[key] = _Counted()
                if has_moved:
                    self._drop(queue, known, log_start, log_end)
                start = max(low, known.until)
                until = start + self._add(queue, known, start, high, log_start, log_end)
                if until != known.until:
                    known.until, known.last = until, queue.entry_before(until)
                total = UnitCount()
                for count in known.files.values():
                    total = total.plus(count)
                found[key] = total
            for key in self._queues.keys() - found.keys():
                del self._queues[key]
            return found

    @staticmethod
    def _add(
        queue: Queue, known: _Counted, start: int, stop: int, log_start: int, log_end: int
    ) -> int:
        """Count the entries in a range; return how many queue offsets were counted."""
        done = start
        for first, units in queue.runs(start, stop):
            # Stop at an entry for a message after ``log_end``. If another process writes the log,
            # the caller may have read the log's end before the queues.
            behind = units["physical_offset"] >= log_end
            count = int(behind.argmax()) if bool(behind.any()) else len(units)
            number = first // queue.units_per_file
            before = known.files.get(number, UnitCount())
            counted = count_units(units[:count], log_start, log_end, is_batch=queue.is_batch)
            known.files[number] = before.plus(counted)
            done = first + count
            if count < len(units):
                break
        return done - start

    @staticmethod
    def _drop(queue: Queue, known: _Counted, log_start: int, log_end: int) -> None:
        """Count the oldest queue files again, after retention has moved the log's start.

        Delete the counts of files without a message in the log. Stop after the first file whose
        first message is still in the log.
        """
        room = queue.units_per_file
        for number in sorted(known.files):
            start, stop = number * room, min((number + 1) * room, known.until)
            total, is_whole = UnitCount(), False
            for first, units in queue.runs(start, stop):
                is_whole = first == start and int(units["physical_offset"][0]) >= log_start
                counted = count_units(units, log_start, log_end, is_batch=queue.is_batch)
                total = total.plus(counted)
            if total.messages:
                known.files[number] = total
            else:
                del known.files[number]
            if is_whole:
                break


LMQ_PREFIX: Final = "%LMQ%"
_SYSTEM_PREFIXES: Final = ("%RETRY%", "rmq_sys_")

QueueKey = tuple[str, int]


class LogQueue(Queue):
    """A queue made from the log. ``offsets`` are the queue offsets, in ascending order. If the log
    is damaged, they have gaps.
    """

    def __init__(
        self, topic: str, queue_id: int, offsets: Int64, units: Units, units_per_file: int
    ) -> None:
        self.topic = topic
        self.queue_id = queue_id
        self.units_per_file = units_per_file
        self.is_batch = bool((units["tags_code"] == NO_CODE).any())
        self._offsets = offsets
        self._units = units

    @property
    def min_offset(self) -> int:
        """Queue offset of the first message in the log."""
        return int(self._offsets[0]) if len(self._offsets) else 0

    @property
    def max_offset(self) -> int:
        """Queue offset after the last message in the log."""
        return int(self._offsets[-1]) + 1 if len(self._offsets) else 0

    @property
    def last_entry(self) -> queue_entry.QueueEntry | None:
        """The entry of the last message."""
        return queue_entry.QueueEntry(*self._units[-1].item()) if len(self._units) else None

    def segments(self) -> Iterator[QueueSegment]:
        """Yield the segments that have an entry. Each is at most as large as a queue file."""
        room = self.units_per_file
        for number in np.unique(self._offsets // room).tolist():
            start = number * room
            yield QueueSegment(start, min(room, self.max_offset - start))

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, Units]]:
        """Yield the entries in a range: one run for each part without a gap."""
        first, last = np.searchsorted(self._offsets, [start, stop]).tolist()
        offsets, units = self._offsets[first:last], self._units[first:last]
        for begin, end in consecutive(offsets):
            yield int(offsets[begin]), units[begin:end]


def epoch_start(offsets: Int64) -> int:
    """Return the index at which the queue's current epoch begins.

    If a queue offset is not larger than the offset before it, the topic was deleted and created
    again there, and a new epoch begins. Only the entries of the last epoch belong to the queue.
    """
    falls = np.flatnonzero(np.diff(offsets) <= 0)
    return int(falls[-1]) + 1 if len(falls) else 0


class QueueBuilder:
    """Collects the entries of all queues from the events of a walk. ``log_end`` is None until the
    walk has reported the log's end.
    """

    def __init__(self, config: StoreConfig, delay_levels_ms: tuple[int, ...]) -> None:
        self.config = config
        self.log_end: int | None = None
        self._levels = delay_levels_ms
        self._parts: dict[QueueKey, list[tuple[Int64, Units]]] = defaultdict(list)

    def add(self, events: Iterable[Event]) -> QueueBuilder:
        """Add the events of a walk, in the log's order."""
        for event in events:
            if isinstance(event, Run):
                self._add_run(event)
            elif isinstance(event, LogEnd):
                self.log_end = event.offset
        return self

    def queues(self) -> Mapping[QueueKey, LogQueue]:
        """Return (topic, queue id) -> queue."""
        room = self.config.queue_file_size or (
            queue_entry.UNIT_SIZE * queue_entry.DEFAULT_UNITS_PER_FILE
        )
        result: dict[QueueKey, LogQueue] = {}
        for (topic, queue_id), parts in sorted(self._parts.items()):
            offsets = np.concatenate([part[0] for part in parts])
            units = np.concatenate([part[1] for part in parts])
            first = epoch_start(offsets)
            result[topic, queue_id] = LogQueue(
                topic, queue_id, offsets[first:], units[first:], room // queue_entry.UNIT_SIZE
            )
        return result

    def _add_run(self, run: Run) -> None:
        # Import here: the module loads pyarrow, which a store with queue files does not need.
        from logquarry.log.follow import dispatch_requests

        found = dispatch_requests(run.window, run.rows, self._levels)
        ids, queue_ids = found.topic_ids, found.queue_id
        counts = message_counts(run.window, run.rows)
        units = np.empty(len(run.rows), UNIT_DTYPE)
        units["physical_offset"], units["size"] = found.physical_offset, found.size
        units["tags_code"] = found.tags_code
        queued = found.is_dispatched & (found.queue_offset >= 0)
        rows = np.flatnonzero(queued)
        # Sort by topic and queue. lexsort is stable, so the entries of each queue stay in the order
        # of the log.
        rows = rows[np.lexsort((queue_ids[rows], ids[rows]))]
        keys = np.stack((ids[rows], queue_ids[rows]))
        cuts = np.flatnonzero((np.diff(keys) != 0).any(axis=0)) + 1
        for part in np.split(rows, cuts):
            if len(part):
                key = found.topics[ids[part[0]]], int(queue_ids[part[0]])
                offsets = found.queue_offset[part]
                self._parts[key].append(_spread(offsets, units[part], counts, part))
        if self.config.enable_multi_dispatch is not False:
            self._add_copies(run, queued, units)

    def _add_copies(self, run: Run, queued: Bools, units: Units) -> None:
        """Add an entry to each further queue that a message's properties name
        (``multiDispatchLmqQueue``).
        """
        from logquarry.log import columns

        numbered = columns.rows_with_property(run.window, run.rows, props.INNER_MULTI_QUEUE_OFFSET)
        rows = numbered[queued[numbered]]
        found = columns.messages(run.window, run.rows[rows], columns.Decoding())
        for row, message in zip(rows.tolist(), found, strict=True):
            for key, offset in copies_of(message, self.config):
                self._parts[key].append((np.array([offset]), units[row : row + 1]))


def _spread(offsets: Int64, units: Units, counts: Int64 | None, rows: Int64) -> tuple[Int64, Units]:
    """Repeat the entry of each inner batch, once per message. ``counts`` is the number of messages
    in each frame; None if each frame has one.
    """
    if counts is None:
        return offsets, units
    own = counts[rows]
    units["tags_code"] = np.where(
        (own > 1) | (units["tags_code"] == 0), NO_CODE, units["tags_code"]
    )
    firsts = np.cumsum(own) - own
    within = np.arange(int(own.sum())) - np.repeat(firsts, own)
    return np.repeat(offsets, own) + within, np.repeat(units, own)


def copies_of(message: StoredMessage, config: StoreConfig) -> Iterator[tuple[QueueKey, int]]:
    """Yield the further queues to which multi-dispatch adds a message, and its queue offset in each
    of them.
    """
    if _only_carries(message):
        return iter(())
    return named_copies(message.properties, message.queue_id, config)


def named_copies(
    properties: Mapping[str, str], queue_id: int, config: StoreConfig
) -> Iterator[tuple[QueueKey, int]]:
    """Yield the queues and queue offsets that a message's properties list for multi-dispatch."""
    names = properties.get(props.INNER_MULTI_DISPATCH, "").split(props.MULTI_SEPARATOR)
    offsets = properties.get(props.INNER_MULTI_QUEUE_OFFSET, "").split(props.MULTI_SEPARATOR)
    if len(names) != len(offsets):
        return
    for name, offset in zip(names, offsets, strict=True):
        number = java.digits(offset)
        if name and number != java.NO_NUMBER:
            yield copy_key(name, queue_id, config), number


def _only_carries(message: StoredMessage) -> bool:
    """Whether a message was not dispatched to the further queues that its properties list, because
    these properties are a copy of another message's properties.

    RocketMQ 5 dispatches no message of a system topic to further queues. But a retried or delayed
    message, which is in a system topic, has the properties of the original message
    (``MultiDispatchUtils.isNeedHandleMultiDispatch``). RocketMQ 4.9 does dispatch such a message,
    with new offsets in its properties. The property string shows the version: only 5.x ends it with
    a separator.
    """
    return (
        message.topic.startswith(_SYSTEM_PREFIXES) or message.topic == props.SCHEDULE_TOPIC
    ) and message.properties_string.endswith(props.PROPERTY_SEPARATOR)


def copy_key(name: str, queue_id: int, config: StoreConfig) -> QueueKey:
    """Return the queue for a name in INNER_MULTI_DISPATCH (``MultiDispatch.queueKey``)."""
    return name, 0 if is_lmq(name, config) else queue_id


def is_lmq(name: str, config: StoreConfig) -> bool:
    """Whether a queue is a light message queue (LMQ), for which RocketMQ counts queue offsets
    separately (``MixAll.isLmq``).
    """
    if not name.startswith(LMQ_PREFIX):
        return False
    if config.enable_lmq is not None:
        return config.enable_lmq
    # If multi-dispatch is configured, an unset enableLmq has RocketMQ's default, false. If neither
    # is configured, the name decides, because only a broker with enableLmq makes queues with such
    # names.
    return config.enable_multi_dispatch is None


def empty_queue(topic: str, queue_id: int) -> LogQueue:
    """Make a queue without messages."""
    return LogQueue(
        topic,
        queue_id,
        np.empty(0, np.int64),
        np.empty(0, UNIT_DTYPE),
        queue_entry.DEFAULT_UNITS_PER_FILE,
    )
