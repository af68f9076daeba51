"""The real RocketMQ store as a process (`oracle/run`), where a JDK and Maven can run it."""

from __future__ import annotations

import json
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


def require_oracle(run: Path = RUN) -> None:
    """Skip the test where the real store cannot be run; build it where it can."""
    if shutil.which("mvn") is None or shutil.which("java") is None:
        pytest.skip("no Maven and JDK to run the real store with")
    built = subprocess.run(
        [run, "help"], capture_output=True, timeout=_BUILD_SECONDS, check=False, text=True
    )
    if "cannot be resolved" in built.stderr or "Could not resolve" in built.stderr:
        pytest.skip("Maven cannot fetch RocketMQ's jars here")


class Master:
    """A running `oracle/run ha-master`: one command a line, one JSON document back."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

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


@contextmanager
def master(folder: Path, port: int, params: Path | None = None) -> Iterator[Master]:
    """The real master store over a folder, until the block ends."""
    settings = [] if params is None else ["--params", str(params)]
    process = subprocess.Popen(
        [RUN, "ha-master", str(port), str(folder), *settings],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        running = Master(process)
        assert running.answer()["ready"]
        yield running
        assert running.ask("quit")["shutdown"]
        process.wait(_ANSWER_SECONDS)
    finally:
        process.kill()
        process.wait(_ANSWER_SECONDS)
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()
