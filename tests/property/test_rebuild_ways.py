"""Queues and index that several tasks build have the bytes of those built in one walk."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

import logquarry as lq
from logquarry.config import StoreConfig
from logquarry.format import sys_flag
from logquarry.format.frame import HEAD
from logquarry.repair.rebuild import parts
from logquarry.repair.rebuild.build import RebuildReport
from logquarry.repair.rebuild.rebuild import rebuild
from logquarry.spark import rebuilding
from logquarry.store.message_store import MessageStore
from tests.conformance.golden_facts import SOUND, WITH_LOG, Scenario
from tests.helpers.damage import damaged
from tests.helpers.files import overwrite
from tests.helpers.hypothesis_profiles import costly
from tests.helpers.small_store import config, opened
from tests.helpers.store_maker import StoreMaker

T = TypeVar("T")
R = TypeVar("R")

CONFIG = StoreConfig(
    max_hash_slot_num=16,
    max_index_num=50,
    mapped_file_size_commit_log=4096,
    mapped_file_size_consume_queue=200,
)


def run_here(
    _spark: object,
    _name: str,
    tasks: Sequence[T],
    work: Callable[[T], R],
    *,
    weight: Callable[[T], int],
    progress: object = None,
    pause: Callable[[], None] = lambda: None,
) -> list[R]:
    """Run tasks as Spark does, without Spark and in another order."""
    found: list[R] = []
    for task in reversed(tasks):
        sent_work, sent_task = pickle.loads(pickle.dumps((work, task)))
        assert weight(task) >= 0
        pause()
        found.append(pickle.loads(pickle.dumps(sent_work(sent_task))))
    return found[::-1]


def both(
    store: Path, folder: Path, config: StoreConfig, split_size: int
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Reports and files of a build in one walk, and of a build by many tasks."""
    alone = rebuild(store, into=folder / "alone", config=config)
    with (
        mock.patch.object(rebuilding, "run_tasks", run_here),
        # Each task then has several stretches, and joins their results.
        mock.patch.object(parts, "STRETCH_BYTES", 1_500),
    ):
        many = rebuilding.rebuild_on_spark(
            None,  # type: ignore[arg-type]
            store,
            into=folder / "many",
            config=config,
            split_size=split_size,
        )
    return made(alone, folder / "alone"), made(many, folder / "many")


def made(report: RebuildReport, folder: Path) -> tuple[Any, ...]:
    document = report.to_json() | {"into": None}
    paths = sorted(path for path in folder.rglob("*"))
    queues = {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in paths
        if "index" not in path.relative_to(folder).parts
    }
    index = [path.read_bytes() for path in paths if path.parent == folder / "index"]
    return document, queues, index


@pytest.mark.parametrize(
    ("name", "split_size"),
    [
        *((name, size) for name in SOUND for size in (7_000, 60_000)),
        *((f"unclean/{name}", 7_000) for name in WITH_LOG),
    ],
)
def test_golden_stores(golden: Path, tmp_path: Path, name: str, split_size: int) -> None:
    scenario = Scenario(golden / name)
    alone, many = both(scenario.store, tmp_path, scenario.config, split_size)
    assert many == alone


def store(restarts: int, rolls: int) -> dict[str, bytes]:
    """A store of small files, with queues whose offsets fall back and with full index files."""
    maker = StoreMaker()
    for number in range(rolls):
        maker.put(f"t{number % 2}", number % 3, b"body", keys=f"k{number} all", tags="T")
    if restarts:
        maker.units["t0", 0].clear()
        for offset in (0, 1, 2):
            maker.put("t0", 0, b"again", queue_offset=offset)
    maker.put("t1", 7, b"no keys")
    with TemporaryDirectory() as folder:
        root = maker.write(Path(folder))
        paths = sorted(path for path in root.rglob("*") if path.is_file())
        return {str(path.relative_to(root)): path.read_bytes() for path in paths}


STORES = {(restarts, rolls): store(restarts, rolls) for restarts in (0, 1) for rolls in (24, 49)}
"""The index files of 49 messages with two keys are just full."""


@costly()
@given(st.sampled_from(sorted(STORES)).flatmap(lambda which: damaged(STORES[which], most=2)))
def test_stores_with_damage(files: dict[str, bytes]) -> None:
    with TemporaryDirectory() as folder:
        root = Path(folder, "store")
        (root / "commitlog").mkdir(parents=True)
        for path, content in files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(content)
        try:
            rebuild(root, into=Path(folder, "first"), config=CONFIG)
        except Exception as error:
            with pytest.raises(type(error)):
                both(root, Path(folder), CONFIG, 900)
            return
        alone, many = both(root, Path(folder), CONFIG, 900)
        assert many == alone


