"""A driver that has `pyspark-client` and no Java, beside a server of Spark Connect.

`tools/spark_matrix.py` makes the driver's environment in the folder `client` of a cell.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from logquarry.spark.columns import has_sources
from tests.helpers.store_maker import StoreMaker

ROOT = Path(__file__).parents[3]
CLIENT = Path(sys.prefix) / "client" / "bin" / "python"

pytestmark = [
    pytest.mark.skipif(not has_sources(), reason="this PySpark has no data sources in Python"),
    pytest.mark.skipif(not CLIENT.exists(), reason="no environment with pyspark-client"),
]

DRIVER = """
import sys
from importlib.metadata import PackageNotFoundError, version
from pyspark.sql import SparkSession
from logquarry.errors import UsageError
from logquarry.spark import read, register, verify_stores

try:
    version("pyspark")
except PackageNotFoundError:
    print("only pyspark-client", version("pyspark-client").rpartition(".")[0])
port, store = sys.argv[1:]
spark = SparkSession.builder.remote(f"sc://127.0.0.1:{port}").getOrCreate()
register(spark)
df = spark.read.format("rocketmq").option("topics", "orders").load(store)
print("rows", sorted(bytes(row[0]).decode() for row in df.select("body").collect()))
try:
    verify_stores(spark, store)
except UsageError as error:
    print("refused:", error)
try:
    read(spark, store + "-none").count()
except Exception as error:
    print("missing:", str(error).splitlines()[0])
spark.stop()
"""


@pytest.fixture
def port() -> Iterator[str]:
    """The port of a server, which ends after the test."""
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.spark.matrix.connect_server"],
        cwd=ROOT,
        env={**os.environ, "PYSPARK_PYTHON": sys.executable},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdin is not None and server.stdout is not None
    try:
        yield server.stdout.readline().strip()
    finally:
        server.stdin.close()
        server.wait(60)
        server.stdout.close()


def test_a_driver_with_the_client_alone(port: str, tmp_path: Path) -> None:
    assert port.isdigit(), "the server did not start"
    maker = StoreMaker()
    for n in range(20):
        maker.put(["orders", "payments"][n % 2], body=b"body %d" % n)
    maker.write(tmp_path / "store")
    # pyspark-client 4.2 takes `python -c` for a run of its doctests, and ends.
    (tmp_path / "driver.py").write_text(DRIVER)
    done = subprocess.run(
        [CLIENT, tmp_path / "driver.py", port, tmp_path / "store"],
        # A JVM on the driver would be a fault.
        env={**os.environ, "JAVA_HOME": "/nonexistent", "PYSPARK_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"
    told = done.stdout.splitlines()
    assert told[0].startswith("only pyspark-client 4.")
    assert told[1] == f"rows {sorted(f'body {n}' for n in range(0, 20, 2))}"
    assert told[2].startswith("refused: this job needs a classic Spark session")
    assert "StoreNotFound" in told[3]
