"""Loads on a cluster of several processes, in a Python of its own (see `test_cluster`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import logquarry as lq

_PROGRAM = """
import json, sys
import logquarry as lq
from logquarry.spark import get_session, load

if __name__ == "__main__":
    out, settings = json.loads(sys.argv[1])
    spark = get_session(master="local-cluster[2,1,1024]")
    df = spark.range(0, 20_000, 1, 6).selectExpr(
        "concat('topic', id % 3) as topic",
        "cast(concat('body ', id) as binary) as body",
        "concat('key', id) as keys",
    )
    config = json.dumps(settings)
    writer = df.write.format("rocketmq").mode("append").option("config", config)
    writer.option("brokers", 4).save(f"{out}/written")
    load(df, f"{out}/loaded", brokers=4, config=lq.StoreConfig.from_mapping(settings))
    for how in ("written", "loaded"):
        found = spark.read.format("rocketmq").load(f"{out}/{how}/*")
        row = found.selectExpr("count(*)", "count(distinct body)", "count(distinct broker)").first()
        assert tuple(row) == (20_000, 20_000, 4), row
    spark.stop()
"""


@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_four_brokers_on_two_executors(tmp_path: Path) -> None:
    settings = {"mappedFileSizeCommitLog": 1 << 20, "maxHashSlotNum": 500, "maxIndexNum": 2_000}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, json.dumps([str(tmp_path), settings])],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(root), *sys.path])},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    for broker in range(4):
        logs = []
        for how in ("written", "loaded"):
            with lq.MessageStore.open(tmp_path / how / f"broker-{broker}") as store:
                logs.append([(m.topic, m.queue_id, m.queue_offset, m.body) for m in store.scan()])
                for topic, queue_id in store.queues():
                    count = sum(each[:2] == (topic, queue_id) for each in logs[-1])
                    assert store.queue_offsets(topic, queue_id) == (0, count)
        assert logs[0] == logs[1]
        assert logs[0]
