"""Is the wire form of a batch read and written as RocketMQ's clients have it?

Inner batches of RocketMQ 5: a frame and its messages.
"""

from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logquarry.format import batch, java, sys_flag
from logquarry.format.batch import INNER_BATCH, BatchItem, is_inner_batch, queue_count, unwrap
from logquarry.format.frame import MAGIC_V2, Frame
from logquarry.stored_message import StoredMessage
from logquarry.testing import strategies

ITEMS = st.builds(
    BatchItem,
    body=st.binary(max_size=40),
    properties=strategies.property_strings(),
    flag=st.integers(-(1 << 31), (1 << 31) - 1),
)


def test_golden_batches_decode_and_encode_to_themselves(golden: Path) -> None:
    messages: dict[tuple[str, int, int], dict[str, object]] = {}
    for line in (golden / "batch" / "expected.jsonl").read_text("utf-8").splitlines():
        message = json.loads(line)
        messages[message["physicalOffset"]] = message
    compared = 0
    for line in (golden / "batch" / "puts.jsonl").read_text("utf-8").splitlines():
        put = json.loads(line)
        if put["input"]["kind"] != "batch" or not put["result"]["isOk"]:
            continue
        wire = base64.b64decode(put["input"]["body"])
        items = list(batch.decode(wire))
        assert batch.encode(items) == wire
        assert len(items) == put["result"]["append"]["msgNum"]
        offset = put["result"]["append"]["wroteOffset"]
        for item in items:
            message = messages[offset]
            assert base64.b64decode(str(message["body"])) == item.body
            assert message["flag"] == item.flag
            assert str(message["propertiesString"]).startswith(item.properties.decode())
            assert (item.magic, item.body_crc) == (0, 0)
            offset += int(str(message["size"]))
            compared += 1
    assert compared > 100


@given(st.lists(ITEMS, max_size=6))
def test_what_was_encoded_comes_back(items: list[BatchItem]) -> None:
    wire = batch.encode(items)
    assert list(batch.decode(wire)) == items
    assert len(wire) == sum(item.size for item in items)


@given(st.lists(ITEMS, min_size=1, max_size=4), st.data())
def test_what_is_cut_off_is_refused(items: list[BatchItem], data: st.DataObject) -> None:
    wire = batch.encode(items)
    ends = {sum(item.size for item in items[:n]) for n in range(len(items) + 1)}
    cut = data.draw(st.integers(0, len(wire)).filter(lambda n: n not in ends))
    with pytest.raises(ValueError, match="at "):
        list(batch.decode(wire[:cut]))


@given(st.binary(max_size=100))
def test_garbage_is_decoded_or_refused(garbage: bytes) -> None:
    try:
        items = list(batch.decode(garbage))
    except ValueError:
        return
    assert batch.encode(items) == garbage


@pytest.mark.parametrize(
    ("at", "value"), [(0, 0), (0, 30), (16, -1), (16, 0x7FFFFFFF), (16, 9), (24, -1), (24, 0x7FFF)]
)
def test_lengths_that_cannot_be(at: int, value: int) -> None:
    wire = bytearray(batch.encode([BatchItem(b"body", b"a\x01b")]))
    width = 2 if at == 24 else 4
    wire[at : at + width] = value.to_bytes(width, "big", signed=True)
    with pytest.raises(ValueError, match="at 0"):
        list(batch.decode(bytes(wire)))


@pytest.mark.parametrize(("at", "name", "left"), [(16, "BODYLEN", 7), (24, "PROPERTIESLEN", 3)])
def test_a_length_is_compared_with_the_bytes_after_it(at: int, name: str, left: int) -> None:
    """The bytes of the fields that must follow a body do not count."""
    wire = bytearray(batch.encode([BatchItem(b"body", b"a\x01b")]))
    wire[at + 1 if at == 24 else at + 3] = 90
    with pytest.raises(ValueError, match=f"^at 0: {name} 90, but {left} bytes are left$"):
        list(batch.decode(bytes(wire)))


@pytest.mark.parametrize("item", [BatchItem(b"", b"x" * 32768), BatchItem(b"", flag=1 << 31)])
def test_what_fits_no_field_is_refused(item: BatchItem) -> None:
    with pytest.raises(ValueError, match="width"):
        batch.encode([item])


