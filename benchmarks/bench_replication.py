"""Compare the replication of logquarry and RocketMQ on loopback.

Run ``python -m benchmarks.bench_replication``.

The program makes two measurements. In both, master and slave run in separate processes, which
accept the same commands for logquarry and for RocketMQ:

- bytes of an existing log a second that a new slave receives, from the first byte on;
- messages a second that are put into a SYNC_MASTER while 64 puts wait for the slave: in Java from
  64 threads; in logquarry from 64 threads, or from one thread with 64 futures.

RocketMQ's slave acknowledges bytes as soon as it has them in memory. Logquarry's slave acknowledges
them when they are on the disk; a further measurement lets it acknowledge them in memory too.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import logquarry as lq
from logquarry.replication import HaMaster, HaSlave, MasterOptions, SlaveOptions
from logquarry.write.put_result import PutResult, PutStatus
from logquarry.write.settling import PutFuture

ORACLE = Path(__file__).parents[1] / "oracle" / "run"
_WAITERS = 64


# ----------------------------------------------------------------------- one side, as a process
def serve(arguments: Sequence[str]) -> None:
    """Run our master or slave with the commands of ``oracle/run ha-master`` and ``ha-slave``."""
    kind, where, folder, params = arguments[:4]
    config = lq.StoreConfig.from_mapping(json.loads(Path(params).read_text()))
    if kind == "master":
        with (
            lq.MessageStore.open(folder, config=config, mode="rw") as store,
            HaMaster(store, port=int(where), options=MasterOptions(full_history=True)),
        ):
            _obey(store)
        return
    host, _, port = where.rpartition(":")
    config = replace(config, broker_role="SLAVE")
    options = SlaveOptions(acknowledge=arguments[4], first_pause=0.01, longest_pause=0.1)
    with (
        lq.MessageStore.open(folder, config=config, mode="rw") as store,
        HaSlave(store, host, int(port), options=options),
    ):
        _obey(store)


def _obey(store: lq.StoreWriter) -> None:
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        command, *words = line.split()
        if command == "quit":
            return
        answer: dict[str, Any] = {"maxPhyOffset": store.max_offset}
        if command == "load":
            numbers = [int(word) for word in words[:3]]
            work = _with_threads if words[3:] == ["threads"] else _with_futures
            answer["seconds"] = work(store, *numbers)
        elif command == "status":
            answer["connections"] = store.log_feed().replicas.connected
        print(json.dumps(answer), flush=True)


def _message(number: int, body: bytes) -> lq.Message:
    return lq.Message(
        f"BenchTopic{number % 4}",
        body=body,
        queue_id=number // 4 % 4,
        properties_string=f"KEYS\1key{number}\2TAGS\1TagA",
    )


def _require(result: PutResult) -> None:
    assert result.status is PutStatus.PUT_OK, result


def _with_futures(store: lq.StoreWriter, count: int, waiters: int, size: int) -> float:
    body = bytes(size)
    waiting: deque[PutFuture] = deque()
    began = time.perf_counter()
    for number in range(count):
        if len(waiting) == waiters:
            _require(waiting.popleft().result())
        waiting.append(store.put_async(_message(number, body)))
    while waiting:
        _require(waiting.popleft().result())
    return time.perf_counter() - began


def _with_threads(store: lq.StoreWriter, count: int, waiters: int, size: int) -> float:
    body = bytes(size)

    def put(first: int) -> None:
        for number in range(first, count, waiters):
            _require(store.put(_message(number, body)))

    threads = [threading.Thread(target=put, args=(first,)) for first in range(waiters)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


# ------------------------------------------------------------------------------------- timing
class Side:
    """A child process that takes commands on stdin."""

    def __init__(self, *command: str | Path) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._answer()

    def ask(self, command: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a process ended without an answer")
        document: dict[str, Any] = json.loads(line)
        return document

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def pair(
    kind: str, work: Path, master: Path, params: Path, how: str
) -> Iterator[tuple[Side, Side]]:
    """Start a master for a folder, and a new slave."""
    port = _free_port()
    copy = work / "slave"
    shutil.rmtree(copy, ignore_errors=True)
    where = f"127.0.0.1:{port}"
    sides: list[Side] = []
    try:
        if kind == "java":
            role = ["--role", "SYNC_MASTER"] if how == "sync" else []
            sides.append(Side(ORACLE, "ha-master", str(port), master, *role, "--params", params))
            sides.append(Side(ORACLE, "ha-slave", where, copy, "--params", params))
        else:
            module = [sys.executable, "-m", "benchmarks.bench_replication", "side"]
            sides.append(Side(*module, "master", str(port), master, params))
            sides.append(Side(*module, "slave", where, copy, params, kind))
        yield sides[0], sides[1]
    finally:
        for side in sides:
            side.end()


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def throughput(kind: str, work: Path, master: Path, params: Path, end: int) -> float:
    """Return the bytes a second that the slave receives.

    The time runs from the first poll that finds bytes at the slave until the slave has all bytes.
    """
    with pair(kind, work, master, params, "async") as (_, slave):
        first: tuple[float, int] | None = None
        while True:
            offset = int(slave.ask("status")["maxPhyOffset"])
            now = time.perf_counter()
            if first is None and offset > 0:
                first = now, offset
            if offset >= end:
                assert first is not None
                return (end - first[1]) / (now - first[0]) if now > first[0] else float("inf")
            time.sleep(0.002)


def sync_puts(
    kind: str, work: Path, params: Path, count: int, body: int, threads: bool
) -> dict[str, float]:
    """Messages a second, measured after a warm-up with half as many messages."""
    master = work / "sync-master"
    shutil.rmtree(master, ignore_errors=True)
    with pair(kind, work, master, params, "sync") as (side, _):
        while not side.ask("status").get("connections"):
            time.sleep(0.05)
        word = " threads" if threads else ""
        # Put one message before the measurement: the first put waits until RocketMQ's slave has
        # reported its offset for the first time.
        time.sleep(7 if kind == "java" else 0.5)
        side.ask(f"load {count // 2} {_WAITERS} {body}{word}")
        seconds = float(side.ask(f"load {count} {_WAITERS} {body}{word}")["seconds"])
    return {"messages_per_s": round(count / seconds), "seconds": round(seconds, 3)}


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, help="where the stores are made")
    parser.add_argument("--mib", type=int, default=512, help="of log to send")
    parser.add_argument("--puts", type=int, default=20_000)
    parser.add_argument("--body", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--no-java", action="store_true")
    asked = parser.parse_args(arguments)
    work = Path(tempfile.mkdtemp(dir=asked.dir))
    try:
        print(json.dumps(measure(work, asked), indent=2))
    finally:
        shutil.rmtree(work)


def measure(work: Path, asked: argparse.Namespace) -> dict[str, Any]:
    """Return all figures, each the best of some rounds.

    The kinds of measurements alternate, so that a slow moment of the machine does not affect only
    one kind.
    """
    sizes = {
        "mappedFileSizeCommitLog": 1 << 30,
        "mappedFileSizeConsumeQueue": 6_000_000,
        "maxHashSlotNum": 5_000_000,
        "maxIndexNum": 20_000_000,
    }
    params, sync = work / "params.json", work / "sync.json"
    params.write_text(json.dumps(sizes))
    sync.write_text(json.dumps(sizes | {"brokerRole": "SYNC_MASTER"}))
    master = work / "master"
    config = lq.StoreConfig.from_mapping(sizes)
    with lq.MessageStore.open(master, config=config, mode="rw") as store:
        many = [_message(number, bytes(1_000)) for number in range(8_192)]
        while store.max_offset < asked.mib << 20:
            store.put_many(many)
        store.wait_dispatched()
        end = store.max_offset
    kinds = ["flushed", "received"] + ([] if asked.no_java else ["java"])
    found: dict[str, Any] = {"log_bytes": end, "bytes_per_s": {}, "sync_puts": {}}
    for _ in range(asked.rounds):
        for kind in kinds:
            speed = throughput(kind, work, master, params, end)
            best = found["bytes_per_s"].get(kind, 0)
            found["bytes_per_s"][kind] = max(best, round(speed))
    ways = [(kind, threads) for kind in kinds for threads in (False, True)]
    for _ in range(asked.rounds):
        for kind, threads in ways:
            if kind == "java" and not threads:
                continue
            name = f"{kind}, {'threads' if threads else 'futures'}"
            told = sync_puts(kind, work, sync, asked.puts, asked.body, threads)
            before = found["sync_puts"].get(name, told)
            found["sync_puts"][name] = max(before, told, key=lambda one: one["messages_per_s"])
    return found


if __name__ == "__main__":
    if sys.argv[1:2] == ["side"]:
        serve(sys.argv[2:])
    else:
        main(sys.argv[1:])
