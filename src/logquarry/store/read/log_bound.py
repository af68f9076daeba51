"""How far the log is known to reach: what the consume queues of a store say about it.

A store that was closed in order (no ``abort``) has dispatched every message, so that its log
reaches at least to the end of the last message that any queue holds. What lies beyond, unless it
goes on from there in an unbroken chain, is left over from an earlier recovery and no message
(`formats.md`, Stale frames).

QUIRK: the queues may be left over as well. Where RocketMQ's recovery meets a bad frame it deletes
all later files of the log, and cuts the file with the bad frame, and the queues, in memory only:
what it cut off still stands in them, sound frames and sound units, and nothing tells it from what
was never cut. So a break of the chain in the *last* file of a closed store is the log's end, for
that is where RocketMQ would leave one; :func:`sound_bound` knows. A break in an earlier file is
damage within the log: recovery would have left no later file.

A store that this library wrote says itself how far its log is on the disk
(:mod:`logquarry.format.durable_mark`): then that counts, also after a crash, and a break before it
is damage wherever it is.
"""

from __future__ import annotations

from collections.abc import Iterable

from logquarry.files.layout import StoreLayout
from logquarry.format import frame
from logquarry.format.queue_entry import FILLER_SIZE, QueueEntry
from logquarry.scan.walk import BlankSpan, LogReader, Run
from logquarry.store.disk.open_files import OpenFiles
from logquarry.store.queue.consume_queue import ConsumeQueue, Queue


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
    """A bound as :class:`~logquarry.scan.walk.LogReader` needs it, cut at the last file's break.

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
    from logquarry.scan import columns

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
