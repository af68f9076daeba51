"""The messages of one ``get``: a copy of their frames, made into objects when they are looked at.

Whoever only counts messages, or hands them on, pays for no objects. What is asked of a message
most was found while its frame was checked, and is in a table before the frames
(:mod:`logquarry.format.got_rows`); the rest is decoded when asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, overload

from logquarry.format import frame
from logquarry.format.frame import Frame
from logquarry.format.got_rows import ASK_TAGS, NO_TAGS, ROW, ROW_SIZE, SAME_TAGS
from logquarry.message import StoredMessage

_new = object.__new__


class GotMessage(StoredMessage):
    """A message whose frame was found sound by the kernel. Made by :class:`GotMessages`."""

    __slots__ = (
        "_block",
        "_body_at",
        "_body_end",
        "_frame_at",
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
    _block: bytes
    _frame_at: int
    _body_at: int
    _body_end: int

    @property
    def body(self) -> bytes:
        """The body as stored, compressed or not."""
        return self._block[self._body_at : self._body_end]

    @cached_property
    def frame(self) -> Frame:
        """The message as it stands in the log."""
        at = self._frame_at
        outcome = frame.decode_at(
            self._block, at, base=self.physical_offset - at, end=at + self.size, check_crc=False
        )
        if not isinstance(outcome, Frame):
            raise AssertionError("the frame was found sound")
        return outcome

    def __reduce__(self) -> tuple[Any, ...]:
        # Not the frames of all that came with it.
        return _plain, (self.frame, self.broker, self._delay_levels_ms)


def _plain(frame: Frame, broker: str, delay_levels_ms: tuple[int, ...]) -> StoredMessage:
    return StoredMessage(frame, broker=broker, delay_levels_ms=delay_levels_ms)


class GotMessages(Sequence[StoredMessage]):
    """The messages of one ``get``, in queue order. Equal to any tuple of the same messages.

    Made by :class:`logquarry.store.read.quick_get.QuickGet`, which sets what it consists of: a
    constructor would take as long as half a message.
    """

    __slots__ = ("_block", "_broker", "_count", "_levels", "_made")

    _block: bytes
    """Table and frames."""
    _count: int
    """Rows of the table."""
    _broker: str
    _levels: tuple[int, ...]
    _made: tuple[StoredMessage, ...] | None

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[StoredMessage]:
        return iter(self._made or self._make())

    @overload
    def __getitem__(self, index: int) -> StoredMessage: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[StoredMessage, ...]: ...
    def __getitem__(self, index: int | slice) -> StoredMessage | tuple[StoredMessage, ...]:
        return (self._made or self._make())[index]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (tuple, GotMessages)):
            return tuple(self) == tuple(other)
        return NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __add__(self, other: Sequence[StoredMessage]) -> tuple[StoredMessage, ...]:
        return (*self, *other)

    def __radd__(self, other: Sequence[StoredMessage]) -> tuple[StoredMessage, ...]:
        return (*other, *self)

    def __repr__(self) -> str:
        return repr(tuple(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (list(self),)

    def _make(self) -> tuple[StoredMessage, ...]:
        block, broker, levels = self._block, self._broker, self._levels
        made: list[StoredMessage] = []
        tags: str | None = None
        # All in one loop, and without a constructor: a call takes as long as all the rest.
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
        ) in ROW.iter_unpack(memoryview(block)[: self._count * ROW_SIZE]):
            message = _new(GotMessage)
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
                    tags = _plain(message.frame, broker, levels).tags
                else:
                    tags = None
            message.tags = tags
            made.append(message)
        self._made = result = tuple(made)
        return result
