"""Exports stores to files, and normalizes messages for a comparison after an import."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from logquarry.format import properties as props
from logquarry.format import sys_flag
from logquarry.spark.options import ReadOptions
from logquarry.spark.output import OutputFolder
from logquarry.spark.parquet import write_task
from logquarry.spark.tasks import plan_tasks
from tests.helpers.command import run

DDL = (
    "broker string, topic string, queue_id int, queue_offset bigint, physical_offset bigint, "
    "size int, message_id string, store_timestamp timestamp, born_timestamp timestamp, "
    "born_host string, store_host string, sys_flag int, flag int, body_crc int, "
    "reconsume_times int, prepared_transaction_offset bigint, tags string, keys string, "
    "uniq_key string, tags_code bigint, properties map<string,string>, body binary"
)
"""The columns with their Spark types."""

Message = dict[str, Any]


def exported_lines(store: Path, target: Path) -> list[Message]:
    """Write a store as JSON lines, and read them."""
    run("export", store, "--format", "jsonl", "--to", target, "--quiet")
    return [json.loads(line) for line in target.read_text("utf-8").splitlines()]


def export_parquet(store: Path, folder: Path, **options: Any) -> Path:
    """Write a store as Parquet as the export's workers do, without Spark and without a manifest."""
    output = OutputFolder(folder)
    output.make("staging")
    for task in plan_tasks(ReadOptions(paths=(str(store),), **options)):
        for file in write_task(task, output, "staging", ()).files:
            output.move(file.staged, file.path)
    output.remove_folder("staging")
    return folder


def kept(messages: list[Message], *, keep_times: bool) -> list[Message]:
    """The fields that an import keeps; queue offsets count from the first of each queue."""
    firsts: dict[tuple[str, int], int] = {}
    found = []
    for message in messages:
        same = {
            name: value
            for name, value in message.items()
            if name not in ("broker", "physical_offset", "message_id")
        }
        if sys_flag.advances_queue(same["sys_flag"]):
            key = same["topic"], same["queue_id"]
            same["queue_offset"] -= firsts.setdefault(key, same["queue_offset"])
        if not keep_times:
            time = same.pop("store_timestamp")
            is_delayed = (props.parse_int(same["properties"].get("DELAY", "")) or 0) > 0
            if same["topic"] == props.SCHEDULE_TOPIC and is_delayed:
                # The time of delivery, which depends on the store time.
                same["tags_code"] -= time
        found.append(same)
    return found
