"""The checkpoint file (``StoreCheckpoint``), and the durable offset in ``.logquarry/durable``.

The checkpoint file has 4,096 bytes, and begins with three timestamps. RocketMQ 5 writes three
offsets after the timestamps; in a file of a 4.9 broker, these bytes are 0.

The durable offset shows which damage can be the result of a crash. All bytes of the log before the
durable offset were once synced, so damage there happened later. Damage after the durable offset may
come from a crash.

The content of ``durable`` fits into one sector, so after a power cut the file has either the old or
the new content. After a RocketMQ broker has written to the store, the durable offset is not valid
any more. To detect such a write, the file also has two sets of times of the checkpoint: the times
before and the times after logquarry's last write of the checkpoint. If the checkpoint has other
times now, a broker has written it.

The file ``durable`` also has the physical offset at which the log starts. Retention raises this
offset before it deletes log files. So if the first existing log file begins after this offset, log
files were lost.
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
"""Size in bytes of two fields: the log's start, and the CRC-32 of the start. They follow the fields
of :class:`DurableMark` in the file. The fields are valid only if the mark is valid.
"""


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
        """Return the offsets for a log that was truncated at ``end``: limit ``confirm`` and
        ``logics_physical`` to ``end``.
        """
        return self._replace(
            confirm=min(self.confirm, end), logics_physical=min(self.logics_physical, end)
        )


def decode_offsets(data: bytes) -> Offsets:
    """Decode the offsets. If the data is too short for an offset, the offset is 0."""
    data = data[LAYOUT.size :].ljust(OFFSETS.size, b"\0")
    return Offsets(*OFFSETS.struct.unpack_from(data, 0))


def encode(checkpoint: Checkpoint) -> bytes:
    """Encode the whole file."""
    return LAYOUT.page(checkpoint)


def decode(data: bytes) -> Checkpoint:
    """Decode the timestamps. Raises ValueError if there are fewer than 24 bytes."""
    return Checkpoint(*LAYOUT.values(data))


class DurableMark(NamedTuple):
    """The durable offset, and the checkpoints for which this offset is valid."""

    offset: int
    before: Checkpoint
    after: Checkpoint

    def speaks_of(self, checkpoint: Checkpoint) -> bool:
        """Whether the durable offset is valid for a store with this checkpoint."""
        return checkpoint in (self.before, self.after)


def encode_mark(mark: DurableMark) -> bytes:
    """Encode the durable mark, the first part of the file ``.logquarry/durable``."""
    data = MARK.struct.pack(MARK_MAGIC, mark.offset, *mark.before, *mark.after)
    return data + zlib.crc32(data).to_bytes(4, "big")


def decode_mark(data: bytes) -> DurableMark | None:
    """Decode the durable offset. Returns None if the CRC is wrong, or if logquarry did not write
    the bytes.
    """
    if len(data) < MARK_SIZE:
        return None
    magic, offset, *times = MARK.struct.unpack_from(data, 0)
    crc = int.from_bytes(data[MARK.size : MARK_SIZE], "big")
    if magic != MARK_MAGIC or crc != zlib.crc32(data[: MARK.size]) or offset < 0:
        return None
    return DurableMark(offset, Checkpoint(*times[:3]), Checkpoint(*times[3:]))


def encode_start(start: int) -> bytes:
    """Encode the log's start, -1 if unknown. The bytes follow the durable mark in the file."""
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
