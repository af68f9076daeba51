"""``logquarry.repair.rebuild`` on frames whose queue offset damage has changed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.format.frame import HEAD
from logquarry.log.layout import StoreLayout
from logquarry.repair.rebuild.rebuild import rebuild
from logquarry.repair.salvage.salvage import salvage_store
from logquarry.repair.verification import verify_store
from tests.helpers.files import overwrite
from tests.helpers.small_store import config, opened

COUNT = 20


def store(root: Path) -> list[int]:
    """Fill a queue; return the physical offsets of its messages."""
    with opened(root) as made:
        for number in range(COUNT):
            made.put(lq.Message("t", b"%d" % number, keys="k"))
        return [message.physical_offset for message in made.scan()]


def harm(root: Path, place: int, field: str, value: int) -> None:
    size = 8 if field == "queue_offset" else 4
    data = value.to_bytes(size, "big", signed=True)
    overwrite(root / "commitlog" / f"{0:020d}", place + HEAD.offsets[field], data)


def served(root: Path, queue_id: int = 0) -> list[int]:
    """The numbers of all messages that a consumer gets, in the queue's order."""
    with lq.MessageStore.open(root) as opened_store:
        offset, end = opened_store.queue_offsets("t", queue_id)
        found = []
        while offset < end:
            answer = opened_store.get("t", queue_id, offset)
            found += [int(message.body) for message in answer.messages]
            offset = answer.next_offset
        return found


@pytest.mark.parametrize("is_lost", [True, False])
@pytest.mark.parametrize("value", [0, 3, 12, 60, 1 << 20, 1 << 40, 1 << 62, -1])
@pytest.mark.parametrize("number", [0, 1, 10, COUNT - 2, COUNT - 1])
def test_every_message_is_served_once(
    tmp_path: Path, number: int, value: int, is_lost: bool
) -> None:
    places = store(tmp_path)
    # Not harmed, or in the queue's last message, where only the old queue shows the damage.
    if value == number or (is_lost and (number, value) == (COUNT - 1, 0)):
        return
    harm(tmp_path, places[number], "queue_offset", value)
    if is_lost:
        shutil.rmtree(tmp_path / "consumequeue")
    report = rebuild(tmp_path, apply=True, config=config())
    assert report.queues is not None and not report.left_out
    (queue,) = report.queues
    assert (queue.min_offset, queue.max_offset) == (0, COUNT)
    assert (queue.harmed, queue.fillers, queue.restarts) == (1, 0, 0)
    assert served(tmp_path) == list(range(COUNT))
    with lq.MessageStore.open(tmp_path) as opened_store:
        (found,) = verify_store(opened_store.layout).findings
    assert (found.kind, found.offset) == ("harmed_queue_offset", places[number])


@pytest.mark.parametrize("value", [0, 2, 12, 40])
def test_a_frame_that_belongs_to_another_queue_is_reported(tmp_path: Path, value: int) -> None:
    places = store(tmp_path)
    with opened(tmp_path) as again:
        stranger = again.put(lq.Message("t", b"99", queue_id=1)).physical_offset
        again.put(lq.Message("t", b"%d" % COUNT))
    harm(tmp_path, stranger, "queue_id", 0)
    harm(tmp_path, stranger, "queue_offset", value)
    shutil.rmtree(tmp_path / "consumequeue")
    report = rebuild(tmp_path, apply=True, config=config())
    assert len(places) == COUNT
    assert [left.physical_offset for left in report.left_out] == [stranger]
    assert report.queues is not None
    assert [queue.restarts for queue in report.queues] == [0]
    assert served(tmp_path) == list(range(COUNT + 1))


def test_a_message_between_two_losses_stays_at_its_offset(tmp_path: Path) -> None:
    """A salvage removes the lost bytes, so the log no longer shows how many messages are lost."""
    source, target = tmp_path / "source", tmp_path / "target"
    with opened(source) as made:
        for number in range(80):
            made.put(lq.Message("t", b"%d" % number))
        places = [message.physical_offset for message in made.scan()]
    log = source / "commitlog" / f"{0:020d}"
    for first, stop in ((10, 40), (41, 70)):
        overwrite(log, places[first], bytes(places[stop] - places[first]))
    salvage_store(StoreLayout.open(source, config()), target)
    shutil.rmtree(target / "consumequeue")
    report = rebuild(target, apply=True, config=config())
    assert report.queues is not None
    (queue,) = report.queues
    assert (queue.max_offset, queue.harmed, queue.fillers) == (80, 0, 59)
    with lq.MessageStore.open(target) as opened_store:
        answer = opened_store.get("t", 0, 40)
    assert answer.messages[0].body == b"40"


@pytest.mark.parametrize("value", [-1, (1 << 63) - 1])
def test_the_only_message_of_a_queue_stays_where_the_old_queue_has_it(
    tmp_path: Path, value: int
) -> None:
    with opened(tmp_path) as made:
        place = made.put(lq.Message("t", b"0")).physical_offset
    harm(tmp_path, place, "queue_offset", value)
    report = rebuild(tmp_path, apply=True, config=config())
    assert report.queues is not None
    (queue,) = report.queues
    assert (queue.min_offset, queue.max_offset, queue.harmed) == (0, 1, 1)
    assert served(tmp_path) == [0]
