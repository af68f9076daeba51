"""The put of one message: property string, frame, CRC, queue offset, append, result.

One source, two ways to run: compiled by Cython (``put_path.pxd`` has the C types), or interpreted.
Only the last step differs, because each way has its own cheapest means to write a frame:
interpreted, :meth:`PutPath.put_common` packs and joins; compiled, ``_append_frame`` stores numbers
at an address. Both write the bytes of the reference, :meth:`MessageEncoder.encode
<logquarry.write.encode.MessageEncoder.encode>` and :meth:`LogAppender.append
<logquarry.write.log_appender.LogAppender.append>` (tests/property/test_put_path_twins.py).

The reference takes every message. :meth:`PutPath.put_common` takes a message only if the store
changes nothing in it; it returns None, and has changed nothing, for a delay, WAIT, further queues,
dialect 3.1, a message that is refused, and if the last file has no room.

Compiled, one clock read in three is exact: ``elapsed_ms`` then counts the kernel's ticks (1 to 4
ms).
"""

from __future__ import annotations

import logging
import struct
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from logquarry.config import StoreConfig
from logquarry.format import frame, java
from logquarry.format import properties as props
from logquarry.format.crc import crc32_address
from logquarry.format.java import crc32
from logquarry.message import Message
from logquarry.units import Clock, now_ms
from logquarry.write.host_fields import host_fields
from logquarry.write.message_rules import LONGEST_PROPERTIES, topic_bytes
from logquarry.write.put_result import AppendStatus, PutResult, PutStatus

if TYPE_CHECKING:
    from logquarry.disk.mapped_file_queue import MappedFileQueue
    from logquarry.disk.service import Health, RunningFlags
    from logquarry.read.log_queues import QueueKey

try:
    import cython
except ImportError:
    from logquarry import uncompiled as cython

if cython.compiled:
    from cython.cimports.cpython.bytes import PyBytes_AS_STRING
    from cython.cimports.cpython.exc import PyErr_CheckSignals
    from cython.cimports.cpython.memoryview import PyMemoryView_GET_BUFFER
    from cython.cimports.cpython.pythread import (
        PyThread_allocate_lock,
        PyThread_free_lock,
        PyThread_release_lock,
    )
    from cython.cimports.cpython.unicode import PyUnicode_AsUTF8AndSize
    from cython.cimports.libc.string import memcpy

logger = logging.getLogger(__name__)

Settle = Callable[[PutResult, bool], PutResult]

SLOW_PUT: Final = 0.5
"""A put that takes longer, or holds the lock longer, is logged. Seconds."""
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
# For the compiled half: the places of the fields, from their tables; of those behind the hosts
# counted from the body back.
_BLANK = frame.BLANK.size
_SIZE_AT = frame.HEAD.offsets["size"]
_CRC_AT = frame.HEAD.offsets["body_crc"]
_QUEUE_ID_AT = frame.HEAD.offsets["queue_id"]
_FLAG_AT = frame.HEAD.offsets["flag"]
_QUEUE_OFFSET_AT = frame.HEAD.offsets["queue_offset"]
_PHYSICAL_OFFSET_AT = frame.HEAD.offsets["physical_offset"]
_BORN_AT = frame.HEAD.offsets["born_timestamp"]
_RECONSUMED_BACK = frame.TAIL.size - frame.TAIL.offsets["reconsume_times"]
_PREPARED_BACK = frame.TAIL.size - frame.TAIL.offsets["prepared_transaction_offset"]
_BODY_LENGTH_BACK = frame.TAIL.size - frame.TAIL.offsets["body_length"]
_INT_MIN, _INT_MAX, _LONGEST = java.INT_MIN, java.INT_MAX, LONGEST_PROPERTIES
_KEYS_BYTES, _TAGS_BYTES = _KEYS.encode(), _TAGS.encode()
_NAME_SIZE = len(_KEYS_BYTES)
_SEPARATOR_BYTE = ord(_SEPARATOR)
assert len(_TAGS_BYTES) == _NAME_SIZE and frame.PROPERTIES_LENGTH.size == 2
_PUT_OK, _APPENDED = PutStatus.PUT_OK, AppendStatus.PUT_OK
_ONE_FRAME: Final = (0,)
_ONE_MESSAGE: Final = 1
_NO_TIME: Final = 0.0
_CACHED: Final = 4_096
_new = tuple.__new__
_monotonic = time.monotonic
_Message = Message


def settle_nothing(result: PutResult, wait: bool) -> PutResult:
    """The result of a put that waits for nothing."""
    return result


