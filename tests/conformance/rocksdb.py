"""What tests of queues in RocksDB share: their entries, and changes to the database of a store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import logquarry as lq
from logquarry.format import queue_entry as table
from logquarry.log.layout import StoreLayout
from logquarry.log.rocksdb import RocksDb
from tests.conformance.rocketmq5 import Entry, Key

QUEUES = (
    *("5.3.3-rocksdb", "5.4.0-rocksdb", "5.5.0-rocksdb", "5.5.0-rocksdb-config-v2"),
    *("5.5.0-rocksdb-lmq", "5.5.0-rocksdb-separate", "5.5.0-kill-rocksdb"),
)
"""The scenarios whose queues are in RocksDB alone."""
CONFIGS = ("5.1.4-rocksdb", "5.3.3-rocksdb", "5.4.0-rocksdb", "5.5.0-rocksdb-config-v2")
"""Scenarios whose topics and offsets are in RocksDB."""
NEEDS_EXTRA = r"pip install 'logquarry\[rocksdb\]'"


def entries_of(store: lq.StoreReader, topic: str, queue_id: int) -> list[Entry]:
    """The entries of a queue, as ``broker_entries`` has them."""
    queue = store.queue(topic, queue_id)
    if queue is None:
        return []
    return [[o, e.physical_offset, e.size, e.tags_code] for o, e in queue.entries()]


def entries_in(store: lq.StoreReader, queues: Iterable[Key]) -> dict[Key, list[Entry]]:
    """The entries of some queues, of which some may be empty or missing."""
    return {key: entries_of(store, *key) for key in queues}


def records(root: Path, folder: str) -> dict[str, dict[bytes, bytes]]:
    """All records of queues in a folder of RocksDB, by column family."""
    database = RocksDb(StoreLayout.open(root).filesystem, folder)
    return {family: dict(database.items(family)) for family in (table.ENTRIES, table.OFFSETS)}


@contextmanager
def changed(folder: Path) -> Iterator[Any]:
    """Open a folder with queues for changes by a test."""
    rocksdict = pytest.importorskip("rocksdict")
    families = {name: rocksdict.Options(raw_mode=True) for name in ("default", "offset")}
    with rocksdict.Rdict(str(folder), rocksdict.Options(raw_mode=True), families) as database:
        yield database


def change(folder: Path, kind: str) -> None:
    """Change queue 0 of Orders, which has at least 20 entries, in a folder of RocksDB."""
    with changed(folder) as database:
        _change(database, kind)


def _change(database: Any, kind: str) -> None:
    offsets = database.get_column_family("offset")
    last = table.bound_key("Orders", table.MAX, 0)
    place, number = table.BOUND.struct.unpack(offsets[last])
    key = table.entry_key("Orders", 0, 7)
    fields = list(table.ENTRY.struct.unpack(database[key]))
    if kind == "hole":
        del database[key]
    elif kind == "place":
        fields[0] += 1
    elif kind == "tags":
        fields[2] += 1
    elif kind == "time":
        fields[3] += 1
    elif kind == "surplus":
        database[table.entry_key("Orders", 0, number + 1)] = database[key]
        offsets[last] = table.BOUND.struct.pack(fields[0], number + 1)
    elif kind == "end":
        del database[table.entry_key("Orders", 0, number)]
        offsets[last] = table.BOUND.struct.pack(place, number - 1)
    elif kind in ("far", "endless"):
        end = 1 << 62 if kind == "far" else (1 << 63) - 1
        offsets[last] = table.BOUND.struct.pack(place, end)
    elif kind == "missing":
        del offsets[last]
    elif kind == "ahead":
        (end,) = table.DISPATCHED_END.struct.unpack(offsets[table.DISPATCHED])
        offsets[table.DISPATCHED] = table.DISPATCHED_END.struct.pack(end + 1000)
    if kind in ("place", "tags", "time"):
        database[key] = table.ENTRY.struct.pack(*fields)
