"""Decodes JSON bodies, with a DDL, a JSON Schema, or types inferred from a sample.

If a body lacks a field, the column is null. The decoder ignores fields without a column. A column
of type string accepts any value. If the value is not a string, the column gets its JSON text. From
a JSON Schema, the decoder reads only the types, not ranges, patterns and required fields.
"""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from functools import partial
from typing import Any, Final

import pyarrow as pa

from logquarry.errors import UsageError
from logquarry.spark.decode.base import BodyDecoder, NotOfTheSchema, check_struct, is_column_name

_SIMPLE: Final = {
    "integer": pa.int64(),
    "number": pa.float64(),
    "boolean": pa.bool_(),
    "string": pa.string(),
}
_FORMATS: Final = {"date-time": pa.timestamp("us", "UTC"), "date": pa.date32()}
_DEEPEST: Final = 50


# ------------------------------------------------------------------------------------- JSON Schema
def struct_of_schema(document: Mapping[str, Any]) -> pa.StructType:
    """Return the struct of a JSON Schema for objects."""
    found = _type(document, document, "value", 0)
    if not pa.types.is_struct(found):
        raise UsageError("JSON Schema: needs an object with properties")
    check_struct(found)
    return found


def _type(schema: Any, root: Mapping[str, Any], path: str, depth: int) -> pa.DataType:
    if depth > _DEEPEST:
        raise UsageError(f"JSON Schema: {path[:80]} contains itself: not supported")
    if isinstance(schema, bool):
        # The schema `true` allows any value, so the column stores the value's JSON text.
        return pa.string()
    if not isinstance(schema, Mapping):
        raise _invalid(path, "a schema is an object, true or false", schema)
    if "$ref" in schema:
        return _type(_resolved(schema["$ref"], root), root, path, depth + 1)
    for word in ("anyOf", "oneOf"):
        if word in schema:
            if not isinstance(schema[word], list):
                raise _invalid(path, f"{word} takes a list of schemas", schema[word])
            some = [s for s in schema[word] if not _is_null(s)]
            return _type(some[0], root, path, depth + 1) if len(some) == 1 else pa.string()
    kinds = schema.get("type", "object" if "properties" in schema else [])
    if isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds):
        kinds = [kind for kind in kinds if kind != "null"]
    elif isinstance(kinds, str):
        kinds = [kinds]
    else:
        raise _invalid(path, "type takes the name of a type, or a list of names", kinds)
    if set(kinds) == {"integer", "number"}:
        kinds = ["number"]
    if len(kinds) != 1:
        # If values can have several types, the column stores their JSON text.
        return pa.string()
    kind = kinds[0]
    if kind == "object":
        return _object(schema, root, path, depth)
    if kind == "array":
        items = schema.get("items", True)
        # If `items` is a list, it has one schema for each position in the array, so the elements
        # can have several types. All elements of an Arrow list have one type.
        items = True if isinstance(items, list) else items
        return pa.list_(_type(items, root, f"{path}[]", depth + 1))
    if kind == "string":
        form = schema.get("format", "")
        if not isinstance(form, str):
            raise _invalid(path, "format takes a name", form)
        return _FORMATS.get(form, pa.string())
    if kind == "null":
        return pa.string()
    if kind not in _SIMPLE:
        raise UsageError(f"JSON Schema: {path}: there is no type {kind!r}")
    return _SIMPLE[kind]


def _object(schema: Mapping[str, Any], root: Mapping[str, Any], path: str, depth: int) -> Any:
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping):
        raise _invalid(path, "properties takes an object", properties)
    if not properties:
        items = schema.get("additionalProperties", True)
        return pa.map_(pa.string(), _type(items, root, path, depth + 1))
    fields = [
        (name, _type(own, root, f"{path}.{name}", depth + 1)) for name, own in properties.items()
    ]
    try:
        return pa.struct(fields)
    except UnicodeEncodeError:
        raise _invalid(path, "names of properties are valid text", list(properties)) from None


def _invalid(path: str, text: str, value: Any) -> UsageError:
    return UsageError(f"JSON Schema: {path[:80]}: {text}, not {json.dumps(value)[:80]}")


def _resolved(reference: Any, root: Mapping[str, Any]) -> Any:
    found: Any = root
    if not isinstance(reference, str) or not reference.startswith("#"):
        raise UsageError(f"JSON Schema: {reference!r} refers to another document: not supported")
    for word in reference.lstrip("#").strip("/").split("/"):
        name = word.replace("~1", "/").replace("~0", "~")
        if name and (not isinstance(found, Mapping) or name not in found):
            raise UsageError(f"JSON Schema: the reference {reference!r} does not exist")
        found = found[name] if name else found
    return found


