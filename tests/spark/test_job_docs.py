"""The examples of the pages about Spark jobs run in their order, in one folder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.spark
@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize("page", ["jobs.md", "lakehouse.md"])
def test_the_examples_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (DOCS / page).read_text("utf-8")
    examples = list(re.finditer(r"```python\n(.*?)```", text, re.DOTALL))
    assert len(examples) > 1
    names: dict[str, object] = {}
    for example in examples:
        line = text[: example.start()].count("\n") + 1
        # Keep the page's line numbers, so that a failure names the line.
        exec(compile("\n" * line + example[1], f"docs/{page}", "exec"), names)
