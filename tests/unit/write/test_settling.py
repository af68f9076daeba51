"""Threads, callbacks and coroutines wait for the future of a put, before and after it is done."""

from __future__ import annotations

import asyncio
import logging
import os
import threading

import pytest

from logquarry.errors import StoreUnavailable
from logquarry.write.put_result import AppendStatus, PutResult, PutStatus
from logquarry.write.settling import PutFuture, WaitingPut, failed_future
from tests.helpers.waiting import eventually

RESULT = PutResult(PutStatus.PUT_OK, AppendStatus.PUT_OK, b"", 0, 0, 100, 1, 0, 0.0)


def test_a_result_before_and_after_it_is_known() -> None:
    future = PutFuture.pending()
    assert not future.done()
    assert "pending" in repr(future)
    for timeout in (0, -1, 0.01):
        with pytest.raises(TimeoutError):
            future.result(timeout=timeout)
        with pytest.raises(TimeoutError):
            future.exception(timeout=timeout)
    future.set_result(RESULT)
    assert future.done()
    assert future.result() is RESULT
    assert future.result(timeout=0) is RESULT
    assert future.exception() is None
    assert "PUT_OK" in repr(future)


@pytest.mark.parametrize(
    "future",
    [
        PutFuture.pending(),
        WaitingPut(RESULT, PutStatus.PUT_OK, 1, lambda _: None, lambda: None),
    ],
)
def test_a_forked_child_does_not_wait_for_a_put_of_its_parent(future: PutFuture) -> None:
    """No thread of the child would complete the future."""
    child = os.fork()
    if not child:
        try:
            future.result(10)
        except StoreUnavailable:
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    future.set_result(RESULT)
    assert future.result() is RESULT


def test_callbacks_before_and_after() -> None:
    future, called = PutFuture.pending(), list[tuple[str, PutFuture]]()
    future.add_done_callback(lambda found: called.append(("first", found)))
    future.add_done_callback(lambda found: called.append(("second", found)))
    assert not called
    future.set_result(RESULT)
    future.add_done_callback(lambda found: called.append(("after", found)))
    assert called == [("first", future), ("second", future), ("after", future)]


def test_a_callback_that_raises_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    future, called = PutFuture.pending(), list[PutFuture]()

    def raises(_: PutFuture) -> None:
        raise ValueError("a bug of the program")

    future.add_done_callback(raises)
    future.add_done_callback(called.append)
    with caplog.at_level(logging.ERROR):
        future.set_result(RESULT)
    assert called == [future] and future.result() is RESULT
    assert "a callback of" in caplog.text and "a bug of the program" in caplog.text


@pytest.mark.parametrize("error", [asyncio.CancelledError, SystemExit, KeyboardInterrupt])
def test_a_callback_never_ends_the_thread_that_syncs(
    error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    future = PutFuture.pending()
    called: list[PutFuture] = []

    def raises(_: PutFuture) -> None:
        raise error

    future.add_done_callback(raises)
    future.add_done_callback(called.append)
    survived = []

    def sync() -> None:
        future.set_result(RESULT)
        survived.append(True)

    thread = threading.Thread(target=sync)
    thread.start()
    thread.join()
    assert survived and called == [future] and error.__name__ in caplog.text


def test_a_callback_in_the_main_thread_may_end_the_program() -> None:
    future = PutFuture()
    future.set_result(RESULT)

    def ends(_: PutFuture) -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        future.add_done_callback(ends)


def test_a_failure() -> None:
    late = PutFuture.pending()
    called = list[PutFuture]()
    late.add_done_callback(called.append)
    late.set_exception(StoreUnavailable("no"))
    assert called == [late]
    for future in (failed_future(StoreUnavailable("no")), late):
        assert future.done()
        assert isinstance(future.exception(), StoreUnavailable)
        for timeout in (None, 1):
            with pytest.raises(StoreUnavailable, match="no"):
                future.result(timeout)


def test_a_thread_waits() -> None:
    for timeout in (None, 20):
        future = PutFuture.pending()
        settling = threading.Timer(0.05, future.set_result, [RESULT])
        settling.start()
        assert future.result(timeout) is RESULT
        settling.join()


def test_coroutines_wait() -> None:
    async def waited() -> list[PutResult]:
        futures = [PutFuture.pending() for _ in range(3)]
        futures[1].set_result(RESULT)
        for at in (0, 2):
            threading.Timer(0.05, futures[at].set_result, [RESULT]).start()

        async def each(future: PutFuture) -> PutResult:
            return await future

        found = await asyncio.wait_for(asyncio.gather(*map(each, futures)), 20)
        # Several may await the same future, also when it is done.
        return [*found, await futures[0]]

    assert asyncio.run(waited()) == [RESULT] * 4


def test_a_coroutine_gets_the_error() -> None:
    async def waited() -> PutResult:
        future = PutFuture.pending()
        threading.Timer(0.05, future.set_exception, [StoreUnavailable("EIO")]).start()
        return await future

    with pytest.raises(StoreUnavailable, match="EIO"):
        asyncio.run(waited())


def test_a_coroutine_that_gives_up_leaves_the_put_as_it_is() -> None:
    future = PutFuture.pending()

    async def gives_up() -> None:
        async def wait() -> PutResult:
            return await future

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(wait(), 0.01)

    asyncio.run(gives_up())
    assert not future.done()
    # Its loop is closed already.
    future.set_result(RESULT)
    assert future.result() is RESULT


@pytest.mark.timeout(120)
def test_no_wait_lasts_for_ever() -> None:
    """One thread settles the future at any moment of another thread's call."""
    rounds = 3_000
    futures = [PutFuture.pending() for _ in range(rounds)]
    called: list[PutFuture] = []
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
            assert future.result(timeout=20) is RESULT
        else:
            future.add_done_callback(called.append)
    thread.join()
    eventually(lambda: len(called) >= rounds // 2)
    # Each callback once.
    assert sorted(map(id, called)) == sorted(map(id, futures[::2]))
