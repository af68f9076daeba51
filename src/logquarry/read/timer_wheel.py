"""Counts the messages that wait in RocketMQ 5's timer wheel (``TimerMessageStore``).

::

    timerwheel       slots of 32 bytes: time / precision 8, first 8, last 8, count 4, magic 4
    timerlog/        entries of 52 bytes that the slots chain
    config/timercheck  8 each: read time, flushed timerlog, queue offset, ...

A slot keeps its numbers after its messages were delivered, so that only slots later than the read
time of ``timercheck`` count. Messages in the queue of ``rmq_sys_wheel_timer`` after the queue
offset of ``timercheck`` are not in the wheel yet.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

import numpy as np

from logquarry.errors import UnreadableFile
from logquarry.log.layout import CONFIG, StoreLayout
from logquarry.read.consume_queue import ConsumeQueue

TOPIC: Final = "rmq_sys_wheel_timer"
WHEEL: Final = "timerwheel"
LOG: Final = "timerlog"
CHECK: Final = f"{CONFIG}/timercheck"

_SLOT: Final = np.dtype(
    [("time", ">i8"), ("first", ">i8"), ("last", ">i8"), ("count", ">i4"), ("magic", ">i4")]
)
_CHECK: Final = struct.Struct(">qqq")
_CHUNK: Final = 1 << 20
_PRECISIONS: Final = (1, 10, 100, 1000, 10_000)


@dataclass(frozen=True, slots=True)
class PendingTimers:
    """Messages that wait for their time.

    Attributes:
        in_wheel: entries in the wheel's slots that are not due yet.
        in_queue: messages that are not in the wheel yet.
        evidence: the files that show it.
    """

    in_wheel: int
    in_queue: int
    evidence: tuple[str, ...]

    @property
    def detail(self) -> str:
        """The numbers in words."""
        return f"{self.in_wheel + self.in_queue} timer messages wait for their time"

    def __bool__(self) -> bool:
        return self.in_wheel + self.in_queue > 0


def pending(layout: StoreLayout) -> PendingTimers:
    """The timer messages that a store still has to deliver. Reads the used pages of the wheel."""
    try:
        read_time, _, offset = _CHECK.unpack_from(layout.filesystem.read(CHECK))
    except (FileNotFoundError, UnreadableFile, struct.error):
        read_time = offset = 0
    in_queue = 0
    if (TOPIC, 0) in layout.queue_names:
        start = layout.commit_log.start
        queue = ConsumeQueue(layout, TOPIC, 0, log_min_offset=start)
        in_queue = max(0, queue.max_offset - max(offset, queue.min_offset))
    in_wheel = _in_wheel(layout, read_time)
    evidence = ((WHEEL,) if in_wheel else ()) + ((f"consumequeue/{TOPIC}/0",) if in_queue else ())
    return PendingTimers(in_wheel, in_queue, evidence)


def _in_wheel(layout: StoreLayout, read_time: int) -> int:
    try:
        view = layout.open_file(WHEEL)
    except FileNotFoundError:
        return 0
    total = position = 0
    while (position := view.next_data(position)) < view.size:
        position -= position % _SLOT.itemsize
        length = min(_CHUNK, view.size - position)
        length -= length % _SLOT.itemsize
        if length <= 0:
            break
        slots = np.frombuffer(view.window(position, length)[:length], _SLOT)
        used = slots[slots["count"] > 0]
        if len(used):
            times = used["time"].astype(np.int64)
            later = times * _precision(read_time, int(times.max())) > read_time
            total += int(used["count"][later].sum())
        position += length
    return total


def _precision(read_time: int, slot_time: int) -> int:
    """Milliseconds of a slot (``timerPrecisionMs``), from a time in ms and a time in slots."""
    if read_time <= 0 or slot_time <= 0:
        return 1000
    return min(_PRECISIONS, key=lambda one: abs(slot_time * one - read_time))
