"""Measures scans, recovery, rebuild and verify.

There are four kinds of scans, each in one thread. ``walk`` finds every frame. ``walk_crc`` also
checks the CRC of every body. ``fixed_to_arrow`` makes Arrow columns of the topic and of all fields
of fixed width. ``all_to_arrow`` makes all columns, and checks the CRC of every body.

The benchmarks in the table below measure recovery, rebuild and verify. For RocketMQ,
``oracle/bench recover`` and ``oracle/bench rebuild`` measure the same work. Each benchmark makes a
store with RocketMQ's file sizes, and does its work on this store three times in one process. The
files are then in the page cache. The measured time of a recovery or a rebuild ends when all
messages are dispatched.

=========  ==================================================================================
normal     open after a clean shutdown
abnormal   open with an abort file and without a checkpoint
rebuild    like ``abnormal``, and without queues and index
verify     verify after a clean shutdown
=========  ==================================================================================
"""

from __future__ import annotations

import gc
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from logquarry.bench.store import Bench, Load
from logquarry.config import StoreConfig
from logquarry.errors import StoreUnavailable
from logquarry.log import columns, schema
from logquarry.log.columns import Decoding
from logquarry.log.layout import StoreLayout
from logquarry.log.store_files import ABORT, CHECKPOINT, CONSUME_QUEUE, INDEX
from logquarry.log.walk import LogEnd, LogReader, Run
from logquarry.repair.verification import verify_store
from logquarry.store.message_store import MessageStore
from logquarry.testing.builder import fill

FIXED_AND_TOPIC: Final = tuple(
    column.name
    for column in schema.COLUMNS
    if column.name == "topic"
    or (column.spark in ("int", "bigint", "timestamp") and column.name != "tags_code")
)

KINDS: Final[Mapping[str, tuple[bool, Sequence[str]]]] = {
    "walk": (False, ()),
    "walk_crc": (True, ()),
    "fixed_to_arrow": (False, FIXED_AND_TOPIC),
    "all_to_arrow": (True, schema.NAMES),
}
"""Kind of scan -> (whether to check CRCs, which columns to make)."""


class Timing(NamedTuple):
    """The result of the fastest scan of one kind. ``n`` is the number of messages."""

    messages_per_s: float
    bytes_per_s: float
    seconds: float
    n: int


def ensure_store(folder: Path, **given: Any) -> Path:
    """Return the store in a folder. If the folder has no store, make a store with RocketMQ's file
    sizes.

    An interrupted call leaves no incomplete store. The arguments are those of
    :func:`logquarry.testing.builder.fill`.
    """
    if (folder / "commitlog").is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as made:
        store = Path(made) / "store"
        fill(store, **given)
        store.rename(folder)
    return folder


def bench_scan(
    store: Path,
    *,
    warmup: int = 1,
    rounds: int = 3,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Timing]:
    """Measure all kinds of scans several times, and return the fastest scan of each kind.

    Each round measures every kind once. If the machine is slow for a while, this affects all kinds.
    """
    layout = StoreLayout.open(store)
    best: dict[str, Timing] = {}
    passes = 0
    for number in range(warmup + rounds):
        for kind, (check_crc, names) in KINDS.items():
            start = time.perf_counter()
            count, length = _pass(layout, check_crc=check_crc, names=names)
            seconds = time.perf_counter() - start
            passes += 1
            if progress is not None:
                progress(passes, (warmup + rounds) * len(KINDS))
            if number >= warmup and (kind not in best or seconds < best[kind].seconds):
                best[kind] = Timing(count / seconds, length / seconds, seconds, count)
    return best


def _pass(layout: StoreLayout, *, check_crc: bool, names: Sequence[str]) -> tuple[int, int]:
    decoding = Decoding(columns=names)
    count = end = 0
    for event in LogReader(layout, check_crc=check_crc).events():
        if isinstance(event, Run):
            count += len(event.rows)
            if names:
                columns.record_batch(event.window, event.rows, decoding)
        elif isinstance(event, LogEnd):
            end = event.offset
    return count, end - layout.commit_log.start


# --------------------------------------------------------------------- recovery, rebuild and verify
PASSES: Final = 3
MODES: Final = {"recover": ("normal", "abnormal"), "rebuild": ("rebuild",), "verify": ("verify",)}


def bench_recovery(kind: str, folder: Path, load: Load, recovery: str) -> dict[str, Any]:
    """Measure all modes of one kind (``recover``, ``rebuild`` or ``verify``) on a new store, and
    delete the store.

    Returns:
        For each mode, the seconds of each of the three passes, and the rates of the last pass.
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
