"""Appends staged frames to the log. The tasks of a bulk load have written these frames into files
beside the store.

The log gets the same bytes as from ``put_many``: the messages of a chunk (about 1 MiB) share one
store time. If a call is interrupted, the log may have only the first frames of the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from logquarry.disk.mapped_file import MappedFile
from logquarry.errors import CorruptFile
from logquarry.format import frame, put_frames
from logquarry.format.arrays import Bytes, Int64
from logquarry.log import codec
from logquarry.read.log_queues import QueueKey
from logquarry.write.commit_log_writer import CommitLogWriter
from logquarry.write.log_appender import end_file
from logquarry.write.outgoing import advance
from logquarry.write.put_many import CHUNK_BYTES

_BLANK: Final = frame.BLANK.size


@dataclass(frozen=True, slots=True)
class StagedFrames:
    """The staged frames of one file; see :mod:`logquarry.format.put_frames` for their format.

    Each frame contains an index into ``queues``. ``path`` is the file's path for errors.
    """

    data: memoryview
    queues: Sequence[QueueKey]
    path: str


@dataclass(eq=False)
class StagedWriter:
    """Appends staged frames.

    ``grown`` is called after each chunk, to wake the services that follow the log. ``counted`` is
    called with each topic, the number of its messages, and their bytes.
    """

    writer: CommitLogWriter
    grown: Callable[[], None]
    counted: Callable[[str, int, int], None]

    def __post_init__(self) -> None:
        self._room = np.empty(CHUNK_BYTES, np.uint8)

    def append(self, frames: StagedFrames, start: int = 0) -> int:
        """Append the staged frames from the position ``start`` in ``frames.data`` to the end.
        Return the number of appended frames.

        Raises:
            StoreUnavailable: if the store refuses messages.
            CorruptFile: if bytes of ``frames.data`` are not a frame, or if a frame is too large for
                a file of the log.
        """
        placed = np.zeros((2, len(frames.queues)), np.int64)
        try:
            while start < len(frames.data):
                self.writer.check_status()
                with self.writer.holding() as (now, _):
                    start = self._append_chunk(frames, start, now, placed)
                self.grown()
        finally:
            for key, messages, size in zip(frames.queues, *placed.tolist(), strict=True):
                if messages:
                    self.counted(key[0], messages, size)
        return int(placed[0].sum())

    def _append_chunk(self, frames: StagedFrames, start: int, now: int, placed: Int64) -> int:
        file = self.writer.file()
        known = self.writer.queue_offsets
        next_offsets = np.array([known.setdefault(key, 0) for key in frames.queues], np.int64)
        place = _place_kernel if codec.kernels_enabled() else _place_reference
        size = min(_size_at(frames, start), len(frames.data) - start)
        if size > len(self._room):
            self._room = np.empty(size, np.uint8)
        added = np.zeros_like(placed)
        stop, position, why = place(frames, start, self._room, file, now, next_offsets, added)
        if stop > start:
            told = dict(zip(frames.queues, next_offsets.tolist(), strict=True))
            advance(file, position, known, told, self._room.data[: position - file.wrote])
            placed += added
        elif why == put_frames.NO_FRAME or (why == put_frames.NO_ROOM and not file.wrote):
            what = (
                "no frame"
                if why == put_frames.NO_FRAME
                else "a frame that no file of the log holds"
            )
            raise CorruptFile(frames.path, start, f"{what} is there")
        file.store_timestamp = now
        if why == put_frames.NO_ROOM:
            end_file(file)
        return stop


def same_frames(frames: StagedFrames, start: int, there: memoryview, at: int) -> tuple[int, int]:
    """Compare staged frames from ``start`` on with frames of the log from the position ``at`` on.

    Return the positions after the last equal frame among the staged frames, and in ``there``.
    """
    same = _same_kernel if codec.kernels_enabled() else _same_reference
    return same(frames, start, there, at)


def _size_at(frames: StagedFrames, start: int) -> int:
    return int.from_bytes(frames.data[start : start + 4], "big", signed=True)


def _place_kernel(
    frames: StagedFrames,
    start: int,
    room: Bytes,
    file: MappedFile,
    now: int,
    next_offsets: Int64,
    placed: Int64,
) -> tuple[int, int, int]:
    # Copies as many frames as `room` can hold into it, and sets their offsets as in the file. The
    # kernel adds positions of the file to an address; `room` begins at the position `wrote`. The
    # result NO_FRAME can also mean that the next frame is too large for the rest of `room`.
    kernels = codec.require_kernels()
    source = np.frombuffer(frames.data, np.uint8)
    end = min(start + len(room), len(source))
    stop, position, _, why = kernels.place_staged(
        *(source.ctypes.data, start, end, CHUNK_BYTES),
        *(room.ctypes.data - file.wrote, file.wrote, file.size, file.base, now),
        *(next_offsets, placed),
    )
    return int(stop), int(position), int(why)


def _place_reference(
    frames: StagedFrames,
    start: int,
    room: Bytes,
    file: MappedFile,
    now: int,
    next_offsets: Int64,
    placed: Int64,
) -> tuple[int, int, int]:
    position = first = file.wrote
    data = frames.data[: start + len(room)]
    while start < len(data) and position - first < CHUNK_BYTES:
        size = put_frames.size_at(data, start)
        if size is None:
            return start, position, put_frames.NO_FRAME
        number = put_frames.queue_number(data, start)
        if not 0 <= number < len(next_offsets):
            return start, position, put_frames.NO_FRAME
        if position + size + _BLANK > file.size:
            return start, position, put_frames.NO_ROOM
        queue_offset = 0
        if put_frames.advances_queue(data, start):
            queue_offset = int(next_offsets[number])
            next_offsets[number] += 1
        target = room.data[position - first : position - first + size]
        target[:] = data[start : start + size]
        put_frames.place(target, queue_offset, file.base + position, now)
        placed[:, number] += (1, size)
        start, position = start + size, position + size
    return start, position, put_frames.PLACED


def _same_kernel(frames: StagedFrames, start: int, there: memoryview, at: int) -> tuple[int, int]:
    kernels = codec.require_kernels()
    one, other = np.frombuffer(frames.data, np.uint8), np.frombuffer(there, np.uint8)
    stop, behind, _ = kernels.same_staged(
        one.ctypes.data, start, len(one), other.ctypes.data, at, len(other)
    )
    return int(stop), int(behind)


def _same_reference(
    frames: StagedFrames, start: int, there: memoryview, at: int
) -> tuple[int, int]:
    for size in put_frames.sizes_of(frames.data, start):
        if not put_frames.same(frames.data[start : start + size], there[at : at + size]):
            break
        start, at = start + size, at + size
    return start, at
