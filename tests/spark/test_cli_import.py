"""Imports of what Spark exported: the manifest's files, also partitioned or of single queues."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.command import jsonl, run
from tests.helpers.exports import kept

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("spark")]


@pytest.mark.parametrize("scenario", ["real-broker", "ipv6", "sysflags", "v3-transactions"])
def test_there_and_back(scenario: str, golden: Path, tmp_path: Path) -> None:
    folder = golden / scenario
    run("export", folder / "store", "--to", tmp_path / "out")
    for keep_times in (False, True):
        target = tmp_path / f"store-{keep_times}"
        options = ["--keep-times"] if keep_times else []
        run("import", tmp_path / "out", target, "--config", folder / "params.json", *options)
        before, after = jsonl(folder / "store"), jsonl(target)
        assert kept(after, keep_times=keep_times) == kept(before, keep_times=keep_times)
        assert [m["queue_offset"] for m in after] == [m["queue_offset"] for m in before]


@pytest.mark.parametrize(
    "options",
    [
        ["--partition-by", "topic,queue_id"],
        ["--partition-by", "topic,day"],
        ["--topic", "MainTopic,OrderTopic"],
    ],
)
def test_queues_keep_their_order(options: list[str], golden: Path, tmp_path: Path) -> None:
    store = golden / "real-broker" / "store"
    run("export", store, "--to", tmp_path / "out", *options)
    settings = store.parent / "params.json"
    run("import", tmp_path / "out", tmp_path / "new", "--config", settings)
    wanted = options if options[0] == "--topic" else []

    def by_queue(path: Path) -> list[dict[str, object]]:
        found = kept(jsonl(path, *wanted), keep_times=False)
        return sorted(found, key=lambda m: (m["topic"], m["queue_id"], m["queue_offset"]))

    assert by_queue(tmp_path / "new") == by_queue(store)
