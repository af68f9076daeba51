"""Avro bodies: plain datums of one schema, without a container file around them."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from functools import cached_property
from typing import Any, Final

import pyarrow as pa

from logquarry.errors import UsageError
from logquarry.spark.decode.ddl import check_struct
from logquarry.spark.decode.decoder import BodyDecoder, NotOfTheSchema

_SIMPLE: Final = {
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "bytes": pa.binary(),
    "string": pa.string(),
    "null": pa.string(),
}
_TIMES: Final = {
    "timestamp-millis": 1_000,
    "timestamp-micros": 1,
    "local-timestamp-millis": 1_000,
    "local-timestamp-micros": 1,
}
_WIDER: Final = ({"int", "long"}, {"float", "double"})
_LONG_MAX: Final = (1 << 63) - 1

Convert = Callable[[Any], Any]


class AvroDecoder(BodyDecoder):
    """Decodes datums.

    Args:
        schema: of a record, as JSON.

    Raises:
        UsageError: if it is none that columns can hold, or the package is missing.
    """

    def __init__(self, schema: str) -> None:
        try:
            import fastavro  # noqa: F401
        except ModuleNotFoundError:
            raise UsageError(
                "Avro takes the package fastavro: pip install 'logquarry[lakehouse]'"
            ) from None
        self._schema = schema
        kind, _ = self._planned
        if not pa.types.is_struct(kind):
            raise UsageError("Avro schema: takes one of a record")
        check_struct(kind)
        self.arrow_type = kind

    def __reduce__(self) -> tuple[Any, ...]:
        return AvroDecoder, (self._schema,)

    @cached_property
    def _planned(self) -> tuple[pa.DataType, Convert | None]:
        from fastavro.schema import parse_schema

        try:
            self._parsed = parse_schema(_without_times(json.loads(self._schema)))
            return _Types().of(json.loads(self._schema), "value")
        except UsageError:
            raise
        except Exception as error:
            # fastavro, and whoever wrote the schema, have many ways to say that it is none.
            raise UsageError(f"Avro schema: {type(error).__name__}: {error}") from error

    def value(self, body: bytes) -> Any:
        """One datum."""
        from fastavro import schemaless_reader

        _, convert = self._planned
        source = io.BytesIO(body)
        found = schemaless_reader(source, self._parsed, None)
        if source.tell() != len(body):
            raise NotOfTheSchema(
                f"the datum ends at byte {source.tell()} of {len(body)}: it has another schema"
            )
        return found if convert is None else convert(found)


def _without_times(schema: Any) -> Any:
    """A schema whose times stay numbers: Python's end with the year 9999."""
    if isinstance(schema, list):
        return [_without_times(own) for own in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {
        name: _without_times(value) if name in ("type", "items", "values", "fields") else value
        for name, value in schema.items()
    }
    if schema.get("logicalType") not in ("decimal", None):
        del kept["logicalType"]
    return kept


class _Types:
    """Arrow types of a schema, and what makes values ready for them where they are not."""

    def __init__(self) -> None:
        self._named: dict[str, Any] = {}
        self._open: list[str] = []

    def of(self, schema: Any, path: str, space: str = "") -> tuple[pa.DataType, Convert | None]:
        if isinstance(schema, list):
            return self._union(schema, path, space)
        if isinstance(schema, str):
            if schema in _SIMPLE:
                return _SIMPLE[schema], None
            name = schema if "." in schema or not space else f"{space}.{schema}"
            own = self._named.get(name, self._named.get(schema))
            if own is None:
                raise UsageError(f"Avro schema: {path}: there is no type {schema!r}")
            return self.of(own, path, space)
        kind = schema["type"]
        if isinstance(kind, dict | list):
            return self.of(kind, path, space)
        if kind in ("record", "error", "enum", "fixed"):
            space = schema.get("namespace", space)
            name = schema["name"] if "." in schema["name"] or not space else ""
            name = name or f"{space}.{schema['name']}"
            self._named[name] = schema
            if kind == "enum":
                return pa.string(), None
            if kind != "fixed":
                return self._record(schema, name, path, space)
        if kind == "array":
            item, convert = self.of(schema["items"], f"{path}[]", space)
            return pa.list_(item), None if convert is None else _each(convert)
        if kind == "map":
            item, convert = self.of(schema["values"], f"{path}{{}}", space)
            return pa.map_(pa.string(), item), _pairs(convert)
        return self._logical(schema, kind, path, space)

    def _logical(
        self, schema: dict[str, Any], kind: str, path: str, space: str
    ) -> tuple[pa.DataType, Convert | None]:
        logical = schema.get("logicalType")
        if logical == "date" and kind == "int":
            return pa.date32(), None
        if logical in _TIMES and kind == "long":
            factor = _TIMES[logical]
            return pa.timestamp("us", "UTC"), _times(factor) if factor > 1 else None
        if logical == "decimal" and kind in ("bytes", "fixed"):
            precision, scale = schema["precision"], schema.get("scale", 0)
            if precision > 38:
                raise UsageError(
                    f"Avro schema: {path}: no table has decimals of {precision} digits"
                )
            return pa.decimal128(precision, scale), None
        if kind == "fixed":
            return pa.binary(), None
        return self.of(kind, path, space)

    def _record(
        self, schema: dict[str, Any], name: str, path: str, space: str
    ) -> tuple[pa.DataType, Convert | None]:
        if name in self._open:
            raise UsageError(f"Avro schema: {path}: {name} is within itself, and columns cannot be")
        self._open.append(name)
        fields: list[tuple[str, pa.DataType]] = []
        converts: dict[str, Convert] = {}
        for field in schema["fields"]:
            kind, convert = self.of(field["type"], f"{path}.{field['name']}", space)
            fields.append((field["name"], kind))
            if convert is not None:
                converts[field["name"]] = convert
        self._open.pop()
        return pa.struct(fields), _fields(converts) if converts else None

    def _union(
        self, schema: list[Any], path: str, space: str
    ) -> tuple[pa.DataType, Convert | None]:
        some = [own for own in schema if own != "null"]
        for pair in _WIDER:
            if len(some) == 2 and all(isinstance(own, str) for own in some) and set(some) == pair:
                return _SIMPLE[max(some)] if "long" in pair else _SIMPLE["double"], None
        if len(some) > 1:
            raise UsageError(
                f"Avro schema: {path} is a union of {len(some)} types: a column has one, and null"
            )
        kind, convert = self.of(some[0], path, space) if some else (pa.string(), None)
        if convert is None:
            return kind, None
        own = convert
        return kind, lambda value: None if value is None else own(value)


def _each(convert: Convert) -> Convert:
    return lambda values: [convert(value) for value in values]


def _pairs(convert: Convert | None) -> Convert:
    if convert is None:
        return lambda value: list(value.items())
    return lambda value: [(name, convert(own)) for name, own in value.items()]


def _fields(converts: dict[str, Convert]) -> Convert:
    def convert(value: dict[str, Any]) -> dict[str, Any]:
        for name, own in converts.items():
            value[name] = own(value[name])
        return value

    return convert


def _times(factor: int) -> Convert:
    def convert(value: int) -> int:
        found = value * factor
        if not -_LONG_MAX <= found <= _LONG_MAX:
            raise NotOfTheSchema(f"the time {value} is beyond all microseconds")
        return found

    return convert
