"""Two pytest plugins: one records which lines each test executes, the other runs chosen tests.

``-p tools.reached_lines`` with REACHED_LINES_TO=FOLDER appends one JSON object for each test to a
file in that folder (one file for each process, so that it works with xdist). With
REACHED_LINES_CHOICE=FILE, only the tests in the file's list run, in the order of the list.

The plugin records only lines inside functions of src/logquarry, in all threads of the test's
process, but not in child processes. To save time, the plugin stops recording a function for the
rest of a test when a few calls in a row have reached no new line. A line that only the hundredth
call reaches may therefore be missing in the record. For this case, the record also contains the
functions that a test has entered. Compiled kernels have no lines: for kernels, the plugin records
the functions that Python calls.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final, TextIO

import pytest

RECORD: Final = "REACHED_LINES_TO"
CHOICE: Final = "REACHED_LINES_CHOICE"
OUTCOME: Final = "REACHED_LINES_OUTCOME"
_CALLS_WITHOUT_NEW: Final = 5
_EVENTS_WITHOUT_NEW: Final = 2_000
_MOST_MEMORY: Final = 6 << 30
"""Maximum bytes of memory of a process that tests a mutant. Without a limit, a mutant whose memory
grows without end could stop the machine.
"""


class _Reached:
    """The lines and functions that one test reaches."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._is_ours: dict[str, bool] = {}
        self.lines: dict[CodeType, set[int]] = {}
        self._vain_calls: dict[CodeType, int] = {}
        self.kernels: set[tuple[str, str]] = set()

    def on_call(self, frame: FrameType, event: str, _: Any) -> Any:
        """Trace function (see `sys.settrace`) of a thread."""
        code = frame.f_code
        name = code.co_filename
        ours = self._is_ours.get(name)
        if ours is None:
            ours = self._is_ours[name] = name.startswith(self._prefix)
        if not ours or code.co_name == "<module>":
            return None
        vain = self._vain_calls.get(code, 0)
        if vain >= _CALLS_WITHOUT_NEW:
            return None
        self._vain_calls[code] = vain + 1
        lines = self.lines.setdefault(code, set())
        events = 0

        def on_line(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal events
            if event == "line":
                line = frame.f_lineno
                if line not in lines:
                    lines.add(line)
                    self._vain_calls[code] = events = 0
                else:
                    events += 1
                    if events >= _EVENTS_WITHOUT_NEW:
                        frame.f_trace_lines = False
            return on_line

        return on_line

    def document(self) -> dict[str, Any]:
        """Return lines and functions by file, and the kernels."""
        lines: dict[str, set[int]] = {}
        functions: dict[str, set[int]] = {}
        for code, found in list(self.lines.items()):
            file = code.co_filename.removeprefix(self._prefix)
            lines.setdefault(file, set()).update(found)
            functions.setdefault(file, set()).add(code.co_firstlineno)
        return {
            "lines": {file: sorted(found) for file, found in lines.items()},
            "functions": {file: sorted(found) for file, found in functions.items()},
            "kernels": sorted(
                [file.removeprefix(self._prefix), name] for file, name in self.kernels
            ),
        }


class _Recorder:
    """The plugin that records."""

    def __init__(self, folder: Path, root: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = (folder / f"{os.getpid()}.jsonl").open("a", encoding="utf-8")
        self._prefix = f"{root}/src/logquarry/"
        self._kernels: set[tuple[str, str]] = set()
        self._passed = True
        self._watch_kernels()

    def _watch_kernels(self) -> None:
        """Record the calls from Python into compiled functions."""
        from numba.core.registry import CPUDispatcher

        call = CPUDispatcher.__call__

        def watched(dispatcher: Any, *arguments: Any, **named: Any) -> Any:
            function = dispatcher.py_func
            self._kernels.add((function.__code__.co_filename, function.__name__))
            return call(dispatcher, *arguments, **named)

        CPUDispatcher.__call__ = watched

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        reached = _Reached(self._prefix)
        self._kernels = reached.kernels
        self._passed = True
        began = time.perf_counter()
        threading.settrace(reached.on_call)
        sys.settrace(reached.on_call)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)
            found = {
                "test": item.nodeid,
                "seconds": round(time.perf_counter() - began, 4),
                "passed": self._passed,
            }
            print(json.dumps(found | reached.document()), file=self._file, flush=True)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._passed &= report.outcome == "passed"

    def pytest_unconfigure(self) -> None:
        self._file.close()


class _Chosen:
    """The plugin that runs chosen tests, and stops when their time is over.

    The choice is a JSON object with the members ``tests``, the names in the order in which to run
    them, and ``seconds``, the time that all tests together may take.
    """

    def __init__(self, choice: Path, outcome: Path) -> None:
        found = json.loads(choice.read_text("utf-8"))
        self._order = {name: place for place, name in enumerate(found["tests"])}
        self._seconds: float = found["seconds"]
        self._outcome = outcome
        self._began = time.monotonic()
        self._ran = 0
        self._chosen = 0
        self._failed: str | None = None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        left_out = [item for item in items if item.nodeid not in self._order]
        items[:] = sorted(
            (item for item in items if item.nodeid in self._order),
            key=lambda item: self._order[item.nodeid],
        )
        self._chosen = len(items)
        config.hook.pytest_deselected(items=left_out)

    def pytest_runtest_logstart(self) -> None:
        self._ran += 1

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        result = yield
        if time.monotonic() - self._began > self._seconds:
            item.session.shouldstop = "the tests of this mutant have used up their time"
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome == "failed" and self._failed is None:
            self._failed = report.nodeid

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        found = {
            "chosen": self._chosen,
            "ran": self._ran,
            "failed": self._failed,
            "exit": int(exitstatus),
        }
        self._outcome.write_text(json.dumps(found), "utf-8")


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugins that the environment variables request."""
    choice, folder = os.environ.get(CHOICE), os.environ.get(RECORD)
    if choice:
        resource.setrlimit(resource.RLIMIT_DATA, (_MOST_MEMORY, _MOST_MEMORY))
        config.pluginmanager.register(_Chosen(Path(choice), Path(os.environ[OUTCOME])))
    # With xdist, only the workers record, because the process that starts them runs no test itself.
    if folder and (hasattr(config, "workerinput") or not config.getoption("numprocesses", None)):
        config.pluginmanager.register(_Recorder(Path(folder), config.rootpath))
