"""Stores for tests of commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.hostile_store import harm, make_small_store


@pytest.fixture
def small_store(tmp_path: Path) -> Path:
    """See :mod:`tests.helpers.hostile_store`."""
    return make_small_store(tmp_path / "small")


@pytest.fixture
def damaged_store(small_store: Path) -> Path:
    """The same with a harmed body in the first file."""
    return harm(small_store)
