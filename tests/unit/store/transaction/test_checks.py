"""Is each open transaction checked, and ended once, whatever happens?"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import logquarry as lq
from logquarry.errors import StoreUnavailable, UsageError
from logquarry.format import broker_json
from logquarry.message import Message
from logquarry.store.transaction.checks import CheckReport, OpenTransaction
from logquarry.store.transaction.transaction import GIVEN_UP_TOPIC, GROUP, HALF_TOPIC, OP_TOPIC
from logquarry.testing.clock import FakeClock
from logquarry.write.put_result import PutResult
from tests.helpers.transaction_stores import (
    NOW,
    TIMEOUT,
    Listener,
    bodies,
    facts,
    failing,
    leave,
    message,
    opened,
)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(NOW)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


def offsets(root: Path) -> tuple[int, int]:
    data = (root / "config" / "consumerOffset.json").read_bytes()
    table = broker_json.decode_consumer_offsets(data)
    return table[HALF_TOPIC, GROUP][0], table[OP_TOPIC, GROUP][0]


def test_the_listener_decides(root: Path, clock: FakeClock) -> None:
    listener = Listener(a="commit", b="rollback")
    with opened(root, clock) as store:
        leave(store, "a", "b", "c", keys="k")
        assert store.check_transactions(listener) == CheckReport(), "too young"
        clock.advance(TIMEOUT - 1)
        assert store.check_transactions(listener) == CheckReport()
        clock.advance(1)
        report = store.check_transactions(listener)
        assert (report.committed, report.rolled_back, report.unknown) == (1, 1, 1)
        asked = listener.asked[0]
        assert (asked.topic, asked.queue_id, asked.check_times) == ("orders", 1, 1)
        assert (asked.message.keys, asked.message.tags) == ("k", "t")
        assert asked.message.topic == HALF_TOPIC
        assert store.message_at(asked.message.physical_offset) == asked.message
        assert bodies(store) == [b"a"]
        clock.advance(1)
        report = store.check_transactions(listener)
        assert report.unknown == 1 and listener.asked[-1].check_times == 2
    assert facts(root) == (1, 1, 4, 1)
    assert offsets(root) == (6, 2)


def test_a_listener_that_fails_decides_nothing(root: Path, clock: FakeClock) -> None:
    def fail(_: OpenTransaction) -> str:
        raise ValueError("it has no idea")

    with opened(root, clock) as store:
        leave(store, "a", "b")
        clock.advance(TIMEOUT)
        assert store.check_transactions(fail).unknown == 2
        clock.advance(1)
        assert store.check_transactions(lambda t: "perhaps").unknown == 2
        clock.advance(1)
        assert store.check_transactions(lambda t: lq.TransactionState.COMMIT).committed == 2
    assert facts(root) == (2, 0, 6, 0)


def test_young_ones_keep_those_behind_them_waiting(root: Path, clock: FakeClock) -> None:
    """As in RocketMQ: the born time counts, and the queue's order."""
    with opened(root, clock) as store:
        leave(store, "old")
        leave(store, "young", born_timestamp=NOW + 3_000)
        leave(store, "behind")
        clock.advance(TIMEOUT)
        listener = Listener()
        assert store.check_transactions(listener).unknown == 1
        clock.advance(3_000)
        store.check_transactions(listener)
        assert [t.message.body for t in listener.asked] == [b"old", b"young", b"behind", b"old"]


def test_a_clock_that_went_back_lets_them_be_asked(root: Path, clock: FakeClock) -> None:
    with opened(root, clock) as store:
        leave(store, "a", born_timestamp=NOW + 3_600_000)
        clock.advance(1)
        assert store.check_transactions(Listener(a="commit")).committed == 1


def test_immune_ones_are_put_back_and_not_asked_for(root: Path, clock: FakeClock) -> None:
    listener = Listener(slow="commit", quick="commit")
    with opened(root, clock, transaction_check_max=2) as store:
        leave(store, "slow", properties={"CHECK_IMMUNITY_TIME_IN_SECONDS": "60"})
        leave(store, "quick")
        for _ in range(5):
            clock.advance(TIMEOUT)
            report = store.check_transactions(listener)
            assert report.put_back == 1 and report.given_up == 0
        assert [t.message.body for t in listener.asked] == [b"quick"]
        half = list(store.scan(HALF_TOPIC))[-1]
        assert half.properties["TRAN_PREPARED_QUEUE_OFFSET"] == "0"
        assert "TRANSACTION_CHECK_TIMES" not in half.properties
        clock.advance(60_000)
        assert store.check_transactions(listener).committed == 1
        assert listener.asked[-1].check_times == 1
        assert sorted(bodies(store)) == [b"quick", b"slow"]
    assert facts(root)[3] == 0


