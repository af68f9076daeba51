"""The durable mark: up to where a log was on the disk when this store last wrote to it.

A file of ours (``.logquarry/durable``), which RocketMQ knows nothing of. What is bad before the
mark was good once, and has rotted; what is bad behind it is what a crash tears. A sector holds all
of it, so that a power cut leaves the one or the other.

Whether the mark still speaks of this log is told by the checkpoint: a RocketMQ that opens the
store writes that anew. The mark names the checkpoint before and after the write it was made for.
"""

from __future__ import annotations

import zlib
from typing import Final, NamedTuple

from logquarry.format.checkpoint import Checkpoint
from logquarry.format.fields import Field, Layout

MAGIC: Final = 0x4C51_4D41_524B_0001
LAYOUT: Final = Layout(
    "durable mark",
    Field("magic", "q", "MAGIC"),
    Field("offset", "q", "physical offset: the log is synced up to here"),
    Field("physic_before", "q", "checkpoint before its next write: physic"),
    Field("logics_before", "q", "logics"),
    Field("index_before", "q", "index"),
    Field("physic_after", "q", "checkpoint after its next write: physic"),
    Field("logics_after", "q", "logics"),
    Field("index_after", "q", "index"),
)
SIZE: Final = LAYOUT.size + 4
"""With the CRC-32 of the fields behind them."""
FILE_SIZE: Final = 4096
assert LAYOUT.size == 64


class DurableMark(NamedTuple):
    """What the file says."""

    offset: int
    before: Checkpoint
    after: Checkpoint

    def speaks_of(self, checkpoint: Checkpoint) -> bool:
        """Whether the store that has this checkpoint is the one that the mark was made for."""
        return checkpoint in (self.before, self.after)


def encode(mark: DurableMark) -> bytes:
    """The mark's bytes."""
    data = LAYOUT.struct.pack(MAGIC, mark.offset, *mark.before, *mark.after)
    return data + zlib.crc32(data).to_bytes(4, "big")


def decode(data: bytes) -> DurableMark | None:
    """The mark, None where these bytes are none (a torn or strange file)."""
    if len(data) < SIZE:
        return None
    magic, offset, *times = LAYOUT.struct.unpack_from(data, 0)
    crc = int.from_bytes(data[LAYOUT.size : SIZE], "big")
    if magic != MAGIC or crc != zlib.crc32(data[: LAYOUT.size]) or offset < 0:
        return None
    return DurableMark(offset, Checkpoint(*times[:3]), Checkpoint(*times[3:]))
