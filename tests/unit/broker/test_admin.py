"""The requests of mqadmin: topics, groups, connected clients, resets, tables."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from logquarry.broker import Broker, admin
from logquarry.format import broker_json
from logquarry.protocol.remoting import RemotingCommand, encode
from logquarry.protocol.remoting_codes import RequestCode, ResponseCode
from tests.helpers.broker_client import Client, arrived, connected, document_of, messages_of, play

WHERE = {"consumerGroup": "g", "topic": "t", "queueId": 0}


async def asked(client: Client, code: int) -> RemotingCommand:
    """The next request of the broker with a code; other requests are notifications."""
    while (found := await client.told.get()).code != code:
        pass
    return found


def test_the_clients_of_a_group(tmp_path: Path) -> None:
    async def scenario(broker: Broker, client: Client) -> None:
        for code, name, reason in (
            (RequestCode.GET_CONSUMER_CONNECTION_LIST, "consumerGroup", 206),
            (RequestCode.GET_PRODUCER_CONNECTION_LIST, "producerGroup", 1),
        ):
            assert (await client.ask(code, {name: "g"})).code == reason
        await client.heartbeat("id", producer="p", group="g", subString="a || b", subVersion=3)
        await client.send("t")
        answer = await client.ask(RequestCode.GET_CONSUMER_CONNECTION_LIST, {"consumerGroup": "g"})
        found = document_of(answer)
        (connection,) = found.pop("connectionSet")
        assert connection["clientId"] == "id" and connection["version"] == 399
        assert connection["clientAddr"] == broker.connections[0].address
        sub = {"topic": "t", "subString": "a || b", "subVersion": 3, "expressionType": "TAG"}
        assert found == {
            "consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET",
            "consumeType": "CONSUME_PASSIVELY",
            "messageModel": "CLUSTERING",
            "subscriptionTable": {"t": sub},
        }
        answer = await client.ask(RequestCode.GET_PRODUCER_CONNECTION_LIST, {"producerGroup": "p"})
        assert document_of(answer) == {"connectionSet": [connection]}
        other = WHERE | {"consumerGroup": "o", "commitOffset": 1}
        assert (await client.ask(RequestCode.UPDATE_CONSUMER_OFFSET, other)).code == 0
        answer = await client.ask(RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, {"topic": "t"})
        assert document_of(answer) == {"groupList": ["g", "o"]}

    play(scenario, tmp_path / "s")


def test_a_reset_tells_the_consumers_their_offsets(tmp_path: Path) -> None:
    async def scenario(broker: Broker, client: Client) -> None:
        for _ in range(3):
            await client.send("t")
        await arrived(client, "t", 3)
        await client.heartbeat(group="g")
        await client.ask(RequestCode.UPDATE_CONSUMER_OFFSET, WHERE | {"commitOffset": 2})
        for timestamp, is_forced, expected in ((0, "false", 0), (-1, "false", 2), (-1, "true", 3)):
            fields = {"topic": "t", "group": "g", "timestamp": timestamp, "isForce": is_forced}
            answer = await client.ask(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, fields)
            first = f'{{"brokerName":"broker-a","queueId":0,"topic":"t"}}:{expected},'
            assert answer.code == 0 and first.encode() in answer.body
            told = await asked(client, RequestCode.RESET_CONSUMER_CLIENT_OFFSET)
            assert told.body == answer.body and told.is_oneway

    play(scenario, tmp_path / "s")


def test_a_reset_of_one_queue_leaves_the_other_queues(tmp_path: Path) -> None:
    """mqadmin 5 (resetOffsetByTime -q) resets one queue with the time 0 and an offset."""

    async def scenario(broker: Broker, client: Client) -> None:
        for queue_id in (0, 0, 0, 1):
            await client.send("t", e=queue_id)
        await arrived(client, "t", 3)
        offsets = broker.core.tables.offsets
        offsets.commit("t", "g", 0, 3)
        offsets.commit("t", "g", 1, 1)
        code = RequestCode.INVOKE_BROKER_TO_RESET_OFFSET
        fields = {"topic": "t", "group": "g", "timestamp": 0, "queueId": 0, "offset": 2}
        expected = b'{"offsetTable":{{"brokerName":"broker-a","queueId":0,"topic":"t"}:%d}}'
        # Without a consumer that is online, the broker itself changes the offset.
        assert (await client.ask(code, fields)).body == expected % 2
        assert offsets.of("t", "g") == {0: 2, 1: 1}
        await client.heartbeat(group="g")
        for offset, result in ((1, 1), (3, 3), (-1, 0)):
            answer = await client.ask(code, fields | {"offset": offset})
            assert answer.body == expected % result
            told = await asked(client, RequestCode.RESET_CONSUMER_CLIENT_OFFSET)
            assert told.body == answer.body
        for changes in ({"offset": 4}, {"queueId": 9}):
            refused = await client.ask(code, fields | changes)
            assert refused.code == ResponseCode.SYSTEM_ERROR

    play(scenario, tmp_path / "s")


def test_a_reset_waits_for_a_consumer_that_does_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin, "_ASK_SECONDS", 0.05)

    async def scenario(broker: Broker, client: Client) -> None:
        await client.send("t")
        await client.heartbeat(group="g")
        (connection,) = broker.connections
        reset = RequestCode.INVOKE_BROKER_TO_RESET_OFFSET
        fields = {"topic": "t", "group": "g", "timestamp": 0}
        mqadmin = await connected(broker.address)
        connection.pause_writing()
        assert (await mqadmin.ask(reset, fields)).code == ResponseCode.CONSUME_MSG_TIMEOUT
        monkeypatch.setattr(admin, "_ASK_SECONDS", 60.0)
        answer = mqadmin.post(reset, fields)
        while not connection._resumed:
            await asyncio.sleep(0)
        connection.resume_writing()
        assert (await answer).code == 0
        await asked(client, RequestCode.RESET_CONSUMER_CLIENT_OFFSET)
        await mqadmin.close()

    play(scenario, tmp_path / "s")


def test_a_consumer_gets_one_message_directly(tmp_path: Path) -> None:
    async def scenario(broker: Broker, client: Client) -> None:
        sent = await client.send("t", b"again")
        fields = {"consumerGroup": "g", "clientId": "id", "msgId": sent.ext_fields["msgId"]}
        code = RequestCode.CONSUME_MESSAGE_DIRECTLY
        assert (await client.ask(code, fields)).code == ResponseCode.SYSTEM_ERROR
        await client.heartbeat("id", group="g")
        answer = client.post(code, fields)
        told = await asked(client, code)
        (message,) = messages_of(told)
        assert (message.topic, message.body) == ("t", b"again")
        client.answer(told, body=b'{"consumeResult":"CR_SUCCESS"}')
        assert document_of(await answer) == {"consumeResult": "CR_SUCCESS"}

    play(scenario, tmp_path / "s")


def test_a_filter_is_checked_before_a_consumer_starts(tmp_path: Path) -> None:
    async def scenario(broker: Broker, client: Client) -> None:
        for kind, text, code in (
            *(("TAG", "a || b", 0), ("SQL92", "a > 1", 0)),
            ("SQL92", "a > >", ResponseCode.SUBSCRIPTION_PARSE_FAILED),
            ("other", "a", ResponseCode.SUBSCRIPTION_PARSE_FAILED),
        ):
            sub = {"topic": "t", "subString": text, "expressionType": kind}
            body = json.dumps({"clientId": "c", "group": "g", "subscriptionData": sub}).encode()
            assert (await client.ask(RequestCode.CHECK_CLIENT_CONFIG, body=body)).code == code

    play(scenario, tmp_path / "s")


def test_tables(tmp_path: Path) -> None:
    async def scenario(broker: Broker, client: Client) -> None:
        await client.send("t")
        await client.ask(RequestCode.UPDATE_CONSUMER_OFFSET, WHERE | {"commitOffset": 1})

        async def table(code: int, **fields: str) -> Any:
            return document_of(await client.ask(code, fields))

        topics = await table(RequestCode.GET_ALL_TOPIC_CONFIG)
        assert {"t", "TBW102", "DefaultCluster"} <= set(topics["topicConfigTable"])
        offsets = await client.ask(RequestCode.GET_ALL_CONSUMER_OFFSET)
        assert broker_json.decode(offsets.body)["offsetTable"] == {"t@g": {"0": 1}}
        assert "offsetTable" in await table(RequestCode.GET_ALL_DELAY_OFFSET)
        for cluster, is_there in ("DefaultCluster", True), ("other", False):
            found = await table(RequestCode.GET_TOPICS_BY_CLUSTER, cluster=cluster)
            assert ("t" in found["topicList"]) is is_there
        names = await table(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS)
        assert names == {"brokerAddr": broker.address, "topicList": ["DefaultCluster", "broker-a"]}
        system = await table(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER)
        assert "SCHEDULE_TOPIC_XXXX" in system["topicList"] and "t" not in system["topicList"]

    play(scenario, tmp_path / "s")


def test_lists_of_topics_and_groups(tmp_path: Path) -> None:
    """mqadmin's updateTopicList and updateSubGroupList, of RocketMQ 5."""

    async def scenario(broker: Broker, client: Client) -> None:
        async def update(code: int, name: str, found: Any) -> int:
            return (await client.ask(code, body=json.dumps({name: found}).encode())).code

        code, name = RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, "topicConfigList"
        one = {"topicName": "one", "readQueueNums": 2, "writeQueueNums": 3, "perm": 6}
        assert await update(code, name, [one, one | {"topicName": "two", "order": True}]) == 0
        topics = broker.core.tables.topics
        assert topics["one"][1:4] == (2, 3, 6) and topics["two"].order
        assert await update(code, name, [one | {"topicName": "two", "order": "false"}]) == 0
        assert not broker.core.tables.topics["two"].order
        wrong: Any
        for wrong in (one | {"topicName": "?"}, one | {"order": []}, one | {"perm": "x"}, {}, 7):
            found = [one | {"topicName": "three"}, wrong]
            assert await update(code, name, found) == ResponseCode.SYSTEM_ERROR
        code, name = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST, "groupConfigList"
        assert await update(code, name, [{"groupName": "g", "retryMaxTimes": 3}]) == 0
        assert broker.core.tables.groups["g"]["retryMaxTimes"] == 3
        for wrong in ([7], 7, [{"groupName": "?"}]):
            assert await update(code, name, wrong) == ResponseCode.SYSTEM_ERROR

    play(scenario, tmp_path / "s")
    # The topics before an illegal topic stay.
    written = (tmp_path / "s" / "config" / "topics.json").read_text()
    assert all(f'"{name}"' in written for name in ("one", "two", "three"))


