"""The broker in a test of another project: a clock that the test advances, stores in memory."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import logquarry as lq
from logquarry.arguments import now_ms
from logquarry.broker import Broker, background
from logquarry.broker import broker as module
from logquarry.format import properties as props
from logquarry.protocol.remoting_codes import RequestCode, ResponseCode
from logquarry.stored_message import StoredMessage
from logquarry.testing.clock import ShiftedClock
from tests.helpers.broker_client import (
    PATIENCE_SECONDS,
    Client,
    connected,
    messages_of,
    pull_fields,
    send_fields,
)

HOUR_MS = 3_600_000


async def received(client: Client, topic: str, queue_id: int = 0) -> StoredMessage:
    """The first message of a queue, as soon as it is there."""
    fields = pull_fields(topic, 0, queue_id, sysFlag=2 | 4, suspendTimeoutMillis=30_000)
    while True:
        answer = await client.ask(RequestCode.PULL_MESSAGE, fields)
        if answer.code == ResponseCode.SUCCESS:
            return messages_of(answer)[0]
        # The topic of retries appears with the first retry.
        await asyncio.sleep(0.01)


def play(scenario: Callable[[Client, ShiftedClock], Awaitable[None]]) -> None:
    """Run a scenario with the fixture's arguments: all settings are the defaults."""
    clock = ShiftedClock()

    async def whole(address: str) -> None:
        client = await connected(address)
        await scenario(client, clock)
        await client.close()

    with background(clock=clock) as broker:
        asyncio.run(asyncio.wait_for(whole(broker.address), PATIENCE_SECONDS))


def test_a_topic_of_the_program_that_runs_the_broker() -> None:
    async def scenario(client: Client, broker: Broker) -> None:
        store = broker.store
        store.put(lq.Message("reports", b"1", queue_id=2))
        assert (await received(client, "reports", queue_id=2)).body == b"1"
        route = await client.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "reports"})
        assert route.code == ResponseCode.SUCCESS
        assert b'"readQueueNums":3' in route.body
        # A message that arrives after the topic was removed does not bring it back.
        assert (
            await client.ask(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "reports"})
        ).code == ResponseCode.SUCCESS
        store.put(lq.Message("reports", b"2", queue_id=2))
        store.put(lq.Message("orders", b"3"))
        await received(client, "orders")
        route = await client.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "reports"})
        assert route.code == ResponseCode.TOPIC_NOT_EXIST

    async def whole(broker: Broker) -> None:
        client = await connected(broker.address)
        await scenario(client, broker)
        await client.close()

    with background() as broker:
        asyncio.run(asyncio.wait_for(whole(broker), PATIENCE_SECONDS))


DELAYS: dict[str, Callable[[], str]] = {
    props.DELAY: lambda: "17",
    props.TIMER_DELIVER_MS: lambda: str(now_ms() + HOUR_MS),
}


@pytest.mark.parametrize("name", DELAYS)
def test_a_delayed_message_comes_when_the_clock_is_advanced(name: str) -> None:
    async def scenario(client: Client, clock: ShiftedClock) -> None:
        sent = await client.send("t", b"late", i=f"{name}\x01{DELAYS[name]()}")
        assert sent.code == 0
        clock.advance(HOUR_MS - 60_000)
        await client.send("t", b"first")
        assert (await received(client, "t")).body == b"first"
        clock.advance(HOUR_MS)
        fields = pull_fields("t", 1, sysFlag=2 | 4, suspendTimeoutMillis=30_000)
        (late,) = messages_of(await client.ask(RequestCode.PULL_MESSAGE, fields))
        assert late.body == b"late"

    play(scenario)


def test_a_retry_comes_when_the_clock_is_advanced() -> None:
    async def scenario(client: Client, clock: ShiftedClock) -> None:
        await client.heartbeat(group="g")
        await client.send("t", b"again")
        offset = (await received(client, "t")).physical_offset
        back = {"group": "g", "delayLevel": 0, "maxReconsumeTimes": 16, "offset": offset}
        assert (await client.ask(RequestCode.CONSUMER_SEND_MSG_BACK, back)).code == 0
        clock.advance(HOUR_MS)
        message = await received(client, "%RETRY%g")
        assert (message.body, message.reconsume_times) == (b"again", 1)

    play(scenario)


def test_a_transaction_is_checked_when_the_clock_is_advanced() -> None:
    """A second check comes as well, although checks come only once a minute."""

    async def scenario(client: Client, clock: ShiftedClock) -> None:
        await client.heartbeat(producer="pg")
        half = "TRAN_MSG\x01true\x02PGROUP\x01pg\x02UNIQ_KEY\x01u7"
        fields = send_fields("t", f=4, g=now_ms(), i=half)
        assert (await client.ask(RequestCode.SEND_MESSAGE_V2, fields)).code == 0
        for _ in range(2):
            clock.advance(60_000)
            asked = await client.told.get()
            assert asked.code == RequestCode.CHECK_TRANSACTION_STATE

    play(scenario)


def test_without_a_path_the_store_is_temporary() -> None:
    with background() as broker:
        root = broker.store.root
        assert Path(root).is_dir()
        taken = sum(file.stat().st_blocks * 512 for file in Path(root).rglob("*"))
        assert taken < 1 << 20
    assert not Path(root).exists()


class Filesystem(NamedTuple):
    """What ``os.statvfs`` says."""

    f_bavail: int
    f_frsize: int = 4_096


@pytest.mark.parametrize(
    ("free", "is_in_memory"), [(1 << 30, True), ((1 << 30) - 4_096, False), (None, False)]
)
def test_the_store_is_in_memory_if_there_is_enough(
    free: int | None, is_in_memory: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def statvfs(path: Any) -> Filesystem:
        if free is None:
            raise FileNotFoundError(path)
        return Filesystem(free // 4_096)

    memory, disk = tmp_path / "shm", tmp_path / "tmp"
    memory.mkdir()
    disk.mkdir()
    monkeypatch.setattr(module, "_SHM", str(memory))
    monkeypatch.setattr("os.statvfs", statvfs)
    monkeypatch.setattr("tempfile.tempdir", str(disk))
    folder = Path(tempfile.mkdtemp(dir=module._memory()))
    assert folder.parent == (memory if is_in_memory else disk)
    shutil.rmtree(folder)
