"""Fixtures of the crash tests: folders in memory, for a thousand stores a second."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.ladder import IS_BY_HAND

_MEMORY = Path("/dev/shm")


@pytest.fixture
def shm(tmp_path: Path) -> Iterator[Path]:
    """A folder on a tmpfs, if there is one."""
    if not os.access(_MEMORY, os.W_OK):
        yield tmp_path
        return
    folder = Path(tempfile.mkdtemp(prefix="logquarry-crash-", dir=_MEMORY))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With the counts of ``make crash``, a test may take any time."""
    for item in items if IS_BY_HAND else []:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(0), append=False)
