"""Reading of files to import."""

from __future__ import annotations

import pytest

from logquarry.errors import SourceNotReadable
from logquarry.ingest.importing import read_lines
from logquarry.ingest.rows import SourceFile


def test_a_failed_read_names_the_file() -> None:
    """The start of a process's memory cannot be read, although the file can be opened."""
    path = "/proc/self/mem"
    with pytest.raises(SourceNotReadable, match=f"{path}: Input/output error"):
        list(read_lines(SourceFile(path, is_parquet=False, size=0)))
