"""Spark reads, verifies and exports stores in an S3 bucket, with storage options alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.dataset as ds
import pytest
from pyarrow import fs as pafs

from logquarry.log.layout import StoreLayout
from logquarry.repair.verification import verify_store
from logquarry.spark.export import export_parquet
from logquarry.spark.repair import verify_stores
from tests.helpers.s3_server import Options, put_stores, s3_server
from tests.helpers.store_maker import StoreMaker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

GLOB = "s3://bucket/brokers/*/store"
MESSAGES = 60 + 90


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write two stores of few files: each request to the server takes it 10 ms."""
    root = tmp_path_factory.mktemp("brokers")
    made = {}
    for count, name in ((60, "batch"), (90, "single")):
        maker = StoreMaker(log_file_size=16_384, queue_file_units=100, slots=100, entries=200)
        for n in range(count):
            maker.put(["orders", "payments"][n % 2], body=b"body %d " % n * 20, keys=f"k{n}")
        made[name] = maker.write(root / name / "store")
    return made


@pytest.fixture(scope="module")
def server(stores: dict[str, Path]) -> Iterator[Options]:
    with s3_server() as options:
        put_stores(options, stores)
        yield options


def test_the_source_reads_it(spark: SparkSession, server: Options, stores: dict[str, Path]) -> None:
    read = spark.read.format("rocketmq").option("minPartitions", "4")
    remote = read.option("storageOptions", json.dumps(server)).load(GLOB)
    local = read.load([str(store) for store in stores.values()])
    rows = [
        frame.selectExpr("broker", "physical_offset", "sha2(body, 256)").collect()
        for frame in (remote, local)
    ]
    assert sorted(rows[0]) == sorted(rows[1]) and len(rows[0]) == MESSAGES


def test_it_is_checked(spark: SparkSession, server: Options, stores: dict[str, Path]) -> None:
    found = verify_stores(spark, GLOB, storage_options=server, split_size=16_384)
    for report, store in zip(found, stores.values(), strict=True):
        alone = verify_store(StoreLayout.open(store))
        assert report.counts == alone.counts
        assert report.findings == alone.findings


def test_it_is_exported_there(spark: SparkSession, server: Options) -> None:
    options = {"storageOptions": json.dumps(server)}
    done = export_parquet(spark, GLOB, "s3://bucket/out", options)
    assert done.messages == done.summary.total.messages == MESSAGES
    again = export_parquet(spark, GLOB, "s3://bucket/out", options)
    assert again.messages == done.messages
    s3 = pafs.S3FileSystem(**server)
    files = [f"bucket/out/{file.path}" for file in again.files]
    assert ds.dataset(files, filesystem=s3).count_rows() == done.messages
