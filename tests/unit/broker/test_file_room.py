"""A broker that has almost reached the process's limit of open files."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from pathlib import Path

import pytest

from logquarry.broker import Broker, core, file_room
from logquarry.broker.file_room import NewQueues, is_near_limit
from logquarry.broker.sparing_log import SparingLog
from logquarry.protocol.remoting_codes import Refused, RequestCode, ResponseCode
from tests.helpers.broker_client import Client, arrived, messages_of, play


def test_new_queues_are_refused_before_all_files_are_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(broker: Broker, client: Client) -> None:
        assert (await client.send("t0")).code == 0
        await arrived(client, "t0")
        # Ten more files, with a margin for files that the store opens meanwhile.
        limit = (file_room._next_number() + 10) * 4 // 3
        monkeypatch.setattr(file_room, "file_limit", lambda: limit)
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
        back = await client.ask(RequestCode.CONSUMER_SEND_MSG_BACK, fields)
        assert back.code == ResponseCode.NO_PERMISSION
        monkeypatch.setattr(file_room, "file_limit", lambda: 1 << 20)
        assert (await client.ask(RequestCode.CONSUMER_SEND_MSG_BACK, fields)).code == 0
        assert (await client.send("t29")).code == 0
        assert (await client.send("t28")).code == 0

    play(scenario, tmp_path / "s")


def test_a_refused_message_takes_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_room, "file_limit", lambda: 100)
    monkeypatch.setattr(file_room, "_next_number", lambda: 71)
    queues = NewQueues()
    queues.require_room("t", 0)
    queues.require_room("t", 1)
    with pytest.raises(Refused, match=r"100 files .*already uses 2 queues"):
        queues.require_room("t", 2)
    queues.failed("t", 1)
    queues.require_room("t", 2)
    queues.arrived(("t", 2))
    queues.require_room("t", 2)
    queues.require_room("t", 3)


def test_connections_leave_files_to_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(core, "_refusals", SparingLog(logging.getLogger("test")))

    async def scenario(broker: Broker, client: Client) -> None:
        assert (await client.send("t")).code == 0
        limit = file_room._next_number()
        monkeypatch.setattr(file_room, "file_limit", lambda: limit)
        assert is_near_limit(limit)
        host, _, port = broker.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        with suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
        assert "too many connections" in caplog.text
        assert (await client.send("t")).code == 0

    play(scenario, tmp_path / "s")
