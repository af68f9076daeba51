"""In dialect 3.1, the inputs of RocketMQ 3.1.3's golden stores give the same bytes."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import logquarry as lq
from logquarry.config import StoreConfig
from logquarry.dialect31.open_transactions import read_redo, read_table
from logquarry.errors import MessageRejected
from logquarry.format import index
from logquarry.format.index import HEADER
from logquarry.log.layout import StoreLayout
from logquarry.message import Message
from logquarry.repair.rebuild.rebuild import rebuild
from logquarry.store.message_store import MessageStore, StoreWriter
from logquarry.store.state import transactions
from logquarry.testing.clock import FakeClock
from tests.conformance.golden_facts import Scenario
from tests.conformance.replay import Input
from tests.helpers.files import bytes_of

SAME = (
    "v3-transactions",
    "v3-blank/rollover",
    "v3-blank/reopened",
    "v3-blank/max-message-size",
)


def message_of(put: Input) -> Message:
    """The message of a recorded input: 3.1.3 parses the map from the string."""
    is_end = put["kind"] in ("commit", "rollback")
    return Message(
        put["topic"],
        base64.b64decode(put["body"] or ""),
        queue_id=put["queueId"],
        # The broker has taken an end's DELAY from the map; its string still has it.
        properties=dict(put["properties"]) if is_end else None,
        properties_string=put["propertiesString"],
        flag=put["flag"],
        sys_flag=put["sysFlag"],
        queue_offset=put["queueOffset"],
        born_timestamp=put["bornTimestamp"],
        born_host=put["bornHost"],
        store_host=put["storeHost"],
        reconsume_times=put["reconsumeTimes"],
        prepared_transaction_offset=put["preparedTransactionOffset"],
    )


def dialect31(scenario: Scenario) -> StoreConfig:
    return StoreConfig.from_mapping({**scenario.params, "dialect": "3.1"})


class Replay:
    """A store of this library that gets the inputs of a golden one."""

    def __init__(self, root: Path, scenario: Scenario) -> None:
        self.root = root
        self.config = dialect31(scenario)
        self.clock = FakeClock()
        self.store = self._opened()
        self.refused: list[dict[str, Any]] = []
        for line in (scenario.folder / "puts.jsonl").read_text("utf-8").splitlines():
            self._take(json.loads(line))

    def _opened(self) -> StoreWriter:
        return StoreWriter.start(self.root, config=self.config, clock=self.clock)

    def _take(self, line: dict[str, Any]) -> None:
        if "event" in line:
            self.store.close()
            self.store = self._opened()
            return
        if "input" not in line:
            return
        expected = line["result"]["append"]
        self.clock.now = expected["storeTimestamp"] or self.clock.now
        try:
            result = self.store.put(message_of(line["input"]))
        except MessageRejected as error:
            assert error.status == line["result"]["putStatus"]
            self.refused.append(line)
            return
        assert {
            "status": result.append_status.value,
            "wroteOffset": result.physical_offset,
            "wroteBytes": result.size,
            "msgId": result.message_id,
            "storeTimestamp": result.store_timestamp,
            "logicsOffset": result.queue_offset,
        } == expected


@pytest.fixture(scope="module", params=SAME)
def replayed(
    request: pytest.FixtureRequest, golden: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Scenario, Replay]]:
    scenario = Scenario(golden / request.param)
    replay = Replay(tmp_path_factory.mktemp("replay") / "store", scenario)
    replay.store.close()
    yield scenario, replay


@pytest.mark.parametrize("folder", ["commitlog", "transaction"])
def test_files_have_the_same_bytes(replayed: tuple[Scenario, Replay], folder: str) -> None:
    scenario, replay = replayed
    ours, theirs = bytes_of(replay.root / folder), bytes_of(scenario.store / folder)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []


def test_queues_are_the_same(replayed: tuple[Scenario, Replay]) -> None:
    """Except delivery times: 3.1.3 took them from its clock, not from the store time."""
    scenario, replay = replayed
    ours = bytes_of(replay.root / "consumequeue")
    theirs = bytes_of(scenario.store / "consumequeue")
    assert ours.keys() == theirs.keys()
    schedule = [name for name in ours if name.startswith("SCHEDULE")]
    assert [name for name in ours if ours[name] != theirs[name] and name not in schedule] == []
    for name in schedule:
        kinds = np.dtype([("frame", "S12"), ("tags", ">i8")])
        mine, real = np.frombuffer(ours[name], kinds), np.frombuffer(theirs[name], kinds)
        assert (mine["frame"] == real["frame"]).all()
        assert (np.abs(mine["tags"] - real["tags"]) < 1_000).all()


def test_index_files_have_the_same_content(replayed: tuple[Scenario, Replay]) -> None:
    scenario, replay = replayed
    ours = sorted((replay.root / "index").iterdir())
    theirs = sorted((scenario.store / "index").iterdir())
    assert len(ours) == len(theirs)
    for mine, real in zip(ours, theirs, strict=True):
        data, expected = mine.read_bytes(), real.read_bytes()
        assert data[HEADER.size :] == expected[HEADER.size :]
        header, wanted = index.decode_header(data), index.decode_header(expected)
        # 3.1.3 leaves 1 on the disk, this library a value that readers count as no time.
        assert header._replace(entry_count=max(1, header.entry_count)) == wanted._replace(
            entry_count=max(1, wanted.entry_count)
        )


def test_a_rebuild_makes_the_same_index(golden: Path, tmp_path: Path) -> None:
    scenario = Scenario(golden / "v3-transactions")
    shutil.copytree(scenario.store, tmp_path / "store")
    rebuild(tmp_path / "store", apply=True, config=dialect31(scenario))
    [mine], [real] = (
        list((root / "index").iterdir()) for root in (tmp_path / "store", scenario.store)
    )
    assert mine.read_bytes() == real.read_bytes()


def test_a_message_larger_than_a_file_is_refused(golden: Path, tmp_path: Path) -> None:
    """QUIRK: RocketMQ returns PUT_OK and blanks two files, and its queue points at a blank."""
    scenario = Scenario(golden / "v3-blank/larger-than-file")
    config, refused = dialect31(scenario), []
    with StoreWriter.start(tmp_path / "store", config=config) as store:
        for line in (scenario.folder / "puts.jsonl").read_text("utf-8").splitlines():
            put = json.loads(line)["input"]
            try:
                store.put(message_of(put))
            except MessageRejected as error:
                assert error.reason == "larger_than_file"
                refused.append(put["properties"]["TAGS"])
        assert refused == ["s9000", "s8185"]
        bodies = [message.body for message in store.scan()]
    with MessageStore.open(scenario.store) as theirs:
        assert bodies == [message.body for message in theirs.scan()]


def test_messages_that_rocketmq_never_wrote_need_no_consent(golden: Path, tmp_path: Path) -> None:
    root = tmp_path / "store"
    shutil.copytree(golden / "v3-blank/larger-than-file/store", root)
    found = lq.salvage(root).plan.lost
    assert [(span.offset, span.kind) for span in found] == [
        (8192, "missing_file"),
        (24576, "missing_file"),
    ]
    plan = lq.recover(root, apply=True)
    assert plan.loss is None
    reasons = [span.reason for span in found] + [span.reason for span in plan.damage]
    words = "RocketMQ 3 acknowledged a message larger than a file, and never wrote it"
    assert all(words in reason for reason in reasons)
    assert [span.offset for span in plan.damage] == [8192, 24576]
    assert not lq.recover(root).is_needed


def test_table_and_redo_log_are_read_as_the_oracle_read_them(golden: Path) -> None:
    for name in (*SAME, "v3-transactions-odd"):
        scenario = Scenario(golden / name)
        layout = StoreLayout.open(scenario.store)
        table, redo = read_table(layout), read_redo(layout)
        assert table.fault is redo.fault is None
        for found, facts in ((table, "stateTable"), (redo, "redoLog")):
            units = scenario.facts[facts]["units"]
            assert [[found.first + at, *unit] for at, unit in enumerate(found.units.tolist())] == [
                list(unit) for unit in units
            ]


def test_info_tells_how_transactions_ended(golden: Path) -> None:
    scenario = Scenario(golden / "v3-transactions")
    states = [unit[5] for unit in scenario.facts["stateTable"]["units"]]
    with MessageStore.open(scenario.store) as store:
        found = transactions(store)
    counts = (len(found.open), found.committed, found.rolled_back)
    assert counts == (states.count(4), states.count(8), states.count(12))
