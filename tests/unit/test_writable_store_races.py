"""Threads of one store that meet: users', services', listeners' and callbacks'."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import logquarry as lq
from logquarry.errors import StoreUnavailable
from tests.faulty_disk import FaultyDisk
from tests.small_store import opened

SECONDS = 20


def start(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_two_flushes_at_once(tmp_path: Path) -> None:
    """Each index file that is full is synced once, and closed after that."""
    disk = FaultyDisk()
    store = opened(tmp_path, disk, flush_interval_consume_queue=3_600_000)
    for number in range(450):
        store.put(lq.Message("t", keys=f"k{number}"))
    store.wait_dispatched()
    store._engine.log.flush()
    for queue in store._engine.queues:
        queue.flush()
    # Only the index is left to be synced.
    disk.gate.clear()
    ended = []

    def flush() -> None:
        store.flush()
        ended.append(True)

    threads = [start(flush) for _ in range(2)]
    threads[1].join(0.2)
    disk.gate.set()
    for thread in threads:
        thread.join(SECONDS)
    assert len(ended) == 2
    times = store.checkpoint
    assert times is not None and times.index_timestamp > 0
    store.close()
    assert not (tmp_path / "abort").exists()


def test_a_flush_after_the_files_are_closed(tmp_path: Path) -> None:
    """It must not take a closed file for a disk that fails: the store would not close in order."""
    store = opened(tmp_path)
    store.put(lq.Message("t", keys="k"))
    store.wait_dispatched()
    abort = store._engine._abort
    remove = abort.remove
    refused = []

    def flush() -> None:
        try:
            store.flush()
        except StoreUnavailable as error:
            refused.append(str(error))

    def remove_later() -> None:
        start(flush).join(SECONDS)
        remove()

    abort.remove = remove_later  # type: ignore[method-assign]
    store.close()
    assert refused == ["the store was closed"]
    assert not (tmp_path / "abort").exists()
