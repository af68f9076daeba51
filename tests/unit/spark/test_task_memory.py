"""A task needs memory for a few batches, however much log it reads.

The test counts anonymous memory: the system frees pages of mapped files when it needs them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from logquarry.testing.builder import fill
from tests.helpers.task_memory import WORKS

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux tells of anonymous memory"
)

MIB = 1 << 20
LARGEST = int(os.environ.get("TASK_MIB") or 256) * MIB
"""Bytes of the largest task; set ``TASK_MIB=1024`` for more."""
MOST = {"export": 256 * MIB, "table": 256 * MIB}
"""Maximum bytes of a task that writes: one copy of a row group's rows and one of a partition's;"""
MOST_OF_OTHERS = 48 * MIB
"""most bytes of all other tasks: a few batches."""
SLACK = {"export": 48 * MIB, "table": 48 * MIB}
"""Bytes that the allocator returns later in one run than in another: for a task that writes, of a
row group; a task that kept its rows would keep half of the largest task's;"""
SLACK_OF_OTHERS = 24 * MIB
"""of all other tasks."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("memory") / "store"
    fill(root, total_bytes=LARGEST + MIB, body=(600, 1_000), file_size=LARGEST + 2 * MIB)
    return root


@pytest.mark.parametrize(
    "work",
    [
        # These tasks write much, or do the same as another task.
        pytest.param(work, marks=pytest.mark.slow) if work in ("load", "table") else work
        for work in WORKS
    ],
)
def test_memory_does_not_grow_with_the_task(work: str, store: Path, tmp_path: Path) -> None:
    with Worker(work, store, tmp_path / "out") as worker:
        # Only a task that writes has row groups, which a smaller task does not fill.
        largest = LARGEST if work in MOST or "TASK_MIB" in os.environ else LARGEST // 2
        slack = SLACK.get(work, SLACK_OF_OTHERS)
        sizes = [largest // 2, largest]
        peaks = [worker.peak(size) for size in sizes]
        # On a busy machine the allocator may not have returned memory yet. The task's own need
        # shows in each run.
        for _ in range(4):
            if peaks[1] - peaks[0] >= slack:
                peaks[1] = min(peaks[1], worker.peak(largest))
    told = ", ".join(f"{s // MIB} MiB: {p / MIB:.1f}" for s, p in zip(sizes, peaks, strict=True))
    print(f"{work}: anonymous, beyond the {worker.idle / MIB:.0f} MiB of an idle worker: {told}")
    assert max(peaks) < MOST.get(work, MOST_OF_OTHERS), told
    assert peaks[1] - peaks[0] < slack, told


class Worker:
    """A process that runs tasks and measures its memory meanwhile."""

    def __init__(self, work: str, store: Path, out: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.task_memory", work, str(store), str(out)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        self._wait_for("ready")
        self.idle = self._anonymous()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def peak(self, size: int) -> int:
        """Return the most memory of a task, above that of the process before its first task.

        On a busy machine, few samples are taken while a task runs. So run the task again until
        there are enough.
        """
        found = [0]
        while len(found) <= 10:
            found += self._samples(size)
        return max(found) - self.idle

    def _samples(self, size: int) -> list[int]:
        """Run a task, and return the memory of the process at moments before the task's end."""
        assert self._process.stdin is not None
        is_done = threading.Event()
        found: list[int] = []

        def watch() -> None:
            while not is_done.wait(0.001):
                found.append(self._anonymous())

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            self._process.stdin.write(f"{size}\n")
            self._process.stdin.flush()
            self._wait_for("done")
        finally:
            is_done.set()
            watcher.join()
        return found

    def _wait_for(self, word: str) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline().strip() == word

    def _anonymous(self) -> int:
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        match = re.search(r"^RssAnon:\s+(\d+) kB$", status, re.MULTILINE)
        assert match is not None
        return int(match[1]) << 10
