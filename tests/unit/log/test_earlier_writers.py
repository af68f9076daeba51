"""The record of the log's start: lost first files are damage, expired ones are not."""

from __future__ import annotations

import errno
import json
import os
import weakref
from pathlib import Path
from typing import Any

import pytest

import logquarry as lq
from logquarry.config import StoreConfig
from logquarry.format import properties as props
from logquarry.format.queue_entry import QueueEntry
from logquarry.log import earlier_writers
from logquarry.log.earlier_writers import LostHead, read_durable, unproved_start
from logquarry.log.filesystem import FileView
from logquarry.log.layout import StoreLayout
from logquarry.log.store_files import CHECKPOINT, DAMAGE, DURABLE, SETTINGS
from logquarry.repair.findings import VerifyReport
from logquarry.repair.verify_files import check_sidecar
from tests.helpers.small_store import config, forget_start, opened
from tests.helpers.store_maker import StoreMaker

CONFIG = StoreConfig(
    dialect="4.9",
    mapped_file_size_commit_log=4_096,
    mapped_file_size_consume_queue=400,
    max_hash_slot_num=50,
    max_index_num=200,
    enable_multi_dispatch=True,
    message_delay_level="1s 7s",
    flush_disk_type="SYNC_FLUSH",
)


def test_what_is_recorded_comes_back() -> None:
    found = earlier_writers.decode(earlier_writers.encode(CONFIG))
    assert found == {
        "dialect": "4.9",
        "mapped_file_size_commit_log": 4_096,
        "mapped_file_size_consume_queue": 400,
        "max_hash_slot_num": 50,
        "max_index_num": 200,
        "enable_multi_dispatch": True,
        "message_delay_level": "1s 7s",
    }


