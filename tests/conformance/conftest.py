"""The stores of RocketMQ 5, for all conformance tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.conformance.rocketmq5 import Copied, rocketmq5_stores, rocksdb_stores
from tests.helpers.golden_data import copy_store


@pytest.fixture(scope="session")
def rocketmq5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the stores that brokers wrote, by scenario: copy what you change."""
    return rocketmq5_stores(tmp_path_factory)


@pytest.fixture(scope="session")
def rocksdb(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of each scenario with RocksDB: those of ``rocketmq5``, and more."""
    return rocksdb_stores(tmp_path_factory)


@pytest.fixture
def copied(rocketmq5: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Copied:
    """Makes a copy of a scenario's store that a test may change."""

    def copy(scenario: str) -> Path:
        folder = rocketmq5 / scenario
        if not folder.exists():
            folder = request.getfixturevalue("rocksdb")[scenario]
        return copy_store(folder / "store", tmp_path / scenario)

    return copy


@pytest.fixture
def no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """As without the extra ``rocksdb``."""
    monkeypatch.setitem(sys.modules, "rocksdict", None)
