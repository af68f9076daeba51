"""Which index files of a store can stay, and from where on the index has to be built.

An index file is derived from the log, and costs little to make. So one that may be torn is not
repaired: after a crash only files that the checkpoint says are on the disk stay, as in RocketMQ,
which destroys all others (and then indexes again only a part of what they held, #8007).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from logquarry.files.layout import INDEX, StoreLayout
from logquarry.format import index
from logquarry.format.frame import Frame
from logquarry.format.index import ENTRY, HEADER, IndexHeader, IndexShape
from logquarry.store.read.commit_log import CommitLog

_ENTRY_DTYPE = ENTRY.dtype()


@dataclass(frozen=True, slots=True)
class IndexPlan:
    """What is to be done to the index.

    Attributes:
        set_aside: names of the files that go, with the reason for each.
        built_from: messages from this physical offset on have to be put in,
        keys_there: but for so many first keys of the message there.
        kept_timestamp: store time of the last key that stays, 0 if none does.
    """

    set_aside: tuple[tuple[str, str], ...]
    built_from: int
    keys_there: int = 0
    kept_timestamp: int = 0


def plan_index(
    layout: StoreLayout,
    shape: IndexShape,
    *,
    log_start: int,
    log_end: int,
    is_closed: bool,
    synced_timestamp: int,
) -> IndexPlan:
    """What is to be done to the index of a store.

    Args:
        layout: the store's files.
        shape: slots and entries of each file.
        log_start: physical offset of the log's first byte.
        log_end: where the log ends.
        is_closed: whether the store was closed in order.
        synced_timestamp: the checkpoint's time of the index.
    """
    aside: list[tuple[str, str]] = []
    last: IndexHeader | None = None
    keys_there = 0
    log = CommitLog(layout)
    for entry in layout.index_files:
        data = layout.open_file(f"{INDEX}/{entry.name}").window(0, entry.size)
        fault = "a file before it goes" if aside else _fault(data, entry.size, shape, log_end)
        if fault is None:
            header = index.decode_header(data)
            if not is_closed and (
                header.entry_count < shape.entries or header.end_timestamp > synced_timestamp
            ):
                fault = "the checkpoint does not say that all of it was on the disk"
            else:
                fault = _misfit(log, log_start, header, last)
            if fault is None:
                last = header
                keys_there = _keys_of_last(data, shape, header)
        if fault is not None:
            aside.append((entry.name, fault))
    if last is not None and last.entry_count > 1:
        return IndexPlan(tuple(aside), last.end_offset, keys_there, last.end_timestamp)
    return IndexPlan(tuple(aside), log_start)


def index_fault(layout: StoreLayout, shape: IndexShape, *, log_end: int) -> str | None:
    """What is wrong with an index, as the headers of its files tell; None if nothing is.

    Args:
        layout: the store's files.
        shape: slots and entries of each.
        log_end: where the log ends.
    """
    log = CommitLog(layout)
    last: IndexHeader | None = None
    for entry in layout.index_files:
        path = f"{INDEX}/{entry.name}"
        data = layout.open_file(path).window(0, min(entry.size, HEADER.size))
        fault = _header_fault(data, entry.size, shape, log_end)
        if fault is None:
            header = index.decode_header(data)
            fault = _misfit(log, layout.commit_log.start, header, last)
            last = header
        if fault is not None:
            return f"{layout.filesystem.full_path(path)}: {fault}"
    return None


def _misfit(
    log: CommitLog, log_start: int, header: IndexHeader, before: IndexHeader | None
) -> str | None:
    """Why a file is none of this log, or does not follow the one before it; None if it does."""
    if header.entry_count > 1 and not _is_of(log, log_start, header):
        return f"its last key is of no message that stands at {header.end_offset}"
    if before is not None and header.end_offset < before.end_offset:
        return "it ends before the one before it"
    return None


def _keys_of_last(data: memoryview, shape: IndexShape, header: IndexHeader) -> int:
    """How many entries at a file's end are of its last message: others may be in the next."""
    number = header.entry_count
    while number > 1:
        entry = index.decode_entry(data, shape.entry_position(number - 1))
        if entry.physical_offset != header.end_offset:
            break
        number -= 1
    return header.entry_count - number


def _is_of(log: CommitLog, log_start: int, header: IndexHeader) -> bool:
    """Whether the log has the message of a file's last key, as far as it goes back.

    An index of another store points into the midst of messages, where none can be read from.
    """
    if header.end_offset < log_start:
        return True
    outcome = log.outcome_at(header.end_offset, check_crc=False)
    return isinstance(outcome, Frame) and outcome.store_timestamp == header.end_timestamp


def _header_fault(data: memoryview, size: int, shape: IndexShape, log_end: int) -> str | None:
    """What is wrong with a file, as its size and its header tell."""
    if size != shape.file_size:
        return f"it has {size} bytes, and {shape.file_size} belong there"
    header = index.decode_header(data)
    if not 1 <= header.entry_count <= shape.entries:
        return f"its header counts {header.entry_count} entries of at most {shape.entries}"
    if header.entry_count > 1 and not 0 <= header.end_offset < log_end:
        return f"its last key is of a message at {header.end_offset}, and the log ends at {log_end}"
    return None


def _fault(data: memoryview, size: int, shape: IndexShape, log_end: int) -> str | None:
    """What is wrong with a file, None if it can stay."""
    fault = _header_fault(data, size, shape, log_end)
    if fault is not None:
        return fault
    header = index.decode_header(data)
    if header.entry_count == 1:
        return None
    count = header.entry_count - 1
    entries = np.frombuffer(data, _ENTRY_DTYPE, count, shape.entry_position(1))
    offsets = entries["physical_offset"].astype(np.int64)
    if (np.diff(offsets) < 0).any():
        return "its entries are not in the log's order"
    if int(offsets[0]) != header.begin_offset or int(offsets[-1]) != header.end_offset:
        return "its entries are not those that its header tells of"
    if (entries["previous"] >= np.arange(1, count + 1)).any() or (entries["previous"] < 0).any():
        return "a chain of it goes on to a later entry"
    return None
