"""A broker with SYNC_FLUSH is killed amid sends: no acknowledged message is lost, consumers go on.

``make crash RUNG=broker_kill N=200`` kills it 200 times.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
from collections import defaultdict
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import pytest

import logquarry as lq
from logquarry.protocol.remoting import RemotingCommand
from logquarry.protocol.remoting_codes import RequestCode
from logquarry.repair.verify import verify_store
from tests.crash.ladder import IS_BY_HAND, SEED, count, told
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


async def consume(
    client: Client, queue_id: int, acknowledged: Bodies, got: Bodies, consumed: asyncio.Event
) -> None:
    """Go on at the group's offset, and commit it after each pull."""
    where = {"consumerGroup": GROUP, "topic": "t", "queueId": queue_id}
    asked = await client.ask(RequestCode.QUERY_CONSUMER_OFFSET, where)
    offset = int(asked.ext_fields["offset"])
    assert offset <= len(got[queue_id]), "the group's offset is beyond what it got"
    while True:
        fields = pull_fields("t", offset, queue_id, sysFlag=2 | 4, suspendTimeoutMillis=60_000)
        answer: RemotingCommand = await client.post(RequestCode.PULL_MESSAGE, fields)
        for message in messages_of(answer):
            assert message.queue_offset == offset, "the consumer gets each offset"
            for known in acknowledged, got:
                assert known[queue_id].get(offset, message.body) == message.body
            got[queue_id][offset] = message.body
            offset += 1
            consumed.set()
        assert answer.code in (0, 19, 20), answer
        commit = where | {"commitOffset": offset}
        client.post(RequestCode.UPDATE_CONSUMER_OFFSET, commit, flag=2)


async def play(
    process: multiprocessing.process.BaseProcess,
    address: str,
    number: int,
    rng: random.Random,
    acknowledged: Bodies,
    got: Bodies,
) -> None:
    """Send and consume until the kill."""
    clients = [await connected(address) for _ in range(SENDERS + QUEUES)]
    if number == 0:
        fields = {"topic": "t", "readQueueNums": QUEUES, "writeQueueNums": QUEUES, "perm": 6}
        assert (await clients[0].ask(RequestCode.UPDATE_AND_CREATE_TOPIC, fields)).code == 0
    else:
        # All acknowledged messages are there before the first new one comes.
        for queue_id, of_queue in acknowledged.items():
            asked = {"topic": "t", "queueId": queue_id}
            end = await clients[0].ask(RequestCode.GET_MAX_OFFSET, asked)
            assert int(end.ext_fields["offset"]) > max(of_queue, default=-1)
    sent, consumed = asyncio.Event(), asyncio.Event()
    senders = [
        asyncio.create_task(send(client, f"{number}-{which}", acknowledged, sent))
        for which, client in enumerate(clients[:SENDERS])
    ]
    consumers = [
        asyncio.create_task(consume(client, queue_id, acknowledged, got, consumed))
        for queue_id, client in enumerate(clients[SENDERS:])
    ]
    await sent.wait()
    await consumed.wait()
    await asyncio.sleep(rng.choice((0.0, 0.02, 0.1)) * rng.random())
    process.kill()
    await asyncio.gather(*senders)
    for consumer in consumers:
        with suppress(asyncio.CancelledError, ConnectionError):
            await consumer
    for client in clients:
        with suppress(ConnectionError):
            await client.close()


@pytest.mark.parametrize(
    "rounds",
    [
        pytest.param(count(5), marks=pytest.mark.timeout(0 if IS_BY_HAND else 300)),
        pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(3_600)]),
    ],
)
def test_kills(rounds: int, tmp_path: Path) -> None:
    rng = random.Random(SEED)
    root = tmp_path / "store"
    acknowledged: Bodies = defaultdict(dict)
    got: Bodies = defaultdict(dict)
    context = multiprocessing.get_context("forkserver")
    # Each broker is a fork of a process that has loaded the code.
    context.set_forkserver_preload([__name__, "logquarry.format.kernels"])
    for number in range(rounds):
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(str(root), theirs))
        process.start()
        try:
            with told(SEED, f"round {number}", root, tmp_path):
                assert ours.poll(_START_SECONDS)
                asyncio.run(play(process, ours.recv(), number, rng, acknowledged, got))
        finally:
            process.kill()
            process.join()
    with told(SEED, "the end", root, tmp_path):
        with lq.MessageStore.open(root, mode="rw", config=SMALL) as store:
            store.wait_dispatched()
            stored: Bodies = defaultdict(dict)
            for message in store.scan("t"):
                stored[message.queue_id][message.queue_offset] = message.body
            for name, known in ("acknowledged", acknowledged), ("consumed", got):
                for queue_id, of_queue in known.items():
                    assert of_queue.items() <= stored[queue_id].items(), f"lost: {name}"
        with lq.MessageStore.open(root, config=SMALL) as store:
            assert not verify_store(store.layout).has_damage
    sums = [sum(map(len, known.values())) for known in (acknowledged, got, stored)]
    print(f"{rounds} kills: {sums[0]} acknowledged, {sums[1]} consumed, {sums[2]} stored")
    assert sums[0] >= rounds
