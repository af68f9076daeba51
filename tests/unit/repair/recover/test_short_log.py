"""The only file of the log was cut short: its length is not the size of the log's files."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.read import store_sizes
from tests.helpers import python_process
from tests.helpers.files import overwrite
from tests.helpers.small_store import opened

SIZE = 1 << 16
LOG = Path("commitlog") / ("0" * 20)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store of five messages without recorded settings. The default size is small."""
    monkeypatch.setattr(store_sizes, "DEFAULT_COMMIT_LOG_FILE", SIZE)
    root = tmp_path / "store"
    with opened(root, mapped_file_size_commit_log=SIZE) as store:
        for number in range(5):
            store.put(lq.Message("t", b"%d" % number * 20))
    shutil.rmtree(root / ".logquarry")
    return root


@pytest.mark.parametrize("left", [1, 3, 4, 8, 72, 99, 150, 300])
def test_the_store_is_recovered_and_written(
    root: Path, left: int, caplog: pytest.LogCaptureFixture
) -> None:
    os.truncate(root / LOG, left)
    lq.recover(root, apply=True, accept_loss=1 << 20)
    assert f"logquarry assumes mapped_file_size_commit_log={SIZE}" in caplog.text
    assert (root / LOG).stat().st_size == SIZE
    with lq.MessageStore.open(root, mode="rw") as store:
        store.put(lq.Message("t", b"a longer body" * 20))
        found = [message.body for message in store.scan(on_damage="skip")]
    assert found == [*(b"%d" % i * 20 for i in range(left // 112)), b"a longer body" * 20]


def test_other_bytes(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    (root / LOG).write_bytes(b'{"topic": "t"}' * 20)
    lq.recover(root, apply=True, accept_loss=1 << 20)
    assert (root / LOG).stat().st_size == SIZE


@pytest.mark.parametrize("end", [b"", b"old"], ids=["zeros in the blank", "old bytes in the blank"])
def test_a_whole_file_shows_the_size(
    root: Path, end: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """The file shows the size of log files, even if it is full and the next file is missing."""
    shutil.rmtree(root)
    with opened(root, mapped_file_size_commit_log=1_024) as store:
        for number in range(12):
            store.put(lq.Message("t", b"%02d" % number * 20))
    shutil.rmtree(root / ".logquarry")
    for path in sorted((root / "commitlog").iterdir())[1:]:
        path.unlink()
    overwrite(root / LOG, 1_024 - len(end), end)
    lq.recover(root, apply=True, accept_loss=1 << 20)
    with lq.MessageStore.open(root, mode="rw") as store:
        assert store.config.mapped_file_size_commit_log == 1_024
    assert "assumes" not in caplog.text


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_plan_takes_no_memory_for_the_missing_bytes(tmp_path: Path) -> None:
    """The plan checks whether zeros after the short file would complete its last message."""
    size = 1 << 30
    with opened(tmp_path / "store", mapped_file_size_commit_log=size) as store:
        put = [store.put(lq.Message("t", b"%d" % number * 20)) for number in range(5)]
    at = put[4].physical_offset
    os.truncate(tmp_path / "store" / LOG, (at or 0) + 90)
    done = python_process.run(
        """
        import sys
        from pathlib import Path
        import logquarry as lq

        def memory():
            lines = Path("/proc/self/status").read_text().splitlines()
            return int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) << 10

        lq.verify(sys.argv[1])
        before = memory()
        plan = lq.recover(sys.argv[1])
        assert plan.is_needed
        print(memory() - before)
        """,
        tmp_path / "store",
    )
    assert int(done.stdout) < size // 4, done.stderr


@pytest.mark.parametrize("files", [1, 2])
def test_empty_files_without_recorded_settings(
    root: Path, files: int, caplog: pytest.LogCaptureFixture
) -> None:
    """No file shows the size of log files, so the recovery says which size it assumes."""
    for number in range(files):
        (root / LOG.with_name(f"{number * SIZE:020d}")).write_bytes(b"")
    for apply in (False, True):
        caplog.clear()
        lq.recover(root, apply=apply, accept_loss=1 << 20)
        assert f"logquarry assumes mapped_file_size_commit_log={SIZE}" in caplog.text
