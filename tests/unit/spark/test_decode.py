"""Decoders for JSON, Avro and Protobuf bodies, and the reasons for bodies that fail."""

from __future__ import annotations

import io
import json
import pickle
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logquarry.errors import UsageError
from logquarry.spark.decode import BodyDecoder, decoder_for, parse_decode_options
from logquarry.spark.decode import base as spark_ddl
from logquarry.spark.decode.json import JsonDecoder, inferred, struct_of_schema


def decoded(decoder: BodyDecoder, *bodies: bytes) -> tuple[list[Any], dict[int, str]]:
    """Send a decoder through pickle, as Spark does, and decode."""
    there = pickle.loads(pickle.dumps(decoder))
    assert there.arrow_type == decoder.arrow_type
    values, failed = there.decode(pa.array(bodies, pa.binary()))
    assert values.type == decoder.arrow_type
    return values.to_pylist(), failed


def json_decoder(ddl: str) -> JsonDecoder:
    return JsonDecoder(spark_ddl.struct_of(ddl))


def one(ddl: str, text: str) -> Any:
    """Return the field `a` of a body, or the reason why the body fails."""
    values, failed = decoded(json_decoder(ddl), text.encode())
    return failed[0] if failed else values[0]["a"]


# -------------------------------------------------------------------------------------------- DDL
def test_ddl() -> None:
    found = spark_ddl.struct_of(
        "id BIGINT NOT NULL, `odd``name` string, s struct<x: int, y:array<map<string, double>>>,"
        " d decimal(10, 2), t timestamp, day date, ok boolean, raw binary"
    )
    assert found == pa.struct(
        [
            ("id", pa.int64()),
            ("odd`name", pa.string()),
            (
                "s",
                pa.struct([("x", pa.int32()), ("y", pa.list_(pa.map_(pa.string(), pa.float64())))]),
            ),
            ("d", pa.decimal128(10, 2)),
            ("t", pa.timestamp("us", "UTC")),
            ("day", pa.date32()),
            ("ok", pa.bool_()),
            ("raw", pa.binary()),
        ]
    )
    assert spark_ddl.struct_of("struct<a: int>") == spark_ddl.struct_of("a int")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "the name of a column"),
        ("a", "a type"),
        ("a int b", "nothing more"),
        ("a colour", "no type 'colour'"),
        ("a int, A string", "twice"),
        ("a decimal(50, 2)", "decimal"),
        ("a decimal(5, 9)", "scale above precision"),
        ("a map<int, int>", "of type string"),
        ("a array<int", "'>'"),
        ("`a b` int", "invalid column name"),
        ("a " + "array<" * 60 + "int" + ">" * 60, "nested types"),
        ("a struct<>", "no fields"),
    ],
)
def test_ddl_that_is_none(text: str, word: str) -> None:
    with pytest.raises(UsageError, match=word):
        spark_ddl.struct_of(text)


