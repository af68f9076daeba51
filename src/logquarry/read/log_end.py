"""Finds the end of a log, its lost messages, and the damage that a recovery has recorded.

- If a durable offset is recorded (:mod:`logquarry.format.checkpoint`), the log reaches at least to
  this offset, even after a crash. A break in the chain of frames (other bytes between two frames)
  before the durable offset is damage.
- If no durable offset is recorded, but the store was shut down cleanly, every message was
  dispatched to its queue. So the log reaches at least to the end of the last message that a queue
  entry points to. If the chain of frames continues there, the log reaches to the end of the chain.

QUIRK: the queues may have entries for messages that the log no longer has. After a bad frame,
RocketMQ's recovery deletes all later log files. It also truncates the file with the bad frame and
the queues, but only in memory: the bytes on the disk stay. So after a clean shutdown, a break in
the *last* file is the log's end (:func:`sound_bound`), and an earlier break is damage.

Lost messages are found from the entries that queues and index still have for them. If queues and
index are lost too, the checkpoint shows the loss: it has the store time of the last synced message.
"""

from __future__ import annotations

import json
import logging
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from logquarry.log.walk import BlankSpan, DamagedSpan, LogReader, Run, Span
from logquarry.read.batch_queue import all_queues, frames_in
from logquarry.read.index_file import LARGEST_MESSAGE, indexed_frames, last_indexed
from logquarry.read.queue import Queue, has_message
from logquarry.read.rocksdb_queue import RocksQueue
from logquarry.text import counted, plural, time_text

logger = logging.getLogger(__name__)

_MOST_OF_ROCKSDB: Final = 64
_INVALID: Final = (ValueError, TypeError, KeyError, ArithmeticError, RecursionError)
_NONE: Final = np.empty(0, np.int64)

LastEntries = Mapping[Queue, QueueEntry | None]
"""Queues with their last entries (:attr:`Queue.last_entry`), which a caller has just read."""
FindEntries = Callable[[], Sequence[QueueEntry]]
StoreTimeAt = Callable[[int, int], int]
"""Function that returns the store time of a message, given its physical offset and its size; -1 if
there is no message.
"""


class DamageMap:
    """The damaged ranges (spans) of a log; ``offset in map`` tests whether one of them contains an
    offset.

    The spans must be in the order of the log. The caller may append spans to the list later. Any
    thread may use the map.
    """

    def __init__(self, spans: Sequence[Span] = ()) -> None:
        self._spans = spans

    def __len__(self) -> int:
        return len(self._spans)

    def __contains__(self, offset: object) -> bool:
        if not isinstance(offset, int):
            return False
        at = bisect_right(self._spans, offset, key=attrgetter("offset")) - 1
        return at >= 0 and offset < self._spans[at].end


def known_damage(layout: StoreLayout) -> DamageMap:
    """Return the damage that the last recovery by logquarry recorded in a store."""
    try:
        document = json.loads(layout.filesystem.read(DAMAGE))
        spans = [Span(int(span["offset"]), int(span["length"])) for span in document["damage"]]
    except FileNotFoundError:
        return DamageMap()
    except (OSError, StoreNotFound, *_INVALID) as error:
        logger.warning("%s: %s: %s", layout.root, DAMAGE, error)
        return DamageMap()
    # If no valid durable offset is recorded, a program other than logquarry was the last to write
    # to the store. This program may have truncated the log, so the recorded damage is not used.
    spans.sort(key=attrgetter("offset"))
    return DamageMap(spans if layout.durable_end is not None else ())


