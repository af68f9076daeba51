"""``logquarry.repair.rebuild``: epochs, gaps, what cannot be placed, swaps and interrupts."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

import logquarry as lq
from logquarry.disk.disk import Disk
from logquarry.disk.folders import StoreLock
from logquarry.errors import StoreUnavailable, UsageError
from logquarry.format import queue_entry
from logquarry.read.queue import UNIT_DTYPE, Units
from logquarry.repair.rebuild import in_place, queue_files
from logquarry.repair.rebuild import rebuild as rebuild_module
from logquarry.repair.rebuild.build import finish_into
from logquarry.repair.rebuild.queue_files import QueueFiles
from logquarry.repair.rebuild.rebuild import rebuild
from logquarry.repair.recover.loss import LossRefused
from logquarry.repair.verification import verify_store
from logquarry.write.queue_writer import QueuePart, units_of
from tests.helpers.failing_disk import ENOSPC, FaultyDisk, StoppedDisk
from tests.helpers.files import bytes_of, leaves_nothing_open
from tests.helpers.small_store import (
    NOW,
    bodies,
    config,
    facts,
    forget_start,
    message_files,
    opened,
)
from tests.helpers.store_maker import StoreMaker

ROOM = 10
KEY = ("t", 0)


def part(first: int, count: int, place: int) -> dict[tuple[str, int], QueuePart]:
    numbers = np.arange(count, dtype=np.int64)
    units = units_of(place + 100 * numbers, np.full(count, 100), numbers)
    return {KEY: QueuePart(numbers, first + numbers, units)}


def built(files: QueueFiles, folder: Path) -> tuple[int, Units]:
    """The start of the first file, and all entries up to the queue's end."""
    files.finish()
    paths = sorted((folder / "t" / "0").iterdir())
    assert paths == list(files.paths())
    assert {path.stat().st_size for path in paths} == {ROOM * 20}
    units = np.frombuffer(b"".join(path.read_bytes() for path in paths), UNIT_DTYPE)
    start = int(paths[0].name) // 20
    stop = files.queues[KEY].stop - start
    assert not units[stop:].tobytes().strip(b"\0")
    return start, units[:stop]


