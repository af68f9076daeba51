"""A file of one page that is written in place: the checkpoint, and the durable mark."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from logquarry.errors import StoreUnavailable
from logquarry.store.disk.disk import Disk
from logquarry.store.disk.lifetime import abandon_in_children


class PageFile:
    """A small file of a fixed size, opened to be written; made of zeros if it is not there.

    Args:
        disk: what it is on.
        path: where it is.
        size: its bytes; a shorter one is made as long.

    Raises:
        StoreUnavailable: if it cannot be opened or made.
    """

    def __init__(self, disk: Disk, path: Path, size: int) -> None:
        self.path = path
        self._disk = disk
        try:
            self._descriptor = disk.open(path)
        except FileNotFoundError:
            self._descriptor = disk.make_file(path, size)
        except OSError as error:
            raise disk.refused(path, error) from error
        with self.opening():
            if disk.size(self._descriptor) < size:
                disk.allocate(self._descriptor, size)
        abandon_in_children(self)

    @contextmanager
    def opening(self) -> Iterator[None]:
        """What belongs to opening it: where that fails the file is closed.

        Raises:
            StoreUnavailable: in place of an OSError.
        """
        try:
            yield
        except OSError as error:
            self.close()
            raise self._disk.refused(self.path, error) from error
        except StoreUnavailable:
            self.close()
            raise

    @property
    def is_open(self) -> bool:
        """Whether it is open still, in this process."""
        return self._descriptor >= 0

    def read(self, count: int) -> bytes:
        """At most so many bytes from its start. Raises OSError."""
        return self._disk.read(self._descriptor, count, 0)

    def write(self, data: bytes) -> None:
        """Write its first bytes, which are on the disk some time later. Raises OSError."""
        self._disk.write_all(self._descriptor, data, 0)

    def sync(self) -> None:
        """Wait until what was written is on the disk.

        Raises:
            StoreUnavailable: if that failed, now or before; the store is poisoned then.
        """
        self._disk.sync(self._descriptor, self.path)

    def write_durably(self, data: bytes) -> None:
        """Write its first bytes and wait until they are on the disk.

        Raises:
            StoreUnavailable: if that failed; the store is poisoned then.
        """
        try:
            self.write(data)
        except OSError as error:
            reason = f"{self.path}: cannot be written: {error.strerror or error}"
            raise self._disk.health.poison(reason) from error
        self.sync()

    def close(self) -> None:
        """Let go of it, without a sync; once more does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            self._disk.let_go(descriptor)

    def abandon_in_child(self) -> None:
        """See :mod:`logquarry.store.disk.lifetime`."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
