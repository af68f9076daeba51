"""Interrupts that wait. No Spark is needed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from logquarry.systems import held


@pytest.fixture(autouse=True)
def python_s_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def test_an_interrupt_waits_for_the_end_of_the_block() -> None:
    done = False
    with pytest.raises(KeyboardInterrupt), held():
        interrupt()
        done = True
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_it_comes_where_it_is_looked_for() -> None:
    reached: list[str] = []
    with pytest.raises(KeyboardInterrupt), held() as interrupts:
        interrupts.check()
        interrupt()
        reached.append("before")
        interrupts.check()
        reached.append("behind")
    assert reached == ["before"]


def test_a_second_one_does_not_wait() -> None:
    reached: list[str] = []
    with pytest.raises(KeyboardInterrupt), held():
        interrupt()
        reached.append("one")
        interrupt()
        reached.append("two")
    assert reached == ["one"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_that_was_set_meanwhile_goes() -> None:
    with held():
        signal.signal(signal.SIGINT, lambda number, frame: None)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_is_not_lost_with_another_exception() -> None:
    with pytest.raises(KeyboardInterrupt), held():
        interrupt()
        raise ValueError


def test_ignored_signals_stay_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with held():
        interrupt()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        # As PySpark does, whatever was there before.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_another_thread_holds_nothing() -> None:
    def run() -> None:
        with held() as interrupts:
            interrupts.check()
            handlers.append(signal.getsignal(signal.SIGINT))

    handlers: list[object] = []
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]
