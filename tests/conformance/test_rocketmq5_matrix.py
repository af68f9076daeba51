"""Each command on each store of RocketMQ 5 (:mod:`matrix5`): served, refused, or read in full."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance import matrix5
from tests.conformance.matrix5 import READERS, RESULTS_OF_SUCCESS, WRITERS, Store
from tests.conformance.rocketmq5 import stores5
from tools import compatibility

STORES = matrix5.stores_in(stores5())
WRITTEN = [store for store in STORES if store.state != "live"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("command", READERS)
@pytest.mark.parametrize("store", STORES, ids=lambda store: store.name)
def test_reads(store: Store, command: str, tmp_path: Path) -> None:
    result = matrix5.run_cell(store, command, tmp_path)
    assert result.result in RESULTS_OF_SUCCESS, result.detail


@pytest.mark.slow
@pytest.mark.java
@pytest.mark.timeout(600)
@pytest.mark.parametrize("command", WRITERS)
@pytest.mark.parametrize("store", WRITTEN, ids=lambda store: store.name)
def test_changes(store: Store, command: str, tmp_path: Path) -> None:
    result = matrix5.run_cell(store, command, tmp_path)
    assert result.result in RESULTS_OF_SUCCESS, result.detail


def test_the_page_knows_every_scenario_and_command() -> None:
    recorded = matrix5.recorded()
    scenarios = {store.partition("/")[2].removesuffix("-live") for store, _ in recorded}
    assert scenarios <= compatibility.SCENARIOS.keys()
    assert {command for _, command in recorded} <= set(compatibility.COMMANDS)
    assert (*READERS, *WRITERS) == compatibility.COMMANDS
    assert matrix5.RESULTS == compatibility.RESULTS