def test_a_topic_that_is_created_again_continues_at_its_queue_offsets(tmp_path: Path) -> None:
    """RocketMQ would start at 0 again; here nothing is deleted, and groups keep their offsets."""

    async def scenario(_: Broker, client: Client) -> None:
        for number in range(3):
            assert (await client.send("t", b"%d" % number)).code == 0
        await arrived(client, "t", 3)
        assert (await client.ask(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "t"})).code == 0
        assert (await client.pull("t")).code == ResponseCode.TOPIC_NOT_EXIST
        sent = await client.send("t", b"3")
        assert sent.ext_fields["queueOffset"] == "3"
        got = messages_of(await arrived(client, "t", 4))
        assert [message.body for message in got] == [b"0", b"1", b"2", b"3"]

    play(scenario, tmp_path / "s")


def test_requests_that_a_consumer_does_not_answer_are_limited(tmp_path: Path) -> None:
    async def scenario(broker: Broker, client: Client) -> None:
        sent = await client.send("t", bytes(700))
        await client.heartbeat("id", group="g")
        fields = {"consumerGroup": "g", "clientId": "id", "msgId": sent.ext_fields["msgId"]}
        state, message = RequestCode.GET_CONSUMER_RUNNING_INFO, RequestCode.CONSUME_MESSAGE_DIRECTLY
        first = client.post(state, fields, bytes(700))
        told = await asked(client, state)
        # While the first request waits, each of these is too large: by its body, by its header, or
        # by the message that it names.
        refused = (
            await client.ask(state, fields, bytes(700)),
            await client.ask(state, fields | {"x": "y" * 700}),
            await client.ask(message, fields),
        )
        assert {answer.code for answer in refused} == {ResponseCode.SYSTEM_BUSY}
        client.answer(told)
        assert (await first).code == 0
        answer = client.post(message, fields)
        client.answer(await asked(client, message))
        assert (await answer).code == 0

    play(scenario, tmp_path / "s", most_waiting_bytes=1_300)


