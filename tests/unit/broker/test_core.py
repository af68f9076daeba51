"""The threads of the store's calls: an error of one job or answer stops no other."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from logquarry.broker.core import Lane, Mailbox


def test_items_after_one_that_fails_are_taken(caplog: pytest.LogCaptureFixture) -> None:
    taken: list[int] = []

    def take(item: int) -> None:
        if item == 1:
            raise ValueError("test")
        taken.append(item)

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        mailbox = Mailbox(loop, take)
        await loop.run_in_executor(None, mailbox.post, 0, 1, 2, 3)
        while len(taken) < 3:
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(scenario(), 60))
    assert taken == [0, 2, 3]
    assert "ValueError: test" in caplog.text


def test_a_lane_runs_its_jobs_in_order_and_delivers_each_result() -> None:
    ran: list[int] = []
    done: list[tuple[Any, BaseException | None]] = []

    def job(number: int) -> int:
        ran.append(number)
        if number == 2:
            raise KeyError(number)
        return number

    async def scenario() -> None:
        lane = Lane(asyncio.get_running_loop(), "test", capacity=300)

        def note(result: Any, error: BaseException | None) -> None:
            done.append((result, error))
            if result == 0:
                raise ValueError("test")

        for number in range(300):
            assert lane.submit(partial(job, number), note)
        # A full lane refuses a job, except one whose caller waits.
        assert not lane.submit(partial(job, 300), note)
        assert await lane.run(partial(job, 301)) == 301
        assert lane.waiting == 0
        with pytest.raises(KeyError):
            await lane.run(partial(job, 2))
        await lane.close()

    asyncio.run(asyncio.wait_for(scenario(), 60))
    assert ran == [*range(300), 301, 2]
    results = [result for result, _ in done]
    assert results == [0, 1, None, *range(3, 300)]
    assert [type(error) for _, error in done if error is not None] == [KeyError]
