"""Compares the timer wheel of RocketMQ 5 with the log and the queue of ``rmq_sys_wheel_timer``.

The check uses the wheel as a broker will have it after its start (``TimerMessageStore.recover``).
So a wheel that is older than the timer log, as a crash can leave it, is sound.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from logquarry.disk.disk import Disk
from logquarry.errors import UnreadableFile
from logquarry.format import timer
from logquarry.format.arrays import Records
from logquarry.format.frame import Frame
from logquarry.format.timer import TimerCheck
from logquarry.log.layout import StoreLayout
from logquarry.log.store_files import is_offset_name
from logquarry.read.commit_log import CommitLog
from logquarry.read.timers import (
    CHECK,
    Timers,
    check_or_none,
    precision,
    read_check,
    timer_queue,
    timers_of,
    used_slots,
)
from logquarry.repair.audit.differences import Difference
from logquarry.write.timer_files import timer_log_file_size, write_timer_files

_ENTRY: Final = timer.ENTRY.dtype()
_MOST: Final = 100
"""Maximum number of faults to report for each kind."""


def timer_faults(layout: StoreLayout) -> Iterator[Difference]:
    """Yield the faults of wheel, timer log and ``timercheck``."""
    names = {entry.name for entry in layout.filesystem.list("")}
    try:
        check = read_check(layout)
    except UnreadableFile:
        # verify reports unreadable bytes.
        return
    except ValueError as error:
        yield Difference("timer_check_wrong", CHECK, 0, str(error))
        return
    if not layout.filesystem.exists(CHECK):
        # The broker reads the queue from its start.
        return
    wheel = _Wheel(layout, check)
    queue = timer_queue(layout) if check.enqueued else None
    end = 0 if queue is None else queue.max_offset
    if check.enqueued > end:
        reason = f"its queue offset is {check.enqueued}, and the queue ends at {end}"
        yield Difference("timer_check_ahead", CHECK, 0, reason)
    found = timers_of(layout, check)
    if names.isdisjoint((timer.WHEEL, timer.LOG)) and not found.waiting:
        return
    yield from wheel.faults(found)


class _Wheel:
    """The wheel as a broker will have it after its start."""

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
                # The broker deleted the file: _chain reports the slots that need it.
                continue
            count = view.size // _ENTRY.itemsize
            data = view.window(0, count * _ENTRY.itemsize)[: count * _ENTRY.itemsize]
            found[int(entry.name)] = np.frombuffer(data, _ENTRY)
        return dict(sorted(found.items()))

    def _read_end(self) -> None:
        """Read the end of the timer log again, as the broker does."""
        begin = max(0, self._check.log_end - self._size)
        starts = [base for base in self._files if base <= begin][-1:] or list(self._files)[:1]
        for base, entries in self._files.items():
            if not starts or base < starts[0]:
                continue
            sound = (entries["size"] == _ENTRY.itemsize) & (entries["magic"] & ~0xF == 0)
            count = len(entries) if sound.all() else int(np.argmin(sound))
            for number in range(count):
                one = entries[number]
                time = int(one["write_time"]) + int(one["delay"])
                self._last[time - time % self._step] = base + number * _ENTRY.itemsize
                self._end = int(one["physical_offset"]), int(one["frame_size"])

    @property
    def enqueued(self) -> int:
        last = None if self._end is None else self._message(*self._end)
        if last is None:
            return self._check.enqueued
        return min(last.queue_offset + 1, self._check.enqueued)

    def _message(self, offset: int, size: int) -> Frame | None:
        found = self._log.outcome_at(offset, check_crc=False)
        if not isinstance(found, Frame) or found.topic != timer.TOPIC.encode():
            return None
        return found if found.size == size else None

    def faults(self, timers: Timers) -> Iterator[Difference]:
        faults: list[Difference] = []
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
                f"{one.slot_time}, and is neither in the wheel nor ahead in the queue"
            )
            yield Difference("timer_missing", timer.WHEEL, 0, reason)

    def _chain(self, time: int, place: int, reached: set[int]) -> Iterator[Difference]:
        while place != timer.NONE:
            base = place - place % self._size
            path = f"{timer.LOG}/{base:020d}"
            entries = self._files.get(base)
            number, rest = divmod(place - base, _ENTRY.itemsize)
            if entries is None or rest or number >= len(entries):
                if not self._files or place >= min(self._files):
                    reason = f"slot {time} leads to position {place}, where no entry is"
                    yield Difference("timer_entry_wrong", path, place - base, reason)
                return
            one = entries[number]
            stated = int(one["write_time"]) + int(one["delay"])
            if one["size"] != _ENTRY.itemsize or stated - stated % self._step != time:
                reason = f"the entry does not belong to slot {time}, which leads to it"
                yield Difference("timer_entry_wrong", path, place - base, reason)
                return
            offset = int(one["physical_offset"])
            if self._message(offset, int(one["frame_size"])) is None:
                is_expired = offset < self._layout.commit_log.start
                what = "was deleted with its file" if is_expired else "is not there"
                reason = f"the message at physical offset {offset} {what}"
                yield Difference("timer_entry_wrong", path, place - base, reason, 0, is_expired)
            reached.add(offset)
            previous = int(one["previous"])
            if previous >= place:
                reason = f"its previous entry should be before it, but is given as {previous}"
                yield Difference("timer_entry_wrong", path, place - base, reason)
                return
            place = previous


def mend_timer_files(layout: StoreLayout, disk: Disk, root: Path, now: int, aside: Path) -> bool:
    """If the timer's files of a store have faults, write new files; return whether files were
    written.

    The queue of ``rmq_sys_wheel_timer`` must be complete. ``now`` is in milliseconds.
    """
    if all(fault.is_explained for fault in timer_faults(layout)):
        return False
    check = check_or_none(layout)
    write_timer_files(
        *(disk, root, timers_of(layout, check), now),
        file_size=timer_log_file_size(layout),
        precision_ms=precision(layout, check.read_time),
        aside=aside,
    )
    return True
