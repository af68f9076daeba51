"""Reads which table files a RocksDB database has, from the file MANIFEST of its folder.

A manifest is a list of edits, one for each change of the database. An edit adds and deletes table
files. ::

    block of 32 KiB    [record]...
    record             [CRC 4][length 2][type 1][bytes ``length``]      little-endian
    edit               [tag][values]...                                 numbers are varints

Long edits are divided into several records. RocksDB's sources: ``log_format.h``,
``version_edit.cc``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Final

_BLOCK: Final = 32_768
_HEAD: Final = struct.Struct("<IHB")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_LARGEST_SHIFT: Final = 63
_IGNORABLE: Final = 1 << 13
"""A tag with this bit is followed by a text, and readers may skip it."""


class _Tag(IntEnum):
    """Tags of an edit."""

    COMPARATOR = 1
    LOG_NUMBER = 2
    NEXT_FILE_NUMBER = 3
    LAST_SEQUENCE = 4
    COMPACT_CURSOR = 5
    DELETED_FILE = 6
    NEW_FILE = 7
    PREVIOUS_LOG_NUMBER = 9
    LEAST_LOG_NUMBER = 10
    NEW_FILE_2 = 100
    NEW_FILE_3 = 102
    NEW_FILE_4 = 103
    FAMILY = 200
    FAMILY_ADDED = 201
    FAMILY_DROPPED = 202
    LARGEST_FAMILY = 203
    IN_ATOMIC_GROUP = 300


_NUMBERS: Final = frozenset(
    {
        *(_Tag.LOG_NUMBER, _Tag.NEXT_FILE_NUMBER, _Tag.LAST_SEQUENCE, _Tag.PREVIOUS_LOG_NUMBER),
        *(_Tag.LEAST_LOG_NUMBER, _Tag.LARGEST_FAMILY, _Tag.IN_ATOMIC_GROUP),
    }
)
"""Tags with one number."""
_TEXTS: Final = frozenset({_Tag.COMPARATOR, _Tag.FAMILY_ADDED})
"""Tags with one text."""
_NUMBERS_OF_FILE: Final = {
    _Tag.NEW_FILE: (3, 0),
    _Tag.NEW_FILE_2: (3, 2),
    _Tag.NEW_FILE_3: (4, 2),
    _Tag.NEW_FILE_4: (3, 2),
}
"""Tag of a new file -> how many numbers precede and follow its smallest and largest key. The second
number is the number of the file.
"""
_LAST_FIELD: Final = 1
"""Ends the further fields of a new file."""


def table_name(number: int) -> str:
    """Return the name of a table file."""
    return f"{number:06d}.sst"


def table_numbers(data: bytes) -> frozenset[int]:
    """Return the numbers of the table files that the database has.

    The result is that of the edits before the first incomplete record, because a running broker may
    be writing the last one. Raises ValueError if an edit has an unknown tag or is cut off.
    """
    tables: dict[int, int] = {}
    for edit in _edits(data):
        family, is_dropped, added, deleted = _Edit(edit).parse()
        for number in deleted:
            tables.pop(number, None)
        tables.update(dict.fromkeys(added, family))
        if is_dropped:
            tables = {number: one for number, one in tables.items() if one != family}
    return frozenset(tables)


def _edits(data: bytes) -> Iterator[bytes]:
    parts: list[bytes] = []
    position = 0
    while position + _HEAD.size <= len(data):
        if _BLOCK - position % _BLOCK < _HEAD.size:
            position += _BLOCK - position % _BLOCK
            continue
        _, length, kind = _HEAD.unpack_from(data, position)
        start = position + _HEAD.size
        position = start + length
        if not _FULL <= kind <= _LAST or position > len(data):
            return
        if kind in (_FULL, _FIRST):
            parts = []
        parts.append(data[start:position])
        if kind in (_FULL, _LAST):
            yield b"".join(parts)


class _Edit:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    def parse(self) -> tuple[int, bool, list[int], list[int]]:
        """Return the column family, whether it is dropped, and the numbers of new and of deleted
        files.
        """
        family, is_dropped = 0, False
        added: list[int] = []
        deleted: list[int] = []
        while self._position < len(self._data):
            tag = self._number()
            if tag & _IGNORABLE or tag in _TEXTS:
                self._text()
            elif tag in _NUMBERS:
                self._number()
            elif tag == _Tag.FAMILY:
                family = self._number()
            elif tag == _Tag.FAMILY_DROPPED:
                is_dropped = True
            elif tag == _Tag.COMPACT_CURSOR:
                self._number()
                self._text()
            elif tag == _Tag.DELETED_FILE:
                self._number()
                deleted.append(self._number())
            elif tag in _NUMBERS_OF_FILE:
                added.append(self._new_file(_Tag(tag)))
            else:
                raise ValueError(f"an edit of the manifest has the unknown tag {tag}")
        return family, is_dropped, added, deleted

    def _new_file(self, tag: _Tag) -> int:
        before, after = _NUMBERS_OF_FILE[tag]
        number = [self._number() for _ in range(before)][1]
        for _ in range(2):
            self._text()
        for _ in range(after):
            self._number()
        while tag == _Tag.NEW_FILE_4 and self._number() != _LAST_FIELD:
            self._text()
        return number

    def _number(self) -> int:
        found = shift = 0
        while True:
            if self._position >= len(self._data) or shift > _LARGEST_SHIFT:
                raise ValueError("an edit of the manifest is cut off")
            byte = self._data[self._position]
            self._position += 1
            found |= (byte & 0x7F) << shift
            if byte < 1 << 7:
                return found
            shift += 7

    def _text(self) -> None:
        length = self._number()
        self._position += length
        if self._position > len(self._data):
            raise ValueError("an edit of the manifest is cut off")
