"""Formats sizes, times, tables and JSON for output, and parses sizes and times.

The content of a store is untrusted: escape sequences can move the cursor or hide text. All content
passes :func:`printable` before it reaches a terminal.
"""

from __future__ import annotations

import codecs
import difflib
import math
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import UTC, date, datetime, time, timedelta
from typing import Any, Final

from logquarry.errors import UsageError

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_STEP = 1024
_SECOND_MS, _MINUTE_MS, _HOUR_MS, _DAY_MS = 1_000, 60_000, 3_600_000, 86_400_000
_BINARY_SHARE = 0.3
_LEAST_COLUMNS: Final = 8
"""Minimum width of a table's cell, in columns of the terminal."""
_SHIFTS: Final = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40, "p": 50}


def printable(text: str) -> str:
    """Escape characters that are not visible: ``\\x1b``, ``\\u202e`` and so on.

    Such characters are control and format characters (for example bidirectional overrides), line
    ends and lone surrogates.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def size_text(count: int | None) -> str:
    """Format a size as ``1.5 GiB``; a dash for None."""
    if count is None:
        return "-"
    value = float(count)
    for unit in _UNITS:
        # If rounding yields 1024, use the next larger unit.
        if round(value, 1) < _STEP or unit == _UNITS[-1]:
            return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= _STEP
    raise AssertionError("the last unit accepts any size")


def count_text(count: int | None) -> str:
    """Format a number as ``2,628,118``; a dash for None."""
    return "-" if count is None else f"{count:,}"


def plural(count: int, what: str, many: str | None = None) -> str:
    """Format a number with its noun: ``1 file``, ``2 files``."""
    return f"{count:,} {what if count == 1 else many or what + 's'}"


def counted(count: int, what: str, many: str | None = None) -> str:
    """Format a number with its noun, without separators; for errors and findings."""
    return f"{count} {what if count == 1 else many or what + 's'}"


def listed(names: Sequence[str], most: int) -> str:
    """Join names for a sentence, with at most ``most`` of the names: ``a, b and 3 more``."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def nearest(name: str, names: Iterable[str], least: float = 0.6) -> str | None:
    """Return the name that is most similar to ``name``, ignoring case. Return None if no name has
    at least the similarity ``least`` (0 to 1).
    """
    spelling = {one.casefold(): one for one in names}
    found = difflib.get_close_matches(name.casefold(), spelling, 1, least)
    return spelling[found[0]] if found else None


def time_text(ms: int | None) -> str:
    """Format a time as ISO 8601 in UTC; a dash for None.

    A time outside of Python's calendar is formatted as a number.
    """
    if ms is None:
        return "-"
    try:
        return f"{_EPOCH + timedelta(milliseconds=ms):%Y-%m-%dT%H:%M:%S}.{ms % 1000:03d}Z"
    except OverflowError:
        return str(ms)


def duration_text(ms: int) -> str:
    """Format a duration: ``350 ms``, ``12.3 s``, ``4 min 10 s``, ``3 h 5 min``, ``2 d 4 h``."""
    if ms < _SECOND_MS:
        return f"{ms} ms"
    if round(ms / _SECOND_MS, 1) < _MINUTE_MS / _SECOND_MS:
        return f"{ms / _SECOND_MS:.1f} s"
    ms = max(ms, _MINUTE_MS)
    if ms < _HOUR_MS:
        return f"{ms // _MINUTE_MS} min {ms % _MINUTE_MS // _SECOND_MS} s"
    if ms < _DAY_MS:
        return f"{ms // _HOUR_MS} h {ms % _HOUR_MS // _MINUTE_MS} min"
    return f"{ms // _DAY_MS} d {ms % _DAY_MS // _HOUR_MS} h"


def bin_text(width_ms: int) -> str:
    """Format the width of a time bin: ``minute``, ``5 minutes``, ``100 ms``."""
    units = (_DAY_MS, "day"), (_HOUR_MS, "hour"), (_MINUTE_MS, "minute"), (_SECOND_MS, "second")
    for unit, name in units:
        if width_ms % unit == 0:
            number = width_ms // unit
            return name if number == 1 else f"{number} {name}s"
    return f"{width_ms} ms"


