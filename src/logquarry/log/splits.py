"""Splits of the log: ranges that threads or machines read independently.

A split [start, stop) owns the frames that start in the range, and the damage after these frames. If
a split starts inside a file, its reader searches for the first sound frame (resync). So splits can
be planned without reading the log or an index. The splits cover the log without gaps or overlaps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Final, TypeVar

import numpy as np

from logquarry.config import IndexKeys
from logquarry.errors import UsageError
from logquarry.format import arrays
from logquarry.format.frame import ENTRY_HEAD, has_entry_head_reference
from logquarry.log.codec import Window
from logquarry.log.follow import Followed, Follower
from logquarry.log.layout import StoreLayout
from logquarry.log.walk import BlankSpan, DamagedSpan, Event, LogReader, Run

DEFAULT_SPLIT_SIZE = 256 << 20


@dataclass(frozen=True, slots=True)
class LogSplit:
    """A range of physical offsets; ``stop`` is exclusive.

    Attributes:
        resync: whether ``start`` may lie inside a frame.
        tail: whether the range lies after the last message that a queue entry points to. If the log
            ends at a break before such a range, the frames in the range are stale.
    """

    start: int
    stop: int
    resync: bool = True
    tail: bool = False

    @property
    def length(self) -> int:
        """Bytes of the range."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class LogExtent:
    """The start and end of the log, as far as they are known before the whole log is read.

    Attributes:
        stop: end (exclusive) of the bytes that can belong to a message.
        bound: see :class:`~logquarry.log.walk.LogReader`.
        tail: start of the frames after the last message that a queue entry points to; None if there
            are none, or if the queues are unknown.
    """

    start: int
    stop: int
    bound: int | None = None
    tail: int | None = None


def log_extent(layout: StoreLayout, bound: int | None, known_end: int | None) -> LogExtent:
    """Find the extent of the log.

    For ``bound``, see :class:`~logquarry.log.walk.LogReader`. ``known_end`` is the largest end of a
    message that a queue entry points to. So a frame starts at this offset, or the log ends there.
    """
    files = layout.commit_log
    reader = LogReader(layout, bound=bound, check_crc=False)
    if bound is not None:
        # The bound may lie before the log's first file, if all queue entries point to expired
        # messages.
        known = max(bound, files.start)
        end = reader.chain_end(known)
        most = known + layout.config.max_message_size
        if end == known and reader.data_end(known, most) > known:
            # If a queue entry is wrong, the bound may lie inside a frame. Search for data only
            # within the length of the longest frame, because the search reads every byte. In a
            # remote store, these bytes come over the network.
            known = _frame_end(reader, known)
            end = reader.chain_end(known)
        return LogExtent(files.start, end, bound, known if end > known else None)
    end = files.start
    if known_end is not None and files.start <= known_end < files.end:
        end = reader.chain_end(known_end)
    # The chain may end at damage, with more sound frames after the damage. So the log may reach to
    # the end of the data.
    return LogExtent(files.start, max(end, reader.data_end(end)))


def _frame_end(reader: LogReader, offset: int) -> int:
    """Return the end of the frame that contains ``offset``. Return ``offset`` itself if the chain
    of frames from the start of the file breaks before ``offset``.
    """
    file = reader.files.at(offset)
    for event in reader.chain(offset if file is None else file.base):
        if event.end < offset:
            continue
        if isinstance(event, Run):
            starts = event.window.base + event.rows[:, arrays.POSITION].astype(np.int64)
            return int(min([event.end, *starts[starts >= offset][:1]]))
        return event.end
    return offset


def frame_start(layout: StoreLayout, offset: int) -> int:
    """Return the end of the frame or blank that contains ``offset``.

    Return ``offset`` itself if a frame starts there, or if the bytes there are damage. In the
    second case, a walk that starts at the returned offset reports the damage.
    """
    # A walk that does not check CRCs also finds the frames with damaged bodies.
    reader = LogReader(layout, check_crc=False)
    file = reader.files.at(offset)
    if file is None or offset == file.base or reader.find(offset, offset + 1) == offset:
        return offset
    # If a frame contains the offset, it usually starts at most ``max_message_size`` bytes before
    # the offset. A store can have larger frames than the settings allow, so search the whole file
    # if nothing was found.
    near = max(file.base, offset - layout.config.max_message_size)
    for start in (near, file.base):
        for event in reader.events(start, offset, resync=start > file.base):
            if isinstance(event, Run) and event.end > offset:
                starts = event.window.base + event.rows[:, arrays.POSITION].astype(np.int64)
                return int(min([event.end, *starts[starts >= offset][:1]]))
            if isinstance(event, BlankSpan) and event.end > offset:
                return event.end
            if isinstance(event, DamagedSpan) and event.end > offset:
                return offset
    return offset


