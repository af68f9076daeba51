"""The checkpoint file (``StoreCheckpoint``): 4,096 bytes that start with three times."""

from __future__ import annotations

from typing import Final, NamedTuple

from logquarry.format.fields import Field, Layout

LAYOUT = Layout(
    "checkpoint",
    Field("physic_timestamp", "q", "store time of the last message synced in the log, ms"),
    Field("logics_timestamp", "q", "store time of the last message synced in the queues, ms"),
    Field("index_timestamp", "q", "store time of the last message synced in the index, ms"),
)
FILE_SIZE: Final = 4096
assert LAYOUT.size == 24


class Checkpoint(NamedTuple):
    """The three times in milliseconds."""

    physic_timestamp: int = 0
    logics_timestamp: int = 0
    index_timestamp: int = 0


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
