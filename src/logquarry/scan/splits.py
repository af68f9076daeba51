"""Cutting the log into ranges that can be read apart from each other.

A split [start, stop) owns the frames that start in it, and the damage that follows them. One that
begins within a file finds its first frame by resync, so that no scan and no index is needed to
make splits: they tile the log by construction.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from logquarry.errors import UsageError
from logquarry.files.layout import StoreLayout
from logquarry.format import rows
from logquarry.scan.walk import DamagedSpan, Event, LogReader, Run

DEFAULT_SPLIT_SIZE = 256 << 20


@dataclass(frozen=True, slots=True)
class LogSplit:
    """A range of physical offsets.

    Attributes:
        start: its first byte.
        stop: just behind its last.
        resync: whether ``start`` may lie within a frame.
        tail: whether it lies beyond the queues' end, so that it holds messages only if the chain
            of frames before it is unbroken.
    """

    start: int
    stop: int
    resync: bool = True
    tail: bool = False

    @property
    def length(self) -> int:
        """Bytes in it."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class LogExtent:
    """Where the log begins and ends, as far as can be told without reading all of it.

    Attributes:
        start: physical offset of the first byte.
        stop: just behind the last byte that may belong to a message.
        bound: see :class:`~logquarry.scan.walk.LogReader`.
        tail: where the queues end, if sound frames follow there: from here to ``stop``.
    """

    start: int
    stop: int
    bound: int | None = None
    tail: int | None = None


def log_extent(layout: StoreLayout, bound: int | None, known_end: int | None) -> LogExtent:
    """Where the log ends.

    Args:
        layout: the store's files.
        bound: see :class:`~logquarry.scan.walk.LogReader`.
        known_end: an offset at which the log is known to have a frame or its end (the largest
            end of a queued message), from which the chain is followed.
    """
    files = layout.commit_log
    reader = LogReader(layout, bound=bound, check_crc=False)
    if bound is not None:
        # The queues may name only messages that are older than the log's first file.
        known = max(bound, files.start)
        end = _chain_end(reader, known)
        most = known + layout.config.max_message_size
        if end == known and reader.data_end(known, most) > known:
            # It may lie within a frame: the unit that says so is wrong. No further than a frame
            # reaches: of a file that is far away each byte that is looked at is fetched.
            known = _frame_end(reader, known)
            end = _chain_end(reader, known)
        return LogExtent(files.start, end, bound, known if end > known else None)
    end = files.start
    if known_end is not None and files.start <= known_end < files.end:
        end = _chain_end(reader, known_end)
    # Behind the end of the chain there may be damage and then sound frames again.
    return LogExtent(files.start, max(end, reader.data_end(end)))


def _frame_end(reader: LogReader, offset: int) -> int:
    """Where the frame ends that holds a byte; the offset itself if the chain does not reach it."""
    file = reader.files.at(offset)
    for event in reader.chain(offset if file is None else file.base):
        if event.end < offset:
            continue
        if isinstance(event, Run):
            starts = event.window.base + event.rows[:, rows.POSITION]
            return int(min([event.end, *starts[starts >= offset][:1]]))
        return event.end
    return offset


def _chain_end(reader: LogReader, start: int) -> int:
    """Where the unbroken chain from ``start`` ends; ``start`` itself if none starts there."""
    end = start
    for event in reader.chain(start):
        end = event.end
    return end


def plan_splits(
    layout: StoreLayout,
    extent: LogExtent,
    *,
    start: int | None = None,
    stop: int | None = None,
    split_size: int = DEFAULT_SPLIT_SIZE,
    min_splits: int = 1,
) -> list[LogSplit]:
    """Splits that tile the log between two physical offsets.

    Args:
        layout: the store's files.
        extent: the log's.
        start: first offset that is wanted (default: the log's).
        stop: offset just behind the last that is wanted (default: the log's end).
        split_size: most bytes of one split.
        min_splits: fewest splits, if the log is large enough to be cut that often.
    """
    if split_size <= 0 or min_splits <= 0:
        raise UsageError("the split size and the least number of splits must be above 0")
    files = layout.commit_log
    first = extent.start if start is None else max(start, extent.start)
    end = extent.stop if stop is None else min(stop, extent.stop)
    body_end = end if extent.tail is None else min(end, extent.tail)
    splits: list[LogSplit] = []
    if body_end > first:
        size = max(1, min(split_size, -(-(body_end - first) // min_splits)))
        position = first
        while position < body_end:
            cut = min(position + size, body_end)
            snapped = _last_file_start(files.start, files.file_size, position, cut)
            if snapped is not None and cut != body_end:
                cut = snapped
            splits.append(LogSplit(position, cut))
            position = cut
    if extent.tail is not None and end > extent.tail:
        tail_start = max(first, extent.tail)
        splits.append(LogSplit(tail_start, end, resync=tail_start != extent.tail, tail=True))
    return splits


def _last_file_start(base: int, file_size: int, after: int, upto: int) -> int | None:
    """The largest file start in (after, upto]: a split that begins there needs no resync."""
    if file_size <= 0:
        return None
    start = base + (upto - base) // file_size * file_size
    return start if start > after else None


def split_events(reader: LogReader, split: LogSplit) -> Iterator[Event]:
    """What stands in a split; see :meth:`LogReader.events`."""
    if split.tail and reader.bound is not None:
        before = reader.events(None, reader.bound)
        if any(isinstance(event, DamagedSpan) for event in before):
            return
    yield from reader.events(split.start, split.stop, resync=split.resync)
