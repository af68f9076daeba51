"""The kernel's ``get`` gives the reference's result in every case that it handles."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
from hypothesis import event, given
from hypothesis import strategies as st

from logquarry.errors import CorruptFrame
from logquarry.format import frame, java
from logquarry.format.frame import Damage, Frame
from logquarry.format.queue_entry import QueueEntry
from logquarry.log import codec
from logquarry.log.store_files import FileSequence, StoreFile
from logquarry.read import get_kernel
from logquarry.read.commit_log import CommitLog
from logquarry.read.get_kernel import KernelGet
from logquarry.read.get_message import (
    GetMessageStatus,
    GetResult,
    TransferLimits,
    get_message,
    read_message,
)
from logquarry.read.log_queues import LogQueue
from logquarry.read.queue import UNIT_DTYPE
from logquarry.stored_message import JSON_NAMES, StoredMessage
from logquarry.testing import strategies
from logquarry.testing.strategies import Log

LEVELS = (1_000, 5_000)
PLENTY = TransferLimits(1 << 40, 32, 1 << 18, 8, 1 << 16)


class LogInMemory(CommitLog):
    """A log whose files are bytes."""

    def __init__(self, start: int, file_size: int, data: Sequence[bytes]) -> None:
        self._data = data
        files = (
            StoreFile(start + number * file_size, file_size, str(number))
            for number in range(len(data))
        )
        self._sequence = FileSequence(tuple(files), file_size)
        self._layout: Any = mock.Mock()
        self._layout.log_path = str

    @property
    def files(self) -> FileSequence:
        return self._sequence

    @property
    def max_offset(self) -> int:
        return self._sequence.end

    def reaches(self, end: int) -> bool:
        return True

    def unreadable_at(self, offset: int, size: int) -> Damage | None:
        return None

    def window_at(self, offset: int, size: int) -> tuple[int, int, memoryview]:
        file = self._sequence.at(offset)
        if file is None:
            return 0, 0, memoryview(b"")
        data = memoryview(self._data[int(file.path)])
        return file.base, file.base + len(data), data


def queue_of(entries: Sequence[QueueEntry], *, first: int = 0, per_file: int = 5) -> LogQueue:
    units = np.array([tuple(entry) for entry in entries], UNIT_DTYPE)
    return LogQueue("t", 0, np.arange(first, first + len(units)), units, per_file)


def entries_of(log: Log) -> list[QueueEntry]:
    """An entry for each frame."""
    messages = (StoredMessage(frame, delay_levels_ms=LEVELS) for frame in log.frames)
    return [QueueEntry(m.physical_offset, m.size, m.tags_code) for m in messages]


def quick(
    log: CommitLog,
    queue: LogQueue,
    offset: int,
    count: int,
    tags: frozenset[str] | None,
    limits: TransferLimits = PLENTY,
) -> GetResult | None:
    # A few gets do not load the kernels.
    assert codec.kernels_enabled(), "there is nothing to compare without kernels"
    return KernelGet(log, limits, "b", LEVELS).get(queue, offset, count, tags)


def plain(
    log: CommitLog,
    queue: LogQueue,
    offset: int,
    count: int,
    tags: frozenset[str] | None,
    limits: TransferLimits = PLENTY,
) -> GetResult | CorruptFrame:
    try:
        return get_message(
            log,
            queue,
            offset,
            count,
            tags=tags,
            limits=limits,
            read=lambda data, at: read_message("b", LEVELS, data, at),
        )
    except CorruptFrame as error:
        return error


def values(result: GetResult) -> object:
    """All values of an answer."""
    messages = [
        {name: getattr(message, name) for name in JSON_NAMES}
        | {"frame": message.frame, "json": message.to_json(), "repr": repr(message)}
        for message in result.messages
    ]
    return result._replace(messages=()), messages, len(result.messages), result.size


def settings() -> st.SearchStrategy[dict[str, Any]]:
    numbers = st.integers(-1, 12)
    return st.fixed_dictionaries(
        {
            "offset": st.integers(0, 3) | numbers,
            "count": numbers,
            "tags": st.none()
            | st.none()
            | st.frozensets(
                st.sampled_from(["TagA", "true", "polygenelubricants", "Zürich", "x", "\ud800"]),
                min_size=1,
                max_size=3,
            ),
            "limits": st.builds(
                TransferLimits,
                st.sampled_from([0, 300, 1 << 40]),
                numbers,
                st.integers(0, 1000),
                numbers,
                st.integers(0, 1000),
            )
            | st.just(PLENTY),
        }
    )


@given(strategies.logs(min_frames=1), settings(), st.data())
def test_any_bytes(log: Log, asked: dict[str, Any], data: st.DataObject) -> None:
    files = [bytearray(file) for file in log.files]
    for _ in range(data.draw(st.sampled_from([0, 0, 1, 3]))):
        file = data.draw(st.sampled_from(files))
        file[data.draw(st.integers(0, len(file) - 1))] ^= data.draw(st.integers(1, 255))
    entries = entries_of(log)
    for _ in range(data.draw(st.sampled_from([0, 0, 1, 2])) if entries else 0):
        at = data.draw(st.integers(0, len(entries) - 1))
        place, size, code = entries[at]
        entries[at] = QueueEntry(
            data.draw(st.sampled_from([place, place ^ 1, -1, 1 << 62, java.LONG_MAX])),
            data.draw(st.sampled_from([size, size ^ 1, 0, -1, java.INT_MAX, java.INT_MIN])),
            data.draw(st.sampled_from([code, code ^ 1, code ^ (1 << 32), java.LONG_MIN])),
        )
    commit_log = LogInMemory(log.start, log.file_size, list(map(bytes, files)))
    queue = queue_of(entries, first=data.draw(st.sampled_from([0, 0, 3])))
    found = quick(commit_log, queue, **asked)
    if found is None:
        event("left to the reference")
        return
    event("answered")
    expected = plain(commit_log, queue, **asked)
    assert isinstance(expected, GetResult)
    assert values(found) == values(expected)
    assert found == expected
    assert expected == found


@given(strategies.logs(items=strategies.plain_frames(), min_frames=1), st.integers(0, 7))
def test_what_is_as_most_is_needs_no_reference(log: Log, offset: int) -> None:
    commit_log = LogInMemory(log.start, log.file_size, log.files)
    # The reference handles a file's end within the answer.
    end = log.start + log.file_size
    in_first = [entry for entry in entries_of(log) if entry.physical_offset < end]
    queue = queue_of(in_first, per_file=100)
    for tags in (None, *map(frozenset, (["TagA"], ["true"], ["TagA", "true"], ["none"]))):
        expected = plain(commit_log, queue, offset, 32, tags)
        assert isinstance(expected, GetResult)
        found = quick(commit_log, queue, offset, 32, tags)
        answers = (GetMessageStatus.FOUND, GetMessageStatus.NO_MATCHED_MESSAGE)
        assert (found is not None) == (expected.status in answers)
        if found is not None:
            assert values(found) == values(expected)
            assert values(pickle.loads(pickle.dumps(found))) == values(expected)


@given(strategies.logs(min_frames=3), st.integers(100, 2_000))
def test_an_answer_larger_than_the_room(log: Log, room: int) -> None:
    commit_log = LogInMemory(log.start, log.file_size, log.files)
    queue = queue_of(entries_of(log), per_file=100)
    with mock.patch.object(get_kernel, "_ROOM", room):
        found = quick(commit_log, queue, 0, 32, None)
    if found is not None:
        expected = plain(commit_log, queue, 0, 32, None)
        assert isinstance(expected, GetResult)
        assert values(found) == values(expected)


def test_the_crc_of_an_empty_body() -> None:
    sound = Frame(b"t", physical_offset=0).with_crc()
    harmed = Frame(b"t", physical_offset=sound.size, body_crc=77)
    log = LogInMemory(0, 2 * sound.size, [frame.encode(sound) + frame.encode(harmed)])
    entries = [QueueEntry(one.physical_offset, one.size, 0) for one in (sound, harmed)]
    found, expected = (way(log, queue_of(entries[:1]), 0, 1, None) for way in (quick, plain))
    assert isinstance(expected, GetResult)
    assert found == expected
    # The reference raises the error.
    assert quick(log, queue_of(entries), 1, 1, None) is None
    assert isinstance(plain(log, queue_of(entries), 1, 1, None), CorruptFrame)
