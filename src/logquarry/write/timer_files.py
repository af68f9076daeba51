"""Writes the timer files of RocketMQ 5, with only the timer messages that still wait.

The broker that opens the store delivers each of these messages once. At its start, the broker reads
the whole timer log, because ``timercheck`` counts no part of that log as flushed. The broker then
continues in the queue of ``rmq_sys_wheel_timer`` after the message of the last entry
(``TimerMessageStore.recover``). So the last entry always points to the last message of the queue.
If that message no longer waits, its entry goes into a slot that the broker has already read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from logquarry.disk.disk import Disk
from logquarry.format import java, timer
from logquarry.format.timer import TimerCheck
from logquarry.log.layout import StoreLayout
from logquarry.log.store_files import CONFIG, NAME_DIGITS
from logquarry.read.timers import Timer, Timers

_LEAST_BLANK: Final = timer.BLANK.size


class _Entry(NamedTuple):
    slot: int
    magic: int
    physical_offset: int
    size: int
    topic: str


def timer_log_file_size(layout: StoreLayout) -> int:
    """Return the bytes of a timer log file: from the settings, existing files, or the default."""
    stated = layout.config.mapped_file_size_timer_log
    sizes = [entry.size for entry in layout.filesystem.list(timer.LOG) if not entry.is_dir]
    size = stated or max(sizes, default=0)
    return size if size >= timer.ENTRY.size + timer.BLANK.size else timer.LOG_FILE_SIZE


def write_timer_files(
    disk: Disk,
    root: Path,
    timers: Timers,
    now: int,
    *,
    file_size: int,
    precision_ms: int,
    aside: Path | None = None,
) -> None:
    """Replace timer wheel, timer log and ``timercheck`` of a store. The caller has synced the log.

    No crash loses a message: until the new files are complete, ``timercheck`` makes the broker
    start at the first message that waits. Old files go to the quarantine ``aside``, or are removed.
    ``file_size`` is ``mappedFileSizeTimerLog``; ``precision_ms`` is ``timerPrecisionMs``.
    If the disk fails or is full, raise StoreUnavailable.
    """
    begin = now // precision_ms * precision_ms
    # The read time must stay before the time of every waiting message. Otherwise RocketMQ would
    # skip the message.
    read_time = min((one.slot_time for one in timers.waiting.values()), default=begin)
    read_time = min(begin, read_time - read_time % precision_ms)
    check = root / CONFIG / timer.CHECK_FILE
    first = min(timers.waiting, default=timers.stop)
    disk.replace(check, timer.encode_check(TimerCheck(read_time, 0, first, first, timestamp=now)))
    _remove(disk, root, aside)
    entries = list(_entries(timers, begin, read_time, precision_ms))
    slots = _write_log(disk, root / timer.LOG, entries, begin, file_size)
    _write_wheel(disk, root / timer.WHEEL, slots, precision_ms)
    stop = timers.stop
    last = TimerCheck(read_time, 0, stop, stop, timestamp=now, counter=1)
    disk.replace(check, timer.encode_check(last))


def _entries(timers: Timers, begin: int, read_time: int, precision_ms: int) -> Iterator[_Entry]:
    """Yield the entries in the queue's order; the last entry points to the queue's last message."""
    window = timer.ROLL_SLOTS * precision_ms
    gone = {
        offset
        for one in timers.waiting.values()
        if one.deletes is not None and one.slot_time < begin
        for offset in timers.deleted_by(one)
    }
    last: Timer | None = None
    # Overdue messages share the first slot. So the broker delivers the messages even if it starts
    # up to a week later.
    for _, one in sorted(timers.waiting.items()):
        is_late = one.slot_time < begin
        if one.queue_offset in gone or (is_late and one.deletes is not None):
            continue
        magic, slot = timer.MAGIC_DEFAULT, max(one.slot_time, begin)
        if one.deletes is not None:
            magic |= timer.MAGIC_DELETE
        left = slot - begin - window
        if left >= 0:
            magic |= timer.MAGIC_ROLL
            slot = begin + (window // 2 if left < window // 3 else window)
        slot -= slot % precision_ms
        last = one
        yield _Entry(slot, magic, one.physical_offset, one.size, one.topic)
    end = timers.last
    if end is not None and (last is None or last.queue_offset != timers.stop - 1):
        passed = read_time - precision_ms
        yield _Entry(passed, timer.MAGIC_DEFAULT, end.physical_offset, end.size, "")


def _write_log(
    disk: Disk, folder: Path, entries: list[_Entry], begin: int, file_size: int
) -> dict[int, list[int]]:
    """Write the timer log; return time -> [first position, last position, count] of each slot."""
    room = (file_size - _LEAST_BLANK) // timer.ENTRY.size
    slots: dict[int, list[int]] = {}
    for number in range(0, len(entries), room):
        base = number // room * file_size
        data = bytearray()
        for one in entries[number : number + room]:
            place = base + len(data)
            change = -1 if one.magic & timer.MAGIC_DELETE else 1
            known = slots.setdefault(one.slot, [place, timer.NONE, 0])
            written = min(begin, one.slot)
            data += timer.ENTRY.struct.pack(
                timer.ENTRY.size,
                known[1],
                one.magic,
                written,
                one.slot - written,
                one.physical_offset,
                one.size,
                java.hash_code(one.topic),
                0,
            )
            known[1:] = place, known[2] + change
        if number + room < len(entries):
            data += timer.BLANK.struct.pack(file_size - len(data), 0, timer.MAGIC_BLANK)
        _write(disk, folder / f"{base:0{NAME_DIGITS}d}", file_size, {0: bytes(data)})
    return slots


def _write_wheel(disk: Disk, path: Path, slots: dict[int, list[int]], precision_ms: int) -> None:
    parts = {
        time // precision_ms % timer.SLOTS * timer.SLOT.size: timer.SLOT.struct.pack(
            time // precision_ms, *numbers, 0
        )
        for time, numbers in slots.items()
    }
    _write(disk, path, timer.WHEEL_SIZE, parts)


def _write(disk: Disk, path: Path, size: int, parts: dict[int, bytes]) -> None:
    disk.make_folders(path.parent)
    with disk.refusing(path):
        descriptor = disk.open(path, create=True, exclusive=True)
        try:
            disk.write_all(descriptor, b"\0", size - 1)
            for place, data in parts.items():
                disk.write_all(descriptor, data, place)
            disk.sync(descriptor, path)
        finally:
            disk.let_go(descriptor)
    disk.sync_names(path.parent)


def _remove(disk: Disk, root: Path, aside: Path | None) -> None:
    """Remove the files that ``timercheck`` no longer needs: wheel, snapshots, timer log."""
    folder = root / timer.LOG
    paths = sorted(root.glob(f"{timer.WHEEL}*"))
    # Also remove a file or a dangling link with the folder's name: it blocks the new folder.
    paths += sorted(folder.iterdir()) if folder.is_dir() else []
    paths += [folder] if os.path.lexists(folder) and not folder.is_dir() else []
    for path in paths:
        if aside is None:
            disk.remove(path)
        else:
            disk.set_aside(path, aside / path.parent.relative_to(root))
