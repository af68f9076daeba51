"""Commands and jobs refuse to write into a store, also through links and relative paths."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from logquarry.config import StoreConfig
from logquarry.errors import UsageError
from logquarry.ingest.load import plan_load
from logquarry.ingest.staging import LoadPlan
from logquarry.spark.export import check_apart
from logquarry.spark.options import parse_read_options
from logquarry.spark.stream_planner import StreamPlanner
from logquarry.spark.tasks import plan_tasks
from tests.helpers.command import run


@pytest.fixture
def linked_store(small_store: Path, tmp_path: Path) -> Iterator[Path]:
    """A store whose log is on another disk; the store does not change."""
    (tmp_path / "disk").mkdir()
    log = shutil.move(small_store / "commitlog", tmp_path / "disk" / "log")
    (small_store / "commitlog").symlink_to(log)
    (tmp_path / "link").symlink_to(small_store)
    before = names(tmp_path)
    yield small_store
    assert names(tmp_path) == before


def names(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*"))


PLACES = ("small/x", "small/commitlog/x", "link/x", "disk/log/x", "disk/../link/config/x")


@pytest.mark.parametrize("place", PLACES)
def test_commands(linked_store: Path, place: str, tmp_path: Path) -> None:
    target = tmp_path / place
    lines = run("export", linked_store, "--to", target, "--format", "jsonl", code=2)
    assert f"{target} lies in the store {linked_store}; give a path outside" in lines.stderr
    page = run("report", linked_store, "--html", target, code=2)
    assert f"{target} lies in the store {linked_store}; give a path outside" in page.stderr
    saved = run("salvage", linked_store, "--into", target, code=2)
    assert f"{target}: lies within the damaged store: give another" in saved.stderr
    rebuilt = run("rebuild", linked_store, "--into", target, code=2)
    assert f"{target}: lies in the store; use --in-place" in rebuilt.stderr
    with pytest.raises(UsageError, match=f"^{target}: overlaps with the store {linked_store}"):
        check_apart(str(target), [str(linked_store)], StoreConfig())


@pytest.mark.parametrize("place", PLACES)
def test_copies_of_damage(linked_store: Path, place: str, tmp_path: Path) -> None:
    given = {
        "path": str(linked_store),
        "onDamage": "quarantine",
        "quarantinePath": os.path.relpath(tmp_path / place),
    }
    reason = f"^quarantinePath: .*/x lies in the store {linked_store}, .* folder outside of it"
    with pytest.raises(UsageError, match=reason):
        plan_tasks(parse_read_options(given))
    options = parse_read_options(given, is_stream=True)
    with pytest.raises(UsageError, match=reason):
        StreamPlanner(options, options.names).initial()


def test_copies_of_damage_that_the_name_of_the_broker_leads_into_the_store(
    linked_store: Path, tmp_path: Path
) -> None:
    # The reader makes a folder with the name of the broker, which is the name of the store's
    # folder.
    given = {
        "path": str(linked_store),
        "onDamage": "quarantine",
        "quarantinePath": str(tmp_path),
    }
    with pytest.raises(UsageError, match=f"^quarantinePath: {linked_store} lies in the store"):
        plan_tasks(parse_read_options(given))


@pytest.mark.parametrize("place", PLACES)
def test_dead_letters(linked_store: Path, place: str, tmp_path: Path) -> None:
    plan = LoadPlan(
        path=str(linked_store), on_rejected="deadLetter", dead_letters=str(tmp_path / place)
    )
    reason = f"^deadLetterPath: {tmp_path / place} lies in {linked_store}, .* outside of it"
    with pytest.raises(UsageError, match=reason):
        plan_load(plan)


def test_dead_letters_of_several_brokers(tmp_path: Path) -> None:
    def plan(place: str) -> LoadPlan:
        return LoadPlan(
            path=str(tmp_path),
            brokers=3,
            on_rejected="deadLetter",
            dead_letters=str(tmp_path / place),
        )

    for place in ("broker-2/dead", ".logquarry/loads/dead"):
        with pytest.raises(UsageError, match="deadLetterPath: "):
            plan_load(plan(place))
    for place in ("dead", "broker-3"):
        plan_load(plan(place))
