"""Tables in an S3 bucket."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyarrow import fs as pafs

from logquarry.errors import UsageError
from logquarry.spark.lakehouse.export import delta_export, iceberg_export
from tests.helpers.lake import put, run_here
from tests.helpers.s3_server import Options, s3_server

pytest.importorskip("moto")
pytest.importorskip("deltalake")
pytest.importorskip("pyiceberg")


@pytest.fixture(scope="module")
def server() -> Iterator[Options]:
    with s3_server() as options:
        pafs.S3FileSystem(**options, allow_bucket_creation=True).create_dir("lake")
        yield options


def documented(server: Options) -> list[dict[str, str]]:
    """The storage options in docs/lakehouse.md, for this server."""
    page = (Path(__file__).parents[3] / "docs/lakehouse.md").read_text()
    page = page.replace("minio:9000", str(server["endpoint_override"]))
    return [json.loads(block) for block in re.findall("```json\n(.*?)```", page, re.DOTALL)]


def test_delta(server: Options, tmp_path: Path) -> None:
    from deltalake import DeltaTable

    files, options = documented(server)
    for number in range(2):
        put(tmp_path / "store", b'{"n": %d}' % number, b"dead %d" % number, topic="a b")
        done = delta_export(
            tmp_path / "store",
            "s3://lake/delta",
            partition_by=["topic", "day"],
            decode="json",
            dest_storage_options=files,
            table_storage_options=options,
        ).run_with(run_here)
        assert (done.messages, done.dead_messages) == (1, 1)
    table = DeltaTable("s3://lake/delta", storage_options=options).to_pyarrow_table()
    assert sorted(row["n"] for row in table.column("value").to_pylist()) == [0, 1]
    dead = DeltaTable("s3://lake/delta_dead_letters", storage_options=options).to_pyarrow_table()
    assert sorted(dead.column("body").to_pylist()) == [b"dead 0", b"dead 1"]


def test_iceberg(server: Options, tmp_path: Path) -> None:
    from pyiceberg.catalog import load_catalog

    catalog = {
        "type": "sql",
        "uri": f"sqlite:///{tmp_path}/catalog.db",
        "s3.endpoint": f"http://{server['endpoint_override']}",
        "s3.access-key-id": "test",
        "s3.secret-access-key": "test",
        "s3.region": "us-east-1",
    }
    for number in range(2):
        put(tmp_path / "store", b"%d" % number, topic="a b")
        done = iceberg_export(
            tmp_path / "store",
            "s3://lake/iceberg",
            partition_by=["topic", "day"],
            catalog=catalog,
            dest_storage_options=server,
        ).run_with(run_here)
        assert (done.messages, done.commits) == (1, 1)
    opened = load_catalog("logquarry", **catalog)
    table = opened.load_table("logquarry.messages").scan().to_arrow()
    assert sorted(table.column("body").to_pylist()) == [b"0", b"1"]
    opened.close()
    with pytest.raises(UsageError, match="needs a local folder"):
        iceberg_export(tmp_path / "store", "s3://lake/x", dest_storage_options=server)
