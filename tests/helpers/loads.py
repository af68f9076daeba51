"""Loads of rows into a store, without Spark: the plan, the staged tasks, and the messages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

import logquarry as lq
from logquarry.ingest.load import (
    plan_load,
)
from logquarry.ingest.staging import LoadPlan, Staged, Stager
from logquarry.store.load.ledger import LoadId
from tests.helpers.small_store import config

LOAD = LoadId("job", 1)


def planned(root: Path, **given: Any) -> LoadPlan:
    return plan_load(LoadPlan(path=str(root), config=config(max_message_size=3_000), **given))


def staged(plan: LoadPlan, *tasks: Sequence[dict[str, Any]], load: LoadId = LOAD) -> list[Staged]:
    found = []
    for partition, rows in enumerate(tasks):
        stager = Stager(plan, load, partition, clock=lambda: 5)
        stager.add(pa.RecordBatch.from_pylist(list(rows), schema_of(rows)))
        found.append(stager.finish())
    return found


def schema_of(rows: Sequence[dict[str, Any]]) -> pa.Schema:
    kinds = {
        "topic": pa.string(),
        "body": pa.binary(),
        "queue_id": pa.int32(),
        "keys": pa.string(),
        "properties": pa.map_(pa.string(), pa.string()),
        "sys_flag": pa.int32(),
        "delay_level": pa.int32(),
    }
    names = {name for row in rows for name in row} | {"topic", "body"}
    return pa.schema([(name, kind) for name, kind in kinds.items() if name in names])


def messages(root: Path) -> list[lq.StoredMessage]:
    with lq.MessageStore.open(root, config=config()) as store:
        return list(store.scan())


def row(topic: str | None = "t", body: bytes | None = b"b", **more: Any) -> dict[str, Any]:
    return {"topic": topic, "body": body, **more}
