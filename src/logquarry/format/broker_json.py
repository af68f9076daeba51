"""A broker's JSON: fastjson's dialect, and the tables in ``config/`` in JSON and in RocksDB.

fastjson writes integer keys without quotes. If a map has integer keys, fastjson's pretty printer
writes all entries of the map on one line. The decoder here also accepts strict JSON.

For an invalid document, a decoder raises ValueError with the reason. The tables in RocksDB have one
of two layouts. Version 1 has one database per table: a key is a member's name in the JSON table,
and the value is the member's JSON. Version 2 (``configManagerVersion=v2``) has one database; a key
begins with the number of its table (``TablePrefix``, ``TableId``, ``RecordPrefix``).
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import struct
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final, NamedTuple

from logquarry.format import java

# Match an unterminated string as one token. Otherwise the search would start again at each later
# quote, and take quadratic time. The quantifiers are possessive (`++`, `*+`), because a pattern
# that can backtrack needs 120 bytes of memory for each character of a string.
_STRING = r'"(?:\\.|[^"\\]++)*+(?:"|\\?\Z)'
_TOKEN = re.compile(rf"({_STRING})|([{{,]\s*)(-?[\w$]+)(\s*:)", re.DOTALL)
_ANY_STRING = re.compile(_STRING, re.DOTALL)
_OPEN, _CLOSE = b"{}"
_BRACKETS = bytes.maketrans(b"[]", b"{}")
_NO_BRACKETS = bytes(set(range(256)) - set(b"{}[]"))
_ESCAPED = re.compile(r'["\\\x00-\x1f\x7f-\x9f\u2028\u2029]')
_SHORT_ESCAPES = {
    '"': r"\"",
    "\\": r"\\",
    "\b": r"\b",
    "\f": r"\f",
    "\n": r"\n",
    "\r": r"\r",
    "\t": r"\t",
}

_STRUCTURE = re.compile(_STRING + r"|[\[{}\],:]", re.DOTALL)

MAX_NESTING = 64


def replace_member(document: str, name: str, source: str) -> str:
    """Replace one member of a JSON document by the member of the same name in another document.

    All other bytes stay unchanged, so members that logquarry does not know are kept. If a document
    has several members of this name, the last one is used, as in :func:`decode`. Raises ValueError
    if one of the documents has no member of this name.
    """
    start, stop = _member_span(document, name)
    first, last = _member_span(source, name)
    return document[:start] + source[first:last] + document[stop:]


def _member_span(document: str, name: str) -> tuple[int, int]:
    depth, key_at, value_at, key = 0, 0, -1, ""
    found: tuple[int, int] | None = None
    for token in _STRUCTURE.finditer(document):
        sign = token[0]
        if sign in "{[":
            depth += 1
            if depth == 1:
                key_at = token.end()
        elif depth == 1 and sign == ":" and value_at < 0:
            key, value_at = document[key_at : token.start()].strip(), token.end()
        elif depth == 1 and sign in ",}":
            if value_at >= 0 and (json.loads(key) if key.startswith('"') else key) == name:
                found = value_at, token.start()
            key_at, value_at = token.end(), -1
        if sign in "}]":
            depth -= 1
    if found is None:
        raise ValueError(f"there is no member {name!r}")
    return found


def decode(text: str | bytes) -> Any:
    """Decode a document. Keys without quotes (integers) become strings, and NaN becomes None, as in
    fastjson.

    If the text has another syntax, is nested too deeply, or contains a number that is infinite or
    too large, the function raises ValueError.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8")
    deepest = _nesting(text)
    if deepest > MAX_NESTING:
        raise ValueError(f"nested {deepest} deep, more than {MAX_NESTING}")
    # Try to parse strict JSON first, because the search for keys without quotes takes much longer
    # than parsing.
    with contextlib.suppress(ValueError):
        return _DECODER.decode(text)
    return _DECODER.decode(_with_quotes(text))


def _constant(name: str) -> None:
    if name != "NaN":
        raise ValueError(f"{name} is not a number")


def _finite(text: str) -> float:
    # `encode` cannot write an infinite number, so a writer could not save the document again.
    if not math.isfinite(value := float(text)):
        raise ValueError(f"the number {text[:80]} is too large")
    return value


_DECODER: Final = json.JSONDecoder(parse_constant=_constant, parse_float=_finite)


def _nesting(text: str) -> int:
    """Return how deeply the brackets of a document are nested. Brackets in strings are ignored."""
    outside = _ANY_STRING.sub("", text).encode("utf-8", "replace")
    brackets = outside.translate(_BRACKETS, _NO_BRACKETS)
    rest, depth = brackets, 0
    # Each step removes the innermost pairs, so a valid document of depth 3 takes 3 steps. These
    # steps are much faster than counting the brackets one by one.
    while depth <= MAX_NESTING and (inner := rest.replace(b"{}", b"")) != rest:
        rest, depth = inner, depth + 1
    if not rest:
        return depth
    depth = deepest = 0
    for bracket in brackets:
        depth += 1 if bracket == _OPEN else -1
        deepest = max(deepest, depth)
    return deepest


