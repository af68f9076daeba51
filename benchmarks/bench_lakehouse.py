"""Measure exports of a store to Iceberg or Delta tables, on a local disk or S3.

With ``--kills``, the program also kills exports, to test that no message is lost or doubled.

    python -m benchmarks.bench_lakehouse --store DIR --to /tmp/tables --kind iceberg --rounds 3
    python -m benchmarks.bench_lakehouse --store DIR --to s3://bucket/tables --s3 127.0.0.1:7070 \\
        --kills 3

A round makes a new table. The time of a round includes the commit. The processor time is the sum
for all processes of the export: driver, JVM and Python workers. An S3 server on this machine has
its own processes, which are not counted.

With ``--kills N``, the benchmark exports in small commits. N times, the benchmark kills all
processes of the export after one to four commits and a random delay of up to a second, and starts
the export again. After the last export, which is not killed, the benchmark counts the rows and the
distinct messages of the table.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.compute as pc

from logquarry.spark.lakehouse.advance import TableSummary
from logquarry.spark.lakehouse.export import export_delta, export_iceberg

_KEY, _SECRET, _REGION = "test", "testtest", "us-east-1"
_COMMITS = 24
"""Number of commits of an export, for ``--kills``."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """One table of one round.

    Attributes:
        kind: iceberg or delta.
        dest: folder or URL of the table.
        catalog: SQLite file of the Iceberg catalog.
        s3: host and port of an S3 server; None for local folders.
    """

    kind: str
    dest: str
    catalog: Path
    s3: str | None

    def export(
        self,
        spark: Any,
        store: Path,
        options: Mapping[str, str],
        on_commit: Callable[[TableSummary], None] | None = None,
    ) -> TableSummary:
        """Export the store into the table."""
        files: dict[str, Any] = {"on_commit": on_commit}
        if self.s3 is not None:
            files["dest_storage_options"] = {
                "endpoint_override": self.s3,
                "scheme": "http",
                "access_key": _KEY,
                "secret_key": _SECRET,
                "region": _REGION,
            }
        if self.kind == "delta":
            return export_delta(
                spark, store, self.dest, options, table_storage_options=self.metadata(), **files
            )
        return export_iceberg(spark, store, self.dest, options, catalog=self.metadata(), **files)

    def metadata(self) -> dict[str, str]:
        """Return the storage options for the library that reads and writes the table's metadata."""
        address = f"http://{self.s3}"
        if self.kind == "delta":
            if self.s3 is None:
                return {}
            return {
                "AWS_ENDPOINT_URL": address,
                "AWS_ALLOW_HTTP": "true",
                "AWS_ACCESS_KEY_ID": _KEY,
                "AWS_SECRET_ACCESS_KEY": _SECRET,
                "AWS_REGION": _REGION,
            }
        catalog = {"type": "sql", "uri": f"sqlite:///{self.catalog}"}
        if self.s3 is not None:
            catalog |= {
                "s3.endpoint": address,
                "s3.access-key-id": _KEY,
                "s3.secret-access-key": _SECRET,
                "s3.region": _REGION,
            }
        return catalog

    def offsets(self) -> pa.ChunkedArray:
        """Read the physical offsets of all rows."""
        if self.kind == "delta":
            from deltalake import DeltaTable

            table = DeltaTable(self.dest, storage_options=self.metadata())
            return table.to_pyarrow_table(columns=["physical_offset"]).column(0)
        from pyiceberg.catalog import load_catalog

        with load_catalog("logquarry", **self.metadata()) as catalog:
            (namespace,) = catalog.list_namespaces()
            names = [n for n in catalog.list_tables(namespace) if "dead" not in n[-1]]
            scan = catalog.load_table(names[0]).scan(selected_fields=("physical_offset",))
            return scan.to_arrow().column(0)


