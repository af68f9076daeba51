"""Two formats of exports: messages as JSON lines (``messages --jsonl`` and ``export --format
jsonl``), and the property strings that a Parquet file's column ``properties`` cannot reproduce.

A JSON line has the same content as :meth:`logquarry.stored_message.StoredMessage.to_json`, but this
module makes the lines from columns, and so needs only a fraction of the time. All control
characters are escaped, so a line can be printed on a terminal.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pyarrow as pa

from logquarry.errors import UsageError
from logquarry.format import arrays as r
from logquarry.format import java
from logquarry.format import properties as props
from logquarry.format.arrays import Int64
from logquarry.log import columns
from logquarry.log.codec import Rows, Window
from logquarry.log.schema import EXACT_PROPERTIES
from logquarry.stored_message import JSON_NAMES

REDACTIONS: Final = ("body", "properties", "hosts")

_REDACTED: Final = {
    # Also hide the CRC of a body and the hash of a tag. With the CRC or hash, a person could find
    # the hidden value by comparing it with the CRCs or hashes of all likely values. For example, a
    # body may be only a telephone number.
    "body": frozenset({"body", "body_crc"}),
    "properties": frozenset(
        {"properties", "properties_string", "tags", "keys", "uniq_key", "tags_code"}
    ),
    # Message ids and UNIQ_KEY contain the address of the broker or the client.
    "hosts": frozenset({"born_host", "store_host", "message_id", "uniq_key"}),
}
_HOST_PROPERTIES: Final = frozenset(
    {props.UNIQ_KEY, props.ORIGIN_MESSAGE_ID, props.DLQ_ORIGIN_MESSAGE_ID, props.TRANSACTION_ID}
)
"""Properties whose values are message ids, which start with an address."""

_BAD_BYTES: Final = "\ufffd"
_BASE64: Final = "properties_base64"
_FIXED: Final = (
    *("queue_id", "queue_offset", "physical_offset", "store_timestamp", "born_timestamp"),
    *("sys_flag", "flag", "body_crc", "reconsume_times", "prepared_transaction_offset"),
)
_REPEATED: Final = ("topic", "born_host", "store_host", "tags")
_DISTINCT: Final = ("message_id", "keys", "uniq_key")
_TEXT: Final = (*_REPEATED, *_DISTINCT, "tags_code", "body")
assert {*_FIXED, *_TEXT, "broker", "size", "properties", "properties_string"} == {*JSON_NAMES}

# JSON requires escapes only for characters below U+0020. DEL, C1 controls, bidirectional marks and
# line separators are escaped too, because they affect a terminal.
_UNSAFE: Final = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]")
_quote = json.encoder.encode_basestring
_MOST_KEPT: Final = 10_000
_TEMPLATE: Final = "{" + ",".join(f'"{name}":%s' for name in JSON_NAMES) + "%s}"
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def redaction(words: str | None) -> frozenset[str]:
    """Parse a list such as ``body,hosts`` (words: :data:`REDACTIONS`) to the names of the JSON
    members to hide.
    """
    names: set[str] = set()
    for word in filter(None, (part.strip() for part in (words or "").split(","))):
        if word not in _REDACTED:
            raise UsageError(f"redact {word!r}: takes {', '.join(REDACTIONS)}")
        names |= _REDACTED[word]
    return frozenset(names)


def redacted(document: dict[str, Any], hidden: frozenset[str]) -> dict[str, Any]:
    """Copy a message's JSON object, and set the hidden members to null."""
    document = dict(document)
    if _hides_hosts(hidden):
        string = _without_ids(document["properties_string"])
        if string != document["properties_string"]:
            document["properties_string"] = string
            document["properties"] = props.decode(string)
            document.pop(_BASE64, None)
    if "properties_string" in hidden:
        document.pop(_BASE64, None)
    return {name: None if name in hidden else value for name, value in document.items()}


def _hides_hosts(hidden: frozenset[str]) -> bool:
    return "born_host" in hidden


def _without_ids(string: str) -> str:
    return props.PROPERTY_SEPARATOR.join(
        segment
        for segment in string.split(props.PROPERTY_SEPARATOR)
        if segment.partition(props.NAME_VALUE_SEPARATOR)[0] not in _HOST_PROPERTIES
    )


def line(document: dict[str, Any]) -> str:
    """Encode an object as one line, without the line end."""
    return _safe(_encode(document))


