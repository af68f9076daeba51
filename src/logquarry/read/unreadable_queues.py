"""Finds unreadable queues, so that commands can show the rest of a store."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from logquarry.disk.open_files import OpenFiles
from logquarry.errors import UnreadableFile
from logquarry.log.layout import StoreLayout
from logquarry.read.batch_queue import all_queues
from logquarry.read.log_queues import QueueKey


def unreadable_queues(layout: StoreLayout) -> Mapping[QueueKey, str]:
    """The queues with unreadable bytes, each with the file, the offset and the reason.

    Reads all entries of all queues.
    """
    found = {}
    for queue in all_queues(layout, OpenFiles(layout, is_strict=True)):
        try:
            deque(queue.runs(*queue.bounds()), maxlen=0)
        except UnreadableFile as error:
            found[queue.topic, queue.queue_id] = str(error)
    return found
