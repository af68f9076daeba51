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

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

GLOB = "s3://bucket/brokers/*/store"


@pytest.fixture(scope="module")
def server(golden: Path) -> Iterator[Options]:
    with s3_server() as options:
        put_stores(options, {name: golden / name / "store" for name in ("single", "batch")})
        yield options


def test_the_source_reads_it(spark: SparkSession, server: Options, golden: Path) -> None:
    read = spark.read.format("rocketmq").option("minPartitions", "8")
    remote = read.option("storageOptions", json.dumps(server)).load(GLOB)
    local = read.load([str(golden / name / "store") for name in ("single", "batch")])
    rows = [
        frame.selectExpr("broker", "physical_offset", "sha2(body, 256)").collect()
        for frame in (remote, local)
    ]
    assert sorted(rows[0]) == sorted(rows[1]) and len(rows[0]) > 400


def test_it_is_checked(spark: SparkSession, server: Options, golden: Path) -> None:
    found = verify_stores(spark, GLOB, storage_options=server, split_size=100_000)
    for report, name in zip(found, ("batch", "single"), strict=True):
        alone = verify_store(StoreLayout.open(golden / name / "store"))
        assert report.counts == alone.counts
        assert report.findings == alone.findings


def test_it_is_exported_there(spark: SparkSession, server: Options) -> None:
    options = {"storageOptions": json.dumps(server)}
    done = export_parquet(spark, GLOB, "s3://bucket/out", options)
    assert done.messages == done.summary.total.messages > 400
    again = export_parquet(spark, GLOB, "s3://bucket/out", options)
    assert again.messages == done.messages
    s3 = pafs.S3FileSystem(**server)
    files = [f"bucket/out/{file.path}" for file in again.files]
    assert ds.dataset(files, filesystem=s3).count_rows() == done.messages
