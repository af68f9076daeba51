"""Limits of a broker: what one client can create, hold or log, and what one error may stop."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import tempfile
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest

import logquarry as lq
from logquarry.broker import Broker, BrokerOptions, clients, connection, limits, pull
from logquarry.broker.limits import SparingLog
from logquarry.disk.disk import Disk
from logquarry.errors import StoreError, UsageError
from logquarry.protocol.remoting import RemotingCommand
from logquarry.protocol.remoting_codes import RequestCode, ResponseCode
from logquarry.store.consumer.sql_filter import parse
from tests.helpers.broker_client import (
    SMALL,
    SUSPENDS,
    Client,
    arrived,
    connected,
    held_pull,
    messages_of,
    play,
    pull_fields,
)
from tests.helpers.replication import make_certificate


def beat(*groups: str, producers: tuple[str, ...] = (), **subscription: Any) -> bytes:
    sub = {"topic": "t", "subString": "*", "subVersion": 1, "expressionType": "TAG"}
    return json.dumps(
        {
            "clientID": "c",
            "producerDataSet": [{"groupName": name} for name in producers],
            "consumerDataSet": [
                {"groupName": name, "subscriptionDataSet": [sub | subscription]} for name in groups
            ],
        }
    ).encode()


def test_many_new_groups_need_few_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    replace = Disk.replace

    def noted(self: Disk, path: Path, data: bytes) -> None:
        written.append(path.name)
        replace(self, path, data)

    async def scenario(broker: Broker, client: Client) -> None:
        monkeypatch.setattr(Disk, "replace", noted)
        names = [f"g{number}" for number in range(3_000)]
        assert (await client.ask(RequestCode.HEART_BEAT, body=beat(*names))).code == 0
        await broker.core.slow(lambda: None)
        # On a busy machine, a thread can write several times while the loop adds the groups.
        assert written.count("topics.json") <= 10
        assert written.count("subscriptionGroup.json") <= 10

    play(scenario, tmp_path / "s")
    for name, member, key in (
        ("topics", "topicConfigTable", "%RETRY%g2999"),
        ("subscriptionGroup", "subscriptionGroupTable", "g2999"),
    ):
        text = (tmp_path / "s" / "config" / f"{name}.json").read_text()
        assert key in json.loads(text)[member]


def test_clients_create_a_limited_number_of_topics_and_groups(tmp_path: Path) -> None:
    async def scenario(broker: Broker, client: Client) -> None:
        for number in range(3):
            assert (await client.send(f"t{number}")).code == 0
        refused = await client.send("t3")
        assert refused.code == ResponseCode.NO_PERMISSION
        assert "the broker has 3 topics already (most_created)" in str(refused.remark)
        assert (await client.send("t0")).code == 0
        # An administrator can create more.
        fields = {"topic": "t3", "readQueueNums": 1, "writeQueueNums": 1, "perm": 6}
        assert (await client.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, fields)).code == 0
        names = [f"g{number}" for number in range(5)]
        await client.ask(RequestCode.HEART_BEAT, body=beat(*names))
        assert len(broker.core.tables.groups) == 3

    play(scenario, tmp_path / "s", most_created=3)


def test_a_read_only_store_has_a_limited_number_of_groups(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with lq.MessageStore.open(path, mode="rw", config=SMALL) as store:
        store.put(lq.Message("t", b"x"))

    async def scenario(broker: Broker, client: Client) -> None:
        for group, code in ("g0", 0), ("?", 1), ("g1", 0), ("g2", 16), ("g0", 0):
            fields = {"consumerGroup": group, "topic": "t", "queueId": 0, "commitOffset": 1}
            answer = await client.ask(RequestCode.UPDATE_CONSUMER_OFFSET, fields)
            assert (group, answer.code) == (group, code)
        assert len(broker.core.tables.offsets.groups()) == 2

    play(scenario, path, read_only=True, create_groups=False, most_created=2)


def test_the_number_of_offsets_is_limited(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with lq.MessageStore.open(path, mode="rw", config=SMALL) as store:
        for queue_id in range(4):
            store.put(lq.Message("t", b"x", queue_id=queue_id))

    async def scenario(broker: Broker, client: Client) -> None:
        def commit(queue_id: int, offset: int = 1) -> Awaitable[RemotingCommand]:
            fields = {"consumerGroup": "g", "topic": "t", "queueId": queue_id}
            fields["commitOffset"] = offset
            return client.ask(RequestCode.UPDATE_CONSUMER_OFFSET, fields)

        codes = [(await commit(queue_id)).code for queue_id in range(3)]
        assert codes == [0, 0, ResponseCode.NO_PERMISSION]
        refused = await commit(3)
        assert "most_offsets" in str(refused.remark) and "mqadmin" in str(refused.remark)
        # Offsets that the broker has already can still change.
        assert (await commit(1, 0)).code == 0
        fields = {"consumerGroup": "g", "sysFlag": 1 | 4, "commitOffset": 1}
        assert (await client.pull("t", 0, 1, **fields)).code == 0
        assert (await client.pull("t", 0, 2, **fields)).code == ResponseCode.NO_PERMISSION
        clone = {"srcGroup": "g", "destGroup": "h", "topic": "t", "offline": False}
        answer = await client.ask(RequestCode.CLONE_GROUP_OFFSET, clone)
        assert answer.code == ResponseCode.NO_PERMISSION
        offsets = broker.core.tables.offsets
        assert offsets.groups() == {("t", "g"): {0: 1, 1: 1}}
        # After the group was deleted with its offsets, other groups can commit.
        delete = {"groupName": "g", "removeOffset": True}
        assert (await client.ask(RequestCode.DELETE_SUBSCRIPTIONGROUP, delete)).code == 0
        assert [(await commit(queue_id)).code for queue_id in (3, 2)] == [0, 0]

    play(scenario, path, most_offsets=2)


def test_a_client_is_in_a_limited_number_of_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "_MOST_GROUPS", 3)

    async def scenario(broker: Broker, client: Client) -> None:
        for number, code in enumerate((0, 0, 0, 1)):
            body = beat(producers=(f"p{number}",))
            assert (await client.ask(RequestCode.HEART_BEAT, body=body)).code == code
        assert list(broker.core.clients.producers) == ["p0", "p1", "p2"]
        gone = {"clientID": "c", "producerGroup": "p0"}
        await client.ask(RequestCode.UNREGISTER_CLIENT, gone)
        body = beat(producers=("p4",))
        assert (await client.ask(RequestCode.HEART_BEAT, body=body)).code == 0

    play(scenario, tmp_path / "s")


def test_one_bad_group_or_filter_leaves_the_rest_of_a_heartbeat(tmp_path: Path) -> None:
    async def scenario(broker: Broker, client: Client) -> None:
        await client.send("t", b"x")
        await arrived(client, "t")
        document = json.loads(beat("bad", "group"))
        document["consumerDataSet"].append("no object")
        bad, good = document["consumerDataSet"][:2]
        bad["subscriptionDataSet"][0] |= {"expressionType": "SQL92", "subString": "a > >"}
        body = json.dumps(document).encode()
        assert (await client.ask(RequestCode.HEART_BEAT, body=body)).code == 0
        assert len(messages_of(await client.pull("t", sysFlag=0))) == 1
        refused = await client.pull("t", sysFlag=0, consumerGroup="bad")
        assert refused.code == ResponseCode.SUBSCRIPTION_PARSE_FAILED
        assert "a > >" in str(refused.remark)
        # An illegal group name is refused, and the client is in its other groups.
        bad["groupName"], good["groupName"] = "?", "later"
        body = json.dumps(document).encode()
        assert (await client.ask(RequestCode.HEART_BEAT, body=body)).code == 1
        assert broker.core.clients.consumer_ids("later") == ["c"]

    play(scenario, tmp_path / "s")


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The filters that the broker parses."""
    found: list[str] = []

    def noted(text: str) -> Any:
        found.append(text)
        return parse(text)

    monkeypatch.setattr(clients, "parse", noted)
    clients._compiled.cache_clear()
    return found


