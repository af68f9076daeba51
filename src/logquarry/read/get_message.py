"""Reads messages of a queue in pure Python, by the rules of ``getMessage`` in RocketMQ 4.9.3.

A get with tags compares the hashes of these tags with the tags codes of the queue's entries.

A get checks the CRC of each message before it returns. It does not decode the fields of a message:
they are decoded when a caller reads a field for the first time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any, Final, NamedTuple, overload

from logquarry.config import StoreConfig
from logquarry.errors import CorruptFrame
from logquarry.format import frame, java, sys_flag
from logquarry.format.batch import is_inner_batch
from logquarry.format.frame import Damage, DamageKind, Frame
from logquarry.format.java import crc32
from logquarry.format.queue_entry import FILLER_SIZE, UNIT_SIZE
from logquarry.read.commit_log import CommitLog
from logquarry.read.got_fields import GotBlock, GotFields, make_messages
from logquarry.read.queue import Queue, Units
from logquarry.stored_message import StoredMessage

_PREFIX: Final = frame.prefix(frame.HOST_SIZE_V4, frame.HOST_SIZE_V4)
assert _PREFIX.size == frame.BODY_POSITION

_V6: Final = sys_flag.BORN_HOST_V6 | sys_flag.STORE_HOST_V6
_BODY_AT: Final = frame.BODY_POSITION
_LENGTHS: Final = frame.FIXED_SIZE_V1 - frame.BODY_POSITION
_SIGN: Final = 0x8000


class LazyMessage(StoredMessage):
    """A message from a checked frame. The object decodes a field only when the field is read."""

    def __init__(
        self, data: bytes, prefix: tuple[Any, ...], broker: str, delay_levels_ms: tuple[int, ...]
    ) -> None:
        self._data = data
        self._prefix = prefix
        self.broker = broker
        self._delay_levels_ms = delay_levels_ms

    @cached_property
    def frame(self) -> Frame:
        """The decoded frame."""
        outcome = frame.decode_at(self._data, 0, base=self._prefix[6], check_crc=False)
        if not isinstance(outcome, Frame):
            raise AssertionError("the frame was found sound")
        return outcome

    @property
    def frame_bytes(self) -> bytes:
        """The bytes of the frame, as stored in the log."""
        return self._data

    # These fields are read often, so they are decoded alone, without the rest of the frame.
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
        # Pickle the bytes of the frame, but no cached fields.
        return LazyMessage, (self._data, self._prefix, self.broker, self._delay_levels_ms)


def read_message(
    broker: str, delay_levels_ms: tuple[int, ...], data: bytes, offset: int
) -> StoredMessage | Damage | None:
    """Read the message whose frame is all of ``data``, and check its CRC.

    Returns:
        The message, or the damage if the frame is not sound. The result is None if the frame's size
        and magic are zeros: the log has lost its end, or these bytes were never written.
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
                and crc32(data[_BODY_AT:end]) & java.INT_MAX == prefix[2]
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
    """Join the frames of messages, as stored in the log. Each message of an inner batch gets a
    separate frame.
    """
    if isinstance(messages, GotMessages):
        return messages.frames
    return b"".join(
        message.frame_bytes if isinstance(message, LazyMessage) else frame.encode(message.frame)
        for message in messages
    )


class GotMessage(GotFields, StoredMessage):
    """A message whose frame the kernel has checked. Made by :class:`GotMessages`."""

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
    """The messages of one ``get``, in queue order; equal to a tuple of the same messages.

    The object contains a copy of the frames. When a caller reads one message for the first time,
    the objects of all messages are created. There is no constructor, because its call would take
    half as long as reading a message. Instead, ``KernelGet`` sets the attributes.
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


LEAST_UNITS: Final = 16_000 // UNIT_SIZE
"""Maximum number of entries that one ``get`` reads, unless its ``max_count`` is larger. Then
``max_count`` is the maximum.

Java's loop ends at the first multiple of the entry size that is at least 16,000 bytes.
"""
assert LEAST_UNITS * UNIT_SIZE == 16_000
_MOST_AT_ONCE: Final = 128


class GetMessageStatus(Enum):
    """The outcome of a ``get`` (``GetMessageStatus``)."""

    FOUND = "FOUND"
    NO_MATCHED_MESSAGE = "NO_MATCHED_MESSAGE"
    """The get has read entries, but none of them has a message with a wanted tag."""
    MESSAGE_WAS_REMOVING = "MESSAGE_WAS_REMOVING"
    """The queue has entries at the offset, but the log no longer has their messages."""
    OFFSET_FOUND_NULL = "OFFSET_FOUND_NULL"
    """The queue has no entry at the offset, although the offset is within the queue's bounds."""
    OFFSET_OVERFLOW_BADLY = "OFFSET_OVERFLOW_BADLY"
    OFFSET_OVERFLOW_ONE = "OFFSET_OVERFLOW_ONE"
    """The offset is the queue's end: there is no new message."""
    OFFSET_TOO_SMALL = "OFFSET_TOO_SMALL"
    NO_MATCHED_LOGIC_QUEUE = "NO_MATCHED_LOGIC_QUEUE"
    """Never returned. RocketMQ creates an unknown queue in memory, so a get from this queue has the
    status NO_MESSAGE_IN_QUEUE.
    """
    NO_MESSAGE_IN_QUEUE = "NO_MESSAGE_IN_QUEUE"


