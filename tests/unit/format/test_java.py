"""Our Java arithmetic gives the results of tests/data/java_vectors.jsonl and golden stores."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logquarry.format import java, properties
from tests.helpers.java_vectors import vectors


@pytest.mark.parametrize(("text", "expected"), vectors("hash"))
def test_hash_code(text: str, expected: int) -> None:
    assert java.hash_code(text) == expected


def test_hash_code_of_known_tags() -> None:
    assert java.hash_code("") == 0
    assert java.hash_code("TagA") == 2598919
    assert java.hash_code("polygenelubricants") == java.INT_MIN


@given(st.text(), st.text())
def test_hash_code_of_joined_texts(a: str, b: str) -> None:
    shift = pow(31, len(b.encode("utf-16-be")) // 2)
    assert java.hash_code(a + b) == java.to_int(java.hash_code(a) * shift + java.hash_code(b))


@given(st.text())
def test_hash_code_is_over_utf16_units(text: str) -> None:
    units = text.encode("utf-16-be")
    value = 0
    for i in range(0, len(units), 2):
        value = 31 * value + int.from_bytes(units[i : i + 2], "big")
    assert java.hash_code(text) == java.to_int(value)


def test_positive_hash_code() -> None:
    assert java.positive_hash_code("polygenelubricants") == 0
    assert java.positive_hash_code("TagA") == 2598919
    assert java.hash_code("orders#k1") < 0
    assert java.positive_hash_code("orders#k1") == -java.hash_code("orders#k1")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, 0),
        (0x7FFFFFFF, 0x7FFFFFFF),
        (0x80000000, -0x80000000),
        (0xFFFFFFFF, -1),
        (1 << 32, 0),
        (-1, -1),
        (-0x80000001, 0x7FFFFFFF),
    ],
)
def test_to_int(value: int, expected: int) -> None:
    assert java.to_int(value) == expected


@given(st.integers(-(1 << 70), 1 << 70))
def test_to_long(value: int) -> None:
    wrapped = java.to_long(value)
    assert java.LONG_MIN <= wrapped <= java.LONG_MAX
    assert (wrapped - value) % (1 << 64) == 0


def test_body_crc_loses_its_sign() -> None:
    assert java.body_crc(0xFFFFFFFF) == java.INT_MAX
    assert java.body_crc(0x7FFFFFFF) == java.INT_MAX
    assert java.body_crc(0x80000001) == 1


@pytest.mark.parametrize(("data", "expected"), vectors("utf8"))
def test_bad_utf8_becomes_what_java_makes_of_it(data: str, expected: str) -> None:
    assert bytes.fromhex(data).decode("utf-8", java.UTF8_ERRORS) == expected


@given(st.text())
def test_good_utf8_is_itself(text: str) -> None:
    assert text.encode().decode("utf-8", java.UTF8_ERRORS) == text


def test_only_decoding_has_java_errors() -> None:
    with pytest.raises(UnicodeEncodeError):
        "\ud800".encode("utf-8", java.UTF8_ERRORS)


@pytest.mark.parametrize(("names", "grown", "copied"), vectors("map"))
def test_hash_map_order(names: list[str], grown: list[str], copied: list[str]) -> None:
    assert java.hash_map_order(names) == grown
    assert java.hash_map_order(names, java.table_size_for(len(names))) == copied


@pytest.mark.parametrize(
    ("count", "size"), [(0, 1), (1, 2), (2, 4), (3, 8), (6, 16), (12, 32), (13, 32), (24, 64)]
)
def test_table_size_for(count: int, size: int) -> None:
    assert java.table_size_for(count) == size


@pytest.mark.parametrize("scenario", ["delay", "delay-deliver"])
def test_the_string_of_a_delayed_message_is_in_hash_map_order(golden: Path, scenario: str) -> None:
    """CommitLog puts REAL_TOPIC and REAL_QID into the map and encodes it again."""
    folder = golden / scenario
    stored = {
        message["physicalOffset"]: message["propertiesString"]
        for message in map(json.loads, (folder / "expected.jsonl").read_text("utf-8").splitlines())
    }
    compared = 0
    for line in (folder / "puts.jsonl").read_text("utf-8").splitlines():
        put = json.loads(line)
        given_ = dict(put["input"]["properties"])
        append = put["result"].get("append")
        if append is None or "DELAY" not in given_ or int(given_["DELAY"]) <= 0:
            continue
        made = properties.decode(stored[append["wroteOffset"]])
        names = java.hash_map_order(
            [*given_, *(name for name in ("REAL_TOPIC", "REAL_QID") if name not in given_)],
            java.table_size_for(len(given_)),
        )
        # A level above the highest is capped; the parser leaves out empty levels.
        values = {**given_, **made}
        text = properties.encode({name: values[name] for name in names})
        assert text == stored[append["wroteOffset"]]
        compared += 1
    assert compared > 10
