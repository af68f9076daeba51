"""The remoting codec: both headers carry the same commands; damage raises only our exception."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from logquarry import protocol
from logquarry.errors import ProtocolViolation
from logquarry.format import broker_json
from logquarry.protocol import remoting, remoting_codes, remoting_header
from logquarry.protocol.remoting import LANGUAGES, RemotingCommand, RemotingReader

INT = st.integers(-(1 << 31), (1 << 31) - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
COMMANDS = st.builds(
    RemotingCommand,
    code=st.integers(-(1 << 15), (1 << 15) - 1),
    opaque=INT,
    flag=INT,
    language=st.sampled_from(LANGUAGES),
    version=st.integers(0, 500),
    remark=st.none() | TEXT.filter(bool),
    ext_fields=st.dictionaries(TEXT, TEXT, max_size=6),
    body=st.binary(max_size=200),
    is_binary=st.booleans(),
)


@given(st.lists(COMMANDS, max_size=5), st.lists(st.integers(1, 60), max_size=60))
def test_commands_survive_both_headers_in_any_parts(
    commands: list[RemotingCommand], cuts: list[int]
) -> None:
    data = b"".join(map(remoting.encode, commands))
    reader = RemotingReader()
    found: list[RemotingCommand] = []
    at = 0
    for size in (*cuts, len(data)):
        found += reader.receive_data(data[at : at + size])
        at += size
    assert found == commands
    assert not reader.pending


@given(COMMANDS, st.data())
def test_damaged_frames_raise_one_error(command: RemotingCommand, data: st.DataObject) -> None:
    frame = bytearray(remoting.encode(command))
    for _ in range(data.draw(st.integers(1, 8))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ProtocolViolation):
        for found in RemotingReader().receive_data(bytes(frame)):
            # Each command that the reader accepts is parsed or refused, and can be answered.
            with contextlib.suppress(remoting_codes.Refused):
                remoting_codes.parse(found.code, found.ext_fields)
            remoting.encode(found.answer(0, remark=found.remark))


@given(st.sampled_from(list(remoting_codes.RequestCode)), st.dictionaries(TEXT, TEXT, max_size=4))
def test_fields_are_parsed_or_refused(
    code: remoting_codes.RequestCode, fields: dict[str, str]
) -> None:
    names = [field.key for field in code.fields]
    given_fields = dict.fromkeys(names, "1") | fields
    with contextlib.suppress(remoting_codes.Refused):
        found = remoting_codes.parse(code, given_fields)
        assert found.keys() == {field.name for field in code.fields}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 53), 1 << 53) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@given(JSON)
def test_bodies_are_json_if_the_keys_are_text(value: object) -> None:
    assert json.loads(broker_json.compact(value)) == value


@given(st.dictionaries(st.integers(-9, 9), JSON, max_size=3))
def test_numbers_as_keys_have_no_quotes(table: dict[int, object]) -> None:
    expected = {str(key): value for key, value in table.items()}
    assert broker_json.decode(broker_json.compact(table)) == expected
    assert json.loads(broker_json.compact(table, quote_keys=True)) == expected


# -------------------------------------------------------------------------- compiled, interpreted
def _interpreted() -> ModuleType:
    """The header codec from its source, as in an installation without compiled modules."""
    path = Path(protocol.__file__).with_name("remoting_header.py")
    spec = spec_from_file_location("remoting_header_interpreted", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


REFERENCE = _interpreted()


def outcome(call: Callable[..., Any], *arguments: object) -> object:
    """The result of a call, or its exception; for text that is not UTF-8 without the message."""
    try:
        return call(*arguments)
    except UnicodeDecodeError:
        return UnicodeDecodeError
    except ValueError as error:
        return type(error), str(error)


HEADERS = st.one_of(
    COMMANDS.map(REFERENCE._json_header),
    JSON.map(lambda value: json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()),
    st.text('{}":,\\u0019abtnr/-.eE \n\x01\x7f\xe9', max_size=40).map(
        lambda text: f'{{"code":1,"opaque":2,"extFields":{{"a":"{text}'.encode()
    ),
    st.lists(
        st.sampled_from(
            [
                *(b"{", b"}", b'"', b":", b",", b"\\", b'"a"', b'"a":', b"0", b"-1", b"00"),
                *(b"9" * 18, b"9" * 19, b"1.5", b"1e3", b"true", b"null", b"\\u0041"),
                *(b"\\u00e9", b"\xc3\xa9", b"\xff", b"\n", b" ", b"\x1f"),
                *(b'"code":1,"opaque":2', b'"extFields":{'),
            ]
        ),
        max_size=12,
    ).map(b"".join),
)


@given(HEADERS)
@example(b'{"code":1,"opaque":2,"remark":"\\u007f\\ud83d\\ude00"}\n')
@example(b'{"code":1,"opaque":2,"extFields":{"a":"\\')
@example(b'{"code":-0,"opaque":-2147483648,"flag":2147483648}')
def test_json_headers_are_decoded_alike(header: bytes) -> None:
    found = outcome(remoting_header.decode_json, header, b"body")
    assert found == outcome(REFERENCE.decode_json, header, b"body")


@given(COMMANDS, st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=4))
def test_damaged_headers_are_decoded_alike(
    command: RemotingCommand, changes: list[tuple[int, int]]
) -> None:
    for encode, name in (
        (REFERENCE._json_header, "decode_json"),
        (REFERENCE._binary_header, "decode_binary"),
    ):
        header = bytearray(encode(command))
        for at, byte in changes:
            header[at % len(header)] = byte
        found = outcome(getattr(remoting_header, name), bytes(header), b"")
        assert found == outcome(getattr(REFERENCE, name), bytes(header), b"")


@given(COMMANDS)
@example(RemotingCommand(0, 1, ext_fields={"a": "\x7f", "b": "x" * 2_000}))
@example(RemotingCommand(0, 1, ext_fields={"a": "x" * 850}, language="\ud800"))
def test_heads_are_encoded_alike(command: RemotingCommand) -> None:
    assert remoting_header.encode_head(command) == REFERENCE.encode_head(command)


NUMBERS = st.one_of(
    st.integers(-(1 << 65), 1 << 65).map(str),
    st.sampled_from(["", "-", "+5", " 7", "1_0", "007", "-0", "\u0663", "1.5", "2147483648"]),
    st.sampled_from([str(1 << 63), str(-(1 << 63)), str(-(1 << 31)), str(-(1 << 31) - 1)]),
)


@given(
    st.sampled_from(list(remoting_codes.RequestCode)),
    st.lists(NUMBERS | st.sampled_from(["true", "True", "no"]), min_size=16, max_size=16),
    st.integers(0, 16),
)
def test_fields_are_parsed_alike(
    code: remoting_codes.RequestCode, texts: list[str], count: int
) -> None:
    expected = tuple(map(tuple, code.fields))
    names = [field.key for field in code.fields]
    fields = dict(zip(names[:count], texts, strict=False))
    expected_of = tuple(
        # The reference marks required fields in its own way.
        (name, kind, REFERENCE.REQUIRED if default is remoting_header.REQUIRED else default, key)
        for name, kind, default, key in expected
    )
    found = outcome(remoting_header.parse_fields, expected, fields)
    assert found == outcome(REFERENCE.parse_fields, expected_of, fields)
