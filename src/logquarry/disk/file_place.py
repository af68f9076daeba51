"""Base classes with the fields of files and of the store's state that each put reads.

Compiled if possible: a put then reads a field in a tenth of the time of a Python attribute.
"""

from __future__ import annotations

from typing import Any


class FilePlace:
    """The place for a file's next bytes; base class of
    :class:`~logquarry.disk.mapped_file.MappedFile`.

    Attributes:
        base: offset of the file's first byte in its queue of files.
        size: bytes of the file.
        wrote: bytes that are written.
        store_timestamp: store time of the last message, set by the writer after its append.
        address: address of the map's first byte; 0 while writes go to a pool's buffer, and after
            the file was closed.
    """

    base: int
    size: int
    wrote: int
    store_timestamp: int
    address: int


class LastFile:
    """The log's last file. Base class of
    :class:`~logquarry.disk.mapped_file_queue.MappedFileQueue`.

    Attributes:
        last: the file to append to, None if there is none.
    """

    last: Any


class HealthReason:
    """The field of :class:`~logquarry.disk.service.Health` that each put reads.

    Attributes:
        reason: why the store may no longer be written, None if it may.
    """

    reason: str | None


class Refusals:
    """The field of :class:`~logquarry.disk.service.RunningFlags` that each put reads.

    Attributes:
        refusals: why the store takes no messages now; empty if it does.
    """

    refusals: frozenset[Any]
