"""The stores that real brokers of RocketMQ 5 wrote: tests/data/rocketmq5.tar.xz (oracle/v5)."""

from __future__ import annotations

import base64
import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.helpers.golden_data import unpacked

ARCHIVE = Path(__file__).parents[1] / "data" / "rocketmq5.tar.xz"
ROCKSDB_ARCHIVE = ARCHIVE.with_name("rocketmq5-rocksdb.tar.xz")
"""More stores with RocksDB, with ``pulled.json``; ``-live`` was copied while the broker ran."""

BATCH_STORES = ("5.1.4-batchcq", "5.5.0-batchcq")
BATCH_TOPIC = "BatchCq"
"""The topic with batch queues in these stores."""

WRITE, RECOVER, QUEUES, INDEX, RETAIN = "write", "recover", "queues", "index", "retain"
ALL = frozenset({WRITE, RECOVER, QUEUES, INDEX, RETAIN})
NONE: frozenset[str] = frozenset()

REFUSED: dict[str, frozenset[str]] = {
    "5.1.4-batchcq": NONE,
    "5.1.4-plain": NONE,
    "5.3.3-kill": NONE,
    "5.3.3-plain": NONE,
    "5.3.3-rocksdb": frozenset({WRITE}),
    "5.4.0-plain": NONE,
    "5.5.0-batchcq": NONE,
    "5.5.0-compaction": ALL - {QUEUES, INDEX},
    "5.5.0-controller": ALL - {QUEUES, INDEX},
    "5.5.0-cqext": ALL - {INDEX, RETAIN},
    "5.5.0-dledger": ALL,
    "5.5.0-kill": NONE,
    "5.5.0-lmq": NONE,
    "5.5.0-multipath": NONE,
    "5.5.0-no-mmap": NONE,
    "5.5.0-plain": NONE,
    "5.5.0-pop-kv": NONE,
    "5.5.0-propcrc": NONE,
    "5.5.0-rocksdb": frozenset({WRITE}),
    "5.5.0-rocksdb-config-v2": frozenset({WRITE}),
    "5.5.0-rocksdb-double": ALL - {INDEX, RETAIN},
    "5.5.0-rocksdb-more": ALL,
    "5.5.0-tiered": ALL,
    "5.5.0-timer": NONE,
}
"""Scenario -> what is refused."""

FEATURES: dict[str, set[str]] = {
    "5.1.4-batchcq": {"batch_queues", "inner_batches"},
    "5.1.4-plain": set(),
    "5.3.3-kill": set(),
    "5.3.3-plain": set(),
    "5.3.3-rocksdb": {"rocksdb_config", "rocksdb_queues", "timers"},
    "5.4.0-plain": {"index_tags"},
    "5.5.0-batchcq": {"batch_queues", "index_tags", "inner_batches"},
    "5.5.0-compaction": {"compaction", "index_tags"},
    "5.5.0-controller": {"controller", "index_tags", "timers"},
    "5.5.0-cqext": {"index_tags", "queue_ext", "timers"},
    "5.5.0-dledger": {"dledger", "index_tags", "timers"},
    "5.5.0-kill": {"index_tags"},
    "5.5.0-lmq": {"index_tags", "multi_dispatch"},
    "5.5.0-multipath": {"index_tags", "several_log_paths", "timers"},
    "5.5.0-no-mmap": {"index_tags", "timers"},
    "5.5.0-plain": {"index_tags"},
    "5.5.0-pop-kv": {"index_tags", "pop_records"},
    "5.5.0-propcrc": {"index_tags", "property_crc", "timers"},
    "5.5.0-rocksdb": {"index_tags", "rocksdb_config", "rocksdb_queues", "timers"},
    "5.5.0-rocksdb-config-v2": {"index_tags", "rocksdb_config", "rocksdb_queues", "timers"},
    "5.5.0-rocksdb-double": {"index_tags", "rocksdb_queues", "timers"},
    "5.5.0-rocksdb-more": {"index_tags", "rocksdb_store"},
    "5.5.0-tiered": {"index_tags", "tiered", "timers"},
    "5.5.0-timer": {"index_tags", "timers"},
}
"""Scenario -> the features that are found."""


Copied = Callable[[str], Path]
"""Copies the store of a scenario (fixture ``copied``)."""


class FileState(NamedTuple):
    """What must not change of a file or folder."""

    data: bytes | None
    mode: int
    modified: int


def stores5() -> Path:
    """The folder with all stores that the oracle can make (``matrix5.py``); it may be missing."""
    return Path(os.environ.get("LOGQUARRY_STORES5", "stores5"))


