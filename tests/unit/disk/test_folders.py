from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from logquarry import systems
from logquarry.disk import folders
from logquarry.disk.disk import Disk
from logquarry.disk.folders import AbortFile, StoreLock, ignores_case, is_lockable
from logquarry.disk.mapped_file_queue import MappedFileQueue
from logquarry.errors import StoreUnavailable
from logquarry.log.layout import StoreLayout
from tests.helpers.failing_disk import EIO, FaultyDisk
from tests.helpers.python_process import run


def test_the_lock_is_as_javas(tmp_path: Path) -> None:
    (tmp_path / "commitlog").mkdir()
    lock = StoreLock(Disk(), tmp_path)
    assert (tmp_path / "lock").read_bytes() == b"lock"
    assert (lock.is_open, StoreLayout.open(tmp_path).is_live()) == (True, True)
    lock.release()
    lock.release()
    assert (lock.is_open, StoreLayout.open(tmp_path).is_live()) == (False, False)


def test_a_new_lock_file_is_durable(tmp_path: Path) -> None:
    disk = FaultyDisk()
    for _ in range(2):
        StoreLock(disk, tmp_path).release()
    assert disk.synced_folders == [tmp_path], "once: then it is there"


def test_a_second_opener_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    lock = StoreLock(Disk(), tmp_path)
    before = (tmp_path / "lock").stat()
    with pytest.raises(StoreUnavailable, match=str(os.getpid())):
        StoreLock(Disk(), tmp_path)
    # Nor did the attempt drop the lock, as it would drop a lock of the process.
    done = run(
        """
        import sys
        from pathlib import Path
        from logquarry.errors import StoreUnavailable
        from logquarry.disk.disk import Disk
        from logquarry.disk.folders import StoreLock
        try:
            StoreLock(Disk(), Path(sys.argv[1]))
        except StoreUnavailable as error:
            print(error)
        """,
        tmp_path,
    )
    assert f"process {os.getpid()}" in done.stdout, done.stderr
    after = (tmp_path / "lock").stat()
    assert (after.st_mtime_ns, after.st_ctime_ns) == (before.st_mtime_ns, before.st_ctime_ns)
    lock.release()
    StoreLock(Disk(), tmp_path).release()


