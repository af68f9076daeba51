"""Unpacks the golden stores, which RocketMQ wrote: tests/data/golden.tar.xz."""

from __future__ import annotations

import tarfile
from pathlib import Path

ARCHIVE = Path(__file__).parents[1] / "data" / "golden.tar.xz"


def unpack(archive: Path, target: Path) -> None:
    """Unpack an archive of this repository into `target`, with each file's modification time."""
    with tarfile.open(archive, "r:xz") as tar:
        if hasattr(tarfile, "data_filter"):
            tar.extractall(target, filter="data")
        else:  # Python 3.11.0 to 3.11.3
            tar.extractall(target)


def unpack_golden(target: Path) -> Path:
    """Unpack the golden stores; return the folder that holds single/, unclean/ and so on."""
    unpack(ARCHIVE, target)
    return target / "golden"
