"""RocksDB folders that cannot be opened, although their files may be sound."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path

import pytest

from logquarry.errors import CorruptFile, StoreNotFound
from logquarry.log.filesystem import Entry, LocalFileSystem
from logquarry.log.rocksdb import RocksDb, lost_files
from tests.unit.log.test_rocksdb_manifest import manifest, new_file


def test_no_temporary_folder_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: str) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "db").mkdir()
    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    with pytest.raises(CorruptFile, match="No space left on device: set TMPDIR") as caught:
        RocksDb(LocalFileSystem(str(tmp_path)), "db")
    assert caught.value.path == str(tmp_path / "db")


def test_lost_files(tmp_path: Path) -> None:
    folder = tmp_path / "db"
    folder.mkdir()
    files = LocalFileSystem(str(tmp_path))
    assert lost_files(files, "db") is None
    (folder / "CURRENT").write_text("MANIFEST-000005\n")
    lost = lost_files(files, "db")
    assert str(lost) == "MANIFEST-000005, which CURRENT names, is missing"
    (folder / "MANIFEST-000005").write_bytes(manifest(new_file(8), new_file(9)))
    lost = lost_files(files, "db")
    assert str(lost) == "000008.sst, 000009.sst, which MANIFEST-000005 names, are missing"
    (folder / "000009.sst").touch()
    lost = lost_files(files, "db")
    assert str(lost) == "000008.sst, which MANIFEST-000005 names, is missing"
    (folder / "000008.sst").touch()
    assert lost_files(files, "db") is None
    # Such a folder is damaged, but shows no names.
    for text in (b"", b"../x", b"MANIFEST-/x", b"\xff"):
        (folder / "CURRENT").write_bytes(text)
        assert lost_files(files, "db") is None
    (folder / "CURRENT").write_text("MANIFEST-000005\n")
    (folder / "MANIFEST-000005").write_bytes(manifest(b"\x4d"))
    assert lost_files(files, "db") is None


def test_a_table_that_a_broker_makes_meanwhile_is_not_lost(tmp_path: Path) -> None:
    class Live(LocalFileSystem):
        """A broker replaces one table by another one before each list, and one after it."""

        number = 8

        def list(self, path: str) -> list[Entry]:
            self.replace()
            found = super().list(path)
            self.replace()
            return found

        def replace(self) -> None:
            (folder / f"{self.number:06d}.sst").unlink()
            self.number += 1
            (folder / f"{self.number:06d}.sst").touch()
            (folder / "MANIFEST-000005").write_bytes(manifest(new_file(self.number)))

    folder = tmp_path / "db"
    folder.mkdir()
    (folder / "CURRENT").write_text("MANIFEST-000005\n")
    (folder / "000008.sst").touch()
    (folder / "MANIFEST-000005").write_bytes(manifest(new_file(8)))
    assert lost_files(Live(str(tmp_path)), "db") is None


def test_an_unreadable_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "db"
    folder.mkdir()
    (folder / "CURRENT").write_text("MANIFEST-000005\n")
    (folder / "MANIFEST-000005").write_bytes(manifest(new_file(8)))
    files, read = LocalFileSystem(str(tmp_path)), LocalFileSystem.read

    def fail(self: LocalFileSystem, path: str) -> bytes:
        if path.endswith(name):
            raise StoreNotFound(f"{path}: cannot be read: Input/output error")
        return read(self, path)

    monkeypatch.setattr(LocalFileSystem, "read", fail)
    name = "MANIFEST-000005"
    # A salvage of the store must go on, so this is no error.
    lost = lost_files(files, "db")
    assert str(lost) == "MANIFEST-000005, which CURRENT names, is unreadable"
    name = "CURRENT"
    assert lost_files(files, "db") is None
