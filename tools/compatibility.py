"""Makes the tables of docs/compatibility.md from results of ``tests/conformance/matrix5.py``."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

RESULTS = Path(__file__).parent.parent / "tests" / "data" / "rocketmq5_matrix.jsonl"
VERSIONS = ("5.1.4", "5.3.3", "5.4.0", "5.5.0")
COMMANDS = ("read", "get", "verify", "put", "recover", "rebuild", "salvage", "convert")
_ON_LIVE = COMMANDS[:7]
"""The commands that are also tested on a copy of a running broker's files."""
_FAILED = "failed"
_LIVE = "-live"

SCENARIOS = {
    "plain": "queue files, V2 frames, delay levels, transactions",
    "ipv6": "hosts with IPv6",
    "default-sizes": "files of the default sizes",
    "timer": "timer wheel",
    "timer-snapshot": "timer wheel with snapshots",
    "pop": "pop consumers",
    "pop-kv": "pop records in `kvStore/`",
    "pop-retry-v2": "pop with retry topics of version 2",
    "lmq": "LMQ and lite topics (multi-dispatch)",
    "batchcq": "batch queues, inner batches",
    "compaction": "compaction topics",
    "propcrc": "property CRC (`enabledAppendPropCRC`)",
    "cqext": "queue extension (`enableConsumeQueueExt`)",
    "no-mmap": "`writeWithoutMmap`",
    "transient": "`transientStorePoolEnable`",
    "multipath": "log in several folders",
    "dledger": "DLedger",
    "controller": "controller mode",
    "tiered": "tiered storage",
    "rocksdb": "queues and configuration in RocksDB",
    "rocksdb-separate": "queues in `consumequeue_rocksdb/`",
    "rocksdb-double": "queues as files and in RocksDB",
    "rocksdb-config-v2": "queues in RocksDB, configuration of version 2",
    "rocksdb-lmq": "queues in RocksDB, multi-dispatch",
    "rocksdb-more": "index, timers and transactions in RocksDB",
    "kill": "killed broker, queue files",
    "kill-no-mmap": "killed broker, `writeWithoutMmap`",
    "kill-transient": "killed broker, `transientStorePoolEnable`",
    "kill-rocksdb": "killed broker, queues in RocksDB",
}
"""For each scenario of oracle/v5, what its store contains."""

_LEFT_BEHIND = {
    "controller": "does not copy the controller's epochs",
    "queue_ext": "does not copy the queue extension",
    "rocksdb_config": "copies the configuration in RocksDB unchanged, without making JSON files",
    "rocksdb_queues": "does not copy the queues in RocksDB, but makes queue files",
    "rocksdb_store": "does not copy `rocksdbstore/`",
    "tiered": "does not copy the messages that are only in tiered storage",
}
"""For each feature that a salvage left behind, what the salvage does."""


def results(path: Path = RESULTS) -> str:
    """Return the tables, and a list of the failures."""
    cells: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    failures, left = [], []
    for line in path.read_text("utf-8").splitlines():
        row = json.loads(line)
        version, _, scenario = row["store"].partition("/")
        cells[scenario, row["command"]][version] = row["result"]
        if row["result"] == _FAILED:
            failures.append(f"- {row['store']}, `{row['command']}`: {_plain(row['detail'])}")
        elif row["detail"].startswith("left behind"):
            features = row["detail"].removeprefix("left behind: ").split(", ")
            left += [
                f"- {row['store']}: `{row['command']}` {_LEFT_BEHIND[name]} (`{name}`)"
                for name in features
            ]
    parts = ["## Stores of brokers that were shut down or killed", _table(cells, "", COMMANDS)]
    parts += ["## Copies of the files of a running broker", _table(cells, _LIVE, _ON_LIVE)]
    if failures:
        parts += ["## Failures", "\n".join(failures)]
    if left:
        parts += ["## Parts that are left behind", "\n".join(left)]
    return "\n\n".join(parts)


def _table(
    cells: dict[tuple[str, str], dict[str, str]], suffix: str, commands: tuple[str, ...]
) -> str:
    lines = [f"| store | {' | '.join(commands)} |", "|---" * (len(commands) + 1) + "|"]
    for scenario, what in SCENARIOS.items():
        found = [_cell(cells.get((scenario + suffix, command), {})) for command in commands]
        if any(cell != "-" for cell in found):
            lines.append(f"| `{scenario}`: {what} | {' | '.join(found)} |")
    return "\n".join(lines)


def _cell(results: dict[str, str]) -> str:
    by_result: dict[str, list[str]] = defaultdict(list)
    for version in VERSIONS:
        if version in results:
            by_result[results[version]].append(version)
    if len(by_result) == 1 and len(results) == len(VERSIONS):
        return next(iter(by_result))
    words = [f"{result} ({', '.join(versions)})" for result, versions in by_result.items()]
    return "; ".join(words) or "-"


def _plain(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
