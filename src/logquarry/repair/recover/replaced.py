"""Finds the messages that queues name and whose place in the log now holds other messages.

That is so if a file of the log was replaced, for example by the file of another store. The log is
sound then, and only the queues show the loss.

An entry without a frame may also be damaged itself, or belong to another store's queue. The frames
at such places decide: if other queues have them, the log is right and the entry is wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from logquarry.format import java
from logquarry.format.frame import Frame
from logquarry.log.layout import StoreLayout
from logquarry.log.places import runs_at
from logquarry.log.walk import LogReader, Run
from logquarry.read.commit_log import CommitLog
from logquarry.read.log_queues import QueueKey
from logquarry.read.queue import Queue, Units

_Int64 = npt.NDArray[np.int64]
_MOST_PROBES: Final = 4_096
"""About the maximum number of entries that are compared to find the queues that differ."""
_QUEUE_PROBES: Final = 64
_JUDGES: Final = 15
"""Maximum number of places in a log file that decide whether the file or the entries are wrong."""
_FRAMES: Final = 8
"""Maximum number of frames that are compared at each place."""


def without_frame(layout: StoreLayout, places: _Int64, sizes: _Int64) -> npt.NDArray[np.bool_]:
    """Which places have no sound frame of a size. Reads no bodies.

    Args:
        layout: the store's files.
        places: physical offsets, in any order.
        sizes: the size of each frame.
    """
    order = np.argsort(places, kind="stable")
    ordered, wanted = places[order], sizes[order].astype(np.int32)
    bad = [
        event.offset
        for event in runs_at(layout, ordered, wanted, check_crc=False)
        if not isinstance(event, Run)
    ]
    return np.isin(places, np.array(bad, np.int64))


def probes(queues: Sequence[Queue]) -> Iterator[tuple[QueueKey, Units]]:
    """A few entries of each queue, from its first to its last."""
    most = max(2, min(_QUEUE_PROBES, _MOST_PROBES // max(1, len(queues))))
    for queue in queues:
        first, last = queue.min_offset, queue.max_offset - 1
        if last < first:
            continue
        for at in np.unique(np.linspace(first, last, most).astype(np.int64)).tolist():
            for _, units in queue.runs(at, at + 1):
                yield (queue.topic, queue.queue_id), units


class ReplacedFiles:
    """Decides for each file of the log whether its frames are those of the store's queues.

    Args:
        layout: the store's files.
        queues: all queues.
        doubtful: the queues with entries that name no frame.
    """

    def __init__(
        self, layout: StoreLayout, queues: Sequence[Queue], doubtful: Container[QueueKey]
    ) -> None:
        self._log = layout.commit_log
        self._reader = LogReader(layout)
        self._frames = CommitLog(layout)
        self._queues: Mapping[QueueKey, Queue] = {(q.topic, q.queue_id): q for q in queues}
        self._doubtful = doubtful

    def holds(self, places: _Int64) -> npt.NDArray[np.bool_]:
        """Which places lie among frames that the store's queues do not have.

        Args:
            places: physical offsets at which no frame of an entry starts.
        """
        held = np.zeros(len(places), np.bool_)
        bases = places // self._log.file_size * self._log.file_size
        for base in np.unique(bases).tolist():
            inside = bases == base
            some = np.unique(places[inside])
            picked = np.unique(np.linspace(0, len(some) - 1, _JUDGES).astype(np.int64))
            held[inside] = self._is_replaced(some[picked].tolist(), base + self._log.file_size)
        return held

    def _is_replaced(self, places: list[int], stop: int) -> bool:
        """Whether the queues lack most frames from some places of a log file on."""
        counts = {True: Counter[bool](), False: Counter[bool]()}
        for place in places:
            for key, is_queued in self._judged(place, stop):
                counts[key in self._doubtful][is_queued] += 1
        # The frames of a doubtful queue decide only if there are no others.
        found = counts[False] or counts[True]
        return found[False] > 0 and found[False] >= found[True]

    def _judged(self, start: int, stop: int) -> Iterator[tuple[QueueKey, bool]]:
        """The queues of some frames from a place on, and whether they have these frames."""
        place = self._reader.find(start, stop)
        for _ in range(_FRAMES):
            found = None if place is None else self._frames.outcome_at(place, check_crc=False)
            if place is None or not isinstance(found, Frame):
                return
            key = found.topic.decode("utf-8", java.UTF8_ERRORS), found.queue_id
            yield key, self._has(key, found)
            place += found.size
            if place >= stop:
                return

    def _has(self, key: QueueKey, frame: Frame) -> bool:
        queue, offset = self._queues.get(key), frame.queue_offset
        if queue is None or offset < 0:
            return False
        for _, units in queue.runs(offset, offset + 1):
            unit = units[0]
            if (unit["physical_offset"], unit["size"]) == (frame.physical_offset, frame.size):
                return True
        return False
