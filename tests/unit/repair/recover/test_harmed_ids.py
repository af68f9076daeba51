"""Recoveries and rebuilds of stores in which damage has changed the topic or queue id of a frame.

No CRC covers these fields. The message's entry in the right queue shows where it belongs.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.format.frame import HEAD
from logquarry.format.queue_entry import FILLER, encode
from logquarry.log.layout import StoreLayout
from logquarry.repair.rebuild.rebuild import rebuild
from logquarry.repair.salvage.salvage import salvage_store
from logquarry.repair.verification import verify_store
from tests.helpers.files import overwrite
from tests.helpers.harmed_store import (
    log_file,
    queue_bytes,
    require_any_interruption_is_harmless,
    served,
)
from tests.helpers.small_store import NOW, config, opened

COUNT = 30


def store(root: Path, queues: list[int] | None = None) -> list[int]:
    """Fill some queues, by default two in turn; return the physical offsets of the messages."""
    with opened(root) as made:
        for number, queue_id in enumerate(queues or [0, 1] * (COUNT // 2)):
            made.put(lq.Message("t", b"%d" % number, tags="a", queue_id=queue_id))
        return [message.physical_offset for message in made.scan()]


def harm(root: Path, place: int, queue_id: int) -> None:
    overwrite(log_file(root), place + HEAD.offsets["queue_id"], queue_id.to_bytes(4, signed=True))


def kinds(root: Path) -> list[str]:
    report = verify_store(StoreLayout.open(root, config()))
    return [found.kind for found in report.findings if found.severity == "damage"]


@pytest.mark.parametrize("is_closed", [True, False])
@pytest.mark.parametrize("queue_id", [1, 7, -3, 1 << 29])
@pytest.mark.parametrize("number", [0, 2, 14, COUNT - 4, COUNT - 2])
def test_the_entry_stays_in_its_queue(
    number: int, queue_id: int, is_closed: bool, tmp_path: Path
) -> None:
    places = store(tmp_path)
    entries = queue_bytes(tmp_path)
    harm(tmp_path, places[number], queue_id)
    assert kinds(tmp_path) == ["harmed_queue_id"]
    if not is_closed:
        (tmp_path / "abort").touch()
    plan = lq.recover(tmp_path, apply=True, config=config())
    assert is_closed or plan.is_needed
    assert "1 frame named a wrong queue: the entries show the right one" in plan.looked_at
    assert queue_bytes(tmp_path) == entries
    assert kinds(tmp_path) == ["harmed_queue_id"]
    assert not lq.recover(tmp_path, config=config()).is_needed
    # Opening the store recovers it if the queues differ from the log.
    with opened(tmp_path) as made:
        made.put(lq.Message("t", b"%d" % COUNT, queue_id=0))
    assert served(tmp_path, 0) == list(range(0, COUNT + 1, 2))
    assert served(tmp_path, 1) == list(range(1, COUNT, 2))


@pytest.mark.parametrize("queue_id", [1, 7])
@pytest.mark.parametrize("number", [2, 14, COUNT - 2])
def test_a_rebuild_keeps_the_entry(number: int, queue_id: int, tmp_path: Path) -> None:
    places = store(tmp_path / "store")
    entries = queue_bytes(tmp_path / "store")
    harm(tmp_path / "store", places[number], queue_id)
    rebuild(tmp_path / "store", into=tmp_path / "new", config=config(), clock=lambda: NOW)
    assert queue_bytes(tmp_path / "new") == entries
    rebuild(tmp_path / "store", apply=True, config=config(), clock=lambda: NOW)
    assert queue_bytes(tmp_path / "store") == entries


@pytest.mark.parametrize("ids", [(7, 8), (7, 7), (1, 1)])
def test_several_harmed_ids_in_turn(ids: tuple[int, int], tmp_path: Path) -> None:
    places = store(tmp_path)
    entries = queue_bytes(tmp_path)
    for number, queue_id in zip((10, 12), ids, strict=True):
        harm(tmp_path, places[number], queue_id)
    plan = lq.recover(tmp_path, apply=True, config=config())
    if ids == (7, 7):
        # The entries could be those of queue 7 in a file that lies in the wrong folder.
        assert plan.is_needed
    else:
        assert not plan.is_needed
        assert queue_bytes(tmp_path) == entries


def test_other_damage_does_not_hide_the_right_queue(tmp_path: Path) -> None:
    places = store(tmp_path)
    entries = queue_bytes(tmp_path)
    harm(tmp_path, places[20], 1)
    name = f"consumequeue/t/0/{0:020d}"
    overwrite(tmp_path / name, 20 * 3, bytes(range(20)))
    overwrite(tmp_path / name.replace("/0/", "/1/"), 20 * 5, bytes(range(20)))
    plan = lq.recover(tmp_path, apply=True, config=config())
    assert plan.is_needed
    assert queue_bytes(tmp_path) == entries


def test_a_frame_of_another_size_or_tag_is_not_believed(tmp_path: Path) -> None:
    """The entry must have the frame's physical offset, size and tags code."""
    places = store(tmp_path / "store")
    harm(tmp_path / "store", places[14], 7)
    entry = 7 * 20
    for at, data in ((8, b"\0\0\1\0"), (12, bytes(8)), (0, bytes(8))):
        root = tmp_path / f"copy-{at}"
        shutil.copytree(tmp_path / "store", root)
        overwrite(root / "consumequeue/t/0" / f"{0:020d}", entry + at, data)
        lq.recover(root, apply=True, config=config())
        assert served(root, 7) == [14]


