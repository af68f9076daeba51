"""The writer of the commit log: puts one message or one batch.

The same source runs compiled by Cython (``commit_log_writer.pxd`` has the C types) or interpreted.
For speed, the code that writes the frame of a common message has two versions. All other code has
one version. In the interpreted version, :meth:`CommitLogWriter.put_common` joins packed fields. In
the compiled version, :class:`~logquarry.write.frame_append.FrameAppend` writes numbers to memory.

The methods :meth:`MessageEncoder.encode <logquarry.write.encode.MessageEncoder.encode>` and
:meth:`LogAppender.append <logquarry.write.log_appender.LogAppender.append>` are the reference. The
two versions write the same bytes as the reference (tests/property/test_put_path_twins.py).

The reference can put any message or batch. :meth:`CommitLogWriter.put_common` returns None, and
changes nothing, in these cases:

- The message has a delay, the property WAIT or further queues, or its body is not a ``bytes``
  object.
- The message must be refused.
- The store has dialect 3.1 or property CRCs.

If this module is compiled, :meth:`CommitLogWriter.put_common_batch` puts common batches, and
``elapsed_ms`` is measured with a clock that advances only every 1 to 4 ms. If this module is
interpreted, the reference (:mod:`logquarry.write.encode_batch`) makes the frames of all batches.
"""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeGuard

from logquarry.errors import LogquarryError
from logquarry.format import batch, frame, java
from logquarry.format import properties as props
from logquarry.format.java import crc32
from logquarry.message import Message
from logquarry.text import counted
from logquarry.write.frame_append import SLOW_PUT, log_held
from logquarry.write.log_appender import LogAppender
from logquarry.write.message_rules import LONGEST_PROPERTIES, host_fields, topic_bytes
from logquarry.write.put_result import AppendStatus, PutResult, PutStatus

try:
    import cython
except ImportError:
    from logquarry import compiled as cython

if cython.compiled:
    from cython.cimports.cpython.bytes import PyBytes_AS_STRING
    from cython.cimports.cpython.unicode import PyUnicode_AsUTF8AndSize
    from cython.cimports.libc.stdlib import free, realloc

logger = logging.getLogger(__name__)

_MS: Final = 1_000
_SLOW_MS = SLOW_PUT * _MS
_KEYS: Final = f"{props.KEYS}{props.NAME_VALUE_SEPARATOR}"
_TAGS: Final = f"{props.TAGS}{props.NAME_VALUE_SEPARATOR}"
_SEPARATOR: Final = props.PROPERTY_SEPARATOR
_DELAY, _WAIT, _COPIES = props.DELAY, props.WAIT, props.INNER_MULTI_DISPATCH
_DELIVER = props.TIMER_DELIVER_MS
_ACTED_ON: Final = (*props.DELAYS, _WAIT, _COPIES)
_LENGTH: Final = frame.PROPERTIES_LENGTH.struct.pack
_MAGIC: Final = frame.MAGIC_V1
_BLANK: Final = frame.BLANK.size
_ONE_FRAME: Final = (0,)
_NAME_SIZE = len(_KEYS)
_HELD = PutResult._fields.index("elapsed_ms")
_monotonic = time.monotonic
_PUT_OK, _APPENDED = PutStatus.PUT_OK, AppendStatus.PUT_OK
_new = tuple.__new__
_WIRE_FLAG_AT = batch.HEAD.offsets["flag"]
_WIRE_BODY_LENGTH_AT = batch.HEAD.offsets["body_length"]
_WIRE_HEAD = batch.HEAD.size
_WIRE_FIXED = batch.FIXED_SIZE
_AT_FIRST = 64
_Message = Message
assert batch.PROPERTIES_LENGTH.size == frame.PROPERTIES_LENGTH.size == 2


def is_written_as_given(
    text: str | bytes, tags: str | None, keys: str | None, properties: Mapping[str, str] | None
) -> TypeGuard[str]:
    """Whether the store writes the property string of a message unchanged."""
    if type(text) is not str or keys is not None or tags is not None or properties is not None:
        return False
    # The search for _DELAY also finds the timer's delay properties, because their names contain
    # this text.
    return not (_DELAY in text or _DELIVER in text or _WAIT in text or _COPIES in text)


def properties_text(message: Message) -> str | None:
    """Make the property string from the fields of a message; None if a property makes the store
    change the message.
    """
    found = message.all_properties()
    for name in _ACTED_ON:
        if name in found:
            return None
    return props.encode(found)