def rocketmq5_stores(factory: pytest.TempPathFactory) -> Path:
    """The folder with 5.5.0-plain/ and so on, unpacked once for all tests: copy what you change."""
    return unpacked(ARCHIVE, factory) / "rocketmq5"


def rocksdb_stores(factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The stores with queues or configuration in RocksDB, unpacked once; name -> folder."""
    made = unpacked(ROCKSDB_ARCHIVE, factory) / "rocketmq5-rocksdb"
    more = {path.name: path for path in made.iterdir()}
    folder, wanted = rocketmq5_stores(factory), {"rocksdb_queues", "rocksdb_config"}
    return more | {name: folder / name for name in FEATURES if FEATURES[name] & wanted}


LOCK = (".", "lock")
"""What a process changes that opens a store and takes its lock."""


def state_of(root: Path, *ignored: str) -> dict[str, FileState]:
    """All files and folders of a store with bytes, modes and modification times."""
    found = {}
    for path in [root, *root.rglob("*")]:
        if str(path.relative_to(root)) in ignored:
            continue
        status = path.stat()
        data = content_of(path) if path.is_file() else None
        found[str(path.relative_to(root))] = FileState(data, status.st_mode, status.st_mtime_ns)
    return found


def content_of(path: Path) -> bytes:
    """The bytes of a file, without its holes: the files of timers and DLedger are large."""
    parts = []
    descriptor = os.open(path, os.O_RDONLY)
    try:
        end = os.fstat(descriptor).st_size
        at = 0
        while at < end:
            try:
                at = os.lseek(descriptor, at, os.SEEK_DATA)
            except OSError:
                break
            hole = os.lseek(descriptor, at, os.SEEK_HOLE)
            # In memory, a read through a mapping turns a hole into zeros.
            for start in range(at, hole, 4_096):
                page = os.pread(descriptor, min(4_096, hole - start), start)
                if page.strip(b"\0"):
                    parts.append(b"%d:" % start + page)
            at = hole
        parts.append(b"%d" % end)
    finally:
        os.close(descriptor)
    return b"".join(parts)


def expected_frames(scenario: Path) -> list[dict[str, Any]]:
    """Each frame of the log, as the broker's decoder gives it."""
    lines = (scenario / "expected.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]


def expected_offsets(scenario: Path) -> list[int]:
    """The physical offset of each frame of the log."""
    return [frame["physicalOffset"] for frame in expected_frames(scenario)]


def broker_queues(scenario: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """(topic, queue id) -> what the broker said of the queue."""
    found = {}
    for name, queue in json.loads((scenario / "queues.json").read_text("utf-8")).items():
        topic, _, queue_id = name.rpartition("/")
        found[topic, int(queue_id)] = queue
    return found


Row = dict[str, Any]


Key = tuple[str, int]
Entry = list[int]


def broker_entries(scenario: Path) -> dict[Key, list[Entry]]:
    """By topic and queue id, the queue's entries: queue offset, place, size, tags code."""
    queues = broker_queues(scenario).items()
    return {key: [unit[:4] for unit in queue["units"]] for key, queue in queues}


def broker_messages(scenario: Path) -> list[Row]:
    """Each message as an ordinary client receives it, taken apart without the package's code."""
    return [row for frame in expected_frames(scenario) for row in _messages(frame)]


def _messages(frame: Row) -> Iterator[Row]:
    body = base64.b64decode(frame["body"])
    if frame["sysFlag"] & 0xC0 != 0xC0:
        yield {**_shared(frame, 0), "body": body, "flag": frame["flag"], **_named(frame)}
        return
    at = number = 0
    while at < len(body):
        size, _, _, flag, length = struct.unpack_from(">iiiii", body, at)
        (properties_length,) = struct.unpack_from(">h", body, at + 20 + length)
        text = body[at + 22 + length : at + 22 + length + properties_length].decode()
        properties = dict(pair.split("\x01") for pair in text.split("\x02") if pair)
        yield {
            **_shared(frame, number),
            "body": body[at + 20 : at + 20 + length],
            "flag": flag,
            "properties": properties,
        }
        at, number = at + size, number + 1


def _named(frame: Row) -> Row:
    return {"properties": frame["properties"]}


def _shared(frame: Row, number: int) -> Row:
    return {
        "topic": frame["topic"],
        "queue_id": frame["queueId"],
        "queue_offset": frame["queueOffset"] + number,
        "physical_offset": frame["physicalOffset"],
        "store_timestamp": frame["storeTimestamp"],
        "born_timestamp": frame["bornTimestamp"],
        "born_host": frame["bornHost"],
        "store_host": frame["storeHost"],
    }
