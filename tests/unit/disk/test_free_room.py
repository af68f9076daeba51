"""Do files keep their sizes and bytes while their unwritten blocks are freed?"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.disk.disk import LocalDisk
from logquarry.disk.log_files import free_room
from logquarry.store.message_store import StoreWriter

SIZE = 4 << 20
CONFIG = lq.StoreConfig(mapped_file_size_commit_log=SIZE, max_hash_slot_num=1_000)


def blocks(path: Path) -> int:
    return path.stat().st_blocks * 512


@pytest.fixture(autouse=True)
def punching(tmp_path: Path) -> None:
    path = tmp_path / "probe"
    descriptor = LocalDisk().make_file(path, 1 << 20)
    try:
        LocalDisk().punch(descriptor, 0, 1 << 20)
        if sys.platform != "linux" or blocks(path) or LocalDisk().next_hole(descriptor, 0, 9)[0]:
            pytest.skip("this file system frees no blocks")
    except OSError:
        pytest.skip("this file system frees no blocks")
    finally:
        os.close(descriptor)


def test_only_unwritten_ranges_of_the_last_file_are_freed(tmp_path: Path) -> None:
    disk = LocalDisk()
    folder = tmp_path / "files"
    for name in ("000", "100", "notes"):
        descriptor = disk.make_file(folder / name, SIZE)
        for at in (0, SIZE // 2, SIZE - 10):
            disk.write(descriptor, b"0123456789", at)
        disk.sync(descriptor, folder / name)
        os.close(descriptor)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    free_room(disk, [folder, tmp_path / "missing"])
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert blocks(folder / "100") < SIZE // 4
    assert blocks(folder / "000") >= SIZE and blocks(folder / "notes") >= SIZE


def test_a_store_that_was_loaded_takes_the_room_of_its_messages(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with StoreWriter.start(root, config=CONFIG) as store:
        store.free_room_at_close()
        store.put(lq.Message("orders", b"x" * 100, keys="k"))
    files = [path for path in root.rglob("*") if path.name.isdigit() and path.is_file()]
    assert len(files) == 3 and sum(map(blocks, files)) < sum(path.stat().st_size for path in files)
    assert blocks(root / "commitlog" / f"{0:020d}") < SIZE // 2
    assert not lq.verify(root).findings
    with lq.MessageStore.open(root, mode="rw", config=CONFIG) as store:
        # The next writer has all blocks again: a full disk is an error when it opens.
        assert blocks(root / "commitlog" / f"{0:020d}") >= SIZE
        assert store.put(lq.Message("orders", b"y")).ok
        assert [message.body for message in store.scan()] == [b"x" * 100, b"y"]