def test_a_filter_is_parsed_once_and_has_a_largest_length(
    tmp_path: Path, parsed: list[str]
) -> None:
    async def scenario(broker: Broker, client: Client) -> None:
        await client.send("t")
        for text in "only_here > 1", "only_here > >":
            for _ in range(3):
                await client.pull("t", subscription=text, expressionType="SQL92")
        assert parsed == ["only_here > 1", "only_here > >"]
        long = f"a = '{'x' * 8_192}'"
        answer = await client.pull("t", subscription=long, expressionType="SQL92")
        assert answer.code == ResponseCode.SUBSCRIPTION_PARSE_FAILED and len(parsed) == 2

    play(scenario, tmp_path / "s")


def test_a_heartbeat_parses_no_filter(tmp_path: Path, parsed: list[str]) -> None:
    """It can have thousands, and the loop would parse them all before the next request."""

    async def scenario(broker: Broker, client: Client) -> None:
        await client.send("t")
        await arrived(client, "t")
        for text, code in (("a = 1", 20), ("a = =", ResponseCode.SUBSCRIPTION_PARSE_FAILED)):
            body = beat("group", "g2", "g3", subString=text, expressionType="SQL92", subVersion=7)
            assert (await client.ask(RequestCode.HEART_BEAT, body=body)).code == 0
            assert parsed == []
            assert (await client.pull("t", sysFlag=0)).code == code
            assert parsed.pop() == text
            gone = {"clientID": "c", "consumerGroup": "group"}
            await client.ask(RequestCode.UNREGISTER_CLIENT, gone)

    play(scenario, tmp_path / "s")


