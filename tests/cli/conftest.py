"""Stores for tests of commands."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.command import run
from tests.helpers.hostile_store import harm, make_small_store
from tests.helpers.imports import SETTINGS, Import


@pytest.fixture(autouse=True)
def sighup_ends_processes() -> Iterator[None]:
    """If ``nohup`` started pytest, the processes that a test starts would ignore SIGHUP."""
    if not hasattr(signal, "SIGHUP"):
        yield
        return
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def small_store(tmp_path: Path) -> Path:
    """See :mod:`tests.helpers.hostile_store`."""
    return make_small_store(tmp_path / "small")


@pytest.fixture
def damaged_store(small_store: Path) -> Path:
    """The same with a harmed body in the first file."""
    return harm(small_store)


@pytest.fixture
def put_in(tmp_path: Path) -> Import:
    """Import into ``tmp_path/store``."""
    settings = tmp_path / "settings.json"
    settings.write_text(json.dumps(SETTINGS))

    def call(source: object, *options: str, code: int = 0) -> Any:
        return run("import", source, tmp_path / "store", "--config", settings, *options, code=code)

    return call
