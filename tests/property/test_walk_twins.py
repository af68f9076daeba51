"""Reference and kernel follow the log alike, on valid and on arbitrary bytes."""

from __future__ import annotations

from functools import partial
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logquarry.format import frame
from logquarry.format.arrays import BLANK, NEED_MORE, REACHED_STOP, SIZE, TABLE_FULL
from logquarry.format.frame import MAGIC_V1, MAGIC_V2, DamageKind, Frame
from logquarry.log import codec
from logquarry.log.codec import Window
from logquarry.testing import strategies
from tests.helpers.small_log import FRAMES, small_log
from tests.helpers.twins import both, scanned, walked


def assert_same_scan(data: bytes, base: int, *, check_crc: bool = True) -> None:
    window = Window.of(data, base)
    fast, plain = both(lambda: scanned(window, check_crc=check_crc))
    assert fast == plain


# ---------------------------------------------------------------------------------------- sound
@given(strategies.logs())
def test_sound_logs(log: strategies.Log) -> None:
    found: list[Frame] = []
    for base, data in zip(log.bases(), log.files, strict=True):
        window = Window.of(data, base)
        fast, plain = both(partial(walked, window, 0, window.length))
        assert fast == plain
        for row in fast[0]:
            outcome = window.decode(row[0])
            assert isinstance(outcome, Frame)
            assert outcome.size == row[SIZE]
            found.append(outcome)
    assert tuple(found) == log.frames


@given(strategies.logs())
def test_the_crc_without_zlib_ng(log: strategies.Log) -> None:
    with mock.patch.object(codec, "crc32_address", lambda: 0):
        for base, data in zip(log.bases(), log.files, strict=True):
            assert_same_scan(data, base)


@given(strategies.logs(min_frames=1), st.integers(1, 4))
def test_a_full_table_is_gone_on_from(log: strategies.Log, room: int) -> None:
    window = Window.of(log.files[0], log.start)
    whole = walked(window, 0, window.length)

    def in_pieces() -> tuple[list[list[int]], int, int]:
        rows: list[list[int]] = []
        position, code = 0, TABLE_FULL
        while code == TABLE_FULL:
            more, position, code = walked(window, position, window.length, room=room)
            rows += more
        return rows, position, code

    assert both(in_pieces) == (whole, whole)


@given(strategies.logs(min_frames=1), st.data())
def test_a_walk_takes_the_frames_that_start_before_its_stop(
    log: strategies.Log, data: st.DataObject
) -> None:
    window = Window.of(log.files[0], log.start)
    stop = data.draw(st.integers(0, window.length))
    fast, plain = both(lambda: walked(window, 0, stop))
    assert fast == plain
    rows, after, code = fast
    assert all(row[0] < stop for row in rows)
    assert code != REACHED_STOP or after >= stop


# -------------------------------------------------------------------------------------- damaged
@pytest.mark.parametrize("check_crc", [True, False])
def test_every_single_bit_flip(check_crc: bool) -> None:
    log = small_log(start=1)
    for base, sound in zip(log.bases(), log.files, strict=True):
        data = bytearray(sound)
        for position in range(len(data)):
            for bit in range(8):
                data[position] ^= 1 << bit
                assert_same_scan(bytes(data), base, check_crc=check_crc)
                data[position] ^= 1 << bit


@pytest.mark.parametrize("check_crc", [True, False])
@pytest.mark.parametrize("crc", [0, 77, 1 << 30])
def test_the_crc_of_an_empty_body(crc: int, check_crc: bool) -> None:
    sound = frame.encode(Frame(b"t", physical_offset=0).with_crc())
    harmed = frame.encode(Frame(b"t", physical_offset=len(sound), body_crc=crc))
    assert_same_scan(sound + harmed, 0, check_crc=check_crc)
    window = Window.of(sound + harmed, 0)
    rows, after, _ = both(partial(walked, window, 0, window.length))[0]
    assert (len(rows) == 2) == (after == window.length)
    if check_crc:
        assert (len(rows) == 2) == (crc == 0)


def test_file_truncated_at_each_byte() -> None:
    log = small_log()
    for base, data in zip(log.bases(), log.files, strict=True):
        for length in range(len(data)):
            assert_same_scan(data[:length], base)


