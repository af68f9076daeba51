"""A recovery of queues in RocksDB that ends at any of its renames and deletions."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.log.layout import StoreLayout
from logquarry.log.rocksdb import RocksDb
from logquarry.read.rocksdb_queue import rocksdb_folders
from logquarry.repair.verify.verify import verify_store
from tests.conformance.rocketmq5 import unpack_rocksdb
from tests.helpers.failing_disk import StoppedDisk

Records = dict[bytes, bytes]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    pytest.importorskip("rocksdict")
    return unpack_rocksdb(tmp_path_factory.mktemp("rocksdb"))


def _records(root: Path) -> tuple[tuple[str, ...], Records, Records]:
    layout = StoreLayout.open(root)
    folders = rocksdb_folders(layout)
    database = RocksDb(layout.filesystem, folders[0])
    return folders, dict(database.items("default")), dict(database.items("offset"))


@pytest.mark.parametrize("name", ["5.5.0-kill-rocksdb", "5.5.0-rocksdb-separate"])
def test_the_next_recovery_comes_to_the_same(
    name: str, stores: dict[str, Path], tmp_path: Path
) -> None:
    source = Path(shutil.copytree(stores[name] / "store", tmp_path / "store"))
    (source / "abort").touch()
    for path in (source / "consumequeue_rocksdb").glob("*.sst"):
        # All tables are lost.
        path.unlink()
    whole = StoppedDisk()
    shutil.copytree(source, tmp_path / "whole")
    lq.recover(tmp_path / "whole", apply=True, disk=whole)
    expected = _records(tmp_path / "whole")
    assert expected[1] and not verify_store(StoreLayout.open(tmp_path / "whole")).by_kind
    calls = [n for n, call in enumerate(whole.order) if call in ("rename", "unlink")]
    assert len(calls) > 10
    for number in calls:
        copy = Path(shutil.copytree(source, tmp_path / "copy"))
        with pytest.raises(KeyboardInterrupt):
            lq.recover(copy, apply=True, disk=StoppedDisk(number))
        lq.recover(copy, apply=True)
        assert _records(copy) == expected, f"call {number}, {whole.order[number]}"
        assert not verify_store(StoreLayout.open(copy)).by_kind
        shutil.rmtree(copy)
