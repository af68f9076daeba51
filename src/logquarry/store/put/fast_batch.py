"""A batch in wire form by a kernel, as far as it is taken; a refusal is the reference's."""

from __future__ import annotations

import threading
from functools import cache, lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from logquarry.config import StoreConfig
from logquarry.format import batch, frame
from logquarry.message import Message
from logquarry.scan import codec
from logquarry.store.put.encoded import Encoded
from logquarry.store.put.frame_maker import FrameMaker

_CACHED: Final = 1_024

Bytes8 = npt.NDArray[np.uint8]
Int64 = npt.NDArray[np.int64]


class EncodedBatch(Encoded):
    """A batch's frames, whose places a kernel fills in."""

    __slots__ = ("_view", "_where")

    def __init__(self, data: bytearray, where: Int64, *given: Any, **more: Any) -> None:
        super().__init__(data, *given, starts=tuple(where.tolist()), **more)
        self._where = where
        self._view = np.frombuffer(data, np.uint8)

    def place(self, queue_offset: int, physical_offset: int, store_timestamp: int) -> None:
        """See :meth:`Encoded.place`."""
        kernels = codec.kernels()
        assert kernels is not None
        kernels.place_frames(
            self._view, self._where, self._time_at, queue_offset, physical_offset, store_timestamp
        )


class _Scratch(threading.local):
    """Room for the frames of the largest batch, for each thread its own. Taken as it is used."""

    out: Bytes8 = np.empty(0, np.uint8)
    starts: Int64 = np.empty(0, np.int64)

    def of(self, size: int) -> tuple[Bytes8, Int64]:
        if len(self.out) != size:
            self.out = np.empty(size, np.uint8)
            self.starts = np.empty(size // batch.FIXED_SIZE + 1, np.int64)
        return self.out, self.starts


_scratch = _Scratch()


def batch_by_kernel(
    config: StoreConfig,
    wire: bytes,
    message: Message,
    maker: FrameMaker,
    topic: bytes,
    shared: bytes,
    wait: bool,
) -> Encoded | None:
    """The frames of a batch that was checked; None where one of them is refused.

    Args:
        config: the store's settings.
        wire: the messages.
        message: what they share.
        maker: knows the hosts.
        topic: the topic's bytes.
        shared: the batch's own properties.
        wait: whether the put waits for flush and replica.
    """
    kernels = codec.kernels()
    assert kernels is not None
    head = maker.head(message.queue_id)
    if head is None:
        return None
    out, starts = _scratch.of(config.max_message_size)
    count, size, bodies = kernels.batch_frames(
        np.frombuffer(wire, np.uint8),
        np.frombuffer(head, np.uint8),
        _with_length(topic),
        _as_array(shared),
        codec.crc32_address(),
        out,
        starts,
    )
    if count < 0:
        return None
    _load_kernel()
    return EncodedBatch(
        bytearray(out[:size]),
        starts[:count].copy(),
        message.topic,
        message.queue_id,
        maker.hosts,
        wait=wait,
        body_size=bodies,
    )


@cache
def _load_kernel() -> None:
    """Load or compile what fills in the places, which takes a moment: not with the log held."""
    kernels = codec.kernels()
    assert kernels is not None
    kernels.place_frames(np.empty(0, np.uint8), np.empty(0, np.int64), 0, 0, 0, 0)


@lru_cache(_CACHED)
def _with_length(topic: bytes) -> Bytes8:
    return _as_array(frame.TOPIC_LENGTH_V1.struct.pack(len(topic)) + topic)


@lru_cache(_CACHED)
def _as_array(data: bytes) -> Bytes8:
    array: Bytes8 = np.frombuffer(data, np.uint8)
    return array
