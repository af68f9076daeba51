"""Frames that only RocketMQ 4.9.3 takes for messages, not :mod:`logquarry.format.frame`."""

from __future__ import annotations

import struct

import pytest

from logquarry.format import frame
from logquarry.format.frame import Frame
from logquarry.repair.recover.java_dispatch import JavaMemoryError, JavaVerdict, check_message

SOUND = frame.encode(
    Frame(b"orders", body=b"text", properties=b"TAGS\x01a", physical_offset=0).with_crc()
)
BODY_LENGTH_AT = frame.BODY_POSITION - 4


def changed(at: int, kind: str, value: int, data: bytes = SOUND) -> bytes:
    patched = bytearray(data)
    struct.pack_into(kind, patched, at, value)
    return bytes(patched)


def verdict(data: bytes, *, read_body: bool = True, check_crc: bool = True) -> JavaVerdict:
    found = memoryview(data + bytes(64))
    return check_message(found, 0, levels_ms=(), check_crc=check_crc, read_body=read_body)


def test_a_sound_message() -> None:
    found = verdict(SOUND)
    assert (found.size, found.is_success, found.end) == (len(SOUND), True, len(SOUND))
    assert found.request is not None
    assert found.request.topic == "orders"
    assert found.request.tags_code == ord("a")


def test_the_place_it_names_is_believed() -> None:
    found = verdict(changed(frame.HEAD.offsets["physical_offset"], ">q", -7)).request
    assert found is not None
    assert found.physical_offset == -7


def test_a_blank_of_any_size() -> None:
    assert verdict(frame.encode_blank(-3)) == JavaVerdict(0, True, 8)


@pytest.mark.parametrize("magic", [0, frame.MAGIC_V2, frame.MAGIC_V1 ^ 1])
def test_other_magics(magic: int) -> None:
    assert verdict(changed(4, ">I", magic)).size == -1


def test_a_negative_length_of_body_or_properties_is_none() -> None:
    made = frame.encode(Frame(b"t", physical_offset=0))
    found = verdict(changed(BODY_LENGTH_AT, ">i", -5, made))
    assert found.is_success and found.size == len(made)
    found = verdict(changed(len(made) - 2, ">h", -5, made))
    assert found.is_success and found.size == len(made)
    assert found.request is not None
    assert found.request.properties is None


def test_a_negative_length_of_the_topic_is_an_error() -> None:
    assert verdict(changed(frame.BODY_POSITION + 4, ">b", -1)) == JavaVerdict(-1, False, 0)


def test_a_wrong_sum_is_an_error_with_a_size() -> None:
    found = verdict(changed(0, ">i", len(SOUND) + 1))
    # Java's buffer goes on where the lengths lead, not after TOTALSIZE.
    assert found == JavaVerdict(len(SOUND) + 1, False, len(SOUND))


def test_a_body_larger_than_the_frame() -> None:
    """Java's recovery copies the body into an array of TOTALSIZE bytes; its dispatcher skips it."""
    data = changed(BODY_LENGTH_AT, ">i", len(SOUND) + 1) + SOUND * 2
    assert verdict(data, check_crc=False).size == -1
    found = verdict(data, read_body=False)
    assert (found.is_success, found.request) == (False, None)


def test_the_crc() -> None:
    data = changed(frame.BODY_POSITION, ">b", 0)
    assert verdict(data).size == -1
    assert verdict(data, check_crc=False).is_success
    assert verdict(data, read_body=False).is_success


def test_an_array_that_no_machine_has() -> None:
    with pytest.raises(JavaMemoryError, match="2147483647"):
        verdict(changed(0, ">i", 0x7FFFFFFF))
    assert verdict(changed(0, ">i", 0x40000000)).size == 0x40000000
    assert verdict(changed(0, ">i", -1)).size == -1


@pytest.mark.parametrize("length", range(len(SOUND)))
def test_what_reads_past_the_buffer_is_an_error(length: int) -> None:
    found = check_message(memoryview(SOUND[:length]), 0, levels_ms=(), check_crc=False)
    assert found == JavaVerdict(-1, False, 0)