def test_delays_are_read_with_few_open_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a store with delayed messages in many log files does not open with a low ulimit -n."""
    maker = StoreMaker()
    for level in range(1, 19):
        for _ in range(3):
            # Each message fills a log file.
            made = maker.put(props.SCHEDULE_TOPIC, level - 1, bytes(3_000))
            entry = QueueEntry(made.physical_offset, made.size, made.store_timestamp + 7 * level)
            maker.units[props.SCHEDULE_TOPIC, level - 1][made.queue_offset] = entry
    layout = StoreLayout.open(maker.write(tmp_path / "store"))
    views: weakref.WeakSet[FileView] = weakref.WeakSet()
    most, really_open = 0, layout.open_file

    def open_file(path: str) -> FileView:
        nonlocal most
        view = really_open(path)
        views.add(view)
        most = max(most, len(views))
        return view

    monkeypatch.setattr(layout, "open_file", open_file)
    assert layout.delay_levels_ms == tuple(7 * level for level in range(1, 19))
    assert 2 <= most <= 16


def test_a_later_version_may_know_more_settings() -> None:
    document = json.loads(earlier_writers.encode(CONFIG))
    document["settings"]["another"] = 1
    assert "another" not in earlier_writers.decode(json.dumps(document).encode())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_index_num", "many"),
        ("max_index_num", -1),
        ("enable_lmq", 1),
        ("dialect", "5"),
        ("message_delay_level", "x"),
    ],
)
def test_values_that_no_writer_records(name: str, value: object) -> None:
    document = {"version": 1, "settings": {name: value}}
    with pytest.raises(ValueError, match=r"\w"):
        earlier_writers.decode(json.dumps(document).encode())


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"version": 2, "settings": {}}', b"\xff"])
def test_bytes_that_are_no_record(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"\w|^$"):
        earlier_writers.decode(data)


FILE = 16_384
RULES = lq.RetentionRules(keep_bytes=FILE)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with opened(tmp_path / "store") as store:
        for number in range(100):
            store.put(lq.Message("orders", b"%06d " % number * 100, keys="k"))
    return tmp_path / "store"


def start_of(root: Path) -> int | None:
    found = read_durable(StoreLayout.open(root).filesystem)
    return None if found is None else found.start


def first_files(root: Path, count: int) -> list[Path]:
    return sorted((root / "commitlog").iterdir())[:count]


def test_a_writer_records_the_start(root: Path) -> None:
    layout = StoreLayout.open(root)
    assert start_of(root) == 0
    assert layout.lost_head is None and layout.commit_log.start == 0


def test_lost_files_count_as_an_empty_file(root: Path) -> None:
    for path in first_files(root, 2):
        path.unlink()
    layout = StoreLayout.open(root)
    assert layout.lost_head == LostHead(0, 2 * FILE)
    first, second = layout.commit_log.files[:2]
    assert (first.base, first.size, second.base) == (0, 0, 2 * FILE)
    assert layout.commit_log.file_size == FILE
    without = layout.by_content(shows_lost_head=False)
    assert without.commit_log.start == 2 * FILE and without.lost_head == layout.lost_head


@pytest.mark.parametrize("is_open", [False, True])
def test_a_retention_records_the_start(root: Path, *, is_open: bool) -> None:
    if is_open:
        with lq.MessageStore.open(root, mode="rw", config=config()) as store:
            plan = store.retain(RULES, apply=True)
    else:
        plan = lq.retain(root, RULES, apply=True)
    assert plan.new_min_offset > 0 and start_of(root) == plan.new_min_offset
    assert StoreLayout.open(root).lost_head is None
    first_files(root, 1)[0].unlink()
    assert StoreLayout.open(root).lost_head is not None


def test_a_retention_that_was_stopped_has_lost_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("logquarry.disk.disk.Disk.remove", stop)
        with pytest.raises(KeyboardInterrupt):
            lq.retain(root, RULES, apply=True)
    assert start_of(root) != 0
    layout = StoreLayout.open(root)
    assert layout.lost_head is None and layout.commit_log.start == 0


def test_a_store_without_a_record(root: Path) -> None:
    first_files(root, 1)[0].unlink()
    forget_start(root)
    layout = StoreLayout.open(root)
    assert layout.lost_head is None and layout.commit_log.start == FILE
    words = unproved_start(layout.filesystem, layout.commit_log.files)
    assert words is not None and words.startswith(f"the log begins at {FILE}:")
    lq.MessageStore.open(root, mode="rw").close()
    assert start_of(root) == FILE


def test_another_program_wrote_the_store(root: Path) -> None:
    """The checkpoint shows it, and the record no longer counts."""
    path = root / "checkpoint"
    path.write_bytes(b"\1" * 8 + path.read_bytes()[8:])
    first_files(root, 1)[0].unlink()
    assert StoreLayout.open(root).lost_head is None


@pytest.mark.parametrize(
    ("name", "kind"),
    [(DURABLE, "durable_mark_invalid"), (DAMAGE, None), (SETTINGS, "bad_settings")],
)
def test_a_record_that_this_user_may_not_read(
    root: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str | None
) -> None:
    (root / name).touch()
    really_open = os.open

    def open_(path: str, *arguments: Any, **options: Any) -> int:
        if str(path).endswith(name):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return really_open(path, *arguments, **options)

    monkeypatch.setattr(os, "open", open_)
    with lq.MessageStore.open(root, config=config()) as store:
        assert len(store.get("orders", 0, 0).messages) == 20
        assert len(list(store.scan())) == 100
    found = [finding for finding in lq.verify(root).findings if finding.kind == kind]
    assert kind is None or "Permission denied" in found[0].reason


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
@pytest.mark.parametrize("name", [DURABLE, CHECKPOINT])
def test_a_failed_open_is_named(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    code: int,
) -> None:
    """Verify must not take it for a record of another checkpoint."""
    really_open, reason = os.open, os.strerror(code)

    def failing(path: str, *arguments: Any, **options: Any) -> int:
        if str(path).endswith(name):
            raise OSError(code, reason, path)
        return really_open(path, *arguments, **options)

    layout = StoreLayout.open(root, config())
    report = VerifyReport(str(root))
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", failing)
        check_sidecar(layout, report, is_live=False, last_sound=layout.commit_log.end)
        for _ in range(2):
            assert read_durable(layout.filesystem) is None
    (finding,) = report.findings
    assert (finding.kind, finding.file) == ("durable_mark_invalid", DURABLE)
    assert f"the durable offset is unknown: {root / name}: cannot be read: {reason}" == (
        finding.reason
    )
    (record,) = caplog.records
    assert f"{root / name}: cannot be read: {reason}" in record.getMessage()
    assert read_durable(layout.filesystem) is not None
