"""Fixtures of the tests of tables in a lakehouse."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.helpers.lake import Lake


@pytest.fixture(params=["delta", "iceberg"])
def lake(request: pytest.FixtureRequest, tmp_path: Path) -> Lake:
    """A table that does not exist yet, once of each kind."""
    from tests.helpers.lake import Lake

    return Lake(request.param, tmp_path / "table")
