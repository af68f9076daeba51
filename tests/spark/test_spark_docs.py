"""The examples of docs/spark.md run one after the other, in one session."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.helpers.s3_server import put_stores, s3_server
from tests.helpers.store_maker import StoreMaker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PAGE = Path(__file__).parents[2] / "docs" / "spark.md"


@pytest.fixture
def open_servers() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_examples(
    spark: SparkSession,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    open_servers: ExitStack,
) -> None:
    maker = StoreMaker()
    for n in range(30):
        maker.put(["orders", "payments"][n % 2], body=b"word and word", tags="paid", keys=f"o-{n}")
    maker.write(tmp_path / "data" / "rocketmq" / "store")
    text = PAGE.read_text("utf-8").replace("/data/", f"{tmp_path}/data/")
    store = tmp_path / "data" / "rocketmq" / "store"
    server = open_servers.enter_context(s3_server())
    put_stores(server, {"a": store, "b": store})
    text = text.replace("minio.example:9000", server["endpoint_override"])
    names: dict[str, object] = {}
    examples = list(re.finditer(r"```python\n(.*?)```", text, re.DOTALL))
    assert len(examples) >= 4
    for example in examples:
        line = text[: example.start()].count("\n") + 1
        # Keep the page's line numbers, so that a failure names the line.
        exec(compile("\n" * line + example[1], "docs/spark.md", "exec"), names)
    assert spark.read.parquet(f"{tmp_path}/data/lake/orders").count() == 15
    words = {row[0]: row[1] for row in spark.table("words").collect()}
    assert words == {"word": 30, "and": 15}
    told = capsys.readouterr().out
    assert "|word|   30|" in told
    assert "|     a|   30|" in told and "|     b|   30|" in told
