"""Runs one Spark task in a process whose memory a test measures: run with -m.

It reads lines from stdin, each the bytes of the log (from its beginning) for one task, and prints a
line when all modules are loaded and a line after each task.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from logquarry.config import StoreConfig
from logquarry.disk.disk import Disk
from logquarry.ingest.load import Appending, append_to_store, plan_load
from logquarry.ingest.staging import LoadPlan, Staged, Stager, by_broker
from logquarry.log.layout import StoreLayout
from logquarry.log.store_files import LOADS
from logquarry.read.store_sizes import with_sizes
from logquarry.repair.audit.runs import SoundReader
from logquarry.repair.rebuild import parts
from logquarry.spark.lakehouse.write import TableWriter
from logquarry.spark.options import parse_read_options
from logquarry.spark.output import OutputFolder
from logquarry.spark.parquet import write_task
from logquarry.spark.tasks import ReadTask, plan_tasks, read_batches
from logquarry.store.load.ledger import LoadId

Work = Callable[[Path, Path, int], None]
"""Gets a store, a folder to write to, and how many bytes of the log are the task's."""

_SETTINGS: Final = {
    "mappedFileSizeCommitLog": 64 << 20,
    "mappedFileSizeConsumeQueue": 20 * 100_000,
    "maxHashSlotNum": 500_000,
    "maxIndexNum": 2_000_000,
}
_PUT: Final = ("topic", "queue_id", "body", "tags", "keys", "properties", "born_timestamp")
"""The columns of rows that are loaded."""


def main(work: str, store: str, out: str) -> None:
    """Do tasks until stdin ends."""
    do = WORKS[work]
    folder = Path(out)
    # Load kernels and libraries, and do everything once.
    _done(do, Path(store), folder, 8 << 20)
    print("ready", flush=True)
    for line in sys.stdin:
        _done(do, Path(store), folder, int(line))
        print("done", flush=True)


def _done(do: Work, store: Path, folder: Path, size: int) -> None:
    folder.mkdir()
    do(store, folder, size)
    shutil.rmtree(folder)


def _task(store: Path, size: int) -> ReadTask:
    """A task that reads this many bytes of the log, with all columns."""
    options = parse_read_options(
        {"path": str(store), "endingOffsets": f'{{"store": {size}}}', "splitSize": str(size)}
    )
    tasks = plan_tasks(options)
    assert len(tasks) == 1, "the whole of it is one task"
    assert tasks[0].length == size
    return tasks[0]


def _read(store: Path, _: Path, size: int) -> None:
    """The source's task, up to the batches that Spark receives."""
    from logquarry.spark.columns import struct_of, task_rows
    from logquarry.spark.options import ReadOptions

    for batch in task_rows(_task(store, size), struct_of(ReadOptions(paths=()))):
        assert batch.num_rows


def _export(store: Path, out: Path, size: int) -> None:
    write_task(_task(store, size), OutputFolder(out), "staging", ["topic"])


def _table(store: Path, out: Path, size: int) -> None:
    writer = TableWriter(
        folder=OutputFolder(out),
        run="run",
        partition_by=("topic",),
        partitions_in_files=True,
    )
    writer(_task(store, size))


def _verify(store: Path, _: Path, size: int) -> None:
    assert SoundReader(StoreLayout.open(store)).read(0, size)


def _stage(store: Path, out: Path, size: int) -> None:
    plan = plan_load(LoadPlan(path=str(out), brokers=2, config=_config()))
    assert _staged(store, plan, LoadId("job", 1), size).segments


def _staged(store: Path, plan: LoadPlan, load: LoadId, size: int) -> Staged:
    stager = Stager(plan, load, 0)
    for batch in read_batches(replace(_task(store, size), columns=_PUT)):
        stager.add(batch)
    return stager.finish()


def _load(store: Path, out: Path, size: int) -> None:
    """Append the staged messages to the log."""
    plan = plan_load(LoadPlan(path=str(out), config=_config()))
    load = LoadId("job", 1)
    segments = by_broker([_staged(store, plan, load, size)])[0]
    append_to_store(Appending(str(out), _config(), load, segments, LOADS))


def _look(store: Path, _: Path, size: int) -> None:
    """The first of the tasks of a rebuild."""
    assert parts.find_runs(StoreLayout.open(store), StoreConfig(), 0, size)


def _queues(store: Path, out: Path, size: int) -> None:
    layout = StoreLayout.open(store)
    config = with_sizes(StoreConfig(), layout)
    spans = [(run.start, run.end) for run in parts.find_runs(layout, config, 0, size)]
    parts.write_entries(layout, config, spans, Disk(), out, frozenset())


def _index(store: Path, out: Path, size: int) -> None:
    layout = StoreLayout.open(store)
    stated = _config()
    slots, entries = stated.max_hash_slot_num, stated.max_index_num
    # The other settings are those of stores that are loaded.
    config = with_sizes(StoreConfig(max_hash_slot_num=slots, max_index_num=entries), layout)
    shape = config.index_shape
    assert shape is not None
    sources = [
        parts.KeySource(run.start, run.end, 0, run.keys)
        for run in parts.find_runs(layout, config, 0, size)
    ]
    path = out / "index"
    parts.write_index_file(layout, sources, Disk(), path, shape, is_first=True)


def _config() -> StoreConfig:
    return StoreConfig.from_mapping(_SETTINGS)


WORKS: Final[dict[str, Work]] = {
    "read": _read,
    "export": _export,
    "table": _table,
    "verify": _verify,
    "stage": _stage,
    "load": _load,
    "rebuild: look": _look,
    "rebuild: queues": _queues,
    "rebuild: index": _index,
}

if __name__ == "__main__":
    main(*sys.argv[1:])
