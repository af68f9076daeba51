"""RocketMQ reads every message of a loaded store, and has nothing to recover."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

import logquarry as lq
from logquarry.ingest.load import commit_load, plan_load
from logquarry.ingest.staging import LoadPlan, Stager
from logquarry.store.load.ledger import LoadId
from tests.conformance.oracle import require_oracle
from tests.conformance.test_store_java import (
    PARAMS,
    check_nothing_was_recovered,
    check_reads_alike,
    dumped,
)

pytestmark = pytest.mark.java

ROWS = 700


def rows(first: int) -> pa.RecordBatch:
    numbers = range(first, first + ROWS)
    return pa.record_batch(
        {
            "topic": [f"topic{n % 3}" for n in numbers],
            "body": pa.array([b"%d:" % n + bytes(n % 90) for n in numbers]),
            "keys": [f"key{n} all" if n % 2 else None for n in numbers],
            "tags": [["paid", "sent", None][n % 3] for n in numbers],
            "delay_level": pa.array([2 if n % 50 == 0 else 0 for n in numbers], pa.int32()),
            "sys_flag": pa.array([[0, 0, 4, 8, 12][n % 5] for n in numbers], pa.int32()),
            "born_host": [["10.1.2.3:4000", "[::1]:5000"][n % 7 == 0] for n in numbers],
        }
    )


def test_the_real_store_reads_what_was_loaded(tmp_path: Path) -> None:
    require_oracle()
    plan = plan_load(
        LoadPlan(path=str(tmp_path / "store"), config=lq.StoreConfig.from_mapping(PARAMS))
    )
    for version in range(2):
        load = LoadId("job", version)
        tasks = []
        for partition in range(3):
            stager = Stager(plan, load, partition)
            stager.add(rows((version * 3 + partition) * ROWS))
            tasks.append(stager.finish())
        assert commit_load(plan, load, tasks).rows == 3 * ROWS
    found = dumped(tmp_path, PARAMS)
    assert len(found.expected) == 6 * ROWS
    queues: dict[tuple[str, int], list[int]] = {}
    for message in found.expected:
        if not message["sysFlag"] & 4:
            key = message["topic"], message["queueId"]
            queues.setdefault(key, []).append(message["queueOffset"])
    assert all(offsets == list(range(len(offsets))) for offsets in queues.values())
    check_reads_alike(found)
    check_nothing_was_recovered(found)
