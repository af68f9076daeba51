"""Is a transaction's message there when it was committed, and only then?"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import logquarry as lq
from logquarry.errors import MessageRejected, StoreUnavailable, UsageError
from logquarry.store.transaction.transaction import OP_TOPIC
from logquarry.testing.clock import FakeClock
from tests.helpers.transaction_stores import (
    NOW,
    TIMEOUT,
    Listener,
    bodies,
    facts,
    failing,
    message,
    opened,
)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(NOW)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


def test_a_commit_puts_the_message(root: Path, clock: FakeClock) -> None:
    with opened(root, clock) as store:
        with store.transaction(message(properties={"city": "Zürich"}, flag=7, keys="k")) as t:
            assert bodies(store) == []
            result = t.commit()
            assert t.state is lq.TransactionState.COMMIT
        assert result.ok and t.half is not None
        stored = store.message_at(result.physical_offset)
        assert (stored.topic, stored.queue_id, stored.queue_offset) == ("orders", 1, 0)
        assert (stored.sys_flag, stored.flag, stored.keys) == (8, 7, "k")
        assert stored.prepared_transaction_offset == t.half.physical_offset
        assert stored.uniq_key == t.transaction_id
        assert stored.properties["PGROUP"] == "logquarry"
        store.wait_dispatched()
        assert store.get("orders", 1, tag="t").messages[0].body == b"x"
        half = store.message_at(t.half.physical_offset)
        assert half.frame == t.half
    assert facts(root) == (1, 0, 0, 0)


def test_an_exception_rolls_back_and_comes_through(root: Path, clock: FakeClock) -> None:
    with opened(root, clock) as store:
        with pytest.raises(KeyError), store.transaction(message()) as t:
            raise KeyError("why")
        assert t.state is lq.TransactionState.ROLLBACK
        with pytest.raises(KeyboardInterrupt), store.transaction(message()):
            raise KeyboardInterrupt
    assert facts(root) == (0, 2, 0, 0)


def test_nobody_saying_anything_rolls_back(root: Path, clock: FakeClock) -> None:
    with opened(root, clock) as store:
        with store.transaction(message()):
            pass
        with store.transaction(message()) as t:
            t.rollback()
        assert bodies(store) == []
    assert facts(root) == (0, 2, 0, 0)


def test_what_was_left_open_stays_open(root: Path, clock: FakeClock) -> None:
    with opened(root, clock) as store, store.transaction(message()) as t:
        t.leave_open()
    assert facts(root) == (0, 0, 0, 1)


def test_an_exception_behind_the_commit_takes_nothing_back(root: Path, clock: FakeClock) -> None:
    with opened(root, clock) as store:
        with pytest.raises(KeyError), store.transaction(message()) as t:
            t.commit()
            raise KeyError
        assert bodies(store) == [b"x"]
    assert facts(root) == (1, 0, 0, 0)


def test_a_transaction_ends_once(root: Path, clock: FakeClock) -> None:
    with opened(root, clock) as store:
        t = store.transaction(message())
        with pytest.raises(UsageError, match="has not begun"):
            t.commit()
        with t:
            t.commit()
            for again in (t.commit, t.rollback, t.leave_open):
                with pytest.raises(UsageError, match="already ended"):
                    again()
        with pytest.raises(UsageError, match="once"):
            t.__enter__()
    assert facts(root) == (1, 0, 0, 0)


@pytest.mark.parametrize(
    "fields",
    [{"delay_level": 3}, {"properties": {"DELAY": "0"}}, {"sys_flag": 4}, {"sys_flag": 8}],
)
def test_messages_that_cannot_be_of_a_transaction(
    root: Path, clock: FakeClock, fields: dict[str, Any]
) -> None:
    with (
        opened(root, clock) as store,
        pytest.raises(UsageError),
        store.transaction(message(**fields)),
    ):
        pytest.fail("it began")
    with lq.MessageStore.open(root) as reader:
        assert list(reader.scan()) == []


@pytest.mark.parametrize("fields", [{"topic": "a/b"}, {"topic": ""}, {"queue_id": 1 << 31}])
def test_a_place_that_cannot_be_put_to_is_refused_before_the_block(
    root: Path, clock: FakeClock, fields: dict[str, Any]
) -> None:
    """The block can do work that cannot be undone, so the commit must not be the first check."""
    with (
        opened(root, clock) as store,
        pytest.raises((MessageRejected, UsageError)),
        store.transaction(message()._replace(**fields)),
    ):
        pytest.fail("it began")
    with lq.MessageStore.open(root) as reader:
        assert list(reader.scan()) == []


def test_a_reading_store_has_no_transactions(root: Path, clock: FakeClock) -> None:
    with opened(root, clock) as store:
        store.put(message())
    with lq.MessageStore.open(root) as opened_to_read:
        reader: Any = opened_to_read
        with pytest.raises(StoreUnavailable):
            reader.transaction(message())
        with pytest.raises(StoreUnavailable):
            reader.check_transactions(Listener())
        with pytest.raises(StoreUnavailable):
            reader.start_transaction_checks(Listener())


def test_a_commit_that_failed_can_be_tried_again(root: Path, clock: FakeClock) -> None:
    with opened(root, clock) as store:
        with store.transaction(message()) as t:
            mend = failing(store, "orders")
            with pytest.raises(StoreUnavailable):
                t.commit()
            mend()
            t.commit()
        assert bodies(store) == [b"x"]
    assert facts(root) == (1, 0, 0, 0)


def test_a_commit_whose_note_failed_is_one_and_is_noted_later(root: Path, clock: FakeClock) -> None:
    with opened(root, clock) as store:
        with store.transaction(message()) as t:
            mend = failing(store, OP_TOPIC)
            t.commit()
        assert bodies(store, OP_TOPIC) == []
        clock.advance(TIMEOUT)
        with pytest.raises(StoreUnavailable):
            store.check_transactions(Listener())
        mend()
        listener = Listener()
        store.check_transactions(listener)
        assert not listener.asked and bodies(store, OP_TOPIC) == [b"0"]
    assert facts(root) == (1, 0, 0, 0)


def test_a_rollback_that_failed_is_told_and_left_to_the_checks(
    root: Path, clock: FakeClock
) -> None:
    with opened(root, clock) as store:
        with pytest.raises(StoreUnavailable), store.transaction(message()):
            mend = failing(store, OP_TOPIC)
        with pytest.raises(KeyError), store.transaction(message(b"y")):
            raise KeyError("of the block")
        mend()
        clock.advance(TIMEOUT)
        report = store.check_transactions(Listener(x="rollback", y="rollback"))
        assert report.rolled_back == 2
    assert facts(root) == (0, 2, 2, 0)


def test_many_threads(root: Path, clock: FakeClock) -> None:
    with opened(root, clock, flush_disk_type="SYNC_FLUSH") as store:

        def work(name: int) -> None:
            for number in range(12):
                with store.transaction(message(b"%d-%d" % (name, number))) as t:
                    if number % 3 == 0:
                        t.commit()
                    elif number % 3 == 1:
                        t.leave_open()

        threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            clock.advance(TIMEOUT)
            store.check_transactions(lambda t: "commit")
        clock.advance(TIMEOUT)
        store.check_transactions(lambda t: "commit")
        wanted = [b"%d-%d" % (n, m) for n in range(4) for m in range(12) if m % 3 < 2]
        assert sorted(bodies(store)) == sorted(wanted)
    assert facts(root)[0] == 32 and facts(root)[3] == 0
