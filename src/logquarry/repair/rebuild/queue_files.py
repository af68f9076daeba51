"""Writes consume queues and index files in bulk, into a folder that no other process uses.

:mod:`logquarry.write.queue_writer` writes the same files. This module collects entries, writes them
in large pieces, and closes each file at once. So a rebuild can write thousands of queues without
keeping memory maps or files open.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from weakref import proxy

from logquarry.disk.disk import Disk
from logquarry.disk.folders import TopicFolders
from logquarry.format import queue_entry
from logquarry.format.arrays import Int64, consecutive
from logquarry.format.index import IndexShape
from logquarry.format.queue_entry import UNIT_SIZE
from logquarry.log.store_files import NAME_DIGITS
from logquarry.read.log_queues import QueueKey
from logquarry.read.queue import Queue, Units
from logquarry.repair.audit.differences import TagsRule
from logquarry.repair.audit.right_offsets import RightOffsets
from logquarry.write.index_writer import IndexFileWriter, IndexWriter
from logquarry.write.message_rules import queue_name_fault
from logquarry.write.queue_writer import QueuePart

_FILLER: Final = queue_entry.encode(queue_entry.FILLER)
_MOST_HELD: Final = 64 << 20
_FILLERS_AT_ONCE: Final = 1 << 16
OldQueues = Mapping[QueueKey, Queue]
INVALID: Final = (
    "its queue id or queue offset is harmed, and the messages around it leave no place for it"
)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A message for which no queue entry can be made, with the reason."""

    topic: str
    queue_id: int
    queue_offset: int
    physical_offset: int
    reason: str


def topic_fault(key: QueueKey) -> str | None:
    """Return why the topic of a queue cannot be the name of a folder, as text; None if it can."""
    fault = queue_name_fault(key[0])
    return None if fault is None else f"the topic cannot be a folder name: {fault}"


@dataclass(slots=True)
class BuiltQueue:
    """One queue during the build. All offsets are queue offsets.

    Attributes:
        written: queue offset after the last entry in the files; :meth:`begin` if the files have no
            entry.
        restarts: number of times that the topic was deleted and created again.
        gaps: ranges (start, stop) without a message in the log, which get fillers.
        parts: entries that are not written yet, as (first queue offset, entries), in order.
        harmed: the frames with a harmed queue offset, as (right queue offset, queue offset in the
            frame, physical offset).
    """

    first: int
    stop: int
    written: int
    restarts: int = 0
    gaps: list[tuple[int, int]] = field(default_factory=list)
    parts: list[tuple[int, Units]] = field(default_factory=list)
    harmed: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def fillers(self) -> int:
        """Number of fillers."""
        return sum(stop - start for start, stop in self.gaps)

    def begin(self, units_per_file: int) -> int:
        """Return the queue offset at which the queue's first file begins."""
        return self.first - self.first % units_per_file


class EntryFiles:
    """New queue files ``folder``/TOPIC/QUEUE/FILE. ``left_out`` lists messages without an entry."""

    def __init__(self, disk: Disk, folder: Path, file_size: int) -> None:
        self.left_out: list[LeftOut] = []
        self._disk = disk
        self._folder = folder
        self._file_size = file_size
        self._topics = TopicFolders(disk, folder)
        # Number of bytes of the entries that are not written yet.
        self._held = 0
        self._touched: dict[Path, None] = {}

    def _write_bytes(self, key: QueueKey, position: int, data: bytes | bytearray) -> None:
        self._topics.require_own(key[0])
        rest = memoryview(data)
        while rest:
            count = min(len(rest), self._file_size - position % self._file_size)
            path = self._path(key, position)
            self._disk.make_folders(path.parent)
            with self._disk.refusing(path):
                descriptor = self._disk.open(path, create=True)
                try:
                    self._disk.allocate(descriptor, self._file_size)
                    self._disk.write_all(descriptor, rest[:count], position % self._file_size)
                finally:
                    self._disk.close(descriptor)
            self._touched[path] = None
            rest, position = rest[count:], position + count

    def _sync(self, paths: Iterable[Path]) -> None:
        """Sync files and their names."""
        folders: dict[Path, None] = {}
        for path in paths:
            sync_file(self._disk, path)
            folders[path.parent] = None
        self._disk.sync_names(*folders)

    def _path(self, key: QueueKey, position: int) -> Path:
        name = f"{position - position % self._file_size:0{NAME_DIGITS}d}"
        return self._folder.joinpath(key[0], str(key[1]), name)


class _Placing(RightOffsets):
    """Places the messages of one queue, in the log's order. ``old``, the queue that is rebuilt,
    decides only if the neighbouring messages do not show the right queue offset.
    """

    def __init__(self, files: QueueFiles, key: QueueKey, old: Queue | None) -> None:
        super().__init__(old, TagsRule.of_readers(key[0]))
        # Use a weak reference: in a cycle of references, the files would stay open until a garbage
        # collection.
        self._files: QueueFiles = proxy(files)
        self._key = key

    def _put(self, offset: int, entries: Units) -> None:
        self._files.place_run(self._key, offset, entries)

    def _correct(self, place: int, own: int, right: int) -> None:
        super()._correct(place, own, right)
        self._files.note_harmed(self._key, (right, own, place))

    def _drop(self, offset: int, entries: Units) -> None:
        self._files.leave_out(self._key, offset, entries, INVALID)

    def _has(self, offset: int, entries: Units) -> bool:
        return len(entries) == 1 and super()._has(offset, entries)

    def _first_place(self, entries: Units) -> int | None:
        return None

    def skip(self, first: int, stop: int) -> None:
        """Continue at ``stop``: other tasks write the entries from ``first`` up to ``stop``."""
        self.settle(first)
        self._next = stop


