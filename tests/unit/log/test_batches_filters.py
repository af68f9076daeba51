"""Do filters take the right messages, and refuse values that cannot be meant?"""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logquarry.errors import UsageError
from logquarry.format.frame import Frame
from logquarry.log import batches, columns
from logquarry.log.batches import MessageFilter
from logquarry.log.codec import Window
from logquarry.log.columns import Decoding
from logquarry.testing import strategies
from tests.helpers.twins import both, sound_rows

ITEMS = (
    Frame(topic=b"orders", queue_id=0, queue_offset=5, store_timestamp=100, body=b"alpha beta",
          properties=b"TAGS\x01paid\x02KEYS\x01k1 k2"),
    Frame(topic=b"orders", queue_id=1, queue_offset=6, store_timestamp=200, body=b"\xe2\x82\xac 5",
          properties=b"TAGS\x01sent\x02UNIQ_KEY\x01u1"),
    Frame(topic=b"payments", queue_id=1, queue_offset=7, store_timestamp=300, body=b"gamma"),
    Frame(topic=b"pay", queue_id=-1, queue_offset=0, store_timestamp=400,
          properties=b"KEYS\x01k2\x02TAGS\x01paid"),
)  # fmt: skip


def taken(wanted: MessageFilter) -> list[int]:
    log = strategies.place([item.with_crc() for item in ITEMS], file_size=2000)
    window = Window.of(log.files[0], 0)
    rows = sound_rows(window)
    at = {item.physical_offset: number for number, item in enumerate(log.frames)}
    fast, plain = both(lambda: [row[0] for row in wanted.select(window, rows, Decoding()).tolist()])
    assert fast == plain
    return [at[position] for position in fast]


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ({}, [0, 1, 2, 3]),
        ({"topics": frozenset({"orders"})}, [0, 1]),
        ({"topics": frozenset({"orders", "pay"})}, [0, 1, 3]),
        ({"topics": frozenset()}, []),
        ({"topic_pattern": "pay"}, [3]),
        ({"topic_pattern": "pay.*"}, [2, 3]),
        ({"topic_pattern": "orders|pay"}, [0, 1, 3]),
        ({"topics": frozenset({"pay"}), "topic_pattern": "o.*"}, []),
        ({"queue_ids": frozenset({1})}, [1, 2]),
        ({"queue_ids": frozenset({-1, 7})}, [3]),
        ({"queue_ids": frozenset({1 << 40})}, []),
        ({"queues": frozenset({("orders", 1), ("payments", 1)})}, [1, 2]),
        ({"queues": frozenset({("orders", 7)})}, []),
        ({"tags": frozenset({"paid"})}, [0, 3]),
        ({"tags": frozenset({"paid", "sent"})}, [0, 1, 3]),
        ({"keys": frozenset({"k2"})}, [0, 3]),
        ({"keys": frozenset({"u1"})}, [1]),
        ({"keys": frozenset({"k1 k2"})}, []),
        ({"keys": frozenset({""})}, []),
        ({"since_ms": 200}, [1, 2, 3]),
        ({"until_ms": 200}, [0]),
        ({"since_ms": 200, "until_ms": 300}, [1]),
        ({"queue_offsets": (5, 7)}, [0, 1]),
        ({"queue_ranges": {("orders", 0): (6, None)}}, [1, 2, 3]),
        ({"queue_ranges": {("orders", 0): (5, 6), ("pay", -1): (1, 9)}}, [0, 1, 2]),
        ({"grep": "a b|gam"}, [0, 2]),
        ({"grep": "€"}, [1]),
        ({"grep": "(?i)ALPHA"}, [0]),
        ({"topics": frozenset({"orders"}), "keys": frozenset({"k2"}), "since_ms": 1}, [0]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_conditions(conditions: dict[str, Any], expected: list[int]) -> None:
    wanted = MessageFilter(**conditions)
    assert taken(wanted) == expected
    assert wanted.is_empty == (not conditions)


@given(strategies.logs(), st.sampled_from(["", "a", r"\x00", "[^a]", "é"]))
def test_grep_of_any_bodies(log: strategies.Log, pattern: str) -> None:
    window = Window.of(log.files[0], log.start)
    rows = sound_rows(window)
    wanted = MessageFilter(grep=pattern)
    kept = wanted.select(window, rows, Decoding())[:, 0].tolist()
    bodies = columns.record_batch(window, rows, Decoding(columns=["body"]))["body"].to_pylist()
    expected = [
        position
        for position, body in zip(rows[:, 0].tolist(), bodies, strict=True)
        if re.search(pattern.encode(), body)
    ]
    assert kept == expected


@pytest.mark.parametrize("name", ["topic_pattern", "grep"])
@pytest.mark.parametrize("pattern", ["(", "*", "[a", "a{99999999999999}", "(?P<x>a)(?P<x>b)"])
def test_patterns_that_are_none_are_refused(name: str, pattern: str) -> None:
    with pytest.raises(UsageError, match="not a regular expression"):
        MessageFilter(**{name: pattern})  # type: ignore[arg-type]


@pytest.mark.parametrize("pattern", [r"\u20ac", r"\N{EURO SIGN}", "(?u)a"])
def test_patterns_that_are_for_text_alone_are_refused_for_bodies(pattern: str) -> None:
    with pytest.raises(UsageError, match="not a regular expression"):
        MessageFilter(grep=pattern)


def test_a_pattern_of_bytes_that_are_no_text() -> None:
    # As Python passes a command line argument that is not UTF-8.
    assert taken(MessageFilter(grep="\udce2\udc82")) == [1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [(None, None), ("a, b,,a", {"a", "b"}), (["a,b", " c "], {"a,b", "c"})],
)
def test_names(text: str | list[str] | None, expected: set[str] | None) -> None:
    assert batches.names(text, "topics") == expected


@pytest.mark.parametrize("text", ["", ",", " , ", [], [""]])
def test_names_of_nothing_do_not_mean_everything(text: str | list[str]) -> None:
    with pytest.raises(UsageError, match="topics names nothing"):
        batches.names(text, "topics")


def test_tags() -> None:
    assert batches.tag_expression(None) is batches.tag_expression("*") is None
    assert batches.tag_expression("a || b") == {"a", "b"}
    for text in ("", " ", "||", " || "):
        with pytest.raises(UsageError, match="tags names nothing"):
            batches.tag_expression(text)


def test_times_in_the_wrong_order() -> None:
    assert not MessageFilter(since_ms=1, until_ms=1).is_empty
    with pytest.raises(UsageError, match="since 2 is later than until 1"):
        MessageFilter(since_ms=2, until_ms=1)