@pytest.mark.parametrize("first", [0, 1])
def test_a_queue_in_the_folder_of_another_is_built_again(first: int, tmp_path: Path) -> None:
    """Its entries have the frames' queue offsets, but no neighbour is a message of that queue."""
    store(tmp_path, [first] * 5 + [1 - first] * 12)
    entries = queue_bytes(tmp_path)
    shutil.rmtree(tmp_path / "consumequeue/t/0")
    (tmp_path / "consumequeue/t/1").rename(tmp_path / "consumequeue/t/0")
    lq.recover(tmp_path, apply=True, config=config())
    assert queue_bytes(tmp_path) == entries
    assert kinds(tmp_path) == []


def test_a_file_in_the_folder_of_another_queue_is_built_again(tmp_path: Path) -> None:
    """The last file of queue 1 continues queue 0, whose last file is lost."""
    store(tmp_path, [0, 1] * 30)
    entries = queue_bytes(tmp_path)
    name = f"{400:020d}"
    (tmp_path / "consumequeue/t/1" / name).replace(tmp_path / "consumequeue/t/0" / name)
    lq.recover(tmp_path, apply=True, config=config())
    assert queue_bytes(tmp_path) == entries
    assert kinds(tmp_path) == []


def test_an_interrupted_recovery_keeps_the_right_queue(tmp_path: Path) -> None:
    """The recovery cuts the queue before the entry, which alone shows the right queue."""
    root = tmp_path / "store"
    places = store(root)
    entries = queue_bytes(root)
    harm(root, places[20], 1)
    overwrite(root / "consumequeue/t/0" / f"{0:020d}", 20 * 3, bytes(range(20)))
    require_any_interruption_is_harmless(root, tmp_path, entries)


@pytest.mark.parametrize("is_closed", [True, False])
def test_the_last_message_of_both_queues(is_closed: bool, tmp_path: Path) -> None:
    """The frame also continues the queue that it names, but only the right queue has its entry."""
    places = store(tmp_path, [0, 1] * 14 + [0])
    entries = queue_bytes(tmp_path)
    harm(tmp_path, places[28], 1)
    assert kinds(tmp_path) == ["harmed_queue_id"]
    if not is_closed:
        (tmp_path / "abort").touch()
    lq.recover(tmp_path, apply=True, config=config())
    assert queue_bytes(tmp_path) == entries
    assert kinds(tmp_path) == ["harmed_queue_id"]


@pytest.mark.parametrize("queue_id", [9, -3, 1 << 28])
def test_the_only_message_of_a_queue(queue_id: int, tmp_path: Path) -> None:
    """The queue has no other entry whose message names it, but the named queue has no files."""
    places = store(tmp_path, [0] * 6 + [1] + [0] * 6)
    entries = queue_bytes(tmp_path)
    harm(tmp_path, places[6], queue_id)
    assert kinds(tmp_path) == ["harmed_queue_id"]
    (tmp_path / "abort").touch()
    lq.recover(tmp_path, apply=True, config=config())
    assert queue_bytes(tmp_path) == entries
    assert served(tmp_path, 1) == [6]


