"""The tables of ``config/`` as records in RocksDB.

Version 1 has a folder for each table, and the value of a record is JSON. Version 2
(``configManagerVersion=v2``) has all tables in one folder, with binary keys. :func:`document` makes
the table's JSON file (:mod:`logquarry.format.broker_json`) from its records.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from logquarry.format import java
from logquarry.format.broker_json import (
    CONSUMER_OFFSET_FILE,
    DATA_VERSION,
    OFFSET_TABLE,
    SUBSCRIPTION_GROUP_FILE,
    TOPICS_FILE,
    decode,
)


class ConfigTable(NamedTuple):
    """A table of the broker that is a JSON file in ``config/``, or records in RocksDB.

    ``folder`` is the folder in ``config/`` that has the table in RocksDB, version 1, and ``family``
    is the table's column family in FOLDER_SINGLE. ``name`` is the table's name in the JSON file,
    and ``ids`` are the table's numbers in the keys of version 2.
    """

    folder: str
    family: str
    name: str
    ids: tuple[int, ...]


_PULLED: Final = 2
CONFIG_TABLES: Final = {
    TOPICS_FILE: ConfigTable("topics", "topic", "topicConfigTable", (3,)),
    SUBSCRIPTION_GROUP_FILE: ConfigTable(
        "subscriptionGroups", "subscriptionGroup", "subscriptionGroupTable", (4,)
    ),
    CONSUMER_OFFSET_FILE: ConfigTable(
        "consumerOffsets", "consumerOffset", OFFSET_TABLE, (1, _PULLED)
    ),
}
FOLDER_V2: Final = "rdb"
FOLDER_SINGLE: Final = "metadata"
"""Folder in ``config/`` that has all tables in one database of version 1
(``useSingleRocksDBForAllConfigs``).
"""
CONFIG_FOLDERS: Final = (*(t.folder for t in CONFIG_TABLES.values()), FOLDER_SINGLE, FOLDER_V2)
"""All folders in ``config/`` that are RocksDB databases."""
_KEY: Final = struct.Struct(">BHB")
_TABLE, _DATA = 1, 2
_PULL_OFFSETS: Final = "pullOffsetTable"
_JSON: Final = b"\x01"
"""The first byte of a topic's or group's record in RocksDB; its value means that the rest is JSON
(``SerializationType.JSON``).
"""
_LENGTH: Final = struct.Struct(">H")
_QUEUE: Final = struct.Struct(">BI")
_OFFSET: Final = struct.Struct(">q")

Items = Iterable[tuple[bytes, bytes]]


def prefixes(file: str, version: int) -> tuple[bytes, ...]:
    """Return the prefixes with which the keys of one table begin."""
    ids = CONFIG_TABLES[file].ids
    return (b"",) if version == 1 else tuple(_KEY.pack(_TABLE, n, _DATA) for n in ids)


def document(file: str, items: Items, *, version: int) -> bytes:
    """Make the JSON document of a table from its records in RocksDB.

    ``file`` is the name of the JSON file that a broker without RocksDB writes for this table.
    Raises ValueError if a key or a value does not have the layout of ``version``.
    """
    table: dict[str, Any] = {}
    pulled: dict[str, Any] = {}
    offsets = file == CONSUMER_OFFSET_FILE
    for key, value in items:
        if version == 1:
            member = decode(value)
            table[_text(key)] = _offsets_v1(member) if offsets else member
        elif offsets:
            name, queue_id, offset = _offset_v2(key, value)
            is_pulled = _KEY.unpack_from(key)[1] == _PULLED
            (pulled if is_pulled else table).setdefault(name, {})[queue_id] = offset
        else:
            name, rest = _name(key[_KEY.size :])
            if rest or not value.startswith(_JSON):
                raise ValueError(f"the record {key!r} is not JSON")
            table[name] = decode(value[len(_JSON) :])
    found = {CONFIG_TABLES[file].name: table, DATA_VERSION: {}}
    return json.dumps(found | ({_PULL_OFFSETS: pulled} if pulled else {})).encode()


def _offsets_v1(member: Any) -> Any:
    if not isinstance(member, dict) or OFFSET_TABLE not in member:
        raise ValueError(f"there is no {OFFSET_TABLE!r} in {member!r}")
    return member[OFFSET_TABLE]


def _offset_v2(key: bytes, value: bytes) -> tuple[str, int, int]:
    group, rest = _name(key[_KEY.size :])
    topic, rest = _name(rest[1:])
    if len(rest) != _QUEUE.size or len(value) != _OFFSET.size:
        raise ValueError(f"the record {key!r} is not a consumer offset")
    return f"{topic}@{group}", _QUEUE.unpack(rest)[1], _OFFSET.unpack(value)[0]


def _name(data: bytes) -> tuple[str, bytes]:
    end = _LENGTH.size
    if len(data) >= end:
        end += _LENGTH.unpack_from(data)[0]
    if len(data) < end:
        raise ValueError(f"the key ends in {data!r}")
    return _text(data[_LENGTH.size : end]), data[end:]


def _text(name: bytes) -> str:
    return name.decode("utf-8", java.UTF8_ERRORS)
