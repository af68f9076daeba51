"""Pulls: filters, offsets outside of a queue, and what ends a pull that the broker holds."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from logquarry.broker import Broker, pull
from logquarry.format.batch import BatchItem, encode
from logquarry.format.properties import parse_tags
from logquarry.protocol.remoting_codes import RequestCode, ResponseCode
from tests.helpers.broker_client import (
    SUSPENDS,
    Client,
    arrived,
    held_pull,
    messages_of,
    play,
    pull_fields,
    send_fields,
)

FILTERS = {
    "tags": {"subscription": "b || c"},
    # "Aa" and "BB" have the same hash code.
    "collision": {"subscription": "b || BB"},
    "sql": {"subscription": "TAGS = 'b'", "expressionType": "SQL92"},
    "many tags": {"subscription": " || ".join(("b", *map(str, range(100))))},
}


async def send(client: Client, *tags: str) -> None:
    for tag in tags:
        assert (await client.send("t", tag.encode(), i=f"TAGS\x01{tag}")).code == 0


async def excluded(broker: Broker, end: int) -> None:
    """Wait until the broker has decided about the messages before an offset."""
    pulling = broker._pulling
    while pulling.bounds_of(("t", 0))[1] < end or pulling._reads or ("t", 0) not in pulling._held:
        await asyncio.sleep(0)


@pytest.mark.parametrize("name", FILTERS)
def test_excluded_messages_do_not_end_a_held_pull(tmp_path: Path, name: str) -> None:
    async def scenario(broker: Broker, client: Client) -> None:
        await send(client, "a")
        await arrived(client, "t")
        held = await held_pull(client, **FILTERS[name])
        for end in range(2, 12):
            await send(client, "Aa")
            await excluded(broker, end)
            # The answer to a pull that ended would come before this one.
            assert len(messages_of(await client.pull("t", end - 1))) == 1
            assert not held.done()
        await send(client, "Aa", "b", "Aa")
        assert [m.body for m in messages_of(await held)] == [b"b"]

    play(scenario, tmp_path / "s")


def test_the_event_loop_checks_no_long_filter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client can hold thousands of pulls, each with thousands of tags."""
    checked: list[str] = []

    def parse(text: str) -> frozenset[str] | None:
        checked.append(text)
        return parse_tags(text)

    monkeypatch.setattr(pull, "parse_tags", parse)

    async def scenario(broker: Broker, client: Client) -> None:
        await send(client, "a")
        await arrived(client, "t")
        for name in "many tags", "tags":
            await held_pull(client, **FILTERS[name])
        await send(client, "Aa")
        await excluded(broker, 2)
        assert checked == [FILTERS["tags"]["subscription"]]

    play(scenario, tmp_path / "s")


@pytest.mark.parametrize("name", FILTERS)
def test_a_client_gets_the_offset_after_excluded_messages(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull, "_EXCLUDED_SECONDS", 0.1)

    async def scenario(broker: Broker, client: Client) -> None:
        await send(client, "a")
        await arrived(client, "t")
        held = await held_pull(client, **FILTERS[name])
        await send(client, "Aa", "Aa", "Aa")
        answer = await held
        assert answer.code == ResponseCode.PULL_RETRY_IMMEDIATELY
        assert 1 < int(answer.ext_fields["nextBeginOffset"]) <= 4

    play(scenario, tmp_path / "s")


def test_any_message_of_an_arrival_ends_a_held_pull(tmp_path: Path) -> None:
    async def scenario(_: Broker, client: Client) -> None:
        await send(client, "a")
        await arrived(client, "t")
        held = await held_pull(client, **FILTERS["tags"])
        wire = encode([BatchItem(tag.encode(), b"TAGS\x01" + tag.encode()) for tag in "abaca"])
        sent = await client.ask(
            RequestCode.SEND_BATCH_MESSAGE, send_fields("t", i="", m="true"), wire
        )
        assert sent.code == 0
        assert [m.body for m in messages_of(await held)] == [b"b", b"c"]

    play(scenario, tmp_path / "s")


def test_a_held_pull_is_answered_by_an_arrival(tmp_path: Path) -> None:
    async def scenario(_: Broker, client: Client) -> None:
        await client.send("t")
        await arrived(client, "t")
        pulls = [await held_pull(client) for _ in range(3)]
        assert not any(held.done() for held in pulls)
        await client.send("t", b"second")
        for held in pulls:
            assert [m.body for m in messages_of(await held)] == [b"second"]

    play(scenario, tmp_path / "s")


def test_a_held_pull_ends_with_its_time_and_with_the_broker(tmp_path: Path) -> None:
    async def scenario(broker: Broker, client: Client) -> None:
        await client.send("t")
        await arrived(client, "t")
        answer = await client.pull("t", 1, **(SUSPENDS | {"suspendTimeoutMillis": 50}))
        assert answer.code == ResponseCode.PULL_NOT_FOUND
        assert answer.ext_fields["nextBeginOffset"] == answer.ext_fields["maxOffset"] == "1"
        held = await held_pull(client)
        await broker.stop()
        assert (await held).code == ResponseCode.PULL_NOT_FOUND

    play(scenario, tmp_path / "s")


