"""A client of a broker: sends requests of the remoting protocol, and waits for their answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import logquarry as lq
from logquarry.broker import Broker, BrokerOptions
from logquarry.format import broker_json, frame
from logquarry.format.frame import Frame
from logquarry.protocol import remoting
from logquarry.protocol.remoting import RemotingCommand, RemotingReader
from logquarry.protocol.remoting_codes import RequestCode
from logquarry.protocol.remoting_header import VERSION
from logquarry.stored_message import StoredMessage

PATIENCE_SECONDS = 60.0
SUSPENDS = {"sysFlag": 2 | 4, "suspendTimeoutMillis": 30_000}
"""The fields of a pull that the broker may hold."""
SMALL = lq.StoreConfig(
    mapped_file_size_commit_log=1 << 22,
    mapped_file_size_consume_queue=20 * 1000,
    max_hash_slot_num=500,
    max_index_num=2000,
)


class Client:
    """One connection.

    Attributes:
        told: requests of the broker that came.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.told: asyncio.Queue[RemotingCommand] = asyncio.Queue()
        self._opaque = 0
        self._is_over = False
        self._asked: dict[int, asyncio.Future[RemotingCommand]] = {}
        self._task = asyncio.create_task(self._read(reader))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        frames = RemotingReader()
        # A broker that is killed resets the connection.
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                for command in frames.receive_data(data):
                    if command.is_response:
                        self._asked.pop(command.opaque).set_result(command)
                    else:
                        self.told.put_nowait(command)
        self._is_over = True
        for future in self._asked.values():
            future.cancel()

    def post(
        self,
        code: int,
        fields: Mapping[str, Any] | None = None,
        body: bytes = b"",
        *,
        flag: int = 0,
        is_binary: bool = False,
        version: int = VERSION,
    ) -> asyncio.Future[RemotingCommand]:
        """Send a request; the future has its answer."""
        self._opaque += 1
        command = RemotingCommand(
            code=code,
            opaque=self._opaque,
            flag=flag,
            ext_fields={key: str(value) for key, value in (fields or {}).items()},
            body=body,
            is_binary=is_binary,
            version=version,
        )
        future: asyncio.Future[RemotingCommand] = asyncio.get_running_loop().create_future()
        if self._is_over:
            future.cancel()
            return future
        if not flag:
            self._asked[self._opaque] = future
        self.writer.write(remoting.encode(command))
        return future

    async def ask(
        self, code: int, fields: Mapping[str, Any] | None = None, body: bytes = b"", **more: Any
    ) -> RemotingCommand:
        return await asyncio.wait_for(self.post(code, fields, body, **more), PATIENCE_SECONDS)

    def answer(self, command: RemotingCommand, code: int = 0, body: bytes = b"") -> None:
        """Answer a request of the broker."""
        self.writer.write(remoting.encode(command.answer(code, body=body)))

    async def send(self, topic: str, body: bytes = b"body", **changes: Any) -> RemotingCommand:
        return await self.ask(RequestCode.SEND_MESSAGE_V2, send_fields(topic, **changes), body)

    async def pull(
        self, topic: str, offset: int = 0, queue_id: int = 0, **changes: Any
    ) -> RemotingCommand:
        return await self.ask(
            RequestCode.PULL_MESSAGE, pull_fields(topic, offset, queue_id, **changes)
        )

    async def heartbeat(
        self,
        client_id: str = "client",
        *,
        producer: str | None = None,
        group: str | None = None,
        model: str = "CLUSTERING",
        **subscription: Any,
    ) -> RemotingCommand:
        consumers = []
        if group is not None:
            sub = {"topic": "t", "subString": "*", "subVersion": 1, "expressionType": "TAG"}
            consumers = [
                {
                    "groupName": group,
                    "consumeType": "CONSUME_PASSIVELY",
                    "messageModel": model,
                    "consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET",
                    "subscriptionDataSet": [sub | subscription],
                }
            ]
        document = {
            "clientID": client_id,
            "producerDataSet": [] if producer is None else [{"groupName": producer}],
            "consumerDataSet": consumers,
        }
        return await self.ask(RequestCode.HEART_BEAT, body=json.dumps(document).encode())

    async def close(self) -> None:
        self.writer.close()
        await self._task


def send_fields(topic: str, **changes: Any) -> dict[str, Any]:
    """The fields of a send in the short form; ``changes`` by their letters."""
    return {
        "a": "producers",
        "b": topic,
        "c": "TBW102",
        "d": 4,
        "e": 0,
        "f": 0,
        "g": 1_700_000_000_000,
        "h": 0,
        "i": "KEYS\x01k1\x02UNIQ_KEY\x01u1\x02WAIT\x01true\x02TAGS\x01a",
        "j": 0,
        "k": "false",
        "m": "false",
    } | changes


def pull_fields(topic: str, offset: int, queue_id: int = 0, **changes: Any) -> dict[str, Any]:
    return {
        "consumerGroup": "group",
        "topic": topic,
        "queueId": queue_id,
        "queueOffset": offset,
        "maxMsgNums": 32,
        "sysFlag": 4,
        "commitOffset": 0,
        "suspendTimeoutMillis": 0,
        "subscription": "*",
        "subVersion": 0,
        "expressionType": "TAG",
    } | changes


def messages_of(answer: RemotingCommand) -> list[StoredMessage]:
    """The messages in the body of an answer."""
    found, at = [], 0
    while at < len(answer.body):
        base = int.from_bytes(answer.body[at + 28 : at + 36], "big") - at
        outcome = frame.decode_at(answer.body, at, base=base)
        assert isinstance(outcome, Frame)
        found.append(StoredMessage(outcome))
        at += outcome.size
    return found


def document_of(answer: RemotingCommand) -> Any:
    assert answer.code == 0, answer
    return broker_json.decode(answer.body)


async def connected(address: str, **options: Any) -> Client:
    host, _, port = address.rpartition(":")
    return Client(*await asyncio.open_connection(host, int(port), **options))


@asynccontextmanager
async def serving(
    path: Path | None, *, config: lq.StoreConfig = SMALL, clock: Any = None, **options: Any
) -> AsyncIterator[tuple[Broker, Client]]:
    """A running broker, and a client of it."""
    settings = BrokerOptions(**options)
    async with Broker(path, options=settings, config=config, clock=clock) as broker:
        client = await connected(broker.address)
        try:
            yield broker, client
        finally:
            await client.close()


Scenario = Callable[[Broker, Client], Awaitable[None]]


def play(scenario: Scenario, path: Path | None, **options: Any) -> None:
    """Run a scenario with a broker and a client of it, within a limit of time."""

    async def whole() -> None:
        async with serving(path, **options) as (broker, client):
            await scenario(broker, client)

    asyncio.run(asyncio.wait_for(whole(), PATIENCE_SECONDS))


async def arrived(client: Client, topic: str, count: int = 1) -> Any:
    """Pull until the dispatcher has some messages in the queue."""
    while True:
        answer = await client.pull(topic)
        if len(messages_of(answer)) >= count:
            return answer
        await asyncio.sleep(0.01)


async def held_pull(client: Client, **fields: Any) -> asyncio.Future[RemotingCommand]:
    """Pull from offset 1 of queue 0 of topic t, and wait until the broker holds the pull."""
    pull = client.post(RequestCode.PULL_MESSAGE, pull_fields("t", 1, **(SUSPENDS | fields)))
    # The broker answers a later request of the same connection.
    where = {"topic": "t", "queueId": 0}
    assert (await client.ask(RequestCode.GET_MAX_OFFSET, where)).code == 0
    assert not pull.done()
    return pull
