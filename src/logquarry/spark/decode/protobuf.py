"""Protobuf bodies: messages of one type of a descriptor set (``protoc -o``).

Fields that say whether they are there are null where they are not; others have their default then,
as Protobuf has it. Enums are their names, or the number of a value that has none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, Final

import pyarrow as pa

from logquarry.errors import UsageError
from logquarry.spark.decode.ddl import check_struct
from logquarry.spark.decode.decoder import BodyDecoder, NotOfTheSchema

_TIMESTAMP: Final = "google.protobuf.Timestamp"
_LONG_MAX: Final = (1 << 63) - 1

Convert = Callable[[Any], Any]


class ProtobufDecoder(BodyDecoder):
    """Decodes messages.

    Args:
        descriptors: a serialized `FileDescriptorSet` with all that the message imports.
        message: full name of the message.

    Raises:
        UsageError: if there is no such message, columns cannot hold it, or the package is missing.
    """

    def __init__(self, descriptors: bytes, message: str) -> None:
        self._descriptors = descriptors
        self._message = message
        self.arrow_type, _ = self._planned[1]
        check_struct(self.arrow_type)

    def __reduce__(self) -> tuple[Any, ...]:
        return ProtobufDecoder, (self._descriptors, self._message)

    @cached_property
    def _planned(self) -> tuple[Any, tuple[pa.DataType, Convert]]:
        """The message's class, and its type."""
        try:
            from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
        except ModuleNotFoundError:
            raise UsageError(
                "Protobuf takes the package protobuf: pip install 'logquarry[lakehouse]'"
            ) from None
        pool = descriptor_pool.DescriptorPool()
        files = descriptor_pb2.FileDescriptorSet()
        try:
            files.ParseFromString(self._descriptors)
            for file in _in_order(files.file):
                pool.Add(file)
            found = pool.FindMessageTypeByName(self._message)
        except KeyError:
            known = sorted(
                f"{file.package}.{own.name}".lstrip(".")
                for file in files.file
                for own in file.message_type
            )
            raise UsageError(
                f"descriptor set: there is no message {self._message!r}; there are "
                f"{', '.join(known) or 'none'}"
            ) from None
        except Exception as error:
            raise UsageError(f"descriptor set: {type(error).__name__}: {error}") from error
        return message_factory.GetMessageClass(found), _message_type(found, "value", ())

    def value(self, body: bytes) -> Any:
        """One message."""
        made, (_, convert) = self._planned
        found = made.FromString(body)
        if not found.IsInitialized():
            missing = ", ".join(found.FindInitializationErrors())
            raise NotOfTheSchema(f"required fields are missing: {missing}")
        return convert(found)


def _in_order(files: Any) -> list[Any]:
    """Files behind those that they import, as far as these are there."""
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
            f"descriptor set: {path}: {descriptor.full_name} is within itself, and columns cannot "
            "be"
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
            # Of all tables' maps the keys can be text.
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
    """The type of one value of a field."""
    if field.message_type is not None:
        return _message_type(field.message_type, path, within)
    if field.enum_type is not None:
        names = {number: own.name for number, own in field.enum_type.values_by_number.items()}
        return pa.string(), lambda value: names.get(value, str(value))
    kinds = {
        field.CPPTYPE_INT32: pa.int32(),
        field.CPPTYPE_INT64: pa.int64(),
        field.CPPTYPE_UINT32: pa.int64(),
        # Beyond a bigint; Spark's own from_protobuf says it so, too.
        field.CPPTYPE_UINT64: pa.decimal128(20, 0),
        field.CPPTYPE_FLOAT: pa.float32(),
        field.CPPTYPE_DOUBLE: pa.float64(),
        field.CPPTYPE_BOOL: pa.bool_(),
        field.CPPTYPE_STRING: pa.string(),
    }
    if field.type == field.TYPE_BYTES:
        return pa.binary(), _same
    kind = kinds[field.cpp_type]
    return kind, _decimal if field.cpp_type == field.CPPTYPE_UINT64 else _same


def _same(value: Any) -> Any:
    return value


def _decimal(value: int) -> Any:
    from decimal import Decimal

    return Decimal(value)


def _microseconds(moment: Any) -> int:
    found = int(moment.seconds) * 1_000_000 + int(moment.nanos) // 1_000
    if not -_LONG_MAX <= found <= _LONG_MAX:
        raise NotOfTheSchema(f"the time {moment.seconds} s is beyond all microseconds")
    return found
