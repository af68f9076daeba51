"""``logquarry broker``: serves until a signal, and closes the store; refuses what is unsafe."""

from __future__ import annotations

import asyncio
import io
import os
import pty
import re
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.protocol.remoting_codes import RequestCode
from tests.helpers.broker_client import connected, serving
from tests.helpers.command import run
from tests.helpers.slow_disk import log_no_slow_disk

COMMAND = [sys.executable, "-m", "logquarry"]
PATIENCE_SECONDS = 120
TERMINAL = {"TERM": "xterm", "COLUMNS": "80", "LINES": "24"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_it_serves_until_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    config = tmp_path / "broker.conf"
    config.write_text("mappedFileSizeCommitLog=1048576\n")
    words = ["broker", str(tmp_path / "s"), "--listen", "127.0.0.1:0", "--name-port", "0"]
    limited = ["sh", "-c", 'ulimit -S -n 200; ulimit -H -n 300; exec "$@"', "sh"]
    process = subprocess.Popen(
        [*limited, *COMMAND, *words, "--config", str(config)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        ready = re.fullmatch(
            r"serving (\S+) at (127\.0\.0\.1:\d+), name server (127\.0\.0\.1:\d+)\n",
            process.stdout.readline(),
        )
        assert ready is not None, process.communicate()

        async def send() -> None:
            client = await connected(ready[2])
            assert (await client.send("t", b"kept")).code == 0
            await client.close()

        asyncio.run(send())
        # Clients need more open files than many systems allow by default.
        if sys.platform == "linux":
            assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == (300, 300)
        process.send_signal(number)
        process.wait(PATIENCE_SECONDS)
    finally:
        process.kill()
        _, errors = process.communicate()
    # 128 and the number of the signal.
    assert process.returncode == 128 + number, errors
    with lq.MessageStore.open(tmp_path / "s") as store:
        assert [message.body for message in store.scan("t")] == [b"kept"]
        assert not store.has_abort


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--listen", "0.0.0.0:0"], "reachable from other machines"),
        (["--listen", "10911"], "HOST:PORT"),
        (["--listen", "127.0.0.1:0", "--name-port", "0", "--advertise", "a" * 70], "--advertise"),
        (["--read-only"], "needs STORE"),
        (["s", "--offsets", "o"], "needs --read-only"),
        (["s", "--accounts", "missing.toml"], "missing.toml"),
        (["s", "--tls-key", "key.pem"], "--tls-cert"),
    ],
)
def test_usage(words: list[str], reason: str, tmp_path: Path) -> None:
    result = run("broker", *words, code=3 if "missing.toml" in words else 2)
    assert reason in result.stderr


@pytest.mark.parametrize("option", ["--listen", "--name-port", "--metrics"])
def test_a_port_in_use(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    log_no_slow_disk(monkeypatch)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        words = {"--listen": "127.0.0.1:0", "--name-port": "0"}
        words[option] = port if option == "--name-port" else f"127.0.0.1:{port}"
        result = run("broker", *(word for pair in words.items() for word in pair), code=2)
    assert result.stderr == (
        f"error: cannot listen on 127.0.0.1:{port}: the port is in use; "
        f"end the process that uses it, or give another ({option})\n"
    )
    assert result.stdout == ""


def test_an_unknown_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    # The answer of a real resolver depends on the network.
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    result = run("broker", "--listen", "nohost.invalid:1", "--insecure", code=2)
    assert "the host nohost.invalid is unknown" in result.stderr


def test_the_table_on_a_terminal(tmp_path: Path) -> None:
    """It shows the groups with the most lag, in at most as many rows as the terminal has."""
    from rich.console import Console

    from logquarry.cli.broker import _View

    async def scenario() -> list[str]:
        async with serving(tmp_path / "s") as (broker, client):
            for _ in range(3):
                assert (await client.send("t")).code == 0
            for number in range(9):
                await client.heartbeat(group=f"g{number}", producer="p")
            for group, offset in ("g4", 1), ("g7", 0):
                where = {"consumerGroup": group, "topic": "t", "queueId": 0}
                commit = where | {"commitOffset": offset}
                assert (await client.ask(RequestCode.UPDATE_CONSUMER_OFFSET, commit)).code == 0
            # The broker knows the ends of the queues that are read.
            while (await client.pull("t", 2, consumerGroup="g0")).code != 0:
                await asyncio.sleep(0.01)
            view = _View(broker)
            assert view.table(20).caption is None
            console = Console(width=80, file=io.StringIO())
            with console.capture() as printed:
                console.print(view.table(4))
            return printed.get().splitlines()

    lines = asyncio.run(asyncio.wait_for(scenario(), PATIENCE_SECONDS))
    assert "1 connection," in lines[0]
    rows = [[word.strip() for word in line.split("│")[1:-1]] for line in lines if "│" in line]
    assert rows == [
        ["g7", "consumer", "1", "t", "3"],
        ["g4", "consumer", "1", "t", "2"],
        ["g0", "consumer", "1", "t", "0"],
        ["g1", "consumer", "1", "t", "0"],
    ]
    assert "6 more groups" in lines[-1]


def test_a_terminal_shows_the_table() -> None:
    screen, terminal = pty.openpty()
    words = ["broker", "--listen", "127.0.0.1:0", "--name-port", "0"]
    with subprocess.Popen(
        [*COMMAND, *words], stdout=subprocess.DEVNULL, stderr=terminal, env=os.environ | TERMINAL
    ) as process:
        os.close(terminal)
        shown = b""
        try:
            while b"0 connections, in 0/s, out 0/s" not in shown:
                shown += os.read(screen, 1 << 16)
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE_SECONDS) == 130
        finally:
            process.kill()
            os.close(screen)
