"""Consumer groups: heartbeats, offsets, locks, and the progress of each group."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.broker import Broker
from logquarry.protocol.remoting_codes import RequestCode, ResponseCode
from tests.helpers.broker_client import Client, arrived, connected, document_of, play


def test_consumers_are_told_about_each_other(tmp_path: Path) -> None:
    async def scenario(broker: Broker, client: Client) -> None:
        assert (await client.heartbeat("one", group="g")).code == 0
        other = await connected(broker.address)
        assert (await other.heartbeat("two", group="g")).code == 0
        for who in (client, other):
            told = await who.told.get()
            assert told.code == RequestCode.NOTIFY_CONSUMER_IDS_CHANGED and told.is_oneway
            assert told.ext_fields == {"consumerGroup": "g"}
        listed = await client.ask(RequestCode.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": "g"})
        assert document_of(listed) == {"consumerIdList": ["one", "two"]}
        await client.told.get()
        await other.close()
        assert (await client.told.get()).code == RequestCode.NOTIFY_CONSUMER_IDS_CHANGED
        gone = {"clientID": "one", "consumerGroup": "g"}
        await client.ask(RequestCode.UNREGISTER_CLIENT, gone)
        listed = await client.ask(RequestCode.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": "g"})
        assert listed.code == ResponseCode.SYSTEM_ERROR

    play(scenario, tmp_path / "s")


def test_offsets_are_kept(tmp_path: Path) -> None:
    where = {"consumerGroup": "g", "topic": "t", "queueId": 0}

    async def first(_: Broker, client: Client) -> None:
        await client.send("t")
        # The whole queue is at hand: a new group starts at 0.
        answer = await client.ask(RequestCode.QUERY_CONSUMER_OFFSET, where)
        assert answer.ext_fields == {"offset": "0"}
        await client.ask(RequestCode.UPDATE_CONSUMER_OFFSET, where | {"commitOffset": 1})

    async def second(_: Broker, client: Client) -> None:
        answer = await client.ask(RequestCode.QUERY_CONSUMER_OFFSET, where)
        assert answer.ext_fields == {"offset": "1"}

    play(first, tmp_path / "s")
    play(second, tmp_path / "s")


def test_a_new_group_starts_at_0_if_the_first_message_counts_as_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 40 % of this memory is 4,000 bytes: less than the log, more than its last message.
    monkeypatch.setattr("logquarry.read.get_message._total_memory", lambda: 10_000)

    async def scenario(_: Broker, client: Client) -> None:
        await client.send("old", bytes(5_000))
        await client.send("young", b"x")
        await arrived(client, "young")
        for topic, queue_id, code in (
            *(("old", 0, ResponseCode.QUERY_NOT_FOUND), ("old", 1, 0)),
            *(("young", 0, 0), ("none", 0, 0)),
        ):
            where = {"consumerGroup": "g", "topic": topic, "queueId": queue_id}
            answer = await client.ask(RequestCode.QUERY_CONSUMER_OFFSET, where)
            assert (topic, answer.code) == (topic, code)
            assert answer.code or answer.ext_fields == {"offset": "0"}

    play(scenario, tmp_path / "s")


def test_a_group_may_be_forbidden_to_broadcast(tmp_path: Path) -> None:
    async def scenario(_: Broker, client: Client) -> None:
        await client.send("t")
        await arrived(client, "t")
        settings = {"groupName": "group", "consumeBroadcastEnable": False}
        update, body = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, json.dumps(settings)
        assert (await client.ask(update, body=body.encode())).code == 0
        for model, code in ("CLUSTERING", 0), ("BROADCASTING", ResponseCode.NO_PERMISSION):
            await client.heartbeat(group="group", model=model)
            assert (await client.pull("t", sysFlag=0)).code == code

    play(scenario, tmp_path / "s")


def test_a_failed_save_of_offsets_does_not_keep_the_store_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise ValueError("test")

    async def scenario(broker: Broker, client: Client) -> None:
        assert (await client.send("t")).code == 0
        monkeypatch.setattr(broker.core.tables, "save_offsets", fail)

    play(scenario, tmp_path / "s")
    assert "the offsets of the groups were not saved" in caplog.text
    with lq.MessageStore.open(tmp_path / "s") as store:
        assert not store.has_abort


def test_locks_belong_to_one_client(tmp_path: Path) -> None:
    async def scenario(_: Broker, client: Client) -> None:
        def body(client_id: str) -> bytes:
            queues = [{"topic": "t", "brokerName": "broker-a", "queueId": n} for n in (0, 1)]
            document = {"consumerGroup": "g", "clientId": client_id, "mqSet": queues}
            return json.dumps(document).encode()

        async def locked(client_id: str) -> int:
            answer = await client.ask(RequestCode.LOCK_BATCH_MQ, body=body(client_id))
            return len(document_of(answer)["lockOKMQSet"])

        assert [await locked(name) for name in ("one", "two", "one")] == [2, 0, 2]
        await client.ask(RequestCode.UNLOCK_BATCH_MQ, body=body("two"))
        assert await locked("two") == 0
        await client.ask(RequestCode.UNLOCK_BATCH_MQ, body=body("one"))
        assert await locked("two") == 2

    play(scenario, tmp_path / "s")


def test_the_lag_of_a_group(tmp_path: Path) -> None:
    """As mqadmin's consumerProgress shows it: a queue without an offset counts from 0."""

    async def scenario(_: Broker, client: Client) -> None:
        for topic in "t", "t", "other":
            await client.send(topic)
        await arrived(client, "other")
        where = {"consumerGroup": "g", "topic": "t", "queueId": 1}
        await client.ask(RequestCode.UPDATE_CONSUMER_OFFSET, where | {"commitOffset": 0})

        async def lags(topic: str = "") -> list[tuple[str, ...]]:
            fields = {"consumerGroup": "g", "topic": topic}
            found = await client.ask(RequestCode.GET_CONSUME_STATS, fields)
            assert found.code == 0
            row = r'"queueId":(\d),"topic":"(\w+)"\}:\{"brokerOffset":(\d),"consumerOffset":(\d),'
            return re.findall(row, found.body.decode())

        assert await lags() == [("0", "t", "2", "0"), *((str(n), "t", "0", "0") for n in (1, 2, 3))]
        assert (await lags("other"))[0] == ("0", "other", "1", "0")
        # The topics to which a connected group does not subscribe are left out.
        await client.heartbeat(group="g", topic="other")
        assert await lags() == await lags("t") == []

    play(scenario, tmp_path / "s")


