"""Writes the key index (``IndexService.buildIndex``, ``IndexFile.putKey`` of 4.9.3).

Only the dispatcher's thread writes. The header of a file contains the number of entries. The writer
writes the header after the entries, so a reader never reads an incomplete entry. The name of a file
is a time. All names are distinct, and a newer file has a higher name, even if the clock is set
back.
"""

from __future__ import annotations

import datetime
from collections import deque
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Final

import numpy as np

from logquarry.disk.disk import Disk
from logquarry.disk.mapped_file import MappedFile
from logquarry.disk.name_guard import NameGuard
from logquarry.disk.page_file import CheckpointFile
from logquarry.errors import StoreUnavailable, UsageError
from logquarry.format import index, java
from logquarry.format.arrays import Bytes, Int32, Int64, Records
from logquarry.format.fields import PAGE_SIZE
from logquarry.format.index import ENTRY, HEADER, SLOT, IndexHeader, IndexShape
from logquarry.log import codec
from logquarry.log.store_files import INDEX, is_index_name
from logquarry.paths import is_folder

_ENTRY_DTYPE: Final = ENTRY.dtype()
_SLOT_DTYPE: Final = np.dtype(">i4")
_NAME_FORMAT: Final = "%Y%m%d%H%M%S"
_NAME_DIGITS: Final = 17
_LEAST_ENTRIES: Final = 2


def load_kernel() -> None:
    """Load the kernel that puts keys. Call this only if kernels can be used."""
    none = np.zeros(0, np.int64)
    codec.require_kernels().put_index_keys(0, 1, 0, 1, 0, none, none, none)


