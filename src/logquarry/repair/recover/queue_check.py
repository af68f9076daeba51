"""Compares the consume queues of a store with its log, run by run.

What a queue should hold is told by the frames: each names its queue and its offset there. An
offset that falls back begins anew from there (a topic that was deleted and came again). Memory
does not grow with the log.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from logquarry.format import java, queue_entry
from logquarry.format.frame import FIXED_SIZE_V1
from logquarry.format.queue_entry import QueueEntry
from logquarry.read.consume_queue import Queue, Units
from logquarry.read.log_queues import QueueKey
from logquarry.write.queue_writer import MOST_GAP, MOST_OFFSET

Offsets = npt.NDArray[np.int64]

_GAP_SLACK = 16
"""Messages that one alone may leave out, beyond those that the log had room for since."""
_MOST_MOVED = 1 << 20
"""Harmed queue offsets of one queue that are set right."""


class QueueAction(Enum):
    """What becomes of a queue."""

    KEEP = "keep"
    CUT = "cut"
    """Units from ``keep_until`` on go; what the log has from there on is appended."""
    REBUILD = "rebuild"
    """All of its files go, and are made anew."""


@dataclass(frozen=True, slots=True)
class QueuePlan:
    """What is to be done to one queue.

    Attributes:
        key: topic and queue id.
        action: what becomes of what there is.
        keep_until: queue offset from which on units go.
        had_until: where the queue ended.
        end: where it will end.
        resume_at: physical offset of the first message that it lacks, None if it lacks none.
        reason: why, in words.
        moved: queue offsets of messages whose own is harmed, by their physical offsets.
        largest_gap: messages that are missing at one place at the most.
    """

    key: QueueKey
    action: QueueAction
    keep_until: int
    had_until: int
    end: int
    resume_at: int | None
    reason: str
    moved: Mapping[int, int] = field(default_factory=dict)
    largest_gap: int = 0

    @property
    def is_sound(self) -> bool:
        """Whether nothing has to be done."""
        return self.action is QueueAction.KEEP and self.resume_at is None


class QueueCheck:
    """One queue, compared with the log as that goes by.

    Args:
        key: topic and queue id.
        disk: the queue as its files hold it, None without (usable) ones.
        damage: the damage of the log up to where it was read.
        tags_slack: how far a tags code may be from the right one: 3.x took times of delivery from
            its clock, some milliseconds beside the store time.

    Attributes:
        key: topic and queue id.
    """

    def __init__(
        self,
        key: QueueKey,
        disk: Queue | None,
        damage: Container[int],
        *,
        tags_slack: int = 0,
    ) -> None:
        self.key = key
        self._tags_slack = tags_slack
        self._disk = disk
        self._damage = damage
        self._had = 0 if disk is None else disk.max_offset
        self._first: int | None = None
        self._first_at = 0
        # Where the last of its messages so far ends in the log.
        self._known_until = 0
        self._next: int | None = None
        self._bad_from: int | None = None
        self._resume_at: int | None = None
        self._reason = ""
        # A single message whose offset does not go on: what comes behind it tells why.
        self._odd: tuple[int, Units] | None = None
        self._moved: dict[int, int] = {}
        self._largest_gap = 0

    def take(self, offsets: Offsets, units: Units) -> None:
        """Some more messages of the queue, in the log's order."""
        cuts = np.flatnonzero(np.diff(offsets) != 1) + 1
        for start, stop in pairwise([0, *cuts.tolist(), len(offsets)]):
            if start < stop:
                self._take_piece(int(offsets[start]), units[start:stop])

    def _take_piece(self, offset: int, units: Units) -> None:
        """A run; but no CRC covers queue offsets, and a single one that does not fit may be harmed.

        It is, where the queue has the message elsewhere, or where those before and behind it tell
        so. Otherwise a topic came again, or messages are lost.
        """
        self._settle(offset)
        expected = self._next
        if len(units) == 1 and offset != expected:
            if expected is not None and self._has(expected, units):
                self._move(units, expected)
            else:
                self._odd = offset, units.copy()
            return
        self._take_run(offset, units)

    def _settle(self, following: int | None) -> None:
        """Take the single message that did not fit, now that the offset behind it is known."""
        odd, self._odd = self._odd, None
        if odd is None:
            return
        offset, units = odd
        expected = self._next
        if expected is None:
            self._take_first(offset, units, following)
            return
        lost = int(units["physical_offset"][0]) - self._known_until
        is_far = offset - expected > max(0, lost) // FIXED_SIZE_V1 + _GAP_SLACK
        # A topic that came again has begun at 0.
        falls_back = offset < expected and (offset != 0 or (following or 0) > expected)
        agrees = offset >= 0 and following == offset + 1
        if following == expected + 1 or (not agrees and (is_far or falls_back)):
            self._move(units, expected)
        else:
            self._take_run(offset, units)

    def _take_first(self, offset: int, units: Units, following: int | None) -> None:
        """The first message of the queue: the one behind it and the queue tell if it is right."""
        if following == offset + 1 or (offset >= 0 and self._has(offset, units)):
            self._take_run(offset, units)
            return
        right = self._place_in_queue(units)
        if right is not None:
            self._move(units, right)
        elif following is not None and following > 0 and not 0 <= offset < following:
            self._move(units, following - 1)
        elif 0 <= offset <= MOST_OFFSET:
            self._take_run(offset, units)
        elif following is None:
            self._move(units, self._had)

    def _place_in_queue(self, units: Units) -> int | None:
        """Where the queue has a message, None if it does not."""
        if self._disk is None:
            return None
        place = units["physical_offset"][0]
        for start, there in self._disk.runs(0, self._had):
            for at in np.flatnonzero(there["physical_offset"] == place).tolist():
                if self._same(there[at : at + 1], units):
                    return int(start + at)
        return None

    def _move(self, units: Units, offset: int) -> None:
        """A message whose own queue offset may be harmed stands at another one."""
        if len(self._moved) < _MOST_MOVED:
            self._moved[int(units["physical_offset"][0])] = offset
            self._take_run(offset, units)

    def _take_run(self, offset: int, units: Units) -> None:
        expected = self._next
        if expected is not None and offset != expected and self._has(expected, units):
            # Their own offsets have rotted, which no CRC covers; the queue knows them still.
            for at, place in enumerate(units["physical_offset"][:_MOST_MOVED].tolist()):
                self._moved[place] = expected + at
            offset = expected
        is_far = expected is not None and offset > expected + self._room(units)
        if is_far or not 0 <= offset <= MOST_OFFSET:
            # Neighbours agree on it, and yet no queue gets there: they go on where it ended.
            right = self._place_in_queue(units[:1]) if expected is None else expected
            units = units[: _MOST_MOVED - len(self._moved)]
            if not len(units):
                return
            offset = 0 if right is None else right
            for at, place in enumerate(units["physical_offset"].tolist()):
                self._moved[place] = offset + at
        if expected is None:
            self._first = offset
            self._first_at = int(units["physical_offset"][0])
        elif offset < expected:
            self._begin_anew(offset)
        elif offset > expected:
            self._largest_gap = max(self._largest_gap, offset - expected)
        if expected is not None and offset > expected and self._bad_from is None:
            self._compare_gap(expected, offset, int(units["physical_offset"][0]))
        self._next = offset + len(units)
        self._known_until = int(units["physical_offset"][-1]) + int(units["size"][-1])
        if self._bad_from is None:
            self._compare(offset, units)

    def _room(self, units: Units) -> int:
        """The messages that may be missing in front of some."""
        lost = max(0, int(units["physical_offset"][0]) - self._known_until)
        return max(MOST_GAP, lost // FIXED_SIZE_V1 + _GAP_SLACK)

    def _has(self, offset: int, units: Units) -> bool:
        """Whether the queue, which agrees with the log so far, has these units from there on."""
        if self._disk is None or self._bad_from is not None:
            return False
        at, stop = offset, offset + len(units)
        for start, there in self._disk.runs(offset, min(stop, self._had)):
            if start != at or self._same(there, units[at - offset :][: len(there)]) < len(there):
                return False
            at += len(there)
        return at == stop

    def _same(self, there: Units, wanted: Units) -> int:
        """How many units are the same, from the first on."""
        return _same(there, wanted, self._tags_slack)

    def _begin_anew(self, offset: int) -> None:
        """What the log has told from an offset on counts no more."""
        assert self._first is not None
        self._first = min(self._first, offset)
        if self._bad_from is not None and self._bad_from >= offset:
            self._bad_from = self._resume_at = None

    def _compare(self, offset: int, units: Units) -> None:
        stop = offset + len(units)
        at = offset
        if self._disk is not None:
            for start, there in self._disk.runs(offset, stop):
                if start != at:
                    break
                same = self._same(there, units[at - offset : at - offset + len(there)])
                at += same
                if same < len(there):
                    break
        if at < stop:
            unit = QueueEntry(*units[at - offset].item())
            self._differs(at, unit.physical_offset, self._what_is_there(at, unit))

    def _what_is_there(self, offset: int, wanted: QueueEntry) -> str:
        if offset >= self._had:
            return f"it ends at {self._had}, and the log has its messages from {offset} on"
        found = None if self._disk is None else next(self._disk.entries(offset, offset + 1), None)
        if found is None:
            return f"there is no unit {offset}"
        return (
            f"unit {offset} names {found[1].size} bytes at {found[1].physical_offset}, and the "
            f"message is {wanted.size} bytes at {wanted.physical_offset}"
        )

    def _compare_gap(self, start: int, stop: int, physical_offset: int) -> None:
        """Units of messages that the log has lost: they name its damage, or nothing."""
        if self._disk is None:
            return
        at = start
        for first, units in self._disk.runs(start, min(stop, self._had)):
            if first != at:
                break
            for unit in units:
                if not self._may_stay(QueueEntry(*unit.item())):
                    break
                at += 1
            if at < first + len(units):
                break
        if at < stop:
            reason = f"unit {at} is of a message that the log does not have"
            self._differs(at, physical_offset, reason)

    def _may_stay(self, unit: QueueEntry) -> bool:
        return unit.is_filler or names_damage(unit, self._damage)

    def _differs(self, offset: int, physical_offset: int, reason: str) -> None:
        self._bad_from, self._resume_at, self._reason = offset, physical_offset, reason

    @property
    def difference(self) -> str | None:
        """Where the queue differs from the log that has gone by, None if it does not."""
        self._settle(None)
        return None if self._bad_from is None else self._reason

    def plan(self, log_start: int, log_end: int) -> QueuePlan:
        """What is to be done, once the log has gone by."""
        self._settle(None)
        end = self._next
        if end is None:
            return self._without_messages(log_start)
        self._look_before(log_start)
        if self._bad_from is None:
            return self._cut_at(max(end, self._kept_behind(end)))
        keep = min(self._bad_from, self._had)
        action = self._action(keep)
        if action is QueueAction.REBUILD:
            keep = 0
        return QueuePlan(
            self.key,
            action,
            keep,
            self._had,
            end,
            self._resume_at,
            self._reason,
            self._moved,
            self._largest_gap,
        )

    def _look_before(self, log_start: int) -> None:
        """Units before the first message of the log are of messages that were deleted, or lost."""
        assert self._first is not None
        stop = min(self._first, self._had)
        wrong = self._first_wrong(0, stop, log_start)
        if wrong < stop:
            reason = f"unit {wrong} is of a message that the log does not have"
            self._differs(wrong, self._first_at, reason)

    def _without_messages(self, log_start: int) -> QueuePlan:
        """The log has no message of it: what was deleted from the log may stay."""
        return self._cut_at(self._kept_behind(0, log_start))

    def _cut_at(self, keep: int) -> QueuePlan:
        """Units from an offset on go, if there are any; nothing is lacking."""
        if keep >= self._had:
            action, reason = QueueAction.KEEP, ""
            if self._ends_empty():
                # RocketMQ would take the first unit of it for a message.
                action, reason = QueueAction.CUT, "its last file is empty"
            return QueuePlan(self.key, action, keep, self._had, keep, None, reason)
        reason = f"units from {keep} on are of no message of the log"
        action = self._action(keep)
        if action is QueueAction.REBUILD:
            keep = 0
        return QueuePlan(self.key, action, keep, self._had, keep, None, reason)

    def _ends_empty(self) -> bool:
        """Whether the last file was made, and nothing written to it."""
        counts = [] if self._disk is None else [s.count for s in self._disk.segments()]
        return len(counts) > 1 and counts[-1] == 0

    def _action(self, keep: int) -> QueueAction:
        """What becomes of the files where units from an offset on go."""
        first = next((s.start for s in self._disk.segments()), None) if self._disk else None
        if first is None or keep < first or (self._had and keep <= first):
            return QueueAction.REBUILD
        return QueueAction.CUT if keep < self._had else QueueAction.KEEP

    def _kept_behind(self, start: int, log_start: int = 0) -> int:
        """Up to where units name damage of the log, or what was deleted from its start."""
        return self._first_wrong(start, self._had, log_start)

    def _first_wrong(self, start: int, stop: int, log_start: int) -> int:
        """The first unit of a range that names neither of both, ``stop`` without one."""
        if self._disk is None:
            return stop
        for offset, units in self._disk.runs(start, stop):
            doubtful = (units["physical_offset"] >= log_start) | (units["size"] <= 0)
            for at in np.flatnonzero(doubtful).tolist():
                if not self._may_stay(QueueEntry(*units[at].item())):
                    return offset + at
        return stop


def _same(there: Units, wanted: Units, tags_slack: int) -> int:
    if there.tobytes() == wanted.tobytes():
        return len(there)
    same = (there["physical_offset"] == wanted["physical_offset"]) & (
        there["size"] == wanted["size"]
    )
    # Below that a tags code is an address into ConsumeQueueExt, which says the same elsewhere.
    tags = (there["tags_code"] == wanted["tags_code"]) | (there["tags_code"] < java.INT_MIN)
    if tags_slack:
        codes = there["tags_code"].astype(np.int64)
        tags |= (codes >= 0) & (np.abs(codes - wanted["tags_code"]) <= tags_slack)
    same &= tags
    return len(there) if same.all() else int(np.argmin(same))


def names_damage(unit: QueueEntry, damage: Container[int]) -> bool:
    """Whether a unit is of a message that the log has lost: all of that lies in damage."""
    first, size = unit.physical_offset, unit.size
    return size > 0 and first in damage and first + size - 1 in damage


def kept_units(
    queue: Queue, start: int, stop: int, damage: Container[int]
) -> Iterator[tuple[int, bytes]]:
    """The units of a range that name damage of the log, by their offsets."""
    for offset, unit in queue.entries(start, stop):
        if not unit.is_filler and names_damage(unit, damage):
            yield offset, queue_entry.encode(unit)
