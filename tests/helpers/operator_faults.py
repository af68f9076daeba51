"""The faults of the operator's page (docs/operations.md), made on a small store.

Each fault is a context: it harms the store when it begins, and undoes what outlives the store when
it ends. The key is the first cell of the page's row.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from unittest.mock import patch

import logquarry as lq
from logquarry.arguments import now_ms
from logquarry.disk.disk import Disk
from logquarry.store.message_store import StoreWriter
from logquarry.testing.clock import FakeClock
from tests.helpers.files import overwrite
from tests.helpers.small_store import config

COUNT = 80
TOPIC = "orders"
_NOBODY = 65_534

Fault = Callable[[Path], AbstractContextManager[object]]


def make_store(root: Path) -> Path:
    """80 messages with keys in four log files, as a writer leaves them after a clean shutdown."""
    # No two messages have the same store time, however fast the machine is.
    clock = FakeClock(now_ms() - 60_000, step=1)
    with StoreWriter.start(root, config=config(), clock=clock) as store:
        for number in range(COUNT):
            body = b"body %02d " % number * 75
            store.put(lq.Message(TOPIC, body, keys=f"key{number}", queue_id=number % 2))
    (root / "config").mkdir(exist_ok=True)
    (root / "config/topics.json").write_text(json.dumps({"topicConfigTable": {}}))
    return root


def log_files(root: Path) -> list[Path]:
    """The files of the log that hold messages."""
    files = sorted((root / "commitlog").iterdir())
    return [file for file in files if file.read_bytes().strip(b"\0")]


def _change(file: Path, old: bytes, new: bytes) -> None:
    data = file.read_bytes()
    assert old in data
    file.write_bytes(data.replace(old, new, 1))


def bit_rot(root: Path) -> None:
    """One wrong byte in a body."""
    _change(log_files(root)[1], b"body 30 ", b"body 3\xff ")


def recorded(root: Path) -> None:
    """Bit rot, and a recovery that has recorded it."""
    bit_rot(root)
    lq.recover(root, apply=True)


def torn_tail(root: Path) -> None:
    """A crash while the last message was written: its second half is missing."""
    file = log_files(root)[-1]
    data = file.read_bytes()
    end = len(data.rstrip(b"\0"))
    file.write_bytes(data[: end - 300] + bytes(len(data) - end + 300))
    # The last flush was before this message.
    checkpoint = root / "checkpoint"
    times = struct.unpack_from(">3q", checkpoint.read_bytes())
    overwrite(checkpoint, 0, struct.pack(">3q", *(time - 1_000 for time in times)))
    (root / "abort").touch()
    shutil.rmtree(root / ".logquarry")


def crash(root: Path) -> None:
    """A kill: ``abort`` exists, and the queues lack their last entries."""
    (root / "abort").touch()


def lost_file(number: int) -> Callable[[Path], None]:
    """Return a fault: one file of the log is missing."""
    return lambda root: log_files(root)[number].unlink()


def lost_first_of_rocketmq(root: Path) -> None:
    """The first file of the log is missing, and nothing shows where the log began."""
    log_files(root)[0].unlink()
    (root / ".logquarry/durable").unlink()


def short_file(root: Path) -> None:
    """A copy of a log file that ended too early."""
    os.truncate(log_files(root)[1], 9_000)


def not_mounted(root: Path) -> None:
    """The mount point of the log's disk is an empty folder."""
    shutil.rmtree(root / "commitlog")
    (root / "commitlog").mkdir()


def lost_queue_file(root: Path) -> None:
    """The second of three files of a queue is missing."""
    sorted((root / "consumequeue" / TOPIC / "0").iterdir())[1].unlink()


def lost_queues(root: Path) -> None:
    """All queue files are missing."""
    shutil.rmtree(root / "consumequeue")


def wrong_entries(root: Path) -> None:
    """Two queue entries in the wrong order."""
    file = min((root / "consumequeue" / TOPIC / "1").iterdir())
    data = file.read_bytes()
    file.write_bytes(data[20:40] + data[:20] + data[40:])


def broken_index(root: Path) -> None:
    """The fifth entry of the index file points to no message."""
    file = min((root / "index").iterdir())
    data = bytearray(file.read_bytes())
    at = 40 + 50 * 4 + 5 * 20 + 4
    data[at : at + 8] = (5).to_bytes(8, "big")
    file.write_bytes(data)


