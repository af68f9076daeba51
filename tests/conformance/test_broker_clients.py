"""RocketMQ's clients in Go, Python (C++) and Node.js with our broker, if they can be installed."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.broker import BrokerOptions, background
from logquarry.broker.acl import AccessControl, Account
from logquarry.protocol.remoting_codes import RequestCode
from tests.conformance.oracle import RUN
from tests.helpers.broker_client import connected

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROGRAMS = RUN.parent / "clients"
REPOSITORY = Path(__file__).parents[2]
CONFIG = lq.StoreConfig(mapped_file_size_commit_log=1 << 26)


def install(*command: str | Path, cwd: Path) -> None:
    """Run an installer; skip the test if it cannot install."""
    if shutil.which(str(command[0])) is None:
        pytest.skip(f"no {command[0]} here")
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=600, check=False
    )
    if done.returncode:
        pytest.skip(f"{command[0]} cannot install the client here: {done.stderr[-300:]}")


async def create(address: str, topic: str) -> None:
    client = await connected(address)
    fields = {"topic": topic, "readQueueNums": 4, "writeQueueNums": 4, "perm": 6}
    assert (await client.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, fields)).code == 0
    await client.close()


def outcome(
    path: Path,
    *command: str | Path,
    cwd: Path,
    topic: str | None = None,
    options: BrokerOptions | None = None,
    keys: tuple[str, ...] = (),
) -> list[str]:
    """The lines that a program prints: OK or FAIL for each scenario."""
    with background(path, options=options, config=CONFIG) as broker:
        if topic is not None:
            asyncio.run(create(broker.address, topic))
        done = subprocess.run(
            [*command, broker.name_server, *keys],
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith(("OK", "FAIL"))]
    assert lines, done
    return lines


def test_go(tmp_path: Path) -> None:
    install("go", "build", "-o", tmp_path / "client", ".", cwd=PROGRAMS / "go")
    lines = outcome(tmp_path / "s", tmp_path / "client", cwd=tmp_path)
    assert lines == ["OK send", "OK push", "OK pull"]


def test_python(tmp_path: Path) -> None:
    install(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    install(python, "-m", "pip", "install", "-q", "rocketmq==0.4.4", cwd=tmp_path)
    program = python, PROGRAMS / "client.py"
    lines = outcome(tmp_path / "s", *program, cwd=tmp_path)
    assert lines == ["OK send", "OK push", "OK pull", "OK broadcast"]
    # This client has no TLS.
    both = frozenset({"PUB", "SUB"})
    account = Account("client1", "secret1", default_topic=both, default_group=both)
    options = BrokerOptions(acl=AccessControl(account))
    keys = "client1", "secret1"
    lines = outcome(tmp_path / "a", *program, cwd=tmp_path, options=options, keys=keys)
    assert lines == ["OK send", "OK push", "OK pull", "OK broadcast"]


def test_node(tmp_path: Path) -> None:
    shutil.copy(PROGRAMS / "client.js", tmp_path)
    install("npm", "install", "--silent", "ali-ons@3.12.0", "urllib@2", cwd=tmp_path)
    # This client does not use the route of TBW102: its topics have to exist, as with RocketMQ.
    lines = outcome(tmp_path / "s", "node", "client.js", cwd=tmp_path, topic="t-node")
    assert lines == ["OK send", "OK push", "OK pull"]


def test_the_tutorial(tmp_path: Path) -> None:
    """The blocks of docs/test-without-docker.md, in the environment that the page makes."""
    page = (REPOSITORY / "docs" / "test-without-docker.md").read_text("utf-8")
    commands = re.findall(r"^venv/bin/pip install path/to/logquarry (.+)$", page, re.MULTILINE)
    assert len(commands) == 1
    service, *tests = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "mailer.py").write_text(service)
    (tmp_path / "test_mailer.py").write_text("\n\n".join(tests))
    install(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    install(python, "-m", "pip", "install", "-q", REPOSITORY, *commands[0].split(), cwd=tmp_path)
    done = subprocess.run(
        [python, "-m", "pytest", "-q"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "3 passed" in done.stdout, done.stdout + done.stderr
