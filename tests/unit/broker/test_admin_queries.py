"""Queries: by key, by message id, by time, and the ends of queues."""

from __future__ import annotations

from pathlib import Path

from logquarry.broker import Broker
from logquarry.protocol.remoting_codes import RequestCode, ResponseCode
from tests.helpers.broker_client import Client, arrived, messages_of, play


def test_queries(tmp_path: Path) -> None:
    async def scenario(broker: Broker, client: Client) -> None:
        sent = await client.send("t", b"found")
        await arrived(client, "t")
        by_key = {"topic": "t", "key": "k1", "maxNum": 8, "beginTimestamp": 0}
        by_key["endTimestamp"] = (1 << 63) - 1
        # The dispatcher writes the index after the queues.
        while (got := await client.ask(RequestCode.QUERY_MESSAGE, by_key)).code:
            assert got.code == ResponseCode.QUERY_NOT_FOUND
        assert [m.message_id for m in messages_of(got)] == [sent.ext_fields["msgId"]]
        none = await client.ask(RequestCode.QUERY_MESSAGE, by_key | {"key": "none"})
        assert none.code == ResponseCode.QUERY_NOT_FOUND
        # mqadmin 5.5 can also search by tag. The index has no tags.
        tags = await client.ask(RequestCode.QUERY_MESSAGE, by_key | {"key": "a", "indexType": "T"})
        assert tags.code == ResponseCode.SYSTEM_ERROR and "no tags" in (tags.remark or "")
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
