"""Counts the messages that queues or index point to and the log has lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from logquarry.format import java
from logquarry.log.layout import StoreLayout
from logquarry.read.batch_queue import all_queues, frames_in
from logquarry.read.indexed import Span, indexed_frames
from logquarry.read.log_end import last_entries
from logquarry.read.queue import has_message
from logquarry.text import plural

_OFFSET, _SIZE = "physical_offset", "size"
_NONE: Final = np.empty(0, np.int64)


class LostMessages(NamedTuple):
    """Messages outside the sound parts of the log.

    Attributes:
        messages: their number.
        bytes: their sizes, according to their queue entries.
    """

    messages: int
    bytes: int

    def __str__(self) -> str:
        return f"{plural(self.messages, 'message')} lost, {plural(self.bytes, 'byte')}"


def lost_messages(layout: StoreLayout, spans: Sequence[Span], log_end: int) -> LostMessages:
    """Count the messages of queues and index in damaged parts of the log and after its end.

    Reads all queue entries. A message that several queues name counts once. Each message of an
    inner batch counts, and the bytes of its frame count once. The bytes of a message that only the
    index names are an estimate (:func:`logquarry.read.indexed.indexed_frames`).

    Args:
        layout: the store's files.
        spans: the damaged parts, in the order of the log.
        log_end: physical offset of the log's end.
    """
    # An entry that points further ahead is itself damaged.
    log = layout.commit_log
    limit = java.LONG_MAX
    if log.files:
        furthest = next(iter(last_entries(layout)), None)
        known = 0 if furthest is None else furthest.physical_offset + furthest.size
        limit = max(max(log_end, log.end) + log.file_size, known)
    starts = np.array([span.offset for span in spans], np.int64)
    ends = np.array([span.offset + span.length for span in spans], np.int64)

    def lost(at: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        is_lost: npt.NDArray[np.bool_] = (at >= log_end) & (at < limit)
        if len(starts):
            number = np.searchsorted(starts, at, side="right") - 1
            is_lost |= (number >= 0) & (at < ends[np.maximum(number, 0)])
        return is_lost

    offsets, sizes, counts = [_NONE], [_NONE], [_NONE]
    for queue in all_queues(layout):
        for _, units in queue.runs(queue.min_offset, queue.max_offset):
            at = units[_OFFSET].astype(np.int64)
            is_lost = lost(at) & has_message(units)
            at, size = at[is_lost], units[_SIZE][is_lost].astype(np.int64)
            which, held = frames_in(at, is_batch=queue.is_batch)
            offsets.append(at[which])
            sizes.append(size[which])
            counts.append(held)
    at, size = indexed_frames(layout, min([log_end, *starts.tolist()]), spans)
    is_lost = lost(at)
    # The queues come first: they have the sizes.
    offsets.append(at[is_lost])
    sizes.append(size[is_lost])
    counts.append(np.ones(np.count_nonzero(is_lost), np.int64))
    _, first = np.unique(np.concatenate(offsets), return_index=True)
    return LostMessages(
        int(np.concatenate(counts)[first].sum()), int(np.concatenate(sizes)[first].sum())
    )
