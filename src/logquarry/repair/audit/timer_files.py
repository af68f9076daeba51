"""Compares the timer files of RocketMQ 5 with the log, and writes new timer files.

When a broker starts, it adds the last entries of the timer log to the wheel
(``TimerMessageStore.recover``). The check also adds these entries before it compares. So if a crash
left a wheel that is older than the timer log, the check reports no fault.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from logquarry.disk.disk import Disk
from logquarry.errors import UnreadableFile
from logquarry.format import java, timer
from logquarry.format.arrays import Records
from logquarry.format.frame import Frame
from logquarry.format.queue_entry import QueueEntry
from logquarry.format.timer import TimerCheck
from logquarry.log.layout import StoreLayout
from logquarry.log.store_files import CONFIG, NAME_DIGITS, is_offset_name
from logquarry.paths import is_folder
from logquarry.read.commit_log import CommitLog
from logquarry.read.timers import (
    CHECK,
    Timer,
    Timers,
    check_or_none,
    precision,
    read_check,
    timer_queue,
    timers_of,
    used_slots,
)
from logquarry.repair.findings import Finding, finding
from logquarry.text import counted

_ENTRY: Final = timer.ENTRY.dtype()
_MOST: Final = 100
"""Maximum number of faults to report for each kind."""


def timer_faults(layout: StoreLayout) -> Iterator[Finding]:
    """Yield the faults of wheel, timer log and ``timercheck``."""
    names = {entry.name for entry in layout.filesystem.list("")}
    yield from _wrong_sizes(layout)
    try:
        check = read_check(layout)
    except UnreadableFile:
        # Another check of verify reports the unreadable bytes.
        return
    except ValueError as error:
        yield finding("timer_check_wrong", CHECK, 0, str(error))
        return
    if not layout.filesystem.exists(CHECK):
        # Without ``timercheck``, the broker reads the timer queue from its start. So the other
        # timer files cannot be wrong.
        return
    wheel = _Wheel(layout, check)
    queue = timer_queue(layout) if check.enqueued else None
    end = 0 if queue is None else queue.max_offset
    if check.enqueued > end:
        reason = f"its queue offset is {check.enqueued}, and the queue ends at {end}"
        yield finding("timer_check_ahead", CHECK, 0, reason)
    found = timers_of(layout, check)
    if names.isdisjoint((timer.WHEEL, timer.LOG)) and not found.waiting:
        return
    yield from wheel.faults(found)


def _wrong_sizes(layout: StoreLayout) -> Iterator[Finding]:
    """Yield the timer files with a wrong size. A broker does not start with such a file
    (``TimerWheel``, ``MappedFileQueue.load``). Exception: a broker fills an empty wheel.
    """
    for entry in layout.filesystem.list(""):
        if entry.name != timer.WHEEL or entry.is_dir:
            continue
        if entry.size not in (0, timer.WHEEL_SIZE):
            reason = _size_words(entry.size, timer.WHEEL_SIZE)
            yield finding("timer_entry_wrong", timer.WHEEL, 0, reason)
    size = timer_log_file_size(layout)
    for entry in sorted(layout.filesystem.list(timer.LOG), key=lambda one: one.name):
        if not entry.is_dir and is_offset_name(entry.name) and entry.size != size:
            path = f"{timer.LOG}/{entry.name}"
            yield finding("timer_entry_wrong", path, 0, _size_words(entry.size, size))


def _size_words(size: int, right: int) -> str:
    return f"the file has {counted(size, 'byte')} instead of {right}, so a broker does not start"


class _Wheel:
    """The timer wheel, with the changes that a broker makes to the wheel when it starts."""

    def __init__(self, layout: StoreLayout, check: TimerCheck) -> None:
        self._layout = layout
        self._log = CommitLog(layout)
        self._check = check
        slots = used_slots(layout)
        self._step = step = precision(layout, check.read_time, slots)
        self._size = timer_log_file_size(layout)
        self._files = self._timer_log()
        self._last = {
            time * step: last
            for time, last in zip(slots["time"].tolist(), slots["last"].tolist(), strict=True)
        }
        self._end: tuple[int, int] | None = None
        self._read_end()

    def _timer_log(self) -> dict[int, Records]:
        found = {}
        for entry in self._layout.filesystem.list(timer.LOG):
            if entry.is_dir or not is_offset_name(entry.name):
                continue
            try:
                view = self._layout.open_file(f"{timer.LOG}/{entry.name}")
            except FileNotFoundError:
                # The broker has deleted the file after it was listed. If a slot leads to the file,
                # and an older file exists, _chain reports the slot.
                continue
            count = view.size // _ENTRY.itemsize
            data = view.window(0, count * _ENTRY.itemsize)[: count * _ENTRY.itemsize]
            found[int(entry.name)] = np.frombuffer(data, _ENTRY)
        return dict(sorted(found.items()))

    def _read_end(self) -> None:
        """Apply the last entries of the timer log to the wheel again, as the broker does."""
        begin = max(0, self._check.log_end - self._size)
        first = max((base for base in self._files if base <= begin), default=0)
        for base, entries in self._files.items():
            if base < first:
                continue
            sound = (entries["size"] == _ENTRY.itemsize) & (entries["magic"] & ~0xF == 0)
            some = entries if sound.all() else entries[: int(np.argmin(sound))]
            times = some["write_time"].astype(np.int64) + some["delay"]
            places = base + np.arange(len(some)) * _ENTRY.itemsize
            self._last.update(
                zip((times - times % self._step).tolist(), places.tolist(), strict=True)
            )
            if len(some):
                self._end = int(some["physical_offset"][-1]), int(some["frame_size"][-1])

    @property
    def enqueued(self) -> int:
        last = None if self._end is None else self._message(*self._end)
        if last is None:
            return self._check.enqueued
        return min(last.queue_offset + 1, self._check.enqueued)

    def _message(self, offset: int, size: int) -> Frame | None:
        found = self._log.frame_of(QueueEntry(offset, size, 0))
        return found if found is not None and found.topic == timer.TOPIC.encode() else None

    def faults(self, timers: Timers) -> Iterator[Finding]:
        faults: list[Finding] = []
        reached: set[int] = set()
        for time, place in sorted(self._last.items()):
            if time >= self._check.read_time:
                faults += self._chain(time, place, reached)
        yield from faults[:_MOST]
        enqueued = self.enqueued
        missing = [
            one
            for one in timers.due()
            if one.queue_offset < enqueued and one.physical_offset not in reached
        ]
        for one in missing[:_MOST]:
            reason = (
                f"the message at physical offset {one.physical_offset} waits for slot "
                f"{one.slot_time}, but is not in the wheel, and the broker has read past it in the "
                "queue"
            )
            yield finding("timer_missing", timer.WHEEL, 0, reason)

    def _chain(self, time: int, place: int, reached: set[int]) -> Iterator[Finding]:
        while place != timer.NONE:
            base = place - place % self._size
            path = f"{timer.LOG}/{base:020d}"
            entries = self._files.get(base)
            number, rest = divmod(place - base, _ENTRY.itemsize)
            if entries is None or rest or number >= len(entries):
                if not self._files or place >= min(self._files):
                    reason = f"slot {time} leads to position {place}, where no entry is"
                    yield finding("timer_entry_wrong", path, place - base, reason)
                return
            one = entries[number]
            stated = int(one["write_time"]) + int(one["delay"])
            if one["size"] != _ENTRY.itemsize or stated - stated % self._step != time:
                reason = f"the entry does not belong to slot {time}, which leads to it"
                yield finding("timer_entry_wrong", path, place - base, reason)
                return
            offset = int(one["physical_offset"])
            if self._message(offset, int(one["frame_size"])) is None:
                is_expired = offset < self._layout.commit_log.start
                what = "was deleted with its file" if is_expired else "is not there"
                reason = f"the message at physical offset {offset} {what}"
                at = place - base
                yield finding("timer_entry_wrong", path, at, reason, is_explained=is_expired)
            reached.add(offset)
            previous = int(one["previous"])
            if previous >= place:
                reason = f"its previous entry should be before it, but is given as {previous}"
                yield finding("timer_entry_wrong", path, place - base, reason)
                return
            place = previous


def mend_timer_files(layout: StoreLayout, disk: Disk, root: Path, now: int, aside: Path) -> bool:
    """Replace the timer files of a store if they have faults; return whether they were replaced.
    Entries of expired messages are not faults. The queue of ``rmq_sys_wheel_timer`` must be
    complete. ``now`` is in milliseconds.
    """
    expired = "timer_entry_wrong", "note"
    if all((fault.kind, fault.severity) == expired for fault in timer_faults(layout)):
        return False
    check = check_or_none(layout)
    write_timer_files(
        *(disk, root, timers_of(layout, check), now),
        file_size=timer_log_file_size(layout),
        precision_ms=precision(layout, check.read_time),
        aside=aside,
    )
    return True


# --------------------------------------------------------------------------------------------------
# New timer files, which contain only the timer messages that are not delivered yet
#
# A broker that starts on these files delivers each of these messages once. At its start, it reads
# the whole timer log, because the new ``timercheck`` gives 0 as the flushed position. The broker
# then reads the queue of ``rmq_sys_wheel_timer``, from the message after the timer log's last entry
# (``TimerMessageStore.recover``). So the last entry of the new timer log must point to the queue's
# last message. If that message was already delivered, its entry is put into a slot that
# the broker does not read again: a slot before the broker's read time.

_LEAST_BLANK: Final = timer.BLANK.size


class _Entry(NamedTuple):
    slot: int
    magic: int
    physical_offset: int
    size: int
    topic: str


def timer_log_file_size(layout: StoreLayout) -> int:
    """Return the size of a timer log file in bytes. The size comes from the settings, or, if they
    give no size, from the largest file. If this size is unknown, or too small for an entry and a
    blank, the default applies.
    """
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

    A crash loses no message: until the new files are complete, ``timercheck`` makes the next broker
    read the queue from the first waiting message. Old files go to the quarantine ``aside``, or are
    removed. ``file_size`` is ``mappedFileSizeTimerLog``, ``precision_ms`` is ``timerPrecisionMs``.
    """
    begin = now // precision_ms * precision_ms
    # RocketMQ would not deliver a message whose delivery time is before the read time.
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
    """Yield the entries of the new timer log. The last entry points to the queue's last message."""
    window = timer.ROLL_SLOTS * precision_ms
    gone = {
        offset
        for one in timers.waiting.values()
        if one.deletes is not None and one.slot_time < begin
        for offset in timers.deleted_by(one)
    }
    last: Timer | None = None
    # Put all overdue messages into the slot of the present time, so that a broker delivers them.
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
    """Write the timer log. Return a dictionary: slot time -> [position of the first entry, position
    of the last entry, number of entries].
    """
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
    """Remove the old wheel, its snapshots and the timer log."""
    folder = root / timer.LOG
    paths = sorted(path for path in root.iterdir() if path.name.startswith(timer.WHEEL))
    # A file with the name of the folder would prevent the creation of the new folder.
    paths += sorted(folder.iterdir()) if is_folder(folder) else []
    paths += [folder] if os.path.lexists(folder) and not is_folder(folder) else []
    for path in paths:
        if aside is None:
            disk.remove(path)
        else:
            disk.set_aside(path, aside / path.parent.relative_to(root))
