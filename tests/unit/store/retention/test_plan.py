"""Which files expire by each rule, and what a plan reports."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import logquarry as lq
from logquarry.store.retention import rules as rules_of_disk
from logquarry.store.retention.rules import DiskUse
from tests.helpers.files import overwrite
from tests.helpers.retention_stores import END, FILE, check_cut, messages, retain
from tests.helpers.small_store import NOW, config, facts


def test_a_plan_changes_nothing(store_root: Path) -> None:
    before = facts(store_root)
    plan = retain(store_root, older_than_ms=0)
    assert plan.files
    assert facts(store_root) == before
    document = plan.to_json()
    assert json.loads(json.dumps(document)) == document
    assert len(document["log"]) == len(plan.log)


def test_by_age_of_the_last_message(store_root: Path) -> None:
    before = messages(store_root)
    last: dict[int, int] = {}
    with lq.MessageStore.open(store_root, config=config()) as store:
        for message in store.scan():
            last[message.physical_offset // FILE] = message.store_timestamp
    bases = sorted(last)
    for which in (0, 3, len(bases) - 2):
        limit = END - last[bases[which]]
        plan = retain(store_root, older_than_ms=limit)
        assert [file.base // FILE for file in plan.log] == bases[: which + 1]
        assert [file.last_timestamp for file in plan.log] == [last[b] for b in bases[: which + 1]]
        # A file that is a millisecond younger stays.
        assert len(retain(store_root, older_than_ms=limit + 1).log) == which
    # The last file never expires.
    plan = retain(store_root, older_than_ms=0, now=END + 10**12, apply=True)
    assert len(plan.log) == len(bases) - 1
    assert plan.stays_because == "it is the log's last file"
    check_cut(store_root, before, plan)


def test_modification_times_say_nothing(store_root: Path) -> None:
    rules: dict[str, Any] = {"older_than_ms": 100_000}
    plan = retain(store_root, **rules)
    for path in (store_root / "commitlog").iterdir():
        os.utime(path, (10**9, 10**9))
    assert retain(store_root, **rules).log == plan.log
    for path in (store_root / "commitlog").iterdir():
        os.utime(path, (END, END))
    assert retain(store_root, **rules).log == plan.log


def test_a_file_of_the_future_stays(store_root: Path) -> None:
    plan = retain(store_root, older_than_ms=0, now=NOW)
    assert not plan.log
    assert "in the future" in plan.stays_because


def test_bytes_that_stay(store_root: Path) -> None:
    end = retain(store_root, keep_bytes=0).max_offset
    for keep in (0, 1, FILE, 3 * FILE + 5, 10 * FILE, 1 << 40):
        plan = retain(store_root, keep_bytes=keep)
        # All files that can expire, and no others.
        assert plan.new_min_offset == max(0, min(end - keep, end - 1) // FILE * FILE)


def test_rules_that_are_given_agree(store_root: Path) -> None:
    by_age = retain(store_root, older_than_ms=150_000)
    by_bytes = retain(store_root, keep_bytes=2 * FILE)
    assert 0 < len(by_age.log) < len(by_bytes.log)
    both = retain(store_root, older_than_ms=150_000, keep_bytes=2 * FILE)
    assert [file.path for file in both.log] == [file.path for file in by_age.log]
    assert all("; " in file.reason for file in both.log)


def test_so_many_at_a_time(store_root: Path) -> None:
    before = messages(store_root)
    plan = retain(store_root, older_than_ms=0, most_files=2, apply=True)
    assert len(plan.log) == 2
    assert plan.stays_because == "one run deletes at most 2 log files"
    check_cut(store_root, before, plan)
    assert retain(store_root, older_than_ms=0, most_files=2).min_offset == plan.new_min_offset


def full_disk(monkeypatch: pytest.MonkeyPatch, used: int, usable: int) -> None:
    monkeypatch.setattr(rules_of_disk, "disk_use", lambda _: DiskUse(used, usable))


def test_as_long_as_the_disk_is_too_full(store_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    freed = (store_root / "commitlog" / f"{0:020d}").stat().st_blocks * 512
    full_disk(monkeypatch, 80 * freed, 20 * freed)
    plan = retain(store_root, max_disk_ratio=0.775)
    # 80, 79 and 78 percent are too full, and 77 percent is not.
    assert len(plan.log) == 3
    assert plan.stays_because.endswith("the disk is 77.0% full; 77.5% are allowed")
    assert not retain(store_root, max_disk_ratio=0.8).log
    both = retain(store_root, max_disk_ratio=0.775, older_than_ms=250_000)
    assert len(both.log) == 1
    monkeypatch.setattr(rules_of_disk, "disk_use", lambda _: None)
    assert "is unknown" in retain(store_root, max_disk_ratio=0.775).stays_because


def test_nothing_goes_in_vain(
    store_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deleting a file that a backup has by another name frees no room."""
    full_disk(monkeypatch, 80, 20)
    os.link(store_root / "commitlog" / f"{0:020d}", tmp_path / "backup")
    plan = retain(store_root, max_disk_ratio=0.5)
    assert not plan.log
    assert "hard link" in plan.stays_because
    assert retain(store_root, older_than_ms=0).log


def test_a_file_without_a_message_is_as_old_as_what_follows(store_root: Path) -> None:
    path = store_root / "commitlog" / f"{FILE:020d}"
    path.write_bytes(bytes(FILE))
    plan = retain(store_root, older_than_ms=END - NOW - 10_000)
    assert not plan.log
    plan = retain(store_root, older_than_ms=100_000)
    assert len(plan.log) > 3
    times = [file.last_timestamp for file in plan.log]
    assert None not in times
    assert times == sorted(times, key=lambda time: time or 0)


def test_a_file_of_another_size_stays(store_root: Path) -> None:
    path = store_root / "commitlog" / f"{FILE:020d}"
    path.write_bytes(path.read_bytes()[:-10])
    plan = retain(store_root, older_than_ms=0)
    assert len(plan.log) == 1
    assert "verify" in plan.stays_because


def test_a_queue_file_that_is_not_in_order_stays(store_root: Path) -> None:
    queue = store_root / "consumequeue" / "t" / "0"
    path = sorted(queue.iterdir())[0]
    whole = len(dict(retain(store_root, older_than_ms=0).queues)["t", 0])
    assert whole > 1
    overwrite(path, 0, (10**9).to_bytes(8, "big"))
    assert ("t", 0) not in dict(retain(store_root, older_than_ms=0).queues)


def test_messages_and_readers_are_told(store_root: Path) -> None:
    folder = store_root / "config"
    folder.mkdir(exist_ok=True)
    table = {"t@slow": {"0": 5, "1": 10_000}, "u@new": {"0": 0}, "gone@g": {"0": 0}}
    (folder / "consumerOffset.json").write_text(json.dumps({"offsetTable": table}))
    (folder / "delayOffset.json").write_text("no json")
    before = messages(store_root)
    plan = retain(store_root, older_than_ms=100_000)
    went = [one for one in before if one[0] < plan.new_min_offset]
    for topic in ("early", "t", "u"):
        assert plan.messages[topic] == sum(one[1] == topic for one in went)
    unread = {(one.group, one.topic, one.queue_id): one.messages for one in plan.unread}
    assert unread == {
        ("slow", "t", 0): sum(one[1:3] == ("t", 0) and one[3] >= 5 for one in went),
        # The group reads all queues of a topic in which it has an offset.
        ("new", "u", 0): sum(one[1:3] == ("u", 0) for one in went),
        ("new", "u", 1): sum(one[1:3] == ("u", 1) for one in went),
    }
