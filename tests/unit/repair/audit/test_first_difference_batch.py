"""Where a batch queue first differs from its log (``audit.first_difference``)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from logquarry.config import StoreConfig
from logquarry.format.batch import ENTRY_SIZE
from logquarry.log.layout import StoreLayout
from logquarry.log.walk import DamagedSpan
from logquarry.read.batch_queue import BATCH_DTYPE, BatchEntries, BatchQueue
from logquarry.read.log_end import DamageMap
from logquarry.repair.audit.first_difference import BatchQueueAudit
from logquarry.repair.recover.plan import QueueAction, QueuePlan, plan_queue

SIZE = 100
FILE_SIZE = 4 * ENTRY_SIZE
KEY = "t", 0


def entries(*numbers: int) -> BatchEntries:
    """The entries of messages with these numbers; the message's number is its queue offset."""
    made = np.zeros(len(numbers), BATCH_DTYPE)
    made["physical_offset"] = np.array(numbers) * SIZE
    made["size"], made["count"], made["base"] = SIZE, 1, numbers
    return made


def planned(
    root: Path,
    *,
    zeroed: set[int],
    log: list[int],
    lost: set[int] | None = None,
    torn: list[int] | None = None,
) -> QueuePlan:
    """The plan for a queue of eight messages in two files. ``zeroed``: its entries that are zeros;
    ``torn``: its entries with only the first fields; ``log``, ``lost``: numbers of the messages
    that are in the log, and of the damaged ones.
    """
    stored = entries(*range(8))
    stored[sorted(zeroed)] = np.zeros(1, BATCH_DTYPE)
    for field in ("base", "count"):
        stored[field][torn or []] = 0
    folder = root / "batchconsumequeue" / "t" / "0"
    folder.mkdir(parents=True)
    (root / "commitlog").mkdir()
    for at in (0, FILE_SIZE):
        (folder / f"{at:020d}").write_bytes(stored.tobytes()[at : at + FILE_SIZE])
    layout = StoreLayout.open(root, StoreConfig(mapper_file_size_batch_consume_queue=FILE_SIZE))
    spans = [DamagedSpan(n * SIZE, SIZE, "zeroed", "zeros", "log") for n in sorted(lost or ())]
    audit = BatchQueueAudit(KEY, BatchQueue(layout, *KEY), DamageMap(spans))
    audit.take(np.array(log, np.int64), entries(*log))
    return plan_queue(audit.finish(min(log) * SIZE))


@pytest.mark.parametrize("zeroed", [{3}, {2, 3}, {1, 2, 3}, {1}])
def test_zeroed_entries_of_lost_messages_do_not_stay(zeroed: set[int], tmp_path: Path) -> None:
    plan = planned(tmp_path, zeroed=zeroed, log=[0, 4, 5, 6, 7], lost={1, 2, 3})
    assert (plan.action, plan.keep_until) == (QueueAction.CUT, min(zeroed))
    assert (plan.end, plan.resume_at) == (min(zeroed) + 4, 4 * SIZE)


def test_a_torn_entry_of_a_lost_message_does_not_stay(tmp_path: Path) -> None:
    plan = planned(tmp_path, zeroed=set(), torn=[3], log=[0, 1, 4, 5], lost={2, 3})
    assert (plan.action, plan.keep_until, plan.resume_at) == (QueueAction.CUT, 3, 4 * SIZE)


def test_a_torn_entry_of_the_last_lost_message_does_not_stay(tmp_path: Path) -> None:
    plan = planned(tmp_path, zeroed={4, 5, 6, 7}, torn=[3], log=[0, 1], lost={2, 3})
    assert (plan.action, plan.keep_until, plan.resume_at) == (QueueAction.CUT, 3, None)


def test_a_zeroed_entry_of_the_last_lost_messages_does_not_stay(tmp_path: Path) -> None:
    plan = planned(tmp_path, zeroed={3}, log=[0, 1], lost={2, 3, 4, 5, 6, 7})
    assert (plan.action, plan.keep_until, plan.resume_at) == (QueueAction.CUT, 3, None)


@pytest.mark.parametrize("zeroed", [{1}, {2}, {1, 2}, {1, 3}])
def test_a_zeroed_entry_of_expired_messages_does_not_stay(zeroed: set[int], tmp_path: Path) -> None:
    plan = planned(tmp_path, zeroed=zeroed, log=[2, 3, 4, 5, 6, 7])
    assert (plan.action, plan.keep_until) == (QueueAction.CUT, min(zeroed))
    assert plan.resume_at == 2 * SIZE


def test_entries_of_lost_and_expired_messages_stay(tmp_path: Path) -> None:
    assert planned(tmp_path, zeroed=set(), log=[2, 3, 6, 7], lost={4, 5}).is_sound
