"""DLedger logs: read, checked, salvaged, and converted into a plain log."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.errors import UnsupportedStore
from logquarry.format import sys_flag
from logquarry.format.arrays import POSITION
from logquarry.format.frame import ENTRY_HEAD, ENTRY_MAGIC, Frame
from logquarry.log.frames import guided
from logquarry.log.layout import StoreLayout
from logquarry.log.splits import Stretch, StretchReader, tiles
from logquarry.log.walk import LogEnd, LogReader, Run
from logquarry.repair.audit.runs import SoundReader
from logquarry.repair.salvage.salvage import salvage_store
from logquarry.repair.verification import verify_store
from logquarry.store.overview import overview
from tests.conformance.rocketmq5 import Copied, expected_offsets, state_of
from tests.helpers.command import run
from tests.helpers.files import flip, overwrite
from tests.helpers.twins import plain_python


def _without_place(message: lq.StoredMessage) -> Frame:
    """The frame of a message without the fields that a new place changes."""
    is_end = message.frame.sys_flag & sys_flag.TRANSACTION_COMMIT
    kept = 0 if is_end else message.frame.prepared_transaction_offset
    return dataclasses.replace(message.frame, physical_offset=0, prepared_transaction_offset=kept)


@pytest.mark.parametrize("name", ["5.5.0-dledger", "5.5.0-multipath"])
def test_convert_makes_a_plain_store(name: str, copied: Copied) -> None:
    root = copied(name)
    before = state_of(root)
    new = root.parent / "new"
    told = json.loads(run("convert", root, "--into", new, "--json").stdout)
    assert not told["left_behind"] and not told["lost"]
    assert told["uncommitted"] == 0
    assert state_of(root) == before
    assert not verify_store(StoreLayout.open(new)).findings
    with lq.MessageStore.open(root) as old, lq.MessageStore.open(new) as plain:
        assert not {"dledger", "several_log_paths"} & {one.name for one in plain.features.features}
        assert [_without_place(m) for m in plain.scan()] == [_without_place(m) for m in old.scan()]
        assert {key: old.queue_offsets(*key) for key in old.queues()} == {
            key: plain.queue_offsets(*key) for key in plain.queues()
        }
    with lq.MessageStore.open(new, mode="rw") as store:
        assert store.put(lq.Message("Orders", b"more")).queue_offset > 0


def test_damage_in_a_dledger_log(copied: Copied, rocketmq5: Path) -> None:
    root = copied("5.5.0-dledger")
    expected = expected_offsets(rocketmq5 / "5.5.0-dledger")
    path = next((root / "dledger-n0" / "data").iterdir())
    # The damage: the position in the head of one entry, and the body of another frame.
    harmed = expected[10], expected[20]
    overwrite(path, harmed[0] - 24, b"\xff" * 8)
    flip(path, harmed[1] + 100)
    # In a store that was shut down cleanly, damage in the last file ends the log.
    (root / "abort").touch()
    with lq.MessageStore.open(root) as store:
        found = [m.physical_offset for m in store.scan(on_damage="skip")]
    assert found == [one for one in expected if one != harmed[1]]
    report = verify_store(StoreLayout.open(root))
    assert {finding.offset for finding in report.findings} >= {harmed[0] - 48}
    new = root.parent / "new"
    salvaged = salvage_store(StoreLayout.open(root), new)
    assert salvaged.plan.messages == len(expected) - 1


def test_ranges_of_a_dledger_log(rocketmq5: Path) -> None:
    """Two neighbouring ranges give each message once, wherever they meet: also in a head."""
    expected = expected_offsets(rocketmq5 / "5.5.0-dledger")
    reader = LogReader(StoreLayout.open(rocketmq5 / "5.5.0-dledger" / "store"))

    def frames(start: int | None, stop: int | None) -> list[int]:
        events = reader.events(start, stop, resync=start is not None)
        runs = [event for event in events if isinstance(event, Run)]
        return [run.window.base + at for run in runs for at in run.rows[:, POSITION].tolist()]

    for place in (0, 1, 47, 48, 49, *range(expected[3] - 50, expected[3] + 3), expected[-1]):
        assert frames(None, place) + frames(place, None) == expected, place
    with plain_python():
        for place in (1, 48, expected[3] - 10, expected[3]):
            assert frames(None, place) + frames(place, None) == expected, place


@pytest.mark.parametrize("size", [500, 2_000, 4_096])
def test_stretches_of_a_dledger_log(rocketmq5: Path, size: int) -> None:
    """Each stretch starts where the previous one ends, so that verify reads the log only once."""
    layout = StoreLayout.open(rocketmq5 / "5.5.0-dledger" / "store")
    expected = expected_offsets(rocketmq5 / "5.5.0-dledger")
    log = layout.commit_log
    (run,) = SoundReader(layout, size).read(log.start, log.start + log.file_size)
    assert (run.start, run.count) == (log.start, len(expected))
    reader, found = StretchReader(layout), list[Stretch]()
    for start, stop in tiles(layout, size):
        stretch = Stretch()
        if reader.read(start, stop, stretch, resync=True):
            found.append(stretch)
    walked = list(guided(LogReader(layout), found))
    assert isinstance(walked.pop(), LogEnd)
    assert walked == found
    assert sum(stretch.count for stretch in found) == len(expected)


def test_diff_of_a_dledger_store(copied: Copied) -> None:
    root = copied("5.5.0-dledger")
    new = root.parent / "new"
    run("convert", root, "--into", new)
    assert "diverge" in run("diff", root, new, code=1).stdout


def test_messages_that_a_dledger_group_had_not_committed(copied: Copied) -> None:
    root = copied("5.5.0-dledger")
    (root / "dledger-n0" / "checkpoint").write_text("committedIndex=95\nendIndex=97\n")
    found = run("convert", root).stdout
    assert (
        "included: 2 messages after the last message that the DLedger group had committed" in found
    )


def test_a_dledger_log_in_a_configured_folder(copied: Copied, rocketmq5: Path) -> None:
    """``storePathDLedgerCommitLog`` moves the log, and leaves the member's other files."""
    root = copied("5.5.0-dledger")
    (root / "dledger-n0" / "data").rename(root / "ledger")
    (root / "dledger-n0" / "checkpoint").write_text("committedIndex=95\nendIndex=97\n")
    with pytest.raises(UnsupportedStore, match=r"DLedger log in ledger/.*--config") as raised:
        lq.MessageStore.open(root)
    assert raised.value.feature == "dledger"
    settings = root.parent / "broker.conf"
    settings.write_text(
        f"enableDLegerCommitLog=true\nstorePathDLedgerCommitLog={root / 'ledger'}\n"
    )
    config = lq.StoreConfig.from_file(settings)
    expected = expected_offsets(rocketmq5 / "5.5.0-dledger")
    with lq.MessageStore.open(root, config=config) as store:
        assert [message.physical_offset for message in store.scan()] == expected
    assert not verify_store(StoreLayout.open(root, config)).findings
    found = run("convert", root, "--config", settings).stdout
    assert (
        "included: 2 messages after the last message that the DLedger group had committed" in found
    )


