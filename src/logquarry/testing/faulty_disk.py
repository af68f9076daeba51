"""A disk for tests with injected faults and simulated power cuts.

The files are real, ideally on a tmpfs, but a sync never reaches the hardware. The disk records
which data a real disk would keep after a power cut: a sync of a file makes its pages durable, and a
sync of a folder makes its names durable. A test can make thousands of crash images from one run of
a store. Each image is a possible content of the disk after a power cut
(:class:`~logquarry.testing.disk_state.DiskState`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from logquarry.disk.disk import Disk
from logquarry.disk.service import Health, abandon_in_children
from logquarry.testing import disk_state
from logquarry.testing.disk_state import PAGE, ROOT_ID, Change, Content, DiskState, Effect, Stopped

P = ParamSpec("P")
T = TypeVar("T")

_MOST_VERSIONS: Final = 3
_SITE_DEPTH: Final = 3
_PACKAGE: Final = "logquarry."
_TESTING: Final = "logquarry.testing."
_PORT: Final = "logquarry.disk.disk"


class _File:
    def __init__(self, number: int, path: Path, durable: bytes) -> None:
        self.number = number
        # Open the file again instead of duplicating the store's descriptor: a duplicate would share
        # the lock of the store's descriptor.
        self._reader = os.open(path, os.O_RDONLY)
        # Not at the exit: the finalizers run before the exit closes the open stores.
        weakref.finalize(self, os.close, self._reader).atexit = False
        status = os.fstat(self._reader)
        self.identity = status.st_dev, status.st_ino
        self.durable = self.live = durable
        self.versions: dict[int, tuple[bytes, ...]] = {}
        # Pages that a failed sync marked clean, with their bytes at that time. As in Linux, a later
        # sync does not write such a page.
        self.stuck: dict[int, bytes] = {}
        self._content: Content | None = None

    def look(self) -> bytes:
        # If a page has changed since the last call, a crash can still leave the page's old content
        # on the disk. So add the old content to the page's versions, unless it is the durable
        # content.
        data = os.pread(self._reader, os.fstat(self._reader).st_size, 0)
        before = self.live
        if data == before:
            return before
        self.live, self._content = data, None
        for number in _differing(before, data):
            page = before[number * PAGE :][:PAGE]
            if page and page != self.durable[number * PAGE :][:PAGE]:
                kept = self.versions.get(number, ())
                self.versions[number] = (*kept, page)[-_MOST_VERSIONS:]
        return data

    def sync(self) -> None:
        # Pages that were marked clean by a failed sync are not written: on the disk, they keep
        # their old bytes.
        live = self.look()
        durable = live
        for number, lost in list(self.stuck.items()):
            at = slice(number * PAGE, number * PAGE + PAGE)
            if live[at] == lost:
                old = self.durable[at].ljust(len(lost), b"\0")
                durable = durable[: at.start] + old + durable[at.stop :]
            else:
                # A write after the failed sync made the page dirty again.
                del self.stuck[number]
        self.durable, self.versions, self._content = durable, {}, None

    def dirty(self, position: int, count: int) -> None:
        # Linux marks a written page dirty even if its bytes did not change, so the next sync writes
        # it.
        for number in range(position // PAGE, -(-(position + count) // PAGE)):
            self.stuck.pop(number, None)

    def fail_sync(self) -> None:
        # After a failed sync, Linux marks the pages clean although the disk does not have them.
        live = self.look()
        for number in _differing(self.durable, live):
            self.stuck[number] = live[number * PAGE :][:PAGE]

    @property
    def content(self) -> Content:
        self.look()
        if self._content is None:
            self._content = Content(self.durable, self.live, dict(self.versions))
        return self._content


def _differing(one: bytes, other: bytes) -> Iterator[int]:
    for at in range(0, max(len(one), len(other)), PAGE):
        if one[at : at + PAGE] != other[at : at + PAGE]:
            yield at // PAGE


def _observed(call: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    # Wraps a disk call: the disk observes and counts the call, and can make the call fail.

    @wraps(call)
    def observed(disk: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with disk._call(call.__name__):
            return call(disk, *args, **kwargs)

    return observed


class FaultyDisk(Disk):
    """A local disk with injected faults, for the files in one folder. Thread-safe.

    The initial content of the folder is durable. Only this disk should create, rename or delete
    files in the folder. If another program changes a name, the disk detects it only when the name
    is opened the next time.

    Attributes:
        observe: called with the name of each disk call before the call; may call :meth:`state`.
        faults: the faults, and the number of calls.
        sites: places in the code that called a sync, with the number of their calls.
    """

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root.absolute()
        self.faults = disk_state.Faults()
        self.observe: Callable[[str], None] | None = None
        self.sites: dict[str, int] = {}
        self.ignored: set[str] = set()
        self._lock = threading.RLock()
        self._files: dict[int, _File] = {}
        self._names: dict[int, dict[str, int]] = {ROOT_ID: {}}
        self._durable: dict[int, dict[str, int]] = {ROOT_ID: {}}
        self._pending: list[Change] = []
        self._open: dict[int, _File] = {}
        self._at_stop: DiskState | None = None
        self._next = ROOT_ID + 1
        self._take_in(self.root, ROOT_ID)

    # ------------------------------------------------------------------------- for the test
    def fail(
        self,
        kind: str | None = None,
        *,
        nth: int = 1,
        error: int = errno.EIO,
        for_ever: bool = False,
    ) -> None:
        """Make a later call fail.

        Args:
            kind: the call's name, for example ``fdatasync``; None for any call.
            nth: number of the failing call, from 1.
            error: the errno, or :data:`~logquarry.testing.disk_state.SHORT`.
        """
        self.faults.add(disk_state.Fault(kind, nth, error, for_ever))

    def stop_at(self, number: int) -> None:
        """Simulate that the process dies before a call, counted from the disk's first call.

        From the call with this number on, each call has no effect and raises :class:`Stopped`.
        Later writes through memory maps are not part of the disk's state.
        """
        self.faults.stops_at = number

    def restart(self) -> None:
        """Simulate the start of a new process after the old one died, and remove all faults.

        There was no power cut, so the page cache is as the old process left it.

        Before this call, close the store that represents the old process, and ignore errors of this
        close.
        """
        with self._lock:
            self.faults.clear()
            self.faults.stops_at, self.faults.is_stopped = None, False
            self._at_stop = None
            self.health = Health()
            abandon_in_children(self.health)

    def state(self) -> DiskState:
        """Return the state of the whole disk: at the process's death if it has died, else now."""
        with self._lock:
            return self._at_stop or DiskState(
                {number: file.content for number, file in self._reachable().items()},
                {folder: dict(names) for folder, names in self._durable.items()},
                {folder: dict(names) for folder, names in self._names.items()},
                tuple(Change(list(c.effects), c.is_rename) for c in self._pending),
            )

    def crash(self, rng: random.Random, folder: Path) -> Path:
        """Write a random crash image of a power cut now into a new folder."""
        return self.image(rng).write(folder)

    def image(self, rng: random.Random) -> disk_state.CrashImage:
        """Make a random crash image of a power cut now, in memory."""
        return self.state().crash(rng)

    # ----------------------------------------------------------------------------- the port
    def open(self, path: Path, *, create: bool = False, exclusive: bool = False) -> int:
        with self._call("open"):
            descriptor = super().open(path, create=create, exclusive=exclusive)
            if self._covers(path):
                self._open[descriptor] = self._opened(path, descriptor)
            return descriptor

    def close(self, descriptor: int) -> None:
        """See :meth:`Disk.close`. The descriptor is closed even if the call raises."""
        try:
            with self._call("close"):
                pass
        except Stopped:
            pass
        finally:
            with self._lock:
                self._open.pop(descriptor, None)
                super().close(descriptor)

    def allocate(self, descriptor: int, size: int) -> None:
        before = os.fstat(descriptor).st_size
        try:
            with self._call("allocate") as is_half:
                if is_half:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                super().allocate(descriptor, size)
        except Stopped:
            raise
        except OSError as error:
            if error.errno == errno.ENOSPC and size > before:
                # If the disk becomes full during an allocation, ext4 keeps the part that it could
                # allocate.
                os.ftruncate(descriptor, before + (size - before) // 2)
            raise

    def read(self, descriptor: int, count: int, position: int) -> bytes:
        with self._call("read") as is_half:
            return super().read(descriptor, -(-count // 2) if is_half else count, position)

    def write(self, descriptor: int, data: memoryview | bytes, position: int) -> int:
        with self._call("write") as is_half:
            if is_half:
                data = data[: -(-len(data) // 2)]
            count = super().write(descriptor, data, position)
            if (file := self._open.get(descriptor)) is not None:
                file.dirty(position, count)
            return count

    def fdatasync(self, descriptor: int) -> None:
        self._sync_file("fdatasync", descriptor)

    def fsync(self, descriptor: int) -> None:
        self._sync_file("fsync", descriptor)

    def sync_folder(self, folder: Path) -> None:
        with self._call("sync_folder"):
            if not folder.is_dir():
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
            if self._covers(folder) and not self._is_ignored("sync_folder", folder):
                self._sync_names(self._number(folder))

    def make_folder(self, folder: Path) -> None:
        with self._call("make_folder"):
            super().make_folder(folder)
            if self._covers(folder):
                number = self._new_number()
                self._names[number], self._durable[number] = {}, {}
                self._change(self._effect(folder, number))

    def rename(self, path: Path, to: Path) -> None:
        with self._call("rename"):
            super().rename(path, to)
            if self._covers(path) and self._covers(to):
                node = self._number(path)
                self._change(self._effect(to, node), self._effect(path, None), is_rename=True)

    def link(self, path: Path, to: Path) -> None:
        with self._call("link"):
            super().link(path, to)
            if self._covers(to):
                self._change(self._effect(to, self._number(path)))

    def unlink(self, path: Path) -> None:
        with self._call("unlink"):
            super().unlink(path)
            if self._covers(path):
                self._change(self._effect(path, None))

    size = _observed(Disk.size)
    map = _observed(Disk.map)
    list = _observed(Disk.list)
    is_linked = _observed(Disk.is_linked)
    is_named = _observed(Disk.is_named)
    next_data = _observed(Disk.next_data)

    # ------------------------------------------------------------------------------- calls
    @contextmanager
    def _call(self, kind: str) -> Iterator[bool]:
        with self._lock:
            if self.observe is not None and not self.faults.is_stopped:
                self.observe(kind)
            try:
                yield self.faults.called(kind)
            except Stopped:
                if self._at_stop is None:
                    self._at_stop = self.state()
                raise

    def _sync_file(self, kind: str, descriptor: int) -> None:
        with self._lock:
            file = self._open.get(descriptor)
            try:
                with self._call(kind):
                    if file is not None and not self._is_ignored(kind, file):
                        file.sync()
            except Stopped:
                raise
            except OSError:
                if file is not None:
                    file.fail_sync()
                raise

    # ------------------------------------------------------------------------------- names
    def _take_in(self, folder: Path, number: int) -> None:
        # The files that exist now are durable: a crash cannot lose them.
        by_identity: dict[tuple[int, int], int] = {}
        below = [(folder, number)]
        while below:
            path, at = below.pop()
            for entry in sorted(path.iterdir()) if path.is_dir() else ():
                if entry.is_dir():
                    found = self._new_number()
                    self._names[found], self._durable[found] = {}, {}
                    below.append((entry, found))
                else:
                    status = entry.stat()
                    key = status.st_dev, status.st_ino
                    if key not in by_identity:
                        file = _File(self._new_number(), entry, entry.read_bytes())
                        self._files[file.number] = file
                        by_identity[key] = file.number
                    found = by_identity[key]
                self._names[at][entry.name] = self._durable[at][entry.name] = found

    def _new_number(self) -> int:
        self._next += 1
        return self._next - 1

    def _covers(self, path: Path) -> bool:
        return path.absolute().is_relative_to(self.root)

    def _number(self, path: Path) -> int:
        number = ROOT_ID
        for name in path.absolute().relative_to(self.root).parts:
            number = self._names[number][name]
        return number

    def _effect(self, path: Path, node: int | None) -> Effect:
        return Effect(self._number(path.parent), path.name, node)

    def _change(self, *effects: Effect, is_rename: bool = False) -> None:
        disk_state.apply(self._names, effects)
        self._pending.append(Change(list(effects), is_rename))

    def _sync_names(self, folder: int) -> None:
        for change in self._pending:
            # If a rename moves a file to another folder, a sync of the old folder also makes the
            # new name durable. Otherwise only the removal of the old name would be durable, and
            # after a crash the file would have no name.
            goes = change.is_rename and change.effects[-1].folder == folder
            done = [e for e in change.effects if e.folder == folder or goes]
            disk_state.apply(self._durable, done)
            change.effects = [e for e in change.effects if e not in done]
        self._pending = [change for change in self._pending if change.effects]

    def _opened(self, path: Path, descriptor: int) -> _File:
        # The open call may have created the file, so record its name.
        status = os.fstat(descriptor)
        with contextlib.suppress(KeyError):
            file = self._files[self._number(path)]
            if file.identity == (status.st_dev, status.st_ino):
                return file
        file = _File(self._new_number(), path, b"")
        self._files[file.number] = file
        self._change(self._effect(path, file.number))
        return file

    def _reachable(self) -> dict[int, _File]:
        # A file is reachable if it has a name now, or if it can have a name again after a crash.
        used = {
            n for names in (*self._names.values(), *self._durable.values()) for n in names.values()
        }
        used.update(e.node for c in self._pending for e in c.effects if e.node is not None)
        opened = {file.number for file in self._open.values()}
        for number in [n for n in self._files if n not in used and n not in opened]:
            del self._files[number]
        return {number: file for number, file in self._files.items() if number in used}

    # ------------------------------------------------------------------------------- sites
    def _is_ignored(self, kind: str, of: _File | Path) -> bool:
        assert kind in disk_state.SYNCS
        site = f"{kind} {self._part(of)}: {_call_chain()}"
        self.sites[site] = self.sites.get(site, 0) + 1
        return site in self.ignored

    def _part(self, of: _File | Path) -> str:
        # Return only the names of the path that _PARTS lists. This removes topics, numbers and file
        # names.
        if isinstance(of, _File):
            parts = self._path_of(of.number)
        else:
            parts = of.absolute().relative_to(self.root).parts
        # A store can be the root folder or any folder in the root folder.
        kept = [part for part in parts if part in _PARTS]
        return "/".join(kept) or ("root" if isinstance(of, Path) else "?")

    def _path_of(self, number: int) -> tuple[str, ...]:
        for folder, names in self._names.items():
            for name, node in names.items():
                if node == number:
                    return (*(self._path_of(folder) if folder != ROOT_ID else ()), name)
        return ()


_PARTS: Final = frozenset(
    {"commitlog", "consumequeue", "index", "checkpoint", "abort", "lock", ".logquarry", "config"}
    | {"names", "quarantine"}
)


def _call_chain() -> str:
    # Return the functions of this package that are on the call stack of a sync. The innermost
    # function comes first.
    found: list[str] = []
    others = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and others < _SITE_DEPTH:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(_PACKAGE) and not module.startswith(_TESTING):
            code = frame.f_code
            others += module != _PORT
            found.append(f"{code.co_qualname}+{frame.f_lineno - code.co_firstlineno}")
        frame = frame.f_back
    return " < ".join(found)
