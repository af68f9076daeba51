"""Stores salvaged by one job equal stores salvaged one by one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from logquarry.errors import UsageError
from logquarry.log.layout import StoreLayout
from logquarry.repair.salvage.salvage import salvage_store
from logquarry.repair.verification import verify_store
from logquarry.spark.repair import salvage_stores
from tests.helpers.command import run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


def test_the_same_is_saved(spark: SparkSession, golden: Path, tmp_path: Path) -> None:
    names = ["crc-middle", "crc-third-last-file", "noabort-crc-middle"]
    stores = [golden / "unclean" / name / "store" for name in names]
    words = ["--into", tmp_path / "new", "--spark-master", "local[2]", "--json"]
    told = json.loads(run("salvage", *stores, *words, code=1).stdout)["stores"]
    for name, store, document in zip(names, stores, told, strict=True):
        alone = salvage_store(StoreLayout.open(store), tmp_path / "alone" / name).to_json()
        made = tmp_path / "new" / name
        assert document | {"into": "", "seconds": 0} == alone | {"into": "", "seconds": 0}
        assert not verify_store(StoreLayout.open(made)).has_damage
        logs = [sorted((p / "commitlog").iterdir()) for p in (made, tmp_path / "alone" / name)]
        assert [f.read_bytes() for f in logs[0]] == [f.read_bytes() for f in logs[1]]


def test_what_was_cut_off_is_gone_on_with(
    spark: SparkSession, golden: Path, tmp_path: Path
) -> None:
    stores = [golden / name / "store" for name in ("single", "batch")]
    one, two = salvage_stores(spark, stores, tmp_path)
    assert one.plan.is_whole and two.plan.is_whole
    # As if the second salvage had been killed while it wrote its store.
    made = tmp_path / "batch"
    (made / ".salvage").mkdir()
    (made / "commitlog").rename(made / ".salvage" / "commitlog")
    (made / "own").write_text("not ours")
    with pytest.raises(UsageError, match="was interrupted"):
        salvage_store(StoreLayout.open(stores[1]), made)
    with pytest.raises(UsageError, match="it holds own"):
        salvage_stores(spark, stores, tmp_path, resume=True)
    (made / "own").unlink()
    (again,) = salvage_stores(spark, stores, tmp_path, resume=True)
    assert (again.plan.store, again.plan.messages) == (two.plan.store, two.plan.messages)
    assert not verify_store(StoreLayout.open(made)).has_damage
    assert salvage_stores(spark, stores, tmp_path, resume=True) == []
