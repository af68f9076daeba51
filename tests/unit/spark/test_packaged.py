"""Errors that name the setting if the Python of Spark's workers lacks the package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyspark import cloudpickle
from pyspark.serializers import CloudPickleSerializer

from logquarry.errors import UsageError
from logquarry.spark import session, source
from logquarry.spark.worker import Packaged

_MAKE: Any = CloudPickleSerializer
PICKLER = _MAKE()


class Part(Packaged):
    def __init__(self, value: int) -> None:
        self.value = value


def test_state_is_kept() -> None:
    found = PICKLER.loads(PICKLER.dumps(Part(3)))
    assert isinstance(found, Part) and found.value == 3


def test_a_worker_without_the_package_names_the_setting(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.write_bytes(PICKLER.dumps(Part(3)))
    # -S: no installed packages, -E: no PYTHONPATH.
    folder = str(Path(cloudpickle.__file__).parent)
    code = f"""
import sys, types, importlib.util
spec = importlib.util.spec_from_file_location(
    "cloudpickle", {cloudpickle.__file__!r},
    submodule_search_locations=[{folder!r}])
module = importlib.util.module_from_spec(spec)
sys.modules["pyspark"] = types.ModuleType("pyspark")
sys.modules["pyspark.cloudpickle"] = sys.modules["cloudpickle"] = module
spec.loader.exec_module(module)
sys.modules["pyspark.cloudpickle.cloudpickle"] = sys.modules["cloudpickle.cloudpickle"]
import pickle
pickle.load(open({str(data)!r}, "rb"))
"""
    done = subprocess.run(
        [sys.executable, "-S", "-E", "-c", code], capture_output=True, text=True, check=False
    )
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: the Python of Spark's workers, {sys.executable}, cannot")
    assert "set PYSPARK_PYTHON" in last


def test_the_python_of_local_workers_is_checked(tmp_path: Path) -> None:
    source.check_python(sys.executable)
    without = tmp_path / "python"
    without.write_text(
        "#!/bin/sh\necho \"ModuleNotFoundError: No module named 'logquarry'\" >&2\nexit 1\n"
    )
    without.chmod(0o755)
    with pytest.raises(UsageError, match=r"No module named 'logquarry'.*PYSPARK_PYTHON="):
        source.check_python(str(without))
    without.write_text("#!/bin/sh\necho 3 9\n")
    with pytest.raises(UsageError, match=r"it is Python 3\.9, and the driver is"):
        source.check_python(str(without))
    with pytest.raises(UsageError, match="PYSPARK_PYTHON="):
        source.check_python(str(tmp_path / "missing"))


def test_what_a_newcomer_forgets_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"register takes a SparkSession, not NoneType: make one"):
        source.register(None)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "pyspark", None)
    monkeypatch.delitem(sys.modules, "logquarry.spark.columns", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'logquarry\[spark\]'"):
        session.get_session()
