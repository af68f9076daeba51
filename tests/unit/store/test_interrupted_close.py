"""Ctrl-C while a store is being closed, at many places of the closing."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import logquarry as lq
from logquarry.disk.service import Service
from logquarry.log.layout import StoreLayout
from logquarry.store.message_store import StoreWriter
from logquarry.store.store_engine import StoreEngine
from tests.helpers.small_store import config

LAST = 24
"""The last calls of the closing, which release the lock. Each of them is interrupted."""
OTHERS = 12
"""Number of other calls that are interrupted."""
MESSAGES = 5


class Interruption:
    """Raises KeyboardInterrupt when the calling thread calls its function number ``at``."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.calls = 0
        self.place = ""

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        self.calls += 1
        if self.calls > self.at:
            sys.setprofile(None)
            self.place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            raise KeyboardInterrupt

    def close(self, store: StoreWriter) -> None:
        """Close the store with the interruption. The code of the closing can catch it."""
        sys.setprofile(self)
        try:
            store.close()
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)


def opened(path: Path) -> tuple[StoreWriter, list[threading.Thread]]:
    before = set(threading.enumerate())
    store = lq.MessageStore.open(path, mode="rw", config=config())
    for number in range(MESSAGES):
        store.put(lq.Message("t", b"%d" % number, keys="k"))
    store.flush()
    return store, [thread for thread in threading.enumerate() if thread not in before]


def check(path: Path, at: int) -> None:
    store, threads = opened(path)
    interruption = Interruption(at)
    interruption.close(store)
    where = f"call {at}, {interruption.place}"
    if any(thread.is_alive() for thread in threads):
        assert StoreLayout.open(path).is_live(), f"{where}: the lock is free too early"
    store.close()
    assert not any(thread.is_alive() for thread in threads), where
    assert not StoreLayout.open(path).is_live(), f"{where}: the lock stays"
    with lq.MessageStore.open(path, mode="rw", config=config()) as again:
        again.wait_dispatched()
        assert len(again.get("t", 0).messages) == MESSAGES, where


# Python ignores an exception in the callback of a weak reference.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_lock_is_held_until_the_threads_have_ended(tmp_path: Path) -> None:
    calls = 0
    for name in ("warm", "measured"):
        store, _ = opened(tmp_path / name)
        counted = Interruption(1 << 30)
        counted.close(store)
        calls = counted.calls
    step = max(1, (calls - LAST) // OTHERS)
    for at in (*range(0, calls - LAST, step), *range(calls - LAST, calls)):
        check(tmp_path / str(at), at)


def test_an_interruption_between_two_steps_of_the_closing(tmp_path: Path, monkeypatch: Any) -> None:
    """The services must end before the files are closed and the lock is released."""
    store, threads = opened(tmp_path / "s")
    engine = store._engine

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.writer, "end", interrupted)
    Interruption(1 << 30).close(store)
    assert not any(thread.is_alive() for thread in threads)
    assert not StoreLayout.open(tmp_path / "s").is_live()
    store.close()


def test_an_interrupt_while_a_failed_opening_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user gets no store to close, so the opening must release the lock."""
    stop = StoreEngine._stop_services
    left = [KeyboardInterrupt]

    def interrupted(engine: StoreEngine) -> None:
        if left:
            raise left.pop()
        stop(engine)

    def fails(_: Service) -> None:
        raise RuntimeError("no thread can be started")

    with monkeypatch.context() as patched:
        patched.setattr(StoreEngine, "_stop_services", interrupted)
        patched.setattr(Service, "start", fails)
        with pytest.raises(KeyboardInterrupt):
            lq.MessageStore.open(tmp_path / "store", mode="rw", config=config())
    with lq.MessageStore.open(tmp_path / "store", mode="rw", config=config()) as store:
        store.put(lq.Message("t"))
