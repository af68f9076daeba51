"""The options of the sinks, and the error of a load that fails."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest
from pyspark import TaskContext

from logquarry.errors import StoreUnavailable, UsageError
from logquarry.format.java import INT_MAX, LONG_MAX
from logquarry.spark import sink
from logquarry.spark.sink import parse_write_options
from logquarry.store.load.ledger import LoadId


def test_names_are_case_insensitive(tmp_path: Path) -> None:
    found = parse_write_options(
        {
            "PATH": str(tmp_path / "s"),
            "Brokers": "4",
            "QUEUES": "8",
            "txnappid": "job",
            "TXNVERSION": "7",
            "onrejected": "DEADLETTER",
            "deadletterpath": str(tmp_path / "dead"),
            "config": '{"mappedFileSizeCommitLog": 4096}',
        },
        is_stream=False,
    )
    plan = found.plan
    assert (plan.brokers, plan.queues, found.app, found.version) == (4, 8, "job", 7)
    assert (plan.on_rejected, plan.dead_letters) == ("deadLetter", str(tmp_path / "dead"))
    assert plan.config.mapped_file_size_commit_log == 4096
    assert found.remarks == ()
    assert plan.store(3) == tmp_path / "s" / "broker-3"


def test_defaults() -> None:
    found = parse_write_options({"path": "file:///a/s"}, is_stream=False)
    assert found.plan.path == "/a/s"
    assert (found.plan.brokers, found.plan.queues, found.plan.on_rejected) == (1, 4, "fail")
    assert (found.app, found.version) == (None, None)
    assert found.plan.store(0) == Path("/a/s")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "path: no store to write to"),
        ({"path": "s3://b/s"}, "path: s3://b/s: only a local store"),
        ({"brokers": "0"}, "brokers: takes a whole number >= 1, not '0'"),
        ({"brokers": "99999"}, "brokers: takes at most 4096"),
        ({"queues": "many"}, "queues: takes a whole number"),
        ({"queues": "1" * 5_000}, "queues: takes a whole number"),
        ({"txnAppId": "job"}, "txnAppId: needs txnVersion"),
        ({"txnVersion": "1"}, "txnAppId: needs txnVersion"),
        ({"txnAppId": " ", "txnVersion": "1"}, "txnAppId: is empty"),
        ({"txnAppId": "a", "txnVersion": "-1"}, "txnVersion: takes a whole number >= 0"),
        ({"txnAppId": "a", "txnVersion": str(1 << 63)}, f"txnVersion: takes at most {LONG_MAX}"),
        ({"txnAppId": "a", "txnVersion": "9" * 5000}, "txnVersion: "),
        ({"queues": str(1 << 31)}, f"queues: takes at most {INT_MAX}"),
        ({"onRejected": "drop"}, "onRejected: takes fail or deadLetter, not 'drop'"),
        ({"onRejected": "deadLetter"}, "onRejected: deadLetter needs a folder"),
        ({"deadLetterPath": "s3://b/d"}, "deadLetterPath: s3://b/d: dead letters need a folder"),
        ({"config": "{"}, "config: takes JSON, not '{'"),
    ],
)
def test_what_cannot_be_meant(options: dict[str, str], why: str) -> None:
    given = options if not options or "path" in options else {"path": "/a/s", **options}
    with pytest.raises(UsageError) as caught:
        parse_write_options(given, is_stream=False)
    assert str(caught.value).startswith(why)


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_unknown_option_is_refused(is_stream: bool) -> None:
    with pytest.raises(UsageError, match=r"no option broker \(did you mean brokers\?\)"):
        parse_write_options({"path": "/a", "broker": "2"}, is_stream=is_stream)


def test_what_has_no_effect_is_told() -> None:
    given = {"path": "/a", "kafka.bootstrap.servers": "x", "checkpointLocation": "c"}
    found = parse_write_options(given, is_stream=True)
    assert found.remarks == ("options of Kafka's client have no effect: kafka.bootstrap.servers",)
    found = parse_write_options({"path": "/a", "txnVersion": "3"}, is_stream=True)
    assert len(found.remarks) == 1 and found.remarks[0].startswith("txnVersion has no effect")
    found = parse_write_options({"path": "/a", "deadLetterPath": "/d"}, is_stream=False)
    assert found.remarks == ("deadLetterPath has no effect without onRejected=deadLetter",)


def test_a_load_that_fails_shows_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another process holds the lock, so the load cannot remove its staged files either."""
    for name in ("context_of", "_check_schema"):
        monkeypatch.setattr(sink, name, mock.Mock())
    for name, text in (("_staged", "no room for a segment"), ("discard_load", "is locked")):
        monkeypatch.setattr(sink, name, mock.Mock(side_effect=StoreUnavailable(text)))
    with pytest.raises(StoreUnavailable, match="no room for a segment"):
        sink.load(mock.Mock(), tmp_path / "store")
    assert "is locked" in caplog.text


