"""Reading commands in a Python that lacks the calls of Linux: a simulation of macOS and Windows."""

from __future__ import annotations

import json
import ntpath
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from logquarry.log.location import absolute
from tests.helpers import other_system
from tests.helpers.command import run


class Done(NamedTuple):
    """The result of a command."""

    code: int
    stdout: str
    stderr: str
    exception: str


def run_on(system: str, *commands: Sequence[object]) -> list[Done]:
    """Run commands as on another system, without kernels: their machine code is this system's."""
    words = json.dumps([[str(word) for word in command] for command in commands])
    done = subprocess.run(
        [sys.executable, str(Path(other_system.__file__)), system, words],
        env={**os.environ, "LOGQUARRY_KERNELS": "off"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [Done(*one) for one in json.loads(done.stdout)]


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_reading_and_verifying_need_no_call_of_linux(
    system: str, golden: Path, tmp_path: Path
) -> None:
    store = golden / "batch" / "store"
    commands = [
        ["info", store, "--json"],
        ["messages", store, "--jsonl"],
        ["verify", store, "--json"],
        ["export", store, "--format", "jsonl", "--to", "-"],
        ["recover", store],
        ["salvage", store],
    ]
    to_parquet = ["export", store, "--to", tmp_path / "parquet"]
    *found, exported = run_on(system, *commands, to_parquet)
    for command, done in zip(commands, found, strict=True):
        assert done.code == 0, (command, done)
        assert done.stdout == run(*command).stdout
    assert exported.code == 0, exported
    assert list((tmp_path / "parquet").glob("*.parquet"))


def test_writing_is_refused_in_one_line_without_fcntl(golden: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(golden / "batch" / "store", store)
    before = sorted((p, p.stat().st_mtime_ns) for p in store.rglob("*"))
    recover, salvage = ["recover", store, "--apply"], ["salvage", store, "--into", tmp_path / "new"]
    for done in run_on("win32", recover, salvage):
        assert done.code == 4, done
        assert "can read stores, but not write them" in done.stderr.splitlines()[0]
    assert sorted((p, p.stat().st_mtime_ns) for p in store.rglob("*")) == before
    assert not (tmp_path / "new").exists()


def test_paths_of_windows_get_slashes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sep", "\\")
    monkeypatch.setattr(os.path, "abspath", ntpath.abspath)
    assert absolute("C:\\data\\x\\..\\store") == "C:/data/store"
