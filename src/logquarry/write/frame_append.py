"""Appends the frames of a message or a batch to the log's last file, by compiled code. A function,
class or method whose docstring begins with "Compiled" is used only if this module is compiled.

If logquarry runs interpreted, other methods append the frames: :meth:`CommitLogWriter.put_common
<logquarry.write.commit_log_writer.CommitLogWriter.put_common>` and :meth:`LogAppender.append_held
<logquarry.write.log_appender.LogAppender.append_held>` (the reference).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from logquarry.arguments import Clock, now_ms
from logquarry.config import StoreConfig
from logquarry.format import frame, java
from logquarry.format import properties as props
from logquarry.format.java import crc32, crc32_address
from logquarry.format.sys_flag import TRANSACTION_NOT
from logquarry.format.sys_flag import transaction_type as sys_flag_type
from logquarry.text import counted
from logquarry.write.message_rules import LONGEST_PROPERTIES, host_fields, topic_bytes
from logquarry.write.put_parts import LogLock, Recent, Wakes
from logquarry.write.put_result import AppendStatus, PutResult, PutStatus

if TYPE_CHECKING:
    from logquarry.disk.mapped_file_queue import MappedFileQueue
    from logquarry.disk.service import Health, RunningFlags
    from logquarry.read.log_queues import QueueKey

try:
    import cython
except ImportError:
    from logquarry import compiled as cython

if cython.compiled:
    from cython.cimports.cpython.bytes import PyBytes_AS_STRING
    from cython.cimports.cpython.memoryview import PyMemoryView_GET_BUFFER
    from cython.cimports.libc.string import memcpy

logger = logging.getLogger(__name__)

Settle = Callable[[PutResult, bool], PutResult]

SLOW_PUT: Final = 0.5
"""If a put takes longer than this number of seconds, or holds the log's lock for longer, the put is
logged.
"""
_MS: Final = 1_000
_SLOW_MS = SLOW_PUT * _MS
_KEYS: Final = f"{props.KEYS}{props.NAME_VALUE_SEPARATOR}"
_TAGS: Final = f"{props.TAGS}{props.NAME_VALUE_SEPARATOR}"
# An IPv6 host is longer than an IPv4 host. So the positions of the fields after the hosts are
# counted backwards from the body (``_BACK``).
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
_INT_MAX, _LONGEST = java.INT_MAX, LONGEST_PROPERTIES
_KEYS_BYTES, _TAGS_BYTES = _KEYS.encode(), _TAGS.encode()
_NAME_SIZE = len(_KEYS_BYTES)
_SEPARATOR_BYTE = ord(props.PROPERTY_SEPARATOR)
assert len(_TAGS_BYTES) == _NAME_SIZE and frame.PROPERTIES_LENGTH.size == 2
_PUT_OK, _APPENDED = PutStatus.PUT_OK, AppendStatus.PUT_OK
# These names are not "Final", because the .pxd file declares them as C variables.
_ONE_FRAME = (0,)
_NO_TIME = 0.0
_Result = PutResult
_CACHED: Final = 4_096
_KEPT_KEYS = 64


def log_held(body_size: int, result: PutResult) -> None:
    """Log a put that held the lock for a long time."""
    size = counted(body_size, "byte")
    logger.warning("a put held the log for %d ms: %s of body, %s", result.elapsed_ms, size, result)


class Key:
    """Compiled: a queue's key together with its hash. A plain tuple would compute the hash again at
    each lookup.
    """

    def __init__(self, key: QueueKey) -> None:
        self.key = key
        self.hash = hash(key)


class Topic:
    """Compiled: the name of a topic, and the bytes of TOPICLEN and TOPIC for its frames."""

    def __init__(self, name: str, data: bytes) -> None:
        self.name = name
        self.data = data
        self.keys: list[Key | None] = [None] * _KEPT_KEYS

    def key(self, queue_id: int) -> Key:
        """Return the key of a queue."""
        if not 0 <= queue_id < _KEPT_KEYS:
            return Key((self.name, queue_id))
        # Always return the same object for a queue. A dictionary finds a key faster if the key is
        # the same object as the stored key, and not just an equal object.
        found = self.keys[queue_id]
        if found is None:
            found = self.keys[queue_id] = Key((self.name, queue_id))
        return found


class FrameHead:
    """Compiled: the bytes at the start of a frame, for all frames with the same hosts and SYSFLAG.

    Raises the errors of :func:`~logquarry.write.message_rules.host_fields`.
    """

    def __init__(self, born_host: str | bytes, store_host: str | bytes, sys_flag: int) -> None:
        fields = host_fields(born_host, store_host, sys_flag)
        # Store the caller's own objects. The next message usually has the same objects, and
        # comparing identities is fast.
        self.born_host, self.store_host, self.sys_flag = born_host, store_host, sys_flag
        self.template = fields.template
        self.size = len(fields.template)
        self.fixed_size = fields.fixed_size
        self.store_time_at = fields.store_time_at
        self.advances = fields.advances
        self.takes_batch = sys_flag_type(fields.flags) == TRANSACTION_NOT
        self.store_bytes = fields.store_host


def measured(item: Any, head: FrameHead, topic_data: bytes) -> int:
    """Compiled: set the size of a message's frame, and return it."""
    item.size = head.fixed_size + item.body_length + len(topic_data) + item.properties_length
    size: int = item.size
    return size


