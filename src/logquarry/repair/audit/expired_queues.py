"""Finds unwritten entries in queues whose messages have all expired, and keeps the ends of these
queues.

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
from logquarry.log.open_files import OpenFiles
from logquarry.log.rocksdb import read_config
from logquarry.log.store_files import NAME_DIGITS
from logquarry.read.batch_queue import BATCH_DTYPE, BatchEntries, is_batch_written
from logquarry.read.log_queues import QueueKey
from logquarry.read.queue import UNIT_DTYPE, FileQueue, has_message, is_written
from logquarry.repair.audit.differences import unreadable_file
from logquarry.repair.findings import Finding, finding
from logquarry.write.queue_writer import MOST_OFFSET

_FILLER: Final = queue_entry.encode(FILLER)


def bridges(queue: FileQueue, log_start: int) -> tuple[dict[int, bytes], int]:
    """Return the entries (*bridges*) that replace a queue's unwritten entries, and the queue's end.

    A bridge replaces consecutive unwritten entries of one file, if a written entry follows them.
    The result maps the number of a bridge's first entry to the new bytes of all entries of the
    bridge. The entries of a bridge belong to no message. In a consume queue, they are fillers,
    which RocketMQ accepts. In a batch queue, they only cover the queue offsets between the entries
    before and after them. :func:`logquarry.write.queue_writer.without_gaps` fills a gap with the
    same kind of entries. The queue's end is the number that the next entry of the queue will get.

    ``log_start`` is the start of the log. If the last file has an unwritten entry, the written
    entries after it may not belong to the queue. So the queue ends before the first of these
    written entries that meets one of two conditions:

    - The entry points to ``log_start`` or later.
    - The entry points to a lower physical offset than an earlier entry.
    """
    made: dict[int, bytes] = {}
    stop = queue.entry_end
    for numbers, entries in _parts(queue, log_start):
        is_there = is_batch_written(entries) if queue.is_batch else is_written(entries)
        unwritten = np.flatnonzero(~is_there)
        for start, end in consecutive(unwritten):
            first, last = int(unwritten[start]), int(unwritten[end - 1]) + 1
            if last == len(entries):
                # In this part of the queue, no written entry follows: do not make a bridge.
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
    """Return the bridges that stay if a recovery cuts off a queue at ``stop``, and the queue's end.
    For bridges, see :func:`bridges`.

    If ``stop`` is at the end of a bridge or inside it, the bridge is the last part of the queue. A
    queue's last entry must not be a filler (:func:`stand_in`). So the function changes the last
    entry of this bridge: the entry then points to the byte before the log. In two cases, the
    function removes this bridge instead, and the queue ends before the bridge:

    - The queue is a batch queue: the recovery cuts off the entry after the bridge, which determined
      the queue offsets of the bridge.
    - The log begins at 0: no message has expired.
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


@dataclass(frozen=True, slots=True)
class StandIn:
    """Entries for a queue whose files are unusable. They replace the queue, and keep its end.

    Attributes:
        number: number of the first entry.
        entries: the bytes of the entries; b"" if the end cannot be kept.
        end: queue offset at which the queue ends with these entries; 0 without entries.
        is_sure: whether the queue certainly ended at ``end``; if not, its end may have been higher.
    """

    number: int
    entries: bytes
    end: int
    is_sure: bool


