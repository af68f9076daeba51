"""Compactions that are interrupted, that find damage, or that run beside another writer."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from logquarry.errors import CorruptFile, StoreNotFound, StoreUnavailable, UsageError
from logquarry.spark.compaction import compact, compact_folder
from logquarry.spark.export import MergeTask, Source, merge
from logquarry.spark.output import INTENT, MANIFEST, SUCCESS, OutputFolder
from tests.unit.spark.test_commit import Crash, CrashingFolder, FullDisk
from tests.unit.spark.test_compaction import (
    PLACE,
    export,
    make_store,
    merge_here,
    odd_strings,
    rows,
)


def all_bodies(dest: Path) -> list[bytes]:
    return sorted(row["body"] for row in rows(dest, "body"))


@pytest.mark.parametrize("then", ["compact", "export"])
def test_a_compaction_that_dies_anywhere_loses_nothing(tmp_path: Path, then: str) -> None:
    store, dest = make_store(tmp_path / "store", 0, 60), tmp_path / "out"
    wanted = sorted(f"body {number}".encode() for number in range(60))
    steps = 0
    while True:
        export(dest, store, partition_by=["topic"])
        folder = CrashingFolder(dest, steps)
        try:
            compact_folder(folder, 1 << 30, merge_in(OutputFolder(dest)))
            break
        except Crash:
            steps += 1
        ended = (dest / SUCCESS).exists()
        if ended:
            assert all_bodies(dest) == wanted
        if then == "compact":
            compact(dest)
        else:
            export(dest, store)
        assert all_bodies(dest) == wanted
        assert {p.name for p in dest.iterdir() if p.is_file() and p.suffix != ".parquet"} == {
            MANIFEST, SUCCESS,
        }  # fmt: skip
        names = {e["path"] for e in json.loads((dest / MANIFEST).read_text())["files"]}
        assert {str(p.relative_to(dest)) for p in dest.rglob("*.parquet")} == names
    assert steps > 10


def test_a_full_disk_at_every_step_of_the_commit(tmp_path: Path) -> None:
    """The error says what stays, and the next compaction removes it."""
    store, dest = make_store(tmp_path / "store", 0, 60), tmp_path / "out"
    wanted = sorted(f"body {number}".encode() for number in range(60))
    export(dest, store, partition_by=["topic"])
    steps, was_explained = 0, False
    while True:
        folder = FullDisk(dest, steps)
        try:
            compact_folder(folder, 1 << 30, merge_in(OutputFolder(dest)))
        except OSError as error:
            steps += 1
            assert error.errno == errno.ENOSPC
            staged = {path.name for path in dest.glob("_temporary-*")}
            if not (dest / INTENT).exists():
                assert not staged
                continue
            was_explained = True
            assert "No space left on device. Run the compaction again" in str(error)
            assert all(name in str(error) for name in staged)
            compact(dest)
            export(dest, store, partition_by=["topic"])
        else:
            break
    assert was_explained
    assert all_bodies(dest) == wanted
    assert not list(dest.glob("_temporary-*"))
    assert not (dest / INTENT).exists()


@pytest.mark.parametrize("fails", ["read_row_group", "write_table"])
def test_an_error_of_the_disk_names_the_file(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrow's errors do not name the file."""
    store, dest = make_store(tmp_path / "store", 0, 60), tmp_path / "out"
    export(dest, store)
    before = all_bodies(dest)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    owner = pq.ParquetFile if fails == "read_row_group" else pq.ParquetWriter
    monkeypatch.setattr(owner, fails, fail)
    what = "read" if fails == "read_row_group" else "written"
    with pytest.raises(StoreUnavailable, match=rf"^{dest}/.*\.parquet: cannot be {what}: Input/"):
        compact(dest)
    monkeypatch.undo()
    assert not list(dest.glob("_temporary-*"))
    assert all_bodies(dest) == before


def merge_in(folder: OutputFolder) -> Callable[[Sequence[MergeTask]], Any]:
    """Worker processes: their steps are not counted."""
    return lambda tasks: merge_here([replace(task, folder=folder) for task in tasks])


def test_an_export_that_did_not_end_comes_first(tmp_path: Path) -> None:
    dest = tmp_path / "out"
    export(dest, make_store(tmp_path / "store", 0, 60))
    (dest / INTENT).write_text(json.dumps({"written_by": "logquarry", "files": []}))
    with pytest.raises(StoreUnavailable, match="an export was interrupted"):
        compact(dest)


