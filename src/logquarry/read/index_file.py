"""Reads index files (``IndexFile``): their headers, their entries and the messages that the entries
point to. Also infers the shape of a file, that is, its number of slots and its number of entries.

The entries of a slot form a chain, from the newest to the oldest. A query follows a chain only to
older entries, so it ends even if a pointer is damaged. A read raises no error for damaged bytes. If
a file is too short, the entries after its end are treated as missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Final

import numpy as np

from logquarry.errors import StoreNotFound
from logquarry.format import index, java
from logquarry.format.arrays import SIZE, Int32, Int64, Records
from logquarry.format.frame import FIXED_SIZE_V1
from logquarry.format.index import ENTRY, HEADER, SLOT, IndexHeader, IndexShape
from logquarry.format.queue_entry import QueueEntry
from logquarry.log.filesystem import FileView
from logquarry.log.layout import StoreLayout
from logquarry.log.open_files import OpenFiles
from logquarry.log.store_files import INDEX, warn_once
from logquarry.log.walk import LogReader, Run, Span

_WORD: Final = 4
_ENTRY_WORDS: Final = ENTRY.size // _WORD
_CHUNK: Final = 4 << 20
_MOST_CHECKED: Final = 4_096
_MOST_GUESSES: Final = 20_000
_LARGEST_SEARCHED: Final = 512 << 20
_ENOUGH: Final = 0.9
"""If no number of slots makes all entries valid, a number of slots is accepted if it makes at least
this share of the entries valid (0 to 1).
"""

_ENTRIES_A_SLOT: Final = index.DEFAULT_SHAPE.entries // index.DEFAULT_SHAPE.slots

_ENTRY_DTYPE: Final = ENTRY.dtype()
_SLOT_DTYPE: Final = np.dtype(">i4")


def infer_shape(view: FileView, header: IndexHeader) -> IndexShape | None:
    """Find the shape (slots, entries) of an index file from its contents; None if unknown.

    If the file has the size of RocketMQ's default shape, this shape is assumed. Any other size
    alone does not determine the shape. Two further facts determine it: the last nonzero byte
    belongs to the last entry, and each entry must be in the chain of its slot. The header has the
    number of the last entry, and the number of slots determines the slot of an entry. The shape of
    a file without entries cannot be determined.
    """
    if view.size == index.DEFAULT_SHAPE.file_size:
        return index.DEFAULT_SHAPE
    room = view.size - HEADER.size
    if header.entry_count <= 1 or room < SLOT.size + ENTRY.size or view.size > _LARGEST_SEARCHED:
        return None
    data = view.window(0, view.size)
    # With a wrong number of slots, almost no entry is valid. So a candidate for the number of slots
    # is right if it makes most entries valid, even if the file is damaged.
    enough: int | None = None
    for slots in _guesses(data, header):
        share = _share_that_fits(data, header, slots)
        if share == 1:
            return _shape_of(room, slots)
        if enough is None and share >= _ENOUGH:
            enough = slots
    return None if enough is None else _shape_of(room, enough)


def _shape_of(room: int, slots: int) -> IndexShape:
    return IndexShape(slots, (room - slots * SLOT.size) // ENTRY.size)


def kept_shape(layout: StoreLayout) -> IndexShape | None:
    """Return the index shape that a writer recorded in the store; None if none is recorded."""
    slots, entries = (layout.kept_settings.get(n) for n in ("max_hash_slot_num", "max_index_num"))
    return IndexShape(slots, entries) if slots and entries else None


def likely_shape(size: int) -> IndexShape:
    """The most probable shape of index files without entries. RocketMQ's default has four entries
    per slot, so this shape has about four too.
    """
    room = max(size - HEADER.size, SLOT.size + ENTRY.size)
    slots = max(1, room // (SLOT.size + _ENTRIES_A_SLOT * ENTRY.size))
    words = room // _WORD
    slots += (words - slots) % _ENTRY_WORDS
    return IndexShape(slots, (words - slots) // _ENTRY_WORDS)


def _guesses(data: memoryview, header: IndexHeader) -> Iterator[int]:
    """Yield the possible numbers of slots for the file's size, the most probable number first."""
    words = (len(data) - HEADER.size) // _WORD
    last = header.entry_count - 1
    most = words - _ENTRY_WORDS * header.entry_count
    # After the header, a file consists of slots (one word each) and entries (five words each), so
    # its size determines the number of slots modulo five.
    remainder = words % _ENTRY_WORDS

    def from_last_word(word: int) -> int:
        """Return the number of slots that the file has if its last entry contains this word.

        ``word`` is the number of a word after the header.
        """
        before = word - last * _ENTRY_WORDS
        return before - (before - remainder) % _ENTRY_WORDS

    def guesses() -> Iterator[int]:
        word = _last_nonzero_word(data)
        if word is not None:
            yield from_last_word(word)
        # The last nonzero word may belong to an entry that a writer has added but not counted in
        # the header yet. So also search the file for the header's end offset: the last entry
        # contains this physical offset. Each place with these bytes can be the last entry.
        yield from map(from_last_word, _words_with(data, header.end_offset))

    yield from (slots for slots in guesses() if 1 <= slots <= most)
    # The header counts used slots. Usually, the number of slots is not smaller than this count, so
    # search from the count on first. But the number of slots can be smaller than the count: before
    # 4.7, RocketMQ counted keys in this field, and a later version adds its used slots to them.
    stop = most + 1
    for least in (header.slots_used, 1):
        first = max(1, min(least, most))
        first += (remainder - first) % _ENTRY_WORDS
        if (stop - 1 - first) // _ENTRY_WORDS < _MOST_GUESSES:
            yield from range(first, stop, _ENTRY_WORDS)
            stop = first


