"""The examples that use Spark run, and check their own results."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("name", ["store_to_delta", "stream_to_aggregate"])
def test_example(
    name: str, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    partitions = spark.conf.get("spark.sql.shuffle.partitions")
    try:
        runpy.run_path(str(EXAMPLES / f"{name}.py"))
    finally:
        assert partitions is not None
        spark.conf.set("spark.sql.shuffle.partitions", partitions)
