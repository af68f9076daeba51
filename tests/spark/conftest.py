"""The session that all Spark tests share: its start takes ten seconds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A session on two cores with the source `rocketmq`; do not change its settings."""
    from logquarry.spark import get_session

    session = get_session(master="local[2]", app_name="logquarry-tests")
    yield session
    session.stop()
