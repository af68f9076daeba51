"""The remoting codec: both headers carry the same commands; damage raises only our exception."""

from __future__ import annotations

import contextlib
import json

from hypothesis import given
from hypothesis import strategies as st

from logquarry.errors import ProtocolViolation
from logquarry.format import fastjson
from logquarry.protocol import remoting, remoting_codes
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
            # What the reader accepts can be parsed or is refused, and can be answered.
            with contextlib.suppress(ValueError):
                remoting_codes.parse(found.code, found.ext_fields)
            remoting.encode(found.answer(0, remark=found.remark))


@given(st.sampled_from(sorted(remoting_codes.REQUESTS)), st.dictionaries(TEXT, TEXT, max_size=4))
def test_fields_are_parsed_or_refused(code: int, fields: dict[str, str]) -> None:
    names = [field.key for field in remoting_codes.REQUESTS[code].fields]
    given_fields = dict.fromkeys(names, "1") | fields
    with contextlib.suppress(ValueError):
        found = remoting_codes.parse(code, given_fields)
        assert found.keys() == {field.name for field in remoting_codes.REQUESTS[code].fields}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 53), 1 << 53) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@given(JSON)
def test_bodies_are_json_if_the_keys_are_text(value: object) -> None:
    assert json.loads(fastjson.compact(value)) == value


@given(st.dictionaries(st.integers(-9, 9), JSON, max_size=3))
def test_numbers_as_keys_have_no_quotes(table: dict[int, object]) -> None:
    expected = {str(key): value for key, value in table.items()}
    assert fastjson.decode(fastjson.compact(table)) == expected
    assert json.loads(fastjson.compact(table, quote_keys=True)) == expected
