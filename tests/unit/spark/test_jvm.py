"""Options of the JVM, and tracebacks that a worker hides."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import traceback
from pathlib import Path
from unittest import mock

import pyspark
import pyspark.sql
import pytest

from logquarry.log.codec import SWITCH
from logquarry.spark import session, worker
from logquarry.spark.session import launch_environment

NAMES = (
    *("SPARK_SUBMIT_OPTS", "PYSPARK_SUBMIT_ARGS"),
    *("JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS"),
)


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NAMES, "SPARK_HOME", "SPARK_CONF_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(session, "java_home", lambda: Path("/java"))


def options(**config: str) -> list[str]:
    with launch_environment({name.replace("_", "."): value for name, value in config.items()}):
        assert os.environ["JAVA_HOME"] == "/java"
        return os.environ["SPARK_SUBMIT_OPTS"].split()


def test_the_environment_is_the_jvms_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", "/mine")
    assert "-XX:+UseParallelGC" in options()
    assert any(option.startswith("-Dlog4j2.configurationFile=file:") for option in options())
    assert os.environ["JAVA_HOME"] == "/mine"
    assert "SPARK_SUBMIT_OPTS" not in os.environ


@pytest.mark.parametrize("choice", ["-XX:+UseG1GC", "-XX:-UseParallelGC", "-XX:+UseZGC"])
@pytest.mark.parametrize("name", NAMES)
def test_a_collector_that_is_chosen_stays(
    monkeypatch: pytest.MonkeyPatch, name: str, choice: str
) -> None:
    monkeypatch.setenv(name, f"-Xss4m {choice}")
    assert [option for option in options() if "ParallelGC" in option and option != choice] == []


def test_a_collector_of_the_configuration_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert "-XX:+UseParallelGC" not in options(
        spark_driver_extraJavaOptions="-XX:+UseSerialGC -Da=b"
    )
    assert "-XX:+UseParallelGC" in options(spark_driver_extraJavaOptions="-Da=b")
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    (tmp_path / "spark-defaults.conf").write_text("spark.driver.extraJavaOptions -XX:+UseZGC\n")
    assert "-XX:+UseParallelGC" not in options()
    (tmp_path / "log4j2.properties").write_text("")
    assert not any("log4j2" in option for option in options())


def test_what_the_user_says_comes_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = "-Darrow.enable_unsafe_memory_access=false"
    monkeypatch.setenv("SPARK_SUBMIT_OPTS", mine)
    found = [option for option in options() if "unsafe_memory" in option]
    assert found[-1] == mine
    assert len(found) == 2


def test_executors_of_a_local_cluster_have_the_options_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = "spark.executor.defaultJavaOptions"
    fast = session._executor_options({})[name]
    assert "-XX:+UseParallelGC" in fast
    assert "-Darrow.enable_unsafe_memory_access=true" in fast
    mine = {"spark.executor.extraJavaOptions": "-XX:+UseZGC"}
    assert "ParallelGC" not in session._executor_options(mine)[name]
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    (tmp_path / "spark-defaults.conf").write_text(f"{name} -Da=b\n")
    assert session._executor_options({}) == {}


@pytest.mark.parametrize(
    ("master", "has_options"), [("local-cluster[2,1,1024]", True), ("local[2]", False)]
)
def test_a_session_passes_options_to_executors(
    monkeypatch: pytest.MonkeyPatch, master: str, has_options: bool
) -> None:
    given: dict[str, str] = {}

    builder = mock.Mock()

    def config(name: str, value: str) -> mock.Mock:
        given[name] = value
        return builder

    builder.config = config
    monkeypatch.setattr(pyspark.sql, "SparkSession", mock.Mock(builder=builder))
    monkeypatch.setattr(pyspark.SparkContext, "_active_spark_context", None)
    monkeypatch.setattr("logquarry.spark.source.register", lambda _: None)
    monkeypatch.delenv("PYSPARK_GATEWAY_PORT", raising=False)
    session.get_session(master)
    assert given["spark.master"] == master
    assert ("spark.executor.defaultJavaOptions" in given) is has_options


# ------------------------------------------------------------------------------------- workers
def errors_of_a_worker(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    # Not a fixture: pytest replaces the streams in each phase of a test.
    text = io.StringIO()
    monkeypatch.setattr(sys, "stderr", text)
    monkeypatch.setenv("PYTHON_WORKER_FACTORY_SOCK_DIR", "/nowhere")
    worker.ignore_hang_ups()
    worker.ignore_hang_ups()
    return text


def fake_daemon(error: Exception, path: str) -> None:
    """Call a function `manager` in a file of that name, as PySpark's daemon ends a worker."""
    source = "def manager():\n try:\n  raise error\n except BaseException:\n  print_exc()\n"
    scope = {"error": error, "print_exc": traceback.print_exc}
    exec(compile(source, path, "exec"), scope)
    scope["manager"]()  # type: ignore[operator]


def test_a_jvm_that_hung_up_is_no_news(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = errors_of_a_worker(monkeypatch)
    fake_daemon(BrokenPipeError("broken"), "pyspark/daemon.py")
    fake_daemon(ConnectionResetError("reset"), "pyspark/daemon.py")
    assert stream.getvalue() == ""


def test_all_else_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = errors_of_a_worker(monkeypatch)
    fake_daemon(OSError("no space"), "pyspark/daemon.py")
    assert "no space" in stream.getvalue()
    fake_daemon(BrokenPipeError("the user's own"), "their/code.py")
    assert "the user's own" in stream.getvalue()
    print("plain", file=sys.stderr)
    assert stream.getvalue().endswith("plain\n")
    assert not sys.stderr.isatty()


def test_outside_of_workers_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in worker._MARKS:
        monkeypatch.delenv(name, raising=False)
    before = sys.stderr
    worker.ignore_hang_ups()
    assert sys.stderr is before


def test_objects_of_new_modules_are_excluded_from_garbage_collection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PySpark collects garbage after each task, also of modules that a late task imported."""
    frozen: list[int] = []
    monkeypatch.setenv("PYTHON_WORKER_FACTORY_SOCK_DIR", "/nowhere")
    monkeypatch.setattr(worker, "_tasks", 0)
    monkeypatch.setattr(worker, "_modules", 0)
    monkeypatch.setattr("gc.freeze", lambda: frozen.append(1))
    for _ in range(10):
        worker.settle()
    assert len(frozen) == 3
    monkeypatch.setitem(sys.modules, "imported_by_a_late_task", worker)
    for _ in range(10):
        worker.settle()
    assert len(frozen) == 4


LOADED = """
import os, sys
from logquarry.spark.daemon import load_worker_modules
load_worker_modules()
print("pyspark.worker" in sys.modules, "numba" in sys.modules, len(os.listdir("/proc/self/task")))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists the threads of a process")
@pytest.mark.parametrize(("threads", "expected"), [("1", "True True 1"), (None, "False False 1")])
def test_the_daemon_starts_no_thread_before_it_forks(threads: str | None, expected: str) -> None:
    """A worker would wait forever for a lock that such a thread had held."""
    pytest.importorskip("pyspark")
    environment = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", SWITCH)}
    if threads is not None:
        environment["OMP_NUM_THREADS"] = threads
    done = subprocess.run(
        [sys.executable, "-c", LOADED], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == expected