def test_the_progress_of_all_groups(tmp_path: Path) -> None:
    async def scenario(_: Broker, client: Client) -> None:
        for _number in range(3):
            await client.send("t")
        await arrived(client, "t", 3)
        where = {"consumerGroup": "g", "topic": "t", "queueId": 0, "commitOffset": 1}
        await client.ask(RequestCode.UPDATE_CONSUMER_OFFSET, where)
        fields = {"srcGroup": "g", "destGroup": "copy", "topic": "t", "offline": "true"}
        assert (await client.ask(RequestCode.CLONE_GROUP_OFFSET, fields)).code == 0
        asked = {"consumerGroup": "copy", "topic": "t", "queueId": 0}
        offset = await client.ask(RequestCode.QUERY_CONSUMER_OFFSET, asked)
        assert offset.ext_fields["offset"] == "1"
        found = await client.ask(RequestCode.QUERY_TOPICS_BY_CONSUMER, {"group": "copy"})
        assert document_of(found) == {"topicList": ["t"]}
        asked = {"group": "copy", "topic": "t"}
        code = RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER
        assert document_of(await client.ask(code, asked)) == asked
        await client.heartbeat(group="copy", subString="a || b")
        subscription = document_of(await client.ask(code, asked))["subscriptionData"]
        assert subscription["subString"] == "a || b"
        fields |= {"destGroup": "none", "topic": "other"}
        assert (await client.ask(RequestCode.CLONE_GROUP_OFFSET, fields)).code == 0
        answer = await client.ask(RequestCode.GET_BROKER_CONSUME_STATS, {"isOrder": "false"})
        first = b'{"brokerOffset":3,"consumerOffset":1,"lastTimestamp":'
        assert answer.code == 0 and answer.body.count(first) == 2
        # mqadmin of RocketMQ 5 subtracts the consumer offset from it: Inflight would be negative.
        assert answer.body.count(b'"pullOffset":1}') == 2
        # Two groups have two messages left each.
        assert b'"totalDiff":4' in answer.body and b'{"none":[]}' in answer.body

    play(scenario, tmp_path / "s")


def test_the_progress_of_all_groups_reads_the_offsets_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read copies all offsets. With 20,000 groups, a read for each group took half a minute."""
    reads: list[int] = []

    async def scenario(broker: Broker, client: Client) -> None:
        await client.send("t")
        offsets = broker.core.tables.offsets
        for number in range(20):
            broker.core.tables.create_group(f"g{number}")
            offsets.commit("t", f"g{number}", 0, 0)
        groups = offsets.groups

        def read() -> dict[tuple[str, str], dict[int, int]]:
            reads.append(1)
            return groups()

        with monkeypatch.context() as patch:
            patch.setattr(offsets, "groups", read)
            answer = await client.ask(RequestCode.GET_BROKER_CONSUME_STATS)
        assert answer.code == 0 and answer.body.count(b'"consumerOffset":0') == 80
        assert len(reads) == 1

    play(scenario, tmp_path / "s")


def test_the_lag_of_the_display_leaves_out_expired_messages(tmp_path: Path) -> None:
    async def scenario(broker: Broker, client: Client) -> None:
        await client.heartbeat(group="g")
        await client.send("t")
        await arrived(client, "t")
        broker.core.tables.commit_offset("t", "g", 0, 0)
        assert broker.lags() == {"g": 1}
        # The queue has five messages, and the first three are expired.
        broker._pulling._ends["t", 0] = 3, 5
        assert broker.lags() == {"g": 2}
        broker.core.tables.commit_offset("t", "g", 0, 4)
        assert broker.lags() == {"g": 1}

    play(scenario, tmp_path / "s")
