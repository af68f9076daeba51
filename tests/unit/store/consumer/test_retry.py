"""Messages that consumers send back: put as by RocketMQ's broker, until they are dead letters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.errors import StoreUnavailable
from logquarry.format import properties as props
from logquarry.message import Message
from logquarry.store.consumer.group import sent_back
from logquarry.store.message_store import StoreWriter
from logquarry.stored_message import StoredMessage
from logquarry.testing.clock import FakeClock
from tests.helpers.consumer_stores import saved
from tests.helpers.small_store import config, opened

HOUR = 3_600_000
RETRY, DEAD = "%RETRY%cg_main", "%DLQ%cg_main"


@pytest.fixture(name="store")
def small_store(tmp_path: Path) -> Iterator[StoreWriter]:
    with opened(tmp_path / "store") as store:
        yield store


def fields(message: StoredMessage) -> tuple[object, ...]:
    """The fields that sending back determines."""
    return (
        message.topic,
        message.queue_id,
        message.body,
        message.properties_string,
        message.flag,
        message.sys_flag,
        message.born_timestamp,
        message.born_host,
        message.store_host,
        message.reconsume_times,
        message.prepared_transaction_offset,
        message.size,
    )


def test_the_broker_put_the_same(golden: Path, tmp_path: Path) -> None:
    """Send back again each message that the consumers of the golden store sent back."""
    with lq.MessageStore.open(golden / "real-broker/store") as original:
        times: dict[tuple[str, int], StoredMessage] = {}
        broker: list[StoredMessage] = []
        for message in original.scan():
            origin = message.properties.get("ORIGIN_MESSAGE_ID")
            if message.topic in (props.SCHEDULE_TOPIC, DEAD) and origin is not None:
                broker.append(message)
            elif message.topic == RETRY:
                times[str(origin), message.reconsume_times] = message
            else:
                times[message.message_id, 0] = message
        levels = original.config.message_delay_level
    assert len(broker) == 27 and {m.topic for m in broker} == {props.SCHEDULE_TOPIC, DEAD}
    with opened(tmp_path / "s", message_delay_level=levels) as store:
        for expected in broker:
            origin = expected.properties["ORIGIN_MESSAGE_ID"]
            consumed = times[origin, expected.reconsume_times - 1]
            # The consumer asked for level 1, and for at most two more deliveries.
            result = store.put(sent_back(consumed, "cg_main", 1, 2))
            assert fields(store.message_at(result.physical_offset)) == fields(expected)


@pytest.mark.parametrize(
    ("times", "asked", "topic", "level"),
    [
        (0, None, "%RETRY%g", "3"),
        (0, 0, "%RETRY%g", "3"),
        (5, None, "%RETRY%g", "8"),
        (15, None, "%RETRY%g", "18"),
        (16, None, "%DLQ%g", "0"),
        (16, 2, "%DLQ%g", "0"),
        (2, 7, "%RETRY%g", "7"),
        (0, -1, "%DLQ%g", "0"),
    ],
)
def test_levels(store: StoreWriter, times: int, asked: int, topic: str, level: str) -> None:
    put = store.put(Message("t", b"x", reconsume_times=times, properties={"a": "b"}))
    message = sent_back(store.message_at(put.physical_offset), "g", asked, 16)
    assert message.topic == topic and message.reconsume_times == times + 1
    properties = message.all_properties()
    assert properties["DELAY"] == level and properties["RETRY_TOPIC"] == "t"
    assert properties["ORIGIN_MESSAGE_ID"] == put.message_id and properties["WAIT"] == "false"


def test_a_message_comes_again_until_it_is_dead(tmp_path: Path) -> None:
    clock = FakeClock(step=1)
    with lq.MessageStore.open(tmp_path / "s", mode="rw", config=config(), clock=clock) as store:
        store.put(Message("t", b"poison", tags="a"))
        store.put(Message("t", b"fine", tags="a"))
        store.wait_dispatched()
        seen: list[tuple[str, bytes, int]] = []
        with store.consumer("g", "t", tags="a", timeout=0, max_reconsume_times=2) as consumer:
            for _ in range(4):
                for message in consumer:
                    seen.append((message.topic, message.body, message.reconsume_times))
                    if message.body == b"poison":
                        assert consumer.nack(message).ok
                store.wait_dispatched()
                clock.advance(HOUR)
                store.deliver_due()
                store.wait_dispatched()
        assert seen == [
            ("t", b"poison", 0),
            ("t", b"fine", 0),
            ("%RETRY%g", b"poison", 1),
            ("%RETRY%g", b"poison", 2),
        ]
        (dead,) = store.get("%DLQ%g", 0).messages
        assert dead.body == b"poison" and dead.reconsume_times == 3
        assert dead.properties["RETRY_TOPIC"] == "t"
        with store.consumer("undertaker", "%DLQ%g", timeout=0) as consumer:
            assert [message.body for message in consumer] == [b"poison"]
        assert saved(store)["%RETRY%g", "g"] == {0: 2}


def test_what_was_sent_back_is_not_passed_by(store: StoreWriter) -> None:
    """A group that begins at the end still gets the messages that it once sent back."""
    put = store.put(Message("t", b"x"))
    message = sent_back(store.message_at(put.physical_offset), "g", None, 16)
    store.put(message._replace(properties_string="RETRY_TOPIC\x01t"))
    store.wait_dispatched()
    with store.consumer("g", "t", start="latest", timeout=0) as consumer:
        assert [message.topic for message in consumer] == ["%RETRY%g"]


def test_a_retry_that_is_refused_leaves_the_message(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        store.put(Message("t", b"x"))
        store.wait_dispatched()
        with store.consumer("g", "t", timeout=0) as consumer:
            message = next(consumer)
            store._health.poison("for a test")
            with pytest.raises(StoreUnavailable):
                consumer.retry(message)
            # Reads go on.
            assert list(consumer) == []
