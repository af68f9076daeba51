"""Traces the main operations of the package (paths), such as a put or a get.

The result counts the calls, files and hops of each path.

Run from the project's root: ``python -m tools.trace_paths``. With ``--list PATH``, the program
prints the files and the calls of one path in their order. With ``--check``, it fails if a path
exceeds its limits, which the column mark shows.

The tool counts a call when the main thread enters a function of src/logquarry, or resumes a
generator. Code of a module that runs at its import is not counted. A hop is a call into a file
other than the file of the previous call. Each path first runs once as a warm-up in a separate
folder, so that the figures do not contain imports and the compilation of kernels.

The tool runs all modules interpreted, because a profiler does not see the calls of compiled ones.
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import logquarry as lq
from logquarry.log.layout import StoreLayout
from logquarry.repair.verification import verify_store

SOURCE = Path(lq.__file__).resolve().parent
_CONFIG = lq.StoreConfig(
    mapped_file_size_commit_log=1 << 20,
    mapped_file_size_consume_queue=20_000,
    max_hash_slot_num=5_000,
    max_index_num=20_000,
)
_TORN_BYTES = 40


class Call(NamedTuple):
    """One call: file and line of its function, and its depth below the first call."""

    file: str
    line: int
    function: str
    depth: int


@dataclass(frozen=True)
class Trace:
    """The calls of one path, in their order."""

    calls: tuple[Call, ...]

    @property
    def files(self) -> Counter[str]:
        """Number of calls of each file, in the order of the first calls."""
        return Counter(call.file for call in self.calls)

    @property
    def hops(self) -> int:
        """Number of calls into a file other than the file of the previous call."""
        pairs = zip(self.calls, self.calls[1:], strict=False)
        return sum(one.file != next_.file for one, next_ in pairs)


class TracedPath(NamedTuple):
    """An operation to trace: its preparation, the operation itself, and its limits.

    `prepared` makes a store in an empty folder and yields the action to trace.
    """

    title: str
    prepared: Callable[[Path], Any]
    max_files: int | None = None
    max_calls: int | None = None


def trace(action: Callable[[], object]) -> Trace:
    """Run `action`, and record the calls of this thread."""
    calls: list[Call] = []
    prefix = f"{SOURCE}/"
    is_ours: dict[str, bool] = {}
    depth = 0

    def record(frame: FrameType, event: str, _: object) -> None:
        nonlocal depth
        if event not in ("call", "return"):
            return
        code = frame.f_code
        name = code.co_filename
        ours = is_ours.get(name)
        if ours is None:
            ours = is_ours[name] = name.startswith(prefix)
        if not ours or code.co_name == "<module>":
            return
        if event == "return":
            depth -= 1
            return
        file = name.removeprefix(prefix)
        calls.append(Call(file, code.co_firstlineno, code.co_qualname, depth))
        depth += 1

    sys.setprofile(record)
    try:
        action()
    finally:
        sys.setprofile(None)
    return Trace(tuple(calls))


def _message(number: int) -> lq.Message:
    return lq.Message(
        "orders", b"body of message %d" % number, queue_id=0, tags="paid", keys=f"o-{number} u-7"
    )


def _filled_store(folder: Path, count: int = 8) -> Path:
    """Make a store with some messages, and close it."""
    root = folder / "store"
    with lq.MessageStore.open(root, mode="rw", config=_CONFIG) as store:
        for number in range(count):
            store.put(_message(number))
    return root


@contextmanager
def _put(folder: Path) -> Iterator[Callable[[], object]]:
    with lq.MessageStore.open(_filled_store(folder), mode="rw") as store:
        store.put(_message(0))
        message = _message(1)
        yield lambda: store.put(message)


@contextmanager
def _put_many(folder: Path) -> Iterator[Callable[[], object]]:
    with lq.MessageStore.open(_filled_store(folder), mode="rw") as store:
        messages = [_message(0), _message(1)]
        yield lambda: store.put_many(messages)


@contextmanager
def _get(folder: Path) -> Iterator[Callable[[], object]]:
    """Trace the second get; the first get opens the queue."""
    with lq.MessageStore.open(_filled_store(folder), mode="rw") as store:
        store.wait_dispatched()
        store.get("orders", 0, offset=0)
        yield lambda: store.get("orders", 0, offset=0)


@contextmanager
def _spark_rows(folder: Path) -> Iterator[Callable[[], object]]:
    """Trace the calls of Spark's driver and its tasks, without a JVM."""
    from logquarry.spark.source import RocketMQDataSource

    root = _filled_store(folder)

    def read() -> None:
        source = RocketMQDataSource({"path": str(root)})
        reader = source.reader(source.schema())
        for partition in reader.partitions():
            for _ in reader.read(partition):
                pass

    yield read


