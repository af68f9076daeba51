"""SQL92 filters: on any text, they give RocketMQ's answers or clear errors."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logquarry.errors import BadFilter
from logquarry.store.consumer.sql_filter import MAX_DEPTH, MAX_LENGTH, parse

VECTORS = Path(__file__).parents[3] / "data" / "sql92_vectors.jsonl"
"""Made by Sql92Vectors.java beside it, with the jars of RocketMQ 4.9.3."""


def answer(sql: str, properties: dict[str, str]) -> bool | None:
    """Whether a message matches; None if the filter is refused."""
    try:
        return parse(sql).matches(properties)
    except BadFilter:
        return None


def test_what_rocketmq_answers() -> None:
    rows = [json.loads(line) for line in VECTORS.read_text("utf-8").splitlines()]
    assert len(rows) > 1_000
    wrong = [row for row in rows if answer(row["sql"], row["properties"]) != row["matches"]]
    assert not wrong
    seen = {row["matches"] for row in rows}
    assert seen == {True, False, None}


@pytest.mark.parametrize(
    ("sql", "column", "reason"),
    [
        ("", 1, "missing"),
        ("   ", 4, "missing"),
        ("a = 'x", 5, "does not end"),
        ("a = 'x' b", 9, "ends before 'b'"),
        ("a LIKE 'x'", 3, "ends before 'LIKE'"),
        ("a > 'x'", 5, "only numbers"),
        ("a = NULL", 5, "IS NULL"),
        ("a IS 3", 3, "NULL or NOT NULL"),
        ("a IN (3)", 7, "single quotes"),
        ("3 IN ('x')", 1, "IN needs a property before it"),
        ("a BETWEEN 5 AND 3", 11, "smaller number first"),
        ("a BETWEEN 5 OR 3", 13, "'AND' is missing"),
        ("(a = 'x'", 9, r"'\)' is missing"),
        ("a = 12ab", 5, "starts no number"),
        ("a = 007", 5, "starts no number"),
        ("a = 99999999999999999999", 5, "64 bits"),
        ("a > 1e999", 5, "too large"),
        ("a ? 3", 3, "no meaning"),
        ("a /* b", 3, "does not end"),
        ("3", 1, "neither true nor false"),
        ("a = 'x' AND 3", 13, "neither true nor false"),
        ("TRUE = 3", 6, "with other constants"),
        ("a = " + "b" * MAX_LENGTH, MAX_LENGTH + 1, "characters"),
    ],
)
def test_an_error_names_the_column(sql: str, column: int, reason: str) -> None:
    with pytest.raises(BadFilter, match=reason) as caught:
        parse(sql)
    assert caught.value.column == column
    assert pickle.loads(pickle.dumps(caught.value)).column == column


def test_what_is_taken_beyond_rocketmq() -> None:
    # RocketMQ takes 0.0 for less than the least number.
    assert parse("a > 0.0").matches({"a": "0.5"})


@pytest.mark.parametrize("unit", ["(", "NOT ", "- ", "+ ", "NOT ("])
def test_depth_is_bounded(unit: str) -> None:
    with pytest.raises(BadFilter, match="deep"):
        parse(unit * 5_000 + "a")
    few = unit * (MAX_DEPTH // 4) + "a" + ")" * unit.count("(") * (MAX_DEPTH // 4)
    assert answer(few, {"a": "x"}) in (True, False, None)


def test_the_tree_is_bounded_too() -> None:
    with pytest.raises(BadFilter, match="deep"):
        parse("a" + " = a" * 5_000)
    with pytest.raises(BadFilter, match="deep"):
        parse("a" + " IS NULL" * 5_000)
    # Many conditions side by side are as deep as two.
    assert parse(" OR ".join(f"a = '{number}'" for number in range(3_000))).matches({"a": "2999"})


SIGNS = ["(", ")", ",", "=", "<>", ">", ">=", "<", "<=", "+", "-", "--", "/*", "*/", "'", "é"]
NUMBERS = ["3", "-3", "3.5", ".5", "1e5", "0", "007", "5L", "9223372036854775808"]
KEYWORDS = ["NOT", "AND", "OR", "BETWEEN", "IN", "IS", "NULL", "TRUE", "FALSE", "like"]
NAMES = ["a", "b", "TAGS", "$x", "_", "'x'", "'it''s'", "''"]
WORDS = st.sampled_from(SIGNS + NUMBERS + KEYWORDS + NAMES)
VALUES = st.sampled_from(["x", "3", "3.5", "", "TRUE", "nan", "NaN", "-Infinity", "٣", "0x1p3"])
PROPERTIES = st.dictionaries(st.sampled_from(["a", "b", "TAGS"]), VALUES)


@given(st.lists(WORDS, max_size=12).map(" ".join) | st.text(max_size=30), PROPERTIES)
def test_any_text_is_a_filter_or_a_bad_one(sql: str, properties: dict[str, str]) -> None:
    try:
        found = parse(sql)
    except BadFilter as error:
        assert 1 <= error.column <= len(sql) + 1
        return
    matches = found.matches(properties)
    assert isinstance(matches, bool)
    # A condition and its negation are not both true.
    assert not (matches and parse(f"NOT ({sql}\n)").matches(properties))