def _safe(text: str) -> str:
    if text.isascii() and "\x7f" not in text:
        return text
    return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def line_parts(
    window: Window, rows: Rows, decoding: columns.Decoding, hidden: frozenset[str] = frozenset()
) -> Iterator[tuple[Rows, list[str]]]:
    """Encode messages as lines. Yields, part by part, the rows and lines of the next messages."""
    for part, bodies in columns.pieces(window, rows, decoding) if len(rows) else ():
        fields = _parts(window, part, decoding, hidden, bodies)
        for name in hidden:
            fields[name] = ["null"] * len(part)
        members = zip(*(fields[name] for name in (*JSON_NAMES, _BASE64)), strict=True)
        yield part, [_safe(_TEMPLATE % values) for values in members]


def _parts(
    window: Window,
    rows: Rows,
    decoding: columns.Decoding,
    hidden: frozenset[str],
    bodies: pa.Array | None,
) -> dict[str, list[Any]]:
    """Return, for each JSON member, the list of its values as JSON: one element per message."""
    fixed = columns.fixed_fields(window, rows, _FIXED)
    parts: dict[str, list[Any]] = {name: array.tolist() for name, array in fixed.items()}
    parts["size"] = rows[:, r.SIZE].tolist()
    text = _Quoted()
    parts["broker"] = [text[decoding.broker]] * len(rows)
    text_columns = replace(decoding, columns=_TEXT)
    batch = columns.record_batch(window, rows, text_columns, bodies=bodies)
    for name in _REPEATED:
        parts[name] = [text[value] for value in batch.column(name).to_pylist()]
    for name in _DISTINCT:
        parts[name] = [_quoted(value) for value in batch.column(name).to_pylist()]
    parts["tags_code"] = batch.column("tags_code").to_pylist()
    # Base64 needs no escapes.
    parts["body"] = [f'"{_base64(body)}"' for body in batch.column("body").to_pylist()]
    stored = _properties(window, rows)
    strings = [data.decode("utf-8", java.UTF8_ERRORS) for data in stored]
    parts[_BASE64] = [
        f',"{_BASE64}":"{_base64(data)}"' if _BAD_BYTES in string else ""
        for data, string in zip(stored, strings, strict=True)
    ]
    if "properties_string" in hidden:
        parts[_BASE64] = [""] * len(rows)
    elif _hides_hosts(hidden):
        shown = [_without_ids(string) for string in strings]
        for i, (before, after) in enumerate(zip(strings, shown, strict=True)):
            if before != after:
                parts[_BASE64][i] = ""
        strings = shown
    parts["properties_string"] = [_quote(string) for string in strings]
    pairs = [
        ",".join([f"{text[key]}:{_quote(value)}" for key, value in props.decode(string).items()])
        for string in strings
    ]
    parts["properties"] = [f"{{{members}}}" for members in pairs]
    return parts


class _Quoted(dict[str | None, str]):
    """Cache of texts as JSON, because many messages have the same topics, tags and hosts."""

    def __missing__(self, text: str | None) -> str:
        quoted = _quoted(text)
        if len(self) < _MOST_KEPT:
            self[text] = quoted
        return quoted


def _quoted(text: str | None) -> str:
    return "null" if text is None else _quote(text)


def _properties(window: Window, rows: Rows) -> list[bytes]:
    data = window.data.data
    starts = rows[:, r.POSITION].astype(np.int64) + rows[:, r.PROPS_AT]
    ends = starts + rows[:, r.PROPS_LENGTH]
    return [bytes(data[a:b]) for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]


def _base64(data: bytes) -> str:
    return binascii.b2a_base64(data, newline=False).decode("ascii")


# --------------------------------------------------------------------------------------------------
# Property strings in the metadata of a Parquet file
#
# The column ``properties`` is a map. A map cannot represent doubled separators, repeated keys,
# empty values and bytes that are not UTF-8. An import must restore the string, so an export writes
# the strings of such rows into the metadata of the Parquet file. Clients before 4.9.3 write a
# separator after the last property too. If this separator is the only difference between a string
# and the encoded map, the list contains a null in place of the string.
#
#     metadata "logquarry.properties_string": base64 of an Arrow IPC stream (zstd) with the columns
#         skip    uint32   rows of the file since the last listed row
#         string  binary   the bytes; null means: the encoded map plus a separator

