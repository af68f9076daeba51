"""Recognizes and dispatches messages as RocketMQ does. The rules depend on RocketMQ's version.

Recovery mode ``rocketmq`` uses :func:`check_message` (``checkMessageAndReturnSize``). Unlike
:mod:`logquarry.format.frame`, Java does not compare PHYSICALOFFSET with the frame's offset, and
accepts a blank of any size. Java rejects a frame if its DELAY property is not a number, or if its
lengths point past the end of Java's read buffer. Apart from that, RocketMQ 4.9.3 accepts every V1
frame that is valid for :func:`logquarry.format.frame.decode_at`. RocketMQ 5 also accepts V2 frames.

The rules by which messages are dispatched (``doDispatch``) apply to stores with queue files. The
rules come from ``CommitLog.recoverNormally``, ``recoverAbnormally`` and
``DefaultMessageStore.load`` of 4.9.3, 5.1.4, 5.3.3, 5.4.0 and 5.5.0. The files of a store do not
show whether 5.1 or 5.3 wrote it, so the rules of 5.3 are used for both. After a clean shutdown, the
two versions differ: 5.1 dispatches no message of the log.
"""

from __future__ import annotations

import logging
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np

from logquarry.config import StoreConfig
from logquarry.format import frame, index, java, sys_flag
from logquarry.format import properties as props
from logquarry.format.arrays import POSITION
from logquarry.format.properties import MULTI_SEPARATOR
from logquarry.log.codec import Window
from logquarry.log.earlier_writers import Writer
from logquarry.log.follow import Followed
from logquarry.read.log_queues import QueueKey, copy_key
from logquarry.repair.recover.java_queues import JavaQueue, JavaRefusal, Target
from logquarry.write.index_writer import IndexWriter
from logquarry.write.message_rules import queue_name_fault
from logquarry.write.queue_writer import parts_of, units_of

LARGEST_ARRAY: Final = java.INT_MAX - 2
"""Maximum size of an array of bytes in Java, regardless of how much memory there is."""


class JavaMemoryError(Exception):
    """RocketMQ would exit here: its recovery does not catch Java's OutOfMemoryError."""


class JavaRequest(NamedTuple):
    """The fields of a message that dispatch uses (``DispatchRequest``)."""

    topic: str
    queue_id: int
    physical_offset: int
    """The field PHYSICALOFFSET, which may differ from the place where the frame is."""
    size: int
    tags_code: int
    store_timestamp: int
    queue_offset: int
    sys_flag: int
    properties: Mapping[str, str] | None
    """None if PROPERTIESLEN is 0."""


class JavaVerdict(NamedTuple):
    """The result of Java's check at a position of its read buffer. ``size`` is the size of a
    message, 0 for a blank, and -1 for other bytes. If ``is_success`` is true, RocketMQ's recovery
    continues after these bytes. ``end`` is the position to which Java's buffer has moved.
    """

    size: int
    is_success: bool
    end: int
    request: JavaRequest | None = None


def check_message(
    data: memoryview,
    position: int,
    *,
    levels_ms: tuple[int, ...],
    check_crc: bool,
    read_body: bool = True,
    is_5: bool = False,
) -> JavaVerdict:
    """Return what Java finds at one position of its read buffer.

    Args:
        levels_ms: delay of each delay level in milliseconds. Empty for the recovery of 4.9, which
            has not read the delay levels yet.
        read_body: whether Java reads the body, as in a recovery. The dispatch after the recovery
            does not read the body, and accepts a BODYLEN that is larger than the frame.
        is_5: whether to use the rules of 5.3 and later, which accept V2 frames, and reject a frame
            or a blank that ends after the end of the buffer.

    Raises:
        JavaMemoryError: if Java would try to make an array that is too large.
    """
    try:
        return _check(data, position, levels_ms, check_crc, read_body, is_5)
    except (struct.error, _Bad):
        return JavaVerdict(-1, False, position)


