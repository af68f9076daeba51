"""Counts the messages that wait in RocketMQ 5's timer wheel, from the wheel alone.

A slot keeps its numbers after its messages were delivered, so that only slots from the read time
of ``timercheck`` on count. Messages in the queue of ``rmq_sys_wheel_timer`` from the queue offset
of ``timercheck`` on are not in the wheel yet. :mod:`.timers` finds the messages themselves, in the
log.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from logquarry.format import timer
from logquarry.log.layout import StoreLayout
from logquarry.read.consume_queue import ConsumeQueue
from logquarry.read.timers import QUEUE_ID, check_or_none

_SLOT: Final = timer.SLOT.dtype()
_SNAPSHOT: Final = f"{timer.WHEEL}."
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
    check = check_or_none(layout)
    in_queue = 0
    if (timer.TOPIC, QUEUE_ID) in layout.queue_names:
        start = layout.commit_log.start
        queue = ConsumeQueue(layout, timer.TOPIC, QUEUE_ID, log_min_offset=start)
        in_queue = max(0, queue.max_offset - max(check.enqueued, queue.min_offset))
    in_wheel = _in_wheel(layout, check.read_time)
    evidence = ((timer.WHEEL,) if in_wheel else ()) + (
        (f"consumequeue/{timer.TOPIC}/{QUEUE_ID}",) if in_queue else ()
    )
    return PendingTimers(in_wheel, in_queue, evidence)


def used_slots(layout: StoreLayout) -> npt.NDArray[np.void]:
    """The slots of ``timerwheel`` that were ever used; none if there is no wheel.

    With ``timerWheelSnapshotFlush``, a broker writes the wheel to files ``timerwheel.POSITION``.
    The newest of them counts with ``timerwheel``: of two slots, the one with the later entry.
    """
    names = {entry.name for entry in layout.filesystem.list("")}
    snapshots = [
        name for name in names if name.startswith(_SNAPSHOT) and name[len(_SNAPSHOT) :].isdigit()
    ]
    chosen = sorted(snapshots, key=lambda name: int(name[len(_SNAPSHOT) :]))[-1:]
    chosen += [timer.WHEEL] if timer.WHEEL in names else []
    slots = np.concatenate([np.empty(0, _SLOT), *(_slots_of(layout, name) for name in chosen)])
    order = np.lexsort((-slots["last"].astype(np.int64), slots["time"]))
    slots = slots[order]
    first: npt.NDArray[np.bool_] = np.append(True, np.diff(slots["time"].astype(np.int64)) != 0)
    return slots[first[: len(slots)]]


def _slots_of(layout: StoreLayout, name: str) -> npt.NDArray[np.void]:
    found = [np.empty(0, _SLOT)]
    try:
        view = layout.open_file(name)
    except FileNotFoundError:
        # A broker has deleted a snapshot.
        return found[0]
    position = 0
    while (position := view.next_data(position)) < view.size:
        position -= position % _SLOT.itemsize
        length = min(_CHUNK, view.size - position)
        length -= length % _SLOT.itemsize
        if length <= 0:
            break
        slots = np.frombuffer(view.window(position, length)[:length], _SLOT)
        found.append(slots[slots["time"] > 0])
        position += length
    return np.concatenate(found)


def _in_wheel(layout: StoreLayout, read_time: int) -> int:
    slots = used_slots(layout)
    if not len(slots):
        return 0
    times = slots["time"].astype(np.int64) * precision(layout, read_time, slots)
    return int(slots["count"][times >= read_time].clip(0).sum())


def precision(
    layout: StoreLayout, read_time: int, slots: npt.NDArray[np.void] | None = None
) -> int:
    """Milliseconds of a slot (``timerPrecisionMs``): stated, or inferred from the wheel's times."""
    if layout.config.timer_precision_ms is not None:
        return layout.config.timer_precision_ms
    slots = used_slots(layout) if slots is None else slots
    if read_time <= 0 or not len(slots):
        return timer.PRECISION_MS
    time = int(slots["time"].max())
    return min(_PRECISIONS, key=lambda one: abs(time * one - read_time))
