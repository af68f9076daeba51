"""RocketMQ's own store as a process (`oracle/run`); needs a JDK and Maven."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

RUN = Path(__file__).parents[2] / "oracle" / "run"
_BUILD_SECONDS = 600
_ANSWER_SECONDS = 60
QUICK_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""A JVM that lives for some seconds ends before the optimizing compiler is of any use."""


def require_oracle(run: Path = RUN) -> None:
    """Skip the test if RocketMQ cannot be run here; otherwise build it."""
    if shutil.which("mvn") is None or shutil.which("java") is None:
        pytest.skip("no Maven and JDK to run the real store with")
    built = subprocess.run(
        [run, "help"], capture_output=True, timeout=_BUILD_SECONDS, check=False, text=True
    )
    if "cannot be resolved" in built.stderr or "Could not resolve" in built.stderr:
        pytest.skip("Maven cannot fetch RocketMQ's jars here")


class Master:
    """A running `oracle/run ha-master` or `ha-slave`, or what answers like one: one command a
    line, one JSON document back.

    Attributes:
        ready: what it said when it was ready.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.ready: dict[str, Any] = {}

    def ask(self, command: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the real store ended without an answer"
        document: dict[str, Any] = json.loads(line)
        return document

    def quit(self) -> None:
        """End it in order."""
        assert self.ask("quit")["shutdown"]
        self._process.wait(_ANSWER_SECONDS)

    def kill(self) -> None:
        """End it as a crash does; a second call does nothing."""
        # The shell script becomes the JVM (exec): there is no other process.
        self._process.kill()
        self._process.wait(_ANSWER_SECONDS)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


def started(*command: str | Path, cwd: Path | None = None) -> Master:
    """Start a process that is ready for commands; the caller kills it."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=cwd,
        env={"ORACLE_JVM": QUICK_JVM} | os.environ,
    )
    running = Master(process)
    try:
        running.ready = running.answer()
        assert running.ready["ready"]
    except BaseException:
        running.kill()
        raise
    return running


@contextmanager
def master(folder: Path, port: int, params: Path | None = None) -> Iterator[Master]:
    """The real master store over a folder, until the block ends."""
    settings: list[str | Path] = [] if params is None else ["--params", params]
    running = started(RUN, "ha-master", str(port), folder, *settings)
    try:
        yield running
        running.quit()
    finally:
        running.kill()
