"""A standalone cluster on loopback: a master, two workers, and a driver that runs jobs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from logquarry.spark.session import java_home
from tests.spark.killing import end_all
from tests.spark.quick_start import QUICK_START

_CLASS = "org.apache.spark.deploy"
_SECONDS = 90


class Cluster:
    """Start a master and workers of one core each; stop them after the block.

    Args:
        folder: folder for logs and the workers' folders.
        workers: number of workers.
    """

    def __init__(self, folder: Path, workers: int = 2) -> None:
        import pyspark

        self._folder = folder
        self._home = Path(pyspark.__file__).parent
        self._workers = workers
        self._stack = ExitStack()
        self.master = ""

    def __enter__(self) -> Cluster:
        with ExitStack() as stack:
            place = ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
            log = stack.enter_context(self._daemon("master", f"{_CLASS}.master.Master", *place))
            self.master = _found(log, r"Starting Spark master at (spark://\S+)")
            for number in range(self._workers):
                name = f"worker-{number}"
                own = ("--cores", "1", "--memory", "1g", "-d", str(self._folder / name))
                kind = f"{_CLASS}.worker.Worker"
                stack.enter_context(self._daemon(name, kind, *place, *own, self.master))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextmanager
    def _daemon(self, name: str, kind: str, *arguments: str) -> Any:
        log = self._folder / f"{name}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [str(self._home / "bin" / "spark-class"), kind, *arguments],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ
                | {
                    "JAVA_HOME": str(java_home()),
                    "SPARK_LOCAL_IP": "127.0.0.1",
                    "SPARK_DAEMON_MEMORY": "256m",
                    "SPARK_DAEMON_JAVA_OPTS": QUICK_START,
                    # Executors inherit the environment, and their Python processes inherit it
                    # from them.
                    "PYTHONPATH": os.pathsep.join(sys.path),
                },
            )
        try:
            yield log
        finally:
            _end(process)


class Driver:
    """A process with a session on a cluster, which runs the jobs of `cluster_driver`.

    A separate process, because this one already has its only session.
    """

    def __init__(self, master: str, folder: Path) -> None:
        self._log = folder / "driver.log"
        with self._log.open("wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.spark.cluster_driver", master],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                cwd=folder,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            )

    def do(self, job: str, **given: Any) -> Any:
        """Return the result of a job."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"job": job, "given": given}) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("{"):
                answer = json.loads(line)
                assert "failed" not in answer, answer["failed"]
                return answer["result"]
        raise AssertionError(f"{job}: the driver is gone:\n{self._log.read_text()[-4000:]}")

    def end(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        _end(self._process, wait=30)
        self._process.stdout.close()


def _found(log: Path, pattern: str) -> str:
    """Wait for a text in a log."""
    deadline = time.monotonic() + _SECONDS
    while time.monotonic() < deadline:
        match = re.search(pattern, log.read_text("utf-8", "replace"))
        if match is not None:
            return match[1]
        time.sleep(0.05)
    raise AssertionError(f"{log} does not say {pattern}:\n{log.read_text()[-4000:]}")


def _end(process: subprocess.Popen[Any], wait: float = 0) -> None:
    """End the process and all that it has started, after some seconds by force."""
    below: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        below = psutil.Process(process.pid).children(recursive=True)
    try:
        process.wait(wait)
    except subprocess.TimeoutExpired:
        process.terminate()
    try:
        # A worker ends its executors.
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    end_all(below)