def test_a_plain_store_needs_no_conversion(rocketmq5: Path) -> None:
    found = run("convert", rocketmq5 / "5.5.0-plain" / "store", code=2)
    assert "its log is in commitlog/ already" in found.stderr


def test_two_ledgers_are_not_read_as_one(copied: Copied) -> None:
    root = copied("5.5.0-dledger")
    shutil.copytree(root / "dledger-n0", root / "dledger-n1")
    with pytest.raises(UnsupportedStore, match="DLedger") as raised:
        lq.MessageStore.open(root)
    assert raised.value.feature == "dledger"


def test_the_overview_has_the_store_times_of_a_dledger_log(copied: Copied) -> None:
    root = copied("5.5.0-dledger")
    with lq.MessageStore.open(root) as store:
        found = overview(store)
        times = [message.store_timestamp for message in store.scan()]
    assert (found.first_time, found.last_time) == (times[0], times[-1])
    lines = [line.split() for line in run("info", root).stdout.splitlines()]
    assert ["stored", "-"] not in lines


@pytest.mark.parametrize("harm", ["swapped", "renamed"])
def test_files_with_wrong_names_in_a_dledger_log(harm: str, tmp_path: Path, copied: Copied) -> None:
    root = copied("5.5.0-dledger")
    folder = root / "dledger-n0" / "data"
    first, second = folder / f"{0:020d}", folder / f"{131_072:020d}"
    if harm == "swapped":
        # A second file with the content that a log of this length would have.
        second.write_bytes(_moved(first.read_bytes(), 131_072))
        assert not [
            f for f in verify_store(StoreLayout.open(root)).findings if "misnamed" in f.kind
        ]
        first.rename(tmp_path / "file")
        second.rename(first)
        (tmp_path / "file").rename(second)
        names = {str(first.relative_to(root)): second, str(second.relative_to(root)): first}
    else:
        first.rename(f"{first}.bak")
        first.with_name(second.name).write_bytes(
            _moved((folder / f"{first}.bak").read_bytes(), 131_072)
        )
        names = {f"{first.relative_to(root)}.bak": first}
    found = verify_store(StoreLayout.open(root)).findings
    shown = {one.file: one.reason for one in found if one.kind == "misnamed_entries"}
    assert shown.keys() == names.keys()
    for file, right in names.items():
        assert shown[file].endswith(f"to {right.relative_to(root)}")
        # To rename the file would delete the other file.
        assert ("move the other file" in shown[file]) == right.exists()
    step = run("verify", root, code=1).stdout.splitlines()[-1]
    assert step == (
        "next: rename or move the files as the findings misnamed_entries say, then: "
        f"logquarry verify {root}"
    )


def test_a_copy_of_a_file_of_a_dledger_log(copied: Copied) -> None:
    """A rename to the right name would replace the file that has this name."""
    root = copied("5.5.0-dledger")
    first = root / "dledger-n0" / "data" / f"{0:020d}"
    shutil.copy(first, f"{first}.bak")
    assert not verify_store(StoreLayout.open(root)).has_damage
    second = first.with_name(f"{131_072:020d}")
    Path(f"{first}.bak").rename(second)
    found = verify_store(StoreLayout.open(root)).findings
    [reason] = [one.reason for one in found if one.kind == "misnamed_entries"]
    assert reason.endswith("has this entry too: move this file out of the store")


def _moved(data: bytes, by: int) -> bytes:
    """The bytes of a DLedger file whose log begins ``by`` bytes later."""
    made = bytearray(data)
    at = 0
    while int.from_bytes(made[at : at + 4]) == ENTRY_MAGIC:
        size = int.from_bytes(made[at + 4 : at + 8])
        for place in (at + 24, at + ENTRY_HEAD.size + 28):
            value = int.from_bytes(made[place : place + 8]) + by
            made[place : place + 8] = value.to_bytes(8)
        at += size
    return bytes(made)
