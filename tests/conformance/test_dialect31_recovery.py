"""The transactions of RocketMQ 3.1.3's stores after this library has opened them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from logquarry.config import StoreConfig
from logquarry.dialect31.open_transactions import read_redo, read_table
from logquarry.dialect31.prepared import TransactionEnd
from logquarry.format import queue_entry
from logquarry.log.layout import StoreLayout
from logquarry.message import Message
from logquarry.repair.recover.recover import recover
from logquarry.repair.verification import verify_store
from logquarry.store.message_store import StoreWriter
from tests.conformance.golden_facts import Scenario
from tests.conformance.test_dialect31 import dialect31

RIGHT = (
    "abort-only",
    "noabort-first-log-file-expired",
    "redolog-behind",
    "redolog-gone-checkpoint-zero",
    "statetable-first-file-short",
    "statetable-gone",
    "statetable-last-file-short",
)
"""Where RocketMQ finds the open transactions again."""
WRONG = (
    "abort-only-then-ends",
    "first-log-file-expired",
    "log-tail-lost",
    "log-tail-lost-then-puts",
    "noabort-statetable-gone",
    "noabort-statetable-last-file-short",
    "noabort-statetable-last-units-lost",
    "noabort-statetable-unit-torn",
    "prepared-without-group",
    "redolog-gone",
    "redolog-over-20-files",
    "redolog-several-files",
)
"""Where it loses some, or brings some back that have ended."""


class Log:
    """The transactions of a golden store, by the messages that the oracle wrote."""

    def __init__(self, messages: list[dict[str, Any]]) -> None:
        self.prepared: dict[int, dict[str, Any]] = {}
        self.ended: set[int] = set()
        for message in messages:
            if message["transactionType"] == "PREPARED":
                self.prepared[message["physicalOffset"]] = message
            elif message["transactionType"] != "NOT":
                self.ended.add(message["preparedTransactionOffset"])

    @property
    def open(self) -> set[int]:
        return self.prepared.keys() - self.ended


def log_of(scenario: Scenario) -> Log:
    """The messages that stand in a harmed store: RocketMQ's recovery keeps all of them here."""
    folder = scenario.folder
    path = folder / "expected.jsonl"
    if not path.read_text("utf-8").strip():
        # RocketMQ refuses the store: the log itself shows what was in it.
        with_frames = StoreLayout.open(folder / "store", dialect31(scenario))
        return Log(frames_as_facts(with_frames))
    return Log([json.loads(line) for line in path.read_text("utf-8").splitlines()])


def frames_as_facts(layout: StoreLayout) -> list[dict[str, Any]]:
    from logquarry.store.message_store import MessageStore

    kinds = {0: "NOT", 4: "PREPARED", 8: "COMMIT", 12: "ROLLBACK"}
    with MessageStore.open(layout.root) as store:
        return [
            {
                "transactionType": kinds[message.sys_flag & 12],
                "physicalOffset": message.physical_offset,
                "preparedTransactionOffset": message.prepared_transaction_offset,
                "queueOffset": message.queue_offset,
            }
            for message in store.scan()
        ]


@pytest.fixture(params=RIGHT + WRONG)
def opened(request: pytest.FixtureRequest, golden: Path, tmp_path: Path) -> tuple[Scenario, Path]:
    scenario = Scenario(golden / "v3-transactions-unclean" / request.param)
    shutil.copytree(scenario.folder / "store", tmp_path / "store")
    return scenario, tmp_path / "store"


