"""A broker with SYNC_FLUSH is killed amid sends: no acknowledged message is lost, consumers go on.

``make crash RUNG=broker_kill N=200`` kills it 200 times.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import pytest

import logquarry as lq
from logquarry.protocol.remoting import RemotingCommand
from logquarry.protocol.remoting_codes import RequestCode
from logquarry.repair.verification import verify_store
from tests.crash.ladder import SEED, count, told
from tests.helpers.broker_client import (
    SMALL,
    Client,
    connected,
    messages_of,
    pull_fields,
    send_fields,
)

QUEUES: Final = 4
SENDERS: Final = 3
WINDOW: Final = 16
MOST: Final = 400
"""Messages of a round."""
GROUP: Final = "group"
_START_SECONDS: Final = 60.0

Bodies = dict[int, dict[int, bytes]]
"""Queue id -> queue offset -> body."""


def serve(path: str, pipe: Connection) -> None:
    """Run a broker until it is killed."""
    from logquarry.broker import background

    settings = replace(SMALL, flush_disk_type="SYNC_FLUSH")
    with background(path, config=settings) as broker:
        pipe.send(broker.address)
        pipe.recv()


async def send(client: Client, name: str, acknowledged: Bodies, sent: asyncio.Event) -> None:
    """Keep a window of sends open until the broker is gone."""
    numbers = iter(range(MOST // SENDERS))
    rng = random.Random(name)

    async def one() -> None:
        for number in numbers:
            body = f"{name}-{number}".encode() + bytes(rng.choice((0, 200, 5_000)))
            fields = send_fields("t", e=rng.randrange(QUEUES))
            answer = await client.post(RequestCode.SEND_MESSAGE_V2, fields, body)
            assert answer.code == 0, answer
            of_queue = acknowledged[int(answer.ext_fields["queueId"])]
            offset = int(answer.ext_fields["queueOffset"])
            assert offset not in of_queue, "an offset was given twice"
            of_queue[offset] = body
            sent.set()

    await asyncio.gather(*(one() for _ in range(WINDOW)), return_exceptions=True)


async def answer_to(request: asyncio.Future[RemotingCommand]) -> RemotingCommand:
    """The answer to a request; ConnectionError if the broker is gone."""
    await asyncio.wait([request])
    if request.cancelled():
        raise ConnectionError
    return request.result()


class Consumers:
    """One consumer for each queue, connected from the first broker to the last.

    Each holds a pull until a message comes. When the broker is gone, it connects to the next one,
    and goes on at the offset that its group has there.

    Attributes:
        got: what the consumers got.
        repeated: messages that came again.
        returns: how often a consumer got a message after it had connected again.
    """

    def __init__(self, acknowledged: Bodies) -> None:
        self._acknowledged = acknowledged
        self._broker: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.got: Bodies = defaultdict(dict)
        self.repeated = 0
        self.returns = 0
        self.consumed = asyncio.Event()

    def serve(self, address: str) -> None:
        """Let the consumers connect to a broker."""
        self.consumed.clear()
        self._broker.set_result(address)

    def gone(self) -> None:
        """The broker was killed."""
        self._broker = asyncio.get_running_loop().create_future()

    async def consume(self, queue_id: int) -> None:
        """Consume one queue, from all brokers in turn."""
        last: asyncio.Future[str] | None = None
        while True:
            while (broker := self._broker) is last:
                await asyncio.sleep(0.005)
            address, last = await broker, broker
            # The broker may be killed at any point.
            with suppress(ConnectionError):
                client = await connected(address)
                try:
                    await self._pull(client, queue_id)
                finally:
                    await client.close()

    async def _pull(self, client: Client, queue_id: int) -> None:
        where = {"consumerGroup": GROUP, "topic": "t", "queueId": queue_id}
        asked = await answer_to(client.post(RequestCode.QUERY_CONSUMER_OFFSET, where))
        offset, got = int(asked.ext_fields["offset"]), self.got[queue_id]
        assert offset <= len(got), "the group's offset is beyond what it got"
        is_first = not got
        while True:
            fields = pull_fields("t", offset, queue_id, sysFlag=2 | 4, suspendTimeoutMillis=60_000)
            answer = await answer_to(client.post(RequestCode.PULL_MESSAGE, fields))
            for message in messages_of(answer):
                assert message.queue_offset == offset, "the consumer gets each offset"
                for known in self._acknowledged, self.got:
                    assert known[queue_id].get(offset, message.body) == message.body
                self.repeated += offset in got
                self.returns += not is_first
                is_first = True
                got[offset] = message.body
                offset += 1
                self.consumed.set()
            assert answer.code in (0, 19, 20), answer
            commit = where | {"commitOffset": offset}
            client.post(RequestCode.UPDATE_CONSUMER_OFFSET, commit, flag=2)

    def has_all(self) -> bool:
        """Whether the consumers have got every acknowledged message."""
        return all(
            of_queue.keys() <= self.got[queue_id].keys()
            for queue_id, of_queue in self._acknowledged.items()
        )


@contextmanager
def broker_of(root: Path) -> Iterator[tuple[multiprocessing.process.BaseProcess, Connection]]:
    """A broker in a process, killed at the end."""
    context = multiprocessing.get_context("forkserver")
    # Each broker is a fork of a process that has loaded the code.
    context.set_forkserver_preload([__name__, "logquarry.format.kernels"])
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(str(root), theirs))
    process.start()
    try:
        yield process, ours
    finally:
        process.kill()
        process.join()


async def address_of(pipe: Connection) -> str:
    assert await asyncio.to_thread(pipe.poll, _START_SECONDS)
    return str(pipe.recv())


async def kill_amid_sends(
    root: Path,
    number: int,
    rng: random.Random,
    acknowledged: Bodies,
    consumers: Consumers,
) -> None:
    """Start a broker, send and consume, and kill it."""
    with broker_of(root) as (process, pipe):
        address = await address_of(pipe)
        clients = [await connected(address) for _ in range(SENDERS)]
        if number == 0:
            fields = {"topic": "t", "readQueueNums": QUEUES, "writeQueueNums": QUEUES, "perm": 6}
            assert (await clients[0].ask(RequestCode.UPDATE_AND_CREATE_TOPIC, fields)).code == 0
        else:
            # All acknowledged messages are there before the first new message comes.
            for queue_id, of_queue in acknowledged.items():
                asked = {"topic": "t", "queueId": queue_id}
                end = await clients[0].ask(RequestCode.GET_MAX_OFFSET, asked)
                assert int(end.ext_fields["offset"]) > max(of_queue, default=-1)
        consumers.serve(address)
        sent = asyncio.Event()
        senders = [
            asyncio.create_task(send(client, f"{number}-{which}", acknowledged, sent))
            for which, client in enumerate(clients)
        ]
        await sent.wait()
        await consumers.consumed.wait()
        await asyncio.sleep(rng.choice((0.0, 0.02, 0.1)) * rng.random())
        process.kill()
        consumers.gone()
        await asyncio.gather(*senders)
        for client in clients:
            with suppress(ConnectionError):
                await client.close()


async def scenario(rounds: int, root: Path) -> tuple[Bodies, Consumers]:
    """Kill brokers, one after the other; the last one lives until the consumers have all."""
    rng = random.Random(SEED)
    acknowledged: Bodies = defaultdict(dict)
    consumers = Consumers(acknowledged)
    tasks = [asyncio.create_task(consumers.consume(queue_id)) for queue_id in range(QUEUES)]

    async def kills() -> None:
        for number in range(rounds):
            with told(SEED, f"round {number}", root, root.parent):
                await kill_amid_sends(root, number, rng, acknowledged, consumers)
        with broker_of(root) as (_, pipe):
            consumers.serve(await address_of(pipe))
            while not consumers.has_all():
                await asyncio.sleep(0.005)

    work = asyncio.create_task(kills())
    # A consumer never ends, except by an error.
    await asyncio.wait([work, *tasks], return_when=asyncio.FIRST_COMPLETED)
    for task in (work, *tasks):
        task.cancel()
    for task, result in zip(
        (work, *tasks), await asyncio.gather(work, *tasks, return_exceptions=True), strict=True
    ):
        if isinstance(result, Exception):
            raise result
        assert task is not work or result is None, "a consumer ended"
    return acknowledged, consumers


@pytest.mark.parametrize(
    "rounds",
    [
        count(5),
        pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(3_600)]),
    ],
)
def test_kills(rounds: int, tmp_path: Path) -> None:
    root = tmp_path / "store"
    acknowledged, consumers = asyncio.run(scenario(rounds, root))
    with told(SEED, "the end", root, tmp_path):
        with lq.MessageStore.open(root, mode="rw", config=SMALL) as store:
            store.wait_dispatched()
            stored: Bodies = defaultdict(dict)
            for message in store.scan("t"):
                stored[message.queue_id][message.queue_offset] = message.body
        for queue_id, of_queue in acknowledged.items():
            got = consumers.got[queue_id]
            assert of_queue.items() <= got.items(), "an acknowledged message was not consumed"
            assert sorted(got) == list(range(len(got))), "a consumer missed an offset"
            assert got.items() <= stored[queue_id].items(), "lost"
        with lq.MessageStore.open(root, config=SMALL) as store:
            assert not verify_store(store.layout).has_damage
    sums = [sum(map(len, known.values())) for known in (acknowledged, consumers.got, stored)]
    print(
        f"{rounds} kills: {sums[0]} acknowledged, {sums[1]} consumed and {consumers.repeated} of "
        f"them again, {consumers.returns} times after a new connection, {sums[2]} stored"
    )
    # In each round after the first a consumer got a message, and each message was new once.
    assert sums[0] >= rounds and consumers.returns >= rounds - 1 - QUEUES
