"""The checkpoint file (``StoreCheckpoint``): 4,096 bytes that start with three times.

RocketMQ 5 has three offsets after them, which are 0 in the file of a 4.9 broker.
"""

from __future__ import annotations

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
    Field("confirm", "q", "physical offset of the last message of the log at its last recovery"),
    Field("logics_physical", "q", "physical offset of the last message synced in the queues (5.5)"),
)
FILE_SIZE: Final = 4096
assert LAYOUT.size == 24


class Checkpoint(NamedTuple):
    """The three times in milliseconds."""

    physic_timestamp: int = 0
    logics_timestamp: int = 0
    index_timestamp: int = 0


class Offsets(NamedTuple):
    """The offsets of RocketMQ 5."""

    master_flushed: int = 0
    confirm: int = 0
    logics_physical: int = 0

    def limited(self, end: int) -> Offsets:
        """The offsets for a log that was cut: none is after its end."""
        return self._replace(
            confirm=min(self.confirm, end), logics_physical=min(self.logics_physical, end)
        )


def decode_offsets(data: bytes) -> Offsets:
    """Decode the offsets; 0 for those after the end of the data."""
    data = data[LAYOUT.size :].ljust(OFFSETS.size, b"\0")
    return Offsets(*OFFSETS.struct.unpack_from(data, 0))


def encode(checkpoint: Checkpoint) -> bytes:
    """Encode the whole file."""
    return LAYOUT.struct.pack(*checkpoint).ljust(FILE_SIZE, b"\0")


def decode(data: bytes) -> Checkpoint:
    """Decode the times.

    Raises:
        ValueError: if there are fewer than 24 bytes.
    """
    if len(data) < LAYOUT.size:
        raise ValueError(f"{len(data)} bytes instead of the {LAYOUT.size} of a checkpoint")
    return Checkpoint(*LAYOUT.struct.unpack_from(data, 0))
