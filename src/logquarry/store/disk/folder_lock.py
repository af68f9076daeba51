"""Who may make something in a folder that is no store: a lock on the folder itself.

Nothing is left of it, in the folder or elsewhere, and it goes with its process. A store has a lock
of its own (:mod:`logquarry.store.disk.store_lock`), which Java knows.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from logquarry.errors import StoreUnavailable
from logquarry.store.disk.disk import Disk

AT_WORK: Final = "a salvage or rebuild is at work there"


def lock_folder(folder: str | os.PathLike[str], at_work: str = AT_WORK) -> int | None:
    """A lock on a folder, held until the descriptor is closed; None where there are no locks.

    Args:
        folder: the folder.
        at_work: what is said of it if somebody has the lock.

    Raises:
        FileNotFoundError: if it is not there, or went while this waited for nobody.
        StoreUnavailable: if somebody has the lock.
    """
    while True:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Somebody may have put another folder in its place since it was opened.
            if os.path.samestat(os.fstat(descriptor), os.stat(folder)):  # noqa: PTH116
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise StoreUnavailable(f"{os.fsdecode(folder)}: {at_work}") from None
        except FileNotFoundError:
            os.close(descriptor)
            raise
        except OSError:
            # Not every file system that is mounted has locks.
            os.close(descriptor)
            return None
        os.close(descriptor)


@contextmanager
def alone_in(disk: Disk, folder: Path) -> Iterator[None]:
    """Make a folder, and have it for oneself for as long as the block takes.

    Raises:
        StoreUnavailable: if somebody else is at work there, or it cannot be made.
    """
    while True:
        is_new = not folder.exists()
        try:
            disk.make_folders(folder)
        except BaseException:
            if is_new:
                with suppress(OSError):
                    folder.rmdir()
            raise
        try:
            descriptor = lock_folder(folder)
            break
        except FileNotFoundError:
            # Who made it, and had nothing to leave in it, took it away again.
            continue
        except OSError as error:
            raise disk.refused(folder, error) from error
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)
