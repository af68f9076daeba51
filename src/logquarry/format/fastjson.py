"""fastjson's dialect of JSON, in which brokers write ``config/*.json``.

Integer keys have no quotes, and the pretty printer writes entries with integer keys on one line.
The decoder accepts strict JSON too.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from typing import Any

# An unterminated string is one token: a retry at each quote would take quadratic time.
_STRING = r'"(?:\\.|[^"\\])*(?:"|\\?\Z)'
_TOKEN = re.compile(_STRING + r"|([{,]\s*)(-?[\w$]+)(\s*:)", re.DOTALL)
_BRACKET = re.compile(_STRING + r"|[\[{}\]]", re.DOTALL)
_ESCAPED = re.compile(r'["\\\x00-\x1f\x7f-\x9f\u2028\u2029]')
_SHORT_ESCAPES = {
    '"': r"\"",
    "\\": r"\\",
    "\b": r"\b",
    "\f": r"\f",
    "\n": r"\n",
    "\r": r"\r",
    "\t": r"\t",
}

_STRUCTURE = re.compile(_STRING + r"|[\[{}\],:]", re.DOTALL)

MAX_NESTING = 64


def replace_member(document: str, name: str, source: str) -> str:
    """Replace one member of a document's object by the same member of another document.

    All other bytes are unchanged, so members that logquarry does not know survive. If a document
    has no such member, this raises ValueError.
    """
    start, stop = _member_span(document, name)
    first, last = _member_span(source, name)
    return document[:start] + source[first:last] + document[stop:]


def _member_span(document: str, name: str) -> tuple[int, int]:
    depth, key_at, value_at, key = 0, 0, -1, ""
    for token in _STRUCTURE.finditer(document):
        sign = token[0]
        if sign in "{[":
            depth += 1
            if depth == 1:
                key_at = token.end()
        elif depth == 1 and sign == ":" and value_at < 0:
            key, value_at = document[key_at : token.start()].strip().strip('"'), token.end()
        elif depth == 1 and sign in ",}":
            if value_at >= 0 and key == name:
                return value_at, token.start()
            key_at, value_at = token.end(), -1
        if sign in "}]":
            depth -= 1
    raise ValueError(f"there is no member {name!r}")


def decode(text: str | bytes) -> Any:
    """Decode a document; keys without quotes become strings.

    If the text has another syntax or is nested too deeply, this raises ValueError.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8")

    def quote(match: re.Match[str]) -> str:
        before, key, after = match.groups()
        return match[0] if key is None else f'{before}"{key}"{after}'

    depth = deepest = 0
    for bracket in _BRACKET.findall(text):
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(bracket, 0)
        deepest = max(deepest, depth)
    if deepest > MAX_NESTING:
        raise ValueError(f"nested {deepest} deep, more than {MAX_NESTING}")
    # Try strict JSON first: the search for unquoted keys takes much longer than parsing.
    with contextlib.suppress(ValueError):
        return json.loads(text)
    return json.loads(_TOKEN.sub(quote, text))


def encode(value: Any) -> str:
    """Encode a document as fastjson's ``toJSONString(value, prettyFormat=true)``.

    JSON has no NaN and no infinite numbers: these raise ValueError.
    """
    return "".join(_pretty(value, 0))


class ObjectKeys(list[tuple[Any, Any]]):
    """The (key, value) pairs of a map whose keys are objects; fastjson writes ``{{"a":1}:2}``."""


def compact(value: Any, *, quote_keys: bool = False) -> str:
    """Encode a document as fastjson's ``toJSONString(value)``, for bodies of the remoting protocol.

    With ``quote_keys``, integer keys get quotes, as in strict JSON. NaN and infinite numbers raise
    ValueError.
    """
    if isinstance(value, ObjectKeys):
        items = (
            f"{compact(key, quote_keys=quote_keys)}:{compact(item, quote_keys=quote_keys)}"
            for key, item in value
        )
        return f"{{{','.join(items)}}}"
    if isinstance(value, Mapping):
        items = (
            f"{key if isinstance(key, int) and not quote_keys else _string(str(key))}:"
            f"{compact(item, quote_keys=quote_keys)}"
            for key, item in value.items()
        )
        return f"{{{','.join(items)}}}"
    if isinstance(value, list | tuple | set | frozenset):
        return f"[{','.join(compact(item, quote_keys=quote_keys) for item in value)}]"
    if isinstance(value, str):
        return _string(value)
    return json.dumps(value, allow_nan=False)


def _pretty(value: Any, depth: int) -> list[str]:
    inner = "\n" + "\t" * (depth + 1)
    outer = "\n" + "\t" * depth
    parts: list[str] = []
    if isinstance(value, Mapping):
        if not value:
            return ["{}"]
        for key, item in value.items():
            comma = "," if parts else ""
            if isinstance(key, int):
                parts.append(f"{comma}{key}:")
            else:
                parts.append(f"{comma}{inner}{_string(key)}:")
            parts += _pretty(item, depth + 1)
        return ["{", *parts, outer, "}"]
    if isinstance(value, (list, tuple)):
        if not value:
            return ["[]"]
        for item in value:
            parts.append(("," if parts else "") + inner)
            parts += _pretty(item, depth + 1)
        return ["[", *parts, outer, "]"]
    if isinstance(value, str):
        return [_string(value)]
    return [json.dumps(value, allow_nan=False)]


def _string(text: str) -> str:
    return f'"{_ESCAPED.sub(_escape, text)}"'


def _escape(match: re.Match[str]) -> str:
    character = match[0]
    return _SHORT_ESCAPES.get(character) or f"\\u{ord(character):04X}"
