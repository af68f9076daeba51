"""Base classes with the fields that each put or get reads.

If this module is compiled, a put reads such a field ten times as fast as a Python attribute.
"""

from __future__ import annotations

from typing import Any


class FilePlace:
    """Fields of :class:`~logquarry.disk.mapped_file.MappedFile`.

    Attributes:
        base: offset of the file's first byte in its queue of files.
        wrote: number of written bytes.
        store_timestamp: store time of the last message. The writer sets this attribute after its
            append.
        address: memory address of the map's first byte. 0 for a closed file, and while writes go to
            a pool's buffer.
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
    """``reason``: why the store may no longer be written; None if the store may be written."""

    reason: str | None


class Refusals:
    """``refusals``: why the store takes no messages now; empty if the store takes messages."""

    refusals: frozenset[Any]
