"""The same rows on a cluster of several processes as in this one.

In a Python of its own: this process has a session already, and may have only one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.spark.golden_rows import golden_messages, sound_stores

_PROGRAM = """
import json, sys
from logquarry.errors import CorruptFrame
from logquarry.spark import get_session
from logquarry.spark.errors import explain
from logquarry.spark.export import export_parquet
from tests.spark.golden_rows import rows_by_broker

stores, harmed, out = json.loads(sys.argv[1])
spark = get_session(master="local-cluster[2,1,1024]")
df = spark.read.format("rocketmq").option("minPartitions", "16").load(list(stores.values()))
executors = {row[0] for row in df.selectExpr("spark_partition_id()").distinct().collect()}
assert len(executors) >= 16, executors
told = {"read": rows_by_broker(df)}
summary = export_parquet(spark, list(stores.values()), out, {"minPartitions": "16"})
told["messages"] = summary.messages
told["exported"] = rows_by_broker(spark.read.parquet(out))
try:
    spark.read.format("rocketmq").load(harmed).collect()
except Exception as error:
    told["error"] = repr(explain(error))
for rows in (told["read"], told["exported"]):
    for message in (m for messages in rows.values() for m in messages):
        message["body"] = message["body"].hex()
with open(out + ".json", "w") as file:
    json.dump(told, file)
spark.stop()
"""


@pytest.mark.cluster
@pytest.mark.timeout(600)
def test_local_cluster(golden: Path, tmp_path: Path) -> None:
    stores = sound_stores(golden)
    harmed = golden / "unclean" / "crc-third-last-file" / "store"
    out = tmp_path / "out"
    given = json.dumps([{k: str(v) for k, v in stores.items()}, str(harmed), str(out)])
    root = Path(__file__).parents[2]
    environ = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, given],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads(Path(f"{out}.json").read_text())
    for broker, path in stores.items():
        expected = golden_messages(path.parent / "expected.jsonl")
        for message in expected:
            message["body"] = message["body"].hex()
        assert told["read"][broker] == expected, broker
        assert told["exported"][broker] == expected, broker
    assert told["messages"] == sum(len(rows) for rows in told["read"].values())
    assert told["error"].startswith("CorruptFrame(")
    assert "at offset 36796: bad_body_crc" in told["error"]