class GetResult(NamedTuple):
    """The answer to a ``get`` (``GetMessageResult``), with ``messages`` if ``status`` is FOUND."""

    status: GetMessageStatus
    messages: Sequence[StoredMessage]
    next_offset: int
    min_offset: int
    max_offset: int

    @property
    def frames(self) -> bytes:
        """The frames of all messages, in the form that a broker sends to a consumer."""
        return frames_of(self.messages)

    @property
    def size(self) -> int:
        """Total bytes of the frames (``bufferTotalSize``)."""
        return sum(message.size for message in self.messages)


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """The maximum numbers of messages and bytes of one ``get`` (``isTheBatchFull``).

    The answer contains the first message even if it exceeds the limits. For messages in the last
    ``memory_bytes`` of the log, the limits are ``count`` and ``size``. For earlier messages, the
    limits are ``disk_count`` and ``disk_size``.
    """

    memory_bytes: int
    count: int
    size: int
    disk_count: int
    disk_size: int

    @classmethod
    def of(cls, config: StoreConfig, total_memory: int | None = None) -> TransferLimits:
        """Return the limits that a configuration sets on this machine."""
        total = _total_memory() if total_memory is None else total_memory
        return cls(
            memory_bytes=int(total * (config.access_message_in_memory_max_ratio / 100)),
            count=config.max_transfer_count_on_message_in_memory,
            size=config.max_transfer_bytes_on_message_in_memory,
            disk_count=config.max_transfer_count_on_message_in_disk,
            disk_size=config.max_transfer_bytes_on_message_in_disk,
        )


def get_message(
    log: CommitLog,
    queue: Queue,
    offset: int,
    max_count: int,
    *,
    tags: Collection[str] | None,
    limits: TransferLimits,
    read: Callable[[bytes, int], StoredMessage | Damage | None],
    known_damage: Container[int] = (),
) -> GetResult:
    """Get up to ``max_count`` messages (at least one) from a queue offset on.

    With ``tags``, the get checks each message twice. First, as in RocketMQ's store, the hash of the
    message's tag (the tags code) must equal the hash of a wanted tag. Second, as in RocketMQ's
    consumers, the tag itself must equal a wanted tag. The get skips messages in ``known_damage``,
    the physical offsets that a recovery has recorded as damaged.

    Raises:
        CorruptFrame: if the first message has damage that is not in ``known_damage``. If a later
            message has such damage, the answer ends before it, so the next ``get`` raises the
            error.
    """
    low, high = queue.min_offset, queue.max_offset

    def answer(
        status: GetMessageStatus, next_offset: int, messages: tuple[StoredMessage, ...] = ()
    ) -> GetResult:
        return GetResult(status, messages, next_offset, low, high)

    if high == 0:
        return answer(GetMessageStatus.NO_MESSAGE_IN_QUEUE, 0)
    if offset < low:
        return answer(GetMessageStatus.OFFSET_TOO_SMALL, low)
    if offset == high:
        return answer(GetMessageStatus.OFFSET_OVERFLOW_ONE, offset)
    if offset > high:
        return answer(GetMessageStatus.OFFSET_OVERFLOW_BADLY, low if low == 0 else high)
    next_file = offset + queue.units_per_file - offset % queue.units_per_file
    stop = min(next_file, offset + max(LEAST_UNITS, max_count))
    first, units = next(queue.runs(offset, stop), (offset, None))
    if units is None:
        if queue.is_batch:
            next_file = next(queue.runs(stop, high), (high, None))[0]
        queue.warn_of_gap(offset)
        return answer(GetMessageStatus.OFFSET_FOUND_NULL, next_file)
    codes = None if tags is None else {java.hash_code(tag) for tag in tags}

    messages: list[StoredMessage] = []
    size = 0
    read_inner = _InnerReader(read)
    last_batch = -1
    # The first entry may be after ``offset``, because damage can leave a gap in the queue.
    done = first - offset
    if done:
        queue.warn_of_gap(offset)
    status = GetMessageStatus.NO_MATCHED_MESSAGE  # if no message is found
    removed_below: int | None = None
    in_memory_from = memory_start(log, limits)
    in_memory = min(max_count, limits.count), limits.size
    on_disk = min(max_count, limits.disk_count), limits.disk_size
    for physical_offset, unit_size, tags_code in _numbers(units, max_count):
        done += 1
        if removed_below is not None and physical_offset < removed_below:
            continue
        most, most_size = on_disk if physical_offset < in_memory_from else in_memory
        # QUIRK: a filler has the size Integer.MAX_VALUE. In Java, adding this size overflows, so a
        # filler never exceeds the limit. If several entries point to one frame, an inner batch is
        # counted once, and any other frame is counted once per entry.
        added = 0 if unit_size == FILLER_SIZE or physical_offset == last_batch else unit_size
        grown = size + added
        if messages and (len(messages) >= most or grown > most_size):
            done -= 1
            break
        if unit_size <= 0 or physical_offset < 0:
            queue.warn_of_gap(offset + done - 1)
            continue
        if codes is not None and not may_match(tags_code, codes):
            status = GetMessageStatus.NO_MATCHED_MESSAGE
            continue
        if unit_size == FILLER_SIZE:
            continue
        data = log.frame_at(physical_offset, unit_size)
        found: StoredMessage | Damage | None = None
        if data is not None:
            found = read_inner.at(data, physical_offset, offset + done - 1)
            # Check for unreadable bytes after the read, because a page can be lost during the read.
            found = log.unreadable_at(physical_offset, unit_size) or found
        if found is None:
            is_known = physical_offset in known_damage
            missing = None if is_known else log.missing_message(physical_offset, unit_size)
            if isinstance(missing, Damage):
                found = missing
            elif missing is not None:
                if messages:
                    done -= 1
                    break
                raise missing
            else:
                status = GetMessageStatus.MESSAGE_WAS_REMOVING
                # If the message was deleted with its file, skip all messages of this file.
                if not is_known:
                    removed_below = log.end_of_lost_file(physical_offset)
                continue
        if isinstance(found, Damage):
            if physical_offset in known_damage:
                status = GetMessageStatus.MESSAGE_WAS_REMOVING
                continue
            if messages:
                done -= 1
                break
            raise _damaged(log, queue, offset + done - 1, physical_offset, found)
        if tags is not None and found.tags not in tags:
            status = GetMessageStatus.NO_MATCHED_MESSAGE
            continue
        messages.append(found)
        size = grown
        last_batch = physical_offset if read_inner.is_batch_at(physical_offset) else -1
        removed_below = None
    status = GetMessageStatus.FOUND if messages else status
    return answer(status, offset + done, tuple(messages))


