"""Reading commands in a Python that lacks the calls of Linux: a simulation of macOS and Windows."""

from __future__ import annotations

import ntpath
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from logquarry.log.store_names import absolute
from tests.helpers import other_system

WORDS = (
    ("info", "STORE", "--json"),
    ("messages", "STORE", "--jsonl"),
    ("verify", "STORE", "--json"),
    ("export", "STORE", "--format", "jsonl", "--to", "-"),
    ("export", "STORE", "--to", "PARQUET"),
    ("recover", "STORE"),
    ("salvage", "STORE"),
)


def run(system: str, *words: object) -> subprocess.CompletedProcess[str]:
    """Run a command as on another system; the kernels' machine code would be this system's."""
    program = [sys.executable, str(Path(other_system.__file__)), system]
    environ = {**os.environ, "LOGQUARRY_KERNELS": "off"}
    return subprocess.run(
        [*program, *map(str, words)], env=environ, capture_output=True, text=True, check=False
    )


def here(*words: object) -> str:
    """The output of a command on this system."""
    command = [sys.executable, "-m", "logquarry", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_reading_and_verifying_need_no_call_of_linux(
    system: str, golden: Path, tmp_path: Path
) -> None:
    store = golden / "batch" / "store"
    for words in WORDS:
        names = [
            {"STORE": str(store), "PARQUET": str(tmp_path / "parquet")}.get(w, w) for w in words
        ]
        done = run(system, *names)
        assert done.returncode == 0, (words, done.stderr)
        if "PARQUET" not in words:
            assert done.stdout == here(*names)
    assert list((tmp_path / "parquet").glob("*.parquet"))


def test_writing_is_refused_in_one_line_without_fcntl(golden: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(golden / "batch" / "store", store)
    before = sorted((p, p.stat().st_mtime_ns) for p in store.rglob("*"))
    for words in (["recover", store, "--apply"], ["salvage", store, "--into", tmp_path / "new"]):
        done = run("win32", *words)
        assert done.returncode == 4
        assert "can read stores, but not write them" in done.stderr.splitlines()[0]
        assert "Traceback" not in done.stderr
    assert sorted((p, p.stat().st_mtime_ns) for p in store.rglob("*")) == before
    assert not (tmp_path / "new").exists()


def test_paths_of_windows_get_slashes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sep", "\\")
    monkeypatch.setattr(os.path, "abspath", ntpath.abspath)
    assert absolute("C:\\data\\x\\..\\store") == "C:/data/store"