def test_a_short_immunity_and_one_that_is_no_number(root: Path, clock: FakeClock) -> None:
    with opened(root, clock) as store:
        leave(store, "a", properties={"CHECK_IMMUNITY_TIME_IN_SECONDS": "1"})
        leave(store, "b", properties={"CHECK_IMMUNITY_TIME_IN_SECONDS": "soon"})
        clock.advance(1_000)
        listener = Listener()
        store.check_transactions(listener)
        assert [t.message.body for t in listener.asked] == [b"a"]
        clock.advance(TIMEOUT)
        store.check_transactions(listener)
        assert {t.message.body for t in listener.asked} == {b"a", b"b"}


def test_who_is_asked_for_too_often_is_given_up(root: Path, clock: FakeClock) -> None:
    listener = Listener()
    with opened(root, clock, transaction_check_max=3) as store:
        leave(store, "a", flag=5)
        reports = []
        for _ in range(5):
            clock.advance(TIMEOUT)
            reports.append(store.check_transactions(listener))
        assert [report.given_up for report in reports] == [0, 0, 0, 1, 0] and len(
            listener.asked
        ) == 3
        kept = list(store.scan(GIVEN_UP_TOPIC))
        assert [(m.body, m.flag, m.properties["REAL_TOPIC"]) for m in kept] == [(b"a", 5, "orders")]
        assert kept[0].properties["TRANSACTION_CHECK_TIMES"] == "3"
    assert facts(root)[3] == 0


def test_who_is_older_than_messages_are_kept_is_given_up(root: Path, clock: FakeClock) -> None:
    listener = Listener()
    with opened(root, clock, file_reserved_time=1) as store:
        leave(store, "a")
        clock.advance(3_600_001)
        assert store.check_transactions(listener).given_up == 1
        assert not listener.asked and bodies(store, GIVEN_UP_TOPIC) == [b"a"]


def test_a_transaction_in_its_block_is_never_asked_for(root: Path, clock: FakeClock) -> None:
    listener = Listener(a="rollback")
    with opened(root, clock) as store:
        with store.transaction(message(b"a")) as t:
            first = t.half
            for _ in range(3):
                clock.advance(TIMEOUT)
                assert store.check_transactions(listener).put_back == 1
            assert t.half != first, "it was put back, and its owner told"
            t.commit()
        clock.advance(TIMEOUT)
        assert store.check_transactions(listener) == CheckReport()
        assert not listener.asked and bodies(store) == [b"a"]
    assert facts(root) == (1, 0, 3, 0)


def test_progress_goes_on_after_a_restart(root: Path, clock: FakeClock) -> None:
    listener = Listener()
    with opened(root, clock) as store:
        leave(store, "a")
        clock.advance(TIMEOUT)
        store.check_transactions(listener)
    clock.advance(TIMEOUT)
    with opened(root, clock) as store:
        store.check_transactions(Listener(a="commit"))
        assert bodies(store) == [b"a"]
    assert facts(root) == (1, 0, 2, 0)
    assert offsets(root) == (2, 0)


def test_an_op_message_with_several_offsets_is_read_until_all_are_passed(
    root: Path, clock: FakeClock
) -> None:
    """RocketMQ 5 lists several half messages in one op message."""
    with opened(root, clock) as store:
        leave(store, "a", "b", "c")
        # There is no half message 99.
        store.put(Message(OP_TOPIC, b"0,2,99,", queue_id=0, tags="d"))
        assert store.check_transactions(Listener()) == CheckReport(), "b is too young"
    assert offsets(root) == (1, 0)
    clock.advance(TIMEOUT)
    listener = Listener(b="rollback", c="commit")
    with opened(root, clock) as store:
        store.check_transactions(listener)
        assert [t.message.body for t in listener.asked] == [b"b"]
        assert bodies(store) == []
        store.check_transactions(listener)
    assert offsets(root) == (4, 2)


def test_a_crash_between_commit_and_note_commits_once(root: Path, clock: FakeClock) -> None:
    with opened(root, clock) as store:
        mend = failing(store, OP_TOPIC)
        for name in (b"a", b"b"):
            with store.transaction(message(name)) as t:
                t.commit() if name == b"a" else t.leave_open()
        mend()
    clock.advance(TIMEOUT)
    listener = Listener(b="rollback")
    with opened(root, clock) as store:
        report = store.check_transactions(listener)
        assert (report.noted, report.rolled_back) == (1, 1)
        assert [t.message.body for t in listener.asked] == [b"b"]
        assert bodies(store) == [b"a"]
    assert facts(root) == (1, 1, 1, 0)


def test_a_crash_behind_a_put_back_asks_once(root: Path, clock: FakeClock) -> None:
    """Progress was not saved: both the half message and its copy are open."""
    with opened(root, clock) as store:
        leave(store, "a", "b", "c")
        clock.advance(TIMEOUT)
        store.check_transactions(Listener(a="commit"))
    for path in (root / "config").iterdir():
        path.unlink()
    clock.advance(TIMEOUT)
    listener = Listener(a="commit", b="commit", c="rollback")
    with opened(root, clock) as store:
        report = store.check_transactions(listener)
        assert (report.committed, report.rolled_back) == (1, 1)
        assert sorted(t.message.body for t in listener.asked) == [b"b", b"c"]
        assert bodies(store) == [b"a", b"b"]


