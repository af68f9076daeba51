"""Finds the end of a log, the messages that it has lost, and the damage that a recovery has noted.

- With a durable offset (:mod:`logquarry.format.checkpoint`), the log reaches at least to the
  durable offset, even after a crash. A break in the chain of frames before the durable offset is
  damage.
- Without a durable offset, after a clean shutdown, every message was dispatched. So the log reaches
  at least to the last message in any queue, and further while the chain of frames is unbroken.

QUIRK: the queues may be stale. After a bad frame, RocketMQ's recovery deletes all later log files.
But RocketMQ cuts the file with the bad frame, and the queues, only in memory. So after a clean
shutdown, a break in the *last* file is the log's end (:func:`sound_bound`), and an earlier break is
damage.

Queues and index show lost messages. If queues and index are lost too, the checkpoint still has the
store time of the last synced message.
"""

from __future__ import annotations

import json
import logging
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from heapq import nlargest
from operator import attrgetter
from typing import Final, NamedTuple

import numpy as np

from logquarry.errors import StoreNotFound
from logquarry.format import frame, java
from logquarry.format.arrays import Bools, Int64
from logquarry.format.checkpoint import Checkpoint
from logquarry.format.queue_entry import FILLER_SIZE, QueueEntry
from logquarry.log.filesystem import LocalFileSystem
from logquarry.log.layout import StoreLayout
from logquarry.log.store_files import DAMAGE
from logquarry.log.walk import BlankSpan, DamagedSpan, LogReader, Run
from logquarry.read.batch_queue import all_queues, frames_in
from logquarry.read.index_file import LARGEST_MESSAGE, Span, indexed_frames, last_indexed
from logquarry.read.queue import Queue, has_message
from logquarry.read.rocksdb_queue import RocksQueue
from logquarry.text import plural, time_text

logger = logging.getLogger(__name__)

_MOST_OF_ROCKSDB: Final = 64
_INVALID: Final = (ValueError, TypeError, KeyError, ArithmeticError, RecursionError)
_NONE: Final = np.empty(0, np.int64)

StoreTimeAt = Callable[[int, int], int]
"""The store time of the message with a physical offset and a size; -1 if there is no message."""


class Noted(NamedTuple):
    """A stretch of damage that a recovery has noted."""

    offset: int
    length: int


class DamageMap:
    """The damaged parts of a log; ``offset in map`` tests whether an offset is in such a part.

    The spans must be in order. The list may grow later. Any thread may use the map.
    """

    def __init__(self, spans: Sequence[Span] = ()) -> None:
        self._spans = spans

    def __len__(self) -> int:
        return len(self._spans)

    def __contains__(self, offset: object) -> bool:
        if not isinstance(offset, int):
            return False
        at = bisect_right(self._spans, offset, key=attrgetter("offset")) - 1
        return at >= 0 and offset < self._spans[at].offset + self._spans[at].length


def known_damage(layout: StoreLayout) -> DamageMap:
    """Return the damage that the last recovery by logquarry noted in a store."""
    try:
        document = json.loads(layout.filesystem.read(DAMAGE))
        spans = [Noted(int(span["offset"]), int(span["length"])) for span in document["damage"]]
    except FileNotFoundError:
        return DamageMap()
    except (OSError, StoreNotFound, *_INVALID) as error:
        logger.warning("%s: %s: %s", layout.root, DAMAGE, error)
        return DamageMap()
    # If no durable offset is valid, another program wrote last, and may have cut the log.
    return DamageMap(sorted(spans) if layout.durable_end is not None else ())


def last_entries(layout: StoreLayout, queues: Iterable[Queue] | None = None) -> list[QueueEntry]:
    """Return the last entry of each queue (default: all queues), sorted by descending end offset.

    If the index has a later message than all queues, an entry for that message comes first: the
    queues may be lost too. The function uses only the furthest 64 queues of RocksDB. If an entry's
    message would end more than one file after the log, the entry may be damaged, and is omitted.
    But if the last two entries of a queue point after the log, files of the log are missing, and
    the last entry is kept.
    """
    log = layout.commit_log
    limit = log.end + log.file_size
    sane = []
    known = list(all_queues(layout) if queues is None else queues)
    in_rocksdb = [queue for queue in known if isinstance(queue, RocksQueue)]
    furthest = nlargest(_MOST_OF_ROCKSDB, in_rocksdb, key=attrgetter("last_place"))
    for queue in (*(one for one in known if not isinstance(one, RocksQueue)), *furthest):
        entry = queue.last_entry
        if entry is None or entry.size == FILLER_SIZE:
            continue
        if entry.end <= limit or _follows_another(queue, entry, log.end):
            sane.append(entry)
    sane.sort(key=attrgetter("end"), reverse=True)
    indexed = last_indexed(layout, sane[0].end if sane else log.start)
    return sane if indexed is None else [indexed, *sane]


