"""Are hosts and message ids written as Java writes them?"""

from __future__ import annotations

import ipaddress
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logquarry.errors import UsageError
from logquarry.format import java, message_id
from logquarry.testing import strategies
from tests.helpers.java_vectors import vectors


@pytest.mark.parametrize(("address", "expected"), vectors("ip"))
def test_an_ipv6_address_is_written_as_java_writes_it(address: str, expected: str) -> None:
    packed = ipaddress.IPv6Address(address).packed
    host = message_id.host_text(packed + (10911).to_bytes(4, "big"))
    assert host == (f"[{expected}]:10911" if ":" in expected else f"{expected}:10911")


@pytest.mark.parametrize(("address", "text", "offset"), vectors("id"))
def test_ids_of_java(address: str, text: str, offset: int) -> None:
    packed = ipaddress.ip_address(address).packed
    host = packed + (10911).to_bytes(4, "big")
    assert message_id.encode(host, offset) == text
    assert message_id.decode(text) == (message_id.host_text(host), offset)
    assert message_id.decode(text.lower()) == message_id.decode(text)


@pytest.mark.parametrize("scenario", ["single", "ipv6"])
def test_golden_ids(golden: Path, scenario: str) -> None:
    for line in (golden / scenario / "expected.jsonl").read_text("utf-8").splitlines():
        message = json.loads(line)
        host = bytes.fromhex(message["storeHostHex"])
        assert message_id.encode(host, message["physicalOffset"]) == message["msgId"]
        assert message_id.decode(message["msgId"])[1] == message["physicalOffset"]


@given(
    st.booleans().flatmap(lambda v6: strategies.hosts(v6=v6)),
    st.integers(java.LONG_MIN, java.LONG_MAX),
)
def test_what_was_encoded_comes_back(host: bytes, offset: int) -> None:
    text = message_id.encode(host, offset)
    assert len(text) == (message_id.ID_LENGTH_V4 if len(host) == 8 else message_id.ID_LENGTH_V6)
    assert text == text.upper()
    assert message_id.decode(text) == (message_id.host_text(host), offset)


@given(st.booleans().flatmap(lambda v6: strategies.hosts(v6=v6)))
def test_hosts_come_back_from_their_text(host: bytes) -> None:
    text = message_id.host_text(host)
    again = message_id.host_bytes(text)
    assert message_id.host_text(again) == text
    if not host.startswith(bytes(10) + b"\xff\xff") or len(host) == 8:
        assert again == host


def test_host_texts() -> None:
    assert message_id.host_text(b"\x7f\0\0\x01\0\0\x2a\x9f") == "127.0.0.1:10911"
    assert message_id.host_text(bytes(20)) == "[0:0:0:0:0:0:0:0]:0"
    assert message_id.host_text(b"\1\2\3\4\xff\xff\xff\xff") == "1.2.3.4:-1"


@pytest.mark.parametrize(
    "text", ["", "127.0.0.1", "1.2.3:4", "a.b.c.d:1", "[::1:5", "1.2.3.4:x", "1.2.3.4:99999999999"]
)
def test_what_is_no_host(text: str) -> None:
    with pytest.raises(UsageError):
        message_id.host_bytes(text)


@pytest.mark.parametrize(
    "text",
    ["", "0", "0" * 31, "0" * 33, "g" * 32, " " * 32, "0 " * 16, "00" * 15 + " 0", "٠" * 32],
)
def test_what_is_no_id(text: str) -> None:
    with pytest.raises(UsageError):
        message_id.decode(text)