def last_entries(
    layout: StoreLayout,
    queues: Iterable[Queue] | None = None,
    lasts: LastEntries | None = None,
) -> list[QueueEntry]:
    """Return the last entry of each queue (default: all queues), sorted by descending end offset.

    If a message in the index is later than all messages in queues, an entry for that message comes
    first, because the queues' last entries may be lost too. Of the queues in RocksDB, the function
    reads only the 64 whose last messages have the highest physical offsets. A last entry may be
    damaged if its message ends far after the log's last file, by more than the size of a log file.
    The function omits such an entry. But if the queue's last two entries both point after the log's
    last file, log files are missing, and the function returns the last entry.
    """
    log = layout.commit_log
    limit = log.end + log.file_size
    sane = []
    known = list(all_queues(layout) if queues is None else queues)
    in_rocksdb = [queue for queue in known if isinstance(queue, RocksQueue)]
    furthest = nlargest(_MOST_OF_ROCKSDB, in_rocksdb, key=attrgetter("last_place"))
    for queue in (*(one for one in known if not isinstance(one, RocksQueue)), *furthest):
        entry = queue.last_entry if lasts is None else lasts[queue]
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
    """Return the physical offset at which the log ended before its last files were lost or emptied.

    Return None if no such loss is known.

    ``entries`` is the result of :func:`last_entries`. After a crash, queues may have entries for
    messages that were not synced, but only in the log's last file. So an entry for a message in a
    later file shows that this file had messages.
    """
    log, durable, least = layout.commit_log, layout.durable_end, layout.commit_log.end
    if layout.has_abort and (entries or durable is not None):
        start = last_file_start(layout)
        least = log.start if start is None else start + log.file_size
    known = [entry.end for entry in entries if entry.physical_offset >= least]
    if durable is not None:
        known = [durable] if durable > least else []
    return max(known, default=None)


def log_bound(layout: StoreLayout, entries: FindEntries | None = None) -> int | None:
    """Return the durable offset. If no durable offset is recorded, return the end of the last
    message that a queue entry points to. ``entries`` returns the :func:`last_entries`.

    Does not read the log. For a walk over the log, pass the result to :func:`sound_bound`. The
    result is None if:

    - a process has the store open for writing;
    - there is no durable offset, and no queue has an entry;
    - there is no durable offset, an ``abort`` file shows a crash, and no last files of the log are
      known to be lost (:func:`missing_end`).
    """
    if layout.has_abort and layout.is_live():
        return None
    if layout.durable_end is not None:
        return layout.durable_end
    found = last_entries(layout) if entries is None else entries()
    if layout.has_abort:
        return missing_end(layout, found)
    return found[0].end if found else None


def sound_bound(layout: StoreLayout, bound: int | None) -> int | None:
    """Return the end of the log, given the result of :func:`log_bound` (``bound``).

    If :meth:`StoreLayout.is_sure_of` shows that every broken frame before ``bound`` is damage, the
    function returns ``bound``. If it does not show this, the first broken frame in the last log
    file can be the log's end. Then the function reads this file, checks CRCs, and returns the end
    of the chain of sound frames, or ``bound`` if the chain reaches it.
    """
    if layout.is_sure_of(bound):
        return bound
    start = last_file_start(layout)
    if start is None:
        # Every file begins with zeros, so no file is known to have frames. So walk the whole log.
        # Its end is its first break.
        start = layout.commit_log.start
    if bound is None or bound <= start:
        return bound
    position = start
    for event in LogReader(layout).events(start, bound):
        if isinstance(event, Run | BlankSpan) or (
            isinstance(event, DamagedSpan) and not event.is_cut
        ):
            position = event.end
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

    The log must have no damage. The function walks the last file that has a message, but does not
    check the bodies' CRCs.
    """
    # Import here: the module loads pyarrow, which a reader of a few messages does not need.
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

    A reader must not read bytes after the known end of the log, because such bytes may not belong
    to a message of the log. The known end is:

    - if the durable offset is known: the durable offset;
    - if a process has the store open, or may have it open: the end of the unbroken frames;
    - if the store was not shut down cleanly and no process has it open: the end of the last sound
      frame;
    - if the store was shut down cleanly: the end of the chain of frames that starts after the last
      message that a queue entry points to.

    With ``skips_damage``, a reader continues after damage. If the store was shut down cleanly, the
    known end is then the first break in the log's last file, where RocketMQ would cut the log.
    """

    def __init__(self, *, skips_damage: bool = False) -> None:
        self._skips_damage = skips_damage
        self._end = 0
        # A cache for stores that no process has open, as a pair. The first item is the files and
        # the checkpoint. The second item is the log's end that was found for them.
        self._closed: tuple[object, int] = None, 0
        self._searched: int | None = None
        self._is_loss_known = False

    def end_of(self, layout: StoreLayout, known: int | None = None) -> int:
        """Physical offset at which the log ends: the end of a frame, of a blank or of damage.

        Each call reads only new bytes. ``layout`` must have been listed just before the call.
        ``known`` is a physical offset up to which a reader has already read the log.
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
            # Return the end of the lost part. A reader that reads up to this end finds the loss,
            # and reports it.
            return max(end, known)
        if known > end and not self._is_loss_known:
            logger.warning(
                "%s: the last %s lost: it reached up to offset %d, and its files end at %d; type: "
                "logquarry verify %s",
                layout.log_path(known),
                counted(known - end, "byte of the log is", "bytes of the log are"),
                *(known, end, layout.root),
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
        # A backup program may change the files in place. So also check that the chain of frames
        # still ends at the cached end.
        if seen == (files, checkpoint) and LogReader(layout).chain_end(end) == end:
            return end
        entries = last_entries(layout)
        if not entries:
            return None
        # Import here: the module loads pyarrow, which a reader of a few messages does not need.
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
        # Start in the last file with a frame, even if the known offset is in an earlier file. All
        # bytes before this file are part of the log. A reader of these bytes checks later whether
        # they are frames or damage.
        start = last_file_start(layout)
        start = log.start if start is None else start
        at = known if start <= known < log.end else start
        while (end := reader.chain_end(at)) == start and known < start and start > log.start:
            start = max(file.base for file in log.files if file.base < start)
            at = max(start, known)
        # In a remote store, a writer may be active even if is_live is False, because the locks of
        # other machines cannot be read.
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
        """Log a warning if the chain of frames did not grow since the last call, and sound frames
        follow its end.

        A reader does not read these frames yet. RocketMQ's recovery may have truncated the log at
        the break, but only in memory; the writer then overwrites the frames. Once the writer
        begins a new file, the break is damage, and readers read the frames after it.
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
    """Return the times of the checkpoint; zeros if the checkpoint is missing or cannot be read."""
    try:
        return layout.read_checkpoint() or Checkpoint()
    except ValueError:
        return Checkpoint()