@pytest.fixture(params=[0, 1 << 20], ids=["written at once", "held"])
def files(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> QueueFiles:
    monkeypatch.setattr(queue_files, "_MOST_HELD", request.param)
    return QueueFiles(FaultyDisk(), tmp_path, ROOM * 20)


# ------------------------------------------------------------------------------------- queues
def test_a_queue_begins_where_its_first_message_is(files: QueueFiles, tmp_path: Path) -> None:
    files.add(part(23, 30, 5_000))
    start, units = built(files, tmp_path)
    assert start == 20
    assert [queue_entry.QueueEntry(*unit.item()) for unit in units[:3]] == [queue_entry.FILLER] * 3
    assert units["physical_offset"][3:].tolist() == list(range(5_000, 8_000, 100))


def test_fillers_stand_for_what_the_log_has_lost(files: QueueFiles, tmp_path: Path) -> None:
    files.add(part(0, 5, 0))
    files.add(part(17, 2, 5_000))
    start, units = built(files, tmp_path)
    assert start == 0
    assert units["physical_offset"].tolist() == [0, 100, 200, 300, 400] + [0] * 12 + [5_000, 5_100]
    assert set(units["size"][5:17].tolist()) == {queue_entry.FILLER_SIZE}
    assert files.queues[KEY].gaps == [(5, 17)]


@pytest.mark.parametrize("back_to", [0, 3, 10, 12, 20])
def test_an_offset_that_falls_back_begins_anew(
    files: QueueFiles, tmp_path: Path, back_to: int
) -> None:
    files.add(part(0, 35, 0))
    files.add(part(back_to, 4, 50_000))
    start, units = built(files, tmp_path)
    assert start == 0
    expected = [100 * n for n in range(back_to)] + [50_000, 50_100, 50_200, 50_300]
    assert units["physical_offset"].tolist() == expected
    assert files.queues[KEY].restarts == 1


def test_it_may_fall_back_before_the_first_file(files: QueueFiles, tmp_path: Path) -> None:
    files.add(part(45, 20, 0))
    files.add(part(80, 2, 40_000))
    files.add(part(2, 3, 50_000))
    start, units = built(files, tmp_path)
    assert start == 0
    assert units["physical_offset"][2:].tolist() == [50_000, 50_100, 50_200]
    assert files.queues[KEY].gaps == []


def test_within_one_run_too(files: QueueFiles, tmp_path: Path) -> None:
    offsets = np.array([0, 1, 2, 0, 1, 5], np.int64)
    numbers = np.arange(6, dtype=np.int64)
    units = units_of(1_000 * numbers, np.full(6, 100), numbers)
    files.add({KEY: QueuePart(numbers, offsets, units)})
    _, found = built(files, tmp_path)
    assert found["physical_offset"].tolist() == [3_000, 4_000, 0, 0, 0, 5_000]


def test_offsets_that_cannot_be_meant_are_left_out(files: QueueFiles, tmp_path: Path) -> None:
    files.add(part(0, 3, 0))
    files.add(part(1 << 50, 1, 300))
    files.add(part(-7, 1, 400))
    files.add(part(3, 1, 500))
    _, units = built(files, tmp_path)
    assert units["physical_offset"].tolist() == [0, 100, 200, 500]
    found = [(left.queue_offset, left.physical_offset) for left in files.left_out]
    assert found == [(1 << 50, 300), (-7, 400)]


def test_no_folder_elsewhere_is_made(files: QueueFiles, tmp_path: Path) -> None:
    for topic in ("../../x", "..", "a/b", ""):
        (value,) = part(0, 1, 0).values()
        files.add({(topic, 0): value})
    files.finish()
    assert list(tmp_path.rglob("*")) == []
    assert len(files.left_out) == 4


# -------------------------------------------------------------------------------- whole stores
def small(root: Path, count: int = 60) -> Path:
    with opened(root) as store:
        for number in range(count):
            body = b"body %d " % number * 9
            store.put(lq.Message(f"t{number % 2}", body, queue_id=number % 3, keys=f"k{number}"))
    return root


def index_bytes(root: Path) -> list[bytes]:
    return [data for _, data in sorted(bytes_of(root / "index").items())]


def test_without_into_or_apply_it_only_tells(tmp_path: Path) -> None:
    root = small(tmp_path / "store")
    before = facts(root)
    report = rebuild(root)
    assert facts(root) == before
    assert not report.is_applied and report.queues is None
    assert report.old["consumequeue"].files == len(bytes_of(root / "consumequeue"))
    assert rebuild(root, queues=False).old.keys() == {"index"}


def test_in_place(tmp_path: Path) -> None:
    root = small(tmp_path / "store")
    queues, index = bytes_of(root / "consumequeue"), index_bytes(root)
    harmed = root / "consumequeue" / "t0" / "0" / f"{0:020d}"
    harmed.write_bytes(bytes(len(harmed.read_bytes())))
    shutil.rmtree(root / "consumequeue" / "t1")
    old = bytes_of(root / "consumequeue")
    log = bytes_of(root / "commitlog")
    report = rebuild(root, apply=True, clock=lambda: NOW)
    assert bytes_of(root / "consumequeue") == queues
    assert index_bytes(root) == index
    assert bytes_of(root / "commitlog") == log
    assert report.quarantine is not None
    assert bytes_of(Path(report.quarantine) / "consumequeue") == old
    assert Path(report.quarantine).name == "rebuild-20231114T221320Z"
    assert not (root / ".logquarry" / "rebuild").exists()
    assert not report.is_live and not report.has_abort
    again = rebuild(root, apply=True, clock=lambda: NOW)
    assert again.quarantine == f"{report.quarantine}.1"
    with lq.MessageStore.open(root, mode="rw") as store:
        assert len(bodies(store)) == 60
    with lq.MessageStore.open(root) as store:
        assert not verify_store(store.layout).has_damage


def test_only_the_index(tmp_path: Path) -> None:
    root = small(tmp_path / "store")
    before = {path: value for path, value in facts(root).items() if "/index/" not in path}
    index = index_bytes(root)
    shutil.rmtree(root / "index")
    report = rebuild(root, apply=True, queues=False, config=config())
    assert index_bytes(root) == index and report.quarantine is None
    after = {path: value for path, value in facts(root).items() if "/index/" not in path}
    assert after == before


def test_a_store_that_was_not_closed_stays_so(tmp_path: Path) -> None:
    root = small(tmp_path / "store")
    (root / "abort").touch()
    report = rebuild(root, apply=True)
    assert report.has_abort and (root / "abort").exists()
    assert lq.recover(root).is_needed


def test_beside_a_writer(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with opened(root, flush_interval_consume_queue=10**6) as store:
        for number in range(50):
            store.put(lq.Message("t", b"%d" % number, keys="k"))
        store.wait_dispatched()
        store.flush()
        before = message_files(root)
        report = rebuild(root, into=tmp_path / "new")
        assert message_files(root) == before
        assert not (root / ".logquarry" / "rebuild").exists()
        assert report.is_live and report.messages == 50
        assert report.log_end == store.max_offset
        with pytest.raises(StoreUnavailable, match="has the store open for writing already"):
            rebuild(root, apply=True)
        assert store.put(lq.Message("t", keys="k")).ok
        ours = bytes_of(tmp_path / "new" / "consumequeue")["t/0/" + f"{0:020d}"]
        assert ours == before[str(root / "consumequeue" / "t" / "0" / f"{0:020d}")]


def test_queues_without_a_message_go_on_where_they_ended(tmp_path: Path) -> None:
    """Their messages were deleted with the log's first file."""
    root = tmp_path / "store"
    with opened(root) as store:
        for _ in range(30):
            store.put(lq.Message("silent", b"x" * 200, keys="k"))
        while store.max_offset < 3 * 16_384:
            store.put(lq.Message("busy", b"y" * 200, keys="k"))
    (root / "commitlog" / f"{0:020d}").unlink()
    forget_start(root)
    old = bytes_of(root / "consumequeue")
    report = rebuild(root, apply=True, index=False)
    assert report.queues is not None
    taken = [queue for queue in report.queues if queue.is_taken_over]
    assert [(queue.topic, queue.max_offset) for queue in taken] == [("silent", 30)]
    new = bytes_of(root / "consumequeue")
    assert {name for name in old if name.startswith("silent")} <= new.keys()
    with lq.MessageStore.open(root, mode="rw") as store:
        assert store.put(lq.Message("silent", keys="k")).queue_offset == 30


def test_damage_leaves_fillers(tmp_path: Path) -> None:
    root = small(tmp_path / "store")
    with lq.MessageStore.open(root) as store:
        lost = list(store.scan())[30]
    path = root / "commitlog" / f"{0:020d}"
    data = bytearray(path.read_bytes())
    data[lost.physical_offset + 4] ^= 0xFF
    path.write_bytes(data)
    for gone in (False, True):
        if gone:
            # If no queue is left, only the frames after the damage show these messages.
            shutil.rmtree(root / "consumequeue")
        new = tmp_path / f"new-{gone}"
        report = rebuild(root, into=new, config=config())
        assert report.messages == 59 and len(report.damage) == 1
        assert report.queues is not None
        found = {(q.topic, q.queue_id): q for q in report.queues}
        assert found[lost.topic, lost.queue_id].fillers == 1
        assert sum(q.fillers for q in report.queues) == 1
        units = np.frombuffer(
            bytes_of(new / "consumequeue")[f"{lost.topic}/{lost.queue_id}/{0:020d}"], UNIT_DTYPE
        )
        assert units[lost.queue_offset]["size"] == queue_entry.FILLER_SIZE


def test_new_queues_do_not_end_the_log_at_damage_that_was_within_it(tmp_path: Path) -> None:
    root = small(tmp_path / "store")
    with lq.MessageStore.open(root) as store:
        lost = list(store.scan())[30]
    path = root / "commitlog" / f"{0:020d}"
    data = bytearray(path.read_bytes())
    data[lost.physical_offset + 4] ^= 0xFF
    path.write_bytes(data)
    # As RocketMQ's broker leaves a store, and without the queues.
    shutil.rmtree(root / ".logquarry")
    shutil.rmtree(root / "consumequeue")
    assert rebuild(root, apply=True, config=config()).messages == 59
    with lq.MessageStore.open(root, config=config()) as store:
        assert sum(1 for _ in store.scan(on_damage="skip")) == 59
        assert verify_store(store.layout).counts["lost_messages"] <= 1


def test_a_topic_that_came_again(tmp_path: Path) -> None:
    made = StoreMaker(log_file_size=1 << 14)
    for number in range(25):
        made.put(body=b"first life", queue_offset=number, keys="k")
    for number in range(12):
        made.put(body=b"second life", queue_offset=number, keys="k")
    root = made.write(tmp_path / "store")
    settings = config(mapped_file_size_consume_queue=200, max_hash_slot_num=16, max_index_num=50)
    report = rebuild(root, into=tmp_path / "new", config=settings)
    assert report.queues is not None
    (queue,) = report.queues
    assert (queue.min_offset, queue.max_offset, queue.restarts) == (0, 12, 1)
    shutil.rmtree(root / "consumequeue")
    shutil.copytree(tmp_path / "new" / "consumequeue", root / "consumequeue")
    with lq.MessageStore.open(root, config=settings) as store:
        found = store.get("orders", 0, 0).messages
        assert {message.body for message in found} == {b"second life"} and len(found) == 10


# ------------------------------------------------------------------------------ what goes wrong
def test_folders_that_cannot_be_meant(tmp_path: Path) -> None:
    root = small(tmp_path / "store")
    before = facts(root)
    (tmp_path / "taken" / "index").mkdir(parents=True)
    (tmp_path / "taken" / "index" / "1").touch()
    (tmp_path / "file").touch()
    for into in (root, root / "consumequeue", tmp_path / "taken", tmp_path / "file"):
        with pytest.raises(UsageError):
            rebuild(root, into=into)
    with pytest.raises(UsageError):
        rebuild(root, queues=False, index=False)
    (root / "consumequeue").rename(tmp_path / "elsewhere")
    (root / "consumequeue").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="link"):
        rebuild(root, apply=True)
    (root / "consumequeue").unlink()
    (tmp_path / "elsewhere").rename(root / "consumequeue")
    assert facts(root).keys() >= before.keys()


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EBUSY])
@pytest.mark.parametrize("name", ["consumequeue", "index"])
def test_a_folder_that_the_system_does_not_rename(tmp_path: Path, name: str, number: int) -> None:
    """It is a mount point, or in a lower layer of an overlay."""

    class Fixed(Disk):
        def rename(self, path: Path, to: Path) -> None:
            if path == root / name:
                raise OSError(number, os.strerror(number))
            super().rename(path, to)

    root = small(tmp_path / "store")
    before = message_files(root)
    with pytest.raises(StoreUnavailable, match=f"{name}: it cannot be renamed") as caught:
        rebuild(root, apply=True, disk=Fixed(), clock=lambda: 0)
    old = root / ".logquarry/quarantine/rebuild-19700101T000000Z"
    if name == "index":
        found = f"Replaced: consumequeue (the old files are in {old}). Not replaced: index. Build"
        assert (old / "consumequeue").is_dir()
    else:
        found = "No folder was replaced. Not replaced: consumequeue, index. Build new files in"
        assert not old.exists()
    assert found in str(caught.value)
    assert message_files(root) == before
    # A later opening must not move the build into place.
    assert not (root / ".logquarry/rebuild").exists()
    rebuild(root, into=tmp_path / "new", disk=Fixed())


