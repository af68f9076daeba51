"""SQL92 filters over message properties: their tree, and its evaluation.

A condition is true, false or unknown (None, if a property is missing). A message matches if the
filter is true. The rules are those of ``org.apache.rocketmq.filter`` 4.9.3, and values compare as
Java's types do (``ComparisonExpression``): a property is text, and a constant is an ``Integer``,
``Long``, ``Double``, ``String`` or ``Boolean``. Text that is compared with a number is parsed as
that number's type. If it cannot be parsed (``'4.5'`` compared with the ``Integer`` 3), the message
does not match, whatever the rest of the filter is. :mod:`.sql_parser` parses filters.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from logquarry.format import java

Value = str | int | float | bool | None
"""Value of an expression; None is SQL's unknown."""

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
    """Java does not compare the two values: the message does not match."""


class _Order(NamedTuple):
    """A ``Double``, ordered as by ``Double.compareTo``."""

    is_nan: bool
    value: float
    sign: float


def compare(left: Value, right: Value) -> int:
    """Compare two known values (``ComparisonExpression.__compare``); returns below 0, 0 or above 0.

    Raises:
        CannotCompare: if Java's comparison throws.
    """
    if isinstance(left, bool):
        if isinstance(right, str):
            # QUIRK: Java casts the wrong side and throws.
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
        CannotCompare: if the text is not a number.
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
    """Parse text as a number of the same type as ``number``."""
    if isinstance(number, float):
        return as_double(text)
    assert isinstance(number, int)
    is_int = java.INT_MIN <= number <= java.INT_MAX
    digits = text[1:] if text[:1] in ("+", "-") else text
    # Java checks single chars, and so accepts no digits beyond the BMP.
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
    # Texts are only tested for equality, so any order is correct.
    return (left > right) - (left < right)


# --------------------------------------------------------------------------------------------------
# The tree of a filter

Properties = Mapping[str, str]

_ORDERED: Final[Mapping[str, Callable[[int], bool]]] = {
    ">": lambda order: order > 0,
    ">=": lambda order: order >= 0,
    "<": lambda order: order < 0,
    "<=": lambda order: order <= 0,
}


class Node(ABC):
    """A node of a filter.

    Attributes:
        is_condition: whether its value is always true, false or unknown.
        depth: nodes on the longest path down from this node, including this node.
    """

    is_condition = True
    depth: int = 1

    @abstractmethod
    def evaluate(self, properties: Properties) -> Value:
        """The node's value for a message.

        Raises:
            CannotCompare: if Java does not compare two of its values.
        """


@dataclass(frozen=True)
class Constant(Node):
    """A number, a text, TRUE, FALSE or NULL."""

    value: Value

    @property
    def is_condition(self) -> bool:  # type: ignore[override]
        """Whether it is TRUE, FALSE or NULL."""
        return self.value is None or isinstance(self.value, bool)

    def evaluate(self, properties: Properties) -> Value:
        """See :meth:`Node.evaluate`."""
        return self.value


@dataclass(frozen=True)
class Property(Node):
    """The text of a property; unknown if the message does not have the property."""

    name: str
    is_condition = False

    def evaluate(self, properties: Properties) -> Value:
        """See :meth:`Node.evaluate`."""
        return properties.get(self.name)


@dataclass(frozen=True)
class IsTrue(Node):
    """A property used as a condition: text is never true (``createBooleanCast``)."""

    inner: Node
    depth: int = field(init=False)

    def __post_init__(self) -> None:
        _set_depth(self, self.inner)

    def evaluate(self, properties: Properties) -> Value:
        """See :meth:`Node.evaluate`."""
        return None if self.inner.evaluate(properties) is None else False


@dataclass(frozen=True)
class Negative(Node):
    """``-`` before a number; unknown before any other value."""

    inner: Node
    is_condition = False
    depth: int = field(init=False)

    def __post_init__(self) -> None:
        _set_depth(self, self.inner)

    def evaluate(self, properties: Properties) -> Value:
        """See :meth:`Node.evaluate`."""
        value = self.inner.evaluate(properties)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return -value
        return None


@dataclass(frozen=True)
class Not(Node):
    """Negation; unknown stays unknown."""

    inner: Node
    depth: int = field(init=False)

    def __post_init__(self) -> None:
        _set_depth(self, self.inner)

    def evaluate(self, properties: Properties) -> Value:
        """See :meth:`Node.evaluate`."""
        value = self.inner.evaluate(properties)
        return None if value is None else not value


@dataclass(frozen=True)
class Joined(Node):
    """Conditions joined by AND or OR, evaluated until the result is known.

    Attributes:
        stop: the value that decides: False for AND, True for OR.
    """

    stop: bool
    parts: tuple[Node, ...]
    depth: int = field(init=False)

    def __post_init__(self) -> None:
        _set_depth(self, *self.parts)

    def evaluate(self, properties: Properties) -> Value:
        """See :meth:`Node.evaluate`."""
        result: Value = not self.stop
        for part in self.parts:
            value = part.evaluate(properties)
            if value is self.stop:
                return self.stop
            if value is None:
                result = None
        return result


@dataclass(frozen=True)
class Equal(Node):
    """Equality. Unknown if the left value is unknown; false if only the right value is unknown."""

    left: Node
    right: Node
    depth: int = field(init=False)

    def __post_init__(self) -> None:
        _set_depth(self, self.left, self.right)

    def evaluate(self, properties: Properties) -> Value:
        """See :meth:`Node.evaluate`."""
        left = self.left.evaluate(properties)
        right = self.right.evaluate(properties)
        if left is None:
            return None if right is not None else True
        return right is not None and compare(left, right) == 0


@dataclass(frozen=True)
class IsNull(Node):
    """Whether a value is unknown. The result is always true or false."""

    inner: Node
    depth: int = field(init=False)

    def __post_init__(self) -> None:
        _set_depth(self, self.inner)

    def evaluate(self, properties: Properties) -> Value:
        """See :meth:`Node.evaluate`."""
        return self.inner.evaluate(properties) is None


@dataclass(frozen=True)
class Ordered(Node):
    """``>``, ``>=``, ``<`` or ``<=``. Two texts are compared as ``Double`` values."""

    sign: str
    left: Node
    right: Node
    depth: int = field(init=False)

    def __post_init__(self) -> None:
        _set_depth(self, self.left, self.right)

    def evaluate(self, properties: Properties) -> Value:
        """See :meth:`Node.evaluate`."""
        left = self.left.evaluate(properties)
        if left is None:
            return None
        right = self.right.evaluate(properties)
        if right is None:
            return None
        if isinstance(left, str) and isinstance(right, str):
            left, right = as_double(left), as_double(right)
        return _ORDERED[self.sign](compare(left, right))


@dataclass(frozen=True)
class In(Node):
    """Whether a property equals one of some texts."""

    inner: Property
    texts: frozenset[str]

    def evaluate(self, properties: Properties) -> Value:
        """See :meth:`Node.evaluate`."""
        value = properties.get(self.inner.name)
        return None if value is None else value in self.texts


def _set_depth(node: Node, *inner: Node) -> None:
    object.__setattr__(node, "depth", 1 + max(part.depth for part in inner))


@dataclass(frozen=True, slots=True)
class SqlFilter:
    """A parsed filter. Made by :func:`logquarry.store.consumer.sql_parser.parse`."""

    expression: str
    condition: Node

    def matches(self, properties: Properties) -> bool:
        """Whether a message with these properties matches.

        If the filter has to compare values that Java does not compare, it does not match.
        """
        try:
            return self.condition.evaluate(properties) is True
        except CannotCompare:
            return False
