"""Measures puts into another embedded database, without syncs, for comparison with logquarry.

=========  =====================================================================================
lmdb       one transaction for each call, ``sync=False``; ``putmulti`` for several messages
rocksdict  RocksDB: a put or a ``WriteBatch`` into the write-ahead log and the memtable
sqlite3    one transaction for each call, WAL, ``synchronous=OFF``; ``executemany`` for several
           messages
=========  =====================================================================================

The key of a message is its number. The databases store no topics, queues, times or checksums.
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

Pairs = list[tuple[bytes, bytes]]
Put = Callable[[bytes, bytes], object]
PutMany = Callable[[Pairs], object]
_MAP_BYTES: Final = 1 << 40


@contextmanager
def _lmdb(folder: str) -> Iterator[tuple[Put, PutMany]]:
    opened = import_module("lmdb").open(folder, map_size=_MAP_BYTES, sync=False, metasync=False)

    def put(key: bytes, body: bytes) -> None:
        with opened.begin(write=True) as transaction:
            transaction.put(key, body)

    def put_many(pairs: Pairs) -> None:
        with opened.begin(write=True) as transaction, transaction.cursor() as cursor:
            cursor.putmulti(pairs)

    with closing(opened):
        yield put, put_many


@contextmanager
def _rocksdict(folder: str) -> Iterator[tuple[Put, PutMany]]:
    rocksdict = import_module("rocksdict")
    with closing(rocksdict.Rdict(folder, rocksdict.Options(raw_mode=True))) as opened:

        def put_many(pairs: Pairs) -> None:
            batch = rocksdict.WriteBatch(raw_mode=True)
            for key, body in pairs:
                batch.put(key, body)
            opened.write(batch)

        yield opened.put, put_many


@contextmanager
def _sqlite3(folder: str) -> Iterator[tuple[Put, PutMany]]:
    with closing(sqlite3.connect(f"{folder}/db", isolation_level=None)) as opened:
        opened.execute("PRAGMA journal_mode=WAL")
        opened.execute("PRAGMA synchronous=OFF")
        opened.execute("CREATE TABLE messages (key BLOB PRIMARY KEY, body BLOB) WITHOUT ROWID")
        execute, insert = opened.execute, "INSERT INTO messages VALUES (?, ?)"

        def put_many(pairs: Pairs) -> None:
            execute("BEGIN")
            opened.executemany(insert, pairs)
            execute("COMMIT")

        yield lambda key, body: execute(insert, (key, body)), put_many


PEERS: Final = {"lmdb": _lmdb, "rocksdict": _rocksdict, "sqlite3": _sqlite3}


def bench_peer(
    name: str, folder: Path, n: int, body: bytes, warmup: int, each: int = 1
) -> dict[str, float]:
    """Measure writes of ``each`` messages per call in one thread, and delete the database."""
    if find_spec(name) is None:
        raise UsageError(f"{name} is not installed. Install it: pip install {name}")
    root = tempfile.mkdtemp(prefix="bench-", dir=folder)
    try:
        with PEERS[name](root) as (put, put_many):

            def run(start: int, stop: int) -> None:
                if each == 1:
                    for number in range(start, stop):
                        put(b"key%015d" % number, body)
                    return
                for first in range(start, stop, each):
                    numbers = range(first, min(first + each, stop))
                    put_many([(b"key%015d" % number, body) for number in numbers])

            run(0, warmup)
            began, used = time.perf_counter(), time.thread_time()
            run(warmup, warmup + n)
            seconds, used = time.perf_counter() - began, time.thread_time() - used
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return {"seconds": seconds, "messages_per_s": n / seconds, "cpu_us_per_message": used / n * 1e6}
