"""Clients that misbehave: they harm neither the broker's memory nor other clients."""

from __future__ import annotations

import asyncio
import json
import random
import re
import struct
from contextlib import suppress
from pathlib import Path

import pytest

from logquarry.broker import Broker, connection
from logquarry.broker import broker as module
from logquarry.broker.limits import UnreadAnswers
from logquarry.protocol import remoting
from logquarry.protocol.remoting import RemotingCommand
from logquarry.protocol.remoting_codes import RequestCode, ResponseCode
from tests.helpers.broker_client import Client, arrived, messages_of, play, pull_fields, send_fields


async def raw(broker: Broker) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = broker.address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


def test_a_huge_length_ends_the_connection_at_once(tmp_path: Path) -> None:
    async def scenario(broker: Broker, client: Client) -> None:
        for length in (1 << 31) - 1, -1, 0, (1 << 24) - 3:
            reader, writer = await raw(broker)
            writer.write(struct.pack(">i", length))
            assert await reader.read() == b""
            writer.close()
        assert (await client.send("t")).code == 0

    play(scenario, tmp_path / "s")


@pytest.mark.parametrize("limit", ["idle_s", "expire_s"])
def test_half_open_connections_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """One client sends nothing, and one sends no heartbeat."""
    monkeypatch.setattr(module, "_HOUSEKEEPING_SECONDS", 0.01)

    async def scenario(broker: Broker, client: Client) -> None:
        body = b'{"clientID":"c","producerDataSet":[{"groupName":"p"}]}'
        client.post(RequestCode.HEART_BEAT, body=body, flag=2)
        await client._task
        while broker.connections:
            await asyncio.sleep(0)
        assert not broker.core.clients.producers

    play(scenario, tmp_path / "s", **{limit: 0.05})


def test_parts_of_requests_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_MOST_BUFFERED", 10_000)

    async def scenario(broker: Broker, client: Client) -> None:
        part = struct.pack(">iI", 1 << 20, 10) + bytes(4_000)
        kept = [await raw(broker) for _ in range(2)]
        for _, writer in kept:
            writer.write(part)
        while broker.core.buffered_bytes < 2 * len(part):
            await asyncio.sleep(0)
        reader, writer = await raw(broker)
        writer.write(part)
        with suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
        # The other connections stay open, and their clients can send the rest.
        assert broker.core.buffered_bytes == 2 * len(part)
        assert (await client.send("t")).code == ResponseCode.SUCCESS
        for _, writer in kept:
            writer.close()
        while broker.core.buffered_bytes:
            await asyncio.sleep(0)

    play(scenario, tmp_path / "s")


def test_random_frames(tmp_path: Path) -> None:
    async def scenario(broker: Broker, client: Client) -> None:
        chance = random.Random(5)
        good = remoting.encode(
            RemotingCommand(
                code=RequestCode.SEND_MESSAGE_V2,
                opaque=1,
                ext_fields={key: str(value) for key, value in send_fields("t").items()},
                body=b"body",
            )
        )
        for _ in range(300):
            frame = bytearray(good)
            frame[4:6] = struct.pack(">H", chance.choice((0, 256)))
            for _ in range(chance.randrange(1, 9)):
                frame[chance.randrange(8, len(frame))] = chance.randrange(256)
            reader, writer = await raw(broker)
            writer.write(frame + good)
            # Either an answer comes, or the connection ends.
            await reader.read(1)
            writer.close()
        for code in range(-2, 400):
            await client.ask(code, {"topic": "x"}, b"{")
        assert (await client.send("t")).code == 0

    play(scenario, tmp_path / "s")


def test_a_client_that_does_not_read_holds_back_only_itself(tmp_path: Path) -> None:
    async def scenario(broker: Broker, client: Client) -> None:
        for _ in range(8):
            await client.send("t", bytes(200_000))
        await arrived(client, "t")
        _, writer = await raw(broker)
        pulls = [
            remoting.encode(
                RemotingCommand(
                    code=RequestCode.PULL_MESSAGE,
                    opaque=number,
                    ext_fields={k: str(v) for k, v in pull_fields("t", 0).items()},
                )
            )
            for number in range(3_000)
        ]
        writer.write(b"".join(pulls))
        # 3,000 answers have 600 MB: the broker makes only those that the client takes.
        while broker.core.counts.got_bytes["t", "group"] < 2_000_000:
            await asyncio.sleep(0.01)
        for _ in range(20):
            assert len(messages_of(await client.pull("t"))) == 1
        assert broker.core.counts.got_bytes["t", "group"] < 40_000_000
        writer.close()

    play(scenario, tmp_path / "s")


