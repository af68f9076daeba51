"""What the entries of a queue show about frames: frames that fit, and harmed queue offsets.

No CRC covers the queue offset in a frame. A queue offset is harmed if it does not follow the offset
of the queue's previous message, and the queue has the message at the following offset, but not at
the frame's own. Consumers read through the queue, so the queue needs no repair.
"""

from __future__ import annotations

import numpy as np

from logquarry.format.arrays import Int64, consecutive
from logquarry.log.layout import StoreLayout
from logquarry.read.queue import Queue, Units
from logquarry.repair.audit.differences import (
    Difference,
    TagsRule,
    and_more,
    queue_name,
    same_entries,
)
from logquarry.write.queue_writer import QueuePart


def has_entries(queue: Queue, part: QueuePart) -> bool:
    """Whether a queue has exactly these entries, byte for byte and without a gap."""
    offsets = part.offsets
    first, stop = int(offsets[0]), int(offsets[-1]) + 1
    if stop - first != len(offsets) or first < queue.min_offset or stop > queue.max_offset:
        return False
    if len(offsets) > 1 and int(np.diff(offsets).min()) != 1:
        return False
    at = 0
    for start, there in queue.runs(first, stop):
        wanted = part.units[at : at + len(there)]
        if start != first + at or there.tobytes() != wanted.tobytes():
            return False
        at += len(there)
    return at == len(offsets)


def entries_at(queue: Queue, offsets: Int64) -> Units:
    """Return the entry at each of ``offsets`` (ascending); zeros if the queue has none there."""
    first, stop = int(offsets[0]), int(offsets[-1]) + 1
    result = np.zeros(len(offsets), dtype=queue.units(0, 0).dtype)
    for start, entries in queue.runs(max(0, first), min(stop, queue.max_offset)):
        inside = (offsets >= start) & (offsets < start + len(entries))
        result[inside] = entries[offsets[inside] - start]
    return result


class HarmedOffsets:
    """The frames of one queue with a harmed queue offset; ``count`` is their number."""

    def __init__(self, queue: Queue) -> None:
        self.count = 0
        self._place = self._size = 0
        self._text = ""
        self._queue = queue
        self._rule = TagsRule.of_readers(queue.topic)
        # The offset and the entry of the queue's first message.
        self._first: tuple[int, Units] | None = None

    def difference(self, layout: StoreLayout) -> Difference:
        """Return the difference for verify, with the physical offset of the first frame."""
        return Difference(
            "harmed_queue_offset",
            layout.log_file(self._place),
            self._place,
            self._text + and_more(self.count),
            self._size,
        )

    def right_first(self, part: QueuePart, messages: int) -> int | None:
        """Return the right queue offset of the queue's first message if the second one shows it.

        Args:
            part: the next message of the queue, and others after it.
            messages: number of messages before the part.
        """
        first, self._first = self._first, None
        offset = int(part.offsets[0])
        if not messages:
            self._first = offset, part.units[:1].copy()
        if first is None or messages != 1 or first[0] == offset - 1 or self._fits(*first):
            return None
        if not self._fits(offset - 1, first[1]) or not self._fits(offset, part.units[:1]):
            return None
        self._note(first[1], first[0], offset - 1)
        return offset - 1

    def right(self, part: QueuePart, following: int) -> Int64:
        """Return the queue offsets of a part, with the right one for each that is harmed.

        Args:
            following: the offset after the queue's previous message.
        """
        right = part.offsets.copy()
        for start, stop in consecutive(part.offsets):
            own, units = int(part.offsets[start]), part.units[start:stop]
            if own != following:
                count = self._fits(following, units)
                if count and not self._fits(own, units[:1]):
                    right[start : start + count] = np.arange(following, following + count)
                    self._note(units[:count], own, following)
            following = int(right[stop - 1]) + 1
        return right

    def _fits(self, offset: int, entries: Units) -> int:
        """Return how many of these entries the queue has from an offset on."""
        at = 0
        stop = min(offset + len(entries), self._queue.max_offset)
        for start, there in self._queue.runs(max(0, offset), stop):
            wanted = entries[at : at + len(there)]
            same = same_entries(there, wanted, self._rule)
            if start != offset + at or not same.all():
                return at + (int(same.argmin()) if start == offset + at else 0)
            at += len(there)
        return at

    def _note(self, entries: Units, own: int, right: int) -> None:
        if not self.count:
            self._place, self._size = int(entries["physical_offset"][0]), int(entries["size"][0])
            name = queue_name((self._queue.topic, self._queue.queue_id))
            self._text = f"the frame has queue offset {own}, and {name} has the message at {right}"
        self.count += len(entries)
