"""Readers and writers agree about a queue all of whose messages have expired."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import logquarry as lq

CONFIG = lq.StoreConfig(
    mapped_file_size_commit_log=1 << 14, mapped_file_size_consume_queue=200 * 20
)


@pytest.mark.parametrize("is_5", [False, True])
def test_the_bounds_of_an_expired_queue(tmp_path: Path, *, is_5: bool) -> None:
    root = tmp_path / "store"
    with lq.MessageStore.open(root, mode="rw", config=CONFIG) as store:
        for _ in range(5):
            store.put(lq.Message("orders", b"x" * 100, queue_id=0))
        for _ in range(200):
            store.put(lq.Message("orders", b"x" * 200, queue_id=1))
    log = sorted((root / "commitlog").iterdir())
    log[0].unlink()
    shutil.rmtree(root / ".logquarry")
    if is_5:
        # Every broker since version 5.4.0 makes this folder.
        (root / "rocksdbstore").mkdir()
    expected = (5, 5) if is_5 else (0, 5)
    for mode in ("r", "rw"):
        with lq.MessageStore.open(root, mode=mode, config=CONFIG) as store:
            bounds = store.queue_offsets("orders", 0)
            assert tuple(bounds) == expected, mode
            got = store.get("orders", 0, offset=2)
            assert not got.messages
            assert got.next_offset == 5
