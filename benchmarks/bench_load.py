"""Compare loads of a DataFrame with one and with two task slots.

Run ``python -m benchmarks.bench_load``.

Each number of slots has its own session on ``local-cluster[SLOTS,1,1024]``: one executor with one
core and 1 GiB for each slot. In each session, every round loads the same Parquet files into new
stores. The first round also compiles the kernels and the code of the JVM, so the ratio uses only
the other rounds. The processor time is the sum for all processes of the session.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from logquarry.spark import get_session, load

_FILES = 8
_BROKERS = 4
_MOST_BYTES = (1 << 31) - 1
_INTERVAL_S = 0.5


def write_rows(folder: Path, rows: int, body: int) -> None:
    """Write the rows of all loads: random bodies, and one key for each message."""
    random = np.random.default_rng(1)
    each = -(-rows // _FILES)
    for file in range(_FILES):
        numbers = np.arange(file * each, min(rows, (file + 1) * each))
        offsets = pa.py_buffer((np.arange(len(numbers) + 1) * body).astype(np.int32))
        data = pa.py_buffer(random.bytes(len(numbers) * body))
        table = pa.table(
            {
                "topic": [f"topic-{number % 4}" for number in numbers],
                "body": pa.Array.from_buffers(pa.binary(), len(numbers), [None, offsets, data]),
                "keys": [f"k{number}" for number in numbers],
            }
        )
        pq.write_table(table, folder / f"{file}.parquet")


class ProcessorTime:
    """Processor time of this process and its descendants, including those that have ended."""

    def __init__(self) -> None:
        self._root = psutil.Process()
        self._seen: dict[tuple[int, float], tuple[str, float]] = {}
        threading.Thread(target=self._watch, daemon=True).start()

    def by_kind(self) -> dict[str, float]:
        """Return the seconds of all JVMs (``jvm``) and Python processes (``python``)."""
        found: dict[str, float] = defaultdict(float)
        for process in [self._root, *self._root.children(recursive=True)]:
            try:
                times = process.cpu_times()
                kind = "jvm" if "java" in process.name() else "python"
                key = (process.pid, process.create_time())
                self._seen[key] = (kind, times.user + times.system)
            except psutil.NoSuchProcess:
                continue
        for kind, seconds in list(self._seen.values()):
            found[kind] += seconds
        return found

    def _watch(self) -> None:
        while True:
            self.by_kind()
            time.sleep(_INTERVAL_S)


def load_rounds(rows: Path, work: Path, slots: int, rounds: int) -> list[dict[str, float]]:
    """Load the rows several times in one session; return the figures of each round."""
    spark = get_session(f"local-cluster[{slots},1,1024]")
    times = ProcessorTime()
    found = []
    for _ in range(rounds):
        stores = work / "stores"
        shutil.rmtree(stores, ignore_errors=True)
        df = spark.read.parquet(str(rows))
        before, start = times.by_kind(), time.perf_counter()
        done = load(df, stores, brokers=_BROKERS)
        seconds = time.perf_counter() - start
        used = {kind: used - before[kind] for kind, used in times.by_kind().items()}
        found.append({"seconds": seconds, "rows_per_s": done.rows / seconds, **used})
    spark.stop()
    return found


def main(arguments: list[str] | None = None) -> None:
    """Print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--body", type=int, default=100, help="bytes of a body")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slots", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.slots is not None:
        rows = options.work / "rows"
        json.dump(load_rounds(rows, options.work, options.slots, options.rounds), sys.stdout)
        return
    if options.rows < _FILES or -(-options.rows // _FILES) * options.body > _MOST_BYTES:
        parser.error(f"--rows, --body: each of {_FILES} files needs 1 byte to 2 GiB of bodies")
    if options.rounds < 2:
        parser.error("--rounds: the first round only warms up, so give at least 2")
    work = Path(tempfile.mkdtemp(prefix="bench-load-"))
    try:
        (work / "rows").mkdir()
        write_rows(work / "rows", options.rows, options.body)
        found: dict[str, Any] = {}
        for slots in (1, 2):
            # Each session needs its own process, because a process has only one JVM.
            command = [sys.executable, "-m", "benchmarks.bench_load", "--slots", str(slots)]
            command += ["--work", str(work), "--rounds", str(options.rounds)]
            run = subprocess.run(command, stdout=subprocess.PIPE, check=True)
            found[f"slots_{slots}"] = json.loads(run.stdout)
        one, two = (
            median(round["seconds"] for round in found[name][1:]) for name in ("slots_1", "slots_2")
        )
        found["speed_of_two_slots_against_one"] = one / two
        json.dump(found, sys.stdout, indent=1)
        print()
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
