"""``stats``: a store's numbers as text, JSON and Prometheus metrics."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.errors import StoreNotFound
from logquarry.log.filesystem import LocalFileSystem
from logquarry.store.message_store import StoreReader
from tests.helpers.command import run
from tests.helpers.small_store import facts, opened


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with opened(tmp_path / "store") as writer:
        for number in range(30):
            writer.put(lq.Message("orders" if number % 3 else "other", b"%d" % number * 40))
    return tmp_path / "store"


def test_as_a_document(store: Path) -> None:
    before = facts(store)
    document = json.loads(run("stats", store, "--json").stdout)
    assert facts(store) == before
    names = ["store", "broker", "state", "min_offset", "max_offset", "first_timestamp"]
    names += ["reserve_time_ms", "file_bytes", "commit_log_disk_ratio", "consume_queue_disk_ratio"]
    names += ["dispatch_behind", "flush_behind", "retained", "consumer_lag", "delay_levels"]
    names += ["half_messages", "unacknowledged_pops", "unreadable"]
    assert list(document) == names
    kept = document["retained"]
    assert kept["orders"]["messages"] == 20
    assert sum(topic["bytes"] for topic in kept.values()) == document["max_offset"]


def test_for_people(store: Path) -> None:
    (store / "config").mkdir(exist_ok=True)
    table = {"offsetTable": {"orders@ev\x1bil": {"0": 7}}}
    (store / "config" / "consumerOffset.json").write_text(json.dumps(table))
    result = run("stats", store)
    assert "shut down cleanly" in result.stdout
    assert "\x1b" not in result.stdout
    with opened(store):
        assert "a process holds its lock" in run("stats", store).stdout
    run("stats", store, "--json", "--prometheus", code=2)
    run("stats", store / "none", code=3)


def test_for_prometheus(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("prometheus_client")
    # The metrics leave out pops: finding them would need reads.
    monkeypatch.setattr("logquarry.read.pops.unacknowledged_pops", None)
    result = run("stats", store, "--prometheus")
    assert 'logquarry_retained_messages{node_id="store",topic="orders"} 20.0' in result.stdout


def test_metrics_of_a_disk_that_fails(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("prometheus_client")

    def fail(opened: StoreReader) -> object:
        raise StoreNotFound(f"{opened.root}/index: cannot be read: Input/output error")

    monkeypatch.setattr(StoreReader, "stats", fail)
    result = run("stats", store, "--prometheus", code=3)
    assert result.stdout == ""
    assert "index: cannot be read: Input/output error" in result.stderr


def test_unreadable_offsets_of_groups(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = LocalFileSystem.open
    (store / "config").mkdir(exist_ok=True)

    def fail(files: LocalFileSystem, path: str) -> object:
        if path.endswith("consumerOffset.json"):
            raise StoreNotFound(f"{files.full_path(path)}: cannot be read: Input/output error")
        return read(files, path)

    monkeypatch.setattr(LocalFileSystem, "open", fail)
    shown = run("stats", store).stderr
    assert f"warning: {store}/config/consumerOffset.json: cannot be read: Input/output" in shown


def test_metrics_of_names_that_are_not_utf_8(store: Path) -> None:
    pytest.importorskip("prometheus_client")
    queue = os.fsencode(store / "consumequeue" / "orders")
    os.rename(queue, os.path.dirname(queue) + b"/\xff")  # noqa: PTH104, PTH120 - bytes
    (store / "config").mkdir(exist_ok=True)
    (store / "config" / "consumerOffset.json").write_text(
        '{"offsetTable":{"other@\\ud800":{"0":1}}}'
    )
    shown = run("stats", store, "--prometheus").stdout
    assert 'topic="\\\\udcff"' in shown
    assert 'consumer_group="\\\\ud800"' in shown


@pytest.mark.parametrize("options", [[], ["--json"], ["--prometheus"]])
def test_the_offsets_of_groups_are_read_once(
    options: list[str], store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store can have a million of groups, whose offsets take seconds to read."""
    pytest.importorskip("prometheus_client")
    (store / "config").mkdir(exist_ok=True)
    table = ",".join(f'"orders@g{number}":{{0:{number}}}' for number in range(1_000))
    (store / "config" / "consumerOffset.json").write_text(f'{{"offsetTable":{{{table}}}}}')
    read = LocalFileSystem.open
    reads: list[str] = []

    def counted(files: LocalFileSystem, path: str) -> object:
        reads.append(path)
        return read(files, path)

    monkeypatch.setattr(LocalFileSystem, "open", counted)
    shown = run("stats", store, *options).stdout
    assert reads.count("config/consumerOffset.json") == 1
    assert shown.count("g999") == 1
    assert gc.isenabled()
    if not options:
        lags = [line.split() for line in shown.splitlines() if " orders " in line]
        assert ["g7", "orders", "13"] in lags
        assert [one[0] for one in lags] == sorted(f"g{number}" for number in range(1_000))
