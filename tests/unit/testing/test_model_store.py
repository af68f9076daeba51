"""ModelStore finds each kind of violation, and none in a sound store."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.errors import UsageError
from logquarry.testing.clock import FakeClock
from logquarry.testing.model_store import ModelStore, Seen, SeenMessage, Wrong
from tests.helpers.small_store import config

KEY = ("orders", 0)


@pytest.fixture
def model() -> ModelStore:
    return ModelStore()


@pytest.fixture
def seen(tmp_path: Path, model: ModelStore) -> Seen:
    """Three messages, acknowledged and present."""
    clock = FakeClock(step=1)
    with lq.MessageStore.open(tmp_path, mode="rw", config=config(), clock=clock) as store:
        for number in range(3):
            message = lq.Message("orders", b"%d" % number, keys=f"k{number} all", tags="paid")
            model.acked(model.attempt(message), store.put(message), is_durable=number < 2)
        store.wait_dispatched()
        found = Seen.of(store, keys=True)
    assert model.check(found) == []
    assert found.queues is not None and found.queues.keys() == {KEY}
    assert found.keyed is not None and len(found.keyed["orders", "all"]) == 3
    return found


def kinds(model: ModelStore, seen: Seen) -> set[Wrong]:
    return {found.kind for found in model.check(seen)}


def changed(seen: Seen, number: int, **fields: object) -> Seen:
    """Add a message to log and queue."""
    assert seen.queues is not None
    log = list(seen.log)
    log[number] = log[number]._replace(**fields)  # type: ignore[arg-type]
    return replace(seen, log=tuple(log), queues={KEY: tuple(log)})


def with_log(seen: Seen, *log: SeenMessage) -> Seen:
    return replace(seen, log=log, queues={KEY: log})


def test_what_is_lost(model: ModelStore, seen: Seen) -> None:
    short = with_log(seen, *seen.log[:2])
    assert kinds(model, short) == {Wrong.LOST}
    assert model.check(short, must=model.mark().durable) == []


def test_what_is_there_twice(model: ModelStore, seen: Seen) -> None:
    assert kinds(model, with_log(seen, *seen.log, seen.log[2])) == {Wrong.DUPLICATE}


def test_what_stands_elsewhere(model: ModelStore, seen: Seen) -> None:
    assert kinds(model, changed(seen, 2, physical_offset=9_999)) == {Wrong.WRONG_OFFSET}


def test_what_is_left_out(model: ModelStore, seen: Seen) -> None:
    assert kinds(model, with_log(seen, seen.log[0], seen.log[2])) == {Wrong.SKIP, Wrong.LOST}
    assert kinds(model, replace(seen, queues={KEY: seen.log[:2]})) == {Wrong.SKIP}
    assert kinds(model, replace(seen, queues={})) == {Wrong.SKIP}
    assert kinds(model, replace(seen, keyed={})) == {Wrong.SKIP}


def test_what_comes_under_another_topic(model: ModelStore, seen: Seen) -> None:
    assert Wrong.WRONG_TOPIC in kinds(model, changed(seen, 1, topic="payments"))
    other = changed(seen, 1, topic="payments")
    assert Wrong.WRONG_TOPIC in kinds(model, replace(seen, queues=other.queues))


def test_what_nobody_put(model: ModelStore, seen: Seen) -> None:
    assert Wrong.UNKNOWN in kinds(model, changed(seen, 1, body=b"?"))
    assert kinds(model, changed(seen, 1, keys="other")) == {Wrong.UNKNOWN, Wrong.SKIP}
    assert kinds(model, changed(seen, 1, is_torn=True)) == {Wrong.TORN}
    assert kinds(model, replace(seen, unreadable=("why",))) == {Wrong.UNREADABLE}
    assert [m.body for m in changed(seen, 1, is_torn=True).before_torn().log] == [b"0"]


def test_what_comes_back(model: ModelStore, seen: Seen) -> None:
    before = model.mark()
    model.survived(with_log(seen, *seen.log[:2]))
    assert model.mark().durable == {b"0", b"1"} and model.absent == {b"2"}
    assert kinds(model, with_log(seen, *seen.log[:2])) == set()
    assert kinds(model, seen) == {Wrong.REVIVED}
    assert model.at(before).check(seen) == []


def test_marks_do_not_change(model: ModelStore, seen: Seen) -> None:
    mark = model.mark()
    assert (mark.attempted, mark.durable, mark.acked) == (3, {b"0", b"1"}, {b"0", b"1", b"2"})
    model.flushed(1 << 40)
    assert mark.durable == {b"0", b"1"} and model.mark().durable == mark.acked
    model.attempt(lq.Message("orders", b"new"))
    assert model.mark().attempted == 4 and len(model.at(mark).puts) == 3
    with pytest.raises(UsageError, match="two messages"):
        model.attempt(lq.Message("payments", b"new"))
    assert [put.body for put in model.queue(*KEY)] == [b"0", b"1", b"2"]
