"""The damage of a log: what a walk finds, and what a recovery has noted and left there.

Readers of queues pass over what was noted.
"""

from __future__ import annotations

import json
import logging
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from logquarry.disk.open_files import OpenFiles
from logquarry.format import frame
from logquarry.format.queue_entry import FILLER_SIZE, QueueEntry
from logquarry.log.filesystem import LocalFileSystem
from logquarry.log.layout import DAMAGE, StoreFile, StoreLayout
from logquarry.log.splits import log_extent
from logquarry.log.walk import BlankSpan, LogReader, Run
from logquarry.read.consume_queue import ConsumeQueue, Queue

logger = logging.getLogger(__name__)


class Span(Protocol):
    """A stretch of the log, by its first byte and how many there are."""

    @property
    def offset(self) -> int:
        """Physical offset."""

    @property
    def length(self) -> int:
        """Bytes."""


class Noted(NamedTuple):
    """A stretch of the log that a recovery has noted."""

    offset: int
    length: int


class DamageMap:
    """Which places of a log are damaged.

    Args:
        spans: the damage, in order. A list that a walk adds to is followed.
    """

    def __init__(self, spans: Sequence[Span] = ()) -> None:
        self._spans = spans
        self._starts: list[int] = []

    def __len__(self) -> int:
        return len(self._spans)

    def __contains__(self, offset: object) -> bool:
        if not isinstance(offset, int):
            return False
        for number in range(len(self._starts), len(self._spans)):
            self._starts.append(self._spans[number].offset)
        at = bisect_right(self._starts, offset) - 1
        return at >= 0 and offset < self._starts[at] + self._spans[at].length


def known_damage(layout: StoreLayout) -> DamageMap:
    """What the last recovery of a store noted; none where it was none of ours."""
    try:
        document = json.loads(layout.filesystem.read(DAMAGE))
        spans = [Noted(int(span["offset"]), int(span["length"])) for span in document["damage"]]
    except FileNotFoundError:
        return DamageMap()
    except (OSError, ValueError, TypeError, KeyError, ArithmeticError, RecursionError) as error:
        logger.warning("%s: %s: %s", layout.root, DAMAGE, error)
        return DamageMap()
    # Another program that opened the store since may have cut the log, and gone on otherwise.
    return DamageMap(sorted(spans) if layout.durable_end is not None else ())


# --------------------------------------------------------------------------------------------------
# How far the log is known to reach: what the consume queues of a store say about it.
#
# A store that was closed in order (no ``abort``) has dispatched every message, so that its log
# reaches at least to the end of the last message that any queue holds. What lies beyond, unless it
# goes on from there in an unbroken chain, is left over from an earlier recovery and no message
# (`formats.md`, Stale frames).
#
# QUIRK: the queues may be left over as well. Where RocketMQ's recovery meets a bad frame it deletes
# all later files of the log, and cuts the file with the bad frame, and the queues, in memory only:
# what it cut off still stands in them, sound frames and sound units, and nothing tells it from what
# was never cut. So a break of the chain in the *last* file of a closed store is the log's end, for
# that is where RocketMQ would leave one; :func:`sound_bound` knows. A break in an earlier file is
# damage within the log: recovery would have left no later file.
#
# A store that this library wrote says itself how far its log is on the disk
# (:mod:`logquarry.format.durable_mark`): then that counts, also after a crash, and a break before
# it is damage wherever it is.


def consume_queues(layout: StoreLayout, files: OpenFiles | None = None) -> list[ConsumeQueue]:
    """All the queues that a store has files of."""
    files = files or OpenFiles(layout)
    start = layout.commit_log.start
    return [
        ConsumeQueue(layout, topic, queue_id, log_min_offset=start, files=files)
        for topic, queue_id in layout.queue_names
    ]


