"""Messages that go back: retries, dead letters, and replies to the producer that asked."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from logquarry.broker import Broker, send
from logquarry.protocol.remoting import RemotingCommand
from logquarry.protocol.remoting_codes import RequestCode, ResponseCode
from logquarry.testing.clock import FakeClock
from tests.helpers.broker_client import (
    SUSPENDS,
    Client,
    arrived,
    connected,
    messages_of,
    play,
    pull_fields,
    send_fields,
)

BODY = bytes(4 << 20)


def reply(client: Client, body: bytes, to: str = "asker") -> asyncio.Future[RemotingCommand]:
    fields = send_fields("DefaultCluster_REPLY_TOPIC", i=f"REPLY_TO_CLIENT\x01{to}")
    return client.post(RequestCode.SEND_REPLY_MESSAGE_V2, fields, body)


def test_replies_for_a_producer_that_does_not_read_take_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(send, "_PATIENCE_SECONDS", 0.05)

    async def scenario(broker: Broker, client: Client) -> None:
        asker = await connected(broker.address)
        await asker.heartbeat("asker", producer="pg")
        found = broker.core.clients.client("asker")
        assert found is not None
        asker.writer.transport.pause_reading()  # type: ignore[attr-defined]
        # The buffers of the sockets take some of these 80 MB.
        for _ in range(20):
            assert (await reply(client, BODY)).code == ResponseCode.SYSTEM_ERROR
        transport = found.connection._transport
        assert transport is not None and transport.get_write_buffer_size() < 2 * len(BODY)
        # When it reads again, it gets the next reply.
        monkeypatch.setattr(send, "_PATIENCE_SECONDS", 60.0)
        last = reply(client, b"last")
        asker.writer.transport.resume_reading()  # type: ignore[attr-defined]
        while (pushed := await asker.told.get()).body != b"last":
            pass
        asker.answer(pushed)
        assert (await last).code == 0
        await asker.close()

    play(scenario, tmp_path / "s")


def test_replies_that_wait_have_a_limit(tmp_path: Path) -> None:
    async def scenario(broker: Broker, client: Client) -> None:
        asker = await connected(broker.address)
        await asker.heartbeat("asker", producer="pg")
        first = reply(client, bytes(900))
        pushed = await asker.told.get()
        assert (await reply(client, bytes(200))).code == ResponseCode.SYSTEM_BUSY
        asker.answer(pushed)
        assert (await first).code == 0
        second = reply(client, bytes(200))
        asker.answer(await asker.told.get())
        assert (await second).code == 0
        # The wait ends when the producer disconnects.
        third = reply(client, b"x")
        await asker.told.get()
        await asker.close()
        lost = await third
        assert lost.code == ResponseCode.SYSTEM_ERROR and "disconnected" in str(lost.remark)

    play(scenario, tmp_path / "s", most_waiting_bytes=1_000)


def test_a_reply_under_way_is_delivered_when_the_broker_stops(tmp_path: Path) -> None:
    async def scenario(broker: Broker, client: Client) -> None:
        asker = await connected(broker.address)
        await asker.heartbeat("asker", producer="pg")
        answer = reply(client, b"x")
        pushed = await asker.told.get()
        connections = broker.connections
        stop = asyncio.create_task(broker.stop())
        while not all(connection._is_stopped for connection in connections):
            await asyncio.sleep(0)
        # A request that comes now does not start.
        late = client.post(RequestCode.GET_BROKER_CLUSTER_INFO)
        asker.answer(pushed)
        assert (await answer).code == 0
        await stop
        await asyncio.wait([late])
        assert late.cancelled()
        await asker.close()

    play(scenario, tmp_path / "s")


def test_retries_and_dead_letters_with_a_clock_of_the_test(tmp_path: Path) -> None:
    clock = FakeClock()

    async def scenario(broker: Broker, client: Client) -> None:
        await client.send("t", b"bad")
        await client.heartbeat(group="g")
        message = messages_of(await arrived(client, "t"))[0]
        back = {"group": "g", "delayLevel": 0, "maxReconsumeTimes": 2}
        for times in (1, 2):
            back["offset"] = message.physical_offset
            assert (await client.ask(RequestCode.CONSUMER_SEND_MSG_BACK, back)).code == 0
            clock.advance(3_600_000)
            held = pull_fields("%RETRY%g", times - 1, **SUSPENDS)
            (message,) = messages_of(await client.ask(RequestCode.PULL_MESSAGE, held))
            assert (message.body, message.reconsume_times) == (b"bad", times)
            assert message.properties["RETRY_TOPIC"] == "t"
        back["offset"] = message.physical_offset
        assert (await client.ask(RequestCode.CONSUMER_SEND_MSG_BACK, back)).code == 0
        (dead,) = messages_of(await arrived(client, "%DLQ%g"))
        assert (dead.body, dead.reconsume_times) == (b"bad", 3)
        back["offset"] = 1
        lost = await client.ask(RequestCode.CONSUMER_SEND_MSG_BACK, back)
        assert lost.code == ResponseCode.SYSTEM_ERROR

    play(scenario, tmp_path / "s", clock=clock)


def test_only_topics_are_counted(tmp_path: Path) -> None:
    """A producer can write any text into RETRY_TOPIC, and the counts are never deleted."""

    async def scenario(broker: Broker, client: Client) -> None:
        for name in "other", "t":
            await client.send("t", i=f"RETRY_TOPIC\x01{name}")
        for message in broker.store.scan("t"):
            back = {"group": "g", "delayLevel": 0, "offset": message.physical_offset}
            assert (await client.ask(RequestCode.CONSUMER_SEND_MSG_BACK, back)).code == 0
        assert broker.core.counts.sent_back == {("t", "g"): 1}

    play(scenario, tmp_path / "s")


def test_the_answer_about_a_damaged_message_has_no_path(tmp_path: Path) -> None:
    async def scenario(broker: Broker, client: Client) -> None:
        assert (await client.send("t", b"body" * 9)).code == 0
        (log,) = (tmp_path / "s" / "commitlog").glob("0" * 20)
        with log.open("r+b") as file:
            at = file.read(1 << 10).index(b"body" * 9)
            file.seek(at)
            file.write(b"B")
        back = {"group": "g", "delayLevel": 0, "maxReconsumeTimes": 2, "offset": 0}
        refused = await client.ask(RequestCode.CONSUMER_SEND_MSG_BACK, back)
        assert refused.code == ResponseCode.SYSTEM_ERROR
        assert refused.remark == "look message by offset failed, 0"

    play(scenario, tmp_path / "s")


def test_a_consumer_that_allows_no_retry_gets_a_dead_letter_at_once(tmp_path: Path) -> None:
    async def scenario(broker: Broker, client: Client) -> None:
        assert (await client.send("t", b"bad")).code == 0
        back = {"group": "g", "delayLevel": 0, "maxReconsumeTimes": 0, "offset": 0}
        assert (await client.ask(RequestCode.CONSUMER_SEND_MSG_BACK, back)).code == 0
        assert (await client.send("%RETRY%g", b"worse", l=0)).code == 0
        assert [m.body for m in broker.store.scan("%DLQ%g")] == [b"bad", b"worse"]

    play(scenario, tmp_path / "s")


def test_a_reply_goes_to_the_producer_that_asked(tmp_path: Path) -> None:
    async def scenario(broker: Broker, client: Client) -> None:
        await client.heartbeat("asker", producer="pg")
        consumer = await connected(broker.address)
        answer = reply(consumer, b"answer")
        pushed = await client.told.get()
        assert pushed.code == RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT
        assert pushed.body == b"answer"
        client.answer(pushed)
        assert (await answer).code == 0
        assert (await reply(consumer, b"answer", "gone")).code == ResponseCode.SYSTEM_ERROR
        await consumer.close()

    play(scenario, tmp_path / "s")