def _follows_another(queue: Queue, last: QueueEntry, log_end: int) -> bool:
    at = queue.max_offset - 2
    before = next((entry for _, entry in queue.entries(at, at + 1)), None) if at >= 0 else None
    return (
        before is not None
        and log_end <= before.physical_offset
        and before.end <= last.physical_offset
        and all(frame.FIXED_SIZE_V1 <= one.size <= LARGEST_MESSAGE for one in (before, last))
    )


def missing_end(layout: StoreLayout, entries: Sequence[QueueEntry]) -> int | None:
    """Return where the log ended before its last files were lost or emptied; else None.

    After a crash the queues may be ahead of the log within one file. But if one of ``entries``
    (:func:`last_entries`) points to a message in a later file, that file had messages.
    """
    log, durable, least = layout.commit_log, layout.durable_end, layout.commit_log.end
    if layout.has_abort and (entries or durable is not None):
        start = last_file_start(layout)
        least = log.start if start is None else start + log.file_size
    known = [entry.end for entry in entries if entry.physical_offset >= least]
    if durable is not None:
        known = [durable] if durable > least else []
    return max(known, default=None)


def log_bound(layout: StoreLayout, queues: Iterable[Queue] | None = None) -> int | None:
    """Return the durable offset, or the end of the last message in the queues of a closed store.

    Reads no bytes of the log; a walk over the log needs :func:`sound_bound`. The result is None if:

    - a process has the store open to write;
    - there is no durable offset, and no queue has an entry;
    - there is no durable offset but an ``abort`` file, and no queue points to a missing last file.
    """
    if layout.has_abort and layout.is_live():
        return None
    durable = layout.durable_end
    if durable is not None:
        return durable
    entries = last_entries(layout, queues)
    if layout.has_abort:
        return missing_end(layout, entries)
    return entries[0].end if entries else None


def sound_bound(layout: StoreLayout, bound: int | None) -> int | None:
    """Cut a bound of the log (:func:`log_bound`) at the first break in the last log file.

    If a break can end the log, this reads the last file and checks CRCs.
    """
    if layout.is_sure_of(bound):
        return bound
    start = last_file_start(layout)
    if start is None:
        # Every file begins with zeros: the first break is the end.
        start = layout.commit_log.start
    if bound is None or bound <= start:
        return bound
    position = start
    for event in LogReader(layout).events(start, bound):
        if isinstance(event, Run):
            position = event.end
        elif isinstance(event, BlankSpan) or (isinstance(event, DamagedSpan) and not event.is_cut):
            position = event.offset + event.length
        else:
            break
    return min(position, bound)


def last_file_start(layout: StoreLayout) -> int | None:
    """Physical offset of the last file that has a frame; None if no file has a frame."""
    for file in reversed(layout.commit_log.files):
        try:
            view = layout.open_file(file.path)
        except FileNotFoundError:
            continue
        if bytes(view.window(0, frame.BLANK.size)[: frame.BLANK.size]).strip(b"\0"):
            return file.base
    return None


def last_store_timestamp(layout: StoreLayout, stop: int) -> int:
    """The store time, in ms, of the last message before ``stop``; 0 if there is no message.

    The log must have no damage. The function reads the last file that has a message, but skips the
    bodies.
    """
    # The import loads pyarrow, which a reader of a few messages does not need.
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


