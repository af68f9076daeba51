"""A broker as its clients see it: a message sent and pulled, answers, stores that it serves."""

from __future__ import annotations

from pathlib import Path

import pytest

import logquarry as lq
from logquarry.broker import Broker, BrokerOptions
from logquarry.errors import UsageError
from logquarry.protocol.remoting_codes import RequestCode, ResponseCode
from tests.helpers.broker_client import (
    SMALL,
    SUSPENDS,
    Client,
    arrived,
    held_pull,
    messages_of,
    play,
    pull_fields,
    send_fields,
)


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
        # Every client writes WAIT=true; a broker leaves it out, and adds its cluster and region.
        # Consumers of RocketMQ 5.3 and later send no trace of a message without a region.
        assert message.properties == {
            "KEYS": "k1",
            "UNIQ_KEY": "u1",
            "TAGS": "a",
            "CLUSTER": "DefaultCluster",
            "MSG_REGION": "DefaultRegion",
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


def test_one_way_requests_get_no_answer(tmp_path: Path) -> None:
    async def scenario(_: Broker, client: Client) -> None:
        oneway = client.post(RequestCode.SEND_MESSAGE_V2, send_fields("t"), b"x", flag=2)
        client.post(9_999, flag=2)
        assert [m.body for m in messages_of(await arrived(client, "t"))] == [b"x"]
        assert not oneway.done()

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
            held = await held_pull(client)
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
