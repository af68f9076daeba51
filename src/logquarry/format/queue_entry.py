"""The 20-byte entry of a consume queue (``ConsumeQueue``)."""

from __future__ import annotations

from typing import Final, NamedTuple

from logquarry.format import java
from logquarry.format.fields import Field, Layout

LAYOUT = Layout(
    "consume queue entry",
    Field("physical_offset", "q", "start of the frame in the log"),
    Field("size", "i", "TOTALSIZE of the frame; 0: empty entry"),
    Field("tags_code", "q", "hash of the tags; in the schedule topic: delivery time, ms"),
)
UNIT_SIZE: Final = LAYOUT.size
DEFAULT_UNITS_PER_FILE: Final = 300_000
assert UNIT_SIZE == 20

FILLER_SIZE: Final = java.INT_MAX
"""Size field of the entries that pad the first file of a queue that starts above offset 0."""


class QueueEntry(NamedTuple):
    """One entry of a consume queue."""

    physical_offset: int
    size: int
    tags_code: int

    @property
    def end(self) -> int:
        """Physical offset after the message."""
        return self.physical_offset + self.size

    @property
    def is_written(self) -> bool:
        """Whether RocketMQ counts the entry as present (``offset >= 0 && size > 0``)."""
        return self.physical_offset >= 0 and self.size > 0

    @property
    def is_filler(self) -> bool:
        """Whether the entry only pads a file, without a message (``ConsumeQueue.fillPreBlank``).

        No frame has that size. The physical offset is 0, except in fillers that a salvage wrote;
        see docs/salvage.md.
        """
        return self.size == FILLER_SIZE


FILLER = QueueEntry(0, FILLER_SIZE, 0)


def encode(entry: QueueEntry) -> bytes:
    """Encode an entry."""
    return LAYOUT.struct.pack(*entry)


def decode_at(data: bytes | memoryview, position: int) -> QueueEntry:
    """Decode the entry at ``position``."""
    return QueueEntry(*LAYOUT.struct.unpack_from(data, position))