def _is_null(schema: Any) -> bool:
    return isinstance(schema, Mapping) and schema.get("type") == "null"


# ---------------------------------------------------------------------------------------- decoder
_EXACT: Final = 1 << 53
_JSON_DEEPEST: Final = 20
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)

Convert = Callable[[Any], Any]


class JsonDecoder(BodyDecoder):
    """Decodes JSON objects."""

    def __init__(self, arrow_type: pa.DataType) -> None:
        self.arrow_type = arrow_type
        self._convert = _converter(arrow_type, "value")

    def __reduce__(self) -> tuple[Any, ...]:
        return JsonDecoder, (self.arrow_type,)

    def value(self, body: bytes) -> Any:
        """Decode one object."""
        return self._convert(parsed(body))


def parsed(body: bytes) -> dict[str, Any]:
    """Parse a body as a JSON object."""
    # json.loads on bytes would also accept UTF-16 and UTF-32.
    found = json.loads(body.decode("utf-8"), parse_float=_Number, parse_constant=_no_constant)
    if not isinstance(found, dict):
        raise NotOfTheSchema(f"is {_kind(found)}, not a JSON object")
    return found


class _Number(float):
    """A number with a point or exponent; `text` keeps all digits for a decimal column."""

    __slots__ = ("text",)
    text: str

    def __new__(cls, text: str) -> _Number:
        self = super().__new__(cls, text)
        self.text = text
        return self


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not valid JSON")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}
    return "null" if value is None else names.get(type(value), "a number")


# ------------------------------------------------------------------------------------------ types
def _converter(kind: pa.DataType, path: str) -> Convert:
    """Return a function that converts a JSON value to a value of `kind`; null stays null."""
    types = pa.types
    make: Convert
    if types.is_struct(kind):
        make = _struct(kind, path)
    elif types.is_list(kind):
        own = _converter(kind.value_type, f"{path}[]")
        make = _of(path, "an array", list, lambda value: [own(item) for item in value])
    elif types.is_map(kind):
        of_map = _converter(kind.item_type, f"{path}{{}}")
        make = _of(
            path,
            "an object",
            dict,
            lambda value: [(_text(k, path), of_map(v)) for k, v in value.items()],
        )
    elif types.is_boolean(kind):
        make = _of(path, "a boolean", bool, lambda value: value)
    elif types.is_integer(kind):
        make = partial(_integer, path, kind.bit_width)
    elif types.is_floating(kind):
        make = partial(_floating, path, is_single=types.is_float32(kind))
    elif types.is_decimal(kind):
        make = partial(_decimal, path)
    elif types.is_timestamp(kind):
        make = _of(path, "a string with a time", str, partial(_microseconds, path))
    elif types.is_date(kind):
        make = _of(path, "a string with a date", str, partial(_day, path))
    elif types.is_binary(kind):
        make = _of(path, "a string in base64", str, lambda v: base64.b64decode(v, validate=True))
    else:
        make = partial(_any_text, path)
    return lambda value: None if value is None else make(value)


def _of(path: str, what: str, kind: type, make: Convert) -> Convert:
    def convert(value: Any) -> Any:
        if type(value) is not kind:
            raise NotOfTheSchema(f"{path}: needs {what}, not {_kind(value)}")
        return make(value)

    return convert


def _struct(kind: pa.StructType, path: str) -> Convert:
    fields = [(child.name, _converter(child.type, f"{path}.{child.name}")) for child in kind]

    def convert(value: Mapping[str, Any]) -> dict[str, Any]:
        return {name: own(value.get(name)) for name, own in fields}

    return _of(path, "an object", dict, convert)


def _integer(path: str, bits: int, value: Any) -> int:
    least, largest = -(1 << bits - 1), (1 << bits - 1) - 1
    if isinstance(value, _Number) and value.is_integer() and abs(value) <= _EXACT:
        value = int(value)
    if type(value) is not int:
        what = _kind(value) if not isinstance(value, float) else "a number with a fraction"
        raise NotOfTheSchema(f"{path}: needs a whole number, not {what}")
    if not least <= value <= largest:
        raise NotOfTheSchema(f"{path}: needs a whole number of {bits} bits, not {value}")
    return value


