"""Finds the frames that contradict the tags code of their queue entry, or the hash of an index
entry.

BODYCRC does not cover the properties of a frame, which contain the frame's tags and keys. If damage
changes the properties, only the entries that a broker made before the damage show the change.
Damage of the entry itself looks the same, so the audit does not decide which of the two is right.
Entries that point to another place or another size do not count: they are no evidence about the
frame's properties.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from logquarry.format.arrays import Int64, consecutive
from logquarry.log.follow import Followed
from logquarry.log.layout import StoreLayout
from logquarry.log.walk import Span
from logquarry.read.log_queues import QueueKey
from logquarry.read.queue import Queue
from logquarry.repair.audit.differences import SpanSet, TagsRule, same_entries
from logquarry.repair.audit.index import IndexAudit
from logquarry.repair.audit.queue_evidence import entries_at, has_entries
from logquarry.write.queue_writer import QueuePart, is_batch


class HarmedProperties:
    """Compares the tags and keys of frames with their entries. The frames come in the order of the
    log.

    Args:
        layout: the store; :func:`with_entry_rules` has completed its settings.
        queue_of: returns a queue; None if it has no usable files.
    """

    def __init__(self, layout: StoreLayout, queue_of: Callable[[QueueKey], Queue | None]) -> None:
        self._queue_of = queue_of
        self._index = IndexAudit(layout)
        self._places: list[Int64] = []

    def take(self, followed: Followed, parts: Mapping[QueueKey, QueuePart]) -> None:
        """Compare some frames. ``parts`` contains their entries, each in its right queue."""
        self._index.add(followed)
        for key, part in parts.items():
            queue = self._queue_of(key)
            if queue is None or is_batch(part.units) or has_entries(queue, part):
                continue
            rule = TagsRule.of_readers(key[0])
            for start, stop in consecutive(part.offsets):
                wanted = part.units[start:stop]
                there = entries_at(queue, part.offsets[start:stop])
                is_own = there["physical_offset"] == wanted["physical_offset"]
                is_own &= (there["size"] == wanted["size"]) & ~same_entries(there, wanted, rule)
                self._places.append(wanted["physical_offset"][is_own].astype(np.int64))

    def finish(self, log_end: int, lost: Iterable[Span]) -> Int64:
        """Return the physical offsets of the frames that contradict an entry.

        Args:
            log_end: physical offset of the log's end.
            lost: the parts of the log whose index entries do not count.
        """
        self._places.append(self._index.contradicted(log_end, SpanSet(lost)))
        return np.unique(np.concatenate(self._places))
