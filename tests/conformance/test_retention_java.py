"""RocketMQ reads a store after a retention, and its own retention deletes the same files."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.repair.verification import verify_store
from logquarry.store.message_store import StoreWriter
from tests.conformance import test_store_facts as read_side
from tests.conformance.golden_facts import Scenario
from tests.conformance.oracle import free_port, master, require_oracle
from tests.conformance.test_store_java import (
    check_nothing_was_recovered,
    dumped,
)

pytestmark = pytest.mark.java

PARAMS = {
    "mappedFileSizeCommitLog": 65536,
    "mappedFileSizeConsumeQueue": 2000,
    "maxHashSlotNum": 500,
    "maxIndexNum": 300,
}
CONFIG = lq.StoreConfig.from_mapping(PARAMS)
COUNT = 900
HOUR_MS = 3_600_000
RESERVED_HOURS = 72
_PATIENCE_SECONDS = 180


def made(root: Path, *, now: int) -> None:
    """Messages of the last 200 hours up to now; all messages of one topic have expired."""
    step = 200 * HOUR_MS // COUNT
    time_ms = now

    with StoreWriter.start(root, config=CONFIG, clock=lambda: time_ms) as store:
        for number in range(COUNT):
            time_ms = now - (COUNT - 1 - number) * step
            topic = "early" if number < 50 else "t" if number % 3 else "u"
            body = b"%04d " % number * 120
            store.put(lq.Message(topic, body, queue_id=number % 2, keys=f"k{number} both"))
        store.wait_dispatched()


def files_of(root: Path) -> set[str]:
    return {
        str(path.relative_to(root))
        for name in ("commitlog", "consumequeue", "index")
        for path in (root / name).rglob("*")
        if path.is_file()
    }


def check_reads_what_stayed(scenario: Scenario) -> None:
    """Like check_reads_alike, also for queues whose messages were deleted."""
    with lq.MessageStore.open(scenario.store, config=scenario.config) as store:
        read_side.test_log_offsets(scenario, store)
        read_side.test_single_messages(scenario, store)
        read_side.test_queues(scenario, store)
        for fact in scenario.facts["getMessage"]:
            # QUIRK: for the entry that names offset 0 of the log, Java gives the log's present
            # first frame (CommitLog.frame_at).
            fact["gets"] = [
                get for get in fact["gets"] if (fact["topic"], get["offset"]) != ("early", 0)
            ]
        read_side.test_get(scenario, store)
        # Entries of deleted messages stay in a queue's last file; a get of them finds nothing.
        queues = scenario.facts["queues"]
        scenario.facts["queues"] = [fact for fact in queues if fact["topic"] != "early"]
        read_side.test_reading_a_queue_through_gives_its_messages(scenario, store)
        read_side.test_index_headers(scenario)
        read_side.test_index_queries(scenario, "stated")
        report = verify_store(store.layout)
        assert not report.has_damage, report.findings


def keys_of(scenario: Scenario) -> list[tuple[object, ...]]:
    names = ("physicalOffset", "topic", "queueId", "queueOffset", "frameCRC32", "consumeQueue")
    return [tuple(map(str, (m.get(name) for name in names))) for m in scenario.expected]


@pytest.mark.parametrize("hours", [170, 72, 0])
def test_the_real_store_reads_what_stayed(tmp_path: Path, hours: int) -> None:
    require_oracle()
    now = int(time.time() * 1_000)
    before = tmp_path / "before"
    made(before / "store", now=now)
    shutil.copytree(before / "store", tmp_path / "after" / "store")
    whole = dumped(before, PARAMS)
    rules = lq.RetentionRules(older_than_ms=hours * HOUR_MS)
    plan = lq.retain(
        tmp_path / "after" / "store", rules, apply=True, config=CONFIG, clock=lambda: now
    )
    assert plan.log
    assert plan.index or hours > 100
    after = dumped(tmp_path / "after", PARAMS)
    assert after.facts["commitLog"]["minOffset"] == plan.new_min_offset
    begin = next(
        at for at, m in enumerate(whole.expected) if int(m["physicalOffset"]) >= plan.new_min_offset
    )
    assert keys_of(after) == keys_of(whole)[begin:]
    check_nothing_was_recovered(after)
    check_reads_what_stayed(after)
    # And our store takes over again from the real one.
    with lq.MessageStore.open(after.store, mode="rw", config=CONFIG) as store:
        assert store.put(lq.Message("early", b"late")).queue_offset == 25


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_real_store_deletes_the_same(tmp_path: Path) -> None:
    """RocketMQ's rules and ours agree if a file's modification time is that of its last message."""
    require_oracle()
    now = int(time.time() * 1_000)
    real, ours = tmp_path / "real", tmp_path / "ours"
    made(real, now=now)
    shutil.copytree(real, ours)
    rules = lq.RetentionRules(older_than_ms=RESERVED_HOURS * HOUR_MS, most_files=10)
    plan = lq.retain(ours, rules, apply=True, config=CONFIG)
    gone = {file.path for file in plan.files}
    assert len(plan.log) > 3
    assert any(path.startswith("consumequeue") for path in gone)
    assert any(path.startswith("index") for path in gone)
    with lq.MessageStore.open(real, config=CONFIG) as store:
        last = {m.physical_offset // 65_536 * 65_536: m.store_timestamp for m in store.scan()}
    for base, stored in last.items():
        os.utime(real / "commitlog" / f"{base:020d}", (stored / 1_000, stored / 1_000))
    params = tmp_path / "params.json"
    params.write_text(
        json.dumps(
            PARAMS
            | {
                "fileReservedTime": RESERVED_HOURS,
                "deleteWhen": ";".join(f"{hour:02d}" for hour in range(24)),
                "cleanFileForciblyEnable": False,
                "cleanResourceInterval": 1_000,
            }
        )
    )
    before = files_of(real)
    assert gone <= before
    with master(real, free_port(), params):
        # RocketMQ looks for expired files from a minute after its start on.
        until = time.monotonic() + _PATIENCE_SECONDS
        while gone & files_of(real) and time.monotonic() < until:
            time.sleep(0.5)
    assert before - files_of(real) == gone