@pytest.mark.parametrize("which", sorted(STORES))
@pytest.mark.parametrize("split_size", [300, 1_500])
def test_sound_stores(tmp_path: Path, which: tuple[int, int], split_size: int) -> None:
    for path, content in STORES[which].items():
        (tmp_path / "store" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "store" / path).write_bytes(content)
    alone, many = both(tmp_path / "store", tmp_path, CONFIG, split_size)
    assert many == alone
    document, _, index = many
    assert document["messages"] == sum(which) + which[0] * 2 + 1
    assert len(index) == (3 if which[1] == 49 else 1)


@pytest.mark.parametrize("offset", [0, 2, 9, 400, 1 << 30, 1 << 60])
@pytest.mark.parametrize("number", [0, 7, 23])
def test_harmed_queue_offsets(tmp_path: Path, number: int, offset: int) -> None:
    maker = StoreMaker()
    for _ in range(24):
        maker.put("t", 0, b"body")
        maker.put("u", 0, b"body")
    root = maker.write(tmp_path / "store")
    with MessageStore.open(root, config=CONFIG) as opened:
        place = opened.get("t", 0, number).messages[0].physical_offset
    shutil.rmtree(root / "consumequeue")
    files = sorted((root / "commitlog").iterdir())
    size = files[0].stat().st_size
    at = place % size + HEAD.offsets["queue_offset"]
    overwrite(files[place // size], at, offset.to_bytes(8, "big"))
    alone, many = both(root, tmp_path, CONFIG, 900)
    assert many == alone


def filled(root: Path) -> list[int]:
    """Put 30 messages into two queues; return their physical offsets."""
    with opened(root) as store:
        for number in range(30):
            store.put(lq.Message("t", b"%d" % number, keys="k", queue_id=number % 2))
        return [message.physical_offset for message in store.scan()]


def require_old_queues(folder: Path, split_size: int) -> None:
    """Both ways build the queues that the store has."""
    root = folder / "store"
    alone, many = both(root, folder, config(), split_size)
    assert many == alone
    assert many[1] == {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else None
        for path in root.rglob("*")
        if "consumequeue" in path.parts
    }


@pytest.mark.parametrize("split_size", [300, 1_500])
@pytest.mark.parametrize("queue_ids", [(1,), (7,), (-3,), (1, 7)])
@pytest.mark.parametrize("number", [0, 2, 14, 26, 28])
def test_harmed_queue_ids(
    number: int, queue_ids: tuple[int, ...], split_size: int, tmp_path: Path
) -> None:
    """No CRC covers the queue id. The entry in the right queue stays there."""
    places = filled(tmp_path / "store")
    for one, queue_id in zip((number, 10), queue_ids, strict=False):
        log = min((tmp_path / "store" / "commitlog").iterdir())
        at = places[one] + HEAD.offsets["queue_id"]
        overwrite(log, at, queue_id.to_bytes(4, signed=True))
    require_old_queues(tmp_path, split_size)


@pytest.mark.parametrize("split_size", [300, 1_500])
@pytest.mark.parametrize("numbers", [[0], [14], [28, 29], [2, 4, 6], list(range(30))])
def test_harmed_transaction_types(numbers: list[int], split_size: int, tmp_path: Path) -> None:
    """No CRC covers SYSFLAG. The entry of a message that seems to be PREPARED stays."""
    places = filled(tmp_path / "store")
    log = min((tmp_path / "store" / "commitlog").iterdir())
    for number in numbers:
        kind = sys_flag.TRANSACTION_PREPARED.to_bytes(4)
        overwrite(log, places[number] + HEAD.offsets["sys_flag"], kind)
    require_old_queues(tmp_path, split_size)


@pytest.mark.parametrize("split_size", [7_000, 60_000])
def test_harmed_transaction_types_with_copies(
    split_size: int, golden: Path, tmp_path: Path
) -> None:
    """The further queues of a message (multi-dispatch) keep their entries, too."""
    scenario = Scenario(golden / "multidispatch")
    root = tmp_path / "store"
    shutil.copytree(scenario.store, root)
    with lq.MessageStore.open(root) as opened_store:
        copied = [one for one in opened_store.scan() if "INNER_MULTI_DISPATCH" in one.properties]
    log = min((root / "commitlog").iterdir())
    for message in copied[3:40:9]:
        kind = message.sys_flag | sys_flag.TRANSACTION_PREPARED
        overwrite(log, message.physical_offset + HEAD.offsets["sys_flag"], kind.to_bytes(4))
    sound, _ = both(scenario.store, tmp_path / "sound", scenario.config, split_size)
    alone, many = both(root, tmp_path, scenario.config, split_size)
    assert many == alone
    assert alone[1] == sound[1]
