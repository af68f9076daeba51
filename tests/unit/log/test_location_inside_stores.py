"""Which places are inside of a store, also through links."""

from __future__ import annotations

from pathlib import Path

import pytest

from logquarry.config import StoreConfig
from logquarry.log.location import lies_in_store, overlaps_store


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store whose log is on another disk, with a link to the store beside it."""
    log = tmp_path / "disk" / "log"
    log.mkdir(parents=True)
    store = tmp_path / "store"
    store.mkdir()
    (store / "commitlog").symlink_to(log)
    (tmp_path / "link").symlink_to(store)
    return store


@pytest.mark.parametrize(
    ("place", "is_inside"),
    [
        ("store", True),
        ("store/q", True),
        ("store/commitlog", True),
        ("link/q", True),
        ("x/../store/q", True),
        ("disk/log", True),
        ("disk/log/q", True),
        ("disk", False),
        ("disk/logs", False),
        ("store2", False),
        (".", False),
    ],
)
def test_places(store: Path, place: str, is_inside: bool) -> None:
    root = store.parent
    assert lies_in_store(root / place, store) is is_inside
    assert lies_in_store(root / place, root / "link") is is_inside


def test_relative_paths(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(store)
    assert lies_in_store("q", store)
    assert not lies_in_store("../q", store)
    assert lies_in_store("../link/q", "../store")


def test_folders_that_the_configuration_names(store: Path) -> None:
    root = store.parent
    config = StoreConfig.from_mapping({"storePathCommitLog": f"{root}/a, {root}/b,c"})
    assert lies_in_store(root / "b" / "q", store, config)
    assert not lies_in_store(root / "b" / "q", store)
    assert not lies_in_store("c/q", store, config)


def test_a_place_that_contains_a_part_of_the_store(store: Path) -> None:
    assert overlaps_store(store.parent, store)
    assert overlaps_store(store.parent / "disk", store)
    assert overlaps_store(store / "q", store)
    assert not overlaps_store(store.parent / "other", store)


def test_places_in_object_stores() -> None:
    assert lies_in_store("s3://bucket/store/q", "s3://bucket/store")
    assert not lies_in_store("s3://bucket/store2", "s3://bucket/store")
    assert not lies_in_store("/store/q", "s3://bucket/store")