def write_frame(
    place: Any,
    head: FrameHead,
    topic_data: bytes,
    item: Any,
    queue_offset: int,
    physical_offset: int,
    now: int,
) -> Any:
    """Compiled: write the frame of a message at an address. Return the address after the frame."""
    memcpy(place, PyBytes_AS_STRING(head.template), head.size)
    store32(place + _SIZE_AT, item.size)
    store32(place + _CRC_AT, item.crc)
    store32(place + _QUEUE_ID_AT, item.queue_id)
    store32(place + _FLAG_AT, item.flag)
    store64(place + _QUEUE_OFFSET_AT, queue_offset)
    store64(place + _PHYSICAL_OFFSET_AT, physical_offset)
    store64(place + _BORN_AT, item.born)
    store64(place + head.store_time_at, now)
    place += head.size
    store32(place - _RECONSUMED_BACK, item.reconsumed)
    store64(place - _PREPARED_BACK, item.prepared)
    store32(place - _BODY_LENGTH_BACK, item.body_length)
    memcpy(place, item.body, item.body_length)
    place += item.body_length
    length = len(topic_data)
    memcpy(place, PyBytes_AS_STRING(topic_data), length)
    place += length
    store16(place, item.properties_length)
    place += 2
    if item.text != cython.NULL:
        if item.is_keys:
            memcpy(place, PyBytes_AS_STRING(_KEYS_BYTES), _NAME_SIZE)
            place += _NAME_SIZE
        memcpy(place, item.text, item.text_length)
        place += item.text_length
    if item.tags != cython.NULL:
        if item.text != cython.NULL:
            place[0] = _SEPARATOR_BYTE
            place += 1
        memcpy(place, PyBytes_AS_STRING(_TAGS_BYTES), _NAME_SIZE)
        place += _NAME_SIZE
        memcpy(place, item.tags, item.tags_length)
        place += item.tags_length
    return place


