"""Processes for a test to kill: Spark's driver, its JVM, and its Python processes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

import psutil


class Killable:
    """A Python program with all processes that it starts.

    Args:
        module: module to run, as with ``-m``.
        arguments: its arguments.
        errors: file for its stderr, to inspect after a failure.
    """

    def __init__(self, module: str, *arguments: str, errors: Path) -> None:
        self._file = errors
        with errors.open("ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                # The process group, so that a kill reaches all processes.
                start_new_session=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            )
        self._left: list[psutil.Process] = []

    def wait_for(self, word: str) -> None:
        """Wait until the program prints a line."""
        while line := self._stdout.readline():
            if line.strip() == word:
                return
        code = self._process.wait()
        raise AssertionError(f"it ended with {code} before it said {word!r}:\n{self.errors}")

    def end(self, seconds: float) -> str:
        """Wait for the end, which closing stdin may cause; return the last line printed."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self.ended(seconds) == 0, self.errors
        return self._stdout.read().strip().rpartition("\n")[2]

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def ended(self, seconds: float) -> int:
        """Return the exit code after the program has ended."""
        return self._process.wait(seconds)

    @property
    def errors(self) -> str:
        """Return the end of its stderr."""
        return self._file.read_text("utf-8", "replace")[-20_000:]

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill_a_worker(self, rng: random.Random) -> None:
        """Kill one of Spark's Python processes: the daemon, or one that plans, reads or commits."""
        workers = [child for child in self._below() if _is_python(child)]
        if workers:
            with suppress(psutil.NoSuchProcess):
                rng.choice(workers).kill()

    def kill_the_driver(self) -> None:
        """Kill driver and JVM only: the Python processes run on until they notice."""
        self._left += [child for child in self._below() if _is_python(child)]
        self._kill_group()

    def kill(self) -> None:
        """Kill all processes at once, also those that an earlier kill left."""
        below = [*self._below(), *self._left]
        self._kill_group()
        end_all(below)
        self._left.clear()
        for pipe in (self._process.stdin, self._stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _below(self) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            found: list[psutil.Process] = psutil.Process(self._process.pid).children(recursive=True)
            return found
        return []

    @property
    def _stdout(self) -> IO[str]:
        assert self._process.stdout is not None
        return self._process.stdout


def _is_python(process: psutil.Process) -> bool:
    try:
        return "python" in process.name()
    except psutil.NoSuchProcess:
        return False


def end_all(processes: Sequence[psutil.Process]) -> None:
    """Kill processes, and wait until they are gone.

    Not with `psutil.wait_procs`, which fails if a process ends during the query.
    """
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    deadline = time.monotonic() + 30
    while not all(map(_is_over, processes)) and time.monotonic() < deadline:
        time.sleep(0.02)


def _is_over(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
