"""Recovers and fills consume queues as RocketMQ 4.9.3 does (``ConsumeQueue``), with its bugs.

:class:`Noted` makes the changes only in memory, to plan a recovery. :class:`Applied` makes them in
the files. As in Java, bytes after a queue's end stay in the files, and a queue may have gaps.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np

from logquarry.disk.disk import Disk
from logquarry.disk.mapped_file import MappedFile
from logquarry.errors import StoreUnavailable, reason_of
from logquarry.format import java, queue_entry
from logquarry.format.arrays import Int64
from logquarry.format.queue_entry import UNIT_SIZE, QueueEntry
from logquarry.log.filesystem import FileView, RestoredFileSystem, whole_file
from logquarry.log.open_files import MOST_OPEN
from logquarry.log.store_files import CONSUME_QUEUE, NAME_DIGITS, SIDECAR
from logquarry.read.log_queues import QueueKey
from logquarry.read.queue import UNIT_DTYPE, Units
from logquarry.repair.recover.store_folders import check_queue_folder


class Noted:
    """Keeps all changes in memory, for a plan. ``restored``: see :class:`RestoredFileSystem`."""

    def __init__(self, root: Path, restored: Mapping[str, str] = MappingProxyType({})) -> None:
        self._place = RestoredFileSystem(root, restored).local_path
        self._changed: dict[str, mmap.mmap] = {}

    def view(self, path: str) -> memoryview:
        """Return the bytes of a file."""
        changed = self._changed.get(path)
        return mapped(self._place(path)) if changed is None else memoryview(changed).toreadonly()

    def write(self, path: str, position: int, data: memoryview | bytes) -> None:
        """Write into a file."""
        if path not in self._changed:
            there = mapped(self._place(path))
            self._changed[path] = mmap.mmap(-1, len(there))
            self._changed[path][:] = bytes(there)
        self._changed[path][position : position + len(data)] = bytes(data)

    def make(self, path: str, size: int) -> None:
        """Create a file of zeros. Raise WrongEntry if a file has the path of the queue's folder."""
        check_queue_folder(self._place(path).parent)
        self._changed[path] = mmap.mmap(-1, size)

    def extend(self, path: str, size: int) -> None:
        """Do nothing: zeros that :class:`Applied` appends do not change the plan."""

    def set_aside(self, path: str) -> None:
        """Move a file to quarantine."""
        self._changed.pop(path, None)


class Applied:
    """Makes all changes in the files. A file that Java would delete is moved to quarantine.
    ``written`` contains the paths of the files of queues and index that :meth:`sync` syncs.
    """

    def __init__(self, root: Path, disk: Disk) -> None:
        self._root = root
        self._disk = disk
        self._open: dict[str, MappedFile] = {}
        self.written: set[str] = set()

    def view(self, path: str) -> memoryview:
        """See :meth:`Noted.view`."""
        file = self._open.get(path)
        if file is not None:
            return file.buffer.toreadonly()
        return mapped(self._root / path)

    def write(self, path: str, position: int, data: memoryview | bytes) -> None:
        """See :meth:`Noted.write`."""
        file = self._open.get(path)
        if file is None:
            file = self._keep(path, (self._root / path).stat().st_size)
            # Java does not reserve disk space, so a full disk can end it with SIGBUS.
            file.allocate()
        self.written.add(path)
        file.buffer[position : position + len(data)] = data
        file.keep(position, position + len(data))

    def make(self, path: str, size: int) -> None:
        """See :meth:`Noted.make`."""
        self._keep(path, size, exclusive=True)
        self.written.add(path)

    def _keep(self, path: str, size: int, *, exclusive: bool = False) -> MappedFile:
        file = MappedFile(self._disk, self._root / path, 0, size, exclusive=exclusive)
        file.load(size)
        while len(self._open) >= MOST_OPEN:
            self._release(next(iter(self._open)))
        self._open[path] = file
        return file

    def extend(self, path: str, size: int) -> None:
        """See :meth:`Noted.extend`."""
        MappedFile(self._disk, self._root / path, 0, size).close()
        self.written.add(path)

    def set_aside(self, path: str) -> None:
        """Move a file to quarantine, or delete it if it has only zeros."""
        self._release(path)
        self.written.discard(path)
        size = (self._root / path).stat().st_size
        if size:
            file = MappedFile(self._disk, self._root / path, 0, size)
            if not file.holds_data():
                file.delete()
                return
            file.close()
        folder = self._root / SIDECAR / "quarantine" / Path(path).parent
        self._disk.set_aside(self._root / path, folder)

    def _release(self, path: str) -> None:
        file = self._open.pop(path, None)
        if file is not None:
            file.close()

    def close(self) -> None:
        """Close the files without a sync."""
        for path in list(self._open):
            self._release(path)

    def sync(self) -> None:
        """Sync the files in ``written``."""
        for path in sorted(self.written):
            with self._disk.writing(self._root / path):
                pass


