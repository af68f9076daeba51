"""Makes the frame of a message. Offsets and store time stay 0, because they are known only under
the log's lock.

Follows ``DefaultMessageStore.checkMessage``, the first half of ``CommitLog.asyncPutMessage`` and
``MessageExtEncoder`` of 4.9.3. The checks have RocketMQ's order, because the first failed check
determines the status. If a topic is too long for its length byte, or SYSFLAG contradicts the size
of a host, RocketMQ writes a frame that cannot be read. This module rejects such a message.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from logquarry import arguments
from logquarry.config import StoreConfig
from logquarry.disk.mapped_file import MappedFile
from logquarry.errors import MessageRejected, UsageError
from logquarry.format import frame, java, sys_flag, timer
from logquarry.format import properties as props
from logquarry.format.java import crc32
from logquarry.message import Message
from logquarry.read.log_queues import QueueKey, copy_key, named_copies
from logquarry.write import message_rules as rules
from logquarry.write.message_rules import HostFields, host_fields, too_large
from logquarry.write.put_result import PutStatus, refusal

_DELAY, _WAIT, _COPIES = props.DELAY, props.WAIT, props.INNER_MULTI_DISPATCH
_OFFSETS: Final = struct.Struct(">qq").pack_into
_OFFSETS_AT: Final = frame.HEAD.offsets["queue_offset"]
assert frame.HEAD.offsets["physical_offset"] == _OFFSETS_AT + 8
_TIME: Final = frame.STORE_TIME.struct.pack_into
_LENGTH: Final = frame.PROPERTIES_LENGTH.struct.pack
_MAGIC: Final = frame.MAGIC_V1
_CRC_MASK: Final = java.INT_MAX
_V6: Final = sys_flag.BORN_HOST_V6 | sys_flag.STORE_HOST_V6
_ONE_FRAME: Final = (0,)

Numbers = tuple[int, int, int, int, int]
"""The queue id, flag, born time, reconsume times and prepared transaction offset of a message."""


@dataclass(slots=True, eq=False, repr=False)
class Encoded:
    """The frame of a message, or the frames of a batch, before the log's lock is taken.

    Attributes:
        data: the bytes. The fields that :meth:`place` fills in are 0.
        body_size: total bytes of the bodies, for log messages.
        key: topic and queue id that the frames contain. For a delayed message, this is a queue of
            the schedule topic.
        hosts: hosts and SYSFLAG of all frames.
        wait: whether the message requests that its put waits for flush and replica.
        own_offset: the value of QUEUEOFFSET in frames that take no new queue offset.
        starts: position in ``data`` of each frame's start.
        copies: the further queues to which multi-dispatch adds the message; None if there are none.
            If there are some, ``data`` is empty until the appender makes the frame under the log's
            lock.
    """

    data: bytearray
    body_size: int
    key: QueueKey
    hosts: HostFields
    wait: bool
    own_offset: int = 0
    starts: tuple[int, ...] = _ONE_FRAME
    copies: Copies | None = None

    @property
    def messages(self) -> int:
        """Number of messages in the frames."""
        return len(self.starts) if self.copies is None else self.copies.messages

    @property
    def size(self) -> int:
        """Bytes of all frames."""
        return len(self.data)

    def write(
        self,
        file: MappedFile,
        queue_offset: int,
        physical_offset: int,
        now: int,
        placed: Callable[[Encoded], None],
    ) -> None:
        """Append the frames to a file, which must have room. ``now`` is the store time in
        milliseconds.

        The method calls :meth:`place`, and then ``placed`` to complete the frames.
        """
        self.place(queue_offset, physical_offset, now)
        placed(self)
        file.append(self.data)

    def place(self, queue_offset: int, physical_offset: int, store_timestamp: int) -> None:
        """Set QUEUEOFFSET, PHYSICALOFFSET and STORETIMESTAMP in all frames. The arguments
        ``queue_offset`` and ``physical_offset`` are the offsets of the first frame.

        A second call overwrites the fields.
        """
        data, time_at = self.data, self.hosts.store_time_at
        for start in self.starts:
            _OFFSETS(data, start + _OFFSETS_AT, queue_offset, physical_offset + start)
            _TIME(data, start + time_at, store_timestamp)
            queue_offset += 1


class Copies:
    """A message whose properties contain queue offsets. The frame of such a message can be made
    only under the log's lock, when the offsets are known.

    The properties contain the message's offset in each further queue (``MultiDispatch``), or the
    offset of the first message of an inner batch. The frame takes ``messages`` queue offsets.
    """

    __slots__ = ("_encode", "keys", "messages")

    def __init__(
        self, keys: tuple[QueueKey, ...], encode: Callable[[str], bytearray], messages: int = 1
    ) -> None:
        self.keys = keys
        self.messages = messages
        self._encode = encode

    def frame(self, queue_offset: int, offsets: list[int]) -> bytearray:
        """Make the frame. ``offsets`` contains the message's offset in each further queue.

        If the frame is too large, raise MessageRejected with UNKNOWN_ERROR, as in RocketMQ.
        """
        return self._encode(props.MULTI_SEPARATOR.join(map(str, offsets or [queue_offset])))


def check_widths(numbers: Numbers) -> None:
    """Raise UsageError, with the field's name, if a number does not fit its field of the frame."""
    queue_id, flag, born, reconsume_times, prepared_offset = numbers
    arguments.int32(queue_id, "queue_id")
    arguments.int32(flag, "flag")
    arguments.integer(born, "born_timestamp")
    arguments.int32(reconsume_times, "reconsume_times")
    arguments.integer(prepared_offset, "prepared_transaction_offset")


