"""Entries that were never written, in queues whose messages have all expired."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import logquarry as lq
from logquarry.format import queue_entry
from logquarry.format.queue_entry import FILLER
from logquarry.log.layout import StoreLayout
from logquarry.log.open_files import OpenFiles
from logquarry.log.readable import Unreadable
from logquarry.read.batch_queue import BATCH_DTYPE, BatchEntries, BatchQueue
from logquarry.read.queue import ConsumeQueue
from logquarry.repair.audit.expired_queues import bridges, cut_bridges
from logquarry.repair.rebuild.rebuild import rebuild
from tests.helpers.failing_disk import StoppedDisk
from tests.helpers.files import overwrite

CONFIG = lq.StoreConfig(
    mapped_file_size_commit_log=1 << 14,
    mapped_file_size_consume_queue=200,
    max_hash_slot_num=100,
    max_index_num=400,
)
MESSAGES = 37
ROOM = 10


@pytest.fixture
def expired(tmp_path: Path) -> Path:
    """A store that has lost all messages of queue 0 by retention; its queue has 4 files."""
    root = tmp_path / "store"
    with lq.MessageStore.open(root, mode="rw", config=CONFIG) as store:
        for _ in range(MESSAGES):
            store.put(lq.Message("orders", b"x" * 100, queue_id=0))
        for _ in range(200):
            store.put(lq.Message("orders", b"x" * 200, queue_id=1))
    sorted((root / "commitlog").iterdir())[0].unlink()
    shutil.rmtree(root / ".logquarry")
    assert not lq.verify(root).has_damage
    return root


def zero(root: Path, numbers: set[int]) -> None:
    for number in numbers:
        path = root / "consumequeue/orders/0" / f"{number // ROOM * ROOM * 20:020d}"
        with path.open("r+b") as file:
            file.seek(number % ROOM * 20)
            file.write(bytes(20))


@pytest.mark.parametrize("is_rebuilt", [False, True])
@pytest.mark.parametrize("has_abort", [False, True])
@pytest.mark.parametrize(
    "zeroed", [{3}, {0}, {33}, {30, 31}, {8, 9, 10, 11}, {5, 35}, set(range(30))]
)
def test_zeroed_entries_become_fillers(
    expired: Path, zeroed: set[int], *, has_abort: bool, is_rebuilt: bool
) -> None:
    """Otherwise new messages would get queue offsets that consumers have passed."""
    folder = expired / "consumequeue/orders/0"
    before = b"".join(path.read_bytes() for path in sorted(folder.iterdir()))
    zero(expired, zeroed)
    if has_abort:
        (expired / "abort").touch()
    (found,) = [one for one in lq.verify(expired).findings if one.kind == "queue_hole"]
    assert found.file.startswith("consumequeue/orders/0/")
    assert found.length == 20 * len(zeroed)
    if is_rebuilt:
        rebuild(expired, apply=True)
    lq.recover(expired, apply=True)
    after = b"".join(path.read_bytes() for path in sorted(folder.iterdir()))
    for number in range(MESSAGES):
        entry = after[number * 20 : number * 20 + 20]
        filler = queue_entry.encode(FILLER)
        assert entry == (filler if number in zeroed else before[number * 20 : number * 20 + 20])
    assert not lq.verify(expired).has_damage
    assert not lq.recover(expired).is_needed
    with lq.MessageStore.open(expired, mode="rw") as store:
        assert store.put(lq.Message("orders", b"new", queue_id=0)).queue_offset == MESSAGES


@pytest.mark.parametrize("is_rebuilt", [False, True])
@pytest.mark.parametrize("name", [0, 200, 400])
@pytest.mark.parametrize("is_missing", [False, True])
def test_an_expired_queue_with_unusable_files_keeps_its_end(
    expired: Path, name: int, *, is_missing: bool, is_rebuilt: bool
) -> None:
    path = expired / "consumequeue/orders/0" / f"{name:020d}"
    if is_missing:
        path.unlink()
    else:
        os.truncate(path, 100)
    if is_rebuilt:
        rebuild(expired, apply=True)
    lq.recover(expired, apply=True)
    assert not lq.verify(expired).has_damage
    assert not lq.recover(expired).is_needed
    layout = StoreLayout.open(expired)
    (last,) = ConsumeQueue(layout, "orders", 0).units(MESSAGES - 1, MESSAGES)
    # RocketMQ takes this for the place up to which it has dispatched the log.
    assert last["physical_offset"] + last["size"] <= layout.commit_log.start
    with lq.MessageStore.open(expired, mode="rw") as store:
        assert store.put(lq.Message("orders", b"new", queue_id=0)).queue_offset == MESSAGES
    with lq.MessageStore.open(expired) as store:
        assert [m.body for m in store.get("orders", 0, MESSAGES).messages] == [b"new"]


def committed(root: Path, topic: str, offset: int) -> None:
    text = json.dumps({"offsetTable": {f"{topic}@group": {"0": offset}}})
    (root / "config").mkdir(exist_ok=True)
    (root / "config/consumerOffset.json").write_text(text)


def put_batches(root: Path) -> Path:
    """Write a batch queue with 2 files, whose 17 messages have all expired."""
    (root / "config").mkdir(exist_ok=True)
    topic = {"topicName": "batches", "attributes": {"queue.type": "BatchCQ"}}
    table = {"topicConfigTable": {"batches": topic}}
    (root / "config/topics.json").write_text(json.dumps(table))
    folder = root / "batchconsumequeue/batches/0"
    folder.mkdir(parents=True)
    for base, count in ((0, 10), (10, 7)):
        data = queue_entry_rows(base, count).tobytes()
        (folder / f"{46 * base:020d}").write_bytes(data.ljust(460, b"\0"))
    return folder


@pytest.mark.parametrize("is_rebuilt", [False, True])
@pytest.mark.parametrize(
    ("topic", "harm", "read", "end"),
    [
        ("orders", "last gone", 0, 30),
        ("orders", "last gone", 35, 35),
        ("orders", "last gone", 20, 30),
        ("orders", "last gone", 1 << 40, 30),
        ("orders", "last short", 36, 36),
        ("orders", "last misnamed", 36, 36),
        ("orders", "all", 33, 33),
        ("orders", "all", 0, 10),
        ("batches", "last gone", 0, 10),
        ("batches", "last gone", 15, 15),
        ("batches", "last short", 0, 12),
        ("batches", "all", 16, 16),
        ("batches", "all", 0, 0),
    ],
)
def test_the_user_learns_that_the_end_of_an_expired_queue_is_not_sure(
    expired: Path, topic: str, harm: str, read: int, end: int, *, is_rebuilt: bool
) -> None:
    """The offsets of consumers show at least where the queue ended."""
    folder = expired / "consumequeue/orders/0"
    if topic == "batches":
        folder = put_batches(expired)
    committed(expired, topic, read)
    first, *_, last = sorted(folder.iterdir())
    if harm == "last gone":
        last.unlink()
        os.truncate(first, first.stat().st_size // 2 if topic == "orders" else 500)
    elif harm == "last short":
        os.truncate(last, 100)
    elif harm == "last misnamed":
        last.rename(folder / f"{601:020d}")
    else:
        for path in folder.iterdir():
            path.write_bytes(b"")
    if is_rebuilt:
        report = rebuild(expired, apply=True)
        (found,) = [one for one in report.queues or () if (one.topic, one.queue_id) == (topic, 0)]
        assert found.is_taken_over and not found.is_end_sure
        assert (found.min_offset, found.max_offset) == (end, end)
        assert [one for one in report.queues or () if not one.is_end_sure] == [found]
    else:
        words = "it may have ended after" if end else "its end cannot be kept"
        told = [line for line in lq.recover(expired, apply=True).looked_at if words in line]
        assert len(told) == 1 and f"the files of queue 0 of {topic} are unusable" in told[0]
    assert not lq.recover(expired).is_needed
    assert not lq.verify(expired).has_damage
    with lq.MessageStore.open(expired) as store:
        assert store.queue_offsets(topic, 0).max == end


@pytest.mark.parametrize("is_rebuilt", [False, True])
@pytest.mark.parametrize("topic", ["orders", "batches"])
def test_a_whole_last_file_shows_the_end_for_sure(
    expired: Path, topic: str, *, is_rebuilt: bool
) -> None:
    """So a consumer offset after the end, which can only be harmed, does not move the end."""
    folder = expired / "consumequeue/orders/0"
    if topic == "batches":
        folder = put_batches(expired)
    committed(expired, topic, 100)
    os.truncate(sorted(folder.iterdir())[0], 92)
    if is_rebuilt:
        assert all(one.is_end_sure for one in rebuild(expired, apply=True).queues or ())
    else:
        assert not [line for line in lq.recover(expired, apply=True).looked_at if "ended" in line]
    with lq.MessageStore.open(expired) as store:
        assert store.queue_offsets(topic, 0).max == (37 if topic == "orders" else 17)


def test_entries_after_zeroed_entries_of_the_last_file_count(expired: Path) -> None:
    os.truncate(expired / "consumequeue/orders/0" / f"{0:020d}", 100)
    zero(expired, {31})
    rebuild(expired, apply=True)
    with lq.MessageStore.open(expired) as store:
        assert store.queue_offsets("orders", 0).max == MESSAGES


def test_unreadable_bytes_at_the_end_make_it_unsure(
    expired: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = Unreadable(0, 200, "the disk does not return it")

    def unreadable(_: OpenFiles, path: str, position: int, length: int) -> Unreadable | None:
        return fault if path.endswith(f"orders/0/{600:020d}") else None

    monkeypatch.setattr(OpenFiles, "fault", unreadable)
    report = rebuild(expired, apply=True)
    assert [one.queue_id for one in report.queues or () if not one.is_end_sure] == [0]


@pytest.mark.parametrize("is_rebuilt", [False, True])
@pytest.mark.parametrize("name", [20 << 50, 8 * 10**18])
def test_a_harmed_file_name_does_not_move_the_end(
    expired: Path, name: int, *, is_rebuilt: bool
) -> None:
    """Consumers would need years to reach such a queue offset."""
    folder = expired / "consumequeue/orders/0"
    (folder / f"{600:020d}").rename(folder / f"{name:020d}")
    if is_rebuilt:
        rebuild(expired, apply=True)
    lq.recover(expired, apply=True)
    assert not lq.verify(expired).has_damage
    with lq.MessageStore.open(expired, mode="rw") as store:
        assert store.put(lq.Message("orders", b"new", queue_id=0)).queue_offset == 30


def test_a_negative_entry_before_a_zeroed_entry_becomes_a_filler(expired: Path) -> None:
    zero(expired, {4})
    path = expired / "consumequeue/orders/0" / f"{0:020d}"
    with path.open("r+b") as file:
        file.seek(3 * 20)
        file.write(b"\xff")
    lq.recover(expired, apply=True)
    assert not lq.verify(expired).has_damage
    with lq.MessageStore.open(expired, mode="rw") as store:
        assert store.put(lq.Message("orders", b"new", queue_id=0)).queue_offset == MESSAGES


@pytest.mark.parametrize("refused", [None, errno.EPERM, errno.EOPNOTSUPP])
def test_an_interrupted_recovery_keeps_the_end_of_an_expired_queue(
    refused: int | None, expired: Path, tmp_path: Path
) -> None:
    """``refused`` is the error of a file system without hard links."""
    folder = expired / "consumequeue/orders/0"
    os.truncate(folder / f"{600:020d}", 7 * 20)
    (folder / f"{200:020d}").unlink()
    old = (folder / f"{600:020d}").read_bytes()

    def disk(number: int | None = None) -> StoppedDisk:
        made = StoppedDisk(number)
        made.failing = {} if refused is None else {"link": refused}
        return made

    whole = disk()
    shutil.copytree(expired, tmp_path / "whole")
    lq.recover(tmp_path / "whole", apply=True, disk=whole)
    moves = [number for number, name in enumerate(whole.order) if name in ("rename", "link")]
    if refused is not None:
        # The file is copied: stop at each of the next calls, up to the rename of the new file.
        at = whole.order.index("link")
        moves = list(range(at, whole.order.index("rename", at) + 1))
    for number in (stop for move in moves for stop in (move, move + 1)):
        copy = tmp_path / "copy"
        shutil.copytree(expired, copy)
        with pytest.raises(KeyboardInterrupt):
            lq.recover(copy, apply=True, disk=disk(number))
        lq.recover(copy, apply=True, disk=disk())
        with lq.MessageStore.open(copy) as store:
            assert store.queue_offsets("orders", 0).max == MESSAGES, whole.order[number]
        # No file is deleted: the old last file is in quarantine.
        kept = (copy / ".logquarry/quarantine").rglob(f"{600:020d}*")
        assert old in [path.read_bytes() for path in kept]
        shutil.rmtree(copy)


@pytest.mark.parametrize("place", [0, 1 << 40])
def test_strange_bytes_after_the_queue_are_no_entries(expired: Path, place: int) -> None:
    path = expired / "consumequeue/orders/0" / f"{600:020d}"
    entry = queue_entry.encode(queue_entry.QueueEntry(place, 100, 0))
    path.write_bytes(path.read_bytes()[: 7 * 20] + bytes(20) + entry + bytes(20))
    assert not lq.verify(expired).has_damage
    assert not lq.recover(expired).is_needed


@pytest.mark.parametrize("has_expired", [True, False])
@pytest.mark.parametrize("zeroed", [{0, 1, 2}, set(range(11))])
def test_no_queue_ends_with_a_bridge(
    expired: Path, zeroed: set[int], has_expired: bool, tmp_path: Path
) -> None:
    """RocketMQ takes a filler at the end for a message of 2 GiB, and dispatches nothing."""
    zero(expired, zeroed)
    last, folder = max(zeroed), expired / "consumequeue/orders/0"
    wrong = queue_entry.encode(queue_entry.QueueEntry(1 << 40, 100, 0))
    path = folder / f"{(last + 1) // ROOM * 200:020d}"
    overwrite(path, (last + 1) % ROOM * 20, wrong)
    if not has_expired:
        shutil.rmtree(expired / "commitlog")
        with lq.MessageStore.open(tmp_path / "other", mode="rw", config=CONFIG) as store:
            store.put(lq.Message("orders", b"x", queue_id=1))
        shutil.rmtree(expired / "consumequeue/orders/1")
        for name in ("commitlog", "consumequeue/orders/1", "checkpoint", ".logquarry"):
            (tmp_path / "other" / name).rename(expired / name)
    lq.recover(expired, apply=True, accept_loss=1 << 30)
    report = lq.verify(expired)
    assert not report.has_damage
    assert "queue_ends_in_filler" not in {found.kind for found in report.findings}
    assert not lq.recover(expired).is_needed
    with lq.MessageStore.open(expired) as store:
        assert store.queue_offsets("orders", 0).max == (last + 1 if has_expired else 0)


def test_a_rebuild_leaves_out_an_empty_last_file(expired: Path) -> None:
    folder = expired / "consumequeue/orders/0"
    (folder / f"{4 * 200:020d}").touch()
    rebuild(expired, apply=True)
    assert [path.name for path in sorted(folder.iterdir())] == [f"{n * 200:020d}" for n in range(4)]
    with lq.MessageStore.open(expired) as store:
        assert store.queue_offsets("orders", 0).max == MESSAGES


def test_a_bridge_does_not_span_a_missing_file(tmp_path: Path) -> None:
    """The neighbours of the missing file are no neighbours in the queue."""
    (tmp_path / "commitlog").mkdir()
    folder = tmp_path / "batchconsumequeue/batches/0"
    folder.mkdir(parents=True)
    for number, base in ((0, 0), (2, 10)):
        entries = queue_entry_rows(base)
        if not number:
            entries[-2:] = 0
        (folder / f"{number * 230:020d}").write_bytes(entries.tobytes())
    config = lq.StoreConfig(mapped_file_size_consume_queue=100)
    queue = BatchQueue(StoreLayout.open(tmp_path, config), "batches", 0)
    assert len(list(queue.file_bytes())) == 2
    made, stop = bridges(queue, 1 << 30)
    assert (made, stop) == ({}, 15)
    simple = ConsumeQueue(StoreLayout.open(tmp_path, config), "batches", 0)
    assert bridges(simple, 0) == ({}, 0)
    # A recovery may cut off a queue within a bridge.
    assert cut_bridges(queue, {0: bytes(46 * 5)}, 2, 100) == ({}, 0)
    cut, end = cut_bridges(simple, {0: queue_entry.encode(FILLER) * 5}, 2, 100)
    ends = [FILLER, queue_entry.QueueEntry(99, 1, 0)]
    assert (cut, end) == ({0: b"".join(map(queue_entry.encode, ends))}, 2)


def queue_entry_rows(base: int, count: int = 5) -> BatchEntries:
    entries = np.zeros(count, BATCH_DTYPE)
    entries["base"] = np.arange(base, base + count)
    entries["physical_offset"] = 100 * entries["base"]
    entries["size"], entries["count"] = 100, 1
    return entries
