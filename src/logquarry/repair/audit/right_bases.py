"""Finds the right queue offset of each frame of a batch queue; see :mod:`.right_offsets`.

Only the neighbouring frames in the log decide. The entry of a frame has the queue offset of the
frame's first message, its base, and the number of the frame's messages.
"""

from __future__ import annotations

import numpy as np

from logquarry.format.arrays import joined_records
from logquarry.read.batch_queue import BATCH_DTYPE, BatchEntries
from logquarry.write.queue_writer import MOST_GAP, MOST_OFFSET

NO_PLACE = -1


class RightBases:
    """Takes the entries of one batch queue in the order of the log, and returns them with the right
    bases.

    A base that does not continue the previous one can be harmed. So this class holds back the last
    entry if its base is in doubt, until the next entry or the log's end decides it.

    Attributes:
        following: queue offset after the last returned entry; None before the first.
        moved: physical offset of each frame with a harmed base -> the right base;
            :data:`NO_PLACE` if the frames around it leave no place for it. Such an entry is not
            returned.
    """

    def __init__(self) -> None:
        self.following: int | None = None
        self.moved: dict[int, int] = {}
        self._odd = np.empty(0, BATCH_DTYPE)

    def take(self, entries: BatchEntries) -> BatchEntries:
        """Add the entries of the next frames; return the entries whose bases are decided."""
        if len(self._odd):
            entries = joined_records(self._odd, entries)
            self._odd = self._odd[:0]
        return self._decide(entries, is_end=False)

    def settle(self) -> BatchEntries:
        """Return the last entry if it was held back: no frame follows."""
        odd, self._odd = self._odd, self._odd[:0]
        return self._decide(odd, is_end=True)

    def _decide(self, entries: BatchEntries, *, is_end: bool) -> BatchEntries:
        if not len(entries):
            return entries
        bases = entries["base"].astype(np.int64)
        counts = entries["count"].astype(np.int64)
        stops = bases + counts
        first = -1 if self.following is None else self.following
        breaks = np.flatnonzero(bases != np.append(first, stops[:-1])).tolist()
        if not breaks:
            self.following = int(stops[-1])
            return entries
        kept = np.ones(len(entries), np.bool_)
        for at in breaks:
            expected = self.following if not at else int(bases[at - 1] + counts[at - 1])
            own, behind = int(bases[at]), at + 1
            if own == expected:
                continue
            if behind == len(entries) and not is_end:
                self._odd = entries[at:].copy()
                kept[at] = False
                break
            following = int(bases[behind]) if behind < len(entries) else None
            right = _right_base(own, int(counts[at]), expected, following)
            if right == own:
                continue
            self.moved[int(entries["physical_offset"][at])] = right
            if right == NO_PLACE:
                # Leave the entry out. The next entry continues at the expected offset.
                kept[at] = False
                right = (expected or 0) - int(counts[at])
            bases[at] = right
        last = len(entries) - 1 - len(self._odd)
        if last >= 0:
            self.following = int(bases[last] + counts[last])
        made: BatchEntries = entries.copy()
        made["base"] = bases
        return made[kept]


def _right_base(own: int, count: int, expected: int | None, following: int | None) -> int:
    is_possible = 0 <= own <= MOST_OFFSET
    if is_possible and following == own + count:
        return own
    if expected is None:
        if following is not None and following >= count and not 0 <= own < following:
            return following - count
        return own if is_possible else 0
    if following == expected:
        # The frame belongs to another queue: damage changed its topic or queue id.
        return NO_PLACE
    if following == expected + count or not is_possible:
        return expected
    if own > expected:
        falls = following is not None and expected < following < own + count
        return expected if falls or own - expected > MOST_GAP else own
    if following is not None and following > expected:
        return expected
    # A topic that was created again begins at 0, or later if its first messages are lost.
    return expected if own and (following is None or following <= own) else own
