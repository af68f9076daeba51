"""The dead letters of a load: Parquet files with the rows that no store accepts, and the reasons.

The tasks write these files into a staging folder; the commit of the load moves them to their final
folder. The file names contain the identity of the load, so a repeated load replaces its own files.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from logquarry.disk.disk import Disk
from logquarry.errors import StoreUnavailable, UsageError
from logquarry.store.load.ledger import LoadId, remove_staged

REASON: Final = "reason"
_STAGED: Final = "_logquarry"
"""Readers of Parquet ignore a folder whose name begins with an underscore."""


class DeadLetters:
    """Stages the rejected rows of one task."""

    def __init__(self, folder: Path, load: LoadId, partition: int) -> None:
        name = f"{partition:05d}-{uuid.uuid4().hex}.parquet"
        self.path = folder / _STAGED / load.staged / name
        self.rows = 0
        self._writer: pq.ParquetWriter | None = None

    def add(self, rows: pa.RecordBatch, reasons: Sequence[str]) -> None:
        """Add rows, with a reason for each row."""
        if REASON in rows.schema.names:
            raise UsageError(
                f"a rejected row has a column {REASON!r} already: rename the column of the rows"
            )
        rows = rows.append_column(REASON, pa.array(reasons, pa.string()))
        try:
            if self._writer is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._writer = pq.ParquetWriter(self.path, rows.schema, compression="zstd")
            self._writer.write_batch(rows)
        except OSError as error:
            raise StoreUnavailable(f"{self.path}: cannot be written: {error}") from error
        self.rows += rows.num_rows

    def finish(self) -> str | None:
        """Sync the file and return its name; None if no row was rejected."""
        if self._writer is None:
            return None
        try:
            self._writer.close()
            descriptor = os.open(self.path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise StoreUnavailable(f"{self.path}: cannot be written: {error}") from error
        return self.path.name

    def discard(self) -> None:
        """Remove the staged file."""
        if self._writer is not None:
            with suppress(OSError):
                self._writer.close()
            with suppress(OSError):
                self.path.unlink()


def put_in_place(folder: Path, load: LoadId, names: Sequence[str], disk: Disk) -> None:
    """Move the staged files of a load into place; remove files of an earlier attempt."""
    prefix = f"rejected-{load.folder}-{load.version:012d}-"
    wanted = {f"{prefix}{number:05d}.parquet": name for number, name in enumerate(names)}
    for name in disk.names_in(folder):
        if name.startswith(prefix) and name not in wanted:
            disk.remove(folder / name)
    staged = folder / _STAGED / load.staged
    for to, name in wanted.items():
        with disk.refusing(staged / name):
            disk.rename(staged / name, folder / to)
    if wanted:
        disk.sync_names(folder)


def forget_staged(folder: Path, load: LoadId, names: Sequence[str] | None = None) -> None:
    """Remove the staged files of a load; see :func:`logquarry.store.load.ledger.remove_staged`."""
    remove_staged(folder / _STAGED, load, names)
    for place in (f"{_STAGED}/staged", _STAGED):
        with suppress(OSError):
            (folder / place).rmdir()
