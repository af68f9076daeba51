"""Copies of small stores with the faults that an operator meets, chosen by a seed."""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
import subprocess
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

from logquarry.disk.disk import Disk
from logquarry.log.readable import BLOCK, Probe, probed_by
from tests.conformance.rocketmq5 import content_of
from tests.fuzz.templates import Template
from tests.helpers.files import flip, overwrite


class BadFiles(Probe):
    """Simulates unreadable blocks of files, which stay with a file when it is renamed."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[int, int], set[int]] = {}
        self._open: list[int] = []

    def add(self, path: Path, block: int) -> None:
        """Make a block of a file unreadable."""
        descriptor = os.open(path, os.O_RDONLY)
        # An open file keeps its number: no new file gets it.
        self._open.append(descriptor)
        self._blocks.setdefault(_number(os.fstat(descriptor)), set()).add(block)

    def blocks(self, path: Path) -> set[int]:
        """The unreadable blocks of a file."""
        return self._blocks.get(_number(path.stat()), set())

    def heal(self, descriptor: int, position: int, length: int) -> None:
        """A disk delivers a block again that was written as a whole."""
        blocks = self._blocks.get(_number(os.fstat(descriptor)), set())
        blocks -= set(range(-(-position // BLOCK), (position + length) // BLOCK))

    def close(self) -> None:
        """Close the files."""
        for descriptor in self._open:
            os.close(descriptor)

    def populate(self, path: str, position: int, address: int, length: int) -> bool | None:
        """See :meth:`Probe.populate`."""
        try:
            status = Path(path).stat()
        except OSError:
            return True
        return not self._fails(status, position, length)

    def read(self, path: str, descriptor: int, position: int, length: int) -> bytes:
        """See :meth:`Probe.read`."""
        if self._fails(os.fstat(descriptor), position, length):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read(path, descriptor, position, length)

    def _fails(self, status: os.stat_result, position: int, length: int) -> bool:
        blocks = self._blocks.get(_number(status), ())
        return any(
            number * BLOCK < position + length and position < (number + 1) * BLOCK
            for number in blocks
        )


def _number(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


@dataclass
class FaultyStore:
    """A copy of a store with some faults.

    Args:
        template: the store to copy.
        folder: where the copy goes.

    Attributes:
        root: the copy.
        done: the faults in words.
        bad: the unreadable blocks.
    """

    template: Template
    folder: Path
    done: list[str] = field(default_factory=list)
    bad: BadFiles = field(default_factory=BadFiles)

    def __post_init__(self) -> None:
        self.root = self.folder / "store"
        self.folder.mkdir(parents=True)
        # Files of 5.x stores are sparse.
        subprocess.run(["cp", "-a", "--sparse=always", self.template.root, self.root], check=True)
        subprocess.run(["chmod", "-R", "u+rwX", self.root], check=True)

    @property
    def told(self) -> str:
        """The store and its faults."""
        return f"{self.template.name}: {'; '.join(self.done)}"

    @property
    def has_log(self) -> bool:
        """Whether the log is in ``commitlog/``."""
        return (self.template.root / "commitlog").is_dir()

    @property
    def log_start(self) -> int:
        """The offset of the first file in ``commitlog/``: of its first frame, else its name."""
        found = []
        for path in (self.root / "commitlog").glob("0" * 8 + "*"):
            head = path.read_bytes()[:36] if path.is_file() else b""
            if head[4:8] == b"\xda\xa3\x20\xa7" and not self.bad.blocks(path):
                found.append(int.from_bytes(head[28:36]))
            elif path.name.isdigit():
                found.append(int(path.name))
        return min(found, default=0)

    @property
    def log_start_is_recorded(self) -> bool:
        """Whether ``.logquarry/durable`` shows where the log starts; without code of the package.

        Else a log whose first files are lost has the same bytes as a log after RocketMQ's
        retention, which deletes the first files at any age if the disk is full.
        """
        try:
            data = (self.root / ".logquarry/durable").read_bytes()
            times = (self.root / "checkpoint").read_bytes()[:24]
        except OSError:
            return False
        if len(data) < 80 or self.bad.blocks(self.root / ".logquarry/durable"):
            return False
        mark, start = data[:64], data[68:76]
        is_whole = zlib.crc32(mark) == int.from_bytes(data[64:68], "big")
        is_whole &= zlib.crc32(start) == int.from_bytes(data[76:80], "big")
        return is_whole and times in (mark[16:40], mark[40:64])

    @contextmanager
    def probed(self) -> Iterator[None]:
        """While the blocks are unreadable."""
        write = Disk.write_all
        bad = self.bad

        def writes(disk: Disk, descriptor: int, data: bytes | memoryview, position: int) -> None:
            write(disk, descriptor, data, position)
            bad.heal(descriptor, position, len(memoryview(data).cast("B")))

        def reads(disk: Disk, descriptor: int, count: int, position: int) -> bytes:
            return bad.read("", descriptor, position, count)

        try:
            with (
                probed_by(bad),
                patch.object(Disk, "write_all", writes),
                patch.object(Disk, "read", reads),
            ):
                yield
        finally:
            self.bad.close()

    def harm(self, rng: random.Random, count: int) -> None:
        """Apply some random faults."""
        for _ in range(count):
            fault = rng.choice(FAULTS)
            path = self._some(rng, folders=fault in OF_FOLDERS)
            if path is not None:
                what = fault(self, rng, path)
                self.done.append(f"{path.relative_to(self.root)} {what}")

    def _some(self, rng: random.Random, *, folders: bool) -> Path | None:
        groups: dict[str, list[Path]] = {}
        for path in sorted(self.root.rglob("*")):
            name = path.relative_to(self.root).parts[0]
            if path.is_symlink() or path.is_dir() != folders:
                continue
            if name != ".logquarry" or rng.random() < 0.5:
                groups.setdefault(name, []).append(path)
        if not groups:
            return None
        weights = {"commitlog": 8, "consumequeue": 4, "index": 3, "checkpoint": 1, "config": 1}
        names = sorted(groups)
        group = rng.choices(names, [weights.get(name, 0.4) for name in names])[0]
        return rng.choice(groups[group])

    # ------------------------------------------------------------------------------- what is left
    def whole(self) -> set[int]:
        """The physical offsets of the frames of which every byte can be read in a file of the log.

        It shares no code with the package's readers: it looks for the bytes of each frame.
        """
        parts = self._log_bytes()
        return {
            offset
            for offset, frame in self.template.frames.items()
            if any(frame in data for data in parts)
        }

    def unguarded(self, *, names: bool) -> set[int]:
        """The physical offsets of frames that rot may have changed without a trace.

        These frames differ in nothing but fields that no CRC covers and no other file repeats:
        FLAG, SYSFLAG to the prepared transaction offset, and the properties. In a PREPARED frame of
        dialect 3.1, QUEUEOFFSET is the number of the transaction: the frame has no queue entry.
        With ``names``, the queue has corrected the topic or the queue id.
        """
        if not any("rotten" in words for words in self.done):
            return set()
        parts = self._log_bytes()
        return {
            offset
            for offset, frame in self.template.frames.items()
            for wanted in [_guarded(frame, names=names)]
            if any(wanted.search(data) for data in parts)
        }

    def _log_bytes(self) -> list[bytes]:
        """The readable bytes of each file of the log."""
        parts = []
        folder = self.root / "commitlog"
        for path in sorted(folder.rglob("*")) if folder.is_dir() else ():
            if path.is_file():
                data = bytearray(path.read_bytes())
                for number in self.bad.blocks(path):
                    at = number * BLOCK
                    data[at : at + BLOCK] = b"\xff" * len(data[at : at + BLOCK])
                parts.append(bytes(data))
        return parts

    def state(self) -> dict[str, tuple[object, ...]]:
        """Type, mode, time and bytes of all files; the target of links."""
        found: dict[str, tuple[object, ...]] = {}
        for path in [self.folder, *self.folder.rglob("*")]:
            status = path.lstat()
            data: object = None
            if path.is_symlink():
                data = str(path.readlink())
            elif path.is_file():
                data = content_of(path)
            found[str(path.relative_to(self.folder))] = (status.st_mode, status.st_mtime_ns, data)
        return found


def _guarded(frame: bytes, *, names: bool) -> re.Pattern[bytes]:
    """A frame of which each unguarded byte may be another one."""
    flags = int.from_bytes(frame[36:40])
    body = 68 + (20 if flags & 0x10 else 8) + (20 if flags & 0x20 else 8)
    topic = body + 4 + int.from_bytes(frame[body : body + 4])
    text = topic + 1 + frame[topic] + 2
    gaps = [(16, 20), (36, body), (text, len(frame))]
    if names:
        gaps[0] = (12, 20)
        gaps.insert(2, (topic + 1, text - 2))
    if flags & 0xC == 0x4:
        gaps.insert(1, (20, 28))
    wanted, at = b"", 0
    for start, stop in gaps:
        wanted += re.escape(frame[at:start]) + b".{%d}" % (stop - start)
        at = stop
    return re.compile(wanted, re.DOTALL)


# -------------------------------------------------------------------------------------- the faults
Fault = Callable[[FaultyStore, random.Random, Path], str]


def _used(path: Path) -> int:
    """The bytes up to the last one that is not 0."""
    return len(path.read_bytes().rstrip(b"\0"))


def _unreadable(store: FaultyStore, rng: random.Random, path: Path) -> str:
    last = max(1, _used(path)) if rng.random() < 0.9 else max(1, path.stat().st_size)
    numbers = sorted({rng.randrange(-(-last // BLOCK)) for _ in range(rng.choice((1, 1, 2, 6)))})
    for number in numbers:
        store.bad.add(path, number)
    return f"unreadable blocks {numbers}"


def _all_unreadable(store: FaultyStore, rng: random.Random, path: Path) -> str:
    for number in range(-(-path.stat().st_size // BLOCK))[:4_000]:
        store.bad.add(path, number)
        if number > 200:
            break
    return "unreadable"


def _missing(store: FaultyStore, rng: random.Random, path: Path) -> str:
    path.unlink()
    return "missing"


def _missing_folder(store: FaultyStore, rng: random.Random, path: Path) -> str:
    path = _higher(store, rng, path)
    shutil.rmtree(path)
    return f"folder {path.name} missing"


def _empty_folder(store: FaultyStore, rng: random.Random, path: Path) -> str:
    path = _higher(store, rng, path)
    shutil.rmtree(path)
    path.mkdir()
    return f"folder {path.name} empty"


def _higher(store: FaultyStore, rng: random.Random, path: Path) -> Path:
    """Half of the time the folder below the store."""
    if rng.random() < 0.5:
        return store.root / path.relative_to(store.root).parts[0]
    return path


def _swapped(store: FaultyStore, rng: random.Random, path: Path) -> str:
    within = path.parent if rng.random() < 0.7 else store.root
    others = [one for one in sorted(within.rglob("*")) if one.is_file() and one != path]
    if not others:
        return "swapped with itself"
    other = rng.choice(others)
    between = path.with_name("between")
    path.rename(between)
    other.rename(path)
    between.rename(other)
    return f"swapped with {other.relative_to(store.root)}"


def _renamed(store: FaultyStore, rng: random.Random, path: Path) -> str:
    size = max(1, path.stat().st_size)
    number = int(path.name) if path.name.isdigit() else 0
    step = rng.choice((1, size, -size, 10 * size, 1 << 40))
    name = rng.choice((f"{max(0, number + step):020d}", path.name + ".bak", "x", "lost+found"))
    target = path.with_name(name)
    if target.exists():
        return "renamed to nothing"
    path.rename(target)
    return f"renamed to {name}"


def _emptied(store: FaultyStore, rng: random.Random, path: Path) -> str:
    os.truncate(path, 0)
    return "empty"


def _truncated(store: FaultyStore, rng: random.Random, path: Path) -> str:
    used = _used(path) if rng.random() < 0.7 else path.stat().st_size
    length = rng.randrange(used + 1)
    os.truncate(path, length)
    return f"truncated to {length}"


def _rotten(store: FaultyStore, rng: random.Random, path: Path) -> str:
    used = _used(path)
    if not used:
        return "empty already"
    places = sorted(rng.randrange(used) for _ in range(rng.choice((1, 1, 3, 20))))
    for place in places:
        flip(path, place, 1 << rng.randrange(8))
    return f"rotten at {places}"


def _zeroed(store: FaultyStore, rng: random.Random, path: Path) -> str:
    at = rng.randrange(_used(path) // BLOCK + 1) * BLOCK
    length = min(BLOCK, path.stat().st_size - at)
    overwrite(path, at, bytes(max(0, length)))
    return f"{length} zeros at {at}"


def _dangling(store: FaultyStore, rng: random.Random, path: Path) -> str:
    path.unlink()
    path.symlink_to(rng.choice(("gone", "/no/such/disk/file", path.name)))
    return f"a link to {path.readlink()}"


def _dangling_folder(store: FaultyStore, rng: random.Random, path: Path) -> str:
    path = _higher(store, rng, path)
    shutil.rmtree(path)
    path.symlink_to(rng.choice(("gone", "/no/such/disk", path.name)))
    return f"folder {path.name}: a link to {path.readlink()}"


def _linked(store: FaultyStore, rng: random.Random, path: Path) -> str:
    """The file or folder is on another disk."""
    if path.is_dir():
        path = _higher(store, rng, path)
    other = store.folder / "disk2"
    other.mkdir(exist_ok=True)
    target = other / f"{len(list(other.iterdir()))}-{path.name}"
    path.rename(target)
    path.symlink_to(target)
    return f"{path.name} is a link"


def _folder_for_file(store: FaultyStore, rng: random.Random, path: Path) -> str:
    path.unlink()
    path.mkdir()
    return "is a folder"


def _file_for_folder(store: FaultyStore, rng: random.Random, path: Path) -> str:
    path = _higher(store, rng, path)
    shutil.rmtree(path)
    path.write_bytes(b"" if rng.random() < 0.5 else b"text")
    return f"folder {path.name} is a file"


OF_FOLDERS: tuple[Fault, ...] = (
    *(_missing_folder, _empty_folder, _dangling_folder, _file_for_folder),
)
FAULTS: tuple[Fault, ...] = (
    *(_unreadable, _unreadable, _unreadable, _all_unreadable, _missing, _missing, _swapped),
    *(_swapped, _renamed, _emptied, _truncated, _truncated, _rotten, _rotten, _zeroed, _dangling),
    *(_linked, _folder_for_file, *OF_FOLDERS),
)