def test_an_intent_that_somebody_else_wrote_removes_nothing(tmp_path: Path) -> None:
    dest = tmp_path / "out"
    export(dest, make_store(tmp_path / "store", 0, 60))
    before = all_bodies(dest)
    document = json.loads((dest / MANIFEST).read_text())
    for harm in (
        {"removed": ["../store/commitlog/00000000000000000000"]},
        {"moves": [["_temporary-0/../../x", "a.parquet"]]},
        {"moves": [["_temporary-0/x.parquet", "/etc/x.parquet"]]},
        {"moves": [["_temporary-0/x", "x.parquet"]]},
        {"staging": "a"},
        {"manifest": 3},
        {"moves": [3]},
    ):
        told = {"staging": "_temporary-0", "moves": [], "removed": [], "manifest": document, **harm}
        intent = {"written_by": "logquarry", "files": [], "compaction": told}
        (dest / INTENT).write_text(json.dumps(intent))
        with pytest.raises(UsageError):
            compact(dest)
        (dest / INTENT).unlink()
    assert all_bodies(dest) == before


@pytest.mark.parametrize("moves", [[], [["_temporary-0/notes.parquet", "a.parquet"]]])
def test_an_intent_with_a_link_to_elsewhere(tmp_path: Path, moves: list[list[str]]) -> None:
    dest, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    export(dest, make_store(tmp_path / "store", 0, 60))
    elsewhere.mkdir()
    for name in ("notes.parquet", MANIFEST):
        (elsewhere / name).write_text("kept")
    (dest / "_temporary-0").symlink_to(elsewhere)
    document = json.loads((dest / MANIFEST).read_text())
    told = {"staging": "_temporary-0", "moves": moves, "removed": [], "manifest": document}
    intent = {"written_by": "logquarry", "files": [], "compaction": told}
    (dest / INTENT).write_text(json.dumps(intent))
    with pytest.raises(UsageError, match="a symbolic link leads out of"):
        compact(dest)
    assert {path.read_text() for path in elsewhere.iterdir()} == {"kept"}


@pytest.mark.parametrize(
    "harm",
    [
        lambda files: files.append(files[0]),
        lambda files: files[1].pop("last_offset"),
        lambda files: files[1].update(bytes=-1),
        lambda files: files[1].update(rows="some"),
    ],
)
def test_a_manifest_that_cannot_be(tmp_path: Path, harm: Callable[[Any], Any]) -> None:
    dest = tmp_path / "out"
    export(dest, make_store(tmp_path / "store", 0, 60))
    document = json.loads((dest / MANIFEST).read_text())
    harm(document["files"])
    (dest / MANIFEST).write_text(json.dumps(document))
    before = {path.name: path.read_bytes() for path in dest.iterdir()}
    with pytest.raises(UsageError, match="is not a manifest of an export"):
        compact(dest)
    assert {path.name: path.read_bytes() for path in dest.iterdir()} == before


@pytest.mark.parametrize("harm", ["gone", "empty", "short", "rotten"])
def test_a_source_that_cannot_be_read(tmp_path: Path, harm: str) -> None:
    dest = tmp_path / "out"
    export(dest, make_store(tmp_path / "store", 0, 60))
    path = sorted(dest.glob("*.parquet"))[1]
    data = path.read_bytes()
    if harm == "gone":
        path.unlink()
    else:
        rotten = data[:30] + b"\xff" * 370 + data[400:]
        path.write_bytes({"empty": b"", "short": data[:-20], "rotten": rotten}[harm])
    before = sorted(p.name for p in dest.iterdir())
    with pytest.raises(CorruptFile, match=path.name):
        compact(dest)
    assert sorted(p.name for p in dest.iterdir()) == before


def test_a_file_of_somebody_else_is_not_written_over(tmp_path: Path) -> None:
    dest = tmp_path / "out"
    export(dest, make_store(tmp_path / "store", 0, 60))
    files = json.loads((dest / MANIFEST).read_text())["files"]
    stem = files[0]["path"].removesuffix(".parquet")
    foreign = dest / f"{stem}.to.{files[-1]['last_offset']:020d}.parquet"
    foreign.write_bytes(b"somebody else's")
    before = sorted(p.name for p in dest.iterdir())
    with pytest.raises(UsageError, match="no export wrote the existing file"):
        compact(dest)
    assert foreign.read_bytes() == b"somebody else's"
    assert sorted(p.name for p in dest.iterdir()) == before


def test_two_at_once_where_there_are_no_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OutputFolder, "lock", lambda _: None)
    dest = tmp_path / "out"
    folder = export(dest, make_store(tmp_path / "store", 0, 60))
    before = all_bodies(dest)

    def meanwhile(tasks: Sequence[MergeTask]) -> Any:
        # The other compaction also removes what this one staged: it takes it for the rest of a
        # crash.
        found = merge_here(tasks)
        assert compact(dest).files_after == 1
        return found

    with pytest.raises(StoreUnavailable, match="changed the export meanwhile"):
        compact_folder(folder, 1 << 30, meanwhile)
    assert all_bodies(dest) == before
    assert compact(dest).files_before == 0


