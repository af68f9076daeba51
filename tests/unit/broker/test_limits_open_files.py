"""A broker that has almost reached the process's limit of open files."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from logquarry.broker import Broker, BrokerOptions, core, limits
from logquarry.broker.limits import NewQueues, SparingLog, is_near_limit
from logquarry.errors import StoreUnavailable
from logquarry.protocol.remoting_codes import Refused, RequestCode, ResponseCode
from tests.helpers.broker_client import Client, arrived, messages_of, play
from tests.helpers.replication import make_certificate


def test_new_queues_are_refused_before_all_files_are_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(broker: Broker, client: Client) -> None:
        assert (await client.send("t0")).code == 0
        await arrived(client, "t0")
        # Ten more files, with a margin for files that the store opens meanwhile.
        limit = (limits._open_files() + 10) * 4 // 3
        monkeypatch.setattr(limits, "file_limit", lambda: limit)
        answers = await asyncio.gather(*(client.send(f"t{number}") for number in range(1, 30)))
        refused = [answer for answer in answers if answer.code]
        assert 20 < len(refused) < 29
        assert {answer.code for answer in refused} == {ResponseCode.NO_PERMISSION}
        assert "ulimit -n" in str(refused[0].remark)
        # The store still takes messages for known queues.
        for topic in "t0", "t1":
            await arrived(client, topic)
            assert (await client.send(topic)).code == 0
        await arrived(client, "t0", 2)
        message = messages_of(await client.pull("t0"))[0]
        fields = {"group": "g", "offset": message.physical_offset, "delayLevel": 0}
        # With Python 3.13 or newer, an open queue has fewer files than the limit counts for a new
        # queue, so there is room again.
        limit = limits._open_files()
        back = await client.ask(RequestCode.CONSUMER_SEND_MSG_BACK, fields)
        assert back.code == ResponseCode.NO_PERMISSION
        monkeypatch.setattr(limits, "file_limit", lambda: 1 << 20)
        assert (await client.ask(RequestCode.CONSUMER_SEND_MSG_BACK, fields)).code == 0
        assert (await client.send("t29")).code == 0
        assert (await client.send("t28")).code == 0

    play(scenario, tmp_path / "s")


def test_a_refused_message_takes_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "file_limit", lambda: 100)
    monkeypatch.setattr(limits, "_open_files", lambda: 71)
    queues = NewQueues()
    queues.require_room("t", 0)
    queues.require_room("t", 1)
    with pytest.raises(Refused, match=r"100 open files .*has 2 queues in use"):
        queues.require_room("t", 2)
    queues.failed("t", 1)
    queues.require_room("t", 2)
    queues.opened(("t", 2))
    queues.require_room("t", 2)
    queues.require_room("t", 3)


def test_a_queue_is_awaited_until_its_last_message_has_failed() -> None:
    queues = NewQueues()
    for _ in range(2):
        queues.require_room("t", 0)
    half = {"REAL_TOPIC": "t", "REAL_QID": "0"}
    queues.rolled_back(half)
    assert queues.awaits_any(), "the other message can still open the files"
    queues.rolled_back(half)
    assert not queues.awaits_any()
    queues.rolled_back(half)
    queues.rolled_back({"REAL_TOPIC": "t"})
    assert not queues.awaits_any()


def test_a_rolled_back_transaction_takes_no_room(tmp_path: Path) -> None:
    async def scenario(broker: Broker, client: Client) -> None:
        queues = broker.core.new_queues
        half = "TRAN_MSG\x01true\x02PGROUP\x01pg\x02UNIQ_KEY\x01u7"
        sent = (await client.send("new", b"x", f=4, i=half)).ext_fields
        assert queues.awaits_any()
        end = {
            "producerGroup": "pg",
            "tranStateTableOffset": sent["queueOffset"],
            "commitLogOffset": int(sent["msgId"][16:], 16),
            "commitOrRollback": 12,
        }
        assert (await client.ask(RequestCode.END_TRANSACTION, end)).code == 0
        assert not queues.awaits_any()
        assert (await client.ask(RequestCode.END_TRANSACTION, end)).code == 0

    play(scenario, tmp_path / "s")


def test_open_files_with_higher_numbers_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = limits._open_files()
    with ExitStack() as opened:
        files = [opened.enter_context((tmp_path / str(n)).open("w")) for n in range(50)]
        files[0].close()
        if Path("/proc/self/fd").stat().st_size:
            assert limits._open_files() == before + 49
        assert limits._next_number() < before + 10
    # Before Linux 6.2, the size is 0.
    monkeypatch.setattr(Path, "stat", lambda _: os.stat_result([0] * 10))
    assert limits._open_files() == limits._next_number()


def test_a_rejected_message_takes_no_room(tmp_path: Path) -> None:
    async def scenario(broker: Broker, client: Client) -> None:
        queues = broker.core.new_queues
        assert (await client.send("t", bytes(5 << 20))).code == ResponseCode.MESSAGE_ILLEGAL
        assert not queues._awaited
        await client.send("t")
        await arrived(client, "t")
        message = messages_of(await client.pull("t"))[0]
        fields = {"group": "g", "offset": message.physical_offset, "delayLevel": 0}

        def fail(message: object) -> None:
            raise StoreUnavailable("the disk is full")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(broker.core.writer, "put_async", fail)
            assert (await client.ask(RequestCode.CONSUMER_SEND_MSG_BACK, fields)).code
        assert not queues._awaited

    play(scenario, tmp_path / "s")


def test_a_queue_that_a_consumer_reads_needs_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a restart, its files are open before its next message."""

    async def put(broker: Broker, client: Client) -> None:
        for topic in "t", "u":
            await client.send(topic)
            await arrived(client, topic)

    async def scenario(broker: Broker, client: Client) -> None:
        assert messages_of(await client.pull("t"))
        monkeypatch.setattr(limits, "file_limit", lambda: 8)
        assert (await client.send("u")).code == ResponseCode.NO_PERMISSION
        assert (await client.send("t")).code == 0

    play(put, tmp_path / "s")
    play(scenario, tmp_path / "s")


def test_handshakes_leave_files_to_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = make_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    async def scenario() -> None:
        async with Broker(tmp_path / "s", options=BrokerOptions(tls=context)) as broker:
            monkeypatch.setattr(limits, "file_limit", lambda: 8)
            host, _, port = broker.address.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            with suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), 5) == b""
            writer.close()

    asyncio.run(scenario())


def test_connections_leave_files_to_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(core, "_refusals", SparingLog(logging.getLogger("test")))

    async def scenario(broker: Broker, client: Client) -> None:
        assert (await client.send("t")).code == 0
        limit = limits._next_number()
        monkeypatch.setattr(limits, "file_limit", lambda: limit)
        assert is_near_limit(limit)
        host, _, port = broker.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        with suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
        assert "too many connections" in caplog.text
        assert (await client.send("t")).code == 0

    play(scenario, tmp_path / "s")
