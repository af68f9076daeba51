"""Measure logquarry beside RocketMQ, other embedded stores and this machine, as one table.

    python -m benchmarks.bench_table --rounds 3 --dir /data/bench

Each round runs ``logquarry bench`` and then ``oracle/bench`` with the same load, so slow moments of
the machine affect both programs. A cell contains the median of the rounds; the cell of ratios
contains the ratio of each round. RocketMQ's column stays empty without Java and Maven, and the
column of another store stays empty without its package (``lmdb``, ``rocksdict``).

In a virtual machine, the first use of a page of memory takes up to ten times as long as later uses,
because the host must first provide the page. With ``--prime SIZE``, each program writes and removes
a file of SIZE GiB just before its clock for puts starts.

The column of shares contains a rate divided by a limit of this machine. The program measures these
limits: memory copies, CRC-32 of memory, the first write of a new file's pages, and ``fdatasync`` of
4 KiB.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from logquarry.format.java import crc32

ORACLE = Path(__file__).parents[1] / "oracle" / "bench"
PEERS = ("lmdb", "rocksdict", "sqlite3")
_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the table.

    Attributes:
        name: name of the measured work.
        ours: arguments of ``logquarry bench``.
        rate: key of messages per second in the JSON of ``logquarry bench``.
        java: arguments of ``oracle/bench``; empty if RocketMQ has no such work.
        java_rate: key of messages per second in the JSON of ``oracle/bench``.
        target: wanted ratio to RocketMQ; 0 without a target.
        has_peers: whether other embedded stores do the same work.
        limit: name of the limit.
        per_sync: maximum number of messages that one sync makes durable, if the limit is
            ``fdatasync``.
    """

    name: str
    ours: Sequence[str]
    rate: str = "messages_per_s"
    java: Sequence[str] = ()
    java_rate: str = "messagesPerSecond"
    target: float = 0
    has_peers: bool = False
    limit: str = ""
    per_sync: int = 1


def rows(n: int, syncs: int) -> list[Row]:
    """Return the rows, with ``n`` messages, or ``syncs`` messages in rows with syncs."""
    size, few = ("--n", str(n)), ("--n", str(syncs))
    both = (*size, "--body", "256")
    return [
        Row(
            name="put, one message a call",
            ours=("put", *size),
            java=("put", *both),
            target=0.8,
            has_peers=True,
            limit="new pages",
        ),
        Row(
            name="put of a batch of 32",
            ours=("put-batch", *size),
            java=("batch", "--batch", "32", *both),
            target=2,
            has_peers=True,
            limit="new pages",
        ),
        Row(
            name="put_many of Arrow rows, until dispatched",
            ours=("put-many", *size),
            rate="messages_per_s_until_dispatched",
            java=("batch", "--batch", "32", *both),
            java_rate="messagesPerSecondDispatched",
            target=2,
            limit="new pages",
        ),
        Row(
            name="put_many of Message objects",
            ours=("put-many", "--as-messages", *size),
            java=("put", *both),
            target=1,
            limit="new pages",
        ),
        Row(
            name="put with SYNC_FLUSH, 64 futures; RocketMQ with 4 threads",
            ours=("put", "--flush", "sync", "--outstanding", "64", *few),
            java=("put", "--flush", "sync", "--threads", "4", *few, "--body", "256"),
            target=5,
            limit="fdatasync",
            per_sync=64,
        ),
        Row(
            name="get of 32, decoded",
            ours=("get", *size),
            java=("get", *both),
            java_rate="decodedMessagesPerSecond",
            target=1,
            limit="CRC-32",
        ),
        Row(
            name="get of 32, frames only",
            ours=("get", *size),
            rate="raw_messages_per_s",
            java=("get", *both),
            java_rate="rawMessagesPerSecond",
            target=0.8,
            limit="CRC-32",
        ),
    ]


# ------------------------------------------------------------------------------------------ limits
def limits(folder: Path) -> dict[str, float]:
    """Measure the machine: bytes per second, and syncs per second for ``fdatasync``."""
    data = np.random.default_rng(1).integers(0, 256, 256 * _MIB, np.uint8)
    copy = np.empty_like(data)

    def crc() -> float:
        crc32(data)
        return float(data.nbytes)

    def copied() -> float:
        copy[:] = data
        return float(data.nbytes)

    return {
        "memcpy": _best(copied),
        "CRC-32": _best(crc),
        "new pages": _best(lambda: _fill(folder, data)),
        "fdatasync": _best(lambda: _sync(folder)),
    }


def _best(work: Callable[[], float]) -> float:
    found = 0.0
    for _ in range(4):
        began = time.perf_counter()
        amount = work()
        found = max(found, amount / (time.perf_counter() - began))
    return found


