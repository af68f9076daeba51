"""The names that `logquarry.spark` offers."""

from __future__ import annotations

import subprocess
import sys

import pytest

import logquarry.spark
from logquarry.errors import UsageError
from logquarry.spark import source


@pytest.mark.parametrize("name", logquarry.spark.__all__)
def test_every_name_is_a_function(name: str) -> None:
    assert callable(getattr(logquarry.spark, name))
    assert getattr(logquarry.spark, name).__name__ == name


def test_there_are_no_other_names() -> None:
    with pytest.raises(AttributeError, match="no attribute 'verify'"):
        _ = logquarry.spark.verify


def test_jobs_are_imported_when_they_are_first_used() -> None:
    """Spark's workers import the package too, and need none of the jobs."""
    code = """if True:
        import sys
        import logquarry.spark
        modules = {"pyspark", "pyarrow", "numba", "logquarry.spark.tasks", "logquarry.repair"}
        assert not modules & sys.modules.keys(), modules & sys.modules.keys()
        from logquarry.spark import verify_stores
        assert "logquarry.repair" in sys.modules
        """
    subprocess.run([sys.executable, "-c", code], check=True)


def test_spark_without_sources_names_the_extra_that_has_pandas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(source, "has_sources", lambda: False)
    monkeypatch.setattr(source, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"needs the package pandas: .*logquarry\[spark\]"):
        source.read(object(), "store")  # type: ignore[arg-type]