def test_attempts_of_a_merge_have_files_of_their_own(tmp_path: Path) -> None:
    dest = tmp_path / "out"
    folder = export(dest, make_store(tmp_path / "store", 0, 60))
    before = rows(dest, *PLACE)

    def twice(tasks: Sequence[MergeTask]) -> Any:
        found = merge_here(tasks)
        # One that started at the same time was killed while it removed the first one's files.
        for late in merge_here(tasks):
            for file in late:
                (dest / file.path).write_bytes(b"half a file")
        return found

    assert compact_folder(folder, 1 << 30, twice).files_after == 1
    assert rows(dest, *PLACE) == before
    assert not list(dest.glob("_temporary-*"))


def test_a_new_file_that_is_gone(tmp_path: Path) -> None:
    dest = tmp_path / "out"
    export(dest, make_store(tmp_path / "store", 0, 60))
    before = sorted(p.name for p in dest.iterdir())
    document = json.loads((dest / MANIFEST).read_text())
    told = {
        "staging": "_temporary-0",
        "moves": [["_temporary-0/a.parquet", "a.parquet"]],
        "removed": [file["path"] for file in document["files"]],
        "manifest": document,
    }
    intent = {"written_by": "logquarry", "files": [], "compaction": told}
    (dest / INTENT).write_text(json.dumps(intent))
    with pytest.raises(CorruptFile, match="the file is missing, also at _temporary-0"):
        compact(dest)
    assert sorted(p.name for p in dest.iterdir()) == sorted([*before, INTENT])


def test_a_source_that_is_not_what_was_written(tmp_path: Path) -> None:
    dest = tmp_path / "out"
    export(dest, make_store(tmp_path / "store", 0, 60))
    path = sorted(dest.glob("*.parquet"))[1]
    table = pq.read_table(path)
    pq.write_table(table.slice(1), path)
    before = sorted(p.name for p in dest.iterdir())
    with pytest.raises(CorruptFile, match="rows, but should have"):
        compact(dest)
    pq.write_table(table.drop_columns(["flag"]), path)
    with pytest.raises(CorruptFile, match="other columns"):
        compact(dest)
    assert sorted(p.name for p in dest.iterdir()) == before


def test_one_at_a_time(tmp_path: Path) -> None:
    dest = tmp_path / "out"
    folder = export(dest, make_store(tmp_path / "store", 0, 60))

    def meanwhile(tasks: Sequence[MergeTask]) -> Any:
        with pytest.raises(StoreUnavailable, match="another export is running there"):
            compact(dest)
        return merge_here(tasks)

    assert compact_folder(folder, 1 << 30, meanwhile).files_after == 1


def rename(dest: Path, names: dict[str, str]) -> None:
    """Rename files of an export, also in the manifest."""
    text = (dest / MANIFEST).read_text()
    for name, other in names.items():
        (dest / name).rename(dest / other)
        text = text.replace(f'"{name}"', f'"{other}"')
    (dest / MANIFEST).write_text(text)


def test_too_many_odd_strings_for_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dest = tmp_path / "out"
    export(dest, make_store(tmp_path / "store"))
    before, odd = rows(dest, *PLACE), odd_strings(dest)
    monkeypatch.setattr("logquarry.spark.export.MOST_BYTES", 120)
    assert compact(dest).files_after > 1
    assert rows(dest, *PLACE) == before
    assert odd_strings(dest) == odd
    # A second merge would write as many files again.
    parts = sorted(path.name for path in dest.glob("*.parquet"))
    assert compact(dest).files_before == 0
    assert sorted(path.name for path in dest.glob("*.parquet")) == parts
    # Merged files with a number in their names can be merged again.
    rename(dest, {name: re.sub(r"(\.to\.[0-9]{20})", r"\1.7", name) for name in parts})
    assert len(list(dest.glob("*.to.*.7.1.parquet"))) == 1
    assert rows(dest, *PLACE) == before
    monkeypatch.undo()
    # The merged file has the same first and last message as before, but a unique name.
    assert compact(dest).files_after == 1
    assert rows(dest, *PLACE) == before


def test_a_merge_that_fails_leaves_no_file(tmp_path: Path) -> None:
    dest = tmp_path / "out"
    folder = export(dest, make_store(tmp_path / "store", 0, 60))
    some = [Source(p.name, 1, pq.read_metadata(p).num_rows) for p in dest.glob("*.parquet")]
    some[-1] = Source(some[-1].path, 1, 12_345)
    with pytest.raises(CorruptFile):
        merge(MergeTask(folder, tuple(some), "new"))
    assert not list(dest.glob("new*"))


def test_nothing_to_compact(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFound, match="holds no export"):
        compact(tmp_path)
    with pytest.raises(UsageError, match="takes bytes"):
        compact(tmp_path, target_size=0)
    (tmp_path / MANIFEST).write_text("{}")
    with pytest.raises(UsageError, match="is not a manifest"):
        compact(tmp_path)