def test_documents_and_names_have_a_largest_size(tmp_path: Path) -> None:
    async def scenario(broker: Broker, client: Client) -> None:
        long, longest = "x" * 513, "x" * 512
        for body, code in (
            (beat(producers=(longest,)), 0),
            (beat(producers=(long,)), 1),
            (beat().replace(b'"c"', f'"{long}"'.encode()), 1),
            (beat() + b" " * (2 << 20), 1),
        ):
            assert (await client.ask(RequestCode.HEART_BEAT, body=body)).code == code
        queues = [{"topic": "t", "queueId": 0}]
        for name, count in (longest, 0), ("c", 1):
            document = {"consumerGroup": "g", "clientId": name, "mqSet": queues}
            body = json.dumps(document).encode()
            answer = await client.ask(RequestCode.LOCK_BATCH_MQ, body=body)
            assert len(json.loads(answer.body)["lockOKMQSet"]) == count

    play(scenario, tmp_path / "s")


def test_a_client_holds_a_limited_number_of_pulls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull, "_MOST_HELD_OF_ONE", 5)

    async def scenario(broker: Broker, client: Client) -> None:
        await client.send("t")
        await arrived(client, "t")
        greedy = await connected(broker.address)
        held = [greedy.post(11, pull_fields("t", 1, **SUSPENDS)) for _ in range(6)]
        assert (await held[5]).code == ResponseCode.SYSTEM_BUSY
        other = await held_pull(client)
        assert not any(one.done() for one in held[:5])
        # The pulls of a disconnected client do not count.
        await greedy.close()
        while broker._pulling._held_count > 1:
            await asyncio.sleep(0.005)
        await client.send("t", b"second")
        assert [m.body for m in messages_of(await other)] == [b"second"]
        assert not broker._pulling._held_of and not broker._pulling._ending

    play(scenario, tmp_path / "s")


def test_numbers_that_json_has_not_are_refused(tmp_path: Path) -> None:
    async def scenario(broker: Broker, client: Client) -> None:
        code = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP
        for text in (
            '{"groupName":"g","retryMaxTimes":NaN}',
            '{"groupName":"g","x":[1e999]}',
            '{"groupName":"g","retryMaxTimes":"many"}',
            '{"groupName":"g","retryQueueNums":99999999999}',
            '{"groupName":"g","consumeEnable":1}',
        ):
            answer = await client.ask(code, body=text.encode())
            assert answer.code == ResponseCode.SYSTEM_ERROR, text
        assert "g" not in broker.core.tables.groups
        good = b'{groupName:"g",retryMaxTimes:3,"attributes":{"a":null}}'
        assert (await client.ask(code, body=good)).code == 0

    play(scenario, tmp_path / "s")
    text = (tmp_path / "s" / "config" / "subscriptionGroup.json").read_text()
    assert json.loads(text)["subscriptionGroupTable"]["g"]["retryMaxTimes"] == 3


def test_offsets_only_of_queues_that_exist(tmp_path: Path) -> None:
    async def scenario(broker: Broker, client: Client) -> None:
        await client.send("t")
        for topic, queue_id, code in (
            *(("t", 3, 0), ("t", 4, ResponseCode.SYSTEM_ERROR), ("t", -1, 1)),
            ("none", 0, ResponseCode.TOPIC_NOT_EXIST),
        ):
            fields = {"consumerGroup": "g", "topic": topic, "queueId": queue_id, "commitOffset": 1}
            assert (await client.ask(RequestCode.UPDATE_CONSUMER_OFFSET, fields)).code == code
        assert broker.core.tables.offsets.groups() == {("t", "g"): {3: 1}}

    play(scenario, tmp_path / "s")


def test_a_reader_goes_on_after_an_unexpected_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from logquarry.broker import broker as module

    path = tmp_path / "s"
    ends, failures = module._ends, [ValueError("test"), StoreError("test")]

    def failing(store: Any, keys: Any) -> Any:
        if keys and failures:
            raise failures.pop()
        return ends(store, keys)

    with lq.MessageStore.open(path, mode="rw", config=SMALL) as store:
        store.put(lq.Message("t", b"first"))
        store.wait_dispatched()

        async def scenario(broker: Broker, client: Client) -> None:
            monkeypatch.setattr(module, "_ends", failing)
            held = client.post(11, pull_fields("t", 1, **SUSPENDS))
            while failures:
                await asyncio.sleep(0.005)
            store.put(lq.Message("t", b"second"))
            store.wait_dispatched()
            assert [m.body for m in messages_of(await held)] == [b"second"]

        play(scenario, path, read_only=True, poll_ms=5)
    assert "ValueError('test')" in caplog.text