@pytest.mark.parametrize("field", ["removeOffset", "cleanOffset"])
def test_a_group_is_deleted_with_its_offsets(tmp_path: Path, field: str) -> None:
    """RocketMQ 5 has renamed the field of RocketMQ 4.9."""

    async def scenario(broker: Broker, client: Client) -> None:
        offsets = broker.core.tables.offsets
        offsets.commit("t", "g", 0, 3)
        code = RequestCode.DELETE_SUBSCRIPTIONGROUP
        for flag, kept in (("false", {0: 3}), ("true", {})):
            assert (await client.ask(code, {"groupName": "g", field: flag})).code == 0
            assert offsets.of("t", "g") == kept

    play(scenario, tmp_path / "s")


@pytest.mark.parametrize("is_list", [False, True])
def test_topic_attributes_are_refused(tmp_path: Path, is_list: bool) -> None:
    """The broker would ignore them, so it must not answer SUCCESS."""

    async def scenario(broker: Broker, client: Client) -> None:
        async def create(name: str, **attributes: str) -> RemotingCommand:
            counts = {"readQueueNums": 2, "writeQueueNums": 2, "perm": 6}
            if is_list:
                topics = [counts | {"topicName": name, "attributes": attributes}]
                body = json.dumps({"topicConfigList": topics}).encode()
                return await client.ask(RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, body=body)
            text = ",".join(f"{key}={value}" for key, value in attributes.items())
            fields = counts | {"topic": name, "attributes": text}
            return await client.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, fields)

        # RocketMQ's dashboard gives each topic the type of its messages.
        typed = {"+message.type": "NORMAL"}
        assert (await create("a", **typed)).code == 0
        refused = await create("b", **typed, **{"+queue.type": "BatchCQ"})
        assert refused.code == ResponseCode.SYSTEM_ERROR
        assert "queue.type" in (refused.remark or "")
        assert broker.core.tables.topic("a") and broker.core.tables.topic("b") is None

    play(scenario, tmp_path / "s")


