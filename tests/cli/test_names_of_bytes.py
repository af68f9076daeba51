"""Paths with bytes that are not UTF-8, and with characters that a terminal must not receive."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from logquarry.cli import options
from tests.helpers.command import jsonl, run
from tests.helpers.exports import export_parquet
from tests.helpers.operator_faults import COUNT, make_store

NAMES = [b"b\xffad", b"new\nline", b"\x1b[31m it's", "bidi\u202e\\".encode()]


def named(folder: Path, name: bytes) -> Path:
    return folder / os.fsdecode(name)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return make_store(tmp_path / "store")


@pytest.mark.parametrize("name", NAMES, ids=repr)
def test_a_shell_reads_the_path_in_a_next_step(tmp_path: Path, store: Path, name: bytes) -> None:
    (store / "abort").touch()
    shown = run("recover", store.rename(named(tmp_path, name)), code=1).stdout
    assert "\x1b" not in shown and "\u202e" not in shown
    step = re.search("next: logquarry recover (.*) --apply", shown)
    assert step is not None
    said = subprocess.run(
        ["bash", "-c", f"printf %s {step[1]}"], capture_output=True, check=True
    ).stdout
    assert said == os.fsencode(named(tmp_path, name))


def test_common_paths_have_common_quotes() -> None:
    assert options.command_line("info", "a b", "ü") == "logquarry info 'a b' 'ü'"


def test_parquet_is_imported_from_any_path(tmp_path: Path, store: Path) -> None:
    source = export_parquet(store, tmp_path / "parquet").rename(named(tmp_path, NAMES[0]))
    run("import", source, tmp_path / "new")
    assert len(jsonl(tmp_path / "new")) == COUNT


@pytest.mark.parametrize("words", ["export STORE --to FOLDER", "compact FOLDER"])
def test_a_folder_of_parquet_needs_a_path_in_utf_8(tmp_path: Path, store: Path, words: str) -> None:
    names = {"STORE": store, "FOLDER": named(tmp_path, NAMES[0])}
    shown = run(*(names.get(word, word) for word in words.split()), code=2).stderr
    assert "b\\udcffad: Parquet and tables need a folder whose path is UTF-8" in shown
