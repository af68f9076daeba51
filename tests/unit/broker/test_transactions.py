"""Transactions of producers: their end, and the check of open ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import logquarry as lq
from logquarry.broker import Broker
from logquarry.format import frame
from logquarry.protocol.remoting_codes import RequestCode, ResponseCode
from logquarry.testing.clock import FakeClock
from tests.helpers.broker_client import SMALL, Client, arrived, messages_of, play, send_fields

HALF = send_fields("t", f=4, i="TRAN_MSG\x01true\x02PGROUP\x01pg\x02UNIQ_KEY\x01u7")


def test_transactions_end_by_commit_or_rollback(tmp_path: Path) -> None:
    async def scenario(_: Broker, client: Client) -> None:
        end: dict[str, Any] = {}
        for body, state in ((b"kept", 8), (b"dropped", 12), (b"open", 0)):
            half = await client.ask(RequestCode.SEND_MESSAGE_V2, HALF, body)
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
        got = messages_of(await arrived(client, "t", 2))
        assert [m.body for m in got] == [b"kept", b"last"]
        assert (await client.send("t", i="TRAN_MSG\x01true\x02DELAY\x013")).code != 0

    play(scenario, tmp_path / "s")


def test_a_check_asks_the_producer(tmp_path: Path) -> None:
    clock = FakeClock()

    async def scenario(broker: Broker, client: Client) -> None:
        await client.heartbeat(producer="pg")
        await client.ask(RequestCode.SEND_MESSAGE_V2, HALF, b"kept")
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
        assert [m.body for m in messages_of(await arrived(client, "t"))] == [b"kept"]

    config = lq.StoreConfig(transaction_check_interval=20, mapped_file_size_commit_log=1 << 22)
    play(scenario, tmp_path / "s", clock=clock, config=config)


def test_the_end_of_a_transaction_names_its_half_message(tmp_path: Path) -> None:
    """Physical offset and queue offset must agree (``checkPrepareMessage``)."""

    async def scenario(_: Broker, client: Client) -> None:
        half = "TRAN_MSG\x01true\x02PGROUP\x01pg\x02UNIQ_KEY\x01u7"
        sent = (await client.send("t", b"kept", f=4, i=half)).ext_fields
        plain = (await client.send("t", b"plain")).ext_fields
        right = {
            "producerGroup": "pg",
            "tranStateTableOffset": sent["queueOffset"],
            "commitLogOffset": int(sent["msgId"][16:], 16),
            "commitOrRollback": 8,
        }
        for wrong in (
            {"commitLogOffset": int(plain["msgId"][16:], 16)},
            {"tranStateTableOffset": 77},
            {"producerGroup": "other"},
        ):
            answer = await client.ask(RequestCode.END_TRANSACTION, right | wrong)
            assert answer.code == ResponseCode.SYSTEM_ERROR, wrong
        assert (await client.ask(RequestCode.END_TRANSACTION, right)).code == 0
        got = messages_of(await arrived(client, "t", 2))
        assert [message.body for message in got] == [b"plain", b"kept"]

    play(scenario, tmp_path / "s")


def test_the_end_of_a_message_whose_topic_is_not_utf8(tmp_path: Path) -> None:
    with lq.MessageStore.open(tmp_path / "s", mode="rw", config=SMALL) as store:
        store.append_data(0, frame.encode(frame.Frame(b"\xff\xfe", b"x").with_crc()))

    async def scenario(_: Broker, client: Client) -> None:
        end = {
            "producerGroup": "pg",
            "tranStateTableOffset": 0,
            "commitLogOffset": 0,
            "commitOrRollback": 8,
        }
        answer = await client.ask(RequestCode.END_TRANSACTION, end)
        assert answer.code == ResponseCode.SYSTEM_ERROR
        assert "no half message at physical offset 0" in str(answer.remark)

    play(scenario, tmp_path / "s")
