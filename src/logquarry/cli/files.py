"""Files that a command writes: whole, or not there."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from logquarry.errors import UsageError


def check_target(target: str | Path, stores: Iterable[str]) -> Path:
    """Where a file is to be written, with links resolved.

    Raises:
        UsageError: if it is a folder, a URL, or lies in one of the stores that are read.
    """
    if "://" in str(target):
        raise UsageError(f"{target}: a local file is written, and this is a URL")
    path = Path(target).resolve()
    if path.is_dir():
        raise UsageError(f"{target}: a folder, and a file is to be written")
    for store in stores:
        if "://" not in store and path.is_relative_to(Path(store).resolve()):
            raise UsageError(f"{target}: lies in the store {store}, which is only read")
    return path


@contextmanager
def staged(target: Path) -> Iterator[BinaryIO]:
    """A file to write that takes its place at the end of the block, and only if nothing is raised.

    What is there and no file (a pipe, a device) is written as it is.

    Raises:
        UsageError: if ``target`` is a folder.
    """
    if target.is_dir():
        raise UsageError(f"{target}: a folder, and a file is to be written")
    target = target.resolve()
    if target.exists() and not target.is_file():
        with target.open("wb") as file:
            yield file
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}-", dir=target.parent)
    draft = Path(name)
    try:
        with os.fdopen(descriptor, "wb", buffering=1 << 20) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        # mkstemp lets nobody else read it; a file that was asked for follows the umask.
        umask = os.umask(0)
        os.umask(umask)
        draft.chmod(0o666 & ~umask)
        draft.replace(target)
    except BaseException as error:
        draft.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:
            # A write names no file.
            raise OSError(error.errno, error.strerror, str(target)) from error
        raise
