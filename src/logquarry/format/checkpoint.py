"""The checkpoint file (``StoreCheckpoint``), and the durable offset in ``.logquarry/durable``.

The checkpoint has 4,096 bytes, which begin with three timestamps. RocketMQ 5 adds three offsets; a
4.9 broker leaves them 0.

Damage before the durable offset is rot: the bytes were once good. Damage after the durable offset
may come from a crash. The content of ``durable`` fits one sector, so a power cut leaves either the
old or the new content. If RocketMQ opens the store, it rewrites the checkpoint, and the durable
offset is stale. So the durable file also records the old and the next content of the checkpoint.

The durable file also has the physical offset of the log's start. Retention raises the start before
it deletes files. If the first log file starts later, the log has lost its first files.
"""

from __future__ import annotations

import zlib
from typing import Final, NamedTuple

from logquarry.format.fields import Field, Layout

LAYOUT = Layout(
    "checkpoint",
    Field("physic_timestamp", "q", "store time of the last message synced in the log, ms"),
    Field("logics_timestamp", "q", "store time of the last message synced in the queues, ms"),
    Field("index_timestamp", "q", "store time of the last message synced in the index, ms"),
)
OFFSETS = Layout(
    "offsets of 5.x",
    Field("master_flushed", "q", "physical offset up to which the master has synced its log"),
    Field("confirm", "q", "physical offset of the log's last message at the last recovery"),
    Field("logics_physical", "q", "physical offset of the last message synced in the queues (5.5)"),
)
assert LAYOUT.size == 24

MARK_MAGIC: Final = 0x4C51_4D41_524B_0001
MARK: Final = Layout(
    "durable mark",
    Field("magic", "q", "MARK_MAGIC"),
    Field("offset", "q", "physical offset: the log is synced up to here"),
    Field("physic_before", "q", "checkpoint before its next write: physic"),
    Field("logics_before", "q", "logics"),
    Field("index_before", "q", "index"),
    Field("physic_after", "q", "checkpoint after its next write: physic"),
    Field("logics_after", "q", "logics"),
    Field("index_after", "q", "index"),
)
MARK_SIZE: Final = MARK.size + 4
assert MARK.size == 64

START: Final = Layout(
    "log start", Field("start", "q", "physical offset at which the log starts; -1: unknown")
)
START_SIZE: Final = START.size + 4
"""Log start and its CRC-32 follow the durable mark, and are valid only if the mark is valid."""


class Checkpoint(NamedTuple):
    """The three timestamps, in milliseconds."""

    physic_timestamp: int = 0
    logics_timestamp: int = 0
    index_timestamp: int = 0


class Offsets(NamedTuple):
    """The offsets of RocketMQ 5."""

    master_flushed: int = 0
    confirm: int = 0
    logics_physical: int = 0

    def limited(self, end: int) -> Offsets:
        """Limit the offsets to the new end of a log that was cut."""
        return self._replace(
            confirm=min(self.confirm, end), logics_physical=min(self.logics_physical, end)
        )


def decode_offsets(data: bytes) -> Offsets:
    """Decode the offsets; 0 for each missing offset."""
    data = data[LAYOUT.size :].ljust(OFFSETS.size, b"\0")
    return Offsets(*OFFSETS.struct.unpack_from(data, 0))


def encode(checkpoint: Checkpoint) -> bytes:
    """Encode the whole file."""
    return LAYOUT.page(checkpoint)


def decode(data: bytes) -> Checkpoint:
    """Decode the timestamps; fewer than 24 bytes raise ValueError."""
    return Checkpoint(*LAYOUT.values(data))


class DurableMark(NamedTuple):
    """The durable offset, and the checkpoints for which it is valid."""

    offset: int
    before: Checkpoint
    after: Checkpoint

    def speaks_of(self, checkpoint: Checkpoint) -> bool:
        """Whether the durable offset is valid for a store with this checkpoint."""
        return checkpoint in (self.before, self.after)


def encode_mark(mark: DurableMark) -> bytes:
    """Encode the content of ``.logquarry/durable``, without padding."""
    data = MARK.struct.pack(MARK_MAGIC, mark.offset, *mark.before, *mark.after)
    return data + zlib.crc32(data).to_bytes(4, "big")


def decode_mark(data: bytes) -> DurableMark | None:
    """Decode the durable offset; None if the bytes are torn, or were not written by logquarry."""
    if len(data) < MARK_SIZE:
        return None
    magic, offset, *times = MARK.struct.unpack_from(data, 0)
    crc = int.from_bytes(data[MARK.size : MARK_SIZE], "big")
    if magic != MARK_MAGIC or crc != zlib.crc32(data[: MARK.size]) or offset < 0:
        return None
    return DurableMark(offset, Checkpoint(*times[:3]), Checkpoint(*times[3:]))


def encode_start(start: int) -> bytes:
    """Encode the log's start for the place after the durable mark; -1 if unknown."""
    data = START.struct.pack(start)
    return data + zlib.crc32(data).to_bytes(4, "big")


def decode_start(data: bytes) -> int | None:
    """Decode the log's start from the content of ``.logquarry/durable``; None if unknown."""
    data = data[MARK_SIZE : MARK_SIZE + START_SIZE]
    if len(data) < START_SIZE:
        return None
    (start,) = START.struct.unpack_from(data, 0)
    is_right = int.from_bytes(data[START.size :], "big") == zlib.crc32(data[: START.size])
    return int(start) if is_right and start >= 0 else None
