"""Audit of the index: compares headers, chains and entries of its files with the log. A chain is
the list of the entries of one slot: the slot leads to the newest entry, and each entry to the
previous one.

:class:`IndexAudit` finds every difference, for verify. :func:`index_fault` and :func:`file_fault`
find the first fault, for open and recover.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np

from logquarry.format import index
from logquarry.format.arrays import Bools, Int32, Int64
from logquarry.format.index import ENTRY, HEADER, SLOT, IndexHeader, IndexShape
from logquarry.log import codec
from logquarry.log.filesystem import FileView
from logquarry.log.follow import Followed
from logquarry.log.layout import StoreLayout
from logquarry.log.open_files import OpenFiles
from logquarry.log.store_files import INDEX
from logquarry.log.walk import Run
from logquarry.read.commit_log import CommitLog
from logquarry.read.index import Index
from logquarry.read.index_file import IndexFile
from logquarry.repair.audit.differences import SpanSet, and_more, names_ends
from logquarry.repair.audit.index_entries import (
    ENTRY_DTYPE,
    Entries,
    EntryAudit,
    EntryStream,
    IndexEntries,
    KeyCounter,
)
from logquarry.repair.findings import Finding, finding
from logquarry.text import counted, plural
from logquarry.write.index_writer import seconds_since

_CHUNK: Final = 1 << 22
_SLOT: Final = SLOT.dtype()

Slots = Int32


class IndexAudit:
    """Compares the index of a store with its log. ``known_chains`` contains the paths of the files
    whose chains a Spark task has already checked and found correct.
    """

    def __init__(self, layout: StoreLayout, known_chains: frozenset[str] = frozenset()) -> None:
        self.layout = layout
        self.entries = 0
        self._files = OpenFiles(layout)
        self._log = CommitLog(layout, files=self._files)
        self._index = Index(layout, files=self._files)
        # Read the headers before the log. A running writer appends a message to the log before it
        # adds the message's keys to the index, so the log has all messages of these headers.
        headers = [file.header for file in self._index.files]
        self._ranges = [(header.begin_offset, header.end_offset) for header in headers]
        self._numbers = {file.path: number for number, file in enumerate(self._index.files)}
        self._gaps = _gaps(headers, layout.commit_log.start)
        self._keys = KeyCounter([*self._ranges, *self._gaps])
        self._known_chains = known_chains
        self._has_keys = False
        self._log_start = layout.commit_log.start

    @cached_property
    def _stream(self) -> EntryStream:
        entries = IndexEntries(self._index.files, self._files, self._log_start)
        return EntryStream(entries, entries.start)

    def add(self, followed: Followed) -> None:
        """Compare the keys of the next messages with the next entries of the index."""
        self._has_keys = True
        hashes = followed.key_hashes
        if len(hashes) and not self._stream.is_broken:
            places = followed.requests.physical_offset[followed.key_numbers]
            self._stream.take(places, hashes)

    def is_next(self, start: int) -> bool:
        """Return whether ``start`` is the next entry to compare. After a difference, the result is
        always True, because no further entry is compared.
        """
        return self._stream.is_broken or self._stream.place == start

    def add_sound(self, stop: int) -> None:
        """Skip the next entries, up to ``stop``, because a Spark task has already compared them."""
        self._has_keys = True
        self._stream.place = stop

    @property
    def is_exact(self) -> bool:
        """Whether the index has exactly the entries of the log's keys, in the order of the log. The
        result is True even if the last keys of the log have no entries, and also if :meth:`add` was
        never called. If the result is False, the caller must read the log again, and call
        :meth:`count` for each run.
        """
        if not self._has_keys:
            return True
        return self._stream.is_through and not self._stream.entries.odd_headers

    def count(self, run: Run, has_key: Bools) -> None:
        """Count the keys of a run. :meth:`finish` compares this count with the number of keys in
        the index, to find missing keys.
        """
        self._keys.add(run, has_key)

    def finish(self, log_end: int, lost: SpanSet, last_keyed: int | None) -> Iterator[Finding]:
        """Yield all differences. Call this after the whole log is read.

        ``lost`` contains the parts of the log whose index entries are not checked. ``last_keyed``
        is the physical offset of the log's last message with keys.
        """
        files = self._index.files
        if not files:
            if last_keyed is not None:
                reason = "messages have keys, and a query by key reads the whole log"
                yield finding("index_missing", INDEX, 0, reason)
            return
        indexed = -1
        for file in files:
            header = file.header
            if header.entry_count > 1:
                indexed = max(indexed, header.end_offset)
            yield from self._check_file(file, header, log_end, lost)
        # Skip this check if a header is wrong, because the range of messages in the header may be
        # wrong too.
        if self._has_keys and not self.is_exact and not self._stream.entries.odd_headers:
            yield from self._gap_differences()
        if last_keyed is not None and last_keyed > indexed:
            reason = f"has keys up to {indexed}, and the log has keys up to {last_keyed}"
            yield finding("index_behind", files[-1].path, 0, reason)
        elif self._has_keys and self.is_exact and self._stream.missing:
            missing = plural(self._stream.missing, "key")
            reason = f"lacks {missing} of its last message at {indexed}"
            yield finding("index_behind", files[-1].path, 0, reason)

    def contradicted(self, log_end: int, lost: SpanSet) -> Int64:
        """Return the physical offsets of the messages that an index entry contradicts.

        An entry contradicts a message if it points to the message, but no key of the message has
        the entry's hash. The arguments are those of :meth:`finish`.
        """
        found = [np.empty(0, np.int64)]
        for file in () if self.is_exact else self._index.files:
            view, header = self._files.view(file.path), file.header
            size = 0 if view is None else view.size
            is_sound = header.entry_count > 1 and self._header_fault(file, header, size) is None
            if is_sound and file.shape is not None:
                audit = EntryAudit(self.layout, log_end, lost, (header.begin_offset, -1))
                audit.check(self._entries(file, file.shape, header.entry_count - 1))
                found += audit.contradicted
        return np.concatenate(found)

    def _check_file(
        self, file: IndexFile, header: IndexHeader, log_end: int, lost: SpanSet
    ) -> Iterator[Finding]:
        view = self._files.view(file.path)
        size = 0 if view is None else view.size
        count = header.entry_count - 1
        shape = file.shape
        may_fit = count * ENTRY.size + HEADER.size <= size
        if count and shape is None and may_fit and header.begin_offset <= header.end_offset:
            reason = "slots and entries are unknown: set maxHashSlotNum and maxIndexNum in a config"
            yield finding("index_shape", file.path, 0, reason)
            return
        fault = self._header_fault(file, header, size)
        if fault is not None:
            yield finding("index_header", file.path, 0, fault, HEADER.size)
        if fault is not None or not count:
            return
        assert shape is not None
        fault = None if view is None else ends_fault(view, shape, header)
        fault = fault or times_fault(self._log, header)
        # A running broker writes the fields of a header one after the other, so report the fault
        # only if the header is still the same.
        if fault is not None and header == file.header:
            yield finding("index_header", file.path, 0, fault, HEADER.size)
        self.entries += count
        is_compared = self._has_keys and self.is_exact
        if is_compared and file.path in self._known_chains:
            return
        entries = self._entries(file, shape, count)
        if file.path not in self._known_chains:
            yield from self._chain_differences(file, shape, entries)
        if not is_compared:
            yield from self._entry_differences(file, shape, entries, log_end, lost)

    def _gap_differences(self) -> Iterator[Finding]:
        for (begin, end), keys in zip(
            self._gaps, self._keys.keys[len(self._ranges) :], strict=True
        ):
            if keys:
                first = max(begin, self._log_start)
                reason = (
                    f"{_unindexed(keys, first, end)}: an index "
                    "file is missing, or the broker ran without an index"
                )
                yield finding("index_gap", INDEX, 0, reason)

    def _header_fault(self, file: IndexFile, header: IndexHeader, size: int) -> str | None:
        count = header.entry_count - 1
        if not count:
            if size < HEADER.size:
                return f"{counted(size, 'byte is', 'bytes are')} too few for a header"
            return _NOT_COUNTED if self._has_bytes(file, size) else None
        if file.shape is None:
            return (
                f"{counted(count, 'entry', 'entries')} from offset {header.begin_offset} to "
                f"{header.end_offset} in {counted(size, 'byte')}"
            )
        if file.shape.entry_position(0) + header.entry_count * ENTRY.size > size:
            entries = counted(header.entry_count, "entry does", "entries do")
            return f"{entries} not fit into {size} bytes"
        return None

    def has_right_chains(self, path: str) -> bool:
        """Whether a file has all entries that its header counts, in the right chains."""
        file = next((file for file in self._index.files if file.path == path), None)
        count = 0 if file is None else file.header.entry_count - 1
        if file is None or file.shape is None or count <= 0:
            return False
        entries = self._entries(file, file.shape, count)
        if len(entries) < count:
            return False
        return not any(self._chain_differences(file, file.shape, entries))

    def _entries(self, file: IndexFile, shape: IndexShape, count: int) -> Entries:
        data = self._files.read(file.path, shape.entry_position(1), count * ENTRY.size)
        return np.frombuffer(data, ENTRY_DTYPE, len(data) // ENTRY.size)

    def _has_bytes(self, file: IndexFile, size: int) -> bool:
        for start in range(HEADER.size, size, _CHUNK):
            data = self._files.read(file.path, start, min(_CHUNK, size - start))
            if np.frombuffer(data, np.uint8).any():
                return True
        return False

    def _chain_differences(
        self, file: IndexFile, shape: IndexShape, entries: Entries
    ) -> Iterator[Finding]:
        data = self._files.read(file.path, HEADER.size, shape.slots * SLOT.size)
        slots = np.frombuffer(data, _SLOT)["newest"]
        kernels = codec.kernels_if_worth(len(entries))
        if kernels is None:
            newest, found = _chains_reference(entries, slots)
        else:
            newest = np.zeros(len(slots), np.int32)
            places = entries.ctypes.data, len(entries), slots.ctypes.data, len(slots)
            found = _Chains(*kernels.check_chains(*places, newest))
        if found.wrong:
            number = found.first + 1
            yield finding(
                "index_chain",
                file.path,
                shape.entry_position(number),
                f"entry {number} leads to {entries['previous'][found.first]}, but the previous "
                f"entry of its slot is {found.expected}" + and_more(found.wrong),
                found.wrong * ENTRY.size,
            )
        if found.wrong_slots:
            slot = found.first_slot
            yield finding(
                "index_chain",
                file.path,
                HEADER.size + slot * SLOT.size,
                f"slot {slot} leads to entry {slots[slot]}, but its newest is {newest[slot]}"
                + and_more(found.wrong_slots),
                found.wrong_slots * SLOT.size,
            )

    def _entry_differences(
        self,
        file: IndexFile,
        shape: IndexShape,
        entries: Entries,
        log_end: int,
        lost: SpanSet,
    ) -> Iterator[Finding]:
        number = self._numbers[file.path]
        begin, end = self._ranges[number]
        audit = EntryAudit(self.layout, log_end, lost, (begin, end))
        audit.check(entries)
        for group in audit.wrong.values():
            yield group.at(file.path, shape.entry_position(group.number), ENTRY.size)
        # ``audit.keys`` does not count the keys of wrong entries. Subtract these keys too:
        # otherwise, they would be reported a second time, as missing keys.
        reported = sum(group.count for group in audit.wrong.values())
        missing = int(self._keys.keys[number]) - audit.keys - reported
        is_right = file.path not in self._stream.entries.odd_headers
        if is_right and audit.is_ordered and missing > 0:
            reason = _unindexed(missing, begin, end)
            yield finding("index_gap", file.path, 0, reason)


def _gaps(headers: list[IndexHeader], log_start: int) -> list[tuple[int, int]]:
    """Return the parts of the log that lie before the first index file, or between two index files.
    The result is empty if a header is invalid.
    """
    spans = [(one.begin_offset, one.end_offset) for one in headers if one.entry_count > 1]
    ends = [log_start - 1, *(end for _, end in spans)]
    gaps = [(end, begin) for end, (begin, _) in zip(ends, spans, strict=False)]
    is_sound = all(begin <= end for begin, end in (*spans, *gaps[1:]))
    return [(begin, end) for begin, end in gaps if begin < end] if is_sound else []


class _Chains(NamedTuple):
    """The number of wrong entries and of wrong slots in an index file, and the first of each. The
    entry at position ``first`` should point to the entry with number ``expected``.
    """

    wrong: int
    first: int
    expected: int
    wrong_slots: int
    first_slot: int


def _chains_reference(entries: Entries, slots: Slots) -> tuple[Slots, _Chains]:
    newest = np.zeros(len(slots), np.int32)
    wrong: list[tuple[int, int]] = []
    for number, entry in enumerate(entries):
        slot = abs(int(entry["key_hash"])) % len(slots)
        if entry["previous"] != newest[slot]:
            wrong.append((number, int(newest[slot])))
        newest[slot] = number + 1
    wrong_slots = np.flatnonzero(slots != newest).tolist()
    first, expected = wrong[0] if wrong else (-1, -1)
    first_slot = wrong_slots[0] if wrong_slots else -1
    return newest, _Chains(len(wrong), first, expected, len(wrong_slots), first_slot)


# ----------------------------------------------------------------------- the first fault of a file
_NOT_COUNTED: Final = "counts no entries, but some follow"


def index_fault(layout: StoreLayout, shape: IndexShape, *, log_end: int) -> str | None:
    """Return the first wrong header of an index as text, or None. The function reads only the
    header, the first and the last entry of each file, and the messages of these two entries.
    """
    log = CommitLog(layout)
    last: IndexHeader | None = None
    for entry in layout.index_files:
        path = f"{INDEX}/{entry.name}"
        file = layout.open_file(path)
        data = file.window(0, min(entry.size, HEADER.size))
        fault = _header_fault(data, entry.size, shape, log_end)
        if fault is None:
            header = index.decode_header(data)
            fault = sequence_fault(log, layout.commit_log.start, header, last)
            fault = fault or ends_fault(file, shape, header)
            last = header
        if fault is not None:
            return f"{layout.filesystem.full_path(path)}: {fault}"
    return None


def file_fault(file: FileView, size: int, shape: IndexShape, log_end: int) -> str | None:
    """Return why the header or the entries of an index file are wrong, as text, or None."""
    data = file.window(0, size)
    fault = _header_fault(data, size, shape, log_end)
    if fault is not None:
        return fault
    header = index.decode_header(data)
    if header.entry_count == 1:
        return _NOT_COUNTED if np.frombuffer(data, np.uint8)[HEADER.size : size].any() else None
    entries = np.frombuffer(data, ENTRY_DTYPE, header.entry_count - 1, shape.entry_position(1))
    if (np.diff(entries["physical_offset"].astype(np.int64)) < 0).any():
        return "its entries are not in the log's order"
    fault = ends_fault(file, shape, header)
    if fault is not None:
        return fault
    previous = entries["previous"]
    if (previous >= np.arange(1, len(entries) + 1)).any() or (previous < 0).any():
        return "one of its chains leads to a later entry"
    return None


def _header_fault(data: memoryview, size: int, shape: IndexShape, log_end: int) -> str | None:
    if size != shape.file_size:
        return f"{counted(size, 'byte')} instead of {shape.file_size}"
    header = index.decode_header(data)
    if not 1 <= header.entry_count <= shape.entries:
        return f"its header counts {header.entry_count} entries of at most {shape.entries}"
    if header.entry_count == 1 and header.slots_used > 0:
        return _NOT_COUNTED
    if header.entry_count > 1 and not 0 <= header.end_offset < log_end:
        return f"its last key is of a message at {header.end_offset}, and the log ends at {log_end}"
    return None


def ends_fault(file: FileView, shape: IndexShape, header: IndexHeader) -> str | None:
    """Return the fault, as text, if a header contradicts its file's first or last entry; else None.

    ``header`` must not count more entries than the file has.
    """
    if header.entry_count <= 1:
        return None
    first, last = (
        index.decode_entry(file.window(shape.entry_position(number), ENTRY.size), 0)
        for number in (1, header.entry_count - 1)
    )
    if not names_ends(header, first.physical_offset, last.physical_offset):
        return (
            "its header gives another first or last message than its entries: the header gives the "
            f"physical offsets {header.begin_offset} and {header.end_offset}, and the entries give "
            f"{first.physical_offset} and {last.physical_offset}"
        )
    # Do not check a file with only one entry: a file's first entry contains the seconds since the
    # end time of the previous file.
    end = np.array([header.end_timestamp])
    expected = int(seconds_since(end, header.begin_timestamp)[0])
    if header.entry_count > 2 and last.seconds != expected:
        return (
            f"its header gives {counted(expected, 'second')} between its first and its last "
            f"message, but its last entry gives {last.seconds}"
        )
    return None


def sequence_fault(
    log: CommitLog, log_start: int, header: IndexHeader, before: IndexHeader | None
) -> str | None:
    """Return, as text, why a file does not fit the log or the previous index file, or None."""
    if header.entry_count > 1:
        if header.end_offset >= log_start and _stored_at(log, header.end_offset) is None:
            return f"the log has no message at {header.end_offset}, where its last key points"
        fault = times_fault(log, header)
        if fault is not None:
            return fault
    if before is not None and header.end_offset < before.end_offset:
        return "it ends before the previous file does"
    return None


def times_fault(log: CommitLog, header: IndexHeader) -> str | None:
    """Return a description of the fault if a store time in a header differs from the store time of
    its message in the log; else None.
    """
    for which, offset, time in (
        ("first", header.begin_offset, header.begin_timestamp),
        ("last", header.end_offset, header.end_timestamp),
    ):
        stored = _stored_at(log, offset)
        if stored is not None and stored != time:
            return (
                f"its header gives the store time {time} for its {which} message, but the message "
                f"at {offset} has the store time {stored}"
            )
    return None


def _stored_at(log: CommitLog, offset: int) -> int | None:
    """Return the store time of the message at a physical offset; None if the log has none there."""
    found = log.sound_frame_at(offset, check_crc=False)
    return None if found is None else found.store_timestamp


def entries_of_last(data: memoryview, shape: IndexShape, header: IndexHeader) -> int:
    """Return how many entries at the file's end belong to keys of the file's last message.

    The entries of this message's other keys can be in the next file.
    """
    number = header.entry_count
    while number > 1:
        entry = index.decode_entry(data, shape.entry_position(number - 1))
        if entry.physical_offset != header.end_offset:
            break
        number -= 1
    return header.entry_count - number


def _unindexed(keys: int, begin: int, end: int) -> str:
    has = "has" if keys == 1 else "have"
    return f"{counted(keys, 'key')} of messages between {begin} and {end} {has} no entry"
