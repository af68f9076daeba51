"""Makes the message objects of a get from the table of its kernel. Compiled if possible.

The table is described in :mod:`logquarry.format.rows`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from logquarry.format.rows import ASK_TAGS, NO_TAGS, ROW, ROW_SIZE, SAME_TAGS

try:
    import cython
except ImportError:
    from logquarry import uncompiled as cython

if cython.compiled:
    from cython.cimports.cpython.bytes import PyBytes_AS_STRING, PyBytes_FromStringAndSize
    from cython.cimports.cpython.unicode import PyUnicode_DecodeUTF8

_ROW_SIZE, _ASK, _NONE, _SAME = ROW_SIZE, ASK_TAGS, NO_TAGS, SAME_TAGS
_new = object.__new__


class GotFields:
    """The fields of a message that most readers use; the base class of
    :class:`~logquarry.read.messages.GotMessage`.

    If this module is compiled, a field becomes a Python object only when it is read.
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


def make_messages(
    kind: type[GotFields],
    block: bytes,
    count: int,
    broker: str,
    levels: tuple[int, ...],
    tags_of: Callable[[Any], str | None],
) -> tuple[Any, ...]:
    """The messages of a get.

    Args:
        kind: the class of the messages, a subclass of :class:`GotFields`.
        block: the bytes of the table and the frames.
        count: number of rows of the table.
        broker: the ``broker`` of each message.
        levels: delay of each level, for the tags codes.
        tags_of: decodes the tags of a message whose properties are not UTF-8.
    """
    made: list[Any] = []
    tags: str | None = None
    if cython.compiled:
        data = PyBytes_AS_STRING(block)
        for number in range(count):
            row = cython.cast(row_pointer, data + number * _ROW_SIZE)
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
    # In one loop and without a constructor: its call would take as long as all other work.
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
    ) in ROW.iter_unpack(memoryview(block)[: count * ROW_SIZE]):
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
