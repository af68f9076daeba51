"""Waits for a condition that another thread or process brings about, with a generous limit."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future

from logquarry.write.flush import GroupCommitService
from logquarry.write.put_result import ReplicaWait
from logquarry.write.settling import PutWait

PATIENCE_SECONDS = 60.0


def eventually(is_so: Callable[[], object]) -> None:
    """Wait until a condition is true; fail after a minute."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.002)


def wait_for(service: GroupCommitService | ReplicaWait, offset: int) -> Future[bool]:
    """Add a wait for an offset of the log. Its result shows whether the wait ended in time."""
    future: Future[bool] = Future()
    service.add(PutWait(offset, future.set_result, future.set_exception))
    return future
