"""The 24-byte unit of the transaction state table of 3.x (``TransactionStateService``).

A PREPARED message has one unit, whose number is the message's QUEUEOFFSET. The unit stays, and its
state says how the transaction has ended.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from logquarry.format import java
from logquarry.format.fields import Field, Layout
from logquarry.format.sys_flag import TRANSACTION_COMMIT, TRANSACTION_PREPARED, TRANSACTION_ROLLBACK

LAYOUT: Final = Layout(
    "state table entry",
    Field("physical_offset", "q", "start of the PREPARED frame in the log"),
    Field("size", "i", "TOTALSIZE of the frame; 0: empty entry"),
    Field("store_seconds", "i", "STORETIMESTAMP of the frame, in seconds"),
    Field("group_hash", "i", "hash of the producer group (PGROUP)"),
    Field("state", "i", "4: prepared, 8: committed, 12: rolled back"),
)
UNIT_SIZE: Final = LAYOUT.size
STATE_AT: Final = LAYOUT.offsets["state"]
DEFAULT_UNITS_PER_FILE: Final = 2_000_000
assert UNIT_SIZE == 24
assert STATE_AT == 20

STATES: Final = (TRANSACTION_PREPARED, TRANSACTION_COMMIT, TRANSACTION_ROLLBACK)
FILLER_SIZE: Final = java.INT_MAX
"""The size in units that stand for no message: those of messages that the log has lost."""


class StateUnit(NamedTuple):
    """One unit."""

    physical_offset: int
    size: int
    store_seconds: int
    group_hash: int
    state: int

    @property
    def is_sound(self) -> bool:
        """Whether RocketMQ counts the unit as present."""
        return self.physical_offset >= 0 and self.size > 0 and self.state in STATES

    @property
    def is_open(self) -> bool:
        """Whether the transaction has not ended."""
        return self.state == TRANSACTION_PREPARED


def encode(unit: StateUnit) -> bytes:
    """The 24 bytes of a unit."""
    return LAYOUT.struct.pack(*unit)


def decode_at(data: bytes | memoryview, position: int) -> StateUnit:
    """The unit at ``position``."""
    return StateUnit(*LAYOUT.struct.unpack_from(data, position))


def group_hash(group: str | None) -> int:
    """What a unit has for a producer group: ``String.hashCode``, 0 without a group."""
    return java.hash_code(group or "")
