"""A broker as its clients see it: sends, pulls, offsets, groups, transactions, admin requests."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import logquarry as lq
from logquarry.broker import Broker, BrokerOptions
from logquarry.errors import UsageError
from logquarry.protocol.remoting_codes import RequestCode, ResponseCode
from logquarry.testing.clock import FakeClock
from tests.helpers.broker_client import (
    PATIENCE_SECONDS,
    SMALL,
    Client,
    connected,
    document_of,
    messages_of,
    pull_fields,
    send_fields,
    serving,
)

Scenario = Callable[[Broker, Client], Awaitable[None]]
SUSPENDS = {"sysFlag": 2 | 4, "suspendTimeoutMillis": 30_000}


def play(scenario: Scenario, path: Path | None, **options: Any) -> None:
    async def whole() -> None:
        async with serving(path, **options) as (broker, client):
            await scenario(broker, client)

    asyncio.run(asyncio.wait_for(whole(), PATIENCE_SECONDS))


def test_a_message_is_sent_and_pulled(tmp_path: Path) -> None:
    async def scenario(broker: Broker, client: Client) -> None:
        held = client.post(RequestCode.PULL_MESSAGE, pull_fields("t", 0, **SUSPENDS))
        assert (await held).code == ResponseCode.TOPIC_NOT_EXIST
        sent = await client.send("t", b"hello")
        assert sent.code == 0
        assert (sent.ext_fields["queueId"], sent.ext_fields["queueOffset"]) == ("0", "0")
        got = await client.pull("t", **SUSPENDS)
        (message,) = messages_of(got)
        assert (message.topic, message.body, message.queue_offset) == ("t", b"hello", 0)
        # Every client writes WAIT=true; a broker leaves it out, and adds its cluster.
        assert message.properties == {
            "KEYS": "k1",
            "UNIQ_KEY": "u1",
            "TAGS": "a",
            "CLUSTER": "DefaultCluster",
        }
        assert message.message_id == sent.ext_fields["msgId"]
        assert message.store_host == broker.address
        assert got.ext_fields["nextBeginOffset"] == "1"
        viewed = await client.ask(
            RequestCode.VIEW_MESSAGE_BY_ID, {"offset": message.physical_offset}
        )
        assert messages_of(viewed) == [message]

    play(scenario, tmp_path / "s")
    with lq.MessageStore.open(tmp_path / "s") as store:
        assert [m.body for m in store.scan("t")] == [b"hello"]
        assert "t" in (tmp_path / "s" / "config" / "topics.json").read_text()


@pytest.mark.parametrize("is_binary", [False, True])
def test_an_answer_has_the_form_of_its_request(tmp_path: Path, is_binary: bool) -> None:
    async def scenario(_: Broker, client: Client) -> None:
        fields = send_fields("t")
        answer = await client.ask(RequestCode.SEND_MESSAGE_V2, fields, b"x", is_binary=is_binary)
        assert answer.is_binary is is_binary and answer.code == 0
        unknown = await client.ask(9_999, {"a": "b"}, is_binary=is_binary)
        assert unknown.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED
        assert unknown.is_binary is is_binary

    play(scenario, tmp_path / "s")


def test_a_held_pull_is_answered_by_an_arrival(tmp_path: Path) -> None:
    async def scenario(_: Broker, client: Client) -> None:
        await client.send("t")
        await _until(client, "t")
        pulls = [client.post(11, pull_fields("t", 1, **SUSPENDS)) for _ in range(3)]
        # A later request of the same connection is answered first.
        assert (
            await client.ask(RequestCode.GET_MAX_OFFSET, {"topic": "t", "queueId": 0})
        ).code == 0
        assert not any(pull.done() for pull in pulls)
        await client.send("t", b"second")
        for pull in pulls:
            assert [m.body for m in messages_of(await pull)] == [b"second"]

    play(scenario, tmp_path / "s")


def test_a_held_pull_ends_with_its_time_and_with_the_broker(tmp_path: Path) -> None:
    async def scenario(broker: Broker, client: Client) -> None:
        await client.send("t")
        await _until(client, "t")
        short = SUSPENDS | {"suspendTimeoutMillis": 50}
        answer = await client.pull("t", 1, **short)
        assert answer.code == ResponseCode.PULL_NOT_FOUND
        assert answer.ext_fields["nextBeginOffset"] == answer.ext_fields["maxOffset"] == "1"
        held = client.post(11, pull_fields("t", 1, **SUSPENDS))
        await client.ask(RequestCode.GET_MAX_OFFSET, {"topic": "t", "queueId": 0})
        await broker.stop()
        assert (await held).code == ResponseCode.PULL_NOT_FOUND

    play(scenario, tmp_path / "s")


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


def test_one_way_requests_get_no_answer(tmp_path: Path) -> None:
    async def scenario(_: Broker, client: Client) -> None:
        oneway = client.post(RequestCode.SEND_MESSAGE_V2, send_fields("t"), b"x", flag=2)
        client.post(9_999, flag=2)
        assert [m.body for m in messages_of(await _until(client, "t"))] == [b"x"]
        assert not oneway.done()

    play(scenario, tmp_path / "s")


async def _until(client: Client, topic: str, count: int = 1) -> Any:
    """Pull until the dispatcher has some messages in the queue."""
    while True:
        answer = await client.pull(topic)
        if len(messages_of(answer)) >= count:
            return answer
        await asyncio.sleep(0.01)


def test_a_batch(tmp_path: Path) -> None:
    from logquarry.format.batch import BatchItem, encode

    async def scenario(_: Broker, client: Client) -> None:
        wire = encode([BatchItem(b"one", b"TAGS\x01a"), BatchItem(b"two", b"TAGS\x01b")])
        fields = send_fields("t", i="", m="true")
        sent = await client.ask(RequestCode.SEND_BATCH_MESSAGE, fields, wire)
        assert len(sent.ext_fields["msgId"].split(",")) == 2
        got = messages_of(await _until(client, "t", 2))
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


def test_the_name_server_gives_routes(tmp_path: Path) -> None:
    async def scenario(broker: Broker, client: Client) -> None:
        await client.send("t")
        names = await connected(broker.name_server)
        answer = await names.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "t"})
        assert f'"brokerAddrs":{{0:"{broker.address}"}}' in answer.body.decode()
        route = document_of(answer)
        assert route["queueDatas"][0]["writeQueueNums"] == 4
        strict = {"topic": "t", "acceptStandardJsonOnly": "true"}
        answer = await names.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, strict)
        assert json.loads(answer.body) == route
        answer = await names.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "none"})
        assert answer.code == ResponseCode.TOPIC_NOT_EXIST
        # The name server is not a broker.
        assert (await names.send("t")).code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED
        cluster = document_of(await names.ask(RequestCode.GET_BROKER_CLUSTER_INFO))
        assert cluster["clusterAddrTable"] == {"DefaultCluster": ["broker-a"]}
        topics = document_of(await names.ask(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER))
        assert {"t", "TBW102"} <= set(topics["topicList"])
        await names.close()

    play(scenario, tmp_path / "s")


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
        await _until(client, "young")
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
        await _until(client, "t")
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


def test_tags_and_sql_filter_messages(tmp_path: Path) -> None:
    async def scenario(_: Broker, client: Client) -> None:
        for number in range(12):
            await client.send("t", b"%d" % number, i=f"TAGS\x01{'ab'[number % 2]}\x02n\x01{number}")
        await _until(client, "t", 12)
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
        await _until(client, "t")
        beyond = await client.pull("t", 99)
        assert beyond.code == ResponseCode.PULL_OFFSET_MOVED
        assert beyond.ext_fields["nextBeginOffset"] == "0"
        assert (await client.pull("t", 0, 99)).code == ResponseCode.SYSTEM_ERROR
        assert (await client.pull("t", 0, 3)).code == ResponseCode.PULL_NOT_FOUND

    play(scenario, tmp_path / "s")


def test_retries_and_dead_letters_with_a_clock_of_the_test(tmp_path: Path) -> None:
    clock = FakeClock()

    async def scenario(broker: Broker, client: Client) -> None:
        await client.send("t", b"bad")
        await client.heartbeat(group="g")
        message = messages_of(await _until(client, "t"))[0]
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
        (dead,) = messages_of(await _until(client, "%DLQ%g"))
        assert (dead.body, dead.reconsume_times) == (b"bad", 3)
        back["offset"] = 1
        lost = await client.ask(RequestCode.CONSUMER_SEND_MSG_BACK, back)
        assert lost.code == ResponseCode.SYSTEM_ERROR

    play(scenario, tmp_path / "s", clock=clock)


def test_a_consumer_that_allows_no_retry_gets_a_dead_letter_at_once(tmp_path: Path) -> None:
    async def scenario(broker: Broker, client: Client) -> None:
        assert (await client.send("t", b"bad")).code == 0
        back = {"group": "g", "delayLevel": 0, "maxReconsumeTimes": 0, "offset": 0}
        assert (await client.ask(RequestCode.CONSUMER_SEND_MSG_BACK, back)).code == 0
        assert (await client.send("%RETRY%g", b"worse", l=0)).code == 0
        assert [m.body for m in broker.store.scan("%DLQ%g")] == [b"bad", b"worse"]

    play(scenario, tmp_path / "s")


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


def _half(topic: str = "t") -> dict[str, Any]:
    return send_fields(topic, f=4, i="TRAN_MSG\x01true\x02PGROUP\x01pg\x02UNIQ_KEY\x01u7")


def test_transactions_end_by_commit_or_rollback(tmp_path: Path) -> None:
    async def scenario(_: Broker, client: Client) -> None:
        end: dict[str, Any] = {}
        for body, state in ((b"kept", 8), (b"dropped", 12), (b"open", 0)):
            half = await client.ask(RequestCode.SEND_MESSAGE_V2, _half(), body)
            assert half.ext_fields["transactionId"] == "u7"
            end = {
                "producerGroup": "pg",
                "tranStateTableOffset": half.ext_fields["queueOffset"],
                "commitLogOffset": int(half.ext_fields["msgId"][16:], 16),
                "commitOrRollback": state,
            }
            assert (await client.ask(RequestCode.END_TRANSACTION, end)).code == 0
        # Twice the same end has no effect.
        end |= {"commitLogOffset": 0, "tranStateTableOffset": 0, "commitOrRollback": 8}
        assert (await client.ask(RequestCode.END_TRANSACTION, end)).code == 0
        other = await client.ask(RequestCode.END_TRANSACTION, end | {"producerGroup": "other"})
        assert other.code == ResponseCode.SYSTEM_ERROR
        await client.send("t", b"last")
        got = messages_of(await _until(client, "t", 2))
        assert [m.body for m in got] == [b"kept", b"last"]
        assert (await client.send("t", i="TRAN_MSG\x01true\x02DELAY\x013")).code != 0

    play(scenario, tmp_path / "s")


def test_a_check_asks_the_producer(tmp_path: Path) -> None:
    clock = FakeClock()

    async def scenario(broker: Broker, client: Client) -> None:
        await client.heartbeat(producer="pg")
        await client.ask(RequestCode.SEND_MESSAGE_V2, _half(), b"kept")
        clock.advance(60_000)
        asked = await client.told.get()
        assert asked.code == RequestCode.CHECK_TRANSACTION_STATE and asked.is_oneway
        (message,) = messages_of(asked)
        assert (message.topic, message.queue_id, message.body) == ("t", 0, b"kept")
        end = {
            "producerGroup": "pg",
            "tranStateTableOffset": asked.ext_fields["tranStateTableOffset"],
            "commitLogOffset": asked.ext_fields["commitLogOffset"],
            "commitOrRollback": 8,
            "fromTransactionCheck": "true",
        }
        assert (await client.ask(RequestCode.END_TRANSACTION, end)).code == 0
        assert [m.body for m in messages_of(await _until(client, "t"))] == [b"kept"]

    config = lq.StoreConfig(transaction_check_interval=20, mapped_file_size_commit_log=1 << 22)
    play(scenario, tmp_path / "s", clock=clock, config=config)


def test_a_reply_goes_to_the_producer_that_asked(tmp_path: Path) -> None:
    async def scenario(broker: Broker, client: Client) -> None:
        await client.heartbeat("asker", producer="pg")
        consumer = await connected(broker.address)
        fields = send_fields("DefaultCluster_REPLY_TOPIC", i="REPLY_TO_CLIENT\x01asker")
        reply = consumer.post(RequestCode.SEND_REPLY_MESSAGE_V2, fields, b"answer")
        pushed = await client.told.get()
        assert pushed.code == RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT
        assert pushed.body == b"answer"
        client.answer(pushed)
        assert (await reply).code == 0
        fields["i"] = "REPLY_TO_CLIENT\x01gone"
        lost = await consumer.ask(RequestCode.SEND_REPLY_MESSAGE_V2, fields, b"answer")
        assert lost.code == ResponseCode.SYSTEM_ERROR
        await consumer.close()

    play(scenario, tmp_path / "s")


def test_queries(tmp_path: Path) -> None:
    async def scenario(broker: Broker, client: Client) -> None:
        sent = await client.send("t", b"found")
        await _until(client, "t")
        by_key = {"topic": "t", "key": "k1", "maxNum": 8, "beginTimestamp": 0}
        by_key["endTimestamp"] = (1 << 63) - 1
        # The dispatcher writes the index after the queues.
        while (got := await client.ask(RequestCode.QUERY_MESSAGE, by_key)).code:
            assert got.code == ResponseCode.QUERY_NOT_FOUND
        assert [m.message_id for m in messages_of(got)] == [sent.ext_fields["msgId"]]
        none = await client.ask(RequestCode.QUERY_MESSAGE, by_key | {"key": "none"})
        assert none.code == ResponseCode.QUERY_NOT_FOUND
        where = {"topic": "t", "queueId": 0, "timestamp": 0}
        for code, name, expected in (
            (RequestCode.GET_MAX_OFFSET, "offset", "1"),
            (RequestCode.GET_MIN_OFFSET, "offset", "0"),
            (RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, "offset", "0"),
        ):
            assert (await client.ask(code, where)).ext_fields[name] == expected
        oldest = await client.ask(RequestCode.GET_EARLIEST_MSG_STORETIME, where)
        assert oldest.ext_fields["timestamp"] == str(messages_of(got)[0].store_timestamp)
        lost = await client.ask(RequestCode.VIEW_MESSAGE_BY_ID, {"offset": 3})
        assert lost.code == ResponseCode.SYSTEM_ERROR

    play(scenario, tmp_path / "s")


def test_admin_requests(tmp_path: Path) -> None:
    async def scenario(_: Broker, client: Client) -> None:
        topic = {"topic": "adm", "readQueueNums": 2, "writeQueueNums": 2, "perm": 6}
        assert (await client.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, topic)).code == 0
        assert (await client.send("adm", c="")).code == 0
        await _until(client, "adm")
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


def test_the_lag_of_a_group(tmp_path: Path) -> None:
    """As mqadmin's consumerProgress shows it: a queue without an offset counts from 0."""

    async def scenario(_: Broker, client: Client) -> None:
        for topic in "t", "t", "other":
            await client.send(topic)
        await _until(client, "other")
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


