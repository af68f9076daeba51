"""The consume queues of two stores, compared as far as both logs go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from logquarry.compare.report import LogBounds, QueueDiff, UnitPair
from logquarry.format import java
from logquarry.format.queue_entry import FILLER_SIZE, UNIT_SIZE
from logquarry.store.queue.consume_queue import ConsumeQueue, Units

_STEP: Final = 1 << 18

Unit = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Common:
    """What both logs have: from one physical offset up to another.

    Attributes:
        start: the first offset.
        end: one past the last.
        is_live: whether somebody writes either store: its queues follow its log a moment later.
    """

    start: int
    end: int
    is_live: bool

    def relevant(self, units: Units) -> npt.NDArray[np.bool_]:
        """Which units name messages that both logs have."""
        found: npt.NDArray[np.bool_] = (
            (units["size"] > 0)
            & (units["size"] != FILLER_SIZE)
            & (units["physical_offset"] >= self.start)
            & (units["physical_offset"] < self.end)
        )
        return found


def compare_queue(
    key: tuple[str, int], a: ConsumeQueue | None, b: ConsumeQueue | None, common: Common
) -> QueueDiff:
    """One queue in two stores.

    What one queue says of messages that the other store's log has not (yet, or any more) is no
    difference.

    Args:
        key: topic and queue id.
        a: the queue in the first store, None if it has none,
        b: and in the second one.
        common: what both logs have.
    """
    bounds = _bounds(a), _bounds(b)
    if a is not None and b is not None:
        start = max(_first(a), _first(b))
        stop = min(a.max_offset, b.max_offset)
        for at in range(start, stop, _STEP):
            end = min(stop, at + _STEP)
            found = _first_difference(a.units(at, end), b.units(at, end), common)
            if found is not None:
                number, left, right = found
                reason = f"unit {at + number} differs"
                pair = UnitPair(at + number, left, right)
                return QueueDiff(*key, "differs", *bounds, pair, reason)
    else:
        stop = 0
    for longer, shorter, is_a in ((a, b, True), (b, a, False)):
        end = 0 if shorter is None else shorter.max_offset
        if longer is None or longer.max_offset <= max(stop, end):
            continue
        lacking = _first_relevant(longer, max(end, _first(longer)), common)
        name = "b" if is_a else "a"
        if lacking is None:
            return QueueDiff(*key, "behind", *bounds, None, f"{name} ends before, as its log does")
        number, unit = lacking
        if common.is_live:
            reason = f"{name} lacks unit {number} yet; a store that is open follows"
            return QueueDiff(*key, "behind", *bounds, None, reason)
        reason = f"{name} lacks unit {number}, and its log has the message at {unit[0]}"
        pair = UnitPair(number, unit if is_a else None, None if is_a else unit)
        return QueueDiff(*key, "differs", *bounds, pair, reason)
    return QueueDiff(*key, "equal", *bounds)


def _bounds(queue: ConsumeQueue | None) -> LogBounds | None:
    return None if queue is None else LogBounds(queue.min_offset, queue.max_offset)


def _first(queue: ConsumeQueue) -> int:
    return queue.files[0].base // UNIT_SIZE if queue.files else 0


def _first_difference(a: Units, b: Units, common: Common) -> tuple[int, Unit, Unit] | None:
    if a.tobytes() == b.tobytes():
        return None
    differs = (a["physical_offset"] != b["physical_offset"]) | (a["size"] != b["size"])
    # Below that a tags code is an address into ConsumeQueueExt, which says the same elsewhere.
    plain = (a["tags_code"] >= java.INT_MIN) & (b["tags_code"] >= java.INT_MIN)
    differs |= plain & (a["tags_code"] != b["tags_code"])
    differs &= common.relevant(a) | common.relevant(b)
    if not differs.any():
        return None
    at = int(np.argmax(differs))
    return at, a[at].item(), b[at].item()


def _first_relevant(queue: ConsumeQueue, start: int, common: Common) -> tuple[int, Unit] | None:
    """The first unit from an offset on of a message that both logs have."""
    stop = queue.max_offset
    for at in range(start, stop, _STEP):
        units = queue.units(at, min(stop, at + _STEP))
        found = common.relevant(units)
        if found.any():
            number = int(np.argmax(found))
            return at + number, units[number].item()
    return None
