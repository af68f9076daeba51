"""RocksDB folders that cannot be opened, although their files may be sound."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path

import pytest

from logquarry.errors import CorruptFile
from logquarry.log.filesystem import LocalFileSystem
from logquarry.log.rocksdb import RocksDb


def test_no_temporary_folder_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: str) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "db").mkdir()
    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    with pytest.raises(CorruptFile, match="No space left on device: set TMPDIR") as caught:
        RocksDb(LocalFileSystem(str(tmp_path)), "db")
    assert caught.value.path == str(tmp_path / "db")
