"""The examples of docs/spark.md run one after the other, in one session."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.helpers.store_maker import StoreMaker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PAGE = Path(__file__).parents[2] / "docs" / "spark.md"


def test_examples(spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    maker = StoreMaker()
    for n in range(30):
        maker.put(["orders", "payments"][n % 2], body=b"word and word", tags="paid", keys=f"o-{n}")
    maker.write(tmp_path / "data" / "rocketmq" / "store")
    text = PAGE.read_text("utf-8").replace("/data/", f"{tmp_path}/data/")
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
    assert "|word|   30|" in capsys.readouterr().out
