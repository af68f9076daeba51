"""The Spark session of all tests; it takes ten seconds to start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.spark.quick_start import SMALL_QUERIES

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A session on two cores that knows the source `rocketmq`; do not change its settings."""
    from logquarry.spark import get_session

    session = get_session(master="local[2]", app_name="logquarry-tests", config=SMALL_QUERIES)
    yield session
    session.stop()