def requests(code: RequestCode, fields: dict[str, str], count: int) -> bytes:
    commands = (RemotingCommand(code=code, opaque=n, ext_fields=fields) for n in range(count))
    return b"".join(map(remoting.encode, commands))


def test_answers_that_clients_do_not_read_are_limited(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(broker: Broker, client: Client) -> None:
        core = broker.core
        core.unread_answers._most = most = 8 << 20
        await client.send("t", bytes(1 << 20))
        fields = {"topic": "t", "key": "", "offset": "0"}
        many = requests(RequestCode.VIEW_MESSAGE_BY_ID, fields, 12)
        reader, writer = await raw(broker)
        for _ in range(4):
            writer.write(requests(RequestCode.VIEW_MESSAGE_BY_ID, fields, 3))
            await reader.readexactly(3 << 20)
        lazy = [await raw(broker) for _ in range(4)]
        for _, other in lazy:
            other.write(many)
            await asyncio.sleep(0.2)
            assert core.unread_answers._total <= most
        # The broker has closed only clients that do not read.
        ports = [other.get_extra_info("sockname")[1] for _, other in lazy]
        assert (
            f"127.0.0.1:{ports[0]}: the connection is closed. All clients together" in caplog.text
        )
        assert f":{writer.get_extra_info('sockname')[1]}:" not in caplog.text
        writer.write(requests(RequestCode.VIEW_MESSAGE_BY_ID, fields, 1))
        await reader.readexactly(1 << 20)
        for _, other in (*lazy, (reader, writer)):
            other.close()
        while len(broker.connections) > 1:
            await asyncio.sleep(0.01)
        assert core.unread_answers._total == 0 and not core.unread_answers._bytes

    play(scenario, tmp_path / "s")


def test_a_client_that_reads_slowly_is_closed_last() -> None:
    class Peer:
        def __init__(self, address: str) -> None:
            self.address, self.count, self.is_closed = address, 0, False

        def unread(self) -> int:
            return self.count

        def abort(self) -> None:
            self.is_closed = True

    answers = UnreadAnswers(1_000_000)
    slow, idle, last = (Peer(name) for name in ("slow", "idle", "last"))
    for peer in slow, idle:
        peer.count = 400_000
        answers.note(peer, peer.count)
    # The slow client has read some bytes since its last note.
    slow.count = 300_000
    last.count = 500_000
    answers.note(last, last.count)
    assert idle.is_closed and not slow.is_closed and not last.is_closed
    for peer in slow, last:
        answers.note(peer, 0)
    assert answers._total == 0 and not answers._bytes


def test_large_answers_to_requests_of_one_segment_do_not_pile_up(tmp_path: Path) -> None:
    """The requests arrive together, and the event loop answers each at once."""
    code = RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER

    async def scenario(broker: Broker, client: Client) -> None:
        for number in range(200):
            fields = {"topic": f"{number:0>100}", "readQueueNums": 1, "writeQueueNums": 1}
            await client.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, fields | {"perm": 6})
        size = len((await client.ask(code)).body)
        counts = broker.core.counts.requests
        before = counts[code]
        _, writer = await raw(broker)
        writer.write(requests(code, {}, 2_000))
        await asyncio.sleep(1)
        made = counts[code] - before
        assert 10 < made < (16 << 20) // size
        writer.close()

    play(scenario, tmp_path / "s")


def test_pulls_that_are_held_leave_room_for_later_requests(tmp_path: Path) -> None:
    async def scenario(broker: Broker, client: Client) -> None:
        assert (await client.send("t")).code == 0
        # The broker reads an empty queue before it holds a pull.
        fields = pull_fields("t", 0, 1, sysFlag=2 | 4, suspendTimeoutMillis=100_000)
        held = [client.post(RequestCode.PULL_MESSAGE, fields) for _ in range(3_000)]
        assert (await client.send("t", b"wakes", e=1)).code == 0
        assert {answer.code for answer in await asyncio.gather(*held)} == {0}

    play(scenario, tmp_path / "s")