@pytest.mark.parametrize("name", ["index", ".logquarry", ".logquarry/quarantine"])
def test_a_mount_point_is_refused_before_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    root = small(tmp_path / "a store")
    before, mounts = facts(root), tmp_path / "mountinfo"
    point = os.fsencode(root / name).replace(b" ", rb"\040")
    mounts.write_bytes(
        b"22 27 8:1 / / rw - ext4 /dev/sda rw\n23 22 8:1 /x %s rw - ext4 y rw\n" % point
    )
    monkeypatch.setattr(in_place, "_MOUNTS", mounts)
    with pytest.raises(UsageError, match=f"{name}: it is a mount point.* --into"):
        rebuild(root, apply=True)
    assert facts(root) == before
    mounts.unlink()
    monkeypatch.setattr(os.path, "ismount", lambda path: path == root / name)
    with pytest.raises(UsageError, match=f"{name}: it is a mount point.* --into"):
        rebuild(root, apply=True)


def test_a_subvolume_that_can_be_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = small(tmp_path / "store")
    monkeypatch.setattr(os.path, "ismount", lambda path: path == root / "index")
    assert rebuild(root, apply=True).is_applied


@pytest.mark.parametrize("call", ["open", "allocate", "write", "fdatasync", "rename"])
def test_a_disk_that_fails_leaves_all_as_it_was(tmp_path: Path, call: str) -> None:
    root = small(tmp_path / "store")
    before = {name: value[0] for name, value in facts(root).items()}
    disk = FaultyDisk()
    with pytest.MonkeyPatch.context() as patch:

        def locked(disk: FaultyDisk, path: Path) -> StoreLock:
            lock = StoreLock(disk, path)
            disk.failing = {call: ENOSPC}
            return lock

        patch.setattr(rebuild_module, "StoreLock", locked)
        with pytest.raises(StoreUnavailable):
            rebuild(root, apply=True, disk=disk)
    assert {name: value[0] for name, value in facts(root).items()} == before
    disk.failing = {call: ENOSPC}
    with pytest.raises(StoreUnavailable):
        rebuild(root, into=tmp_path / "new", disk=disk)
    assert not (tmp_path / "new").exists()


