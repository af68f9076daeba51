"""Imports exported messages.

The source is Parquet, or the JSON Lines that the commands ``messages`` and ``export`` write.

Messages cannot be removed from a log. Therefore, if an import failed in the middle and a user
repeated it, the store would contain the first messages twice. To prevent failures, the import
checks the whole source before the first put. After the check, only Ctrl-C, a full or failing disk,
or a change of the source ends the import early. The import then ends between two messages, and
reports the number of imported messages.
"""

from __future__ import annotations

import binascii
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np
import pyarrow as pa

from logquarry import text
from logquarry.arguments import Progress
from logquarry.disk.disk import Disk
from logquarry.disk.folders import StoreLock
from logquarry.errors import BadRow, LogquarryError, MessageRejected, SourceNotReadable, UsageError
from logquarry.format import properties as props
from logquarry.ingest.rows import WORDS, Rows, Source, SourceFile, as_stored, read_parquet
from logquarry.log import store_files
from logquarry.log.location import local_folder
from logquarry.paths import is_folder
from logquarry.store.message_store import StoreWriter
from logquarry.stored_message import JSON_NAMES
from logquarry.write.message_rules import utf8
from logquarry.write.outgoing_arrow import store_times_of
from logquarry.write.put_many import PutManyResult

LINES_BYTES: Final = 8 << 20
"""Approximate maximum of the bytes that are read at once; a single line can be longer."""

_MADE_FOLDERS: Final = (
    store_files.CONSUME_QUEUE,
    store_files.INDEX,
    store_files.CONFIG,
    store_files.TRANSACTION,
    store_files.SIDECAR,
)
"""The folders that a writer creates in a new store, besides the log's folder."""
_BASE64: Final = "properties_base64"
_KNOWN: Final = frozenset((*JSON_NAMES, _BASE64))
_KINDS: Final = {
    "topic": pa.string(),
    "queue_id": pa.int32(),
    "queue_offset": pa.int64(),
    "store_timestamp": pa.int64(),
    "born_timestamp": pa.int64(),
    "born_host": pa.string(),
    "store_host": pa.string(),
    "sys_flag": pa.int32(),
    "flag": pa.int32(),
    "body_crc": pa.int64(),
    "reconsume_times": pa.int32(),
    "prepared_transaction_offset": pa.int64(),
}
_TEXT: Final = frozenset({"topic", "born_host", "store_host"})
_NONE: Final = type(None)

Document = dict[str, Any]


def read_lines(file: SourceFile) -> Iterator[Rows]:
    """Yield the messages of a file of JSON Lines in batches; empty lines are skipped."""
    try:
        with open(file.path, "rb") as source:  # noqa: PTH123
            first = 1
            while lines := source.readlines(LINES_BYTES):
                numbers, documents = _documents(file.path, first, lines)
                first += len(lines)
                if documents:
                    yield _rows(file.path, numbers, documents, source.tell())
    except OSError as error:
        # The OSError does not contain the name of the file if a read fails.
        raise SourceNotReadable(f"{file.path}: {error.strerror}") from error


def _documents(path: str, first: int, lines: list[bytes]) -> tuple[list[int], list[Document]]:
    numbers: list[int] = []
    documents: list[Document] = []
    for number, line in enumerate(lines, first):
        if not line.strip():
            continue
        try:
            document = json.loads(line.decode())
        except (ValueError, RecursionError) as error:
            raise BadRow(path, "line", number, f"is not JSON: {error}") from error
        if not isinstance(document, dict):
            reason = f"is {_shown(document)}, but must be a JSON object"
            raise BadRow(path, "line", number, reason)
        numbers.append(number)
        documents.append(document)
    return numbers, documents


def _rows(path: str, numbers: list[int], documents: list[Document], done: int) -> Rows:
    unbatched = Rows(pa.record_batch({}), path, "line", numbers, done)
    names = set(chain.from_iterable(set(map(tuple, documents))))
    for name in names - _KNOWN:
        index = next(i for i, document in enumerate(documents) if name in document)
        raise unbatched.bad(index, f"an export has no column {name!r}")
    columns = {
        name: _column(unbatched, name, [document.get(name) for document in documents])
        for name in _KINDS
        if name in names or name == "topic"
    }
    columns["body"] = _bodies(unbatched, documents)
    columns["properties_string"] = _strings(unbatched, documents)
    return Rows(pa.record_batch(columns), path, "line", numbers, done)


def _column(rows: Rows, name: str, values: list[Any]) -> pa.Array:
    wanted = str if name in _TEXT else int
    if not set(map(type, values)) <= {wanted, _NONE}:
        index = _first_bad(values, lambda value: type(value) not in (wanted, _NONE))
        what = "text" if wanted is str else "a whole number"
        raise rows.bad(index, f"{name} is {_shown(values[index])}, but must be {what}")
    try:
        return pa.array(values, _KINDS[name])
    except (pa.ArrowInvalid, OverflowError, UnicodeEncodeError) as error:
        index = _first_bad(values, lambda value: not _fits(value, _KINDS[name]))
        raise rows.bad(index, f"{name} is {_shown(values[index])}: {error}") from error


def _first_bad(values: list[Any], is_bad: Callable[[Any], bool]) -> int:
    return next(number for number, value in enumerate(values) if is_bad(value))


