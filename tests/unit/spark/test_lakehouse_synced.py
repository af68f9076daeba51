"""After an export or a compaction, a power cut loses no file of the table."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from logquarry.spark.compaction import compact
from logquarry.spark.lakehouse.table import TableFile
from logquarry.spark.lakehouse.write import Run
from tests.helpers.lake import KINDS, Lake, numbers, put

pytest.importorskip("deltalake")
pytest.importorskip("pyiceberg")


class Synced:
    """Records the size of each synced file, and the names in each synced folder, by inode."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._found: dict[int, int | set[str]] = {}
        self._real = os.fsync
        patch.setattr(os, "fsync", self)

    def __call__(self, number: int) -> None:
        self._real(number)
        found = os.fstat(number)
        place = Path(f"/proc/self/fd/{number}").readlink()
        self._found[found.st_ino] = _now(place)

    def missing(self, folder: Path) -> list[Path]:
        """Return the files and folders that have changed since their last sync."""
        # SQLite syncs its own file, but not by a call of Python.
        places = [folder, *(place for place in folder.rglob("*") if place.name != "catalog.db")]
        return [place for place in places if self._found.get(place.stat().st_ino) != _now(place)]


def _now(place: Path) -> int | set[str]:
    return {one.name for one in place.iterdir()} if place.is_dir() else place.stat().st_size


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs the folder /proc")
@pytest.mark.parametrize("kind", KINDS)
def test_every_file_of_a_table_is_synced(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, lake = tmp_path / "store", Lake(kind, tmp_path / "table")
    put(store, *numbers(0, 40))
    synced = Synced(monkeypatch)
    assert lake.export(store, {"maxBytesPerTrigger": "2k"}, partition_by=["topic"]).commits > 1
    # After its last commit, an export removes its note. Without this removal, the next export finds
    # that the commit has succeeded, and removes the note.
    notes = lake.dest / "_logquarry"
    assert set(synced.missing(lake.dest)) <= {notes}
    assert compact(lake.dest).files_after == 1
    assert set(synced.missing(lake.dest)) <= {notes}


def test_the_catalog_keeps_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyiceberg.table import Transaction

    store, lake = tmp_path / "store", Lake("iceberg", tmp_path / "table")
    put(store, *numbers(0, 4))
    events: list[str] = []
    sync, commit, done = os.fsync, Transaction.commit_transaction, Run.commit_done

    def synced(number: int) -> None:
        sync(number)
        if os.fstat(number).st_ino == lake.dest.stat().st_ino:
            events.append("sync")

    def committed(change: Transaction) -> Any:
        events.append("commit")
        return commit(change)

    def ended(run: Run, *committed: Sequence[TableFile]) -> None:
        events.append("end")
        done(run, *committed)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Transaction, "commit_transaction", committed)
    monkeypatch.setattr(Run, "commit_done", ended)
    lake.export(store)
    # Without a sync of the folder after the commit, a power cut could restore SQLite's journal,
    # and the journal would undo the commit. The last commit writes one metadata file.
    assert events[-4:] == ["commit", "sync", "sync", "end"]


def test_an_export_syncs_no_commit_before_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deltalake import DeltaTable

    store, lake = tmp_path / "store", Lake("delta", tmp_path / "table")
    for number in range(3):
        put(store, *numbers(number, number + 1))
        lake.export(store)
    log = lake.dest / "_delta_log"
    DeltaTable(lake.dest).create_checkpoint()
    put(store, *numbers(3, 4))
    lake.export(store)
    before = {path.name for path in log.glob("*.json")}
    put(store, *numbers(4, 5))
    synced = Synced(monkeypatch)
    lake.export(store)
    # The commits have the versions 0 to 5. Readers need version 3 of the checkpoint, and what
    # follows; a crashed export may not have synced version 4.
    missing = {path.name for path in synced.missing(log)}
    assert missing == {f"{version:020}.json" for version in range(3)} < before
