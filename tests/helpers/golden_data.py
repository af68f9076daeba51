"""Unpacks the archives of stores that RocketMQ wrote, once for all tests, and copies stores."""

from __future__ import annotations

import fcntl
import os
import shutil
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

ARCHIVE = Path(__file__).parents[1] / "data" / "golden.tar.xz"


def unpack(archive: Path, target: Path) -> None:
    """Unpack an archive of this repository into `target`, with each file's modification time."""
    with tarfile.open(archive, "r:xz") as tar:
        if hasattr(tarfile, "data_filter"):
            tar.extractall(target, filter="data")
        else:  # Python 3.11.0 to 3.11.3
            tar.extractall(target)


def unpacked(archive: Path, factory: pytest.TempPathFactory) -> Path:
    """The folder with an archive's stores, shared by all tests and workers: copy what you change.

    The first worker unpacks, the others wait for it.
    """
    folder = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        # The folder of the whole run.
        folder = folder.parent
    target = folder / f"{archive.name.partition('.')[0]}-data"
    target.mkdir(exist_ok=True)
    with (target / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (target / "unpacked").exists():
            unpack(archive, target)
            (target / "unpacked").touch()
    return target


def copy_store(
    source: Path, target: Path, ignore: Callable[[str, list[str]], Iterable[str]] | None = None
) -> Path:
    """Copy a folder with the holes of its files: a timer wheel has 38 MB of zeros."""
    return Path(shutil.copytree(source, target, ignore=ignore, copy_function=_copy_data))


def _copy_data(name: str, to: str) -> str:
    with Path(name).open("rb", buffering=0) as file, Path(to).open("wb", buffering=0) as out:
        size, at = os.fstat(file.fileno()).st_size, 0
        out.truncate(size)
        while at < size:
            try:
                start = os.lseek(file.fileno(), at, os.SEEK_DATA)
            except OSError:
                # Only a hole is left.
                break
            at = os.lseek(file.fileno(), start, os.SEEK_HOLE)
            os.pwrite(out.fileno(), os.pread(file.fileno(), at - start, start), start)
    shutil.copystat(name, to)
    return to