def _with_quotes(text: str) -> str:
    """Put quotes around each key that has no quotes."""
    parts = _TOKEN.split(text)
    # For each match, `split` returns five parts: the text before the match, a JSON string, the text
    # before a key, the key, and the text after the key. Either the JSON string is None, or the last
    # three parts are None. A loop over the matches would take twice as long.
    parts[2::5] = [before and before + '"' for before in parts[2::5]]
    parts[4::5] = [after and '"' + after for after in parts[4::5]]
    return "".join(filter(None, parts))


def encode(value: Any) -> str:
    """Encode a document as fastjson's ``toJSONString(value, prettyFormat=true)``.

    Raises ValueError for NaN and infinite numbers, which JSON does not have.
    """
    return _encoded(value, 0)


class ObjectKeys(list[tuple[Any, Any]]):
    """The (key, value) pairs of a map whose keys are objects; fastjson writes ``{{"a":1}:2}``."""


_NAMES: Final = {None: "null", True: "true", False: "false"}


def compact(value: Any, *, quote_keys: bool = False) -> str:
    """Encode a document as fastjson's ``toJSONString(value)``, for bodies of the remoting protocol.

    With ``quote_keys``, integer keys get quotes, as in strict JSON. NaN and infinite numbers raise
    ValueError.
    """
    return _encoded(value, None, quote_keys=quote_keys)


def _encoded(value: Any, depth: int | None, *, quote_keys: bool = False) -> str:
    # A document can have a million members, so check the common types first.
    kind = type(value)
    if kind is str:
        return _string(value)
    if kind is int:
        return str(value)
    # Without `depth`, there are no line breaks.
    inner = None if depth is None else depth + 1
    before = "" if inner is None else "\n" + "\t" * inner
    members: list[str] = []
    if kind is dict or isinstance(value, Mapping | ObjectKeys):
        is_mapping = kind is dict or isinstance(value, Mapping)
        for key, item in value.items() if is_mapping else value:
            if isinstance(key, int) and not quote_keys:
                name = str(key)
            elif is_mapping:
                name = before + _string(str(key))
            else:
                name = _encoded(key, inner, quote_keys=quote_keys)
            members.append(f"{name}:{_encoded(item, inner, quote_keys=quote_keys)}")
        ends = "{}"
    elif isinstance(value, list | tuple | set | frozenset):
        members += [before + _encoded(item, inner, quote_keys=quote_keys) for item in value]
        ends = "[]"
    else:
        if value is None or kind is bool:
            return _NAMES[value]
        return _string(value) if isinstance(value, str) else json.dumps(value, allow_nan=False)
    if not members:
        return ends
    return f"{ends[0]}{','.join(members)}{before[:-1]}{ends[1]}"


def _string(text: str) -> str:
    return f'"{_ESCAPED.sub(_escape, text)}"'


def _escape(match: re.Match[str]) -> str:
    character = match[0]
    return _SHORT_ESCAPES.get(character) or f"\\u{ord(character):04X}"


DELAY_OFFSET_FILE = "delayOffset.json"
CONSUMER_OFFSET_FILE = "consumerOffset.json"
TOPICS_FILE = "topics.json"
SUBSCRIPTION_GROUP_FILE = "subscriptionGroup.json"

OFFSET_TABLE = "offsetTable"
DATA_VERSION = "dataVersion"
QUEUE_TYPE = "queue.type"
"""Name of a topic attribute of RocketMQ 5. If the attribute's value is :data:`BATCH_TYPE`, the
topic has batch queues.
"""
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
    return _int_table(_table(decode(text), OFFSET_TABLE), OFFSET_TABLE)


def encode_delay_offsets(offsets: Mapping[int, int]) -> str:
    """Encode the document as a broker does."""
    return encode({OFFSET_TABLE: dict(offsets)})


def decode_consumer_offsets(text: str | bytes) -> dict[tuple[str, str], dict[int, int]]:
    """Decode (topic, group) -> queue id -> next queue offset (``ConsumerOffsetManager``)."""
    result: dict[tuple[str, str], dict[int, int]] = {}
    topics: dict[str, str] = {}
    known: dict[str, int] = {}
    table = _table(decode(text), OFFSET_TABLE)
    for name in list(table):
        topic, separator, group = name.partition(_GROUP_SEPARATOR)
        if not separator:
            raise ValueError(f"{OFFSET_TABLE}: {name!r} is not topic@group")
        # A store can have a million groups. To save memory, keep the name of a topic only once, and
        # remove each entry from the document when it is converted.
        offsets = _int_table(table.pop(name), name, known)
        result[topics.setdefault(topic, topic), group] = offsets
    return result