def lost_tail(layout: StoreLayout, last_time: int) -> str | None:
    """Return the evidence, in words, that a log has lost its last messages; else None.

    The evidence is that the checkpoint has a later time than the last message of the log. In 386
    stores that RocketMQ and logquarry wrote, this occurred only if messages were lost. For example,
    a power cut loses messages that were dispatched but not synced. ``last_time`` is the latest
    store time of a message in the log, in ms, or 0. No process may have the store open.
    """
    covered = max(checkpoint_times(layout))
    # If a durable offset is recorded, for example by a recovery, it determines the log's end, and
    # the checkpoint is not needed.
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

    ``entries`` is the result of :func:`last_entries`. The function reads the store time of the
    message to which the first entry points. If the checkpoint has a later time, the function also
    reads the last log file. No process may have the store open.
    """
    log = layout.commit_log
    if lost_tail(layout, 0) is None:
        return None
    if entries:
        last = entries[0]
        if log.at(last.physical_offset) is None:
            # The log file that should contain the message does not exist. The caller already knows
            # of this loss, because it has the entries.
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
    """Number and bytes of messages that queues or index point to, but that the log has lost."""

    messages: int
    bytes: int

    def __str__(self) -> str:
        return f"{plural(self.messages, 'message')} lost, {plural(self.bytes, 'byte')}"


def lost_messages(
    layout: StoreLayout, spans: Sequence[Span], log_end: int = java.LONG_MAX
) -> LostMessages:
    """Count the messages that queues and index point to in damaged ranges of the log, or after its
    end.

    Reads all queue entries. A message in several queues is counted once. Each message of an inner
    batch is counted, but the bytes of the batch only once. The bytes of a message that only the
    index has are an estimate. ``spans``, the damaged ranges, must be in the order of the log.
    Without ``log_end``, only messages in ``spans`` are counted.
    """
    # Ignore entries that point to ``limit`` or later. Such an entry is damaged, so it does not
    # prove that a message is lost.
    log = layout.commit_log
    limit = java.LONG_MAX
    if log.files and log_end < java.LONG_MAX:
        furthest = next(iter(last_entries(layout)), None)
        known = 0 if furthest is None else furthest.end
        limit = max(max(log_end, log.end) + log.file_size, known)
    starts = np.array([span.offset for span in spans], np.int64)
    ends = np.array([span.end for span in spans], np.int64)

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
    # np.unique keeps the first size of each offset. So append the sizes from the index after the
    # sizes from the queues, because the index only has estimates.
    offsets.append(at[is_lost])
    sizes.append(size[is_lost])
    counts.append(np.ones(np.count_nonzero(is_lost), np.int64))
    _, first = np.unique(np.concatenate(offsets), return_index=True)
    return LostMessages(
        int(np.concatenate(counts)[first].sum()), int(np.concatenate(sizes)[first].sum())
    )