def processor_seconds() -> dict[int, float]:
    """Return the processor time of this process and of each process below it."""
    found = {}
    this = psutil.Process()
    for process in (this, *this.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        ended = times.children_user + times.children_system if process.pid != this.pid else 0
        found[process.pid] = times.user + times.system + ended
    return found


def measure(make: Any, store: Path, rounds: int, master: str) -> list[dict[str, Any]]:
    """Export into a new table in each round, and return the figures of each round."""
    from logquarry.spark import get_session

    size = log_bytes(store)
    spark = get_session(master=master)
    found = []
    for _ in range(rounds):
        table = make()
        before, start = processor_seconds(), time.perf_counter()
        done = table.export(spark, store, {})
        seconds, after = time.perf_counter() - start, processor_seconds()
        used = sum(value - before.get(pid, 0.0) for pid, value in after.items())
        found.append(
            {
                "messages": done.messages,
                "log_bytes": size,
                "table_bytes": done.bytes,
                "commits": done.commits,
                "seconds": seconds,
                "processor_seconds": used,
                "log_mb_per_second": size / 1e6 / seconds,
                "log_mb_per_processor_second": size / 1e6 / used,
            }
        )
    spark.stop()
    return found


def log_bytes(store: Path) -> int:
    """Return the bytes of log in the files, without the unused rest of the last file."""
    return sum(512 * file.stat().st_blocks for file in (store / "commitlog").iterdir())


# ------------------------------------------------------------------------------------------ kills
def export_once(table: Table, store: Path) -> None:
    """Export in small commits, and print a line after each commit.

    This function runs in the process that the benchmark kills.
    """
    from logquarry.spark import get_session

    limit = str(max(1 << 20, log_bytes(store) // _COMMITS))
    spark = get_session(master="local[2]")
    table.export(
        spark,
        store,
        {"maxBytesPerTrigger": limit},
        on_commit=lambda done: print(done.commits, flush=True),
    )


def kill_and_finish(table: Table, store: Path, kills: int, seed: int) -> dict[str, Any]:
    """Kill several exports, let one export finish, and count the rows of the table."""
    chance = random.Random(seed)
    command = [
        sys.executable, "-m", "benchmarks.bench_lakehouse", "--once", "--kind", table.kind,
        "--store", str(store), "--to", table.dest, "--catalog", str(table.catalog),
        *(["--s3", table.s3] if table.s3 else []),
    ]  # fmt: skip
    commits: list[int] = []
    for _ in range(kills):
        process = subprocess.Popen(
            command, start_new_session=True, stdout=subprocess.PIPE, text=True
        )
        wanted = chance.randint(1, 4)
        assert process.stdout is not None
        seen = len(list(itertools.islice(process.stdout, wanted)))
        time.sleep(chance.random())
        if seen < wanted or process.poll() is not None:
            raise SystemExit("the export ended before it was killed: give a larger store")
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        commits.append(wanted)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    offsets = table.offsets()
    return {
        "commits_before_each_kill": commits,
        "rows": len(offsets),
        "distinct_messages": pc.count_distinct(offsets).as_py(),
    }


def main(arguments: list[str] | None = None) -> None:
    """Print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--to", required=True, help="folder or s3:// URL that gets the tables")
    parser.add_argument("--kind", choices=("iceberg", "delta"), default="iceberg")
    parser.add_argument("--s3", help="HOST:PORT of an S3 server; access key test, secret testtest")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--master", default="local[2]")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--catalog", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.once:
        table = Table(kind=options.kind, dest=options.to, catalog=options.catalog, s3=options.s3)
        export_once(table, options.store)
        return
    catalogs = Path(os.environ.get("TMPDIR", "/tmp"), f"bench-lakehouse-{os.getpid()}")
    catalogs.mkdir()
    make = partial(new_table, options.kind, options.to, options.s3, catalogs)
    try:
        if options.kills:
            found: Any = kill_and_finish(make(), options.store, options.kills, options.seed)
        else:
            found = measure(make, options.store, options.rounds, options.master)
        json.dump(found, sys.stdout, indent=1)
        print()
    finally:
        shutil.rmtree(catalogs, ignore_errors=True)


def new_table(kind: str, to: str, s3: str | None, catalogs: Path) -> Table:
    """Choose a table that does not exist yet."""
    name = f"bench-{uuid.uuid4().hex[:12]}"
    return Table(kind=kind, dest=f"{to}/{name}", catalog=catalogs / f"{name}.db", s3=s3)


if __name__ == "__main__":
    main()