class LogFrontier:
    """Finds the end of a growing log for readers that poll for new messages.

    A reader must never read bytes that later turn out to be no message. So the end is:

    - with a durable offset: that offset;
    - if a process has the store open, or may have it open: the end of the last whole frame;
    - if the store was not shut down cleanly and no process has it open: the end of the last frame;
    - if the store was shut down cleanly: the end of the last message in the queues, and further
      while the chain of frames is unbroken.

    With ``skips_damage``, a reader continues after damage, and a closed log ends at the first break
    in its last file, where RocketMQ would cut the log.
    """

    def __init__(self, *, skips_damage: bool = False) -> None:
        self._skips_damage = skips_damage
        self._end = 0
        # The files and the checkpoint of the last closed store, and the end of its log.
        self._closed: tuple[object, int] = None, 0
        self._searched: int | None = None
        self._is_loss_known = False

    def end_of(self, layout: StoreLayout, known: int | None = None) -> int:
        """Physical offset at which the log ends: the end of a frame, of a blank or of damage.

        Each call reads only new bytes. ``layout`` must be a new listing; ``known`` is an offset up
        to which a reader has already followed the log.
        """
        log = layout.commit_log
        if not log.files:
            return log.start
        durable = layout.durable_end
        if durable is not None:
            end = max(log.start, min(durable, log.end))
            if durable > log.end and not layout.is_live():
                return self._with_lost_files(layout, end, durable)
            return end
        is_live = layout.is_live()
        if not layout.has_abort and not is_live:
            closed_end = self._end_of_closed(layout)
            if closed_end is not None:
                return closed_end
        self._end = self._chain_end(layout, max(known or 0, self._end), is_live=is_live)
        if layout.has_abort and not is_live and not (self._skips_damage and self._is_loss_known):
            missing = missing_end(layout, last_entries(layout))
            return self._with_lost_files(layout, self._end, missing or 0)
        return self._end

    def _with_lost_files(self, layout: StoreLayout, end: int, known: int) -> int:
        if not self._skips_damage:
            # The read goes up to the known end, and reports the loss there.
            return max(end, known)
        if known > end and not self._is_loss_known:
            logger.warning(
                "%s: the last %d bytes of the log are lost: it reached up to offset %d, and its "
                "files end at %d; type: logquarry verify %s",
                *(layout.log_path(known), known - end, known, end, layout.root),
            )
        self._is_loss_known = True
        return end

    def _end_of_closed(self, layout: StoreLayout) -> int | None:
        files = layout.commit_log.files
        try:
            checkpoint: object = layout.read_checkpoint()
        except ValueError:
            checkpoint = None
        seen, end = self._closed
        # The files of a backup may change in place.
        if seen == (files, checkpoint) and LogReader(layout).chain_end(end) == end:
            return end
        entries = last_entries(layout)
        if not entries:
            return None
        # The import loads pyarrow, which a reader of a few messages does not need.
        from logquarry.log.splits import log_extent

        bound = entries[0].end
        end = log_extent(layout, bound, bound).stop
        if self._skips_damage:
            cut = sound_bound(layout, end)
            assert cut is not None
            end = self._with_lost_files(layout, cut, missing_end(layout, entries) or 0)
        self._closed = (files, checkpoint), end
        return end

    def _chain_end(self, layout: StoreLayout, known: int, *, is_live: bool) -> int:
        log = layout.commit_log
        reader = LogReader(layout, live=True)
        # A later read shows whether bytes before the last file with a frame are frames or damage.
        # So the walk need not start at a known offset in an earlier file.
        start = last_file_start(layout)
        start = log.start if start is None else start
        at = known if start <= known < log.end else start
        while (end := reader.chain_end(at)) == start and known < start and start > log.start:
            start = max(file.base for file in log.files if file.base < start)
            at = max(start, known)
        # The locks of other machines cannot be read.
        if is_live or not isinstance(layout.filesystem, LocalFileSystem):
            if end == self._end and end != self._searched:
                self._searched = end
                self._warn(reader, end)
            return end
        while end != self._searched and (found := reader.find(end + 1, log.end)) is not None:
            end = reader.chain_end(found)
        self._searched = end
        return end

    def _warn(self, reader: LogReader, end: int) -> None:
        """Warn of sound frames after the end of a chain that does not grow.

        RocketMQ's recovery may have cut off the frames after the break, but only in memory. Once
        the writer begins a later file, readers count the break as damage, and read the frames after
        it.
        """
        found = reader.find(end + 1, reader.files.end)
        if found is not None:
            logger.warning(
                "%s: at offset %d: no frame, and sound frames from %d on: waiting until the "
                "store's writer begins another file",
                reader.layout.log_path(end),
                end,
                found,
            )


def checkpoint_times(layout: StoreLayout) -> Checkpoint:
    """The times of the checkpoint; zeros if it is missing or cannot be read."""
    try:
        return layout.read_checkpoint() or Checkpoint()
    except ValueError:
        return Checkpoint()


