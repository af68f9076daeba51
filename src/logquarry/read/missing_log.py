"""Refuses to read a store whose ``commitlog/`` has no byte, though its queues know of messages."""

from __future__ import annotations

import dataclasses

from logquarry import text
from logquarry.log.layout import StoreLayout
from logquarry.log.log_place import setting
from logquarry.log.store_files import CHECKPOINT
from logquarry.read.batch_queue import all_queues
from logquarry.read.store_sizes import require_own_settings


def require_log(layout: StoreLayout) -> None:
    """Refuse a store whose log is not found: its reader would find no message.

    Raises:
        UnsupportedStore: if the log is elsewhere, or is missing.
        UsageError: if the configuration gives sizes that the files contradict.
    """
    require_own_settings(layout)
    if any(file.size for file in layout.commit_log.files):
        return
    missing = layout.missing_log
    if missing is None:
        # A writer that has just begun may have made the first file after the listing.
        layout.refresh()
    else:
        what = "the log's files are empty" if layout.commit_log.files else "the log has no files"
        reason = f"{what}, but {_known(layout)}: is a disk not mounted?"
        path = setting(layout.config, "storePathCommitLog")
        reason = f"storePathCommitLog={path}: {reason}" if path else reason
        raise dataclasses.replace(missing, reason=reason).error(layout.root)


def _known(layout: StoreLayout) -> str:
    """What the store knows of the log, by the ends of its queues."""
    messages = 0
    starts, ends = [], []
    for queue in all_queues(layout):
        last, first = queue.last_entry, next(queue.entries(0), None)
        if last is None or first is None:
            continue
        messages += queue.max_offset - first[0]
        starts.append(first[1].physical_offset)
        ends.append(last.physical_offset + last.size)
    if not ends:
        return f"{CHECKPOINT} knows of messages"
    size = max(ends) - min(starts)
    return f"the queues point to {size:,} bytes ({text.plural(messages, 'message')})"
