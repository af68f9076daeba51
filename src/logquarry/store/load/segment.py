"""Staged segments: files of frames for one store, each written by one task. This module writes
segments, reads them, and appends their frames to the log.

::

    | frame | frame | ... | JSON: queues by the numbers in the frames | size of all frames 8 |
    | size of the JSON 4 | "LQSG" |

Numbers are big-endian. The task reports the file's CRC to the loader, and the loader rejects a
segment with another CRC. The log gets the same bytes as from ``put_many``: the messages of a chunk
(about 1 MiB) share one store time. If an append is interrupted, the log may have only the first
frames of the segment.
"""

from __future__ import annotations

import json
import os
import re
import struct
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import numpy as np

from logquarry.disk.mapped_file import MappedFile
from logquarry.errors import CorruptFile, StoreNotFound, StoreUnavailable, reason_of
from logquarry.format import frame, put_frames
from logquarry.format.arrays import Bytes, Int64
from logquarry.format.java import crc32
from logquarry.log import codec
from logquarry.log.filesystem import FileView, unreadable_file, whole_file
from logquarry.read.log_queues import QueueKey
from logquarry.systems import sync_path
from logquarry.text import counted, document
from logquarry.write.commit_log_writer import CommitLogWriter
from logquarry.write.log_appender import end_file
from logquarry.write.outgoing import advance
from logquarry.write.put_many import CHUNK_BYTES

_TAIL: Final = struct.Struct(">qi4s")
_MAGIC: Final = b"LQSG"
_STEP: Final = 16 << 20
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.frames")

ENDING: Final = ".frames"
_BLANK: Final = frame.BLANK.size


@dataclass(frozen=True, slots=True)
class StagedFrames:
    """The staged frames of one file; see :mod:`logquarry.format.put_frames` for their format.

    Each frame contains an index into ``queues``. ``path`` is the file's path for errors.
    """

    data: memoryview
    queues: Sequence[QueueKey]
    path: str


