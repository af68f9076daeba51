"""Frames that are ready for the log but for what only its lock can tell.

QUEUEOFFSET, PHYSICALOFFSET and STORETIMESTAMP are filled in by :meth:`Encoded.place`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final

from logquarry.format import frame
from logquarry.store.put.frame_maker import HostFields
from logquarry.store.queue.log_queues import MULTI_SEPARATOR, QueueKey

_PLACES: Final = struct.Struct(">qq")
_PLACES_AT: Final = frame.HEAD.offsets["queue_offset"]
assert frame.HEAD.offsets["physical_offset"] == _PLACES_AT + 8
_TIME: Final = frame.STORE_TIME.struct


class Encoded:
    """A frame, or a batch's frames, ready for the log.

    Attributes:
        data: the bytes, with places for what the lock tells.
        key: topic and queue of the frames: of a delayed message the schedule topic's.
        store_host: the broker, as in the frame.
        starts: where each frame starts in ``data``.
        advances: whether the frames take places in their queue (NOT and COMMIT).
        wait: whether the put waits for flush and replica.
        body_size: bytes of body, for messages.
        copies: further queues that the message goes to.
        own_offset: QUEUEOFFSET of frames that take no places.
    """

    __slots__ = (
        "_time_at",
        "advances",
        "body_size",
        "copies",
        "data",
        "key",
        "own_offset",
        "starts",
        "store_host",
        "wait",
    )

    def __init__(
        self,
        data: bytearray,
        topic: str,
        queue_id: int,
        hosts: HostFields,
        *,
        starts: tuple[int, ...] = (0,),
        advances: bool = True,
        wait: bool = True,
        body_size: int = 0,
        copies: Copies | None = None,
        own_offset: int = 0,
    ) -> None:
        self.data = data
        self.key = (topic, queue_id)
        self.store_host = hosts.store_host
        self.starts = starts
        self.advances = advances
        self.wait = wait
        self.body_size = body_size
        self.copies = copies
        self.own_offset = own_offset
        self._time_at = hosts.time_at

    def place(self, queue_offset: int, physical_offset: int, store_timestamp: int) -> None:
        """Fill in what the lock told. Can be done again, for another file."""
        data, time_at = self.data, self._time_at
        for number, start in enumerate(self.starts):
            _PLACES.pack_into(
                data, start + _PLACES_AT, queue_offset + number, physical_offset + start
            )
            _TIME.pack_into(data, start + time_at, store_timestamp)


class Copies:
    """The further queues of a message (``MultiDispatch``), whose offsets its properties tell.

    So its frame can only be made inside the lock.

    Attributes:
        keys: the queues.
    """

    __slots__ = ("_encode", "keys")

    def __init__(self, keys: tuple[QueueKey, ...], encode: Callable[[str], bytearray]) -> None:
        self.keys = keys
        self._encode = encode

    def frame(self, offsets: list[int]) -> bytearray:
        """The frame for an offset in each of the queues.

        Raises:
            MessageRejected: if that makes the message too large: UNKNOWN_ERROR, as in RocketMQ.
        """
        return self._encode(MULTI_SEPARATOR.join(map(str, offsets)))
