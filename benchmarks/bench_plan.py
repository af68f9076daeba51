"""Measure how long Spark's driver takes to plan a read of many files.

    python -m benchmarks.bench_plan --brokers 100 --files 10000

A simulated file system holds the stores: each broker has ``--files`` log files of 1 GiB and four
consume queues. A log file reports its full size and contains only its first frame. A queue contains
only the entry of the last message.
"""

from __future__ import annotations

import argparse
import json
import pickle
import resource
import time
from collections.abc import Mapping
from typing import Any

import fsspec
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from logquarry.format import frame, queue_entry
from logquarry.format.frame import Frame
from logquarry.format.queue_entry import QueueEntry
from logquarry.spark.options import parse_read_options
from logquarry.spark.tasks import plan_tasks

_LOG_SIZE = 1 << 30
_QUEUE_SIZE = 6_000_000
_QUEUES = 4


class Pretended(AbstractFileSystem):  # type: ignore[misc]
    """A simulated file system of brokers with many log files.

    A store's URL is ``pretended://B/F/broker-N/store``, with B brokers of F files each.
    """

    protocol = "pretended"
    cachable = False

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        found = self._entries(self._strip_protocol(path).strip("/").split("/"))
        if found is None:
            raise FileNotFoundError(path)
        base = self._strip_protocol(path).rstrip("/")
        rows = [
            {"name": f"{base}/{name}", "size": size, "type": "file" if size else "directory"}
            for name, size in found.items()
        ]
        return rows if detail else [row["name"] for row in rows]

    @staticmethod
    def _entries(parts: list[str]) -> Mapping[str, int] | None:
        # The size of a folder is 0.
        brokers, files, *rest = parts
        match rest:
            case []:
                return {f"broker-{number:03d}": 0 for number in range(int(brokers))}
            case [_]:
                return {"store": 0}
            case [_, "store"]:
                return {"commitlog": 0, "consumequeue": 0}
            case [_, "store", "commitlog"]:
                return {f"{n * _LOG_SIZE:020d}": _LOG_SIZE for n in range(int(files))}
            case [_, "store", "consumequeue"]:
                return {"orders": 0}
            case [_, "store", "consumequeue", "orders"]:
                return {str(number): 0 for number in range(_QUEUES)}
            case [_, "store", "consumequeue", "orders", _]:
                return {f"{0:020d}": _QUEUE_SIZE}
        return None

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        stripped = self._strip_protocol(path).strip("/")
        folder, _, name = stripped.rpartition("/")
        if self._entries(stripped.split("/")) is not None:
            return {"name": stripped, "size": 0, "type": "directory"}
        found = self._entries(folder.split("/")) or {}
        if name not in found:
            raise FileNotFoundError(path)
        return {"name": stripped, "size": found[name], "type": "file"}

    def _open(self, path: str, mode: str = "rb", **_: Any) -> _File:
        return _File(self, self._strip_protocol(path).strip("/"), mode)


class _File(AbstractBufferedFile):  # type: ignore[misc]
    """A file that begins with some bytes and continues with zeros."""

    def __init__(self, folder: Pretended, path: str, mode: str) -> None:
        super().__init__(folder, path, mode, size=folder.info(path)["size"], cache_type="none")
        *_, parent, name = path.split("/")
        if parent == "commitlog":
            self._head = _message(int(name))
        else:
            last = (int(path.split("/")[1]) - 1) * _LOG_SIZE
            unit = QueueEntry(last, len(_message(last)), 0)
            self._head = queue_entry.encode(unit)

    def _fetch_range(self, start: int, end: int) -> bytes:
        return self._head[start:end].ljust(end - start, b"\0")


def _message(offset: int) -> bytes:
    return frame.encode(
        Frame(
            topic=b"orders",
            body=b"{}",
            properties=b"",
            queue_id=0,
            queue_offset=0,
            physical_offset=offset,
            sys_flag=0,
            born_timestamp=1_700_000_000_000,
            born_host=bytes(8),
            store_timestamp=1_700_000_000_000 + offset // 1_000_000,
            store_host=bytes(8),
            body_crc=0x1FDC66DE & 0x7FFFFFFF,
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--brokers", type=int, default=100)
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--split-size", default="")
    given = parser.parse_args()
    fsspec.register_implementation("pretended", Pretended)
    options = {"path": f"pretended://{given.brokers}/{given.files}/*/store"}
    if given.split_size:
        options["splitSize"] = given.split_size
    began = time.perf_counter()
    tasks = plan_tasks(parse_read_options(options), min_tasks=400)
    seconds = time.perf_counter() - began
    print(
        json.dumps(
            {
                "brokers": given.brokers,
                "log_files": given.brokers * given.files,
                "bytes": given.brokers * given.files * _LOG_SIZE,
                "seconds": round(seconds, 2),
                "tasks": len(tasks),
                "bytes_a_task": len(pickle.dumps(tasks[len(tasks) // 2])),
                "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
