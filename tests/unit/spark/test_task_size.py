"""Tasks and results stay small, however many files, queues, gaps and stores there are."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from logquarry.config import StoreConfig
from logquarry.spark import rebuilding, repair
from logquarry.spark.options import parse_read_options
from logquarry.spark.rebuilding import rebuild_on_spark
from logquarry.spark.repair import verify_stores
from logquarry.spark.stream_planner import Limits, StreamPlanner
from logquarry.spark.tasks import ReadTask, plan_tasks, read_batches
from tests.helpers.lake import Lake
from tests.helpers.store_maker import StoreMaker

MOST = 16 << 10
"""Maximum bytes of any pickled task."""
MOST_OF_RANGE = 2 << 10
"""Maximum bytes of a pickled task that reads a range of the log."""
PREPARED = 0x4
SETTINGS = {"maxHashSlotNum": 16, "maxIndexNum": 50}


def written(root: Path, topics: int, bulky: int) -> Path:
    """Make a store with small topics, and one large topic with gaps between its queues' messages.

    Args:
        root: folder of the store.
        topics: number of small topics, of six messages each in three queues.
        bulky: messages of the large topic, each followed by a half message of a transaction.
    """
    maker = StoreMaker(log_file_size=16_384, queue_file_units=50)
    rng = random.Random(topics)
    small = [f"t{n}" for n in range(topics)] * 6
    rng.shuffle(small)
    for n in range(bulky):
        maker.put("bulk", 0, rng.randbytes(900), keys="same")
        maker.put("half", 0, b"not yet", sys_flag=PREPARED)
        for topic in small[n * len(small) // bulky : (n + 1) * len(small) // bulky]:
            maker.put(topic, rng.randrange(3), b"small")
    return maker.write(root)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Make a store with few of everything, and one with many."""
    root = tmp_path_factory.mktemp("sizes")
    return written(root / "few", 3, 60), written(root / "many", 200, 1_200)


def sizes(tasks: Sequence[Any]) -> int:
    return max(len(pickle.dumps(task)) for task in tasks)


def rows(tasks: Sequence[ReadTask]) -> int:
    return sum(
        batch.num_rows for task in pickle.loads(pickle.dumps(tasks)) for batch in read_batches(task)
    )


@pytest.mark.parametrize(
    ("options", "most", "messages"),
    [
        ({"splitSize": "64k"}, MOST_OF_RANGE, 1_200 * 2 + 1_200),
        ({"splitSize": "64m", "topicPattern": "t[0-9]+"}, MOST, 1_200),
        ({"splitSize": "64m", "topics": "bulk", "keys": "same"}, MOST, 1_200),
    ],
)
def test_tasks_of_a_read(
    stores: tuple[Path, Path], options: dict[str, str], most: int, messages: int
) -> None:
    few, many = (plan_tasks(parse_read_options({"path": str(s), **options})) for s in stores)
    assert sizes(many) < most, len(many)
    assert rows(many) == messages
    if most == MOST_OF_RANGE:
        assert abs(sizes(many) - sizes(few)) < 100


def test_tasks_of_a_read_of_many_stores(stores: tuple[Path, Path], tmp_path: Path) -> None:
    """A task does not contain the other stores, or where they start."""
    few, _ = stores
    paths = []
    for number in range(100):
        place = tmp_path / f"broker-with-a-name-{number:03d}"
        shutil.copytree(few, place, copy_function=os.link)
        paths.append(str(place))
    starts = {f"broker-with-a-name-{number:03d}": 0 for number in range(100)}
    read = parse_read_options({"path": paths[0], "startingOffsets": json.dumps(starts)})
    assert sizes(plan_tasks(replace(read, paths=tuple(paths)))) < MOST_OF_RANGE


def test_tasks_of_a_stream(stores: tuple[Path, Path]) -> None:
    for store in stores:
        options = parse_read_options({"path": str(store), "splitSize": "64k"}, is_stream=True)
        planner = StreamPlanner(options, options.names)
        start = planner.initial()
        found = planner.tasks(start, planner.latest(start, Limits()))
        assert sizes(found) < MOST_OF_RANGE


@dataclass
class Jobs:
    """Replaces Spark: runs tasks here and records the size of tasks and results."""

    largest: dict[str, int] = field(default_factory=dict)

    def __call__(
        self, _: Any, name: str, tasks: Sequence[Any], work: Callable[[Any], Any], **__: Any
    ) -> list[Any]:
        found = []
        for task in tasks:
            sent = pickle.dumps((task, work))
            self.largest[name] = max(self.largest.get(name, 0), len(sent))
            own_task, own_work = pickle.loads(sent)
            found.append(pickle.loads(pickle.dumps(own_work(own_task))))
        return found


def test_tasks_of_verify_and_rebuild(
    stores: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = Jobs()
    monkeypatch.setattr(repair, "run_tasks", jobs)
    monkeypatch.setattr(rebuilding, "run_tasks", jobs)
    no_spark: Any = None
    _, many = stores
    config = StoreConfig.from_mapping(SETTINGS)
    (report,) = verify_stores(no_spark, many, split_size=16_384)
    assert report.counts["messages"] == 1_200 * 2 + 1_200
    rebuild_on_spark(no_spark, many, into=tmp_path / "new", config=config, split_size=16_384)
    assert jobs.largest.keys() >= {"verify", "rebuild: look", "rebuild: queues", "rebuild: index"}
    assert max(jobs.largest.values()) < MOST, jobs.largest


def test_tasks_of_an_export_into_a_table(stores: tuple[Path, Path], tmp_path: Path) -> None:
    pytest.importorskip("deltalake")
    found: list[int] = []

    def run(tasks: Sequence[Any], work: Any) -> list[Any]:
        found.append(sizes([(task, work) for task in tasks]))
        return [work(task) for task in tasks]

    lake = Lake("delta", tmp_path / "table")
    done = lake.prepared(stores[1], {"splitSize": "256k"}).run_with(run)
    assert done.messages == 1_200 * 2 + 1_200
    assert 0 < max(found) < MOST