def shown(text: str, most: int = 60) -> str:
    """Make a text :func:`printable`, and shorten it to ``most`` characters."""
    text = printable(text)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def preview(body: bytes, most: int = 100) -> str:
    """Format the start of a body, as text in quotes or as hex."""
    if not body:
        return "(empty)"
    head = body[: 4 * most]
    # The cut may split a character. The incomplete bytes of this character do not make the body
    # invalid text.
    whole = len(head) == len(body)
    text = codecs.getincrementaldecoder("utf-8")("replace").decode(head, final=whole)
    odd = sum(not (c.isprintable() or c in "\r\n\t") or c == "\ufffd" for c in text[:most])
    if odd > _BINARY_SHARE * min(len(text), most):
        digits = body[: most // 2].hex()
        return f"hex {digits}{'...' if len(body) > most // 2 else ''}"
    shown = printable(text[:most])
    return f'"{shown}"{"..." if len(text) > most or not whole else ""}'


def width(text: str) -> int:
    """Count the columns of a printable text on a terminal."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def shortened(text: str, most: int) -> str:
    """Shorten a printable text to ``most`` columns of a terminal; ``…`` marks the cut."""
    if width(text) <= most:
        return text
    while text and width(text) > most - 1:
        text = text[:-1]
    return f"{text}…"


def columns(
    rows: Sequence[Sequence[str]], right: Sequence[int] = (), most: int | None = None
) -> list[str]:
    """Format rows of cells as lines with aligned columns.

    Args:
        right: indexes of the columns to align right (from 0); these columns are never cut.
        most: columns of the terminal; the widest texts are shortened to fit. None: no limit.
    """
    if not rows:
        return []
    # A store can have a million consumer groups, so process whole columns, which is faster than
    # processing single cells.
    cells = list(zip(*rows, strict=True))
    widths = [_width(column) for column in cells]
    room = widths.copy()
    if most is not None:
        _narrow(room, right, most - 2 * (len(room) - 1))
    filled = []
    for i, column in enumerate(cells):
        shown = column
        if room[i] < widths[i]:
            shown = tuple(shortened(cell, room[i]) for cell in column)
        filled.append(_filled(shown, room[i], is_right=i in right))
    return ["  ".join(row).rstrip() for row in zip(*filled, strict=True)]


def _width(column: Sequence[str]) -> int:
    is_ascii = all(map(str.isascii, column))
    return max(map(len if is_ascii else width, column))


def _filled(column: Sequence[str], room: int, *, is_right: bool) -> list[str]:
    if all(map(str.isascii, column)):
        return [cell.rjust(room) if is_right else cell.ljust(room) for cell in column]
    fills = [" " * (room - width(cell)) for cell in column]
    pairs = zip(fills, column, strict=True) if is_right else zip(column, fills, strict=True)
    return ["".join(pair) for pair in pairs]


def _narrow(widths: list[int], right: Sequence[int], room: int) -> None:
    texts = [i for i in range(len(widths)) if i not in right]
    while sum(widths) > room and texts:
        widest = max(texts, key=lambda i: widths[i])
        if widths[widest] <= _LEAST_COLUMNS:
            return
        widths[widest] -= 1


def byte_count(text: str) -> int:
    """Parse a size such as ``1048576``, ``1m`` or ``1.5 MB``.

    Units are powers of 1024, as in Spark.

    Raises:
        UsageError: if the text is not a size, or the size is below one byte.
    """
    pattern = r"(\d{1,18}(?:\.\d{1,18})?)\s*([kmgtp]?)(?:i?b)?"
    match = re.fullmatch(pattern, text.strip(), re.I | re.A)
    size = int(float(match[1]) * (1 << _SHIFTS[match[2].lower()])) if match else 0
    if size < 1:
        raise UsageError(f"takes a size such as 64m, not {text!r}")
    return size


def time_ms(value: str | date) -> int:
    """Convert a time to milliseconds since 1970; round fractions of a millisecond up.

    Accepts milliseconds, ISO 8601, a date (which means midnight) or a datetime. A time without a
    zone is in UTC.

    Raises:
        UsageError: if a text is neither a number of milliseconds nor a time.
    """
    if isinstance(value, str):
        if re.fullmatch(r"-?\d{1,18}", value, re.ASCII):
            return int(value)
        try:
            if re.fullmatch(r"-?\d+", value, re.ASCII):
                # Reject a number of more than 18 digits, because fromisoformat could parse this
                # number as a date and a time.
                raise ValueError
            moment = datetime.fromisoformat(value)
        except ValueError:
            raise UsageError(f"takes milliseconds or an ISO 8601 time, not {value!r}") from None
    else:
        moment = value if isinstance(value, datetime) else datetime.combine(value, time())
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    whole = moment.replace(microsecond=0)
    return round(whole.timestamp()) * 1000 + math.ceil(moment.microsecond / 1000)


def document(value: Any, names: Iterable[str] | None = None) -> dict[str, Any]:
    """Make the JSON document of an object.

    Args:
        names: the attributes that become members, in order. Default: the fields of the dataclass.
    """
    if names is None:
        names = [field.name for field in fields(value)]
    return {name: json_value(getattr(value, name)) for name in names}


def json_value(value: Any) -> Any:
    """Convert an attribute to its JSON value; an object's ``to_json`` takes precedence.

    A dataclass or a NamedTuple becomes an object.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    if hasattr(value, "to_json"):
        return value.to_json()
    if is_dataclass(value):
        return document(value)
    if isinstance(value, Mapping):
        return {key: json_value(item) for key, item in value.items()}
    if hasattr(value, "_asdict"):
        return {name: json_value(item) for name, item in value._asdict().items()}
    if isinstance(value, (list, tuple)):
        return [json_value(item) for item in value]
    return value
