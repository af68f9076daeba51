"""The configuration in RocksDB of RocketMQ 5, as the JSON documents that a broker without it keeps.

Version 1 has a RocksDB for topics, one for subscription groups and one for consumer offsets: the
key is the member's name in the JSON table, the value its JSON. Version 2 (``configManagerVersion``)
has one RocksDB, whose keys begin with the number of a table (``TablePrefix``, ``TableId``,
``RecordPrefix``).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from typing import Any, Final

from logquarry.format import broker_config, fastjson, java

FOLDERS_V1: Final = {
    broker_config.TOPICS_FILE: "topics",
    broker_config.SUBSCRIPTION_GROUP_FILE: "subscriptionGroups",
    broker_config.CONSUMER_OFFSET_FILE: "consumerOffsets",
}
"""JSON file -> folder of version 1 in ``config/``."""
FOLDER_V2: Final = "rdb"

_TABLES: Final = {
    broker_config.TOPICS_FILE: "topicConfigTable",
    broker_config.SUBSCRIPTION_GROUP_FILE: "subscriptionGroupTable",
    broker_config.CONSUMER_OFFSET_FILE: broker_config.OFFSET_TABLE,
}
_KEY: Final = struct.Struct(">BHB")
_TABLE, _DATA = 1, 2
_PULLED: Final = 2
_IDS: Final = {
    broker_config.CONSUMER_OFFSET_FILE: (1, _PULLED),
    broker_config.TOPICS_FILE: (3,),
    broker_config.SUBSCRIPTION_GROUP_FILE: (4,),
}
_PULL_OFFSETS: Final = "pullOffsetTable"
_JSON: Final = b"\x01"
"""``SerializationType.JSON``: the first byte of a topic or group."""
_LENGTH: Final = struct.Struct(">H")
_QUEUE: Final = struct.Struct(">BI")
_OFFSET: Final = struct.Struct(">q")

Items = Iterable[tuple[bytes, bytes]]


def prefixes(file: str, version: int) -> tuple[bytes, ...]:
    """The prefix of the keys of one table."""
    return (b"",) if version == 1 else tuple(_KEY.pack(_TABLE, n, _DATA) for n in _IDS[file])


def document(file: str, items: Items, *, version: int) -> bytes:
    """The JSON document of a table, as its decoder in ``broker_config`` takes it.

    Args:
        file: name of the JSON file that a broker without RocksDB writes.
        items: keys and values of the table.
        version: version of the layout, 1 or 2.

    Raises:
        ValueError: if a key or a value has another layout.
    """
    table: dict[str, Any] = {}
    pulled: dict[str, Any] = {}
    offsets = file == broker_config.CONSUMER_OFFSET_FILE
    for key, value in items:
        if version == 1:
            member = fastjson.decode(value)
            table[_text(key)] = _offsets_v1(member) if offsets else member
        elif offsets:
            name, queue_id, offset = _offset_v2(key, value)
            is_pulled = _KEY.unpack_from(key)[1] == _PULLED
            (pulled if is_pulled else table).setdefault(name, {})[queue_id] = offset
        else:
            name, rest = _name(key[_KEY.size :])
            if rest or not value.startswith(_JSON):
                raise ValueError(f"the record {key!r} is not JSON")
            table[name] = fastjson.decode(value[len(_JSON) :])
    found = {_TABLES[file]: table, broker_config.DATA_VERSION: {}}
    return json.dumps(found | ({_PULL_OFFSETS: pulled} if pulled else {})).encode()


def _offsets_v1(member: Any) -> Any:
    if not isinstance(member, dict) or broker_config.OFFSET_TABLE not in member:
        raise ValueError(f"there is no {broker_config.OFFSET_TABLE!r} in {member!r}")
    return member[broker_config.OFFSET_TABLE]


def _offset_v2(key: bytes, value: bytes) -> tuple[str, int, int]:
    group, rest = _name(key[_KEY.size :])
    topic, rest = _name(rest[1:])
    if len(rest) != _QUEUE.size or len(value) != _OFFSET.size:
        raise ValueError(f"the record {key!r} is no consumer offset")
    return f"{topic}@{group}", _QUEUE.unpack(rest)[1], _OFFSET.unpack(value)[0]


def _name(data: bytes) -> tuple[str, bytes]:
    """A name with its length before it, and the bytes after it."""
    if len(data) < _LENGTH.size:
        raise ValueError(f"the key ends in {data!r}")
    end = _LENGTH.size + _LENGTH.unpack_from(data)[0]
    return _text(data[_LENGTH.size : end]), data[end:]


def _text(name: bytes) -> str:
    return name.decode("utf-8", java.UTF8_ERRORS)
