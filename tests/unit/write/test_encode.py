"""How the store encodes a message, and which messages it refuses."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from logquarry.config import StoreConfig
from logquarry.errors import MessageRejected, UsageError
from logquarry.format import frame, java, sys_flag
from logquarry.format.frame import Frame
from logquarry.message import Message
from logquarry.stored_message import StoredMessage
from logquarry.write.encode import Encoded, MessageEncoder

NOW = 1_700_000_000_123
HEART = "\N{HEAVY BLACK HEART}"
MULTI = {"enable_multi_dispatch": True, "enable_lmq": True}


def encode(message: Message, **settings: Any) -> Encoded:
    return MessageEncoder(StoreConfig(**settings), lambda: NOW).encode(message)


def stored(message: Message, **settings: Any) -> StoredMessage:
    encoded = encode(message, **settings)
    encoded.place(5, 300, NOW + 1)
    found = frame.decode_at(bytes(encoded.data), 0, base=300)
    assert isinstance(found, Frame)
    return StoredMessage(found)


def rejected(message: Message, **settings: Any) -> tuple[str, str]:
    with pytest.raises(MessageRejected) as error:
        encode(message, **settings)
    return error.value.status, error.value.reason


def test_defaults() -> None:
    message = stored(Message("orders", b"body"))
    assert (message.topic, message.body, message.queue_id) == ("orders", b"body", 0)
    assert (message.queue_offset, message.physical_offset) == (5, 300)
    assert (message.born_timestamp, message.store_timestamp) == (NOW, NOW + 1)
    assert (message.born_host, message.store_host) == ("127.0.0.1:0", "127.0.0.1:10911")
    assert (message.flag, message.sys_flag, message.reconsume_times) == (0, 0, 0)
    assert message.properties_string == ""


def test_every_field() -> None:
    message = Message(
        "orders",
        memoryview(b"body"),
        queue_id=-3,
        flag=7,
        sys_flag=sys_flag.TRANSACTION_COMMIT,
        born_timestamp=11,
        born_host="[2001:db8::1]:9",
        store_host=frame.host_bytes("10.0.0.1:80"),
        reconsume_times=2,
        prepared_transaction_offset=99,
    )
    found = stored(message)
    assert (found.queue_id, found.flag, found.body) == (-3, 7, b"body")
    assert found.sys_flag == sys_flag.TRANSACTION_COMMIT | sys_flag.BORN_HOST_V6
    assert found.born_host == "[2001:db8:0:0:0:0:0:1]:9"
    assert found.store_host == "10.0.0.1:80"
    assert (found.reconsume_times, found.prepared_transaction_offset) == (2, 99)


def test_order_of_the_properties() -> None:
    message = Message(
        "t", tags="paid", keys="k1 k2", properties={"z": "1", "a": "2"}, wait_store_ok=False
    )
    assert stored(message).properties_string == (
        "z\x011\x02a\x012\x02KEYS\x01k1 k2\x02TAGS\x01paid\x02WAIT\x01false"
    )
    assert not encode(message).wait


def test_a_string_is_written_as_given() -> None:
    odd = b"novalue\x02k\x01\x02\x02TAGS\x01x\x02\xff"
    assert stored(Message("t", properties_string=odd)).frame.properties == odd
    with pytest.raises(UsageError, match="properties_string"):
        encode(Message("t", properties_string="", tags="x"))


@pytest.mark.parametrize("wait", ["true", "True", "false", "no"])
def test_wait_is_found_in_a_string(wait: str) -> None:
    assert encode(Message("t", properties_string=f"WAIT\x01{wait}")).wait is (
        wait.lower() == "true"
    )


def test_a_delayed_message_goes_to_its_level() -> None:
    message = stored(Message("orders", queue_id=3, tags="x", delay_level=2))
    assert (message.topic, message.queue_id) == ("SCHEDULE_TOPIC_XXXX", 1)
    assert message.properties == {
        "TAGS": "x",
        "DELAY": "2",
        "REAL_TOPIC": "orders",
        "REAL_QID": "3",
    }


def test_a_level_that_is_not_capped_keeps_its_spelling() -> None:
    message = stored(Message("orders", properties_string="DELAY\x01+02"))
    assert (message.queue_id, message.properties["DELAY"]) == (1, "+02")
    message = stored(Message("orders", properties_string="DELAY\x01999"))
    assert (message.queue_id, message.properties["DELAY"]) == (17, "18")


def test_the_order_of_a_string_made_anew() -> None:
    # As a broker parses a string (16 buckets), and as a map is copied (2 for one property).
    given = {f"key-{n}": "v" for n in range(3)}
    copied = stored(Message("t", properties=given, delay_level=1)).properties
    names = [*given, "DELAY", "REAL_TOPIC", "REAL_QID"]
    assert list(copied) == java.hash_map_order(names, java.table_size_for(4))
    string = "\x02".join(f"{name}\x01v" for name in given) + "\x02DELAY\x011"
    parsed = stored(Message("t", properties_string=string)).properties
    assert list(parsed) == java.hash_map_order(names, 16)


@pytest.mark.parametrize("kind", [sys_flag.TRANSACTION_PREPARED, sys_flag.TRANSACTION_ROLLBACK])
def test_an_open_transaction_is_not_delayed(kind: int) -> None:
    assert stored(Message("t", delay_level=1, sys_flag=kind)).topic == "t"
    assert stored(Message("t", properties={"DELAY": "abc"}, sys_flag=kind)).topic == "t"
    assert not encode(Message("t", sys_flag=kind)).hosts.advances


def test_a_delay_that_is_no_number() -> None:
    message = Message("t", properties={"DELAY": "abc"})
    assert rejected(message) == ("MESSAGE_ILLEGAL", "delay")


@pytest.mark.parametrize(
    "topic",
    ["", ".", "..", "a/b", "../../../x", "a\0b", "a\nb", "\x85", "é" * 64, "x" * 128, "\ud800"],
)
def test_topics_that_are_no_names(topic: str) -> None:
    assert rejected(Message(topic)) == ("MESSAGE_ILLEGAL", "topic")


def test_the_brokers_rule_for_topics() -> None:
    for topic in ("主题-ü", "x" * 127, "...", "a b", "é" * 63):
        assert stored(Message(topic)).topic == topic
    assert rejected(Message("主题-ü"), topic_check="rocketmq-broker") == (
        "MESSAGE_ILLEGAL",
        "topic",
    )
    assert encode(Message("%RETRY%a_b-1|2"), topic_check="rocketmq-broker").hosts.advances


def test_properties_are_counted_twice() -> None:
    longest = 0x7FFF
    assert len(stored(Message("t", properties_string="x" * longest)).properties_string) == longest
    characters = Message("t", properties_string="x" * (longest + 1))
    assert rejected(characters) == ("MESSAGE_ILLEGAL", "properties")
    in_bytes = Message("t", properties_string="é" * 16384)
    assert rejected(in_bytes) == ("PROPERTIES_SIZE_EXCEEDED", "properties")
    # Each has two UTF-16 units and four bytes.
    pairs = Message("t", properties_string="\U0001f600" * 16384)
    assert rejected(pairs) == ("MESSAGE_ILLEGAL", "properties")


def test_the_whole_frame_is_bounded() -> None:
    room = 1000 - len(encode(Message("t")).data)
    assert len(encode(Message("t", bytes(room)), max_message_size=1000).data) == 1000
    too_large = Message("t", bytes(room + 1))
    assert rejected(too_large, max_message_size=1000) == ("MESSAGE_ILLEGAL", "too_large")


@pytest.mark.parametrize(
    "message",
    [
        Message("t", sys_flag=sys_flag.BORN_HOST_V6),
        Message("t", sys_flag=sys_flag.STORE_HOST_V6, born_host="[::1]:1"),
        Message("t", born_host="nowhere"),
        Message("t", store_host="1.2.3.4"),
        Message("t", store_host="1.2.3.4:65536"),
        Message("t", born_host="[::1]:-1"),
        Message("t", store_host=b"1234567"),
    ],
)
def test_hosts_that_are_none(message: Message) -> None:
    assert rejected(message) == ("MESSAGE_ILLEGAL", "hosts")


def test_numbers_that_do_not_fit() -> None:
    with pytest.raises(UsageError, match="queue_id is 2147483648, and must be at most"):
        encode(Message("t", queue_id=1 << 31))


def test_multi_dispatch_names_are_checked() -> None:
    message = Message("t", properties={"INNER_MULTI_DISPATCH": "%LMQ%a,../x"})
    assert rejected(message, **MULTI) == ("MESSAGE_ILLEGAL", "topic")
    assert encode(message).copies is None
    long = Message("t", properties={"INNER_MULTI_DISPATCH": "%LMQ%" + "n" * 200})
    assert encode(long, **MULTI).copies is not None


def test_multi_dispatch_makes_the_string_anew() -> None:
    properties = {"WAIT": "false", "INNER_MULTI_DISPATCH": "%LMQ%a,b,", "k": HEART}
    encoded = encode(Message("t", queue_id=4, properties=properties), **MULTI)
    assert encoded.copies is not None and not encoded.wait
    assert encoded.copies.keys == (("%LMQ%a", 0), ("b", 4))
    encoded.data = encoded.copies.frame(0, [7, 8])
    found = frame.decode_at(bytes(encoded.data), 0, base=0)
    assert isinstance(found, Frame)
    properties |= {"INNER_MULTI_QUEUE_OFFSET": "7,8"}
    del properties["WAIT"]
    assert StoredMessage(found).properties == properties


def test_multi_dispatch_that_makes_it_too_large() -> None:
    properties = {"INNER_MULTI_DISPATCH": "a", "k": "x" * 32_730}
    copies = encode(Message("t", properties=properties), **MULTI).copies
    assert copies is not None
    with pytest.raises(MessageRejected) as error:
        copies.frame(0, [0])
    assert (error.value.status, error.value.reason) == ("UNKNOWN_ERROR", "properties")


def test_a_rejection_survives_pickling() -> None:
    with pytest.raises(MessageRejected) as error:
        encode(Message("/"))
    again = pickle.loads(pickle.dumps(error.value))
    assert (str(again), again.status, again.reason) == (
        str(error.value),
        "MESSAGE_ILLEGAL",
        "topic",
    )


def test_messages_are_values() -> None:
    message = Message("t", b"x", keys="k")
    assert message == message._replace(body=b"x") != message._replace(body=b"y")
    assert pickle.loads(pickle.dumps(message)) == message
    assert repr(message).startswith("Message(topic='t', body=b'x', queue_id=0,")
    with pytest.raises(AttributeError):
        message.topic = "other"  # type: ignore[misc]
