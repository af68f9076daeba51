"""Checks with samples whether the consume queues belong to the log.

If a log file was replaced by a file of another store, its frames can begin at exactly the places to
which the queues point. The queues then name a wrong topic for each frame.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

import numpy as np

from logquarry.format import java
from logquarry.format.frame import Frame
from logquarry.log.batches import MessageFilter
from logquarry.log.layout import StoreLayout
from logquarry.log.store_files import StoreFile
from logquarry.read.commit_log import CommitLog
from logquarry.read.queue import ConsumeQueue, Units

T = TypeVar("T")
_MOST_FRAMES: Final = 32
"""Maximum number of frames that a check reads for the wanted queues, and for the log files."""


def do_queues_fit(
    layout: StoreLayout,
    units: Mapping[ConsumeQueue, Units],
    wanted: MessageFilter,
    within: tuple[int, int],
) -> bool:
    """Whether frames have the topic and the queue id of the queues that point to them.

    The function reads the frames of the first and the last entry of the ``wanted`` queues, and the
    frame of the first entry in each log file. If there are too many such frames, the function reads
    some of them. It ignores damaged frames, because a read reports them.

    Args:
        units: the entries of each queue, in the order of the log.
        within: the range of the log that is read. Entries that point outside of this range are not
            checked.
    """
    start, stop = within
    units = {queue: _between(found, start, stop) for queue, found in units.items()}
    files = [file for file in layout.commit_log.files if file.base + file.size > start]
    files = [file for file in files if file.base < stop]
    chosen = [queue for queue in units if wanted.takes_queue(queue.topic, queue.queue_id)]
    places = [
        (queue, int(units[queue]["physical_offset"][at]))
        for queue in _some(chosen, _MOST_FRAMES // 2)
        for at in (0, -1)
        if len(units[queue])
    ]
    places += _first_in_files(_some(files, _MOST_FRAMES), units)
    log = CommitLog(layout)
    for queue, offset in dict.fromkeys(places):
        found = log.outcome_at(offset, check_crc=False)
        if isinstance(found, Frame) and not _belongs(found, queue):
            return False
    return True


def _between(units: Units, start: int, stop: int) -> Units:
    first, end = np.searchsorted(units["physical_offset"], (start, stop)).tolist()
    return units[first:end]


def _belongs(frame: Frame, queue: ConsumeQueue) -> bool:
    own = frame.topic.decode("utf-8", java.UTF8_ERRORS), frame.queue_id
    return own == queue.key or frame.is_copied_to(queue.topic)


def _first_in_files(
    files: Sequence[StoreFile], units: Mapping[ConsumeQueue, Units]
) -> list[tuple[ConsumeQueue, int]]:
    """Return the first entry in each file: its queue, and its physical offset."""
    bases = np.array([file.base for file in files], np.int64)
    ends = np.array([file.base + file.size for file in files], np.int64)
    firsts = ends
    found: list[ConsumeQueue | None] = [None] * len(files)
    for queue, one in units.items():
        offsets = one["physical_offset"].astype(np.int64)
        after = np.searchsorted(offsets, bases)
        candidates = np.append(offsets, np.iinfo(np.int64).max)[after]
        for i in np.flatnonzero(candidates < firsts).tolist():
            found[i] = queue
        firsts = np.minimum(firsts, candidates)
    return [
        (queue, int(first)) for queue, first in zip(found, firsts, strict=True) if queue is not None
    ]


def _some(items: Sequence[T], most: int) -> Sequence[T]:
    """Return at most ``most`` items, evenly distributed and including the first and the last."""
    if len(items) <= most:
        return items
    return [items[i * (len(items) - 1) // (most - 1)] for i in range(most)]
