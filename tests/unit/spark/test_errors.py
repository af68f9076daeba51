"""Exceptions made again from Spark's text. Needs no Spark."""

from __future__ import annotations

import os

import pytest

from logquarry import errors
from logquarry.log.batches import as_error
from logquarry.log.walk import DamagedSpan
from logquarry.spark.jobs import explain, root_cause
from logquarry.spark.worker import without_traceback

SPAN = DamagedSpan(
    36796, 336, "bad_body_crc", "BODYCRC is 1, but the body has the CRC 2", "/s/commitlog/0024"
)


def through_spark(error: Exception, before: str = "", after: str = "") -> Exception:
    return RuntimeError(f"{before}{type(error).__module__}.{type(error).__name__}: {error}{after}")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("An exception was thrown from the Python worker:\n", "\n"),
        ("[PYTHON_DATA_SOURCE_ERROR] Failed to create: ", "\n SQLSTATE: 38000"),
        ("Job aborted: Lost task 0.3: org.apache.spark.api.python.PythonException: ", "\n\tat X"),
        ("Traceback (most recent call last):\n  File 'x', line 1\n", ""),
        ("", ""),
    ],
)
def test_a_damaged_place(before: str, after: str) -> None:
    error = as_error(SPAN)
    found = explain(through_spark(error, before, after))
    assert isinstance(found, errors.CorruptFrame)
    assert (found.path, found.offset, found.kind) == (error.path, error.offset, error.kind)
    assert found.reason == error.reason
    assert str(found) == str(error)


@pytest.mark.parametrize(
    "error",
    [
        errors.UsageError("splitSize: takes a size"),
        errors.StoreNotFound("/s: there is no such folder"),
        errors.MessageNotFound("gone"),
        errors.CorruptFile("/s/checkpoint", 0, "too short"),
    ],
)
def test_others(error: errors.LogquarryError) -> None:
    found = explain(through_spark(error))
    assert type(found) is type(error)
    assert str(found) == str(error)


def test_the_cause_is_looked_at() -> None:
    ours = errors.UsageError("x")
    outer = ValueError("outer")
    outer.__cause__ = through_spark(ours)
    assert str(explain(outer)) == "x"
    assert explain(ours) is ours


def test_none_of_ours() -> None:
    assert explain(None) is None
    assert explain(ValueError("logquarry is a name")) is None
    assert type(explain(RuntimeError("logquarry.errors.NoSuchThing: x"))) is errors.LogquarryError
    rejected = "logquarry.errors.MessageRejected: too large"
    assert type(explain(RuntimeError(rejected))) is errors.StoreError
    assert type(explain(RuntimeError("logquarry.errors.CorruptFrame: what"))) is errors.StoreError


def kinds(base: type[errors.LogquarryError]) -> set[type[errors.LogquarryError]]:
    return {base}.union(*(kinds(own) for own in base.__subclasses__()))


# The kinds of a task's errors. Kinds in other modules are known only where these are imported, and
# each worker that runs the tests imports other modules before this one.
KINDS = sorted(
    (kind for kind in kinds(errors.LogquarryError) if kind.__module__ == errors.__name__),
    key=lambda kind: kind.__name__,
)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_each_kind_becomes_itself_or_a_base(kind: type[errors.LogquarryError]) -> None:
    found = explain(RuntimeError(f"logquarry.errors.{kind.__name__}: /s: text"))
    assert issubclass(kind, type(found))
    assert str(found) == "/s: text"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("UnsupportedStore", errors.StoreUnavailable),
        ("BadFilter", errors.UsageError),
        ("BadRow", errors.LogquarryError),
        ("LogsDiverged", errors.ReplicationError),
    ],
)
def test_exceptions_that_need_more_than_a_text(name: str, kind: type[Exception]) -> None:
    assert type(explain(RuntimeError(f"logquarry.errors.{name}: /s: text"))) is kind


JOB_ABORTED = """An error occurred while calling z:org.apache.spark.api.python.PythonRDD.collect.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 1 in stage 0.0 failed 1 \
times, most recent failure: Lost task 1.0 in stage 0.0 (TID 1) (127.0.0.1 executor driver): \
org.apache.spark.api.python.PythonException: Traceback (most recent call last):
  File "/x/pyspark/worker.py", line 3551, in main
    process()
    ~~~~~~~^^
KeyError: 'a'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/x/logquarry/spark/output.py", line 84, in create
    return self._fs.open_output_stream(self._full(path))
OSError: [Errno 28] Error writing bytes to file. Detail: [errno 28] No space left on device

\tat org.apache.spark.api.python.BasePythonRunner$ReaderIterator.handlePythonException(X.scala:1)

Driver stacktrace:
\tat org.apache.spark.scheduler.DAGScheduler.abortStage(DAGScheduler.scala:2)
"""
JAVA_ONLY = """An error occurred while calling None.org.apache.spark.api.java.JavaSparkContext.
: org.apache.spark.SparkException: Exception thrown in awaitResult:
\tat org.apache.spark.util.SparkThreadUtils$.awaitResult(SparkThreadUtils.scala:53)
Caused by: java.io.IOException: Failed to connect
\t... 1 more
Caused by: java.net.ConnectException: Connection refused
\t... 2 more
"""


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            JOB_ABORTED,
            "OSError: [Errno 28] Error writing bytes to file. "
            "Detail: [errno 28] No space left on device",
        ),
        (JAVA_ONLY, "java.net.ConnectException: Connection refused"),
        ("\n[JAVA_GATEWAY_EXITED] Java\n\nexited\nearly", "[JAVA_GATEWAY_EXITED] Java exited"),
        ("", ""),
        ("Traceback (most recent call last):", "Traceback (most recent call last):"),
    ],
)
def test_the_line_that_says_why(text: str, line: str) -> None:
    assert root_cause(RuntimeError(text)) == line


def test_tracebacks_are_left_out_in_workers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARK_HIDE_TRACEBACK", raising=False)
    with pytest.raises(errors.UsageError), without_traceback():
        raise errors.UsageError("x")
    assert "SPARK_HIDE_TRACEBACK" not in os.environ
    monkeypatch.setenv("PYTHON_WORKER_FACTORY_SECRET", "x")
    with pytest.raises(ValueError, match="x"), without_traceback():
        raise ValueError("x")
    assert "SPARK_HIDE_TRACEBACK" not in os.environ
    with pytest.raises(errors.UsageError), without_traceback():
        raise errors.UsageError("x")
    assert os.environ["SPARK_HIDE_TRACEBACK"] == "1"