def last_entries(layout: StoreLayout, queues: Iterable[Queue]) -> list[QueueEntry]:
    """The last unit of each queue, the one that reaches furthest in the log first.

    Units that cannot be meant are left out: they end more than a file behind the last file of the
    log. Reads at most the last file of each queue that has a unit.
    """
    log = layout.commit_log
    limit = log.end + log.file_size
    entries = [entry for queue in queues if (entry := queue.last_entry) is not None]
    sane = [e for e in entries if e.size != FILLER_SIZE and e.physical_offset + e.size <= limit]
    return sorted(sane, key=lambda entry: entry.physical_offset + entry.size, reverse=True)


def log_bound(layout: StoreLayout, queues: Iterable[Queue] | None = None) -> int | None:
    """The durable mark, or the end of the last message that a queue of a closed store has.

    None if nothing says so: without a mark nothing does where the store has an ``abort`` file (it
    is open, or was not closed in order), and where no queue has a unit. While somebody writes it
    nothing does. Cheap: no byte of the log is read, and so damage at its end is not seen; a walk
    over the log needs :func:`sound_bound`.

    Args:
        layout: the store's files.
        queues: its queues (default: all of which there are files).
    """
    if layout.has_abort and layout.is_live():
        return None
    durable = layout.durable_end
    if durable is not None:
        return durable
    if layout.has_abort:
        return None
    entries = last_entries(layout, consume_queues(layout) if queues is None else queues)
    return entries[0].physical_offset + entries[0].size if entries else None


def sound_bound(layout: StoreLayout, bound: int | None) -> int | None:
    """A bound as :class:`~logquarry.log.walk.LogReader` needs it, cut at the last file's break.

    Reads what the last file of the log holds below the bound, and its CRCs; nothing where that
    was all on the disk, says the durable mark.

    Args:
        layout: the store's files.
        bound: what :func:`log_bound` says.
    """
    durable = layout.durable_end
    if bound is not None and durable is not None and bound <= durable:
        return bound
    start = last_file_start(layout)
    if start is None:
        # Every file begins with zeros: the first break of all is the end.
        start = layout.commit_log.start
    if bound is None or bound <= start:
        return bound
    position = start
    for event in LogReader(layout).events(start, bound):
        if isinstance(event, Run):
            position = event.end
        elif isinstance(event, BlankSpan):
            position = event.offset + event.length
        else:
            break
    return min(position, bound)


def last_file_start(layout: StoreLayout) -> int | None:
    """Where the last file of the log that holds anything starts; None without one.

    A file that begins with zeros was only made in advance.
    """
    for file in reversed(layout.commit_log.files):
        try:
            view = layout.open_file(file.path)
        except FileNotFoundError:
            continue
        if bytes(view.window(0, frame.BLANK.size)[: frame.BLANK.size]).strip(b"\0"):
            return file.base
    return None


def last_store_timestamp(layout: StoreLayout, stop: int) -> int:
    """The store time of the last message of a log without damage, in milliseconds; 0 without one.

    Reads the last file that holds a message, and no bodies.

    Args:
        layout: the store's files.
        stop: where the log ends.
    """
    from logquarry.log import columns

    for file in reversed(layout.commit_log.files):
        if file.base >= stop:
            continue
        last: Run | None = None
        for event in LogReader(layout, check_crc=False).events(file.base, stop):
            if isinstance(event, Run) and len(event.rows):
                last = event
        if last is not None:
            found = columns.fixed_fields(last.window, last.rows[-1:], ("store_timestamp",))
            return int(found["store_timestamp"][0])
    return 0


# --------------------------------------------------------------------------------------------------
# Up to where the log of a store can be followed without a doubt, asked again and again.
#
# For readers who come back for more, and must never have read what turns out to be no message:
#
# - A store of ours: up to its durable mark, whatever stands behind that.
# - A store that is being written, or may be: up to the end of the last whole frame of the chain. A
#   frame that is not whole yet is looked at again the next time.
# - A store that was not closed in order and that nobody writes: up to the end of its last frame.
# - A store that was closed in order: as far as its queues say, and its chain goes on from there.
#
# An answer costs what was written since the one before, and a listing of the log's folder.


