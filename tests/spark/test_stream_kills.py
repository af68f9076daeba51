"""A stream whose processes are killed at any point: every message is there once."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COUNT, KILLS = 600_000, 20


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kills(spark: SparkSession, tmp_path: Path) -> None:
    store = tmp_path / "store"
    rng = random.Random(2)
    writer = _start("tests.spark.stream_writer", str(store), str(COUNT), "25")
    try:
        _wait_for(writer, "open")
        for number in range(KILLS):
            query = _start("tests.spark.stream_query", str(store), str(tmp_path), "on")
            _wait_for(query, "started")
            time.sleep(rng.uniform(0, 15))
            if number % 3 == 2:
                _kill_a_worker(query, rng)
            _kill(query)
        assert writer.wait(600) == 0
    finally:
        _kill(writer)
    last = _start("tests.spark.stream_query", str(store), str(tmp_path), "now")
    try:
        assert last.wait(300) == 0
    finally:
        _kill(last)
    df = spark.read.parquet(str(tmp_path / "out"))
    found = df.selectExpr("CAST(CAST(body AS STRING) AS INT) AS n")
    row = found.selectExpr("count(*)", "count(DISTINCT n)", "min(n)", "max(n)").collect()[0]
    assert tuple(row) == (COUNT, COUNT, 0, COUNT - 1)


def _start(module: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        # Killed with all that it started.
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )


def _wait_for(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None
    while line := process.stdout.readline():
        if line.strip() == word:
            return
    raise AssertionError(f"it ended with {process.wait()} before it said {word!r}")


def _kill_a_worker(query: subprocess.Popen[str], rng: random.Random) -> None:
    """One of Spark's Python processes, planning or reading; Spark gets a while to notice."""
    with suppress(psutil.NoSuchProcess):
        below = psutil.Process(query.pid).children(recursive=True)
        workers = [child for child in below if "python" in child.name()]
        if workers:
            rng.choice(workers).kill()
        time.sleep(rng.uniform(0, 2))


def _kill(process: subprocess.Popen[str]) -> None:
    below: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        below = psutil.Process(process.pid).children(recursive=True)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for child in below:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(below, timeout=30)
    assert process.stdout is not None
    process.stdout.close()
