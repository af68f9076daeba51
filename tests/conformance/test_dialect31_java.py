"""RocketMQ 3.1.3 reads stores that this library wrote in dialect 3.1."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from logquarry.dialect31.open_transactions import read_redo, read_table
from logquarry.dialect31.prepared import TransactionEnd
from logquarry.log.layout import StoreLayout
from logquarry.message import Message
from logquarry.store.message_store import MessageStore, StoreWriter
from tests.conformance.golden_facts import Scenario
from tests.conformance.oracle import RUN, require_oracle
from tests.conformance.test_dialect31 import dialect31

pytestmark = pytest.mark.java

RUN_V3 = RUN.parent / "v3" / "run"


@pytest.fixture(scope="module", autouse=True)
def _oracle() -> None:
    require_oracle(RUN_V3)


def work(store: StoreWriter, rng: random.Random, steps: int) -> None:
    """Begin and end transactions, and put ordinary and delayed messages between them."""
    known = store.prepared_transactions
    for _ in range(steps):
        still, kind, body = known.open(), rng.random(), bytes(rng.randrange(500))
        if still and kind < 0.4:
            known.end(rng.choice(still), rng.choice(list(TransactionEnd)))
        elif kind < 0.6:
            level = rng.choice([0, 0, 3, 99])
            store.put(Message("Plain", body, keys=f"k{rng.randrange(9)} z", delay_level=level))
        else:
            known.begin(Message("TxA", body, keys="t", tags="Tag"), "pg-orders")


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("v3-transactions", "."),
        ("v3-transactions", ""),
        ("v3-transactions-unclean/log-tail-lost", ""),
        ("v3-transactions-unclean/redolog-several-files", ""),
        # Then the entries before the log's first message are fillers.
        ("v3-transactions-unclean/first-log-file-expired", "transaction/statetable"),
    ],
)
def test_rocketmq_reads_what_we_wrote(name: str, lost: str, golden: Path, tmp_path: Path) -> None:
    scenario = Scenario(golden / name)
    config, root = dialect31(scenario), tmp_path / "store"
    shutil.copytree(scenario.store, root)
    if lost:
        shutil.rmtree(root / lost)
    rng = random.Random(name)
    for _ in range(2):
        with StoreWriter.start(root, config=config) as store:
            work(store, rng, 60)
    params, out = tmp_path / "params.json", tmp_path / "out"
    params.write_text(json.dumps(scenario.params))
    command: list[str | Path] = [RUN_V3, "dump", root, "--params", params, "--out", out]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    facts = json.loads((out / "facts.json").read_text("utf-8"))
    assert facts["load"] is True
    assert facts["commitLog"]["stop"] is None
    layout = StoreLayout.open(root, config)
    for found, told in ((read_table(layout), "stateTable"), (read_redo(layout), "redoLog")):
        units = [[found.first + at, *unit] for at, unit in enumerate(found.units.tolist())]
        assert facts[told]["units"] == units
    assert facts["tranStateTableOffset"] == read_table(layout).end
    with MessageStore.open(root, config=config) as ours:
        mine = [message.physical_offset for message in ours.scan()]
    lines = (out / "expected.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line)["physicalOffset"] for line in lines] == mine
    still = [unit[1] for unit in facts["stateTable"]["units"] if unit[5] == 4]
    asked = [call[2] for task in facts["checkTasks"] for call in task["gotoCheck"]]
    assert asked == still
    for query in facts["indexQueries"]:
        with MessageStore.open(root, config=config) as ours:
            mine = [m.physical_offset for m in ours.query(query["topic"], query["key"], 32)]
        assert mine == sorted(query["indexPhyOffsets"])
