"""The writer of the commit log. For a batch, it makes frames from the messages or from their wire
form, and appends all frames at once.

If this module is compiled, :meth:`CommitLogWriter.put_common_batch` puts common batches. In all
other cases, the pure-Python version (the reference, :mod:`logquarry.write.encode_batch`) makes the
frames. Both write the same bytes (tests/property/test_put_path_twins.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from logquarry.errors import LogquarryError
from logquarry.format import batch, frame
from logquarry.message import Message
from logquarry.write.frame_append import SLOW_PUT, log_held
from logquarry.write.put_path import PutPath
from logquarry.write.put_result import PutResult

try:
    import cython
except ImportError:
    from logquarry import compiled as cython

if cython.compiled:
    from cython.cimports.cpython.bytes import PyBytes_AS_STRING
    from cython.cimports.libc.stdlib import free, malloc, realloc

_SLOW_MS = SLOW_PUT * 1_000
_WIRE_FLAG_AT = batch.HEAD.offsets["flag"]
_WIRE_BODY_LENGTH_AT = batch.HEAD.offsets["body_length"]
_WIRE_HEAD = batch.HEAD.size
_WIRE_FIXED = batch.FIXED_SIZE
_AT_FIRST = 64
_Message = Message
assert batch.PROPERTIES_LENGTH.size == frame.PROPERTIES_LENGTH.size == 2


def batch_size(messages: Sequence[Message] | None, wire: bytes | None) -> int:
    """Return the bytes of a batch's bodies, or of its wire form, for log messages."""
    return sum(len(message.body) for message in messages or ()) + len(wire or b"")


class CommitLogWriter(PutPath):
    """Puts messages into the log, like the put methods of ``CommitLog``. Any thread may put."""

    def put_batch(
        self,
        messages: Sequence[Message] | None = None,
        *,
        wire: bytes | None = None,
        message: Message | None = None,
    ) -> PutResult:
        """Put messages of one topic and queue. Either all frames are appended, to the same file, or
        none.
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
        batch requests this wait.
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
            # Copy the list to a tuple. It keeps the messages alive even if another thread changes
            # the list.
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
            # A batch that has shared properties, a delay or WAIT is not common.
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
            # The pure-Python version then raises the error, or replaces a lone surrogate.
            return None
        finally:
            free(items)

    def _message_items(self, messages: tuple[Message, ...], items: Any) -> int:
        """Compiled: fill an array with one Item for each message; the caller frees the array.

        Return the number of messages, or 0 if the batch is not common.
        """
        count = len(messages)
        items[0] = cython.cast(item_pointer, malloc(count * cython.sizeof(Item)))
        if items[0] == cython.NULL:
            raise MemoryError
        first = cython.cast(tuple, messages[0])
        for number in range(count):
            if type(messages[number]) is not _Message:
                return 0
            fields = cython.cast(tuple, messages[number])
            body, text, keys, tags = fields[1], fields[6], fields[4], fields[3]
            if type(body) is not bytes or fields[5] is not None or fields[7] or not fields[8]:
                return 0
            if text is not None and not is_written_as_given(text, tags, keys, None):
                return 0
            # In a batch, these fields must be the same in all messages.
            for place in (0, 2, 10, 12, 13, 14, 15):
                if fields[place] is not first[place] and fields[place] != first[place]:
                    return 0
            self._fill(cython.address(items[0][number]), body, tags, keys, text, fields[9])
        return count

    def _wire_items(self, wire: bytes, items: Any) -> int:
        at = PyBytes_AS_STRING(wire)
        left = len(wire)
        if left > self._largest:
            return 0
        room = _AT_FIRST
        count = 0
        items[0] = cython.cast(item_pointer, malloc(room * cython.sizeof(Item)))
        if items[0] == cython.NULL:
            raise MemoryError
        while left:
            if left < _WIRE_FIXED:
                return 0
            length = load32(at + _WIRE_BODY_LENGTH_AT)
            if length < 0 or length > left - _WIRE_FIXED:
                return 0
            if count == room:
                room *= 2
                more = realloc(items[0], room * cython.sizeof(Item))
                if more == cython.NULL:
                    raise MemoryError
                items[0] = cython.cast(item_pointer, more)
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