class _Bad(Exception):
    """Java throws an exception while it reads the frame, and so does not accept it as a message."""


def _check(
    data: memoryview,
    position: int,
    levels_ms: tuple[int, ...],
    check_crc: bool,
    read_body: bool,
    is_5: bool,
) -> JavaVerdict:
    size, magic = frame.BLANK.struct.unpack_from(data, position)
    if is_5 and size > len(data) - position:
        raise _Bad
    if magic == frame.MAGIC_BLANK:
        return JavaVerdict(0, True, position + frame.BLANK.size)
    is_v2 = is_5 and magic == frame.MAGIC_V2
    if (magic != frame.MAGIC_V1 and not is_v2) or size < 0:
        raise _Bad
    if size > LARGEST_ARRAY:
        raise JavaMemoryError(f"an array of {size} bytes")
    head = frame.HEAD.struct.unpack_from(data, position)
    _, _, crc, queue_id, _, queue_offset, physical_offset, sys_flag, _ = head
    born, store = frame.host_sizes(sys_flag)
    # Java copies each of the two hosts into an array of TOTALSIZE bytes, so each must fit.
    if max(born, store) > size:
        raise _Bad
    at = position + frame.HEAD.size + born
    (store_timestamp,) = frame.STORE_TIME.struct.unpack_from(data, at)
    at += frame.STORE_TIME.size + store
    *_, body_length = frame.TAIL.struct.unpack_from(data, at)
    at += frame.TAIL.size
    body_length = max(0, body_length)
    if body_length > len(data) - at or (read_body and body_length > size):
        raise _Bad
    body = data[at : at + body_length]
    if check_crc and read_body and body and java.body_crc(zlib.crc32(body)) != crc:
        raise _Bad
    at += body_length
    topic_layout = frame.TOPIC_LENGTH_V2 if is_v2 else frame.TOPIC_LENGTH_V1
    (topic_length,) = topic_layout.struct.unpack_from(data, at)
    at += topic_layout.size
    topic = _text(data, at, topic_length, size)
    at += topic_length
    (properties_length,) = frame.PROPERTIES_LENGTH.struct.unpack_from(data, at)
    at += frame.PROPERTIES_LENGTH.size
    properties_length = max(0, properties_length)
    properties = None
    tags_code = 0
    if properties_length:
        properties = props.decode(_text(data, at, properties_length, size))
        level = properties.get(props.DELAY)
        if topic == props.SCHEDULE_TOPIC and level is not None and props.parse_int(level) is None:
            raise _Bad
        tags_code = props.tags_code(topic, properties, store_timestamp, levels_ms)
    at += properties_length
    if at - position != size:
        return JavaVerdict(size, False, at)
    request = JavaRequest(
        topic,
        queue_id,
        physical_offset,
        size,
        tags_code,
        store_timestamp,
        queue_offset,
        sys_flag,
        properties,
    )
    return JavaVerdict(size, True, at, request)


def _text(data: memoryview, at: int, length: int, size: int) -> str:
    if not 0 <= length <= min(size, len(data) - at):
        raise _Bad
    return bytes(data[at : at + length]).decode("utf-8", java.UTF8_ERRORS)


_MOST_FILES: Final = 10


@dataclass(frozen=True, slots=True)
class JavaRules:
    """The rules of one RocketMQ version.

    Attributes:
        is_5: whether the version is 5. RocketMQ 5 reads V2 frames, knows the delay levels during
            the recovery, and after the recovery dispatches from the log's end on. RocketMQ 4.9
            dispatches from the end of the queues on.
        most_files: maximum number of files at the log's end that the recovery reads, or None.
        starts_by_frame: whether the first frame of a file decides if the recovery begins there.
            After a clean shutdown, RocketMQ then compares the PHYSICALOFFSET of this frame with the
            end of the queues. If False, 5.3 compares the file's name instead, and 4.9 begins at the
            third-last file.
        starts_by_offset: whether a recovery after a crash compares the PHYSICALOFFSET of this frame
            with the checkpoint's physical offset of the queues. If False, or if the checkpoint has
            no such offset, store times decide.
    """

    name: str
    is_5: bool
    most_files: int | None = None
    starts_by_frame: bool = False
    starts_by_offset: bool = False


