"""``bench``: each kind measures, and ``scan`` makes its store only once."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.bench import scan
from logquarry.bench import store as bench_store
from tests.helpers.command import run
from tests.helpers.small_store import SMALL


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the benchmarks make small files: those of production size take a second in each pass."""
    for module in (scan, bench_store):
        monkeypatch.setattr(module, "StoreConfig", partial(lq.StoreConfig, **SMALL))


def test_bench_scan(tmp_path: Path, small_files: None) -> None:
    store = tmp_path / "bench"
    options = ["--dir", store, "--n", 2_000, "--body", "10-20", "--topics", 2, "--rounds", 1]
    found = json.loads(run("bench", "scan", *options, "--json").stdout)
    assert list(found) == ["walk", "walk_crc", "fixed_to_arrow", "all_to_arrow"]
    for timing in found.values():
        assert timing["n"] == 2_000
        assert timing["messages_per_s"] > 0 and timing["bytes_per_s"] > 0 < timing["seconds"]
    made = sorted((path, path.stat().st_mtime_ns) for path in store.rglob("*"))
    assert "all_to_arrow" in run("bench", "scan", *options, "--warmup", 0).stdout
    assert sorted((path, path.stat().st_mtime_ns) for path in store.rglob("*")) == made
    assert [path.name for path in tmp_path.iterdir()] == ["bench"]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("put", []),
        ("put", ["--threads", 2, "--outstanding", 4, "--flush", "sync"]),
        ("put-batch", ["--keys", 2]),
        ("put-many", ["--batch", 50]),
        ("put-many", ["--batch", 50, "--as-messages", "--keys", 0]),
        ("get", ["--batch", 100]),
        ("consume", ["--batch", 100]),
    ],
)
def test_bench_of_a_store(
    tmp_path: Path, kind: str, options: list[object], small_files: None
) -> None:
    shared = ["--dir", tmp_path, "--n", 200, "--body", 20, "--warmup", 64]
    found = json.loads(run("bench", kind, *shared, *options, "--json").stdout)
    assert found["bench"] == kind and found["n"] in (192, 200)
    assert found["messages_per_s"] > 0 and found["bytes_per_s"] > 0 < found["seconds"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("kind", "modes"), [("recover", 2), ("rebuild", 1)])
def test_bench_of_a_recovery(tmp_path: Path, kind: str, modes: int, small_files: None) -> None:
    shared = ["--dir", tmp_path, "--n", 200, "--body", 20]
    found = json.loads(run("bench", kind, *shared, "--json").stdout)
    assert found["bench"] == kind and found["recovery"] == "safe" and found["n"] == 200
    seconds = [value for name, value in found.items() if name.endswith("_seconds")]
    assert len(seconds) == modes and all(len(passes) == 3 for passes in seconds)
    assert not list(tmp_path.iterdir())
    assert "messages per s" in run("bench", kind, *shared).stdout


def test_bench_for_people(tmp_path: Path) -> None:
    # With files of production size, unlike the other tests.
    shown = run("bench", "put", "--dir", tmp_path, "--n", 10, "--warmup", 0).stdout
    assert "seconds until dispatched" in shown


@pytest.mark.parametrize("kind", ["put", "put-batch"])
def test_bench_beside_another_store(tmp_path: Path, kind: str, small_files: None) -> None:
    options = ["--dir", tmp_path, "--n", 50, "--warmup", 10, "--beside", "sqlite3"]
    found = json.loads(run("bench", kind, *options, "--json").stdout)
    assert found["ratio_to_sqlite3"] == pytest.approx(
        found["messages_per_s"] / found["sqlite3_messages_per_s"]
    )
    assert not list(tmp_path.iterdir())
    assert "--threads 1" in run("bench", kind, *options, "--threads", 2, code=2).stderr


@pytest.mark.parametrize(
    "body",
    [
        "4194304",
        "2-1",
        "x",
        pytest.param("1" * 5_000, id="long"),
        pytest.param(f"1-{'1' * 5_000}", id="long end"),
    ],
)
def test_body_sizes_that_bench_refuses(body: str, tmp_path: Path) -> None:
    run("bench", "put", "--dir", tmp_path / "p", "--body", body, code=2)
    result = run("bench", "scan", "--dir", tmp_path / "s", "--body", body, code=2)
    assert "--body takes bytes below 4 MiB" in result.stderr


@pytest.mark.parametrize(
    "options",
    [
        ["put-batch", "--body", 4_194_303],
        ["put-many", "--body", 4_194_303],
        ["get", "--body", 100_000],
        ["put", "--topics", 10_001],
        ["scan", "--topics", 1 << 40],
        ["recover", "--queues", 1_001],
    ],
    ids=str,
)
def test_loads_that_bench_refuses(options: list[object], tmp_path: Path) -> None:
    flag = options[1]
    error = run("bench", *options, "--dir", tmp_path / "s", "--n", 3, code=2).stderr
    assert str(flag) in error
    assert not list(tmp_path.iterdir())


def test_bench_of_large_bodies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = SMALL | {"mapped_file_size_commit_log": 1 << 22}
    for module in (scan, bench_store):
        monkeypatch.setattr(module, "StoreConfig", partial(lq.StoreConfig, **sizes))
    options = ["--dir", tmp_path, "--n", 3, "--body", 1 << 20, "--json"]
    assert json.loads(run("bench", "recover", *options).stdout)["n"] == 3
