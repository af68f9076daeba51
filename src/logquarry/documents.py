"""Makes JSON documents of objects: by default, each field of a dataclass becomes a member."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any


def document(value: Any, names: Iterable[str] | None = None) -> dict[str, Any]:
    """The JSON document of an object.

    Args:
        value: the object.
        names: attributes that become members, in order (default: the fields of the dataclass).
    """
    if names is None:
        names = [field.name for field in fields(value)]
    return {name: json_value(getattr(value, name)) for name in names}


def json_value(value: Any) -> Any:
    """The JSON value of an attribute; an object's own ``to_json`` takes precedence."""
    if hasattr(value, "to_json"):
        return value.to_json()
    if is_dataclass(value):
        return document(value)
    if isinstance(value, Mapping):
        return {key: json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(item) for item in value]
    return value
