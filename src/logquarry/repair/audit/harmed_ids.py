"""Finds the right queue of each frame whose queue id damage has changed.

No CRC covers the queue id in a frame. The queue that the frame names is called the *named queue*
here. The queue id is called *harmed* if all these conditions are true:

- Another queue of the topic has the frame's entry at the frame's queue offset: with the frame's
  physical offset, size and tags code.
- The named queue does not have this entry.
- The other queue has an own entry near this entry: the message of the own entry names the other
  queue. The search goes in both directions, in each up to the first own entry.
- The search finds no entry that points to a message of the named queue. Such an entry would show
  that a file lies in the folder of the wrong queue. Exception: such an entry is ignored if the
  named queue has its own message at the same queue offset.

The frame then counts as a frame of the other queue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

import numpy as np

from logquarry.format.arrays import Bools, Int64, consecutive, joined_records
from logquarry.format.frame import Frame
from logquarry.format.queue_entry import QueueEntry
from logquarry.log.layout import StoreLayout
from logquarry.read.commit_log import CommitLog
from logquarry.read.log_queues import QueueKey
from logquarry.read.queue import Queue, Units
from logquarry.repair.audit.differences import TagsRule, same_entries
from logquarry.repair.audit.queue_evidence import entries_at, has_entries
from logquarry.write.queue_writer import QueuePart, is_batch

NotedEntries = Mapping[QueueKey, Mapping[int, QueueEntry]]
"""For each queue, the entries that an interrupted recovery saved: queue offset -> entry."""

_MOST_NEIGHBOURS: Final = 16
"""Maximum number of entries to read on each side of an entry."""
_MOST_SEARCHED: Final = 1 << 24
"""Maximum work of one audit, counted in entries. Only the frames of a large queue without files, in
a topic with many queues, need more.
"""
_SEARCH: Final = 64
_READ: Final = 256
"""Work of a search in one queue (``_SEARCH``), and of a check of an entry's neighbours (``_READ``),
counted in entries.
"""


class HarmedIds:
    """Moves the frames with a harmed queue id to their right queues. The frames come in the order
    of the log.

    Args:
        names: the queues on the disk.
        queue_of: returns such a queue; None if its files are unusable. Called only when needed.
        noted: the entries that an interrupted recovery saved before it cut the queues.

    Attributes:
        found: physical offset -> right queue, for each frame with a harmed queue id so far.
        offsets: physical offset -> queue offset, for each such frame.
    """

    def __init__(
        self,
        layout: StoreLayout,
        names: Iterable[QueueKey],
        queue_of: Callable[[QueueKey], Queue | None],
        noted: NotedEntries | None = None,
        *,
        is_3_1: bool = False,
    ) -> None:
        self.found: dict[int, QueueKey] = {}
        self.offsets: dict[int, int] = {}
        self._log = CommitLog(layout)
        self._queue_of = queue_of
        self._noted = noted or {}
        self._is_3_1 = is_3_1
        self._by_topic: dict[str, list[QueueKey]] = {}
        for key in sorted({*names, *self._noted}):
            self._by_topic.setdefault(key[0], []).append(key)
        self._searched = 0

    def place(self, parts: Mapping[QueueKey, QueuePart]) -> Mapping[QueueKey, QueuePart]:
        """Return the entries of some frames, each in its right queue."""
        has_found = False
        for key, part in parts.items():
            others = [other for other in self._by_topic.get(key[0], ()) if other != key]
            if others and not is_batch(part.units):
                has_found = self._search(key, part, others) or has_found
        return placed(parts, self.found) if has_found else parts

    def _search(self, key: QueueKey, part: QueuePart, others: list[QueueKey]) -> bool:
        queue = self._queue_of(key)
        if queue is not None and has_entries(queue, part):
            return False
        left = np.flatnonzero(~self._same(key, part.offsets, part.units))
        has_found = False
        for other in others:
            if not len(left) or self._searched >= _MOST_SEARCHED:
                break
            self._searched += _SEARCH + len(left)
            same = self._same(other, part.offsets[left], part.units[left])
            for at in left[same].tolist():
                offset = int(part.offsets[at])
                if self._is_of(other, key, offset):
                    place = int(part.units["physical_offset"][at])
                    self.found[place], self.offsets[place] = other, offset
                    left, has_found = left[left != at], True
        return has_found

    def _same(self, key: QueueKey, offsets: Int64, units: Units) -> Bools:
        """Return a mask: whether a queue has each entry at its queue offset."""
        same = np.zeros(len(units), np.bool_)
        rule = TagsRule.of_writers(key, is_3_1=self._is_3_1)
        queue = self._queue_of(key)
        if queue is not None:
            for start, stop in consecutive(offsets):
                there = entries_at(queue, offsets[start:stop])
                same[start:stop] = same_entries(there, units[start:stop], rule)
        noted = self._noted.get(key, {})
        for at in np.flatnonzero(~same).tolist() if noted else ():
            same[at] = noted.get(int(offsets[at])) == QueueEntry(*units[at].item())
        return same

    def _is_of(self, key: QueueKey, named: QueueKey, offset: int) -> bool:
        """Whether the neighbours of an entry of ``key`` show that the entry's frame belongs to
        ``key``, although the frame names the queue ``named``.
        """
        if offset in self._noted.get(key, {}):
            # The interrupted recovery read the neighbours, and may have cut them off after that.
            return True
        self._searched += _READ
        is_own = False
        for step in (-1, 1):
            for at in range(offset + step, offset + step * (1 + _MOST_NEIGHBOURS), step):
                frame = self._frame(key, at)
                if frame is None or frame.queue_offset != at:
                    continue
                if frame.queue_key == named and not self._has_own(named, at):
                    return False
                if frame.queue_key == key:
                    is_own = True
                    break
        return is_own

    def _has_own(self, key: QueueKey, offset: int) -> bool:
        """Whether a queue has an entry at an offset that points to its own message."""
        frame = self._frame(key, offset)
        return frame is not None and frame.queue_offset == offset and frame.queue_key == key

    def _frame(self, key: QueueKey, offset: int) -> Frame | None:
        """Return the frame to which the entry of a queue points; None if there is none."""
        queue = self._queue_of(key)
        if queue is None or offset < 0:
            return None
        for _, entry in queue.entries(offset, offset + 1):
            if not entry.is_filler:
                return self._log.frame_of(entry)
        return None


def placed(
    parts: Mapping[QueueKey, QueuePart], found: Mapping[int, QueueKey]
) -> Mapping[QueueKey, QueuePart]:
    """Move the entries of frames with a harmed queue id to the right queues. ``found`` maps the
    physical offset of each such frame to its right queue.
    """
    if not found:
        return parts
    harmed = np.fromiter(found, np.int64, len(found))
    made = dict(parts)
    moved: dict[QueueKey, list[QueuePart]] = {}
    for key, part in parts.items():
        places = part.units["physical_offset"]
        # Multi-dispatch can have copied the frame to a queue of another topic: this entry stays.
        rows = [
            (at, right)
            for at in np.flatnonzero(np.isin(places, harmed)).tolist()
            if (right := found[int(places[at])])[0] == key[0] and right != key
        ]
        for at, right in rows:
            moved.setdefault(right, []).append(part[at : at + 1])
        if rows:
            stays = np.ones(len(places), np.bool_)
            stays[[at for at, _ in rows]] = False
            made[key] = part[stays]
    for key, some in moved.items():
        every = [*([made[key]] if key in made else []), *some]
        joined = QueuePart(
            np.concatenate([part.rows for part in every]),
            np.concatenate([part.offsets for part in every]),
            joined_records(*(part.units for part in every)),
        )
        made[key] = joined[np.argsort(joined.rows, kind="stable")]
    return {key: part for key, part in made.items() if len(part.rows)}