class MessageEncoder:
    """Checks messages and makes their frames.

    ``clock`` returns the born time, in milliseconds, of a message without born time. With
    ``has_property_crc``, each frame ends with room for a property CRC
    (:mod:`logquarry.format.properties`), which the appender fills in.
    """

    def __init__(
        self, config: StoreConfig, clock: Callable[[], int], *, has_property_crc: bool = False
    ) -> None:
        self.has_property_crc = has_property_crc
        self._config = config
        self._clock = clock
        self._levels = len(config.delay_levels_ms)
        self._largest = config.max_message_size
        self._store_host = config.store_host
        self._topic_check = config.topic_check
        self._copies_messages = config.enable_multi_dispatch
        self._is_3_1 = config.is_3_1

    def encode(self, message: Message) -> Encoded:
        """Return the frame of a message.

        Raises:
            MessageRejected: if the store refuses the message.
            UsageError: if a number does not fit its field, or the message has tags or keys in
                addition to a property string.
        """
        topic, queue_id = message.topic, message.queue_id
        body = arguments.as_bytes(message.body, "body")
        topic_data = rules.topic_bytes(topic, self._topic_check)
        properties = rules.given_properties(message, is_closed=self._is_3_1)
        values = rules.looked_at(message)
        changed = None
        if values and sys_flag.advances_queue(message.sys_flag):
            changed, (topic, queue_id) = self._delayed(message, values)
            if changed is not None:
                topic_data = rules.topic_bytes(topic, "")
                properties = rules.utf8(changed.text(is_closed=self._is_3_1))
        hosts = self.hosts(message)
        numbers = queue_id, *self.numbers(message)[1:]
        copies, data = None, bytearray()
        if self._copies_messages and values.get(_COPIES, "").strip():
            make = partial(self.frame, hosts, topic_data, body, numbers)
            copies = self._copies(changed or rules.PropertyMap(message), queue_id, make)
        else:
            data = self.frame(hosts, topic_data, body, numbers, properties)
        wait = rules.waits(values) if values else True
        own_offset = message.queue_offset if self._is_3_1 else 0
        key = topic, queue_id
        return Encoded(data, len(body), key, hosts, wait, own_offset, copies=copies)

    def encode_stored(self, message: Message) -> Encoded:
        """Return the frame of a message that was stored before, without the changes of a put.

        Topic and property string stay unchanged, because they already show the message's delay and
        its further queues. The offsets in the property string must be equal to the next offsets of
        the further queues. Raises the errors of :meth:`encode`.
        """
        topic_data = rules.topic_bytes(message.topic, self._topic_check)
        properties = rules.given_properties(message, is_closed=self._is_3_1)
        hosts = self.hosts(message)
        body = arguments.as_bytes(message.body, "body")
        data = self.frame(hosts, topic_data, body, self.numbers(message), properties)
        copies = None
        if self._copies_messages and hosts.advances:
            values = props.decode_bytes(properties)
            named = dict(named_copies(values, message.queue_id, self._config))
            if named:
                copies = _stored_copies(named, data)
        key = message.topic, message.queue_id
        return Encoded(data, len(body), key, hosts, True, message.queue_offset, copies=copies)

    def hosts(self, message: Message) -> HostFields:
        """Return hosts and SYSFLAG; raise MessageRejected for an invalid host or address family."""
        store_host = self._store_host if message.store_host is None else message.store_host
        hosts = host_fields(message.born_host, store_host, message.sys_flag)
        if self._is_3_1 and hosts.flags & _V6:
            raise refusal(
                PutStatus.MESSAGE_ILLEGAL, "dialect 3.1 has no IPv6 hosts", reason="hosts"
            )
        return hosts

    def numbers(self, message: Message) -> Numbers:
        """Return the numeric fields of a message or batch for :meth:`frame`."""
        born = message.born_timestamp
        return (
            message.queue_id,
            message.flag,
            self._clock() if born is None else born,
            message.reconsume_times,
            message.prepared_transaction_offset,
        )

    def frame(
        self,
        hosts: HostFields,
        topic_data: bytes,
        body: bytes | bytearray | memoryview,
        numbers: Numbers,
        properties: bytes,
    ) -> bytearray:
        """Make one frame, with 0 in the fields that :meth:`Encoded.place` fills in.

        Raises:
            MessageRejected: if the properties or the whole frame is too large.
            UsageError: if a number does not fit its field.
        """
        if type(body) is not bytes:
            # The len() of a memoryview counts items, and an item can have several bytes.
            body = bytes(body)
        queue_id, flag, born, reconsume_times, prepared_offset = numbers
        if self.has_property_crc:
            properties = props.with_crc_room(properties)
        body_length, properties_length = len(body), len(properties)
        if properties_length > rules.LONGEST_PROPERTIES:
            raise refusal(
                PutStatus.PROPERTIES_SIZE_EXCEEDED,
                f"the properties take {properties_length} bytes, and {rules.LONGEST_PROPERTIES} "
                "are the most",
                reason="properties",
            )
        size = hosts.fixed_size + body_length + len(topic_data) + properties_length
        if size > self._largest:
            raise too_large(size, self._largest)
        try:
            head = hosts.pack(
                size,
                _MAGIC,
                crc32(body) & _CRC_MASK,
                queue_id,
                flag,
                0,
                0,
                hosts.flags,
                born,
                hosts.born_host,
                0,
                hosts.store_host,
                reconsume_times,
                prepared_offset,
                body_length,
            )
        except struct.error as error:
            check_widths(numbers)
            raise UsageError(f"a field does not fit its width: {error}") from error
        return bytearray().join((head, body, topic_data, _LENGTH(properties_length), properties))

    def _delayed(
        self, message: Message, values: Mapping[str, str]
    ) -> tuple[rules.PropertyMap | None, QueueKey]:
        """Return the changed properties of a delayed message, and the queue of its frame. If the
        store does not delay the message, return None and the message's own queue.
        """
        own = message.topic, message.queue_id
        if rules.is_timed(values) and message.topic != timer.TOPIC and not self._is_3_1:
            config = self._config
            slot = rules.timer_slot(
                *(values, self._clock()),
                longest_s=config.timer_max_delay_sec,
                precision_ms=config.timer_precision_ms or timer.PRECISION_MS,
            )
            if slot is None:
                return None, own
            changed = rules.PropertyMap(message)
            changed.values[props.TIMER_OUT_MS] = str(slot)
            changed.values[props.REAL_TOPIC] = message.topic
            changed.values[props.REAL_QUEUE_ID] = str(message.queue_id)
            return changed, (timer.TOPIC, 0)
        stated = rules.delay_level(values.get(_DELAY))
        level = min(stated, self._levels)
        if level <= 0:
            return None, own
        changed = rules.PropertyMap(message)
        if level < stated:
            changed.values[_DELAY] = str(level)
        changed.values[props.REAL_TOPIC] = message.topic
        changed.values[props.REAL_QUEUE_ID] = str(message.queue_id)
        return changed, (props.SCHEDULE_TOPIC, level - 1)

    def _copies(
        self, changed: rules.PropertyMap, queue_id: int, make: Callable[[bytes], bytearray]
    ) -> Copies:
        # Java's String.split drops empty parts only at the end.
        names = changed.values[_COPIES].rstrip(props.MULTI_SEPARATOR).split(props.MULTI_SEPARATOR)
        for name in names:
            fault = rules.name_fault(name, "store", longest=rules.LONGEST_NAME)
            if fault is not None:
                rules.reject_topic(name, fault)

        def encode(offsets: str) -> bytearray:
            changed.values[props.INNER_MULTI_QUEUE_OFFSET] = offsets
            try:
                return make(rules.utf8(changed.text(without=_WAIT)))
            except MessageRejected as error:
                raise refusal(PutStatus.UNKNOWN_ERROR, str(error), reason=error.reason) from error

        keys = tuple(copy_key(name, queue_id, self._config) for name in names)
        return Copies(keys, encode)


def _stored_copies(named: Mapping[QueueKey, int], data: bytearray) -> Copies:

    def encode(offsets: str) -> bytearray:
        stated = props.MULTI_SEPARATOR.join(map(str, named.values()))
        if offsets != stated:
            names = ", ".join(name for name, _ in named)
            raise refusal(
                PutStatus.MESSAGE_ILLEGAL,
                f"its properties state offset {stated} in the further queues {names}, and the next "
                f"ones there are {offsets}",
                reason="properties",
            )
        return data

    return Copies(tuple(named), encode)
