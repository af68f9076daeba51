"""Which half messages nobody has ended, by what stands in a store, without asking its checks."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from logquarry.format import properties as props
from logquarry.format.frame import Frame
from logquarry.store.queue.consume_queue import Queue
from logquarry.store.transaction.half import HALF_TOPIC, OP_TOPIC, ended_halves

FrameAt = Callable[[int], Frame | None]
"""Gives the message at a place of the log, None if no sound one stands there."""


def ended_by(ops: Queue | None, frame_at: FrameAt, start: int) -> set[int]:
    """Queue offsets of half messages that the ops of a queue name, from one of them on."""
    ended: set[int] = set()
    for _, entry in () if ops is None else ops.entries(start):
        op = None if entry.is_filler else frame_at(entry.physical_offset)
        ended.update(() if op is None else ended_halves(op))
    return ended


@dataclass(slots=True)
class _Known:
    """What is known of one queue.

    Attributes:
        halves: up to where its half messages were read,
        ops: and its op messages.
        open: queue offset of each open half message -> topic of its message.
        ended: what an op names whose half message was not read yet.
    """

    halves: int = 0
    ops: int = 0
    open: dict[int, str] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)


class HalfCounter:
    """Counts the open half messages of one store by topic. Any thread may ask.

    Who asks again pays for the half and op messages that are new.
    """

    def __init__(self) -> None:
        self._counting = threading.Lock()
        self._queues: dict[int, _Known] = {}

    def count(
        self, queues: Iterable[Queue], frame_at: FrameAt, passed: Mapping[int, int]
    ) -> Counter[str]:
        """How many are open of each topic now.

        Args:
            queues: all queues of the store.
            frame_at: reads its log.
            passed: queue id -> offset of the half topic below which the checks are through: what
                was put back counts where it stands now.
        """
        by_name = {(queue.topic, queue.queue_id): queue for queue in queues}
        total: Counter[str] = Counter()
        with self._counting:
            for (topic, queue_id), queue in by_name.items():
                if topic != HALF_TOPIC:
                    continue
                ops = by_name.get((OP_TOPIC, queue_id))
                known = self._queues.get(queue_id)
                if known is None or _is_another(known, queue, ops):
                    known = self._queues[queue_id] = _Known()
                _read(known, queue, ops, frame_at)
                first = max(queue.min_offset, passed.get(queue_id, 0))
                known.open = {at: name for at, name in known.open.items() if at >= first}
                total.update(known.open.values())
        return total


def _is_another(known: _Known, halves: Queue, ops: Queue | None) -> bool:
    """Whether a queue is shorter than it was: its topic was deleted, and came again."""
    return halves.max_offset < known.halves or (ops is not None and ops.max_offset < known.ops)


def _read(known: _Known, halves: Queue, ops: Queue | None, frame_at: FrameAt) -> None:
    """Read what is new. An op comes after its half: so the halves are read up to a place first."""
    stop = halves.max_offset
    for at, entry in halves.entries(max(known.halves, halves.min_offset), stop):
        half = None if entry.is_filler else frame_at(entry.physical_offset)
        if half is not None:
            known.open[at] = props.decode_bytes(half.properties).get(props.REAL_TOPIC, "")
    known.halves = stop
    if ops is not None:
        end = ops.max_offset
        known.ended |= ended_by(ops, frame_at, max(known.ops, ops.min_offset))
        known.ops = end
    for at in known.ended & known.open.keys():
        del known.open[at]
    known.ended = {at for at in known.ended if at >= stop}