@contextmanager
def _verify(folder: Path) -> Iterator[Callable[[], object]]:
    root = _filled_store(folder)
    yield lambda: verify_store(StoreLayout.open(root))


@contextmanager
def _open_rw(folder: Path) -> Iterator[Callable[[], object]]:
    """Trace the opening of a store that was shut down cleanly."""
    root = _filled_store(folder)
    opened: list[lq.MessageStore] = []
    yield lambda: opened.append(lq.MessageStore.open(root, mode="rw"))
    opened[0].close()


@contextmanager
def _recover(folder: Path) -> Iterator[Callable[[], object]]:
    """Make a store after a power cut: an open store without the end of the last frame."""
    root = _filled_store(folder)
    with lq.MessageStore.open(root) as store:
        end = max(message.physical_offset + message.size for message in store.scan())
    (root / "abort").write_bytes(b"")
    log = min((root / "commitlog").iterdir())
    with log.open("r+b") as file:
        file.seek(end - _TORN_BYTES)
        file.write(bytes(_TORN_BYTES))
    yield lambda: lq.recover(root, apply=True)


PATHS: dict[str, TracedPath] = {
    "put": TracedPath("put with tags and keys", _put, max_files=6, max_calls=15),
    "put_many": TracedPath("put_many, first call of 2 messages", _put_many),
    "get": TracedPath("get", _get),
    "spark": TracedPath("Spark option to rows", _spark_rows, max_files=18),
    "verify": TracedPath("verify", _verify, max_files=20),
    "open": TracedPath("open rw", _open_rw, max_files=35),
    "recover": TracedPath("recover --apply", _recover, max_files=30),
}


def trace_path(path: TracedPath) -> Trace:
    """Run a path once to warm up, and trace it in a new store."""
    for is_traced in (False, True):
        with (
            tempfile.TemporaryDirectory(prefix="logquarry-trace-") as folder,
            path.prepared(Path(folder)) as action,
        ):
            if is_traced:
                return trace(action)
            action()
    raise AssertionError("the second round returns")


def is_kept(path: TracedPath, found: Trace) -> bool:
    """Whether a trace is within the limits of its path."""
    max_files = path.max_files or len(found.files)
    max_calls = path.max_calls or len(found.calls)
    return len(found.files) <= max_files and len(found.calls) <= max_calls


def _table(traces: dict[str, Trace]) -> str:
    lines = [
        "| path | calls | files | hops between files | mark | kept |",
        "|---|---:|---:|---:|---|---|",
    ]
    for name, found in traces.items():
        path = PATHS[name]
        marks = [
            f"{most} {what}"
            for most, what in ((path.max_files, "files"), (path.max_calls, "calls"))
            if most is not None
        ]
        verdict = ("yes" if is_kept(path, found) else "no") if marks else ""
        cells = [
            f"{path.title} (`{name}`)",
            f"{len(found.calls):,}",
            f"{len(found.files):,}",
            f"{found.hops:,}",
            ", ".join(marks),
            verdict,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _listing(found: Trace) -> str:
    lines = [f"{len(found.files)} files, in the order in which they are entered:"]
    lines += [f"{count:>6} calls  {file}" for file, count in found.files.items()]
    lines += ["", f"{len(found.calls)} calls:"]
    lines += [
        f"{'  ' * max(0, call.depth)}{call.file}:{call.line} {call.function}"
        for call in found.calls
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, or the calls of one path."""
    parser = argparse.ArgumentParser(prog="python -m tools.trace_paths", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "paths",
        nargs="*",
        metavar="PATH",
        help=f"paths of the table (default: all): {', '.join(PATHS)}",
    )
    parser.add_argument(
        "--list", choices=PATHS, metavar="PATH", help="print the files and calls of one path"
    )
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 if a path exceeds its limits"
    )
    given = parser.parse_args(arguments)
    unknown = sorted(set(given.paths) - PATHS.keys())
    if unknown:
        parser.error(f"no such path: {', '.join(unknown)} (there are {', '.join(PATHS)})")
    # Hide the warnings that the recovery logs, because the traced store is damaged on purpose.
    logging.getLogger("logquarry").setLevel(logging.ERROR)
    if given.list is not None:
        print(_listing(trace_path(PATHS[given.list])))
        return 0
    traces = {name: trace_path(PATHS[name]) for name in given.paths or PATHS}
    print(_table(traces))
    kept = all(is_kept(PATHS[name], found) for name, found in traces.items())
    return int(given.check and not kept)


if __name__ == "__main__":
    if "LOGQUARRY_COMPILED" not in os.environ:
        # The variable counts only before the import of logquarry.
        command = [sys.executable, "-m", "tools.trace_paths", *sys.argv[1:]]
        environment = {**os.environ, "LOGQUARRY_COMPILED": "off"}
        sys.exit(subprocess.run(command, env=environment, check=False).returncode)
    sys.exit(main())