def _last_nonzero_word(data: memoryview) -> int | None:
    stop = HEADER.size + (len(data) - HEADER.size) // _WORD * _WORD
    while stop > HEADER.size:
        start = max(HEADER.size, stop - _CHUNK)
        # A writer may change the file during the search, and flatnonzero fails if its input
        # changes. The comparison with 0 makes a new array, which does not change.
        found = np.flatnonzero(np.frombuffer(data[start:stop], np.int32) != 0)
        if len(found):
            return (start - HEADER.size) // _WORD + int(found[-1])
        stop = start
    return None


def _words_with(data: memoryview, offset: int) -> Iterator[int]:
    if offset == 0:
        return
    stop = HEADER.size + (len(data) - HEADER.size) // _WORD * _WORD
    words = np.frombuffer(data[HEADER.size : stop], ">u4")
    found = (words[:-1] == (offset >> 32) & 0xFFFFFFFF) & (words[1:] == offset & 0xFFFFFFFF)
    yield from np.flatnonzero(found)[-64:].tolist()


def _share_that_fits(data: memoryview, header: IndexHeader, slots: int) -> float:
    """Share (0 to 1) of the entries that are valid if the file has this number of slots."""
    count = header.entry_count - 1
    start = HEADER.size + slots * SLOT.size
    entries = np.frombuffer(data, _ENTRY_DTYPE, count + 1, start)
    ends = [
        not entries[0].tobytes().strip(b"\0"),
        entries["physical_offset"][1] == header.begin_offset,
        entries["physical_offset"][count] == header.end_offset,
    ]
    if sum(ends) < 2:
        return 0.0
    table = np.frombuffer(data, _SLOT_DTYPE, slots, HEADER.size)
    head = np.arange(1, min(count, _MOST_CHECKED) + 1)
    tail = np.arange(max(1, count + 1 - _MOST_CHECKED), count + 1)
    share = min(_share_chained(entries, table, numbers, header) for numbers in (head, tail))
    return share if all(ends) else min(share, _ENOUGH)


def _share_chained(
    entries: Records,
    table: Int32,
    numbers: Int64,
    header: IndexHeader,
) -> float:
    """Return the share (0 to 1) of the entries ``numbers`` that are in the chain of their slot. For
    such an entry, the slot points to this entry or to a newer entry. The entry itself points to an
    older entry of the same slot, or to no entry.
    """
    some = entries[numbers]
    offsets, previous = some["physical_offset"], some["previous"].astype(np.int64)
    # Ignore an entry of zeros, because it was never written. It would look like an entry of slot 0.
    sound = (offsets > 0) | (some["key_hash"] != 0) | (some["seconds"] != 0)
    sound &= (offsets >= header.begin_offset) & (offsets <= header.end_offset)
    sound &= (some["seconds"] >= 0) & (previous >= 0) & (previous < numbers)
    slots = np.abs(some["key_hash"].astype(np.int64)) % len(table)
    sound &= table[slots] >= numbers
    before = entries["key_hash"][np.where(sound, previous, 0)].astype(np.int64)
    sound &= (previous == 0) | (np.abs(before) % len(table) == slots)
    return float(sound.mean())


