"""Reference and kernel give the dispatcher the same requests for the same frames."""

from __future__ import annotations

import mmap
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logquarry.disk.disk import Disk
from logquarry.format import frame
from logquarry.format import properties as props
from logquarry.format.frame import Frame
from logquarry.format.index import IndexShape
from logquarry.log.codec import Window
from logquarry.log.follow import Followed, Follower
from logquarry.testing import strategies
from logquarry.write.index_writer import IndexWriter
from logquarry.write.queue_writer import parts_of
from tests.helpers.twins import both

LEVELS = (1_000, 5_000)


def as_values(run: Followed) -> dict[str, Any]:
    """The requests of a run, as values that compare."""
    said: dict[str, Any] = {}
    for field in fields(run.requests):
        value = getattr(run.requests, field.name)
        said[field.name] = value.tolist() if isinstance(value, np.ndarray) else value
    said["rows"] = run.rows.tolist()
    said["keys"] = list(zip(run.key_hashes.tolist(), run.key_numbers.tolist(), strict=True))
    # The order of queues is free: compare queue by queue.
    said["parts"] = {
        key: (part.rows.tolist(), part.offsets.tolist(), part.units.tobytes())
        for key, part in parts_of(run).items()
    }
    return said


def followed(data: bytes, base: int, *, most_frames: int = 3) -> list[object]:
    follower = Follower(LEVELS, most_frames=most_frames)
    events: list[object] = []
    at = 0
    while at < len(data):
        run, after, code = follower.follow(Window.of(data[at:], base + at), len(data) - at)
        events.append((None if run is None else as_values(run), after, code))
        if run is None:
            break
        at += after
    return events


def same(data: bytes, base: int) -> list[object]:
    fast, plain = both(lambda: followed(data, base))
    assert fast == plain
    return fast


@given(strategies.logs())
def test_any_log(log: strategies.Log) -> None:
    for base, data in zip(log.bases(), log.files, strict=True):
        same(data, base)


@given(strategies.logs(items=strategies.plain_frames(), min_frames=3))
def test_logs_of_well_behaved_clients(log: strategies.Log) -> None:
    for base, data in zip(log.bases(), log.files, strict=True):
        same(data, base)


@pytest.mark.parametrize("level", ["0", "1", "2", "3", "-1", "+1", "\u0661", "x", "9" * 10])
def test_delays(level: str) -> None:
    properties = f"DELAY\x01{level}\x02TAGS\x01t".encode()
    data = b""
    for topic in (props.SCHEDULE_TOPIC, "t"):
        made = Frame(topic.encode(), properties=properties, physical_offset=len(data))
        data += frame.encode(made.with_crc())
    assert len(same(data, 0)) == 1


def test_a_topic_that_is_no_text_is_compared_with_nothing_that_is_gone() -> None:
    """The memory of an earlier call's frame may be unmapped now."""

    def log(*topics: bytes) -> bytes:
        data = b""
        for topic in topics:
            data += frame.encode(Frame(topic, physical_offset=len(data)).with_crc())
        return data

    follower = Follower(props.parse_levels(props.DEFAULT_LEVELS))
    first = mmap.mmap(-1, 1 << 20)
    first.write(log(b"topic0"))
    window = Window.of(memoryview(first)[: len(log(b"topic0"))], 0)
    follower.follow(window, window.length)
    del window
    first.close()
    again = Window.of(log(b"topic\xff", b"topic1", b"topic2"), 0)
    found, _, _ = follower.follow(again, again.length)
    assert found is not None
    assert found.requests.topics[1:] == ["topic1", "topic2"]


hashes = st.integers(0, 2**31 - 1)


@given(
    st.lists(st.lists(st.tuples(hashes, st.integers(-5_000, 400_000)), max_size=6), max_size=5),
    st.integers(1, 7),
    st.integers(2, 12),
)
def test_index_files(
    tmp_path_factory: pytest.TempPathFactory,
    calls: list[list[tuple[int, int]]],
    slots: int,
    entries: int,
) -> None:
    def written() -> list[bytes]:
        folder = tmp_path_factory.mktemp("index")
        clock = iter(range(1_700_000_000_000, 1_800_000_000_000))
        writer = IndexWriter(Disk(), folder, IndexShape(slots, entries), clock=lambda: next(clock))
        offset = 0
        for keys in calls:
            offsets = np.arange(offset, offset + len(keys), dtype=np.int64)
            offset += len(keys)
            times = np.array([1_700_000_000_000 + time for _, time in keys], np.int64)
            found = np.array([key for key, _ in keys], np.int64)
            writer.put(offsets, times, found, np.arange(len(keys)))
        writer.close()
        return [Path(path).read_bytes() for path in sorted(folder.iterdir())]

    fast, plain = both(written)
    assert fast == plain
