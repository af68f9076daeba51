"""Fixtures and hooks of all tests; pyspark is imported by the tests that need it."""

from __future__ import annotations

import fcntl
import gc
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import hatch_build
from logquarry.log import codec
from tests.helpers import hypothesis_profiles
from tests.helpers.golden_data import ARCHIVE, unpacked

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # If a shell starts the tests in the background, they ignore interrupts, and so would every
    # process that they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)


if hatch_build.is_stale():
    pytest.exit("the compiled modules are older than their sources: run python hatch_build.py", 2)

# Not in the conftest.py of a folder: a test of another folder can import a test of that folder
# first, and Hypothesis's own settings, with a deadline, would then hold for it.
hypothesis_profiles.load()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without garbage collection, which takes a quarter of that time.

    Later collections do not visit the tests and modules either: they all live to the end. With
    Python's own threshold (700), they take 4 % of the tests' processor time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10_000)
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Let each worker start at another file of a folder.

    pytest rewrites the assertions of a new or changed file and stores the result. If all workers
    went through the files in the same order, each worker would rewrite each file.
    """
    report = yield
    if "PYTEST_XDIST_WORKER" in os.environ and isinstance(collector, pytest.Directory):
        worker = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
        first = len(report.result) * worker // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        report.result = report.result[first:] + report.result[:first]
    return report


@pytest.hookimpl(tryfirst=True)  # before -m selects by the markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test that uses the Spark session: `make test` runs those apart from the others.

    All workers must have the same order of tests.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: item.path)
    for item in items:
        if "spark" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.spark)


@pytest.fixture(scope="session")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the golden stores, shared by all tests and workers: copy what you change."""
    return unpacked(ARCHIVE, tmp_path_factory) / "golden"


@pytest.fixture(scope="session", autouse=True)
def kernels_are_used() -> None:
    """Import the kernels now: otherwise the first frames of a process are read without them."""
    codec.kernels()


@pytest.fixture(scope="session", autouse=True)
def kernels_are_compiled_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let a worker wait for a kernel that another worker compiles, and load it from the cache."""
    if "PYTEST_XDIST_WORKER" not in os.environ or find_spec("numba") is None:
        return
    from numba.core.dispatcher import Dispatcher

    folder, compiled = tmp_path_factory.getbasetemp().parent, Dispatcher.compile

    # A kernel that calls another holds both locks. No two kernels call each other.
    def compile_alone(kernel: Any, signature: Any) -> Any:
        with (folder / f"{kernel.py_func.__qualname__}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return compiled(kernel, signature)

    pytest.MonkeyPatch().setattr(Dispatcher, "compile", compile_alone)


SYNCED = ("tests/crash", "tests/unit/disk", "tests/unit/store/test_fault_table.py")
"""The tests that really sync."""

IN_MEMORY = (
    "tests/cli/test_import_golden.py",
    "tests/conformance/test_batch_queue_repair.py",
    "tests/conformance/test_batch_queues.py",
    "tests/conformance/test_dialect31_recovery.py",
    "tests/conformance/test_diff_queues.py",
    "tests/conformance/test_dledger.py",
    "tests/conformance/test_log_names.py",
    "tests/conformance/test_own_settings.py",
    "tests/conformance/test_recover.py",
    "tests/conformance/test_rocketmq5.py",
    "tests/conformance/test_rocketmq_recovery.py",
    "tests/conformance/test_rocksdb_recovery.py",
    "tests/conformance/test_safe_recovery.py",
    "tests/conformance/test_store_replay.py",
    "tests/property/test_rebuild_ways.py",
    "tests/unit/log/test_log_names.py",
    "tests/unit/read",
    "tests/unit/repair",
    "tests/unit/spark",
    "tests/unit/store",
)
"""The tests whose folder `tmp_path` is in memory: they make many small files."""

ON_DISK = (
    *SYNCED,
    "tests/unit/repair/recover/test_other_disks.py",
    "tests/unit/repair/test_strange_entries.py",
    "tests/unit/spark/test_task_memory.py",
    "tests/unit/spark/test_task_size.py",
)
"""Tests in these folders that need a real disk, write large files, remove `tmp_path`, or make hard
links to files of other tests.
"""

_MEMORY = Path("/dev/shm")
_LEAST_FREE = 1 << 30
_HAS_FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note that a test failed, for `tmp_path`."""
    report = yield
    item.stash[_HAS_FAILED] = item.stash.get(_HAS_FAILED, False) or report.failed
    return report


@pytest.fixture
def tmp_path(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """A folder for one test; if the test fails, its files stay.

    With small files, a test in memory takes up to a third less processor time than on a disk.
    """
    if not _is_in_memory(request.node.nodeid):
        yield request.getfixturevalue("tmp_path")  # pytest's own
        return
    folder = Path(tempfile.mkdtemp(prefix="logquarry-test-", dir=_MEMORY))
    try:
        yield folder
        if request.node.stash.get(_HAS_FAILED, False):
            kept = tmp_path_factory.mktemp(re.sub(r"\W", "_", request.node.name)[:30])
            shutil.copytree(folder, kept, dirs_exist_ok=True, symlinks=True)
    finally:
        try:
            shutil.rmtree(folder)
        except PermissionError:
            # The test took away its own rights to a folder.
            subprocess.run(["chmod", "-R", "u+rwx", folder], check=True)
            shutil.rmtree(folder)


def _is_in_memory(test: str) -> bool:
    if not test.startswith(IN_MEMORY) or test.startswith(ON_DISK):
        return False
    if not os.access(_MEMORY, os.W_OK):
        return False
    space = os.statvfs(_MEMORY)
    return space.f_bavail * space.f_frsize >= _LEAST_FREE


def _check_descriptor(descriptor: int) -> None:
    """Raise what a sync raises for a closed file."""
    if descriptor < 0:
        raise ValueError(f"file descriptor cannot be a negative integer ({descriptor})")
    os.fstat(descriptor)


@pytest.fixture(autouse=True)
def syncs_do_not_wait(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a sync only check its descriptor: a real one takes 5 ms, and tests see no difference."""
    if not request.node.nodeid.startswith(SYNCED):
        monkeypatch.setattr(os, "fsync", _check_descriptor)
        monkeypatch.setattr(os, "fdatasync", _check_descriptor)