class IndexFile:
    """One index file (``IndexFile``)."""

    def __init__(self, path: str, layout: StoreLayout, files: OpenFiles) -> None:
        self.path = path
        self._layout = layout
        self._reader = files

    @property
    def header(self) -> IndexHeader:
        """The header, read again at each access. If the file is too short, missing bytes are
        treated as zeros.
        """
        # When Java opens a file that is too short, it extends the file with zeros.
        data = bytes(self._reader.read(self.path, 0, HEADER.size))
        return index.decode_header(data.ljust(HEADER.size, b"\0"))

    @cached_property
    def shape(self) -> IndexShape | None:
        """The shape from the settings, else from the contents, else from the record in the store.

        None if it is unknown.
        """
        stated = self._layout.config.index_shape
        if stated is not None:
            return stated
        view = self._reader.view(self.path)
        if view is None:
            return None
        kept = kept_shape(self._layout)
        return infer_shape(view, self.header) or (
            kept if kept is not None and kept.file_size == view.size else None
        )

    @property
    def is_empty(self) -> bool:
        """Whether the file has no key."""
        return self.header.entry_count <= 1

    @property
    def is_usable(self) -> bool:
        """Whether keys can be found in the file."""
        return self.is_empty or self.shape is not None

    def is_time_matched(self, begin: int, end: int) -> bool:
        """Whether the file can have keys of messages stored between ``begin`` and ``end``."""
        header = self.header
        first, last = header.begin_timestamp, header.end_timestamp
        if begin < first and end > last:
            return True
        return first <= begin <= last or first <= end <= last

    def read(self, position: int, length: int) -> memoryview:
        """Read bytes of the file; fewer if the file ends before the range does."""
        return self._reader.read(self.path, position, length)

    def select_offsets(
        self, found: list[int], topic: str, key: str, max_count: int, begin: int, end: int
    ) -> None:
        """Add the physical offsets of a key to ``found``, newest first, up to ``max_count``.

        The offsets include messages of other keys with the same hash, because an entry contains
        only the hash. An entry contains the store time as a number of whole seconds since the
        file's first store time. So the comparison with ``begin`` and ``end`` is only exact to a
        second.
        """
        first = self.header.begin_timestamp
        hashes = _hashes(topic, key)
        if len(found) >= max_count:
            return
        for entry in self._chain(hashes[0]):
            time = first + entry.seconds * 1000
            if entry.key_hash in hashes and begin <= time <= end:
                found.append(entry.physical_offset)
            if len(found) >= max_count or time < begin:
                return

    def all_offsets(self, topic: str, key: str) -> list[int] | None:
        """Return all physical offsets that the file has for a key's hash, newest first; None if a
        pointer in the chain is damaged.
        """
        hashes = _hashes(topic, key)
        header, shape = self.header, self.shape
        if shape is None:
            return None
        found: list[int] = []
        slot = shape.slot_position(hashes[0])
        number, upper = self._slot(shape, hashes[0]), header.entry_count
        newest = header.end_offset
        while number != 0:
            entry = self._entry(shape, number) if 0 < number < upper else None
            if entry is None or entry.seconds < 0:
                return None
            if shape.slot_position(entry.key_hash) != slot:
                return None
            # Messages are indexed in the order of the log, so older entries have lower offsets.
            if not header.begin_offset <= entry.physical_offset <= newest:
                return None
            newest = entry.physical_offset
            if entry.key_hash in hashes:
                found.append(entry.physical_offset)
            number, upper = entry.previous, number
        return found

    def _chain(self, key_hash: int) -> Iterator[index.IndexEntry]:
        header = self.header
        # The shape cannot be inferred while the file has no entries. So do not read the attribute
        # `shape` then, because it would cache the result None.
        shape = self.shape if header.entry_count > 1 else None
        if shape is None:
            return
        number = self._slot(shape, key_hash)
        if number > header.entry_count:
            return
        slot = shape.slot_position(key_hash)
        while number > 0:
            entry = self._entry(shape, number)
            if entry is None or entry.seconds < 0:
                self.warn_of_damage(f"entry {number} is damaged or missing")
                return
            if shape.slot_position(entry.key_hash) != slot:
                self.warn_of_damage(f"entry {number} is in the chain of another slot")
            yield entry
            # QUIRK: Java follows every pointer except a pointer to the entry itself. So if a
            # damaged pointer leads to a newer entry, Java loops for ever (apache/rocketmq#8018).
            if entry.previous >= number:
                self.warn_of_damage(f"entry {number} leads to entry {entry.previous}")
                return
            number = entry.previous

    def warn_of_damage(self, reason: str) -> None:
        """Warn, once per reason, that a query may lack messages because of damage to this file."""
        path = self._layout.filesystem.full_path(self.path)
        warn_once(
            f"{path}: {reason}: a query by key can lack messages. Search with `logquarry messages "
            "--key`, and check the store with `logquarry verify`"
        )

    def _slot(self, shape: IndexShape, key_hash: int) -> int:
        data = self._reader.read(self.path, shape.slot_position(key_hash), SLOT.size)
        return int(SLOT.struct.unpack(data)[0]) if len(data) == SLOT.size else 0

    def _entry(self, shape: IndexShape, number: int) -> index.IndexEntry | None:
        data = self._reader.read(self.path, shape.entry_position(number), ENTRY.size)
        return index.decode_entry(data, 0) if len(data) == ENTRY.size else None


