"""A stream on a Spark that passes no start and no limit: restarts, start options, losses."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from logquarry.errors import MessageNotFound, UsageError
from logquarry.spark.stream_planner import UnlimitedPlanner
from tests.helpers.store_maker import FIRST_TIME, StoreMaker
from tests.helpers.stream import Stream, through_json


class UnlimitedStream(Stream):
    """Calls the planner in the order in which Spark 4.0 and 4.1 call it."""

    planner: UnlimitedPlanner

    def restart(self, **options: str) -> None:
        super().restart(**options)
        self.planner = UnlimitedPlanner(self.options, self.options.names)

    def plan(self) -> bool:
        start = through_json(self.planner.initial()) if self.at is None else self.at
        end = through_json(self.planner.newest_end())
        if end == start:
            return False
        self.planned = start, end
        return True


def grow(root: Path, count: int) -> None:
    """Write the first `count` messages of an endless sequence."""
    maker = StoreMaker(log_file_size=3000)
    for n in range(count):
        maker.put("a", n % 2, b"%d" % n)
    shutil.rmtree(root, ignore_errors=True)
    maker.write(root)


def bodies(stream: Stream) -> list[int]:
    return sorted(int(row["body"]) for row in stream.rows)


@pytest.mark.parametrize("fails", ["true", "false"])
def test_a_store_whose_name_has_changed(fails: str, tmp_path: Path) -> None:
    grow(tmp_path / "s", 10)
    stream = UnlimitedStream(tmp_path / "s", failOnDataLoss=fails)
    stream.drain()
    (tmp_path / "s").rename(tmp_path / "other")
    stream.restart(path=str(tmp_path / "other"))
    with pytest.raises(UsageError, match=r"as broker 's', .* is 'other' now"):
        stream.drain()


@pytest.mark.parametrize("again", [False, True])
def test_each_message_once(tmp_path: Path, again: bool) -> None:
    stream = UnlimitedStream(tmp_path / "s")
    for count in (10, 25, 25, 60):
        grow(tmp_path / "s", count)
        if again:
            stream.restart()
        stream.drain(3)
        assert bodies(stream) == list(range(count))


def test_a_planned_batch_runs_again_after_a_restart(tmp_path: Path) -> None:
    grow(tmp_path / "s", 10)
    stream = UnlimitedStream(tmp_path / "s")
    stream.drain()
    grow(tmp_path / "s", 20)
    assert stream.plan()
    stream.restart()
    grow(tmp_path / "s", 30)
    assert stream.run() == 10
    stream.drain()
    assert bodies(stream) == list(range(30))


STARTS: list[tuple[dict[str, str], list[int]]] = [
    ({"startingOffsets": "latest"}, list(range(10, 40))),
    ({"startingTimestamp": str(FIRST_TIME + 150)}, list(range(15, 40))),
    ({"startingQueueOffsets": '{"a": {"0": 3}}'}, [n for n in range(40) if n % 2 or n >= 6]),
    ({"startingQueueOffsets": '{"a": {"0": 8}}'}, [n for n in range(40) if n % 2 or n >= 16]),
    ({"startingQueueOffsets": '{"a": {"0": -1}}'}, [n for n in range(40) if n % 2 or n >= 10]),
]


@pytest.mark.parametrize(("options", "expected"), STARTS, ids=str)
def test_a_start_holds_after_restarts(
    tmp_path: Path, options: dict[str, Any], expected: list[int]
) -> None:
    grow(tmp_path / "s", 10)
    stream = UnlimitedStream(tmp_path / "s", **options)
    for count in (10, 14, 20, 40):
        stream.drain(3)
        grow(tmp_path / "s", count)
        if stream.at is not None:
            stream.restart()
    stream.drain(3)
    assert bodies(stream) == expected


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({}, {"startingTimestamp": str(FIRST_TIME + 15)}),
        ({"startingQueueOffsets": '{"a": {"0": 8}}'}, {"startingQueueOffsets": '{"a": {"0": 1}}'}),
        ({"startingQueueOffsets": '{"a": {"0": 8}}'}, {"startingQueueOffsets": '{"a": {"1": 8}}'}),
    ],
    ids=str,
)
def test_another_start_after_a_restart_is_refused(
    tmp_path: Path, first: dict[str, str], then: dict[str, str]
) -> None:
    grow(tmp_path / "s", 10)
    stream = UnlimitedStream(tmp_path / "s", **first)
    stream.drain()
    grow(tmp_path / "s", 20)
    stream.restart(**then)
    with pytest.raises(UsageError, match="give the original start options"):
        stream.drain(1)


def test_a_log_that_ends_earlier_after_a_restart_is_a_loss(tmp_path: Path) -> None:
    grow(tmp_path / "s", 60)
    stream = UnlimitedStream(tmp_path / "s")
    stream.drain()
    grow(tmp_path / "s", 5)
    stream.restart()
    with pytest.raises(MessageNotFound, match="truncated or replaced"):
        stream.drain(1)


def test_limits_have_no_effect_and_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    grow(tmp_path / "s", 20)
    with caplog.at_level(logging.WARNING):
        stream = UnlimitedStream(tmp_path / "s", maxOffsetsPerTrigger="3")
        stream.drain()
    assert stream.batches == [20]
    (told,) = [r.getMessage() for r in caplog.records if "have no effect" in r.getMessage()]
    assert "Spark 4.2" in told
