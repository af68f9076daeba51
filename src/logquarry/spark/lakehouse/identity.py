"""What an export puts into a table, in words that the table keeps.

A table has one kind of rows: who comes back with other filters or columns would leave holes in it
that nobody sees. So the table says what it was begun with, and an export that wants something else
is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Final

from logquarry.errors import UsageError
from logquarry.spark.options import ReadOptions

_VERSION: Final = 1
# Where a new export starts, and no condition on what comes later.
_STARTS: Final = ("queue_ranges",)


def identity(
    read: ReadOptions, partition_by: Sequence[str], decode: Mapping[str, Any] | None
) -> dict[str, Any]:
    """What distinguishes an export from others into the same table.

    Args:
        read: what is read.
        partition_by: what the table is parted by.
        decode: how bodies are decoded, as JSON; None for not at all.
    """
    wanted = {
        field.name: _plain(value)
        for field in fields(read.wanted)
        if field.name not in _STARTS and (value := getattr(read.wanted, field.name)) is not None
    }
    return {
        "schema": read.schema,
        "columns": list(read.names),
        "partition_by": list(partition_by),
        "filters": wanted,
        "decode": dict(decode) if decode else None,
        "decompress": read.decompress,
    }


def document(own: Mapping[str, Any], start: Mapping[str, Any], dead_letters: str | None) -> str:
    """What the table keeps.

    Args:
        own: the :func:`identity`.
        start: what the planner said of the start besides offsets, which later runs keep.
        dead_letters: where the table of the dead letters is; None for none.
    """
    found = {"version": _VERSION, **own, "start": dict(start), "dead_letters": dead_letters}
    return json.dumps(found, sort_keys=True)


def parsed(name: str, text: str) -> dict[str, Any]:
    """The document of a table.

    Raises:
        UsageError: if it is none that this version knows.
    """
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict) or found.get("version") != _VERSION:
        raise UsageError(f"{name}: another version of logquarry made this table: {text!r}")
    return found


def check_same(name: str, own: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """That an export puts into a table what is in it already.

    Raises:
        UsageError: if not, with what differs.
    """
    for key, value in own.items():
        if json.loads(json.dumps(value)) != found.get(key):
            raise UsageError(
                f"{name}: the table was begun with {key} {json.dumps(found.get(key))}, and this "
                f"export has {json.dumps(value)}: export into another one"
            )


def _plain(value: Any) -> Any:
    if isinstance(value, frozenset | set):
        return sorted(_plain(item) for item in value)
    return list(value) if isinstance(value, tuple) else value
