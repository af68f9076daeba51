"""What retention says about messages that services wait for, and what it does to 3.x's files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.dialect31.open_transactions import (
    TransactionsFound,
    read_redo,
    read_table,
)
from logquarry.dialect31.state_table import find_transactions
from logquarry.errors import UsageError
from logquarry.format.properties import SCHEDULE_TOPIC
from logquarry.log.layout import StoreLayout
from logquarry.repair.verification import verify_store
from logquarry.store.message_store import StoreWriter
from logquarry.store.retention.rules import DELAYED, OPEN
from logquarry.store.transaction.transaction import HALF_TOPIC
from logquarry.testing.clock import FakeClock

NOW = 1_700_000_000_000
ALL = lq.RetentionRules(keep_bytes=0)


def config(**more: object) -> lq.StoreConfig:
    settings = {
        "mapped_file_size_commit_log": 4_096,
        "mapped_file_size_consume_queue": 100,
        "max_hash_slot_num": 4,
        "max_index_num": 20,
    }
    return lq.StoreConfig(**settings | more)  # type: ignore[arg-type]


def fill(store: StoreWriter) -> None:
    """Put messages after which all earlier ones expire."""
    for _ in range(6):
        store.put(lq.Message("filler", bytes(2_000)))
    store.wait_dispatched()
    store.flush()


def told(store: StoreWriter) -> set[tuple[str, int, str, int, int]]:
    plan = store.retain(ALL)
    return {(u.topic, u.queue_id, u.group, u.offset, u.messages) for u in plan.unread}


def test_delayed_messages_that_nobody_has_delivered_yet(tmp_path: Path) -> None:
    clock = FakeClock(NOW)
    with StoreWriter.start(tmp_path / "store", config=config(), clock=clock) as store:
        for _ in range(3):
            store.put(lq.Message("t", b"later", delay_level=5))
        store.put(lq.Message("t", b"soon", delay_level=1))
        fill(store)
        late = SCHEDULE_TOPIC, 4, DELAYED, 0, 3
        assert told(store) == {late, (SCHEDULE_TOPIC, 0, DELAYED, 0, 1)}
        clock.advance(2_000)
        assert store.deliver_due() == 1
        assert told(store) == {late}
        # They are deleted, as in RocketMQ; delivery goes on after them.
        store.retain(ALL, apply=True)
        store.put(lq.Message("t", b"last", delay_level=5))
        clock.advance(120_000)
        assert store.deliver_due() == 1
        store.wait_dispatched()
        assert [m.body for m in store.scan("t") if m.body in (b"later", b"last")][-1] == b"last"


def test_delayed_messages_beside_the_offsets_of_another_store(tmp_path: Path) -> None:
    with StoreWriter.start(tmp_path / "store", config=config()) as store:
        store.put(lq.Message("t", b"later", delay_level=5))
        fill(store)
        (tmp_path / "store/config").mkdir(exist_ok=True)
        (tmp_path / "store/config/delayOffset.json").write_text('{"offsetTable":{5:50}}')
        assert told(store) == {(SCHEDULE_TOPIC, 4, DELAYED, 0, 1)}


def test_half_messages_that_are_open(tmp_path: Path) -> None:
    clock = FakeClock(NOW)
    with StoreWriter.start(tmp_path / "store", config=config(), clock=clock) as store:
        for number in range(6):
            with store.transaction(lq.Message("t", b"%d" % number)) as t:
                if number % 3 == 0:
                    t.commit()
                elif number % 3 == 1:
                    t.leave_open()
        fill(store)
        assert told(store) == {(HALF_TOPIC, 0, OPEN, 1, 2)}
        assert store.stats().state.half_messages == {"t": 2}
        clock.advance(10_000)
        # The checker has put them back at the end, so they are not deleted.
        assert store.check_transactions(lambda _: "unknown").unknown == 2
        store.wait_dispatched()
        assert not told(store)
        assert store.stats().state.half_messages == {"t": 2}
        store.retain(ALL, apply=True)
        clock.advance(10_000)
        assert store.check_transactions(lambda _: "commit").committed == 2
        store.wait_dispatched()
        assert store.stats().state.half_messages == {}
    with lq.MessageStore.open(tmp_path / "store") as reader:
        assert reader.stats().state.half_messages == {}


def test_what_a_group_sent_back(tmp_path: Path) -> None:
    clock = FakeClock(NOW)
    with StoreWriter.start(tmp_path / "store", config=config(), clock=clock) as store:
        store.put(lq.Message("t", b"one"))
        store.wait_dispatched()
        with store.consumer("g", "t", timeout=0) as consumer:
            for message in consumer:
                consumer.retry(message)
        clock.advance(60_000)
        assert store.deliver_due() == 1
        fill(store)
        assert told(store) == {("%RETRY%g", 0, "g", 0, 1)}


# ------------------------------------------------------------------------------------------ 3.x
def old() -> lq.StoreConfig:
    return config(
        dialect="3.1",
        tran_state_table_mapped_file_size=24 * 5,
        tran_redo_log_mapped_file_size=20 * 7,
    )


def in_order(_: Path) -> None:
    """Leave the store cleanly closed."""


def crashed(root: Path) -> None:
    (root / "abort").touch()


@pytest.mark.parametrize("before_opening", [in_order, crashed])
@pytest.mark.parametrize("is_live", [True, False])
def test_transactions_of_3x(
    tmp_path: Path, is_live: bool, before_opening: Callable[[Path], None]
) -> None:
    root, clock = tmp_path / "store", FakeClock(NOW)
    opened: dict[int, int] = {}
    with StoreWriter.start(root, config=old(), clock=clock) as store:
        transactions = store.prepared_transactions
        for number in range(60):
            put = transactions.begin(lq.Message("t", bytes(300)), "g")
            if number % 10:
                transactions.commit(put.physical_offset)
            else:
                opened[put.physical_offset] = put.queue_offset
        store.wait_dispatched()
        store.flush()
        rules = lq.RetentionRules(keep_bytes=20_000)
        plan = store.retain(rules, apply=is_live)
        gone = {at for at in opened if at < plan.new_min_offset}
        assert gone and len(gone) < len(opened)
        assert [(u.topic, u.group, u.offset, u.messages) for u in plan.unread] == [
            ("t", OPEN, 0, len(gone))
        ]
        left = {at: number for at, number in opened.items() if at not in gone}
        if is_live:
            assert {one.physical_offset: one.number for one in transactions.open()} == left
            transactions.rollback(left.popitem()[0])
    if not is_live:
        plan = lq.retain(root, rules, apply=True, config=old(), clock=clock)
    folders = {file.path.split("/")[1] for file in plan.transactions}
    assert folders == {"statetable", "redolog"}
    layout = StoreLayout.open(root, old())
    for found in (read_table(layout), read_redo(layout)):
        assert found.fault is None and found.first > 0
        # Not too many files: the first remaining file has the entry of a remaining message.
        first = found.units["physical_offset"][: 5 if found.units.dtype.itemsize == 24 else 7]
        assert int(first.max()) >= plan.new_min_offset
    end = max(int(offset) for offset in read_redo(layout).units["physical_offset"])
    found_at = find_transactions(layout, plan.new_min_offset, end + 4_096)
    assert isinstance(found_at, TransactionsFound), found_at
    assert not verify_store(layout).has_damage
    before_opening(root)
    with StoreWriter.start(root, config=old(), clock=clock) as store:
        transactions = store.prepared_transactions
        assert {one.physical_offset: one.number for one in transactions.open()} == left
        assert transactions.begin(lq.Message("t", b"new"), "g").queue_offset == 60
        for offset in left:
            transactions.commit(offset)
        with pytest.raises(UsageError):
            transactions.commit(min(gone))
    quarantine = root / ".logquarry" / "quarantine" / "transaction"
    # Nothing had to be rebuilt, not even after a crash.
    assert not quarantine.exists()
    assert not verify_store(StoreLayout.open(root, old())).has_damage
