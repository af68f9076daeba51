"""How fast a store comes back, and is checked: as ``oracle/bench recover`` and ``rebuild``.

A store of production file sizes is filled with the messages of :mod:`.store_bench`, and opened
three times in one process, with a warm page cache; the clock stops once all is dispatched.

=========  ==================================================================================
normal     as it was closed
abnormal   not closed in order, and without a checkpoint
rebuild    likewise, and without queues and index
verify     not opened but checked, as it was closed
=========  ==================================================================================
"""

from __future__ import annotations

import gc
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from logquarry.config import StoreConfig
from logquarry.errors import StoreUnavailable
from logquarry.files.layout import ABORT, CHECKPOINT, CONSUME_QUEUE, INDEX, StoreLayout
from logquarry.store.message_store import MessageStore
from logquarry.testing.store_bench import Bench, Load
from logquarry.verify import verify_store

PASSES: Final = 3
MODES: Final = {"recover": ("normal", "abnormal"), "rebuild": ("rebuild",), "verify": ("verify",)}


def bench_recovery(kind: str, folder: Path, load: Load, recovery: str) -> dict[str, Any]:
    """Time one kind on a new store in a folder, which is deleted afterwards.

    Args:
        kind: ``recover``, ``rebuild`` or ``verify``.
        folder: where the store is made.
        load: what is put.
        recovery: ``safe`` or ``rocketmq``.

    Returns:
        Seconds of each pass by mode, and messages and bytes a second of the last one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = StoreConfig(recovery=recovery)
    root = Path(tempfile.mkdtemp(prefix="bench-", dir=folder)) / "store"
    try:
        with MessageStore.open(root, mode="rw", config=config) as store:
            Bench(store, load).putter("put-many")(0, load.n // load.batch * load.batch, load.batch)
            store.wait_dispatched()
            size = store.max_offset
        found: dict[str, Any] = {"n": load.n // load.batch * load.batch, "log_bytes": size}
        for mode in MODES[kind]:
            seconds = [_timed(root, mode, config) for _ in range(PASSES)]
            found[f"{mode}_seconds"] = seconds
            found[f"{mode}_messages_per_s"] = found["n"] / seconds[-1]
            found[f"{mode}_bytes_per_s"] = size / seconds[-1]
        return found
    finally:
        shutil.rmtree(root.parent, ignore_errors=True)


def _timed(root: Path, mode: str, config: StoreConfig) -> float:
    if mode in ("abnormal", "rebuild"):
        (root / ABORT).touch()
        (root / CHECKPOINT).unlink()
    if mode == "rebuild":
        for name in (CONSUME_QUEUE, INDEX):
            shutil.rmtree(root / name)
    gc.collect()
    began = time.perf_counter()
    if mode == "verify":
        report = verify_store(StoreLayout.open(root, config))
        if report.findings:
            raise StoreUnavailable(f"{root}: {report.findings[0].reason}")
        return time.perf_counter() - began
    store = MessageStore.open(root, mode="rw", config=config)
    try:
        store.wait_dispatched()
        return time.perf_counter() - began
    finally:
        store.close()
