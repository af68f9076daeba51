"""Links to disks that are not mounted: the error names the link, its target and the next step."""

from __future__ import annotations

from pathlib import Path

import pytest

import logquarry as lq
from logquarry.errors import CorruptFrame, StoreNotFound, StoreUnavailable
from tests.helpers.small_store import bodies, config, opened

TEXT = r"{}: it is a link to /nowhere/disk, which does not exist: mount that disk, or correct"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    root = tmp_path / "store"
    with opened(root) as writer:
        for number in range(60):
            writer.put(lq.Message("t", bytes(600), keys=f"k{number}"))
    return root


@pytest.mark.parametrize("folder", ["commitlog", "consumequeue"])
def test_a_folder(store: Path, folder: str) -> None:
    (store / folder).rename(store / "elsewhere")
    (store / folder).symlink_to("/nowhere/disk")
    for call in (
        lambda: lq.MessageStore.open(store),
        lambda: opened(store),
        lambda: lq.recover(store, apply=True, config=config()),
    ):
        with pytest.raises((StoreNotFound, StoreUnavailable), match=TEXT.format(folder)):
            call()
    assert sorted(path.name for path in (store / "elsewhere").iterdir())


def test_a_file_of_the_log(store: Path) -> None:
    path = store / "commitlog" / f"{16_384:020d}"
    path.rename(store / "elsewhere")
    path.symlink_to("/nowhere/disk")
    with pytest.raises(CorruptFrame, match="its file is a link to /nowhere/disk, which does not"):
        bodies(lq.MessageStore.open(store))
    with pytest.raises(StoreUnavailable, match=TEXT.format(path.name)):
        lq.recover(store, apply=True, config=config())
