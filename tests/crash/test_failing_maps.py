"""Maps of a file that is truncated, or on a disk that is full or fails: no process dies."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.crash.lost_pages import MODES, handled, make_store, run, use


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("failing") / "store")


WRITES = """
from pathlib import Path
from logquarry.disk.disk import Disk
from logquarry.disk.mapped_file import MappedFile
class Sparse(Disk):
    def allocate(self, descriptor, size):
        os.truncate(descriptor, size)
path = Path(root) / "file"
file = MappedFile(Sparse(), path, 0, 4 << 20)
"""
POISONED = """
    file.flush()
except lq.errors.StoreUnavailable as error:
    is_watched = lost_pages.watch(mmap.mmap(-1, 10), True) >= 0
    words = ("SIGBUS",) if is_watched else ("truncated the file", "No space left")
    assert any(word in str(error) for word in words) and str(path) in str(error), error
else:
    raise SystemExit("flushed what is not in the file")
assert file.flushed == flushed
try:
    file.flush()
except lq.errors.StoreUnavailable:
    pass
else:
    raise SystemExit("the store still takes writes")
file.close()
"""


@MODES
def test_a_file_truncated_under_a_writer_poisons_the_store(
    tmp_path: Path, mode: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(mode, monkeypatch)
    run(
        WRITES
        + """
file.append(b"a" * 100_000)
flushed = file.flush()
os.truncate(path, 50_000)
try:
    file.append(b"b" * 100_000)
"""
        + POISONED,
        tmp_path,
    )


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounts need root")
    mount = tmp_path / "mount"
    mount.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)]
    if subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("no mounts here")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], capture_output=True, check=False)


@pytest.mark.root
@MODES
def test_a_sparse_file_on_a_full_disk_poisons_the_store(
    full_disk: Path, mode: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(mode, monkeypatch)
    run(
        WRITES
        + """
file.append(b"a" * 500_000)
flushed = file.flush()
try:
    for _ in range(20):
        file.append(b"b" * 100_000)
"""
        + POISONED,
        full_disk,
    )


@contextmanager
def failing_disk(made: Path, tmp_path: Path, options: str) -> Iterator[tuple[Path, Path]]:
    """A copy of a store on a loop device, and the image that a test truncates."""
    if os.geteuid() != 0:
        pytest.skip("mounts need root")
    image, mount = tmp_path / "image", tmp_path / "mount"
    mount.mkdir()
    image.touch()
    os.truncate(image, 64 << 20)
    try:
        for words in (
            ["mkfs.ext4", "-q", "-b", "4096", "-m", "0", "-O", "^has_journal", str(image)],
            ["mount", "-o", "loop", str(image), str(mount)],
        ):
            subprocess.run(words, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no loop mounts here")
    try:
        subprocess.run(["cp", "-a", "--sparse=always", made, mount / "store"], check=True)
        subprocess.run(["umount", str(mount)], check=True)
        subprocess.run(["mount", "-o", options, str(image), str(mount)], check=True)
        yield mount / "store", image
    finally:
        subprocess.run(["umount", "-l", str(mount)], capture_output=True, check=False)


FAILING = """
image = sys.argv[2]
libc = ctypes.CDLL(None, use_errno=True)
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
def fail():
    # The disk fails from here on, and the pages leave the cache although they are mapped.
    os.truncate(image, 0)
    for line in open("/proc/self/maps"):
        if root in line:
            start, stop = (int(part, 16) for part in line.split()[0].split("-"))
            libc.madvise(start, stop - start, 21)
    for folder, _, names in os.walk(root):
        for name in names:
            with open(os.path.join(folder, name), "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
"""
WRITER = """
with lq.MessageStore.open(root, mode="rw", config=config) as store:
    store.put(lq.Message("orders", b"first", keys="k1", tags="a"))
    store.flush()
    # Only clean pages leave the cache.
    assert libc.syncfs(os.open(root, os.O_RDONLY)) == 0
    fail()
    errors = 0
    for number in range(300):
        try:
            store.put(lq.Message("orders", b"later", keys=f"k{number}", tags="a"))
            store.put_many([lq.Message("orders", b"later", keys="k")] * 3)
            if number % 50 == 49:
                store.flush()
        except lq.errors.StoreError:
            errors += 1
        try:
            found = store.get("orders", 0, 9 * number, 32)
            assert {one.body for one in found.messages} <= TRUTH | {b"first", b"later"}
        except lq.errors.StoreError:
            errors += 1
    # Pages that stay in the cache hide the fault, so the number depends on the system.
    print(errors, flush=True)
    # The store cannot close cleanly either.
    os._exit(0)
"""


@pytest.mark.root
@MODES
def test_a_writer_survives_a_disk_that_fails(
    made: Path, tmp_path: Path, mode: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(mode, monkeypatch)
    with failing_disk(made, tmp_path, "loop") as (store, image):
        run(FAILING + WRITER, store, image)


READER = """
with lq.MessageStore.open(root, config=config) as store:
    first = [store.get("orders", 0, offset, 32) for offset in range(0, 2_900, 32)]
    assert len(list(store.scan())) == 3_000
    fail()
    errors = 0
    for offset in range(0, 2_900, 32):
        try:
            answer = store.get("orders", 0, offset, 32)
        except lq.errors.StoreError as error:
            errors += 1
            continue
        assert {one.body for one in answer.messages} <= TRUTH
    try:
        assert {one.body for one in store.scan(on_damage="skip")} <= TRUTH
    except lq.errors.StoreError:
        errors += 1
    assert errors and lost_pages.lost()
    print(lost_pages.lost())
"""


@pytest.mark.root
@handled
def test_pages_that_leave_the_cache_of_a_failing_disk_are_unreadable(
    made: Path, tmp_path: Path
) -> None:
    with failing_disk(made, tmp_path, "loop,ro") as (store, image):
        assert int(run(FAILING + READER, store, image)) > 0
