"""Where a queue first differs from its log (``audit.first_difference``)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from logquarry.config import StoreConfig
from logquarry.format import queue_entry
from logquarry.format.queue_entry import FILLER, QueueEntry
from logquarry.log.layout import StoreLayout
from logquarry.log.walk import DamagedSpan
from logquarry.read.log_end import DamageMap
from logquarry.read.queue import ConsumeQueue, Units
from logquarry.repair.audit.first_difference import QueueAudit
from logquarry.repair.recover.plan import QueueAction, QueuePlan, plan_queue
from logquarry.write.queue_writer import MOST_GAP, units_of

SIZE = 100
FILE_SIZE = 200
"""Ten units."""
KEY = "t", 0


def unit(number: int) -> QueueEntry:
    return QueueEntry(number * SIZE, SIZE, number)


def queue(root: Path, units: list[QueueEntry], start: int = 0) -> ConsumeQueue:
    folder = root / "consumequeue" / "t" / "0"
    folder.mkdir(parents=True)
    (root / "commitlog").mkdir()
    data = b"".join(map(queue_entry.encode, units))
    for at in range(0, max(1, len(data)), FILE_SIZE):
        path = folder / f"{start * 20 + at:020d}"
        path.write_bytes(data[at : at + FILE_SIZE].ljust(FILE_SIZE, b"\0"))
    config = StoreConfig(mapped_file_size_consume_queue=FILE_SIZE)
    return ConsumeQueue(StoreLayout.open(root, config), *KEY, log_min_offset=0)


def spans(*numbers: int) -> DamageMap:
    return DamageMap([DamagedSpan(n * SIZE, SIZE, "zeroed", "zeros", "log") for n in numbers])


def planned(
    disk: ConsumeQueue | None,
    log: list[tuple[int, int]],
    damage: DamageMap | None = None,
    *,
    start: int = 0,
) -> QueuePlan:
    """``log``: queue offset and number of each message; it begins with that of number ``start``."""
    audit = QueueAudit(KEY, disk, damage or spans())
    numbers = np.array([number for _, number in log], np.int64)
    if log:
        offsets = np.array([offset for offset, _ in log], np.int64)
        audit.take(offsets, units_of(numbers * SIZE, np.full(len(log), SIZE), numbers))
    return plan_queue(audit.finish(start * SIZE))


def same(*numbers: int) -> list[tuple[int, int]]:
    return [(number, number) for number in numbers]


def test_a_queue_that_agrees_stays(tmp_path: Path) -> None:
    disk = queue(tmp_path, [unit(number) for number in range(25)])
    assert planned(disk, same(*range(25))).is_sound
    # Entries of messages deleted at the log's start may stay.
    assert planned(disk, same(*range(20, 25)), start=20).is_sound
    # Entries of messages after the log's start that it does not have may not.
    plan = planned(disk, same(*range(20, 25)), start=12)
    assert (plan.action, plan.keep_until, plan.resume_at) == (QueueAction.CUT, 12, 20 * SIZE)
    lost = spans(*range(12, 20))
    assert planned(disk, same(*range(20, 25)), lost, start=12).is_sound


@pytest.mark.parametrize(
    ("log", "action", "keep", "end", "resume_at"),
    [
        (range(27), QueueAction.KEEP, 25, 27, 2_500),
        (range(20), QueueAction.CUT, 20, 20, None),
        ((), QueueAction.REBUILD, 0, 0, None),
    ],
)
def test_a_queue_that_is_too_short_or_too_long(
    tmp_path: Path,
    log: range,
    action: QueueAction,
    keep: int,
    end: int,
    resume_at: int | None,
) -> None:
    disk = queue(tmp_path, [unit(number) for number in range(25)])
    plan = planned(disk, same(*log))
    assert (plan.action, plan.keep_until, plan.end, plan.resume_at) == (
        action,
        keep,
        end,
        resume_at,
    )


def test_a_unit_that_differs(tmp_path: Path) -> None:
    units = [unit(number) for number in range(25)]
    units[12] = unit(99)
    plan = planned(queue(tmp_path, units), same(*range(25)))
    assert (plan.action, plan.keep_until, plan.resume_at) == (QueueAction.CUT, 12, 1_200)
    assert plan.reason.startswith("entry 12 points to 100 bytes at 9900")


def test_a_lost_queue_is_made_from_where_the_log_has_it() -> None:
    plan = planned(None, same(*range(7, 12)))
    assert (plan.action, plan.end, plan.resume_at) == (QueueAction.REBUILD, 12, 700)


def test_units_of_damage_and_fillers_stay(tmp_path: Path) -> None:
    units = [unit(number) for number in range(12)]
    units[4] = FILLER
    disk = queue(tmp_path, units)
    log = same(0, 1, 2, 5, 6, 7, 8, 9, 10)
    assert planned(disk, log, spans(3, 11)).is_sound
    plan = planned(disk, log, spans(11))
    assert (plan.keep_until, plan.resume_at) == (3, 500)
    plan = planned(disk, log, spans(3))
    assert (plan.action, plan.keep_until, plan.resume_at) == (QueueAction.CUT, 11, None)


def test_a_topic_that_came_again(tmp_path: Path) -> None:
    log = [*same(0, 1, 2), (0, 3), (1, 4)]
    assert planned(queue(tmp_path / "new", [unit(3), unit(4)]), log).is_sound
    plan = planned(queue(tmp_path / "old", [unit(n) for n in range(3)]), log)
    assert (plan.action, plan.resume_at, plan.end) == (QueueAction.REBUILD, 300, 2)


@pytest.mark.parametrize("wrong", [0, 5, 8, 10, MOST_GAP * 2])
def test_a_rotten_queue_offset_is_set_right_by_the_queue(tmp_path: Path, wrong: int) -> None:
    disk = queue(tmp_path, [unit(number) for number in range(12)])
    log = [*same(*range(9)), (wrong, 9), *same(10, 11)]
    assert planned(disk, log).is_sound


def test_an_offset_far_beyond_is_passed_over() -> None:
    plan = planned(None, [*same(0, 1), (MOST_GAP + 3, 2), *same(3)])
    assert (plan.end, plan.resume_at) == (4, 0)


@pytest.mark.parametrize("wrong", [-1, 7, 1 << 20, MOST_GAP * 4, 1 << 59, (1 << 63) - 1])
@pytest.mark.parametrize("number", [0, 1, 5, 9])
@pytest.mark.parametrize("queues", ["there", "lost"])
def test_a_hostile_offset_leaves_no_gap(
    tmp_path: Path, queues: str, number: int, wrong: int
) -> None:
    """The queue gets no more fillers for lost messages than the log had room for."""
    disk = queue(tmp_path, [unit(number) for number in range(10)]) if queues == "there" else None
    log = [(n if n != number else wrong, n) for n in range(10)]
    plan = planned(disk, log)
    assert plan.end == 10
    assert plan.is_sound is (disk is not None)
    if disk is None:
        assert plan.moved == {number * SIZE: number}


@pytest.mark.parametrize("wrong", [-5, 1, 3, 8])
@pytest.mark.parametrize("behind", [[], [20, 21]])
def test_one_offset_that_falls_back_begins_no_new_life(wrong: int, behind: list[int]) -> None:
    """A topic that was created again begins at 0, and goes on from there."""
    plan = planned(None, [*same(*range(9)), (wrong, 9), *same(*behind)])
    assert (plan.end, dict(plan.moved)) == (22 if behind else 10, {900: 9})


def test_the_only_message_of_a_queue_has_a_hostile_offset(tmp_path: Path) -> None:
    disk = queue(tmp_path, [unit(number) for number in range(3)])
    assert planned(disk, [(1 << 59, 2)], spans(0, 1)).is_sound
    plan = planned(None, [(1 << 59, 0)])
    assert (plan.end, dict(plan.moved)) == (1, {0: 0})


def test_two_messages_agree_on_their_offsets_against_the_queue(tmp_path: Path) -> None:
    """Otherwise the queue would be cut before the second message, and look wrong again."""
    disk = queue(tmp_path, [unit(number) for number in (0, 1, 2)])
    plan = planned(disk, [(1, 2), (2, 4)], start=2)
    assert (plan.keep_until, plan.end, dict(plan.moved)) == (1, 3, {})


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_the_size_of_the_pieces_does_not_matter(tmp_path: Path, size: int) -> None:
    """Two messages continue each other, but the queue has both at other offsets."""
    disk = queue(tmp_path, [unit(number) for number in range(7)])
    offsets = np.array([0, 1, 2, 20, 21, 5, 6], np.int64)
    numbers = np.arange(7, dtype=np.int64)
    units = units_of(numbers * SIZE, np.full(7, SIZE), numbers)
    audit = QueueAudit(KEY, disk, spans())
    for at in range(0, 7, size):
        audit.take(offsets[at : at + size], units[at : at + size])
    assert plan_queue(audit.finish(0)).is_sound


def test_a_last_file_that_is_empty_goes(tmp_path: Path) -> None:
    queue(tmp_path, [unit(number) for number in range(10)])
    (tmp_path / "consumequeue" / "t" / "0" / f"{FILE_SIZE:020d}").touch()
    config = StoreConfig(mapped_file_size_consume_queue=FILE_SIZE)
    disk = ConsumeQueue(StoreLayout.open(tmp_path, config), *KEY, log_min_offset=0)
    plan = planned(disk, same(*range(10)))
    assert (plan.action, plan.keep_until) == (QueueAction.CUT, 10)


def test_the_first_message_that_is_left_of_a_recreated_topic_keeps_its_entry() -> None:
    """Messages 0 to 2 and 4 of the recreated topic are lost."""
    plan = planned(None, [*same(*range(50)), (3, 53), (5, 55), (6, 56)], spans(50, 51, 52, 54))
    assert (plan.end, dict(plan.moved)) == (7, {})


@pytest.mark.parametrize("again", [0, 1])
def test_a_recreated_topic_whose_next_message_has_the_old_next_offset(
    tmp_path: Path, again: int
) -> None:
    """The new messages between ``again`` and offset 3 are lost."""
    units = [unit(0), unit(1), FILLER, unit(5)]
    units[again] = unit(3)
    units[again + 1 : 3] = [FILLER] * (2 - again)
    plan = planned(queue(tmp_path, units), [*same(0, 1, 2), (again, 3), (3, 5)], spans(4))
    assert plan.is_sound


def test_a_hostile_log_does_not_search_the_queue_for_each_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, searches = queue(tmp_path, [unit(number) for number in range(25)]), list[int]()
    runs = disk.runs

    def counted(start: int, stop: int) -> Iterator[tuple[int, Units]]:
        searches.append(start)
        return runs(start, stop)

    monkeypatch.setattr(disk, "runs", counted)
    planned(disk, [(-1 - 4 * (number % 2), number) for number in range(30, 530)], start=30)
    assert len(searches) < 100
