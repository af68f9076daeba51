"""The index of keys, written (``IndexService.buildIndex``, ``IndexFile.putKey`` of 4.9.3).

One thread writes: the dispatcher. Many keys are put in at once, with arrays; the entries, chains
and headers that come out are those of one key after the other.

Guarantees: a file's header is written after its entries, so that a reader of a half-written batch
sees the state before it. File names are distinct and ascend, whatever the clock does.
"""

from __future__ import annotations

import datetime
import logging
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from logquarry.disk.disk import Disk
from logquarry.disk.mapped_file import MappedFile
from logquarry.disk.page_file import CheckpointFile
from logquarry.disk.queue_folders import NameGuard
from logquarry.errors import StoreUnavailable
from logquarry.format import index, java
from logquarry.format.index import ENTRY, HEADER, IndexHeader, IndexShape
from logquarry.log import codec
from logquarry.log.layout import INDEX

logger = logging.getLogger(__name__)

Int64 = npt.NDArray[np.int64]

_ENTRY_DTYPE: Final = ENTRY.dtype()
_SLOT_DTYPE: Final = np.dtype(">i4")
_NAME_FORMAT: Final = "%Y%m%d%H%M%S"
_NAME_DIGITS: Final = 17


class IndexFileWriter:
    """One index file that keys are put into.

    Args:
        file: the file, as large as ``shape`` says.
        shape: its slots and entries.
        before: the header of the file before it, whose end a new file begins with.
        counts_keys: whether the header counts keys and not chains (3.x).

    Attributes:
        header: as it is now.
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
        self.header = index.decode_header(file.buffer)
        # All of the file counts as written: a flush takes whatever has changed in it.
        file.advance(file.room)
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
        """Keys that can still be put in."""
        return self.shape.entries - self.header.entry_count

    def put(self, hashes: Int64, offsets: Int64, times: Int64) -> None:
        """Put in keys, no more than there is room for.

        Args:
            hashes: of the keys.
            offsets: physical offsets of their messages.
            times: store times of these, in milliseconds.
        """
        count = len(hashes)
        if not count:
            return
        before = self.header
        header = before
        if header.entry_count <= 1:
            header = header._replace(begin_timestamp=int(times[0]), begin_offset=int(offsets[0]))
        if codec.kernels_enabled():
            begun = self._put_fast(hashes, offsets, times, header.begin_timestamp)
        else:
            begun = self._put_plain(hashes, offsets, times, header.begin_timestamp)
        if before.entry_count <= 1:
            # QUIRK: the first entry counts from the end of the file before, which the header
            # still names as its begin (test_replay.py: clean-restart/base).
            entries = self._entries(before.entry_count, 1)
            entries["seconds"] = _seconds(times[:1], before.begin_timestamp)
        self.header = header._replace(
            end_timestamp=int(times[-1]),
            end_offset=int(offsets[-1]),
            slots_used=header.slots_used + (count if self._counts_keys else begun),
            entry_count=header.entry_count + count,
        )
        self._write_header()

    def _entries(self, number: int, count: int) -> npt.NDArray[np.void]:
        """Some entries of the file, to be written."""
        position = self.shape.entry_position(number)
        entries: npt.NDArray[np.void] = np.frombuffer(
            self.file.buffer, _ENTRY_DTYPE, count, position
        )
        return entries

    def _put_plain(self, hashes: Int64, offsets: Int64, times: Int64, begin: int) -> int:
        """Write the entries and their chains: how many chains are begun."""
        number, count = self.header.entry_count, len(hashes)
        entries = self._entries(number, count)
        entries["key_hash"] = hashes
        entries["physical_offset"] = offsets
        entries["seconds"] = _seconds(times, begin)
        table = np.frombuffer(self.file.buffer, _SLOT_DTYPE, self.shape.slots, HEADER.size)
        numbers = np.arange(number, number + count, dtype=np.int64)
        entries["previous"], begun = _chain(table, np.abs(hashes) % self.shape.slots, numbers)
        return begun

    def _put_fast(self, hashes: Int64, offsets: Int64, times: Int64, begin: int) -> int:
        """The same by a kernel, one entry after the other."""
        kernels = codec.kernels()
        assert kernels is not None
        # The view keeps the map while the kernel writes.
        view: npt.NDArray[np.uint8] = np.frombuffer(self.file.buffer, np.uint8)
        assert len(view) >= self.shape.entry_position(self.header.entry_count + len(hashes))
        address, number = view.ctypes.data, self.header.entry_count
        begun: int = kernels.put_index_keys(
            *(address + HEADER.size, self.shape.slots),
            *(address + self.shape.entry_position(number), number),
            *(begin, hashes, offsets, times),
        )
        return begun

    def flush(self, least_pages: int = 0) -> None:
        """Wait until all of it is on the disk, whatever ``least_pages`` says.

        Raises:
            StoreUnavailable: if that failed, now or before.
        """
        self.file.flushed = 0
        self.file.flush()

    def _write_header(self, count_on_disk: int | None = None) -> None:
        header = self.header
        if count_on_disk is not None:
            header = header._replace(entry_count=count_on_disk)
        self.file.buffer[: HEADER.size] = index.encode_header(header)


def _chain(table: npt.NDArray[np.int32], slots: Int64, numbers: Int64) -> tuple[Int64, int]:
    """Put new entries in front of their chains.

    Returns:
        The entry behind each new one, and how many chains are begun.
    """
    order = np.argsort(slots, kind="stable")
    ordered, sorted_numbers = slots[order], numbers[order]
    changes = ordered[1:] != ordered[:-1]
    is_first, is_last = np.append(True, changes), np.append(changes, True)
    behind = np.empty(len(slots), np.int64)
    behind[1:] = sorted_numbers[:-1]
    found = table[ordered[is_first]].astype(np.int64)
    # What a slot holds that is no earlier entry's number counts as nothing.
    found[(found <= 0) | (found > numbers[0])] = 0
    behind[is_first] = found
    table[ordered[is_last]] = sorted_numbers[is_last]
    previous = np.empty(len(slots), np.int64)
    previous[order] = behind
    return previous, int((found == 0).sum())


def _seconds(times: Int64, begin: int) -> Int64:
    """Seconds after a file's begin, as far as an entry can say them."""
    if begin <= 0:
        return np.zeros(len(times), np.int64)
    return np.clip((times - begin) // 1000, 0, java.INT_MAX)


class IndexWriter:
    """The index files of a store, and the one that is written to.

    Args:
        disk: what they are on.
        folder: where they are.
        shape: slots and entries of new files, and of those that are there.
        clock: names new files, in milliseconds.
        filled: told of each file that is full (``IndexService.flush`` syncs it).
        counts_keys: see :class:`IndexFileWriter`.

    Attributes:
        last: the file that is written to, None while there is none.
    """

    def __init__(
        self,
        disk: Disk,
        folder: Path,
        shape: IndexShape,
        *,
        clock: Callable[[], int],
        filled: Callable[[IndexFileWriter], None] = lambda _: None,
        counts_keys: bool = False,
    ) -> None:
        self._counts_keys = counts_keys
        self._disk = disk
        self._folder = folder
        self._shape = shape
        self._clock = clock
        self._filled = filled
        names = [name for name in disk.names_in(folder) if name.isascii() and name.isdigit()]
        self._last_name = max(names, default="")
        self.last: IndexFileWriter | None = None
        if self._last_name:
            file = self._open(self._last_name)
            self.last = IndexFileWriter(file, shape, counts_keys=counts_keys)

    def put(self, offsets: Int64, times: Int64, hashes: Int64, numbers: Int64) -> None:
        """Put in the keys of a run of messages.

        Args:
            offsets: physical offset of each message, also of those without a key.
            times: store time of each, in milliseconds.
            hashes: of the keys, in the messages' order.
            numbers: the index of each key's message.

        Raises:
            StoreUnavailable: if a file cannot be made.
        """
        if not len(offsets):
            return
        file = self._writable()
        # What was indexed before is passed over. QUIRK: but for the very last message, which is
        # indexed again (test_index_writer.py::test_the_last_message_is_indexed_again).
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
            # Any message makes the next file where the last one is full.
            self._writable()

    def _writable(self) -> IndexFileWriter:
        """The last file, or a new one where it is full or none is there."""
        before = self.last
        if before is not None and before.room > 0:
            return before
        file = self._make()
        made = IndexFileWriter(
            file,
            self._shape,
            None if before is None else before.header,
            counts_keys=self._counts_keys,
        )
        self.last = made
        if before is not None:
            self._filled(before)
        return made

    def _make(self) -> MappedFile:
        """A new file, of a name that nobody has.

        A Java store that is opened on this one makes files of its own before the lock refuses it,
        in the same millisecond, it may be.
        """
        while True:
            self._last_name = next_name(self._last_name, self._clock())
            try:
                return self._open(self._last_name, exclusive=True)
            except StoreUnavailable as error:
                # Of one that was made and cannot be mapped the name is taken too.
                if not isinstance(error.__cause__, FileExistsError):
                    raise

    def _open(self, name: str, *, exclusive: bool = False) -> MappedFile:
        size = self._shape.file_size
        return MappedFile(self._disk, self._folder / name, 0, size, exclusive=exclusive)

    def close(self) -> None:
        """Close the last file."""
        if self.last is not None:
            self.last.file.close()


def next_name(last: str, now_ms: int) -> str:
    """The name of a new file: the time (``timeMillisToHumanString``), but behind ``last``.

    QUIRK: RocketMQ takes the time as it is: two files of one millisecond are one file, and one
    after the clocks were set back stands before the older ones
    (test_index_writer.py::test_names_ascend).
    """
    moment = datetime.datetime.fromtimestamp(now_ms // 1000)
    name = f"{moment.strftime(_NAME_FORMAT)}{now_ms % 1000:03d}"
    if name > last and len(name) >= len(last):
        return name
    try:
        # Without a time zone: no hour is there twice.
        moment = datetime.datetime.strptime(last[:-3], _NAME_FORMAT)
        if len(last) != _NAME_DIGITS:
            raise ValueError(last)
    except ValueError:
        following = f"{int(last) + 1:0{len(last)}d}"
        return following if following > last else f"{last}0"
    moment += datetime.timedelta(milliseconds=int(last[-3:]) + 1)
    return f"{moment.strftime(_NAME_FORMAT)}{moment.microsecond // 1000:03d}"


# --------------------------------------------------------------------------------------------------
# The index of a store that is written: its files to the disk, and back when they are lost.
#
# A file that is full is synced and closed by the thread that flushes, and only then the checkpoint
# says so (``IndexService.flush``). The one that is written to is synced with the thorough flushes.
#
# A Java store that is opened on this one deletes index files that are newer than the checkpoint,
# before the lock refuses it: each that the checkpoint does not cover has a second name, and comes
# back (:mod:`logquarry.disk.queue_folders`).


class IndexKeeper:
    """Keeps the index files of a store. Written by one thread, flushed by any.

    Args:
        disk: what they are on.
        root: the store.
        shape: slots and entries of each.
        checkpoint: gets the time up to which the index is on the disk.
        clock: names new files, in milliseconds.
        sync_log: brings the log to the disk. The checkpoint is not to say that the index has what
            the log may lose.
        counts_keys: see :class:`~logquarry.write.index_writer.IndexFileWriter`.

    Attributes:
        writer: what the dispatcher writes to.
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
        # Users flush beside the thread that does it now and then.
        self.writer = IndexWriter(
            *(disk, folder, shape),
            clock=clock,
            filled=self._filled.append,
            counts_keys=counts_keys,
        )
        self.guard()

    def guard(self) -> None:
        """Give the file that is written to its second name; after each run of the dispatcher."""
        last = self.writer.last
        if last is not None and last is not self._guarded:
            self._guarded = last
            self._guard.guard(last.file.path)

    @property
    def held(self) -> frozenset[str]:
        """Names of the files that are written to, or not known to be on the disk yet.

        One that is not among them never is again.
        """
        last = self.writer.last
        held = list(self._filled)
        if last is not None:
            held.append(last)
        return frozenset(one.file.path.name for one in held)

    def check(self) -> None:
        """Give files that somebody deleted their names back."""
        self._guard.check()

    def flush(self, least_pages: int = 0) -> None:
        """Sync and close what is full; with 0 also sync the file that is written to.

        Raises:
            StoreUnavailable: if a sync failed, now or before.
        """
        while self._filled:
            full = self._filled[0]
            self._sync_log()
            full.flush()
            self._guard.check()
            if full.header.end_timestamp > 0:
                self._checkpoint.index_timestamp = full.header.end_timestamp
                # Before the second name goes: then Java lets the file be.
                self._checkpoint.flush()
            self._guard.release(full.file.path)
            # Ctrl-C may come between: what is in the list is open.
            self._filled.popleft()
            full.file.close()
        last = self.writer.last
        if least_pages == 0 and last is not None:
            last.flush()

    def close(self) -> None:
        """Close the files; what is not flushed is with the kernel."""
        self._guard.close()
        for full in self._filled:
            full.file.close()
        self.writer.close()
