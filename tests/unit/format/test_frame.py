"""Are frames, blanks, hosts and message ids read and written as RocketMQ has them?"""

from __future__ import annotations

import base64
import ipaddress
import json
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logquarry.errors import UsageError
from logquarry.format import frame, java, sys_flag
from logquarry.format.frame import (
    ID_LENGTH_V4,
    ID_LENGTH_V6,
    MAGIC_V2,
    Blank,
    Damage,
    DamageKind,
    Frame,
    decode_id,
    encode_id,
    host_bytes,
    host_text,
)
from logquarry.testing import strategies
from tests.conformance.golden_facts import SOUND, Scenario
from tests.helpers.java_vectors import vectors

V4 = frame.host_bytes("10.0.0.1:10911")
V6 = frame.host_bytes("[2001:db8::1]:10911")


def a_frame(**changes: Any) -> Frame:
    item = Frame(topic=b"orders", body=b"body", properties=b"K\x01V", born_host=V4, store_host=V4)
    return replace(item, **changes).with_crc()


# ------------------------------------------------------------------------------------- golden bytes
@pytest.mark.parametrize("name", SOUND)
def test_golden_frames_decode_to_what_rocketmq_says_and_encode_to_themselves(
    golden: Path, name: str
) -> None:
    scenario = Scenario(golden / name)
    files = {int(p.name): p.read_bytes() for p in (scenario.store / "commitlog").iterdir()}
    size = scenario.config.mapped_file_size_commit_log
    assert size is not None
    for expected in scenario.expected:
        offset = expected["physicalOffset"]
        base = offset // size * size
        item = frame.decode_at(files[base], offset - base, base=base)
        assert isinstance(item, Frame)
        stored = files[base][offset - base : offset - base + item.size]
        assert frame.encode(item) == stored
        assert zlib.crc32(stored) == expected["frameCRC32"]
        assert (item.size, item.physical_offset) == (expected["size"], offset)
        assert item.topic.decode() == expected["topic"]
        assert item.queue_id == expected["queueId"]
        assert item.queue_offset == expected["queueOffset"]
        assert item.body == base64.b64decode(expected["body"])
        assert item.properties.decode() == expected["propertiesString"]
        assert item.born_host.hex().upper() == expected["bornHostHex"]
        assert item.store_host.hex().upper() == expected["storeHostHex"]
        for field, column in (
            ("store_timestamp", "storeTimestamp"),
            ("born_timestamp", "bornTimestamp"),
            ("sys_flag", "sysFlag"),
            ("flag", "flag"),
            ("body_crc", "bodyCRC"),
            ("reconsume_times", "reconsumeTimes"),
            ("prepared_transaction_offset", "preparedTransactionOffset"),
        ):
            assert getattr(item, field) == expected[column]


def test_golden_blanks(golden: Path) -> None:
    scenario = Scenario(golden / "rollover")
    blanks = scenario.facts["commitLog"]["blanks"]
    assert len(blanks) > 20
    size = scenario.config.mapped_file_size_commit_log
    assert size is not None
    for offset, length in blanks:
        base = offset // size * size
        data = (scenario.store / "commitlog" / f"{base:020d}").read_bytes()
        assert frame.decode_at(data, offset - base, base=base) == Blank(length)
        assert data[offset - base :][:8] == frame.encode_blank(length)


# ----------------------------------------------------------------------------------------- sizes
@pytest.mark.parametrize(
    ("flags", "magic", "size"),
    [
        (0, frame.MAGIC_V1, 91),
        (sys_flag.BORN_HOST_V6, frame.MAGIC_V1, 103),
        (sys_flag.STORE_HOST_V6, frame.MAGIC_V1, 103),
        (sys_flag.BORN_HOST_V6 | sys_flag.STORE_HOST_V6, frame.MAGIC_V1, 115),
        (0, MAGIC_V2, 92),
        (0x30, MAGIC_V2, 116),
        (~0x30, frame.MAGIC_V1, 91),
    ],
)
def test_fixed_sizes(flags: int, magic: int, size: int) -> None:
    assert frame.fixed_size(magic, flags) == size
    born, store = frame.host_sizes(flags)
    item = Frame(
        topic=b"", sys_flag=flags, magic=magic, born_host=bytes(born), store_host=bytes(store)
    )
    assert item.size == len(frame.encode(item)) == size


def test_the_body_stands_at_byte_88_and_12_further_on_for_each_ipv6_host() -> None:
    for flags, at in ((0, 88), (0x10, 100), (0x20, 100), (0x30, 112)):
        item = a_frame(
            sys_flag=flags,
            born_host=V6 if flags & 0x10 else V4,
            store_host=V6 if flags & 0x20 else V4,
        )
        assert frame.encode(item).index(b"body") == at