# ------------------------------------------------------------------------------------------- JSON
@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("bigint", '{"a": 9223372036854775807}', 9223372036854775807),
        ("bigint", '{"a": 9223372036854775808}', "value.a: needs a whole number of 64 bits"),
        ("tinyint", '{"a": -129}', "value.a: needs a whole number of 8 bits"),
        ("int", '{"a": 3.0}', 3),
        ("int", '{"a": 3.5}', "value.a: needs a whole number, not a number with a fraction"),
        ("int", '{"a": true}', "value.a: needs a whole number, not a boolean"),
        ("int", '{"a": "3"}', "value.a: needs a whole number, not a string"),
        ("int", '{"a": null}', None),
        ("int", "{}", None),
        ("int", '{"b": 1}', None),
        ("double", '{"a": 7}', 7.0),
        ("double", '{"a": 1e999}', "value.a: the number is too large"),
        ("double", '{"a": 1' + "0" * 400 + "}", "value.a: the number is too large"),
        ("double", '{"a": 1e300}', 1e300),
        ("float", '{"a": 3.4e38}', 3.3999999521443642e38),
        ("float", '{"a": 3.5e38}', "value.a: the number is too large"),
        ("float", '{"a": -1e300}', "value.a: the number is too large"),
        ("float", '{"a": 1' + "0" * 39 + "}", "value.a: the number is too large"),
        ("array<float>", '{"a": [1e300]}', "value.a[]: the number is too large"),
        ("double", '{"a": NaN}', "ValueError: NaN is not valid JSON"),
        ("boolean", '{"a": 0}', "value.a: needs a boolean, not a number"),
        ("string", '{"a": "Zürich"}', "Zürich"),
        ("string", '{"a": {"b": [1, 2.50]}}', '{"b":[1,2.5]}'),
        ("string", '{"a": 12.50}', "12.50"),
        ("string", r'{"a": "\ud800"}', "value.a: contains half of a surrogate pair"),
        ("decimal(10,2)", '{"a": 12345678.91}', Decimal("12345678.91")),
        ("decimal(4,2)", '{"a": 123.45}', "ArrowInvalid"),
        ("timestamp", '{"a": "2024-05-01T12:00:00+02:00"}', datetime(2024, 5, 1, 10, tzinfo=UTC)),
        ("timestamp", '{"a": "2024-05-01T12:00:00"}', datetime(2024, 5, 1, 12, tzinfo=UTC)),
        ("timestamp", '{"a": 5}', "value.a: needs a string with a time, not a number"),
        ("date", '{"a": "2024-05-01"}', date(2024, 5, 1)),
        ("date", '{"a": "soon"}', "value.a: needs a date"),
        ("binary", '{"a": "AAEC"}', b"\0\1\2"),
        ("array<int>", '{"a": [1, null, 2]}', [1, None, 2]),
        ("array<int>", '{"a": [1, "x"]}', "value.a[]: needs a whole number, not a string"),
        ("map<string,int>", '{"a": {"x": 1}}', [("x", 1)]),
        ("struct<b:int>", '{"a": {"b": 1, "c": 2}}', {"b": 1}),
        ("struct<b:int>", '{"a": []}', "value.a: needs an object, not an array"),
        ("int", "[1]", "is an array, not a JSON object"),
        ("int", "3", "is a number, not a JSON object"),
        ("int", "", "JSONDecodeError"),
        ("int", '{"a": 1} {"a": 2}', "JSONDecodeError: Extra data"),
        ("int", '{"a": ' + "1" * 5000 + "}", "ValueError"),
        ("int", '{"a":' * 100_000, "RecursionError"),
    ],
)
def test_json(kind: str, text: str, value: Any) -> None:
    found = one(f"a {kind}", text)
    if isinstance(value, str) and not kind.startswith("string"):
        assert found.startswith(value)
    else:
        assert found == value


def test_json_of_other_encodings_is_none() -> None:
    text = '{"a": 1}'
    _, failed = decoded(json_decoder("a int"), text.encode("utf-16"), b'{"a": "\xff"}')
    assert [reason.partition(":")[0] for reason in failed.values()] == ["UnicodeDecodeError"] * 2


@given(
    st.lists(
        st.binary() | st.from_regex(r'\{"a": ?[0-9"x.]{0,22}\}', fullmatch=True).map(str.encode)
    )
)
def test_a_verdict_does_not_depend_on_the_neighbours(bodies: list[bytes]) -> None:
    for kind in ("int", "decimal(5,2)", "string"):
        decoder = json_decoder(f"a {kind}")
        values, failed = decoder.decode(pa.array(bodies, pa.binary()))
        for row, body in enumerate(bodies):
            alone, reasons = decoder.decode(pa.array([body], pa.binary()))
            assert failed.get(row) == reasons.get(0)
            assert values[row].as_py() == alone[0].as_py()


