"""The commands ``export`` through Spark, and ``demo``."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from py4j.clientserver import ClientServer, JavaParameters, PythonParameters
from pyspark.sql import SparkSession

from logquarry.cli.outcome import ExitCode, exit_code
from logquarry.cli.spark import SparkTrouble, session
from logquarry.spark.jobs import run_tasks
from logquarry.testing.builder import fill
from tests.helpers.command import jsonl, run
from tests.helpers.hostile_store import harm, make_small_store
from tests.spark.quick_start import QUICK_START

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("spark")]


# The parent of the tests may have ignored interrupts.
HEEDING_INTERRUPTS = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from logquarry.cli.main import main
main()
"""


def rows(folder: Path) -> list[tuple[Any, ...]]:
    # The files have all columns; those of the folders are not needed, and have other types.
    names = ["topic", "physical_offset", "body"]
    table = pq.read_table(folder, columns=names, partitioning=None)
    return sorted(tuple(row.values()) for row in table.to_pylist())


def messages(*arguments: object) -> list[tuple[Any, ...]]:
    return sorted(
        (m["topic"], m["physical_offset"], base64.b64decode(m["body"])) for m in jsonl(*arguments)
    )


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--decompress"],
        ["--topic", "MainTopic,TxTopic"],
        ["--topic", "MainTopic", "--queue", "2", "--queue-offset", "10:20"],
        ["--tag", "TagB", "--since", "2026-11-20T11:57:25Z"],
        ["--key", "key7"],
    ],
)
def test_same_rows_as_messages(golden: Path, tmp_path: Path, options: list[str]) -> None:
    store, target = golden / "real-broker" / "store", tmp_path / "out"
    result = run("export", store, "--to", target, *options)
    found = rows(target)
    assert found == messages(store, *options) and found
    assert not result.stdout and f"wrote {len(found)} message" in result.stderr
    assert (target / "_SUCCESS").exists()


def test_again_and_partitioned(golden: Path, tmp_path: Path) -> None:
    store, target = golden / "real-broker" / "store", tmp_path / "out"
    run("export", store, "--to", target)
    run("export", store, "--to", target, "--partition-by", "topic,day", "--quiet")
    assert rows(target) == messages(store)
    assert (target / "topic=TxTopic" / "day=2026-11-20").is_dir()


def test_damage(tmp_path: Path) -> None:
    damaged_store, target = harm(make_small_store(tmp_path / "small")), tmp_path / "out"
    result = run("export", damaged_store, "--to", target, code=1)
    assert f"{0:020d}" in result.stderr and "bad_body_crc" in result.stderr
    assert "Traceback" not in result.stderr and "java" not in result.stderr
    assert not list(target.rglob("*.parquet"))
    result = run("export", damaged_store, "--to", target, "--on-damage", "skip")
    assert len(rows(target)) == 39
    assert "skipped 1 damaged place" in result.stderr


@pytest.mark.parametrize(
    "options",
    [
        ["--to", "-"],
        ["--to", "x", "--limit", "3"],
        ["--to", "x", "--partition-by", "colour"],
        ["--to", "x", "--since", "never"],
    ],
)
def test_usage(
    golden: Path, tmp_path: Path, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run("export", golden / "single" / "store", *options, code=2)
    assert not list(tmp_path.rglob("*.parquet"))


def test_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spark: SparkSession) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        result = run("demo")
        lines = result.stdout.splitlines()
        total = next(line for line in lines if line.startswith("all topics")).split()
        assert total[2:5] == ["452", "213.2", "KiB"]
        assert any(line.split() == ["Damage", "none"] for line in lines)
        assert pq.read_table(tmp_path / "demo-output" / "parquet").num_rows == 452
    page = (tmp_path / "demo-output" / "report.html").read_text("utf-8")
    assert "MainTopic takes 41% of" in page and len(page) < 1_500_000
    # The session existed before, and still does.
    assert spark.range(3).count() == 3


@pytest.mark.parametrize("seconds", [None, 4])
def test_interrupted(tmp_path: Path, seconds: float | None) -> None:
    """Ctrl-C while the export writes, and while Spark starts."""
    store, target = tmp_path / "store", tmp_path / "out"
    fill(store, total_bytes=200 << 20 if seconds is None else 1 << 20)
    process = subprocess.Popen(
        [
            *(sys.executable, "-c", HEEDING_INTERRUPTS),
            *("export", str(store), "--to", str(target), "--spark-master", "local[1]"),
        ],
        env={**os.environ, "SPARK_SUBMIT_OPTS": QUICK_START},
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + 200
    if seconds is not None:
        time.sleep(seconds)
    else:
        while not list(target.glob("_temporary-*/**/*.parquet*")) and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    # A terminal signals all processes of the group.
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 130, errors.decode()
    assert errors == b"error: interrupted\n"
    assert not [path for path in target.rglob("*") if path.is_file()]


def test_what_went_wrong_in_a_worker_is_told(spark: SparkSession) -> None:
    # Raises OSError, like a full disk.
    with (
        pytest.raises(
            SparkTrouble, match=r"^Spark failed: OSError: \[Errno 9\] Bad file descriptor$"
        ),
        session("local[2]"),
    ):
        run_tasks(spark, "test", [-1], os.close, weight=abs)


def test_a_job_runs_in_the_workers_of_queries(spark: SparkSession) -> None:
    """Other workers would take seconds of processor time until they have imported everything."""
    parents = run_tasks(spark, "test", [0, 1], _daemon, weight=lambda _: 1)
    rows = spark.range(0, 2, 1, 2).mapInArrow(_daemons, "pid long").collect()
    assert {row[0] for row in rows} == set(parents)
    assert "SPARK_SIMPLIFIED_TRACEBACK" not in spark.sparkContext.environment


def _daemon(task: int) -> int:
    return os.getppid()


def _daemons(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield pa.record_batch({"pid": [os.getppid()] * batch.num_rows})


def test_a_full_disk_of_a_worker_has_its_own_exit_code(spark: SparkSession) -> None:
    write = partial(Path.write_text, data="x")
    with pytest.raises(OSError, match="No space left") as caught, session("local[2]"):
        run_tasks(spark, "test", [Path("/dev/full")], write, weight=lambda _: 1)
    assert exit_code(caught.value) == ExitCode.REFUSED


def test_java_that_does_not_answer(spark: SparkSession) -> None:
    """For example, the system has ended the Java process, because memory was short."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    java = JavaParameters(port=port, eager_load=False)
    python = PythonParameters(port=0, eager_load=False)
    with (
        pytest.raises(SparkTrouble, match=r"^Spark's Java process does not answer \(.*refused\)"),
        session("local[1]"),
    ):
        ClientServer(java_parameters=java, python_parameters=python).jvm.java.lang.System.gc()


def test_manifest_tells_the_same(golden: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    run("export", golden / "single" / "store", golden / "rollover" / "store", "--to", target)
    manifest = json.loads((target / "_manifest.json").read_text())
    assert {store["broker"] for store in manifest["stores"]} == {"single", "rollover"}
    assert manifest["messages"] == pq.read_table(target).num_rows
