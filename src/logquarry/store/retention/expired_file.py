"""A file that goes, and those of 3.x's state table and redo log that do."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from logquarry.files.layout import FileSequence, StoreLayout
from logquarry.store.state_table.files import UnitFiles, read_redo, read_table

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ExpiredFile:
    """A file that goes.

    Attributes:
        path: below the store's root.
        base: offset of its first byte (its name); 0 for an index file.
        size: its bytes.
        reason: why it goes.
        last_timestamp: store time of its last message, or of the one that follows where it has
            none; None for queues and index.
    """

    path: str
    base: int
    size: int
    reason: str
    last_timestamp: int | None = None

    def to_json(self) -> dict[str, Any]:
        """The same as a JSON document."""
        return {
            "path": self.path,
            "size": self.size,
            "last_timestamp": self.last_timestamp,
            "reason": self.reason,
        }


def expired_units(layout: StoreLayout, cut: int) -> tuple[ExpiredFile, ...]:
    """The first files of state table and redo log of which no unit is of a message that stays.

    RocketMQ 3.1.3 deletes the same (``deleteExpiredStateFile``). The messages of transactions that
    are open in them have gone: nobody can end those any more.

    Args:
        layout: the store's files.
        cut: where the log will begin.
    """
    if not layout.has_state_table:
        return ()
    table, redo = layout.state_table, layout.redo_log
    return (
        *_expired(table, read_table(layout), cut),
        *_expired(redo, read_redo(layout), cut),
    )


def _expired(sequence: FileSequence, found: UnitFiles, cut: int) -> list[ExpiredFile]:
    files: list[ExpiredFile] = []
    if len(sequence.files) > 1 and found.fault is not None:
        logger.warning("%s: none of its files goes: verify tells more", found.fault)
        return files
    size = found.units.dtype.itemsize
    for file in sequence.files[:-1]:
        start = file.base // size - found.first
        stop = start + sequence.file_size // size
        # The last file is the one that the last unit stands in.
        if stop >= len(found.units) or int(found.units["physical_offset"][start:stop].max()) >= cut:
            break
        reason = f"all its units are of messages before the log's begin at {cut}"
        files.append(ExpiredFile(file.path, file.base, file.size, reason))
    return files