def test_admin_requests(tmp_path: Path) -> None:
    async def scenario(_: Broker, client: Client) -> None:
        topic = {"topic": "adm", "readQueueNums": 2, "writeQueueNums": 2, "perm": 6}
        assert (await client.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, topic)).code == 0
        assert (await client.send("adm", c="")).code == 0
        await arrived(client, "adm")
        one = await client.ask(RequestCode.GET_TOPIC_CONFIG, {"topic": "adm"})
        assert document_of(one)["topicName"] == "adm"
        stats = await client.ask(RequestCode.GET_TOPIC_STATS_INFO, {"topic": "adm"})
        # Keys that are objects, in fastjson's dialect.
        key = b'{"brokerName":"broker-a","queueId":1,"topic":"adm"}'
        assert stats.body.count(key + b':{"lastUpdateTimestamp":0,"maxOffset":0,') == 1
        group = json.dumps({"groupName": "g", "retryMaxTimes": 3}).encode()
        code = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP
        assert (await client.ask(code, body=group)).code == 0
        groups = document_of(await client.ask(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG))
        assert groups["subscriptionGroupTable"]["g"]["retryMaxTimes"] == 3
        assert (
            await client.ask(RequestCode.DELETE_SUBSCRIPTIONGROUP, {"groupName": "g"})
        ).code == 0
        info = document_of(await client.ask(RequestCode.GET_BROKER_RUNTIME_INFO))
        assert info["table"]["msgPutTotalTodayNow"] == "1"
        settings = await client.ask(RequestCode.GET_BROKER_CONFIG)
        assert b"brokerName=broker-a\n" in settings.body
        assert (await client.ask(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "adm"})).code == 0
        assert (await client.pull("adm")).code == ResponseCode.TOPIC_NOT_EXIST
        offline = {"topic": "TBW102", "group": "g", "timestamp": 0}
        answer = await client.ask(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, offline)
        assert answer.code == ResponseCode.CONSUMER_NOT_ONLINE

    play(scenario, tmp_path / "s")
    assert '"adm"' not in (tmp_path / "s" / "config" / "topics.json").read_text()


@pytest.mark.parametrize(
    "code",
    [
        RequestCode.GET_ALL_TOPIC_CONFIG,
        RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG,
        RequestCode.GET_ALL_CONSUMER_OFFSET,
    ],
)
def test_the_event_loop_makes_no_large_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: RequestCode
) -> None:
    threads: set[str] = set()

    def noted(make: Callable[..., str], *values: Any, **options: Any) -> str:
        threads.add(threading.current_thread().name)
        return make(*values, **options)

    async def scenario(broker: Broker, client: Client) -> None:
        await client.send("t")
        for name in "compact", "encode_consumer_offsets":
            made = partial(noted, getattr(broker_json, name))
            monkeypatch.setattr(broker_json, name, made)
        assert (await client.ask(code)).code == 0
        assert threads == {"broker-slow"}

    play(scenario, tmp_path / "s")


async def hundred_questions(broker: Broker) -> asyncio.StreamWriter:
    """Connect, and ask for all topics a hundred times at once."""
    host, _, port = broker.address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    code = RequestCode.GET_ALL_TOPIC_CONFIG
    asked = (encode(RemotingCommand(code=code, opaque=number)) for number in range(100))
    writer.write(b"".join(asked))
    return writer


def test_no_large_answers_for_a_client_that_does_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def large(document: Any) -> str:
        made.append(1)
        return " " * (1 << 20)

    async def scenario(broker: Broker, client: Client) -> None:
        monkeypatch.setattr(broker_json, "compact", large)
        writer = await hundred_questions(broker)
        await asyncio.sleep(0.5)
        assert len(made) < 30
        # The other clients get their answers.
        answer = await client.ask(RequestCode.GET_ALL_TOPIC_CONFIG)
        assert len(answer.body) == 1 << 20
        writer.close()

    play(scenario, tmp_path / "s")


def test_no_large_answers_for_a_client_that_has_disconnected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def slow(document: Any) -> str:
        made.append(1)
        time.sleep(0.1)
        return ""

    async def scenario(broker: Broker, client: Client) -> None:
        monkeypatch.setattr(broker_json, "compact", slow)
        writer = await hundred_questions(broker)
        while not made:
            await asyncio.sleep(0.01)
        writer.transport.abort()
        await asyncio.sleep(1)
        assert len(made) < 5

    play(scenario, tmp_path / "s")
