"""A put's future does what one of the library's does, whoever waits for it, and when."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, as_completed, wait

import pytest

from logquarry.errors import StoreUnavailable
from logquarry.write.put_future import PutFuture, failed_future
from logquarry.write.put_result import AppendStatus, PutResult, PutStatus

RESULT = PutResult(PutStatus.PUT_OK, AppendStatus.PUT_OK, b"", 0, 0, 100, 1, 0, 0.0)


def test_a_future_that_nobody_waits_for() -> None:
    future = PutFuture()
    assert future.running()
    assert not future.cancel()
    assert not future.done()
    with pytest.raises(TimeoutError):
        future.result(timeout=0)
    future.set_result(RESULT)
    assert future.done()
    assert not future.running()
    assert not future.cancelled()
    assert future.result() is RESULT
    assert future.exception() is None
    assert "finished" in repr(future)


@pytest.mark.parametrize("is_looked_at", [False, True])
def test_it_is_settled_once(is_looked_at: bool) -> None:
    future = PutFuture()
    if is_looked_at:
        future.add_done_callback(lambda _: None)
    future.set_result(RESULT)
    with pytest.raises(InvalidStateError):
        future.set_result(RESULT)
    with pytest.raises(InvalidStateError):
        future.set_exception(ValueError())


def test_callbacks_before_and_after() -> None:
    future, called = PutFuture(), list[tuple[str, Future[PutResult]]]()
    future.add_done_callback(lambda found: called.append(("before", found)))
    assert not called
    future.set_result(RESULT)
    future.add_done_callback(lambda found: called.append(("after", found)))
    assert called == [("before", future), ("after", future)]


def test_a_failure() -> None:
    future = failed_future(StoreUnavailable("no"))
    assert future.done()
    assert isinstance(future.exception(), StoreUnavailable)
    for timeout in (None, 1):
        with pytest.raises(StoreUnavailable, match="no"):
            future.result(timeout)


def test_the_librarys_ways_of_waiting() -> None:
    futures: list[Future[PutResult]] = [PutFuture() for _ in range(4)]
    futures[2].set_result(RESULT)
    assert wait(futures, return_when=FIRST_COMPLETED).done == {futures[2]}
    left = [*futures[:2], futures[3]]

    def settle() -> None:
        for future in left:
            future.set_result(RESULT)

    settling = threading.Timer(0.05, settle)
    settling.start()
    assert set(as_completed(futures, timeout=60)) == set(futures)
    settling.join()

    async def waited() -> PutResult:
        future = PutFuture()
        threading.Timer(0.05, lambda: future.set_result(RESULT)).start()
        return await asyncio.wait_for(asyncio.wrap_future(future), 20)

    assert asyncio.run(waited()) is RESULT


@pytest.mark.timeout(120)
def test_nobody_waits_for_ever() -> None:
    """Settled by one thread at any moment of another's beginning to wait."""
    rounds = 3_000
    futures = [PutFuture() for _ in range(rounds)]
    called = threading.Semaphore(0)
    start = threading.Barrier(2)

    def settle() -> None:
        start.wait()
        for future in futures:
            future.set_result(RESULT)

    thread = threading.Thread(target=settle)
    thread.start()
    start.wait()
    for number, future in enumerate(futures):
        if number % 2:
            assert future.result(timeout=60) is RESULT
        else:
            future.add_done_callback(lambda _: called.release())
    for _ in range(rounds // 2):
        assert called.acquire(timeout=60)
    thread.join()