# ------------------------------------------------------------------------------------ harmed topics
def store_of_topics(root: Path) -> list[int]:
    with opened(root) as made:
        for number in range(COUNT):
            made.put(lq.Message(f"t{number % 2}", b"%d" % number, queue_id=0))
        return [message.physical_offset for message in made.scan()]


@pytest.mark.parametrize("bits", [1, 64, 128])
@pytest.mark.parametrize("number", [0, 1, 14, 15, COUNT - 3, COUNT - 2, COUNT - 1])
def test_a_frame_with_a_harmed_topic_stays_in_its_queue(
    number: int, bits: int, tmp_path: Path
) -> None:
    """No CRC covers the topic. The frame can name the other topic, a new one, or an invalid one."""
    root = tmp_path / "store"
    places = store_of_topics(root)
    entries = queue_bytes(root)
    data = log_file(root).read_bytes()
    at = data.index(b"t%d" % (number % 2), places[number] + HEAD.size) + 1
    overwrite(log_file(root), at, bytes([data[at] ^ bits]))
    assert "harmed_queue_id" in kinds(root)
    rebuild(root, into=tmp_path / "new", config=config(), clock=lambda: NOW)
    assert queue_bytes(tmp_path / "new") == entries
    lq.recover(root, apply=True, config=config())
    assert queue_bytes(root) == entries
    salvaged = salvage_store(StoreLayout.open(root, config()), tmp_path / "saved")
    assert salvaged.is_whole
    with lq.MessageStore.open(tmp_path / "saved") as made:
        found = [(message.topic, message.body) for message in made.scan()]
    assert found == [(f"t{number % 2}", b"%d" % number) for number in range(COUNT)]
    assert not verify_store(StoreLayout.open(tmp_path / "saved")).findings


@pytest.mark.parametrize("lost", ["t1", "t2"])
def test_copies_by_multi_dispatch_are_no_harmed_topics(lost: str, tmp_path: Path) -> None:
    """The queue of the other topic has the entries of the copies, at the same queue offsets."""
    root, rules = tmp_path / "store", config(enable_multi_dispatch=True)
    with opened(root, enable_multi_dispatch=True) as made:
        for number in range(12):
            properties = {"INNER_MULTI_DISPATCH": "t2"} if number == 5 else {}
            made.put(lq.Message("t1", b"one", properties=properties))
            if number != 5:
                made.put(lq.Message("t2", b"two"))
    entries = queue_bytes(root)
    shutil.rmtree(root / "consumequeue" / lost)
    (root / "abort").touch()
    salvage_store(StoreLayout.open(root, rules), tmp_path / "saved")
    lq.recover(root, apply=True, config=rules)
    assert queue_bytes(root) == entries
    with lq.MessageStore.open(tmp_path / "saved", config=rules) as made:
        assert [made.queue_offsets(topic, 0).max for topic in ("t1", "t2")] == [12, 12]
        assert {message.topic for message in made.get("t1", 0).messages} == {"t1"}


def test_a_frame_of_a_batch_topic_is_not_searched_for(tmp_path: Path) -> None:
    """The entries of batch queues have another form."""
    root, rules = tmp_path / "store", config(mapper_file_size_batch_consume_queue=4_600)
    with opened(root) as made:
        for _ in range(12):
            made.put(lq.Message("b1", b"one"))
            made.put(lq.Message("b2", b"two"))
        places = [message.physical_offset for message in made.scan()]
    topics = {
        name: {"topicName": name, "readQueueNums": 1, "writeQueueNums": 1, "perm": 6} | more
        for name, more in (("b1", {"attributes": {"queue.type": "BatchCQ"}}), ("b2", {}))
    }
    document = {"dataVersion": {"counter": 1, "timestamp": 1}, "topicConfigTable": topics}
    (root / "config" / "topics.json").write_text(json.dumps(document))
    shutil.rmtree(root / "consumequeue" / "b1")
    rebuild(root, apply=True, config=rules, clock=lambda: NOW)
    at = log_file(root).read_bytes().index(b"b1", places[10])
    overwrite(log_file(root), at, b"b2")
    (root / "abort").touch()
    with lq.MessageStore.open(root, mode="rw", config=rules) as made:
        assert made.queue_offsets("b2", 0).max >= 12