Target = Noted | Applied


def mapped(path: Path, remedy: str = "makes the file again") -> memoryview:
    """Return all bytes of a file. Raises JavaRefusal if any byte cannot be read.

    The error's text contains ``remedy``, which describes what a safe recovery would do.
    """
    try:
        view = whole_file(path)
        data = view.window(0, view.size)
    except OSError as error:
        raise StoreUnavailable(f"{path}: cannot be read: {reason_of(error)}") from error
    refuse_unreadable(view, view.size, remedy)
    return data


def refuse_unreadable(view: FileView, length: int, remedy: str = "makes the file again") -> None:
    """Raise JavaRefusal if any of the first ``length`` bytes of a file cannot be read."""
    fault = view.fault(0, length)
    if fault is not None:
        raise JavaRefusal(
            f"{view.path}: {fault.words}: RocketMQ would end here; a recovery with `--mode safe` "
            f"{remedy}"
        )


RECOVERED_FILES: Final = 3
"""A recovery reads this number of files at the end of a queue or of the log."""
LARGEST_BASE: Final = java.LONG_MAX // 2
_FILLER: Final = queue_entry.encode(queue_entry.FILLER)
_CHUNK: Final = 1 << 12


class JavaRefusal(Exception):
    """RocketMQ would not start on this store. The error's text has the reason."""


@dataclass(slots=True)
class JavaFile:
    """A file of a queue or of the log. Java uses only the first ``wrote`` bytes of the file."""

    base: int
    path: str
    wrote: int


