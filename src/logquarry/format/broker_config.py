"""A broker's settings and offsets: the JSON tables in ``config/``, and their form in RocksDB.

A decoder never guesses: it raises ValueError with the reason. In RocksDB, version 1 has one
database per table: a key is a member's name in the JSON table, and the value is the member's JSON.
Version 2 (``configManagerVersion``) has one database; a key begins with the number of its table
(``TablePrefix``, ``TableId``, ``RecordPrefix``).
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final, NamedTuple

from logquarry.format import fastjson, java

DELAY_OFFSET_FILE = "delayOffset.json"
CONSUMER_OFFSET_FILE = "consumerOffset.json"
TOPICS_FILE = "topics.json"
SUBSCRIPTION_GROUP_FILE = "subscriptionGroup.json"

OFFSET_TABLE = "offsetTable"
DATA_VERSION = "dataVersion"
QUEUE_TYPE = "queue.type"
"""Attribute of a topic of RocketMQ 5; :data:`BATCH_TYPE` means batch queues."""
BATCH_TYPE = "BatchCQ"

_GROUP_SEPARATOR = "@"
_WHOLE = re.compile("-?[0-9]{1,19}")
_FLAGS: Final = {
    **dict.fromkeys(("true", "1", "y", "t"), True),
    **dict.fromkeys(("false", "0", "n", "f", "null", ""), False),
}


class TopicConfig(NamedTuple):
    """One topic of ``topics.json`` (``TopicConfig``)."""

    name: str
    read_queues: int
    write_queues: int
    perm: int
    sys_flag: int
    order: bool


def decode_delay_offsets(text: str | bytes) -> dict[int, int]:
    """Decode delay level -> next queue offset to deliver (``DelayOffsetSerializeWrapper``)."""
    return _int_table(_table(fastjson.decode(text), OFFSET_TABLE), OFFSET_TABLE)


def encode_delay_offsets(offsets: Mapping[int, int]) -> str:
    """Encode the document as a broker does."""
    return fastjson.encode({OFFSET_TABLE: dict(offsets)})


def decode_consumer_offsets(text: str | bytes) -> dict[tuple[str, str], dict[int, int]]:
    """Decode (topic, group) -> queue id -> next queue offset (``ConsumerOffsetManager``)."""
    result: dict[tuple[str, str], dict[int, int]] = {}
    for name, offsets in _table(fastjson.decode(text), OFFSET_TABLE).items():
        topic, separator, group = name.partition(_GROUP_SEPARATOR)
        if not separator:
            raise ValueError(f"{OFFSET_TABLE}: {name!r} is not topic@group")
        result[topic, group] = _int_table(offsets, name)
    return result


def encode_consumer_offsets(offsets: Mapping[tuple[str, str], Mapping[int, int]]) -> str:
    """Encode the document as a broker does."""
    table = {f"{topic}{_GROUP_SEPARATOR}{group}": dict(v) for (topic, group), v in offsets.items()}
    return fastjson.encode({OFFSET_TABLE: table})


def decode_topics(text: str | bytes) -> dict[str, TopicConfig]:
    """Decode topic name -> configuration (``TopicConfigManager``)."""
    return topics_of_document(fastjson.decode(text))


def topics_of_document(document: Any) -> dict[str, TopicConfig]:
    """Read topic name -> configuration from the decoded document."""
    result: dict[str, TopicConfig] = {}
    for name, entry in _table(document, "topicConfigTable").items():
        if not isinstance(entry, dict):
            raise ValueError(f"topicConfigTable: {name!r} is not an object")
        result[name] = TopicConfig(
            name=str(entry.get("topicName", name)),
            read_queues=whole(entry.get("readQueueNums", 0), name),
            write_queues=whole(entry.get("writeQueueNums", 0), name),
            perm=whole(entry.get("perm", 0), name),
            sys_flag=whole(entry.get("topicSysFlag", 0), name),
            order=as_flag(entry.get("order"), name),
        )
    return result


def as_flag(value: Any, name: str) -> bool:
    """Convert a JSON value to a flag, as fastjson does (``TypeUtils.castToBoolean``)."""
    if isinstance(value, int):
        return value == 1
    word = "" if value is None else value
    if not isinstance(word, str) or word.lower() not in _FLAGS:
        raise ValueError(f"{name!r} holds {value!r} instead of true or false")
    return _FLAGS[word.lower()]


def encode_topics(
    topics: Mapping[str, TopicConfig],
    *,
    batch_topics: Collection[str] = (),
    counter: int = 0,
    timestamp_ms: int = 0,
) -> str:
    """Encode the document as a broker does, with its version."""
    table = {
        name: topic_entry(topic, is_batch=name in batch_topics) for name, topic in topics.items()
    }
    version = {"counter": counter, "timestamp": timestamp_ms}
    return fastjson.encode({"dataVersion": version, "topicConfigTable": table})


def topic_entry(topic: TopicConfig, *, is_batch: bool = False) -> dict[str, Any]:
    """Return the entry of a topic in ``topicConfigTable``."""
    attributes = {"attributes": {QUEUE_TYPE: BATCH_TYPE}} if is_batch else {}
    return {
        **attributes,
        "order": topic.order,
        "perm": topic.perm,
        "readQueueNums": topic.read_queues,
        "topicFilterType": "SINGLE_TAG",
        "topicName": topic.name,
        "topicSysFlag": topic.sys_flag,
        "writeQueueNums": topic.write_queues,
    }


def decode_topic_document(text: str | bytes) -> dict[str, Any]:
    """Decode and check ``topics.json``, including members that :class:`TopicConfig` lacks."""
    document = _versioned(text)
    topics_of_document(document)
    return document


def decode_subscription_group_document(text: str | bytes) -> dict[str, Any]:
    """Decode and check ``subscriptionGroup.json`` (``SubscriptionGroupManager``)."""
    document = _versioned(text)
    for name, entry in _table(document, "subscriptionGroupTable").items():
        if not isinstance(entry, dict):
            raise ValueError(f"subscriptionGroupTable: {name!r} is not an object")
    return document


def _versioned(text: str | bytes) -> dict[str, Any]:
    document = fastjson.decode(text)
    for name, value in _table(document, DATA_VERSION).items():
        whole(value, name)
    return dict(document)


def _table(document: Any, name: str) -> dict[str, Any]:
    table = document.get(name) if isinstance(document, dict) else None
    if not isinstance(table, dict):
        raise ValueError(f"there is no object {name!r}")
    return table


def _int_table(table: Any, name: str) -> dict[int, int]:
    if not isinstance(table, dict):
        raise ValueError(f"{name!r} is not an object")
    return {whole(key, name): whole(value, name) for key, value in table.items()}


def whole(value: Any, name: str) -> int:
    """Return a whole number of 64 bits; for any other value, raise ValueError."""
    found = None
    if isinstance(value, int) and not isinstance(value, bool):
        found = value
    elif isinstance(value, str) and _WHOLE.fullmatch(value):
        found = int(value)
    if found is None or not java.LONG_MIN <= found <= java.LONG_MAX:
        raise ValueError(f"{name!r} holds {value!r} instead of a whole number")
    return found


FOLDERS_V1: Final = {
    TOPICS_FILE: "topics",
    SUBSCRIPTION_GROUP_FILE: "subscriptionGroups",
    CONSUMER_OFFSET_FILE: "consumerOffsets",
}
"""JSON file -> folder of version 1 in ``config/``."""
FOLDER_V2: Final = "rdb"

_TABLES: Final = {
    TOPICS_FILE: "topicConfigTable",
    SUBSCRIPTION_GROUP_FILE: "subscriptionGroupTable",
    CONSUMER_OFFSET_FILE: OFFSET_TABLE,
}
_KEY: Final = struct.Struct(">BHB")
_TABLE, _DATA = 1, 2
_PULLED: Final = 2
_IDS: Final = {
    CONSUMER_OFFSET_FILE: (1, _PULLED),
    TOPICS_FILE: (3,),
    SUBSCRIPTION_GROUP_FILE: (4,),
}
_PULL_OFFSETS: Final = "pullOffsetTable"
_JSON: Final = b"\x01"
"""``SerializationType.JSON``: the first byte of the record of a topic or group."""
_LENGTH: Final = struct.Struct(">H")
_QUEUE: Final = struct.Struct(">BI")
_OFFSET: Final = struct.Struct(">q")

Items = Iterable[tuple[bytes, bytes]]


def prefixes(file: str, version: int) -> tuple[bytes, ...]:
    """The prefixes of the keys of one table."""
    return (b"",) if version == 1 else tuple(_KEY.pack(_TABLE, n, _DATA) for n in _IDS[file])


def document(file: str, items: Items, *, version: int) -> bytes:
    """Make the JSON document of a table from its records in RocksDB.

    ``file`` is the name of the JSON file that a broker without RocksDB writes. If a key or a value
    has another layout, this raises ValueError.
    """
    table: dict[str, Any] = {}
    pulled: dict[str, Any] = {}
    offsets = file == CONSUMER_OFFSET_FILE
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
    found = {_TABLES[file]: table, DATA_VERSION: {}}
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
