"""Loads: their versions in the ledger, their leftovers, and loads that were interrupted."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import logquarry as lq
from logquarry.disk.disk import Disk
from logquarry.errors import CorruptFile, StoreUnavailable, UsageError
from logquarry.format.java import LONG_MAX
from logquarry.ingest import load as load_module
from logquarry.ingest.load import (
    Appending,
    LoadSummary,
    append_to_store,
    commit_load,
    discard_load,
    plan_load,
)
from logquarry.ingest.staging import LoadPlan
from logquarry.store.load import ledger as ledger_module
from logquarry.store.load.ledger import Ledger, LoadId
from logquarry.store.load.loading import Loaded
from logquarry.store.message_store import StoreWriter
from tests.helpers.loads import LOAD, messages, planned, row, staged
from tests.helpers.small_store import config


def test_the_largest_version(tmp_path: Path) -> None:
    plan = planned(tmp_path / "s")
    load = LoadId("job", LONG_MAX)
    assert commit_load(plan, load, staged(plan, [row()], [row()] * 3, load=load)).rows == 4
    with pytest.raises(UsageError, match="invalid load"):
        LoadId("job", LONG_MAX + 1)


def test_versions_count_upwards(tmp_path: Path) -> None:
    plan = planned(tmp_path / "s")
    for version, was_there in ((3, False), (3, True), (2, True), (4, False)):
        load = LoadId("job", version)
        summary = commit_load(plan, load, staged(plan, [row()], load=load))
        assert summary.was_there is was_there
    other = LoadId("other", 0)
    assert not commit_load(plan, other, staged(plan, [row()], load=other)).was_there
    assert len(messages(tmp_path / "s")) == 3
    assert not list((tmp_path / "s").rglob("*.frames"))


@pytest.mark.parametrize("brokers", [1, 2])
def test_other_rows_under_a_number_that_the_store_has_are_refused(
    brokers: int, tmp_path: Path
) -> None:
    """A query with an older checkpoint gives other rows the number of an earlier batch."""
    plan = planned(tmp_path / "s", brokers=brokers)

    def batch(version: int, rows: int) -> LoadSummary:
        load = LoadId("job", version)
        tasks = staged(plan, [row(queue_id=number) for number in range(rows)], load=load)
        return commit_load(plan, load, tasks, is_batch=True)

    assert [batch(number, 2).rows for number in (1, 2)] == [2, 2]
    assert batch(2, 2).was_there
    assert batch(2, 1).was_there
    with pytest.raises(UsageError, match=r"2 of job .* 3 rows, .* has 2: .*Lost checkpoint"):
        batch(2, 3)
    with pytest.raises(UsageError, match=r"version 1 of job .* is 2: .*Lost checkpoint"):
        batch(1, 2)
    assert batch(3, 0).rows == 0
    with pytest.raises(UsageError, match="3 of job"):
        batch(3, 1)
    assert sum(len(messages(plan.store(broker))) for broker in range(brokers)) == 4


@pytest.mark.parametrize("is_small", [False, True])
def test_files_that_are_large_for_few_rows_are_told_before(
    is_small: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = config() if is_small else lq.StoreConfig()
    plan = plan_load(LoadPlan(path=str(tmp_path / "s"), brokers=2, config=sizes))

    def stop(_: object) -> Sequence[Loaded]:
        raise StoreUnavailable("before anything is allocated")

    tasks = staged(plan, [row(queue_id=0), row(queue_id=1)])
    with pytest.raises(StoreUnavailable, match="before anything"):
        commit_load(plan, LOAD, tasks, run=stop)
    words = ("2 new stores", "takes at least 1.4 GiB of", "docs/sink.md")
    told = all(word in caplog.text for word in words)
    assert told is not is_small


@pytest.mark.parametrize("harm", ["missing", "short"])
def test_a_missing_segment_does_not_stop_later_loads(harm: str, tmp_path: Path) -> None:
    """As if the executors did not share the folder with the driver."""
    plan = planned(tmp_path / "s", brokers=2)
    first, second = LoadId("job", 1), LoadId("job", 2)
    rows = [row(queue_id=number) for number in range(4)]
    tasks = staged(plan, rows, load=first)
    segment = plan.loads / first.staged / tasks[0].segments[-1][1].name
    if harm == "missing":
        segment.unlink()
    else:
        segment.write_bytes(segment.read_bytes()[:-1])
    with pytest.raises(CorruptFile, match=r"segment is missing|bytes instead of"):
        commit_load(plan, first, tasks)
    assert not any((plan.store(number) / "commitlog").exists() for number in range(2))
    assert commit_load(plan, second, staged(plan, rows, load=second)).rows == 4


def test_a_store_from_an_older_backup_cannot_complete_a_load(tmp_path: Path) -> None:
    root = tmp_path / "s"
    plan = planned(root, brokers=2)
    first, second, third = (LoadId("job", version) for version in (1, 2, 3))
    rows = [row(queue_id=number) for number in range(4)]
    commit_load(plan, first, staged(plan, rows, load=first))
    shutil.copytree(root / "broker-0", tmp_path / "backup")

    def crash(appendings: Sequence[Appending]) -> Any:
        append_to_store(appendings[0])
        raise StoreUnavailable("a crash")

    with pytest.raises(StoreUnavailable, match="a crash"):
        commit_load(plan, second, staged(plan, rows, load=second), run=crash)
    (root / "broker-0").rename(tmp_path / "newest")
    shutil.copytree(tmp_path / "backup", root / "broker-0")
    for load in (second, third):
        with pytest.raises(CorruptFile, match=r"decision.json.*broker-0 does not have the load"):
            commit_load(plan, load, staged(plan, rows, load=load))
    assert [len(messages(plan.store(broker))) for broker in range(2)] == [2, 2]

    # Without the newest copy, the user discards the load's decision and repeats the load.
    shutil.copytree(root, tmp_path / "given up")
    given_up = planned(tmp_path / "given up", brokers=2)
    (given_up.loads / "decision.json").unlink()
    commit_load(given_up, second, staged(given_up, rows, load=second))
    assert [len(messages(given_up.store(broker))) for broker in range(2)] == [4, 4]

    # With the newest copy, the next load completes the load.
    shutil.rmtree(root / "broker-0")
    (tmp_path / "newest").rename(root / "broker-0")
    commit_load(plan, third, staged(plan, rows, load=third))
    assert [len(messages(plan.store(broker))) for broker in range(2)] == [6, 6]


def test_a_small_load_fills_one_store_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(tmp_path / "s", brokers=2)
    threads = []

    def append(appending: load_module.Appending) -> Loaded:
        threads.append(threading.current_thread())
        return append_to_store(appending)

    monkeypatch.setattr(load_module, "append_to_store", append)
    load = LoadId("job", 1)
    done = commit_load(plan, load, staged(plan, [row(queue_id=n) for n in range(4)], load=load))
    assert done.rows == 4 and len(done.stores) == 2
    assert threads == [threading.current_thread()] * 2


def test_no_log_file_is_made_for_messages_after_the_load(tmp_path: Path) -> None:
    plan, made = planned(tmp_path / "s"), list[str]()
    make_file = Disk.make_file

    def make(disk: Disk, path: Path, size: int, *, final: Path | None = None) -> int:
        if path.parent.name == "commitlog":
            made.append(path.name)
        return make_file(disk, path, size, final=final)

    with mock.patch.object(Disk, "make_file", make):
        commit_load(plan, LOAD, staged(plan, [row()]))
    assert made == [f"{0:020d}"]


def test_loads_without_a_name_leave_nothing(tmp_path: Path) -> None:
    for brokers in (1, 2):
        plan = planned(tmp_path / f"s{brokers}", brokers=brokers)
        load = LoadId("run-" + "0" * 32, 0, is_named=False)
        for _ in range(2):
            commit_load(plan, load, staged(plan, [row(), row(), row(), row()], load=load))
        found = [m for broker in range(brokers) for m in messages(plan.store(broker))]
        assert len(found) == 8
        assert not [path for path in plan.loads.rglob("*") if path.suffix in (".json", ".frames")]


def test_a_crash_at_the_end_of_a_load_without_a_name(tmp_path: Path) -> None:
    """The segments are gone, so the next load must not append them again."""
    plan = planned(tmp_path / "s", brokers=2)
    rows = [row(queue_id=number) for number in range(4)]
    first, second = (LoadId(f"run-{digit * 32}", 0, is_named=False) for digit in "01")
    forget = Ledger.forget

    def crash(ledger: Ledger, load: LoadId) -> None:
        forget(ledger, load)
        raise StoreUnavailable("a crash")

    with mock.patch.object(Ledger, "forget", crash), pytest.raises(StoreUnavailable):
        commit_load(plan, first, staged(plan, rows, load=first))
    assert commit_load(plan, second, staged(plan, rows, load=second)).rows == 4
    assert sum(len(messages(plan.store(broker))) for broker in range(2)) == 8


@pytest.mark.parametrize("brokers", [1, 2])
def test_a_load_without_rows_is_known(tmp_path: Path, brokers: int) -> None:
    plan = planned(tmp_path / "s", brokers=brokers)
    for was_there in (False, True):
        summary = commit_load(plan, LOAD, staged(plan, [], []))
        assert (summary.rows, summary.was_there) == (0, was_there)
    assert not commit_load(plan, LoadId("job", 2), []).was_there


def test_older_leftovers_of_the_same_application_go(tmp_path: Path) -> None:
    plan = planned(tmp_path / "s")
    first, second, third = (LoadId("job", version) for version in (1, 2, 3))
    other = LoadId("other", 1)
    for load in (first, second, third, other):
        staged(plan, [row()], load=load)
    commit_load(plan, second, staged(plan, [row()], load=second))
    left = {path.parent for path in plan.loads.rglob("*.frames")}
    assert left == {plan.loads / third.staged, plan.loads / other.staged}


def test_what_was_staged_for_nothing_goes(tmp_path: Path) -> None:
    dead = tmp_path / "dead"
    plan = planned(tmp_path / "s", on_rejected="deadLetter", dead_letters=str(dead))
    tasks = staged(plan, [row(), row(body=None)], [row()])
    kept = staged(plan, [row()])
    discard_load(plan, LOAD, tasks)
    names = {path.name for path in plan.loads.rglob("*.frames")}
    assert names == {segment.name for task in kept for _, segment in task.segments}
    assert not list(dead.rglob("*.parquet"))


def test_what_was_begun_is_not_discarded(tmp_path: Path) -> None:
    """Spark calls abort also after a commit that failed halfway."""
    no_room = StoreUnavailable("no room")
    for brokers in (1, 2):
        plan = planned(tmp_path / f"s{brokers}", brokers=brokers)
        tasks = staged(plan, [row(queue_id=number) for number in range(4)])

        def fails(appendings: Any) -> Any:
            if len(appendings) == 1:
                store = StoreWriter.start(appendings[0].store, config=appendings[0].config)
                writer = store._engine.loads.staged
                with store, mock.patch.object(writer, "append", side_effect=no_room):
                    store.load_staged(LOAD, appendings[0].segments)
            raise no_room

        with pytest.raises(StoreUnavailable, match="no room"):
            commit_load(plan, LOAD, tasks, run=fails)
        discard_load(plan, LOAD, tasks)
        again = staged(plan, [row(queue_id=number) for number in range(4)])
        assert commit_load(plan, LOAD, again).was_there
        assert sum(len(messages(plan.store(broker))) for broker in range(brokers)) == 4


@pytest.mark.parametrize("brokers", [1, 2])
def test_other_rows_under_the_number_of_an_interrupted_load_are_refused(
    brokers: int, tmp_path: Path
) -> None:
    """The call first completes the interrupted load; its own rows are others."""
    plan = planned(tmp_path / "s", brokers=brokers)
    rows = [row(queue_id=number) for number in range(5)]
    no_room = StoreUnavailable("no room")

    def fails(appendings: Sequence[Appending]) -> Any:
        store = StoreWriter.start(appendings[0].store, config=appendings[0].config)
        with store, mock.patch.object(store._engine.loads.staged, "append", side_effect=no_room):
            store.load_staged(LOAD, appendings[0].segments, appendings[0].loads)

    with pytest.raises(StoreUnavailable, match="no room"):
        commit_load(plan, LOAD, staged(plan, rows[:4]), run=fails)
    tasks = staged(plan, rows)
    with pytest.raises(UsageError, match=r"5 rows, .* has 4: pass a higher txnVersion"):
        commit_load(plan, LOAD, tasks)
    discard_load(plan, LOAD, tasks)
    assert sum(len(messages(plan.store(broker))) for broker in range(brokers)) == 4
    assert not list((tmp_path / "s").rglob("*.frames"))
    assert commit_load(plan, LOAD, staged(plan, rows[:4])).was_there


def test_a_path_of_one_store_takes_no_brokers(tmp_path: Path) -> None:
    with StoreWriter.start(tmp_path / "s", config=config()):
        pass
    with pytest.raises(UsageError, match="is a store, but 2 brokers need a folder"):
        planned(tmp_path / "s", brokers=2)


def test_the_ledger_knows_its_applications(tmp_path: Path) -> None:
    from logquarry.disk.disk import Disk

    ledger = Ledger(Disk(), tmp_path)
    ledger.add(LoadId("имя / with anything", 5), 0)
    assert ledger.has(LoadId("имя / with anything", 5))
    assert not ledger.has(LoadId("имя / with anything", 6))
    assert not ledger.has(LoadId("another", 0))


def test_a_limit_of_open_files_is_no_damage_of_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(Disk(), tmp_path)
    ledger.add(LOAD, 0)

    def fails(path: object) -> bytes:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)

    monkeypatch.setattr(ledger_module, "read_file", fails)
    with pytest.raises(StoreUnavailable, match=r"Too many open files: raise .*\(ulimit -n\)$"):
        ledger.has(LOAD)
    monkeypatch.undo()
    assert ledger.has(LOAD)
