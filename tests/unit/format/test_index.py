"""Are index files read and written as RocketMQ's own have them?"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logquarry.format import index, java
from logquarry.format.index import IndexEntry, IndexHeader, IndexShape
from tests.conformance.golden_facts import Scenario

INT = st.integers(java.INT_MIN, java.INT_MAX)
LONG = st.integers(java.LONG_MIN, java.LONG_MAX)


def shape_of(scenario: Scenario) -> IndexShape:
    return IndexShape(scenario.params["maxHashSlotNum"], scenario.params["maxIndexNum"])


@pytest.mark.parametrize("name", ["single", "batch", "clean-restart/base", "real-broker"])
def test_golden_headers(golden: Path, name: str) -> None:
    scenario = Scenario(golden / name)
    files = sorted((scenario.store / "index").iterdir())
    assert len(files) == len(scenario.facts["index"])
    for path, said in zip(files, scenario.facts["index"], strict=True):
        data = path.read_bytes()
        assert len(data) == shape_of(scenario).file_size
        header = index.decode_header(data)
        assert list(header) == [
            said[key]
            for key in (
                *("beginTimestamp", "endTimestamp", "beginPhyOffset", "endPhyOffset"),
                *("hashSlotCount", "indexCount"),
            )
        ]
        assert index.encode_header(header) == data[: index.HEADER.size]


@pytest.mark.parametrize("name", ["single", "batch", "clean-restart/base", "real-broker"])
def test_golden_entries_make_chains_that_hold_every_key(golden: Path, name: str) -> None:
    """Each entry is in the chain of its slot, and the chains have all entries."""
    scenario = Scenario(golden / name)
    shape = shape_of(scenario)
    hashes: set[tuple[int, int]] = set()
    for path in sorted((scenario.store / "index").iterdir()):
        data = path.read_bytes()
        header = index.decode_header(data)
        met: set[int] = set()
        for slot in range(shape.slots):
            position = index.HEADER.size + slot * index.SLOT.size
            (number,) = index.SLOT.struct.unpack_from(data, position)
            while number:
                entry = index.decode_entry(data, shape.entry_position(number))
                at = shape.entry_position(number)
                assert index.ENTRY.struct.pack(*entry) == data[at : at + 20]
                assert shape.slot_position(entry.key_hash) == position
                assert entry.previous < number
                met.add(number)
                hashes.add((entry.key_hash, entry.physical_offset))
                number = entry.previous
        assert met == set(range(1, header.entry_count))
    keys = {
        (index.key_hash(message["topic"], key), message["physicalOffset"])
        for message in scenario.expected
        if message["sysFlag"] & 0xC != 0xC
        for key in [message["uniqKey"], *(message["keys"] or "").split(" ")]
        if key
    }
    assert hashes == keys


def test_the_default_shape() -> None:
    assert index.DEFAULT_SHAPE.file_size == 40 + 5_000_000 * 4 + 20_000_000 * 20
    assert IndexShape(3, 5).entry_position(1) == 40 + 12 + 20
    assert IndexShape(3, 5).slot_position(7) == 40 + 4
    assert IndexShape(3, 5).slot_position(-7) == 40 + 4


def test_key_hashes() -> None:
    assert index.key_text("orders", "k 1") == "orders#k 1"
    assert index.key_hash("", "") == 35
    assert index.key_hash("orders", "k1") == abs(java.hash_code("orders#k1"))


@given(LONG, LONG, LONG, LONG, INT, INT)
def test_headers_come_back(
    begin: int, end: int, first: int, last: int, used: int, count: int
) -> None:
    data = index.encode_header(IndexHeader(begin, end, first, last, used, count))
    assert len(data) == 40
    assert index.decode_header(data) == (begin, end, first, last, used, max(1, count))


@given(INT, LONG, INT, INT)
def test_entries_come_back(key_hash: int, offset: int, seconds: int, previous: int) -> None:
    entry = IndexEntry(key_hash, offset, seconds, previous)
    assert index.decode_entry(b"ab" + index.ENTRY.struct.pack(*entry), 2) == entry
