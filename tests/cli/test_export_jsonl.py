"""``export --format jsonl``: a file with the lines of ``messages``, complete or not there."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from logquarry.cli import output
from logquarry.log import exported
from logquarry.log.codec import Rows
from tests.helpers.command import jsonl, run


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_file_and_stdout(golden: Path, tmp_path: Path) -> None:
    store, target = golden / "real-broker" / "store", tmp_path / "new" / "out.jsonl"
    result = run("export", store, "--to", target, "--format", "jsonl")
    assert not result.stdout and "452 messages" in result.stderr
    found = lines(target)
    assert [{**m, "broker": ""} for m in found] == [{**m, "broker": ""} for m in jsonl(store)]
    printed = run("export", store, "--to", "-", "--format", "jsonl", "--quiet")
    assert [json.loads(line) for line in printed.stdout.splitlines()] == found
    assert not printed.stderr
    # A second export replaces the file.
    run("export", store, "--to", target, "--format", "jsonl", "--topic", "TxTopic", "--limit", 5)
    assert len(lines(target)) == 5
    assert [path.name for path in target.parent.iterdir()] == ["out.jsonl"]


def test_several_stores(golden: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    stores = [golden / name / "store" for name in ("real-broker", "single")]
    run("export", *stores, "--to", target, "--format", "jsonl")
    assert {message["broker"] for message in lines(target)} == {"real-broker", "single"}
    run("export", golden / "[rs]*" / "store", "--to", target, "--format", "jsonl")
    brokers = {message["broker"] for message in lines(target)}
    assert brokers == {"real-broker", "rollover", "single", "sysflags"}
    run("export", *stores, "--to", target, "--format", "jsonl", "--limit", 453)
    assert len(lines(target)) == 453


def test_damage(damaged_store: Path, tmp_path: Path) -> None:
    target = tmp_path / "out" / "x.jsonl"
    run("export", damaged_store, "--to", target, "--format", "jsonl", code=1)
    assert not list(target.parent.iterdir())
    skipping = ["--format", "jsonl", "--on-damage", "skip"]
    result = run("export", damaged_store, "--to", target, *skipping)
    assert len(lines(target)) == 39 and "skipped 1 damaged place" in result.stderr


def test_interrupted(small_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "out" / "x.jsonl"
    target.parent.mkdir()
    target.write_text("before\n")

    def interrupted(_: object, rows: Rows, *rest: object) -> Iterator[tuple[Rows, list[str]]]:
        yield rows, ["{}"]
        raise KeyboardInterrupt

    monkeypatch.setattr(exported, "line_parts", interrupted)
    result = run("export", small_store, "--to", target, "--format", "jsonl", code=130)
    assert "interrupted" in result.stderr
    assert target.read_text() == "before\n"
    assert [path.name for path in target.parent.iterdir()] == ["x.jsonl"]


def test_target_is_a_folder(small_store: Path, tmp_path: Path) -> None:
    run("export", small_store, "--to", tmp_path, "--format", "jsonl", code=2)


def test_mode_of_the_file(small_store: Path, tmp_path: Path) -> None:
    target = tmp_path / "x.jsonl"
    run("export", small_store, "--to", target, "--format", "jsonl")
    plain = tmp_path / "plain"
    plain.touch()
    assert target.stat().st_mode == plain.stat().st_mode


def test_a_store_that_is_read_is_never_written_into(golden: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(golden / "single" / "store", store)
    for target in (store / "checkpoint", store / "commitlog" / "new.jsonl"):
        run("export", store, "--format", "jsonl", "--to", target, code=2)
        run("report", store, "--html", target, code=2)
    original = golden / "single" / "store" / "checkpoint"
    assert (store / "checkpoint").read_bytes() == original.read_bytes()


def test_a_device_is_written_and_a_link_is_followed(golden: Path, tmp_path: Path) -> None:
    real, link = tmp_path / "real.jsonl", tmp_path / "link.jsonl"
    link.symlink_to(real)
    store = golden / "single" / "store"
    run("export", store, "--format", "jsonl", "--to", link)
    assert link.is_symlink()
    assert len(real.read_bytes().splitlines()) == 400
    run("export", store, "--format", "jsonl", "--to", "/dev/null")
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_full_disk_is_named(
    golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, number: int
) -> None:
    def fail(*_: object) -> None:
        # pyarrow's errors lack the path.
        raise OSError(number, "Error writing bytes to file")

    monkeypatch.setattr("logquarry.cli.export._write", fail)
    monkeypatch.setattr("logquarry.cli.spark.export", fail)
    monkeypatch.setattr("logquarry.cli.spark.session_if_installed", lambda _: nullcontext())
    store, target = golden / "real-broker" / "store", tmp_path / "out"
    result = run("export", store, "--to", target, "--format", kind, code=4)
    step = "raise the limit" if number == errno.EFBIG else "free some space"
    assert f"error: {target}: {os.strerror(number)}\nnext: {step}" in result.stderr
    assert not target.exists()


@contextmanager
def reading(path: Path, *, after: float = 0) -> Iterator[list[bytes]]:
    """Read a pipe in a thread, and yield the list to which its content is added."""
    found: list[bytes] = []

    def read() -> None:
        time.sleep(after)
        found.append(path.read_bytes())

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    yield found
    thread.join(60)


@pytest.mark.timeout(60)
def test_a_pipe_is_written_if_a_program_reads_it(
    golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, pipe = golden / "single" / "store", tmp_path / "pipe"
    os.mkfifo(pipe)
    for after in (0, 0.3):
        with reading(pipe, after=after) as found:
            run("export", store, "--to", pipe, "--format", "jsonl")
        assert len(found[0].splitlines()) == len(jsonl(store))
    with reading(pipe) as found:
        run("report", store, "--html", pipe)
    assert found[0].endswith(b"</html>\n") and pipe.is_fifo()
    monkeypatch.setattr(output, "_READER_SECONDS", 0.1)
    for words in (["export", store, "--format", "jsonl", "--to"], ["report", store, "--html"]):
        error = run(*words, pipe, code=2).stderr
        assert error == (
            f"error: {pipe} is a pipe, and no program reads it: start the program that reads it, "
            "or give the path of a file\n"
        )
    assert pipe.is_fifo()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["/dev/fd/{}", "/proc/self/fd/{}"])
def test_a_pipe_without_a_name_is_written(golden: Path, name: str) -> None:
    """As a shell passes it: ``--to >(gzip > messages.gz)``."""
    store = golden / "single" / "store"
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as file:
        try:
            run("export", store, "--to", name.format(writer), "--format", "jsonl", "--limit", 3)
        finally:
            os.close(writer)
        assert len(file.read().splitlines()) == 3


@pytest.mark.parametrize("call", ["tempfile.mkstemp", "pathlib.Path.replace"])
def test_an_error_of_the_temporary_file_names_the_file_itself(
    call: str, golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: object, **_: object) -> None:
        name = str(given[0]) if given else str(tmp_path / ".temporary")
        raise OSError(errno.EIO, os.strerror(errno.EIO), name)

    monkeypatch.setattr(call, fail)
    target = tmp_path / "out.jsonl"
    words = ["export", golden / "single" / "store", "--to", target, "--format", "jsonl"]
    assert run(*words, code=3).stderr == f"error: {target}: Input/output error\n"
    assert not list(tmp_path.iterdir())


def test_the_longest_name_of_a_file(golden: Path, tmp_path: Path) -> None:
    target = tmp_path / ("x" * 255)
    run("export", golden / "single" / "store", "--to", target, "--format", "jsonl", "--limit", 3)
    assert len(lines(target)) == 3
