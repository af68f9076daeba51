"""Refuses to read a store whose ``commitlog/`` has no file, though its queues know of messages."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from logquarry import text
from logquarry.log.filesystem import LocalFileSystem
from logquarry.log.layout import CHECKPOINT, COMMIT_LOG, StoreLayout
from logquarry.log.log_place import setting
from logquarry.read.log_end import consume_queues


def require_log(layout: StoreLayout) -> None:
    """Refuse a store whose log is not found: its reader would find no message.

    Raises:
        UnsupportedStore: if the log is elsewhere, or is missing.
        UsageError: if the configuration gives another size of the log's files.
    """
    layout.require_stated_size()
    if layout.commit_log.files:
        return
    missing = layout.missing_log
    if missing is not None:
        known = f"{_link(layout)}, but {_known(layout)}"
        reason = f"the log has no files{known}: is a disk not mounted?"
        path = setting(layout.config, "storePathCommitLog")
        reason = f"storePathCommitLog={path}: {reason}" if path else reason
        raise dataclasses.replace(missing, reason=reason).error(layout.root)


def _link(layout: StoreLayout) -> str:
    if not isinstance(layout.filesystem, LocalFileSystem):
        return ""
    folder = Path(layout.root) / COMMIT_LOG
    if folder.is_symlink() and not folder.exists():
        return f" ({COMMIT_LOG} is a link to {folder.readlink()}, which does not exist)"
    return ""


def _known(layout: StoreLayout) -> str:
    """What the store knows of the log, by the ends of its queues."""
    messages = 0
    starts, ends = [], []
    for queue in consume_queues(layout):
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
