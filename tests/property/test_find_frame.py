"""After damage, reference and kernel find the same next frame."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logquarry.format import frame
from logquarry.format.arrays import NEED_MORE, REACHED_STOP
from logquarry.format.frame import MAGIC_V1, DamageKind
from logquarry.log import codec
from logquarry.log.codec import Window
from logquarry.testing import strategies
from tests.helpers.small_log import FRAMES, small_log
from tests.helpers.twins import both, first_sound

MAGIC = MAGIC_V1.to_bytes(4, "big")


def find(window: Window, start: int, stop: int, *, check_crc: bool = True) -> tuple[int, int]:
    fast, plain = both(lambda: codec.find_frame(window, start, stop, check_crc=check_crc))
    assert fast == plain
    return fast


def test_from_every_place_of_a_small_log() -> None:
    log = small_log(start=1)
    for base, data in zip(log.bases(), log.files, strict=True):
        window = Window.of(data, base)
        for start in range(len(data) + 1):
            expected = first_sound(data, start, len(data), base=base)
            place, code = find(window, start, len(data))
            assert (place if code == REACHED_STOP else -1) == expected


def test_a_frame_that_names_another_place_is_not_found() -> None:
    stale = frame.encode(replace(FRAMES[0], physical_offset=500).with_crc())
    sound = frame.encode(replace(FRAMES[0], physical_offset=1000 + len(stale)).with_crc())
    data = stale + sound
    assert find(Window.of(data, 1000), 0, len(data)) == (len(stale), REACHED_STOP)
    assert find(Window.of(stale, 1000), 0, len(stale)) == (len(stale), DamageKind.TRUNCATED)


def test_a_magic_within_a_body_is_passed_over() -> None:
    inner = frame.encode(replace(FRAMES[0], physical_offset=7).with_crc())
    outer = replace(FRAMES[0], body=inner, physical_offset=3).with_crc()
    data = b"xyz" + frame.encode(outer)
    assert find(Window.of(data, 0), 0, len(data)) == (3, REACHED_STOP)
    assert find(Window.of(data, 0), 4, len(data)) == (len(data), DamageKind.TRUNCATED)


@pytest.mark.parametrize("zeros", range(40))
def test_behind_any_number_of_zeros(zeros: int) -> None:
    """The search passes eight zeros at a time, and no frame after them."""
    item = replace(FRAMES[0], physical_offset=zeros).with_crc()
    data = bytes(zeros) + frame.encode(item) + bytes(30)
    window = Window.of(data, 0)
    for start in range(zeros + 1):
        assert find(window, start, len(data)) == (zeros, REACHED_STOP)
    assert find(window, zeros + 1, len(data)) == (len(data), DamageKind.TRUNCATED)


@given(strategies.logs(min_frames=1), st.data())
def test_behind_damage(log: strategies.Log, data: st.DataObject) -> None:
    broken = bytearray(log.files[0])
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, len(broken) - 1))
        what = data.draw(st.sampled_from([b"\0", MAGIC, b"\xda", b"\0" * 40]))
        broken[at : at + len(what)] = what[: len(broken) - at]
    start = data.draw(st.integers(0, len(broken)))
    stop = data.draw(st.integers(start, len(broken)))
    check_crc = data.draw(st.booleans())
    content = bytes(broken)
    window = Window.of(content, log.start)
    place, code = find(window, start, stop, check_crc=check_crc)
    expected = first_sound(content, start, stop, base=log.start, check_crc=check_crc)
    assert (place, code) == (
        (expected, REACHED_STOP) if expected >= 0 else (stop, DamageKind.TRUNCATED)
    )


@given(strategies.logs(min_frames=1), st.data())
def test_a_window_of_any_length_finds_the_same_or_asks_for_more(
    log: strategies.Log, data: st.DataObject
) -> None:
    content = log.files[0]
    length = data.draw(st.integers(0, len(content)))
    start = data.draw(st.integers(0, length))
    stop = data.draw(st.integers(start, len(content)))
    window = Window.of(content[:length], log.start, len(content))
    place, code = find(window, start, stop)
    expected = first_sound(content, start, stop, base=log.start)
    if code == NEED_MORE:
        # The search skipped no frame before the place, and advances.
        assert start <= place < stop
        assert expected < 0 or place <= expected
    else:
        assert (place if code == REACHED_STOP else -1) == expected


@pytest.mark.parametrize("tail", range(9))
def test_a_magic_that_the_end_of_the_window_cuts(tail: int) -> None:
    content = (bytes(20) + b"\0\0\0\x64" + MAGIC)[: 20 + tail] + b""
    find(Window.of(content, 0), 0, len(content))
    for end in (len(content) + 1, 200):
        window = Window.of(content, 0, end)
        for stop in range(len(content) + 1):
            find(window, 0, stop)
