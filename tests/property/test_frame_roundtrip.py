"""The reference codec decodes every frame that it encodes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from logquarry.format import frame
from logquarry.format.frame import Blank, Damage, Frame
from logquarry.testing import strategies


@given(strategies.frames(), st.binary(max_size=20), st.binary(max_size=20))
def test_decoding_what_was_encoded_gives_the_frame(
    item: Frame, before: bytes, after: bytes
) -> None:
    data = before + frame.encode(item) + after
    base = item.physical_offset - len(before)
    assert frame.decode_at(data, len(before), base=base) == item
    assert len(frame.encode(item)) == item.size


@given(strategies.frames())
def test_every_kind_of_buffer_decodes_alike(item: Frame) -> None:
    data = frame.encode(item)
    for kind in (bytes, bytearray, memoryview):
        assert frame.decode_at(kind(data), 0, base=item.physical_offset) == item


@given(strategies.frames(), st.data())
def test_a_changed_body_is_noticed_and_nothing_else_hides_it(
    item: Frame, data: st.DataObject
) -> None:
    body = data.draw(st.binary(max_size=len(item.body) + 8))
    changed = Frame(**{name: getattr(item, name) for name in item.__slots__} | {"body": body})
    outcome = frame.decode_at(frame.encode(changed), 0, base=item.physical_offset)
    if changed.with_crc().body_crc != item.body_crc:
        assert isinstance(outcome, Damage)
        assert outcome.kind is frame.DamageKind.BAD_BODY_CRC
    else:
        assert outcome == changed


@given(strategies.frames(), st.data())
def test_no_part_of_a_frame_is_a_frame(item: Frame, data: st.DataObject) -> None:
    whole = frame.encode(item)
    cut = data.draw(st.integers(0, len(whole) - 1))
    assert isinstance(frame.decode_at(whole[:cut], 0, base=item.physical_offset), Damage)


@given(st.binary(max_size=400), st.integers(0, 400), st.integers(-(1 << 62), 1 << 62))
def test_garbage_never_raises(garbage: bytes, position: int, base: int) -> None:
    position = min(position, len(garbage))
    outcome = frame.decode_at(garbage, position, base=base)
    if isinstance(outcome, Frame):
        assert frame.encode(outcome) == garbage[position : position + outcome.size]
    elif isinstance(outcome, Blank):
        assert outcome.size == len(garbage) - position


@given(strategies.logs())
def test_a_log_decodes_to_the_frames_it_was_made_of(log: strategies.Log) -> None:
    found: list[Frame] = []
    blanks: list[tuple[int, int]] = []
    for base, data in zip(log.bases(), log.files, strict=True):
        position = 0
        while position < len(data):
            outcome = frame.decode_at(data, position, base=base)
            if isinstance(outcome, Damage):
                assert outcome.kind in (frame.DamageKind.ZEROED, frame.DamageKind.TRUNCATED)
                break
            if isinstance(outcome, Blank):
                blanks.append((base + position, outcome.size))
            else:
                found.append(outcome)
            position += outcome.size
    assert tuple(found) == log.frames
    assert tuple(blanks) == log.blanks
