"""The recorded puts of the golden stores, put into an open store, give the same bytes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.repair.verification import verify_store
from logquarry.testing.clock import FakeClock
from tests.conformance.golden_facts import ANY_LOSS, CUT_FILES, LOG_GONE, Scenario
from tests.conformance.replay import append_facts, message_of, wire_of
from tests.conformance.test_replay import SCENARIOS, index_parts
from tests.helpers.files import bytes_of


@pytest.fixture(scope="module", params=SCENARIOS)
def replayed(
    request: pytest.FixtureRequest, golden: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Scenario, Path]]:
    scenario = Scenario(golden / request.param)
    root = tmp_path_factory.mktemp("replay") / "store"
    puts = (scenario.folder / "puts.jsonl").read_text("utf-8").splitlines()
    clock = FakeClock()
    # Reopened in between: earlier messages are still there.
    for part in (puts[: len(puts) // 2], puts[len(puts) // 2 :]):
        with lq.MessageStore.open(root, mode="rw", config=scenario.config, clock=clock) as store:
            for line in part:
                put = json.loads(line)
                expected = put["result"]["append"]
                clock.now = expected["storeTimestamp"]
                message = message_of(put["input"])
                if put["input"]["kind"] == "batch":
                    result = store.put_batch(wire=wire_of(put["input"]), message=message)
                else:
                    result = store.put(message)
                assert append_facts(result) == expected
                assert result.status.value == put["result"]["putStatus"]
    yield scenario, root


@pytest.mark.parametrize("folder", ["commitlog", "consumequeue"])
def test_files_have_the_same_bytes(replayed: tuple[Scenario, Path], folder: str) -> None:
    scenario, root = replayed
    ours, theirs = bytes_of(root / folder), bytes_of(scenario.store / folder)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []


def test_index_files_have_the_same_content(replayed: tuple[Scenario, Path]) -> None:
    scenario, root = replayed
    shape = scenario.config.index_shape
    assert shape is not None
    ours, theirs = bytes_of(root / "index"), bytes_of(scenario.store / "index")
    assert len(ours) == len(theirs)
    for our_name, their_name in zip(sorted(ours), sorted(theirs), strict=True):
        assert index_parts(ours[our_name], shape) == index_parts(theirs[their_name], shape)


def test_the_store_is_closed_in_order(replayed: tuple[Scenario, Path]) -> None:
    _, root = replayed
    names = {path.name for path in root.iterdir()}
    parts = {"checkpoint", "commitlog", "consumequeue", "index", "lock", ".logquarry"}
    assert names == {*parts, "config"}
    assert {path.name for path in (root / "config").iterdir()} <= {"topics.json", "topics.json.bak"}
    ours = {path.name for path in (root / ".logquarry").rglob("*") if path.is_file()}
    assert ours == {"durable", "settings.json"}


def all_stores(golden: Path) -> Iterator[Scenario]:
    for folder in sorted(golden.rglob("store*")):
        if folder.is_dir():
            yield Scenario(folder.parent, folder.name)


def contents(root: Path) -> dict[str, bytes]:
    # A reader may create or write the lock file.
    return {name: data for name, data in bytes_of(root).items() if name != "lock"}


PARTS = 6
HEALED = "unclean/noabort-cq-behind/"
"""Whose queues get what they lack; Java leaves the gaps."""


@pytest.mark.parametrize("part", range(PARTS))
def test_any_golden_store_is_written_without_harm(part: int, golden: Path, tmp_path: Path) -> None:
    for number, scenario in enumerate(list(all_stores(golden))[part::PARTS]):
        name = str(scenario.store.relative_to(golden))
        root = tmp_path / str(number)
        shutil.copytree(scenario.store, root)
        if scenario.folder.name == LOG_GONE:
            with pytest.raises(lq.errors.UnsupportedStore):
                lq.MessageStore.open(root, mode="rw", config=scenario.config)
            continue
        with lq.MessageStore.open(root, config=scenario.config) as reader:
            log = [message.physical_offset for message in reader.scan(on_damage="stop")]
            log_end = reader.max_offset
            queues = {key: reader.queue_offsets(*key) for key in reader.queues()}
        # RocketMQ's recovery drops whole files of these stores; its queues still name their
        # messages. The queues of 3.1 also name messages that were larger than a file, and that are
        # in no file.
        may_lack = scenario.folder.name in (*CUT_FILES, "larger-than-file")
        accept_loss = ANY_LOSS if may_lack else None
        with lq.MessageStore.open(
            root, mode="rw", config=scenario.config, accept_loss=accept_loss
        ) as store:
            found = {key: store.queue_offsets(*key) for key in store.queues()}
            if name.startswith(SCENARIOS):
                assert found == queues, name
            elif name.startswith(HEALED):
                assert found != queues, name
            result = store.put(lq.Message("RollA", b"new", keys="new"))
            assert result.physical_offset >= log_end, name
            assert store.wait_dispatched(timeout=60)
            assert store.get("RollA", 0, result.queue_offset).messages[0].body == b"new", name
            assert store.query("RollA", "new", exact=True), name
        with lq.MessageStore.open(root, config=scenario.config) as reader:
            after = [message.physical_offset for message in reader.scan(on_damage="skip")]
            assert after[: len(log)] == log, name
            assert after[-1] == result.physical_offset, name
            if name.startswith(HEALED):
                report = verify_store(reader.layout)
                assert not report.has_damage, report.findings
        shutil.rmtree(root)