def lost_tail(layout: StoreLayout, last_time: int) -> str | None:
    """Return the evidence, in words, that a log has lost its last messages; else None.

    In 386 stores that RocketMQ and logquarry wrote, the checkpoint was later than the last message
    only if messages were lost. For example, a power cut loses messages that were dispatched, but
    not synced. ``last_time`` is the latest store time of a message in the log, in ms, or 0. No
    process may have the store open.
    """
    covered = max(checkpoint_times(layout))
    # The durable offset, which a recovery writes, shows where the log ends.
    is_known = layout.durable_end is not None or not layout.commit_log.files
    if is_known or covered <= max(0, last_time):
        return None
    last = f"the last message in the log was stored at {time_text(last_time)}"
    return (
        f"the checkpoint covers a message stored at {time_text(covered)}, and "
        f"{last if last_time else 'the log has no message'}: later messages are lost"
    )


def find_lost_tail(
    layout: StoreLayout, entries: Sequence[QueueEntry], store_time_at: StoreTimeAt
) -> str | None:
    """Do the same as :func:`lost_tail`, for a caller that has not read the log.

    Reads the store time of the first of ``entries`` (:func:`last_entries`). If the checkpoint is
    later, reads the last log file. No process may have the store open.
    """
    log = layout.commit_log
    if lost_tail(layout, 0) is None:
        return None
    if entries:
        last = entries[0]
        if log.at(last.physical_offset) is None:
            # The entries already show that a file is lost.
            return None
        if lost_tail(layout, store_time_at(*last[:2])) is None:
            return None
    return lost_tail(layout, last_store_timestamp(layout, log.end))


def warn_of_lost_tail(
    layout: StoreLayout, entries: Sequence[QueueEntry], store_time_at: StoreTimeAt
) -> None:
    """Log a warning if the log has lost its last messages (:func:`find_lost_tail`)."""
    reason = find_lost_tail(layout, entries, store_time_at)
    if reason is not None:
        logger.warning("%s: %s; type: logquarry verify %s", *(layout.root, reason, layout.root))


class LostMessages(NamedTuple):
    """Number and bytes of messages that are not in the sound parts of the log."""

    messages: int
    bytes: int

    def __str__(self) -> str:
        return f"{plural(self.messages, 'message')} lost, {plural(self.bytes, 'byte')}"


def lost_messages(
    layout: StoreLayout, spans: Sequence[Span], log_end: int = java.LONG_MAX
) -> LostMessages:
    """Count the messages of queues and index in damaged parts of the log and after its end.

    Reads all queue entries. A message in several queues counts once. For an inner batch, the
    function counts all messages, but counts the bytes once. If only the index has a message, its
    bytes are an estimate. The spans must be in order. By default, only messages in ``spans`` count.
    """
    # An entry that points after ``limit`` is itself damaged.
    log = layout.commit_log
    limit = java.LONG_MAX
    if log.files and log_end < java.LONG_MAX:
        furthest = next(iter(last_entries(layout)), None)
        known = 0 if furthest is None else furthest.end
        limit = max(max(log_end, log.end) + log.file_size, known)
    starts = np.array([span.offset for span in spans], np.int64)
    ends = np.array([span.offset + span.length for span in spans], np.int64)

    def lost(at: Int64) -> Bools:
        is_lost: Bools = (at >= log_end) & (at < limit)
        if len(starts):
            number = np.searchsorted(starts, at, side="right") - 1
            is_lost |= (number >= 0) & (at < ends[np.maximum(number, 0)])
        return is_lost

    offsets, sizes, counts = [_NONE], [_NONE], [_NONE]
    for queue in all_queues(layout):
        for _, units in queue.runs(queue.min_offset, queue.max_offset):
            at = units["physical_offset"].astype(np.int64)
            is_lost = lost(at) & has_message(units)
            at, size = at[is_lost], units["size"][is_lost].astype(np.int64)
            which, held = frames_in(at, is_batch=queue.is_batch)
            offsets.append(at[which])
            sizes.append(size[which])
            counts.append(held)
    at, size = indexed_frames(layout, min([log_end, *starts.tolist()]), spans)
    is_lost = lost(at)
    # The queues come first, because they have the exact sizes.
    offsets.append(at[is_lost])
    sizes.append(size[is_lost])
    counts.append(np.ones(np.count_nonzero(is_lost), np.int64))
    _, first = np.unique(np.concatenate(offsets), return_index=True)
    return LostMessages(
        int(np.concatenate(counts)[first].sum()), int(np.concatenate(sizes)[first].sum())
    )
