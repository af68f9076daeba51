"""Work grows in proportion to the number of queues: a broker can have 100,000 of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

import logquarry as lq
from logquarry.log import open_files
from logquarry.store.overview import overview

FEW, MANY = 40, 240
MOST_GROWTH = 1.1 * MANY / FEW
CONFIG = lq.StoreConfig(mapped_file_size_commit_log=1 << 20, mapped_file_size_consume_queue=200)


def _show(root: Path) -> None:
    with lq.MessageStore.open(root) as store:
        overview(store)


def _open_for_writing(root: Path) -> None:
    lq.MessageStore.open(root, mode="rw", config=CONFIG).close()


OPERATIONS: dict[str, Callable[[Path], object]] = {
    "info": _show,
    "open": _open_for_writing,
    "verify": lq.verify,
    "recover": lq.recover,
    "diff": lambda root: lq.diff(root, root),
}


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    made = {}
    for count in (FEW, MANY):
        made[count] = root = tmp_path_factory.mktemp(f"queues-{count}")
        with lq.MessageStore.open(root, mode="rw", config=CONFIG) as store:
            for number in range(count):
                store.put(lq.Message(f"topic-{number // 4}", b"body", queue_id=number % 4))
    return made


@pytest.mark.parametrize("name", OPERATIONS)
def test_calls_grow_in_proportion_to_the_queues(
    name: str, stores: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    # In both stores, readers close a queue's file before they read it again.
    monkeypatch.setattr(open_files, "MOST_OPEN", FEW // 2)
    operation = OPERATIONS[name]
    operation(stores[FEW])  # imports, and compiles kernels
    few, many = (_calls(operation, stores[count]) for count in (FEW, MANY))
    assert many <= MOST_GROWTH * few, f"{few} calls for {FEW} queues, {many} for {MANY}"


def _calls(operation: Callable[[Path], object], root: Path) -> int:
    """Number of calls of Python functions in this thread; each step of a generator counts."""
    calls = 0

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        operation(root)
    finally:
        sys.setprofile(before)
    return calls