# ----------------------------------------------------------------------------- batches from Spark
ROWS = "spark.sql.execution.arrow.maxRecordsPerBatch"


class FakeConf(dict[str, str]):
    def set(self, name: str, value: str) -> None:
        self[name] = value

    def unset(self, name: str) -> None:
        self[name] = "10000"


class FakeSession:
    def __init__(self, rows: str) -> None:
        self.conf = FakeConf({ROWS: rows})


def rows_of_a_batch(monkeypatch: pytest.MonkeyPatch, rows: str, *, is_limited: bool) -> str:
    """Return the setting while a query stages rows, and check that it is as before afterwards."""
    monkeypatch.setattr(sink, "has_sources", lambda: is_limited)
    session = FakeSession(rows)
    found = []

    def fail() -> None:
        found.append(str(session.conf[ROWS]))
        raise InterruptedError

    df: Any = mock.Mock(sparkSession=session)
    df.mapInArrow.return_value.collect = fail
    with suppress(InterruptedError):
        sink._staged(df, mock.Mock())
    assert session.conf[ROWS] == rows
    return found[0]


def test_spark_3_5_sends_few_rows_in_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rows_of_a_batch(monkeypatch, "10000", is_limited=False) == "64"
    assert rows_of_a_batch(monkeypatch, "500", is_limited=False) == "500"
    assert rows_of_a_batch(monkeypatch, "10000", is_limited=True) == "10000"


def test_two_loads_at_once_send_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink, "has_sources", lambda: False)
    session: Any = FakeSession("10000")
    first, second = sink._few_rows(session), sink._few_rows(session)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert session.conf[ROWS] == "64"
    second.__exit__(None, None, None)
    assert session.conf[ROWS] == "10000"


def test_a_task_stages_joined_batches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan = parse_write_options({"path": str(tmp_path / "s")}, is_stream=False).plan
    stager = mock.Mock()
    monkeypatch.setattr(sink, "Stager", mock.Mock(return_value=stager))
    monkeypatch.setattr(TaskContext, "get", mock.Mock())
    batch = pa.record_batch({"body": [b"b"] * 64, "topic": ["a"] * 64})
    sink._Stage(plan, LoadId("job", 1)).staged(iter([batch] * 3))
    ((joined,), _), *others = stager.add.call_args_list
    assert joined.num_rows == 192
    assert not others


def test_small_batches_are_joined() -> None:
    batch = pa.record_batch({"body": [bytes(10)] * 128, "topic": ["a"] * 128})
    found = list(sink._joined([batch] * 200))
    assert [part.num_rows for part in found] == [78 * 128, 78 * 128, 44 * 128]
    assert pa.Table.from_batches(found) == pa.Table.from_batches([batch] * 200)
    large = pa.record_batch({"body": [bytes(3 << 20)], "topic": ["a"]})
    assert [part.num_rows for part in sink._joined([large] * 7)] == [2, 2, 2, 1]
    assert list(sink._joined([])) == []
    empty = batch.slice(0, 0)
    assert [part.num_rows for part in sink._joined([empty, batch, empty])] == [128]
    assert [part.num_rows for part in sink._joined([empty, empty])] == [0]
