"""A safe recovery that ends at any call of its disk: the next recovery has the same result.

What the first recovery could know about the store, the second must know, too.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.disk.disk import Disk
from logquarry.repair.recover.apply import disk_json
from logquarry.store.message_store import StoreWriter
from tests.helpers.failing_disk import StoppedDisk
from tests.helpers.files import overwrite
from tests.helpers.small_store import NOW, config, opened

COUNT = 20


def in_log(root: Path) -> list[bytes]:
    with lq.MessageStore.open(root, config=config()) as store:
        return [message.body for message in store.scan(on_damage="skip")]


def in_queue(root: Path) -> list[bytes]:
    found, offset = [], 0
    with lq.MessageStore.open(root, config=config()) as store:
        while offset < store.queue_offsets("t", 0)[1]:
            answer = store.get("t", 0, offset)
            found += [message.body for message in answer.messages]
            offset = answer.next_offset
    return found


def tree(root: Path) -> frozenset[tuple[str, bytes | None]]:
    """All files with their bytes, and all folders."""
    return frozenset(
        (str(path.relative_to(root)), path.read_bytes() if path.is_file() else None)
        for path in root.rglob("*")
    )


def comes_to(root: Path, tmp_path: Path, view: Callable[[Path], list[bytes]]) -> list[bytes]:
    """The result of a recovery, which it also has after one interrupt at any call.

    Two interrupts that leave the same files need one recovery.
    """
    whole = StoppedDisk()
    shutil.copytree(root, tmp_path / "whole")
    lq.recover(tmp_path / "whole", apply=True, accept_loss=1 << 20, disk=whole, config=config())
    left = view(tmp_path / "whole")
    assert len(whole.order) > 30
    recovered: set[frozenset[tuple[str, bytes | None]]] = set()
    for number in whole.stops:
        copy = tmp_path / "copy"
        shutil.copytree(root, copy)
        with pytest.raises(KeyboardInterrupt):
            lq.recover(
                copy, apply=True, accept_loss=1 << 20, disk=StoppedDisk(number), config=config()
            )
        interrupted = tree(copy)
        if interrupted not in recovered:
            lq.recover(copy, apply=True, accept_loss=1 << 20, config=config())
            assert view(copy) == left, f"call {number}, {whole.order[number]}"
            recovered.add(interrupted)
        shutil.rmtree(copy)
    assert len(recovered) > 10
    return left


def rot(root: Path, position: int) -> None:
    path = root / "commitlog" / f"{0:020d}"
    data = bytearray(path.read_bytes())
    data[position + 5] ^= 1
    path.write_bytes(data)


def test_the_durable_mark_is_good_throughout(tmp_path: Path) -> None:
    """Without it, messages after the damage would count as stale where the clock was set back."""
    now = NOW
    with StoreWriter.start(tmp_path / "live", config=config(), clock=lambda: now) as store:
        for number in range(COUNT):
            now = NOW + number + (10_000 if number < 10 else 0)
            store.put(lq.Message("t", b"body %d" % number, keys="k"))
        store.wait_dispatched()
        store.flush()
        at = [message.physical_offset for message in store.scan()]
        shutil.copytree(tmp_path / "live", tmp_path / "crashed")
    rot(tmp_path / "crashed", at[10])
    left = comes_to(tmp_path / "crashed", tmp_path, in_queue)
    assert left == [b"body %d" % number for number in range(COUNT) if number != 10]


def test_stale_messages_of_a_closed_store_stay_dropped(tmp_path: Path) -> None:
    """The clean shutdown shows that they are stale; an interrupted recovery leaves ``abort``."""
    root = tmp_path / "closed"
    with opened(root) as store:
        for number in range(COUNT):
            store.put(lq.Message("t", b"body %d" % number))
        at = [message.physical_offset for message in store.scan()]
    # As RocketMQ leaves a store after it has cut the log and written the queues.
    shutil.rmtree(root / ".logquarry")
    rot(root, at[10])
    queue = root / "consumequeue" / "t" / "0" / f"{0:020d}"
    queue.write_bytes(queue.read_bytes()[: 20 * 10].ljust(400, b"\0"))
    assert comes_to(root, tmp_path, in_log) == [b"body %d" % number for number in range(10)]


@pytest.mark.parametrize("which", [0, -1])
def test_a_file_that_is_too_long_is_there_throughout(tmp_path: Path, which: int) -> None:
    root = tmp_path / "long"
    with opened(root) as store:
        for number in range(COUNT):
            store.put(lq.Message("t", b"%02d" % number * 400))
    files = [path for path in sorted((root / "commitlog").iterdir()) if any(path.read_bytes())]
    with files[which].open("ab") as file:
        file.write(b"more")
    assert len(comes_to(root, tmp_path, in_log)) == COUNT
    tails = list((tmp_path / "whole" / ".logquarry" / "quarantine").rglob("*.from-*"))
    assert [path.read_bytes() for path in tails] == [b"more"]


def test_a_lost_file_stays_known(tmp_path: Path) -> None:
    """The entries of its messages stay, so that later messages keep their queue offsets."""
    root = tmp_path / "lost"
    with opened(root) as store:
        for number in range(COUNT):
            store.put(lq.Message("t", b"%02d" % number * 1000))
    queue = root / "consumequeue" / "t" / "0" / f"{0:020d}"
    units = queue.read_bytes()
    sorted((root / "commitlog").iterdir())[1].unlink()
    left = comes_to(root, tmp_path, in_queue)
    assert 5 < len(left) < COUNT
    whole = tmp_path / "whole"
    assert not lq.recover(whole, config=config()).is_needed
    (whole / "abort").touch()
    plan = lq.recover(whole, apply=True, config=config())
    assert [span.length for span in plan.damage] == [16_384]
    assert in_queue(whole) == left
    assert (whole / "consumequeue" / "t" / "0" / queue.name).read_bytes() == units


def test_units_of_lost_messages_stay_known(tmp_path: Path) -> None:
    """The queue is cut before these entries, and only they show where the message was."""
    root = tmp_path / "harmed"
    with opened(root) as store:
        for number in range(COUNT):
            store.put(lq.Message("t", b"body %d" % number))
        at = [message.physical_offset for message in store.scan()]
    queue = root / "consumequeue" / "t" / "0" / f"{0:020d}"
    units = queue.read_bytes()
    rot(root, at[10])
    with queue.open("r+b") as file:
        file.seek(3 * 20)
        file.write(bytes(range(20)))

    def in_file(root: Path) -> list[bytes]:
        return [(root / queue.relative_to(tmp_path / "harmed")).read_bytes()]

    assert comes_to(root, tmp_path, in_file) == [units]
    quarantine = tmp_path / "whole" / ".logquarry" / "quarantine"
    assert "kept_units.json" not in [path.name for path in quarantine.iterdir()]


@pytest.mark.parametrize("text", ["", "[", "{}", '[{"topic": "t"}]', '[{"topic": 1, "units": 2}]'])
def test_a_note_that_cannot_be_read_is_passed_over(tmp_path: Path, text: str) -> None:
    with opened(tmp_path) as store:
        for number in range(COUNT):
            store.put(lq.Message("t", b"body %d" % number))
    (tmp_path / "abort").touch()
    folder = tmp_path / ".logquarry" / "quarantine"
    folder.mkdir()
    (folder / "kept_units.json").write_text(text)
    lq.recover(tmp_path, apply=True, config=config())
    assert len(in_queue(tmp_path)) == COUNT


def test_a_folder_whose_name_is_no_utf8_is_told(tmp_path: Path) -> None:
    path = tmp_path / "recovery.json"
    document = {"file": os.fsdecode(b"consumequeue/\xff\xfe/0")}
    disk_json(Disk(), path, document)
    assert json.loads(path.read_bytes()) == document


def test_a_second_recovery_knows_the_sizes_of_files_that_the_first_one_moved(
    tmp_path: Path,
) -> None:
    """RocketMQ's sizes instead would give an index file 420 MB, and a broker would not start with
    queue files of another size.
    """
    root = tmp_path / "crashed"
    with opened(root) as store:
        for number in range(COUNT):
            store.put(lq.Message("t", b"body %d" % number, keys=f"k{number}"))
    shutil.rmtree(root / ".logquarry")
    (root / "abort").touch()
    times = struct.unpack_from(">3q", (root / "checkpoint").read_bytes())
    overwrite(root / "checkpoint", 0, struct.pack(">3q", *(time - 60_000 for time in times)))
    queue = root / "consumequeue" / "t" / "0" / f"{0:020d}"
    # The first entry points into the middle of a message, so the recovery replaces the file.
    overwrite(queue, 0, struct.pack(">q", 7))
    sizes = {"index": 40 + 50 * 4 + 200 * 20, "consumequeue": 400}
    counted = StoppedDisk()
    shutil.copytree(root, tmp_path / "whole")
    plan = lq.recover(tmp_path / "whole", apply=True, disk=counted)
    assert {Path(step.file).parts[0] for step in plan.steps} >= sizes.keys()
    for number in counted.stops:
        copy = tmp_path / "copy"
        shutil.copytree(root, copy)
        with pytest.raises(KeyboardInterrupt):
            lq.recover(copy, apply=True, disk=StoppedDisk(number))
        lq.recover(copy, apply=True)
        for part, size in sizes.items():
            files = [path for path in (copy / part).rglob("*") if path.is_file()]
            assert {path.stat().st_size for path in files} == {size}, counted.order[number]
        shutil.rmtree(copy)
