"""A verify on Spark has the same findings as one in a single process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from logquarry.log.layout import StoreLayout
from logquarry.repair.verification import verify_store
from logquarry.spark.repair import verify_stores
from tests.helpers.command import run
from tests.spark.golden_rows import sound_stores

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


def test_the_same_is_found(spark: SparkSession, golden: Path) -> None:
    harmed = sorted((golden / "unclean").glob("*/store"))
    stores = [*harmed, *sound_stores(golden).values()]
    alone = [verify_store(StoreLayout.open(store)).to_json() for store in stores]
    for split_size in (40_000, 128 << 20):
        found = verify_stores(spark, stores, split_size=split_size)
        assert len(found) == len(stores) > 40
        for store, report, expected in zip(stores, found, alone, strict=True):
            assert report.to_json() == expected, (store, split_size)


def test_the_command_checks_many(spark: SparkSession, golden: Path) -> None:
    glob = f"{golden}/unclean/crc-*/store"
    words = ["verify", glob, str(golden / "single" / "store"), "--json"]
    alone = run(*words, code=1)
    on_spark = run(*words, "--spark-master", "local[2]", code=1)
    assert json.loads(on_spark.stdout) == json.loads(alone.stdout)
    assert len(json.loads(alone.stdout)["stores"]) == 3
