"""Decodes message bodies into a struct column: JSON, Avro (fastavro) or Protobuf (protobuf).

The value of a body depends only on the body and the schema, not on other bodies.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from json import loads as parse_json
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from logquarry import arguments
from logquarry.errors import UsageError
from logquarry.spark.decode.base import BodyDecoder, plain, struct_of
from logquarry.spark.decode.binary import AvroDecoder, ProtobufDecoder
from logquarry.spark.decode.json import JsonDecoder, inferred, struct_of_schema
from logquarry.spark.tasks import ReadTask, read_batches
from logquarry.text import counted

__all__ = ["BodyDecoder", "DecodeOptions", "decoder_for", "parse_decode_options"]

KINDS: Final = ("raw", "json", "avro", "protobuf")
SAMPLE: Final = 1_000
"""Maximum number of messages for inferring the schema of JSON bodies."""


@dataclass(frozen=True, kw_only=True)
class DecodeOptions:
    """Options for decoding bodies.

    If `schema` is None, the export infers the schema from JSON bodies. Picklable.
    """

    kind: str
    schema: bytes | None = None
    message: str | None = None

    @property
    def needs_sample(self) -> bool:
        """Whether the schema is missing and must be inferred from messages."""
        return self.schema is None

    def as_json(self) -> dict[str, Any]:
        """Return the options as JSON; the JSON must be the same for all exports into one table."""
        digest = None if self.schema is None else hashlib.sha256(self.schema).hexdigest()
        return {"kind": self.kind, "schema_sha256": digest, "message": self.message}


def parse_decode_options(
    kind: str, schema: str | None = None, message: str | None = None
) -> DecodeOptions | None:
    """Read and check the schema; return None if the export does not decode bodies.

    Args:
        schema: for JSON a DDL, or a file with a DDL or a JSON Schema; for Avro a file (.avsc); for
            Protobuf a file with a descriptor set.
        message: full name of the Protobuf message.

    Raises:
        UsageError: if an argument is missing or has no effect, or if the schema is invalid.
    """
    if kind not in KINDS:
        raise UsageError(f"decode {kind!r}: takes {', '.join(KINDS)}")
    if message is not None and kind != "protobuf":
        raise UsageError("a message name needs decode=protobuf")
    if kind == "raw":
        if schema is not None:
            raise UsageError("decode raw: takes no schema")
        return None
    if kind == "json":
        data = None if schema is None else _ddl_or_file(schema)
    elif schema is None:
        what = "a schema (.avsc)" if kind == "avro" else "a descriptor set (protoc -o)"
        raise UsageError(f"decode {kind}: takes a file with {what}")
    else:
        data = _read(schema)
    if kind == "protobuf" and not message:
        raise UsageError("decode protobuf: needs the full name of a message")
    found = DecodeOptions(kind=kind, schema=data, message=message)
    if not found.needs_sample:
        decoder_for(found, None)
    return found


def decoder_for(
    options: DecodeOptions, known: pa.DataType | None, tasks: Sequence[ReadTask] = ()
) -> BodyDecoder | None:
    """Make the decoder; return None if its schema is still unknown.

    For JSON bodies without a schema, the messages of `tasks` determine the schema. If there are no
    messages, the schema stays unknown.

    Args:
        known: type of the column ``value`` of the table; None if the table does not exist.
        tasks: tasks whose messages are the sample for an unknown schema.
    """
    if options.kind == "avro":
        assert options.schema is not None
        return AvroDecoder(_text(options.schema))
    if options.kind == "protobuf":
        assert options.schema is not None and options.message is not None
        return ProtobufDecoder(options.schema, options.message)
    if options.schema is not None:
        return JsonDecoder(_json_type(_text(options.schema)))
    found = _from_sample(tasks) if known is None else plain(known)
    return None if found is None else JsonDecoder(found)


def _from_sample(tasks: Sequence[ReadTask]) -> pa.DataType | None:
    bodies = list(_sample(tasks))
    if not bodies:
        return None
    found, objects = inferred(bodies)
    if found is None:
        raise UsageError(
            f"decode json: of the first {counted(len(bodies), 'body', 'bodies')}, "
            f"{counted(objects, 'is a JSON object', 'are JSON objects')}, and none has a field: "
            "give a schema"
        )
    return found


def _sample(tasks: Sequence[ReadTask]) -> Iterator[bytes]:
    left = SAMPLE
    for task in tasks:
        # Do not copy damage to the quarantine here: the tasks of the export read the same bytes
        # later, and copy the damage.
        options = replace(task.options, quarantine_path=None)
        for batch in read_batches(replace(task, columns=("body",), options=options)):
            for body in batch.column("body")[:left].to_pylist():
                yield body
                left -= 1
            if not left:
                return


def _ddl_or_file(text: str) -> bytes:
    """Return the content of the file at the path `text`; return `text` if there is no such file."""
    try:
        is_file = Path(text).is_file()
    except (OSError, ValueError):
        is_file = False
    if is_file:
        return _read(text)
    if " " not in text.strip() and "<" not in text:
        raise UsageError(
            f"schema {text!r}: is neither an existing file nor a DDL (NAME TYPE, NAME TYPE ...)"
        )
    return text.encode()


def _json_type(text: str) -> pa.DataType:
    if not text.lstrip().startswith("{"):
        return struct_of(text)
    try:
        document = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"JSON Schema: {error}") from None
    return struct_of_schema(document)


def _read(path: str) -> bytes:
    arguments.path(path, "schema", may_be_long=True)
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"schema: {path}: {error.strerror}") from None


def _text(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise UsageError(
            f"schema: is not UTF-8 text: it begins with {base64.b16encode(data[:8]).decode()}"
        ) from None
