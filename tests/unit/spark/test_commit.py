"""The commit of an export's files, with a crash at every step. Needs no Spark."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from logquarry.errors import StoreUnavailable, UsageError
from logquarry.spark.output import (
    INTENT,
    MANIFEST,
    SUCCESS,
    ExportCommit,
    OutputFolder,
    written_path,
)

STEPS = ("make", "create", "move", "remove", "remove_folder", "remove_if_empty", "write_json")


class Crash(BaseException):
    pass


class CrashingFolder(OutputFolder):
    """Allows a number of changes, then stops before the next one, like a killed process."""

    def __init__(self, location: Path, steps: int) -> None:
        super().__init__(location)
        self._left = steps
        for name in STEPS:
            setattr(self, name, self._counted(getattr(self, name)))

    def _counted(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            if self._left <= 0:
                raise Crash
            self._left -= 1
            return step(*arguments, **named)

        return counted


def export(folder: OutputFolder, *paths: str, text: str = "new") -> None:
    commit = ExportCommit(folder)
    try:
        commit.begin()
        files = []
        for number, path in enumerate(paths):
            staged = f"{commit.staging}/{number}"
            with folder.create(staged) as sink:
                sink.write(f"{text} {path}".encode())
            files.append((staged, path))
        commit.commit(files, {"files": [{"path": path} for path in paths]})
    except Crash:
        # The locks of a process end with it.
        commit._unlock()
        raise


def contents(dest: Path) -> dict[str, str]:
    """Return all files that readers see, by path."""
    return {
        str(path.relative_to(dest)): path.read_text()
        for path in sorted(dest.rglob("*.parquet"))
        if not str(path.relative_to(dest)).startswith("_")
    }


def is_complete(dest: Path) -> bool:
    names = {path.name for path in dest.iterdir()}
    manifest = json.loads((dest / MANIFEST).read_text())
    assert manifest["written_by"] == "logquarry"
    assert {entry["path"] for entry in manifest["files"]} == contents(dest).keys()
    return SUCCESS in names and INTENT not in names and not any("temporary" in n for n in names)


def test_export(tmp_path: Path) -> None:
    dest = tmp_path / "dest"
    export(OutputFolder(dest), "a.parquet", "topic=x/b.parquet")
    assert contents(dest) == {
        "a.parquet": "new a.parquet",
        "topic=x/b.parquet": "new topic=x/b.parquet",
    }
    assert is_complete(dest)


def test_another_export_replaces_the_first(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path)
    (tmp_path / "notes.txt").write_text("not ours")
    export(folder, "a.parquet", "topic=x/b.parquet", "topic=y/day=1/c.parquet", text="old")
    export(folder, "a.parquet", "topic=x/d.parquet")
    assert contents(tmp_path) == {
        "a.parquet": "new a.parquet",
        "topic=x/d.parquet": "new topic=x/d.parquet",
    }
    assert not (tmp_path / "topic=y").exists()
    assert (tmp_path / "notes.txt").read_text() == "not ours"
    assert is_complete(tmp_path)


OLD = ("a.parquet", "topic=x/b.parquet", "topic=y/c.parquet")
NEW = ("a.parquet", "topic=x/d.parquet")


@pytest.mark.parametrize("earlier", [(), OLD])
def test_a_crash_at_every_step(tmp_path: Path, earlier: tuple[str, ...]) -> None:
    """After a crash and a second export, the folder holds exactly the second export's files."""
    steps = 0
    while True:
        dest = tmp_path / str(steps)
        folder = OutputFolder(dest)
        if earlier:
            export(folder, *earlier, text="old")
        before = contents(dest)
        crashed = False
        try:
            export(CrashingFolder(dest, steps), *NEW)
        except Crash:
            crashed = True
        if crashed and not (dest / INTENT).exists() and not (dest / SUCCESS).exists():
            assert contents(dest) == before
        if (dest / SUCCESS).exists():
            # A reader that trusts _SUCCESS sees one of the two exports, complete.
            assert contents(dest) in (before, {path: f"new {path}" for path in NEW})
        export(folder, "other.parquet", *NEW)
        assert contents(dest) == {path: f"new {path}" for path in ("other.parquet", *NEW)}
        assert is_complete(dest)
        if not crashed:
            break
        steps += 1
    assert steps > 10