_EXACT_KEY: Final = b"logquarry.properties_string"
"""Key of the list in the file's metadata."""
MOST_BYTES: Final = 16 << 20
"""Approximate maximum bytes of strings in one file. There is a limit because readers of Parquet
reject a file with too much metadata.
"""

_SEPARATOR: Final = props.PROPERTY_SEPARATOR.encode()
_EXACT_SCHEMA: Final = pa.schema({"skip": pa.uint32(), "string": pa.binary()})


class ExactProperties:
    """Collects the property strings of one file. ``size``: bytes of the listed strings."""

    def __init__(self) -> None:
        self.size = 0
        self._rows = 0
        self._last = -1
        self._parts: list[pa.RecordBatch] = []

    def add(self, rows: pa.Table) -> None:
        """Add rows with the columns ``properties`` and ``properties_string``."""
        column = rows.column(EXACT_PROPERTIES.name)
        if column.null_count < len(column):
            exact = column.combine_chunks()
            odd = np.flatnonzero(exact.is_valid().to_numpy(zero_copy_only=False))
            strings = exact.take(pa.array(odd))
            maps = rows.column("properties").take(pa.array(odd)).to_pylist()
            values = [
                None if string == _made(pairs) + _SEPARATOR else string
                for string, pairs in zip(strings.to_pylist(), maps, strict=True)
            ]
            self._list(odd + self._rows, pa.array(values, pa.binary()))
        self._rows += rows.num_rows

    def add_listed(self, listed: tuple[Int64, pa.Array] | None, count: int) -> None:
        """Add ``count`` rows of another file. ``listed`` is the result of :func:`read_exact` for
        the other file.
        """
        if listed is not None and len(listed[0]):
            rows, values = listed
            self._list(rows + self._rows, values)
        self._rows += count

    def _list(self, places: Int64, values: pa.Array) -> None:
        import pyarrow.compute as pc  # slow to import, and JSON lines do not need it

        skips = np.diff(places, prepend=self._last) - 1
        self._last = int(places[-1])
        self.size += int(pc.sum(pc.binary_length(values)).as_py() or 0)
        self._parts.append(
            pa.record_batch([pa.array(skips.astype(np.uint32)), values], schema=_EXACT_SCHEMA)
        )

    def metadata(self) -> dict[str, str]:
        """Return the metadata of the file; an empty dict if the maps reproduce all strings."""
        if not self._parts:
            return {}
        sink = pa.BufferOutputStream()
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with pa.ipc.new_stream(sink, _EXACT_SCHEMA, options=options) as writer:
            writer.write_table(pa.Table.from_batches(self._parts).combine_chunks())
        return {_EXACT_KEY.decode(): base64.b64encode(sink.getvalue()).decode("ascii")}


def read_exact(metadata: Mapping[bytes, bytes] | None) -> tuple[Int64, pa.Array] | None:
    """Read the list in a file's metadata.

    Returns:
        The positions of the listed rows in the file (from 0), and the stored string of each listed
        row. None if the file has no list.
    """
    data = (metadata or {}).get(_EXACT_KEY)
    if data is None:
        return None
    with pa.ipc.open_stream(base64.b64decode(data, validate=True)) as reader:
        table = reader.read_all()
    if not table.schema.equals(_EXACT_SCHEMA):
        raise ValueError(f"{_EXACT_KEY.decode()} has the columns {table.schema.names}")
    skips = table.column("skip").combine_chunks().to_numpy(zero_copy_only=False)
    rows = np.cumsum(skips.astype(np.int64) + 1) - 1
    return rows, table.column("string").combine_chunks()


def exact_strings(exact: tuple[Int64, pa.Array], maps: pa.Array, first: int) -> pa.Array:
    """Return the stored property string of each row in ``maps``. ``first`` is the number of the
    first of these rows in the file. The string is null for a row that is not in the list.
    """
    rows, listed = exact
    begin, end = np.searchsorted(rows, [first, first + len(maps)]).tolist()
    values: list[bytes | None] = [None] * len(maps)
    places = (rows[begin:end] - first).tolist()
    for place, value in zip(places, listed[begin:end].to_pylist(), strict=True):
        values[place] = _made(maps[place].as_py()) + _SEPARATOR if value is None else value
    return pa.array(values, pa.binary())


def _made(pairs: list[tuple[str, str]] | None) -> bytes:
    return props.encode(dict(pairs or ())).encode()