def test_a_flood_of_bad_requests_logs_few_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection, "_failures", SparingLog(connection.logger))
    # Otherwise a slow machine would log five more lines in each ten seconds.
    monkeypatch.setattr(limits, "_INTERVAL_SECONDS", float("inf"))

    def broken(*_: object) -> None:
        raise TypeError("test")

    monkeypatch.setattr(clients.Clients, "heartbeat", broken)

    async def scenario(broker: Broker, client: Client) -> None:
        for _ in range(100):
            answer = await client.ask(RequestCode.HEART_BEAT, body=b"{}")
            assert answer.code == ResponseCode.SYSTEM_ERROR
        assert (await client.send("t")).code == 0

    with caplog.at_level(logging.INFO):
        play(scenario, tmp_path / "s")
    lines = [record for record in caplog.records if "failed" in record.getMessage()]
    assert 1 <= len(lines) <= 5
    assert "test_limits.py:" in lines[0].getMessage() and lines[0].exc_info is None


def test_a_value_that_the_broker_cannot_use_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection._failures, "_until", 0.0)

    async def scenario(broker: Broker, client: Client) -> None:
        # A value that an edited subscriptionGroup.json can have.
        broker.core.tables.groups["g"] = {"groupName": "g", "retryMaxTimes": "many"}
        assert (await client.send("%RETRY%g")).code == ResponseCode.SYSTEM_ERROR
        # An error of a client is not logged.
        assert (await client.send("t", e="many")).code == ResponseCode.SYSTEM_ERROR

    play(scenario, tmp_path / "s")
    (line,) = [line for line in caplog.messages if "failed" in line]
    assert "send.py:" in line


def test_a_start_that_fails_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def fail(*_: Any, **__: Any) -> None:
        raise StoreError("test")

    async def start(**options: Any) -> None:
        async with Broker(options=BrokerOptions(**options)):
            pass

    for name in ("logquarry.broker.broker.Tables", "logquarry.broker.broker.MessageStore.open"):
        with monkeypatch.context() as patch, pytest.raises(StoreError):
            patch.setattr(name, fail)
            asyncio.run(start())
    with pytest.raises(UsageError):
        asyncio.run(start(host="192.0.2.77", insecure=True))
    assert not list(tmp_path.iterdir())


def test_all_addresses_are_not_given_to_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    from logquarry.broker import options

    everywhere = BrokerOptions(host="0.0.0.0", insecure=True)
    monkeypatch.setattr(options, "_address_of_machine", lambda _: "10.0.0.7")

    async def start() -> None:
        async with Broker(options=everywhere) as broker:
            assert broker.is_address_chosen
            assert {broker.address[:9], broker.name_server[:9]} == {"10.0.0.7:"}

    asyncio.run(start())
    monkeypatch.setattr(options, "_address_of_machine", lambda _: None)
    with pytest.raises(UsageError, match="--advertise"):
        everywhere.advertised()
    with pytest.raises(UsageError, match="--advertise"):
        BrokerOptions(advertise="::").advertised()
    named = BrokerOptions(host="0.0.0.0", insecure=True, advertise="queue.example")
    assert named.advertised() == "queue.example"


def test_tls_handshakes_have_a_limit_and_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_MOST_HANDSHAKES", 2)
    monkeypatch.setattr(connection, "_HANDSHAKE_SECONDS", 0.2)
    certificate, key = make_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    trusting = ssl.create_default_context(cafile=str(certificate))

    async def scenario() -> None:
        async with Broker(tmp_path / "s", options=BrokerOptions(tls=context)) as broker:
            host, _, port = broker.address.rpartition(":")
            silent = [await asyncio.open_connection(host, int(port)) for _ in range(3)]
            # The third pull is too many; the others end when their time is over.
            assert await silent[2][0].read() == b""
            for reader, _ in silent[:2]:
                assert await reader.read() == b""
            monkeypatch.setattr(connection, "_HANDSHAKE_SECONDS", 60.0)
            client = await connected(broker.address, ssl=trusting, server_hostname="localhost")
            assert (await client.send("t")).code == 0
            await client.close()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_refused_pull_leaves_nothing_of_its_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull, "_MOST_HELD", 0)

    async def scenario(broker: Broker, client: Client) -> None:
        await client.send("t")
        await arrived(client, "t")
        answer = await client.ask(11, pull_fields("t", 1, **SUSPENDS))
        assert answer.code == ResponseCode.SYSTEM_BUSY
        assert not broker._pulling._held_of

    play(scenario, tmp_path / "s")
