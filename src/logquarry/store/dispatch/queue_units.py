"""The units of a run of frames, queue by queue, in two twins."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from logquarry.config import StoreConfig
from logquarry.format.queue_entry import UNIT_SIZE
from logquarry.scan import codec, columns
from logquarry.scan.codec import Window
from logquarry.scan.columns import Decoding
from logquarry.scan.follow import Followed
from logquarry.scan.requests import DispatchRequests
from logquarry.store.dispatch.queue_writer import units_of
from logquarry.store.queue.consume_queue import UNIT_DTYPE, Units
from logquarry.store.queue.log_queues import QueueKey, copies_of

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class QueuePart:
    """What a run of frames brings to one queue, in the log's order.

    Attributes:
        rows: the numbers of the frames.
        offsets: the queue offset of each.
        units: what stands there.
    """

    rows: Int64
    offsets: Int64
    units: Units


def parts_of(followed: Followed) -> dict[QueueKey, QueuePart]:
    """What a run brings to each queue."""
    if followed.table is None:
        return _plain(followed.requests)
    kernels = codec.kernels()
    assert kernels is not None
    count, queues = followed.table.shape[1], len(followed.queues)
    ends = np.empty(queues + 1, np.int64)
    rows, offsets = np.empty(count, np.int64), np.empty(count, np.int64)
    data = np.empty(count * UNIT_SIZE, np.uint8)
    kernels.group_units(followed.table, count, queues, ends, rows, offsets, data)
    units: Units = data.view(UNIT_DTYPE)
    bounds = ends.tolist()
    return {
        key: QueuePart(rows[start:stop], offsets[start:stop], units[start:stop])
        for key, start, stop in zip(followed.queues, bounds, bounds[1:], strict=False)
    }


def _plain(requests: DispatchRequests) -> dict[QueueKey, QueuePart]:
    units = units_of(requests.physical_offset, requests.size, requests.tags_code)
    queued = np.flatnonzero(requests.is_dispatched)
    ids, queue_ids = requests.topic_ids[queued], requests.queue_id[queued]
    # Stable: the order within a queue stays the log's.
    order = np.lexsort((queue_ids, ids))
    ids, queue_ids, queued = ids[order], queue_ids[order], queued[order]
    cuts = np.flatnonzero((np.diff(ids) != 0) | (np.diff(queue_ids) != 0)) + 1
    parts: dict[QueueKey, QueuePart] = {}
    for part in np.split(np.arange(len(queued)), cuts):
        if len(part):
            key = requests.topics[ids[part[0]]], int(queue_ids[part[0]])
            rows = queued[part]
            parts[key] = QueuePart(rows, requests.queue_offset[rows], units[rows])
    return parts


def parts_with_copies(
    window: Window, followed: Followed, config: StoreConfig
) -> dict[QueueKey, QueuePart]:
    """What a run brings to each queue, also to those that its messages name besides their own."""
    parts = parts_of(followed)
    if config.enable_multi_dispatch:
        _add_copies(window, followed, parts, config)
    return parts


def _add_copies(
    window: Window, run: Followed, parts: dict[QueueKey, QueuePart], config: StoreConfig
) -> None:
    """Add what the messages of a run bring to further queues (``multiDispatchLmqQueue``)."""
    requests = run.requests
    units = units_of(requests.physical_offset, requests.size, requests.tags_code)
    queued = np.flatnonzero(requests.is_dispatched)
    copies: dict[QueueKey, list[tuple[int, int]]] = {}
    found = columns.messages(window, run.rows[queued], Decoding())
    for row, message in zip(queued.tolist(), found, strict=True):
        for key, offset in copies_of(message, config):
            copies.setdefault(key, []).append((row, offset))
    for key, pairs in copies.items():
        rows, offsets = np.array(pairs, np.int64).T
        if key in parts:
            rows = np.concatenate((parts[key].rows, rows))
            offsets = np.concatenate((parts[key].offsets, offsets))
            # Stable: a message that names its own queue is in it once.
            order = np.argsort(rows, kind="stable")
            rows, offsets = rows[order], offsets[order]
            once = np.append(True, np.diff(rows) != 0)
            rows, offsets = rows[once], offsets[once]
        parts[key] = QueuePart(rows, offsets, units[rows])
