"""SQL92 filters over message properties: the tree of a filter, and its evaluation for a message.

The rules follow ``org.apache.rocketmq.filter`` 4.9.3. A condition is true, false or unknown (None);
a missing property is unknown. The values of properties are text. To compare text with a number, the
filter parses the text as the number's Java type. If text cannot be parsed, the message does not
match, even if the rest of the filter is true.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from logquarry.format import java

Value = str | int | float | bool | None
"""The value of an expression; None means unknown, as in SQL."""

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
    """Java does not compare the two values, so the message does not match."""


def compare(left: Value, right: Value) -> int:
    """Compare two values (``ComparisonExpression.__compare``); neither is unknown.

    Return <0, 0 or >0.

    Raises:
        CannotCompare: if Java's comparison throws an exception.
    """
    if isinstance(left, bool):
        if isinstance(right, str):
            # QUIRK: Java casts the wrong side of the comparison, and throws.
            raise CannotCompare
        return int(left) - int(right) if isinstance(right, bool) else -1
    if isinstance(right, bool):
        if isinstance(left, str):
            return int(left.lower() == "true") - int(right)
        return -1
    if isinstance(left, str):
        if isinstance(right, str):
            # Two texts get here only from a test for equality, so the sign of the result does not
            # matter.
            return (left > right) - (left < right)
        left = _number_like(left, right)
    elif isinstance(right, str):
        right = _number_like(right, left)
    if isinstance(left, int) and isinstance(right, int):
        return (left > right) - (left < right)
    assert isinstance(left, (int, float)) and isinstance(right, (int, float))
    one, other = _order(float(left)), _order(float(right))
    return (one > other) - (one < other)


def as_double(text: str) -> float:
    """Parse text like Java's ``Double.valueOf``. Raises CannotCompare if the text is no number."""
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
    if isinstance(number, float):
        return as_double(text)
    assert isinstance(number, int)
    is_int = java.INT_MIN <= number <= java.INT_MAX
    digits = text[1:] if text[:1] in ("+", "-") else text
    # Java checks single 16-bit chars, so it rejects digits above U+FFFF, which need two chars.
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


def _order(number: float) -> tuple[bool, float, float]:
    """Return a sort key for the order of ``Double.compareTo``."""
    is_nan = math.isnan(number)
    return (is_nan, 0.0, 0.0) if is_nan else (is_nan, number, math.copysign(1.0, number))


# --------------------------------------------------------------------------------------------------
# The tree of a filter

Properties = Mapping[str, str]

_ORDERED: Final[Mapping[str, Callable[[int], bool]]] = {
    ">": lambda order: order > 0,
    ">=": lambda order: order >= 0,
    "<": lambda order: order < 0,
    "<=": lambda order: order <= 0,
}


@dataclass(frozen=True)
class Node:
    """A node of a filter.

    Attributes:
        evaluate: returns the value of the node for the properties of a message; raises
            CannotCompare.
        is_condition: whether the node is a condition, whose value is always true, false or None.
        depth: number of nodes on the longest path down from this node, including this node.
    """

    evaluate: Callable[[Properties], Value]
    is_condition: bool = True
    depth: int = 1


@dataclass(frozen=True)
class Constant(Node):
    """A number, a text, TRUE, FALSE or NULL; made by :func:`constant`."""

    value: Value = None


@dataclass(frozen=True)
class Property(Node):
    """The text of a property; made by :func:`property_text`."""

    name: str = ""


def constant(value: Value) -> Constant:
    """Make a constant. TRUE, FALSE and NULL are conditions."""
    is_condition = value is None or isinstance(value, bool)
    return Constant(lambda _: value, is_condition, value=value)


def property_text(name: str) -> Property:
    """Make a node for a property's text. It is unknown if the message lacks the property."""
    return Property(lambda properties: properties.get(name), is_condition=False, name=name)


def is_true(inner: Node) -> Node:
    """Make a condition from a property: text is never true (``createBooleanCast``).

    If the message lacks the property, the result is unknown.
    """
    return _above(lambda found: None if inner.evaluate(found) is None else False, inner)


def negative(inner: Node) -> Node:
    """Make a unary minus. The result is unknown if the operand is not a number."""

    def evaluate(properties: Properties) -> Value:
        value = inner.evaluate(properties)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return -value
        return None

    return _above(evaluate, inner, is_condition=False)


def negation(inner: Node) -> Node:
    """Make a NOT; NOT of unknown is unknown."""

    def evaluate(properties: Properties) -> Value:
        value = inner.evaluate(properties)
        return None if value is None else not value

    return _above(evaluate, inner)


def joined(stop: bool, parts: Sequence[Node]) -> Node:
    """Join conditions by AND (``stop`` is False) or OR (``stop`` is True).

    A part with the value ``stop`` decides the result.
    """

    def evaluate(properties: Properties) -> Value:
        result: Value = not stop
        for part in parts:
            value = part.evaluate(properties)
            if value is stop:
                return stop
            if value is None:
                result = None
        return result

    return _above(evaluate, *parts)


def equality(left: Node, right: Node) -> Node:
    """Make an ``=``.

    If only the left value is unknown, the result is unknown. If only the right value is unknown,
    the result is false. If both values are unknown, the result is true.
    """

    def evaluate(properties: Properties) -> Value:
        one, other = left.evaluate(properties), right.evaluate(properties)
        if one is None:
            return None if other is not None else True
        return other is not None and compare(one, other) == 0

    return _above(evaluate, left, right)


def is_null(inner: Node) -> Node:
    """Make an IS NULL, which is true or false, but never unknown."""
    return _above(lambda properties: inner.evaluate(properties) is None, inner)


def ordered(sign: str, left: Node, right: Node) -> Node:
    """Make a ``>``, ``>=``, ``<`` or ``<=``. Two texts are compared as ``Double`` values."""
    is_ordered = _ORDERED[sign]

    def evaluate(properties: Properties) -> Value:
        one = left.evaluate(properties)
        other = None if one is None else right.evaluate(properties)
        if other is None:
            return None
        if isinstance(one, str) and isinstance(other, str):
            one, other = as_double(one), as_double(other)
        return is_ordered(compare(one, other))

    return _above(evaluate, left, right)


def is_in(name: str, texts: frozenset[str]) -> Node:
    """Make an IN, which tests whether a property equals one of several texts."""

    def evaluate(properties: Properties) -> Value:
        value = properties.get(name)
        return None if value is None else value in texts

    return Node(evaluate)


def _above(
    evaluate: Callable[[Properties], Value], *inner: Node, is_condition: bool = True
) -> Node:
    return Node(evaluate, is_condition, 1 + max(part.depth for part in inner))


@dataclass(frozen=True, slots=True)
class SqlFilter:
    """A parsed filter. :func:`logquarry.store.consumer.sql_parser.parse` makes it from text."""

    expression: str
    condition: Node

    def matches(self, properties: Properties) -> bool:
        """Whether a message with these properties matches.

        If Java cannot compare two values, the message does not match.
        """
        try:
            return self.condition.evaluate(properties) is True
        except CannotCompare:
            return False