@dataclass(frozen=True, slots=True)
class Segment:
    """The metadata of a segment. Small, and can be pickled.

    Attributes:
        size: bytes of the file.
        bytes: total size of the frames in the file, without the footer.
        crc: CRC-32 of the file.
        queues: topic, queue id and number of frames of each queue; empty after :meth:`from_json`.
    """

    name: str
    size: int
    rows: int
    bytes: int
    crc: int
    queues: tuple[tuple[str, int, int], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the metadata as a JSON document, without the queues."""
        return document(self, ("name", "size", "rows", "bytes", "crc"))

    @classmethod
    def from_json(cls, document: Any) -> Segment:
        """Parse the result of :meth:`to_json`."""
        if not isinstance(document, dict):
            raise ValueError(f"a segment must be an object, not {document!r}")
        name = document.get("name")
        numbers: list[Any] = [document.get(key) for key in ("size", "rows", "bytes", "crc")]
        if not isinstance(name, str) or _NAME.fullmatch(name) is None:
            raise ValueError(f"invalid name of a segment: {name!r}")
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError(f"{name}: sizes and CRC must be numbers, not {numbers}")
        size, rows, length, crc = numbers
        return cls(name, size, rows, length, crc)


class SegmentWriter:
    """Writes one segment to a new file. Raises StoreUnavailable if the file cannot be created."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = 0
        self.bytes = 0
        self._crc = 0
        self._size = 0
        self._numbers: dict[QueueKey, int] = {}
        self._counts: list[int] = []
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, flags, 0o644)
        except OSError as error:
            raise _refused(path, error) from error

    def number(self, queue: QueueKey) -> int:
        """Return the number of a queue in this segment."""
        found = self._numbers.setdefault(queue, len(self._numbers))
        if found == len(self._counts):
            self._counts.append(0)
        return found

    def add(self, frames: memoryview | bytes, counts: Iterable[tuple[int, int]]) -> None:
        """Append frames whose QUEUEOFFSET contains the number of their queue (:meth:`number`).

        ``counts`` has the number of frames of each queue number.
        """
        self._write(frames)
        self.bytes += len(frames)
        for number, count in counts:
            self._counts[number] += count
            self.rows += count

    def finish(self) -> Segment:
        """Write the footer and sync the file; return the metadata."""
        text = json.dumps({"queues": [[*key] for key in self._numbers]}, ensure_ascii=False)
        footer = text.encode()
        self._write(footer + _TAIL.pack(self.bytes, len(footer), _MAGIC))
        try:
            os.fsync(self._descriptor)
            sync_path(self.path.parent)
        except OSError as error:
            raise _refused(self.path, error) from error
        finally:
            self.close()
        queues = tuple(
            (topic, queue_id, count)
            for (topic, queue_id), count in zip(self._numbers, self._counts, strict=True)
        )
        return Segment(self.path.name, self._size, self.rows, self.bytes, self._crc, queues)

    def close(self) -> None:
        """Close the file; further calls do nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def discard(self) -> None:
        """Close and delete the file."""
        self.close()
        with suppress(OSError):
            self.path.unlink()

    def _write(self, data: memoryview | bytes) -> None:
        self._crc = crc32(data, self._crc)
        self._size += len(data)
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._descriptor, view) :]
        except OSError as error:
            raise _refused(self.path, error) from error


def _refused(path: Path, error: OSError) -> StoreUnavailable:
    return StoreUnavailable(f"{path}: cannot be staged: {reason_of(error)}")


def find_segment(folder: Path, segment: Segment) -> FileView:
    """Open a segment for reading.

    Raises CorruptFile if the file is missing or has another size than ``segment.size``.
    """
    path = folder / segment.name
    try:
        file = whole_file(path)
    except FileNotFoundError as error:
        reason = "the segment is missing: do all tasks and the loader see the same folder?"
        raise CorruptFile(str(path), 0, reason) from error
    except StoreNotFound as error:
        raise CorruptFile(str(path), 0, str(error)) from error
    if file.size != segment.size or file.size < _TAIL.size:
        reason = f"it has {counted(file.size, 'byte')} instead of {segment.size}"
        raise CorruptFile(str(path), 0, reason)
    return file


class SegmentReader:
    """Opens a segment and verifies it.

    Without ``check``, the CRC is not verified, because the caller has already verified it.
    ``frames`` must not be used after :meth:`close`. Raises CorruptFile if the file is missing or
    damaged.
    """

    def __init__(self, folder: Path, segment: Segment, *, check: bool = True) -> None:
        path = folder / segment.name
        file = find_segment(folder, segment)
        self._view = file.window(0, file.size)
        if file.unreadable:
            raise unreadable_file(file)
        try:
            self.frames = self._opened(path, segment, check)
        except BaseException:
            self.close()
            raise

    def _opened(self, path: Path, segment: Segment, check: bool) -> StagedFrames:
        view, crc = self._view, 0 if check else segment.crc
        for at in range(0, len(view) if check else 0, _STEP):
            crc = crc32(view[at : at + _STEP], crc)
        if crc != segment.crc:
            reason = f"its CRC is {crc:08x} instead of {segment.crc:08x}"
            raise CorruptFile(str(path), 0, reason)
        frames, footer, magic = _TAIL.unpack_from(view, len(view) - _TAIL.size)
        end = len(view) - _TAIL.size
        if magic != _MAGIC or frames != segment.bytes or frames + footer != end:
            raise CorruptFile(str(path), end, "it has no valid footer")
        named = json.loads(bytes(view[frames:end]))["queues"]
        queues = [(topic, queue_id) for topic, queue_id in named]
        return StagedFrames(view[:frames], queues, str(path))

    def close(self) -> None:
        """Close the file; further calls do nothing."""
        if hasattr(self, "frames"):
            self.frames.data.release()
        with suppress(BufferError):
            self._view.release()


class StagedLoad:
    """The staged frames of a load, in the order of its segments. One segment at a time is open.

    The place of a frame is the total size of the frames before it, in all segments together.

    Attributes:
        end: the place after the last frame.
    """

    def __init__(self, folder: Path, segments: Sequence[Segment]) -> None:
        self._folder = folder
        self._segments = segments
        self._ends = list(accumulate(segment.bytes for segment in segments))
        self.end = self._ends[-1] if segments else 0
        self._open: tuple[int, SegmentReader] | None = None

    def close(self) -> None:
        """Close the open segment."""
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def frames(self, place: int) -> tuple[StagedFrames, int]:
        """Return the frames of the segment that contains a place, and the position of the place in
        it. The frames are valid until the next call.
        """
        number = bisect_right(self._ends, place)
        segment = self._segments[number]
        if self._open is None or self._open[0] != number:
            self.close()
            # The caller has verified the CRCs before.
            self._open = number, SegmentReader(self._folder, segment, check=False)
        return self._open[1].frames, place - self._ends[number] + segment.bytes

    def frame(self, place: int) -> memoryview:
        """Return the frame at a place."""
        frames, start = self.frames(place)
        size = put_frames.size_at(frames.data, start)
        return frames.data[start : start + (size or 0)]

    def after(self, place: int, size: int) -> int | None:
        """Return the place that is ``size`` bytes after ``place``. Return None if no frame ends at
        the new place, or if the new place is the end of the load.
        """
        end = place + size
        while place < min(end, self.end) and (frame := self.frame(place)):
            place += len(frame)
        return place if place == end < self.end else None

    def find(self, other: memoryview, place: int) -> int | None:
        """Search from a place on; return the place of the first frame that equals ``other``."""
        places, keys, order = self._index
        key = _key(other)
        low, high = (int(np.searchsorted(keys, key, side)) for side in ("left", "right"))
        for found in places[np.sort(order[low:high])].tolist():
            if found >= place and put_frames.same(self.frame(found), other):
                return int(found)
        return None

    @cached_property
    def _index(self) -> tuple[Int64, Int64, Int64]:
        # Return three arrays. The first array has the place of each frame, in the order of the
        # load. The second array has the keys of the frames, sorted. For each key, the third array
        # has the position of the key's frame in the first array. Only a search after damage needs
        # these arrays.
        places, keys, place = [], [], 0
        while place < self.end and (frame := self.frame(place)):
            places.append(place)
            keys.append(_key(frame))
            place += len(frame)
        each = np.array(keys, np.int64)
        order = np.argsort(each, kind="stable")
        return np.array(places, np.int64), each[order], order


def _key(data: memoryview) -> int:
    return len(data) << 32 | zlib.crc32(put_frames.text_of(data))


@dataclass(eq=False)
class StagedWriter:
    """Appends staged frames.

    ``grown`` is called after each chunk, to wake the services that follow the log. After the last
    chunk, ``counted`` is called once for each queue to which messages were appended. Its arguments
    are the queue's topic, the number of these messages, and their total size.
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
        self.writer.claim(frames.queues)
        known = self.writer.queue_offsets
        next_offsets = np.array([known.setdefault(key, 0) for key in frames.queues], np.int64)
        place = _place_kernel if codec.kernels_enabled() else _place_reference
        size = put_frames.size_at(frames.data, start) or 0
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
    """Compare staged frames with frames of the log, until two frames differ.

    The comparison begins at the position ``start`` in ``frames.data`` and at the position ``at`` in
    ``there``, the bytes of the log. Return the positions in ``frames.data`` and in ``there`` after
    the last two frames that are equal.
    """
    same = _same_kernel if codec.kernels_enabled() else _same_reference
    return same(frames, start, there, at)


def _place_kernel(
    frames: StagedFrames,
    start: int,
    room: Bytes,
    file: MappedFile,
    now: int,
    next_offsets: Int64,
    placed: Int64,
) -> tuple[int, int, int]:
    # The kernel copies as many frames into `room` as fit. In each copied frame, the kernel sets the
    # offsets that the frame has in the file. The kernel needs the address of the file's first byte.
    # `room` begins at the position `wrote`, so this address is the address of `room` minus `wrote`.
    # The result NO_FRAME can also mean that the next frame is too large for the rest of `room`.
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