@dataclass(eq=False)
class JavaQueue:
    """One queue, as RocketMQ treats it.

    Attributes:
        max_physical: physical offset after the last message (``maxPhysicOffset``), -1 if none.
        files: the files in order. At first, Java treats each file as full.
        set_aside: (path, reason) of each file that Java would delete.
        cut: byte position of the first entry that was cut off because its message is after the
            log's end; None if there is none. Entries in files that Java would delete do not count.
        put_from: byte position of the first entry that was appended.
    """

    key: QueueKey
    files: list[JavaFile]
    file_size: int
    target: Target
    max_physical: int = field(init=False, default=-1)
    set_aside: list[tuple[str, str]] = field(init=False, default_factory=list)
    cut: int | None = field(init=False, default=None)
    put_from: int = field(init=False, default=0)
    put_units: int = field(init=False, default=0)

    @property
    def folder(self) -> str:
        """Path below the store's folder."""
        return f"{CONSUME_QUEUE}/{self.key[0]}/{self.key[1]}"

    @property
    def wrote_offset(self) -> int:
        """Position of the queue's end in bytes, 0 without files."""
        return self.files[-1].base + self.files[-1].wrote if self.files else 0

    def recover(self) -> None:
        """Find the queue's end as ``recover`` does: the first invalid entry of the last 3 files."""
        if not self.files:
            return
        index = max(0, len(self.files) - RECOVERED_FILES)
        while True:
            file = self.files[index]
            count, last = self._leading(file, 0, java.LONG_MAX)
            if last is not None:
                self.max_physical = java.to_long(last.end)
            index += 1
            if count * UNIT_SIZE < self.file_size or index == len(self.files):
                break
        self._truncate(file.base + count * UNIT_SIZE)

    def _leading(self, file: JavaFile, start: int, limit: int) -> tuple[int, QueueEntry | None]:
        """Return the number of consecutive valid entries from ``start`` on, and the last entry.
        A valid entry has a positive size, and a physical offset from 0 to below ``limit``.
        """
        units = np.frombuffer(self.target.view(file.path), UNIT_DTYPE, self.file_size // UNIT_SIZE)
        at = start
        while at < len(units):
            part = units[at : at + _CHUNK]
            offsets = part["physical_offset"]
            bad = (offsets < 0) | (part["size"] <= 0)
            if limit < java.LONG_MAX:
                bad |= offsets >= limit
            if bad.any():
                at += int(np.argmax(bad))
                break
            at += len(part)
        last = QueueEntry(*units[at - 1].item()) if at > start else None
        return at - start, last

    def _truncate(self, offset: int) -> None:
        """Cut the queue at a byte position, as ``MappedFileQueue.truncateDirtyFiles`` does."""
        while self.files[-1].base > offset:
            reason = f"it lies after the last sound entry, {offset // UNIT_SIZE}"
            self._destroy(self.files.pop(), reason)
        last = self.files[-1]
        last.wrote = min(self.file_size, offset - last.base)

    def truncate_dirty(self, physical: int) -> None:
        """Remove entries of messages after the log's end, as ``truncateDirtyLogicFiles`` does.

        QUIRK: Java accepts the first entry of a file even if it is all zeros. If each file holds
        only one entry, Java's loop never ends.
        """
        self.max_physical = physical
        while self.files:
            file = self.files[-1]
            first = queue_entry.decode_at(self.target.view(file.path), 0)
            if first.physical_offset >= physical:
                self.files.pop()
                self._destroy(file, f"its messages lie after the log's end at {physical}")
                continue
            count, last = self._leading(file, 1, physical)
            last = first if last is None else last
            wrote = (1 + count) * UNIT_SIZE
            if wrote < file.wrote:
                self.cut = file.base + wrote
            file.wrote = wrote
            self.max_physical = java.to_long(last.end)
            return

    def destroy(self) -> None:
        """Remove all files (``destroyLogics``)."""
        self.max_physical = -1
        while self.files:
            self._destroy(self.files.pop(), "there is no log")

    def _destroy(self, file: JavaFile, reason: str) -> None:
        self.target.set_aside(file.path)
        self.set_aside.append((file.path, reason))

    def put(self, offsets: Int64, units: Units) -> None:
        """Append entries in the order of the log, as ``putMessagePositionInfo`` does. Raises
        JavaRefusal if the position of a new file is too large for a file name.

        QUIRK: the dispatcher skips a message that ends at or before ``max_physical``. The
        dispatcher also skips an entry whose queue offset is before the queue's end, unless the
        queue offset is 0. All other entries are appended at the queue's end, even if their queue
        offsets are higher than the queue's end.
        """
        if not len(units):
            return
        if _end_of(units[0]) <= self.max_physical:
            ends = units["physical_offset"].astype(np.int64) + units["size"]
            known = int(np.count_nonzero(ends <= self.max_physical))
            offsets, units = offsets[known:], units[known:]
        # Other rules apply to an entry with queue offset 0, so pass each such entry separately.
        breaks = np.diff(offsets) != 1
        if len(offsets) and int(offsets.min()) <= 0:
            breaks |= (offsets[:-1] == 0) | (offsets[1:] == 0)
        cuts = np.flatnonzero(breaks) + 1
        bounds = [0, *cuts.tolist(), len(offsets)]
        for start, stop in pairwise(bounds):
            if start < stop:
                self._put_run(int(offsets[start]), units[start:stop])

    def _put_run(self, offset: int, units: Units) -> None:
        """Append consecutive entries. An entry with queue offset 0 must be passed alone."""
        end = _end_of(units[-1])
        expected = java.to_long(offset * UNIT_SIZE)
        file = self._writable(expected)
        if offset != 0 and expected < file.base + file.wrote:
            units = units[(file.base + file.wrote - expected) // UNIT_SIZE :]
            if not len(units):
                return
        if not self.put_units:
            self.put_from = self.wrote_offset
        self.put_units += len(units)
        data = memoryview(units.tobytes())
        while data:
            file = self._writable(expected)
            count = min(len(data), self.file_size - file.wrote)
            self.target.write(file.path, file.wrote, data[:count])
            file.wrote += count
            data = data[count:]
        self.max_physical = end

    def _writable(self, expected: int) -> JavaFile:
        """Return the last file, or a new file if it is full, as ``getLastMappedFile`` does."""
        if not self.files:
            if not 0 <= expected <= LARGEST_BASE:
                raise JavaRefusal(
                    f"{self.folder}: the queue offset of its first message needs an entry at byte "
                    f"{expected}"
                )
            file = self._make(expected - expected % self.file_size)
            padding = expected - file.base
            self.target.write(file.path, 0, _FILLER * (padding // UNIT_SIZE))
            file.wrote = padding
        elif self.files[-1].wrote == self.file_size:
            self._make(self.files[-1].base + self.file_size)
        return self.files[-1]

    def _make(self, base: int) -> JavaFile:
        file = JavaFile(base, f"{self.folder}/{base:0{NAME_DIGITS}d}", 0)
        self.target.make(file.path, self.file_size)
        self.files.append(file)
        return file


def _end_of(unit: np.void) -> int:
    physical_offset, size, _ = unit.item()
    return java.to_long(physical_offset + size)
