"""Finds entries that were never written in a queue whose messages have all expired.

The log no longer has the messages of these entries, so the entries cannot be made from the log. But
a broker would end the queue at the first unwritten entry. New messages would then get queue offsets
that consumers have already passed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from logquarry.errors import CorruptFile, StoreNotFound, UsageError
from logquarry.format import broker_json, queue_entry
from logquarry.format.arrays import Int64, Records, consecutive
from logquarry.format.batch import MOST_MESSAGES
from logquarry.format.queue_entry import FILLER, UNIT_SIZE, QueueEntry
from logquarry.log.layout import StoreLayout
from logquarry.log.rocksdb import read_config
from logquarry.log.store_files import NAME_DIGITS
from logquarry.read.batch_queue import BATCH_DTYPE, BatchEntries, BatchQueue, is_batch_written
from logquarry.read.log_queues import QueueKey
from logquarry.read.queue import UNIT_DTYPE, ConsumeQueue, FileQueue, has_message, is_written
from logquarry.repair.audit.differences import Difference
from logquarry.write.queue_writer import MOST_OFFSET

_FILLER: Final = queue_entry.encode(FILLER)


def bridges(queue: FileQueue, log_start: int) -> tuple[dict[int, bytes], int]:
    """Return bridges for the unwritten entries before a written one, and the end of the queue with
    these bridges, counted in entries.

    A bridge replaces consecutive unwritten entries of one file: number of the first entry -> new
    bytes of all these entries. The entries of a bridge belong to no message. In a consume queue,
    they are fillers, which RocketMQ accepts. In a batch queue, they only cover the queue offsets
    between their neighbours, like the entries with which
    :func:`logquarry.write.queue_writer.without_gaps` fills a gap.

    ``log_start`` is the start of the log. Not every written entry after the first unwritten entry
    of the last file belongs to the queue. The queue ends at the first entry there that points to
    ``log_start`` or later, or that points to a lower physical offset than an earlier entry.
    """
    made: dict[int, bytes] = {}
    stop = queue.entry_end
    for numbers, entries in _parts(queue, log_start):
        is_there = is_batch_written(entries) if queue.is_batch else is_written(entries)
        unwritten = np.flatnonzero(~is_there)
        for start, end in consecutive(unwritten):
            first, last = int(unwritten[start]), int(unwritten[end - 1]) + 1
            if last == len(entries):
                # Without a file for the next entry, the bridge would have no right neighbour.
                continue
            found = _cover(entries, first, last) if queue.is_batch else _FILLER * (last - first)
            if found:
                made |= _by_files(queue, int(numbers[first]), found)
        if is_there.any():
            stop = max(stop, int(numbers[np.flatnonzero(is_there)[-1]]) + 1)
    return made, stop


def cut_bridges(
    queue: FileQueue, made: dict[int, bytes], stop: int, log_start: int
) -> tuple[dict[int, bytes], int]:
    """Return the bridges of a queue that a recovery cuts off at ``stop``, and the queue's end.

    If the queue would end with a bridge, the last entry must be no filler; see :func:`stand_in`. A
    batch queue ends before this bridge, because the entry after it gave the queue offsets of the
    bridge. If the log begins at 0, no message has expired, so the queue ends before the bridge too.
    """
    left = {number: data for number, data in made.items() if number < stop}
    for last in sorted(left, reverse=True):
        if last + len(left[last]) // queue.entry_size < stop:
            break
        if log_start > 0 and not queue.is_batch:
            left[last] = left[last][: (stop - last - 1) * UNIT_SIZE] + _expired(log_start)
            break
        del left[last]
        stop = last
    return left, stop


def _expired(log_start: int) -> bytes:
    """Return an entry like that of an expired message: it points to the byte before the log."""
    return queue_entry.encode(QueueEntry(log_start - 1, 1, 0))


def stand_in(queue: ConsumeQueue, log_start: int, file_size: int) -> tuple[dict[int, bytes], int]:
    """Return the entries of a new queue that replaces a queue with unusable files, and its end.

    The entries have the form of :func:`bridges`. They begin at the start of a file, and reach the
    end of the old queue. Each entry is like that of an expired message. The result is empty if a
    message of the queue has not expired.

    QUIRK: these entries must not be fillers. RocketMQ adds the size in a queue's last entry to the
    physical offset in this entry. It assumes that all messages before the sum are dispatched. For a
    filler, the sum is 2 GiB. So RocketMQ would dispatch no message before 2 GiB, in any queue.
    """
    end, room = queue.entry_end, file_size // UNIT_SIZE
    # A message takes more than one byte. So a later end is that of a file with a harmed name.
    stop = end if end <= log_start else 0
    for start, units in queue.runs(0, min(end, log_start)):
        if (has_message(units) & (units["physical_offset"] >= log_start)).any():
            return {}, 0
        stop = max([stop, *(start + 1 + np.flatnonzero(is_written(units))[-1:]).tolist()])
    if not stop:
        return {}, 0
    first = (stop - 1) // room * room
    return {first: _expired(log_start) * (stop - first)}, stop


@dataclass(frozen=True, slots=True)
class BatchStandIn:
    """One entry that replaces a batch queue with unusable files, and keeps the queue's end.

    Attributes:
        number: position of the entry, counted in entries.
        end: queue offset at which the queue ends.
        is_sure: whether the queue surely ended there; otherwise it may have ended later.
    """

    number: int
    entry: bytes
    end: int
    is_sure: bool


def batch_stand_in(queue: BatchQueue, layout: StoreLayout, file_size: int) -> BatchStandIn | None:
    """Return the entry that keeps the end of a batch queue with unusable files. None if a message
    of the queue has not expired, or if nothing shows the end.

    The names of the files show no queue offsets. The last entry that can be read shows the end, and
    so does the offset of a consumer group, which never is after the end. The end is sure only if
    the last file is whole.
    """
    log_start = layout.commit_log.start
    number, end, is_sure = 0, 0, False
    last = np.zeros(1, BATCH_DTYPE)
    last["physical_offset"], last["size"], last["compacted_offset"] = log_start - 1, 1, -1
    for file, data in queue.file_bytes():
        entries = np.frombuffer(data, BATCH_DTYPE, len(data) // queue.entry_size)
        entries = entries[is_batch_written(entries) & (entries["base"] <= MOST_OFFSET)]
        if (entries["physical_offset"] >= log_start).any():
            return None
        stop = int(entries["base"][-1]) + int(entries["count"][-1]) if len(entries) else 0
        is_sure = file.size == file_size and not file.base % file_size and stop > end
        if stop > end:
            number = file.base // file_size * (file_size // queue.entry_size)
            last, end = entries[-1:].copy(), stop
    read = _committed(layout, queue.key)
    if not is_sure and end < read <= MOST_OFFSET:
        end = read
        last["base"], last["count"], last["reserved"] = end - 1, 1, 0
    if not end or log_start <= 0:
        return None
    return BatchStandIn(number, last.tobytes(), end, is_sure)


def _committed(layout: StoreLayout, key: QueueKey) -> int:
    """Return the highest queue offset that a consumer group has committed for a queue; else 0."""
    try:
        text = read_config(layout.filesystem, broker_json.CONSUMER_OFFSET_FILE)
        groups = broker_json.decode_consumer_offsets(text)
    except (OSError, CorruptFile, StoreNotFound, UsageError, ValueError, TypeError, KeyError):
        # verify reports a file that cannot be read.
        return 0
    return max(
        (offsets.get(key[1], 0) for (t, _), offsets in groups.items() if t == key[0]), default=0
    )


def holes(queue: FileQueue, folder: str, log_start: int) -> Iterator[Difference]:
    """Yield a difference for the unwritten entries of a queue in ``folder``, if it has any.

    In a batch queue, only unwritten entries after the queue's end count. The search for spare
    entries finds those before the end.
    """
    made, _ = bridges(queue, log_start)
    begin, size = queue.entry_end if queue.is_batch else 0, queue.sequence.file_size
    first = min((number for number in made if number >= begin), default=None)
    if first is not None:
        base = first * queue.entry_size // size * size
        reason = f"entry {first} was never written, and later entries were"
        file, at = f"{folder}/{base:0{NAME_DIGITS}d}", first * queue.entry_size - base
        yield Difference("queue_hole", file, at, reason, sum(map(len, made.values())))


def _parts(queue: FileQueue, log_start: int) -> Iterator[tuple[Int64, Records]]:
    """Yield the numbers and the entries of each part of a queue between missing files."""
    dtype, size = (BATCH_DTYPE if queue.is_batch else UNIT_DTYPE), queue.entry_size
    numbers, parts = [np.empty(0, np.int64)], [np.empty(0, dtype)]
    for file, data in queue.file_bytes():
        entries = np.frombuffer(data, dtype, len(data) // size)
        numbers.append(file.base // size + np.arange(len(entries)))
        parts.append(entries)
    every, numbered = np.concatenate(parts).astype(dtype), np.concatenate(numbers)
    named = is_batch_written(every) if queue.is_batch else has_message(every)
    places = np.where(named, every["physical_offset"].astype(np.int64), -1)
    falls = places < np.append(-1, np.maximum.accumulate(places)[:-1])
    strange = named & (numbered >= queue.entry_end) & (falls | (places >= log_start))
    cut = int(strange.argmax()) if strange.any() else len(every)
    for start, stop in consecutive(numbered[:cut]):
        yield numbered[start:stop], every[start:stop]


def _cover(entries: BatchEntries, first: int, last: int) -> bytes:
    """Return the entries of a bridge in a batch queue; b"" if the neighbours leave no queue offsets
    for these entries.
    """
    following = entries[last : last + 1].copy()
    end = int(following["base"][0])
    base = end - (last - first)
    if first:
        base = int(entries["base"][first - 1]) + int(entries["count"][first - 1])
    if base < 0 or not last - first <= end - base <= (last - first) * MOST_MESSAGES:
        return b""
    made = b""
    for at in range(first, last):
        following["base"] = base
        following["count"] = min(MOST_MESSAGES, end - base - (last - at - 1))
        following["reserved"] = following["count"]
        made += following.tobytes()
        base += int(following["count"][0])
    return made


def _by_files(queue: FileQueue, number: int, data: bytes) -> dict[int, bytes]:
    """Cut a bridge at the boundaries of the queue's files."""
    size, room = queue.entry_size, queue.sequence.file_size
    made: dict[int, bytes] = {}
    at = 0
    while at < len(data):
        length = min(len(data) - at, room - (number * size + at) % room)
        made[number + at // size] = data[at : at + length]
        at += length
    return made
