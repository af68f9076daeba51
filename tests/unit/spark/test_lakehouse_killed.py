"""Exports that end at any step: crashes, interrupts, kills. The next one adds each message once."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import logquarry as lq
from logquarry.spark.decode import parse_decode_options
from logquarry.spark.lakehouse import write
from logquarry.spark.lakehouse.advance import Work
from logquarry.spark.lakehouse.delta import Delta
from logquarry.spark.lakehouse.iceberg import Iceberg
from logquarry.spark.lakehouse.write import TableResult
from logquarry.spark.output import OutputFolder
from logquarry.spark.tasks import ReadTask
from tests.helpers.lake import KINDS, Lake, numbers, put, run_here

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
from tests.helpers.lake import Lake, numbers, put
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


# ------------------------------------------------------------------------------- ends at a step
class Power(BaseException):
    """The process is gone: no cleanup runs."""


STEPS: list[tuple[type[Any], str]] = [
    (OutputFolder, "create"),
    (OutputFolder, "make"),
    (OutputFolder, "move"),
    (OutputFolder, "remove"),
    (OutputFolder, "open"),
    (Delta, "create"),
    (Delta, "append"),
    (Iceberg, "create"),
    (Iceberg, "append"),
]


def counted(
    monkeypatch: pytest.MonkeyPatch, crash_at: int | None, *, behind: bool
) -> Callable[[], int]:
    """Count the calls that change something; crash before or after one of them."""
    calls = 0

    def wrapped(plain: Any) -> Any:
        def call(*arguments: Any, **names: Any) -> Any:
            nonlocal calls
            calls += 1
            if crash_at is not None and calls > crash_at:
                raise Power
            if calls == crash_at and not behind:
                raise Power
            found = plain(*arguments, **names)
            if calls == crash_at:
                raise Power
            return found

        return call

    for owner, name in STEPS:
        monkeypatch.setattr(owner, name, wrapped(getattr(owner, name)))
    return lambda: calls


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize(
    ("kind", "stride"),
    [("delta", 1), ("iceberg", 5), pytest.param("iceberg", 1, marks=pytest.mark.slow)],
)
def test_a_crash_at_each_step(
    kind: str, stride: int, behind: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    good, bad = b'{"n": 1}', b"no JSON"
    put(store, good, bad, good, good)
    more: dict[str, Any] = {"decode": parse_decode_options("json", "n bigint")}
    options = {"maxOffsetsPerTrigger": "2", "splitSize": "1k"}
    with monkeypatch.context() as patch:
        total = counted(patch, None, behind=behind)
        Lake(kind, tmp_path / "whole").export(store, options, **more)
        steps = total()
    expected = Lake(kind, tmp_path / "whole").rows("physical_offset")
    dead = Lake(kind, tmp_path / "whole").rows("physical_offset", "reason", dead=True)
    assert (len(expected), len(dead), steps > 10) == (3, 1, True)
    for step in range(1, steps + 1, stride):
        lake = Lake(kind, tmp_path / f"crash-{step}")
        with monkeypatch.context() as patch:
            counted(patch, step, behind=behind)
            with pytest.raises(Power):
                lake.export(store, options, **more)
        lake.export(store, {"splitSize": "1k"}, **more)
        assert lake.rows("physical_offset") == expected, step
        assert lake.rows("physical_offset", "reason", dead=True) == dead, step
        assert lake.known_files() == lake.parquet_files(), step
        assert not list((lake.dest / write.CONTROL).iterdir()), step


def test_files_of_a_killed_worker_go(lake: Lake, tmp_path: Path) -> None:
    """Spark repeats the task of the killed worker, and the commit has only the later files."""
    store = tmp_path / "store"
    put(store, b'{"n": 1}', b"no JSON", topic="a")
    put(store, b'{"n": 2}', topic="b")
    more: dict[str, Any] = {"decode": parse_decode_options("json", "n bigint")}

    def repeated(tasks: Sequence[ReadTask], work: Work) -> list[TableResult]:
        killed = run_here(tasks, work)
        assert sum(len(result.files) + len(result.dead) for result in killed) == 3
        return run_here(tasks, work)

    lake.prepared(store, partition_by=["topic"], **more).run_with(repeated)
    assert lake.known_files() == lake.parquet_files()
    assert len(lake.known_files()) == 3


def test_an_interrupt_leaves_the_table_as_it_was(lake: Lake, tmp_path: Path) -> None:
    put(tmp_path / "store", *numbers(0, 4))
    lake.export(tmp_path / "store")
    put(tmp_path / "store", *numbers(4, 6))

    def interrupted(tasks: Any, work: Any) -> Any:
        run_here(tasks, work)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lake.prepared(tmp_path / "store").run_with(interrupted)
    assert lake.known_files() == lake.parquet_files()
    assert lake.bodies() == numbers(0, 4)


def test_a_note_that_a_power_cut_emptied(lake: Lake, tmp_path: Path) -> None:
    put(tmp_path / "store", b"a")
    lake.export(tmp_path / "store")
    note = lake.dest / write.CONTROL / "0123456789ab.json"
    note.touch()
    put(tmp_path / "store", b"b")
    lake.export(tmp_path / "store")
    assert (lake.bodies(), note.exists()) == ([b"a", b"b"], False)


def test_a_note_without_the_name_of_a_table_stays(
    lake: Lake, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Versions before the first release wrote such notes."""
    put(tmp_path / "store", b"a")
    lake.export(tmp_path / "store")
    note = lake.dest / write.CONTROL / "0123456789ab.json"
    note.write_text(json.dumps({"marks": {}}))
    put(tmp_path / "store", b"b")
    lake.export(tmp_path / "store")
    assert (lake.bodies(), note.exists()) == ([b"a", b"b"], True)
    (message,) = (one for one in caplog.messages if "without the name of a table" in one)
    assert message.startswith(f"{note}: ")


def test_files_are_on_the_disk_before_a_table_names_them(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    plain = OutputFolder.sync

    def sync(self: OutputFolder, path: str) -> None:
        plain(self, path)
        synced.append(path)

    monkeypatch.setattr(OutputFolder, "sync", sync)
    put(tmp_path / "store", b"a")
    lake.export(tmp_path / "store")
    files = {Path(path).name for path in synced if path.endswith(".parquet")}
    assert {Path(path).name for path in lake.known_files()} == files