def test_inferred() -> None:
    bodies = [
        b'{"n": 1, "x": 1, "s": "t", "l": [], "o": {"p": null}, "mixed": 1, "bad name": 1}',
        b"no JSON",
        b'{"n": 2.5, "x": 2, "l": [{"q": true}], "o": {"p": "r"}, "mixed": "a", "S": 1, "e": {}}',
    ]
    found, count = inferred(bodies)
    assert count == 2
    assert found == spark_ddl.struct_of(
        "n double, x bigint, s string, l array<struct<q:boolean>>, o struct<p:string>,"
        " mixed string, e string"
    )
    values, failed = decoded(JsonDecoder(found), *bodies)
    assert set(failed) == {1}
    assert values[2]["l"] == [{"q": True}] and values[2]["e"] == "{}"
    assert inferred([b"x", b"{}"]) == (None, 1)
    assert inferred([]) == (None, 0)


def test_json_schema() -> None:
    document = {
        "type": "object",
        "properties": {
            "id": {"type": "integer"},
            "price": {"type": ["number", "null"]},
            "when": {"type": "string", "format": "date-time"},
            "items": {"type": "array", "items": {"$ref": "#/$defs/item"}},
            "labels": {"type": "object", "additionalProperties": {"type": "string"}},
            "any": True,
            "maybe": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
        },
        "$defs": {"item": {"type": "object", "properties": {"sku": {"type": "string"}}}},
    }
    assert struct_of_schema(document) == spark_ddl.struct_of(
        "id bigint, price double, when timestamp, items array<struct<sku:string>>,"
        " labels map<string,string>, any string, maybe boolean"
    )
    for wrong, word in (
        ({"type": "string"}, "needs an object"),
        ({"properties": {"a": {"$ref": "#"}}}, "contains itself"),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}}, "does not exist"),
        ({"properties": {"a": {"$ref": "http://x"}}}, "another document"),
        ({"properties": {"a": {"type": "colour"}}}, "no type"),
    ):
        with pytest.raises(UsageError, match=word):
            struct_of_schema(wrong)


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"properties": [1]}, r"value: properties takes an object, not \[1\]"),
        ({"properties": None}, "properties takes an object, not null"),
        ({"type": [{}]}, r"value: type takes the name of a type, or a list of names, not \[{}\]"),
        ({"type": 3}, "type takes the name"),
        ({"type": None}, "type takes the name"),
        ({"properties": {"a": {"anyOf": 3}}}, r"value\.a: anyOf takes a list of schemas, not 3"),
        ({"properties": {"a": {"oneOf": {}}}}, r"value\.a: oneOf takes a list"),
        ({"properties": {"a": {"anyOf": [5]}}}, r"value\.a: a schema is an object"),
        ({"properties": {"a": 3}}, r"value\.a: a schema is an object, true or false, not 3"),
        ({"properties": {"a": {"type": "array", "items": 3}}}, r"value\.a\[\]: a schema is"),
        ({"type": "object", "additionalProperties": "string"}, "a schema is an object"),
        ({"properties": {"a": {"type": "string", "format": []}}}, "format takes a name"),
        ({"properties": {"\ud800": True}}, "names of properties are valid text"),
        ({"properties": {"a": {"$ref": 3}}}, "another document"),
        ({"properties": {"a": {"$ref": "#/properties/a/b"}}}, "does not exist"),
    ],
)
def test_json_schemas_that_are_invalid(schema: Any, word: str, tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(schema))
    with pytest.raises(UsageError, match=word):
        parse_decode_options("json", str(file))


def test_valid_json_schemas_of_other_forms() -> None:
    document = {
        "properties": {
            "tuple": {"type": "array", "items": [{"type": "string"}, {"type": "integer"}]},
            "never": False,
            "no_type": {},
            "only_null": {"type": ["null"]},
            "one": {"anyOf": [True]},
        }
    }
    assert struct_of_schema(document) == spark_ddl.struct_of(
        "tuple array<string>, never string, no_type string, only_null string, one string"
    )


