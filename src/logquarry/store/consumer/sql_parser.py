"""The parser of SQL92 filters.

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
"""

from __future__ import annotations

import re
from functools import lru_cache, partial
from typing import Final, NamedTuple, NoReturn

from logquarry.errors import BadFilter
from logquarry.format import java
from logquarry.store.consumer import sql_filter as tree

MAX_LENGTH: Final = 1 << 16
"""Maximum length of a filter in characters."""
MAX_DEPTH: Final = 40
"""Maximum nesting of brackets, NOT and minus, and maximum depth of the tree of nodes."""

_CACHED: Final = 100
_MOST_DIGITS: Final = 19
_ORDERS: Final = frozenset({">", ">=", "<", "<="})
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
_CONSTANTS: Final = {"TRUE": True, "FALSE": False, "NULL": None}


class _Token(NamedTuple):
    """A token; ``kind`` is real, whole, text, name, sign, keyword or end."""

    kind: str
    text: str
    at: int


@lru_cache(_CACHED)
def parse(expression: str) -> tree.SqlFilter:
    """Parse a filter. Raises BadFilter, and no other exception, if the filter is invalid."""
    if len(expression) > MAX_LENGTH:
        raise BadFilter(expression, MAX_LENGTH + 1, f"it has more than {MAX_LENGTH} characters")
    return tree.SqlFilter(expression, _Parser(expression).whole())


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

    def whole(self) -> tree.Node:
        node = self._condition(self._or(), self._tokens[0])
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
        for number, text in enumerate(texts, self._next):
            if number >= len(self._tokens):
                return False
            token = self._tokens[number]
            if token.text != text or token.kind not in ("sign", "keyword"):
                return False
        return True

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

    def _made(self, node: tree.Node, at: _Token) -> tree.Node:
        if node.depth > MAX_DEPTH:
            self._fail(at, f"it is nested more than {MAX_DEPTH} deep")
        return node

    def _condition(self, node: tree.Node, at: _Token) -> tree.Node:
        if node.is_condition:
            return node
        if isinstance(node, tree.Property):
            return self._made(tree.is_true(node), at)
        self._fail(at, "this is neither true nor false")

    # ---------------------------------------------------------------------------- the grammar
    def _or(self) -> tree.Node:
        return self._joined("OR", stop=True)

    def _joined(self, word: str, *, stop: bool) -> tree.Node:
        inner = partial(self._joined, "AND", stop=False) if stop else self._equality
        at = self._token
        first = inner()
        if not self._is_at(word):
            return first
        parts = [self._condition(first, at)]
        while self._took(word):
            start = self._token
            parts.append(self._condition(inner(), start))
        return self._made(tree.joined(stop, parts), at)

    def _equality(self) -> tree.Node:
        at = self._token
        left = self._comparison()
        while True:
            sign = self._token
            if self._took("=") or self._took("<>"):
                start = self._token
                right = self._comparison()
                self._check_equal(left, at)
                self._check_equal(right, start)
                if _is_truth(left) and isinstance(right, tree.Constant) and not _is_truth(right):
                    self._fail(sign, "TRUE and FALSE cannot be compared with other constants")
                left = self._made(tree.equality(left, right), at)
                if sign.text == "<>":
                    left = self._made(tree.negation(left), at)
            elif self._took("IS", "NULL"):
                left = self._made(tree.is_null(left), at)
            elif self._took("IS", "NOT", "NULL"):
                left = self._made(tree.negation(self._made(tree.is_null(left), at)), at)
            elif self._is_at("IS"):
                self._fail(sign, "IS must be followed by NULL or NOT NULL")
            else:
                return left

    def _check_equal(self, node: tree.Node, at: _Token) -> None:
        if isinstance(node, tree.Constant) and node.value is None:
            self._fail(at, "NULL equals nothing: use IS NULL to test for a missing property")

    def _comparison(self) -> tree.Node:
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
                left = self._made(tree.negation(self._in(left, at)), at)
            else:
                return left

    def _ordered(
        self, sign: str, left: tree.Node, at: _Token, right: tree.Node, start: _Token
    ) -> tree.Node:
        for node, token in ((left, at), (right, start)):
            if node.is_condition or (
                isinstance(node, tree.Constant) and isinstance(node.value, str)
            ):
                self._fail(token, "only numbers can be compared with <, <=, > and >=")
        return self._made(tree.ordered(sign, left, right), at)

    def _between(self, value: tree.Node, at: _Token, *, is_not: bool) -> tree.Node:
        low_at = self._token
        low = self._unary()
        self._expect("AND")
        high_at = self._token
        high = self._unary()
        signs = ("<", ">") if is_not else (">=", "<=")
        parts = (
            self._ordered(signs[0], value, at, low, low_at),
            self._ordered(signs[1], value, at, high, high_at),
        )
        is_constant = isinstance(low, tree.Constant) and isinstance(high, tree.Constant)
        if not is_not and is_constant and tree.compare(_value(high), _value(low)) < 0:
            self._fail(low_at, "BETWEEN takes the smaller number first")
        return self._made(tree.joined(is_not, parts), at)

    def _in(self, left: tree.Node, at: _Token) -> tree.Node:
        if not isinstance(left, tree.Property):
            self._fail(at, "IN needs a property before it")
        self._expect("(")
        texts = [self._text()]
        while self._took(","):
            texts.append(self._text())
        self._expect(")")
        return tree.is_in(left.name, frozenset(texts))

    def _text(self) -> str:
        token = self._take()
        if token.kind != "text":
            self._next -= 1
            self._fail(token, "a text in single quotes is missing")
        return _unquoted(token.text)

    def _unary(self) -> tree.Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self._fail(self._token, f"it is nested more than {MAX_DEPTH} deep")
        at = self._token
        if self._took("+"):
            node = self._unary()
        elif self._took("-"):
            node = self._made(tree.negative(self._unary()), at)
        elif self._took("NOT"):
            start = self._token
            node = self._made(tree.negation(self._condition(self._unary(), start)), at)
        elif self._took("("):
            node = self._or()
            self._expect(")")
        else:
            node = self._primary()
        self._depth -= 1
        return node

    def _primary(self) -> tree.Node:
        token = self._token
        node: tree.Node
        if token.kind == "name":
            node = tree.property_text(token.text)
        elif token.kind == "text":
            node = tree.constant(_unquoted(token.text))
        elif token.kind == "whole":
            node = tree.constant(self._whole_number(token))
        elif token.kind == "real":
            node = tree.constant(self._real_number(token))
        elif token.kind == "keyword" and token.text in _CONSTANTS:
            node = tree.constant(_CONSTANTS[token.text])
        else:
            self._fail(token, "a property or a constant is missing")
        self._take()
        return node

    def _whole_number(self, token: _Token) -> int:
        digits = token.text.rstrip("lL")
        if len(digits) > _MOST_DIGITS or int(digits) > java.LONG_MAX:
            self._fail(token, "the number does not fit 64 bits")
        return int(digits)

    def _real_number(self, token: _Token) -> float:
        value = float(token.text)
        if value == float("inf"):
            self._fail(token, "the number is too large")
        return value


def _value(node: tree.Node) -> int | float:
    assert isinstance(node, tree.Constant) and isinstance(node.value, (int, float))
    return node.value


def _is_truth(node: tree.Node) -> bool:
    return isinstance(node, tree.Constant) and node.is_condition


def _unquoted(text: str) -> str:
    return text[1:-1].replace("''", "'")
