"""Holds the frames of a get, and makes the message objects of the get.

The module is compiled if possible. A kernel fills a table with one row per message
(:mod:`logquarry.format.arrays`), from which the objects are made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from logquarry.format.arrays import ASK_TAGS, NO_TAGS, ROW, ROW_SIZE, SAME_TAGS
from logquarry.log import codec

try:
    import cython
except ImportError:
    from logquarry import compiled as cython

if cython.compiled:
    from cython.cimports.cpython.bytes import PyBytes_AS_STRING, PyBytes_FromStringAndSize
    from cython.cimports.cpython.unicode import PyUnicode_DecodeUTF8

_ROW_SIZE, _ASK, _NONE, _SAME = ROW_SIZE, ASK_TAGS, NO_TAGS, SAME_TAGS
_address = 0
"""Address of the kernel that fills the table of rows; 0 if the kernel is not loaded."""
_new = object.__new__


class GotFields:
    """The fields of a message that most callers read. Base class of
    :class:`~logquarry.read.get_message.GotMessage`.

    If this module runs compiled, fields are stored as C values, and converted to Python objects
    when they are read.
    """

    __slots__ = (
        "_block",
        "_body_at",
        "_body_end",
        "_delay_levels_ms",
        "_frame_at",
        "broker",
        "physical_offset",
        "queue_offset",
        "size",
        "store_timestamp",
        "tags",
    )

    queue_offset: int
    store_timestamp: int
    physical_offset: int
    size: int
    tags: str | None
    broker: str
    _delay_levels_ms: tuple[int, ...]
    _block: bytes
    _frame_at: int
    _body_at: int
    _body_end: int

    @property
    def body(self) -> bytes:
        """The body as stored, compressed or not."""
        if cython.compiled:
            found: bytes = PyBytes_FromStringAndSize(
                PyBytes_AS_STRING(self._block) + self._body_at, self._body_end - self._body_at
            )
            return found
        return self._block[self._body_at : self._body_end]


class GotBlock:
    """The frames of the messages of a get. Base class of
    :class:`~logquarry.read.get_message.GotMessages`.

    Attributes:
        frames: the frames of the messages, one after the other.
    """

    __slots__ = ("_broker", "_count", "_levels", "_made", "frames")

    frames: bytes
    _count: int
    _broker: str
    _levels: tuple[int, ...]
    _made: tuple[Any, ...] | None

    def __len__(self) -> int:
        return self._count


def _find_rows(frames: bytes, count: int) -> bytes:
    """Return a table that has one row for each frame (:mod:`logquarry.format.arrays`)."""
    global _address  # noqa: PLW0603 - the address of the one kernel
    if cython.compiled:
        if not _address:
            _address = codec.require_kernels().frame_rows_address()
        table: bytes = PyBytes_FromStringAndSize(cython.NULL, count * _ROW_SIZE)
        call_kernel(_address, PyBytes_AS_STRING(frames), count, PyBytes_AS_STRING(table))
        return table
    rows = np.empty(count * ROW_SIZE, np.uint8)
    place = int(np.frombuffer(frames, np.uint8).ctypes.data)
    codec.require_kernels().frame_rows(place, count, int(rows.ctypes.data))
    return rows.tobytes()


def make_messages(
    kind: type[GotFields], messages: GotBlock, tags_of: Callable[[Any], str | None]
) -> tuple[Any, ...]:
    """Make the messages of a get.

    Args:
        kind: the class of the messages, a subclass of :class:`GotFields`.
        messages: the frames of the messages.
        tags_of: decodes the tags of a message whose properties are not UTF-8.
    """
    block, count = messages.frames, messages._count
    broker, levels = messages._broker, messages._levels
    rows = _find_rows(block, count)
    made: list[Any] = []
    tags: str | None = None
    if cython.compiled:
        data = PyBytes_AS_STRING(block)
        table = PyBytes_AS_STRING(rows)
        for number in range(count):
            row = cython.cast(row_pointer, table + number * _ROW_SIZE)
            message = new_of(kind, ())
            message.queue_offset = row.queue_offset
            message.store_timestamp = row.store_timestamp
            message.physical_offset = row.physical_offset
            message._frame_at = row.frame_at
            message.size = row.size
            message._body_at = row.body_at
            message._body_end = row.body_end
            message.broker = broker
            message._block = block
            message._delay_levels_ms = levels
            if row.tags_at != _SAME:
                tags = None
                if row.tags_at > _NONE:
                    length = row.tags_end - row.tags_at
                    tags = PyUnicode_DecodeUTF8(data + row.tags_at, length, cython.NULL)
                elif row.tags_at == _ASK:
                    tags = tags_of(message)
            message.tags = tags
            made.append(message)
        return tuple(made)
    # Set the attributes of all messages in one loop. A constructor call per message would double
    # the time.
    for (
        queue_offset,
        store_timestamp,
        physical_offset,
        frame_at,
        size,
        body_at,
        body_end,
        tags_at,
        tags_end,
    ) in ROW.iter_unpack(rows):
        message = _new(kind)
        message.queue_offset = queue_offset
        message.store_timestamp = store_timestamp
        message.physical_offset = physical_offset
        message.size = size
        message.broker = broker
        message._block = block
        message._frame_at = frame_at
        message._body_at = body_at
        message._body_end = body_end
        message._delay_levels_ms = levels
        if tags_at != SAME_TAGS:
            if tags_at > NO_TAGS:
                tags = block[tags_at:tags_end].decode()
            elif tags_at == ASK_TAGS:
                tags = tags_of(message)
            else:
                tags = None
        message.tags = tags
        made.append(message)
    return tuple(made)
