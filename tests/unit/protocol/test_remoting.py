"""Remoting frames: cut at every byte, and with hostile bytes."""

from __future__ import annotations

import json
import random
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logquarry.errors import ProtocolViolation, UsageError
from logquarry.protocol import remoting
from logquarry.protocol.remoting import (
    LARGEST_FRAME,
    RemotingCommand,
    RemotingReader,
)
from logquarry.protocol.remoting_codes import RequestCode, ResponseCode

ASKED = RemotingCommand(code=RequestCode.GET_ALL_TOPIC_CONFIG, opaque=7)
# RemotingCommand.encode() of RocketMQ 4.9.3, with both kinds of headers.
JAVA_JSON = bytes.fromhex(
    "0000007e000000767b22636f6465223a32312c226578744669656c6473223a7b226b223a2276c3a9227d2c22666c61"
    "67223a302c226c616e6775616765223a224a415641222c226f7061717565223a302c2273657269616c697a65547970"
    "6543757272656e74525043223a224a534f4e222c2276657273696f6e223a307d626f6479"
)
JAVA_BINARY = bytes.fromhex(
    "0000002c010000240015000000000000000000000000000005776879c3a90000000a00016b0000000376c3a9626f6479"
)
JAVA_ANSWER = (
    '{"code":1,"flag":1,"language":"JAVA","opaque":7,"remark":"No topic in this broker",'
    '"serializeTypeCurrentRPC":"JSON","version":0}'
)


def frame(header: bytes, body: bytes = b"", *, kind: int = 0) -> bytes:
    size = 4 + len(header) + len(body)
    return struct.pack(">iI", size, kind << 24 | len(header)) + header + body


def binary(remark: bytes = b"", fields: bytes = b"", sizes: tuple[int, int] | None = None) -> bytes:
    first, second = sizes or (len(remark), len(fields))
    head = struct.pack(">hbhiii", 21, 0, 399, 7, 0, first)
    return frame(head + remark + struct.pack(">i", second) + fields, kind=1)


def read(data: bytes) -> list[RemotingCommand]:
    return RemotingReader().receive_data(data)


# ---------------------------------------------------------------------------------------- frames
def test_what_java_wrote() -> None:
    expected = RemotingCommand(
        code=21,
        opaque=0,
        language="JAVA",
        version=0,
        ext_fields={"k": "v\xe9"},
        body=b"body",
    )
    assert read(JAVA_JSON) == [expected]
    (found,) = read(JAVA_BINARY)
    assert found.remark == "why\xe9"
    assert found.ext_fields == expected.ext_fields and found.body == b"body"
    assert (found.code, found.opaque, found.language) == (21, 0, "JAVA")


def test_what_is_written_is_what_java_writes() -> None:
    answer = RemotingCommand(code=0, opaque=7, language="JAVA", version=0).answer(
        ResponseCode.SYSTEM_ERROR, remark="No topic in this broker"
    )
    ours = remoting.encode(answer).replace(b'"PYTHON"', b'"JAVA"').replace(b":399", b":0")
    assert ours[8:].decode() == JAVA_ANSWER


@given(
    st.builds(
        RemotingCommand,
        code=st.integers(-(1 << 31), (1 << 31) - 1),
        opaque=st.integers(-(1 << 31), (1 << 31) - 1),
        flag=st.integers(0, 3),
        language=st.sampled_from(remoting.LANGUAGES),
        version=st.integers(0, 1 << 20),
        remark=st.none() | st.text(max_size=20),
        ext_fields=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
        body=st.binary(max_size=50),
        is_binary=st.just(False),
    )
)
def test_what_is_written_can_be_read(command: RemotingCommand) -> None:
    assert read(remoting.encode(command)) == [command]


def test_every_split_gives_the_same() -> None:
    answer = ASKED.answer(ResponseCode.SUCCESS, body=b"{}" * 10)
    data = remoting.encode(ASKED) + JAVA_BINARY + remoting.encode(answer)
    whole = read(data)
    assert [command.is_response for command in whole] == [False, False, True]
    for first in range(len(data) + 1):
        reader = RemotingReader()
        found = reader.receive_data(data[:first])
        found += reader.receive_data(memoryview(data)[first:])
        assert found == whole and not reader.pending
    reader = RemotingReader()
    assert [c for at in range(len(data)) for c in reader.receive_data(data[at : at + 1])] == whole


