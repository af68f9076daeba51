"""Is a property string read as RocketMQ 4.9.3's own parser reads it?

Is the tags code what RocketMQ's dispatcher computes, and are delay levels read as there?
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logquarry.errors import UsageError
from logquarry.format import java, properties
from logquarry.format import properties as props
from logquarry.format.properties import SCHEDULE_TOPIC
from logquarry.testing import strategies
from tests.conformance.golden_facts import SOUND, Scenario
from tests.helpers.java_vectors import vectors


def string2message_properties(text: str) -> dict[str, str]:
    """MessageDecoder.string2messageProperties of 4.9.3, line by line."""
    result: dict[str, str] = {}
    length = len(text)
    index = 0
    while index < length:
        new_index = text.find("\x02", index)
        if new_index < 0:
            new_index = length
        if new_index - index >= 3:
            separator = text.find("\x01", index)
            if index < separator < new_index - 1:
                result[text[index:separator]] = text[separator + 1 : new_index]
        index = new_index + 1
    return result


@pytest.mark.parametrize(("text", "expected"), vectors("props"))
def test_what_java_says(text: str, expected: dict[str, str]) -> None:
    assert properties.decode(text) == expected
    assert string2message_properties(text) == expected


@given(
    st.text("\x01\x02ab😀", max_size=20)
    | strategies.property_strings().map(lambda data: data.decode("utf-8", "replace"))
)
def test_what_a_transcription_of_java_says(text: str) -> None:
    assert properties.decode(text) == string2message_properties(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("a\x01b", {"a": "b"}),
        ("a\x01b\x02", {"a": "b"}),
        ("a\x01b\x02c\x01d", {"a": "b", "c": "d"}),
        ("a\x01b\x02\x02c\x01d\x02\x02", {"a": "b", "c": "d"}),
        ("a\x01\x02c\x01d", {"c": "d"}),
        ("\x01b", {}),
        ("ab", {}),
        ("a\x01b\x01c", {"a": "b\x01c"}),
        ("a\x011\x02b\x012\x02a\x013", {"a": "3", "b": "2"}),
    ],
)
def test_odd_strings(text: str, expected: dict[str, str]) -> None:
    assert properties.decode(text) == expected
    assert list(properties.decode(text)) == list(expected)


@given(strategies.properties_maps())
def test_what_was_encoded_comes_back(pairs: dict[str, str]) -> None:
    text = properties.encode(pairs)
    assert properties.decode(text) == pairs
    assert list(properties.decode(text)) == list(pairs)
    assert not text.endswith(properties.PROPERTY_SEPARATOR)
    assert properties.decode_bytes(text.encode()) == pairs


@given(strategies.property_strings())
def test_no_bytes_raise(data: bytes) -> None:
    for key, value in properties.decode_bytes(data).items():
        assert key
        assert value


def test_bytes_that_are_no_utf8() -> None:
    assert properties.decode_bytes(b"a\x01\xff\x02\xed\xa0\x80\x01c") == {"a": "�", "�": "c"}


def test_split_keys() -> None:
    assert properties.split_keys(" a  b c ") == ["a", "b", "c"]
    assert properties.split_keys("") == []
    assert properties.split_keys("one\ttwo") == ["one\ttwo"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, None),
        ("*", None),
        ("", None),
        (" ", None),
        ("paid", {"paid"}),
        (" paid || sent ", {"paid", "sent"}),
        ("\tpaid\x01||", {"paid"}),
        ("paid || *", {"paid", "*"}),
        (" * ", {"*"}),
        ("||", None),
        (" || ", None),
        ("a|b", {"a|b"}),
        ("\u00a0", {"\u00a0"}),
    ],
)
def test_tag_expressions(text: str | None, expected: set[str] | None) -> None:
    assert properties.parse_tags(text) == expected


LEVELS = props.parse_levels(props.DEFAULT_LEVELS)


@pytest.mark.parametrize("name", [*SOUND, "v3-delay-unloaded"])
def test_golden_dispatch_tags_codes(golden: Path, name: str) -> None:
    scenario = Scenario(golden / name)
    levels = scenario.config.delay_levels_ms
    for message in scenario.expected:
        found = props.tags_code(
            message["topic"],
            props.decode(message["propertiesString"]),
            message["storeTimestamp"],
            levels,
        )
        assert found == message["dispatchTagsCode"]


def test_the_default_levels() -> None:
    minutes = [60_000 * minute for minute in (*range(1, 11), 20, 30)]
    assert (1_000, 5_000, 10_000, 30_000, *minutes, 3_600_000, 7_200_000) == LEVELS


@pytest.mark.parametrize(
    ("text", "expected"), [("", ()), ("2s", (2_000,)), (" 1d  3m ", (86_400_000, 180_000))]
)
def test_parse_levels(text: str, expected: tuple[int, ...]) -> None:
    assert props.parse_levels(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "1",
        "s",
        "1x",
        "1.5s",
        "-1s",
        "1s,2s",
        "١s",
        "²s",
        pytest.param("1" * 5_000 + "s", id="long"),
    ],
)
def test_what_is_no_level(text: str) -> None:
    with pytest.raises(UsageError, match="delay level"):
        props.parse_levels(text)


@pytest.mark.parametrize(("text", "expected"), vectors("int"))
def test_parse_int(text: str, expected: int | None) -> None:
    assert props.parse_int(text) == expected


@given(st.text(max_size=6) | st.integers(-(1 << 34), 1 << 34).map(str))
def test_parse_int_raises_nothing(text: str) -> None:
    value = props.parse_int(text)
    assert value is None or java.INT_MIN <= value <= java.INT_MAX


@pytest.mark.parametrize(
    ("topic", "pairs", "levels", "expected"),
    [
        ("t", {}, LEVELS, 0),
        ("t", {"TAGS": ""}, LEVELS, 0),
        ("t", {"TAGS": "TagA"}, LEVELS, 2598919),
        ("t", {"TAGS": "polygenelubricants"}, LEVELS, java.INT_MIN),
        ("t", {"TAGS": "TagA", "DELAY": "1"}, LEVELS, 2598919),
        (SCHEDULE_TOPIC, {"TAGS": "TagA"}, LEVELS, 2598919),
        (SCHEDULE_TOPIC, {"TAGS": "TagA", "DELAY": "0"}, LEVELS, 2598919),
        (SCHEDULE_TOPIC, {"TAGS": "TagA", "DELAY": "-3"}, LEVELS, 2598919),
        (SCHEDULE_TOPIC, {"TAGS": "TagA", "DELAY": "no"}, LEVELS, 2598919),
        (SCHEDULE_TOPIC, {"TAGS": "TagA", "DELAY": "1"}, LEVELS, 50_000 + 1_000),
        (SCHEDULE_TOPIC, {"DELAY": "+2"}, LEVELS, 50_000 + 5_000),
        (SCHEDULE_TOPIC, {"DELAY": "18"}, LEVELS, 50_000 + 7_200_000),
        (SCHEDULE_TOPIC, {"DELAY": "99"}, LEVELS, 50_000 + 7_200_000),
        (SCHEDULE_TOPIC, {"TAGS": "TagA", "DELAY": "1"}, (), 2598919),
    ],
)
def test_tags_code(
    topic: str, pairs: dict[str, str], levels: tuple[int, ...], expected: int
) -> None:
    assert props.tags_code(topic, pairs, 50_000, levels) == expected


def test_a_delivery_time_wraps_as_a_long_does() -> None:
    code = props.tags_code(SCHEDULE_TOPIC, {"DELAY": "1"}, java.LONG_MAX, LEVELS)
    assert code == java.LONG_MIN + 999


CRC = b"__CRC32#\x010123456789\x02"


@pytest.mark.parametrize(
    ("properties", "left"),
    [
        (b"", b""),
        (CRC, b""),
        (CRC[:-1], b""),
        (CRC + CRC, b""),
        (b"a\x01b", b"a\x01b\x02"),
        (b"a\x01b\x02" + CRC, b"a\x01b\x02"),
        (CRC + b"a\x01b\x02" + CRC, b"a\x01b\x02"),
        (b"a\x01x__CRC32#\x01y\x02" + CRC, b"a\x01x__CRC32#\x01y\x02"),
        (b"x__CRC32#\x01y\x02", b"x__CRC32#\x01y\x02"),
        (b"a\x01__CRC32#\x02" + CRC + b"c\x01d", b"a\x01__CRC32#\x02c\x01d\x02"),
    ],
)
def test_each_old_crc_is_removed(properties: bytes, left: bytes) -> None:
    assert props.with_crc_room(properties) == left + bytes(props.CRC_SIZE)
