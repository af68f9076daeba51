"""The messages that the index names: evidence of messages that log and queues have lost.

The queues are the first evidence of a lost part of the log. If the queues are lost too, the index
still has the physical offset of each message with a key, but no size: a message whose frame is
missing reaches up to the next one in the index. The last one counts as the smallest frame.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from logquarry.disk.open_files import OpenFiles
from logquarry.errors import StoreNotFound
from logquarry.format.frame import FIXED_SIZE_V1
from logquarry.format.index import ENTRY, IndexHeader
from logquarry.format.queue_entry import QueueEntry
from logquarry.format.rows import SIZE
from logquarry.log.layout import StoreLayout
from logquarry.log.store_files import INDEX
from logquarry.log.walk import LogReader, Run
from logquarry.read.index_file import IndexFile

Int64 = npt.NDArray[np.int64]
LARGEST_MESSAGE: Final = 64 << 20
"""Bytes; a message that seems larger is damage."""
_ENTRY: Final = ENTRY.dtype()
_CHUNK: Final = 1 << 20
"""Entries that are read at once."""
_LEAST_APART: Final = 2
"""Fewest messages far after the log's files that count: one entry may be damaged."""


class Span(Protocol):
    """A stretch of the log."""

    @property
    def offset(self) -> int:
        """Physical offset."""

    @property
    def length(self) -> int:
        """Bytes."""


def last_indexed(layout: StoreLayout, least: int) -> QueueEntry | None:
    """The last message in the index, as an entry of a queue would name it.

    Usually this reads one header: the entries are read only if the message starts at or after
    ``least``. A header that differs from its entries counts as damaged.

    Args:
        layout: the store's files.
        least: physical offset up to which other files show messages.

    Returns:
        The entry; None if the index names no message from ``least`` on.
    """
    try:
        file = next((one for one in reversed(_files(layout)) if not one.is_empty), None)
        if file is None or not _is_possible(file.header) or file.header.end_offset < least:
            return None
        places = next(_places(file, from_end=True), None)
    except StoreNotFound:
        # No permission: a reader of the log does without the index.
        return None
    if places is None or not len(places) or (np.diff(places) < 0).any():
        return None
    last, log = int(places[-1]), layout.commit_log
    if last != file.header.end_offset:
        return None
    is_far = last >= log.end + log.file_size
    if is_far and len(np.unique(places[places >= log.end])) < _LEAST_APART:
        return None
    return QueueEntry(last, _size_at(layout, last), 0)


def indexed_frames(layout: StoreLayout, least: int, spans: Sequence[Span]) -> tuple[Int64, Int64]:
    """The messages that the index has from a physical offset on, in the order of the log.

    Args:
        layout: the store's files.
        least: the offset.
        spans: damaged parts of the log, in order; a message inside such a part ends with it.

    Returns:
        The physical offset of each message, and its bytes, estimated by the next message.
    """
    places, size = _all_places(layout, least), layout.commit_log.file_size
    after = np.append(places[1:], places[-1:] + FIXED_SIZE_V1)
    if size:
        after = np.minimum(after, places - places % size + size)
    if spans and len(places):
        starts = np.array([span.offset for span in spans], np.int64)
        ends = np.array([span.offset + span.length for span in spans], np.int64)
        number = np.maximum(np.searchsorted(starts, places, side="right") - 1, 0)
        inside = (places >= starts[number]) & (places < ends[number])
        after = np.where(inside, np.minimum(after, ends[number]), after)
    return places, np.clip(after - places, FIXED_SIZE_V1, LARGEST_MESSAGE)


def _all_places(layout: StoreLayout, least: int) -> Int64:
    found = [np.empty(0, np.int64)]
    for file in _files(layout):
        header = file.header
        if file.is_empty or not _is_possible(header) or header.end_offset < least:
            continue
        for places in _places(file):
            is_own = (places >= header.begin_offset) & (places <= header.end_offset)
            found.append(places[is_own & (places >= least)])
    return np.unique(np.concatenate(found))


def _files(layout: StoreLayout) -> list[IndexFile]:
    files = OpenFiles(layout)
    return [IndexFile(f"{INDEX}/{entry.name}", layout, files) for entry in layout.index_files]


def _is_possible(header: IndexHeader) -> bool:
    return header.entry_count > 1 and 0 <= header.begin_offset <= header.end_offset


def _places(file: IndexFile, *, from_end: bool = False) -> Iterator[Int64]:
    """The physical offsets of a file's entries, some at a time; none if its shape is unknown."""
    shape, count = file.shape, file.header.entry_count - 1
    if shape is None:
        return
    starts = range(1, count + 1, _CHUNK)
    for start in reversed(starts) if from_end else starts:
        wanted = min(_CHUNK, count + 1 - start)
        data = file.read(shape.entry_position(start), wanted * ENTRY.size)
        entries = np.frombuffer(data, _ENTRY, len(data) // ENTRY.size)
        if len(entries) < wanted and from_end:
            return
        yield entries["physical_offset"].astype(np.int64)


def _size_at(layout: StoreLayout, offset: int) -> int:
    """Bytes of the frame at an offset; those of the smallest frame if there is none."""
    first = next(LogReader(layout, check_crc=False).chain(offset), None)
    return int(first.rows[0, SIZE]) if isinstance(first, Run) else FIXED_SIZE_V1
