"""An export that follows a growing store is killed repeatedly."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import logquarry as lq
from tests.helpers.lake import KINDS, Lake

pytest.importorskip("deltalake")
pytest.importorskip("pyiceberg")

ROOT = Path(__file__).parents[3]

WRITER = """
import sys, time
import logquarry as lq
store, count, pause = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
config = lq.StoreConfig(mapped_file_size_commit_log=1 << 16, mapped_file_size_consume_queue=20_000)
with lq.MessageStore.open(store, config=config, mode="rw") as opened:
    for number in range(count):
        body = b'{"n": %d}' % number if number % 7 else b"dead %d" % number
        assert opened.put(lq.Message(topic=f"topic{number % 3}", body=body, queue_id=0)).ok
        if number % 50 == 49:
            time.sleep(pause)
"""

FOLLOWER = """
import sys
from pathlib import Path
from logquarry.spark.decode import parse_decode_options
from tests.helpers.lake import Lake
kind, dest, store, follow = sys.argv[1:]
Lake(kind, Path(dest)).export(
    Path(store),
    {"maxBytesPerTrigger": "20k", "splitSize": "8k"},
    follow=follow == "follow",
    interval=0.01,
    partition_by=["topic"],
    decode=parse_decode_options("json", "n bigint"),
)
"""


def started(code: str, *arguments: Any) -> subprocess.Popen[bytes]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": path},
        stderr=subprocess.PIPE,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("kills", "count", "pause"),
    [(2, 1_000, 0.1), pytest.param(20, 20_000, 0.15, marks=pytest.mark.slow)],
)
def test_each_message_once(kind: str, kills: int, count: int, pause: float, tmp_path: Path) -> None:
    store, lake = tmp_path / "store", Lake(kind, tmp_path / "table")
    writer = started(WRITER, store, count, pause)
    chance = random.Random(f"{kind} {kills}")
    try:
        while not list(store.glob("commitlog/*")):
            assert writer.poll() is None
            time.sleep(0.05)
        for _ in range(kills):
            follower = started(FOLLOWER, kind, lake.dest, store, "follow")
            before = commits(lake)
            deadline = time.monotonic() + 60
            # At least one commit later: a kill before the first commit would prove nothing.
            while commits(lake) == before and writer.poll() is None:
                assert time.monotonic() < deadline
                assert follower.poll() is None, follower.communicate()[1].decode()
                time.sleep(0.02)
            time.sleep(chance.uniform(0, 0.3))
            follower.send_signal(signal.SIGKILL)
            follower.communicate()
        assert writer.wait(200) == 0
    finally:
        writer.kill()
        writer.communicate()
    last = started(FOLLOWER, kind, lake.dest, store, "to the end")
    assert (last.communicate()[1], last.returncode) == (b"", 0)
    with lq.MessageStore.open(store, mode="r") as opened:
        expected = [(m.physical_offset, m.topic, m.body) for m in opened.scan()]
    assert len(expected) == count
    names = ("physical_offset", "topic", "body")
    check(lake.rows(*names), [row for row in expected if row[2].startswith(b"{")])
    check(lake.rows(*names, dead=True), [row for row in expected if row[2].startswith(b"d")])
    assert lake.known_files() == lake.parquet_files()


def commits(lake: Lake) -> int:
    """Return a number that grows with each commit."""
    logs = lake.dest.glob("_delta_log/*.json" if lake.kind == "delta" else "*/metadata/snap-*")
    return len(list(logs))


def check(found: Sequence[Any], expected: Sequence[Any]) -> None:
    assert len(found) == len(expected)
    assert found == expected