def _floating(path: str, value: Any, *, is_single: bool) -> float:
    if type(value) is not int and not isinstance(value, float):
        raise NotOfTheSchema(f"{path}: needs a number, not {_kind(value)}")
    try:
        found = float(value)
        if is_single:
            # Arrow would turn a number that is too large for 32 bits into infinity.
            struct.pack("<f", found)
    except OverflowError:
        found = math.inf
    if math.isinf(found):
        raise NotOfTheSchema(f"{path}: the number is too large")
    return found


def _decimal(path: str, value: Any) -> Decimal:
    if type(value) is int:
        return Decimal(value)
    if isinstance(value, _Number):
        return Decimal(value.text)
    raise NotOfTheSchema(f"{path}: needs a number, not {_kind(value)}")


def _microseconds(path: str, text: str) -> int:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise NotOfTheSchema(f"{path}: needs a time (ISO 8601), not {text!r}") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return (moment - _EPOCH) // _MICROSECOND


def _day(path: str, text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise NotOfTheSchema(f"{path}: needs a date (ISO 8601), not {text!r}") from None


def _any_text(path: str, value: Any) -> str:
    return _text(value if type(value) is str else _as_json(value), path)


def _as_json(value: Any) -> str:
    if isinstance(value, _Number):
        return value.text
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _text(value: str, path: str) -> str:
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise NotOfTheSchema(f"{path}: contains half of a surrogate pair") from None
    return value


# ---------------------------------------------------------------------------------------- inference
def inferred(bodies: Iterable[bytes]) -> tuple[pa.DataType | None, int]:
    """Return (struct, number of JSON objects); the struct fits all JSON objects among `bodies`.

    The struct is None if no object has a field. Types of fields:

    - ``bigint`` if all values are whole numbers; ``double`` if all values are numbers.
    - ``string`` if the values have several types, or are all null.
    - A field whose name cannot be a column name gets no column.
    """
    found: pa.DataType | None = None
    count = 0
    for body in bodies:
        try:
            value = parsed(body)
        except (ValueError, RecursionError):
            continue
        count += 1
        found = _merged(found, _type_of(value, 0))
    if found is None:
        return None, count
    whole = _complete(found)
    return (whole if pa.types.is_struct(whole) else None), count


def _type_of(value: Any, depth: int) -> pa.DataType:
    if value is None:
        return pa.null()
    if depth > _JSON_DEEPEST:
        return pa.string()
    if isinstance(value, dict):
        fields: dict[str, pa.DataType] = {}
        seen: set[str] = set()
        for name, own in value.items():
            if is_column_name(name) and name.isprintable() and name.lower() not in seen:
                seen.add(name.lower())
                fields[name] = _type_of(own, depth + 1)
        return pa.struct(list(fields.items()))
    if isinstance(value, list):
        item: pa.DataType | None = None
        for own in value:
            item = _merged(item, _type_of(own, depth + 1))
        return pa.list_(pa.null() if item is None else item)
    if isinstance(value, bool):
        return pa.bool_()
    if isinstance(value, int):
        return pa.int64() if -(1 << 63) <= value < 1 << 63 else pa.float64()
    return pa.float64() if isinstance(value, float) else pa.string()


def _merged(one: pa.DataType | None, other: pa.DataType) -> pa.DataType:
    if one is None or pa.types.is_null(one) or one.equals(other):
        return other
    if pa.types.is_null(other):
        return one
    if pa.types.is_struct(one) and pa.types.is_struct(other):
        fields = {child.name: child.type for child in one}
        by_lower = {name.lower(): name for name in fields}
        for child in other:
            name = by_lower.get(child.name.lower())
            if name is None:
                fields[child.name] = child.type
            elif name == child.name:
                fields[name] = _merged(fields[name], child.type)
        return pa.struct(list(fields.items()))
    if pa.types.is_list(one) and pa.types.is_list(other):
        return pa.list_(_merged(one.value_type, other.value_type))
    if {str(one), str(other)} == {"int64", "double"}:
        return pa.float64()
    return pa.string()


def _complete(kind: pa.DataType) -> pa.DataType:
    """Replace types that tables do not support (``null``, structs without fields) by string."""
    if pa.types.is_null(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(_complete(kind.value_type))
    if pa.types.is_struct(kind):
        if not kind.num_fields:
            return pa.string()
        return pa.struct([(child.name, _complete(child.type)) for child in kind])
    return kind
