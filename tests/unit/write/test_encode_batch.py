"""How the store encodes batches."""

from __future__ import annotations

from typing import Any

import pytest

from logquarry.config import StoreConfig
from logquarry.errors import MessageRejected, UsageError
from logquarry.format import batch, frame, sys_flag
from logquarry.format.batch import BatchItem
from logquarry.format.frame import Frame
from logquarry.message import Message
from logquarry.write.encode import Encoded, MessageEncoder
from logquarry.write.encode_batch import encode_batch, encode_messages


def encode(
    items: list[BatchItem] | bytes, message: Message | None = None, **settings: Any
) -> Encoded:
    config = StoreConfig(**settings)
    wire = items if isinstance(items, bytes) else batch.encode(items)
    return encode_batch(MessageEncoder(config, lambda: 1), config, wire, message or Message("t"))


def of_messages(*messages: Message) -> Encoded:
    config = StoreConfig()
    return encode_messages(MessageEncoder(config, lambda: 1), config, messages)


def frames(encoded: Encoded) -> list[Frame]:
    encoded.place(4, 1000, 99)
    found = []
    for start in encoded.starts:
        outcome = frame.decode_at(bytes(encoded.data), start, base=1000)
        assert isinstance(outcome, Frame)
        found.append(outcome)
    return found


def rejected(*args: Any, **settings: Any) -> tuple[str, str]:
    with pytest.raises(MessageRejected) as error:
        encode(*args, **settings)
    return error.value.status, error.value.reason


def test_frames_stand_one_after_the_other() -> None:
    items = [BatchItem(b"one", b"k\x01v", 3), BatchItem(b"", b"", -1), BatchItem(b"three")]
    message = Message("t", queue_id=2, reconsume_times=1, born_timestamp=7, born_host="[::1]:5")
    found = frames(encode(items, message))
    assert [(f.body, f.properties, f.flag) for f in found] == [
        (item.body, item.properties, item.flag) for item in items
    ]
    assert [f.queue_offset for f in found] == [4, 5, 6]
    assert [f.store_timestamp for f in found] == [99, 99, 99]
    assert {(f.queue_id, f.reconsume_times, f.born_timestamp) for f in found} == {(2, 1, 7)}
    assert {f.sys_flag for f in found} == {sys_flag.BORN_HOST_V6}


@pytest.mark.parametrize(
    ("own", "shared", "expected"),
    [
        (b"", {"b": "1"}, b"b\x011"),
        (b"k\x01v", {}, b"k\x01v"),
        (b"k\x01v", {"b": "1"}, b"k\x01v\x02b\x011"),
        (b"k\x01v\x02", {"b": "1"}, b"k\x01v\x02b\x011"),
        (b"", {}, b""),
    ],
)
def test_the_batchs_properties_come_last(
    own: bytes, shared: dict[str, str], expected: bytes
) -> None:
    (found,) = frames(encode([BatchItem(b"", own)], Message("t", properties=shared)))
    assert found.properties == expected


def test_sizes_and_crcs_of_the_wire_form_are_not_looked_at() -> None:
    wire = bytearray(batch.encode([BatchItem(b"body", b"", 1, 77, 88)]))
    wire[:4] = bytes(4)
    (found,) = frames(encode(bytes(wire)))
    assert found.body == b"body"


@pytest.mark.parametrize("cut", range(1, 30))
def test_a_wire_form_cut_short(cut: int) -> None:
    wire = batch.encode([BatchItem(b"body", b"k\x01v1")])
    assert len(wire) == 30
    assert rejected(wire[:cut]) == ("MESSAGE_ILLEGAL", "truncated")


def test_negative_lengths() -> None:
    wire = bytearray(batch.encode([BatchItem(b"body")]))
    wire[16:20] = b"\xff\xff\xff\xff"
    assert rejected(bytes(wire)) == ("MESSAGE_ILLEGAL", "truncated")
    wire = bytearray(batch.encode([BatchItem(b"body")]))
    wire[-2:] = b"\xff\xff"
    assert rejected(bytes(wire)) == ("MESSAGE_ILLEGAL", "truncated")


def test_properties_that_are_too_long_together() -> None:
    items = [BatchItem(b"", b"x" * 30_000)]
    message = Message("t", properties={"k": "y" * 3_000})
    assert rejected(items, message) == ("PROPERTIES_SIZE_EXCEEDED", "properties")
    message = Message("t", properties={"k": "y" * 32_767})
    assert rejected([], message) == ("PROPERTIES_SIZE_EXCEEDED", "properties")


def test_what_a_batch_cannot_be() -> None:
    item = [BatchItem(b"")]
    prepared = Message("t", sys_flag=sys_flag.TRANSACTION_PREPARED)
    assert rejected(item, prepared) == ("MESSAGE_ILLEGAL", "transaction")
    assert rejected(item, Message("t", delay_level=1)) == ("MESSAGE_ILLEGAL", "delay")
    assert rejected(item, Message("t", properties={"DELAY": "x"})) == ("MESSAGE_ILLEGAL", "delay")
    assert rejected(item, Message("a/b")) == ("MESSAGE_ILLEGAL", "topic")
    with pytest.raises(UsageError, match="wire form"):
        encode(item, Message("t", b"body"))


def test_too_many_bytes() -> None:
    items = [BatchItem(bytes(400)), BatchItem(bytes(400))]
    assert rejected(items, max_message_size=800) == ("MESSAGE_ILLEGAL", "too_large")
    assert rejected(items, max_message_size=900) == ("MESSAGE_ILLEGAL", "too_large")
    assert len(encode(items, max_message_size=984).data) == 984


def test_an_empty_batch() -> None:
    assert rejected([]) == ("MESSAGE_ILLEGAL", "count")
    with pytest.raises(MessageRejected, match="the batch has no messages"):
        of_messages()


def test_messages_as_a_batch() -> None:
    one = Message("t", b"1", queue_id=3, tags="x", flag=5, born_timestamp=9)
    two = Message("t", b"2", queue_id=3, keys="k", born_timestamp=9, wait_store_ok=False)
    encoded = of_messages(one, two)
    assert not encoded.wait
    assert [(f.body, f.flag, f.properties) for f in frames(encoded)] == [
        (b"1", 5, b"TAGS\x01x"),
        (b"2", 0, b"KEYS\x01k\x02WAIT\x01false"),
    ]
    assert of_messages(one).wait


@pytest.mark.parametrize(
    "other",
    [
        Message("other"),
        Message("t", queue_id=1),
        Message("t", born_host="1.1.1.1:1"),
        Message("t", reconsume_times=1),
    ],
)
def test_messages_that_are_no_batch(other: Message) -> None:
    with pytest.raises(UsageError, match="messages of a batch have one"):
        of_messages(Message("t"), other)


def test_a_delayed_message_in_a_batch() -> None:
    with pytest.raises(MessageRejected) as error:
        of_messages(Message("t", delay_level=3))
    assert error.value.reason == "delay"
