"""Whichever call of the disk fails: what was acknowledged is there, and nothing else goes wrong."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.errors import StoreError
from logquarry.files.layout import COMMIT_LOG, CONSUME_QUEUE
from logquarry.store.writable_store import WritableStore
from logquarry.verify import verify_store
from tests.faulty_disk import EIO, ENOSPC, FaultyDisk

CONFIG = lq.StoreConfig(
    mapped_file_size_commit_log=2_048,
    mapped_file_size_consume_queue=100,
    max_hash_slot_num=5,
    max_index_num=8,
    flush_disk_type="SYNC_FLUSH",
)


class FailingDisk(FaultyDisk):
    """Fails its nth call, or that one and all behind it."""

    def __init__(self, fails_at: int, error: int, *, for_ever: bool) -> None:
        super().__init__()
        self._fails_at = fails_at
        self._error = error
        self._for_ever = for_ever
        self.calls = 0

    def _called(self, name: str) -> None:
        self.calls += 1
        if self.calls == self._fails_at or (self._for_ever and self.calls > self._fails_at):
            raise OSError(self._error, os.strerror(self._error))


def workload(root: Path, disk: FaultyDisk) -> list[tuple[int, bytes]]:
    """Open, put and close: the messages that were acknowledged."""
    acked: list[tuple[int, bytes]] = []
    try:
        store = WritableStore.start(root, config=CONFIG, disk=disk)
    except StoreError:
        return acked
    try:
        for number in range(30):
            body = b"%d" % number + bytes(number)
            try:
                result = store.put(lq.Message("t", body, queue_id=number % 2, keys=f"k{number}"))
            except StoreError:
                continue
            acked.append((result.physical_offset, body))
        try:
            store.wait_dispatched(timeout=5)
            assert len(store.get("t", 0).messages) <= 15
        except StoreError:
            pass
    finally:
        store.close()
    return acked


def check(root: Path, acked: list[tuple[int, bytes]]) -> None:
    if (root / COMMIT_LOG).is_dir() or (root / CONSUME_QUEUE).is_dir():
        with lq.MessageStore.open(root, config=CONFIG) as reader:
            found = {(m.physical_offset, m.body) for m in reader.scan()}
            assert found.issuperset(acked)
    elif root.exists():
        assert not acked
    with WritableStore.start(root, config=CONFIG) as store:
        assert {(m.physical_offset, m.body) for m in store.scan()}.issuperset(acked)
        queued = sum(store.queue_offsets("t", queue_id).max for queue_id in (0, 1))
        assert queued == len(list(store.scan())) >= len(acked)
        store.put(lq.Message("t", b"one more", keys="k"))
    with lq.MessageStore.open(root, config=CONFIG) as reader:
        report = verify_store(reader.layout)
        assert not report.has_damage, report.findings


def calls_of_the_workload(root: Path) -> int:
    disk = FailingDisk(-1, EIO, for_ever=False)
    acked = workload(root, disk)
    assert len(acked) == 30
    check(root, acked)
    return disk.calls


def try_each(tmp_path: Path, step: int, start: int) -> None:
    count = calls_of_the_workload(tmp_path / "whole")
    assert count > 100
    for fails_at in range(1 + start % step, count + 1, step):
        for error in (EIO, ENOSPC):
            for for_ever in (False, True):
                root = tmp_path / f"{fails_at}-{error}-{for_ever}"
                disk = FailingDisk(fails_at, error, for_ever=for_ever)
                acked = workload(root, disk)
                try:
                    check(root, acked)
                except BaseException:
                    print(f"call {fails_at} fails with {error}, for ever: {for_ever}")
                    raise


def test_some_calls_fail(tmp_path: Path) -> None:
    try_each(tmp_path, 29, 3)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_each_call_fails(tmp_path: Path) -> None:
    try_each(tmp_path, 1, 0)