def log_held(body_size: int, result: PutResult) -> None:
    """Log a put that held the lock for long."""
    logger.warning(
        "a put held the log for %d ms: %d bytes of body, %s", result.elapsed_ms, body_size, result
    )


def log_slow(seconds: float, body_size: int, result: PutResult) -> None:
    """Log a put that took long."""
    logger.warning("a put took %d ms: %d bytes of body, %s", seconds * _MS, body_size, result)


def put_result(
    store_host: bytes,
    physical_offset: int,
    queue_offset: int,
    size: int,
    now: int,
    held: float,
) -> PutResult:
    """The result of a put of one message; see :class:`PutResult`."""
    if cython.compiled:
        # Most puts end within one tick.
        held_ms = held if held else _NO_TIME
        made: PutResult = result_of(
            PutResult,
            _PUT_OK,
            _APPENDED,
            store_host,
            physical_offset,
            queue_offset,
            size,
            _ONE_MESSAGE,
            now,
            held_ms,
            _ONE_FRAME,
        )
        return made
    return _new(
        PutResult,
        (
            _PUT_OK,
            _APPENDED,
            store_host,
            physical_offset,
            queue_offset,
            size,
            1,
            now,
            held,
            _ONE_FRAME,
            held,
        ),
    )


class LogLock:
    """A lock of the log, compiled: taking it costs a tenth of ``threading.Lock``.

    As there, Ctrl-C interrupts a thread that waits for it.
    """

    def __cinit__(self) -> None:
        """Make the lock, open."""
        self._lock = PyThread_allocate_lock()
        if self._lock == cython.NULL:
            raise MemoryError

    def __dealloc__(self) -> None:
        if self._lock != cython.NULL:
            PyThread_free_lock(self._lock)

    def __enter__(self) -> None:
        while not acquire_lock(self._lock):
            # A signal came first: its handler may raise.
            PyErr_CheckSignals()

    def __exit__(self, *error: object) -> None:
        PyThread_release_lock(self._lock)


class FrameHead:
    """Compiled: the start of the frames with the same hosts and SYSFLAG.

    Raises:
        MessageRejected, UsageError: as :func:`~logquarry.write.host_fields.host_fields`.
    """

    def __init__(self, born_host: str | bytes, store_host: str | bytes, sys_flag: int) -> None:
        fields = host_fields(born_host, store_host, sys_flag)
        # The very objects: the next message usually has the same.
        self.born_host, self.store_host, self.sys_flag = born_host, store_host, sys_flag
        self.template = fields.pack(
            *(0, frame.MAGIC_V1, 0, 0, 0, 0, 0, fields.flags, 0),
            *(fields.born_host, 0, fields.store_host, 0, 0, 0),
        )
        self.size = fields.prefix_size
        self.fixed_size = fields.fixed_size
        self.store_time_at = fields.store_time_at
        self.advances = fields.advances
        self.store_bytes = fields.store_host


