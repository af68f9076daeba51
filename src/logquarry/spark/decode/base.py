"""The decoders' base class, the struct types of bodies, and a parser for Spark's DDL.

Exports check schemas before Spark starts, so the parser does not use Spark.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import Any, Final

import pyarrow as pa

from logquarry.errors import UsageError

_LONGEST_REASON: Final = 500


class BodyDecoder(ABC):
    """Decodes bodies into values of an Arrow struct. Picklable."""

    arrow_type: pa.DataType

    @abstractmethod
    def value(self, body: bytes) -> Any:
        """Decode one body into a value for :func:`pyarrow.array`."""

    def field(self, name: str) -> pa.Field:
        """Return the Arrow field of the column `name`."""
        return pa.field(name, self.arrow_type)

    def decode(self, bodies: pa.Array) -> tuple[pa.Array, dict[int, str]]:
        """Decode bodies; return (values, {row: reason}), with null for a body that fails."""
        values: list[Any] = []
        failed: dict[int, str] = {}
        for row, body in enumerate(bodies.to_pylist()):
            try:
                values.append(self.value(body or b""))
            except Exception as error:
                # For invalid bodies, the libraries raise exceptions of many types.
                failed[row] = reason(error)
                values.append(None)
        try:
            return pa.array(values, self.arrow_type), failed
        except (pa.ArrowException, ValueError, TypeError, OverflowError):
            return self._singly(values, failed), failed

    def _singly(self, values: list[Any], failed: dict[int, str]) -> pa.Array:
        """Make an array; replace each value of a wrong type by null and add its row to `failed`."""
        for row, value in enumerate(values):
            try:
                pa.array([value], self.arrow_type)
            except MemoryError:
                raise
            except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
                failed[row] = reason(error)
                values[row] = None
        return pa.array(values, self.arrow_type)


class NotOfTheSchema(ValueError):
    """A value does not have the type of its column."""


def reason(error: BaseException) -> str:
    """Return an exception's text for the dead letters, at most 500 characters."""
    text = str(error).encode("utf-8", "replace").decode("utf-8")
    if not isinstance(error, NotOfTheSchema):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text[:_LONGEST_REASON]


# ---------------------------------------------------------------------------- struct types, DDL
_SIMPLE: Final = {
    "boolean": pa.bool_(),
    "tinyint": pa.int8(),
    "byte": pa.int8(),
    "smallint": pa.int16(),
    "short": pa.int16(),
    "int": pa.int32(),
    "integer": pa.int32(),
    "bigint": pa.int64(),
    "long": pa.int64(),
    "float": pa.float32(),
    "real": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "decimal": pa.decimal128(10, 0),
}
_TOKEN: Final = re.compile(r"\s*(?:`((?:[^`]|``)+)`|([A-Za-z0-9_$-]+)|([<>(),:]))")
_DEEPEST: Final = 50


def struct_of(text: str) -> pa.StructType:
    """Parse a DDL: ``id bigint, tags array<string>``, or ``struct<...>``."""
    parser = _Parser(text)
    if re.match(r"\s*struct\s*<", text, re.IGNORECASE):
        found = parser.type()
    else:
        found = parser.fields(None)
    parser.expect_end()
    check_struct(found)
    return found


def check_struct(kind: pa.DataType, path: str = "value") -> None:
    """Raise UsageError if Delta or Iceberg cannot store the struct."""
    if pa.types.is_struct(kind):
        if not kind.num_fields:
            raise UsageError(f"schema: {path} has no fields: tables need at least one")
        seen: set[str] = set()
        for child in kind:
            if not is_column_name(child.name):
                raise UsageError(f"schema: {path} has a field {child.name!r}: invalid column name")
            if child.name.lower() in seen:
                raise UsageError(f"schema: {path} has {child.name} twice (names ignore case)")
            seen.add(child.name.lower())
            check_struct(child.type, f"{path}.{child.name}")
    elif pa.types.is_list(kind):
        check_struct(kind.value_type, f"{path}[]")
    elif pa.types.is_map(kind):
        check_struct(kind.item_type, f"{path}{{}}")


