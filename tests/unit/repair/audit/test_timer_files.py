"""Are the files of the timer wheel those that RocketMQ 5 reads?"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.disk.disk import Disk
from logquarry.format import properties as props
from logquarry.format import timer
from logquarry.log.layout import StoreLayout
from logquarry.read.timers import read_check, timers_of, used_slots
from logquarry.repair.audit.timer_files import timer_faults, write_timer_files
from logquarry.store.message_store import StoreWriter
from logquarry.testing.clock import FakeClock
from tests.helpers.failing_disk import StoppedDisk
from tests.helpers.small_store import config as small_config

NOW = 1_700_000_000_500
HOUR_MS = 3_600_000
FILE = 52 * 3 + 16


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made") / "store"
    with StoreWriter.start(root, config=small_config(), clock=FakeClock(NOW)) as store:
        for hours in (1, 1, 2, 60, 71):
            store.put(lq.Message("t", b"%d" % hours, deliver_at=NOW + hours * HOUR_MS))
    return root


def write(root: Path, disk: Disk | None = None, now: int = NOW) -> None:
    found = timers_of(StoreLayout.open(root))
    write_timer_files(disk or Disk(), root, found, now, file_size=FILE, precision_ms=1_000)


def entries(root: Path) -> list[tuple[int, ...]]:
    found = []
    for path in sorted((root / timer.LOG).iterdir()):
        data = path.read_bytes()
        assert len(data) == FILE
        for at in range(0, FILE - 52, 52):
            if data[at : at + 4] == (52).to_bytes(4, "big"):
                found.append(timer.ENTRY.struct.unpack_from(data, at))
    return found


def test_files_with_other_names_are_no_files_of_the_wheel(made: Path, tmp_path: Path) -> None:
    root = tmp_path / "store"
    shutil.copytree(made, root)
    write(root)
    # A digit for str.isdigit, but not for int().
    (root / f"{timer.WHEEL}.\u00b2").write_bytes(b"")
    (root / timer.LOG / "\u00b2").write_bytes(b"")
    layout = StoreLayout.open(root, small_config(mapped_file_size_timer_log=FILE))
    assert len(used_slots(layout)) and not list(timer_faults(layout))


@pytest.mark.parametrize("with_check", [True, False])
@pytest.mark.parametrize("name", [timer.WHEEL, f"{timer.LOG}/{FILE:020d}"])
def test_a_file_with_a_wrong_size_stops_a_broker(
    name: str, with_check: bool, made: Path, tmp_path: Path
) -> None:
    """The constructor of ``TimerWheel`` raises an error, and ``MappedFileQueue.load`` fails."""
    root = tmp_path / "store"
    shutil.copytree(made, root)
    write(root)
    layout = StoreLayout.open(root, small_config(mapped_file_size_timer_log=FILE))
    assert not list(timer_faults(layout))
    if not with_check:
        (root / "config" / timer.CHECK_FILE).unlink()
    (root / name).write_bytes((root / name).read_bytes() + bytes(32))
    layout = StoreLayout.open(root, small_config(mapped_file_size_timer_log=FILE))
    found = next(timer_faults(layout))
    assert (found.kind, found.file) == ("timer_entry_wrong", name)
    assert "a broker does not start" in found.reason
    lq.rebuild(root, apply=True, config=small_config(mapped_file_size_timer_log=FILE))
    layout = StoreLayout.open(root, small_config(mapped_file_size_timer_log=FILE))
    assert not list(timer_faults(layout))
    assert (root / timer.WHEEL).stat().st_size == timer.WHEEL_SIZE


def test_slots_chain_their_entries(made: Path, tmp_path: Path) -> None:
    root = tmp_path / "store"
    shutil.copytree(made, root)
    write(root)
    layout = StoreLayout.open(root, small_config(mapped_file_size_timer_log=FILE))
    assert not list(timer_faults(layout))
    check = read_check(layout)
    assert (check.queue_offset, check.master_queue_offset, check.log_end) == (5, 5, 0)
    found = entries(root)
    # Two messages share a slot, and the second names the first; the last two are due after the
    # wheel's range.
    assert [one[1] for one in found] == [-1, 0, -1, -1, -1]
    assert [one[2] for one in found] == [1, 1, 1, 3, 3]
    delays = [one[4] // HOUR_MS for one in found]
    assert delays == [1, 1, 2, 24, 48], "RocketMQ's doEnqueue: half the window, or all of it"
    last = (root / timer.LOG / f"{0:020d}").read_bytes()[-16:]
    assert timer.BLANK.struct.unpack(last) == (16, 0, timer.MAGIC_BLANK)


def test_the_last_entry_names_the_last_message_of_the_queue(made: Path, tmp_path: Path) -> None:
    root = tmp_path / "store"
    shutil.copytree(made, root)
    later = NOW + 2 * HOUR_MS
    with StoreWriter.start(root, config=small_config(), clock=FakeClock(later)) as store:
        store.put(lq.Message("t", b"soon", delay_ms=1))
        store._engine.clock.now += 3_000  # type: ignore[attr-defined]
        assert store.deliver_due() == 4
    found = timers_of(StoreLayout.open(root))
    assert sorted(found.waiting) == [3, 4]
    # Without the entry for the delivered message, a broker would read it from the queue again.
    write(root, now=later)
    last = entries(root)[-1]
    assert last[5] == found.last.physical_offset if found.last else False
    assert last[3] + last[4] < read_check(StoreLayout.open(root)).read_time


def test_a_message_that_was_put_back_waits_once(tmp_path: Path) -> None:
    fields = {
        props.TIMER_OUT_MS: str(NOW + HOUR_MS),
        props.REAL_TOPIC: "t",
        props.REAL_QUEUE_ID: "0",
        props.UNIQ_KEY: "U",
    }
    with StoreWriter.start(tmp_path, config=small_config(), clock=FakeClock(NOW)) as store:
        for rolled in (None, "1", "2"):
            more = {} if rolled is None else {props.TIMER_ROLL_TIMES: rolled}
            store.put(lq.Message(timer.TOPIC, b"x", properties=fields | more, born_timestamp=NOW))
    (one,) = timers_of(StoreLayout.open(tmp_path)).due()
    assert one.rolled == 2 and one.queue_offset == 2


def test_no_crash_loses_a_message(made: Path, tmp_path: Path) -> None:
    """Until the new files are complete, the broker begins at the first message that waits."""
    for number in range(200):
        root = tmp_path / str(number)
        shutil.copytree(made, root)
        write(root)
        try:
            write(root, StoppedDisk(number), now=NOW + 1_000)
        except BaseException:
            pass
        else:
            break
        layout = StoreLayout.open(root, small_config(mapped_file_size_timer_log=FILE))
        assert len(timers_of(layout).due()) == 5
        missing = [f for f in timer_faults(layout) if f.kind == "timer_missing"]
        assert not missing or read_check(layout).queue_offset == 0
        shutil.rmtree(root)
    assert 10 < number < 199