@given(strategies.logs(min_frames=1), st.data())
def test_overwritten_ranges(log: strategies.Log, data: st.DataObject) -> None:
    broken = bytearray(log.files[0])
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(broken)))
        what = data.draw(
            st.one_of(
                st.binary(max_size=24),
                st.integers(1, 64).map(bytes),
                st.sampled_from([MAGIC_V1, MAGIC_V2, frame.MAGIC_BLANK]).map(
                    lambda magic: magic.to_bytes(4, "big")
                ),
            )
        )
        broken[at : at + len(what)] = what
    assert_same_scan(bytes(broken), log.start)
    assert_same_scan(bytes(broken), log.start, check_crc=False)


MAGIC_BYTES = [magic.to_bytes(4, "big") for magic in (MAGIC_V1, MAGIC_V2, frame.MAGIC_BLANK)]


@given(
    st.lists(
        st.one_of(
            st.binary(max_size=12),
            st.sampled_from(MAGIC_BYTES),
            st.integers(0, 200).map(lambda size: size.to_bytes(4, "big")),
            st.integers(1, 100).map(bytes),
        ),
        max_size=20,
    ).map(b"".join),
    st.sampled_from([0, 1, 1 << 40, -5]),
)
def test_garbage(data: bytes, base: int) -> None:
    assert_same_scan(data, base)


BOUNDARIES = [0, 1, 7, 8, 90, 91, 92, 115, 126, 127, 128, 255, 256, 0x7FFF, 0x8000, 0xFFFF]
BOUNDARIES += [0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFFFF80, 0xFFFF8000, 0x7FFFFFF0]

# Enough bytes for a length that is misread as unsigned, or as its first byte only.
ROOMY = (
    Frame(topic=b"roomy", body=b"b", properties=b"p" * 600),
    Frame(topic=b"t" * 700, body=b"b", properties=b"p" * 32767, magic=MAGIC_V2),
)


@pytest.mark.parametrize("value", BOUNDARIES)
@pytest.mark.parametrize("item", [*FRAMES, *ROOMY], ids=lambda item: item.topic[:12].decode())
@pytest.mark.parametrize("field", ["TOTALSIZE", "BODYLEN", "TOPICLEN", "PROPERTIESLEN"])
def test_hostile_lengths(item: Frame, field: str, value: int) -> None:
    item = item.with_crc()
    sound = frame.encode(item)
    body_at = item.size - len(item.properties) - 2 - len(item.topic) - len(item.body)
    topic_width = 1 if item.magic == MAGIC_V1 else 2
    body_at -= topic_width
    at, width = {
        "TOTALSIZE": (0, 4),
        "BODYLEN": (body_at - 4, 4),
        "TOPICLEN": (body_at + len(item.body), topic_width),
        "PROPERTIESLEN": (item.size - len(item.properties) - 2, 2),
    }[field]
    data = bytearray(sound)
    data[at : at + width] = (value % (1 << (8 * width))).to_bytes(width, "big")
    for check_crc in (True, False):
        # Alone in its file, and with bytes after it: in neither case may the wrong length be
        # accepted.
        assert_same_scan(bytes(data), 0, check_crc=check_crc)
        assert_same_scan(bytes(data) + sound + bytes(300), 0, check_crc=check_crc)


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [
        (0, 0x7FFFFFFF, DamageKind.BAD_SIZE),
        (0, -1, DamageKind.BAD_SIZE),
        (84, -1, DamageKind.BAD_BODY_LENGTH),
        (84, 0x7FFFFFFF, DamageKind.BAD_BODY_LENGTH),
    ],
)
def test_hostile_sizes_are_told_as_what_they_are(field: int, value: int, kind: DamageKind) -> None:
    data = bytearray(frame.encode(FRAMES[0].with_crc()))
    data[field : field + 4] = value.to_bytes(4, "big", signed=True)
    window = Window.of(bytes(data), 0)
    fast, plain = both(lambda: walked(window, 0, 1))
    assert fast == plain == ([], 0, kind)