def log_slow(seconds: float, body_size: int, result: PutResult) -> None:
    """Log a put that took longer than SLOW_PUT."""
    size = counted(body_size, "byte")
    logger.warning("a put took %d ms: %s of body, %s", seconds * _MS, size, result)


def batch_size(messages: Sequence[Message] | None, wire: bytes | None) -> int:
    """Return the bytes of a batch's bodies, or of its wire form, for log messages."""
    return sum(len(message.body) for message in messages or ()) + len(wire or b"")


def grown(memory: Any, size: int) -> Any:
    """Compiled: allocate memory, or resize allocated memory. Raise MemoryError on failure."""
    found = realloc(memory, size)
    if found == cython.NULL:
        raise MemoryError
    return found


class CommitLogWriter(LogAppender):
    """Puts messages into the log, like the put methods of ``CommitLog``. Any thread may put."""

    def put(self, message: Message) -> PutResult:
        """Put one message. Wait for flush and replica if the message requests it.

        Raises:
            StoreUnavailable: if the store takes no messages now.
            MessageRejected: if the store does not accept this message.
            UsageError: if a number does not fit its field.
        """
        if self._flags.refusals or self._health.reason is not None or self._held_since:
            self.check_status()
        result, wait = self.put_common(message), True
        if result is None:
            result, wait = self.append_reference(message)
        if self._wakes is not None:
            self._wakes.wake()
            return result
        return self.settle(result, wait)

    def append_message(self, message: Message) -> tuple[PutResult, bool]:
        """Put one message without waiting for flush and replica. Return the result, and whether the
        message requests these waits.
        """
        if self._flags.refusals or self._health.reason is not None or self._held_since:
            self.check_status()
        result = self.put_common(message)
        return self.append_reference(message) if result is None else (result, True)

    def put_common(self, message: Message) -> PutResult | None:
        """Put a message in which the store changes nothing.

        If the reference must put the message, return None and change nothing.
        """
        if type(message) is not _Message or not self.takes_kernels:
            return None
        if cython.compiled:
            return self._put_one(message)
        (
            topic,
            body,
            queue_id,
            tags,
            keys,
            properties,
            text,
            delay_level,
            wait,
            flag,
            sys_flag,
            _,
            born,
            born_host,
            store_host,
            reconsume_times,
            prepared_offset,
        ) = message
        if delay_level or not wait or type(body) is not bytes:
            return None
        if text is not None and not is_written_as_given(text, tags, keys, properties):
            return None
        if properties is not None:
            text = properties_text(message)
            if text is None:
                return None
        if store_host is None:
            store_host = self._store_host
        if text is None:
            text = "" if keys is None else _KEYS + keys
            if tags is not None:
                text = f"{text}{_SEPARATOR}{_TAGS}{tags}" if text else _TAGS + tags
        data = text.encode("utf-8", "replace")
        topic_data = topic_bytes(topic, self._topic_check)
        length, body_length = len(data), len(body)
        if length > LONGEST_PROPERTIES:
            return None
        hosts = host_fields(born_host, store_host, sys_flag)
        size = hosts.fixed_size + body_length + len(topic_data) + length
        if size > self._largest:
            return None
        if born is None:
            born = self.clock()
        rest = topic_data + _LENGTH(length) + data
        crc = crc32(body) & java.INT_MAX
        key = topic, queue_id

        with self._lock:
            began = self._held_since = _monotonic()
            try:
                file = self._files.last
                if file is None or self._health.reason is not None or self.bar is not None:
                    return None
                at = file.wrote
                end = at + size
                if end + _BLANK > file.size:
                    return None
                if self.claim_topic is not None and key not in self.queue_offsets:
                    return None
                now = self.clock()
                queue_offset = self.queue_offsets.get(key, 0) if hosts.advances else 0
                physical_offset = file.base + at
                head = hosts.pack(
                    size,
                    _MAGIC,
                    crc,
                    queue_id,
                    flag,
                    queue_offset,
                    physical_offset,
                    hosts.flags,
                    born,
                    hosts.born_host,
                    now,
                    hosts.store_host,
                    reconsume_times,
                    prepared_offset,
                    body_length,
                )
                try:
                    # The next lines do the same as MappedFile.append, but without the cost of the
                    # call.
                    file.buffer[at:end] = b"".join((head, body, rest))
                    if not file.address:
                        file.keep(at, end)
                    file.wrote = end
                    if hosts.advances:
                        self.queue_offsets[key] = queue_offset + 1
                    else:
                        # If the message takes no queue offset, still add its queue to the table.
                        self.queue_offsets.setdefault(key, 0)
                except BaseException:
                    # Ctrl-C may arrive at any line. If the message is already in the log, the
                    # queue's next offset must still be raised.
                    if hosts.advances and file.wrote > at:
                        self.queue_offsets[key] = queue_offset + 1
                    raise
                file.store_timestamp = now
            except struct.error:
                # A number does not fit its field. Return None, so that the reference raises an
                # error that names the field.
                return None
            finally:
                self._held_since = 0.0
        held = (_monotonic() - began) * _MS
        # This call takes half as long as PutResult(...).
        result: PutResult = _new(
            PutResult,
            (
                *(_PUT_OK, _APPENDED, hosts.store_host, physical_offset, queue_offset, size),
                *(1, now, held, _ONE_FRAME, held),
            ),
        )
        if held > _SLOW_MS:
            log_held(body_length, result)
        return result

    def _put_one(self, message: Message) -> PutResult | None:
        fields = cython.cast(tuple, message)
        body = fields[1]
        try:
            if type(body) is not bytes:
                return None
            owner = self._fill(cython.address(item), message, body)
            if owner is None:
                return None
            topic = self.topic_of(fields[0])
            store_host = fields[14]
            head = self.head_of(
                fields[13], self._store_host if store_host is None else store_host, fields[10]
            )
            result = self.append_items(
                topic, fields[2], head, fields[12], fields[15], fields[16], cython.address(item), 1
            )
        except (OverflowError, UnicodeEncodeError):
            # Return None, so that the reference raises the error, or replaces a lone surrogate.
            return None
        if result is not None:
            held = cython.cast(tuple, result)[_HELD]
            if held > _SLOW_MS:
                log_held(len(body), result)
        return result

    def _fill(self, item: Any, message: Message, body: bytes) -> object:
        """Compiled: fill an Item for :meth:`FrameAppend.append_items`. Return the object that owns
        the memory of the property string. The caller must keep this object while it uses the Item.

        Return None, or raise OverflowError or UnicodeEncodeError, if the reference must put the
        message.
        """
        fields = cython.cast(tuple, message)
        tags, keys, text = fields[3], fields[4], fields[6]
        if fields[7] or not fields[8]:
            return None
        if text is not None and not is_written_as_given(text, tags, keys, fields[5]):
            return None
        if fields[5] is not None:
            text = properties_text(message)
            if text is None:
                return None
        item.flag = fields[9]
        item.body = PyBytes_AS_STRING(body)
        item.body_length = len(body)
        item.text = item.tags = cython.NULL
        item.is_keys = False
        item.properties_length = 0
        if text is not None:
            # A property string from the caller already contains keys and tags.
            item.text = PyUnicode_AsUTF8AndSize(text, cython.address(item.text_length))
            item.properties_length = item.text_length
            tags = None
        elif keys is not None:
            item.text = PyUnicode_AsUTF8AndSize(keys, cython.address(item.text_length))
            item.is_keys = True
            item.properties_length = _NAME_SIZE + item.text_length
        if tags is not None:
            item.tags = PyUnicode_AsUTF8AndSize(tags, cython.address(item.tags_length))
            item.properties_length += _NAME_SIZE + item.tags_length
            if item.text != cython.NULL:
                item.properties_length += 1
        item.crc = self.body_crc(item.body, item.body_length)
        return message if text is None else text

    # ---------------------------------------------------------------------------------- batches
    def put_batch(
        self,
        messages: Sequence[Message] | None = None,
        *,
        wire: bytes | None = None,
        message: Message | None = None,
    ) -> PutResult:
        """Put messages of one topic and queue. Either all frames are appended to the same file, or
        no frame is appended.
        """
        result, wait = self.append_batch(messages, wire, message)
        return self.settle(result, wait)

    def append_batch(
        self,
        messages: Sequence[Message] | None,
        wire: bytes | None,
        message: Message | None,
    ) -> tuple[PutResult, bool]:
        """Put a batch without waiting for flush and replica. Return the result, and whether the
        batch requests these waits.
        """
        if self._flags.refusals or self._health.reason is not None or self._held_since:
            self.check_status()
        if cython.compiled and self.takes_kernels:
            result = self.put_common_batch(messages, wire, message)
            if result is not None:
                return result, True
        return self.append_batch_reference(messages, wire, message)

    def put_common_batch(
        self,
        messages: Sequence[Message] | None,
        wire: bytes | None,
        message: Message | None,
    ) -> PutResult | None:
        """Compiled: put a common batch. For other batches, return None and change nothing."""
        if wire is None:
            if messages is None or message is not None:
                return None
            # Copy the list to a tuple, which keeps the messages alive even if another thread
            # changes the list.
            held = tuple(messages)
            if not held:
                return None
            shared = held[0]
        elif messages is not None or message is None:
            return None
        else:
            held = ()
            shared = message
        if type(shared) is not _Message:
            return None
        fields = cython.cast(tuple, shared)
        topic, body, tags, keys, text = fields[0], fields[1], fields[3], fields[4], fields[6]
        born, store_host = fields[12], fields[14]
        if topic in self._batch_topics:
            return None
        if wire is not None:
            if type(wire) is not bytes or type(body) is not bytes or body:
                return None
            # The fast path takes no batch that has shared properties, a delay or WAIT.
            if not (tags is None and keys is None and text is None and fields[5] is None):
                return None
            if fields[7] or not fields[8]:
                return None
        items = cython.NULL
        try:
            head = self.head_of(
                fields[13], self._store_host if store_host is None else store_host, fields[10]
            )
            if not head.takes_batch:
                return None
            found = self.topic_of(topic)
            if wire is not None:
                count = self._wire_items(wire, cython.address(items))
            else:
                count = self._message_items(held, cython.address(items))
            if count <= 0:
                return None
            reconsumed = fields[15]
            result = self.append_items(found, fields[2], head, born, reconsumed, 0, items, count)
            if result is not None and result.elapsed_ms > _SLOW_MS:
                log_held(batch_size(messages, wire), result)
            return result
        except (OverflowError, UnicodeEncodeError, LogquarryError):
            # Return None, so that the pure-Python version raises the error, or replaces a lone
            # surrogate.
            return None
        finally:
            free(items)

    def _message_items(self, messages: tuple[Message, ...], items: Any) -> int:
        """Compiled: fill an array with one Item for each message; the caller frees the array.

        Return the number of messages, or 0 if the batch is not common.
        """
        count = len(messages)
        items[0] = cython.cast(item_pointer, grown(cython.NULL, count * cython.sizeof(Item)))
        first = cython.cast(tuple, messages[0])
        for number in range(count):
            if type(messages[number]) is not _Message:
                return 0
            fields = cython.cast(tuple, messages[number])
            body = fields[1]
            # In a batch, these fields must be the same in all messages.
            for place in (0, 2, 10, 12, 13, 14, 15):
                if fields[place] is not first[place] and fields[place] != first[place]:
                    return 0
            # If the message has a map of properties, _fill makes a new string, and no variable here
            # would keep this string in memory until the kernel has read it.
            if type(body) is not bytes or fields[5] is not None:
                return 0
            if self._fill(cython.address(items[0][number]), messages[number], body) is None:
                return 0
        return count

    def _wire_items(self, wire: bytes, items: Any) -> int:
        at = PyBytes_AS_STRING(wire)
        left = len(wire)
        if left > self._largest:
            return 0
        room = count = 0
        while left:
            if left < _WIRE_FIXED:
                return 0
            length = load32(at + _WIRE_BODY_LENGTH_AT)
            if length < 0 or length > left - _WIRE_FIXED:
                return 0
            if count == room:
                room = max(_AT_FIRST, 2 * room)
                items[0] = cython.cast(item_pointer, grown(items[0], room * cython.sizeof(Item)))
            item = cython.address(items[0][count])
            item.flag = load32(at + _WIRE_FLAG_AT)
            item.body = at + _WIRE_HEAD
            item.body_length = length
            item.text = item.body + length + 2
            item.text_length = item.properties_length = load16(item.body + length)
            item.is_keys = False
            item.tags = cython.NULL
            length += _WIRE_FIXED + item.text_length
            if item.text_length < 0 or length > left:
                return 0
            item.crc = self.body_crc(item.body, item.body_length)
            at += length
            left -= length
            count += 1
        return count
