"""What of the log concerns transactions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from logquarry.format import java, state_table, sys_flag
from logquarry.format import properties as props
from logquarry.format.frame import Frame
from logquarry.format.queue_entry import QueueEntry
from logquarry.format.rows import POSITION, SIZE
from logquarry.format.state_table import StateUnit
from logquarry.scan.codec import Rows, Window
from logquarry.scan.walk import LogReader, Run

PREPARED_TAG: Final = -1
"""What the redo log has in place of a tags code for a PREPARED message."""
_GROUP: Final = props.PRODUCER_GROUP.encode()
_MS: Final = 1_000


class TransactionFrame(NamedTuple):
    """A PREPARED, COMMIT or ROLLBACK message.

    Attributes:
        kind: its transaction type, as in SYSFLAG.
        physical_offset: where it stands.
        size: bytes of the frame.
        number: its QUEUEOFFSET.
        prepared_offset: where the PREPARED message stands that it ends.
        store_timestamp: in milliseconds.
        group_hash: of its producer group, 0 without one.
    """

    kind: int
    physical_offset: int
    size: int
    number: int
    prepared_offset: int
    store_timestamp: int
    group_hash: int

    @property
    def is_prepared(self) -> bool:
        """Whether it begins a transaction."""
        return self.kind == sys_flag.TRANSACTION_PREPARED

    def unit(self, state: int = sys_flag.TRANSACTION_PREPARED) -> StateUnit:
        """Its unit in the state table."""
        # Java cuts what is beyond 2038 off likewise, and no CRC covers the time.
        seconds = java.to_int(self.store_timestamp // _MS)
        return StateUnit(self.physical_offset, self.size, seconds, self.group_hash, state)

    def redo_unit(self) -> QueueEntry:
        """Its unit in the redo log."""
        tag = PREPARED_TAG if self.is_prepared else self.prepared_offset
        return QueueEntry(self.physical_offset, self.size, tag)


def transaction_frames(window: Window, rows: Rows) -> list[TransactionFrame]:
    """Those of some frames that concern transactions, in their order."""
    if not len(rows):
        return []
    # It brings pyarrow, which whoever looks at a store of 4.x can do without.
    from logquarry.scan import columns

    flags = columns.fixed_fields(window, rows, ["sys_flag"])["sys_flag"]
    chosen = np.flatnonzero(flags & sys_flag.TRANSACTION_MASK)
    found = []
    for position, size in rows[chosen][:, [POSITION, SIZE]].tolist():
        decoded = window.decode(position, check_crc=False)
        assert isinstance(decoded, Frame), "a row stands for a frame that was found sound"
        frame = frame_of(decoded)
        assert frame is not None and frame[1:3] == (window.base + position, size)
        found.append(frame)
    return found


def frame_of(frame: Frame) -> TransactionFrame | None:
    """What a frame says of a transaction, None if nothing."""
    kind = sys_flag.transaction_type(frame.sys_flag)
    if kind == sys_flag.TRANSACTION_NOT:
        return None
    group = None
    if _GROUP in frame.properties:
        group = props.decode_bytes(frame.properties).get(props.PRODUCER_GROUP)
    return TransactionFrame(
        kind,
        frame.physical_offset,
        frame.size,
        frame.queue_offset,
        frame.prepared_transaction_offset,
        frame.store_timestamp,
        state_table.group_hash(group),
    )


def frames_between(reader: LogReader, start: int, stop: int) -> Iterator[TransactionFrame]:
    """Those of a part of the log."""
    for event in reader.events(start, stop):
        if isinstance(event, Run):
            yield from transaction_frames(event.window, event.rows)
