"""Small files of many commits into larger ones."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from logquarry.errors import StoreNotFound, StoreUnavailable
from logquarry.spark.lakehouse.delta import Delta
from logquarry.spark.output import OutputFolder


@dataclass(frozen=True, slots=True)
class Compaction:
    """What was merged.

    Attributes:
        files_before: how many files were merged.
        files_after: how many there are instead.
        bytes_before: of those.
        bytes_after: of these.
    """

    files_before: int
    files_after: int
    bytes_before: int
    bytes_after: int


def compact(
    dest: str | os.PathLike[str],
    *,
    target_size: int | None = None,
    table_storage_options: Mapping[str, str] | None = None,
) -> Compaction:
    """Merge the small files of a Delta table of ours, in one commit that changes no rows.

    An export may follow into the table meanwhile. Old files stay for older versions of the table.

    Args:
        dest: the table's folder.
        target_size: bytes of a file, about; files of that size stay as they are. None for what the
            table's settings say.
        table_storage_options: what `deltalake` takes to reach a URL.

    Raises:
        StoreNotFound: if there is no Delta table.
        UsageError: if no export of ours made it, or a package is missing.
        StoreUnavailable: if somebody else has compacted it meanwhile.
    """
    delta = Delta(OutputFolder(dest), table_storage_options)
    if delta.look() is None:
        raise StoreNotFound(f"{delta.name}: no Delta table is there")
    from deltalake.exceptions import CommitFailedError

    try:
        told = delta.compact(target_size)
    except CommitFailedError as error:
        raise StoreUnavailable(f"{delta.name}: changed meanwhile: {error}") from error
    return Compaction(
        files_before=int(told["numFilesRemoved"]),
        files_after=int(told["numFilesAdded"]),
        bytes_before=_total(told["filesRemoved"]),
        bytes_after=_total(told["filesAdded"]),
    )


def _total(sizes: Any) -> int:
    # A document within a document, in some versions.
    found = json.loads(sizes) if isinstance(sizes, str) else sizes
    return int(found["totalSize"])
