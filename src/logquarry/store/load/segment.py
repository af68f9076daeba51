"""A staged segment: a file of frames for one store, written by one task.

::

    | frame | frame | ... | JSON: queues by the numbers in the frames | size of all frames 8 |
    | size of the JSON 4 | "LQSG" |

Numbers are big-endian. The task reports the file's CRC to the loader, and the loader rejects a
segment with another CRC.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from logquarry.errors import CorruptFile, StoreNotFound, StoreUnavailable
from logquarry.format.java import crc32
from logquarry.log.filesystem import FileView, unreadable_file, whole_file
from logquarry.read.log_queues import QueueKey
from logquarry.text import document
from logquarry.write.staged_put import StagedFrames

_TAIL: Final = struct.Struct(">qi4s")
_MAGIC: Final = b"LQSG"
_STEP: Final = 16 << 20
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.frames")

ENDING: Final = ".frames"


@dataclass(frozen=True, slots=True)
class Segment:
    """The metadata of a segment. Small, and can be pickled.

    Attributes:
        size: bytes of the file.
        bytes: total size of the frames in the file, without the footer.
        crc: CRC-32 of the file.
        queues: topic, queue id and number of frames of each queue.
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
        """Append frames that contain queue numbers in place of queue ids.

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
            folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
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
    return StoreUnavailable(f"{path}: cannot be staged: {error.strerror or error}")


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
        reason = f"it has {file.size} bytes instead of {segment.size}"
        raise CorruptFile(str(path), 0, reason)
    return file


class SegmentReader:
    """Opens a segment and verifies it.

    Without ``check``, the CRC is not verified: the caller has done so before. ``frames`` must not
    be used after :meth:`close`. Raises CorruptFile if the file is missing or damaged.
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
