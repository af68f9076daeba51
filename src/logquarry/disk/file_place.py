"""Base classes whose fields are read by each put or each get.

If this module is compiled, a put reads such a field ten times faster than an ordinary Python
attribute.
"""

from __future__ import annotations

from typing import Any

from logquarry.format.queue_entry import UNIT_SIZE

_UNIT = UNIT_SIZE


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


class LiveBounds:
    """The min and max offset of a :class:`~logquarry.read.live_read.LiveQueue`.

    Attributes:
        _files: the queue's files.
        _log: the log's files.
        _low: the list of the queue's files, the list of the log's files, and the min offset that
            was computed for these lists. When files are deleted, a new list replaces the old list.
            If a list is still the same object, no file was deleted, and the min offset is valid.
    """

    _files: LastFile
    _log: LastFile
    _low: tuple[object, object, int]

    def bounds(self) -> tuple[int, int]:
        """See :meth:`~logquarry.read.queue.Queue.bounds`."""
        files = self._files
        of_files, of_log, low = self._low
        if of_files is not files.bases or of_log is not self._log.bases:
            low = self._find_low()
        last: FilePlace | None = files.last
        # The max offset is the position of the last write. An entry can be read as soon as it is
        # written, because only the log has a transient store pool.
        return low, 0 if last is None else (last.base + last.wrote) // _UNIT

    def _find_low(self) -> int:
        # LiveQueue overrides this method. A compiled class cannot have abstract methods.
        raise NotImplementedError


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