# --------------------------------------------------------------------------------------- encoding
@pytest.mark.parametrize(
    "changes",
    [
        {"born_host": V6},
        {"store_host": V6},
        {"sys_flag": 0x10},
        {"topic": b"x" * 128},
        {"properties": b"x" * 32768},
        {"queue_id": 1 << 31},
        {"queue_offset": 1 << 63},
        {"store_timestamp": -(1 << 63) - 1},
        {"magic": -1},
    ],
    ids=" ".join,
)
def test_what_fits_no_field_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"host|width"):
        frame.encode(a_frame(**changes))


def test_the_largest_parts_that_fit() -> None:
    item = a_frame(topic=b"t" * 127, properties=b"p" * 32767)
    assert frame.decode_at(frame.encode(item), 0, base=0) == item
    wide = a_frame(topic=b"t" * 32767, magic=MAGIC_V2)
    assert frame.decode_at(frame.encode(wide), 0, base=0) == wide


def test_the_crc_has_no_sign() -> None:
    body = next(bytes([n]) for n in range(256) if zlib.crc32(bytes([n])) >> 31)
    item = a_frame(body=body)
    assert item.body_crc == zlib.crc32(body) & 0x7FFFFFFF
    assert isinstance(frame.decode_at(frame.encode(item), 0, base=0), Frame)


# --------------------------------------------------------------------------------------- verdicts
def damaged_at(data: bytes, *, base: int = 0, end: int | None = None) -> DamageKind:
    outcome = frame.decode_at(data, 0, base=base, end=end)
    assert isinstance(outcome, Damage)
    assert outcome.reason
    return outcome.kind


def with_int(at: int, value: int, width: int = 4) -> bytes:
    data = bytearray(frame.encode(a_frame()))
    data[at : at + width] = value.to_bytes(width, "big", signed=value < 0)
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", DamageKind.TRUNCATED),
        (bytes(7), DamageKind.TRUNCATED),
        (bytes(8), DamageKind.ZEROED),
        (b"\0\0\0\x01\0\0\0\0", DamageKind.BAD_MAGIC),
        (with_int(4, 0xDAA320A8), DamageKind.BAD_MAGIC),
        (with_int(0, 0), DamageKind.BAD_SIZE),
        (with_int(0, 90), DamageKind.BAD_SIZE),
        (with_int(0, -1), DamageKind.BAD_SIZE),
        (with_int(0, 0x7FFFFFFF), DamageKind.BAD_SIZE),
        (with_int(0, 0x80000000), DamageKind.BAD_SIZE),
        (with_int(0, 105), DamageKind.BAD_SIZE),
        (with_int(0, 91), DamageKind.BAD_BODY_LENGTH),
        (with_int(0, 103), DamageKind.BAD_LENGTH_SUM),
        (with_int(28, 1, 8), DamageKind.BAD_PHYSICAL_OFFSET),
        (with_int(36, 0x30), DamageKind.BAD_SIZE),
        (with_int(84, -1), DamageKind.BAD_BODY_LENGTH),
        (with_int(84, 14), DamageKind.BAD_BODY_LENGTH),
        (with_int(92, 0x80, 1), DamageKind.BAD_TOPIC_LENGTH),
        (with_int(92, 10, 1), DamageKind.BAD_TOPIC_LENGTH),
        (with_int(99, 0x8000, 2), DamageKind.BAD_PROPERTIES_LENGTH),
        (with_int(99, 4, 2), DamageKind.BAD_LENGTH_SUM),
        (with_int(99, 2, 2), DamageKind.BAD_LENGTH_SUM),
        (with_int(88, 0, 1), DamageKind.BAD_BODY_CRC),
        (frame.encode_blank(9) + bytes(2), DamageKind.BAD_BLANK),
        (frame.encode_blank(0), DamageKind.BAD_BLANK),
        (frame.encode_blank(-8), DamageKind.BAD_BLANK),
    ],
)
def test_kinds_of_damage(data: bytes, kind: DamageKind) -> None:
    assert damaged_at(data) is kind


def test_the_end_of_the_file_counts_and_not_that_of_the_bytes() -> None:
    data = frame.encode(a_frame())
    assert isinstance(frame.decode_at(data + b"more", 0, base=0, end=len(data)), Frame)
    assert damaged_at(data, end=len(data) - 1) is DamageKind.BAD_SIZE
    assert frame.decode_at(frame.encode_blank(100), 0, base=0, end=100) == Blank(100)


