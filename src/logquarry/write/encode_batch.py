"""Makes the frames of a batch: messages of one topic and queue, put all together or not at all.

Follows ``DefaultMessageStore.checkMessages``, ``CommitLog.asyncPutMessages`` and the batch form of
``MessageExtEncoder.encode`` of 4.9.3. This module rejects a batch if Java would raise an exception
for its wire form. The kernel only detects faults; the pure-Python version (the reference) then
raises the error.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np

from logquarry import arguments
from logquarry.config import StoreConfig
from logquarry.disk.mapped_file import MappedFile
from logquarry.errors import StoreError, UsageError
from logquarry.format import batch, frame, java, sys_flag
from logquarry.format import properties as props
from logquarry.format.arrays import Bytes
from logquarry.format.batch import INNER_BATCH, MOST_MESSAGES, BatchItem
from logquarry.log import codec
from logquarry.message import Message
from logquarry.read.log_queues import QueueKey
from logquarry.write import message_rules as rules
from logquarry.write.encode import Copies, Encoded, MessageEncoder, Numbers
from logquarry.write.message_rules import HostFields, too_large
from logquarry.write.put_result import PutStatus, refusal

_SEPARATOR: Final = props.PROPERTY_SEPARATOR.encode()
_VALUE: Final = props.NAME_VALUE_SEPARATOR
_SHARED: Final = (
    "topic",
    "queue_id",
    "sys_flag",
    "born_timestamp",
    "born_host",
    "store_host",
    "reconsume_times",
)


def encode_batch(
    encoder: MessageEncoder,
    config: StoreConfig,
    wire: bytes,
    message: Message,
    *,
    is_producer: bool = False,
) -> Encoded:
    """Return the frames of a batch in wire form (:mod:`logquarry.format.batch`).

    Usually each message gets its own frame. If the topic has batch queues and the batch has a
    UNIQ_KEY, the whole batch becomes one frame. RocketMQ 5 calls this frame an inner batch
    (``SendMessageProcessor.sendBatchMessage``).

    Args:
        wire: the messages. TOTALSIZE, MAGICCODE and BODYCRC are ignored.
        message: the fields that all messages share. The properties in ``message`` are appended to
            the properties of each message.
        is_producer: whether a batch without UNIQ_KEY also becomes one frame, as a batch from a
            RocketMQ 5 producer does.

    Raises:
        MessageRejected: if the store refuses the batch.
        UsageError: if a number does not fit its field, or ``message`` has a body.
    """
    if len(message.body):
        raise UsageError("a batch has its bodies in the wire form, and no other")
    topic_data = rules.topic_bytes(message.topic, config.topic_check)
    if len(wire) > config.max_message_size:
        raise too_large(len(wire), config.max_message_size)
    if sys_flag.transaction_type(message.sys_flag) != sys_flag.TRANSACTION_NOT:
        raise refusal(
            PutStatus.MESSAGE_ILLEGAL,
            f"a batch cannot be part of a transaction: its SYSFLAG is {message.sys_flag:#x}",
            reason="transaction",
        )
    values = rules.looked_at(message)
    if rules.delay_level(values.get(props.DELAY)) > 0 or rules.is_timed(values):
        raise refusal(PutStatus.MESSAGE_ILLEGAL, "a batch cannot be delayed", reason="delay")
    hosts = encoder.hosts(message)
    numbers = encoder.numbers(message)
    shared = rules.utf8(rules.PropertyMap(message).text())
    if len(shared) > rules.LONGEST_PROPERTIES:
        raise refusal(
            PutStatus.PROPERTIES_SIZE_EXCEEDED,
            f"the batch's properties take {len(shared)} bytes; the maximum is "
            f"{rules.LONGEST_PROPERTIES}",
            reason="properties",
        )
    if message.topic in config.batch_topics and (
        is_producer or props.UNIQ_KEY in message.all_properties()
    ):
        return _inner_batch(encoder, config, wire, message, topic_data, shared)
    if not wire:
        raise _no_messages()
    most = config.max_message_size
    key, wait = (message.topic, message.queue_id), rules.waits(values)
    if codec.kernels_enabled() and not encoder.has_property_crc:
        parts = _kernel_parts(wire, hosts, topic_data, numbers, shared)
        if parts is not None:
            frames = WireFrames(parts, key, hosts, wait)
            if frames.measure(most):
                return frames
    data, starts, body_size = _frames_reference(
        encoder, most, wire, hosts, topic_data, numbers, shared
    )
    return Encoded(data, body_size, key, hosts, wait, starts=starts)


def encode_messages(
    encoder: MessageEncoder, config: StoreConfig, messages: Sequence[Message]
) -> Encoded:
    """Return the frames of a batch of messages; see :func:`wire_form` and :func:`encode_batch`."""
    wire, shared = wire_form(messages)
    encoded = encode_batch(encoder, config, wire, shared, is_producer=True)
    # A client sets WAIT in each message and also in the batch, so a broker writes WAIT twice.
    encoded.wait = all(rules.waits(rules.looked_at(message)) for message in messages)
    return encoded


def _no_messages() -> StoreError:
    # QUIRK: for a batch without messages, RocketMQ's store writes nothing and returns PUT_OK. Then
    # the broker asks for the message id, and gets an exception (test_append_vectors: vector 22).
    text = "the batch has no messages: put at least one message"
    return refusal(PutStatus.MESSAGE_ILLEGAL, text, reason="count")


def _inner_batch(
    encoder: MessageEncoder,
    config: StoreConfig,
    wire: bytes,
    message: Message,
    topic_data: bytes,
    shared: bytes,
) -> Encoded:
    # Check the sizes, because a client could not split a frame with wrong sizes into its messages.
    count = sum(1 for _ in _items(wire, check_size=True))
    if not 0 < count <= MOST_MESSAGES:
        text = f"an inner batch holds 1 to {MOST_MESSAGES} messages, not {count}"
        raise refusal(PutStatus.MESSAGE_ILLEGAL, text, reason="count")
    message = message._replace(sys_flag=message.sys_flag | INNER_BATCH)
    hosts = encoder.hosts(message)
    numbers = encoder.numbers(message)
    glue = _SEPARATOR if shared and not shared.endswith(_SEPARATOR) else b""

    def frame_at(base: str) -> bytearray:
        pairs = {props.INNER_NUM: str(count), props.INNER_BASE: base}
        own = rules.utf8(
            "".join(f"{k}{_VALUE}{v}{props.PROPERTY_SEPARATOR}" for k, v in pairs.items())
        )
        made = encoder.frame(hosts, topic_data, wire, numbers, shared + glue + own)
        if len(made) > config.max_message_size:
            raise too_large(len(made), config.max_message_size)
        return made

    # Make the frame once, so that a batch that is too large is refused before the append takes the
    # log's lock.
    frame_at(str(java.LONG_MAX))
    wait = rules.waits(rules.looked_at(message))
    key, copies = (message.topic, message.queue_id), Copies((), frame_at, count)
    return Encoded(bytearray(), len(wire), key, hosts, wait, copies=copies)


def wire_form(messages: Sequence[Message]) -> tuple[bytes, Message]:
    """Return the wire form and the shared fields of messages (``MessageDecoder.encodeMessages``).

    Raises:
        UsageError: if the messages differ in a shared field.
        MessageRejected: if there are no messages, if a message is delayed, or if its properties are
            too long.
    """
    if not messages:
        raise _no_messages()
    first = messages[0]
    for message in messages:
        for name in _SHARED:
            if getattr(message, name) != getattr(first, name):
                raise UsageError(
                    f"the messages of a batch have one {name}: {getattr(first, name)!r} is not "
                    f"{getattr(message, name)!r}"
                )
        values = rules.looked_at(message)
        if rules.delay_level(values.get(props.DELAY)) > 0 or rules.is_timed(values):
            raise refusal(
                PutStatus.MESSAGE_ILLEGAL, "a message in a batch cannot be delayed", reason="delay"
            )
    try:
        wire = batch.encode(
            BatchItem(
                arguments.as_bytes(message.body, "body"),
                rules.given_properties(message),
                message.flag,
            )
            for message in messages
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    shared: dict[str, object] = {name: getattr(first, name) for name in _SHARED}
    return wire, Message(**shared)  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------------------
# The code below makes the frames of a checked batch. It has a pure-Python version (the reference),
# and a version with a kernel that writes the same bytes.


def _frames_reference(
    encoder: MessageEncoder,
    most: int,
    wire: bytes,
    hosts: HostFields,
    topic_data: bytes,
    numbers: Numbers,
    shared: bytes,
) -> tuple[bytearray, tuple[int, ...], int]:
    frames: list[bytearray] = []
    starts: list[int] = []
    size = body_size = 0
    queue_id, _, born, reconsume_times, _ = numbers
    for item in _items(wire, check_size=False):
        own = item.properties
        glue = _SEPARATOR if own and shared and not own.endswith(_SEPARATOR) else b""
        # QUIRK: if the joined properties of a message and its batch are too long for PROPERTIESLEN,
        # Java writes a wrong length, and the frame cannot be read. logquarry refuses the batch
        # (test_encode_batch.py::test_properties_that_are_too_long_together).
        made = encoder.frame(
            hosts,
            topic_data,
            item.body,
            (queue_id, item.flag, born, reconsume_times, 0),
            own + glue + shared,
        )
        starts.append(size)
        frames.append(made)
        size += len(made)
        body_size += len(item.body)
        if size > most:
            raise too_large(size, most)
    return bytearray().join(frames), tuple(starts), body_size


Parts = tuple[Bytes, Bytes, Bytes, Bytes]


class WireFrames(Encoded):
    """The frames of a batch. A kernel writes the frames into the log's file.

    ``parts`` contains the wire form, the head that all frames share, the topic, and the properties
    of the batch.
    """

    __slots__ = ("_parts", "_place", "_size", "_starts")

    def __init__(self, parts: Parts, key: QueueKey, hosts: HostFields, wait: bool) -> None:
        self.key, self.hosts, self.wait, self.own_offset = key, hosts, wait, 0
        self._parts = parts
        self._starts = np.empty(len(parts[0]) // batch.FIXED_SIZE + 1, np.int64)
        self.copies = None
        self._place = 0, 0, 0

    def measure(self, most: int) -> bool:
        """Compute the start of each frame. Return False if the pure-Python version would refuse the
        batch.
        """
        count, self._size, self.body_size = self._run(0, most, 0, 0, 0)
        self.starts = tuple(self._starts[:count].tolist()) if count >= 0 else ()
        return bool(count >= 0)

    @property
    def size(self) -> int:
        """See :attr:`Encoded.size`."""
        return self._size

    @property
    def data(self) -> bytearray:  # type: ignore[override]
        """The frames with the offsets and the store time from :meth:`place`."""
        out = np.empty(self._size, np.uint8)
        if self._size:
            self._run(out.ctypes.data, self._size, *self._place)
        return bytearray(out)

    def place(self, queue_offset: int, physical_offset: int, store_timestamp: int) -> None:
        """See :meth:`Encoded.place`."""
        self._place = queue_offset, physical_offset, store_timestamp

    def write(
        self,
        file: MappedFile,
        queue_offset: int,
        physical_offset: int,
        now: int,
        placed: Callable[[Encoded], None],
    ) -> None:
        """See :meth:`Encoded.write`."""
        address = file.address
        if not address or not self._size or self._size > file.room:
            super().write(file, queue_offset, physical_offset, now, placed)
            return
        # The caller holds the log's lock, and closing a log first waits for this lock. So this file
        # cannot be closed here, and the address stays valid.
        self._run(address + file.wrote, self._size, queue_offset, physical_offset, now)
        file.advance(self._size)

    def _run(
        self, target: int, room: int, queue_offset: int, physical_offset: int, now: int
    ) -> tuple[int, int, int]:
        count, size, body_size = codec.require_kernels().batch_frames(
            *(*self._parts, codec.crc32_address(), target, room, self._starts),
            *(self.hosts.store_time_at, queue_offset, physical_offset, now),
        )
        return int(count), int(size), int(body_size)


def _kernel_parts(
    wire: bytes, hosts: HostFields, topic_data: bytes, numbers: Numbers, shared: bytes
) -> Parts | None:
    queue_id, _, born, reconsume_times, _ = numbers
    try:
        head = hosts.pack(
            *(0, frame.MAGIC_V1, 0, queue_id, 0, 0, 0, hosts.flags, born),
            *(hosts.born_host, 0, hosts.store_host, reconsume_times, 0, 0),
        )
    except struct.error:
        return None
    return (
        np.frombuffer(wire, np.uint8),
        np.frombuffer(head, np.uint8),
        np.frombuffer(topic_data, np.uint8),
        np.frombuffer(shared, np.uint8),
    )


def _items(wire: bytes, *, check_size: bool) -> Iterator[BatchItem]:
    try:
        yield from batch.decode(wire, check_size=check_size)
    except ValueError as error:
        text = f"the wire form of the batch is wrong: {error}"
        raise refusal(PutStatus.MESSAGE_ILLEGAL, text, reason="truncated") from error