def test_a_oneway_request_wants_no_answer() -> None:
    assert RemotingCommand(code=1, opaque=1, flag=2).is_oneway
    assert not ASKED.is_oneway and not ASKED.is_response


def test_no_frame_is_written_that_nobody_takes() -> None:
    body = bytes(LARGEST_FRAME)
    with pytest.raises(UsageError, match="at most 16777216"):
        remoting.encode(ASKED.answer(0, body=body))
    whole = remoting.encode(ASKED.answer(0, body=body[:-200]))
    assert len(read(whole)[0].body) == LARGEST_FRAME - 200


# --------------------------------------------------------------------------------------- hostile
HOSTILE = {
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01",
    "negative length": struct.pack(">i", -1),
    "no room for a header": struct.pack(">i", 3),
    "too long": struct.pack(">i", LARGEST_FRAME - 3),
    "header behind the frame": struct.pack(">iI", 10, 7),
    "unknown type": frame(b"{}", kind=2),
    "highest type": frame(b"{}", kind=255),
    "no header": frame(b""),
    # The limit is checked before the header has arrived.
    "header too long": struct.pack(">iI", (1 << 23), (1 << 21) + 1),
    "no object": frame(b"[]"),
    "no json": frame(b"{"),
    "no utf-8": frame(b'{"code":0,"opaque":0,"remark":"\xff"}'),
    "deep": frame(b'{"code":' + b"[" * 5000 + b"]" * 5000 + b"}"),
    "no code": frame(b'{"opaque":0}'),
    "no opaque": frame(b'{"code":0}'),
    "a code that is a text": frame(b'{"code":"0","opaque":0}'),
    "a code that is a truth": frame(b'{"code":true,"opaque":0}'),
    "a broken code": frame(b'{"code":0.5,"opaque":0}'),
    "a large code": frame(b'{"code":2147483648,"opaque":0}'),
    "a huge code": frame(b'{"code":' + b"9" * 6000 + b',"opaque":0}'),
    "a remark that is a number": frame(b'{"code":0,"opaque":0,"remark":1}'),
    "fields that are a list": frame(b'{"code":0,"opaque":0,"extFields":[]}'),
    "nested fields": frame(b'{"code":0,"opaque":0,"extFields":{"a":{}}}'),
    "short binary": frame(bytes(12), kind=1),
    "binary without sizes": frame(bytes(13), kind=1),
    "binary with half a size": frame(bytes(19), kind=1),
    "binary with more": frame(bytes(22), kind=1),
    "remark behind its header": binary(sizes=(1 << 30, 0)),
    "remark below 0": binary(sizes=(-1, 0)),
    "fields behind their header": binary(sizes=(0, 5)),
    "half a key": binary(fields=b"\0\5a"),
    "a key alone": binary(fields=b"\0\1a"),
    "a key below 0": binary(fields=b"\xff\xff\0\0\0\0"),
    "binary without utf-8": binary(remark=b"\xff"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_the_hostile_get_one_error(name: str) -> None:
    data = remoting.encode(ASKED) + HOSTILE[name]
    for pieces in ([data], [data[at : at + 1] for at in range(len(data))]):
        reader = RemotingReader()
        found: list[RemotingCommand] = []
        with pytest.raises(ProtocolViolation, match="no remoting frame") as raised:
            for piece in pieces:
                found += reader.receive_data(piece)
        assert found + raised.value.events == [ASKED]
        assert reader.receive_data(remoting.encode(ASKED)) == [] and not reader.pending


def test_a_length_is_refused_before_what_it_tells_of_comes() -> None:
    reader = RemotingReader(largest=100)
    assert reader.receive_data(struct.pack(">i", 96)) == []
    with pytest.raises(ProtocolViolation):
        RemotingReader(largest=100).receive_data(struct.pack(">i", 97))


def test_whatever_is_changed_gives_commands_or_the_one_error() -> None:
    rng = random.Random(11)
    answer = json.dumps({"code": 0, "opaque": 1, "extFields": {"a": "b"}}).encode()
    for original in (JAVA_JSON, JAVA_BINARY, frame(answer, b"{}")):
        for _ in range(1_500):
            data = bytearray(original * 2)
            for _ in range(rng.randint(1, 4)):
                data[rng.randrange(len(data))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, 34, 123))
            reader = RemotingReader()
            try:
                reader.receive_data(data)
            except ProtocolViolation:
                assert not reader.pending
            assert reader.pending <= len(data)
