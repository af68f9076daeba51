"""Puts one message, from its property string and frame to the append and the result.

The same source runs compiled by Cython (``put_path.pxd`` has the C types) or interpreted. Only the
code that writes the frame has two versions, for speed. In the interpreted version,
:meth:`PutPath.put_common` joins packed fields. In the compiled version,
:class:`~logquarry.write.frame_append.FrameAppend` writes numbers to memory. Both write the same
bytes as the reference, :meth:`MessageEncoder.encode <logquarry.write.encode.MessageEncoder.encode>`
and :meth:`LogAppender.append <logquarry.write.log_appender.LogAppender.append>`
(tests/property/test_put_path_twins.py).

The reference can put any message. :meth:`PutPath.put_common` returns None, and changes nothing,
in these cases:

- The message has a delay, WAIT or further queues.
- The message must be refused.
- The store has dialect 3.1.
- The last file has no room.

If the module is compiled, ``elapsed_ms`` is measured with a clock that advances only every 1 to 4
ms.
"""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Mapping
from typing import Any, Final, TypeGuard

from logquarry.format import frame, java
from logquarry.format import properties as props
from logquarry.format.java import crc32
from logquarry.message import Message
from logquarry.write.frame_append import SLOW_PUT, log_held, put_result
from logquarry.write.log_appender import LogAppender
from logquarry.write.message_rules import LONGEST_PROPERTIES, host_fields, topic_bytes
from logquarry.write.put_result import PutResult

try:
    import cython
except ImportError:
    from logquarry import compiled as cython

if cython.compiled:
    from cython.cimports.cpython.bytes import PyBytes_AS_STRING
    from cython.cimports.cpython.unicode import PyUnicode_AsUTF8AndSize

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
_Message = Message


def is_written_as_given(
    text: str | bytes, tags: str | None, keys: str | None, properties: Mapping[str, str] | None
) -> TypeGuard[str]:
    """Whether the store writes the property string of a message unchanged."""
    if type(text) is not str or keys is not None or tags is not None or properties is not None:
        return False
    # This also finds the timer's delay properties, because their names contain the text of _DELAY.
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
    logger.warning("a put took %d ms: %d bytes of body, %s", seconds * _MS, body_size, result)


class PutPath(LogAppender):
    """The methods that put one message."""

    def put(self, message: Message) -> PutResult:
        """Put one message. Wait for flush and replica if the message requests it.

        Raises:
            StoreUnavailable: if the store takes no messages now.
            MessageRejected: if the store does not accept this message.
            UsageError: if a number does not fit its field.
        """
        return self.put_typed(message)

    def put_typed(self, message: Message) -> PutResult:
        """Put one message like :meth:`put`, as a C method that compiled callers can call."""
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
        message requests this wait.
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
                    # These lines do the same as MappedFile.append, but save the call.
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
                    # Ctrl-C may arrive at any line. If the message is already in the log, its queue
                    # offset must still be counted.
                    if hosts.advances and file.wrote > at:
                        self.queue_offsets[key] = queue_offset + 1
                    raise
                file.store_timestamp = now
            except struct.error:
                # A number does not fit its field. The reference then raises an error that names the
                # field.
                return None
            finally:
                self._held_since = 0.0
        held = (_monotonic() - began) * _MS
        result = put_result(
            hosts.store_host, physical_offset, queue_offset, size, now, held, 1, _ONE_FRAME
        )
        if held > _SLOW_MS:
            log_held(body_length, result)
        return result

    def _put_one(self, message: Message) -> PutResult | None:
        fields = cython.cast(tuple, message)
        body, text = fields[1], fields[6]
        if fields[7] or not fields[8] or type(body) is not bytes:
            return None
        if text is not None and not is_written_as_given(text, fields[3], fields[4], fields[5]):
            return None
        if fields[5] is not None:
            text = properties_text(message)
            if text is None:
                return None
        topic = self.topic_of(fields[0])
        store_host = fields[14]
        head = self.head_of(
            fields[13], self._store_host if store_host is None else store_host, fields[10]
        )
        try:
            self._fill(cython.address(item), body, fields[3], fields[4], text, fields[9])
            result = self.append_items(
                topic, fields[2], head, fields[12], fields[15], fields[16], cython.address(item), 1
            )
        except (OverflowError, UnicodeEncodeError):
            # The reference then raises the error, or replaces a lone surrogate.
            return None
        if result is not None:
            held = cython.cast(tuple, result)[_HELD]
            if held > _SLOW_MS:
                log_held(len(body), result)
        return result

    def _fill(
        self,
        item: Any,
        body: bytes,
        tags: str | None,
        keys: str | None,
        text: str | None,
        flag: int,
    ) -> None:
        """Compiled: fill an Item for :meth:`FrameAppend.append_items`.

        Raises:
            OverflowError, UnicodeEncodeError: if the reference must put the message.
        """
        item.flag = flag
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
