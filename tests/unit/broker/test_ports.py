"""The port two below the broker's, to which Java clients before 4.6 send."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from logquarry.broker import Broker
from logquarry.broker.ports import Port
from logquarry.errors import UsageError
from logquarry.protocol.remoting_codes import RequestCode
from tests.helpers.broker_client import SMALL, connected, document_of


def _lower(address: str) -> str:
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) - 2}"


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
