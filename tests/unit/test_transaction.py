"""Is a transaction's message there when it was committed, and only then, whatever happens?"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import logquarry as lq
from logquarry.errors import MessageRejected, StoreUnavailable, UsageError
from logquarry.format import broker_config
from logquarry.message import Message
from logquarry.store.put.put_result import PutResult
from logquarry.store.transaction.checks import CheckReport, OpenTransaction
from logquarry.store.transaction.half import GIVEN_UP_TOPIC, GROUP, HALF_TOPIC, OP_TOPIC
from logquarry.store.transactions import transactions
from logquarry.store.writable_store import WritableStore
from logquarry.testing.clock import FakeClock
from tests.small_store import config as small_config

NOW = 1_700_000_000_000
TIMEOUT = 6_000


def opened(root: Path, clock: FakeClock, **settings: Any) -> WritableStore:
    config = small_config(mapped_file_size_commit_log=65_536, **settings)
    return WritableStore.start(root, config=config, clock=clock)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(NOW)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


def message(body: bytes = b"x", **fields: Any) -> Message:
    topic = fields.pop("topic", "orders")
    return lq.Message(topic, body, queue_id=1, tags="t", **fields)


def bodies(store: lq.MessageStore, topic: str = "orders") -> list[bytes]:
    return [found.body for found in store.scan(topic=topic)]


def facts(root: Path) -> tuple[int, int, int, int]:
    """Committed, rolled back, put back and open, as readers tell it."""
    with lq.MessageStore.open(root) as store:
        found = transactions(store)
    return found.committed, found.rolled_back, found.put_back, len(found.open)


class Listener:
    """Answers by the body; remembers what it was asked."""

    def __init__(self, **answers: str) -> None:
        self.answers = answers
        self.asked: list[OpenTransaction] = []

    def __call__(self, transaction: OpenTransaction) -> str:
        self.asked.append(transaction)
        return self.answers.get(transaction.message.body.decode(), "unknown")


# ---------------------------------------------------------------------------------- the block
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
        with pytest.raises(UsageError, match="begins with the block"):
            t.commit()
        with t:
            t.commit()
            for again in (t.commit, t.rollback, t.leave_open):
                with pytest.raises(UsageError, match="over"):
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


def test_a_topic_that_cannot_be_put_to_is_refused_at_the_commit(
    root: Path, clock: FakeClock
) -> None:
    with opened(root, clock) as store:
        with pytest.raises(MessageRejected), store.transaction(message(topic="a/b")) as t:
            t.commit()
        assert t.state is lq.TransactionState.ROLLBACK
    assert facts(root)[3] == 0


def test_a_reading_store_has_no_transactions(root: Path, clock: FakeClock) -> None:
    with opened(root, clock) as store:
        store.put(message())
    with lq.MessageStore.open(root) as reader:
        with pytest.raises(StoreUnavailable):
            reader.transaction(message())
        with pytest.raises(StoreUnavailable):
            reader.check_transactions(Listener())
        with pytest.raises(StoreUnavailable):
            reader.start_transaction_checks(Listener())


def failing(store: WritableStore, topic: str) -> Callable[[], None]:
    """Have puts to a topic fail from now on, until the function is called."""
    service = store._services.transactions
    append = service._append

    def refuse(put: Message) -> Any:
        if put.topic == topic:
            raise StoreUnavailable("no room")
        return append(put)

    service._append = refuse

    def mend() -> None:
        service._append = append

    return mend


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


# ------------------------------------------------------------------------------------- checks
def leave(store: WritableStore, *names: str, **fields: Any) -> None:
    for name in names:
        with store.transaction(message(name.encode(), **fields)) as t:
            t.leave_open()


def offsets(root: Path) -> tuple[int, int]:
    data = (root / "config" / "consumerOffset.json").read_bytes()
    table = broker_config.decode_consumer_offsets(data)
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
    """As RocketMQ has it: the born time counts, and the queue's order."""
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
        half = list(store.scan(topic=HALF_TOPIC))[-1]
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
        kept = list(store.scan(topic=GIVEN_UP_TOPIC))
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
    """Progress was not saved: both the half message and its successor are open."""
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


def test_a_put_that_fails_in_a_check_is_tried_again(root: Path, clock: FakeClock) -> None:
    with opened(root, clock) as store:
        leave(store, "a", "b", "c")
        clock.advance(TIMEOUT)
        checks = store._services.checks
        append, room = checks._append, [2]

        def scarce(put: Message) -> tuple[PutResult, Any]:
            if not room[0]:
                raise StoreUnavailable("no room")
            room[0] -= 1
            return append(put)

        checks._append = scarce
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
