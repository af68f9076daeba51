"""Reads ``.logquarry/durable``: where the log of a store ended on the disk, and where it started.

Both are known only if this library wrote the store last
(:class:`logquarry.format.checkpoint.DurableMark`). Retention records a new start before it deletes
files. So a log whose first file begins later has lost its first files.
"""

from __future__ import annotations

from typing import NamedTuple

from logquarry.format import checkpoint
from logquarry.log.file_sequence import StoreFile
from logquarry.log.filesystem import FileSystem
from logquarry.log.store_files import CHECKPOINT, DURABLE, NAME_DIGITS


class Durable(NamedTuple):
    """The durable offset of a log, and the offset at which the log starts, None if unknown."""

    end: int
    start: int | None


class LostHead(NamedTuple):
    """The first part of a log whose files are missing: its start, and the start of the rest."""

    start: int
    stop: int

    def __str__(self) -> str:
        return (
            f"the log began at {self.start} when it was last written, and its first file begins "
            f"at {self.stop} now"
        )

    def as_file(self, folder: str) -> StoreFile:
        """The first missing file, as a file of 0 bytes: readers treat it as a missing one."""
        return StoreFile(self.start, 0, f"{folder}/{self.start:0{NAME_DIGITS}d}")


def read_durable(filesystem: FileSystem) -> Durable | None:
    """The recorded end and start of the log; None if there is no valid record."""
    try:
        data = filesystem.read(DURABLE)
        mark = checkpoint.decode_mark(data)
        found = checkpoint.decode(filesystem.read(CHECKPOINT))
    except (OSError, ValueError):
        return None
    if mark is None or not mark.speaks_of(found):
        return None
    return Durable(mark.offset, checkpoint.decode_start(data))


def find_lost_head(filesystem: FileSystem, files: tuple[StoreFile, ...]) -> LostHead | None:
    """The first part of the log that has no files; None if nothing shows one.

    Args:
        filesystem: the store's folder.
        files: the log's files, listed just now: a retention records its start before it deletes.
    """
    found = read_durable(filesystem) if files and files[0].base else None
    if found is None or found.start is None or found.start >= files[0].base:
        return None
    return LostHead(found.start, files[0].base)


def unproved_start(filesystem: FileSystem, files: tuple[StoreFile, ...]) -> str | None:
    """Why earlier files of a log may be missing, in words; None if its start is recorded or 0.

    RocketMQ's retention deletes the first files of a log, and records that nowhere.
    """
    if not files or not files[0].base:
        return None
    found = read_durable(filesystem)
    if found is not None and found.start is not None:
        return None
    return (
        f"the log begins at {files[0].base}: earlier messages have expired, or their files are "
        "missing"
    )
