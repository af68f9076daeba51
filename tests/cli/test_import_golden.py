"""Every sound golden store: export, import into an empty store, export again, compare."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conformance.golden_facts import SOUND
from tests.helpers.command import run
from tests.helpers.exports import export_parquet, exported_lines, kept

STORES = (
    *SOUND,
    "clean-restart/prepad",
    "v3-transactions",
    "v3-transactions-odd",
    "v3-delay-unloaded",
    "v3-blank/rollover",
    "v3-blank/reopened",
    "v3-blank/max-message-size",
    "v3-blank/larger-than-file",
)
STARTS_LATE = ("clean-restart/retention", "clean-restart/prepad")
"""The first messages of these queues were deleted; in a new store the queues start at 0."""


@pytest.mark.parametrize("scenario", STORES)
def test_what_comes_back_is_what_was_there(scenario: str, golden: Path, tmp_path: Path) -> None:
    folder = golden / scenario
    store, settings = folder / "store", folder / "params.json"
    before = exported_lines(store, tmp_path / "before.jsonl")
    assert before
    parquet = export_parquet(store, tmp_path / "parquet")
    for source in (tmp_path / "before.jsonl", parquet):
        for keep_times in (False, True):
            target = tmp_path / f"{source.name}-{keep_times}"
            options = ["--keep-times"] if keep_times else []
            result = run("import", source, target, "--config", settings, *options)
            assert f"put {len(before):,} message" in result.stderr
            assert "raised to the store time" not in result.stderr
            after = exported_lines(target, tmp_path / "after.jsonl")
            assert kept(after, keep_times=keep_times) == kept(before, keep_times=keep_times)
            if scenario not in STARTS_LATE:
                assert [m["queue_offset"] for m in after] == [m["queue_offset"] for m in before]
            checked = json.loads(run("verify", target, "--config", settings, "--json").stdout)
            assert checked["findings"] == []