def test_an_unchecked_crc_does_not_matter() -> None:
    wrong = replace(a_frame(), body_crc=77)
    assert damaged_at(frame.encode(wrong)) is DamageKind.BAD_BODY_CRC
    assert frame.decode_at(frame.encode(wrong), 0, base=0, check_crc=False) == wrong


def test_the_crc_of_an_empty_body_is_zero() -> None:
    empty = a_frame(body=b"")
    assert empty.body_crc == 0
    assert frame.decode_at(frame.encode(empty), 0, base=0) == empty
    wrong = frame.encode(replace(empty, body_crc=77))
    assert damaged_at(wrong) is DamageKind.BAD_BODY_CRC
    assert isinstance(frame.decode_at(wrong, 0, base=0, check_crc=False), Frame)


def test_a_body_that_harmed_flags_hide() -> None:
    """With the flag of an IPv6 host, the body's last four bytes are read as the BODYLEN 0."""
    data = bytearray(frame.encode(a_frame(body=b"12345678" + bytes(4), properties=b"")))
    data[frame.HEAD.offsets["sys_flag"] + 3] ^= sys_flag.BORN_HOST_V6
    assert damaged_at(bytes(data)) is DamageKind.BAD_BODY_CRC


def test_kinds_have_labels() -> None:
    assert DamageKind.BAD_LENGTH_SUM.label == "bad_length_sum"
    assert [kind.value for kind in DamageKind] == list(range(1, 13))


@pytest.mark.parametrize(("address", "expected"), vectors("ip"))
def test_an_ipv6_address_is_written_as_java_writes_it(address: str, expected: str) -> None:
    packed = ipaddress.IPv6Address(address).packed
    host = host_text(packed + (10911).to_bytes(4, "big"))
    assert host == (f"[{expected}]:10911" if ":" in expected else f"{expected}:10911")


@pytest.mark.parametrize(("address", "text", "offset"), vectors("id"))
def test_ids_of_java(address: str, text: str, offset: int) -> None:
    packed = ipaddress.ip_address(address).packed
    host = packed + (10911).to_bytes(4, "big")
    assert encode_id(host, offset) == text
    assert decode_id(text) == (host_text(host), offset)
    assert decode_id(text.lower()) == decode_id(text)


@pytest.mark.parametrize("scenario", ["single", "ipv6"])
def test_golden_ids(golden: Path, scenario: str) -> None:
    for line in (golden / scenario / "expected.jsonl").read_text("utf-8").splitlines():
        message = json.loads(line)
        host = bytes.fromhex(message["storeHostHex"])
        assert encode_id(host, message["physicalOffset"]) == message["msgId"]
        assert decode_id(message["msgId"])[1] == message["physicalOffset"]


@given(
    st.booleans().flatmap(lambda v6: strategies.hosts(v6=v6)),
    st.integers(java.LONG_MIN, java.LONG_MAX),
)
def test_what_was_encoded_comes_back(host: bytes, offset: int) -> None:
    text = encode_id(host, offset)
    assert len(text) == (ID_LENGTH_V4 if len(host) == 8 else ID_LENGTH_V6)
    assert text == text.upper()
    assert decode_id(text) == (host_text(host), offset)


@given(st.booleans().flatmap(lambda v6: strategies.hosts(v6=v6)))
def test_hosts_come_back_from_their_text(host: bytes) -> None:
    text = host_text(host)
    again = host_bytes(text)
    assert host_text(again) == text
    if not host.startswith(bytes(10) + b"\xff\xff") or len(host) == 8:
        assert again == host


def test_host_texts() -> None:
    assert host_text(b"\x7f\0\0\x01\0\0\x2a\x9f") == "127.0.0.1:10911"
    assert host_text(bytes(20)) == "[0:0:0:0:0:0:0:0]:0"
    assert host_text(b"\1\2\3\4\xff\xff\xff\xff") == "1.2.3.4:-1"


@pytest.mark.parametrize(
    "text", ["", "127.0.0.1", "1.2.3:4", "a.b.c.d:1", "[::1:5", "1.2.3.4:x", "1.2.3.4:99999999999"]
)
def test_what_is_no_host(text: str) -> None:
    with pytest.raises(UsageError):
        host_bytes(text)


@pytest.mark.parametrize(
    "text",
    ["", "0", "0" * 31, "0" * 33, "g" * 32, " " * 32, "0 " * 16, "00" * 15 + " 0", "٠" * 32],
)
def test_what_is_no_id(text: str) -> None:
    with pytest.raises(UsageError):
        decode_id(text)
