"""Queues and index built by Spark are those that one process builds; the driver knows no more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from logquarry.spark.rebuilding import rebuild_on_spark
from logquarry.store.rebuild.rebuild import rebuild
from tests.cli.helpers import run
from tests.conformance.golden_facts import Scenario
from tests.property.test_rebuild_ways import made

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


@pytest.mark.parametrize("name", ["single", "unclean/crc-middle"])
def test_the_same_bytes(spark: SparkSession, golden: Path, tmp_path: Path, name: str) -> None:
    scenario = Scenario(golden / name)
    told: list[tuple[int, int]] = []
    many = rebuild_on_spark(
        spark,
        scenario.store,
        into=tmp_path / "many",
        config=scenario.config,
        split_size=50_000,
        progress=lambda done, total: told.append((done, total)),
    )
    alone = rebuild(scenario.store, into=tmp_path / "alone", config=scenario.config)
    assert made(many, tmp_path / "many") == made(alone, tmp_path / "alone")
    assert told and all(done <= total for done, total in told)


def test_the_command(spark: SparkSession, golden: Path, tmp_path: Path) -> None:
    store = golden / "single" / "store"
    words = ["rebuild", store, "--into", tmp_path / "new", "--queues", "--json"]
    document = json.loads(run(*words, "--spark-master", "local[2]").stdout)
    assert document["messages"] == 400
    assert (tmp_path / "new" / "consumequeue").is_dir()
    assert not (tmp_path / "new" / "index").exists()
