"""Reads JSON Lines back into rows: the output of ``messages --jsonl`` and ``export``."""

from __future__ import annotations

import binascii
import json
from collections.abc import Iterator
from itertools import chain
from typing import Any, Final

import pyarrow as pa

from logquarry.errors import BadRow
from logquarry.format import properties as props
from logquarry.ingest.rows import Rows, SourceFile, first_bad
from logquarry.stored_message import JSON_NAMES
from logquarry.write.message_rules import utf8

CHUNK_BYTES: Final = 8 << 20
"""Approximate bytes of lines in memory at a time; one line can be longer."""

_BASE64: Final = "properties_base64"
_KNOWN: Final = frozenset((*JSON_NAMES, _BASE64))
_KINDS: Final = {
    "topic": pa.string(),
    "queue_id": pa.int32(),
    "queue_offset": pa.int64(),
    "store_timestamp": pa.int64(),
    "born_timestamp": pa.int64(),
    "born_host": pa.string(),
    "store_host": pa.string(),
    "sys_flag": pa.int32(),
    "flag": pa.int32(),
    "body_crc": pa.int64(),
    "reconsume_times": pa.int32(),
    "prepared_transaction_offset": pa.int64(),
}
_TEXT: Final = frozenset({"topic", "born_host", "store_host"})
_NONE: Final = type(None)

Document = dict[str, Any]


def read_lines(file: SourceFile) -> Iterator[Rows]:
    """Yield the messages of a file in batches; empty lines are skipped.

    Raises:
        BadRow: for the first line that is not an exported message.
    """
    with open(file.path, "rb") as source:  # noqa: PTH123
        first = 1
        while lines := source.readlines(CHUNK_BYTES):
            numbers, documents = _documents(file.path, first, lines)
            first += len(lines)
            if documents:
                yield _rows(file.path, numbers, documents, source.tell())


def _documents(path: str, first: int, lines: list[bytes]) -> tuple[list[int], list[Document]]:
    numbers: list[int] = []
    documents: list[Document] = []
    for number, line in enumerate(lines, first):
        if not line.strip():
            continue
        try:
            document = json.loads(line.decode())
        except (ValueError, RecursionError) as error:
            raise BadRow(path, "line", number, f"is not JSON: {error}") from error
        if not isinstance(document, dict):
            kind = type(document).__name__
            raise BadRow(path, "line", number, f"is a {kind}, not a JSON object")
        numbers.append(number)
        documents.append(document)
    return numbers, documents


def _rows(path: str, numbers: list[int], documents: list[Document], done: int) -> Rows:
    unbatched = Rows(pa.record_batch({}), path, "line", numbers, done)
    for shape in set(map(tuple, documents)):
        for name in shape:
            if name not in _KNOWN:
                index = next(i for i, document in enumerate(documents) if name in document)
                raise unbatched.bad(index, f"an export has no column {name!r}")
    names = set(chain.from_iterable(set(map(tuple, documents))))
    columns = {
        name: _column(unbatched, name, [document.get(name) for document in documents])
        for name in _KINDS
        if name in names or name == "topic"
    }
    columns["body"] = _bodies(unbatched, documents)
    columns["properties_string"] = _strings(unbatched, documents)
    return Rows(pa.record_batch(columns), path, "line", numbers, done)


def _column(rows: Rows, name: str, values: list[Any]) -> pa.Array:
    wanted = str if name in _TEXT else int
    if not set(map(type, values)) <= {wanted, _NONE}:
        index = first_bad(values, lambda value: type(value) not in (wanted, _NONE))
        what = "text" if wanted is str else "a whole number"
        raise rows.bad(index, f"{name} is {_shown(values[index])}, but must be {what}")
    try:
        return pa.array(values, _KINDS[name])
    except (pa.ArrowInvalid, OverflowError, UnicodeEncodeError) as error:
        index = first_bad(values, lambda value: not _fits(value, _KINDS[name]))
        raise rows.bad(index, f"{name} is {_shown(values[index])}: {error}") from error


def _fits(value: Any, kind: pa.DataType) -> bool:
    try:
        pa.array([value], kind)
    except (pa.ArrowInvalid, OverflowError, UnicodeEncodeError):
        return False
    return True


def _bodies(rows: Rows, documents: list[Document]) -> pa.Array:
    bodies: list[bytes | None] = []
    for index, document in enumerate(documents):
        text = document.get("body")
        bodies.append(None if text is None else _decoded(rows, index, "body", text))
    return pa.array(bodies, pa.large_binary())


def _decoded(rows: Rows, index: int, name: str, text: Any) -> bytes:
    if not isinstance(text, str):
        raise rows.bad(index, f"{name} is {_shown(text)}, but must be base64")
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError as error:
        raise rows.bad(index, f"{name} is not base64: {error}") from error


def _strings(rows: Rows, documents: list[Document]) -> pa.Array:
    """Return the property strings: from base64, else from the text, else from the properties."""
    strings: list[bytes] = []
    for index, document in enumerate(documents):
        if (data := document.get(_BASE64)) is not None:
            strings.append(_decoded(rows, index, _BASE64, data))
        elif (text := document.get("properties_string")) is None:
            strings.append(_made(rows, index, document))
        elif isinstance(text, str):
            strings.append(utf8(text))
        else:
            reason = f"properties_string is {_shown(text)}, but must be text"
            raise rows.bad(index, reason)
    return pa.array(strings, pa.binary())


def _made(rows: Rows, index: int, document: Document) -> bytes:
    given = document.get("properties")
    found = {} if given is None else given
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise rows.bad(index, f"properties is {_shown(found)}, but must be an object of texts")
    found = dict(found)
    for name, word in (("keys", props.KEYS), ("tags", props.TAGS), ("uniq_key", props.UNIQ_KEY)):
        value = document.get(name)
        if value is not None:
            if not isinstance(value, str):
                raise rows.bad(index, f"{name} is {_shown(value)}, but must be text")
            found[word] = value
    return utf8(props.encode(found))


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