def test_whoever_is_interrupted_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a kill at any call, each folder is the old or the new one, or its swap is finished."""
    root = small(tmp_path / "store", 20)
    (root / "consumequeue" / "t1" / "1" / f"{0:020d}").unlink()
    old = {name: bytes_of(root / name) for name in ("consumequeue", "index")}
    whole = StoppedDisk()
    shutil.copytree(root, tmp_path / "whole")
    rebuild(tmp_path / "whole", apply=True, disk=whole, clock=lambda: NOW)
    new = {name: bytes_of(tmp_path / "whole" / name) for name in ("consumequeue", "index")}
    assert new["consumequeue"] != old["consumequeue"]
    real = shutil.rmtree
    finished = 0
    for number in whole.stops:
        copy, disk = tmp_path / "copy", StoppedDisk(number)
        real(copy, ignore_errors=True)
        shutil.copytree(root, copy)

        def rmtree(path: Path, ignore_errors: bool = False, disk: StoppedDisk = disk) -> None:
            if not disk.is_stopped:
                real(path, ignore_errors)

        monkeypatch.setattr(shutil, "rmtree", rmtree)
        with pytest.raises(KeyboardInterrupt):
            rebuild(copy, apply=True, disk=disk, clock=lambda: NOW)
        for name in ("consumequeue", "index"):
            if (copy / name).exists():
                assert bytes_of(copy / name) in (old[name], new[name])
            else:
                finished += 1
                assert bytes_of(copy / ".logquarry" / "rebuild" / name) == new[name]
        monkeypatch.setattr(shutil, "rmtree", real)
        rebuild(copy, apply=True, clock=lambda: NOW)
        for name in ("consumequeue", "index"):
            assert bytes_of(copy / name) == new[name]
        assert not (copy / ".logquarry" / "rebuild").exists()
    assert finished


@pytest.mark.parametrize("stops_at", ["consumequeue", "index"])
def test_what_was_cut_off_on_its_way_into_a_folder_is_ended(tmp_path: Path, stops_at: str) -> None:
    root, names = small(tmp_path / "store"), ("consumequeue", "index")
    into = tmp_path / "new"
    rebuild(root, into=tmp_path / "whole")

    class Interrupted(FaultyDisk):
        def rename(self, path: Path, to: Path) -> None:
            if to == into / stops_at:
                raise KeyboardInterrupt
            super().rename(path, to)

    note = tmp_path / "note.json"

    def finished() -> bool:
        return finish_into(root, into, names, note=note)

    assert not finished()
    with pytest.raises(KeyboardInterrupt):
        rebuild(root, into=into, disk=Interrupted(), note=note)
    assert finished()
    assert sorted(path.name for path in into.iterdir()) == list(names)
    assert bytes_of(into / names[0]) == bytes_of(tmp_path / "whole" / names[0])
    assert index_bytes(into) == index_bytes(tmp_path / "whole")


def test_an_interrupt_in_the_middle_of_the_swap_takes_it_back(tmp_path: Path) -> None:
    root = small(tmp_path / "store")
    before = {name: bytes_of(root / name) for name in ("commitlog", "consumequeue", "index")}

    class Interrupted(FaultyDisk):
        def rename(self, path: Path, to: Path) -> None:
            if path.parent.name == "rebuild" and to.name == "consumequeue":
                raise KeyboardInterrupt
            super().rename(path, to)

    with pytest.raises(KeyboardInterrupt):
        rebuild(root, apply=True, disk=Interrupted())
    for name, files in before.items():
        assert bytes_of(root / name) == files


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_refusal_names_the_interrupted_rebuild_that_was_finished(
    tmp_path: Path, is_gone: bool
) -> None:
    """A lost log file is found before the renames, a damaged log file only after them."""
    root = small(tmp_path / "store", 250)
    made = root / ".logquarry" / "rebuild"
    made.mkdir(parents=True)
    for name in ("consumequeue", "index"):
        (root / name).rename(made / name)
    (made / "complete").touch()
    (root / ".logquarry" / "durable").unlink()
    _, second, *_, last = sorted((root / "commitlog").iterdir())
    if is_gone:
        last.unlink()
    else:
        second.write_bytes(bytes([7]) * second.stat().st_size)
    before = bytes_of(root)
    with pytest.raises(LossRefused) as refused:
        rebuild(root, apply=True)
    words = "Only the interrupted rebuild of consumequeue, index was finished"
    assert ("Nothing was changed. Bring" in str(refused.value)) is is_gone
    assert (f"{words}. Bring" in str(refused.value)) is not is_gone
    assert (root / "consumequeue").exists() is not is_gone
    if is_gone:
        assert bytes_of(root) == before


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_file_stays_open(tmp_path: Path) -> None:
    root = small(tmp_path / "store")
    with leaves_nothing_open(root):
        rebuild(root, apply=True)
