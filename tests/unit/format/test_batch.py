"""Is the wire form of a batch read and written as RocketMQ's clients have it?"""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logquarry.format import batch
from logquarry.format.batch import BatchItem
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


@pytest.mark.parametrize("item", [BatchItem(b"", b"x" * 32768), BatchItem(b"", flag=1 << 31)])
def test_what_fits_no_field_is_refused(item: BatchItem) -> None:
    with pytest.raises(ValueError, match="width"):
        batch.encode([item])


def test_an_empty_batch() -> None:
    assert batch.encode([]) == b""
    assert list(batch.decode(b"")) == []
