"""Finds lost messages: queues point to them, but the log now has other messages at their offsets.

This happens if a log file was replaced, for example by a file of another store. The log then has no
damage, and only the queues show the loss. But if an entry points to no frame, the entry itself can
also be damaged, or come from another store. To decide, the search reads the next frames of the log:
if queues have entries for them, the log is right, and the entry is wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from logquarry.format.arrays import Bools, Int64
from logquarry.format.frame import FIXED_SIZE_V1, Frame
from logquarry.format.sys_flag import advances_queue
from logquarry.log.frames import runs_at
from logquarry.log.layout import StoreLayout
from logquarry.log.walk import LogReader, Run
from logquarry.read.batch_queue import frames_in
from logquarry.read.commit_log import CommitLog
from logquarry.read.index_file import LARGEST_MESSAGE
from logquarry.read.log_queues import QueueKey
from logquarry.read.queue import Queue, Units, has_message

Frames = Int64
"""An array with three columns: physical offset, size and number of messages of each frame."""
_NONE: Final[Frames] = np.empty((0, 3), np.int64)
_MOST_PROBES: Final = 4_096
"""Approximate maximum number of entries that are compared to find queues that differ from the log.
"""
_QUEUE_PROBES: Final = 64
_JUDGES: Final = 15
"""Maximum number of places that are checked in a log file to decide whether it was replaced."""
_FRAMES: Final = 8
"""Maximum number of frames that are compared with the queues at each of these places."""


class ReplacedFiles:
    """Finds the lost frames of log files that were replaced.

    ``is_expected`` takes an array of frames, and returns a mask: whether the log should have each
    frame.
    """

    def __init__(
        self,
        layout: StoreLayout,
        queues: Sequence[Queue],
        is_expected: Callable[[Frames], Bools],
        known: Container[int],
    ) -> None:
        self._layout = layout
        self._log = layout.commit_log
        self._reader = LogReader(layout)
        self._frames = CommitLog(layout)
        self._all = queues
        self._queues: Mapping[QueueKey, Queue] = {q.key: q for q in queues}
        self._is_expected = is_expected
        self._known = known
        # The queues in which some entries point to no frame. Other entries of these queues can be
        # wrong too.
        self._doubtful: set[QueueKey] = set()

    def frames(self, dropped: Mapping[QueueKey, int] | None) -> Frames:
        """Return the frames to which queue entries point, but which the log's files lack."""
        found = self._frames_of(self._differing() if dropped is None else dropped)
        if not len(found):
            return found
        # Now check all entries, which is rarely necessary, to count all lost messages.
        return self._frames_of(dict.fromkeys(self._queues, 0))

    def _frames_of(self, starts: Mapping[QueueKey, int]) -> Frames:
        """Return the lost frames of the queues in ``starts``. ``starts`` maps each queue to the
        queue offset at which the search begins.
        """
        found = [_NONE]
        for queue in self._all:
            key = queue.key
            if key not in starts:
                continue
            runs = queue.runs(starts[key], queue.max_offset)
            parts = (frames_of(units, is_batch=queue.is_batch) for _, units in runs)
            frames = self._without_frame(in_order(np.concatenate([_NONE, *parts]), None))
            found.append(frames)
            if len(frames):
                self._doubtful.add(key)
        frames = np.concatenate(found)
        return frames[self._are_replaced(frames[:, 0])]

    def is_foreign(self, base: int) -> bool:
        """Whether the log file that begins at ``base`` has only messages of another store.

        In such a file, no checked frame has an entry in a queue. Frames whose queue does not exist
        may be messages of a deleted topic, so they count only if there are no other frames.
        """
        has_queue = {True: Counter[bool](), False: Counter[bool]()}
        stop = base + self._log.file_size
        for start in np.linspace(base, stop, _JUDGES, endpoint=False).astype(np.int64).tolist():
            place = self._reader.find(start, stop)
            if place is None:
                break
            for key, is_queued in self._judged(place, stop):
                has_queue[key in self._queues][is_queued] += 1
        found = has_queue[True] or has_queue[False]
        return found[False] > 0 and not found[True]

    def _differing(self) -> Mapping[QueueKey, int]:
        """Return the queues in which a probed entry points to no frame. For each queue, the search
        for lost frames begins at queue offset 0.
        """
        keys: list[QueueKey] = []
        parts = [_NONE]
        for key, units in self._probes():
            parts.append(frames_of(units, is_batch=False))
            keys += [key] * len(parts[-1])
        frames = np.concatenate(parts)
        places = self._without_frame(frames)[:, 0]
        differing = np.flatnonzero(np.isin(frames[:, 0], places)).tolist()
        return {keys[number]: 0 for number in differing}

    def _probes(self) -> Iterator[tuple[QueueKey, Units]]:
        most = max(2, min(_QUEUE_PROBES, _MOST_PROBES // max(1, len(self._all))))
        for queue in self._all:
            first, last = queue.min_offset, queue.max_offset - 1
            if last < first:
                continue
            for at in np.unique(np.linspace(first, last, most).astype(np.int64)).tolist():
                for _, units in queue.runs(at, at + 1):
                    yield queue.key, units

    def _without_frame(self, frames: Frames) -> Frames:
        """Return the frames that the log should have but lacks. CRCs are not checked."""
        frames = frames[self._is_expected(frames)]
        ordered = frames[np.argsort(frames[:, 0], kind="stable")]
        places, sizes = ordered[:, 0], ordered[:, 1].astype(np.int32)
        bad = [
            event.offset
            for event in runs_at(self._layout, places, sizes, check_crc=False)
            if not isinstance(event, Run) and event.offset not in self._known
        ]
        return frames[np.isin(frames[:, 0], bad)]

    def _are_replaced(self, places: Int64) -> Bools:
        """Return a mask: whether each physical offset is in a log file that was replaced."""
        held = np.zeros(len(places), np.bool_)
        bases = places // self._log.file_size * self._log.file_size
        for base in np.unique(bases).tolist():
            inside = bases == base
            some = np.unique(places[inside])
            picked = np.unique(np.linspace(0, len(some) - 1, _JUDGES).astype(np.int64))
            held[inside] = self._is_replaced(some[picked].tolist(), base + self._log.file_size)
        return held

    def _is_replaced(self, places: list[int], stop: int) -> bool:
        """Whether a log file was replaced: at least half of the compared frames have no entry in
        the queues. ``places`` are physical offsets in the file, and ``stop`` is the file's end. The
        next frames at or after each of these offsets are compared (:meth:`_judged`).
        """
        counts = {True: Counter[bool](), False: Counter[bool]()}
        for place in places:
            for key, is_queued in self._judged(place, stop):
                counts[key in self._doubtful][is_queued] += 1
        # Count the frames of queues with wrong entries only if there are no frames of other queues.
        found = counts[False] or counts[True]
        return found[False] > 0 and found[False] >= found[True]

    def _judged(self, start: int, stop: int) -> Iterator[tuple[QueueKey, bool]]:
        """For each of the first frames at or after ``start``, yield its queue, and whether the
        queue has the frame's entry. Frames that need no entry are left out.
        """
        place = self._reader.find(start, stop)
        for _ in range(_FRAMES):
            found = None if place is None else self._frames.outcome_at(place, check_crc=False)
            if place is None or not isinstance(found, Frame):
                return
            queue = self._queues.get(found.queue_key)
            if _needs_entry(queue, found):
                yield found.queue_key, _has(queue, found)
            place += found.size
            if place >= stop:
                return


def _needs_entry(queue: Queue | None, frame: Frame) -> bool:
    """Whether a sound store has an entry for the frame. A sound store has no entry for a PREPARED
    or ROLLBACK message, or for a message before the first entry of the queue.
    """
    if not advances_queue(frame.sys_flag):
        return False
    if queue is None or frame.queue_offset >= queue.min_offset:
        return True
    first = next(queue.entries(queue.min_offset, queue.min_offset + 1), None)
    return first is not None and frame.physical_offset >= first[1].physical_offset


def _has(queue: Queue | None, frame: Frame) -> bool:
    offset = frame.queue_offset
    if queue is None or offset < 0:
        return False
    wanted = frame.physical_offset, frame.size
    return any(entry[:2] == wanted for _, entry in queue.entries(offset, offset + 1))


def frames_of(units: Units, *, is_batch: bool) -> Frames:
    """Return the frames to which entries point. Entries that are surely invalid are left out."""
    units = units[has_message(units)]
    places = units["physical_offset"].astype(np.int64)
    which, held = frames_in(places, is_batch=is_batch)
    frames = np.stack([places[which], units["size"].astype(np.int64)[which], held], axis=1)
    frames = frames[(frames[:, 1] >= FIXED_SIZE_V1) & (frames[:, 1] <= LARGEST_MESSAGE)]
    return frames[frames[:, 0] < np.iinfo(np.int64).max - LARGEST_MESSAGE]


def in_order(frames: Frames, after: int | None) -> Frames:
    """Remove the frames of damaged entries. An entry is treated as damaged if it has a higher
    physical offset than a later entry. ``after`` is the physical offset in the entry that follows
    these entries, or None.
    """
    if not len(frames):
        return frames
    least = np.minimum.accumulate(frames[::-1, 0])[::-1]
    if after is not None:
        least = np.minimum(least, after)
    return frames[frames[:, 0] <= least]
