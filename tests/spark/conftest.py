"""The one session of all Spark tests: it takes ten seconds to start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A session on two cores that knows the source `rocketmq`; change none of its settings."""
    from logquarry.spark import get_session

    session = get_session(master="local[2]", app_name="logquarry-tests")
    yield session
    session.stop()