# ------------------------------------------------------------------- windows within a larger file
def test_a_window_of_any_length_says_the_same_or_asks_for_more() -> None:
    log = small_log(start=2)
    data = log.files[0]
    whole = Window.of(data, log.start)
    rows, after, code = walked(whole, 0, len(data))
    assert code == BLANK
    for length in range(len(data) + 1):
        window = Window.of(data[:length], log.start, len(data))
        fast, plain = both(partial(walked, window, 0, len(data)))
        assert fast == plain
        taken = fast[0]
        assert taken == rows[: len(taken)]
        if fast[2] == NEED_MORE:
            assert fast[1] <= length
        else:
            assert fast == (rows, after, code)


@pytest.mark.parametrize("left", range(10))
def test_the_last_bytes_of_a_file(left: int) -> None:
    for length in range(left + 1):
        window = Window.of(bytes(length), 0, left)
        fast, plain = both(partial(walked, window, 0, left))
        assert fast == plain


@given(strategies.logs(min_frames=1), st.data())
def test_a_damaged_window_says_the_same_or_asks_for_more(
    log: strategies.Log, data: st.DataObject
) -> None:
    broken = bytearray(log.files[0])
    at = data.draw(st.integers(0, len(broken) - 1))
    broken[at] ^= 1 << data.draw(st.integers(0, 7))
    base, end = log.start, len(broken)
    place = data.draw(st.sampled_from([f.physical_offset - base for f in log.frames] + [at]))
    if place >= end:
        place = at
    length = data.draw(st.integers(0, end))
    verdict = walked(Window.of(bytes(broken), base), place, place + 1)
    window = Window.of(bytes(broken[:length]), base, end)
    if place > length:
        return
    fast, plain = both(lambda: walked(window, place, place + 1))
    assert fast == plain
    assert fast in (verdict, ([], place, NEED_MORE))


@given(strategies.logs(min_frames=1), st.integers(1, 300))
def test_feeding_a_walk_window_by_window_gives_the_same_frames(
    log: strategies.Log, step: int
) -> None:
    def fed() -> list[Frame]:
        found: list[Frame] = []
        for base, data in zip(log.bases(), log.files, strict=True):
            position, length = 0, step
            while True:
                window = Window.of(data[position : position + length], base + position)
                window = Window(window.data, window.base, len(data) - position)
                rows, after, code = walked(window, 0, len(data) - position)
                for row in rows:
                    outcome = window.decode(row[0])
                    assert isinstance(outcome, Frame)
                    found.append(outcome)
                position += after
                if code == NEED_MORE and not rows:
                    length += step
                    assert length <= len(data) + step
                elif code == NEED_MORE:
                    length = step
                elif code != TABLE_FULL:
                    break
        return found

    fast, plain = both(fed)
    assert fast == plain == list(log.frames)


# ------------------------------------------------------------------------------- the other scans
@given(strategies.logs(min_frames=1), st.data())
def test_check_places(log: strategies.Log, data: st.DataObject) -> None:
    content = log.files[0]
    length = data.draw(st.integers(0, len(content)))
    window = Window.of(content[:length], log.start, len(content))
    true = [(f.physical_offset - log.start, f.size) for f in log.frames]
    guesses = st.tuples(
        st.integers(-5, len(content) + 5) | st.sampled_from([at for at, _ in true]),
        st.sampled_from([0, -1, *(size for _, size in true)]),
    )
    asked = data.draw(st.lists(guesses | st.sampled_from(true), max_size=8))
    places = np.array([place for place, _ in asked], np.int64)
    sizes = np.array([size for _, size in asked], np.int32)

    def check() -> tuple[list[list[int]], list[int]]:
        rows, codes = codec.check_places(window, places, sizes, check_crc=True)
        return rows.tolist(), codes.tolist()

    fast, plain = both(check)
    assert fast == plain
    for (place, size), code in zip(asked, fast[1], strict=True):
        if code == REACHED_STOP:
            outcome = window.decode(place)
            assert isinstance(outcome, Frame)
            assert size in (0, outcome.size)


@given(
    st.lists(st.integers(0, 40).map(bytes) | st.binary(max_size=3), max_size=6).map(b"".join),
    st.data(),
)
def test_last_nonzero(content: bytes, data: st.DataObject) -> None:
    window = Window.of(content, 0)
    start = data.draw(st.integers(0, len(content)))
    stop = data.draw(st.integers(start, len(content)))
    part = content[start:stop]
    assert both(lambda: codec.last_nonzero(window, start, stop)) == (
        (start + len(part.rstrip(b"\0")),) * 2
    )
