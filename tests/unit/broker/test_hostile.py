"""Clients that misbehave: they harm neither the broker's memory nor other clients."""

from __future__ import annotations

import asyncio
import random
import struct
from pathlib import Path

import pytest

from logquarry.broker import Broker
from logquarry.broker import broker as module
from logquarry.protocol import remoting
from logquarry.protocol.remoting import RemotingCommand
from logquarry.protocol.remoting_codes import RequestCode
from tests.helpers.broker_client import (
    Client,
    messages_of,
    pull_fields,
    send_fields,
)
from tests.unit.broker.test_broker import _until, play


async def raw(broker: Broker) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = broker.address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


def test_a_huge_length_ends_the_connection_at_once(tmp_path: Path) -> None:
    async def scenario(broker: Broker, client: Client) -> None:
        for length in (1 << 31) - 1, -1, 0, (1 << 24) - 3:
            reader, writer = await raw(broker)
            writer.write(struct.pack(">i", length))
            assert await reader.read() == b""
            writer.close()
        assert (await client.send("t")).code == 0

    play(scenario, tmp_path / "s")


@pytest.mark.parametrize("limit", ["idle_s", "expire_s"])
def test_half_open_connections_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """One client sends nothing, and one sends no heartbeat."""
    monkeypatch.setattr(module, "_HOUSEKEEPING_SECONDS", 0.01)

    async def scenario(broker: Broker, client: Client) -> None:
        body = b'{"clientID":"c","producerDataSet":[{"groupName":"p"}]}'
        client.post(RequestCode.HEART_BEAT, body=body, flag=2)
        await client._task
        while broker.connections:
            await asyncio.sleep(0)
        assert not broker.core.clients.producers

    play(scenario, tmp_path / "s", **{limit: 0.05})


def test_random_frames(tmp_path: Path) -> None:
    async def scenario(broker: Broker, client: Client) -> None:
        chance = random.Random(5)
        good = remoting.encode(
            RemotingCommand(
                code=RequestCode.SEND_MESSAGE_V2,
                opaque=1,
                ext_fields={key: str(value) for key, value in send_fields("t").items()},
                body=b"body",
            )
        )
        for _ in range(300):
            frame = bytearray(good)
            frame[4:6] = struct.pack(">H", chance.choice((0, 256)))
            for _ in range(chance.randrange(1, 9)):
                frame[chance.randrange(8, len(frame))] = chance.randrange(256)
            reader, writer = await raw(broker)
            writer.write(frame + good)
            # Either an answer comes, or the connection ends.
            await reader.read(1)
            writer.close()
        for code in range(-2, 400):
            await client.ask(code, {"topic": "x"}, b"{")
        assert (await client.send("t")).code == 0

    play(scenario, tmp_path / "s")


def test_a_client_that_does_not_read_holds_back_only_itself(tmp_path: Path) -> None:
    async def scenario(broker: Broker, client: Client) -> None:
        for _ in range(8):
            await client.send("t", bytes(200_000))
        await _until(client, "t")
        _, writer = await raw(broker)
        pulls = [
            remoting.encode(
                RemotingCommand(
                    code=RequestCode.PULL_MESSAGE,
                    opaque=number,
                    ext_fields={k: str(v) for k, v in pull_fields("t", 0).items()},
                )
            )
            for number in range(3_000)
        ]
        writer.write(b"".join(pulls))
        # 3,000 answers have 600 MB: the broker makes only those that the client takes.
        while broker.core.counts.got_bytes["t", "group"] < 2_000_000:
            await asyncio.sleep(0.01)
        for _ in range(20):
            assert len(messages_of(await client.pull("t"))) == 1
        assert broker.core.counts.got_bytes["t", "group"] < 40_000_000
        writer.close()

    play(scenario, tmp_path / "s")


def test_pulls_that_are_held_leave_room_for_later_requests(tmp_path: Path) -> None:
    async def scenario(broker: Broker, client: Client) -> None:
        assert (await client.send("t")).code == 0
        # The broker reads an empty queue before it holds a pull.
        fields = pull_fields("t", 0, 1, sysFlag=2 | 4, suspendTimeoutMillis=100_000)
        held = [client.post(RequestCode.PULL_MESSAGE, fields) for _ in range(3_000)]
        assert (await client.send("t", b"wakes", e=1)).code == 0
        assert {answer.code for answer in await asyncio.gather(*held)} == {0}

    play(scenario, tmp_path / "s")
