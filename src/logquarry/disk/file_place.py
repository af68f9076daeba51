"""Base classes with the fields that each put or get reads.

If this module is compiled, a put reads such a field in a tenth of the time that an ordinary Python
attribute takes.
"""

from __future__ import annotations

from typing import Any


class FilePlace:
    """Fields of :class:`~logquarry.disk.mapped_file.MappedFile`.

    Attributes:
        base: offset of the file's first byte, counted in bytes over all files of the
            :class:`~logquarry.disk.mapped_file_queue.MappedFileQueue`.
        wrote: number of written bytes.
        store_timestamp: store time of the last message. The writer sets this attribute after its
            append.
        address: memory address of the first byte of the file's memory map; 0 if the file is closed,
            or if writes go to a buffer instead of the map.
    """

    base: int
    size: int
    wrote: int
    store_timestamp: int
    address: int


class LastFile:
    """Fields of :class:`~logquarry.disk.mapped_file_queue.MappedFileQueue`.

    Attributes:
        last: the last file, None if there are no files.
        bases: offset of each file's first byte, ascending. A new tuple replaces the old tuple.
    """

    last: Any
    bases: tuple[int, ...]


class HealthReason:
    """The field ``reason`` says why the store may no longer be written; None if the store may be
    written.
    """

    reason: str | None


class Refusals:
    """The field ``refusals`` has the reasons why the store refuses messages now; empty if there is
    none.
    """

    refusals: frozenset[Any]