def _fill(folder: Path, data: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> float:
    path = folder / "pages"
    with path.open("w+b") as file:
        os.posix_fallocate(file.fileno(), 0, data.nbytes)
        with mmap.mmap(file.fileno(), data.nbytes) as mapped:
            mapped[:] = data.data
    path.unlink()
    return float(data.nbytes)


def _sync(folder: Path, count: int = 200) -> float:
    path = folder / "synced"
    with path.open("w+b", buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, count * 4096)
        for _ in range(count):
            file.write(bytes(4096))
            os.fdatasync(file.fileno())
    path.unlink()
    return float(count)


# -------------------------------------------------------------------------------------------- runs
def run_ours(row: Row, folder: Path, peers: Sequence[str], primed: int) -> dict[str, float]:
    """Run ``logquarry bench``, and return its JSON."""
    beside = [word for name in peers for word in ("--beside", name)] if row.has_peers else []
    command = [sys.executable, "-m", "logquarry", "bench", *row.ours, *beside]
    return _json([*command, "--prime", str(primed), "--json", "-q", "--dir", str(folder / "ours")])


def run_java(row: Row, folder: Path, primed: int) -> dict[str, float]:
    """Run ``oracle/bench``, and return its JSON; empty if RocketMQ cannot run here."""
    if not row.java or not shutil.which("mvn") or not shutil.which("java"):
        return {}
    place = folder / "java"
    found = _json([str(ORACLE), *row.java, "--prime", str(primed), "--dir", str(place)])
    shutil.rmtree(place, ignore_errors=True)
    return found


def _json(command: Sequence[str]) -> dict[str, float]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()[-400:]}")
    text = done.stdout[done.stdout.index("{") :]
    found: dict[str, float] = json.loads(text)
    return found


def measure(row: Row, folder: Path, rounds: int, machine: Mapping[str, float], primed: int) -> str:
    """Run all rounds of a row, and return its line of the table."""
    peers = [name for name in PEERS if name == "sqlite3" or find_spec(name)]
    speeds, theirs, ratios, shares = [], [], [], []
    best: dict[str, list[float]] = {}
    for number in range(rounds):
        sys.stderr.write(f"{row.name}: round {number + 1} of {rounds}\n")
        ours = run_ours(row, folder, peers, primed)
        java = run_java(row, folder, primed)
        speed = ours[row.rate]
        speeds.append(speed)
        if java:
            theirs.append(java[row.java_rate])
            ratios.append(speed / java[row.java_rate])
        for name in peers if row.has_peers else ():
            best.setdefault(name, []).append(speed / ours[f"{name}_messages_per_s"])
        if row.limit == "fdatasync":
            shares.append(speed / row.per_sync / machine[row.limit])
        elif row.limit:
            bytes_each = ours["bytes_per_s"] / ours["messages_per_s"]
            shares.append(speed * bytes_each / machine[row.limit])
    target = f" ({row.target:g})" if row.target else ""
    peer = min(best.items(), key=lambda item: statistics.median(item[1]), default=None)
    cells = [
        row.name,
        f"{_count(statistics.median(speeds))}/s",
        f"{_count(statistics.median(theirs))}/s" if theirs else "",
        f"{_all(ratios)}{target}" if ratios else "",
        f"{peer[0]}: {_all(peer[1])}" if peer else "",
        f"{row.limit}: {statistics.median(shares):.0%}" if shares else "",
        f"`logquarry bench {' '.join(row.ours)}`",
    ]
    return f"| {' | '.join(cells)} |"


def _count(value: float) -> str:
    return f"{value / 1e6:.2f} M" if value >= 1e5 else f"{value:,.0f}"


def _all(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


def main(arguments: list[str] | None = None) -> None:
    """Print the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--n", type=int, default=1_000_000, help="messages of a row")
    parser.add_argument("--syncs", type=int, default=200_000, help="messages of a row with syncs")
    parser.add_argument("--prime", type=int, default=0, metavar="SIZE", help="GiB; default: 0")
    parser.add_argument("--dir", type=Path, default=Path("bench-table"), help="an empty folder")
    options = parser.parse_args(arguments)
    options.dir.mkdir(parents=True, exist_ok=True)
    machine = limits(options.dir)
    print(f"Date: {date.today()}. Machine: {os.cpu_count()} cores, {platform.platform()}, ", end="")
    print(f"CPython {platform.python_version()}. Limits: ", end="")
    sizes = [f"{name} {machine[name] / 1e9:.1f} GB/s" for name in ("memcpy", "CRC-32", "new pages")]
    print(f"{', '.join(sizes)}, {machine['fdatasync']:,.0f} fdatasync/s.\n")
    print(
        "| work | logquarry | RocketMQ 4.9.3 | ratio of each round (target) "
        "| ratio to the fastest Python peer | share of a limit | command |"
    )
    print("|---|---|---|---|---|---|---|")
    for row in rows(options.n, options.syncs):
        print(measure(row, options.dir, options.rounds, machine, options.prime), flush=True)
    shutil.rmtree(options.dir, ignore_errors=True)


if __name__ == "__main__":
    main()
