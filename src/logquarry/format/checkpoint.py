"""The checkpoint page (``StoreCheckpoint``): 4,096 bytes, three times at their start."""

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
    """The whole page."""
    return LAYOUT.struct.pack(*checkpoint).ljust(FILE_SIZE, b"\0")


def decode(data: bytes) -> Checkpoint:
    """The times of a page.

    Raises:
        ValueError: if there are fewer than 24 bytes.
    """
    if len(data) < LAYOUT.size:
        raise ValueError(f"{len(data)} bytes, and a checkpoint takes {LAYOUT.size}")
    return Checkpoint(*LAYOUT.struct.unpack_from(data, 0))
