"""Collects a store's contents for ``logquarry info``: queues, messages, bytes per topic, index."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

import numpy as np

from logquarry.arguments import Progress
from logquarry.format import frame, sys_flag
from logquarry.format.arrays import SIZE
from logquarry.format.index import IndexHeader, IndexShape
from logquarry.log.frames import message_counts
from logquarry.log.layout import StoreLayout
from logquarry.log.open_files import OpenFiles
from logquarry.log.store_files import CHECKPOINT, FileSequence
from logquarry.log.walk import DamagedSpan, LogReader, Run
from logquarry.read.commit_log import CommitLog
from logquarry.read.index import Index
from logquarry.read.log_end import (
    find_lost_tail,
    known_damage,
    last_entries,
    log_bound,
    lost_messages,
)
from logquarry.read.log_queues import QueueKey, UnitCount, count_units
from logquarry.read.queue import Queue
from logquarry.repair.audit.differences import FileFault, file_differences
from logquarry.repair.recover.loss import missing_files
from logquarry.store.reads import StoreReads
from logquarry.store.state import State, condition
from logquarry.text import counted, plural


@dataclass(slots=True)
class QueueOverview:
    """A queue, and its messages that are still in the log.

    ``messages`` is the number of these messages, and ``bytes`` is their total size; None if
    unknown.
    """

    topic: str
    queue_id: int
    min_offset: int
    max_offset: int
    messages: int | None
    bytes: int | None


@dataclass(slots=True)
class TopicOverview:
    """A topic with its queues; its numbers are the sums over the queues."""

    topic: str
    queues: list[QueueOverview] = field(default_factory=list)

    @property
    def messages(self) -> int | None:
        """Number of messages in the log; None if unknown."""
        return _sum(queue.messages for queue in self.queues)

    @property
    def bytes(self) -> int | None:
        """Bytes of the messages in the log; None if unknown."""
        return _sum(queue.bytes for queue in self.queues)


@dataclass(frozen=True, slots=True)
class IndexOverview:
    """An index file; ``shape`` is None if the file's number of slots is unknown."""

    path: str
    size: int
    header: IndexHeader
    shape: IndexShape | None


@dataclass(slots=True)
class Overview:
    """The result of :func:`overview`. Times are store times in milliseconds.

    Attributes:
        topics: the topics with their queues, sorted by name.
        index: the index files, oldest first.
        hint: why some numbers are unknown, and how to get them.
        other_bytes: number of bytes of the log that are not messages of ``topics``: blanks, damage,
            and messages that are in no queue. None if unknown.
        damage: the damaged parts of the log; empty unless the whole log was read.
        signs: descriptions of signs of damage that were found without reading the whole log.
    """

    state: State
    min_offset: int
    max_offset: int
    first_time: int | None = None
    last_time: int | None = None
    topics: list[TopicOverview] = field(default_factory=list)
    index: list[IndexOverview] = field(default_factory=list)
    hint: str | None = None
    other_bytes: int | None = None
    damage: list[DamagedSpan] = field(default_factory=list)
    signs: list[str] = field(default_factory=list)


def overview(
    store: StoreReads, *, exact: bool = False, progress: Progress | None = None
) -> Overview:
    """Read the contents of a store.

    Without ``exact``, add up the entries of the queues. With ``exact``, or if no queue file has an
    entry, read the log to count messages and bytes. While the log is read, ``progress`` is called
    with the number of bytes read and the total number.
    """
    exact = exact or not store.has_queue_files
    queues = [queue for name in store.queues() if (queue := store.queue(*name)) is not None]
    found = Overview(condition(store), store.min_offset, store.max_offset, index=_index(store))
    found.first_time, found.last_time = _times(store, queues)
    if found.state != "live":
        found.signs = list(visible_damage(store.layout, found.max_offset))
    rows = [
        QueueOverview(q.topic, q.queue_id, q.min_offset, q.max_offset, None, None) for q in queues
    ]
    if exact:
        _count(store, found, rows, progress)
    else:
        _sum_queues(store, found, rows, queues)
    topics: dict[str, TopicOverview] = {}
    for row in rows:
        topics.setdefault(row.topic, TopicOverview(row.topic)).queues.append(row)
    found.topics = [topics[name] for name in sorted(topics)]
    if all(topic.bytes is not None for topic in found.topics):
        kept = sum(topic.bytes or 0 for topic in found.topics)
        kept += _head_bytes(store.layout.commit_log, sum(row.messages or 0 for row in rows))
        found.other_bytes = max(0, found.max_offset - found.min_offset - kept)
    return found


