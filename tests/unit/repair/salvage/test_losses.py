"""Lost messages of a queue: which queue offsets are missing, and which are wrong."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

import logquarry as lq
from logquarry.format import sys_flag
from logquarry.format.frame import HEAD
from logquarry.log.layout import StoreLayout
from logquarry.repair.rebuild.rebuild import rebuild
from logquarry.repair.salvage.losses import QueueNotes, merged, ranges_of
from logquarry.repair.salvage.plan import plan_salvage
from logquarry.repair.salvage.salvage import salvage_store
from logquarry.repair.verification import verify_store
from tests.helpers.files import flip, overwrite
from tests.helpers.small_store import config, opened
from tests.helpers.store_maker import StoreMaker


def notes(*offsets: int) -> QueueNotes:
    made = QueueNotes(offsets[0])
    for at in range(0, len(offsets), 3):
        part = np.array(offsets[at : at + 3], np.int64)
        made.take(np.arange(at, at + len(part)) * 100, part)
    return made


@pytest.mark.parametrize(
    ("offsets", "first", "end", "gaps", "mended"),
    [
        ((0, 1, 2, 3), 0, 4, (), {}),
        ((5, 6, 9, 10), 5, 11, ((7, 9),), {}),
        ((5, 6, 0, 1), 0, 2, (), {}),
        ((0, 1, 900, 3, 4), 0, 5, (), {200: 2}),
        ((0, 1, 900, 5, 6), 0, 7, ((3, 5),), {200: 2}),
        ((6, 7, 0, 9, 10), 6, 11, (), {200: 8}),
        ((0, 1, 1 << 60), 0, 3, (), {200: 2}),
        ((-5, 1, 2), 0, 3, (), {0: 0}),
        ((1 << 48, 1, 2), 0, 3, (), {0: 0}),
        ((900, 6, 7, 9), 5, 10, ((8, 9),), {0: 5}),
        ((900, 6, 900, 8), 5, 9, (), {0: 5, 200: 7}),
        ((900, 0, 1), 0, 2, (), {}),
        ((0, 1, 2, -(1 << 62), 4), 0, 5, (), {300: 3}),
        ((5, 6, 7, 3, 8, 12, 13), 5, 14, ((9, 12),), {}),
    ],
)
def test_the_story_of_a_queue(
    offsets: tuple[int, ...],
    first: int,
    end: int,
    gaps: tuple[tuple[int, int], ...],
    mended: dict[int, int],
) -> None:
    story = notes(*offsets).story()
    assert (story.first, story.next, story.gaps, story.mended) == (
        first,
        end,
        gaps,
        mended,
    )


@pytest.mark.parametrize("again", [0, 1])
def test_a_recreated_topic_whose_second_message_is_lost(again: int) -> None:
    """The queue has the message at the queue offset in its frame, so the frame is right."""
    found = notes(0, 1, 2, again, 4)
    story = found.story(is_queued=lambda place, offset: (place, offset) == (300, again))
    assert (story.first, story.next, story.mended) == (again, 5, {})
    assert notes(0, 1, 2, again, 4).story().mended == {300: 3}


def test_more_missing_than_anybody_can_pad_is_refused() -> None:
    with pytest.raises(ValueError, match="one of them is invalid"):
        notes(0, 1, 1 << 40, (1 << 40) + 1).story()


def test_ranges() -> None:
    assert ranges_of(np.array([4, 1, 2, 2, 9])) == [(1, 3), (4, 5), (9, 10)]
    assert ranges_of(np.array([], np.int64)) == []
    assert merged([(3, 5), (0, 2), (2, 4), (9, 10)]) == [(0, 5), (9, 10)]


@pytest.fixture
def two_queues(tmp_path: Path) -> Path:
    root = tmp_path / "store"
    with opened(root) as store:
        for number in range(40):
            store.put(lq.Message("orders", b"b" * 50, queue_id=number % 2))
    return root


def lost_in(root: Path) -> dict[tuple[str, int], list[tuple[int, int]]]:
    plan = plan_salvage(StoreLayout.open(root).by_content())
    assert all(span.kind == "queue_misplaced" for span in plan.lost)
    return {key: ranges for span in plan.lost for key, ranges in span.messages.items()}


@pytest.mark.parametrize("number", [0, 1, 10, 19])
def test_a_frame_that_names_another_topic_is_lost_in_its_own(number: int, two_queues: Path) -> None:
    """No CRC covers the topic. A topic in which two characters differ is not searched for."""
    with lq.MessageStore.open(two_queues) as store:
        found = store.get("orders", 1, number, 1).messages[0]
        frame = store.get_data(found.physical_offset, found.size)
    log = two_queues / "commitlog" / f"{0:020d}"
    for at in (0, 1):
        flip(log, found.physical_offset + frame.index(b"orders") + at, 1)
    assert lost_in(two_queues) == {("orders", 1): [(number, number + 1)]}
    salvaged = salvage_store(StoreLayout.open(two_queues).by_content(), two_queues.parent / "new")
    assert not salvaged.is_whole and salvaged.plan.messages == 40


@pytest.mark.parametrize("number", [0, 1, 10, 19])
@pytest.mark.parametrize("bits", [1, 4])
def test_a_harmed_queue_id_is_corrected(bits: int, number: int, two_queues: Path) -> None:
    """No CRC covers the queue id. With bit 1, the frame names a queue that has another message at
    this queue offset: this message must keep its place.
    """
    with lq.MessageStore.open(two_queues) as store:
        found = store.get("orders", 1, number, 1).messages[0]
    at = found.physical_offset + HEAD.offsets["queue_id"] + 3
    flip(two_queues / "commitlog" / f"{0:020d}", at, bits)
    into = two_queues.parent / "new"
    salvaged = salvage_store(StoreLayout.open(two_queues).by_content(), into)
    assert salvaged.is_whole
    assert salvaged.plan.right_queues == {found.physical_offset: ("orders", 1)}
    with lq.MessageStore.open(into) as store:
        assert {(m.queue_id, m.queue_offset) for m in store.scan()} == {
            (queue_id, offset) for queue_id in (0, 1) for offset in range(20)
        }
        for queue_id in (0, 1):
            got = store.get("orders", queue_id, 0, 32).messages
            assert [(m.queue_id, m.queue_offset) for m in got] == [
                (queue_id, offset) for offset in range(20)
            ]
    assert not verify_store(StoreLayout.open(into)).findings


@pytest.mark.parametrize("bits", [4, 12])
def test_a_wrong_transaction_type_is_corrected(bits: int, two_queues: Path) -> None:
    """No CRC covers SYSFLAG. No queue gets half messages (4) and rollbacks (12), but this queue has
    the message's entry.
    """
    with lq.MessageStore.open(two_queues) as store:
        place = store.get("orders", 1, 10, 1).messages[0].physical_offset
    at = place + HEAD.offsets["sys_flag"] + 3
    flip(two_queues / "commitlog" / f"{0:020d}", at, bits)
    assert lost_in(two_queues) == {}
    into = two_queues.parent / "new"
    salvaged = salvage_store(StoreLayout.open(two_queues).by_content(), into)
    assert salvaged.is_whole
    with lq.MessageStore.open(into) as store:
        assert store.get("orders", 1, 10, 1).messages[0].sys_flag == 0
    assert not verify_store(StoreLayout.open(into)).findings


@pytest.mark.parametrize("bits", [4, 12])
def test_a_frame_with_a_wrong_transaction_type_is_lost_in_its_queue(
    bits: int, two_queues: Path
) -> None:
    """The entry in the queue has another tags code, so it does not prove that the type is wrong."""
    with lq.MessageStore.open(two_queues) as store:
        place = store.get("orders", 1, 10, 1).messages[0].physical_offset
    at = place + HEAD.offsets["sys_flag"] + 3
    flip(two_queues / "commitlog" / f"{0:020d}", at, bits)
    flip(min((two_queues / "consumequeue" / "orders" / "1").iterdir()), 10 * 20 + 19, 1)
    assert lost_in(two_queues) == {("orders", 1): [(10, 11)]}


def test_a_frame_without_a_place_takes_no_place_of_another(two_queues: Path) -> None:
    """Without the queues, the right queue of a frame with a harmed queue id is unknown. The frame
    names queue 0, which has another message at its queue offset.
    """
    root = two_queues
    with lq.MessageStore.open(root, mode="rw") as store:
        for _ in range(4):
            store.put(lq.Message("orders", b"b" * 50, queue_id=0))
        place = store.put(lq.Message("orders", b"stray", queue_id=1)).physical_offset
        for _ in range(4):
            store.put(lq.Message("orders", b"b" * 50, queue_id=0))
    at = place + HEAD.offsets["queue_id"]
    size = config().mapped_file_size_commit_log or 0
    file = at // size * size
    overwrite(root / "commitlog" / f"{file:020d}", at - file, (0).to_bytes(4))
    shutil.rmtree(root / "consumequeue")
    into = root.parent / "new"
    salvaged = salvage_store(StoreLayout.open(root, config()).by_content(), into)
    assert [(span.kind, span.offset) for span in salvaged.plan.lost] == [("harmed_queue_id", place)]
    rebuild(root, apply=True, config=config())
    for where in (root, into):
        with lq.MessageStore.open(where, config=config()) as store:
            assert len(list(store.scan())) == 49
            # A get ends at the end of a queue file.
            got = [one for at in range(28) for one in store.get("orders", 0, at, 1).messages]
            assert [message.queue_offset for message in got] == list(range(28))
            assert all(message.body == b"b" * 50 for message in got)
        findings = verify_store(StoreLayout.open(where, config())).findings
        assert [one.kind for one in findings if one.severity == "damage"] == ["harmed_queue_id"]


def test_swapped_queue_files_lose_nothing(two_queues: Path) -> None:
    """Their entries point to sound messages of another queue."""
    with lq.MessageStore.open(two_queues, mode="rw") as store:
        for _ in range(10):
            store.put(lq.Message("orders", b"b" * 50, queue_id=1))
    first, second = (two_queues / "consumequeue/orders" / str(number) for number in (0, 1))
    first.rename(two_queues / "aside")
    second.rename(first)
    (two_queues / "aside").rename(second)
    assert lost_in(two_queues) == {}


def test_entries_of_messages_that_a_recovery_cut_off_are_no_loss(two_queues: Path) -> None:
    """RocketMQ leaves such entries; then other messages take their place in the log."""
    path = two_queues / "consumequeue/orders/1" / f"{0:020d}"
    with lq.MessageStore.open(two_queues) as store:
        place = store.get("orders", 0, 19, 1).messages[0]
    overwrite(path, 20 * 20, struct.pack(">qiq", place.physical_offset, place.size, 0))
    assert lost_in(two_queues) == {}


@pytest.mark.parametrize("gone", [[], ["checkpoint"]])
def test_a_log_of_which_only_checkpoint_and_index_are_left(gone: list[str], tmp_path: Path) -> None:
    with opened(tmp_path / "store") as writer:
        writer.put(lq.Message("orders", b"body", keys="k"))
    for name in ("commitlog", "consumequeue", ".logquarry"):
        shutil.rmtree(tmp_path / "store" / name)
    # A broker makes these folders again.
    (tmp_path / "store" / "commitlog").mkdir()
    for name in gone:
        (tmp_path / "store" / name).unlink()
    found = lq.salvage(tmp_path / "store")
    (span,) = found.plan.lost
    known = "index/" if gone else "checkpoint"
    assert span.kind == "missing_file" and span.file.startswith(known)
    assert not found.is_whole


def test_an_empty_store_has_no_loss(tmp_path: Path) -> None:
    opened(tmp_path / "store").close()
    assert lq.salvage(tmp_path / "store").is_whole


@pytest.mark.parametrize("value", [2, 40, 1 << 40])
@pytest.mark.parametrize("number", [0, 7, 18])
def test_a_harmed_offset_of_a_message_with_copies(tmp_path: Path, number: int, value: int) -> None:
    """A frame has only its own queue offset; a property has the queue offsets of its copies."""
    root = tmp_path / "store"
    with opened(root, enable_multi_dispatch=True, enable_lmq=True) as store:
        for count in range(20):
            copies = {"INNER_MULTI_DISPATCH": "%LMQ%a"} if count % 3 else {}
            store.put(lq.Message("t", b"%d" % count, properties=copies))
        places = [message.physical_offset for message in store.scan()]
    log = root / "commitlog" / f"{0:020d}"
    overwrite(log, places[number] + HEAD.offsets["queue_offset"], value.to_bytes(8, "big"))
    # Damage also changes queue offset 4 of a copy, which is in a property.
    data = log.read_bytes()
    assert data.count(b"INNER_MULTI_QUEUE_OFFSET\x014") == 1
    at = data.index(b"INNER_MULTI_QUEUE_OFFSET\x014")
    overwrite(log, at + 25, b"9")
    salvage_store(StoreLayout.open(root), tmp_path / "new")
    with lq.MessageStore.open(tmp_path / "new") as found:
        assert [message.queue_offset for message in found.scan()] == list(range(20))
        assert len(found.get("%LMQ%a", 0, 5).messages) == 8


@pytest.mark.parametrize(("value", "is_lost"), [(0, False), (2, False), (2, True)])
def test_the_last_message_has_a_harmed_offset(tmp_path: Path, value: int, is_lost: bool) -> None:
    """Otherwise the new queue would lack all messages before it."""
    root = tmp_path / "store"
    with opened(root) as store:
        places = [store.put(lq.Message("t", b"%d" % n)).physical_offset for n in range(20)]
    log = root / "commitlog" / f"{0:020d}"
    overwrite(log, places[-1] + HEAD.offsets["queue_offset"], value.to_bytes(8, "big"))
    if is_lost:
        shutil.rmtree(root / "consumequeue")
    salvage_store(StoreLayout.open(root), tmp_path / "new")
    assert not lq.verify(tmp_path / "new").findings
    with lq.MessageStore.open(tmp_path / "new") as found:
        assert found.queue_offsets("t", 0) == (0, 20)
        messages = found.get("t", 0, 0, max_count=32).messages
        assert [(m.queue_offset, int(m.body)) for m in messages] == [(n, n) for n in range(20)]


@pytest.mark.parametrize("is_closed", [True, False])
def test_bytes_after_the_end_of_a_closed_log_are_a_loss(tmp_path: Path, is_closed: bool) -> None:
    maker = StoreMaker()
    maker.put("T")
    last = maker.put("T", sys_flag=sys_flag.TRANSACTION_ROLLBACK)
    root = maker.write(tmp_path)
    flip(root / "commitlog" / f"{0:020d}", last.physical_offset + 4, 255)
    if not is_closed:
        # A crash can leave a part of a message.
        (root / "abort").touch()
    lost = plan_salvage(StoreLayout.open(root)).lost
    kinds = [(span.kind, span.offset) for span in lost]
    assert kinds == ([("torn_tail", last.physical_offset)] if is_closed else [])