V4_9: Final = JavaRules("4.9.3", False)
V5_3: Final = JavaRules("5.3.3", True)
V5_4: Final = JavaRules("5.4.0", True, _MOST_FILES, True)
V5_5: Final = JavaRules("5.5.0", True, _MOST_FILES, True, True)


def rules_for(writer: Writer) -> JavaRules:
    """Return the rules of the RocketMQ version that wrote a store, or of the nearest known one."""
    if not writer.is_5:
        return V4_9
    assert writer.at_least is not None
    return {"5.4.0": V5_4, "5.5.0": V5_5}.get(writer.at_least, V5_3)


logger = logging.getLogger(__name__)

_QUEUED: Final = (sys_flag.TRANSACTION_NOT, sys_flag.TRANSACTION_COMMIT)
_LONGEST_NUMBER: Final = 40
_NEVER_COPIED: Final = ("%RETRY%", "rmq_sys_", props.SCHEDULE_TOPIC)
"""RocketMQ 5 makes no multi-dispatch copies of messages whose topic begins with one of these."""


class JavaDispatch:
    """Dispatches messages in the order of the log. ``open_index`` is called once, before the first
    message. ``messages`` and ``keys`` are counts. ``store_timestamp`` and ``physical_offset`` are
    those of the last dispatched message that has a queue entry.
    """

    def __init__(
        self,
        queues: dict[QueueKey, JavaQueue],
        config: StoreConfig,
        target: Target,
        open_index: Callable[[], IndexWriter | None],
        rules: JavaRules = V4_9,
    ) -> None:
        self.queues = queues
        self.messages = self.keys = 0
        self.store_timestamp: int | None = None
        self.physical_offset: int | None = None
        self._rules = rules
        self._config = config
        self._target = target
        self._open_index = open_index
        self._unsafe: set[str] = set()

    @cached_property
    def _index(self) -> IndexWriter | None:
        return self._open_index()

    def run(self, window: Window, run: Followed, levels_ms: tuple[int, ...]) -> None:
        """Dispatch the messages of a run (valid frames without a gap)."""
        requests = run.requests
        if self._config.enable_multi_dispatch:
            # A queue has the entries of its own messages, and entries that multi-dispatch adds for
            # messages of other queues. All these entries must be in the order of the log.
            data = window.data.data
            for position in run.rows[:, POSITION].tolist():
                found = check_message(
                    data, position, levels_ms=levels_ms, check_crc=False, is_5=self._rules.is_5
                )
                assert found.request is not None
                self.one(found.request)
            return
        for key, part in parts_of(run).items():
            queue = self._queue(key)
            if queue is not None:
                queue.put(part.offsets, part.units)
        queued = np.flatnonzero(requests.is_dispatched)
        if len(queued):
            self.store_timestamp = int(requests.store_timestamp[queued[-1]])
            self.physical_offset = int(requests.physical_offset[queued[-1]])
        self.messages += len(requests.size)
        self.keys += len(run.key_hashes)
        if self._index is not None:
            self._index.put(
                requests.physical_offset,
                requests.store_timestamp,
                run.key_hashes,
                run.key_numbers,
            )

    def one(self, request: JavaRequest) -> None:
        """Dispatch one message; raise JavaRefusal if RocketMQ would fail."""
        self.messages += 1
        kind = request.sys_flag & sys_flag.TRANSACTION_MASK
        if kind in _QUEUED:
            self._put((request.topic, request.queue_id), request.queue_offset, request)
            self.store_timestamp = request.store_timestamp
            self.physical_offset = request.physical_offset
            for key, offset in self._copies(request):
                self._put(key, offset, request)
        keys = [] if kind == sys_flag.TRANSACTION_ROLLBACK else _keys(request)
        self.keys += len(keys)
        if self._index is not None:
            hashes = [index.key_hash(request.topic, key) for key in keys]
            tag = (request.properties or {}).get(props.TAGS)
            if self._config.index_tags and tag and kind != sys_flag.TRANSACTION_ROLLBACK:
                hashes.append(java.positive_hash_code(index.tag_text(request.topic, tag)))
            self._index.put(
                np.array([request.physical_offset], np.int64),
                np.array([request.store_timestamp], np.int64),
                np.array(hashes, np.int64),
                np.zeros(len(hashes), np.int64),
            )

    def _put(self, key: QueueKey, offset: int, request: JavaRequest) -> None:
        queue = self._queue(key)
        if queue is not None:
            size = np.array([request.size], np.int64)
            physical, code = np.array([[request.physical_offset], [request.tags_code]], np.int64)
            queue.put(np.array([offset], np.int64), units_of(physical, size, code))

    def _queue(self, key: QueueKey) -> JavaQueue | None:
        """Return a queue, and create it if it is missing. Return None if the topic's name cannot be
        the name of a folder.
        """
        queue = self.queues.get(key)
        if queue is None:
            topic = key[0]
            fault = queue_name_fault(topic)
            if fault is not None:
                if topic not in self._unsafe:
                    self._unsafe.add(topic)
                    logger.error("topic %r gets no consume queue: %s", topic, fault)
                return None
            size = self._config.queue_file_size
            assert size is not None
            queue = self.queues[key] = JavaQueue(key, [], size, self._target)
        return queue

    def _copies(self, request: JavaRequest) -> Iterator[tuple[QueueKey, int]]:
        """Yield the queues that receive a multi-dispatch copy of the message
        (``multiDispatchLmqQueue``).
        """
        if not self._config.enable_multi_dispatch:
            return
        if self._rules.is_5 and (not request.properties or request.topic.startswith(_NEVER_COPIED)):
            return
        if request.properties is None:
            # QUIRK: RocketMQ throws NullPointerException if the message has no properties
            # (checkMultiDispatchQueue).
            raise JavaRefusal(
                f"the message at {request.physical_offset} has no properties, and RocketMQ's "
                "multi-dispatch fails without them"
            )
        named = request.properties.get(props.INNER_MULTI_DISPATCH, "")
        numbers = request.properties.get(props.INNER_MULTI_QUEUE_OFFSET, "")
        if not named.strip() or not numbers.strip():
            return
        names, offsets = _split(named), _split(numbers)
        if len(names) != len(offsets):
            return
        for name, text in zip(names, offsets, strict=True):
            yield copy_key(name, request.queue_id, self._config), _parse_long(text, request)


def _split(text: str) -> list[str]:
    """Split a text as Java's ``String.split`` does: empty words at the end are left out."""
    words = text.split(MULTI_SEPARATOR)
    while len(words) > 1 and not words[-1]:
        words.pop()
    return words if words[-1] or len(words) > 1 else []


def _parse_long(text: str, request: JavaRequest) -> int:
    digits = text[1:] if text[:1] in ("+", "-") else text
    value = int(text) if digits.isdecimal() and len(text) <= _LONGEST_NUMBER else None
    if value is None or not java.LONG_MIN <= value <= java.LONG_MAX:
        raise JavaRefusal(
            f"the message at {request.physical_offset} gives {text[:_LONGEST_NUMBER]!r} as its "
            "queue offset in another queue, but that is not a number"
        )
    return value


def _keys(request: JavaRequest) -> list[str]:
    if request.properties is None:
        return []
    unique = request.properties.get(props.UNIQ_KEY)
    rest = props.split_keys(request.properties.get(props.KEYS, ""))
    return rest if unique is None else [unique, *rest]