def test_tags_and_sql_filter_messages(tmp_path: Path) -> None:
    async def scenario(_: Broker, client: Client) -> None:
        for number in range(12):
            await client.send("t", b"%d" % number, i=f"TAGS\x01{'ab'[number % 2]}\x02n\x01{number}")
        await arrived(client, "t", 12)
        for kind, text, expected in (
            ("TAG", "a", "0 2 4 6 8 10"),
            ("TAG", "a || b", "0 1 2 3 4 5 6 7 8 9 10 11"),
            ("SQL92", "n > 3 AND TAGS = 'b'", "5 7 9 11"),
        ):
            got = await client.pull("t", subscription=text, expressionType=kind)
            assert [m.body.decode() for m in messages_of(got)] == expected.split()
        none = await client.pull("t", subscription="c")
        assert (none.code, none.ext_fields["nextBeginOffset"]) == (20, "12")
        none = await client.pull("t", subscription="n > 90", expressionType="SQL92")
        assert (none.code, none.ext_fields["nextBeginOffset"]) == (20, "12")
        wrong = await client.pull("t", subscription="n > >", expressionType="SQL92")
        assert wrong.code == ResponseCode.SUBSCRIPTION_PARSE_FAILED
        # A pull without a subscription uses the one in its group's heartbeat.
        unknown = await client.pull("t", sysFlag=0)
        assert unknown.code == ResponseCode.SUBSCRIPTION_NOT_EXIST
        await client.heartbeat(group="group", subString="n = 3", expressionType="SQL92")
        assert [m.body for m in messages_of(await client.pull("t", sysFlag=0))] == [b"3"]
        later = await client.pull("t", sysFlag=0, subVersion=2)
        assert later.code == ResponseCode.SUBSCRIPTION_NOT_LATEST

    play(scenario, tmp_path / "s")


def test_pulls_outside_of_a_queue(tmp_path: Path) -> None:
    async def scenario(_: Broker, client: Client) -> None:
        await client.send("t")
        await arrived(client, "t")
        beyond = await client.pull("t", 99)
        assert beyond.code == ResponseCode.PULL_OFFSET_MOVED
        assert beyond.ext_fields["nextBeginOffset"] == "0"
        assert (await client.pull("t", 0, 99)).code == ResponseCode.SYSTEM_ERROR
        assert (await client.pull("t", 0, 3)).code == ResponseCode.PULL_NOT_FOUND

    play(scenario, tmp_path / "s")


def test_a_second_pull_at_the_end_of_an_empty_queue_reads_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    get = pull._get

    def noted(store: Any, one: pull.Pull) -> Any:
        reads.append(one.offset)
        return get(store, one)

    monkeypatch.setattr(pull, "_get", noted)

    async def scenario(broker: Broker, client: Client) -> None:
        await client.ask(
            RequestCode.UPDATE_AND_CREATE_TOPIC,
            {"topic": "t", "readQueueNums": 1, "writeQueueNums": 1, "perm": 6},
        )
        held = []
        for count in (1, 2):
            held.append(client.post(RequestCode.PULL_MESSAGE, pull_fields("t", 0, **SUSPENDS)))
            while broker._pulling._held_count < count:
                await asyncio.sleep(0.001)
        assert reads == [0]
        await send(client, "b")
        for one in held:
            assert [m.body for m in messages_of(await one)] == [b"b"]

    play(scenario, tmp_path / "s")


def test_a_held_pull_is_answered_after_its_time(tmp_path: Path) -> None:
    async def scenario(broker: Broker, client: Client) -> None:
        loop = asyncio.get_running_loop()
        await send(client, "a")
        await arrived(client, "t")
        late = await held_pull(client)
        began = loop.time()
        answer = await client.pull("t", 1, **(SUSPENDS | {"suspendTimeoutMillis": 300}))
        assert answer.code == ResponseCode.PULL_NOT_FOUND
        # Never early: a client that asks for short times would pull without a pause.
        assert loop.time() - began >= 0.3
        assert not late.done()

    play(scenario, tmp_path / "s")


@pytest.mark.parametrize("times", [(1,), (400, 4_000, 20_000)])
def test_a_queue_that_does_not_reach_its_noted_end(tmp_path: Path, times: tuple[int, ...]) -> None:
    """The broker's client got no answer, and the broker read the queue again each millisecond."""

    async def scenario(broker: Broker, client: Client) -> None:
        await send(client, "a")
        await arrived(client, "t")
        for milliseconds in times:
            broker._pulling._ends["t", 0] = 0, 50
            fields = SUSPENDS | {"suspendTimeoutMillis": milliseconds}
            answer = await client.pull("t", 1, **fields)
            assert answer.code == ResponseCode.PULL_NOT_FOUND
            if broker._pulling.bounds_of(("t", 0))[1] == 1:
                return
        # If the time of a pull ends before its second read, the noted end stays: only a longer
        # time shows whether the broker drops it.
        assert times == (1,)

    play(scenario, tmp_path / "s")


def test_the_lag_does_not_count_expired_messages(tmp_path: Path) -> None:
    async def scenario(broker: Broker, client: Client) -> None:
        await send(client, "a")
        await client.heartbeat(group="g")
        broker.core.tables.offsets.commit("t", "g", 0, 3)
        broker._pulling._ends["t", 0] = 0, 9
        assert broker.lags() == {"g": 6}
        broker._pulling._ends["t", 0] = 5, 9
        assert broker.lags() == {"g": 4}

    play(scenario, tmp_path / "s")


def test_a_poll_finds_a_queue_that_was_made_again(tmp_path: Path) -> None:
    """A pull that was held at the old end was held until the new queue reached this end."""

    async def scenario(broker: Broker, client: Client) -> None:
        await send(client, "a")
        await arrived(client, "t")
        broker._pulling._ends["t", 0] = 0, 50
        held = client.post(RequestCode.PULL_MESSAGE, pull_fields("t", 50, **SUSPENDS))
        while ("t", 0) not in broker._pulling._held:
            await asyncio.sleep(0)
        broker._pulling.grown(("t", 0), 1)
        assert (await asyncio.wait_for(held, 10)).code == ResponseCode.PULL_OFFSET_MOVED

    play(scenario, tmp_path / "s")
