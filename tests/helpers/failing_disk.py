"""A disk that counts its calls; a test can let them fail, wait or stop the program."""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from pathlib import Path

from logquarry.disk.disk import Disk


class FaultyDisk(Disk):
    """A local disk that counts its calls by name.

    Attributes:
        counts: how often each was called.
        order: the calls in order.
        synced_folders: the folders whose names were synced, in order.
        failing: name of a call to the errno of its failure.
        gate: fdatasync waits until it is set.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.order: list[str] = []
        self.synced_folders: list[Path] = []
        self.failing: dict[str, int] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.most_bytes_a_write = 1 << 30

    def _called(self, name: str) -> None:
        self.counts[name] += 1
        self.order.append(name)
        if name in self.failing:
            raise OSError(self.failing[name], os.strerror(self.failing[name]))

    def open(self, path: Path, *, create: bool = False, exclusive: bool = False) -> int:
        self._called("open")
        return super().open(path, create=create, exclusive=exclusive)

    def allocate(self, descriptor: int, size: int) -> None:
        if "allocate" in self.failing:
            # ext4 leaves the file half allocated.
            os.ftruncate(descriptor, size // 2)
        self._called("allocate")
        super().allocate(descriptor, size)

    def write(self, descriptor: int, data: memoryview | bytes, position: int) -> int:
        self._called("write")
        return super().write(descriptor, data[: self.most_bytes_a_write], position)

    def fdatasync(self, descriptor: int) -> None:
        self._called("fdatasync")
        self.gate.wait(30)
        super().fdatasync(descriptor)

    def fsync(self, descriptor: int) -> None:
        self._called("fsync")
        super().fsync(descriptor)

    def sync_folder(self, folder: Path) -> None:
        self.synced_folders.append(folder)
        self._called("sync_folder")
        super().sync_folder(folder)

    def rename(self, path: Path, to: Path) -> None:
        self._called("rename")
        super().rename(path, to)

    def link(self, path: Path, to: Path) -> None:
        self._called("link")
        super().link(path, to)

    def unlink(self, path: Path) -> None:
        self._called("unlink")
        super().unlink(path)


EIO = errno.EIO
ENOSPC = errno.ENOSPC


class StoppedDisk(FaultyDisk):
    """A disk that ends the program at one call; later calls do nothing but raise again.

    Args:
        number: number of the call, from 0; None only counts.
    """

    def __init__(self, number: int | None = None) -> None:
        super().__init__()
        self.number = number
        self.is_stopped = False

    @property
    def stops(self) -> list[int]:
        """Calls to stop at: all but the syncs, and every third sync: syncs change no file."""
        return [
            number
            for number, name in enumerate(self.order)
            if number % 3 == 0 or name not in ("fdatasync", "fsync", "sync_folder")
        ]

    def _called(self, name: str) -> None:
        if self.is_stopped or len(self.order) == self.number:
            self.is_stopped = True
            raise KeyboardInterrupt
        super()._called(name)
