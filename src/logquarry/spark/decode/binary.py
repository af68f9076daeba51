"""Decodes binary bodies: Avro and Protobuf.

An Avro body is a single datum without the header of an Avro file; all bodies have the same schema.
If a Protobuf message lacks a field, the column gets the field's default, or null if Protobuf tracks
the field's presence. An enum value becomes its name, or its number (as text) if it has no name.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from typing import Any, Final

import pyarrow as pa

from logquarry.errors import MissingExtra, UsageError
from logquarry.spark.decode.base import BodyDecoder, NotOfTheSchema, check_struct

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
    """Decodes Avro datums."""

    def __init__(self, schema: str) -> None:
        try:
            from fastavro.schema import parse_schema
        except ModuleNotFoundError:
            raise MissingExtra(
                "Avro needs the package fastavro: pip install 'logquarry[lakehouse]'"
            ) from None
        self._schema = schema
        try:
            self._parsed = parse_schema(_without_times(json.loads(schema)))
            self.arrow_type, self._convert = _Types().of(json.loads(schema), "value")
        except UsageError:
            raise
        except Exception as error:
            # fastavro raises many types of exceptions on invalid schemas.
            raise UsageError(f"Avro schema: {type(error).__name__}: {error}") from error
        if not pa.types.is_struct(self.arrow_type):
            raise UsageError("Avro schema: needs a record")
        check_struct(self.arrow_type)

    def __reduce__(self) -> tuple[Any, ...]:
        return AvroDecoder, (self._schema,)

    def value(self, body: bytes) -> Any:
        """Decode one datum."""
        from fastavro import schemaless_reader

        source = io.BytesIO(body)
        found = schemaless_reader(source, self._parsed, None)
        if source.tell() != len(body):
            raise NotOfTheSchema(
                f"the datum ends at byte {source.tell()} of {len(body)}: the schema differs"
            )
        return found if self._convert is None else self._convert(found)


def _without_times(schema: Any) -> Any:
    """Remove the logical types of times from a schema.

    fastavro would convert such values to Python's datetime, which cannot represent years after
    9999.
    """
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
    """Maps Avro types to Arrow types, and to converters for values that Arrow rejects."""

    def __init__(self) -> None:
        # Maps the full name of a type to its schema and to the namespace in which the type is
        # defined.
        self._named: dict[str, tuple[Any, str]] = {}
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
            # Short names in the schema refer to the namespace in which the type is defined.
            return self.of(own[0], path, own[1])
        kind = schema["type"]
        if isinstance(kind, dict | list):
            return self.of(kind, path, space)
        if kind in ("record", "error", "enum", "fixed"):
            around, word = space, schema["name"]
            if "." in word:
                # Avro ignores the attribute `namespace` if the name contains dots.
                space = word.rpartition(".")[0]
                name = word
            else:
                space = schema.get("namespace", space)
                name = f"{space}.{word}" if space else word
            self._named[name] = schema, around
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
            return pa.timestamp("us", "UTC"), partial(_times, factor) if factor > 1 else None
        if logical == "decimal" and kind in ("bytes", "fixed"):
            precision, scale = schema["precision"], schema.get("scale", 0)
            if precision > 38:
                raise UsageError(
                    f"Avro schema: {path}: decimals have at most 38 digits, not {precision}"
                )
            return pa.decimal128(precision, scale), None
        if kind == "fixed":
            return pa.binary(), None
        return self.of(kind, path, space)

    def _record(
        self, schema: dict[str, Any], name: str, path: str, space: str
    ) -> tuple[pa.DataType, Convert | None]:
        if name in self._open:
            raise UsageError(f"Avro schema: {path}: {name} contains itself: not supported")
        self._open.append(name)
        fields: list[tuple[str, pa.DataType]] = []
        converts: dict[str, Convert] = {}
        for field in schema["fields"]:
            kind, convert = self.of(field["type"], f"{path}.{field['name']}", space)
            fields.append((field["name"], kind))
            if convert is not None:
                converts[field["name"]] = convert
        self._open.pop()
        return pa.struct(fields), partial(_fields, converts) if converts else None

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


def _fields(converts: dict[str, Convert], value: dict[str, Any]) -> dict[str, Any]:
    for name, own in converts.items():
        value[name] = own(value[name])
    return value


def _times(factor: int, value: int) -> int:
    found = value * factor
    if not -_LONG_MAX <= found <= _LONG_MAX:
        raise NotOfTheSchema(f"the time {value} is outside the range of microseconds")
    return found


_TIMESTAMP: Final = "google.protobuf.Timestamp"


class ProtobufDecoder(BodyDecoder):
    """Decodes Protobuf messages.

    `descriptors` is a serialized `FileDescriptorSet` of the message and all its imports.
    """

    def __init__(self, descriptors: bytes, message: str) -> None:
        try:
            from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
        except ModuleNotFoundError:
            raise MissingExtra(
                "Protobuf needs the package protobuf: pip install 'logquarry[lakehouse]'"
            ) from None
        self._given = descriptors, message
        pool = descriptor_pool.DescriptorPool()
        files = descriptor_pb2.FileDescriptorSet()
        try:
            files.ParseFromString(descriptors)
            for file in _in_order(files.file):
                pool.Add(file)
            found = pool.FindMessageTypeByName(message)
        except KeyError:
            known = sorted(
                f"{file.package}.{own.name}".lstrip(".")
                for file in files.file
                for own in file.message_type
            )
            raise UsageError(
                f"descriptor set: there is no message {message!r}; there are: "
                f"{', '.join(known) or 'none'}"
            ) from None
        except Exception as error:
            raise UsageError(f"descriptor set: {type(error).__name__}: {error}") from error
        self._message: Any = message_factory.GetMessageClass(found)
        self.arrow_type, self._convert = _message_type(found, "value", ())
        check_struct(self.arrow_type)

    def __reduce__(self) -> tuple[Any, ...]:
        return ProtobufDecoder, self._given

    def value(self, body: bytes) -> Any:
        """Decode one message."""
        found = self._message.FromString(body)
        if not found.IsInitialized():
            missing = ", ".join(found.FindInitializationErrors())
            raise NotOfTheSchema(f"required fields are missing: {missing}")
        return self._convert(found)


def _in_order(files: Any) -> list[Any]:
    """Sort the files of a descriptor set, so that each file comes after its imports."""
    by_name = {file.name: file for file in files}
    found: dict[str, Any] = {}

    def add(name: str) -> None:
        if name in by_name and name not in found:
            file = by_name.pop(name)
            for other in file.dependency:
                add(other)
            found[name] = file

    for name in list(by_name):
        add(name)
    return list(found.values())


def _message_type(
    descriptor: Any, path: str, within: tuple[str, ...]
) -> tuple[pa.DataType, Convert]:
    if descriptor.full_name == _TIMESTAMP:
        return pa.timestamp("us", "UTC"), _microseconds
    if descriptor.full_name in within:
        raise UsageError(
            f"descriptor set: {path}: {descriptor.full_name} contains itself: not supported"
        )
    inner = (*within, descriptor.full_name)
    types: list[tuple[str, pa.DataType]] = []
    reads: list[tuple[str, Callable[[Any], Any]]] = []
    for field in descriptor.fields:
        kind, read = _field(field, f"{path}.{field.name}", inner)
        types.append((field.name, kind))
        reads.append((field.name, read))

    def convert(message: Any) -> dict[str, Any]:
        return {name: read(message) for name, read in reads}

    return pa.struct(types), convert


def _field(field: Any, path: str, within: tuple[str, ...]) -> tuple[pa.DataType, Convert]:
    name = field.name
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key_type, key = _single(field.message_type.fields_by_name["key"], path, within)
        item_type, item = _single(field.message_type.fields_by_name["value"], path, within)
        if key_type != pa.string():
            # Some table formats accept only maps whose keys are text.
            key_type, key = pa.string(), _as_text
        return pa.map_(key_type, item_type), lambda message: [
            (key(k), item(v)) for k, v in getattr(message, name).items()
        ]
    kind, convert = _single(field, path, within)
    if field.is_repeated:
        return pa.list_(kind), lambda message: [convert(own) for own in getattr(message, name)]
    if field.has_presence:
        return (
            kind,
            lambda message: convert(getattr(message, name)) if message.HasField(name) else None,
        )
    return kind, lambda message: convert(getattr(message, name))


def _as_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _single(field: Any, path: str, within: tuple[str, ...]) -> tuple[pa.DataType, Convert]:
    if field.message_type is not None:
        return _message_type(field.message_type, path, within)
    if field.enum_type is not None:
        names = {number: own.name for number, own in field.enum_type.values_by_number.items()}
        return pa.string(), lambda value: names.get(value, str(value))
    kinds = {
        field.CPPTYPE_INT32: pa.int32(),
        field.CPPTYPE_INT64: pa.int64(),
        field.CPPTYPE_UINT32: pa.int64(),
        # bigint cannot hold all values of uint64; Spark's from_protobuf uses decimal(20, 0) too.
        field.CPPTYPE_UINT64: pa.decimal128(20, 0),
        field.CPPTYPE_FLOAT: pa.float32(),
        field.CPPTYPE_DOUBLE: pa.float64(),
        field.CPPTYPE_BOOL: pa.bool_(),
        field.CPPTYPE_STRING: pa.string(),
    }
    if field.type == field.TYPE_BYTES:
        return pa.binary(), _same
    kind = kinds[field.cpp_type]
    return kind, Decimal if field.cpp_type == field.CPPTYPE_UINT64 else _same


def _same(value: Any) -> Any:
    return value


def _microseconds(moment: Any) -> int:
    found = int(moment.seconds) * 1_000_000 + int(moment.nanos) // 1_000
    if not -_LONG_MAX <= found <= _LONG_MAX:
        raise NotOfTheSchema(f"the time {moment.seconds} s is outside the range of microseconds")
    return found
