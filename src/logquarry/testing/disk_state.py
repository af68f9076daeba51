"""Simulates failing disk calls, and makes crash images. A crash image is a possible content of a
disk after a power cut.

A crash keeps an arbitrary part of the data that is not durable:

- a page of 4 KiB has its old content, its new content or a content in between, or it is torn: old
  and new bytes meet at a multiple of 512 bytes;
- a file has its old size, its new size or a size in between; bytes without data are zeros;
- the creation, rename or removal of a name is either done or not done. After a rename, the file has
  its old name, its new name, or both.
"""

from __future__ import annotations

import errno
import os
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from logquarry.log.readable import BLOCK, Probe

SHORT: Final = -1
"""A value of :attr:`Fault.error` that makes a call do half of its work. A write or a read transfers
half of its bytes. An allocation allocates half of the space, and then fails because the disk is
full. Other calls succeed.
"""

SYNCS: Final = frozenset({"fdatasync", "fsync", "sync_folder"})
CHANGES: Final = frozenset({"make_folder", "rename", "link", "unlink"})
NEED_ROOM: Final = frozenset({"open", "allocate", "write", "make_folder", "rename", "link"}) | SYNCS
"""Calls that can fail if the disk is full."""
CALLS: Final = (
    frozenset({"open", "close", "size", "allocate", "map", "read", "write"})
    | SYNCS
    | CHANGES
    | frozenset({"list", "is_linked", "is_named", "next_data"})
)
"""The names of the disk calls that a faulty disk counts."""

HALVES: Final = frozenset({"write", "read", "allocate"})
"""Calls that can do only half of their work (:data:`SHORT`)."""


class Stopped(OSError):
    """Raised by a disk call after the simulated death of the process; the call had no effect."""

    def __init__(self) -> None:
        super().__init__(errno.EIO, "the process was stopped before this call")


@dataclass(slots=True)
class Fault:
    """A disk call that fails.

    Attributes:
        kind: the call's name; None for any call.
        nth: which call fails, counted from 1 since the fault was added.
        error: the errno, or :data:`SHORT`.
    """

    kind: str | None = None
    nth: int = 1
    error: int = errno.EIO
    for_ever: bool = False

    def hits(self, kind: str) -> bool:
        """Count a call of this fault's kind, and return whether the fault makes this call fail."""
        if self.kind not in (None, kind):
            return False
        self.nth -= 1
        return self.nth == 0 or (self.for_ever and self.nth < 0)