def encode_consumer_offsets(offsets: Mapping[tuple[str, str], Mapping[int, int]]) -> str:
    """Encode the document as a broker does."""
    table = {f"{topic}{_GROUP_SEPARATOR}{group}": dict(v) for (topic, group), v in offsets.items()}
    return encode({OFFSET_TABLE: table})


def decode_topics(text: str | bytes) -> dict[str, TopicConfig]:
    """Decode topic name -> configuration (``TopicConfigManager``)."""
    return topics_of_document(decode(text))


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
    """Encode ``topics.json`` as a broker does, with the version of the data."""
    table = {
        name: topic_entry(topic, is_batch=name in batch_topics) for name, topic in topics.items()
    }
    version = {"counter": counter, "timestamp": timestamp_ms}
    return encode({"dataVersion": version, "topicConfigTable": table})


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


def decode_topic_document(text: str | bytes, *, needs_version: bool = True) -> dict[str, Any]:
    """Decode and check ``topics.json``, including members that :class:`TopicConfig` lacks.

    If ``needs_version`` is false, the document may lack a version, because RocketMQ accepts such a
    file. The result then has an empty version.
    """
    document = _versioned(text, needs_version=needs_version)
    topics_of_document(document)
    return document


def decode_subscription_group_document(
    text: str | bytes, *, needs_version: bool = True
) -> dict[str, Any]:
    """Decode and check ``subscriptionGroup.json`` (``SubscriptionGroupManager``). For
    ``needs_version``, see :func:`decode_topic_document`.
    """
    document = _versioned(text, needs_version=needs_version)
    for name, entry in _table(document, "subscriptionGroupTable").items():
        if not isinstance(entry, dict):
            raise ValueError(f"subscriptionGroupTable: {name!r} is not an object")
    return document


def _versioned(text: str | bytes, *, needs_version: bool) -> dict[str, Any]:
    document = decode(text)
    if not needs_version and isinstance(document, dict):
        document = {DATA_VERSION: {}, **document}
    for name, value in _table(document, DATA_VERSION).items():
        whole(value, name)
    return dict(document)


def _table(document: Any, name: str) -> dict[str, Any]:
    table = document.get(name) if isinstance(document, dict) else None
    if not isinstance(table, dict):
        raise ValueError(f"there is no object {name!r}")
    return table


def _int_table(table: Any, name: str, known: dict[str, int] | None = None) -> dict[int, int]:
    """Convert keys and values of a table. ``known`` has the converted keys of earlier tables."""
    if not isinstance(table, dict):
        raise ValueError(f"{name!r} is not an object")
    found: dict[int, int] = {}
    keys = {} if known is None else known
    for key, value in table.items():
        number = keys.get(key)
        if number is None:
            number = keys[key] = whole(key, name)
        is_whole = type(value) is int and java.LONG_MIN <= value <= java.LONG_MAX
        found[number] = value if is_whole else whole(value, name)
    return found


def whole(value: Any, name: str) -> int:
    """Convert a JSON number, or a string of digits, to an integer of 64 bits. Raises ValueError for
    any other value.
    """
    found = None
    if isinstance(value, int) and not isinstance(value, bool):
        found = value
    elif isinstance(value, str) and _WHOLE.fullmatch(value):
        found = int(value)
    if found is None or not java.LONG_MIN <= found <= java.LONG_MAX:
        raise ValueError(f"{name!r} holds {value!r} instead of a whole number")
    return found


class ConfigTable(NamedTuple):
    """A table of the broker that is a JSON file in ``config/``, or records in RocksDB.

    In RocksDB version 1, the table is in the folder ``folder`` of ``config/``, or in the column
    family ``family`` of FOLDER_SINGLE. ``name`` is the table's name in the JSON file, and ``ids``
    are the table's numbers in the keys of version 2.
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
"""The first byte of a topic's or group's record in RocksDB. This value means that the other bytes
are JSON (``SerializationType.JSON``).
"""
_LENGTH: Final = struct.Struct(">H")
_QUEUE: Final = struct.Struct(">BI")
_OFFSET: Final = struct.Struct(">q")


def prefixes(file: str, version: int) -> tuple[bytes, ...]:
    """Return the prefixes of the keys of one table."""
    ids = CONFIG_TABLES[file].ids
    return (b"",) if version == 1 else tuple(_KEY.pack(_TABLE, n, _DATA) for n in ids)


def document(file: str, items: Iterable[tuple[bytes, bytes]], *, version: int) -> bytes:
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
            member = _table(member, OFFSET_TABLE) if offsets else member
            table[key.decode("utf-8", java.UTF8_ERRORS)] = member
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
    return data[_LENGTH.size : end].decode("utf-8", java.UTF8_ERRORS), data[end:]
