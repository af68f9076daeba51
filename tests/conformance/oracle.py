"""RocketMQ's own store as a process (`oracle/run`); needs a JDK and Maven."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, Any

import pytest

RUN = Path(__file__).parents[2] / "oracle" / "run"
_BUILD_SECONDS = 600
_ANSWER_SECONDS = 60
_CLOSE_SECONDS = 120
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


def free_ports() -> Iterator[int]:
    """Ports that are free, as are their neighbours.

    RocketMQ's broker also listens at the port above (replication) and at the second one below (VIP
    channel). The ports are below those that the system gives to clients; otherwise a client that
    connects meanwhile could get one of them.
    """
    for port in random.sample(range(10_002, 32_000, 4), 1_000):
        try:
            with ExitStack() as probes:
                for one in (port - 2, port, port + 1):
                    probe = probes.enter_context(socket.socket())
                    probe.bind(("127.0.0.1", one))
        except OSError:
            continue
        yield port


def free_port() -> int:
    return next(free_ports())


class Master:
    """A running `oracle/run ha-master`, `ha-slave` or `broker`, or what answers like one: one
    command a line, one JSON document back.

    Args:
        process: it runs, and takes commands.
        errors: what it writes to its standard error.

    Attributes:
        ready: what it said when it was ready.
    """

    def __init__(self, process: subprocess.Popen[str], errors: IO[bytes]) -> None:
        self._process = process
        self._errors = errors
        self.ready: dict[str, Any] = {}

    def ask(self, command: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            said = self._errors.read()[-4_000:].decode(errors="replace")
            raise AssertionError(f"RocketMQ ended without an answer: {said}")
        document: dict[str, Any] = json.loads(line)
        return document

    def quit(self) -> None:
        """End it in order."""
        assert self.ask("quit")["shutdown"]
        self._process.wait(_ANSWER_SECONDS)

    def close(self) -> None:
        """End a broker in order: it ends with its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(_CLOSE_SECONDS)

    def kill(self) -> None:
        """End it as a crash does; a second call does nothing."""
        # The shell script becomes the JVM (exec): there is no other process.
        self._process.kill()
        self._process.wait(_ANSWER_SECONDS)
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                stream.close()


def started(*command: str | Path, cwd: Path | None = None) -> Master:
    """Start a process that is ready for commands; the caller kills it."""
    errors = tempfile.TemporaryFile()  # noqa: SIM115 -- Master.kill closes it
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        cwd=cwd,
        env={"ORACLE_JVM": QUICK_JVM} | os.environ,
    )
    running = Master(process, errors)
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


@contextmanager
def broker(root: Path, params: dict[str, Any]) -> Iterator[str]:
    """RocketMQ's broker over a store, until the block ends; gives the address of its name server.

    Args:
        params: settings of the store, by RocketMQ's names; they are written to a file beside it.
    """
    settings = root.parent / "params.json"
    settings.write_text(json.dumps(params))
    ports = (str(port) for port in islice(free_ports(), 2))
    running = started(RUN, "broker", *ports, root, "--params", settings)
    try:
        yield str(running.ready["namesrv"])
        running.close()
    finally:
        running.kill()