def broken_index_header(root: Path) -> None:
    """The header of the index file is overwritten; a broker.conf has its sizes."""
    file = min((root / "index").iterdir())
    file.write_bytes(b"\xff" * 40 + file.read_bytes()[40:])
    (root.parent / "broker.conf").write_text("maxHashSlotNum=50\nmaxIndexNum=200\n")


def no_checkpoint(root: Path) -> None:
    """The checkpoint is missing."""
    (root / "checkpoint").unlink()


def empty_checkpoint(root: Path) -> None:
    """The checkpoint has no bytes."""
    (root / "checkpoint").write_bytes(b"")


def broken_json(root: Path) -> None:
    """``config/topics.json`` ends in the middle."""
    (root / "config/topics.json").write_text('{"topicConfigTable": {')


def rocksdb(root: Path) -> None:
    """The queues are in RocksDB, as RocketMQ 5 can keep them."""
    (root / "consumequeue_rocksdb").mkdir()
    (root / "consumequeue_rocksdb" / "CURRENT").write_text("MANIFEST-000004\n")


def sizes_of_another_store(root: Path) -> None:
    """A broker.conf with another file size."""
    (root.parent / "broker.conf").write_text("brokerName=a\nmappedFileSizeCommitLog=32768\n")


def typing_error(root: Path) -> None:
    """A broker.conf with a misspelled setting."""
    (root.parent / "broker.conf").write_text("brokerName=a\nmappedFileSizeComitLog=16384\n")


@contextmanager
def held_lock(root: Path) -> Iterator[None]:
    """Another process has the store open, until its standard input ends."""
    program = "import sys, logquarry as lq\nwith lq.MessageStore.open(sys.argv[1], mode='rw'):\n"
    program += "    print('open', flush=True)\n    sys.stdin.read()\n"
    with subprocess.Popen(
        [sys.executable, "-c", program, root], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdin is not None and holder.stdout is not None
        assert holder.stdout.readline()
        yield
        holder.stdin.close()


@contextmanager
def other_user(root: Path, mode: int) -> Iterator[None]:
    """The user of the command is not the owner of the store."""
    folders = [root, *(path for path in root.rglob("*") if path.is_dir())]
    is_root = os.geteuid() == 0
    for folder in folders:
        folder.chmod(mode)
    if is_root:
        os.seteuid(_NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
        for folder in folders:
            folder.chmod(0o755)


@contextmanager
def full_disk(root: Path) -> Iterator[None]:
    """Every write to a file fails, as on a full disk."""

    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with patch.object(Disk, "write", refuse), patch.object(Disk, "write_all", refuse):
        yield


def _once(harm: Callable[[Path], None]) -> Fault:
    @contextmanager
    def context(root: Path) -> Iterator[None]:
        harm(root)
        yield

    return context


FAULTS: dict[str, Fault] = {
    "a wrong byte in a message's body (bit rot)": _once(bit_rot),
    "a wrong byte in a message's body, after a recovery that recorded this damage": _once(recorded),
    "the broker or the machine crashed": _once(crash),
    "a crash in the middle of a write (torn tail)": _once(torn_tail),
    "the first log file is missing": _once(lost_file(0)),
    "the first log file is missing, and RocketMQ wrote the store": _once(lost_first_of_rocketmq),
    "a log file in the middle is missing": _once(lost_file(1)),
    "the last log file is missing": _once(lost_file(-1)),
    "a log file is too short": _once(short_file),
    "the disk of `commitlog/` is not mounted": _once(not_mounted),
    "a queue file is lost": _once(lost_queue_file),
    "`consumequeue/` is lost": _once(lost_queues),
    "wrong queue entries: consumers get wrong messages": _once(wrong_entries),
    "a broken index: a query by key finds nothing": _once(broken_index),
    "the header of an index file is broken": _once(broken_index_header),
    "the checkpoint is missing": _once(no_checkpoint),
    "the checkpoint is empty": _once(empty_checkpoint),
    "a broken JSON file in `config/`": _once(broken_json),
    "the store belongs to another user": lambda root: other_user(root, 0o700),
    "the store's folder is read-only": lambda root: other_user(root, 0o555),
    "the disk is full": full_disk,
    "the broker still has the store open": held_lock,
    "the path is one level too deep": _once(lambda root: None),
    "the path is one level too high": _once(lambda root: None),
    "`--config` has the sizes of another store": _once(sizes_of_another_store),
    "`--config` has a typing error": _once(typing_error),
    "the store has a feature of RocketMQ 5 that a recovery would harm": _once(rocksdb),
}
"""First cell of a row -> the fault."""
