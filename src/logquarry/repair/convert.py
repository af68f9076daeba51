"""Converts a store whose log is outside of ``commitlog/`` into a plain store.

A broker of RocketMQ 4.9 or 5 serves the new store. The messages of a DLedger log get new physical
offsets, because the head of each entry is not copied; their queue offsets stay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from logquarry.disk.disk import Disk
from logquarry.errors import UsageError
from logquarry.format import dledger
from logquarry.log.layout import StoreLayout
from logquarry.read.store_sizes import require_log
from logquarry.repair.salvage.salvage import Salvaged, salvage
from logquarry.units import Bars


@dataclass(frozen=True, slots=True)
class Converted:
    """The result of a conversion.

    Attributes:
        salvaged: the new store, the losses, and the files that were not copied.
        uncommitted: number of messages of a DLedger log after the last one that the group had
            committed. They are in the new store: some member may have acknowledged them.
    """

    salvaged: Salvaged
    uncommitted: int

    def to_json(self) -> dict[str, Any]:
        """The document of ``convert --json``: that of ``salvage --json``, and ``uncommitted``."""
        return self.salvaged.to_json() | {"uncommitted": self.uncommitted}


def convert(
    layout: StoreLayout,
    into: Path | None = None,
    *,
    disk: Disk | None = None,
    bars: Bars | None = None,
    pause: Callable[[], None] = lambda: None,
) -> Converted:
    """Make a plain store from a DLedger log, or from a log in several folders.

    Args:
        layout: the store's files; they are not changed.
        into: the folder of the new store, empty or missing; None to write nothing.
        disk: disk of the new store.
        bars: makes progress bars.
        pause: called at safe points; raise to cancel.

    Raises:
        UsageError: if the log is in ``commitlog/``, or for the reasons of
            :func:`logquarry.repair.salvage.salvage.salvage`.
        UnsupportedStore: if a folder of the log is not found, or there are several logs.
        StoreUnavailable: if a process has the store open, or the disk fails or is full.
    """
    if layout.log_folders.feature is None and layout.commit_log.files:
        raise UsageError(
            f"{layout.root}: its log is in commitlog/ already: a broker can use the store as it "
            f"is. To copy its sound messages: `logquarry salvage {layout.root} --into DIR`"
        )
    require_log(layout)
    uncommitted = _uncommitted(layout)
    return Converted(salvage(layout, into, disk=disk, bars=bars, pause=pause), uncommitted)


def _uncommitted(layout: StoreLayout) -> int:
    """The messages of a DLedger log that the group had not committed; 0 if that is unknown."""
    folders = layout.log_folders
    if not folders.has_heads:
        return 0
    member = folders.paths[0].partition("/")[0]
    try:
        text = layout.filesystem.read(f"{member}/checkpoint").decode("ascii", "replace")
        values = dict(line.partition("=")[::2] for line in text.splitlines())
        committed = int(values["committedIndex"])
    except (FileNotFoundError, KeyError, ValueError):
        return 0
    last = _last_index(layout)
    return 0 if last is None else max(0, last - committed)


def _last_index(layout: StoreLayout) -> int | None:
    """The index of the last entry; None if there is none."""
    last = None
    for file in layout.commit_log.files[-2:]:
        data, at = layout.open_file(file.path).window(0, file.size), 0
        while dledger.has_head_reference(data, at, base=file.base, left=file.size - at):
            head = dledger.HEAD.struct.unpack_from(data, at)
            last, at = int(head[2]), at + int(head[1])
    return last