def stand_in(queue: FileQueue, layout: StoreLayout, files: OpenFiles, file_size: int) -> StandIn:
    """Return the entries of a new queue that replaces a queue with unusable files. The log has no
    message of the queue.

    The end is sure only if it lies within the last file, and this file is whole. If the end is not
    sure, the consumer groups can show a later end, because a group never commits an offset after
    the end. The result has no entries in three cases:

    - nothing shows the end;
    - the log begins at 0, so no message has expired;
    - an entry points to a message that has not expired: this message is lost.

    Each entry points to the byte before the log, like the entry of an expired message. In a consume
    queue, the entries begin at the start of a file, and reach the end of the old queue. In a batch
    queue, one entry shows the end.

    QUIRK: these entries must not be fillers. RocketMQ adds the physical offset and the size in a
    queue's last entry. It assumes that all messages before this sum are dispatched. For a filler,
    the sum is 2 GiB - 1. So RocketMQ would dispatch no message before 2 GiB, in any queue.
    """
    log_start = layout.commit_log.start
    last = _last_of_batches(queue, log_start) if queue.is_batch else _last(queue, log_start)
    if last is None:
        return StandIn(0, b"", 0, is_sure=False)
    end, is_sure = last.end, _is_sure(last, queue, files, file_size)
    committed = 0 if is_sure else _committed(layout, queue.key)
    # The messages before ``log_start`` took more than one byte each. So a consume queue whose
    # messages have all expired ends at most at queue offset ``log_start``.
    if end < committed <= (MOST_OFFSET if queue.is_batch else min(log_start, MOST_OFFSET)):
        end = committed
    if log_start <= 0 or not end:
        # In a log that begins at 0, no message has expired, so a queue without entries was empty.
        return StandIn(0, b"", 0, is_sure=log_start <= 0 and not committed)
    room = file_size // queue.entry_size
    if queue.is_batch:
        entry = last.entry.copy()
        if end != last.end:
            entry["base"], entry["count"], entry["reserved"] = end - 1, 1, 0
        return StandIn(max(0, last.number) // room * room, entry.tobytes(), end, is_sure)
    number = (end - 1) // room * room
    entries = _expired(log_start) * (end - number)
    return StandIn(number, entries, end, is_sure)


def end_words(end: int) -> str:
    """Return the text for the user if the end of a :class:`StandIn` is not sure."""
    if not end:
        return "its end cannot be kept: new messages begin at queue offset 0"
    return f"it may have ended after queue offset {end}: new messages begin there"


@dataclass(frozen=True, slots=True)
class _Last:
    """The last entry of a queue: its number, and the queue's end.
    ``number`` is -1 if no entry can be read. ``entry`` is used only in a batch queue.
    """

    number: int
    end: int
    entry: BatchEntries


def _last(queue: FileQueue, log_start: int) -> _Last | None:
    """Return the last entry of a consume queue; None if an entry points to a message that has not
    expired.
    """
    end = queue.entry_end if queue.entry_end <= log_start else 0
    for numbers, entries in _parts(queue, log_start):
        if (has_message(entries) & (entries["physical_offset"] >= log_start)).any():
            return None
        # A message takes more than one byte. So an entry whose number is ``log_start`` or higher is
        # in a file with a wrong name.
        written = numbers[is_written(entries) & (numbers < log_start)]
        end = max([end, *(written[-1:] + 1).tolist()])
    return _Last(end - 1, end, np.empty(0, BATCH_DTYPE))


def _last_of_batches(queue: FileQueue, log_start: int) -> _Last | None:
    """Return the entry of a batch queue with the highest queue offset.

    The names of the files do not show queue offsets, so all entries are read. The result is None if
    an entry points to a message that has not expired.
    """
    made = np.zeros(1, BATCH_DTYPE)
    made["physical_offset"], made["size"], made["compacted_offset"] = log_start - 1, 1, -1
    last = _Last(-1, 0, made)
    for file, data in queue.file_bytes():
        entries = np.frombuffer(data, BATCH_DTYPE, len(data) // queue.entry_size)
        there = np.flatnonzero(is_batch_written(entries) & (entries["base"] <= MOST_OFFSET))
        entries = entries[there]
        if (entries["physical_offset"] >= log_start).any():
            return None
        end = int(entries["base"][-1]) + int(entries["count"][-1]) if len(entries) else 0
        if end > last.end:
            last = _Last(file.base // queue.entry_size + int(there[-1]), end, entries[-1:])
    return last


def _is_sure(last: _Last, queue: FileQueue, files: OpenFiles, file_size: int) -> bool:
    """Whether ``last`` was certainly the last entry of the queue. The result is true if the last
    file has the right size, can be read, and has room for more entries. Such a file is the newest
    file of the queue, so no later file is missing.
    """
    if not queue.listed.files:
        return False
    file = queue.listed.files[-1]
    end = (last.number + 1) * queue.entry_size
    is_whole = file.size == file_size and not file.base % file_size
    return (
        is_whole
        and file.base < end < file.base + file_size
        and unreadable_file((file,), files) is None
    )


def _committed(layout: StoreLayout, key: QueueKey) -> int:
    """Return the highest queue offset that a consumer group has committed for a queue; 0 if there
    is none.
    """
    try:
        text = read_config(layout.filesystem, broker_json.CONSUMER_OFFSET_FILE)
        groups = broker_json.decode_consumer_offsets(text)
    except (OSError, CorruptFile, StoreNotFound, UsageError, ValueError, TypeError, KeyError):
        # verify reports a file that cannot be read.
        return 0
    return max(
        (offsets.get(key[1], 0) for (t, _), offsets in groups.items() if t == key[0]), default=0
    )


def holes(queue: FileQueue, folder: str, log_start: int) -> Iterator[Finding]:
    """Yield one finding for the unwritten entries of a queue in ``folder``, if the queue has any.

    In a batch queue, the function considers only unwritten entries after the queue's end. The
    search for spare entries finds the other unwritten entries.
    """
    made, _ = bridges(queue, log_start)
    begin, size = queue.entry_end if queue.is_batch else 0, queue.sequence.file_size
    first = min((number for number in made if number >= begin), default=None)
    if first is not None:
        base = first * queue.entry_size // size * size
        reason = f"entry {first} was never written, and later entries were"
        file, at = f"{folder}/{base:0{NAME_DIGITS}d}", first * queue.entry_size - base
        yield finding("queue_hole", file, at, reason, sum(map(len, made.values())))


def _parts(queue: FileQueue, log_start: int) -> Iterator[tuple[Int64, Records]]:
    """Yield the entries of a queue and their numbers. A new part begins after each missing file."""
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
    """Return the entries of a bridge in a batch queue.

    The entries cover the queue offsets between the entries before and after the bridge. If there
    are too few or too many queue offsets for the number of entries, the result is b"".
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
