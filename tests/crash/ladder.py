"""Counts and seeds of the crash tests: small by default, larger with ``make crash``.

``make crash N=... SEED=... RUNG=...`` sets the environment variables that this module reads.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

COUNT: Final = os.environ.get("CRASH_N", "")
SEED: Final = int(os.environ.get("CRASH_SEED") or 1)
IS_BY_HAND: Final = bool(COUNT)


def count(default: int) -> int:
    """The number that was asked for by hand, else the default for each commit."""
    return int(COUNT) if COUNT else default


def seeds(total: int, each: int) -> list[int]:
    """One seed for each part of a rung that does ``each`` of a total."""
    return [SEED * 1_000_000 + number for number in range(-(-total // each))]


@contextmanager
def told(seed: int, what: str, kept: Path | None = None, to: Path | None = None) -> Iterator[None]:
    """Say how to repeat a failure of the block, and keep its folder."""
    try:
        yield
    except BaseException:
        print(f"seed {seed}: {what}")
        if kept is not None and to is not None and kept.exists():
            # The copy lacks what a broken disk does not deliver.
            with contextlib.suppress(shutil.Error):
                shutil.copytree(kept, to / "failed", dirs_exist_ok=True, symlinks=True)
            print(f"the store is kept in {to / 'failed'}")
        raise