def test_a_power_cut_loses_only_the_copy(root: Path, clock: FakeClock) -> None:
    """The copy that was put back is lost, but its committed message after it is on the disk."""
    with opened(root, clock) as store:
        leave(store, "a", "b")
        clock.advance(TIMEOUT)
        store.check_transactions(Listener(a="commit"))
        copy = [half for half in store.scan(HALF_TOPIC) if half.body == b"a"][1]
    for path in (root / "config").iterdir():
        path.unlink()
    (root / "abort").touch()
    (root / ".logquarry/durable").unlink()
    with (root / "commitlog" / f"{0:020d}").open("r+b") as file:
        file.seek(copy.physical_offset)
        file.write(bytes(copy.size))
    clock.advance(TIMEOUT)
    listener = Listener(a="commit", b="commit")
    with opened(root, clock) as store:
        report = store.check_transactions(listener)
        assert [t.message.body for t in listener.asked] == [b"b"]
        assert report.committed == 1
        assert [m.body for m in store.scan("orders", on_damage="skip")] == [b"a", b"b"]


def test_a_put_that_fails_in_a_check_is_tried_again(root: Path, clock: FakeClock) -> None:
    with opened(root, clock) as store:
        leave(store, "a", "b", "c")
        clock.advance(TIMEOUT)
        checks = store._services.checks
        append, room = checks.append, [2]

        def scarce(put: Message) -> tuple[PutResult, Any]:
            if not room[0]:
                raise StoreUnavailable("no room")
            room[0] -= 1
            return append(put)

        checks.append = scarce
        listener = Listener(a="commit", b="commit", c="commit")
        with pytest.raises(StoreUnavailable):
            store.check_transactions(listener)
        room[0] = 9
        clock.advance(1)
        assert store.check_transactions(listener).committed == 1
        assert [t.message.body for t in listener.asked] == [b"a", b"b", b"c"]
        assert bodies(store) == [b"a", b"b", b"c"]


def test_a_commit_that_fails_in_a_check_is_asked_for_again(root: Path, clock: FakeClock) -> None:
    with opened(root, clock) as store:
        leave(store, "a")
        clock.advance(TIMEOUT)
        mend = failing(store, "orders")
        with pytest.raises(StoreUnavailable):
            store.check_transactions(Listener(a="commit"))
        mend()
        clock.advance(1)
        assert store.check_transactions(Listener(a="commit")).committed == 1
        assert bodies(store) == [b"a"]
    assert facts(root) == (1, 0, 2, 0)


def test_checks_of_several_threads_ask_once(root: Path, clock: FakeClock) -> None:
    with opened(root, clock) as store:
        leave(store, *map(str, range(40)))
        clock.advance(TIMEOUT)
        listener = Listener(**dict.fromkeys(map(str, range(40)), "commit"))
        threads = [
            threading.Thread(target=store.check_transactions, args=(listener,)) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(listener.asked) == len(bodies(store)) == 40
    assert facts(root) == (40, 0, 40, 0)


def test_a_listener_cannot_check(root: Path, clock: FakeClock) -> None:
    with opened(root, clock) as store:
        leave(store, "a")
        clock.advance(TIMEOUT)

        def listener(_: OpenTransaction) -> str:
            with pytest.raises(UsageError):
                store.check_transactions(Listener())
            return "commit"

        assert store.check_transactions(listener).committed == 1


def test_checking_a_store_without_transactions_leaves_nothing(root: Path, clock: FakeClock) -> None:
    with opened(root, clock) as store:
        assert store.check_transactions(Listener()) == CheckReport()
    assert not (root / "config").exists()


def test_the_thread_checks(root: Path, clock: FakeClock) -> None:
    asked = threading.Event()

    def listener(_: OpenTransaction) -> str:
        asked.set()
        return "commit"

    with opened(root, clock, transaction_check_interval=1) as store:
        leave(store, "a")
        store.start_transaction_checks(listener)
        with pytest.raises(UsageError):
            store.start_transaction_checks(listener)
        clock.advance(TIMEOUT)
        assert asked.wait(60)
    assert facts(root) == (1, 0, 1, 0)


def test_a_listener_cannot_close_the_store(root: Path, clock: FakeClock) -> None:
    tried = threading.Event()
    errors: list[BaseException] = []
    with opened(root, clock, transaction_check_interval=1) as store:

        def listener(_: OpenTransaction) -> str:
            try:
                store.close()
            except UsageError as error:
                errors.append(error)
            tried.set()
            return "rollback"

        leave(store, "a")
        clock.advance(TIMEOUT)
        store.start_transaction_checks(listener)
        assert tried.wait(60)
    assert errors and facts(root) == (0, 1, 1, 0)
