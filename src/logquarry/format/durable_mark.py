"""The file with the log's durable offset: ``.logquarry/durable``, unknown to RocketMQ.

Damage before the durable offset is rot: the bytes were good once. Damage after it may come from a
crash. The content fits one sector, so a power cut leaves either the old or the new content.

A RocketMQ that opens the store rewrites the checkpoint, and the durable offset is then stale. So
the file records the content of the checkpoint before and after the checkpoint's next write.
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
"""With the CRC-32 after the fields."""
FILE_SIZE: Final = 4096
assert LAYOUT.size == 64


class DurableMark(NamedTuple):
    """The durable offset and the checkpoints that it is valid for."""

    offset: int
    before: Checkpoint
    after: Checkpoint

    def speaks_of(self, checkpoint: Checkpoint) -> bool:
        """Whether the durable offset is valid for a store with this checkpoint."""
        return checkpoint in (self.before, self.after)


def encode(mark: DurableMark) -> bytes:
    """Encode the content, without padding."""
    data = LAYOUT.struct.pack(MAGIC, mark.offset, *mark.before, *mark.after)
    return data + zlib.crc32(data).to_bytes(4, "big")


def decode(data: bytes) -> DurableMark | None:
    """Decode the content; None if it is torn or foreign."""
    if len(data) < SIZE:
        return None
    magic, offset, *times = LAYOUT.struct.unpack_from(data, 0)
    crc = int.from_bytes(data[LAYOUT.size : SIZE], "big")
    if magic != MAGIC or crc != zlib.crc32(data[: LAYOUT.size]) or offset < 0:
        return None
    return DurableMark(offset, Checkpoint(*times[:3]), Checkpoint(*times[3:]))
