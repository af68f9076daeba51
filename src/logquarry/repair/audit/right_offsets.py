"""Finds the right queue offset of each message of a queue.

BODYCRC does not cover the queue offset in a frame. So damage can change the queue offset, and the
frame still seems valid. Such a queue offset is called *harmed*. :class:`RightBases` finds the right
queue offsets of batch queues. :class:`RightOffsets` finds those of other queues, for recover and
rebuild, with these rules.

The expected queue offset of a message is one more than that of the previous message. The following
rules are for a message with another queue offset, if the next message does not continue from this
other offset. The first rule that applies decides whether the queue offset is right or harmed:

1. The queue on the disk has the message's entry at the expected queue offset: harmed.
2. The queue offset is lower than expected, and the queue has the message's entry at this lower
   offset: right.
3. The next message has the expected queue offset or the following one: harmed.
4. The queue has the message's entry at the queue offset of the frame: right.
5. The queue offset is higher than expected: harmed if the lost bytes are too few for so many
   messages. Exception: if the next message has an even higher queue offset, the gap may have up to
   ``SMALL_GAP`` more messages.
6. The queue offset is lower than expected: harmed if the next message has a higher queue offset
   than expected. A queue offset other than 0 is also harmed in two cases: there is no next message,
   or the next message has the same or a lower queue offset.

Several messages with consecutive queue offsets have another rule: their queue offsets are harmed
only if the queue has the entries of all these messages at the expected offsets. The same rule
applies to a message whose queue offset follows the last right queue offset.

The queue's first message has other rules. Its queue offset is right if the next message has the
following queue offset. It is also right if the queue has the message's entry at this queue offset.
Otherwise, the message's entry elsewhere in the queue shows the right queue offset. Without such an
entry, the first message's queue offset is right if it is lower than that of the next message, or if
there is no next message, or if the next message has queue offset 0 (the topic was created again).
If none of these is true, the right queue offset is one less than that of the next message.

A queue offset below 0 or above ``MOST_OFFSET`` is always harmed. A gap always shows a
harmed queue offset if it is larger than ``MOST_GAP``, and the lost bytes are too few for so many
messages. In all other cases, the frame is right: a lower queue offset means that the topic was
deleted and created again, and a gap means that messages were lost.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import pairwise
from typing import Final

import numpy as np

from logquarry.format.arrays import Int64, consecutive, joined_records
from logquarry.format.frame import FIXED_SIZE_V1
from logquarry.read.batch_queue import BATCH_DTYPE, BatchEntries
from logquarry.read.queue import Queue, Units
from logquarry.repair.audit.differences import (
    GAP_SLACK,
    MOST_MOVED,
    SMALL_GAP,
    TagsRule,
    count_same,
    same_entries,
)
from logquarry.write.queue_writer import MOST_GAP, MOST_OFFSET, falls

_MOST_SEARCHES: Final = 64
"""Maximum number of searches through the whole queue. Only a hostile log needs more."""


class RightOffsets(ABC):
    """Takes the messages of one queue in the log's order, and passes them to :meth:`_put` with the
    right queue offsets. ``disk`` is the queue on the disk or None. If ``mends`` is False, the
    decision about a message does not use the next message.
    """

    def __init__(
        self, disk: Queue | None, tags: TagsRule | None = None, *, mends: bool = True
    ) -> None:
        self._disk = disk
        self._tags = tags or TagsRule()
        self._mends = mends
        self._had = 0 if disk is None else disk.max_offset
        # Physical offset after the last message.
        self._known_until = 0
        # Queue offset after the last message; None before the first message.
        self._next: int | None = None
        # Queue offset after the last message whose frame has the right queue offset.
        self._sure: int | None = None
        # The last message, if its queue offset is in doubt until the next message is read; else
        # None.
        self._odd: tuple[int, Units] | None = None
        self._moved: dict[int, int] = {}
        self._searches = 0

    @abstractmethod
    def _put(self, offset: int, entries: Units) -> None:
        """Take the next messages; ``offset`` is the right queue offset of the first."""

    def _correct(self, place: int, own: int, right: int) -> None:
        """Record the ``right`` queue offset of the frame at physical offset ``place``."""
        self._moved[place] = right

    @abstractmethod
    def _drop(self, offset: int, entries: Units) -> None:
        """Handle messages that have no place in the queue. ``offset`` is the queue offset in the
        first message's frame.
        """

    def take(self, offsets: Int64, entries: Units) -> None:
        """Take the next messages of the queue, in the order of the log."""
        for start, stop in consecutive(offsets):
            self._take_part(int(offsets[start]), entries[start:stop])

    def _take_part(self, offset: int, entries: Units) -> None:
        odd = self._odd
        if odd is not None and 0 <= odd[0] == offset - 1:
            # The message in doubt and this part have consecutive queue offsets: decide both
            # together.
            self._odd = None
            self._take_run(odd[0], joined_records(odd[1], entries))
            return
        self.settle(offset)
        if self._mends and len(entries) == 1 and offset not in (self._next, self._sure):
            self._odd = offset, entries.copy()
        else:
            self._take_run(offset, entries)

    def settle(self, following: int | None = None) -> None:
        """Decide the last message's queue offset, if it is in doubt. ``following`` is the queue
        offset of the next message, None at the log's end.
        """
        odd, self._odd = self._odd, None
        if odd is None:
            return
        offset, entries = odd
        expected = self._next
        if expected is None:
            self._take_first(offset, entries, following)
        elif self._is_harmed(offset, entries, expected, following):
            self._move(offset, entries, expected)
        else:
            self._take_run(offset, entries)

    def _is_harmed(self, offset: int, entries: Units, expected: int, following: int | None) -> bool:
        if self._has(expected, entries):
            return True
        if 0 <= offset < expected and self._is_queued(offset, entries):
            # The queue had another message at this offset before, so the topic was created again.
            return False
        # The next message has the queue offset that is right for this message, or the one above.
        # So damage has changed this frame's topic or queue id, or its queue offset.
        if following in (expected, expected + 1):
            return True
        if offset >= 0 and self._has(offset, entries):
            return False
        if offset > expected:
            # If the next message has an even higher queue offset, allow a larger gap. An earlier
            # salvage can have removed damaged bytes before and after the message.
            rises = following is not None and following > offset
            return offset - expected > self._room(entries) + (SMALL_GAP if rises else 0)
        if following is not None and following > expected:
            return True
        # Either the topic was created again, or the queue offset is harmed. A topic that was
        # created again begins at 0, or later if its first messages are lost. If the topic begins
        # above 0, the next message has a higher queue offset.
        return offset != 0 and (following is None or following <= offset)

    def _take_first(self, offset: int, entries: Units, following: int | None) -> None:
        if following == offset + 1 or (offset >= 0 and self._has(offset, entries)):
            self._take_run(offset, entries)
            return
        right = self._first_place(entries)
        if right is not None:
            self._move(offset, entries, right)
        elif following is not None and following > 0 and not 0 <= offset < following:
            self._move(offset, entries, following - 1)
        elif 0 <= offset <= MOST_OFFSET:
            self._take_run(offset, entries)
        elif following is None:
            right = self._place_in_queue(entries)
            self._move(offset, entries, self._had if right is None else right)
        else:
            self._drop(offset, entries)

    def _first_place(self, entries: Units) -> int | None:
        """Return the first message's queue offset if the queue on the disk alone decides this
        offset.
        """
        return self._place_in_queue(entries)

    def _place_in_queue(self, entries: Units) -> int | None:
        if self._disk is None or self._searches == _MOST_SEARCHES:
            return None
        self._searches += 1
        place = entries["physical_offset"][0]
        for start, there in self._disk.runs(0, self._had):
            for at in np.flatnonzero(there["physical_offset"] == place).tolist():
                if same_entries(there[at : at + 1], entries, self._tags)[0]:
                    return int(start + at)
        return None

    def _move(self, own: int, entries: Units, offset: int) -> None:
        if len(self._moved) < MOST_MOVED:
            self._correct(int(entries["physical_offset"][0]), own, offset)
            sure = self._sure
            self._take_run(offset, entries)
            self._sure = sure
        else:
            self._drop(own, entries)

    def _take_run(self, offset: int, entries: Units) -> None:
        own, expected = offset, self._next
        if expected is not None and offset != expected:
            if self._has(expected, entries):
                # The queue has all these entries at the expected queue offsets, so the queue
                # offsets in all these frames are harmed.
                for at, place in enumerate(entries["physical_offset"][:MOST_MOVED].tolist()):
                    self._correct(place, offset + at, expected + at)
                offset = expected
            elif offset - expected > max(MOST_GAP, self._room(entries)):
                offset, entries = self._bring_back(offset, entries)
        if not 0 <= offset <= MOST_OFFSET:
            offset, entries = self._bring_back(offset, entries)
        if len(entries):
            self._put(offset, entries)
            self._next = offset + len(entries)
            if offset == own:
                self._sure = self._next
            self._known_until = int(entries["physical_offset"][-1]) + int(entries["size"][-1])

    def _bring_back(self, own: int, entries: Units) -> tuple[int, Units]:
        """Correct the queue offsets of these messages, and drop the messages beyond the limit
        ``MOST_MOVED``. Return the right queue offset of the first message, and the corrected
        messages.
        """
        right = self._place_in_queue(entries[:1]) if self._next is None else self._next
        offset = 0 if right is None else right
        room = MOST_MOVED - len(self._moved)
        if len(entries) > room:
            self._drop(own + room, entries[room:])
        for at, place in enumerate(entries["physical_offset"][:room].tolist()):
            self._correct(place, own + at, offset + at)
        return offset, entries[:room]

    def _room(self, entries: Units) -> int:
        """Return the maximum number of messages that can be lost before ``entries``."""
        lost = max(0, int(entries["physical_offset"][0]) - self._known_until)
        return lost // FIXED_SIZE_V1 + GAP_SLACK

    def _has(self, offset: int, entries: Units) -> bool:
        """Whether the queue shows that ``offset`` is the right queue offset of these entries."""
        return self._is_queued(offset, entries)

    def _is_queued(self, offset: int, entries: Units) -> bool:
        """Whether the queue has these entries at an offset."""
        return count_same(self._disk, offset, entries, self._tags) == len(entries)


# ----------------------------------------------------------------------------------- batch queues
# An entry of a batch queue has the queue offset of its first message, the *base*. Only the
# neighbouring frames show whether a base is right.
NO_PLACE: Final = -1


class RightBases:
    """Takes the entries of one batch queue in the order of the log, and returns them with the right
    bases. If the base of an entry is in doubt, the object holds back the entry until the next entry
    or the log's end decides the base.

    Attributes:
        following: queue offset after the last returned entry; None before the first.
        moved: physical offset of each frame with a harmed base -> the right base. The value is
            :data:`NO_PLACE` if the previous and the next frame leave no place for the frame. The
            entry of such a frame is never returned.
        homeless: physical offset of each such frame -> the base in the frame.
    """

    def __init__(self) -> None:
        self.following: int | None = None
        self.moved: dict[int, int] = {}
        self.homeless: dict[int, int] = {}
        self._odd = np.empty(0, BATCH_DTYPE)

    def take(self, entries: BatchEntries) -> BatchEntries:
        """Add the entries of the next frames; return the entries whose bases are decided."""
        if len(self._odd):
            entries = joined_records(self._odd, entries)
            self._odd = self._odd[:0]
        return self._decide(entries, is_end=False)

    def settle(self) -> BatchEntries:
        """Return the entry that was held back, if any. Call this when no frame follows."""
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
            place = int(entries["physical_offset"][at])
            self.moved[place] = right
            if right == NO_PLACE:
                self.homeless[place] = own
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


def epochs(entries: BatchEntries, expected: int) -> Iterator[tuple[bool, BatchEntries]]:
    """Split the entries of a batch queue into parts. A new part begins at each entry whose queue
    offset does not increase, because the topic was created again before this entry. For each part,
    yield whether the topic was created again at the part's start, and the part. ``expected`` is the
    queue offset after the previous message.
    """
    starts = entries["base"].astype(np.int64)
    cuts = falls(starts, starts + entries["count"], expected)
    for at, stop in pairwise([0, *cuts, len(entries)]):
        if at < stop:
            yield at in cuts, entries[at:stop]
