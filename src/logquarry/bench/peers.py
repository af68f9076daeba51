"""Measures other stores that a Python program can embed: lmdb, rocksdict and sqlite3.

:func:`bench_peer` puts messages of the same size as :mod:`logquarry.bench.store`, without syncs.
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

from logquarry.errors import MissingExtra

Pairs = list[tuple[bytes, bytes]]
Put = Callable[[bytes, bytes], object]
PutMany = Callable[[Pairs], object]
_MAP_BYTES: Final = 1 << 40
_PRIME_WRITE: Final = 1 << 26


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


def prime(folder: Path, gib: int) -> None:
    """Make ``gib`` GiB of memory pages free: write a file of this size, and remove it.

    In a virtual machine, the host may first have to provide a memory page. A program then waits up
    to ten times as long as for a free page. A host may also take back pages that were free for a
    second or two, so call this function just before the measurement.
    """
    if not gib:
        return
    path, zeros = folder / "primed", bytes(_PRIME_WRITE)
    try:
        with path.open("wb", buffering=0) as file:
            for _ in range(gib * (1 << 30) // _PRIME_WRITE):
                file.write(zeros)
    finally:
        path.unlink(missing_ok=True)


def bench_peer(
    name: str, folder: Path, body: bytes, *, n: int, warmup: int, each: int, primed: int
) -> dict[str, float]:
    """Measure how fast one thread writes ``n`` messages to a new database; delete the database.

    Each call writes ``each`` messages.
    """
    if find_spec(name) is None:
        raise MissingExtra(f"{name} is not installed. Install it: pip install {name}")
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
            prime(folder, primed)
            began, used = time.perf_counter(), time.thread_time()
            run(warmup, warmup + n)
            seconds, used = time.perf_counter() - began, time.thread_time() - used
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return {"seconds": seconds, "messages_per_s": n / seconds, "cpu_us_per_message": used / n * 1e6}