# ---------------------------------------------------------------------------- from the queues
def _sum_queues(
    store: StoreReads, found: Overview, rows: list[QueueOverview], queues: list[Queue]
) -> None:
    log = CommitLog(store.layout)
    total = largest = end = 0
    copies: list[str] = []
    for row, queue in zip(rows, queues, strict=True):
        row.messages, row.bytes, size, last = _retained(queue, found.min_offset, found.max_offset)
        stranger = _stranger(log, queue) if row.messages else None
        if stranger is not None:
            copies.append(row.topic)
            if found.state != "live" and not stranger.is_copied_to(queue.topic):
                path = f"consumequeue/{queue.topic}/{queue.queue_id}"
                found.signs.append(f"{path}: its entries point to messages of another queue")
            row.bytes = None
            continue
        total += (row.bytes or 0) + _head_bytes(log.files, row.messages or 0)
        largest, end = max(largest, size), max(end, last)
    found.hint = _hint(found, log, total, largest, end)
    if found.hint is not None:
        for row in rows:
            row.messages = row.bytes = None
    elif copies:
        names = ", ".join(sorted(set(copies)))
        found.hint = f"the queues of {names} point to messages of other topics; --exact counts them"


def _head_bytes(files: FileSequence, messages: int) -> int:
    """Return the size of ``messages`` DLedger heads; 0 if the log has no DLedger heads."""
    return messages * frame.ENTRY_HEAD.size if files.has_heads else 0


def _retained(queue: Queue, min_offset: int, max_offset: int) -> UnitCount:
    found = UnitCount()
    for _, units in queue.runs(queue.min_offset, queue.max_offset):
        found = found.plus(count_units(units, min_offset, max_offset, is_batch=queue.is_batch))
    return found


def _stranger(log: CommitLog, queue: Queue) -> frame.Frame | None:
    """If a queue's first or last entry points to another queue's message, return that message."""
    for offset in {queue.min_offset, queue.max_offset - 1}:
        for _, unit in queue.entries(offset, offset + 1):
            found = log.sound_frame_at(unit.physical_offset, check_crc=False)
            if found is not None and found.queue_key != queue.key:
                return found
    return None


def _hint(found: Overview, log: CommitLog, total: int, largest: int, end: int) -> str | None:
    """Return the reason why the sizes in the queues do not add up to the log; None if they do.

    The sizes add up if the log consists only of messages that are in queues, and of blanks at the
    ends of log files. A blank has fewer bytes than the largest message plus eight.
    """
    length = found.max_offset - found.min_offset
    if total > length:
        return "the queues point to some bytes of the log twice; --exact reads the log"
    files = len(log.files.files)
    blanks = files * (largest + frame.BLANK.size)
    end = max(end, found.min_offset)
    complete = end - found.min_offset - total <= blanks
    # In a live store, the queues may lack the newest messages, because the dispatcher adds them
    # some milliseconds later.
    if found.state != "live" and end < found.max_offset:
        next_one = log.sound_frame_at(end, check_crc=False)
        is_queued = next_one is not None and sys_flag.advances_queue(next_one.sys_flag)
        complete = complete and not is_queued and found.max_offset - end <= blanks
    if complete:
        return None
    length_text = counted(length - total, "byte of the log is", "bytes of the log are")
    return f"{length_text} in no queue; --exact reads the log"


# -------------------------------------------------------------------------------- from the log
@dataclass(slots=True)
class LogCount:
    """Number and bytes of the log's messages by (topic, queue id), and the log's damage."""

    messages: dict[QueueKey, int] = field(default_factory=lambda: defaultdict(int))
    bytes: dict[QueueKey, int] = field(default_factory=lambda: defaultdict(int))
    damage: list[DamagedSpan] = field(default_factory=list)


def count_log(store: StoreReads, progress: Progress | None = None) -> LogCount:
    """Read the log; count each queue's messages and bytes. Damage is skipped and listed."""
    # Import late: the module imports pyarrow, and only this function needs it.
    from logquarry.log import columns

    counted = LogCount()
    reader = LogReader(store.layout, bound=store.bound, live=store.is_live)
    start, length = store.min_offset, store.max_offset - store.min_offset
    for event in reader.events():
        if isinstance(event, DamagedSpan):
            counted.damage.append(event)
        if not isinstance(event, Run):
            continue
        ids, names = columns.topic_ids(event.window, event.rows)
        queue_ids = columns.fixed_fields(event.window, event.rows, ["queue_id"])["queue_id"]
        pairs = (ids.astype(np.int64) << 32) | (queue_ids.astype(np.int64) & 0xFFFFFFFF)
        distinct, which = np.unique(pairs, return_inverse=True)
        sizes = np.bincount(which, event.rows[:, SIZE]).astype(np.int64).tolist()
        held = message_counts(event.window, event.rows)
        counts = np.bincount(which, held).astype(np.int64).tolist()
        for pair, count, size in zip(distinct.tolist(), counts, sizes, strict=True):
            low = pair & 0xFFFFFFFF
            key = names[pair >> 32], low - (1 << 32) if low >> 31 else low
            counted.messages[key] += count
            counted.bytes[key] += size
        if progress is not None:
            progress(min(event.end - start, length), length)
    if store.bound is not None and not store.is_live:
        queued = log_bound(store.layout)
        if queued is not None and store.bound < queued:
            # The reader stopped before messages to which the queues point. Read the damage that
            # made it stop.
            rest = LogReader(store.layout, bound=queued).events(store.bound, store.bound + 1)
            counted.damage += [event for event in rest if isinstance(event, DamagedSpan)]
    return counted


