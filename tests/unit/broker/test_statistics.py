"""The numbers that mqadmin, RocketMQ's dashboard and its exporter read."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from logquarry.broker import Broker, statistics
from logquarry.protocol.remoting_codes import RequestCode, ResponseCode
from tests.helpers.broker_client import Client, arrived, document_of, play

_KEYS = (
    *("EndTransactionQueueSize", "EndTransactionThreadPoolQueueCapacity"),
    *("bootTimestamp", "brokerVersion", "brokerVersionDesc", "commitLogDirCapacity"),
    *("commitLogDiskRatio", "commitLogMaxOffset", "commitLogMinOffset"),
    *("consumeQueueDiskRatio", "dispatchBehindBytes", "dispatchMaxBuffer"),
    *("earliestMessageTimeStamp", "getFoundTps", "getMessageEntireTimeMax", "getMissTps"),
    *("getTotalTps", "getTransferedTps", "msgGetTotalTodayMorning"),
    *("msgGetTotalTodayNow", "msgGetTotalYesterdayMorning", "msgPutTotalTodayMorning"),
    *("msgPutTotalTodayNow", "msgPutTotalYesterdayMorning", "pageCacheLockTimeMills"),
    *("pullThreadPoolQueueCapacity", "pullThreadPoolQueueHeadWaitTimeMills"),
    *("pullThreadPoolQueueSize", "putMessageAverageSize", "putMessageDistributeTime"),
    *("putMessageEntireTimeMax", "putMessageFailedTimes", "putMessageSizeTotal"),
    *("putMessageTimesTotal", "putTps", "queryThreadPoolQueueCapacity"),
    *("queryThreadPoolQueueHeadWaitTimeMills", "queryThreadPoolQueueSize"),
    *("remainHowManyDataToFlush", "remainTransientStoreBufferNumbs", "runtime"),
    *("sendThreadPoolQueueCapacity", "sendThreadPoolQueueHeadWaitTimeMills"),
    *("sendThreadPoolQueueSize", "startAcceptSendRequestTimeStamp"),
)
"""What the broker of RocketMQ 4.9.3 answers, except for keys with the name of a folder."""
VIEW = RequestCode.VIEW_BROKER_STATS_DATA


async def _numbers(client: Client) -> dict[str, str]:
    table: dict[str, str] = document_of(await client.ask(RequestCode.GET_BROKER_RUNTIME_INFO))[
        "table"
    ]
    return table


def test_all_numbers_have_the_formats_of_rocketmq(tmp_path: Path) -> None:
    async def scenario(broker: Broker, client: Client) -> None:
        for _ in range(2):
            await client.send("t", b"x" * 10)
        await client.send("t", i="DELAY\x013")
        await arrived(client, "t", 2)
        await client.pull("t")
        while "scheduleMessageOffset_3" not in (table := await _numbers(client)):
            # The delayed message is not in its queue yet.
            await asyncio.sleep(0.01)
        assert set(_KEYS) <= table.keys()
        # Without it, clusterList of mqadmin 5 shows the broker as not activated.
        assert table["brokerActive"] == "true"
        assert table["scheduleMessageOffset_3"] == "0,1"
        rates = [table[name] for name in table if name.endswith("Tps") and "timer" not in name]
        assert len(rates) == 6
        for rate in rates:
            assert re.fullmatch(r"\d+\.\d\d \d+\.\d\d \d+\.\d\d", rate)
        times = table["putMessageDistributeTime"].split(" ")
        assert len(times) == 13 and times[0].startswith("[<=0ms]:")
        assert sum(int(one.rpartition(":")[2]) for one in times) == 3
        size = r"\d+(\.\d)? (B|[KMGTPE]iB)"
        assert re.fullmatch(f"Total : {size}, Free : {size}\\.", table["commitLogDirCapacity"])
        assert re.fullmatch(size, table["remainHowManyDataToFlush"])
        runtime = r"\[ 0 days, 0 hours, \d minutes, \d+ seconds \]"
        assert re.fullmatch(runtime, table["runtime"])
        for name in _KEYS:
            if not re.search("Tps|Desc|Distribute|Capacity|runtime|remainHow", name):
                float(table[name])

    play(scenario, tmp_path / "s")


def test_a_reader_has_the_numbers_too(tmp_path: Path) -> None:
    async def first(_: Broker, client: Client) -> None:
        assert (await client.send("t")).code == 0

    async def second(_: Broker, client: Client) -> None:
        table = await _numbers(client)
        assert set(_KEYS) <= table.keys() and int(table["commitLogMaxOffset"]) > 0

    play(first, tmp_path / "s")
    play(second, tmp_path / "s", read_only=True)


def test_counts_of_topics_groups_and_the_broker(tmp_path: Path) -> None:
    async def scenario(broker: Broker, client: Client) -> None:
        for _ in range(4):
            await client.send("t", b"x")
        await arrived(client, "t", 4)
        await client.pull("t", consumerGroup="g")
        sent = await client.send("t")
        offset = int(sent.ext_fields["msgId"][16:], 16)
        back = {"offset": offset, "group": "g", "delayLevel": 1}
        assert (await client.ask(RequestCode.CONSUMER_SEND_MSG_BACK, back)).code == 0

        async def count(name: str, key: str) -> Any:
            answer = await client.ask(VIEW, {"statsName": name, "statsKey": key})
            if answer.code:
                assert answer.code == ResponseCode.SYSTEM_ERROR
                assert answer.remark == f"The stats <{name}> <{key}> not exist"
                return None
            found = document_of(answer)
            assert found.keys() == {"statsMinute", "statsHour", "statsDay"}
            assert len({one["sum"] for one in found.values()}) == 1
            assert found["statsMinute"]["tps"] > 0
            return found["statsMinute"]["sum"], found["statsMinute"]["avgpt"]

        assert await count("TOPIC_PUT_NUMS", "t") == (5, 1.0)
        size, average = await count("TOPIC_PUT_SIZE", "t")
        assert size == 5 * average > 0
        assert await count("GROUP_GET_NUMS", "t@g") == (4, 1.0)
        size, average = await count("GROUP_GET_SIZE", "t@g")
        assert size == 4 * average > 0
        assert await count("SNDBCK_PUT_NUMS", "t@g") == (1, 1.0)
        assert await count("BROKER_PUT_NUMS", "DefaultCluster") == (5, 1.0)
        # The wait for the queues pulls too.
        pulled = sum(broker.core.counts.got.values())
        assert await count("BROKER_GET_NUMS", "DefaultCluster") == (pulled, 1.0)
        for name, key in ("TOPIC_PUT_NUMS", "other"), ("GROUP_GET_NUMS", "t"), ("nothing", "t"):
            assert await count(name, key) is None
        # The consumer's rate in mqadmin's consumerProgress.
        await client.ask(
            RequestCode.UPDATE_CONSUMER_OFFSET,
            {"consumerGroup": "g", "topic": "t", "queueId": 0, "commitOffset": 1},
        )
        stats = await client.ask(RequestCode.GET_CONSUME_STATS, {"consumerGroup": "g"})
        assert re.match(rb'\{"consumeTps":[1-9]|\{"consumeTps":0\.\d*[1-9]', stats.body)

    play(scenario, tmp_path / "s")


def test_a_window_moves() -> None:
    """A minute has five ended intervals of 10 s and the current one."""
    window = statistics._Window(10.0, 5, 0.0)
    assert window.growth("n", "k", 7, 1.0) == (7, 1.0)
    window.sample({"n": {"k": 7}}, 9.0)
    assert window.growth("n", "k", 7, 9.0) == (7, 9.0)
    for second in range(10, 60, 10):
        window.sample({"n": {"k": second}}, float(second))
    assert window.growth("n", "k", 55, 55.0) == (55, 55.0)
    window.sample({"n": {"k": 60}}, 60.0)
    # The interval from 0 to 10 s has left the window, with its 10.
    assert window.growth("n", "k", 65, 65.0) == (55, 55.0)
    assert window.growth("n", "other", 0, 65.0) == (0, 55.0)
    for second in range(70, 130, 10):
        window.sample({"n": {"k": 65}}, float(second))
    # It keeps no snapshots of a count that does not grow.
    assert {str(growth) for _, growth in window._ended} == {"{'n': {}}"}


def test_the_totals_at_midnight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(broker: Broker, client: Client) -> None:
        found, day = broker._statistics, (2026, 1, 1)
        monkeypatch.setattr(found, "_today", lambda: day)
        found.sample()
        for _ in range(2):
            await client.send("t")
            day = *day[:2], day[2] + 1
            found.sample()
            found.sample()
        await client.send("t")
        table = await _numbers(client)
        names = "YesterdayMorning", "TodayMorning", "TodayNow"
        assert [table[f"msgPutTotal{name}"] for name in names] == ["1", "2", "3"]

    play(scenario, tmp_path / "s")


def test_the_producers_of_all_groups(tmp_path: Path) -> None:
    async def scenario(broker: Broker, client: Client) -> None:
        await client.heartbeat("id", producer="p")
        answer = await client.ask(RequestCode.GET_ALL_PRODUCER_INFO)
        (found,) = document_of(answer)["data"].pop("p")
        now = broker.core.clock()
        assert now - 60_000 < found.pop("lastUpdateTimestamp") <= now + 1_000
        assert found == {
            "clientId": "id",
            "language": "PYTHON",
            "remoteIP": broker.connections[0].address,
            "version": 399,
        }

    play(scenario, tmp_path / "s")


def test_entries_of_a_queue(tmp_path: Path) -> None:
    async def scenario(_: Broker, client: Client) -> None:
        for tag in "a", "b", "a":
            await client.send("t", i=f"TAGS\x01{tag}")
        await arrived(client, "t", 3)
        await client.heartbeat(group="g", subString="a", codeSet=[ord("a")])

        async def entries(**fields: Any) -> Any:
            wanted = {"topic": "t", "queueId": 0, "index": 1, "count": 10} | fields
            return await client.ask(RequestCode.QUERY_CONSUME_QUEUE, wanted)

        found = document_of(await entries(consumerGroup="g"))
        assert (found["minQueueIndex"], found["maxQueueIndex"]) == (0, 3)
        assert found["subscriptionData"]["subString"] == "a"
        assert [(one["tagsCode"], one["eval"]) for one in found["queueData"]] == [
            (ord("b"), False),
            (ord("a"), True),
        ]
        assert not {"subscriptionData", "filterData"} & document_of(await entries(count=1)).keys()
        offline = document_of(await entries(consumerGroup="gone"))
        assert offline["filterData"] == "gone@t is not online!"
        for fields, reason in (
            ({"index": 3}, "Index 3 of 0@t is not exist!"),
            ({"topic": "other"}, "0@other is not exist!"),
        ):
            answer = await entries(**fields)
            assert (answer.code, answer.remark) == (ResponseCode.SYSTEM_ERROR, reason)

    play(scenario, tmp_path / "s")


def test_the_settings_that_mqadmin_exports(tmp_path: Path) -> None:
    async def scenario(_: Broker, client: Client) -> None:
        answer = await client.ask(RequestCode.GET_BROKER_CONFIG)
        lines = answer.body.decode().splitlines()
        found = dict(line.split("=", 1) for line in lines)
        assert {
            *("brokerClusterName", "brokerId", "brokerName", "brokerRole", "fileReservedTime"),
            *("filterServerNums", "flushDiskType", "maxMessageSize", "messageDelayLevel"),
            *("msgTraceTopicName", "slaveReadEnable", "traceOn", "traceTopicEnable", "useTLS"),
            *("autoCreateTopicEnable", "autoCreateSubscriptionGroup"),
        } <= found.keys()
        assert found["messageDelayLevel"].startswith("1s 5s ") and found["useTLS"] == "false"

    play(scenario, tmp_path / "s")
