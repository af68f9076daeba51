"""Finds messages that a log has lost: the checkpoint shows the last messages, queues and index show
the others.

The checkpoint has the store time of the last synced message. If queues and index are lost with the
end of the log, only the checkpoint shows that there were later messages.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from logquarry.format import java
from logquarry.format.arrays import Bools, Int64
from logquarry.format.checkpoint import Checkpoint
from logquarry.format.queue_entry import QueueEntry
from logquarry.log.layout import StoreLayout
from logquarry.read.batch_queue import all_queues, frames_in
from logquarry.read.commit_log import CommitLog
from logquarry.read.index_file import Span, indexed_frames
from logquarry.read.log_end import last_entries, last_store_timestamp
from logquarry.read.queue import has_message
from logquarry.text import plural, time_text

logger = logging.getLogger(__name__)


def checkpoint_times(layout: StoreLayout) -> Checkpoint:
    """The times of the checkpoint; zeros if it is missing or cannot be read."""
    try:
        return layout.read_checkpoint() or Checkpoint()
    except ValueError:
        return Checkpoint()


def lost_tail(layout: StoreLayout, last_time: int) -> str | None:
    """Return the evidence, in words, that a log has lost its last messages; else None.

    In 386 stores that RocketMQ and logquarry wrote, the checkpoint was later than the last message
    only if messages were lost. For example, a power cut loses messages that were dispatched, but
    not synced. ``last_time`` is the latest store time of a message in the log, in ms, or 0. No
    process may have the store open.
    """
    covered = max(checkpoint_times(layout))
    # The durable offset, which a recovery writes, shows where the log ends.
    is_known = layout.durable_end is not None or not layout.commit_log.files
    if is_known or covered <= max(0, last_time):
        return None
    last = f"the last message in the log was stored at {time_text(last_time)}"
    return (
        f"the checkpoint covers a message stored at {time_text(covered)}, and "
        f"{last if last_time else 'the log has no message'}: later messages are lost"
    )


def find_lost_tail(layout: StoreLayout, entries: Sequence[QueueEntry]) -> str | None:
    """Do the same as :func:`lost_tail`, for a caller that has not read the log.

    Reads the message of the first of ``entries`` (:func:`logquarry.read.log_end.last_entries`). If
    the checkpoint is later, reads the last log file. No process may have the store open.
    """
    log = layout.commit_log
    if lost_tail(layout, 0) is None:
        return None
    if entries:
        last = entries[0]
        if log.at(last.physical_offset) is None:
            # The entries already show that a file is lost.
            return None
        if lost_tail(layout, CommitLog(layout).store_time_at(*last[:2])) is None:
            return None
    return lost_tail(layout, last_store_timestamp(layout, log.end))


def warn_of_lost_tail(layout: StoreLayout, entries: Sequence[QueueEntry]) -> None:
    """Log a warning if the log has lost its last messages (:func:`find_lost_tail`)."""
    reason = find_lost_tail(layout, entries)
    if reason is not None:
        logger.warning("%s: %s; type: logquarry verify %s", *(layout.root, reason, layout.root))


_NONE: Final = np.empty(0, np.int64)


class LostMessages(NamedTuple):
    """Messages outside the sound parts of the log, and their bytes."""

    messages: int
    bytes: int

    def __str__(self) -> str:
        return f"{plural(self.messages, 'message')} lost, {plural(self.bytes, 'byte')}"


def lost_messages(
    layout: StoreLayout, spans: Sequence[Span], log_end: int = java.LONG_MAX
) -> LostMessages:
    """Count the messages of queues and index in damaged parts of the log and after its end.

    Reads all queue entries. A message in several queues counts once. For an inner batch, the
    function counts all messages, but counts the bytes once. If only the index has a message, its
    bytes are an estimate. The spans must be in order. By default, only messages in ``spans`` count.
    """
    # An entry that points after this offset is itself damaged.
    log = layout.commit_log
    limit = java.LONG_MAX
    if log.files and log_end < java.LONG_MAX:
        furthest = next(iter(last_entries(layout)), None)
        known = 0 if furthest is None else furthest.end
        limit = max(max(log_end, log.end) + log.file_size, known)
    starts = np.array([span.offset for span in spans], np.int64)
    ends = np.array([span.offset + span.length for span in spans], np.int64)

    def lost(at: Int64) -> Bools:
        is_lost: Bools = (at >= log_end) & (at < limit)
        if len(starts):
            number = np.searchsorted(starts, at, side="right") - 1
            is_lost |= (number >= 0) & (at < ends[np.maximum(number, 0)])
        return is_lost

    offsets, sizes, counts = [_NONE], [_NONE], [_NONE]
    for queue in all_queues(layout):
        for _, units in queue.runs(queue.min_offset, queue.max_offset):
            at = units["physical_offset"].astype(np.int64)
            is_lost = lost(at) & has_message(units)
            at, size = at[is_lost], units["size"][is_lost].astype(np.int64)
            which, held = frames_in(at, is_batch=queue.is_batch)
            offsets.append(at[which])
            sizes.append(size[which])
            counts.append(held)
    at, size = indexed_frames(layout, min([log_end, *starts.tolist()]), spans)
    is_lost = lost(at)
    # The queues come first, because they have the exact sizes.
    offsets.append(at[is_lost])
    sizes.append(size[is_lost])
    counts.append(np.ones(np.count_nonzero(is_lost), np.int64))
    _, first = np.unique(np.concatenate(offsets), return_index=True)
    return LostMessages(
        int(np.concatenate(counts)[first].sum()), int(np.concatenate(sizes)[first].sum())
    )