class PutPath:
    """The state of a log's writer that each put reads or changes, and the put of one message.

    The writer (:class:`~logquarry.write.log_appender.LogAppender`) is a subclass.

    Args:
        files: the log's files.
        config: the store's settings.
        clock: gives store times, in milliseconds.
        queue_offsets: the next offset of each queue.
        flags: reasons for which the store takes no messages.
        health: whether the disk still takes writes.
        takes_kernels: whether kernels, or this class, may write frames.
        settle: waits for flush and replica, as far as the put asks for it, and returns the result
            with their status. Called outside the lock.

    Attributes:
        clock, queue_offsets, takes_kernels, settle: as given.
        bar: why nothing may be appended now, None if it may. Checked under the lock: a put may
            have passed all other checks before the bar was set.
    """

    def __init__(
        self,
        files: MappedFileQueue,
        config: StoreConfig,
        clock: Clock,
        queue_offsets: dict[QueueKey, int],
        flags: RunningFlags,
        health: Health,
        takes_kernels: bool,
        settle: Settle,
    ) -> None:
        self._files = files
        self.clock = clock
        self.queue_offsets = queue_offsets
        self._flags = flags
        self._health = health
        self.takes_kernels = takes_kernels
        self.settle = settle
        self.bar: str | None = None
        self._held_since = 0.0
        self._topic_check = config.topic_check
        self._store_host = config.store_host
        self._largest = min(config.max_message_size, files.file_size - frame.BLANK.size)
        if cython.compiled:
            self._lock: Any = LogLock()
            self._topics: dict[str, bytes] = {}
            self._head: FrameHead | None = None
            self._is_wall_clock = clock is now_ms
            self._crc32 = cython.cast(crc32_function, cython.cast(cython.size_t, crc32_address()))
        else:
            self._lock = threading.Lock()

    def put(self, message: Message) -> PutResult:
        """Put one message, and wait for flush and replica as far as it asks for that.

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
        return self.settle(result, wait)

    def append_message(self, message: Message) -> tuple[PutResult, bool]:
        """Put one message; the caller waits for flush and replica.

        Returns:
            The result, and whether the put waits.

        Raises:
            StoreUnavailable, MessageRejected, UsageError: as :meth:`put`.
        """
        if self._flags.refusals or self._health.reason is not None or self._held_since:
            self.check_status()
        result = self.put_common(message)
        return self.append_reference(message) if result is None else (result, True)

    def check_status(self) -> None:
        """Raise StoreUnavailable unless the store takes messages now."""
        raise NotImplementedError

    def append_reference(self, message: Message) -> tuple[PutResult, bool]:
        """Put any message as the reference does; see :meth:`append_message`."""
        raise NotImplementedError

    def put_common(self, message: Message) -> PutResult | None:
        """Put a message in which the store changes nothing.

        Returns:
            None, and nothing is changed, for any other message; then the reference puts it.
        """
        if type(message) is not _Message or not self.takes_kernels:
            return None
        fields = cython.cast(tuple, message) if cython.compiled else message
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
        ) = fields
        if delay_level or not wait or type(body) is not bytes:
            return None
        if properties is not None:
            if text is not None:
                return None
            found = message.all_properties()
            for name in _ACTED_ON:
                if name in found:
                    return None
            text = props.encode(found)
            keys = tags = None
        elif text is not None:
            if type(text) is not str or keys is not None or tags is not None:
                return None
            # The names of the timer's delays contain that of the delay level.
            if _DELAY in text or _DELIVER in text or _WAIT in text or _COPIES in text:
                return None
        if store_host is None:
            store_host = self._store_host
        # The parts of the frame that are known before the lock is taken.
        if cython.compiled:
            return self._append_frame(
                topic,
                body,
                queue_id,
                tags,
                keys,
                text,
                flag,
                sys_flag,
                born,
                born_host,
                store_host,
                reconsume_times,
                prepared_offset,
            )
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

        # Under the lock: place, queue offset and store time; then the bytes.
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
                    # As MappedFile.append does it, without the call.
                    file.buffer[at:end] = b"".join((head, body, rest))
                    file.wrote = end
                    if hosts.advances:
                        self.queue_offsets[key] = queue_offset + 1
                    else:
                        # Messages without a queue offset register their queue too.
                        self.queue_offsets.setdefault(key, 0)
                except BaseException:
                    # Ctrl-C may arrive at any line. If the message is in the log, its queue offset
                    # is taken.
                    if hosts.advances and file.wrote > at:
                        self.queue_offsets[key] = queue_offset + 1
                    raise
                file.store_timestamp = now
            except struct.error:
                # A number does not fit its field: the encoder's error names it.
                return None
            finally:
                self._held_since = 0.0
        held = (_monotonic() - began) * _MS
        result = put_result(hosts.store_host, physical_offset, queue_offset, size, now, held)
        if held > _SLOW_MS:
            log_held(body_length, result)
        return result

    def _append_frame(
        self,
        topic: str,
        body: bytes,
        queue_id: int,
        tags: str | None,
        keys: str | None,
        text: str | None,
        flag: int,
        sys_flag: int,
        born: int | None,
        born_host: str | bytes,
        store_host: str | bytes,
        reconsume_times: int,
        prepared_offset: int,
    ) -> PutResult | None:
        """Compiled: the second half of :meth:`put_common`.

        With the wall clock it calls no Python code while it holds the log: no other thread and no
        signal handler runs between the bytes and the queue offset.
        """
        topic_data = self._topics.get(topic)
        if topic_data is None:
            topic_data = topic_bytes(topic, self._topic_check)
            if len(self._topics) >= _CACHED:
                self._topics.clear()
            self._topics[topic] = topic_data
        head = self._head
        if (
            head is None
            or head.born_host is not born_host
            or head.store_host is not store_host
            or head.sys_flag is not sys_flag
        ):
            head = self._head = FrameHead(born_host, store_host, sys_flag)

        # The property string stays in pieces.
        key_text = tag_text = b""
        key_length = tag_length = length = born_time = 0
        try:
            queue_number = queue_id
            flag_number = flag
            reconsumed = reconsume_times
            prepared = prepared_offset
            if born is not None:
                born_time = born
            if text is not None:
                key_text = PyUnicode_AsUTF8AndSize(text, cython.address(key_length))
                length = key_length
            elif keys is not None:
                key_text = PyUnicode_AsUTF8AndSize(keys, cython.address(key_length))
                length = _NAME_SIZE + key_length
            if tags is not None:
                tag_text = PyUnicode_AsUTF8AndSize(tags, cython.address(tag_length))
                length += _NAME_SIZE + tag_length + (1 if length else 0)
        except (OverflowError, UnicodeEncodeError):
            # The reference names the field, or replaces half a surrogate pair.
            return None
        if (
            not _INT_MIN <= queue_number <= _INT_MAX
            or not _INT_MIN <= flag_number <= _INT_MAX
            or not _INT_MIN <= reconsumed <= _INT_MAX
            or length > _LONGEST
        ):
            return None
        body_length, topic_length = len(body), len(topic_data)
        size = head.fixed_size + body_length + topic_length + length
        if size > self._largest:
            return None
        body_bytes = PyBytes_AS_STRING(body)
        if self._crc32 is not cython.NULL:
            crc = self._crc32(0, body_bytes, body_length)
        else:
            crc = crc32(body)
        if born is None and not self._is_wall_clock:
            born_time = self.clock()
        key = (topic, queue_id)

        # Under the lock: place, queue offset and store time; then the bytes.
        lock = self._lock
        while not acquire_lock(lock._lock):
            # A signal came first: its handler may raise.
            PyErr_CheckSignals()
        try:
            began = ticks_ns()
            file = self._files.last
            if file is None or self._health.reason is not None or self.bar is not None:
                return None
            at = file.wrote
            if at + size + _BLANK > file.size:
                return None
            if self._is_wall_clock:
                now = time_ns() // 1_000_000
                if born is None:
                    born_time = now
            else:
                stamp = self.clock()
                if type(stamp) is not int:
                    # The reference refuses it.
                    return None
                now = stamp
            known = self.queue_offsets.get(key)
            queue_offset = known if head.advances and known is not None else 0
            physical_offset = file.base + at
            view = None
            if file.address:
                place = cython.cast(cython.p_char, file.address)
            else:
                # A buffer of the transient store pool.
                view = file.buffer
                place = cython.cast(cython.p_char, PyMemoryView_GET_BUFFER(view).buf)
            place += at
            memcpy(place, PyBytes_AS_STRING(head.template), head.size)
            store32(place + _SIZE_AT, size)
            store32(place + _CRC_AT, crc & _INT_MAX)
            store32(place + _QUEUE_ID_AT, queue_number)
            store32(place + _FLAG_AT, flag_number)
            store64(place + _QUEUE_OFFSET_AT, queue_offset)
            store64(place + _PHYSICAL_OFFSET_AT, physical_offset)
            store64(place + _BORN_AT, born_time)
            store64(place + head.store_time_at, now)
            place += head.size
            store32(place - _RECONSUMED_BACK, reconsumed)
            store64(place - _PREPARED_BACK, prepared)
            store32(place - _BODY_LENGTH_BACK, body_length)
            memcpy(place, body_bytes, body_length)
            place += body_length
            memcpy(place, PyBytes_AS_STRING(topic_data), topic_length)
            place += topic_length
            store16(place, length)
            place += 2
            if text is not None:
                memcpy(place, key_text, key_length)
            else:
                if keys is not None:
                    memcpy(place, PyBytes_AS_STRING(_KEYS_BYTES), _NAME_SIZE)
                    memcpy(place + _NAME_SIZE, key_text, key_length)
                    place += _NAME_SIZE + key_length
                    if tags is not None:
                        place[0] = _SEPARATOR_BYTE
                        place += 1
                if tags is not None:
                    memcpy(place, PyBytes_AS_STRING(_TAGS_BYTES), _NAME_SIZE)
                    memcpy(place + _NAME_SIZE, tag_text, tag_length)
            # The bytes count only from the last of these lines on, which cannot fail.
            if head.advances:
                self.queue_offsets[key] = queue_offset + 1
            elif known is None:
                # Messages without a queue offset register their queue too.
                self.queue_offsets[key] = 0
            file.store_timestamp = now
            file.wrote = at + size
            held = (ticks_ns() - began) / 1e6
        finally:
            PyThread_release_lock(lock._lock)
        result = put_result(head.store_bytes, physical_offset, queue_offset, size, now, held)
        if held > _SLOW_MS:
            log_held(body_length, result)
        return result