class QueueFiles(EntryFiles):
    """Builds the consume queues of one store.

    ``old`` contains the old queues, except queues with unusable files.
    """

    def __init__(
        self,
        disk: Disk,
        folder: Path,
        file_size: int,
        old: OldQueues | None = None,
    ) -> None:
        super().__init__(disk, folder, file_size)
        self.queues: dict[QueueKey, BuiltQueue] = {}
        self._old = old or {}
        self._placing: dict[QueueKey, _Placing] = {}
        self._harmed: dict[QueueKey, list[tuple[int, int, int]]] = {}
        self._room = file_size // UNIT_SIZE
        self._here: dict[QueueKey, list[tuple[int, Units]]] = {}

    def add(self, parts: Mapping[QueueKey, QueuePart]) -> None:
        """Add the entries of the next frames, in the log's order."""
        for key, part in parts.items():
            if (fault := topic_fault(key)) is not None:
                for start, stop in consecutive(part.offsets):
                    self.leave_out(key, int(part.offsets[start]), part.units[start:stop], fault)
            else:
                self._place(key).take(part.offsets, part.units)
        if self._held > _MOST_HELD:
            self._write_all()

    def _place(self, key: QueueKey) -> _Placing:
        placing = self._placing.get(key)
        if placing is None:
            placing = self._placing[key] = _Placing(self, key, self._old.get(key))
        return placing

    def leave_out(self, key: QueueKey, offset: int, units: Units, reason: str) -> None:
        """Record messages that get no entry; ``offset`` is the queue offset in the first frame."""
        for number, place in enumerate(units["physical_offset"].tolist()):
            self.left_out.append(LeftOut(*key, offset + number, place, reason))

    def note_harmed(self, key: QueueKey, found: tuple[int, int, int]) -> None:
        """Record a harmed queue offset; see :attr:`BuiltQueue.harmed`."""
        self._harmed.setdefault(key, []).append(found)

    def place_run(self, key: QueueKey, offset: int, units: Units) -> None:
        """Add entries whose queue offsets are right and consecutive."""
        queue = self.queues.get(key)
        if queue is None:
            queue = self.queues[key] = BuiltQueue(offset, offset, offset - offset % self._room)
            queue.harmed = self._harmed.setdefault(key, [])
        elif offset < queue.stop:
            self._fall_back(key, queue, offset)
        if offset > queue.stop:
            queue.gaps.append((queue.stop, offset))
        queue.parts.append((offset, units))
        queue.stop = offset + len(units)
        self._held += units.nbytes

    def _fall_back(self, key: QueueKey, queue: BuiltQueue, offset: int) -> None:
        """Remove the entries from ``offset`` on. Either the topic was created again, or all these
        entries belong to frames with a harmed queue offset. Such frames then get no entry.
        """
        removed = [found for found in queue.harmed if found[0] >= offset]
        if len(removed) < queue.stop - offset:
            queue.restarts += 1
        for _, own, place in removed:
            self.left_out.append(LeftOut(*key, own, place, INVALID))
        queue.harmed[:] = [found for found in queue.harmed if found[0] < offset]
        if offset <= queue.first:
            self._cut_files(key, queue, queue.begin(self._room))
            queue.first = queue.stop = offset
            queue.written = queue.begin(self._room)
            queue.parts.clear()
            queue.gaps.clear()
            return
        queue.parts[:] = [(at, units[: offset - at]) for at, units in queue.parts if at < offset]
        queue.gaps[:] = [(at, min(stop, offset)) for at, stop in queue.gaps if at < offset]
        if offset < queue.written:
            self._cut_files(key, queue, offset)
            queue.written = offset
        queue.stop = offset

    # ------------------------------------------------------------------- built by several tasks
    def reserve(self, key: QueueKey, first: int, stop: int) -> None:
        """Count the entries from ``first`` to ``stop`` as written; tasks write them."""
        self._place(key).skip(first, stop)
        queue = self.queues.get(key)
        if queue is None:
            queue = self.queues[key] = BuiltQueue(first, first, first - first % self._room)
        elif queue.parts:
            self._write(key, queue)
        if first > queue.stop:
            queue.gaps.append((queue.stop, first))
        for at in range(queue.written, first, _FILLERS_AT_ONCE):
            self._write_at(key, at, _FILLER * (min(at + _FILLERS_AT_ONCE, first) - at))
        queue.written = queue.stop = stop

    def put(self, key: QueueKey, part: QueuePart) -> None:
        """Write some entries of a queue. Other tasks write the other entries."""
        for start, stop in consecutive(part.offsets):
            here = self._here.setdefault(key, [])
            here.append((int(part.offsets[start]), part.units[start:stop].copy()))
            self._held += here[-1][1].nbytes
        if self._held > _MOST_HELD:
            self._write_here()

    def _write_here(self) -> None:
        for key, pieces in self._here.items():
            at, data = pieces[0][0], bytearray()
            for offset, units in pieces:
                if offset != at + len(data) // UNIT_SIZE:
                    self._write_at(key, at, data)
                    at, data = offset, bytearray()
                data += units.tobytes()
            self._write_at(key, at, data)
        self._here.clear()
        self._held = 0

    def finish_put(self) -> None:
        """Write the entries that :meth:`put` still holds in memory, and sync the files."""
        self._write_here()
        for path in self._touched:
            sync_file(self._disk, path)
        self._touched.clear()

    def _settle(self) -> None:
        """Place the last message of each queue."""
        for placing in self._placing.values():
            placing.settle()

    # ------------------------------------------------------------------------------------ files
    def _write_all(self) -> None:
        for key, queue in self.queues.items():
            if queue.parts:
                self._write(key, queue)
        self._held = 0

    def _write(self, key: QueueKey, queue: BuiltQueue) -> None:
        start = at = queue.written
        data = bytearray()
        for offset, units in queue.parts:
            data += _FILLER * (offset - at)
            data += units.tobytes()
            at = offset + len(units)
        queue.parts.clear()
        queue.written = at
        self._write_at(key, start, data)

    def _write_at(self, key: QueueKey, offset: int, data: bytes | bytearray) -> None:
        self._write_bytes(key, offset * UNIT_SIZE, data)

    def _cut_files(self, key: QueueKey, queue: BuiltQueue, offset: int) -> None:
        room, rest = self._room, -offset % self._room
        for base in range(offset + rest, queue.written, room):
            self._disk.remove(self._path(key, base * UNIT_SIZE))
        if rest:
            self._write_at(key, offset, bytes(rest * UNIT_SIZE))

    def paths(self) -> Iterator[Path]:
        """Yield the paths of the files, queue by queue."""
        for key, queue in sorted(self.queues.items()):
            for base in range(queue.begin(self._room), queue.stop, self._room):
                yield self._path(key, base * UNIT_SIZE)

    def finish(self) -> None:
        """Write all entries, and sync the files."""
        self._settle()
        self._write_all()
        self._disk.make_folders(self._folder)
        self._sync(self.paths())


