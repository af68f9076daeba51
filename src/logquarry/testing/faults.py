"""Which calls of a disk fail, and how: counted, one by one or all from some call on."""

from __future__ import annotations

import errno
import os
from collections import Counter
from dataclasses import dataclass
from typing import Final

SHORT: Final = -1
"""Instead of an errno: a write that writes half, a read that reads half, an allocation that gets
half and then finds the disk full. Other calls are not touched by it."""

SYNCS: Final = frozenset({"fdatasync", "fsync", "sync_folder"})
CHANGES: Final = frozenset({"make_folder", "rename", "link", "unlink"})
NEED_ROOM: Final = frozenset({"open", "allocate", "write", "make_folder", "rename", "link"}) | SYNCS
"""Calls that a full disk may refuse."""
CALLS: Final = (
    frozenset({"open", "close", "size", "allocate", "map", "read", "write"})
    | SYNCS
    | CHANGES
    | frozenset({"list", "is_linked", "is_named", "next_data"})
)
"""The names of the calls."""

HALVES: Final = frozenset({"write", "read", "allocate"})
"""Calls that can do half."""


class Stopped(OSError):
    """The process is dead, and this call never happened."""

    def __init__(self) -> None:
        super().__init__(errno.EIO, "the process was stopped before this call")


@dataclass(slots=True)
class Fault:
    """A call that is to fail.

    Attributes:
        kind: the call's name, None for any.
        nth: which one, from 1 on, counted from when the fault was set.
        error: errno to fail with, or :data:`SHORT`.
        for_ever: whether all calls behind it fail likewise.
    """

    kind: str | None = None
    nth: int = 1
    error: int = errno.EIO
    for_ever: bool = False

    def hits(self, kind: str) -> bool:
        """Whether this call fails; counts it."""
        if self.kind not in (None, kind):
            return False
        self.nth -= 1
        return self.nth == 0 or (self.for_ever and self.nth < 0)


class Faults:
    """The faults of one disk.

    Attributes:
        counts: how often each call was made.
        total: how many there were.
        stops_at: the number of the call before which the process dies, None for never.
        is_stopped: whether it has died.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.total = 0
        self.stops_at: int | None = None
        self.is_stopped = False
        self._faults: list[Fault] = []

    def add(self, fault: Fault) -> None:
        """Have a call fail."""
        if fault.kind is not None and fault.kind not in CALLS:
            raise ValueError(f"no call of a disk: {fault.kind}")
        self._faults.append(fault)

    def clear(self) -> None:
        """Let all calls work again."""
        self._faults.clear()

    def called(self, kind: str) -> bool:
        """Count a call; whether it is to do only half of its work.

        Raises:
            OSError: if it is to fail.
            Stopped: if the process is dead, now or before.
        """
        if self.is_stopped:
            raise Stopped
        self.counts[kind] += 1
        self.total += 1
        if self.stops_at is not None and self.total >= self.stops_at:
            self.is_stopped = True
            raise Stopped
        is_half = False
        # All of them count, whichever fails first.
        for fault in [fault for fault in self._faults if fault.hits(kind)]:
            if fault.error != SHORT:
                raise OSError(fault.error, os.strerror(fault.error))
            is_half = is_half or kind in HALVES
        return is_half