class _InnerReader:
    """Reads the message at a queue offset, even if its frame is an inner batch."""

    def __init__(self, read: Callable[[bytes, int], StoredMessage | Damage | None]) -> None:
        self._read = read
        self._place = -1
        self._batch: tuple[StoredMessage, ...] = ()

    def is_batch_at(self, physical_offset: int) -> bool:
        """Whether the inner batch that was read last starts at this physical offset."""
        return physical_offset == self._place

    def at(
        self, data: memoryview, physical_offset: int, queue_offset: int
    ) -> StoredMessage | Damage | None:
        if physical_offset != self._place:
            found = self._read(bytes(data), physical_offset)
            if not isinstance(found, StoredMessage) or not is_inner_batch(found.sys_flag):
                return found
            batch = found.unwrap()
            if len(batch) == 1 and is_inner_batch(batch[0].sys_flag):
                # The flags mark an inner batch, but the body contains no batch. Return the frame as
                # one message, as RocketMQ's clients do.
                return found
            self._place, self._batch = physical_offset, batch
        first, count = self._batch[0].queue_offset, len(self._batch)
        if not first <= queue_offset < first + count:
            return Damage(
                DamageKind.BAD_SIZE,
                f"an inner batch with the queue offsets {first} to {first + count - 1}",
            )
        return self._batch[queue_offset - first]


def may_match(tags_code: int, codes: Collection[int]) -> bool:
    """Whether a message with this tags code can have one of the wanted tags."""
    # A code below INT_MIN is an address in ConsumeQueueExt, and does not determine the tag. Java
    # compares only the low 32 bits of a code (intValue()). It also does this in the schedule topic,
    # where the codes are delivery times of more than 32 bits.
    return tags_code < java.INT_MIN or java.to_int(tags_code) in codes


def memory_start(log: CommitLog, limits: TransferLimits) -> int:
    """Return the lowest physical offset whose message is assumed to be in memory
    (``checkInDiskByCommitOffset``).
    """
    # If the whole log is in memory, do not search for the log's end, because the search takes long.
    if log.files.end - log.min_offset <= limits.memory_bytes:
        return java.LONG_MIN
    return log.max_offset - limits.memory_bytes


def _numbers(units: Units, count: int) -> Iterator[tuple[int, int, int]]:
    """Yield the entries as tuples of Python numbers. The function converts a few entries at a time,
    because the caller usually needs only the first ``count`` entries.
    """
    step = max(1, min(count + 1, _MOST_AT_ONCE))
    for at in range(0, len(units), step):
        yield from units[at : at + step].tolist()


def _damaged(
    log: CommitLog, queue: Queue, queue_offset: int, physical_offset: int, damage: Damage
) -> CorruptFrame:
    reason = (
        f"{damage.reason} (offset {queue_offset} of queue {queue.queue_id} of {queue.topic} "
        "points here)"
    )
    return log.corrupt(physical_offset, Damage(damage.kind, reason))


def _total_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