def sync_file(disk: Disk, path: Path) -> None:
    """Sync a closed file."""
    with disk.writing(path):
        pass


# -------------------------------------------------------------------------------------- the index
_MOST_WAITING: Final = 8


class KeyThread:
    """Adds keys to an index in a second thread, because each key changes a random place of the
    file.

    Only one thread may call the methods. If ``most`` earlier calls are still unfinished,
    :meth:`put` waits.
    """

    def __init__(self, writer: IndexWriter, most: int = 1) -> None:
        self._writer = writer
        self._most = most
        self._thread = ThreadPoolExecutor(1, "index")
        self._waiting: deque[Future[None]] = deque()

    def put(self, offsets: Int64, times: Int64, hashes: Int64, numbers: Int64) -> None:
        """Pass keys to the thread, which adds them to the index with :meth:`IndexWriter.put`. If
        the thread failed on the keys of an earlier call, raises that error.
        """
        if len(self._waiting) >= self._most:
            self._waiting.popleft().result()
        # Copy the arrays of keys: the follower overwrites them before the thread has used them.
        work = self._thread.submit(self._writer.put, offsets, times, hashes.copy(), numbers.copy())
        self._waiting.append(work)

    def wait(self) -> None:
        """Wait until all keys are in the index."""
        while self._waiting:
            self._waiting.popleft().result()

    def end(self) -> None:
        """End the thread; drop the keys that still wait."""
        self._thread.shutdown(cancel_futures=True)


class IndexFiles(KeyThread):
    """Builds the index of a store, in a second thread. ``files`` and ``keys`` are the numbers of
    complete files and of their keys; :meth:`finish` completes the last file.
    """

    def __init__(
        self,
        disk: Disk,
        folder: Path,
        shape: IndexShape,
        clock: Callable[[], int],
        *,
        counts_keys: bool = False,
    ) -> None:
        disk.make_folders(folder)
        self.files = 0
        self.keys = 0
        writer = IndexWriter(
            *(disk, folder, shape), clock=clock, filled=self._complete, counts_keys=counts_keys
        )
        super().__init__(writer, _MOST_WAITING)

    def _complete(self, file: IndexFileWriter) -> None:
        file.flush()
        self.files += 1
        self.keys += file.header.entry_count - 1
        file.file.close()

    def finish(self) -> None:
        """Wait until all keys are in the index, and sync the last file."""
        self.wait()
        if self._writer.last is not None:
            self._complete(self._writer.last)

    def end(self) -> None:
        """See :meth:`KeyThread.end`. Also close the last file."""
        super().end()
        self._writer.close()
