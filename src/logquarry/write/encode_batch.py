"""A batch in wire form by a kernel, as far as it is taken; a refusal is the reference's."""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from logquarry.config import StoreConfig
from logquarry.errors import UsageError
from logquarry.format import batch, frame, sys_flag
from logquarry.format import properties as props
from logquarry.format.batch import BatchItem
from logquarry.log import codec
from logquarry.message import Message
from logquarry.write.encode import (
    Encoded,
    MessageEncoder,
    PropertyMap,
    check_topic,
    delay_level,
    given_properties,
    looked_at,
    utf8,
    waits,
)
from logquarry.write.frame_maker import LONGEST_PROPERTIES, FrameMaker, too_large
from logquarry.write.put_result import PutStatus, refusal

_CACHED: Final = 1_024

Bytes8 = npt.NDArray[np.uint8]
Int64 = npt.NDArray[np.int64]


class EncodedBatch(Encoded):
    """A batch's frames, whose places a kernel fills in."""

    __slots__ = ("_view", "_where")

    def __init__(self, data: bytearray, where: Int64, *given: Any, **more: Any) -> None:
        super().__init__(data, *given, starts=tuple(where.tolist()), **more)
        self._where = where
        self._view = np.frombuffer(data, np.uint8)

    def place(self, queue_offset: int, physical_offset: int, store_timestamp: int) -> None:
        """See :meth:`Encoded.place`."""
        kernels = codec.kernels()
        assert kernels is not None
        kernels.place_frames(
            self._view, self._where, self._time_at, queue_offset, physical_offset, store_timestamp
        )


