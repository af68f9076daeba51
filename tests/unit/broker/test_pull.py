"""Held pulls with a filter: messages that it excludes do not end them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from logquarry.broker import Broker, pull
from logquarry.protocol.remoting_codes import RequestCode, ResponseCode
from tests.helpers.broker_client import Client, messages_of, pull_fields
from tests.unit.broker.test_broker import SUSPENDS, _until, play

FILTERS = {
    "tags": {"subscription": "b || c"},
    # "Aa" and "BB" have the same hash code.
    "collision": {"subscription": "b || BB"},
    "sql": {"subscription": "TAGS = 'b'", "expressionType": "SQL92"},
}


async def send(client: Client, *tags: str) -> None:
    for tag in tags:
        assert (await client.send("t", tag.encode(), i=f"TAGS\x01{tag}")).code == 0


async def excluded(broker: Broker, end: int) -> None:
    """Wait until the broker has decided about the messages before an offset."""
    pulling = broker._pulling
    while pulling.end_of(("t", 0)) < end or pulling._reads or ("t", 0) not in pulling._held:
        await asyncio.sleep(0)


@pytest.mark.parametrize("name", FILTERS)
def test_excluded_messages_do_not_end_a_held_pull(tmp_path: Path, name: str) -> None:
    fields: dict[str, Any] = SUSPENDS | FILTERS[name]

    async def scenario(broker: Broker, client: Client) -> None:
        await send(client, "a")
        await _until(client, "t")
        held = client.post(RequestCode.PULL_MESSAGE, pull_fields("t", 1, **fields))
        await client.ask(RequestCode.GET_MAX_OFFSET, {"topic": "t", "queueId": 0})
        for end in range(2, 12):
            await send(client, "Aa")
            await excluded(broker, end)
            # The answer to a pull that ended would come before this one.
            assert len(messages_of(await client.pull("t", end - 1))) == 1
            assert not held.done()
        await send(client, "Aa", "b", "Aa")
        assert [m.body for m in messages_of(await held)] == [b"b"]

    play(scenario, tmp_path / "s")


@pytest.mark.parametrize("name", FILTERS)
def test_a_client_gets_the_offset_after_excluded_messages(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull, "_EXCLUDED_SECONDS", 0.1)
    fields: dict[str, Any] = SUSPENDS | FILTERS[name]

    async def scenario(broker: Broker, client: Client) -> None:
        await send(client, "a")
        await _until(client, "t")
        held = client.post(RequestCode.PULL_MESSAGE, pull_fields("t", 1, **fields))
        await client.ask(RequestCode.GET_MAX_OFFSET, {"topic": "t", "queueId": 0})
        await send(client, "Aa", "Aa", "Aa")
        answer = await held
        assert answer.code == ResponseCode.PULL_RETRY_IMMEDIATELY
        assert 1 < int(answer.ext_fields["nextBeginOffset"]) <= 4

    play(scenario, tmp_path / "s")


def test_any_message_of_an_arrival_ends_a_held_pull(tmp_path: Path) -> None:
    from logquarry.format.batch import BatchItem, encode
    from tests.helpers.broker_client import send_fields

    async def scenario(_: Broker, client: Client) -> None:
        await send(client, "a")
        await _until(client, "t")
        fields: dict[str, Any] = SUSPENDS | FILTERS["tags"]
        held = client.post(RequestCode.PULL_MESSAGE, pull_fields("t", 1, **fields))
        await client.ask(RequestCode.GET_MAX_OFFSET, {"topic": "t", "queueId": 0})
        wire = encode([BatchItem(tag.encode(), b"TAGS\x01" + tag.encode()) for tag in "abaca"])
        sent = await client.ask(
            RequestCode.SEND_BATCH_MESSAGE, send_fields("t", i="", m="true"), wire
        )
        assert sent.code == 0
        assert [m.body for m in messages_of(await held)] == [b"b", b"c"]

    play(scenario, tmp_path / "s")
