"""The numbers of a mapped file that each put reads and changes. Compiled if possible."""

from __future__ import annotations


class FilePlace:
    """Where the next bytes of a file go; :class:`~logquarry.disk.mapped_file.MappedFile` is one.

    Attributes:
        base: offset of the first byte in the queue.
        size: bytes of the file.
        wrote: bytes that are written.
        store_timestamp: store time of the last message, set by the writer after its append.
        address: of the map's first byte; 0 while a pool's buffer is in front of it, and after the
            file was closed.
    """

    base: int
    size: int
    wrote: int
    store_timestamp: int
    address: int
