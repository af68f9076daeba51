"""The fixture logquarry_broker, in a separate session of pytest."""

from __future__ import annotations

import tomllib
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
pytest_plugins = ["pytester"]

TEST = """
import socket

def test_it(logquarry_broker, logquarry_clock):
    host, _, port = logquarry_broker.name_server.rpartition(":")
    socket.create_connection((host, int(port))).close()
    before = logquarry_broker.core.clock()
    logquarry_clock.advance(60_000)
    assert logquarry_broker.core.clock() >= before + 60_000
"""


def test_the_fixture(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(TEST)
    # Also if the package is installed, so that pytest would load the plugin by its entry point.
    plugin = ("-p", "no:logquarry", "-p", "logquarry.testing.pytest_plugin")
    result = pytester.runpytest_inprocess(*plugin, "-q")
    result.assert_outcomes(passed=1)


def test_the_entry_point_names_the_plugin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module = import_module(project["entry-points"]["pytest11"]["logquarry"])
    assert module.logquarry_broker is not None
