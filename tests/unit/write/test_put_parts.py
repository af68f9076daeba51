"""The lock of the log, the flags that a put sets, and the counts of many topics."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from logquarry import compiled
from logquarry.store.single_calls import CallCounter
from logquarry.write.put_parts import LogLock, Wakes
from logquarry.write.put_result import AppendStatus, PutResult, PutStatus

SECONDS = 60
RESULT = PutResult(PutStatus.PUT_OK, AppendStatus.PUT_OK, b"", 0, 0, 10, 1, 0, 0.0)
needs_compiled = pytest.mark.skipif(
    not compiled.is_compiled(), reason="the modules are not compiled"
)


def run_all(work: Any, count: int) -> list[threading.Thread]:
    threads = [threading.Thread(target=work, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    return threads


@needs_compiled
def test_each_thread_that_waits_for_the_lock_gets_it() -> None:
    lock, passed = LogLock(), []

    def work() -> None:
        with lock:
            passed.append(threading.get_ident())

    with lock:
        threads = run_all(work, 5)
        time.sleep(0.01)
        assert not passed
    for thread in threads:
        thread.join(SECONDS)
    assert len(set(passed)) == 5
    # The next thread must not find the lock taken, nor open for two.
    with lock:
        last = run_all(work, 1)
        time.sleep(0.01)
        assert len(passed) == 5
    last[0].join(SECONDS)
    assert len(passed) == 6


@needs_compiled
def test_only_one_thread_at_a_time_has_the_lock() -> None:
    lock, count = LogLock(), 0

    def work() -> None:
        nonlocal count
        for _ in range(100):
            with lock:
                before = count
                # Let another thread run.
                time.sleep(0)
                count = before + 1

    for thread in run_all(work, 5):
        thread.join(SECONDS)
    assert count == 500


class Flag:
    def __init__(self, *, is_set: bool) -> None:
        self.is_set = is_set
        self.sets = 0

    def is_unset(self) -> bool:
        return not self.is_set

    def set(self) -> None:
        self.is_set = True
        self.sets += 1


def test_a_put_sets_the_flags_that_are_not_set() -> None:
    wakes, flags = Wakes(), [Flag(is_set=False), Flag(is_set=True), Flag(is_set=False)]
    assert wakes(RESULT, True) is RESULT
    wakes.use(flags)
    assert wakes(RESULT, True) is RESULT
    assert wakes(RESULT, False) is RESULT
    assert [flag.sets for flag in flags] == [1, 0, 1]
    wakes.use(flags[:1])
    for flag in flags:
        flag.is_set = False
    wakes(RESULT, True)
    assert [flag.sets for flag in flags] == [2, 0, 1]


def test_equal_names_of_many_topics_are_counted_together() -> None:
    counter = CallCounter()
    for _ in range(3):
        # Each round makes new objects for the names.
        for number in range(300):
            counter.put(f"topic{number}", RESULT, 0.0)
    kept = "topic7"
    counter.put(kept, RESULT, 0.0)
    counter.put(kept, RESULT, 0.0)
    found = counter.total().topics
    assert len(found) == 300
    assert {name: each.messages for name, each in found.items()} == {
        f"topic{number}": 5 if number == 7 else 3 for number in range(300)
    }
    assert found["topic7"].size == 50
