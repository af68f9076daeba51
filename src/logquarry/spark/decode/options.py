"""Which decoder, and with which schema: from what users say to what workers get."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from logquarry.errors import UsageError
from logquarry.spark.decode.decoder import BodyDecoder

if TYPE_CHECKING:
    import pyarrow as pa

    from logquarry.spark.tasks import ReadTask


KINDS: Final = ("raw", "json", "avro", "protobuf")
SAMPLE: Final = 1_000
"""Messages that a schema of JSON is taken from."""


@dataclass(frozen=True, kw_only=True)
class DecodeOptions:
    """How bodies are decoded. Picklable.

    Attributes:
        kind: json, avro or protobuf.
        schema: its schema: DDL or JSON Schema, Avro's JSON, or the bytes of a descriptor set; None
            for what a sample of JSON has.
        message: full name of the message of Protobuf.
    """

    kind: str
    schema: bytes | None = None
    message: str | None = None

    @property
    def needs_sample(self) -> bool:
        """Whether the schema is to be taken from messages."""
        return self.schema is None

    def as_json(self) -> dict[str, Any]:
        """For a document: what two exports into one table have to share."""
        digest = None if self.schema is None else hashlib.sha256(self.schema).hexdigest()
        return {"kind": self.kind, "schema_sha256": digest, "message": self.message}


def parse_decode_options(
    kind: str, schema: str | None = None, message: str | None = None
) -> DecodeOptions | None:
    """How bodies are decoded; None for not at all. Files are read, and schemas understood.

    Args:
        kind: raw, json, avro or protobuf.
        schema: for JSON a DDL, or a file with one or with a JSON Schema; for Avro a file (.avsc);
            for Protobuf a file with a descriptor set.
        message: full name of the message of Protobuf.

    Raises:
        UsageError: if something is missing, too much, or not understood.
    """
    if kind not in KINDS:
        raise UsageError(f"decode {kind!r}: takes {', '.join(KINDS)}")
    if message is not None and kind != "protobuf":
        raise UsageError("the name of a message goes with decode=protobuf alone")
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
        raise UsageError("decode protobuf: takes the full name of a message")
    found = DecodeOptions(kind=kind, schema=data, message=message)
    if not found.needs_sample:
        decoder_for(found, None)
    return found


def decoder_for(
    options: DecodeOptions, known: pa.DataType | None, tasks: Sequence[ReadTask] = ()
) -> BodyDecoder | None:
    """What decodes.

    Args:
        options: how.
        known: the type that a table's column has, if it is there.
        tasks: whose messages tell the schema, where it is not known.

    Returns:
        None if the schema is not known, and there are no messages to tell it.

    Raises:
        UsageError: if no JSON object is among the messages, or a schema is not understood.
    """
    from logquarry.spark.decode import ddl

    if options.kind == "avro":
        from logquarry.spark.decode.avro import AvroDecoder

        assert options.schema is not None
        return AvroDecoder(_text(options.schema))
    if options.kind == "protobuf":
        from logquarry.spark.decode.protobuf import ProtobufDecoder

        assert options.schema is not None and options.message is not None
        return ProtobufDecoder(options.schema, options.message)
    from logquarry.spark.decode.json import JsonDecoder

    if options.schema is not None:
        return JsonDecoder(_json_type(_text(options.schema)))
    found = _from_sample(tasks) if known is None else ddl.plain(known)
    return None if found is None else JsonDecoder(found)


def _from_sample(tasks: Sequence[ReadTask]) -> pa.DataType | None:
    from logquarry.spark.decode.json import inferred

    bodies = list(_sample(tasks))
    if not bodies:
        return None
    found, objects = inferred(bodies)
    if found is None:
        raise UsageError(
            f"decode json: of the first {len(bodies)} bodies {objects} are JSON objects, and none "
            "has a field: give a schema"
        )
    return found


def _sample(tasks: Sequence[ReadTask]) -> Iterator[bytes]:
    from logquarry.spark.tasks import read_batches

    left = SAMPLE
    for task in tasks:
        # What the workers will do about damage they do when they meet it.
        calm = replace(task, columns=("body",), options=replace(task.options, quarantine_path=None))
        for batch in read_batches(calm):
            for body in batch.column("body")[:left].to_pylist():
                yield body
                left -= 1
            if not left:
                return


def _ddl_or_file(text: str) -> bytes:
    """A DDL has a blank in it, and a file's name mostly has none: what is there is a file."""
    try:
        is_file = Path(text).is_file()
    except (OSError, ValueError):
        is_file = False
    if is_file:
        return _read(text)
    if " " not in text.strip() and "<" not in text:
        raise UsageError(f"schema {text!r}: there is no such file, and a DDL has a type behind it")
    return text.encode()


def _json_type(text: str) -> pa.DataType:
    from logquarry.spark.decode import ddl
    from logquarry.spark.decode.json import struct_of_schema

    if not text.lstrip().startswith("{"):
        return ddl.struct_of(text)
    try:
        document = json.loads(text)
    except ValueError as error:
        raise UsageError(f"JSON Schema: {error}") from None
    return struct_of_schema(document)


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"schema: {path}: {error.strerror}") from None


def _text(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise UsageError(
            f"schema: is no text: it begins with {base64.b16encode(data[:8]).decode()}"
        ) from None