class FullDisk(CrashingFolder):
    """After a number of changes, the disk is full: files can only be removed."""

    def _counted(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            self._left -= 1
            if self._left < 0 and not step.__name__.startswith("remove"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a file")
            return step(*arguments, **named)

        return counted


def test_the_error_says_that_the_export_is_complete(tmp_path: Path) -> None:
    """Only the removal of the intent has failed."""

    class Sticky(OutputFolder):
        def remove(self, path: str) -> None:
            if path == INTENT:
                raise OSError(errno.EIO, os.strerror(errno.EIO), path)
            super().remove(path)

    with pytest.raises(OSError, match=f"The export is complete, but {INTENT} is still there"):
        export(Sticky(tmp_path), *NEW)
    (tmp_path / INTENT).unlink()
    assert is_complete(tmp_path)
    assert contents(tmp_path) == {path: f"new {path}" for path in NEW}


def test_a_full_disk_at_every_step(tmp_path: Path) -> None:
    """The staged files are removed, the error says what stays, and the next export works."""
    steps, was_explained = 3, False
    while True:
        dest = tmp_path / str(steps)
        folder = OutputFolder(dest)
        export(folder, *OLD, text="old")
        commit = ExportCommit(FullDisk(dest, steps))
        commit.begin()
        for number in range(len(NEW)):
            (dest / commit.staging / str(number)).write_text(f"new {NEW[number]}")
        moves = [(f"{commit.staging}/{number}", path) for number, path in enumerate(NEW)]
        try:
            commit.commit(moves, {"files": [{"path": path} for path in NEW]})
        except OSError as error:
            assert error.errno == errno.ENOSPC
            assert not list(dest.glob("_temporary-*"))
            if (dest / INTENT).exists():
                was_explained = True
                assert error.filename == str(dest)
                assert "No space left on device. The folder has no complete export now" in str(
                    error
                )
                assert f"removes all files that {INTENT} lists" in str(error)
            else:
                assert is_complete(dest)
                assert contents(dest) == {path: f"old {path}" for path in OLD}
            export(folder, *NEW)
            steps += 1
        else:
            break
        assert contents(dest) == {path: f"new {path}" for path in NEW}
        assert is_complete(dest)
    assert was_explained


def test_abort_leaves_everything_as_it_was(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path)
    export(folder, "a.parquet", text="old")
    commit = ExportCommit(folder)
    commit.begin()
    with folder.create(f"{commit.staging}/x") as sink:
        sink.write(b"half")
    commit.abort()
    assert contents(tmp_path) == {"a.parquet": "old a.parquet"}
    assert is_complete(tmp_path)


@pytest.mark.parametrize("path", ["b.parquet", "deep/down/b.PARQUET", "c.parq"])
def test_foreign_parquet_files(tmp_path: Path, path: str) -> None:
    folder = OutputFolder(tmp_path)
    export(folder, "a.parquet", text="old")
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text("theirs")
    with pytest.raises(UsageError, match=f"no export wrote.*{path}"):
        export(folder, "a.parquet")
    assert (tmp_path / path).read_text() == "theirs"
    assert (tmp_path / "a.parquet").read_text() == "old a.parquet"


def test_other_tables(tmp_path: Path) -> None:
    (tmp_path / "_delta_log").mkdir()
    with pytest.raises(UsageError, match="holds a Delta table"):
        ExportCommit(OutputFolder(tmp_path)).begin()


@pytest.mark.parametrize("text", ["{}", "[]", "no JSON", '{"written_by": "another"}'])
def test_a_manifest_that_is_not_ours(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(UsageError, match=r"_manifest\.json was not written by an export"):
        ExportCommit(OutputFolder(tmp_path)).begin()


@pytest.mark.parametrize(
    "path",
    [
        "../victim.parquet",
        "topic=x/../../victim.parquet",
        "{victim}",
        "./a.parquet",
        "topic=x//a.parquet",
        "link/victim.parquet",
        "_SUCCESS",
        "",
        7,
        None,
    ],
)
@pytest.mark.parametrize("name", [MANIFEST, INTENT])
def test_a_manifest_that_names_files_elsewhere(tmp_path: Path, name: str, path: Any) -> None:
    victim = tmp_path / "victim.parquet"
    victim.write_text("theirs")
    dest = tmp_path / "dest"
    dest.mkdir()
    (dest / "link").symlink_to(tmp_path)
    named = str(victim) if path == "{victim}" else path
    document = {"written_by": "logquarry", "files": [{"path": named}]}
    (dest / name).write_text(json.dumps(document))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError, match=name):
        export(OutputFolder(dest), "a.parquet")
    assert sorted(tmp_path.rglob("*")) == before
    assert victim.read_text() == "theirs"


@pytest.mark.parametrize("files", [None, "a.parquet", {}])
def test_a_manifest_without_a_list(tmp_path: Path, files: Any) -> None:
    (tmp_path / MANIFEST).write_text(json.dumps({"written_by": "logquarry", "files": files}))
    with pytest.raises(UsageError, match=MANIFEST):
        export(OutputFolder(tmp_path), "a.parquet")


def test_a_destination_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for text in ("old", "new"):
        export(OutputFolder(tmp_path / "link"), "topic=x/a.parquet", text=text)
    assert contents(tmp_path / "real") == {"topic=x/a.parquet": "new topic=x/a.parquet"}


class LateFolder(OutputFolder):
    """Another export runs completely just before this one lists the folder."""

    def names(self, path: str = "") -> list[tuple[str, bool]]:
        if not self.__dict__.get("_seen"):
            self._seen = True
            with pytest.raises(StoreUnavailable, match="another export is running"):
                export(OutputFolder(self.location), "theirs.parquet")
        return super().names(path)


def test_nobody_commits_between_the_look_and_the_lock(tmp_path: Path) -> None:
    dest = tmp_path / "dest"
    export(LateFolder(dest), "ours.parquet")
    assert contents(dest) == {"ours.parquet": "new ours.parquet"}
    assert is_complete(dest)


def test_one_export_at_a_time(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path)
    first = ExportCommit(folder)
    first.begin()
    with pytest.raises(StoreUnavailable, match="another export is running"):
        ExportCommit(folder).begin()
    assert [path.name for path in tmp_path.iterdir()] == [first.staging]
    first.commit([], {"files": []})
    export(folder, "a.parquet")
    assert is_complete(tmp_path)


def test_what_a_dead_export_left_goes(tmp_path: Path) -> None:
    dead = tmp_path / "_temporary-dead" / "000000-x"
    dead.mkdir(parents=True)
    (dead / "a.parquet").write_text("half")
    export(OutputFolder(tmp_path), "a.parquet")
    assert is_complete(tmp_path)


def test_behind_a_file_system_of_arrow(tmp_path: Path) -> None:
    """Behaves like an object store: no locks, and a move does not replace a file."""
    folder = OutputFolder(f"mock://{tmp_path}")
    from pyarrow import fs as pafs

    folder.__dict__["_opened"] = (pafs.LocalFileSystem(), str(tmp_path))
    assert not folder.is_local
    export(folder, *OLD, text="old")
    export(folder, *NEW)
    assert contents(tmp_path) == {path: f"new {path}" for path in NEW}
    assert is_complete(tmp_path)


class Disk:
    """Knows which files and folders the process has synced since their last change."""

    def __init__(self, dest: Path, patch: pytest.MonkeyPatch) -> None:
        self._dest = dest
        self._synced: set[int] = set()
        self._moved = self._removed = 0
        # Several threads move the new files and remove the old ones. The first move and the first
        # removal must not change what another thread checks.
        one_at_a_time = threading.Lock()
        self.checked: set[str] = set()
        move, remove = OutputFolder.move, OutputFolder.remove

        def synced(number: int) -> None:
            self._synced.add(os.fstat(number).st_ino)

        def moved(folder: OutputFolder, source: str, target: str) -> None:
            if target.endswith(".parquet"):
                # The intent is on the disk before the first new file gets its place.
                with one_at_a_time:
                    self._check(*(() if self._moved else [INTENT]))
                    self._moved += 1
            move(folder, source, target)
            self._changed(source, target)

        def removed(folder: OutputFolder, path: str) -> None:
            if path == INTENT:
                self._check(MANIFEST, *contents(dest))
            elif path.endswith(".parquet"):
                # The new files are on the disk before the first old file goes.
                with one_at_a_time:
                    self._check(*(() if self._removed else NEW))
                    self._removed += 1
            remove(folder, path)
            self._changed(path)

        patch.setattr(os, "fsync", synced)
        patch.setattr(OutputFolder, "move", moved)
        patch.setattr(OutputFolder, "remove", removed)

    def _check(self, *paths: str) -> None:
        for path in paths:
            place = self._dest / path
            while place != self._dest.parent:
                assert place.stat().st_ino in self._synced, place
                self.checked.add(place.name)
                place = place.parent

    def _changed(self, *paths: str) -> None:
        for path in paths:
            if (place := (self._dest / path).parent).exists():
                self._synced.discard(place.stat().st_ino)


def test_a_power_cut_finds_each_step_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dest = tmp_path / "dest"
    export(OutputFolder(dest), *OLD)
    disk = Disk(dest, monkeypatch)
    export(OutputFolder(dest), *NEW)
    assert disk.checked == {INTENT, MANIFEST, "a.parquet", "d.parquet", "topic=x", "dest"}
    assert is_complete(dest)


def test_a_document_is_on_the_disk_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.fstat(number).st_ino))
    move = OutputFolder.move

    def moved(folder: OutputFolder, source: str, target: str) -> None:
        assert (tmp_path / source).stat().st_ino in synced
        move(folder, source, target)
        synced.clear()

    monkeypatch.setattr(OutputFolder, "move", moved)
    OutputFolder(tmp_path).write_json("a.json", {"n": 1}, by_way_of="draft")
    assert tmp_path.stat().st_ino in synced
    assert json.loads((tmp_path / "a.json").read_text()) == {"n": 1}


def test_a_path_that_cannot_be_encoded(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="which no export wrote"):
        written_path(OutputFolder(tmp_path), MANIFEST, "\ud800/a.parquet")
