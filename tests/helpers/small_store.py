"""Writable stores with small files, and the bytes and times of the files in a folder."""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import logquarry as lq
from logquarry.arguments import Bars
from logquarry.format.checkpoint import MARK_SIZE
from logquarry.store.message_store import StoreWriter
from tests.helpers.failing_disk import FaultyDisk

NOW = 1_700_000_000_000
SMALL: dict[str, Any] = {
    "mapped_file_size_commit_log": 16_384,
    "mapped_file_size_consume_queue": 400,
    "max_hash_slot_num": 50,
    "max_index_num": 200,
}
PATIENT = {"os_page_cache_busy_time_out_mills": 60_000, "sync_flush_timeout": 60_000}
"""A busy machine may stop a thread for seconds, and a slow disk may need seconds for a file. With
the defaults, puts of other threads would then fail, or end with FLUSH_DISK_TIMEOUT.
"""


def config(**settings: Any) -> lq.StoreConfig:
    return lq.StoreConfig(**(SMALL | PATIENT | settings))


def opened(root: Path, disk: FaultyDisk | None = None, **settings: Any) -> StoreWriter:
    return StoreWriter.start(root, config=config(**settings), disk=disk)


def facts(root: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in root.rglob("*")
        if path.is_file()
    }


def at_each_step(call: Callable[[], None]) -> Bars:
    """Progress bars that call a function at each step."""
    return lambda _: nullcontext(lambda *_: call())


def forget_start(root: Path) -> None:
    """Remove the record of the log's start: missing first files then look like expired ones."""
    path = root / ".logquarry" / "durable"
    if path.exists():
        path.write_bytes(path.read_bytes()[:MARK_SIZE])


def message_files(root: Path) -> dict[str, bytes]:
    """The files of log, queues and index that are not empty.

    An open writer changes their bytes only for puts, but their times also when it loads pages
    ahead. It writes its other files, and makes the next file of the log, at times of its choice.
    """
    return {
        name: data
        for folder in ("commitlog", "consumequeue", "index")
        for name, (data, _) in facts(root / folder).items()
        if any(data)
    }


def bodies(store: lq.MessageStore) -> list[bytes]:
    return [message.body for message in store.scan()]


@contextmanager
def held_by_a_broker(store: Path) -> Iterator[None]:
    """Hold the store's lock, as a process that writes it does.

    The lock belongs to an open file description, so this process sees it, too.
    """
    (store / "abort").touch()
    descriptor = os.open(store / "lock", os.O_RDWR | os.O_CREAT)
    request = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, request)
    try:
        yield
    finally:
        os.close(descriptor)
