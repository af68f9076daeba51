"""Files that a command writes: whole, or not there."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from logquarry.errors import UsageError


@contextmanager
def staged(target: Path) -> Iterator[BinaryIO]:
    """A file to write that takes its place at the end of the block, and only if nothing is raised.

    Raises:
        UsageError: if ``target`` is a folder.
    """
    if target.is_dir():
        raise UsageError(f"{target}: a folder, and a file is to be written")
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
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
