"""Which transactions are open, as the frames of the log tell it, one after the other.

A PREPARED message has the unit of its QUEUEOFFSET, as far as that can be: producers name it when
they end the transaction. A COMMIT or ROLLBACK ends the transaction whose PREPARED message it names
by its place in the log, if it is of the same producer group; the first one counts. (RocketMQ looks
only at the unit whose number the end brings along, and passes over all ends of transactions whose
units it has numbered anew.)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from logquarry.format import sys_flag
from logquarry.format.frame import FIXED_SIZE_V1
from logquarry.format.state_table import FILLER_SIZE, StateUnit
from logquarry.store.state_table.frames import TransactionFrame

MOST_LOST: Final = 1 << 20
"""PREPARED messages that may be missing in front of one. No CRC covers a number, and each one that
is missing takes a unit."""


class OpenTransaction(NamedTuple):
    """A transaction that has not ended.

    Attributes:
        number: its unit's in the state table.
        physical_offset: where its PREPARED message stands in the log.
        size: bytes of that.
        store_seconds: when it was stored.
        group_hash: of its producer group.
    """

    number: int
    physical_offset: int
    size: int
    store_seconds: int
    group_hash: int


class Change(NamedTuple):
    """What a frame does to the table.

    Attributes:
        number: of the unit that it writes; those missing before it are to stand for nothing.
        unit: the unit, None where only the state changes.
        state: its state.
    """

    number: int
    unit: StateUnit | None
    state: int


class TransactionBook:
    """Keeps which transactions are open.

    Args:
        next_number: the number that comes next; None where any may.
        known_until: where the last message that it knows of ends in the log.

    Attributes:
        open: by the places of their PREPARED messages.
        next_number: as above.
    """

    def __init__(self, next_number: int | None = None, known_until: int = 0) -> None:
        self.open: dict[int, OpenTransaction] = {}
        self.next_number = next_number
        self._known_until = known_until

    def __iter__(self) -> Iterator[OpenTransaction]:
        return iter(sorted(self.open.values()))

    def take(self, frame: TransactionFrame) -> Change | None:
        """The next frame of the log; what it changes, None if nothing."""
        if not frame.is_prepared:
            return self._end(frame)
        number = self._number_of(frame)
        self.next_number = number + 1
        self._known_until = frame.physical_offset + frame.size
        unit = frame.unit()
        self.open[frame.physical_offset] = OpenTransaction(
            number, unit.physical_offset, unit.size, unit.store_seconds, unit.group_hash
        )
        return Change(number, unit, unit.state)

    def _number_of(self, frame: TransactionFrame) -> int:
        """The number of a PREPARED message: its own, if one may come there."""
        expected = self.next_number
        # Each number took a message, at its least.
        room = (frame.physical_offset - self._known_until) // FIXED_SIZE_V1
        if expected is None:
            return frame.number if 0 <= frame.number <= room else 0
        lost = frame.number - expected
        return frame.number if 0 <= lost <= min(room, MOST_LOST) else expected

    def _end(self, frame: TransactionFrame) -> Change | None:
        found = self.open.get(frame.prepared_offset)
        if found is None or found.group_hash != frame.group_hash:
            return None
        del self.open[frame.prepared_offset]
        return Change(found.number, None, frame.kind)


def filler(before: StateUnit) -> StateUnit:
    """A unit for a message that the log has lost, to stand in front of another one's.

    Nobody asks for it, and RocketMQ takes it for one that has ended.
    """
    return StateUnit(
        before.physical_offset,
        FILLER_SIZE,
        before.store_seconds,
        0,
        sys_flag.TRANSACTION_ROLLBACK,
    )
