"""Reference and kernel take inner batches apart alike, and leave all other frames as they are."""

from __future__ import annotations

import zlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from logquarry.format import batch, frame, sys_flag
from logquarry.format.batch import INNER_BATCH, BatchItem, unwrap
from logquarry.format.frame import Frame
from logquarry.log import columns
from logquarry.log import frames as log_frames
from logquarry.log.codec import Window
from logquarry.log.columns import Decoding
from logquarry.testing import strategies
from tests.helpers.twins import both, sound_rows

LIMIT = 1 << 16

items = st.builds(
    BatchItem,
    body=st.binary(max_size=40),
    properties=st.one_of(
        st.binary(max_size=20),
        st.sampled_from([b"KEYS\x01k\x02TAGS\x01a\x02", b"UNIQ_KEY\x01u"]),
    ),
    flag=st.integers(-(1 << 31), (1 << 31) - 1),
)


@st.composite
def frames(draw: st.DrawFn) -> Frame:
    made = draw(strategies.frames())
    kind = draw(st.sampled_from(["plain", "batch", "compressed", "broken", "one bit"]))
    if kind == "plain":
        return made
    body = batch.encode(draw(st.lists(items, max_size=6)))
    flag = made.sys_flag & ~(sys_flag.COMPRESSED | sys_flag.COMPRESSION_MASK) | INNER_BATCH
    if kind == "compressed":
        body, flag = zlib.compress(body), flag | sys_flag.COMPRESSED
    elif kind == "broken" and body:
        place = draw(st.integers(0, len(body) - 1))
        body = body[:place] + bytes([body[place] ^ draw(st.integers(1, 255))]) + body[place + 1 :]
    elif kind == "one bit":
        flag &= ~draw(st.sampled_from([sys_flag.INNER_BATCH, sys_flag.NEED_UNWRAP]))
    offset = draw(st.sampled_from([0, 1, 1 << 40, (1 << 63) - 3]))
    return Frame(
        **{
            **{name: getattr(made, name) for name in Frame.__slots__},
            "body": body,
            "sys_flag": flag,
            "queue_offset": offset,
        }
    ).with_crc()


def _window(found: list[Frame], base: int) -> Window:
    data = b""
    for one in found:
        placed = Frame(
            **{
                **{name: getattr(one, name) for name in Frame.__slots__},
                "physical_offset": base + len(data),
            }
        )
        data += frame.encode(placed)
    return Window.of(data, base)


@given(st.lists(frames(), max_size=6), st.sampled_from([0, 4096, 1 << 40]))
def test_twins(found: list[Frame], base: int) -> None:
    window = _window(found, base)
    rows = sound_rows(window)
    assert len(rows) == len(found)
    fast, plain = both(lambda: log_frames.unwrap_rows(window, rows, LIMIT))
    counts, plain_counts = both(lambda: log_frames.message_counts(window, rows, LIMIT))
    assert (fast is None) == (plain is None) == (counts is None) == (plain_counts is None)
    wanted = [m for row in rows for m in unwrap(_decoded(window, int(row[0])), limit=LIMIT)]
    if fast is None or plain is None:
        assert len(wanted) == len(rows)
        return
    assert fast[0].data.tobytes() == plain[0].data.tobytes()
    assert np.array_equal(fast[1], plain[1])
    made = columns.messages(*fast, Decoding())
    assert [message.frame for message in made] == wanted
    assert counts is not None and plain_counts is not None
    assert np.array_equal(counts, plain_counts) and int(np.sum(counts)) == len(wanted)
    batch_of_rows = columns.record_batch(*fast, Decoding())
    assert batch_of_rows["physical_offset"].to_pylist() == [m.physical_offset for m in wanted]
    assert batch_of_rows["queue_offset"].to_pylist() == [m.queue_offset for m in wanted]
    assert batch_of_rows["body"].to_pylist() == [m.body for m in wanted]


def _decoded(window: Window, position: int) -> Frame:
    found = window.decode(position)
    assert isinstance(found, Frame)
    return found
