"""``serve-master`` and ``replicate``: from one store to another, and ended in order."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import logquarry as lq
from tests.cli.helpers import run
from tests.cli.test_process import COMMAND
from tests.replication_pair import fill, log_bytes, opened

SIZES = {
    "mappedFileSizeCommitLog": 65_536,
    "mappedFileSizeConsumeQueue": 2_000,
    "maxHashSlotNum": 500,
    "maxIndexNum": 2_000,
}


@contextmanager
def serving(*arguments: object, ends: int = signal.SIGINT, code: int = 130) -> Iterator[str]:
    """A master's address; the master is told to end at the end of the block."""
    process = subprocess.Popen(
        [*COMMAND, "serve-master", *map(str, arguments), "--listen", "127.0.0.1:0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("serving ")
        yield line.split()[-1]
        process.send_signal(ends)
        assert process.wait(60) == code
    finally:
        process.kill()
        process.wait(60)
        if process.stdout is not None:
            process.stdout.close()


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "sizes.json"
    path.write_text(json.dumps(SIZES))
    return path


def test_a_whole_log_once(tmp_path: Path, config: Path) -> None:
    with opened(tmp_path / "m") as store:
        end = fill(store, 200)
    with serving(tmp_path / "m") as address:
        options = ["--from", 0, "--once", "--config", config]
        result = run("replicate", address, "--into", tmp_path / "s", *options)
        assert f"up to {end}" in result.stderr and result.stdout == ""
        again = run("replicate", address, "--into", tmp_path / "s", "--once", "--quiet")
        assert again.stderr == ""
    for name in ("m", "s"):
        assert not (tmp_path / name / "abort").exists(), "it was closed in order"
    assert log_bytes(tmp_path / "m", end) == log_bytes(tmp_path / "s", end)
    assert "equal" in run("diff", tmp_path / "m", tmp_path / "s").stdout
    run("verify", tmp_path / "s")


def test_the_last_file_and_a_full_history(tmp_path: Path, config: Path) -> None:
    with opened(tmp_path / "m") as store:
        end = fill(store, 300)
    options = ["--once", "--config", config, "--quiet"]
    with serving(tmp_path / "m", ends=signal.SIGTERM, code=143) as address:
        run("replicate", address, "--into", tmp_path / "last", *options)
    with serving(tmp_path / "m", "--full-history", "--transfer-size", "1k") as address:
        run("replicate", address, "--into", tmp_path / "all", *options)
    with lq.MessageStore.open(tmp_path / "last") as last:
        assert (last.min_offset, last.max_offset) == (end - end % 65_536, end)
    with lq.MessageStore.open(tmp_path / "all") as whole:
        assert (whole.min_offset, whole.max_offset) == (0, end)


def test_a_store_of_another_master_is_refused(tmp_path: Path, config: Path) -> None:
    for name, body in (("m", b"one"), ("s", b"two")):
        with opened(tmp_path / name) as store:
            store.put(lq.Message("t", body=body))
    with serving(tmp_path / "m", "--config", config) as address:
        options = ["--into", tmp_path / "s", "--config", config]
        result = run("replicate", address, *options, code=4)
    assert "logquarry diff" in result.stderr and str(tmp_path / "s") in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["replicate", "nowhere", "--into", "s"],
        ["replicate", "127.0.0.1:99999", "--into", "s"],
        ["replicate", "127.0.0.1:1"],
        ["replicate", "127.0.0.1:1", "--into", "s", "--tls-ca", "x"],
        ["replicate", "127.0.0.1:1", "--into", "s", "--from", str(1 << 63)],
        ["serve-master", "m", "--listen", "10912"],
        ["serve-master", "m", "--allow", "everybody"],
        ["serve-master", "m", "--rate", "quick"],
        ["serve-master", "m", "--tls-key", "x"],
        ["serve-master", "m", "--tls-cert", "not-there.pem"],
        ["serve-master", "m", "--max-connections", "0"],
    ],
)
def test_usage(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(*arguments, code=2)
    assert not list(tmp_path.iterdir()), "nothing is made"


def test_no_store_is_made_to_be_served(tmp_path: Path) -> None:
    result = run("serve-master", tmp_path / "m", "--listen", "127.0.0.1:0", code=3)
    assert str(tmp_path / "m") in result.stderr and not list(tmp_path.iterdir())