def test_a_read_only_store_is_served_and_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with lq.MessageStore.open(path, mode="rw", config=SMALL) as store:
        for number in range(3):
            store.put(lq.Message("t", b"%d" % number))
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    where = {"consumerGroup": "g", "topic": "t", "queueId": 0}

    async def first(_: Broker, client: Client) -> None:
        assert len(messages_of(await client.pull("t"))) == 3
        assert (await client.send("t")).code == ResponseCode.NO_PERMISSION
        topic = {"topic": "adm", "readQueueNums": 2, "writeQueueNums": 2, "perm": 6}
        refused = await client.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, topic)
        assert refused.code == ResponseCode.NO_PERMISSION
        await client.ask(RequestCode.UPDATE_CONSUMER_OFFSET, where | {"commitOffset": 2})

    async def second(_: Broker, client: Client) -> None:
        answer = await client.ask(RequestCode.QUERY_CONSUMER_OFFSET, where)
        assert answer.ext_fields == {"offset": "2"}

    for scenario in (first, second):
        play(scenario, path, read_only=True, offsets=tmp_path / "o")
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before


def test_a_reader_sees_what_another_process_puts(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with lq.MessageStore.open(path, mode="rw", config=SMALL) as store:
        store.put(lq.Message("t", b"first"))
        store.wait_dispatched()
        store.flush()

        async def scenario(_: Broker, client: Client) -> None:
            assert len(messages_of(await client.pull("t"))) == 1
            held = client.post(11, pull_fields("t", 1, **SUSPENDS))
            await client.ask(RequestCode.GET_MAX_OFFSET, {"topic": "t", "queueId": 0})
            store.put(lq.Message("t", b"second"))
            store.wait_dispatched()
            assert [m.body for m in messages_of(await held)] == [b"second"]

        play(scenario, path, read_only=True, poll_ms=10)


def test_a_temporary_store_is_deleted() -> None:
    paths = []

    async def scenario(broker: Broker, client: Client) -> None:
        assert (await client.send("t")).code == 0
        paths.append(Path(broker.store.root))
        assert paths[0].exists()

    play(scenario, None)
    assert not paths[0].exists()


def test_other_addresses_need_tls_and_accounts() -> None:
    with pytest.raises(UsageError, match="insecure"):
        BrokerOptions(host="0.0.0.0")
    assert BrokerOptions(host="0.0.0.0", insecure=True).host == "0.0.0.0"
    assert BrokerOptions(host="::1").host == "::1"
