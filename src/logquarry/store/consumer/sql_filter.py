"""An SQL92 filter over the properties of a message: its tree, and what it says of a message.

Three values: true, false, and unknown (None) where a property is not there. A message matches
where the whole is true. The rules are those of ``org.apache.rocketmq.filter`` 4.9.3; the parser is
:mod:`logquarry.store.consumer.sql_parser`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from logquarry.store.consumer.sql_values import CannotCompare, Value, as_double, compare

Properties = Mapping[str, str]

_ORDERED: Final[Mapping[str, Callable[[int], bool]]] = {
    ">": lambda order: order > 0,
    ">=": lambda order: order >= 0,
    "<": lambda order: order < 0,
    "<=": lambda order: order <= 0,
}


class Node:
    """A part of a filter.

    Attributes:
        is_condition: whether it is true, false or unknown, and nothing else.
        depth: nodes on the longest way down from here.
    """

    is_condition = True
    depth: int = 1

    def evaluate(self, properties: Properties) -> Value:
        """Its value for a message.

        Raises:
            CannotCompare: if values cannot be compared that would have to be.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Constant(Node):
    """A number, a text, TRUE, FALSE or NULL."""

    value: Value

    @property
    def is_condition(self) -> bool:  # type: ignore[override]
        """TRUE, FALSE and NULL are conditions by themselves."""
        return self.value is None or isinstance(self.value, bool)

    def evaluate(self, properties: Properties) -> Value:
        """See :meth:`Node.evaluate`."""
        return self.value


@dataclass(frozen=True)
class Property(Node):
    """The text of a property, unknown where the message has none of that name."""

    name: str
    is_condition = False

    def evaluate(self, properties: Properties) -> Value:
        """See :meth:`Node.evaluate`."""
        return properties.get(self.name)


@dataclass(frozen=True)
class IsTrue(Node):
    """A property where a condition belongs: text is never true (``createBooleanCast``)."""

    inner: Node
    depth: int = field(init=False)

    def __post_init__(self) -> None:
        _set_depth(self, self.inner)

    def evaluate(self, properties: Properties) -> Value:
        """See :meth:`Node.evaluate`."""
        return None if self.inner.evaluate(properties) is None else False


@dataclass(frozen=True)
class Negative(Node):
    """``-`` before a number; unknown before anything else."""

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
    """The opposite; unknown stays unknown."""

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
    """Conditions with AND, or with OR, between them; those that cannot matter are not looked at.

    Attributes:
        stop: what decides: False of AND, True of OR.
        parts: the conditions.
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
    """Whether two values are equal. Unknown where the left one is, false where the right one is."""

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
    """Whether a value is unknown; this is always known."""

    inner: Node
    depth: int = field(init=False)

    def __post_init__(self) -> None:
        _set_depth(self, self.inner)

    def evaluate(self, properties: Properties) -> Value:
        """See :meth:`Node.evaluate`."""
        return self.inner.evaluate(properties) is None


@dataclass(frozen=True)
class Ordered(Node):
    """``>``, ``>=``, ``<`` or ``<=`` of numbers. Two texts are compared as ``Double``s."""

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
    """Whether a property is one of some texts."""

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
    """A filter that was understood. Made by :func:`logquarry.store.consumer.sql_parser.parse`.

    Attributes:
        expression: its text.
        condition: its tree.
    """

    expression: str
    condition: Node

    def matches(self, properties: Properties) -> bool:
        """Whether a message with some properties is wanted.

        One whose values cannot be compared as the filter asks is not, as with RocketMQ.
        """
        try:
            return self.condition.evaluate(properties) is True
        except CannotCompare:
            return False
