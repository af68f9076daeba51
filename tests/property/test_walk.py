"""The walker gives the same events for mapped and for remote files, and misses no frame."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from logquarry.config import StoreConfig
from logquarry.log.frames import runs_at
from logquarry.log.layout import StoreLayout
from logquarry.log.walk import DamagedSpan, LogEnd, LogReader, Run
from logquarry.testing import strategies
from tests.helpers.damage import damaged
from tests.helpers.memory_stores import MemoryFileSystem, Told, frames_told, layout_of, told
from tests.helpers.twins import plain_python


def walk(
    layout: StoreLayout, *, bound: int | None = None, batch_bytes: int = 1 << 20
) -> list[Told]:
    return list(told(LogReader(layout, bound=bound, batch_bytes=batch_bytes).events()))


@given(strategies.logs(min_frames=1))
def test_a_sound_log_has_its_frames_its_blanks_and_its_end(log: strategies.Log) -> None:
    events = walk(layout_of(log.named_files(), file_size=log.file_size))
    frames = [("frame", item.physical_offset, item.size) for item in log.frames]
    blanks = [("blank", *blank) for blank in log.blanks]
    assert events == [*sorted(frames + blanks, key=lambda event: event[1]), ("end", log.end)]


@given(
    strategies.logs(min_frames=1),
    st.integers(1, 400),
    st.integers(1, 500),
    st.integers(1, 99),
    st.data(),
)
def test_windows_of_any_size_tell_the_same(
    log: strategies.Log, least: int, batch_bytes: int, page: int, data: st.DataObject
) -> None:
    files = data.draw(damaged(log.named_files()))
    bound = data.draw(st.sampled_from([None, log.end]))
    size = log.file_size
    expected = walk(layout_of(files, file_size=size), bound=bound)
    for layout in (
        layout_of(files, file_size=size, least=least),
        layout_of(files, file_size=size, page=page),
    ):
        assert walk(layout, bound=bound) == expected
        assert walk(layout, bound=bound, batch_bytes=batch_bytes) == expected


@given(strategies.logs(min_frames=1), st.data())
def test_plain_python_tells_the_same(log: strategies.Log, data: st.DataObject) -> None:
    files = data.draw(damaged(log.named_files()))
    bound = data.draw(st.sampled_from([None, log.end]))
    layout = layout_of(files, file_size=log.file_size)
    expected = walk(layout, bound=bound)
    with plain_python():
        assert walk(layout, bound=bound) == expected


@given(strategies.logs(min_frames=1), st.data())
def test_every_frame_that_stands_whole_is_told(log: strategies.Log, data: st.DataObject) -> None:
    files = data.draw(damaged(log.named_files()))
    events = walk(layout_of(files, file_size=log.file_size))
    whole = {
        ("frame", item.physical_offset, item.size)
        for path, sound in log.named_files().items()
        for item in log.frames
        if item.physical_offset // log.file_size == int(path[-20:]) // log.file_size
        and _same(sound, files.get(path, b""), item.physical_offset % log.file_size, item.size)
    }
    assert whole <= set(frames_told(events))


def _same(sound: bytes, found: bytes, at: int, size: int) -> bool:
    return found[at : at + size] == sound[at : at + size]


@given(strategies.logs(min_frames=1), st.data())
def test_events_follow_one_another_without_a_gap(log: strategies.Log, data: st.DataObject) -> None:
    files = data.draw(damaged(log.named_files()))
    bound = data.draw(st.sampled_from([None, log.end]))
    layout = layout_of(files, file_size=log.file_size)
    position = layout.commit_log.start
    last: list[int] = []
    for event in LogReader(layout, bound=bound, batch_bytes=500).events():
        if isinstance(event, LogEnd):
            assert event.offset == (last[0] if last else position)
            return
        start, stop = (
            (event.start, event.end)
            if isinstance(event, Run)
            else (event.offset, event.offset + event.length)
        )
        assert start == position < stop
        file = layout.commit_log.at(start)
        assert file is None or event_ends_log(event) or stop <= file.base + log.file_size
        position = stop
        if isinstance(event, DamagedSpan) and (event.is_tail or event.ends_log):
            last.append(start)
    raise AssertionError("the last event is the log's end")


def event_ends_log(event: object) -> bool:
    return isinstance(event, DamagedSpan) and event.ends_log


@given(strategies.logs(min_frames=2), st.data())
def test_files_that_go_or_shrink_after_they_were_listed(
    log: strategies.Log, data: st.DataObject
) -> None:
    """A live broker deletes expired files: the walk gives the rest, without a hang or an error."""
    least = data.draw(st.sampled_from([None, 100]))
    files = MemoryFileSystem(log.named_files(), least=least)
    layout = StoreLayout(files, StoreConfig(mapped_file_size_commit_log=log.file_size))
    assert len(layout.commit_log.files) == len(log.files)
    gone = data.draw(st.sampled_from(sorted(files.files)))
    if data.draw(st.booleans()):
        del files.files[gone]
    else:
        files.files[gone] = files.files[gone][: data.draw(st.integers(0, log.file_size))]
    bound = data.draw(st.sampled_from([None, log.end]))
    frames = frames_told(walk(layout, bound=bound))
    elsewhere = [
        ("frame", item.physical_offset, item.size)
        for item in log.frames
        if not gone.endswith(f"{item.physical_offset // log.file_size * log.file_size:020d}")
    ]
    if bound is None or gone != max(log.named_files()):
        assert set(elsewhere) <= set(frames)
    offsets = np.array([item.physical_offset for item in log.frames], np.int64)
    sizes = np.array([item.size for item in log.frames], np.int32)
    assert set(elsewhere) <= set(frames_told(told(runs_at(layout, offsets, sizes))))
