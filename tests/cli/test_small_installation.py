"""Commands without the packages of the extras: the base works, and the rest names its extra."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from logquarry.log import codec
from tests.helpers.command import run

EXTRAS = ("numba", "llvmlite", "pyspark", "altair", "deltalake", "prometheus_client", "fsspec")


@pytest.fixture
def base_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hide what only the extras bring, and the modules that use it."""
    users = ("logquarry.spark", "logquarry.metrics", "logquarry.report")
    for name in list(sys.modules):
        if name.partition(".")[0] in EXTRAS or name.startswith(users):
            monkeypatch.delitem(sys.modules, name)
            # At the end, the package has its module again, not the one that the test has imported.
            package, _, child = name.rpartition(".")
            if package in sys.modules:
                monkeypatch.delattr(sys.modules[package], child, raising=False)
    for name in (*EXTRAS, "logquarry.format.kernels"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delattr("logquarry.format.kernels", raising=False)
    codec.kernels.cache_clear()
    yield
    codec.kernels.cache_clear()


@pytest.mark.usefixtures("base_only")
def test_export_to_parquet_needs_no_spark_and_no_numba(golden: Path, tmp_path: Path) -> None:
    store = golden / "batch" / "store"
    done = run("export", store, "--to", tmp_path / "out")
    rows = pq.read_table(tmp_path / "out")
    expected = (golden / "batch" / "expected.jsonl").read_text().splitlines()
    assert rows.num_rows == len(expected)
    # The hint comes once, not at each call.
    assert done.stderr.count("logquarry[fast]") == 1
    for words in (["info", store], ["verify", store], ["recover", store], ["salvage", store]):
        assert "logquarry[fast]" not in run(*words).stderr


@pytest.mark.usefixtures("base_only")
@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (["export", "STORE", "--to", "OUT", "--spark-master", "local[1]"], "spark"),
        (["verify", "STORE", "--spark-master", "local[1]"], "spark"),
        (["export", "STORE", "--to", "OUT", "--format", "delta"], "lakehouse"),
        (["report", "STORE", "--html", "OUT"], "report"),
        (["stats", "STORE", "--prometheus"], "metrics"),
    ],
)
def test_a_command_names_the_extra_that_it_needs(
    words: list[str], extra: str, golden: Path, tmp_path: Path
) -> None:
    places = {"STORE": str(golden / "batch" / "store"), "OUT": str(tmp_path / "out")}
    done = run(*(places.get(word, word) for word in words), code=None)
    assert done.exit_code != 0
    assert f"pip install 'logquarry[{extra}]'" in done.stderr
    assert not (tmp_path / "out").exists()
