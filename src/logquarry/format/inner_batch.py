"""Inner batches of RocketMQ 5: one frame that holds several messages.

A producer sends a batch to a topic with batch queues; the broker stores it as one frame with the
SYSFLAG bits INNER_BATCH and NEED_UNWRAP. The body is the wire form of the batch
(:mod:`logquarry.format.batch`). Message i of the batch has the queue offset QUEUEOFFSET + i, and
a body, properties and FLAG of its own; all other fields are the frame's
(``MessageDecoder.decodeMessage``). The property INNER_NUM is the number of messages, by which the
queue offset advances; INNER_BASE repeats QUEUEOFFSET.

A message of a batch is given as a :class:`~logquarry.format.frame.Frame` that stands alone: its
SYSFLAG has neither the bits of the batch nor those of compression, BODYCRC is that of its own
body, and TOTALSIZE the size that it would have in the log. PHYSICALOFFSET is that of the batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from logquarry.errors import DecompressionError
from logquarry.format import batch, java, sys_flag
from logquarry.format import properties as props
from logquarry.format.compression import DEFAULT_LIMIT, decompress
from logquarry.format.frame import Frame

INNER_BATCH: Final = sys_flag.INNER_BATCH | sys_flag.NEED_UNWRAP
"""Both bits: clients take a frame apart only if it has both."""
OF_BATCH: Final = INNER_BATCH | sys_flag.COMPRESSED | sys_flag.COMPRESSION_MASK
"""The bits that a message of a batch does not inherit: they describe the body of the frame."""
MOST_MESSAGES: Final = 0x7FFF
"""``DispatchRequest.batchSize`` and the entry of a batch queue count the messages in 16 bits."""


def is_inner_batch(flag: int) -> bool:
    """Whether a frame with this SYSFLAG holds the messages of a batch."""
    return flag & INNER_BATCH == INNER_BATCH


def unwrap(frame: Frame, *, limit: int = DEFAULT_LIMIT) -> tuple[Frame, ...]:
    """The messages of an inner batch; a frame that is none, or whose body is no batch, stays whole.

    Clients keep a frame whose body is no batch as one message too (``PullAPIWrapper``).

    Args:
        frame: a sound frame.
        limit: maximum bytes of the decompressed body.
    """
    if not is_inner_batch(frame.sys_flag):
        return (frame,)
    try:
        items = tuple(batch.decode(decompress(frame.body, frame.sys_flag, limit=limit)))
    except (ValueError, DecompressionError):
        return (frame,)
    if not items or frame.queue_offset > java.LONG_MAX - len(items):
        return (frame,)
    flag = frame.sys_flag & ~OF_BATCH
    return tuple(
        replace(
            frame,
            body=item.body,
            properties=item.properties,
            flag=item.flag,
            sys_flag=flag,
            queue_offset=frame.queue_offset + number,
        ).with_crc()
        for number, item in enumerate(items)
    )


def queue_span(frame: Frame) -> tuple[int, int] | None:
    """The first queue offset of a frame and the number of its offsets, as the broker dispatches it.

    ``CommitLog.checkMessageAndReturnSize`` takes both from the properties INNER_BASE and INNER_NUM
    of an inner batch.

    Returns:
        (QUEUEOFFSET, 1) for an ordinary frame; None for an inner batch whose properties are not
        numbers, which the broker takes for a damaged frame.
    """
    if not frame.sys_flag & sys_flag.INNER_BATCH:
        return frame.queue_offset, 1
    found = props.decode_bytes(frame.properties)
    number, base = found.get(props.INNER_NUM), found.get(props.INNER_BASE)
    if number is None or base is None:
        return frame.queue_offset, 1
    if not (_is_number(number) and _is_number(base)):
        return None
    if int(number) > MOST_MESSAGES or int(base) > java.LONG_MAX - MOST_MESSAGES:
        return None
    return int(base), int(number)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= len(str(java.LONG_MAX))
