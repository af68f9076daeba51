"""SQL92 filters over message properties: the parser, and the evaluation for a message.

::

    or         = and { OR and }
    and        = equality { AND equality }
    equality   = comparison { ("=" | "<>") comparison | IS [NOT] NULL }
    comparison = unary { (">" | ">=" | "<" | "<=") unary
                       | [NOT] BETWEEN unary AND unary
                       | [NOT] IN "(" text { "," text } ")" }
    unary      = ("+" | "-" | NOT) unary | constant | property | "(" or ")"

This is the grammar of RocketMQ 4.9.3 (``SelectorParser``), with two differences. RocketMQ ignores
text after a complete filter (``b`` in ``a = 'x' b``); this parser rejects such text. RocketMQ
rejects a number whose absolute value is too small for a double; this parser reads it as ``0.0``.

The evaluation follows ``org.apache.rocketmq.filter`` 4.9.3. A condition is true, false or unknown
(None); a missing property is unknown. The values of properties are text. To compare text with a
number, the filter parses the text as the number's Java type. If the evaluation reaches text that
cannot be parsed, the message does not match.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Final, NamedTuple, NoReturn

from logquarry.errors import BadFilter
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


class CannotCompare(Exception):
    """Java does not compare the two values, so the message does not match."""


def compare(left: Value, right: Value) -> int:
    """Compare two values (``ComparisonExpression.__compare``); neither is unknown.

    Return <0, 0 or >0. Raises CannotCompare if Java's comparison throws an exception.
    """
    if isinstance(left, bool):
        if isinstance(right, str):
            # QUIRK: Java casts the wrong operand, and this cast throws an exception.
            raise CannotCompare
        return int(left) - int(right) if isinstance(right, bool) else -1
    if isinstance(right, bool):
        if isinstance(left, str):
            return int(left.lower() == "true") - int(right)
        return -1
    if isinstance(left, str):
        if isinstance(right, str):
            # Only a test for equality passes two texts to this function, so the sign of the result
            # does not matter.
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
    digits = text[1:] if text[:1] in ("+", "-") else text
    # Java checks single 16-bit chars, so it rejects digits above U+FFFF, which need two chars.
    if not digits.isdecimal() or max(digits) > "\uffff":
        raise CannotCompare
    digits = digits.lstrip("0") or "0"
    if len(digits) > _MOST_DIGITS:
        raise CannotCompare
    value = int(digits) * (-1 if text[0] == "-" else 1)
    bits = 31 if java.INT_MIN <= number <= java.INT_MAX else 63
    if not -(1 << bits) <= value < 1 << bits:
        raise CannotCompare
    return value


def _order(number: float) -> tuple[bool, float, float]:
    """Return a sort key for the order of ``Double.compareTo``."""
    is_nan = math.isnan(number)
    return (is_nan, 0.0, 0.0) if is_nan else (is_nan, number, math.copysign(1.0, number))


# --------------------------------------------------------------------------------------------------
# A filter, and its nodes

MAX_LENGTH: Final = 1 << 16
"""Maximum length of a filter in characters."""
MAX_DEPTH: Final = 40
"""Maximum nesting of brackets, NOT and signs (``+``, ``-``), and maximum depth of the tree."""

Properties = Mapping[str, str]


@dataclass(frozen=True)
class Node:
    """A node of a filter.

    Attributes:
        evaluate: returns the value of the node for the properties of a message; raises
            CannotCompare.
        depth: number of nodes on the longest path down from this node, including this node.
        is_condition: whether the node is a condition, whose value is always true, false or None.
        constants: the value of a number, a text, TRUE, FALSE or NULL; empty for another node.
        name: the name of a property; None for another node.
    """

    evaluate: Callable[[Properties], Value]
    depth: int = 1
    is_condition: bool = True
    constants: tuple[Value, ...] = ()
    name: str | None = None


@dataclass(frozen=True, slots=True)
class SqlFilter:
    """A filter that :func:`parse` made from text."""

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


@lru_cache(100)
def parse(expression: str) -> SqlFilter:
    """Parse a filter. Raises BadFilter, and no other exception, if the filter is invalid."""
    if len(expression) > MAX_LENGTH:
        raise BadFilter(expression, MAX_LENGTH + 1, f"it has more than {MAX_LENGTH} characters")
    return SqlFilter(expression, _Parser(expression).whole())


# --------------------------------------------------------------------------------------------------
# The parser

_KEYWORDS: Final = frozenset(["NOT", "AND", "OR", "BETWEEN", "IN", "TRUE", "FALSE", "NULL", "IS"])
_TOKEN: Final = re.compile(
    r"""
    (?P<blank>[ \t\n\r\f]+ | --[^\n\r]*(?:[\n\r]|\Z) | /\*(?s:.*?)\*/)
  | (?P<real>(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)? | [0-9]+[eE][+-]?[0-9]+)
  | (?P<whole>0 | [1-9][0-9]*[lL]?)
  | (?P<text>'(?:''|[^'])*')
  | (?P<name>[A-Za-z_$][A-Za-z0-9_$]*)
  | (?P<sign><> | >= | <= | [=<>(),+-])
    """,
    re.VERBOSE,
)
_CONSTANTS: Final[Mapping[str, bool | None]] = {"TRUE": True, "FALSE": False, "NULL": None}
_ORDERS: Final = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}


class _Token(NamedTuple):
    """A token; ``kind`` is real, whole, text, name, sign, keyword or end."""

    kind: str
    text: str
    at: int


def _tokens(expression: str) -> list[_Token]:
    found: list[_Token] = []
    at = 0
    while at < len(expression):
        match = _TOKEN.match(expression, at)
        if match is None:
            why = {"'": "a text that does not end", "/": "a comment that does not end"}
            here = expression[at]
            raise BadFilter(expression, at + 1, why.get(here, f"{here!r} has no meaning here"))
        kind, text = str(match.lastgroup), match[0]
        end = match.end()
        if kind in ("real", "whole") and expression[end : end + 1].isalnum():
            raise BadFilter(expression, at + 1, f"{text + expression[end]!r} starts no number")
        if kind == "name" and text.upper() in _KEYWORDS:
            kind, text = "keyword", text.upper()
        if kind != "blank":
            found.append(_Token(kind, text, at))
        at = end
    found.append(_Token("end", "", at))
    return found


class _Parser:
    def __init__(self, expression: str) -> None:
        self._expression = expression
        self._tokens = _tokens(expression)
        self._next = 0
        self._depth = 0

    def whole(self) -> Node:
        node = self._condition(self._joined("OR", stop=True), self._tokens[0])
        if self._token.kind != "end":
            self._fail(self._token, f"the filter ends before {self._token.text!r}")
        return node

    # ------------------------------------------------------------------------------ tokens
    @property
    def _token(self) -> _Token:
        return self._tokens[self._next]

    def _take(self) -> _Token:
        token = self._token
        self._next += 1
        return token

    def _is_at(self, *texts: str) -> bool:
        following = self._tokens[self._next : self._next + len(texts)]
        return [token.text for token in following] == list(texts)

    def _took(self, *texts: str) -> bool:
        if not self._is_at(*texts):
            return False
        self._next += len(texts)
        return True

    def _expect(self, text: str) -> None:
        if not self._took(text):
            self._fail(self._token, f"{text!r} is missing")

    def _fail(self, token: _Token, reason: str) -> NoReturn:
        raise BadFilter(self._expression, token.at + 1, reason)

    # ----------------------------------------------------------------------------- the nodes
    def _made(
        self,
        at: _Token,
        evaluate: Callable[[Properties], Value],
        *inner: Node,
        is_condition: bool = True,
    ) -> Node:
        depth = 1 + max(node.depth for node in inner)
        if depth > MAX_DEPTH:
            self._fail(at, f"it is nested more than {MAX_DEPTH} deep")
        return Node(evaluate, depth, is_condition)

    def _condition(self, node: Node, at: _Token) -> Node:
        if node.is_condition:
            return node
        if node.name is None:
            self._fail(at, "this is neither true nor false")
        # Text is never true. A missing property gives an unknown result (``createBooleanCast``).
        return self._made(at, lambda found: None if node.evaluate(found) is None else False, node)

    def _negation(self, node: Node, at: _Token) -> Node:
        def evaluate(properties: Properties) -> Value:
            value = node.evaluate(properties)
            return None if value is None else not value

        return self._made(at, evaluate, node)

    def _minus(self, node: Node, at: _Token) -> Node:
        def evaluate(properties: Properties) -> Value:
            # If the value is no number, the result is unknown.
            value = node.evaluate(properties)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                return -value
            return None

        return self._made(at, evaluate, node, is_condition=False)

    def _join(self, stop: bool, parts: list[Node], at: _Token) -> Node:
        """Join conditions by AND (``stop`` is False) or OR (``stop`` is True).

        If a part has the value ``stop``, the result is ``stop``.
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

        return self._made(at, evaluate, *parts)

    def _equal(self, left: Node, right: Node, at: _Token) -> Node:
        """Make an ``=``.

        If only the left value is unknown, the result is unknown. If only the right value is
        unknown, the result is false. If both values are unknown, the result is true.
        """

        def evaluate(properties: Properties) -> Value:
            one, other = left.evaluate(properties), right.evaluate(properties)
            if one is None:
                return None if other is not None else True
            return other is not None and compare(one, other) == 0

        return self._made(at, evaluate, left, right)

    def _is_null(self, node: Node, at: _Token) -> Node:
        return self._made(at, lambda properties: node.evaluate(properties) is None, node)

    def _ordered(self, sign: str, left: Node, at: _Token, right: Node, start: _Token) -> Node:
        """Make a node for ``>``, ``>=``, ``<`` or ``<=``. Two texts are compared as ``Double``."""
        for node, token in ((left, at), (right, start)):
            if node.is_condition or any(isinstance(value, str) for value in node.constants):
                self._fail(token, "only numbers can be compared with <, <=, > and >=")

        def evaluate(properties: Properties) -> Value:
            one = left.evaluate(properties)
            other = None if one is None else right.evaluate(properties)
            if other is None:
                return None
            if isinstance(one, str) and isinstance(other, str):
                one, other = as_double(one), as_double(other)
            return bool(_ORDERS[sign](compare(one, other), 0))

        return self._made(at, evaluate, left, right)

    # ---------------------------------------------------------------------------- the grammar
    def _joined(self, word: str, *, stop: bool) -> Node:
        inner = partial(self._joined, "AND", stop=False) if stop else self._equality
        at = self._token
        first = inner()
        if not self._is_at(word):
            return first
        parts = [self._condition(first, at)]
        while self._took(word):
            start = self._token
            parts.append(self._condition(inner(), start))
        return self._join(stop, parts, at)

    def _equality(self) -> Node:
        at = self._token
        left = self._comparison()
        while True:
            sign = self._token
            if self._took("=") or self._took("<>"):
                start = self._token
                right = self._comparison()
                for node, token in ((left, at), (right, start)):
                    if node.constants == (None,):
                        hint = "use IS NULL to test for a missing property"
                        self._fail(token, f"NULL equals nothing: {hint}")
                is_truth = left.constants and left.is_condition
                if is_truth and right.constants and not right.is_condition:
                    self._fail(sign, "TRUE and FALSE cannot be compared with other constants")
                left = self._equal(left, right, at)
                if sign.text == "<>":
                    left = self._negation(left, at)
            elif self._took("IS", "NULL"):
                left = self._is_null(left, at)
            elif self._took("IS", "NOT", "NULL"):
                left = self._negation(self._is_null(left, at), at)
            elif self._is_at("IS"):
                self._fail(sign, "IS must be followed by NULL or NOT NULL")
            else:
                return left

    def _comparison(self) -> Node:
        at = self._token
        left = self._unary()
        while True:
            token = self._token
            if token.kind == "sign" and token.text in _ORDERS:
                self._take()
                start = self._token
                left = self._ordered(token.text, left, at, self._unary(), start)
            elif self._took("BETWEEN"):
                left = self._between(left, at, is_not=False)
            elif self._took("NOT", "BETWEEN"):
                left = self._between(left, at, is_not=True)
            elif self._took("IN"):
                left = self._in(left, at)
            elif self._took("NOT", "IN"):
                left = self._negation(self._in(left, at), at)
            else:
                return left

    def _between(self, value: Node, at: _Token, *, is_not: bool) -> Node:
        low_at = self._token
        low = self._unary()
        self._expect("AND")
        high_at = self._token
        high = self._unary()
        signs = ("<", ">") if is_not else (">=", "<=")
        parts = [
            self._ordered(signs[0], value, at, low, low_at),
            self._ordered(signs[1], value, at, high, high_at),
        ]
        is_constant = low.constants and high.constants and not is_not
        if is_constant and compare(high.constants[0], low.constants[0]) < 0:
            self._fail(low_at, "BETWEEN takes the smaller number first")
        return self._join(is_not, parts, at)

    def _in(self, left: Node, at: _Token) -> Node:
        name = left.name
        if name is None:
            self._fail(at, "IN needs a property before it")
        self._expect("(")
        texts = {self._text()}
        while self._took(","):
            texts.add(self._text())
        self._expect(")")
        return Node(lambda properties: properties[name] in texts if name in properties else None)

    def _text(self) -> str:
        token = self._token
        if token.kind != "text":
            self._fail(token, "a text in single quotes is missing")
        return _unquoted(self._take().text)

    def _unary(self) -> Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self._fail(self._token, f"it is nested more than {MAX_DEPTH} deep")
        at = self._token
        if self._took("+"):
            node = self._unary()
        elif self._took("-"):
            node = self._minus(self._unary(), at)
        elif self._took("NOT"):
            start = self._token
            node = self._negation(self._condition(self._unary(), start), at)
        elif self._took("("):
            node = self._joined("OR", stop=True)
            self._expect(")")
        else:
            node = self._primary()
        self._depth -= 1
        return node

    def _primary(self) -> Node:
        token = self._token
        value: Value
        if token.kind == "name":
            self._take()
            name = token.text
            return Node(lambda found: found.get(name), is_condition=False, name=name)
        if token.kind == "text":
            value = _unquoted(token.text)
        elif token.kind == "whole":
            digits = token.text.rstrip("lL")
            if len(digits) > _MOST_DIGITS or int(digits) > java.LONG_MAX:
                self._fail(token, "the number does not fit 64 bits")
            value = int(digits)
        elif token.kind == "real":
            value = float(token.text)
            if value == math.inf:
                self._fail(token, "the number is too large")
        elif token.kind == "keyword" and token.text in _CONSTANTS:
            value = _CONSTANTS[token.text]
        else:
            self._fail(token, "a property or a constant is missing")
        self._take()
        is_condition = value is None or isinstance(value, bool)
        return Node(lambda _: value, is_condition=is_condition, constants=(value,))


def _unquoted(text: str) -> str:
    return text[1:-1].replace("''", "'")
