"""RocksDB folders that cannot be opened, and a folder with several tables."""

from __future__ import annotations

import errno
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest

import logquarry as lq
from logquarry.disk.config_file import consumer_offsets
from logquarry.errors import CorruptFile, StoreNotFound
from logquarry.log.filesystem import Entry, LocalFileSystem
from logquarry.log.layout import StoreLayout
from logquarry.log.rocksdb import RocksDb, lost_files
from logquarry.read.features import ROCKSDB_CONFIG
from logquarry.repair.salvage.salvage import salvage_store
from tests.helpers.small_store import opened
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


def test_topics_groups_and_offsets_in_one_database(tmp_path: Path) -> None:
    """A broker with ``useSingleRocksDBForAllConfigs`` has a column family for each table."""
    rocksdict = pytest.importorskip("rocksdict")
    root, new = tmp_path / "store", tmp_path / "new"
    with opened(root) as store:
        store.put(lq.Message("Orders", b"1"))
    records = {
        "topic": (b"Orders", {"topicName": "Orders", "readQueueNums": 7, "writeQueueNums": 7}),
        "topicVersion": (b"kvDataVersionKey", {"counter": 11}),
        "subscriptionGroup": (b"cg", {"groupName": "cg", "retryMaxTimes": 3}),
        "consumerOffset": (b"Orders@cg", {"offsetTable": {"0": 1}}),
    }
    options = rocksdict.Options(raw_mode=True)
    options.create_missing_column_families(True)
    families: Any = {name: rocksdict.Options(raw_mode=True) for name in records}
    path = root / "config" / "metadata"
    with rocksdict.Rdict(str(path), options, families) as database:
        for name, (key, value) in records.items():
            database.get_column_family(name)[key] = json.dumps(value).encode()
    # The broker copied the offsets into the one database, and left this folder.
    with rocksdict.Rdict(str(path.with_name("consumerOffsets")), options) as database:
        database[b"Orders@cg"] = b'{"offsetTable":{"0":0}}'
    salvage_store(StoreLayout.open(root), new)
    for folder in (root, new):
        with lq.MessageStore.open(folder) as store:
            assert (ROCKSDB_CONFIG in store.features) == (folder == root)
            assert not store.features.unknown
            assert store.layout.read_topics()["Orders"].read_queues == 7
            assert consumer_offsets(store.layout) == {("Orders", "cg"): {0: 1}}
    groups = json.loads((new / "config" / "subscriptionGroup.json").read_text("utf-8"))
    assert groups["subscriptionGroupTable"]["cg"]["retryMaxTimes"] == 3
    assert not (new / "config" / "metadata").exists()


@pytest.mark.parametrize(
    ("single", "first", "is_single"),
    [
        *((200, 100, True), (200, 200, True), (200, 300, False), (None, 300, True)),
        *((200, None, True), (200, math.inf, True)),
    ],
)
def test_a_broker_that_no_longer_uses_the_single_database(
    tmp_path: Path, single: int | None, first: float | None, *, is_single: bool
) -> None:
    """The versions show which of the databases a broker changed last."""
    rocksdict = pytest.importorskip("rocksdict")
    with opened(tmp_path) as store:
        store.put(lq.Message("Orders", b"1"))
    options = rocksdict.Options(raw_mode=True)
    options.create_missing_column_families(True)

    def write(folder: str, records: dict[str, tuple[bytes, Any]]) -> None:
        families: Any = {name: rocksdict.Options(raw_mode=True) for name in records}
        path = tmp_path / "config" / folder
        with rocksdict.Rdict(str(path), options, families) as database:
            for name, (key, value) in records.items():
                database.get_column_family(name)[key] = json.dumps(value).encode()

    def topic(queues: int) -> tuple[bytes, Any]:
        table = {"topicName": "Orders", "readQueueNums": queues, "writeQueueNums": queues}
        return b"Orders", table

    def version(time: float | None) -> tuple[bytes, Any]:
        return b"kvDataVersionKey", {"counter": 1} if time is None else {"timestamp": time}

    offsets = ({"offsetTable": {"0": offset}} for offset in (7, 8))
    group = b"Orders@cg"
    write(
        "metadata",
        {
            "topic": topic(7),
            "topicVersion": version(single),
            "consumerOffset": (group, next(offsets)),
        },
    )
    write("topics", {"default": topic(8), "kvDataVersion": version(first)})
    write("consumerOffsets", {"default": (group, next(offsets))})
    layout = StoreLayout.open(tmp_path)
    expected = 7 if is_single else 8
    assert layout.read_topics()["Orders"].read_queues == expected
    assert consumer_offsets(layout) == {("Orders", "cg"): {0: expected}}


def test_offsets_that_a_broker_did_not_copy_into_the_single_database(tmp_path: Path) -> None:
    """Until the first commit, the single database has no column family for consumer offsets."""
    rocksdict = pytest.importorskip("rocksdict")
    with opened(tmp_path) as store:
        store.put(lq.Message("Orders", b"1"))
    options = rocksdict.Options(raw_mode=True)
    options.create_missing_column_families(True)
    path = tmp_path / "config" / "metadata"
    families: Any = {"topic": rocksdict.Options(raw_mode=True)}
    with rocksdict.Rdict(str(path), options, families) as database:
        database.get_column_family("topic")[b"Orders"] = b'{"topicName": "Orders"}'
    with rocksdict.Rdict(str(path.with_name("consumerOffsets")), options) as database:
        database[b"Orders@cg"] = b'{"offsetTable":{"0":9}}'
    assert consumer_offsets(StoreLayout.open(tmp_path)) == {("Orders", "cg"): {0: 9}}
