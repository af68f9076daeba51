"""What the dispatcher wants to know of each frame (``DispatchRequest``), as arrays for a run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from logquarry.format import rows as r
from logquarry.format import sys_flag
from logquarry.scan import columns
from logquarry.scan.codec import Rows, Window
from logquarry.scan.columns import Decoding

Int64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_NUMBERS = ("queue_id", "queue_offset", "sys_flag", "store_timestamp")


@dataclass(frozen=True, slots=True)
class DispatchRequests:
    """The frames of a run, in their order.

    Attributes:
        topic_ids: a number for each frame's topic.
        topics: the topics by number.
        queue_id: queue of the topic.
        queue_offset: index in the consume queue.
        physical_offset: where the frame starts in the log.
        size: bytes of the frame.
        store_timestamp: in milliseconds.
        tags_code: what goes into the queue's unit.
        is_dispatched: whether the frame takes a place in its queue (NOT and COMMIT).
        has_key: whether the index takes it: with KEYS or UNIQ_KEY, and not a ROLLBACK.
    """

    topic_ids: npt.NDArray[np.int32]
    topics: list[str]
    queue_id: Int64
    queue_offset: Int64
    physical_offset: Int64
    size: Int64
    store_timestamp: Int64
    tags_code: Int64
    is_dispatched: Bools
    has_key: Bools


def dispatch_requests(
    window: Window, rows: Rows, delay_levels_ms: tuple[int, ...]
) -> DispatchRequests:
    """What the dispatcher takes from some frames."""
    ids, topics = columns.topic_ids(window, rows)
    numbers = {
        name: values.astype(np.int64)
        for name, values in columns.fixed_fields(window, rows, _NUMBERS).items()
    }
    codes, has_key = columns.tags_codes(window, rows, Decoding(delay_levels_ms=delay_levels_ms))
    kinds = numbers["sys_flag"] & sys_flag.TRANSACTION_MASK
    return DispatchRequests(
        topic_ids=ids,
        topics=topics,
        queue_id=numbers["queue_id"],
        queue_offset=numbers["queue_offset"],
        physical_offset=rows[:, r.POSITION].astype(np.int64) + window.base,
        size=rows[:, r.SIZE].astype(np.int64),
        store_timestamp=numbers["store_timestamp"],
        tags_code=codes,
        is_dispatched=(kinds == sys_flag.TRANSACTION_NOT) | (kinds == sys_flag.TRANSACTION_COMMIT),
        has_key=has_key & (kinds != sys_flag.TRANSACTION_ROLLBACK),
    )
