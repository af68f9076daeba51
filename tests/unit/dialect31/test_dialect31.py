"""Dialect 3.1: what it takes, what it refuses, how transactions end, and who checks them."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from logquarry.config import StoreConfig
from logquarry.dialect31.open_transactions import (
    TransactionBook,
    TransactionFrame,
    TransactionsFound,
    read_redo,
    read_table,
)
from logquarry.dialect31.prepared import (
    CheckService,
    PreparedTransaction,
    ScratchBuffer,
    TransactionEnd,
)
from logquarry.dialect31.state_table import StateTableKeeper, TransactionCheck
from logquarry.disk.service import Health
from logquarry.errors import MessageRejected, StoreUnavailable, UsageError
from logquarry.format import frame, queue_entry
from logquarry.format.queue_entry import StateUnit
from logquarry.log.layout import StoreLayout
from logquarry.log.store_files import REDO_LOG, STATE_TABLE
from logquarry.log.walk import LogReader, Run
from logquarry.message import Message
from logquarry.repair.recover.recover import recover
from logquarry.repair.verification import verify_store
from logquarry.store.message_store import StoreWriter
from logquarry.testing.clock import FakeClock
from logquarry.write.dispatcher import MessageArrival
from logquarry.write.put_result import PutResult
from tests.helpers.failing_disk import ENOSPC, FaultyDisk
from tests.helpers.waiting import eventually

NOW = 1_700_000_000_000


def config(**changes: Any) -> StoreConfig:
    sizes = {
        "mapped_file_size_commit_log": 8_192,
        "mapped_file_size_consume_queue": 200,
        "max_hash_slot_num": 8,
        "max_index_num": 100,
        "tran_state_table_mapped_file_size": 24 * 5,
        "tran_redo_log_mapped_file_size": 20 * 7,
    }
    return StoreConfig(dialect="3.1", **(sizes | changes))


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(NOW)


@pytest.fixture
def store(tmp_path: Path, clock: FakeClock) -> Iterator[StoreWriter]:
    with StoreWriter.start(tmp_path / "store", config=config(), clock=clock) as opened:
        yield opened


def begin(store: StoreWriter, body: bytes = b"body", **fields: Any) -> int:
    message = Message("topic", body, **fields)
    return store.prepared_transactions.begin(message, "pg").physical_offset


def places(store: StoreWriter) -> list[int]:
    return [one.physical_offset for one in store.prepared_transactions.open()]


# ----------------------------------------------------------------------------------------- settings
def test_defaults_of_the_dialects() -> None:
    old, new = StoreConfig(dialect="3.1"), StoreConfig()
    assert (len(old.delay_levels_ms), old.max_message_size) == (16, 524_288)
    assert (len(new.delay_levels_ms), new.max_message_size) == (18, 4 << 20)
    stated = StoreConfig(dialect="3.1", max_message_size=4 << 20, message_delay_level="7s")
    assert (stated.delay_levels_ms, stated.max_message_size) == ((7_000,), 4 << 20)


@pytest.mark.parametrize(
    "setting",
    [
        {"enable_multi_dispatch": True},
        {"enable_lmq": True},
        {"transient_store_pool_enable": True},
        {"recovery": "rocketmq"},
        {"dialect": "3.2"},
    ],
)
def test_settings_that_it_does_not_have(setting: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        StoreConfig(**({"dialect": "3.1"} | setting))


def test_what_it_refuses(store: StoreWriter) -> None:
    end = store.max_offset
    with pytest.raises(MessageRejected, match="no batches"):
        store.put_batch([Message("t", b"1"), Message("t", b"2")])
    with pytest.raises(MessageRejected, match="IPv6"):
        store.put(Message("t", b"1", born_host="[::1]:1"))
    with pytest.raises(MessageRejected) as refused:
        store.put(Message("t", bytes(8_192)))
    assert refused.value.reason == "larger_than_file"
    with pytest.raises(UsageError, match="producer group"):
        store.prepared_transactions.begin(Message("t", b"1"))
    assert store.max_offset == end


def test_another_dialect_has_no_state_table(tmp_path: Path) -> None:
    with StoreWriter.start(tmp_path / "store", config=StoreConfig()) as opened:
        with pytest.raises(UsageError, match="dialect"):
            _ = opened.prepared_transactions
        opened.put(Message("t", b"1"))
    assert not (tmp_path / "store" / "transaction").exists()


# ------------------------------------------------------------------------------------------- frames
def test_property_strings_end_with_a_separator(store: StoreWriter) -> None:
    store.put(Message("t", b"1", tags="A", keys="k"))
    store.put(Message("t", b"2"))
    store.put(Message("t", b"3", properties_string="a\x01b"))
    many = store.put_many([Message("t", b"4", tags="B")])
    texts = [message.frame.properties for message in store.scan()]
    assert texts == [b"KEYS\x01k\x02TAGS\x01A\x02", b"", b"a\x01b", b"TAGS\x01B\x02"]
    assert many.message_count == 1


def test_put_many_writes_blanks_and_numbers_as_single_puts_do(
    tmp_path: Path, clock: FakeClock
) -> None:
    rng = np.random.default_rng(5)
    messages = [
        Message(
            "t",
            rng.bytes(int(rng.integers(1_500))),
            sys_flag=int(rng.choice([0, 0, 4])),
            properties={"PGROUP": "pg", "KEYS": "a b"},
            born_timestamp=NOW,
        )
        for _ in range(60)
    ]
    for name in ("single", "many"):
        with StoreWriter.start(tmp_path / name, config=config(), clock=clock) as opened:
            if name == "many":
                opened.put_many(messages)
            else:
                for message in messages:
                    opened.put(message)
    for folder in ("commitlog", "transaction", "consumequeue"):
        single, many = (
            {
                path.relative_to(root): path.read_bytes()
                for path in root.rglob("0*")
                if path.is_file()
            }
            for root in (tmp_path / "single" / folder, tmp_path / "many" / folder)
        )
        assert single == many
    assert len(list((tmp_path / "many" / "commitlog").iterdir())) > 3


def test_the_scratch_buffer_is_what_one_frame_after_the_other_leaves(tmp_path: Path) -> None:
    """Only frames longer than all later ones are copied, which has the same result."""
    with StoreWriter.start(tmp_path / "store", config=config()) as opened:
        for size in (300, 20, 0, 500, 7, 90, 480, 1):
            opened.put(Message("topic" * (size % 3 + 1), bytes([size % 251]) * size, tags="x" * 9))
    quick, plain = ScratchBuffer(1_000), ScratchBuffer(1_000)
    reader = LogReader(StoreLayout.open(tmp_path / "store"))
    for event in reader.events():
        if isinstance(event, Run):
            quick.take_run(event)
            for position in event.rows[:, 0].tolist():
                found = event.window.decode(position, check_crc=True)
                assert isinstance(found, frame.Frame)
                for part in (found.body, found.topic, found.properties):
                    plain.take(part)
    assert quick.blank(1_000) == plain.blank(1_000)
    assert any(quick.blank(1_000)[400:])


# ------------------------------------------------------------------------------------- transactions
def test_a_commit_brings_the_message_to_its_queue(store: StoreWriter) -> None:
    fields = {"queue_id": 2, "tags": "A", "keys": "k", "flag": 7, "delay_level": 3}
    offset = begin(store, b"one", **fields)
    assert not store.get("topic", 2).messages
    [known] = store.prepared_transactions.open()
    assert (known.physical_offset, known.number) == (offset, 0)
    assert known.group_hash == queue_entry.group_hash("pg")
    result = store.prepared_transactions.commit(known)
    store.wait_dispatched()
    [message] = store.get("topic", 2).messages
    assert (message.body, message.tags, message.flag) == (b"one", "A", 7)
    assert message.physical_offset == result.physical_offset
    assert message.prepared_transaction_offset == offset
    assert message.properties["DELAY"] == "3"
    assert places(store) == []
    # The index has the PREPARED message, and not the COMMIT.
    assert [found.physical_offset for found in store.query("topic", "k")] == [offset]


def test_a_rollback_names_the_unit(store: StoreWriter) -> None:
    first, second = begin(store), begin(store)
    result = store.prepared_transactions.rollback(second)
    ended = store.message_at(result.physical_offset)
    assert (ended.body, ended.queue_offset, ended.prepared_transaction_offset) == (b"", 1, second)
    assert places(store) == [first]


def test_nothing_ends_twice(store: StoreWriter) -> None:
    offset = begin(store)
    end = store.put(Message("topic", b"no transaction")).end_offset
    store.prepared_transactions.commit(offset)
    for wrong in (offset, 4_711, end):
        with pytest.raises(UsageError, match="no open transaction"):
            store.prepared_transactions.rollback(wrong)


def test_an_interrupted_end_is_not_put_twice(
    store: StoreWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C ends the flush wait of one thread; another thread has waited for the dispatch already.

    The test runs the first thread's call inside the second thread's wait.
    """
    known = store.prepared_transactions
    offset = begin(store)
    wait, put = known._wait_dispatched, known._put
    is_stuck, may_go_on = threading.Event(), threading.Event()

    def stuck(arrival: MessageArrival) -> None:
        is_stuck.set()
        may_go_on.wait(30)

    def interrupted(message: Message) -> PutResult:
        put(message)
        raise KeyboardInterrupt

    def resumed() -> None:
        may_go_on.set()
        wait()

    def wait_and_commit() -> None:
        wait()
        store.add_arrival_listener(stuck)
        store.put(Message("topic", b"holds the dispatcher up"))
        assert is_stuck.wait(30)
        monkeypatch.setattr(known, "_wait_dispatched", lambda: None)
        monkeypatch.setattr(known, "_put", interrupted)
        with pytest.raises(KeyboardInterrupt):
            known.commit(offset)
        monkeypatch.setattr(known, "_wait_dispatched", resumed)
        monkeypatch.setattr(known, "_put", put)

    monkeypatch.setattr(known, "_wait_dispatched", wait_and_commit)
    try:
        with pytest.raises(UsageError, match="no open transaction"):
            known.rollback(offset)
    finally:
        may_go_on.set()
    store.wait_dispatched()
    assert [one.sys_flag for one in store.scan()] == [4, 0, 8]


