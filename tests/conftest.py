"""Fixtures and hooks of all tests; pyspark and numba are imported by the tests that need them."""

from __future__ import annotations

import fcntl
import gc
import os
import signal
from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import hatch_build
from tests.helpers.golden_data import ARCHIVE, unpacked

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # If a shell starts the tests in the background, they ignore interrupts, and so would every
    # process that they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)


if hatch_build.is_stale():
    pytest.exit("the compiled modules are older than their sources: run python hatch_build.py", 2)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without garbage collection, which takes a quarter of that time.

    Later collections do not visit the tests and modules either: they all live to the end.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
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
