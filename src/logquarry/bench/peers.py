"""Puts the bodies of a benchmark into another embedded store, one write each, without a sync.

=========  =====================================================================================
lmdb       a transaction for each message, ``sync=False``
rocksdict  RocksDB: a put into the write-ahead log and the memtable
sqlite3    a transaction for each insert, WAL, ``synchronous=OFF``
=========  =====================================================================================

A message is stored under its number. The stores keep no topics, queues, times or checksums, so they
do less than a put of logquarry.
"""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from logquarry.errors import UsageError

Put = Callable[[bytes, bytes], object]
_MAP_BYTES: Final = 1 << 40


@contextmanager
def _lmdb(folder: str) -> Iterator[Put]:
    opened = import_module("lmdb").open(folder, map_size=_MAP_BYTES, sync=False, metasync=False)

    def put(key: bytes, body: bytes) -> None:
        with opened.begin(write=True) as transaction:
            transaction.put(key, body)

    with closing(opened):
        yield put


@contextmanager
def _rocksdict(folder: str) -> Iterator[Put]:
    rocksdict = import_module("rocksdict")
    with closing(rocksdict.Rdict(folder, rocksdict.Options(raw_mode=True))) as opened:
        yield opened.put


@contextmanager
def _sqlite3(folder: str) -> Iterator[Put]:
    with closing(sqlite3.connect(f"{folder}/db", isolation_level=None)) as opened:
        opened.execute("PRAGMA journal_mode=WAL")
        opened.execute("PRAGMA synchronous=OFF")
        opened.execute("CREATE TABLE messages (key BLOB PRIMARY KEY, body BLOB) WITHOUT ROWID")
        execute = opened.execute
        yield lambda key, body: execute("INSERT INTO messages VALUES (?, ?)", (key, body))


PEERS: Final = {"lmdb": _lmdb, "rocksdict": _rocksdict, "sqlite3": _sqlite3}


def bench_peer(name: str, folder: Path, n: int, body: bytes, warmup: int) -> dict[str, float]:
    """Measure single writes of another store in one thread, and delete the store.

    Args:
        name: one of :data:`PEERS`.
        folder: folder in which to make the store.
        n: messages to measure.
        body: the body of each message.
        warmup: messages before the measurement.

    Raises:
        UsageError: if the store's package is not installed.
    """
    if find_spec(name) is None:
        raise UsageError(f"{name} is not installed. Install it: pip install {name}")
    root = tempfile.mkdtemp(prefix="bench-", dir=folder)
    try:
        with PEERS[name](root) as put:
            for number in range(warmup):
                put(b"key%015d" % number, body)
            began, used = time.perf_counter(), time.thread_time()
            for number in range(warmup, warmup + n):
                put(b"key%015d" % number, body)
            seconds, used = time.perf_counter() - began, time.thread_time() - used
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return {"seconds": seconds, "messages_per_s": n / seconds, "cpu_us_per_message": used / n * 1e6}
