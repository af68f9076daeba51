"""The rules by which RocketMQ recognises a message (``checkMessageAndReturnSize``).

Recovery mode ``rocketmq`` uses these rules. Unlike :mod:`logquarry.format.frame`, Java does not
compare PHYSICALOFFSET with the frame's offset, and accepts a blank of any size. Java rejects a
frame if its DELAY is not a number, or if its lengths reach past the buffer. RocketMQ 4.9.3 accepts
every other V1 frame that :func:`logquarry.format.frame.decode_at` finds sound; 5.x also accepts V2
frames.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from typing import Final, NamedTuple

from logquarry.format import frame, java
from logquarry.format import properties as props

LARGEST_ARRAY: Final = java.INT_MAX - 2
"""Maximum bytes of an array in a Java virtual machine, regardless of its memory."""


class JavaMemoryError(Exception):
    """Java would raise OutOfMemoryError, which its recovery does not catch."""


class JavaRequest(NamedTuple):
    """The fields for queues and index (``DispatchRequest``)."""

    topic: str
    queue_id: int
    physical_offset: int
    """PHYSICALOFFSET, which may differ from the frame's offset."""
    size: int
    tags_code: int
    store_timestamp: int
    queue_offset: int
    sys_flag: int
    properties: Mapping[str, str] | None
    """None if PROPERTIESLEN is 0."""


class JavaVerdict(NamedTuple):
    """Java's verdict on the bytes at a position; ``end`` is the position of Java's buffer
    afterwards.

    ``size`` is 0 for a blank, and -1 for other bytes without a message. If ``is_success``, a
    recovery continues after these bytes.
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
    """Return Java's verdict on the bytes at one position in Java's buffer.

    If Java would request an array that is too large, this raises JavaMemoryError.

    Args:
        levels_ms: delay of each level; empty during a recovery, because Java reads the levels
            later.
        read_body: whether Java reads the body, which it does in a recovery. Dispatching skips the
            body, and accepts a BODYLEN that is larger than the frame.
        is_5: whether to use the rules of 5.3 and later: V2 frames are read, and a frame or blank
            that reaches past the buffer is rejected.
    """
    try:
        return _check(data, position, levels_ms, check_crc, read_body, is_5)
    except (struct.error, _Bad):
        return JavaVerdict(-1, False, position)


class _Bad(Exception):
    """Java throws an exception here, and does not treat the bytes as a message."""


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
    # Java copies parts of the frame into an array of TOTALSIZE bytes.
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
