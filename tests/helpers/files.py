"""The bytes of files, and changes to them in place, as a bad disk or another program makes them."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def bytes_of(folder: Path) -> dict[str, bytes]:
    """The bytes of all files in a folder and its subfolders, by relative name."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def overwrite(path: Path, at: int, data: bytes | bytearray) -> None:
    """Write bytes over those at an offset of a file."""
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def flip(path: Path, at: int, bits: int = 1) -> None:
    """Change bits of the byte at an offset of a file."""
    with path.open("rb") as file:
        file.seek(at)
        byte = file.read(1)[0]
    overwrite(path, at, bytes([byte ^ bits]))


def zero(path: Path, start: int, stop: int | None = None) -> None:
    """Zero a file from an offset on, up to another or to its end."""
    overwrite(path, start, bytes((path.stat().st_size if stop is None else stop) - start))


@contextmanager
def leaves_nothing_open(folder: Path) -> Iterator[None]:
    """Fail if the block leaves a file of the folder open or mapped, so that only a garbage
    collection would close it.
    """
    gc.collect()
    gc.disable()
    try:
        yield
        numbers = Path("/proc/self/fd").iterdir()
        assert not [number for number in numbers if str(folder) in os.path.realpath(number)]
        assert str(folder) not in Path("/proc/self/maps").read_text()
    finally:
        gc.enable()
