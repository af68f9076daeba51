"""Slots and entries of an index file whose configuration nobody states.

The size of a file, ``40 + 4 x slots + 20 x entries``, leaves one number open. Its contents give
that one away: the last byte that is not zero belongs to the last entry, of which the header says
the number, and every entry must lie in the chain of its slot, a place that depends on the number
of slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from logquarry.files.filesystem import FileView
from logquarry.format.index import DEFAULT_SHAPE, ENTRY, HEADER, SLOT, IndexHeader, IndexShape

_WORD: Final = 4
_ENTRY_WORDS: Final = ENTRY.size // _WORD
_CHUNK: Final = 4 << 20
_MOST_CHECKED: Final = 4_096
"""Entries that are checked at each end of a file."""
_MOST_GUESSES: Final = 20_000
_LARGEST_SEARCHED: Final = 512 << 20
_ENOUGH: Final = 0.9
"""Share of the entries that have to fit where none of the numbers fits all."""

_ENTRY_DTYPE: Final = ENTRY.dtype()
_SLOT_DTYPE: Final = np.dtype(">i4")

Words = npt.NDArray[np.int32]


def infer_shape(view: FileView, header: IndexHeader) -> IndexShape | None:
    """The shape of an index file by what it holds, None if that does not tell.

    A file of RocketMQ's default size is taken to have its default shape. An index without
    entries cannot tell, and need not.
    """
    if view.size == DEFAULT_SHAPE.file_size:
        return DEFAULT_SHAPE
    room = view.size - HEADER.size
    if header.entry_count <= 1 or room < SLOT.size + ENTRY.size or view.size > _LARGEST_SEARCHED:
        return None
    data = view.window(0, view.size)
    # A damaged file still tells: the wrong number of slots fits next to none of its entries.
    for share in (1.0, _ENOUGH):
        for slots in _guesses(data, header):
            if _share_that_fits(data, header, slots) >= share:
                entries = (room - slots * SLOT.size) // ENTRY.size
                return IndexShape(slots, entries)
    return None


def _guesses(data: memoryview, header: IndexHeader) -> Iterator[int]:
    """Numbers of slots to try, the likeliest first. Each fits the file's size."""
    words = (len(data) - HEADER.size) // _WORD
    last = header.entry_count - 1
    most = words - _ENTRY_WORDS * header.entry_count
    least = max(1, min(header.slots_used, most))
    # A file is slots and whole entries: the number of slots is known but for multiples of five.
    remainder = words % _ENTRY_WORDS

    def from_last_word(word: int) -> int:
        """Slots, if the word at that index is in the last entry: there is but one such number."""
        before = word - last * _ENTRY_WORDS
        return before - (before - remainder) % _ENTRY_WORDS

    def guesses() -> Iterator[int]:
        word = _last_nonzero_word(data)
        if word is not None:
            yield from_last_word(word)
        # Entries of a writer's last moments may stand behind those that the header counts.
        yield from map(from_last_word, _words_with(data, header.end_offset))

    yield from (slots for slots in guesses() if least <= slots <= most)
    first = least + (remainder - least) % _ENTRY_WORDS
    if (most - first) // _ENTRY_WORDS < _MOST_GUESSES:
        yield from range(first, most + 1, _ENTRY_WORDS)


def _last_nonzero_word(data: memoryview) -> int | None:
    """Index of the last word behind the header that is not zero."""
    stop = HEADER.size + (len(data) - HEADER.size) // _WORD * _WORD
    while stop > HEADER.size:
        start = max(HEADER.size, stop - _CHUNK)
        # A live index changes while it is looked at, which numpy allows in its own copy alone.
        found = np.flatnonzero(np.frombuffer(data[start:stop], np.int32) != 0)
        if len(found):
            return (start - HEADER.size) // _WORD + int(found[-1])
        stop = start
    return None


def _words_with(data: memoryview, offset: int) -> Iterator[int]:
    """Words at which a physical offset may stand, as it does in an entry."""
    if offset == 0:
        return
    stop = HEADER.size + (len(data) - HEADER.size) // _WORD * _WORD
    words = np.frombuffer(data[HEADER.size : stop], ">u4")
    found = (words[:-1] == (offset >> 32) & 0xFFFFFFFF) & (words[1:] == offset & 0xFFFFFFFF)
    yield from np.flatnonzero(found)[-64:].tolist()


def _share_that_fits(data: memoryview, header: IndexHeader, slots: int) -> float:
    """How many of the entries, read with that many slots, are what an index holds: 0 to 1."""
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
    entries: npt.NDArray[np.void],
    table: npt.NDArray[np.int32],
    numbers: npt.NDArray[np.int64],
    header: IndexHeader,
) -> float:
    """The share of some entries that lead to an earlier one of the same slot, and have a newer
    one or themselves in their slot.
    """
    some = entries[numbers]
    offsets, previous = some["physical_offset"], some["previous"].astype(np.int64)
    sound = (offsets >= header.begin_offset) & (offsets <= header.end_offset)
    sound &= (some["seconds"] >= 0) & (previous >= 0) & (previous < numbers)
    slots = np.abs(some["key_hash"].astype(np.int64)) % len(table)
    sound &= table[slots] >= numbers
    before = entries["key_hash"][np.where(sound, previous, 0)].astype(np.int64)
    sound &= (previous == 0) | (np.abs(before) % len(table) == slots)
    return float(sound.mean())
