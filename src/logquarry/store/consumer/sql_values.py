"""Values that an SQL92 filter compares, as Java's types do it (``ComparisonExpression`` of 4.9.3).

A property is always text, and a constant is an ``Integer``, ``Long``, ``Double``, ``String`` or
``Boolean``. Text beside a number is read as a number of that very type: ``'4.5'`` beside ``3`` is
no ``Integer``, and then the message does not match, whatever the rest of the filter says.
"""

from __future__ import annotations

import math
import re
from typing import Final, NamedTuple

from logquarry.format import java

Value = str | int | float | bool | None
"""Of an expression; None is SQL's unknown."""

_BLANKS: Final = "".join(map(chr, range(0x21)))
_DOUBLE: Final = re.compile(
    r"[+-]?(?:NaN|Infinity|(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?[fFdD]?)"
)
_HEX_DOUBLE: Final = re.compile(
    r"([+-]?0[xX](?:[0-9a-fA-F]+\.?|[0-9a-fA-F]*\.[0-9a-fA-F]+)[pP][+-]?[0-9]+)[fFdD]?"
)
_MOST_DIGITS: Final = 19
_INT_BITS, _LONG_BITS = 31, 63


class CannotCompare(Exception):
    """Two values that Java does not compare: a message that they come from does not match."""


class _Order(NamedTuple):
    """A ``Double`` in the order of ``Double.compareTo``."""

    is_nan: bool
    value: float
    sign: float


def compare(left: Value, right: Value) -> int:
    """Below 0, 0 or above 0, as ``ComparisonExpression.__compare`` says; both are known.

    Raises:
        CannotCompare: where it throws.
    """
    if isinstance(left, bool):
        if isinstance(right, str):
            # QUIRK: Java casts the wrong side, and fails.
            raise CannotCompare
        return int(left) - int(right) if isinstance(right, bool) else -1
    if isinstance(right, bool):
        if isinstance(left, str):
            return int(left.lower() == "true") - int(right)
        return -1
    if isinstance(left, str):
        if isinstance(right, str):
            return _sign_of(left, right)
        left = _number_like(left, right)
    elif isinstance(right, str):
        right = _number_like(right, left)
    if isinstance(left, int) and isinstance(right, int):
        return (left > right) - (left < right)
    assert isinstance(left, (int, float)) and isinstance(right, (int, float))
    one, other = _order(float(left)), _order(float(right))
    return (one > other) - (one < other)


def as_double(text: str) -> float:
    """``Double.valueOf(text)``.

    Raises:
        CannotCompare: if it is no number.
    """
    plain = text.strip(_BLANKS)
    if _DOUBLE.fullmatch(plain):
        if plain[-1:] in "fFdD":
            plain = plain[:-1]
        return float(plain)
    match = _HEX_DOUBLE.fullmatch(plain)
    if match is None:
        raise CannotCompare
    try:
        return float.fromhex(match[1])
    except OverflowError:
        return -math.inf if plain.startswith("-") else math.inf


def _number_like(text: str, number: Value) -> int | float:
    """Text as a number of the type that another value has."""
    if isinstance(number, float):
        return as_double(text)
    assert isinstance(number, int)
    is_int = java.INT_MIN <= number <= java.INT_MAX
    digits = text[1:] if text[:1] in ("+", "-") else text
    # Java looks at single chars, and so knows no digits beyond the BMP.
    if not digits.isdecimal() or max(digits) > "\uffff":
        raise CannotCompare
    digits = digits.lstrip("0") or "0"
    if len(digits) > _MOST_DIGITS:
        raise CannotCompare
    value = int(digits) * (-1 if text[0] == "-" else 1)
    bits = _INT_BITS if is_int else _LONG_BITS
    if not -(1 << bits) <= value < 1 << bits:
        raise CannotCompare
    return value


def _order(number: float) -> _Order:
    if math.isnan(number):
        return _Order(True, 0.0, 0.0)
    return _Order(False, number, math.copysign(1.0, number))


def _sign_of(left: str, right: str) -> int:
    # Only whether they are equal is ever asked of two texts, so that the order is any.
    return (left > right) - (left < right)
