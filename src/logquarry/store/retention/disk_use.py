"""How full the disk of a store is, and what deleting a file of it would free."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from logquarry.store.disk.name_guard import link_of

_BLOCK: Final = 512
"""What ``st_blocks`` counts, whatever blocks the disk has."""


@dataclass(frozen=True, slots=True)
class DiskUse:
    """A disk's bytes, as its users see them.

    Attributes:
        used: bytes that are taken.
        usable: bytes that are left to those who are not root.
    """

    used: int
    usable: int

    @property
    def ratio(self) -> float:
        """How full it is, from 0 to 1. (RocketMQ has whole percents, rounded up.)"""
        whole = self.used + self.usable
        return self.used / whole if whole else 0.0

    def without(self, freed: int) -> DiskUse:
        """The same once some bytes are free."""
        freed = min(freed, self.used)
        return DiskUse(self.used - freed, self.usable + freed)


def disk_use(path: Path) -> DiskUse | None:
    """How full the disk is that a path is on; None if nobody can tell."""
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    used = (found.f_blocks - found.f_bfree) * found.f_frsize
    return DiskUse(used, found.f_bavail * found.f_frsize)


def freed_bytes(path: Path) -> int:
    """What deleting a file frees: its blocks, or nothing where it has a name elsewhere."""
    try:
        status = path.stat()
        # The writer's own second name goes with the first.
        names = 1 + link_of(path).exists()
    except OSError:
        return 0
    return status.st_blocks * _BLOCK if status.st_nlink <= names else 0