def test_a_transaction_whose_end_was_refused_can_be_ended(
    store: StoreWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = store.prepared_transactions
    offset = begin(store)

    def refuses(message: Message) -> PutResult:
        raise StoreUnavailable("no room")

    with monkeypatch.context() as patch:
        patch.setattr(known, "_put", refuses)
        with pytest.raises(StoreUnavailable):
            known.commit(offset)
    known.commit(offset)
    assert places(store) == []


def test_an_end_of_another_group_is_none(store: StoreWriter) -> None:
    offset = begin(store)
    for group in ("other", None):
        store.put(
            Message(
                "topic",
                b"",
                sys_flag=8,
                prepared_transaction_offset=offset,
                properties=None if group is None else {"PGROUP": group},
            )
        )
    store.wait_dispatched()
    assert places(store) == [offset]


def test_units_of_table_and_redo_log(tmp_path: Path, clock: FakeClock) -> None:
    with StoreWriter.start(tmp_path / "store", config=config(), clock=clock) as opened:
        offsets = [begin(opened) for _ in range(12)]
        sizes = [opened.message_at(offset).size for offset in offsets]
        for offset in offsets[::3]:
            opened.prepared_transactions.commit(offset)
        opened.prepared_transactions.rollback(offsets[1])
    layout = StoreLayout.open(tmp_path / "store")
    table, redo = read_table(layout), read_redo(layout)
    states = [8, 12, 4, 8, 4, 4, 8, 4, 4, 8, 4, 4]
    group = queue_entry.group_hash("pg")
    assert [StateUnit(*unit.item()) for unit in table.units] == [
        StateUnit(offset, size, NOW // 1_000, group, state)
        for offset, size, state in zip(offsets, sizes, states, strict=True)
    ]
    tags = redo.units["tags_code"].tolist()
    assert tags == [-1] * 12 + [*offsets[::3], offsets[1]]
    assert (len(layout.state_table.files), len(layout.redo_log.files)) == (3, 3)


def test_lost_numbers_are_filled() -> None:
    """The log has lost PREPARED messages: later messages keep their numbers."""
    check = TransactionCheck()
    frames = [
        TransactionFrame(4, 10_000, 100, 7, 0, NOW, 1),
        # Number 9 comes next: number 8 was lost.
        TransactionFrame(4, 10_300, 100, 9, 0, NOW, 1),
        # No log can have so many messages: the number is wrong.
        TransactionFrame(4, 10_400, 100, 1 << 40, 0, NOW, 1),
        TransactionFrame(12, 10_500, 91, 9, 10_300, NOW, 1),
        TransactionFrame(8, 10_591, 100, 0, 10_300, NOW, 1),
    ]
    check.take(frames)
    units = [queue_entry.decode_state_at(bytes(check.units), at) for at in range(0, 4 * 24, 24)]
    assert check.first == 7
    assert [unit.state for unit in units] == [4, 12, 12, 4]
    assert units[1].size == queue_entry.FILLER_SIZE
    assert [(one.number, one.physical_offset) for one in check.book] == [(7, 10_000), (10, 10_400)]
    assert len(check.redo) == 5 * 20


def test_an_entry_keeps_its_number_after_a_full_disk(tmp_path: Path) -> None:
    """The dispatcher passes the same frame again; it lost messages before the frame."""
    disk = FaultyDisk()
    keeper = StateTableKeeper(disk, tmp_path, config(), TransactionsFound(), 0)
    frames = [
        TransactionFrame(4, 10_000, 100, 3, 0, NOW, 1),
        # The table has 5 entries in a file. Number 6 needs a second file.
        TransactionFrame(4, 11_000, 100, 6, 0, NOW, 1),
    ]
    for one in frames:
        disk.failing["allocate"] = ENOSPC
        with pytest.raises(StoreUnavailable):
            keeper._take(one)
        assert keeper.find(one.physical_offset) is None
        disk.failing.clear()
        keeper._take(one)
    assert [(one.number, one.physical_offset) for one in keeper.open_transactions()] == [
        (3, 10_000),
        (6, 11_000),
    ]
    keeper.flush()
    keeper.close()
    (tmp_path / "commitlog").mkdir()
    units = read_table(StoreLayout.open(tmp_path, config())).units
    assert units["state"].tolist() == [12, 12, 12, 4, 12, 12, 4]


def test_a_number_that_rotted_makes_no_gigabytes_of_units() -> None:
    """After a terabyte of log many messages may be missing, but not so many."""
    for lost, number in ((1 << 20, 5 + (1 << 20)), ((1 << 20) + 1, 5)):
        book = TransactionBook(5, 1_000)
        change = book.take(TransactionFrame(4, 1 << 40, 100, 5 + lost, 0, NOW, 1))
        assert change is not None
        assert change.number == number


def test_numbers_that_fall_back_go_on(store: StoreWriter) -> None:
    """RocketMQ begins new numbers: later messages take the next numbers, and no used ones."""
    book = TransactionBook(5, 1_000)
    frames = [TransactionFrame(4, at, 100, 2, 0, NOW, 1) for at in (1_000, 1_100)]
    changes = [book.take(frame) for frame in frames]
    assert [change.number for change in changes if change is not None] == [5, 6]


# ----------------------------------------------------------------------------------- reopened, lost
def test_numbers_go_on_after_reopening(tmp_path: Path, clock: FakeClock) -> None:
    numbers: list[int] = []
    for _ in range(3):
        with StoreWriter.start(tmp_path / "store", config=config(), clock=clock) as opened:
            known = opened.prepared_transactions
            results = [known.begin(Message("t", b""), "pg") for _ in range(4)]
            numbers += [result.queue_offset for result in results]
            known.commit(results[-1].physical_offset)
    assert numbers == list(range(12))
    assert not recover(tmp_path / "store", config=config()).is_needed


def test_a_table_that_lost_what_has_ended_does_not_use_numbers_twice(
    tmp_path: Path, clock: FakeClock
) -> None:
    root = tmp_path / "store"
    with StoreWriter.start(root, config=config(), clock=clock) as opened:
        offsets = [begin(opened) for _ in range(12)]
        for offset in offsets[9:]:
            opened.prepared_transactions.commit(offset)
    path = sorted((root / STATE_TABLE).iterdir())[-1]
    data = path.read_bytes()
    # Entries 10 and 11 did not reach the disk.
    path.write_bytes(bytes(len(data)))
    for crashed in (True, False):
        if crashed:
            (root / "abort").touch()
        else:
            path.write_bytes(bytes(len(data)))
        with StoreWriter.start(root, config=config(), clock=clock) as opened:
            result = opened.prepared_transactions.begin(Message("t", b""), "pg")
            opened.prepared_transactions.commit(result.physical_offset)
            assert result.queue_offset == (12 if crashed else 13)


@pytest.mark.parametrize("seed", range(4))
def test_what_is_made_anew_is_what_was_there(seed: int, tmp_path: Path, clock: FakeClock) -> None:
    """The dispatcher and a recovery write the same bytes."""
    rng = random.Random(seed)
    root = tmp_path / "store"
    with StoreWriter.start(root, config=config(), clock=clock) as opened:
        still: list[int] = []
        for _ in range(60):
            clock.advance(rng.randrange(1_500))
            if still and rng.random() < 0.5:
                offset = still.pop(rng.randrange(len(still)))
                opened.prepared_transactions.end(offset, rng.choice(list(TransactionEnd)))
            else:
                still.append(begin(opened, bytes(rng.randrange(200))))
    before = units_below(root)
    shutil.move(root / "transaction", tmp_path / "gone")
    with StoreWriter.start(root, config=config(), clock=clock) as opened:
        assert places(opened) == sorted(still)
    assert units_below(root) == before
    assert len(before) > 10


def units_below(root: Path) -> dict[str, bytes]:
    files = (path for path in (root / "transaction").rglob("*") if path.is_file())
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


@pytest.mark.parametrize(
    ("part", "kind"), [(STATE_TABLE, "state_table_wrong"), (REDO_LOG, "redo_log_wrong")]
)
@pytest.mark.parametrize("harm", ["flip", "zero", "short", "gone", "group"])
def test_harm_is_found_and_mended(
    part: str, kind: str, harm: str, tmp_path: Path, clock: FakeClock
) -> None:
    root = tmp_path / "store"
    with StoreWriter.start(root, config=config(), clock=clock) as opened:
        offsets = [begin(opened) for _ in range(12)]
        for offset in (offsets[5], offsets[7]):
            opened.prepared_transactions.commit(offset)
        still = places(opened)
    path = sorted((root / part).iterdir())[1]
    data = bytearray(path.read_bytes())
    if harm == "gone":
        path.unlink()
    elif harm == "short":
        path.write_bytes(data[:50])
    else:
        if harm == "zero":
            data[:20] = bytes(20)
        else:
            # The end of the first entry's place, or of the entry of an ended transaction.
            data[7 if harm == "flip" else 19] ^= 1
        path.write_bytes(data)
    assert kind in verify_store(StoreLayout.open(root, config())).by_kind
    with StoreWriter.start(root, config=config(), clock=clock) as opened:
        assert places(opened) == still
    assert not verify_store(StoreLayout.open(root, config())).has_damage


# -------------------------------------------------------------------------------------------- check
def test_the_listener_is_asked_about_what_is_old_enough(
    store: StoreWriter, clock: FakeClock
) -> None:
    known = store.prepared_transactions
    assert known.check() == 0
    old = [begin(store) for _ in range(3)]
    clock.advance(59_000)
    young = begin(store)
    clock.advance(1_000)
    asked: list[int] = []
    ends = {old[0]: TransactionEnd.COMMIT, old[1]: TransactionEnd.ROLLBACK, old[2]: None}

    def listener(one: PreparedTransaction) -> TransactionEnd | None:
        asked.append(one.physical_offset)
        return ends[one.physical_offset]

    known.set_listener(listener)
    assert known.check() == 3
    assert asked == old
    assert places(store) == [old[2], young]
    assert known.check() == 1


def test_a_listener_that_fails_is_asked_again(
    store: StoreWriter, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    offset = begin(store)
    clock.advance(120_000)

    def fails(one: PreparedTransaction) -> None:
        raise RuntimeError("the listener failed")

    store.prepared_transactions.set_listener(fails)
    assert store.prepared_transactions.check() == 1
    assert "the listener failed" in caplog.text
    assert places(store) == [offset]


def test_the_first_check_is_after_a_minute_whatever_the_interval() -> None:
    runs: list[int] = []

    def check() -> int:
        runs.append(1)
        return 1

    service = CheckService(check, Health(), 5_000)
    assert service.interval_ms == 60_000
    service.run_once()
    assert (runs, service.interval_ms) == ([1], 5_000)


def test_a_check_that_fails_because_of_a_queue_leaves_the_store_writable(
    tmp_path: Path, clock: FakeClock
) -> None:
    """The dispatcher tries again, so the check must try again too."""
    checks: list[int] = []

    def check() -> int:
        checks.append(1)
        return found()

    with StoreWriter.start(tmp_path, config=config(), clock=clock) as store:
        known = store.prepared_transactions
        known.set_listener(lambda _: None)
        found = known.check
        taken = tmp_path / "consumequeue" / "other"
        taken.write_bytes(b"")
        store.put(Message("other", b"1"))
        with pytest.raises(StoreUnavailable, match="it is not a folder"):
            store.wait_dispatched(timeout=60)
        service = CheckService(check, store._engine.health, 10)
        service.interval_ms = 10
        service.start()
        try:
            eventually(lambda: len(checks) > 2)
        finally:
            service.stop()
        taken.unlink()
        # The dispatcher writes the entry first, and then allows puts again.
        eventually(lambda: not store._engine.flags.refusals)
        assert store.queue_offsets("other", 0).max > 0
        store.put(Message("t", b"2"))
    assert store.close_problem is None