def test_a_json_schema_that_is_nested_too_deep(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"properties": ' * 100_000)
    with pytest.raises(UsageError, match="JSON Schema: "):
        parse_decode_options("json", str(file))


# ------------------------------------------------------------------------------------------- Avro
AVRO = {
    "type": "record",
    "name": "Order",
    "namespace": "shop",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "name", "type": ["null", "string"], "default": None},
        {"name": "kind", "type": {"type": "enum", "name": "Kind", "symbols": ["A", "B"]}},
        {"name": "other", "type": "Kind"},
        {"name": "hash", "type": {"type": "fixed", "name": "Hash", "size": 2}},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "us", "type": ["null", {"type": "long", "logicalType": "timestamp-micros"}]},
        {"name": "day", "type": {"type": "int", "logicalType": "date"}},
        {
            "name": "price",
            "type": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2},
        },
        {"name": "tags", "type": {"type": "map", "values": "int"}},
        {
            "name": "lines",
            "type": {
                "type": "array",
                "items": {
                    "type": "record",
                    "name": "Line",
                    "fields": [
                        {"name": "t", "type": {"type": "long", "logicalType": "timestamp-millis"}}
                    ],
                },
            },
        },
        {"name": "wide", "type": ["int", "long"]},
    ],
}
ORDER = {
    "id": 7,
    "name": None,
    "kind": "A",
    "other": "B",
    "hash": b"hh",
    "at": 1_700_000_000_123,
    "us": 5,
    "day": 19_000,
    "price": Decimal("12.34"),
    "tags": {"x": 1},
    "lines": [{"t": 1}],
    "wide": 1 << 40,
}


def avro_bytes(schema: Any, value: Any) -> bytes:
    fastavro = pytest.importorskip("fastavro")
    sink = io.BytesIO()
    fastavro.schemaless_writer(sink, fastavro.parse_schema(schema), value)
    return sink.getvalue()


def avro_decoder(tmp_path: Path, schema: Any) -> BodyDecoder:
    (tmp_path / "schema.avsc").write_text(json.dumps(schema))
    options = parse_decode_options("avro", str(tmp_path / "schema.avsc"))
    assert options is not None
    decoder = decoder_for(options, None)
    assert decoder is not None
    return decoder


def test_avro(tmp_path: Path) -> None:
    body = avro_bytes(AVRO, ORDER)
    decoder = avro_decoder(tmp_path, AVRO)
    values, failed = decoded(decoder, body, body[:-1], body + b"\0", b"", b"\xff" * 40)
    assert set(failed) == {1, 2, 3, 4}
    assert "the schema differs" in failed[2]
    found = values[0]
    assert (found["id"], found["name"], found["kind"], found["other"]) == (7, None, "A", "B")
    assert found["at"] == datetime(2023, 11, 14, 22, 13, 20, 123_000, UTC)
    assert found["us"].microsecond == 5 and found["day"] == date(2022, 1, 8)
    assert (found["price"], found["tags"], found["hash"]) == (Decimal("12.34"), [("x", 1)], b"hh")
    assert found["lines"][0]["t"].microsecond == 1000 and found["wide"] == 1 << 40


def record(name: str, *fields: Any, **more: str) -> dict[str, Any]:
    named = [{"name": f"f{number}", "type": kind} for number, kind in enumerate(fields)]
    return {"type": "record", "name": name, "fields": named, **more}


ENUM = {"type": "enum", "name": "E", "symbols": ["X"]}


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (record("a.b.Outer", ENUM, "a.b.E"), {"f0": "X", "f1": "X"}),
        (record("a.b.Outer", ENUM, "E"), {"f0": "X", "f1": "X"}),
        (record("a.b.Outer", ENUM, "a.b.E", namespace="c"), {"f0": "X", "f1": "X"}),
        (record("Outer", {**ENUM, "name": "x.E"}, "x.E", namespace="c"), {"f0": "X", "f1": "X"}),
        # The record L has the namespace a, also where a record of the namespace c names it.
        (
            record(
                "a.Outer",
                ENUM,
                record("L", "E"),
                record("c.M", "a.L"),
            ),
            {"f0": "X", "f1": {"f0": "X"}, "f2": {"f0": {"f0": "X"}}},
        ),
    ],
)
def test_avro_names(tmp_path: Path, schema: Any, value: Any) -> None:
    decoder = avro_decoder(tmp_path, schema)
    values, failed = decoded(decoder, avro_bytes(schema, value))
    assert (values, failed) == ([value], {})


