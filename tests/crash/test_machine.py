"""Faults of the machine: a second writer, a full disk, a sync that fails in the kernel."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.errors import StoreUnavailable
from logquarry.testing.faulty_disk import FaultyDisk
from logquarry.testing.model_store import ModelStore, Seen, explain
from tests.crash.checks import check_image
from tests.crash.ladder import SEED, count, told
from tests.crash.workload import Workload, settings
from tests.crash.writer import SETTINGS, message_of
from tests.helpers.python_process import run
from tests.helpers.small_store import facts

HOUR_MS = 3_600_000


# ------------------------------------------------------------------------------- a second opener
def test_a_second_opener_is_refused_and_changes_nothing(shm: Path) -> None:
    rng = random.Random(SEED)
    # The store flushes only when it is asked to.
    slow = {"flush_interval_consume_queue": HOUR_MS, "flush_interval_commit_log": HOUR_MS}
    work = Workload(shm, rng, lq.StoreConfig(**settings(rng) | slow))
    root = shm / "store"
    code = """
        import sys
        import logquarry as lq
        try:
            lq.MessageStore.open(sys.argv[1], mode="rw")
        except lq.errors.StoreUnavailable as error:
            print(error)
        """
    with work.open(FaultyDisk(shm)) as store:
        for number in range(count(20)):
            work.run(store, 5)
            with pytest.raises(StoreUnavailable, match="has the store open for writing already"):
                lq.MessageStore.open(root, mode="rw", config=work.config)
            if number % 10 == 0:
                assert store.wait_dispatched(timeout=60)
                store.flush()
                before = facts(root)
                assert "is open in another program" in run(code, root).stdout
                assert facts(root) == before
        store.wait_dispatched()
        assert work.model.check(Seen.of(store)) == []
    with lq.MessageStore.open(root, config=work.config) as reader:
        assert (
            work.model.check(Seen.of(reader, keys=work.config.message_index_enable is not False))
            == []
        )


# ---------------------------------------------------------------------------------- a full disk
@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 400 KiB."""
    if os.geteuid() != 0:
        pytest.skip("mounts need root")
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(folder)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("no mounts here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.root
@pytest.mark.parametrize("kind", ["SYNC_FLUSH", "ASYNC_FLUSH"])
def test_a_full_disk_refuses_and_takes_again(small_disk: Path, kind: str) -> None:
    config = lq.StoreConfig(**SETTINGS | {"flush_disk_type": kind})
    model = ModelStore()
    root = small_disk / "store"
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(100 << 10))
    refused = 0
    with lq.MessageStore.open(root, mode="rw", config=config) as store:
        for number in range(400):
            message = message_of(1, number)
            put = model.attempt(message)
            try:
                model.acked(put, store.put(message), is_durable=True)
            except StoreUnavailable as error:
                # Neither a log file nor a queue file.
                assert error.status in ("CREATE_MAPEDFILE_FAILED", "SERVICE_NOT_AVAILABLE")
                refused += 1
        assert refused, "the disk was never full"
        # Reads still work.
        assert model.check(Seen.of(store, queues=False)) == []
        ballast.unlink()
        message = message_of(2, 0)
        put = model.attempt(message)
        end = time.monotonic() + 60
        while not put.is_acked and time.monotonic() < end:
            with contextlib.suppress(StoreUnavailable):
                model.acked(put, store.put(message), is_durable=True)
        assert put.is_acked, "nothing was taken again"
        assert store.wait_dispatched(timeout=60)
        assert model.check(Seen.of(store)) == []
    assert check_image(root, config, model, model.mark(), is_exact=False) == []


# ------------------------------------------------------------------------------- a failing sync
@pytest.mark.parametrize("nth", [2, 9, 40])
def test_a_sync_that_fails_in_the_kernel(nth: int, tmp_path: Path) -> None:
    """All syncs from the nth on fail: every message acknowledged before is there."""
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("there is no strace")
    root, told_of = tmp_path / "store", tmp_path / "told"
    inject = f"inject=fdatasync:error=EIO:when={nth}+"
    done = subprocess.run(
        [
            *(strace, "-f", "-qq", "--seccomp-bpf", "-e", "trace=fdatasync", "-e", inject),
            *("-o", os.devnull, sys.executable, "-c", _WRITE, str(root), str(told_of)),
        ],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    if "ptrace" in done.stderr.lower() or "Operation not permitted" in done.stderr:
        pytest.skip(f"strace may not trace here: {done.stderr[:200]}")
    model = ModelStore()
    lines = told_of.read_text().splitlines()
    acked = {int(n): tuple(map(int, told)) for n, *told in map(str.split, lines) if n.isdigit()}
    for number in range(80):
        put = model.attempt(message_of(1, number))
        if number in acked:
            model.acked_at(put, *acked[number], is_durable=True)
    with told(SEED, done.stderr, root, tmp_path):
        assert lines[-1] == "refused", "a sync failed, and messages were taken"
        assert len(acked) < 80
        wrong = check_image(root, lq.StoreConfig(**SETTINGS), model, model.mark(), is_killed=True)
        assert not wrong, explain(wrong)
        assert (root / "abort").exists(), "the store was not closed in order"


_WRITE = textwrap.dedent(
    """
    import sys
    import logquarry as lq
    from logquarry.errors import StoreError
    from tests.crash.writer import SETTINGS, message_of

    told = open(sys.argv[2], "w", buffering=1)
    config = lq.StoreConfig(**SETTINGS | {"flush_disk_type": "SYNC_FLUSH"})
    try:
        with lq.MessageStore.open(sys.argv[1], mode="rw", config=config) as store:
            is_refused = False
            for number in range(80):
                try:
                    put = store.put(message_of(1, number))
                except StoreError:
                    is_refused = True
                    continue
                assert not is_refused, "taken after a failed sync"
                print(number, put.physical_offset, put.queue_offset, put.store_timestamp, file=told)
    except StoreError:
        is_refused = True
    print("refused" if is_refused else "taken", file=told)
    """
)
