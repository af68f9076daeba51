"""What units of a queue come to: messages that are still in the log, and their bytes."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from logquarry.format.queue_entry import FILLER_SIZE
from logquarry.store.queue.consume_queue import Units, has_message

_CHUNK: Final = 1 << 20
"""Units that are summed at once."""


class UnitCount(NamedTuple):
    """Some units, counted.

    Attributes:
        messages: how many name a message in the log.
        bytes: what these take.
        largest: bytes of the largest of them.
        end: where the last of them ends in the log.
    """

    messages: int = 0
    bytes: int = 0
    largest: int = 0
    end: int = 0

    def plus(self, other: UnitCount) -> UnitCount:
        """Both together."""
        return UnitCount(
            self.messages + other.messages,
            self.bytes + other.bytes,
            max(self.largest, other.largest),
            max(self.end, other.end),
        )


def count_units(units: Units, min_offset: int, max_offset: int) -> UnitCount:
    """Count the units that name a message between two physical offsets."""
    found = UnitCount()
    for start in range(0, len(units), _CHUNK):
        part = units[start : start + _CHUNK]
        # One pass over the units for a copy of the sizes; what is asked of that costs little.
        sizes = part["size"].astype(np.int32)
        first, end = int(part["physical_offset"][0]), int(part["physical_offset"][-1])
        whole = min_offset <= first <= end < max_offset and int(sizes.min()) > 0
        if not whole or int(sizes.max()) == FILLER_SIZE:
            offsets = part["physical_offset"]
            inside = has_message(part) & (offsets >= min_offset) & (offsets < max_offset)
            sizes = sizes[inside]
            end = int(offsets[inside][-1]) if len(sizes) else 0
        if len(sizes):
            total, largest = int(sizes.sum(dtype=np.int64)), int(sizes.max())
            found = found.plus(UnitCount(len(sizes), total, largest, end + int(sizes[-1])))
    return found