def check_unmoved(root: Path, new: Path, repair: str, entries: dict[str, bytes]) -> None:
    """Repair a store whose queue files were moved, and check that no message changes its queue."""
    assert "harmed_queue_id" not in kinds(root)
    if repair == "salvage":
        found = salvage_store(StoreLayout.open(root, config()), new)
        assert found.is_whole and not found.plan.right_queues
        root = new
    elif repair == "recover":
        lq.recover(root, apply=True, config=config())
    elif repair == "rebuild":
        rebuild(root, apply=True, config=config())
    else:
        with opened(root):
            pass
    assert queue_bytes(root) == entries
    assert kinds(root) == []


@pytest.mark.parametrize("repair", ["recover", "rebuild", "salvage"])
@pytest.mark.parametrize("is_last", [True, False])
def test_swapped_files_of_which_one_has_one_entry(
    tmp_path: Path, repair: str, *, is_last: bool
) -> None:
    """The entry before the single entry is of the queue, but no entry after it."""
    root, new = tmp_path / "store", tmp_path / "new"
    ends = [0] * 6 + [1] if is_last else [1] + [0] * 6
    store(root, [0, 1] * 20 + ends)
    entries = queue_bytes(root)
    first, second = (root / f"consumequeue/t/{queue}/{400:020d}" for queue in (0, 1))
    first.rename(tmp_path / "other")
    second.rename(first)
    (tmp_path / "other").rename(second)
    check_unmoved(root, new, repair, entries)


@pytest.mark.parametrize("repair", ["recover", "rebuild", "salvage", "opening"])
@pytest.mark.parametrize("case", ["earlier", "later", "first", "other_topic", "folder"])
def test_a_moved_file_with_one_entry(tmp_path: Path, repair: str, case: str) -> None:
    """No entry shows that the file was moved, but the log has the message of the other queue."""
    root, new = tmp_path / "store", tmp_path / "new"
    names = [("t", 0), ("t", 1)]
    if case == "other_topic":
        names[1] = ("u", 0)
    rows = [0, 1] * 20 + ([0] * 6 + [1] if case == "earlier" else [1] + [0] * 6)
    if case == "first":
        rows = [1] * 19 + [0] * 19 + [1] + [0] * 6
    elif case == "folder":
        rows = [1] + [0] * 6
    with opened(root) as made:
        for number, at in enumerate(rows):
            topic, queue_id = names[at]
            made.put(lq.Message(topic, b"%d" % number, tags="a", queue_id=queue_id))
    entries = queue_bytes(root)
    first, second = (root / "consumequeue" / topic / str(queue_id) for topic, queue_id in names)
    if case == "folder":
        shutil.rmtree(first)
        second.rename(first)
    else:
        if case == "first":
            # The queue begins with fillers: no own entry is before the entry.
            for folder in (first, second):
                overwrite(folder / f"{0:020d}", 0, encode(FILLER) * 19)
        position = 0 if case == "first" else 400
        (second / f"{position:020d}").rename(first / f"{position:020d}")
    check_unmoved(root, new, repair, entries)


@pytest.mark.parametrize("repair", ["recover", "rebuild", "salvage", "opening"])
def test_a_renamed_folder_of_a_topic_with_one_message(tmp_path: Path, repair: str) -> None:
    """Only the list of topics shows that the folder was renamed, and the message is sound."""
    root, new = tmp_path / "store", tmp_path / "new"
    with opened(root) as made:
        for number in range(7):
            made.put(lq.Message("orders", b"%d" % number, tags="a"))
        made.put(lq.Message("pay", b"one", tags="a"))
    assert (root / "config" / "topics.json").exists()
    entries = queue_bytes(root)
    (root / "consumequeue" / "pay").rename(root / "consumequeue" / "paz")
    check_unmoved(root, new, repair, entries)