def test_avro_times_beyond_all_calendars(tmp_path: Path) -> None:
    schema = {
        "type": "record",
        "name": "R",
        "fields": [{"name": "t", "type": {"type": "long", "logicalType": "timestamp-millis"}}],
    }
    decoder = avro_decoder(tmp_path, schema)
    plain = {**schema, "fields": [{"name": "t", "type": "long"}]}
    far = avro_bytes(plain, {"t": 9_000_000_000_000_000})
    beyond = avro_bytes(plain, {"t": 10_000_000_000_000_000})
    values, failed = decoder.decode(pa.array([far, beyond]))
    assert values.field(0).cast(pa.int64())[0].as_py() == 9_000_000_000_000_000_000
    assert set(failed) == {1} and "outside the range of microseconds" in failed[1]


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ("long", "needs a record"),
        ({"type": "record", "name": "R", "fields": []}, "no fields"),
        (
            {"type": "record", "name": "R", "fields": [{"name": "a", "type": ["int", "string"]}]},
            "union of 2 types",
        ),
        (
            {
                "type": "record",
                "name": "R",
                "fields": [{"name": "a", "type": ["null", "R"]}],
            },
            "contains itself",
        ),
        ({"type": "record", "name": "R", "fields": [{"name": "a", "type": "colour"}]}, "colour"),
    ],
)
def test_avro_schemas_that_no_column_holds(tmp_path: Path, schema: Any, word: str) -> None:
    pytest.importorskip("fastavro")
    with pytest.raises(UsageError, match=word):
        avro_decoder(tmp_path, schema)


