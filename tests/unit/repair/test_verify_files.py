"""Queue files and folders with wrong names: verify says where their entries belong."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

import logquarry as lq
from logquarry.errors import StoreNotFound
from logquarry.log.filesystem import Entry, LocalFileSystem
from logquarry.log.layout import StoreLayout
from logquarry.repair.salvage.salvage import salvage_store
from logquarry.repair.verification import verify_store
from tests.helpers.small_store import config, opened

COUNT = 100


@pytest.fixture
def store(tmp_path: Path) -> Path:
    root = tmp_path / "store"
    with opened(root) as writer:
        for number in range(COUNT):
            writer.put(lq.Message("tu"[number % 2], b"%d" % number, queue_id=0))
    return root


def swap(one: Path, other: Path) -> None:
    between = one.rename(one.with_name("between"))
    other.rename(one)
    between.rename(other)


def notes(root: Path) -> dict[str, str]:
    found = verify_store(StoreLayout.open(root)).findings
    return {f.file: f.reason for f in found if f.kind == "misnamed_queue_file"}


def test_a_sound_store_has_none(store: Path) -> None:
    assert not notes(store)


def test_two_files_of_a_queue(store: Path) -> None:
    folder = store / "consumequeue/t/0"
    first, second = sorted(folder.iterdir())[:2]
    swap(first, second)
    found = notes(store)
    assert set(found) == {f"consumequeue/t/0/{path.name}" for path in (first, second)}
    assert all("look swapped" in reason and "recover" in reason for reason in found.values())
    assert salvage_store(StoreLayout.open(store)).plan.messages == COUNT
    lq.recover(store, apply=True, config=config())
    assert not verify_store(StoreLayout.open(store)).has_damage


@pytest.mark.parametrize("target", ["t/1", "other/0"])
def test_a_folder_with_the_name_of_another_queue(store: Path, target: str) -> None:
    (store / "consumequeue" / target).parent.mkdir(exist_ok=True)
    (store / "consumequeue/t/0").rename(store / "consumequeue" / target)
    found = notes(store)
    assert found
    for path, reason in found.items():
        assert path.startswith(f"consumequeue/{target}/")
        assert f"belong in consumequeue/t/0/{path[-20:]}" in reason
    if target == "t/1":
        # The queue of a topic without messages looks like one of multi-dispatch.
        lq.recover(store, apply=True, config=config())
        assert not verify_store(StoreLayout.open(store)).has_damage


def test_the_folders_of_two_queues(store: Path) -> None:
    swap(store / "consumequeue/t/0", store / "consumequeue/u/0")
    assert any("look swapped" in reason for reason in notes(store).values())


@pytest.mark.parametrize("folder", ["rocksdbstore", "kvStore"])
@pytest.mark.parametrize("is_live", [False, True])
@pytest.mark.parametrize("failures", [1, 1_000])
def test_a_database_that_cannot_be_listed(
    folder: str, is_live: bool, failures: int, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a database that a process is changing gets another attempt."""
    (store / folder).mkdir()
    left = [failures]
    listed = LocalFileSystem.list

    def list_or_fail(self: LocalFileSystem, path: str) -> list[Entry]:
        if path == folder and left[0]:
            left[0] -= 1
            raise StoreNotFound(f"{folder}: cannot be read: Permission denied")
        return listed(self, path)

    layout = StoreLayout.open(store)
    monkeypatch.setattr(LocalFileSystem, "list", list_or_fail)
    monkeypatch.setattr(StoreLayout, "is_live", lambda _: is_live)
    found = verify_store(layout).findings
    expected = [] if is_live and failures == 1 else [("bad_rocksdb_store", folder, "damage")]
    assert [(one.kind, one.file, one.severity) for one in found if one.kind != "live"] == expected


@pytest.mark.parametrize(
    ("file", "table"),
    [("topics.json", "topicConfigTable"), ("subscriptionGroup.json", "subscriptionGroupTable")],
)
@pytest.mark.parametrize("version", ["null", "[1]", '"x"', '{"counter":"x"}'])
def test_an_invalid_version_is_found_as_the_writer_finds_it(
    file: str, table: str, version: str, store: Path
) -> None:
    """RocketMQ does not load such a file, and a writer does not change it."""
    path = store / "config" / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'{{"{table}":{{}}}}')
    assert not lq.verify(store).findings
    path.write_text(f'{{"{table}":{{}},"dataVersion":{version}}}')
    [found] = lq.verify(store).findings
    assert (found.kind, found.file) == ("bad_config", f"config/{file}")


@pytest.mark.parametrize(
    "name",
    [
        "config/notes.txt",
        "config/rocksdb",
        "config/rocksdb/000012.sst",
        "rocksdbstore/000012.sst",
    ],
)
def test_a_file_that_this_process_may_not_open(
    store: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = store / name
    path.parent.mkdir(exist_ok=True, parents=True)
    path.touch() if path.suffix else path.mkdir()
    call = "open" if path.suffix else "scandir"
    number, before = 0, getattr(os, call)

    def refuse(at: object, *more: Any, **options: Any) -> object:
        if str(at) == str(path):
            raise OSError(number, os.strerror(number), at)
        return before(at, *more, **options)

    monkeypatch.setattr(os, call, refuse)
    number = errno.EACCES
    with pytest.raises(StoreNotFound, match=f"^{path}: cannot be read: Permission denied"):
        verify_store(StoreLayout.open(store))
    number = errno.EMFILE
    with pytest.raises(StoreNotFound, match="Too many open files: raise the process's limit"):
        verify_store(StoreLayout.open(store))
    number = errno.EIO
    report = verify_store(StoreLayout.open(store))
    # A folder with only one file is no database.
    kinds = {finding.kind for finding in report.findings} - {"bad_rocksdb_store"}
    assert kinds == {"unreadable"}
