"""The messages of a get: their CRC is checked at once, their fields are decoded on first use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, Final, overload

from logquarry.format import frame, java, sys_flag
from logquarry.format.frame import Damage, DamageKind, Frame
from logquarry.format.java import crc32
from logquarry.read.got_fields import GotBlock, GotFields, make_messages
from logquarry.stored_message import StoredMessage

_PREFIX: Final = frame.prefix(frame.HOST_SIZE_V4, frame.HOST_SIZE_V4)
assert _PREFIX.size == frame.BODY_POSITION

_V6: Final = sys_flag.BORN_HOST_V6 | sys_flag.STORE_HOST_V6
_BODY_AT: Final = frame.BODY_POSITION
_LENGTHS: Final = frame.FIXED_SIZE_V1 - frame.BODY_POSITION
_SIGN: Final = 0x8000


class LazyMessage(StoredMessage):
    """A message with a sound frame; the first use of a field decodes the frame."""

    def __init__(
        self, data: bytes, prefix: tuple[Any, ...], broker: str, delay_levels_ms: tuple[int, ...]
    ) -> None:
        self._data = data
        self._prefix = prefix
        self.broker = broker
        self._delay_levels_ms = delay_levels_ms

    @cached_property
    def frame(self) -> Frame:
        """The message as the log holds it."""
        outcome = frame.decode_at(self._data, 0, base=self._prefix[6], check_crc=False)
        if not isinstance(outcome, Frame):
            raise AssertionError("the frame was found sound")
        return outcome

    @property
    def frame_bytes(self) -> bytes:
        """The frame as the log has it."""
        return self._data

    # Frequently read fields, available without decoding the frame.
    @property
    def size(self) -> int:
        """Bytes of the frame."""
        return len(self._data)

    @property
    def physical_offset(self) -> int:
        """Physical offset of the frame."""
        return int(self._prefix[6])

    @property
    def queue_offset(self) -> int:
        """Queue offset of the message."""
        return int(self._prefix[5])

    @property
    def store_timestamp(self) -> int:
        """Store time, in milliseconds since 1970."""
        return int(self._prefix[10])

    @property
    def body(self) -> bytes:
        """The body as stored, compressed or not."""
        return self._data[_BODY_AT : _BODY_AT + self._prefix[14]]

    @cached_property
    def properties_string(self) -> str:
        """The property string as stored; bytes that are not UTF-8 become U+FFFD."""
        data, at = self._data, _BODY_AT + self._prefix[14]
        return data[at + data[at] + _LENGTHS :].decode("utf-8", java.UTF8_ERRORS)

    def __reduce__(self) -> tuple[Any, ...]:
        # Cached fields are not pickled.
        return LazyMessage, (self._data, self._prefix, self.broker, self._delay_levels_ms)


def read_message(
    broker: str, delay_levels_ms: tuple[int, ...], data: bytes, offset: int
) -> StoredMessage | Damage | None:
    """Read the message whose frame is all of ``data``, and check its CRC.

    Returns:
        The message; None if the bytes are zeros: the log lost its end, or never had the message;
        otherwise the damage.
    """
    size = len(data)
    if size >= frame.FIXED_SIZE_V1:
        prefix = _PREFIX.unpack_from(data)
        length = prefix[14]
        end = _BODY_AT + length
        if (
            prefix[0] == size
            and prefix[1] == frame.MAGIC_V1
            and prefix[6] == offset
            and not prefix[7] & _V6
            and 0 <= length <= size - frame.FIXED_SIZE_V1
            and data[end] < 128
        ):
            at = end + 1 + data[end]
            if (
                at + 2 <= size
                and (data[at] << 8 | data[at + 1]) == size - at - 2 < _SIGN
                and (length == 0 or crc32(data[_BODY_AT:end]) & java.INT_MAX == prefix[2])
            ):
                return LazyMessage(data, prefix, broker, delay_levels_ms)
    outcome = frame.decode_at(data, 0, base=offset, end=size)
    if isinstance(outcome, Frame):
        if outcome.size == size:
            return StoredMessage(outcome, broker=broker, delay_levels_ms=delay_levels_ms)
        return Damage(DamageKind.BAD_SIZE, f"TOTALSIZE {outcome.size}, and {size} in the queue")
    if isinstance(outcome, Damage):
        return None if outcome.kind is DamageKind.ZEROED else outcome
    return Damage(DamageKind.BAD_MAGIC, "a blank")


def frames_of(messages: Sequence[StoredMessage]) -> bytes:
    """Join the stored frames of messages; each message of an inner batch gets a separate frame."""
    if isinstance(messages, GotMessages):
        return messages.frames
    return b"".join(
        message.frame_bytes if isinstance(message, LazyMessage) else frame.encode(message.frame)
        for message in messages
    )


class GotMessage(GotFields, StoredMessage):
    """A message whose frame the kernel found sound. Made by :class:`GotMessages`."""

    __slots__ = ()

    @cached_property
    def frame(self) -> Frame:
        """The decoded frame."""
        at = self._frame_at
        outcome = frame.decode_at(
            self._block, at, base=self.physical_offset - at, end=at + self.size, check_crc=False
        )
        if not isinstance(outcome, Frame):
            raise AssertionError("the frame was found sound")
        return outcome

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickle only this message, without the frames of the other messages of the get.
        return _stored_message, (self.frame, self.broker, self._delay_levels_ms)


def _stored_message(frame: Frame, broker: str, delay_levels_ms: tuple[int, ...]) -> StoredMessage:
    return StoredMessage(frame, broker=broker, delay_levels_ms=delay_levels_ms)


def _tags_of(message: GotMessage) -> str | None:
    return _stored_message(message.frame, message.broker, message._delay_levels_ms).tags


class GotMessages(GotBlock, Sequence[StoredMessage]):
    """The messages of one ``get``, in queue order. The object equals any tuple of the same
    messages.

    Holds a copy of the frames. The first read of a message makes all message objects. ``KernelGet``
    sets the attributes: a constructor call would take half as long as reading a message.
    """

    __slots__ = ()

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
        made = make_messages(GotMessage, self, _tags_of)
        self._made = made
        return made