class FrameAppend:
    """The base class of a log's writer, with the attributes that each put reads or changes.

    Args:
        clock: returns store times, in milliseconds.
        queue_offsets: the next offset of each queue.
        takes_kernels: whether compiled code (kernels or this class) may write frames. If False,
            the pure-Python version (the reference) writes all frames.
        settle: called after the append, without the log's lock. If the put requests a wait,
            ``settle`` waits for flush and replica. It returns the result with the status of the
            waits.

    Attributes:
        bar: the reason why no bytes may be appended now; None if bytes may be appended. An append
            reads this attribute under the log's lock, because another thread may set ``bar``
            after all other checks of the put.
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
        claim_topic: Callable[[str], None] | None = None,
    ) -> None:
        self._files = files
        self.clock = clock
        self.queue_offsets = queue_offsets
        self._flags = flags
        self._health = health
        self.takes_kernels = takes_kernels
        self.claim_topic = claim_topic
        self.settle = settle
        self._wakes = settle if type(settle) is Wakes else None
        self.bar: str | None = None
        self._held_since = 0.0
        self._topic_check = config.topic_check
        self._store_host = config.store_host
        self._batch_topics = config.batch_topics
        self._largest = min(config.max_message_size, files.file_size - frame.BLANK.size)
        if cython.compiled:
            self._lock: Any = LogLock()
            self._topics: dict[str, Topic] = {}
            self._recent = Recent()
            self._head: FrameHead | None = None
            self._heads: dict[tuple[str | bytes, str | bytes, int], FrameHead] = {}
            self._is_wall_clock = clock is now_ms
            self._now = self._size = 0
            self._now_object = self._size_object = 0
            self._crc32 = cython.cast(crc32_function, cython.cast(cython.size_t, crc32_address()))
        else:
            self._lock = threading.Lock()

    def head_of(self, born_host: str | bytes, store_host: str | bytes, sys_flag: int) -> FrameHead:
        """Compiled: return a frame head. Raises the errors of :class:`FrameHead`."""
        head = self._head
        if (
            head is None
            or head.born_host is not born_host
            or head.store_host is not store_host
            or head.sys_flag is not sys_flag
        ):
            key = born_host, store_host, sys_flag
            head = self._heads.get(key)
            if head is None:
                head = FrameHead(born_host, store_host, sys_flag)
                if len(self._heads) >= _CACHED:
                    self._heads.clear()
                self._heads[key] = head
            self._head = head
        return head

    def topic_of(self, name: str) -> Topic:
        """Compiled: return a topic; raise MessageRejected if the name is not a valid topic."""
        found: Topic | None = cython.cast(Topic, self._recent.get(name))
        if found is not None:
            return found
        found = cython.cast(Topic, self._topics.get(name))
        if found is None:
            found = Topic(name, topic_bytes(name, self._topic_check))
            if len(self._topics) >= _CACHED:
                self._topics.clear()
            self._topics[name] = found
        self._recent.put(name, found)
        return found

    def body_crc(self, body: Any, length: int) -> int:
        """Compiled: return BODYCRC of the bytes at an address."""
        if self._crc32 is not cython.NULL:
            found: int = self._crc32(0, body, length) & _INT_MAX
            return found
        return crc32(body[:length]) & _INT_MAX

    def append_items(
        self,
        topic: Topic,
        queue_id: int,
        head: FrameHead,
        born: int | None,
        reconsumed: int,
        prepared: int,
        items: Any,
        count: int,
    ) -> PutResult | None:
        """Compiled: append the frames of one or more messages of the same queue. Either all frames
        are appended, or none.

        ``items`` is a C array of ``Item``. In each item, this method sets the sizes and the numbers
        that all messages share. If the clock is the system time, the method calls no Python code
        while it holds the log's lock. So no other thread and no signal handler can run after the
        bytes are written and before the queue's next offset is raised.

        If the pure-Python version must append the messages, this method changes nothing, and
        returns None or raises OverflowError.
        """
        queue_number = queue_id
        born_time = 0
        if born is not None:
            born_time = born
        elif not self._is_wall_clock:
            born_time = self.clock()
        whole = 0
        data = topic.data
        for number in range(count):
            item = cython.address(items[number])
            item.queue_id = queue_number
            item.born = born_time
            item.reconsumed = reconsumed
            item.prepared = prepared
            item.start = whole
            whole += measured(item, head, data)
            if item.properties_length > _LONGEST or whole > self._largest:
                return None
        key = topic.key(queue_number)

        lock = self._lock
        lock.take()
        try:
            began = ticks_ns()
            file = self._files.last
            if file is None or self._health.reason is not None or self.bar is not None:
                return None
            at = file.wrote
            if at + whole + _BLANK > file.size:
                return None
            if self._is_wall_clock:
                now = time_ns() // 1_000_000
            else:
                stamp = self.clock()
                if type(stamp) is not int:
                    return None
                now = stamp
            known = get_known(self.queue_offsets, key.key, key.hash)
            if known is None and self.claim_topic is not None:
                return None
            queue_offset = known if head.advances and known is not None else 0
            physical_offset = file.base + at
            view = None
            if file.address:
                place = cython.cast(cython.p_char, file.address)
            else:
                # The file has no address if writes go to a buffer of the transient store pool or to
                # a copy of the file.
                view = file.buffer
                place = cython.cast(cython.p_char, PyMemoryView_GET_BUFFER(view).buf)
            place += at
            for number in range(count):
                item = cython.address(items[number])
                if born is None and self._is_wall_clock:
                    item.born = now
                place = write_frame(
                    place,
                    head,
                    data,
                    item,
                    queue_offset + number,
                    physical_offset + item.start,
                    now,
                )
            if view is not None:
                file.keep(at, at + whole)
            # The next lines cannot raise an error. Only the last line makes the written bytes a
            # part of the log.
            if head.advances:
                set_known(self.queue_offsets, key.key, queue_offset + count, key.hash)
            elif known is None:
                # If the message takes no queue offset, still add its queue to the table.
                self.queue_offsets[key.key] = 0
            file.store_timestamp = now
            file.wrote = at + whole
            held = (ticks_ns() - began) / 1e6
        finally:
            lock.release()
        starts = _ONE_FRAME
        if count != 1:
            starts = tuple([items[number].start for number in range(count)])
        # Most puts have the same store time and size as the previous put, so keep these two number
        # objects and use them again.
        if now != self._now:
            self._now, self._now_object = now, now
        if whole != self._size:
            self._size, self._size_object = whole, whole
        held_ms = held if held else _NO_TIME
        made: PutResult = result_of(
            _Result,
            _PUT_OK,
            _APPENDED,
            head.store_bytes,
            physical_offset,
            known if head.advances and known is not None else 0,
            self._size_object,
            count,
            self._now_object,
            held_ms,
            starts,
        )
        return made