def test_an_empty_batch() -> None:
    assert batch.encode([]) == b""
    assert list(batch.decode(b"")) == []


INNER_ITEMS = (
    BatchItem(b"one", b"KEYS\x01k1\x02TAGS\x01a\x02", flag=3),
    BatchItem(b"", b"", flag=-1),
    BatchItem(b"three", b"UNIQ_KEY\x01u3\x02"),
)


def _frame(body: bytes | None = None, **changes: Any) -> Frame:
    values: dict[str, Any] = {
        "topic": b"Batch",
        "body": batch.encode(INNER_ITEMS) if body is None else body,
        "properties": b"INNER_NUM\x013\x02INNER_BASE\x017\x02",
        "queue_offset": 7,
        "physical_offset": 1000,
        "sys_flag": INNER_BATCH,
        "flag": 9,
        **changes,
    }
    return Frame(**values).with_crc()


def test_each_message_stands_alone() -> None:
    found = unwrap(_frame())
    assert [one.body for one in found] == [b"one", b"", b"three"]
    assert [one.properties for one in found] == [item.properties for item in INNER_ITEMS]
    assert [one.flag for one in found] == [3, -1, 0]
    assert [one.queue_offset for one in found] == [7, 8, 9]
    assert {one.physical_offset for one in found} == {1000}
    assert {one.sys_flag for one in found} == {0}
    assert [one.body_crc for one in found] == [
        zlib.crc32(body) & java.INT_MAX for body in (b"one", b"", b"three")
    ]


def test_other_fields_are_those_of_the_frame() -> None:
    outer = _frame(queue_id=3, born_timestamp=5, store_timestamp=6, magic=MAGIC_V2)
    for one in unwrap(outer):
        assert (one.topic, one.queue_id, one.born_timestamp) == (b"Batch", 3, 5)
        assert (one.store_timestamp, one.magic) == (6, MAGIC_V2)


def test_a_compressed_batch_is_decompressed() -> None:
    flag = INNER_BATCH | sys_flag.COMPRESSED | sys_flag.COMPRESSION_ZLIB
    found = unwrap(_frame(zlib.compress(batch.encode(INNER_ITEMS)), sys_flag=flag))
    assert [one.body for one in found] == [b"one", b"", b"three"]
    assert {one.sys_flag for one in found} == {0}


@pytest.mark.parametrize(
    "changes",
    [
        {"sys_flag": sys_flag.INNER_BATCH},
        {"sys_flag": sys_flag.NEED_UNWRAP},
        {"sys_flag": 0},
        {"body": b""},
        {"body": batch.encode(INNER_ITEMS)[:-1]},
        {"body": b"no batch at all, but more than an item"},
        {"body": b"broken", "sys_flag": INNER_BATCH | sys_flag.COMPRESSED},
        {"queue_offset": java.LONG_MAX - 1},
    ],
)
def test_a_frame_that_cannot_be_taken_apart_stays_whole(changes: dict[str, Any]) -> None:
    whole = _frame(**changes)
    assert unwrap(whole) == (whole,)


def test_a_batch_above_the_limit_stays_whole() -> None:
    whole = _frame()
    room = sum(one.size for one in unwrap(whole))
    assert len(unwrap(whole, limit=room)) == 3
    assert unwrap(whole, limit=room - 1) == (whole,)


def test_queue_offsets_advance_by_inner_num() -> None:
    assert queue_count(_frame()) == 3
    assert queue_count(_frame(properties=b"INNER_NUM\x015\x02INNER_BASE\x017\x02")) == 5
    assert queue_count(_frame(properties=b"INNER_NUM\x01x\x02")) == 1
    assert queue_count(_frame(properties=b"INNER_NUM\x0199999\x02")) == 0x7FFF
    assert queue_count(_frame(properties=b"INNER_NUM\x015\x02", sys_flag=0)) == 1


def test_stored_messages_unwrap() -> None:
    message = StoredMessage(_frame(), broker="b")
    first, _, third = message.unwrap()
    assert (first.keys, first.tags, first.queue_offset, first.broker) == ("k1", "a", 7, "b")
    assert (third.uniq_key, third.content()) == ("u3", b"three")
    assert first.unwrap() == (first,) and not is_inner_batch(first.sys_flag)
