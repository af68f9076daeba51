"""Timer messages and pops of stores that RocketMQ 5 wrote: tests/data/rocketmq5-timers.tar.xz.

Brokers 5.1.4 and 5.5.0 started on stores that salvage had made of these, and delivered each message
once that was due; docs/rocketmq-5.md has the results.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.arguments import now_ms
from logquarry.disk.disk import Disk
from logquarry.format import timer
from logquarry.log.layout import StoreLayout
from logquarry.read.pops import unacknowledged_pops
from logquarry.read.store_sizes import with_sizes
from logquarry.read.timers import CHECK, pending, read_check, timers_of
from logquarry.repair.audit.timer_files import timer_faults
from logquarry.repair.rebuild.build import replace_queues
from logquarry.repair.recover.recover import recover
from logquarry.repair.salvage.salvage import salvage_store
from logquarry.repair.verification import verify_store
from tests.conformance.rocketmq5 import state_of
from tests.helpers.command import run
from tests.helpers.golden_data import copy_store, unpacked

ARCHIVE = Path(__file__).parents[1] / "data" / "rocketmq5-timers.tar.xz"
TIMERS = ("5.1.4-timer", "5.3.3-timer", "5.5.0-timer", "5.5.0-timer-snapshot")
POPS = ("5.1.4-pop", "5.4.0-pop-kv", "5.5.0-pop-kv")


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked(ARCHIVE, tmp_path_factory) / "rocketmq5-timers"


@pytest.fixture
def copied(stores: Path, tmp_path: Path) -> Callable[[str], Path]:
    def copy(name: str) -> Path:
        return copy_store(stores / name / "store", tmp_path / "store")

    return copy


def waiting_by_client(scenario: Path) -> list[str]:
    """The keys of the waiting messages, from the producer: due much later, and not recalled."""
    sends = [json.loads(line) for line in (scenario / "sends.jsonl").read_text().splitlines()]
    timed = [one for one in sends if one["how"] == "timer"]
    recalled = sum(one["how"] == "recall" and "answer" in one for one in sends)
    far = [one["keys"] for one in timed if "TIMER_DELIVER_MS" in one["properties"]]
    # The scenario recalls the messages 6, 14, 22 and so on.
    return [key for key in far if not recalled or int(key.partition("-")[2]) % 8 != 6]


@pytest.mark.parametrize("name", TIMERS)
def test_the_messages_that_wait_are_those_of_the_producer(name: str, stores: Path) -> None:
    layout = StoreLayout.open(stores / name / "store")
    found = timers_of(layout).due()
    assert sorted(one.keys or "" for one in found) == sorted(waiting_by_client(stores / name))
    assert {one.topic for one in found} == {"Later"}
    assert pending(layout).in_wheel == len(found)
    document = json.loads(run("info", layout.root, "--timers", "--json").stdout)["timers"]
    assert document["waiting"] == len(found)
    first = document["messages"][0]
    assert first["physical_offset"] == found[0].physical_offset and first["is_in_wheel"]
    assert first["due"] == found[0].slot_time + 1_000
    assert str(found[0].keys) in run("info", layout.root, "--timers").stdout


@pytest.mark.parametrize("name", [*TIMERS, *POPS])
def test_sound_timer_files_have_no_faults(name: str, stores: Path) -> None:
    assert not verify_store(StoreLayout.open(stores / name / "store")).has_damage


@pytest.mark.parametrize("name", TIMERS[:3])
@pytest.mark.parametrize("lost_check", [False, True])
def test_salvage_keeps_what_waits_though_frames_move(
    name: str, lost_check: bool, copied: Callable[[str], Path], stores: Path, tmp_path: Path
) -> None:
    root, into = copied(name), tmp_path / "new"
    with (root / "commitlog" / ("0" * 20)).open("r+b") as log:
        # The damage is in the body of the first message, a delivered timer message.
        log.seek(95)
        log.write(b"damaged")
    if lost_check:
        # Then the copies in the log show which messages were delivered.
        (root / CHECK).unlink()
    found = salvage_store(StoreLayout.open(root), into)
    assert any(piece.to != piece.start for piece in found.plan.pieces)
    new = StoreLayout.open(into)
    expected = sorted(waiting_by_client(stores / name))
    assert sorted(one.keys or "" for one in timers_of(new).due()) == expected
    assert found.timers == len(expected) and not found.left_behind
    assert not list(timer_faults(new)) and not verify_store(new).has_damage
    assert pending(new).in_wheel == len(expected)
    # A second salvage, before a broker starts, keeps them too.
    assert salvage_store(new, tmp_path / "again").timers == len(expected)


def test_messages_that_are_overdue_for_long_have_a_week_for_the_broker(
    stores: Path, tmp_path: Path
) -> None:
    source = StoreLayout.open(stores / "5.5.0-timer-snapshot" / "store")
    into = tmp_path / "new"
    salvage_store(source, into)
    check = read_check(StoreLayout.open(into))
    assert check.read_time <= min(one.slot_time for one in timers_of(source).due())
    assert (into / timer.WHEEL).stat().st_size == timer.WHEEL_SIZE


@pytest.mark.parametrize("harm", ["wheel", "entry", "check", "log"])
def test_verify_finds_a_harmed_wheel_and_rebuild_writes_it(
    harm: str, copied: Callable[[str], Path], stores: Path
) -> None:
    root = copied("5.3.3-timer")
    entries = root / timer.LOG / ("0" * 20)
    if harm == "wheel":
        # The broker would read only the end of the timer log again.
        page = bytearray((root / CHECK).read_bytes())
        page[8:16] = (10 * 5200).to_bytes(8, "big")
        (root / CHECK).write_bytes(page)
        (root / timer.WHEEL).unlink()
        entries.write_bytes(bytes(5200))
    elif harm == "entry":
        data = bytearray(entries.read_bytes())
        at = 52 * 2 + timer.ENTRY.offsets["physical_offset"]
        data[at : at + 8] = (12_345).to_bytes(8, "big")
        entries.write_bytes(data)
    elif harm == "check":
        (root / CHECK).write_bytes(b"\0" * 20)
    else:
        shutil.rmtree(root / timer.LOG)
    kinds = set(verify_store(StoreLayout.open(root)).by_kind)
    expected = {
        "wheel": {"timer_missing"},
        "entry": {"timer_entry_wrong", "timer_missing"},
        "check": {"timer_check_wrong"},
        "log": {"timer_entry_wrong", "timer_missing"},
    }
    assert kinds >= expected[harm]
    run("verify", root, code=1)
    assert "rebuild" in run("verify", root, code=1).stdout
    report = lq.rebuild(root, apply=True)
    layout = StoreLayout.open(root)
    assert not verify_store(layout).has_damage and not list(timer_faults(layout))
    keys = sorted(one.keys or "" for one in timers_of(layout).due())
    assert keys == sorted(waiting_by_client(stores / "5.3.3-timer"))
    assert report.quarantine is not None
    if harm != "wheel":
        assert (Path(report.quarantine) / timer.WHEEL).is_file(), "nothing is deleted"


@pytest.mark.parametrize("name", TIMERS)
def test_a_writer_delivers_what_the_broker_had_not(
    name: str, copied: Callable[[str], Path], stores: Path
) -> None:
    root = copied(name)
    before = timers_of(StoreLayout.open(root)).due()
    with lq.MessageStore.open(root, mode="rw") as store:
        now = before[-1].slot_time + 10_000
        delivered = store._services.deliveries[1].deliver(now)
        assert delivered == len(before)
        given = [m.keys for m in store.scan() if m.topic == "Later" and m.keys]
    assert len(given) == len(set(given)), "each once"
    layout = StoreLayout.open(root)
    assert not timers_of(layout).waiting and not verify_store(layout).has_damage


def test_unacknowledged_pops(stores: Path, tmp_path: Path) -> None:
    pytest.importorskip("rocksdict")
    for name, count in (("5.1.4-pop", 0), ("5.4.0-pop-kv", 12), ("5.5.0-pop-kv", 12)):
        root = stores / name / "store"
        before = state_of(root)
        found = unacknowledged_pops(StoreLayout.open(root))
        assert sum(one.messages for one in found.queues) == count and found.hint is None
        into = tmp_path / name
        salvage_store(StoreLayout.open(root), into)
        assert unacknowledged_pops(StoreLayout.open(into)) == found
        document = json.loads(run("stats", root, "--json").stdout)["unacknowledged_pops"]
        assert document == found.to_json()
        assert state_of(root) == before
    shown = run("stats", stores / "5.5.0-pop-kv" / "store").stdout
    assert "%RETRY%cg_pop_PopTopic" in shown


def test_pops_whose_queues_are_in_rocksdb(copied: Callable[[str], Path]) -> None:
    pytest.importorskip("rocksdict")
    root = copied("5.1.4-pop")
    # Without the broker's offsets, each check point may still wait.
    (root / "config" / "consumerOffset.json").unlink()
    layout = StoreLayout.open(root)
    found = unacknowledged_pops(layout)
    assert sum(one.messages for one in found.queues) == 24
    config, end = with_sizes(lq.StoreConfig(), layout), recover(root).log_end
    replace_queues(layout, config, "consumequeue", end, Disk(), now_ms, None)
    layout = StoreLayout.open(root)
    assert not layout.queue_names and unacknowledged_pops(layout) == found


def test_pops_without_the_package(stores: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rocksdict", None)
    found = unacknowledged_pops(StoreLayout.open(stores / "5.5.0-pop-kv" / "store"))
    assert not found.queues and "logquarry[rocksdb]" in (found.hint or "")


def test_damaged_pops_are_named(stores: Path, tmp_path: Path) -> None:
    pytest.importorskip("rocksdict")
    root = copy_store(stores / "5.5.0-pop-kv" / "store", tmp_path / "store")
    (root / "kvStore" / "CURRENT").unlink()
    hint = unacknowledged_pops(StoreLayout.open(root)).hint or ""
    assert "kvStore/ cannot be read" in hint and "logquarry-rocksdb-" not in hint
    left = {one.paths: one.feature for one in lq.salvage(root).left_behind}
    assert left.get(("kvStore",)) == "bad_rocksdb_store"


HARMS: dict[str, Callable[[Path], object]] = {
    "folder": lambda path: path.mkdir(),
    "link": lambda path: path.symlink_to("nowhere"),
    "pipe": os.mkfifo,
}


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("part", [f"{timer.LOG}/{'0' * 20}", timer.LOG, timer.WHEEL])
def test_what_is_no_file_stops_neither_verify_nor_rebuild(
    part: str, harm: str, copied: Callable[[str], Path], stores: Path
) -> None:
    root = copied("5.3.3-timer")
    path = root / part
    path.rename(root.parent / "old")
    HARMS[harm](path)
    run("verify", root, code=0 if part == timer.WHEEL else 1)
    run("rebuild", root, "--in-place", "--apply")
    layout = StoreLayout.open(root)
    assert not verify_store(layout).has_damage
    keys = sorted(one.keys or "" for one in timers_of(layout).due())
    assert keys == sorted(waiting_by_client(stores / "5.3.3-timer"))


@pytest.mark.parametrize("number", [1 << 62, -1])
def test_an_impossible_read_time_hides_no_message(
    number: int, copied: Callable[[str], Path], stores: Path
) -> None:
    root = copied("5.5.0-timer")
    page = bytearray((root / CHECK).read_bytes())
    page[:8] = number.to_bytes(8, "big", signed=True)
    (root / CHECK).write_bytes(page)
    assert "impossible" in run("verify", root, code=1).stdout
    for _ in range(2):
        keys = sorted(one.keys or "" for one in timers_of(StoreLayout.open(root)).due())
        assert keys == sorted(waiting_by_client(stores / "5.5.0-timer"))
        run("rebuild", root, "--in-place", "--apply")
    run("verify", root)