@dataclass(frozen=True, slots=True)
class _Closed:
    """What a closed store's files looked like, and where its log ended then."""

    files: tuple[StoreFile, ...]
    checkpoint: object
    end: int


class LogFrontier:
    """Follows one log; :meth:`end_of` answers anew each time.

    Args:
        skips_damage: whether reading goes on behind damage. The end of a closed log is then the
            first break in its last file, for that is where RocketMQ would cut it.
    """

    def __init__(self, *, skips_damage: bool = False) -> None:
        self._skips_damage = skips_damage
        self._end = 0
        self._closed: _Closed | None = None
        self._searched: int | None = None

    def end_of(self, layout: StoreLayout, known: int | None = None) -> int:
        """Where the log ends, at the end of a frame, of a blank or of damage.

        Args:
            layout: the store's files as they are now.
            known: an offset up to which the log was followed before, by anyone.
        """
        log = layout.commit_log
        if not log.files:
            return log.start
        durable = layout.durable_end
        if durable is not None:
            return max(log.start, min(durable, log.end))
        is_live = layout.is_live()
        if not layout.has_abort and not is_live:
            end = self._end_of_closed(layout)
            if end is not None:
                return end
        self._end = self._chain_end(layout, max(known or 0, self._end), is_live=is_live)
        return self._end

    def _end_of_closed(self, layout: StoreLayout) -> int | None:
        """None where no queue says anything."""
        files = layout.commit_log.files
        try:
            checkpoint: object = layout.read_checkpoint()
        except ValueError:
            checkpoint = None
        seen = self._closed
        if (
            seen is not None
            and (seen.files, seen.checkpoint) == (files, checkpoint)
            # Files of a backup may change in place.
            and _follow(LogReader(layout), seen.end) == seen.end
        ):
            return seen.end
        entries = last_entries(layout, consume_queues(layout))
        if not entries:
            return None
        bound = entries[0].physical_offset + entries[0].size
        end: int | None = log_extent(layout, bound, bound).stop
        if self._skips_damage:
            end = sound_bound(layout, end)
        assert end is not None
        self._closed = _Closed(files, checkpoint, end)
        return end

    def _chain_end(self, layout: StoreLayout, known: int, *, is_live: bool) -> int:
        log = layout.commit_log
        reader = LogReader(layout, live=True)
        # What comes before the last file with a frame is there, or is damage: whoever reads it will
        # see. So a start far behind is not walked up from.
        start = last_file_start(layout)
        start = log.start if start is None else start
        at = known if start <= known < log.end else start
        while (end := _follow(reader, at)) == start and known < start and start > log.start:
            start = max(file.base for file in log.files if file.base < start)
            at = max(start, known)
        # Other machines' locks are not seen from here.
        if is_live or not isinstance(layout.filesystem, LocalFileSystem):
            if end == self._end and end != self._searched:
                self._searched = end
                self._warn(reader, end)
            return end
        while end != self._searched and (found := reader.find(end + 1, log.end)) is not None:
            end = _follow(reader, found)
        self._searched = end
        return end

    def _warn(self, reader: LogReader, end: int) -> None:
        """Tell of sound frames behind the end of a chain that stands still.

        They may be what RocketMQ's own recovery cut off, in memory only; to tell it from damage
        takes a file that was begun behind this one, and then it is read as damage.
        """
        found = reader.find(end + 1, reader.files.end)
        if found is not None:
            logger.warning(
                "%s: at offset %d: no frame, and sound ones from %d on: waiting for what the "
                "store's writer makes of it",
                reader.layout.log_path(end),
                end,
                found,
            )


def _follow(reader: LogReader, start: int) -> int:
    end = start
    for event in reader.chain(start):
        end = event.end
    return end
