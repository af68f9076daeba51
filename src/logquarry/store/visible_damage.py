"""The damage of a store that shows without reading its log: for ``logquarry info``.

It reads folder names, the last queue entries, the checkpoint and ``.logquarry/damage.json``. If
files of the log are missing, or the queues point beyond the log's end, it reads all queue entries.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Final

from logquarry.log.file_sequence import FileSequence
from logquarry.log.layout import StoreLayout
from logquarry.log.store_files import CHECKPOINT
from logquarry.read.log_end import Noted, known_damage, last_entries
from logquarry.read.lost_messages import lost_messages
from logquarry.read.lost_tail import find_lost_tail
from logquarry.repair.audit.differences import FileFault, file_differences
from logquarry.text import plural

_MOST: Final = 3
"""Maximum number of wrong files that a sign names."""


def visible_damage(layout: StoreLayout, log_end: int) -> Iterator[str]:
    """Describe each sign of damage in words.

    Args:
        layout: the files of a store that no process has open.
        log_end: physical offset of the log's end.
    """
    log = layout.commit_log
    if layout.lost_head is not None:
        yield str(layout.lost_head)
    lacks_first = layout.lost_head is not None
    yield from _first(_wrong_files(log, "log file", lacks_first=lacks_first))
    queues = layout.queue_files() + layout.batch_queue_files()
    yield from _first(fault for files in queues for fault in _wrong_files(files, "queue file"))
    entries = last_entries(layout)
    queued = entries[0].physical_offset + entries[0].size if entries else 0
    if queued > log_end:
        yield f"the log ends at {log_end}, and the queues point to messages up to {queued}"
    tail = find_lost_tail(layout, entries)
    if tail is not None:
        yield tail
    gaps = [span for span in _without_file(log) if span.offset < log_end]
    if gaps or queued > log_end:
        lost = lost_messages(layout, gaps, log_end)
        if lost.messages:
            yield str(lost)
    recorded = len(known_damage(layout))
    if recorded:
        yield f"a recovery has recorded {plural(recorded, 'damaged place')} in the log"
    try:
        layout.read_checkpoint()
    except ValueError as error:
        yield f"{CHECKPOINT}: {error}"


def _without_file(log: FileSequence) -> Iterator[Noted]:
    """The parts of the log whose file is missing or empty, in order."""
    size = log.file_size
    for file, following in zip(log.files, (*log.files[1:], None), strict=True):
        start = file.base + (size if file.size else 0)
        end = file.base + size if following is None else following.base
        if start < end:
            yield Noted(start, end - start)


def _wrong_files(files: FileSequence, what: str, *, lacks_first: bool = False) -> Iterator[str]:
    for one in file_differences(files.files, files.file_size, lacks_first=lacks_first):
        if one.fault is not FileFault.GAP:
            yield one.reason()
        elif one.missing:
            yield f"{plural(len(one.missing), what)} missing before {one.file.path}"


def _first(faults: Iterator[str]) -> Iterator[str]:
    yield from islice(faults, _MOST)
    rest = sum(1 for _ in faults)
    if rest:
        yield f"and {rest:,} more"
