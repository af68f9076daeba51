"""The threads of the store's calls: an error of one job or answer stops no other. The ports: their
connections, and the port two below for Java clients before 4.6.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from logquarry.broker import Broker, core, limits
from logquarry.broker.core import Lane, Mailbox, Port
from logquarry.broker.limits import SparingLog
from logquarry.errors import UsageError
from logquarry.protocol.remoting_codes import RequestCode
from tests.helpers.broker_client import PATIENCE_SECONDS, SMALL, connected, document_of


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


# ------------------------------------------------------------------------------ ports
def _lower(address: str) -> str:
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) - 2}"


def test_connections_leave_open_files_to_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(core, "file_limit", lambda: 11)
    # Other tests log refusals too, and a slow machine would log five more in each ten seconds.
    monkeypatch.setattr(core, "_refusals", SparingLog(core.logger))
    monkeypatch.setattr(limits, "_INTERVAL_SECONDS", float("inf"))

    async def scenario() -> None:
        async with Broker(tmp_path / "s", config=SMALL) as broker:
            host, _, port = broker.address.rpartition(":")
            clients = [await connected(broker.address) for _ in range(2)]
            for client in clients:
                assert (await client.send("t")).code == 0
            for _ in range(20):
                reader, writer = await asyncio.open_connection(host, int(port))
                with suppress(ConnectionError):
                    assert await reader.read() == b""
                writer.close()
            assert 1 <= caplog.text.count("too many connections") <= 5
            for client in clients:
                assert (await client.send("t")).code == 0
                await client.close()

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_SECONDS))


def test_a_client_sends_to_the_port_two_below(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Broker(tmp_path / "s", config=SMALL) as broker:
            for address in broker.address, _lower(broker.address):
                client = await connected(address)
                assert (await client.send("t")).code == 0
                await client.close()
            # The name server gives the broker's address only.
            client = await connected(broker.name_server)
            route = RequestCode.GET_ROUTEINFO_BY_TOPIC
            found = document_of(await client.ask(route, {"topic": "t"}))
            assert found["brokerDatas"][0]["brokerAddrs"] == {"0": broker.address}
            await client.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("taken", [1, 1_000])
def test_the_port_two_below_is_taken(
    taken: int, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker chooses other ports; if all are taken, it logs which clients cannot send."""
    listen, tried = Port.listen, []

    async def busy(port: Port, number: int, option: str) -> None:
        if number:
            tried.append(number)
            if len(tried) <= taken:
                raise UsageError(f"the port {number} is in use")
        await listen(port, number, option)

    async def scenario() -> None:
        monkeypatch.setattr(Port, "listen", busy)
        with caplog.at_level(logging.WARNING):
            async with Broker(tmp_path / "s", config=SMALL) as broker:
                client = await connected(broker.address)
                assert (await client.send("t")).code == 0
                await client.close()
                if taken == 1:
                    client = await connected(_lower(broker.address))
                    await client.close()

    asyncio.run(scenario())
    has_warning = "before RocketMQ 4.6" in caplog.text
    assert has_warning is (taken > 1)
    assert not has_warning or f"the port {tried[-1]} is in use" in caplog.text


def test_all_addresses_of_a_host_take_one_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients learn only one port; the system would choose another port for each address."""
    resolve = socket.getaddrinfo

    def both(host: str, *args: Any, **more: Any) -> list[Any]:
        hosts = ("127.0.0.1", "127.0.0.2") if host == "two.example" else (host,)
        return [found for one in hosts for found in resolve(one, *args, **more)]

    monkeypatch.setattr(socket, "getaddrinfo", both)
    found = core._bound_at_one_port("two.example", 0)
    try:
        first, second = (one.getsockname() for one in found)
        assert (first[0], second[0]) == ("127.0.0.1", "127.0.0.2")
        assert first[1] == second[1]
    finally:
        for one in found:
            one.close()


def test_a_port_that_another_address_lacks_is_chosen_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [OSError(errno.EADDRINUSE, "in use"), []]

    def bound(_: str, __: int) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(core, "_bound", bound)
    assert core._bound_at_one_port("h", 0) == [] and not answers