class Faults:
    """The faults of one disk.

    Attributes:
        counts: name of a disk call -> number of calls.
        stops_at: number of the call before which the process dies; None if it never dies.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.total = 0
        self.stops_at: int | None = None
        self.is_stopped = False
        self._faults: list[Fault] = []

    def add(self, fault: Fault) -> None:
        """Add a fault."""
        if fault.kind is not None and fault.kind not in CALLS:
            raise ValueError(f"{fault.kind!r} is not a disk call; use one of {sorted(CALLS)}")
        self._faults.append(fault)

    def clear(self) -> None:
        """Remove all faults."""
        self._faults.clear()

    def called(self, kind: str) -> bool:
        """Count a call. Return True if a fault makes the call do only half of its work.

        Raises:
            OSError: if the call fails.
            Stopped: if the process is dead.
        """
        if self.is_stopped:
            raise Stopped
        self.counts[kind] += 1
        self.total += 1
        if self.stops_at is not None and self.total >= self.stops_at:
            self.is_stopped = True
            raise Stopped
        is_half = False
        # Call hits() of each fault before this method raises, so that each fault counts the call.
        for fault in [fault for fault in self._faults if fault.hits(kind)]:
            if fault.error != SHORT:
                raise OSError(fault.error, os.strerror(fault.error))
            is_half = is_half or kind in HALVES
        return is_half


# ----------------------------------------------------------------------------------- crash images
PAGE: Final = 4096
SECTOR: Final = 512
ROOT_ID: Final = 0
"""The number of the root folder."""

_SHARES: Final = (0.0, 0.1, 0.5, 0.9, 1.0)
"""Probabilities that a crash image keeps a change that is not durable. Each image draws one of them
for its names, and one for its pages and file sizes.
"""


class Content(NamedTuple):
    """A file's bytes on the disk (``durable``) and in the page cache (``live``).

    ``versions`` maps a page number to other contents that this page had since the last sync.
    """

    durable: bytes
    live: bytes
    versions: Mapping[int, tuple[bytes, ...]]


class Effect(NamedTuple):
    """A change of one name. ``node`` is the number of the file or folder; None removes the name."""

    folder: int
    name: str
    node: int | None


@dataclass(slots=True)
class Change:
    """A change of names that is not durable yet.

    For a rename, the effect that makes the new name comes first.
    """

    effects: list[Effect]
    is_rename: bool = False


@dataclass(frozen=True, slots=True)
class CrashImage:
    """Files and folders after a crash, by their paths below the root folder.

    Attributes:
        folders: the folders, each after its parent.
        links: path of a hard link -> path of the same file in ``files``.
    """

    folders: tuple[str, ...] = ()
    files: Mapping[str, bytes] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        """Write the image into a new folder, and return the folder."""
        folder.mkdir(parents=True)
        root = os.fspath(folder)
        for name in self.folders:
            os.mkdir(f"{root}/{name}")  # noqa: PTH102
        for name, data in self.files.items():
            # Use `os`: tests write thousands of images, and pathlib would take twice the time.
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
    """The state of a disk at one moment. Immutable.

    Attributes:
        contents: bytes of each file, by its number.
        durable: for each folder (by its number), the durable names in the folder, each with the
            number of its file or folder.
        live: for each folder (by its number), the current names in the folder, each with the number
            of its file or folder.
        pending: changes from ``durable`` to ``live``, in order.
    """

    contents: Mapping[int, Content]
    durable: Mapping[int, Mapping[str, int]]
    live: Mapping[int, Mapping[str, int]]
    pending: Sequence[Change] = ()

    def crash(self, rng: random.Random) -> CrashImage:
        """Make a random crash image of a power cut."""
        names = {folder: dict(entries) for folder, entries in self.durable.items()}
        share = rng.choice(_SHARES)
        for change in self.pending:
            if rng.random() < share:
                effects = change.effects
                if change.is_rename and len(effects) > 1 and rng.random() < 0.25:
                    effects = effects[:1]
                apply(names, effects)
        share = rng.choice(_SHARES)
        return _image(names, {key: _crashed(c, share, rng) for key, c in self.contents.items()})

    def killed(self) -> CrashImage:
        """Make the image of the disk after only the process has died. The image has all writes."""
        return _image(self.live, {key: c.live for key, c in self.contents.items()})

    def synced(self) -> CrashImage:
        """Make the image of the disk after a power cut that loses all data that is not durable."""
        return _image(
            self.durable, {key: content.durable for key, content in self.contents.items()}
        )


def apply(names: dict[int, dict[str, int]], effects: Iterable[Effect]) -> None:
    """Apply effects to the names of folders."""
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
    choice = rng.getrandbits(PAGE // SECTOR)
    sectors = range(0, len(old), SECTOR)
    return b"".join(
        (new if choice >> number & 1 else old)[at : at + SECTOR]
        for number, at in enumerate(sectors)
    )


class BadBlocks(Probe):
    """A disk with unreadable blocks, for :func:`logquarry.log.readable.probed_by`.

    Args:
        blocks: (end of a file's path, number of an unreadable block of 4,096 bytes).
        has_populate: whether the system has ``MADV_POPULATE_READ``.
    """

    def __init__(self, blocks: Iterable[tuple[str, int]], *, has_populate: bool = True) -> None:
        self._blocks = tuple(blocks)
        self._has_populate = has_populate

    def populate(self, path: str, position: int, address: int, length: int) -> bool | None:
        """See :meth:`Probe.populate`."""
        if not self._has_populate:
            return None
        return not self._fails(path, position, length)

    def read(self, path: str, descriptor: int, position: int, length: int) -> bytes:
        """See :meth:`Probe.read`."""
        if self._fails(path, position, length):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read(path, descriptor, position, length)

    def _fails(self, path: str, position: int, length: int) -> bool:
        return any(
            path.endswith(name)
            and number * BLOCK < position + length
            and position < (number + 1) * BLOCK
            for name, number in self._blocks
        )