def _fits(value: Any, kind: pa.DataType) -> bool:
    try:
        pa.array([value], kind)
    except (pa.ArrowInvalid, OverflowError, UnicodeEncodeError):
        return False
    return True


def _bodies(rows: Rows, documents: list[Document]) -> pa.Array:
    bodies: list[bytes | None] = []
    for index, document in enumerate(documents):
        text = document.get("body")
        bodies.append(None if text is None else _decoded(rows, index, "body", text))
    return pa.array(bodies, pa.large_binary())


def _decoded(rows: Rows, index: int, name: str, text: Any) -> bytes:
    if not isinstance(text, str):
        raise rows.bad(index, f"{name} is {_shown(text)}, but must be base64")
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError as error:
        raise rows.bad(index, f"{name} is not base64: {error}") from error


def _strings(rows: Rows, documents: list[Document]) -> pa.Array:
    # Read the properties from the first member that the row has: properties_base64,
    # properties_string or properties.
    strings: list[bytes] = []
    for index, document in enumerate(documents):
        if (data := document.get(_BASE64)) is not None:
            strings.append(_decoded(rows, index, _BASE64, data))
        elif (text := document.get("properties_string")) is None:
            strings.append(_made(rows, index, document))
        elif isinstance(text, str):
            strings.append(utf8(text))
        else:
            reason = f"properties_string is {_shown(text)}, but must be text"
            raise rows.bad(index, reason)
    return pa.array(strings, pa.binary())


def _made(rows: Rows, index: int, document: Document) -> bytes:
    given = document.get("properties")
    found = {} if given is None else given
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise rows.bad(index, f"properties is {_shown(found)}, but must be an object of texts")
    found = dict(found)
    for name, word in WORDS.items():
        value = document.get(name)
        if value is not None:
            if not isinstance(value, str):
                raise rows.bad(index, f"{name} is {_shown(value)}, but must be text")
            found[word] = value
    return utf8(props.encode(found))


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


Checked = list[Rows]
"""All rows of a source after the check, in the form that ``put_stored`` expects."""

MOST_KEPT: Final = 256 << 20
"""Maximum bytes of checked rows in memory. The import reads a larger source twice."""


@dataclass(slots=True)
class Imported:
    """Counts of an import; they grow while the import runs.

    Attributes:
        bytes: bytes of the imported frames.
        topics: (messages, bytes) by topic.
        raised_times: number of messages that got a later store time than in the source, because
            store times must not decrease in a log. The import counts these messages only if it
            keeps store times.
        is_complete: whether all messages were put into the store.
        is_synced: whether all messages that were put are on the disk; the caller sets it.
    """

    messages: int = 0
    bytes: int = 0
    topics: dict[str, tuple[int, int]] = field(default_factory=dict)
    first_offset: int | None = None
    end_offset: int | None = None
    raised_times: int = 0
    is_complete: bool = False
    is_synced: bool = False

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


@contextmanager
def only_with_messages(path: str) -> Iterator[None]:
    """Context manager: if the block raises an exception, remove the store that the block has
    created. The store stays if it contains a message, or if the folder had files before the block.
    If an empty store stayed, an operator could think that the import had succeeded.
    """
    root = local_folder(path)
    # Do not call Path.exists: since Python 3.14, it also returns False if the disk fails.
    was_there, was_empty = True, False
    try:
        was_empty = not os.listdir(root)  # noqa: PTH208
    except FileNotFoundError:
        was_there, was_empty = False, True
    except OSError:
        pass  # The opening of the store reports the error.
    try:
        yield
    except BaseException:
        if was_empty and is_folder(root):
            # If the removal fails, report only the error of the import.
            with suppress(OSError, LogquarryError):
                _remove_empty(root, keeps_folder=was_there)
        raise


def _remove_empty(root: Path, *, keeps_folder: bool) -> None:
    lock = StoreLock(Disk(), root)
    try:
        # While the lock is held, no other program can put a message. If the folder has a file, the
        # system refuses the removal. Path.glob would find no file if the disk fails (Python 3.13).
        with suppress(FileNotFoundError):
            (root / store_files.COMMIT_LOG).rmdir()
        for name in _MADE_FOLDERS:
            shutil.rmtree(root / name, ignore_errors=True)
        for name in (store_files.CHECKPOINT, store_files.ABORT, store_files.LOCK):
            (root / name).unlink(missing_ok=True)
    finally:
        lock.release()
    if not keeps_folder:
        root.rmdir()


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
        skip: number of messages to skip at the start of the source.
        progress: called with (bytes done, bytes in total).
        pause: called at safe points; raise to cancel.

    Raises:
        StoreUnavailable: if the store rejects puts, for example because the disk is full.
        BadRow: if a row is not a valid message because the source has changed since the check.
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
    is_given = batch["store_timestamp"].is_valid().to_numpy(zero_copy_only=False)
    return int(np.count_nonzero((result.store_timestamp > store_times_of(batch)) & is_given))


def _raise_as_row(rows: Rows, error: MessageRejected | UsageError) -> NoReturn:
    # The caught error names the message's position in the batch. Raise BadRow instead, which names
    # the row in the file.
    match = re.fullmatch(r"message (\d+): (.*)", str(error), re.DOTALL)
    if match is None:
        raise SourceNotReadable(f"{rows.path}: {error}") from error
    raise rows.bad(int(match[1]), match[2]) from error