def test_a_lock_of_another_kind_of_process_excludes_ours(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import fcntl, sys\n"
            "file = open(sys.argv[1], 'wb')\n"
            "fcntl.lockf(file, fcntl.LOCK_EX, 1)\n"
            "print('held', flush=True)\n"
            "sys.stdin.read()\n",
            str(tmp_path / "lock"),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
    with pytest.raises(StoreUnavailable, match=str(holder.pid)):
        StoreLock(Disk(), tmp_path)
    assert (tmp_path / "lock").read_bytes() == b""
    holder.communicate()
    StoreLock(Disk(), tmp_path).release()


def test_our_lock_excludes_one_of_a_process(tmp_path: Path) -> None:
    lock = StoreLock(Disk(), tmp_path)
    with (tmp_path / "lock").open("r+b") as file, pytest.raises(OSError, match="unavailable"):
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
    # The other descriptor is closed, and the lock is still there.
    with pytest.raises(StoreUnavailable):
        StoreLock(Disk(), tmp_path)
    lock.release()


def test_a_lock_of_the_process_stays_until_its_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On macOS, a process loses its lock if it closes any descriptor of the lock file."""
    macos = SimpleNamespace(
        **{name: value for name, value in vars(fcntl).items() if not name.startswith("F_OFD_")}
    )
    monkeypatch.setattr(systems, "fcntl", macos)
    monkeypatch.setattr(folders, "fcntl", macos)
    take = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+b'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    command = [sys.executable, "-c", take, str(tmp_path / "lock")]
    (tmp_path / "commitlog").mkdir()
    lock = StoreLock(Disk(), tmp_path)
    with pytest.raises(StoreUnavailable, match=str(os.getpid())):
        StoreLock(Disk(), tmp_path)
    assert StoreLayout.open(tmp_path).is_live()
    assert is_lockable(tmp_path)
    assert subprocess.run(command, capture_output=True, check=False).returncode, "still locked"
    lock.release()
    assert not StoreLayout.open(tmp_path).is_live()
    assert is_lockable(tmp_path)
    subprocess.run(command, check=True)
    StoreLock(Disk(), tmp_path).release()


def test_a_child_reads_the_lock_of_its_parent(tmp_path: Path) -> None:
    lock = StoreLock(Disk(), tmp_path)
    child = os.fork()
    if not child:
        os._exit(0 if systems.is_locked(lock.path) else 1)
    assert os.waitpid(child, 0)[1] == 0
    lock.release()


JAVA = """
import java.io.RandomAccessFile;
public class TryLock {
    public static void main(String[] names) throws Exception {
        RandomAccessFile file = new RandomAccessFile(names[0], "rw");
        System.out.println(file.getChannel().tryLock(0, 1, false) == null ? "refused" : "taken");
        System.in.read();
    }
}
"""


@pytest.mark.java
def test_javas_lock_and_ours_exclude_each_other(tmp_path: Path) -> None:
    java = shutil.which("java")
    if java is None:
        pytest.skip("no Java")
    (tmp_path / "TryLock.java").write_text(JAVA)
    command = [java, str(tmp_path / "TryLock.java"), str(tmp_path / "lock")]
    lock = StoreLock(Disk(), tmp_path)
    done = subprocess.run(command, check=True, capture_output=True, input=b"\n")
    assert done.stdout == b"refused\n"
    lock.release()
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline() == b"taken\n"
    with pytest.raises(StoreUnavailable, match=str(holder.pid)):
        StoreLock(Disk(), tmp_path)
    holder.communicate(b"\n")


def test_a_failed_lock_lets_go(tmp_path: Path) -> None:
    disk = FaultyDisk()
    disk.failing["write"] = EIO
    with pytest.raises(StoreUnavailable):
        StoreLock(disk, tmp_path)
    StoreLock(Disk(), tmp_path).release()


# ----------------------------------------------------------------------------------------- abort
def test_abort_comes_and_goes_durably(tmp_path: Path) -> None:
    disk = FaultyDisk()
    abort = AbortFile(disk, tmp_path)
    was_there = [abort.exists]
    for step in (abort.make, abort.make, abort.remove):
        step()
        was_there.append(abort.exists)
    assert was_there == [False, True, True, False]
    assert disk.order == ["open", "sync_folder", "open", "sync_folder", "unlink", "sync_folder"]


def test_a_poisoned_store_keeps_its_abort(tmp_path: Path) -> None:
    disk = FaultyDisk()
    abort = AbortFile(disk, tmp_path)
    abort.make()
    disk.health.poison("a sync failed")
    with pytest.raises(StoreUnavailable):
        abort.remove()
    assert abort.exists


# --------------------------------------------------------------------------- children and the end
FORK = """
    import gc, mmap, os, sys, threading
    from pathlib import Path
    from logquarry.errors import StoreUnavailable
    from logquarry.disk.service import close_at_exit, was_closed
    from logquarry.disk.disk import Disk
    from logquarry.disk.page_file import CheckpointFile
    from logquarry.write.flush import GroupCommitService
    from logquarry.write.settling import PutWait
    from logquarry.disk.mapped_file import MappedFile
    from logquarry.disk.mapped_file_queue import MappedFileQueue
    from logquarry.disk.folders import StoreLock
    root = Path(sys.argv[1])
    disk = Disk()
    lock = StoreLock(disk, root)
    times = CheckpointFile(disk, root / "checkpoint")
    queue = MappedFileQueue(disk, root / "log", 1 << 20)
    queue.load()
    file = queue.writable()
    file.append(b"parent")
    alone = MappedFile(disk, root / "alone", 0, 1 << 20)
    flusher = GroupCommitService(queue, disk.health)
    flusher.start()
    def is_synced(offset):
        done = threading.Event()
        flusher.add(PutWait(offset, lambda in_time: done.set(), print))
        return done.wait(60)
    assert is_synced(6)
    class Store:
        def close(self):
            print("closed by", os.getpid() == parent, flush=True)
    parent = os.getpid()
    store = Store()
    close_at_exit(store)
    # As if another thread was in the middle of things.
    queue._change.acquire(); queue._flushing.acquire(); file._sync_lock.acquire()
    child = os.fork()
    if child == 0:
        # The child's memory, where the maps were.
        mine = [mmap.mmap(-1, 1 << 20) for _ in range(200)]
        for question in (
            lambda: queue.writable(), lambda: queue.select(0),
            queue.flush, queue.commit,
            lambda: file.select(0), file.flush, times.flush, lambda: queue.truncate_to(0),
        ):
            try:
                question()
            except StoreUnavailable as error:
                assert "forked" in str(error)
            else:
                raise AssertionError(question)
        queue.close(); file.close(); times.close(); lock.release(); flusher.stop()
        assert not lock.is_open
        del alone
        gc.collect()
        # None of it went with the parent's maps.
        assert all(part[0] == part[-1] == 0 for part in mine)
        sys.exit(7)
    _, status = os.waitpid(child, 0)
    queue._change.release(); queue._flushing.release(); file._sync_lock.release()
    assert os.waitstatus_to_exitcode(status) == 7, status
    file.append(b" goes on")
    assert is_synced(14)
    assert bytes(queue.select(0)) == b"parent goes on"
    try:
        StoreLock(Disk(), root)
    except StoreUnavailable:
        print("still locked", flush=True)
"""


def test_a_forked_child_has_no_store_and_the_parent_keeps_it(tmp_path: Path) -> None:
    done = run(FORK, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == ["still locked", "closed by True", ""]


def test_the_lock_goes_with_the_parent_although_a_child_lives(tmp_path: Path) -> None:
    done = run(
        """
        import os, sys, time
        from pathlib import Path
        from logquarry.disk.disk import Disk
        from logquarry.disk.folders import StoreLock
        lock = StoreLock(Disk(), Path(sys.argv[1]))
        child = os.fork()
        if child == 0:
            os.close(1); os.close(2)
            time.sleep(20)
            os._exit(0)
        print(child, flush=True)
        time.sleep(0.2)
        os.kill(os.getpid(), 9)
        """,
        tmp_path,
    )
    child = int(done.stdout)
    try:
        StoreLock(Disk(), tmp_path).release()
    finally:
        os.kill(child, 9)


def test_the_end_of_the_interpreter_closes_and_does_not_hang(tmp_path: Path) -> None:
    done = run(
        """
        import sys
        from pathlib import Path
        from logquarry.disk.service import close_at_exit, was_closed
        from logquarry.disk.log_files import AllocateMappedFileService
        from logquarry.disk.disk import Disk
        from logquarry.write.flush import FlushRealTimeService, Timing
        from logquarry.write.flush import GroupCommitService
        from logquarry.disk.mapped_file_queue import MappedFileQueue
        from logquarry.disk.folders import AbortFile, StoreLock, is_lockable
        root = Path(sys.argv[1])
        class Store:
            def __init__(self):
                self.disk = disk = Disk()
                self.lock = StoreLock(disk, root)
                self.abort = AbortFile(disk, root)
                self.abort.make()
                self.allocator = AllocateMappedFileService(disk)
                self.queue = MappedFileQueue(disk, root / "log", 4096, allocator=self.allocator)
                self.queue.load()
                self.services = [self.allocator, GroupCommitService(self.queue, disk.health),
                                 FlushRealTimeService(self.queue, disk.health, Timing(500, 4, 9))]
                for service in self.services:
                    service.start()
                close_at_exit(self)
            def close(self):
                for service in self.services:
                    assert service.stop()
                self.queue.close()
                self.abort.remove()
                self.lock.release()
                was_closed(self)
        class Broken:
            def close(self):
                raise ZeroDivisionError
        store = Store()
        close_at_exit(Broken())
        store.queue.writable().append(b"text")
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "ZeroDivisionError" in done.stderr
    assert not (tmp_path / "abort").exists()
    assert [int(path.name) for path in (tmp_path / "log").iterdir()] == [0]
    queue = MappedFileQueue(Disk(), tmp_path / "log", 4096)
    queue.load()
    assert bytes(queue.select(0, 4) or b"") == b"text"
    queue.close()


HOLDS = """
import sys
from pathlib import Path
from logquarry.disk.disk import Disk
from logquarry.disk.folders import StoreLock
input()
lock = StoreLock(Disk(), Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""
OPENS_AGAIN = """
import sys
from pathlib import Path
from logquarry.errors import StoreUnavailable
from logquarry.disk.disk import Disk
from logquarry.disk.folders import StoreLock
try:
    StoreLock(Disk(), Path(sys.argv[1])).release()
except StoreUnavailable as error:
    print(error)
"""


@pytest.mark.skipif(not hasattr(fcntl, "F_OFD_SETLK"), reason="only Linux can mark a folder")
@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_deleted_lock_file_lets_no_second_writer_in(tmp_path: Path, is_replaced: bool) -> None:
    (tmp_path / "commitlog").mkdir()
    lock = StoreLock(Disk(), tmp_path)
    lock.path.unlink()
    if is_replaced:
        lock.path.write_bytes(b"lock")
    reason = "its lock file was replaced" if is_replaced else "its lock file was deleted"
    words = f"the store is open in another program (process {os.getpid()}), but {reason}: stop"
    with pytest.raises(StoreUnavailable, match=re.escape(words)):
        StoreLock(Disk(), tmp_path)
    assert words in run(OPENS_AGAIN, tmp_path).stdout
    assert lock.path.exists() is is_replaced
    assert StoreLayout.open(tmp_path).is_live()
    lock.release()
    assert not StoreLayout.open(tmp_path).is_live()
    assert not run(OPENS_AGAIN, tmp_path).stdout
    StoreLock(Disk(), tmp_path).release()


@pytest.mark.skipif(not hasattr(fcntl, "F_OFD_SETLK"), reason="only Linux can mark a folder")
def test_two_writers_that_open_a_new_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one creates and locks the file after this one has looked for it."""
    other = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    told, heard = other.stdin, other.stdout
    assert told is not None and heard is not None

    def opened_by_other(path: Path) -> contextlib.AbstractContextManager[bool]:
        told.write(b"\n")
        told.flush()
        assert heard.readline() == b"held\n"
        return systems.lock_file(path)

    monkeypatch.setattr(folders, "lock_file", opened_by_other)
    text = rf"{other.pid}\), which holds lock: stop that program$"
    with other, pytest.raises(StoreUnavailable, match=text):
        StoreLock(Disk(), tmp_path)


@pytest.mark.skipif(not hasattr(fcntl, "F_OFD_SETLK"), reason="only Linux can mark a folder")
def test_the_mark_ends_with_the_lock(tmp_path: Path) -> None:
    """Also if the lock is held by another program, and if a process forks."""
    lock = StoreLock(Disk(), tmp_path)
    child = os.fork()
    if not child:
        # The copy of the parent's mark is closed, and the parent's mark stays.
        os._exit(0 if systems.is_marked(tmp_path) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with pytest.raises(StoreUnavailable):
        StoreLock(Disk(), tmp_path)
    lock.release()
    assert not systems.is_marked(tmp_path)
    assert not systems.folder_holders(tmp_path)


# ------------------------------------------------------------------------- upper and lower case
@pytest.mark.parametrize("names", [[], ["orders"], ["orders", "ORDERS"], ["1", "2"]])
def test_this_file_system_distinguishes_case(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / "topics" / name).mkdir(parents=True)
    assert not ignores_case(tmp_path / "topics")


@pytest.mark.parametrize("names", [[], ["orders"], ["1", "2"]])
@pytest.mark.parametrize("is_made", [False, True])
def test_a_file_system_that_ignores_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], is_made: bool
) -> None:
    if names or is_made:
        (tmp_path / "topics").mkdir()
    for name in names:
        (tmp_path / "topics" / name).mkdir()
    (tmp_path / "lock").touch()

    def lexists(path: Path) -> bool:
        known = {name.name.casefold() for name in path.parent.iterdir()}
        return path.name.casefold() in known

    monkeypatch.setattr(os.path, "lexists", lexists)
    assert ignores_case(tmp_path / "topics")


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of Linux")
def test_one_folder_ignores_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``chattr +F`` on a folder of ext4."""
    asked: list[int] = []

    def ioctl(_: int, call: int, data: bytes) -> bytes:
        asked.append(call)
        return (0x40080000).to_bytes(4, sys.byteorder) + data[4:]

    monkeypatch.setattr(fcntl, "ioctl", ioctl)
    assert ignores_case(tmp_path)
    assert asked == [0x80086601]