class IndexFileWriter:
    """Puts keys into one index file.

    ``before`` is the header of the previous file. At first, both times in the header of a new file
    are the end time of ``before``, and both offsets are the end offset of ``before``. With
    ``counts_keys``, the header's ``slots_used`` counts keys instead of used slots, as in RocketMQ
    3.x.
    """

    def __init__(
        self,
        file: MappedFile,
        shape: IndexShape,
        before: IndexHeader | None = None,
        *,
        counts_keys: bool = False,
    ) -> None:
        self._counts_keys = counts_keys
        self.file = file
        self.shape = shape
        # Allocate the whole file. If the file had holes and the disk were full, a write to a hole
        # through the map would end the process. RocketMQ leaves holes.
        file.allocate()
        # Check that the disk can read the header and all slots, because a put can change any slot.
        file.require_readable(0, shape.entry_position(0))
        file.load(shape.entry_position(0))
        count = index.decode_header(file.buffer).entry_count
        file.require_readable(shape.entry_position(max(0, count - 1)), 2 * ENTRY.size)
        self.header = index.decode_header(file.buffer)
        file.wrote = file.size
        if before is not None and self.header.entry_count <= 1:
            self.header = IndexHeader(
                before.end_timestamp,
                before.end_timestamp,
                before.end_offset,
                before.end_offset,
                0,
                1,
            )
            self._write_header(count_on_disk=0)

    @property
    def room(self) -> int:
        """Number of keys that the file can still take."""
        return self.shape.entries - self.header.entry_count

    def put(self, hashes: Int64, offsets: Int64, times: Int64) -> None:
        """Put keys into the file. There must be at most :attr:`room` keys."""
        count = len(hashes)
        if not count:
            return
        before = self.header
        header = before
        if header.entry_count <= 1:
            header = header._replace(begin_timestamp=int(times[0]), begin_offset=int(offsets[0]))
        if codec.kernels_enabled():
            begun = self._put_kernel(hashes, offsets, times, header.begin_timestamp)
        else:
            begun = self._put_reference(hashes, offsets, times, header.begin_timestamp)
        if before.entry_count <= 1:
            # QUIRK: the first entry counts its seconds from the end time of the previous file. The
            # header of the new file still contains this time as its begin time
            # (test_replay.py: clean-restart/base).
            entries = self._entries(before.entry_count, 1)
            entries["seconds"] = seconds_since(times[:1], before.begin_timestamp)
        if not self.file.address:
            self._keep(hashes, before.entry_count)
        self.header = header._replace(
            end_timestamp=int(times[-1]),
            end_offset=int(offsets[-1]),
            slots_used=header.slots_used + (count if self._counts_keys else begun),
            entry_count=header.entry_count + count,
        )
        self._write_header()

    def _keep(self, hashes: Int64, number: int) -> None:
        """If the buffer is not a memory map of the file, write new entries and their slots to the
        file.
        """
        file, first_entry = self.file, self.shape.entry_position(0)
        file.keep(
            self.shape.entry_position(number), self.shape.entry_position(number + len(hashes))
        )
        slots = HEADER.size + np.abs(hashes) % self.shape.slots * SLOT.size
        pages = np.unique(slots // PAGE_SIZE)
        for run in np.split(pages, np.flatnonzero(np.diff(pages) > 1) + 1):
            stop = (int(run[-1]) + 1) * PAGE_SIZE
            file.keep(int(run[0]) * PAGE_SIZE, min(stop, first_entry))

    def _entries(self, number: int, count: int) -> Records:
        position = self.shape.entry_position(number)
        entries: Records = np.frombuffer(self.file.buffer, _ENTRY_DTYPE, count, position)
        return entries

    def _put_reference(self, hashes: Int64, offsets: Int64, times: Int64, begin: int) -> int:
        """Write the entries, and link each to the previous entry of its slot. Return the number of
        slots that were empty before.
        """
        number, count = self.header.entry_count, len(hashes)
        entries = self._entries(number, count)
        entries["key_hash"] = hashes
        entries["physical_offset"] = offsets
        entries["seconds"] = seconds_since(times, begin)
        table = np.frombuffer(self.file.buffer, _SLOT_DTYPE, self.shape.slots, HEADER.size)
        numbers = np.arange(number, number + count, dtype=np.int64)
        entries["previous"], begun = _chain(table, np.abs(hashes) % self.shape.slots, numbers)
        return begun

    def _put_kernel(self, hashes: Int64, offsets: Int64, times: Int64, begin: int) -> int:
        kernels = codec.require_kernels()
        # The view keeps the file mapped while the kernel writes.
        view: Bytes = np.frombuffer(self.file.buffer, np.uint8)
        assert len(view) >= self.shape.entry_position(self.header.entry_count + len(hashes))
        address, number = view.ctypes.data, self.header.entry_count
        begun: int = kernels.put_index_keys(
            *(address + HEADER.size, self.shape.slots),
            *(address + self.shape.entry_position(number), number),
            *(begin, hashes, offsets, times),
        )
        return begun

    def flush(self, least_pages: int = 0) -> None:
        """Sync the whole file; ``least_pages`` is ignored."""
        self.file.flushed = 0
        self.file.flush()

    def _write_header(self, count_on_disk: int | None = None) -> None:
        header = self.header
        if count_on_disk is not None:
            header = header._replace(entry_count=count_on_disk)
        self.file.buffer[: HEADER.size] = index.encode_header(header)
        self.file.keep(0, HEADER.size)


def _chain(table: Int32, slots: Int64, numbers: Int64) -> tuple[Int64, int]:
    """Make each slot of ``table`` point to its newest entry.

    Return an array and a count. For each new entry, the array contains the number of the previous
    entry of the same slot. The count is the number of slots that were empty before.
    """
    order = np.argsort(slots, kind="stable")
    ordered, sorted_numbers = slots[order], numbers[order]
    changes = ordered[1:] != ordered[:-1]
    is_first, is_last = np.append(True, changes), np.append(changes, True)
    behind = np.empty(len(slots), np.int64)
    behind[1:] = sorted_numbers[:-1]
    found = table[ordered[is_first]].astype(np.int64)
    # Treat a slot as empty if it does not contain the number of an earlier entry.
    found[(found <= 0) | (found > numbers[0])] = 0
    behind[is_first] = found
    table[ordered[is_last]] = sorted_numbers[is_last]
    previous = np.empty(len(slots), np.int64)
    previous[order] = behind
    return previous, int((found == 0).sum())


def seconds_since(times: Int64, begin: int) -> Int64:
    """Convert store times (ms) to the form that entries contain: seconds since ``begin`` (ms)."""
    if begin <= 0:
        return np.zeros(len(times), np.int64)
    return np.clip((times - begin) // 1000, 0, java.INT_MAX)


def check_room(shape: IndexShape) -> None:
    """Raise UsageError if no key fits into an index file.

    If no key fits, the first key would make the writer create files without end.
    """
    if shape.entries < _LEAST_ENTRIES:
        raise UsageError(
            f"max_index_num is {shape.entries}, and must be at least {_LEAST_ENTRIES}: the first "
            "entry of an index file is never used"
        )


@dataclass(eq=False, repr=False)
class IndexWriter:
    """Writes the index files of a store, and calls ``filled`` with each full file."""

    disk: Disk
    folder: Path
    shape: IndexShape
    _: KW_ONLY
    clock: Callable[[], int]
    filled: Callable[[IndexFileWriter], None] = lambda _: None
    counts_keys: bool = False

    def __post_init__(self) -> None:
        check_room(self.shape)
        names = [name for name in self.disk.names_in(self.folder) if is_index_name(name)]
        self._last_name = max(names, default="")
        self.last: IndexFileWriter | None = None
        if self._last_name:
            file = self._open(self._last_name)
            self.last = IndexFileWriter(file, self.shape, counts_keys=self.counts_keys)

    def put(self, offsets: Int64, times: Int64, hashes: Int64, numbers: Int64) -> None:
        """Put the keys of a run of messages.

        ``offsets`` and ``times`` (milliseconds) have one element per message, also for messages
        without a key. ``hashes`` and ``numbers`` have one element per key: the hash of the key, and
        the position of the key's message in ``offsets`` and ``times``.
        """
        if not len(offsets):
            return
        file = self._writable()
        # Skip messages that were indexed before. QUIRK: the last indexed message is indexed again
        # (test_index_writer.py::test_the_last_message_is_indexed_again).
        if offsets[0] < file.header.end_offset:
            new = offsets[numbers] >= file.header.end_offset
            hashes, numbers = hashes[new], numbers[new]
        at = 0
        while at < len(hashes):
            file = self._writable()
            stop = min(len(hashes), at + file.room)
            chosen = numbers[at:stop]
            file.put(hashes[at:stop], offsets[chosen], times[chosen])
            at = stop
        last_keyed = int(numbers[-1]) if len(numbers) else -1
        if last_keyed < len(offsets) - 1:
            # As in Java, even a message without a key creates the next file if the last file is
            # full.
            self._writable()

    def _writable(self) -> IndexFileWriter:
        before = self.last
        if before is not None and before.room > 0:
            return before
        file = self._make()
        made = IndexFileWriter(
            file,
            self.shape,
            None if before is None else before.header,
            counts_keys=self.counts_keys,
        )
        self.last = made
        if before is not None:
            self.filled(before)
        return made

    def _make(self) -> MappedFile:
        """Create a file with an unused name.

        A broker that is started on this store may create an index file before it fails to take the
        lock. The broker's file may have the same millisecond in its name as the new file.
        """
        while True:
            self._last_name = next_name(self._last_name, self.clock())
            try:
                return self._open(self._last_name, exclusive=True)
            except StoreUnavailable as error:
                # The file also exists if an earlier call created it, but could not map it. The
                # error is the same if a file has the name of the folder; no name would be unused.
                is_taken = isinstance(error.__cause__, FileExistsError)
                if not is_taken or not is_folder(self.folder):
                    raise

    def _open(self, name: str, *, exclusive: bool = False) -> MappedFile:
        size = self.shape.file_size
        return MappedFile(self.disk, self.folder / name, 0, size, exclusive=exclusive)

    def close(self) -> None:
        """Close the last file."""
        if self.last is not None:
            self.last.file.close()


def next_name(last: str, now_ms: int) -> str:
    """Return a name for a new file. Usually the name shows the current time. But if ``last``, the
    name of the newest file, shows this time or a later one, the new name shows the millisecond
    after ``last``.

    QUIRK: RocketMQ always uses the current time (``timeMillisToHumanString``). So two files of one
    millisecond get the same name, and if the clock is set back, a new file has a lower name than
    older files (test_index_writer.py::test_names_ascend).
    """
    moment = datetime.datetime.fromtimestamp(now_ms // 1000)
    name = f"{moment.strftime(_NAME_FORMAT)}{now_ms % 1000:03d}"
    if name > last and len(name) >= len(last):
        return name
    try:
        # Parse the name without a time zone. With a zone, an hour would occur twice when the clock
        # is set back in autumn.
        moment = datetime.datetime.strptime(last[:-3], _NAME_FORMAT)
        if len(last) != _NAME_DIGITS:
            raise ValueError(last)
    except ValueError:
        following = f"{int(last) + 1:0{len(last)}d}"
        return following if following > last else f"{last}0"
    moment += datetime.timedelta(milliseconds=int(last[-3:]) + 1)
    return f"{moment.strftime(_NAME_FORMAT)}{moment.microsecond // 1000:03d}"


# --------------------------------------------------------------------------------------------------
# Sync the index files, and restore index files that another program deletes.
#
# If a RocketMQ broker is started on this store, the broker deletes index files that are newer than
# the checkpoint, and then fails to take the lock. So logquarry makes a hard link to each index file
# that is newer than the checkpoint. If the broker deletes the file, logquarry restores it from the
# hard link (:mod:`logquarry.disk.name_guard`).


class IndexKeeper:
    """Writes and syncs the index files of a store. One thread writes; any thread may flush.

    ``sync_log`` is called before each write of the checkpoint. So if the checkpoint covers a
    message, the log cannot lose the message in a power cut.
    """

    def __init__(
        self,
        disk: Disk,
        root: Path,
        shape: IndexShape,
        checkpoint: CheckpointFile,
        clock: Callable[[], int],
        sync_log: Callable[[], object] = lambda: None,
        *,
        counts_keys: bool = False,
    ) -> None:
        folder = root / INDEX
        self._checkpoint = checkpoint
        self._sync_log = sync_log
        self._guard = NameGuard(disk)
        self._guard.restore([folder])
        self._guarded: IndexFileWriter | None = None
        self._filled: deque[IndexFileWriter] = deque()
        self.writer = IndexWriter(
            *(disk, folder, shape),
            clock=clock,
            filled=self._filled.append,
            counts_keys=counts_keys,
        )
        self.guard()

    def guard(self) -> None:
        """Make a hard link to the current file. The dispatcher calls this method after each run."""
        last = self.writer.last
        if last is not None and last is not self._guarded:
            self._guarded = last
            self._guard.guard(last.file.path)

    @property
    def held(self) -> frozenset[str]:
        """The names of the files that can still change, or are not synced yet. A name that was
        removed from the set is never added again.
        """
        last = self.writer.last
        held = list(self._filled)
        if last is not None:
            held.append(last)
        return frozenset(one.file.path.name for one in held)

    def check(self) -> None:
        """If another program has deleted index files, restore them from their hard links."""
        self._guard.check()

    def flush(self, least_pages: int = 0) -> None:
        """Sync and close full files; with ``least_pages`` 0, also sync the current file."""
        while self._filled:
            full = self._filled[0]
            self._sync_log()
            full.flush()
            self._guard.check()
            if full.header.end_timestamp > 0:
                self._checkpoint.index_timestamp = full.header.end_timestamp
                # Write the checkpoint before removing the hard link. From then on the file needs no
                # hard link, because a broker does not delete files that the checkpoint covers.
                self._checkpoint.flush()
            self._guard.release(full.file.path)
            # Remove the file from the list before closing it. Ctrl-C may arrive between these
            # lines, and the list must contain only open files.
            self._filled.popleft()
            full.file.close()
        last = self.writer.last
        if least_pages == 0 and last is not None:
            last.flush()

    def close(self) -> None:
        """Close the files without a sync."""
        try:
            self._guard.close()
        finally:
            for full in self._filled:
                full.file.close()
            self.writer.close()