def _hashes(topic: str, key: str) -> tuple[int, int]:
    """Return the two hashes that an entry of a key can have. The first hash determines the slot."""
    # RocketMQ 3.x stored the hash with its sign, but used the same slot. In 4.9.3 a hash is never
    # negative.
    return index.key_hash(topic, key), java.hash_code(index.key_text(topic, key))


LARGEST_MESSAGE: Final = 64 << 20
_ENTRIES_AT_ONCE: Final = 1 << 20
_LEAST_APART: Final = 2
"""Minimum number of messages in the index that must start after the log's end, if the last of them
is at least the size of a log file after the log's end. If there are fewer, the index is ignored: a
single entry with such an offset may be damaged.
"""


def last_indexed(layout: StoreLayout, least: int) -> QueueEntry | None:
    """Return the last message in the index, in the form of a queue entry. Return None if this
    message starts before the physical offset ``least``.

    The result is also None if the entries of the index file contradict its header, because the file
    is then damaged.
    """
    try:
        file = next((one for one in reversed(_files(layout)) if not one.is_empty), None)
        if file is None or not _is_possible(file.header) or file.header.end_offset < least:
            return None
        places = next(_places(file, from_end=True), None)
    except StoreNotFound:
        # The user may not read the index. This is no error, because the log can be read without the
        # index.
        return None
    if places is None or not len(places) or (np.diff(places) < 0).any():
        return None
    last, log = int(places[-1]), layout.commit_log
    if last != file.header.end_offset:
        return None
    is_far = last >= log.end + log.file_size
    if is_far and len(np.unique(places[places >= log.end])) < _LEAST_APART:
        return None
    return QueueEntry(last, _size_at(layout, last), 0)


def indexed_frames(layout: StoreLayout, least: int, spans: Sequence[Span]) -> tuple[Int64, Int64]:
    """Return the physical offsets and the sizes of the messages in the index that start at the
    physical offset ``least`` or later.

    A size is an estimate, because the index has no sizes. A message is assumed to end where the
    next message in the index starts. If the message's log file or its span in ``spans`` ends
    earlier, the message is assumed to end there.
    The last message is assumed to have the smallest possible size.
    """
    places, size = _all_places(layout, least), layout.commit_log.file_size
    after = np.append(places[1:], places[-1:] + FIXED_SIZE_V1)
    if size:
        after = np.minimum(after, places - places % size + size)
    if spans and len(places):
        starts = np.array([span.offset for span in spans], np.int64)
        ends = np.array([span.end for span in spans], np.int64)
        number = np.maximum(np.searchsorted(starts, places, side="right") - 1, 0)
        inside = (places >= starts[number]) & (places < ends[number])
        after = np.where(inside, np.minimum(after, ends[number]), after)
    return places, np.clip(after - places, FIXED_SIZE_V1, LARGEST_MESSAGE)


def _all_places(layout: StoreLayout, least: int) -> Int64:
    found = [np.empty(0, np.int64)]
    for file in _files(layout):
        header = file.header
        if file.is_empty or not _is_possible(header) or header.end_offset < least:
            continue
        for places in _places(file):
            is_own = (places >= header.begin_offset) & (places <= header.end_offset)
            found.append(places[is_own & (places >= least)])
    return np.unique(np.concatenate(found))


def _files(layout: StoreLayout) -> list[IndexFile]:
    files = OpenFiles(layout)
    return [IndexFile(f"{INDEX}/{entry.name}", layout, files) for entry in layout.index_files]


def _is_possible(header: IndexHeader) -> bool:
    return header.entry_count > 1 and 0 <= header.begin_offset <= header.end_offset


def _places(file: IndexFile, *, from_end: bool = False) -> Iterator[Int64]:
    shape, count = file.shape, file.header.entry_count - 1
    if shape is None:
        return
    starts = range(1, count + 1, _ENTRIES_AT_ONCE)
    for start in reversed(starts) if from_end else starts:
        wanted = min(_ENTRIES_AT_ONCE, count + 1 - start)
        data = file.read(shape.entry_position(start), wanted * ENTRY.size)
        entries = np.frombuffer(data, _ENTRY_DTYPE, len(data) // ENTRY.size)
        if len(entries) < wanted and from_end:
            return
        yield entries["physical_offset"].astype(np.int64)


def _size_at(layout: StoreLayout, offset: int) -> int:
    """Return the size of the frame at an offset. If there is no frame, return the smallest possible
    size.
    """
    first = next(LogReader(layout, check_crc=False).chain(offset), None)
    return int(first.rows[0, SIZE]) if isinstance(first, Run) else FIXED_SIZE_V1