def is_column_name(name: str) -> bool:
    """Return whether Delta and Iceberg accept the column name."""
    return bool(name) and re.search(r"[ ,;{}()\n\t=.\x00]", name) is None


def plain(kind: pa.DataType) -> pa.DataType:
    """Replace the types that a library chose, such as large_string, by logquarry's types."""
    types = pa.types
    if types.is_struct(kind):
        return pa.struct([(child.name, plain(child.type)) for child in kind])
    if types.is_map(kind):
        return pa.map_(plain(kind.key_type), plain(kind.item_type))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_list_view(kind):
        return pa.list_(plain(kind.value_type))
    if types.is_large_string(kind) or types.is_string_view(kind):
        return pa.string()
    if types.is_large_binary(kind) or types.is_binary_view(kind):
        return pa.binary()
    if types.is_timestamp(kind):
        return pa.timestamp("us", "UTC")
    return kind


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def _look(self) -> re.Match[str] | None:
        return _TOKEN.match(self._text, self._at)

    def _symbol(self, wanted: str) -> bool:
        found = self._look()
        if found is not None and found[3] == wanted:
            self._at = found.end()
            return True
        return False

    def _name(self, what: str) -> str:
        found = self._look()
        if found is None or found[3] is not None:
            raise self._error(f"takes {what} here")
        self._at = found.end()
        return found[2] if found[1] is None else found[1].replace("``", "`")

    def _expect(self, symbol: str) -> None:
        if not self._symbol(symbol):
            raise self._error(f"takes {symbol!r} here")

    def _error(self, text: str) -> UsageError:
        rest = self._text[self._at :].strip()[:40]
        return UsageError(f"schema: {text}: {rest!r} (of {self._text[:80]!r})")

    def expect_end(self) -> None:
        if self._text[self._at :].strip():
            raise self._error("takes nothing more")

    def fields(self, end: str | None) -> pa.StructType:
        """Parse fields up to the symbol `end`, or to the end of the text."""
        found: list[tuple[str, pa.DataType]] = []
        while end is None or not self._symbol(end):
            name = self._name("the name of a column")
            self._symbol(":")
            found.append((name, self.type()))
            for word in ("not", "null"):
                if (token := self._look()) is not None and (token[2] or "").lower() == word:
                    # Ignore NOT NULL: a body can lack any field, and the column is then null.
                    self._at = token.end()
            if not self._symbol(","):
                if end is not None:
                    self._expect(end)
                break
        return pa.struct(found)

    def type(self) -> pa.DataType:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise UsageError(f"schema: more than {_DEEPEST} nested types")
        word = self._name("a type")
        name = word.lower()
        found: pa.DataType
        if name == "struct":
            self._expect("<")
            found = self.fields(">")
        elif name == "array":
            self._expect("<")
            found = pa.list_(self.type())
            self._expect(">")
        elif name == "map":
            self._expect("<")
            key = self.type()
            self._expect(",")
            found = pa.map_(key, self.type())
            if key != pa.string():
                raise UsageError("schema: a map needs keys of type string")
            self._expect(">")
        elif name in ("decimal", "numeric", "dec") and self._symbol("("):
            precision = self._name("a precision")
            scale = self._name("a scale") if self._symbol(",") else "0"
            self._expect(")")
            try:
                found = pa.decimal128(int(precision), int(scale))
            except ValueError as error:
                raise UsageError(f"schema: decimal({precision},{scale}): {error}") from None
            if int(scale) > int(precision):
                raise UsageError(f"schema: decimal({precision},{scale}): scale above precision")
        elif name in _SIMPLE:
            found = _SIMPLE[name]
        else:
            raise UsageError(f"schema: there is no type {word!r}")
        self._depth -= 1
        return found