def test_what_is_open_by_the_log_is_open_and_can_be_ended(opened: tuple[Scenario, Path]) -> None:
    scenario, root = opened
    config, log = dialect31(scenario), log_of(scenario)
    with StoreWriter.start(root, config=config) as store:
        known = store.prepared_transactions
        found = {one.physical_offset: one for one in known.open()}
        assert found.keys() == log.open
        name = scenario.folder.name
        if name in RIGHT:
            theirs = {unit[1] for unit in scenario.facts["stateTable"]["units"] if unit[5] == 4}
            assert found.keys() == theirs
        if "then" not in name:
            # Transactions keep their numbers, so producers can still name them.
            assert all(log.prepared[at]["queueOffset"] == one.number for at, one in found.items())
        some = sorted(found)[:: max(1, len(found) // 7)]
        for number, offset in enumerate(some):
            known.end(offset, list(TransactionEnd)[number % 2])
        begun = known.begin(Message("TxA", b"new"), "pg-orders")
        left = {one.physical_offset for one in known.open()}
        assert left == log.open - set(some) | {begun.physical_offset}
    with StoreWriter.start(root, config=config) as store:
        assert {one.physical_offset for one in store.prepared_transactions.open()} == left
    layout = StoreLayout.open(root, config)
    report = verify_store(layout)
    assert not [finding for finding in report.findings if "transaction/" in finding.file]
    units = read_table(layout).units
    ends = {unit["physical_offset"]: unit["state"] for unit in units}
    for number, offset in enumerate(some):
        assert ends[offset] == list(TransactionEnd)[number % 2].value


def test_nothing_is_deleted(opened: tuple[Scenario, Path]) -> None:
    """Every byte that was there is still there, or in quarantine."""
    scenario, root = opened
    config = dialect31(scenario)
    before = [path.read_bytes() for path in (root / "transaction").rglob("0*") if path.is_file()]
    with StoreWriter.start(root, config=config):
        pass
    after = {path.read_bytes() for path in root.rglob("*") if path.is_file()}
    assert all(data in after for data in before)


@pytest.mark.parametrize("name", ["log-tail-lost", "redolog-several-files"])
def test_the_command_recovers_them_without_settings(
    name: str, golden: Path, tmp_path: Path
) -> None:
    scenario = Scenario(golden / "v3-transactions-unclean" / name)
    root = tmp_path / "store"
    shutil.copytree(scenario.folder / "store", root)
    sizes = {
        key: value for key, value in scenario.params.items() if "Index" in key or "Slot" in key
    }
    recover(root, apply=True, config=StoreConfig.from_mapping(sizes))
    table = read_table(StoreLayout.open(root))
    states = table.units["state"] == queue_entry.STATES[0]
    assert set(table.units["physical_offset"][states].tolist()) == log_of(scenario).open
    assert read_redo(StoreLayout.open(root)).fault is None


@pytest.mark.parametrize("name", ["abort-only", "redolog-several-files", "log-tail-lost"])
def test_a_store_that_rocketmq_recovered_is_set_right(
    name: str, golden: Path, tmp_path: Path
) -> None:
    """RocketMQ has renumbered open transactions and lost some: the log shows which are open."""
    scenario = Scenario(golden / "v3-transactions-unclean" / name)
    root = tmp_path / "store"
    shutil.copytree(scenario.folder / "store-recovered", root)
    with StoreWriter.start(root, config=dialect31(scenario)) as store:
        known = store.prepared_transactions
        assert {one.physical_offset for one in known.open()} == log_of(scenario).open
        one = known.open()[-1]
        result = known.rollback(one)
        assert result.queue_offset == one.number
        assert one.physical_offset not in {other.physical_offset for other in known.open()}


def test_ends_that_rocketmq_passed_over(golden: Path, tmp_path: Path) -> None:
    """After a clean shutdown the table contradicts the log, and the log is right."""
    scenario = Scenario(golden / "v3-transactions-odd")
    root = tmp_path / "store"
    shutil.copytree(scenario.store, root)
    config = dialect31(scenario)
    groups = {
        message["physicalOffset"]: message["properties"].get("PGROUP")
        for message in scenario.expected
    }
    opened = {m["physicalOffset"] for m in scenario.expected if m["transactionType"] == "PREPARED"}
    for message in scenario.expected:
        place = message["preparedTransactionOffset"]
        is_end = message["transactionType"] in ("COMMIT", "ROLLBACK")
        # Only the producers that began a transaction end it.
        if is_end and place in opened and groups[message["physicalOffset"]] == groups[place]:
            opened.discard(place)
    with StoreWriter.start(root, config=config) as store:
        known = store.prepared_transactions
        assert {one.physical_offset for one in known.open()} == opened
        for one in known.open():
            if one.group_hash:
                known.commit(one)
        store.wait_dispatched()
    layout = StoreLayout.open(root, config)
    assert not verify_store(layout).has_damage
    with StoreWriter.start(root, config=config):
        pass
    # The table is put aside once at most.
    assert len(list((root / ".logquarry").rglob("statetable"))) <= 1