# --------------------------------------------------------------------------------------- Protobuf
def descriptor_set(tmp_path: Path, *, proto2: bool = False) -> Path:
    pb = pytest.importorskip("google.protobuf.descriptor_pb2")
    from google.protobuf import timestamp_pb2

    field = pb.FieldDescriptorProto
    files = pb.FileDescriptorSet()
    file = files.file.add(
        name="order.proto", package="shop", syntax="proto2" if proto2 else "proto3"
    )
    file.dependency.append("google/protobuf/timestamp.proto")
    # After the file that imports it: a descriptor set may have any order.
    timestamp_pb2.DESCRIPTOR.CopyToProto(files.file.add())
    kind = file.enum_type.add(name="Kind")
    kind.value.add(name="UNKNOWN", number=0)
    kind.value.add(name="PAID", number=1)
    line = file.message_type.add(name="Line")
    line.field.add(name="sku", number=1, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL)
    order = file.message_type.add(name="Order")
    label = field.LABEL_REQUIRED if proto2 else field.LABEL_OPTIONAL
    order.field.add(name="id", number=1, type=field.TYPE_INT64, label=label)
    more = [
        ("name", field.TYPE_STRING, None),
        ("big", field.TYPE_UINT64, None),
        ("raw", field.TYPE_BYTES, None),
        ("kind", field.TYPE_ENUM, ".shop.Kind"),
        ("line", field.TYPE_MESSAGE, ".shop.Line"),
        ("at", field.TYPE_MESSAGE, ".google.protobuf.Timestamp"),
    ]
    for number, (name, type_, type_name) in enumerate(more, 2):
        order.field.add(
            name=name, number=number, type=type_, type_name=type_name, label=field.LABEL_OPTIONAL
        )
    order.field.add(
        name="lines",
        number=20,
        type=field.TYPE_MESSAGE,
        type_name=".shop.Line",
        label=field.LABEL_REPEATED,
    )
    entry = order.nested_type.add(name="CountsEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=field.TYPE_INT32, label=field.LABEL_OPTIONAL)
    entry.field.add(name="value", number=2, type=field.TYPE_INT32, label=field.LABEL_OPTIONAL)
    order.field.add(
        name="counts",
        number=21,
        type=field.TYPE_MESSAGE,
        type_name=".shop.Order.CountsEntry",
        label=field.LABEL_REPEATED,
    )
    tree = file.message_type.add(name="Tree")
    tree.field.add(
        name="child",
        number=1,
        type=field.TYPE_MESSAGE,
        type_name=".shop.Tree",
        label=field.LABEL_OPTIONAL,
    )
    path = tmp_path / "order.pb"
    path.write_bytes(files.SerializeToString())
    return path


def protobuf_decoder(path: Path, message: str = "shop.Order") -> Any:
    options = parse_decode_options("protobuf", str(path), message)
    assert options is not None
    return decoder_for(options, None)


def test_protobuf(tmp_path: Path) -> None:
    decoder = protobuf_decoder(descriptor_set(tmp_path))
    made = decoder._message
    order = made(id=5, name="x", big=1 << 63, raw=b"r", kind=1, counts={3: 4})
    order.line.sku = "s"
    order.lines.add(sku="t")
    order.at.FromDatetime(datetime(2024, 5, 1, tzinfo=UTC))
    # A value that was added to the enum later.
    unknown = made(kind=9).SerializeToString()
    body = order.SerializeToString()
    values, failed = decoded(decoder, body, b"", unknown, body[:-1], b"\xff\xff")
    assert set(failed) == {3, 4} and "DecodeError" in failed[3]
    assert values[0] == {
        "id": 5,
        "name": "x",
        "big": Decimal(1 << 63),
        "raw": b"r",
        "kind": "PAID",
        "line": {"sku": "s"},
        "at": datetime(2024, 5, 1, tzinfo=UTC),
        "lines": [{"sku": "t"}],
        "counts": [("3", 4)],
    }
    assert (values[1]["id"], values[1]["line"], values[1]["at"]) == (0, None, None)
    assert values[2]["kind"] == "9"


def test_protobuf_that_wants_its_fields(tmp_path: Path) -> None:
    decoder = protobuf_decoder(descriptor_set(tmp_path, proto2=True))
    made = decoder._message
    values, failed = decoded(decoder, made(id=1).SerializeToString(), b"")
    assert failed == {1: "required fields are missing: id"}
    # A missing field with presence is null.
    assert values[0]["name"] is None


def test_protobuf_refusals(tmp_path: Path) -> None:
    path = descriptor_set(tmp_path)
    with pytest.raises(UsageError, match=r"no message 'Order'; there are: .*shop\.Order"):
        protobuf_decoder(path, "Order")
    with pytest.raises(UsageError, match="contains itself"):
        protobuf_decoder(path, "shop.Tree")
    path.write_bytes(b"\xff\xff\xff")
    with pytest.raises(UsageError, match="descriptor set"):
        protobuf_decoder(path)


# ---------------------------------------------------------------------------------------- options
@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("xml",), "takes raw, json"),
        (("raw", "a int"), "takes no schema"),
        (("avro",), "avsc"),
        (("protobuf",), "descriptor set"),
        (("protobuf", "/dev/null"), "full name"),
        (("json", "a int", "shop.Order"), "needs decode=protobuf"),
        (("json", "missing.json"), "neither an existing file nor a DDL"),
        (("avro", "/nowhere/x.avsc"), "No such file"),
        (("json", "a colour"), "no type"),
    ],
)
def test_options_that_make_no_sense(arguments: tuple[str, ...], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        parse_decode_options(*arguments)


def test_schema_files(tmp_path: Path) -> None:
    (tmp_path / "ddl.txt").write_text("a int,\n b string\n")
    (tmp_path / "schema.json").write_text('{"properties": {"a": {"type": "integer"}}}')
    for name, ddl in (("ddl.txt", "a int, b string"), ("schema.json", "a bigint")):
        options = parse_decode_options("json", str(tmp_path / name))
        assert options is not None
        decoder = decoder_for(options, None)
        assert decoder is not None and decoder.arrow_type == spark_ddl.struct_of(ddl)
    assert parse_decode_options("raw") is None


def test_a_lack_of_memory_fails_no_body(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> pa.Array:
        raise pa.ArrowMemoryError("realloc of size 256 failed")

    bodies = pa.array([b'{"a": 1}'], pa.binary())
    decoder = json_decoder("a int")
    monkeypatch.setattr(pa, "array", refuse)
    with pytest.raises(MemoryError):
        decoder.decode(bodies)