STRANGE = {"consumerDataSet": [{"groupName": "g", "subscriptionDataSet": 5, "consumeType": []}]}
HALF_PAIR = {"topic": "\ud800", "subString": "*", "codeSet": 7}
LOCKED = {"consumerGroup": "g", "clientId": "c", "mqSet": [{"topic": "\ud800", "queueId": 9}]}
ODD_REQUESTS: dict[str, tuple[int, dict[str, object], object, int]] = {
    "a subscription that is no list": (34, {}, {"clientID": "c"} | STRANGE, 0),
    "a topic of half a surrogate pair": (
        34,
        {},
        {"consumerDataSet": [{"groupName": "g", "subscriptionDataSet": [HALF_PAIR]}]},
        0,
    ),
    "the topics of that group": (343, {"group": "g"}, None, 0),
    "the entries of a queue for that group": (
        321,
        {"topic": "t", "queueId": 0, "index": 0, "count": 1, "consumerGroup": "g"},
        None,
        0,
    ),
    "a lock of a queue that does not exist": (41, {}, LOCKED, 0),
    "a number of queues that is infinite": (
        18,
        {},
        '{"topicConfigList":[{"topicName":"u","readQueueNums":1e400,"writeQueueNums":1,"perm":6}]}',
        1,
    ),
    "a query for no messages": (
        12,
        {"topic": "t", "key": "k1", "maxNum": -1, "beginTimestamp": 0, "endTimestamp": 2**62},
        None,
        22,
    ),
    "a filter of a megabyte": (11, pull_fields("t", 0, subscription="x" * (1 << 20)), None, 23),
    "a number with an underscore": (30, {"topic": "t", "queueId": "0_0"}, None, 1),
    "a number with a blank": (30, {"topic": "t", "queueId": " 0"}, None, 1),
    "a number of 5,000 digits": (30, {"topic": "t", "queueId": "9" * 5_000}, None, 1),
    "a retry of no message": (36, {"group": "g", "offset": 7, "delayLevel": 0}, None, 1),
    "the deletion of a topic that does not exist": (215, {"topic": "x" * 10_000}, None, 0),
}
INTERNAL = re.compile(r"Error\(|not iterable|codec can't encode|cannot convert|/s/commitlog")


def test_odd_requests_get_an_answer_without_internals(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(broker: Broker, client: Client) -> None:
        await client.send("t")
        await arrived(client, "t")
        for name, (code, fields, document, expected) in ODD_REQUESTS.items():
            text = document if isinstance(document, str) else json.dumps(document)
            body = b"" if document is None else text.encode()
            answer = await client.ask(code, fields, body)
            assert answer.code == expected, (name, answer)
            assert not INTERNAL.search(answer.remark or ""), (name, answer)
        assert not broker.core.tables._removed

    play(scenario, tmp_path / "s")
    assert "failed: " not in caplog.text


def test_a_held_pull_keeps_nothing_of_its_request(tmp_path: Path) -> None:
    """Otherwise 8,192 pulls of 16 MiB could fill the memory."""

    async def scenario(broker: Broker, client: Client) -> None:
        await client.send("t")
        await arrived(client, "t")
        fields = pull_fields("t", 1, sysFlag=2 | 4, suspendTimeoutMillis=100_000, junk="x" * 99_999)
        held = client.post(RequestCode.PULL_MESSAGE, fields, bytes(99_999))
        while ("t", 0) not in broker._pulling._held:
            await client.ask(RequestCode.GET_MAX_OFFSET, {"topic": "t", "queueId": 0})
        (pull,) = broker._pulling._held["t", 0]
        assert not (pull.request.command.body or pull.request.command.ext_fields)
        await client.send("t", b"wakes")
        assert [m.body for m in messages_of(await held)] == [b"wakes"]

    play(scenario, tmp_path / "s")


def test_unusual_values_in_the_table_of_groups(tmp_path: Path) -> None:
    path = tmp_path / "s" / "config" / "subscriptionGroup.json"
    most = 2**63 - 1
    text = f'{{"x":NaN,"dataVersion":{{"counter":{most}}},"subscriptionGroupTable":{{"a":{{}}}}}}'

    def create(name: str) -> None:
        async def scenario(_: Broker, client: Client) -> None:
            code = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP
            body = b'{"groupName":"%s"}' % name.encode()
            assert (await client.ask(code, body=body)).code == 0

        play(scenario, tmp_path / "s")

    create("a")
    path.write_text(text)
    for name in "b", "c":
        create(name)
    found = json.loads(path.read_text())
    assert {"a", "b", "c"} <= set(found["subscriptionGroupTable"]) and found["x"] is None
    assert -(2**63) < found["dataVersion"]["counter"] < 0