def _count(
    store: StoreReads,
    found: Overview,
    rows: list[QueueOverview],
    progress: Progress | None,
) -> None:
    counted = count_log(store, progress)
    found.damage = counted.damage
    for row in rows:
        key = row.topic, row.queue_id
        row.messages = counted.messages.pop(key, 0)
        row.bytes = counted.bytes.pop(key, 0)
    # Messages in the log can belong to queues that have no files.
    for (topic, queue_id), count in sorted(counted.messages.items()):
        size = counted.bytes[topic, queue_id]
        rows.append(QueueOverview(topic, queue_id, 0, 0, count, size))


# ------------------------------------------------------------------------------------ the rest
def _times(store: StoreReads, queues: list[Queue]) -> tuple[int | None, int | None]:
    """Return the store times of the log's first and last queued message; None if unreadable."""
    log = CommitLog(store.layout)
    start = store.min_offset
    if store.layout.commit_log.has_heads:
        # In a DLedger log, a head precedes the first frame.
        start += frame.ENTRY_HEAD.size
    entries = [entry for queue in queues if (entry := queue.last_entry) is not None]
    ends = [entry.physical_offset for entry in entries if entry.physical_offset < store.max_offset]
    frames = map(log.sound_frame_at, (start, max(ends, default=start)))
    first, last = (None if one is None else one.store_timestamp for one in frames)
    return first, last


def _index(store: StoreReads) -> list[IndexOverview]:
    reader = OpenFiles(store.layout)
    sizes: Mapping[str, int] = {entry.name: entry.size for entry in store.layout.index_files}
    return [
        IndexOverview(
            file.path,
            sizes.get(file.path.rpartition("/")[2], 0),
            file.header,
            None if file.is_empty else file.shape,
        )
        for file in Index(store.layout, files=reader).files
    ]


def _sum(values: Iterable[int | None]) -> int | None:
    total = 0
    for value in values:
        if value is None:
            return None
        total += value
    return total


_MOST: Final = 3
"""Maximum number of wrong log files, and of wrong queue files, that are listed one by one."""


def visible_damage(layout: StoreLayout, log_end: int) -> Iterator[str]:
    """Describe the signs of damage in a store that no process has open.

    The function reads file names, the last entry of each queue, the checkpoint,
    ``.logquarry/damage.json``, and the store time of the last queued message. If the checkpoint has
    a later time, the function also reads the last log file. If log files are missing, or if the
    queues point beyond the log's end, it also reads all queue entries to count the lost messages.
    """
    log = layout.commit_log
    if layout.lost_head is not None:
        yield str(layout.lost_head)
    lacks_first = layout.lost_head is not None
    yield from _first(_wrong_files(log, "log file", lacks_first=lacks_first))
    queues = layout.queue_files() + layout.batch_queue_files()
    yield from _first(fault for files in queues for fault in _wrong_files(files, "queue file"))
    entries = last_entries(layout)
    queued = entries[0].end if entries else 0
    if queued > log_end:
        yield f"the log ends at {log_end}, and the queues point to messages up to {queued}"
    tail = find_lost_tail(layout, entries, CommitLog(layout).store_time_at)
    if tail is not None:
        yield tail
    gaps = list(missing_files(layout, log_end))
    if gaps or queued > log_end:
        lost = lost_messages(layout, gaps, log_end)
        if lost.messages:
            yield str(lost)
    recorded = len(known_damage(layout))
    if recorded:
        yield f"a recovery has recorded {plural(recorded, 'damaged place')} in the log"
    try:
        layout.read_checkpoint()
    except ValueError as error:
        yield f"{CHECKPOINT}: {error}"


def _wrong_files(files: FileSequence, what: str, *, lacks_first: bool = False) -> Iterator[str]:
    for one in file_differences(files.files, files.file_size, lacks_first=lacks_first):
        if one.fault is not FileFault.GAP:
            yield one.reason()
        elif one.missing:
            yield f"{plural(len(one.missing), what)} missing before {one.file.path}"


def _first(faults: Iterator[str]) -> Iterator[str]:
    yield from islice(faults, _MOST)
    rest = sum(1 for _ in faults)
    if rest:
        yield f"and {rest:,} more"
