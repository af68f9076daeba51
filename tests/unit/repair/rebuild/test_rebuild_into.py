"""Rebuilds into another folder: one at a time, and never over another store's rebuild."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

import logquarry as lq
from logquarry.arguments import Progress
from logquarry.cli.main import app
from logquarry.config import StoreConfig
from logquarry.disk.disk import Disk
from logquarry.disk.folders import alone_in
from logquarry.errors import StoreUnavailable, UsageError
from logquarry.log.layout import StoreLayout
from logquarry.repair.rebuild import rebuild as rebuild_module
from logquarry.repair.rebuild.build import Builder, BuildJob, Built, build_here, finish_into
from logquarry.repair.rebuild.rebuild import rebuild
from logquarry.repair.salvage.salvage import salvage_store
from tests.helpers.store_maker import StoreMaker

NAMES = ("consumequeue", "index")


def a_log(root: Path) -> Path:
    maker = StoreMaker()
    maker.put("t", 0, b"body")
    return maker.write(root)


def while_at_work(then: threading.Event, begun: threading.Event) -> Builder:
    def build(job: BuildJob, progress: Progress | None) -> Built:
        begun.set()
        assert then.wait(60)
        return build_here(job, progress)

    return build


def test_one_at_a_time(tmp_path: Path) -> None:
    root, into = a_log(tmp_path / "store"), tmp_path / "new"
    then, begun = threading.Event(), threading.Event()
    builder = while_at_work(then, begun)
    first = threading.Thread(target=lambda: rebuild(root, into=into, builder=builder))
    first.start()
    assert begun.wait(60)
    try:
        with pytest.raises(StoreUnavailable, match="a salvage or rebuild is at work there"):
            rebuild(root, into=into)
        with pytest.raises(StoreUnavailable, match="at work"):
            finish_into(root, into, NAMES, note=tmp_path / "note.json")
        with pytest.raises((StoreUnavailable, UsageError)):
            salvage_store(StoreLayout.open(root), into)
    finally:
        then.set()
        first.join()
    assert sorted(path.name for path in into.iterdir()) == list(NAMES)
    with pytest.raises(UsageError, match="a rebuild overwrites nothing"):
        rebuild(root, into=into)


def test_not_beside_a_salvage(tmp_path: Path) -> None:
    root, into = a_log(tmp_path / "store"), tmp_path / "new"
    with alone_in(Disk(), into), pytest.raises(StoreUnavailable, match="at work"):
        rebuild(root, into=into)
    with alone_in(Disk(), into), pytest.raises(StoreUnavailable, match="at work"):
        salvage_store(StoreLayout.open(root), into)
    assert not list(into.iterdir())
    (into / ".salvage").mkdir()
    with pytest.raises(UsageError, match="a salvage into it was interrupted"):
        rebuild(root, into=into)


def test_not_into_a_store_that_is_open(tmp_path: Path) -> None:
    root, other = a_log(tmp_path / "store"), tmp_path / "other"
    with (
        lq.MessageStore.open(other, mode="rw", config=StoreConfig(message_index_enable=False)),
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(StoreUnavailable, match="has the store open for writing already"),
    ):
        patch.setattr(rebuild_module, "check_into", lambda root, target, names: target)
        rebuild(root, into=other, queues=False)


@pytest.mark.parametrize("names", [NAMES, NAMES[:1]])
def test_whose_they_are_is_told(tmp_path: Path, names: tuple[str, ...]) -> None:
    root, other = a_log(tmp_path / "store"), a_log(tmp_path / "other")
    into, note = tmp_path / "new", tmp_path / "notes" / "new.json"
    rebuild(root, into=into, index="index" in names, note=note)
    assert finish_into(root, into, names, note=note)
    with pytest.raises(UsageError, match=f"to the store {root}, not to {other}"):
        finish_into(other, into, names, note=note)
    lmq = StoreConfig(enable_multi_dispatch=True, mapped_file_size_consume_queue=6_000)
    with pytest.raises(UsageError, match=r"other settings: file_size .*enable_multi_dispatch"):
        finish_into(root, into, names, note=note, config=lmq)
    if names == NAMES:
        shape = StoreConfig(max_hash_slot_num=7, max_index_num=70)
        with pytest.raises(UsageError, match="index: it was made with other settings: slots"):
            finish_into(root, into, names, note=note, config=shape)
    else:
        # The index is missing, so the rebuild is not complete.
        assert not finish_into(root, into, NAMES, note=note)
        rebuild(root, into=into, queues=False, note=note)
        assert finish_into(root, into, NAMES, note=note)
    note.unlink()
    with pytest.raises(UsageError, match="the store that it belongs to is unknown"):
        finish_into(root, into, names, note=note)
    for text in ("[]", "{", "[" * 100_000, json.dumps({"written_by": "us", "folders": {}})):
        note.write_text(text)
        with pytest.raises(UsageError, match="not the note of a rebuild"):
            finish_into(root, into, names, note=note)


def test_what_was_killed_on_its_way_in_is_ended_by_whoever_comes_next(tmp_path: Path) -> None:
    root, into = a_log(tmp_path / "store"), tmp_path / "new"

    class Killed(Disk):
        def rename(self, source: Path, target: Path) -> None:
            if target == into / "index":
                raise KeyboardInterrupt
            super().rename(source, target)

    with pytest.raises(KeyboardInterrupt):
        rebuild(root, into=into, disk=Killed())
    assert not (into / "index").exists()
    with pytest.raises(UsageError, match="is in place now"):
        rebuild(root, into=into)
    assert sorted(path.name for path in into.iterdir()) == list(NAMES)


@pytest.mark.parametrize("spark", [[], ["--spark-master", "local[1]"]])
@pytest.mark.parametrize("command", ["rebuild", "salvage"])
def test_no_folder_called_s3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, spark: list[str]
) -> None:
    root = a_log(tmp_path / "store")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, [command, str(root), "--into", "s3://bucket/new", *spark])
    assert result.exit_code == 2
    assert "s3://bucket/new: only a local folder can be written" in result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store"]


@pytest.mark.parametrize(
    "words",
    [
        ["report", "store", "--html", "s3://bucket/x.html"],
        ["export", "store", "--format", "jsonl", "s3://bucket/x.jsonl"],
        ["import", "lines.jsonl", "s3://bucket/store"],
        ["replicate", "s3://bucket/store", "--from", "127.0.0.1:1"],
        ["recover", "s3://bucket/store", "--apply"],
        ["retain", "s3://bucket/store", "--apply", "--keep-time", "1h"],
        ["bench", "put", "--n", "1", "--dir", "s3://bucket/bench"],
        ["bench", "scan", "--n", "1", "--dir", "s3://bucket/bench"],
        ["demo", "--to", "s3://bucket/demo"],
        ["salvage", "store", "--into", "file:///dev/null/x"],
    ],
)
def test_no_command_makes_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    a_log(tmp_path / "store")
    (tmp_path / "lines.jsonl").write_text('{"topic": "t", "body": "YQ=="}\n')
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, words)
    assert result.exit_code in (2, 3, 4), result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lines.jsonl", "store"]


def test_the_functions_refuse_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = a_log(tmp_path / "store")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="only a local folder can be written"):
        rebuild(root, into="s3://bucket/new")
    made = replace(StoreConfig(), max_index_num=100)
    rebuild(root, into=f"file://{tmp_path}/new", config=made)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "store"]
