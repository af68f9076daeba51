"""Is a property string read as RocketMQ 4.9.3's own parser reads it?"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logquarry.format import properties
from logquarry.testing import strategies
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
