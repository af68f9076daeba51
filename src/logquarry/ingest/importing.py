"""Imports exported messages: checks all rows, then puts the rows.

The log cannot remove messages, so a repeated import duplicates the messages of a failed import. To
prevent this, the import checks the whole source before the first put. Afterwards only a full disk
or Ctrl-C can end the import. The import then ends between two messages, and reports their number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final, NoReturn

import numpy as np

from logquarry import text
from logquarry.errors import LogquarryError, MessageRejected, SourceNotReadable, UsageError
from logquarry.ingest.readers import read_lines, read_parquet
from logquarry.ingest.rows import Rows, Source, as_stored
from logquarry.store.message_store import StoreWriter
from logquarry.units import Progress
from logquarry.write.outgoing_arrow import store_times_of
from logquarry.write.put_many import PutManyResult

Checked = list[Rows]
"""All rows of a source, in the form that ``put_stored`` expects."""

MOST_KEPT: Final = 256 << 20
"""Maximum bytes of checked rows in memory. The import reads a larger source twice."""


@dataclass(slots=True)
class Imported:
    """Counts of an import so far.

    Attributes:
        bytes: bytes of the imported frames.
        topics: (messages, bytes) by topic.
        raised_times: number of messages whose store time was raised, if store times are kept.
        is_complete: whether all messages are in the store.
    """

    messages: int = 0
    bytes: int = 0
    topics: dict[str, tuple[int, int]] = field(default_factory=dict)
    first_offset: int | None = None
    end_offset: int | None = None
    raised_times: int = 0
    is_complete: bool = False

    def add(self, result: PutManyResult) -> None:
        """Add the result of a put to the counts."""
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
    """Yield all rows of a source, in order."""
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
    """Read the whole source, and check that the store accepts all rows.

    Args:
        progress: called with (bytes read, bytes in total).
        pause: called at safe points; raise to cancel.

    Returns:
        The rows; None if the rows take more than MOST_KEPT bytes.
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
    skip: int = 0,
    progress: Progress | None = None,
    pause: Callable[[], None] = lambda: None,
) -> None:
    """Put the messages of a source into a store, in order.

    Args:
        imported: receives the counts, even if an exception ends the import.
        checked: the result of :func:`check_source`; None to read the source again.
        keep_times: whether messages keep their store times; see :meth:`ManyWriter.put_stored`.
        skip: number of messages at the start of the source to skip.
        progress: called with (bytes done, bytes in total).
        pause: called at safe points; raise to cancel.

    Raises:
        StoreUnavailable: if the store rejects puts, for example because the disk is full.
        BadRow: if the source has changed since the check.
        SourceNotReadable: if a file cannot be read.
        UsageError: if the source has fewer than ``skip`` messages.
    """
    found = _stored(read_source(source, progress)) if checked is None else iter(checked)
    for number, rows in enumerate(_after(source, found, skip), 1):
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


def _after(source: Source, found: Iterator[Rows], skip: int) -> Iterator[Rows]:
    left = skip
    for rows in found:
        skipped = min(left, rows.batch.num_rows)
        left -= skipped
        if skipped < rows.batch.num_rows:
            yield rows.after(skipped)
    if left:
        raise UsageError(f"skip: {source.location} has only {text.plural(skip - left, 'message')}")


def _later(batch: Any, result: PutManyResult) -> int:
    if "store_timestamp" not in batch.schema.names:
        return 0
    return int(np.count_nonzero(result.store_timestamp > store_times_of(batch)))


def _raise_as_row(rows: Rows, error: MessageRejected | UsageError) -> NoReturn:
    # The error names the position of the message in the batch; BadRow names the row in the file.
    match = re.fullmatch(r"message (\d+): (.*)", str(error), re.DOTALL)
    if match is None:
        raise SourceNotReadable(f"{rows.path}: {error}") from error
    raise rows.bad(int(match[1]), match[2]) from error
