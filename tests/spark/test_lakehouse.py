"""Exports to tables with Spark's workers, and by command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import logquarry as lq
from logquarry.errors import CorruptFrame
from logquarry.spark.lakehouse.export import export_delta, export_iceberg
from tests.helpers.command import run
from tests.helpers.hostile_store import harm, make_small_store
from tests.helpers.lake import KINDS, Lake
from tests.spark.golden_rows import golden_messages, sound_stores

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytest.importorskip("deltalake")
pytest.importorskip("pyiceberg")


def export(spark: SparkSession, lake: Lake, stores: Any, *arguments: Any, **more: Any) -> Any:
    call = export_delta if lake.kind == "delta" else export_iceberg
    return call(spark, stores, lake.dest, *arguments, **more)


@pytest.mark.parametrize("kind", KINDS)
def test_golden_stores(kind: str, spark: SparkSession, golden: Path, tmp_path: Path) -> None:
    lake = Lake(kind, tmp_path / "table")
    stores = sound_stores(golden)
    told: list[tuple[int, int]] = []
    done = export(
        spark,
        lake,
        list(stores.values()),
        {"splitSize": "30k"},
        partition_by=["topic", "day"],
        progress=lambda *step: told.append(step),
    )
    assert told[-1][0] == told[-1][1] > 0
    names = ("broker", "topic", "queue_id", "queue_offset", "physical_offset", "body")
    expected = sorted(
        (
            broker,
            *(m[name] for name in names[1:]),
        )
        for broker, path in stores.items()
        for m in golden_messages(path.parent / "expected.jsonl")
    )
    assert sorted(lake.rows(*names)) == expected
    assert (done.messages, done.commits) == (len(expected), 1)
    assert export(spark, lake, list(stores.values()), partition_by=["topic", "day"]).messages == 0


def test_damage_in_a_worker(spark: SparkSession, tmp_path: Path) -> None:
    lake, store = Lake("delta", tmp_path / "table"), harm(make_small_store(tmp_path / "store"))
    with pytest.raises(CorruptFrame, match="bad_body_crc"):
        export(spark, lake, store, {"splitSize": "4k"})
    assert not lake.parquet_files()


# ---------------------------------------------------------------------------------------- commands
@pytest.mark.spark
@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize("kind", KINDS)
def test_command(kind: str, tmp_path: Path) -> None:
    store, lake = make_small_store(tmp_path / "store"), Lake(kind, tmp_path / "table")
    words = ["export", store, "--to", lake.dest, "--format", kind, "--topic", "orders"]
    words += ["--columns", "broker,physical_offset,body", "--decode", "json"]
    words += ["--decode-schema", "n int", "--max-bytes", "8k"]
    result = run(*words)
    assert "added 0 messages" in result.stderr
    assert "30 bodies did not decode: see" in result.stderr
    assert len(lake.rows("reason", dead=True)) == 30
    result = run(*words)
    assert "did not decode" not in result.stderr
    result = run(*words, "--tag", "Tag1", code=2)
    assert "the table has filters" in result.stderr


@pytest.mark.spark
@pytest.mark.usefixtures("spark")
def test_command_with_the_columns_of_kafka(tmp_path: Path) -> None:
    store, lake = make_small_store(tmp_path / "store"), Lake("delta", tmp_path / "table")
    words = ["export", store, "--to", lake.dest, "--format", "delta", "--schema", "kafka"]
    run(*words, "--columns", "offset,headers")
    assert lake.table().column_names == ["offset", "headers"]
    assert lake.table().num_rows == 40


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--format", "parquet", "--follow"], "--follow is for --format delta and iceberg"),
        (["--format", "jsonl", "--decode", "json"], "--decode is for"),
        (["--format", "jsonl", "--columns", "topic"], "--columns are for"),
        (["--format", "delta", "--table", "a.b"], "--table is for --format iceberg"),
        (["--format", "delta", "--interval", "3"], "--interval needs --follow"),
        (["--format", "delta", "--max-bytes", "much"], "--max-bytes takes a size"),
        (["--format", "delta", "--decode", "xml"], "takes raw, json"),
        (["--format", "delta", "--decode", "avro"], "takes a file"),
        (["--format", "delta", "--partition-by", "colour"], "partition by 'colour'"),
        (["--format", "delta", "--limit", "3"], "--limit is for --format jsonl"),
        (["--format", "iceberg", "--catalog", "hush"], "takes NAME=VALUE: value 1 has"),
        (["--format", "iceberg", "--table", "messages"], "give NAMESPACE.TABLE"),
        (["--format", "delta", "--columns", "colour"], "no column 'colour'"),
    ],
)
def test_usage(tmp_path: Path, words: list[str], told: str) -> None:
    """These errors appear before Spark starts."""
    store = make_small_store(tmp_path / "store")
    result = run("export", store, "--to", tmp_path / "out", *words, code=2)
    assert told in result.stderr
    assert "hush" not in result.stderr, "the value of --catalog can be a credential"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("kind", "package"), [("delta", "deltalake"), ("iceberg", "pyiceberg")])
def test_without_the_extra(
    kind: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == package]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, package, None)
    store = make_small_store(tmp_path / "store")
    result = run("export", store, "--to", tmp_path / "out", "--format", kind, code=2)
    assert "pip install 'logquarry[lakehouse]'" in result.stderr


FOLLOW = "from logquarry.cli.main import main; main()"


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_follower_that_is_killed(kind: str, tmp_path: Path) -> None:
    """Kill driver, JVM and workers at once, while the store is written."""
    store, lake = tmp_path / "store", Lake(kind, tmp_path / "table")
    config = lq.StoreConfig(
        mapped_file_size_commit_log=1 << 18, mapped_file_size_consume_queue=60_000
    )
    words = ["export", str(store), "--to", str(lake.dest), "--format", kind, "--quiet"]
    with lq.MessageStore.open(store, config=config, mode="rw") as opened:

        def put(count: int) -> None:
            for number in range(count):
                message = lq.Message(topic="orders", body=b"%d" % number, queue_id=0)
                assert opened.put(message).ok

        put(100)
        for kill in range(4):
            follower = subprocess.Popen(
                [
                    *(sys.executable, "-c", FOLLOW, *words, "--follow", "--interval", "0.1"),
                    *("--spark-master", "local[2]"),
                ],
                start_new_session=True,
                stderr=subprocess.PIPE,
            )
            before, deadline = len(lake.parquet_files()), time.monotonic() + 120
            while len(lake.parquet_files()) < before + 2:
                assert follower.poll() is None, follower.communicate()[1].decode()
                assert time.monotonic() < deadline
                put(50)
                time.sleep(0.05)
            time.sleep(0.07 * kill)
            os.killpg(follower.pid, signal.SIGKILL)
            follower.communicate()
    run(*words)
    with lq.MessageStore.open(store, mode="r") as reader:
        expected = [(m.physical_offset, m.body) for m in reader.scan()]
    assert lake.rows("physical_offset", "body") == expected
    assert lake.known_files() == lake.parquet_files()
