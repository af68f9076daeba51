"""Accounts: signatures as RocketMQ's client makes them, and the permission of each request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from logquarry.broker.acl import AccessControl, Account, sign
from logquarry.broker.clients import Client, Clients
from logquarry.errors import UsageError
from logquarry.protocol.remoting import RemotingCommand
from logquarry.protocol.remoting_codes import Refused, RequestCode, parse
from tests.helpers.broker_client import (
    PATIENCE_SECONDS,
    connected,
    pull_fields,
    send_fields,
    serving,
)

SECRET = "12345678"
PUB, SUB, BOTH = frozenset({"PUB"}), frozenset({"SUB"}), frozenset({"PUB", "SUB"})
SENDER = Account("sender", SECRET, topics={"t": PUB})
READER = Account("reader", SECRET, topics={"t": SUB}, groups={"group": SUB})
CHIEF = Account("chief1", SECRET, admin=True)
FIELDS = {key: str(value) for key, value in send_fields("t").items()}
CONTROL = AccessControl(SENDER, READER, CHIEF)


def signed(
    name: str, code: int, fields: Mapping[str, Any], body: bytes = b"", secret: str = SECRET
) -> RemotingCommand:
    texts = {key: str(value) for key, value in fields.items()} | {"AccessKey": name}
    texts["Signature"] = sign(texts, body, secret).decode()
    return RemotingCommand(code=code, opaque=1, ext_fields=texts, body=body)


def admitted(command: RemotingCommand) -> bool:
    fields = parse(command.code, FIELDS | dict(command.ext_fields))
    try:
        CONTROL.admit(command, fields)
    except Refused as refused:
        assert refused.code == 16
        return False
    return True


def test_the_signature_is_that_of_rocketmq() -> None:
    # AclUtils.calSignature(AclUtils.combineRequestContent(...)) of rocketmq-acl 4.9.8.
    fields = {"AccessKey": "RocketMQ", "topic": "t", "queueId": "0"}
    assert sign(fields, b"body", SECRET) == b"PTNwl9zNL/GhSmrqp+8wLj3ImTE="


def test_a_wrong_signature_is_refused() -> None:
    fields = send_fields("t")
    good = signed("sender", RequestCode.SEND_MESSAGE_V2, fields)
    assert admitted(good)
    for changed in (
        signed("sender", RequestCode.SEND_MESSAGE_V2, fields, secret="87654321"),
        signed("unknown", RequestCode.SEND_MESSAGE_V2, fields),
        RemotingCommand(code=310, opaque=1, ext_fields=good.ext_fields, body=b"other"),
        RemotingCommand(code=310, opaque=1, ext_fields={**good.ext_fields, "e": "1"}),
        RemotingCommand(code=310, opaque=1, ext_fields={"b": "t", "AccessKey": "sender"}),
    ):
        assert not admitted(changed)


def _heartbeat(group: str, topic: str) -> bytes:
    consumer = {"groupName": group, "subscriptionDataSet": [{"topic": topic}]}
    return json.dumps({"clientID": "c", "consumerDataSet": [consumer]}).encode()


def _locks(group: str, topic: str) -> bytes:
    queues = [{"topic": topic, "queueId": 0}]
    return json.dumps({"consumerGroup": group, "clientId": "c", "mqSet": queues}).encode()


QUEUE = {"topic": "t", "queueId": 0, "timestamp": 0, "commitOffset": 0}
BACK = {"offset": 0, "group": "group", "delayLevel": 0, "originTopic": "t"}
CASES: list[tuple[int, dict[str, Any], bytes, str]] = [
    (RequestCode.SEND_MESSAGE_V2, send_fields("t"), b"", "sender"),
    (RequestCode.SEND_BATCH_MESSAGE, send_fields("t"), b"", "sender"),
    (RequestCode.SEND_MESSAGE_V2, send_fields("other"), b"", ""),
    (RequestCode.SEND_BATCH_MESSAGE, send_fields("other"), b"", ""),
    (RequestCode.PULL_MESSAGE, pull_fields("t", 0), b"", "reader"),
    (RequestCode.LITE_PULL_MESSAGE, pull_fields("t", 0), b"", "reader"),
    (RequestCode.PULL_MESSAGE, pull_fields("t", 0, consumerGroup="other"), b"", ""),
    (RequestCode.PULL_MESSAGE, pull_fields("%RETRY%group", 0), b"", "reader"),
    (RequestCode.PULL_MESSAGE, pull_fields("%RETRY%other", 0), b"", ""),
    (RequestCode.QUERY_CONSUMER_OFFSET, QUEUE | {"consumerGroup": "group"}, b"", "reader"),
    (RequestCode.UPDATE_CONSUMER_OFFSET, QUEUE | {"consumerGroup": "other"}, b"", ""),
    (RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, QUEUE, b"", "reader"),
    (RequestCode.GET_MAX_OFFSET, QUEUE | {"topic": "other"}, b"", ""),
    (RequestCode.CONSUMER_SEND_MSG_BACK, BACK, b"", "reader"),
    (RequestCode.CONSUMER_SEND_MSG_BACK, BACK | {"group": "other"}, b"", ""),
    (RequestCode.HEART_BEAT, {}, _heartbeat("group", "t"), "reader"),
    (RequestCode.HEART_BEAT, {}, _heartbeat("group", "other"), ""),
    (RequestCode.HEART_BEAT, {}, _heartbeat("other", "t"), ""),
    (RequestCode.HEART_BEAT, {}, b"{", ""),
    (RequestCode.HEART_BEAT, {}, b'{"producerDataSet":[{"groupName":"p"}]}', "sender"),
    (RequestCode.LOCK_BATCH_MQ, {}, _locks("group", "t"), "reader"),
    (RequestCode.UNLOCK_BATCH_MQ, {}, _locks("other", "t"), ""),
    (RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "t"}, b"", ""),
]


@pytest.mark.parametrize(("code", "fields", "body", "who"), CASES)
def test_who_may_do_what(code: int, fields: dict[str, Any], body: bytes, who: str) -> None:
    for name in ("sender", "reader"):
        command = signed(name, code, fields, body)
        if body == b"{":
            with pytest.raises(Refused):
                CONTROL.admit(command, {})
        else:
            assert admitted(command) is (name == who)
    assert admitted(signed("chief1", code, fields, body))


def test_system_topics_need_a_permission_of_their_name() -> None:
    account = Account(
        "reader", SECRET, topics={"RMQ_SYS_TRACE_TOPIC": SUB}, default_topic=BOTH, default_group=SUB
    )
    account.require_topic("any", "SUB")
    account.require_topic("RMQ_SYS_TRACE_TOPIC", "SUB")
    for topic in "SCHEDULE_TOPIC_XXXX", "RMQ_SYS_TRANS_HALF_TOPIC", "rmq_sys_wheel_timer":
        with pytest.raises(Refused):
            account.require_topic(topic, "SUB")


def test_a_listed_producer_group_needs_its_permission() -> None:
    account = Account("sender", SECRET, topics={"t": PUB}, groups={"mine": PUB, "other": SUB})
    for group in "mine", "unlisted":
        account.require_producer(group)
    with pytest.raises(Refused):
        account.require_producer("other")


def test_a_check_goes_to_a_producer_that_may_send_to_the_topic() -> None:
    clients = Clients(lambda _: False)
    stranger = Account("other1", SECRET, topics={"other": PUB})
    for account in stranger, SENDER:
        key: Any = account.access_key
        clients.heartbeat(Client(key, key, "JAVA", 399, 0.0, account), ["p"], [])
    for _ in range(4):
        found = clients.producer_of("p", "t")
        assert found is not None and found.client_id == "sender"
    assert clients.producer_of("p", "secret") is None


@pytest.mark.parametrize("code", [code for code in RequestCode if code.where])
def test_no_request_is_open_to_a_stranger(code: int) -> None:
    command = RemotingCommand(code=code, opaque=1)
    routes = RequestCode.GET_ROUTEINFO_BY_TOPIC, RequestCode.GET_BROKER_CLUSTER_INFO
    if code in (*routes, RequestCode.UNREGISTER_CLIENT):
        assert CONTROL.admit(command, {}) is None
    else:
        with pytest.raises(Refused):
            CONTROL.admit(command, {})


def test_a_wrong_key_does_not_hide_the_routes() -> None:
    """Otherwise a client reports that the topic is missing, and not that its key is wrong."""
    for key in "reader", "unknown":
        fields = {"topic": "t", "AccessKey": key, "Signature": "wrong"}
        routes = RemotingCommand(
            code=RequestCode.GET_ROUTEINFO_BY_TOPIC, opaque=1, ext_fields=fields
        )
        assert CONTROL.admit(routes, fields) is None


def test_accounts_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "accounts.toml"
    path.write_text(
        '[[accounts]]\naccessKey = "reader"\nsecretKey = "12345678"\n'
        'topicPerms = ["t=SUB"]\ngroupPerms = ["group=PUB|SUB"]\n'
    )
    account = AccessControl.from_file(path).authenticate(signed("reader", 34, {}))
    assert account == Account("reader", SECRET, topics={"t": SUB}, groups={"group": BOTH})
    for text in (
        "",
        "[[accounts]]\n",
        '[[accounts]]\naccessKey="abc"\nsecretKey="12345678"\n',
        "x",
    ):
        path.write_text(text)
        with pytest.raises(UsageError):
            AccessControl.from_file(path)


def test_a_message_is_sent_back_only_by_an_account_that_may_read_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path / "s", acl=CONTROL) as (broker, client):
            for topic, code in ("t", 0), ("secret", 16):
                send = signed("chief1", RequestCode.SEND_MESSAGE_V2, send_fields(topic))
                assert (await client.ask(send.code, send.ext_fields)).code == 0
                (offset,) = (m.physical_offset for m in broker.store.scan(topic))
                fields = BACK | {"offset": offset}
                del fields["originTopic"]
                back = signed("reader", RequestCode.CONSUMER_SEND_MSG_BACK, fields)
                assert (await client.ask(back.code, back.ext_fields)).code == code

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_SECONDS))


def test_a_timer_message_cannot_name_the_topic_of_another_account(tmp_path: Path) -> None:
    """The broker delivers a message of rmq_sys_wheel_timer to the topic in its REAL_TOPIC."""
    account = Account("sender", SECRET, topics={"secret": frozenset()}, default_topic=PUB)
    text = "REAL_TOPIC\x01secret\x02REAL_QID\x010\x02TIMER_OUT_MS\x011\x02"
    fields = send_fields("rmq_sys_wheel_timer", i=text)

    async def scenario() -> None:
        async with serving(tmp_path / "s", acl=AccessControl(account)) as (_, client):
            send = signed("sender", RequestCode.SEND_MESSAGE_V2, fields)
            assert (await client.ask(send.code, send.ext_fields)).code == 16

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_SECONDS))


def test_a_consumer_does_not_get_the_signature_of_an_administrator(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path / "s", acl=CONTROL) as (_, client):
            beat = signed("reader", RequestCode.HEART_BEAT, {}, _heartbeat("group", "t"))
            assert (await client.ask(beat.code, beat.ext_fields, beat.body)).code == 0
            fields = {"consumerGroup": "group", "clientId": "c"}
            info = signed("chief1", RequestCode.GET_CONSUMER_RUNNING_INFO, fields)
            answer = client.post(info.code, info.ext_fields)
            while (asked := await client.told.get()).code != info.code:
                pass
            assert asked.ext_fields == fields
            client.answer(asked)
            assert (await answer).code == 0

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_SECONDS))


def test_a_client_id_belongs_to_the_account_that_uses_it(tmp_path: Path) -> None:
    other = Account("other1", SECRET, topics={"t": BOTH}, groups={"group": SUB})
    control = AccessControl(SENDER, other, CHIEF)

    async def scenario() -> None:
        async with serving(tmp_path / "s", acl=control) as (broker, client):
            strangers = [await connected(broker.address) for _ in range(2)]

            async def ask(who: Any, name: str, code: int, body: bytes) -> int:
                request = signed(name, code, {}, body)
                return int((await who.ask(code, request.ext_fields, body)).code)

            code = RequestCode.HEART_BEAT
            producer = b'{"clientID":"c","producerDataSet":[{"groupName":"p"}]}'
            assert await ask(client, "sender", code, producer) == 0
            for body in producer, _heartbeat("group", "t"):
                assert await ask(strangers[0], "other1", code, body) == 16
            assert (
                await ask(strangers[0], "other1", RequestCode.LOCK_BATCH_MQ, _locks("group", "t"))
                == 16
            )
            # A client has several connections; each keeps its own id.
            assert await ask(strangers[1], "sender", code, producer) == 0
            await client.close()
            assert await ask(strangers[0], "other1", code, producer) == 16
            await strangers[1].close()
            while broker.core.clients.client("c") is not None:
                await asyncio.sleep(0.01)
            assert await ask(strangers[0], "other1", code, producer) == 0
            await strangers[0].close()

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_SECONDS))


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ('admin = "false"', "admin takes true or false"),
        ("admin = 1", "admin takes true or false"),
        ("topicPerms = 'orders=SUB'", "topicPerms takes a list"),
        ('topicPerms = { "orders=PUB" = "DENY" }', "topicPerms takes a list"),
        ("groupPerms = [5]", "each entry of groupPerms takes text"),
        ("defaultTopicPerm = true", "defaultTopicPerm takes text"),
        ('defaultGroupPerm = ["PUB"]', "defaultGroupPerm takes text"),
    ],
)
def test_a_field_of_a_wrong_type_is_refused(line: str, named: str, tmp_path: Path) -> None:
    path = tmp_path / "accounts.toml"
    path.write_text(f'[[accounts]]\naccessKey = "client1"\nsecretKey = "{SECRET}"\n{line}\n')
    with pytest.raises(UsageError, match=f"accounts.toml.*{named}"):
        AccessControl.from_file(path)


def test_keys_of_a_wrong_type_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "accounts.toml"
    path.write_text(f'[[accounts]]\naccessKey = 12345678\nsecretKey = "{SECRET}"\n')
    with pytest.raises(UsageError, match="accessKey takes text"):
        AccessControl.from_file(path)
    path.write_text('[[accounts]]\naccessKey = "client1"\nsecretKey = 87654321\n')
    with pytest.raises(UsageError, match="secretKey takes text") as refused:
        AccessControl.from_file(path)
    assert "87654321" not in str(refused.value)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"admin": "false"}, {"topics": [("t", PUB)]}, {"topics": {"t": "PUB"}}),
        *({"groups": {"g": None}}, {"default_topic": "PUB"}, {"default_group": True}),
        *({"access_key": 12345678}, {"secret_key": b"12345678"}),
    ],
)
def test_an_account_with_an_argument_of_a_wrong_type(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Account(**{"access_key": "client1", "secret_key": SECRET} | wrong)
