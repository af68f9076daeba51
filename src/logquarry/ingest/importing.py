"""The import: all rows are checked, and then put.

An import that fails on the way leaves half of it in a log from which nothing can be taken back,
and one that is tried again doubles it. So all of the source is read and checked first. What can
still end it then (a full disk, Ctrl-C) ends it between two messages, and it is known how many are
in.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final, NoReturn

import numpy as np

from logquarry.errors import LogquarryError, MessageRejected, SourceNotReadable, UsageError
from logquarry.ingest.json_lines import read_lines
from logquarry.ingest.parquet import read_parquet
from logquarry.ingest.rows import Rows, Source, as_stored
from logquarry.store.message_store import StoreWriter
from logquarry.units import Progress
from logquarry.write.put_many import PutManyResult

Checked = list[Rows]
"""All rows of a source, as ``put_stored`` takes them."""

MOST_KEPT: Final = 256 << 20
"""Bytes of rows that are kept from the check to the put; more are read once more."""


@dataclass(slots=True)
class Imported:
    """What an import has put so far.

    Attributes:
        messages: how many.
        bytes: of their frames.
        topics: messages and bytes by topic.
        first_offset: physical offset of the first one; None without one.
        end_offset: behind the last one.
        raised_times: with kept times, how many are later than they were.
        is_complete: whether that is all of them.
    """

    messages: int = 0
    bytes: int = 0
    topics: dict[str, tuple[int, int]] = field(default_factory=dict)
    first_offset: int | None = None
    end_offset: int | None = None
    raised_times: int = 0
    is_complete: bool = False

    def add(self, result: PutManyResult) -> None:
        """Take in what was put."""
        if not result.message_count:
            return
        self.messages += result.message_count
        self.bytes += int(result.size.sum())
        if self.first_offset is None:
            self.first_offset = int(result.physical_offset[0])
        self.end_offset = result.end_offset
        for topic, (count, size) in result.topics.items():
            before = self.topics.get(topic, (0, 0))
            self.topics[topic] = before[0] + count, before[1] + size


def read_source(source: Source, progress: Progress | None = None) -> Iterator[Rows]:
    """All rows of a source, in order.

    Raises:
        BadRow, SourceNotReadable: as :func:`read_lines` and :func:`read_parquet`.
    """
    before = 0
    for file in source.files:
        read = read_parquet if file.is_parquet else read_lines
        try:
            for rows in read(file):
                yield rows
                if progress is not None:
                    progress(min(before + rows.done, source.size), source.size)
        except OSError as error:
            raise SourceNotReadable(f"{file.path}: {error.strerror}") from error
        before += file.size


def check_source(
    store: StoreWriter,
    source: Source,
    *,
    progress: Progress | None = None,
    pause: Callable[[], None] = lambda: None,
) -> Checked | None:
    """Read all of a source, and refuse what the store would refuse.

    Args:
        store: where they are to go.
        source: the messages.
        progress: told how many bytes are read, of how many.
        pause: called where the work may be ended: by what it raises.

    Returns:
        The rows, so that they need not be read once more; None where they are too many.

    Raises:
        BadRow, SourceNotReadable: at the first row that cannot be imported.
    """
    kept: Checked | None = []
    size = 0
    for rows in _stored(read_source(source, progress)):
        pause()
        try:
            store.check_stored(rows.batch)
        except (MessageRejected, UsageError) as error:
            _raise_as_row(rows, error)
        size += rows.batch.nbytes
        if kept is not None:
            kept.append(rows)
        if size > MOST_KEPT:
            kept = None
    return kept


def import_source(
    store: StoreWriter,
    source: Source,
    imported: Imported,
    *,
    checked: Checked | None = None,
    keep_times: bool = False,
    progress: Progress | None = None,
    pause: Callable[[], None] = lambda: None,
) -> None:
    """Put all messages of a source into a store, in order.

    Args:
        store: where they go.
        source: the messages.
        imported: is told of what is in, also where an exception ends it.
        checked: the rows, where :func:`check_source` has kept them.
        keep_times: whether they keep their store times; see :meth:`ManyWriter.put_stored`.
        progress: told how many bytes are done, of how many.
        pause: called where the work may be ended: by what it raises.

    Raises:
        StoreUnavailable: if the store takes no more.
        BadRow, SourceNotReadable: as :func:`check_source`, if the source is another one by now.
    """
    found = _stored(read_source(source, progress)) if checked is None else iter(checked)
    for number, rows in enumerate(found, 1):
        pause()
        try:
            result = store.put_stored(rows.batch, keep_times=keep_times)
        except LogquarryError as error:
            appended = getattr(error, "appended", None)
            if appended is not None:
                imported.add(appended)
            if isinstance(error, MessageRejected | UsageError):
                _raise_as_row(rows, error)
            raise
        imported.add(result)
        if keep_times:
            imported.raised_times += _later(rows.batch, result)
        if progress is not None and checked is not None:
            progress(source.size * number // len(checked), source.size)
    imported.is_complete = True


def _stored(found: Iterator[Rows]) -> Iterator[Rows]:
    return (replace(rows, batch=as_stored(rows)) for rows in found)


def _later(batch: Any, result: PutManyResult) -> int:
    """How many messages have a later store time than they had."""
    from logquarry.write.outgoing_arrow import store_times_of

    if "store_timestamp" not in batch.schema.names:
        return 0
    return int(np.count_nonzero(result.store_timestamp > store_times_of(batch)))


def _raise_as_row(rows: Rows, error: MessageRejected | UsageError) -> NoReturn:
    """The same said of the row."""
    match = re.fullmatch(r"message (\d+): (.*)", str(error), re.DOTALL)
    if match is None:
        raise SourceNotReadable(f"{rows.path}: {error}") from error
    raise rows.bad(int(match[1]), match[2]) from error
