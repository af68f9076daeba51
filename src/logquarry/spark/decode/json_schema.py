"""The types that a JSON Schema states, as Arrow types.

Types alone count: what a schema says of values (ranges, patterns, what is required) is not checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import pyarrow as pa

from logquarry.errors import UsageError
from logquarry.spark.decode.ddl import check_struct

_SIMPLE: Final = {
    "integer": pa.int64(),
    "number": pa.float64(),
    "boolean": pa.bool_(),
    "string": pa.string(),
}
_FORMATS: Final = {"date-time": pa.timestamp("us", "UTC"), "date": pa.date32()}
_DEEPEST: Final = 50


def struct_of_schema(document: Mapping[str, Any]) -> pa.StructType:
    """The struct of a schema for objects.

    Raises:
        UsageError: if it is of no object, or says what no column can be.
    """
    found = _type(document, document, "value", 0)
    if not pa.types.is_struct(found):
        raise UsageError("JSON Schema: takes one of an object with properties")
    check_struct(found)
    return found


def _type(schema: Any, root: Mapping[str, Any], path: str, depth: int) -> pa.DataType:
    if depth > _DEEPEST:
        raise UsageError(f"JSON Schema: {path[:80]} leads into itself, and columns cannot")
    if not isinstance(schema, Mapping):
        # true: anything.
        return pa.string()
    if "$ref" in schema:
        return _type(_referred(schema["$ref"], root), root, path, depth + 1)
    for word in ("anyOf", "oneOf"):
        if word in schema:
            some = [s for s in schema[word] if not _is_null(s)]
            return _type(some[0], root, path, depth + 1) if len(some) == 1 else pa.string()
    kinds = schema.get("type", "object" if "properties" in schema else None)
    kinds = [kinds] if isinstance(kinds, str) else [k for k in kinds or () if k != "null"]
    if set(kinds) == {"integer", "number"}:
        kinds = ["number"]
    if len(kinds) != 1:
        # Of several types only text can hold all: it gets the JSON.
        return pa.string()
    kind = kinds[0]
    if kind == "object":
        return _object(schema, root, path, depth)
    if kind == "array":
        return pa.list_(_type(schema.get("items", True), root, f"{path}[]", depth + 1))
    if kind == "string":
        return _FORMATS.get(schema.get("format", ""), pa.string())
    if kind == "null":
        return pa.string()
    if kind not in _SIMPLE:
        raise UsageError(f"JSON Schema: {path}: there is no type {kind!r}")
    return _SIMPLE[kind]


def _object(schema: Mapping[str, Any], root: Mapping[str, Any], path: str, depth: int) -> Any:
    properties = schema.get("properties")
    if properties:
        return pa.struct(
            [
                (name, _type(own, root, f"{path}.{name}", depth + 1))
                for name, own in properties.items()
            ]
        )
    return pa.map_(
        pa.string(), _type(schema.get("additionalProperties", True), root, path, depth + 1)
    )


def _referred(reference: Any, root: Mapping[str, Any]) -> Any:
    found: Any = root
    if not isinstance(reference, str) or not reference.startswith("#"):
        raise UsageError(f"JSON Schema: {reference!r} is in another document")
    for word in reference.lstrip("#").strip("/").split("/"):
        name = word.replace("~1", "/").replace("~0", "~")
        if name and (not isinstance(found, Mapping) or name not in found):
            raise UsageError(f"JSON Schema: there is no {reference!r}")
        found = found[name] if name else found
    return found


def _is_null(schema: Any) -> bool:
    return isinstance(schema, Mapping) and schema.get("type") == "null"