class _Scratch(threading.local):
    """Room for the frames of the largest batch, for each thread its own. Taken as it is used."""

    out: Bytes8 = np.empty(0, np.uint8)
    starts: Int64 = np.empty(0, np.int64)

    def of(self, size: int) -> tuple[Bytes8, Int64]:
        if len(self.out) != size:
            self.out = np.empty(size, np.uint8)
            self.starts = np.empty(size // batch.FIXED_SIZE + 1, np.int64)
        return self.out, self.starts


_scratch = _Scratch()


def batch_by_kernel(
    config: StoreConfig,
    wire: bytes,
    message: Message,
    maker: FrameMaker,
    topic: bytes,
    shared: bytes,
    wait: bool,
) -> Encoded | None:
    """The frames of a batch that was checked; None where one of them is refused.

    Args:
        config: the store's settings.
        wire: the messages.
        message: what they share.
        maker: knows the hosts.
        topic: the topic's bytes.
        shared: the batch's own properties.
        wait: whether the put waits for flush and replica.
    """
    kernels = codec.kernels()
    assert kernels is not None
    head = maker.head(message.queue_id)
    if head is None:
        return None
    out, starts = _scratch.of(config.max_message_size)
    count, size, bodies = kernels.batch_frames(
        np.frombuffer(wire, np.uint8),
        np.frombuffer(head, np.uint8),
        _with_length(topic),
        _as_array(shared),
        codec.crc32_address(),
        out,
        starts,
    )
    if count < 0:
        return None
    _load_kernel()
    return EncodedBatch(
        bytearray(out[:size]),
        starts[:count].copy(),
        message.topic,
        message.queue_id,
        maker.hosts,
        wait=wait,
        body_size=bodies,
    )


@cache
def _load_kernel() -> None:
    """Load or compile what fills in the places, which takes a moment: not with the log held."""
    kernels = codec.kernels()
    assert kernels is not None
    kernels.place_frames(np.empty(0, np.uint8), np.empty(0, np.int64), 0, 0, 0, 0)


@lru_cache(_CACHED)
def _with_length(topic: bytes) -> Bytes8:
    return _as_array(frame.TOPIC_LENGTH_V1.struct.pack(len(topic)) + topic)


@lru_cache(_CACHED)
def _as_array(data: bytes) -> Bytes8:
    array: Bytes8 = np.frombuffer(data, np.uint8)
    return array


# --------------------------------------------------------------------------------------------------
# From a batch to its frames: one topic and queue, all or nothing.
#
# Follows ``DefaultMessageStore.checkMessages``, ``CommitLog.asyncPutMessages`` and the batch form
# of ``MessageExtEncoder.encode`` of 4.9.3. A batch comes as the wire form that clients send
# (:mod:`logquarry.format.batch`), or as messages that are brought into it.
#
# Guarantees: as for single messages. Where Java throws (a wire form cut short, too many bytes), the
# batch is refused.

_SEPARATOR: Final = props.PROPERTY_SEPARATOR.encode()
_SHARED: Final = (
    "topic",
    "queue_id",
    "sys_flag",
    "born_timestamp",
    "born_host",
    "store_host",
    "reconsume_times",
)
"""What a batch has once."""


def encode_batch(
    encoder: MessageEncoder, config: StoreConfig, wire: bytes, message: Message
) -> Encoded:
    """The frames of a batch in wire form.

    Args:
        encoder: gives what the frames share.
        config: the store's settings.
        wire: the messages. Their TOTALSIZE, MAGICCODE and BODYCRC are not looked at.
        message: what they share; its properties are added to those of each message.

    Raises:
        MessageRejected: if the store does not take it.
        UsageError: if a number does not fit its field, or ``message`` has a body of its own.
    """
    if len(message.body):
        raise UsageError("a batch has its bodies in the wire form, and no other")
    topic = check_topic(message.topic, config)
    if len(wire) > config.max_message_size:
        raise too_large(len(wire), config.max_message_size)
    if sys_flag.transaction_type(message.sys_flag) != sys_flag.TRANSACTION_NOT:
        raise refusal(
            PutStatus.MESSAGE_ILLEGAL,
            f"a batch takes part in no transaction: its SYSFLAG is {message.sys_flag:#x}",
            reason="transaction",
        )
    values = looked_at(message)
    if delay_level(values.get(props.DELAY)) > 0:
        raise refusal(PutStatus.MESSAGE_ILLEGAL, "a batch is not delayed", reason="delay")
    maker = encoder.maker(message)
    shared = utf8(PropertyMap(message).text())
    if len(shared) > LONGEST_PROPERTIES:
        raise refusal(
            PutStatus.PROPERTIES_SIZE_EXCEEDED,
            f"the batch's properties take {len(shared)} bytes, and {LONGEST_PROPERTIES} are the "
            "most",
            reason="properties",
        )
    wait = waits(values)
    if codec.kernels_enabled():
        fast = batch_by_kernel(config, wire, message, maker, topic, shared, wait)
        if fast is not None:
            return fast
    frames: list[bytearray] = []
    starts: list[int] = []
    size = bodies = 0
    for flag, body, own in _items(wire):
        glue = _SEPARATOR if own and shared and not own.endswith(_SEPARATOR) else b""
        # QUIRK: Java lets PROPERTIESLEN wrap where a message's and the batch's are too long
        # together, and the frame cannot be read; the frame maker refuses
        # (test_encode_batch.py::test_properties_that_are_too_long_together).
        made = maker.frame(topic, message.queue_id, body, own + glue + shared, flag=flag)
        starts.append(size)
        frames.append(made)
        size += len(made)
        bodies += len(body)
        if size > config.max_message_size:
            raise too_large(size, config.max_message_size)
    return Encoded(
        bytearray().join(frames),
        message.topic,
        message.queue_id,
        maker.hosts,
        starts=tuple(starts),
        wait=wait,
        body_size=bodies,
    )


def encode_messages(
    encoder: MessageEncoder, config: StoreConfig, messages: Sequence[Message]
) -> Encoded:
    """The frames of a batch of messages; see :func:`wire_form` and :func:`encode_batch`."""
    wire, shared = wire_form(messages)
    encoded = encode_batch(encoder, config, wire, shared)
    # A client states it once more for the whole batch, and the broker writes it twice.
    encoded.wait = all(waits(looked_at(message)) for message in messages)
    return encoded


def wire_form(messages: Sequence[Message]) -> tuple[bytes, Message]:
    """The wire form of some messages, and what they share (``MessageDecoder.encodeMessages``).

    Raises:
        UsageError: if they differ in what a batch has only once.
        MessageRejected: if one of them is delayed, or its properties are too long.
    """
    if not messages:
        raise UsageError("a batch of no messages has no topic; give a wire form and a message")
    first = messages[0]
    for message in messages:
        for name in _SHARED:
            if getattr(message, name) != getattr(first, name):
                raise UsageError(
                    f"the messages of a batch have one {name}: {getattr(first, name)!r} is not "
                    f"{getattr(message, name)!r}"
                )
        if delay_level(looked_at(message).get(props.DELAY)) > 0:
            raise refusal(
                PutStatus.MESSAGE_ILLEGAL, "a message in a batch is not delayed", reason="delay"
            )
    try:
        wire = batch.encode(
            BatchItem(bytes(message.body), given_properties(message), message.flag)
            for message in messages
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    shared: dict[str, object] = {name: getattr(first, name) for name in _SHARED}
    return wire, Message(**shared)  # type: ignore[arg-type]


def _items(wire: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """Flag, body and properties of each message.

    RocketMQ reads over TOTALSIZE, and so do we; :func:`logquarry.format.batch.decode` is strict.
    """
    head, length = batch.HEAD.struct, batch.PROPERTIES_LENGTH
    at, end = 0, len(wire)
    try:
        while at < end:
            *_, flag, body_length = head.unpack_from(wire, at)
            body_at = at + head.size
            body_end = body_at + body_length
            if body_length < 0 or body_end > end:
                raise _cut_short(f"BODYLEN is {body_length} where {end - body_at} bytes are left")
            (properties_length,) = length.struct.unpack_from(wire, body_end)
            properties_at = body_end + length.size
            at = properties_at + properties_length
            if properties_length < 0 or at > end:
                raise _cut_short(
                    f"PROPERTIESLEN is {properties_length} where {end - properties_at} bytes are "
                    "left"
                )
            yield flag, wire[body_at:body_end], wire[properties_at:at]
    except struct.error as error:
        raise _cut_short(f"at {at}, {end - at} bytes are left") from error


def _cut_short(why: str) -> Exception:
    return refusal(
        PutStatus.MESSAGE_ILLEGAL,
        f"the wire form of the batch is cut short: {why}",
        reason="truncated",
    )
