"""Text for people.

JSON documents of dataclasses: members, their order, and nested values.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logquarry import text
from logquarry.text import document


@given(st.text())
def test_printable_is_printable(words: str) -> None:
    shown = text.printable(words)
    assert shown.isprintable()
    assert shown == words or not words.isprintable()


def test_printable_escapes_what_acts_on_a_terminal() -> None:
    assert text.printable("a\x1b[1m\n\u202eb\x9b\ud800") == "a\\x1b[1m\\n\\u202eb\\x9b\\ud800"
    assert text.printable("Zürich 订单") == "Zürich 订单"


@given(st.binary(max_size=600))
def test_preview_is_printable(body: bytes) -> None:
    assert text.preview(body).isprintable()


def test_preview() -> None:
    assert text.preview(b"") == "(empty)"
    assert text.preview(b'{"a": 1}\n') == '"{"a": 1}\\n"'
    assert text.preview(b"x" * 101) == '"' + "x" * 100 + '"...'
    assert text.preview(bytes(range(128, 160))) == "hex " + bytes(range(128, 160)).hex()
    assert text.preview(b"\0" * 51) == "hex " + "00" * 50 + "..."
    # A character that the cut divides does not count as invalid.
    assert "\ufffd" not in text.preview("ü".encode() * 300 + b"a")
    assert "\ufffd" not in text.preview(b"a" + "ü".encode() * 300)


@pytest.mark.parametrize(
    ("ms", "words"),
    [
        (None, "-"),
        (0, "1970-01-01T00:00:00.000Z"),
        (1_700_000_000_123, "2023-11-14T22:13:20.123Z"),
        (-1, "1969-12-31T23:59:59.999Z"),
        (1 << 62, str(1 << 62)),
        (-(1 << 63), str(-(1 << 63))),
    ],
)
def test_times(ms: int | None, words: str) -> None:
    assert text.time_text(ms) == words


@pytest.mark.parametrize(
    ("ms", "words"),
    [
        (350, "350 ms"),
        (12_345, "12.3 s"),
        (59_999, "1 min 0 s"),
        (250_000, "4 min 10 s"),
        (11_100_000, "3 h 5 min"),
        (187_200_000, "2 d 4 h"),
    ],
)
def test_durations(ms: int, words: str) -> None:
    assert text.duration_text(ms) == words


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (None, "-"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1_048_575, "1.0 MiB"),
        (5 << 30, "5.0 GiB"),
        (1 << 70, "1048576.0 PiB"),
    ],
)
def test_sizes(count: int | None, words: str) -> None:
    assert text.size_text(count) == words


@pytest.mark.parametrize(
    ("ms", "words"),
    [(100, "100 ms"), (1_000, "second"), (300_000, "5 minutes"), (3_600_000, "hour")],
)
def test_bins(ms: int, words: str) -> None:
    assert text.bin_text(ms) == words


def test_columns_are_aligned_by_what_they_take_on_a_terminal() -> None:
    lines = text.columns([["订单", "1", "x"], ["a", "22", "y"]], right=[1])
    assert lines == ["订单   1  x", "a     22  y"]
    assert text.columns([]) == []


def test_columns_fit_a_terminal() -> None:
    rows = [["topic", "messages", "reason"], ["t" * 60, "1,234", "why " * 20], ["短" * 30, "1", ""]]
    lines = text.columns(rows, [1], 80)
    assert all(text.width(line) <= 80 for line in lines)
    assert lines[1].count("…") == 2 and "1,234" in lines[1]
    assert max(text.width(line) for line in text.columns(rows, [1])) > 80
    # On a very narrow terminal each text keeps a few columns.
    assert all("…" in line for line in text.columns(rows[1:2], [1], 10))


@pytest.mark.parametrize(("given", "most", "short"), [("abc", 3, "abc"), ("abcd", 3, "ab…")])
def test_shortened(given: str, most: int, short: str) -> None:
    assert text.shortened(given, most) == short


@dataclass(frozen=True, slots=True)
class Inner:
    number: int
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Named:
    number: int

    def to_json(self) -> dict[str, int]:
        return {"the_number": self.number}


@dataclass(frozen=True, slots=True)
class Outer:
    inner: Inner
    many: tuple[Inner, ...]
    named: Named
    table: dict[str, Inner]

    @property
    def count(self) -> int:
        return len(self.many)


OUTER = Outer(Inner(1), (Inner(2, "b"), Inner(3)), Named(4), {"x": Inner(5)})


def test_fields_are_members_in_their_order() -> None:
    found = document(OUTER)
    assert list(found) == ["inner", "many", "named", "table"]
    assert found == {
        "inner": {"number": 1, "text": None},
        "many": [{"number": 2, "text": "b"}, {"number": 3, "text": None}],
        "named": {"the_number": 4},
        "table": {"x": {"number": 5, "text": None}},
    }


def test_names_choose_members_and_their_order() -> None:
    assert document(OUTER, ("count", "inner")) == {
        "count": 2,
        "inner": {"number": 1, "text": None},
    }
    assert list(document(OUTER, ("count", "inner"))) == ["count", "inner"]


def test_numbers_with_their_noun() -> None:
    assert [text.counted(n, "byte") for n in (0, 1, 2_000)] == ["0 bytes", "1 byte", "2000 bytes"]
    assert [text.plural(n, "byte") for n in (0, 1, 2_000)] == ["0 bytes", "1 byte", "2,000 bytes"]
    assert text.counted(1, "entry is", "entries are") == "1 entry is"
    assert text.counted(2, "entry is", "entries are") == "2 entries are"
