"""Which calls of a disk fail, and how: counted, one by one or all from some call on."""

from __future__ import annotations

import errno
import os
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

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


# --------------------------------------------------------------------------------------------------
# What a power cut may leave of a folder: a disk at one moment, and crash images of it.
#
# A :class:`DiskState` holds, of each file, what is on the disk for sure and what the page cache
# has, and of each folder the names that are on the disk for sure and the changes that may be. A
# crash takes, of all that is not sure, any part:
#
# - a page of 4 KiB is the old one, the new one, one that it was in between, or torn at 512 bytes;
# - a file has its old size, its new one, or one in between; what lies between is zeros;
# - a name that was made, renamed or taken away is as before or as after.
#
# A rename loses no file: its new name may be there beside the old one, but never none of the two.

PAGE: Final = 4096
SECTOR: Final = 512
ROOT_ID: Final = 0
"""The number of the topmost folder."""

_SHARES: Final = (0.0, 0.1, 0.5, 0.9, 1.0)
"""How much of what is not sure a crash keeps: all and nothing are the likeliest ends."""


class Content(NamedTuple):
    """A file's bytes.

    Attributes:
        durable: what is on the disk.
        live: what the page cache has.
        versions: what else pages held since the last sync, by page number.
    """

    durable: bytes
    live: bytes
    versions: Mapping[int, tuple[bytes, ...]]


class Effect(NamedTuple):
    """One name that is to change: which file or folder it leads to then, None for no longer."""

    folder: int
    name: str
    node: int | None


@dataclass(slots=True)
class Change:
    """A change of names that no sync has made sure; of a rename the new name comes first."""

    effects: list[Effect]
    is_rename: bool = False


@dataclass(frozen=True, slots=True)
class CrashImage:
    """Files and folders as a crash left them, by their paths below the topmost folder.

    Attributes:
        folders: each after the one that it is in.
        files: bytes of each file.
        links: further names of files, with the first one of each.
    """

    folders: tuple[str, ...] = ()
    files: Mapping[str, bytes] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        """Make a folder with this in it."""
        folder.mkdir(parents=True)
        root = os.fspath(folder)
        for name in self.folders:
            os.mkdir(f"{root}/{name}")  # noqa: PTH102
        for name, data in self.files.items():
            # A thousand images a second: pathlib alone would take half of the time.
            descriptor = os.open(f"{root}/{name}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            try:
                os.write(descriptor, data)
            finally:
                os.close(descriptor)
        for name, first in self.links.items():
            os.link(f"{root}/{first}", f"{root}/{name}")
        return folder


@dataclass(frozen=True, slots=True)
class DiskState:
    """A disk at one moment; nothing that happens later changes it.

    Attributes:
        contents: each file's bytes, by its number.
        durable: names that are on the disk, by folder: where they lead to.
        live: names as they are seen.
        pending: changes between the two, in their order.
    """

    contents: Mapping[int, Content]
    durable: Mapping[int, Mapping[str, int]]
    live: Mapping[int, Mapping[str, int]]
    pending: Sequence[Change] = ()

    def crash(self, rng: random.Random) -> CrashImage:
        """What a power cut may leave; another one for each state of the random numbers."""
        names = {folder: dict(entries) for folder, entries in self.durable.items()}
        share = rng.choice(_SHARES)
        for change in self.pending:
            if rng.random() < share:
                effects = change.effects
                if change.is_rename and len(effects) > 1 and rng.random() < 0.25:
                    effects = effects[:1]
                _apply(names, effects)
        share = rng.choice(_SHARES)
        return _image(names, {key: _crashed(c, share, rng) for key, c in self.contents.items()})

    def killed(self) -> CrashImage:
        """What the death of the process leaves: all that it did."""
        return _image(self.live, {key: c.live for key, c in self.contents.items()})

    def synced(self) -> CrashImage:
        """What is on the disk for sure, and nothing else."""
        return _image(
            self.durable, {key: content.durable for key, content in self.contents.items()}
        )


def _apply(names: dict[int, dict[str, int]], effects: Sequence[Effect]) -> None:
    for folder, name, node in effects:
        entries = names.setdefault(folder, {})
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


def _image(names: Mapping[int, Mapping[str, int]], contents: Mapping[int, bytes]) -> CrashImage:
    folders: list[str] = []
    files: dict[str, bytes] = {}
    links: dict[str, str] = {}
    first: dict[int, str] = {}
    below = [("", ROOT_ID)]
    while below:
        prefix, folder = below.pop()
        for name, node in names.get(folder, {}).items():
            path = prefix + name
            data = contents.get(node)
            if data is None:
                folders.append(path)
                below.append((f"{path}/", node))
            elif node in first:
                links[path] = first[node]
            else:
                first[node] = path
                files[path] = data
    return CrashImage(tuple(folders), files, links)


def _crashed(content: Content, share: float, rng: random.Random) -> bytes:
    durable, live, versions = content
    if durable is live or (durable == live and not versions):
        return durable
    size = len(live)
    if len(durable) != size and rng.random() >= share:
        size = len(durable)
        if rng.random() < 0.5:
            size = rng.randint(*sorted((len(durable), len(live))))
    data = bytearray(durable[:size].ljust(size, b"\0"))
    for at in range(0, size, PAGE):
        old, new = bytes(data[at : at + PAGE]), live[at : at + PAGE][: size - at]
        older = versions.get(at // PAGE, ())
        if (old == new and not older) or rng.random() >= share:
            continue
        chosen = rng.choice(older)[: len(old)] if older and rng.random() < 0.3 else new
        chosen = chosen.ljust(len(old), b"\0")
        if rng.random() < 0.25:
            chosen = _torn(old, chosen, rng)
        data[at : at + len(old)] = chosen
    return bytes(data)


def _torn(old: bytes, new: bytes, rng: random.Random) -> bytes:
    """Sectors of the one page and of the other."""
    choice = rng.getrandbits(PAGE // SECTOR)
    sectors = range(0, len(old), SECTOR)
    return b"".join(
        (new if choice >> number & 1 else old)[at : at + SECTOR]
        for number, at in enumerate(sectors)
    )