def plan_splits(
    layout: StoreLayout,
    extent: LogExtent,
    *,
    start: int | None = None,
    stop: int | None = None,
    split_size: int = DEFAULT_SPLIT_SIZE,
    min_splits: int = 1,
) -> list[LogSplit]:
    """Plan splits that cover the log between two physical offsets, without gaps or overlaps.

    A split has at most ``split_size`` bytes. Exceptions: a gap between two files, and the frames
    from :attr:`LogExtent.tail` on, are one split each. If the log is large enough, there are at
    least ``min_splits`` splits.
    """
    if split_size <= 0 or min_splits <= 0:
        raise UsageError("the split size and the minimum number of splits must be above 0")
    files = layout.commit_log
    first = extent.start if start is None else max(start, extent.start)
    end = extent.stop if stop is None else min(stop, extent.stop)
    body_end = end if extent.tail is None else min(end, extent.tail)
    splits: list[LogSplit] = []
    if body_end > first:
        size = max(1, min(split_size, -(-(body_end - first) // min_splits)))
        position = first
        while position < body_end:
            if files.at(position) is None:
                # There is a gap before the next file. Plan one split for the whole gap, because the
                # gap can be huge if a queue entry is wrong.
                cut = min(files.next_boundary(position), body_end)
            else:
                cut = min(position + size, body_end)
                # A split that starts at the start of a file needs no resync.
                snapped = cut - (cut - files.start) % files.file_size
                if position < snapped and cut != body_end:
                    cut = snapped
            splits.append(LogSplit(position, cut))
            position = cut
    if extent.tail is not None and end > extent.tail:
        tail_start = max(first, extent.tail)
        splits.append(LogSplit(tail_start, end, resync=tail_start != extent.tail, tail=True))
    return splits


def split_events(reader: LogReader, split: LogSplit) -> Iterator[Event]:
    """Walk a split; see :meth:`LogReader.events`."""
    if split.tail and reader.bound is not None:
        before = reader.events(None, reader.bound)
        if any(isinstance(event, DamagedSpan) and event.ends_log for event in before):
            return
    yield from reader.events(split.start, split.stop, resync=split.resync)


# --------------------------------------------------------------------------------------------------
# Stretches: parts of a log. Threads or machines decode the frames of these parts for the dispatcher

STRETCH_BYTES: Final = 8 << 20
_THREADS: Final = 2
_MOST_AHEAD: Final = 4
_FRAMES_AT_ONCE: Final = 1 << 15
"""Maximum number of frames that one call decodes. A stretch of 256-byte frames has this number of
frames.
"""


@dataclass
class Stretch:
    """Consecutive sound frames, and facts about them. Call the object to add the next frames.
    Subclasses collect further facts.

    Attributes:
        start: physical offset of the first frame. In a DLedger log, offset of the head before it.
        end: physical offset after the last frame.
        first_time: store time of the first frame in milliseconds.
        last_time: store time of the last frame in milliseconds.
    """

    start: int = 0
    end: int = 0
    count: int = 0
    first_time: int = 0
    last_time: int = 0

    def __call__(self, window: Window, followed: Followed) -> None:
        """Add the next frames: the frames at the start of the window. The arguments are valid only
        during the call.
        """
        rows, times = followed.rows, followed.requests.store_timestamp
        if not self.count:
            # In a DLedger log, a stretch starts at the head before its first frame. The window
            # begins at this head, but the row has the position of the frame.
            self.start = window.base
            self.first_time = int(times[0])
        self.end = window.base + int(rows[-1, arrays.POSITION]) + int(rows[-1, arrays.SIZE])
        self.count += len(rows)
        self.last_time = int(times[-1])


S = TypeVar("S", bound=Stretch)


def tiles(layout: StoreLayout, size: int) -> Iterator[tuple[int, int]]:
    """Cut the log into ranges of ``size`` bytes. No range crosses the end of a file."""
    room = layout.commit_log.file_size
    for file in layout.commit_log.files:
        for start in range(file.base, file.base + room, size):
            yield start, min(start + size, file.base + room)


class StretchReader:
    """Walks and decodes stretches of a log. Only one thread may use a reader at a time."""

    def __init__(
        self, layout: StoreLayout, *, check_crc: bool = True, keys: IndexKeys | None = None
    ) -> None:
        self._log = layout.commit_log
        self._reader = LogReader(layout, check_crc=check_crc)
        self._follower = Follower(
            layout.delay_levels_ms,
            most_frames=_FRAMES_AT_ONCE,
            check_crc=check_crc,
            keys=keys or layout.config.index_keys,
        )
        # The last frame of a stretch may end after the stretch, so this number of further bytes is
        # read.
        self._more = layout.config.max_message_size

    def read(self, start: int, stop: int, stretch: Stretch, *, resync: bool) -> bool:
        """Decode the frames that start in a range of one file, and add them to ``stretch``. The
        decoding ends early at the first position where no sound frame starts.

        With ``resync``, ``start`` may lie inside a frame. Returns whether ``stretch`` has frames
        after the call.
        """
        file = self._log.at(start)
        if file is None or not file.size:
            return False
        at: int | None = start
        if resync and start != file.base:
            at = self._reader.find(start, stop)
        if at is None:
            return False
        at = self._head_before(at, file.base)
        window = self._reader.window(at, stop - at + self._more)
        if self._reader.fault(at, window.length) is not None:
            # Decode nothing in a range with unreadable bytes. The caller's walk finds out which
            # frames are unreadable.
            return False
        while at < stop:
            done = at - window.base
            rest = window.after(done)
            followed, after, _ = self._follower.follow(rest, stop - at)
            if followed is None:
                break
            stretch(rest, followed)
            at += after
        return stretch.count > 0

    def _head_before(self, place: int, base: int) -> int:
        """Return the offset of the DLedger head before a frame, or ``place`` if there is no head.

        A stretch can replace a part of the walk only if it starts exactly where the previous part
        ends. So the returned offset must be the end of the previous stretch.
        """
        at = place - ENTRY_HEAD.size
        if at < base or not self._log.has_heads:
            return place
        window = self._reader.window(at, ENTRY_HEAD.size)
        is_head = has_entry_head_reference(window.data.data, 0, base=at, left=window.end)
        return at if is_head else place

    def read_all(self, start: int, stop: int, size: int, make: Callable[[], S]) -> Iterator[S]:
        """Decode all frames between two positions of one file, in stretches of ``size`` bytes.

        ``start`` may lie inside a frame. ``make`` is called before each stretch, and returns the
        object to which the frames are added.
        """
        at, resync = start, True
        while at < stop:
            upto = min(at + size, stop)
            found = make()
            if self.read(at, upto, found, resync=resync):
                yield found
            resync = found.end < upto
            at = upto if resync else found.end


def stretches_ahead(layout: StoreLayout, size: int, make: Callable[[], S]) -> Generator[S]:
    """Yield the sound stretches of a log, each of about ``size`` bytes. Threads read the next
    stretches while the caller uses one. For ``make``, see :meth:`StretchReader.read_all`.

    If the log is no larger than one stretch, the generator yields nothing, because threads would
    save no time. A caller that does not exhaust the generator must close it.
    """
    log = layout.commit_log
    if log.end - log.start <= size:
        return
    places = tiles(layout, size)
    coming: deque[tuple[int, S, Future[bool]]] = deque()
    # One reader per thread. For each stretch, a thread takes a reader from this queue, and returns
    # it afterwards.
    idle: deque[StretchReader] = deque(StretchReader(layout) for _ in range(_THREADS))

    def read(start: int, stop: int, stretch: Stretch) -> bool:
        reader = idle.pop()
        try:
            return reader.read(start, stop, stretch, resync=True)
        finally:
            idle.append(reader)

    pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="stretches")
    rest = LogReader(layout)
    try:
        while True:
            for start, stop in islice(places, _MOST_AHEAD - len(coming)):
                stretch = make()
                coming.append((start, stretch, pool.submit(read, start, stop, stretch)))
            if not coming:
                return
            start, stretch, future = coming.popleft()
            if future.result():
                yield stretch
            elif rest.data_end(start) <= start:
                # Only zeros follow.
                return
    finally:
        pool.shutdown(cancel_futures=True)
