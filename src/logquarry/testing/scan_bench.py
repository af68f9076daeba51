"""How fast a store is read: the walk over the log, and frames into Arrow, on one thread.

The kinds, in order: ``walk`` finds every frame, ``walk_crc`` checks every body too,
``fixed_to_arrow`` makes columns of all fields of fixed width and the topic, ``all_to_arrow`` of
everything, the map of properties and CRCs included.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from logquarry.files.layout import StoreLayout
from logquarry.scan import columns, schema
from logquarry.scan.columns import Decoding
from logquarry.scan.walk import LogEnd, LogReader, Run
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
"""Kind -> (whether CRCs are checked, columns that are made)."""


class Timing(NamedTuple):
    """One kind's best round."""

    messages_per_s: float
    bytes_per_s: float
    seconds: float
    n: int


def ensure_store(
    folder: Path,
    *,
    count: int | None,
    total_bytes: int | None,
    body: tuple[int, int],
    topics: int,
    queues: int,
    keys: int,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """The store in a folder, made if there is none, with production file sizes.

    It appears there once it is whole.
    """
    if (folder / "commitlog").is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as made:
        store = Path(made) / "store"
        fill(
            store,
            count=count,
            total_bytes=total_bytes,
            body=body,
            topics=topics,
            queues=queues,
            keys=keys,
            progress=progress,
        )
        store.rename(folder)
    return folder


def bench_scan(
    store: Path,
    *,
    warmup: int = 1,
    rounds: int = 3,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Timing]:
    """The best of some rounds of each kind, after a warm-up.

    Args:
        store: the store.
        warmup: rounds that do not count: they load kernels and the page cache.
        rounds: rounds that do. Kinds take turns, so that a slow moment harms all alike.
        progress: called after each pass with passes done and passes in all.
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
    """Read all of the log once: messages, and bytes of log."""
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
