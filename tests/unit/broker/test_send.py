"""Sends: batches, refusals, topics that they create, and sends that wait for the disk."""

from __future__ import annotations

import asyncio
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.broker import Broker
from logquarry.format.batch import BatchItem, encode
from logquarry.protocol.remoting_codes import RequestCode, ResponseCode
from tests.helpers.broker_client import SMALL, Client, arrived, messages_of, play, send_fields


def test_batches_share_a_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one sync runs, further batches come into the log, and the next sync is theirs."""
    gate = threading.Event()
    wire = encode([BatchItem(b"one", b""), BatchItem(b"two", b"")])
    fields = send_fields("t", i="", m="true")

    async def scenario(broker: Broker, client: Client) -> None:
        assert (await client.send("t")).code == 0
        monkeypatch.setattr(os, "fdatasync", lambda _: gate.wait())
        start = broker.store.max_offset
        first = client.post(RequestCode.SEND_BATCH_MESSAGE, fields, wire)
        while broker.store.max_offset == start:
            await asyncio.sleep(0)
        size = broker.store.max_offset - start
        batches = [client.post(RequestCode.SEND_BATCH_MESSAGE, fields, wire) for _ in range(50)]
        while broker.store.max_offset < start + 51 * size:
            await asyncio.sleep(0)
        assert not first.done() and not any(batch.done() for batch in batches)
        gate.set()
        answers = await asyncio.gather(first, *batches)
        assert [answer.code for answer in answers] == [0] * 51
        offsets = [int(answer.ext_fields["queueOffset"]) for answer in answers]
        assert offsets == list(range(1, 103, 2))

    config = replace(SMALL, flush_disk_type="SYNC_FLUSH", sync_flush_timeout=60_000)
    try:
        play(scenario, tmp_path / "s", config=config)
    finally:
        gate.set()


def test_a_batch(tmp_path: Path) -> None:
    async def scenario(_: Broker, client: Client) -> None:
        wire = encode([BatchItem(b"one", b"TAGS\x01a"), BatchItem(b"two", b"TAGS\x01b")])
        fields = send_fields("t", i="", m="true")
        sent = await client.ask(RequestCode.SEND_BATCH_MESSAGE, fields, wire)
        assert len(sent.ext_fields["msgId"].split(",")) == 2
        got = messages_of(await arrived(client, "t", 2))
        assert [(m.body, m.tags) for m in got] == [(b"one", "a"), (b"two", "b")]
        cut = await client.ask(RequestCode.SEND_BATCH_MESSAGE, fields, wire[:-1])
        assert cut.code == ResponseCode.MESSAGE_ILLEGAL

    play(scenario, tmp_path / "s")


def test_sends_that_are_refused(tmp_path: Path) -> None:
    async def scenario(_: Broker, client: Client) -> None:
        expected = {
            "SCHEDULE_TOPIC_XXXX": ResponseCode.NO_PERMISSION,
            "a/b": ResponseCode.SYSTEM_ERROR,
            "x" * 128: ResponseCode.SYSTEM_ERROR,
        }
        for topic, code in expected.items():
            assert (await client.send(topic)).code == code
        assert (await client.send("t", c="other")).code == ResponseCode.TOPIC_NOT_EXIST
        assert (await client.send("t", e=4)).code == ResponseCode.SYSTEM_ERROR
        assert (await client.send("t", bytes(5 << 20))).code == ResponseCode.MESSAGE_ILLEGAL
        fields = send_fields("t")
        del fields["g"]
        lacking = await client.ask(RequestCode.SEND_MESSAGE_V2, fields)
        assert lacking.code == ResponseCode.SYSTEM_ERROR
        assert lacking.remark == "the custom field <bornTimestamp> is null"

    play(scenario, tmp_path / "s")


def test_topics_are_not_created_if_that_is_forbidden(tmp_path: Path) -> None:
    async def scenario(_: Broker, client: Client) -> None:
        assert (await client.send("t")).code == ResponseCode.TOPIC_NOT_EXIST
        route = {"topic": "TBW102"}
        answer = await client.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, route)
        assert answer.code == ResponseCode.TOPIC_NOT_EXIST

    play(scenario, tmp_path / "s", create_topics=False)


@pytest.mark.parametrize(("default", "queues"), [("broker-a", 1), ("DefaultCluster", 4)])
def test_other_topics_to_inherit_from(tmp_path: Path, default: str, queues: int) -> None:
    """Topics as a producer uses them after setCreateTopicKey."""

    async def scenario(broker: Broker, client: Client) -> None:
        assert (await client.send("t", c=default)).code == 0
        topic = broker.core.tables.topic("t")
        assert topic is not None and topic.write_queues == queues
        # Both names are topics, too.
        assert (await client.send(default)).code == 0

    async def forbidden(_: Broker, client: Client) -> None:
        assert (await client.send("t2", c=default)).code == ResponseCode.TOPIC_NOT_EXIST

    play(scenario, tmp_path / "s")
    play(forbidden, tmp_path / "s", create_topics=False)


def test_a_full_queue_of_sends_is_busy(tmp_path: Path) -> None:
    async def scenario(_: Broker, client: Client) -> None:
        await client.send("t")
        answers = await asyncio.gather(
            *(client.post(RequestCode.SEND_MESSAGE_V2, send_fields("t"), b"x") for _ in range(50))
        )
        codes = [answer.code for answer in answers]
        assert set(codes) == {ResponseCode.SUCCESS, ResponseCode.SYSTEM_BUSY}

    play(scenario, tmp_path / "s", most_waiting=3)


def test_sends_under_way_are_answered_when_the_broker_stops(tmp_path: Path) -> None:
    async def scenario(broker: Broker, client: Client) -> None:
        go = threading.Event()
        blocker = asyncio.ensure_future(broker.core.lanes.puts.run(go.wait))
        sends = [
            client.post(RequestCode.SEND_MESSAGE_V2, send_fields("t"), b"%d" % number)
            for number in range(3)
        ]
        (connection,) = broker.connections
        while connection.pending < 3:
            await asyncio.sleep(0)
        stop = asyncio.create_task(broker.stop())
        while not connection._is_stopped:
            await asyncio.sleep(0)
        go.set()
        assert [(await send).code for send in sends] == [0, 0, 0]
        assert await blocker
        await stop

    play(scenario, tmp_path / "s")
    with lq.MessageStore.open(tmp_path / "s") as store:
        assert [message.body for message in store.scan("t")] == [b"0", b"1", b"2"]
        assert not store.has_abort
