"""The 24-byte entry of the transaction state table of 3.x (``TransactionStateService``).

Each PREPARED message has one entry, whose number is the message's QUEUEOFFSET. Entries are never
removed.
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
"""The value of the size field in an entry whose message is no longer in the log."""


class StateUnit(NamedTuple):
    """One entry of the state table."""

    physical_offset: int
    size: int
    store_seconds: int
    group_hash: int
    state: int

    @property
    def is_sound(self) -> bool:
        """Whether RocketMQ counts the entry as present."""
        return self.physical_offset >= 0 and self.size > 0 and self.state in STATES

    @property
    def is_open(self) -> bool:
        """Whether the transaction is open: not committed, and not rolled back."""
        return self.state == TRANSACTION_PREPARED


def encode(unit: StateUnit) -> bytes:
    """Encode an entry."""
    return LAYOUT.struct.pack(*unit)


def decode_at(data: bytes | memoryview, position: int) -> StateUnit:
    """Decode the entry at ``position``."""
    return StateUnit(*LAYOUT.struct.unpack_from(data, position))


def group_hash(group: str | None) -> int:
    """Return the hash of a producer group that an entry contains (``String.hashCode``); 0 if there
    is no group.
    """
    return java.hash_code(group or "")
