"""A store with messages of five minutes, and a copy of it for each test."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from logquarry.store.message_store import StoreWriter
from logquarry.testing.clock import FakeClock
from tests.helpers.retention_stores import put_all
from tests.helpers.small_store import NOW, config


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made") / "store"
    clock = FakeClock(NOW)
    with StoreWriter.start(root, config=config(), clock=clock) as store:
        put_all(store, clock)
    return root


@pytest.fixture
def store_root(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "store")
    return tmp_path / "store"
