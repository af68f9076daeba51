"""Spark rebuilds the same queues and index as one process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from logquarry.errors import UsageError
from logquarry.repair.rebuild.rebuild import rebuild
from logquarry.spark.rebuilding import rebuild_on_spark, rebuild_stores
from tests.conformance.golden_facts import Scenario
from tests.conformance.test_dialect31 import dialect31
from tests.helpers.command import run
from tests.property.test_rebuild_ways import made

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


@pytest.mark.parametrize("name", ["single", "unclean/crc-middle", "v3-transactions"])
def test_the_same_bytes(spark: SparkSession, golden: Path, tmp_path: Path, name: str) -> None:
    scenario = Scenario(golden / name)
    config = dialect31(scenario) if name.startswith("v3-") else scenario.config
    told: list[tuple[int, int]] = []
    many = rebuild_on_spark(
        spark,
        scenario.store,
        into=tmp_path / "many",
        config=config,
        split_size=50_000,
        progress=lambda done, total: told.append((done, total)),
    )
    alone = rebuild(scenario.store, into=tmp_path / "alone", config=config)
    assert made(many, tmp_path / "many") == made(alone, tmp_path / "alone")
    if name.startswith("v3-"):
        # RocketMQ 3.1.3's own file, except for its name, which is a time.
        [theirs] = (scenario.store / "index").iterdir()
        [ours] = (tmp_path / "many" / "index").iterdir()
        assert ours.read_bytes() == theirs.read_bytes()
    assert told and all(done <= total for done, total in told)


def test_the_command(spark: SparkSession, golden: Path, tmp_path: Path) -> None:
    store = golden / "single" / "store"
    words = ["rebuild", store, "--into", tmp_path / "new", "--queues", "--json"]
    document = json.loads(run(*words, "--spark-master", "local[2]").stdout)
    assert document["messages"] == 400
    assert (tmp_path / "new" / "consumequeue").is_dir()
    assert not (tmp_path / "new" / "index").exists()


def test_many_stores(spark: SparkSession, golden: Path, tmp_path: Path) -> None:
    stores = [golden / name / "store" for name in ("single", "batch", "rollover")]
    into = tmp_path / "new"
    words = ["--into", into, "--spark-master", "local[2]", "--json"]
    told = json.loads(run("rebuild", *stores, *words).stdout)["stores"]
    assert [document["store"] for document in told] == [str(store) for store in stores]
    for store in stores:
        scenario = Scenario(store.parent)
        name = store.parent.name
        alone = rebuild(store, into=tmp_path / "alone" / name, config=scenario.config)
        queues = {
            str(path.relative_to(into / name)): path.read_bytes()
            for path in (into / name / "consumequeue").rglob("*")
            if path.is_file()
        }
        assert queues == {
            key: value
            for key, value in made(alone, tmp_path / "alone" / name)[1].items()
            if key.startswith("consumequeue") and value is not None
        }


def test_stores_that_are_there_already_are_left_out(
    spark: SparkSession, golden: Path, tmp_path: Path
) -> None:
    stores = [golden / name / "store" for name in ("single", "batch")]
    first, second = rebuild_stores(spark, stores, into=tmp_path)
    with pytest.raises(UsageError, match="a rebuild overwrites nothing"):
        rebuild_stores(spark, stores, into=tmp_path)
    shutil.rmtree(tmp_path / "batch" / "index")
    shutil.rmtree(tmp_path / "batch" / "consumequeue")
    (again,) = rebuild_stores(spark, stores, into=tmp_path, resume=True)
    assert (again.store, again.messages) == (second.store, second.messages)
    assert rebuild_stores(spark, stores, into=tmp_path, resume=True) == []
    with pytest.raises(UsageError, match="needs a target folder"):
        rebuild_stores(spark, stores, apply=True, resume=True)
    assert first.messages == 400
