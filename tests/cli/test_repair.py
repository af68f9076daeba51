"""``recover``, ``rebuild`` and ``diff``: the verdict first, then places, then the next command."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

import logquarry as lq
from logquarry.cli.output import Output
from logquarry.cli.repair import _show_rebuild
from logquarry.disk.disk import Disk
from logquarry.repair.rebuild.build import FileCount, QueueReport, RebuildReport
from tests.helpers.command import run
from tests.helpers.hostile_store import EVIL_TOPIC
from tests.helpers.small_store import facts, opened

COUNT = 40


def document(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def next_commands(result: Result) -> list[list[str]]:
    """The commands that the output tells the user to type."""
    return [
        shlex.split(match[1])[1:]
        for match in re.finditer(r"^[a-z ]+: +(logquarry .*)$", result.stdout, re.MULTILINE)
    ]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with opened(tmp_path / "a store") as writer:
        for number in range(COUNT):
            writer.put(lq.Message("orders", b"%d" % number * 40, keys=f"k{number}"))
    return tmp_path / "a store"


@pytest.fixture
def crashed(store: Path) -> Path:
    (store / "abort").touch()
    shutil.rmtree(store / "consumequeue")
    return store


# ------------------------------------------------------------------------------------- recover
def test_recover_by_its_own_words(crashed: Path) -> None:
    before = facts(crashed)
    result = run("recover", crashed, code=1)
    assert facts(crashed) == before
    first = result.stdout.splitlines()[0]
    assert first.startswith(f"{crashed}: needs recovery, ") and "nothing was changed" in first
    assert "build queue: consumequeue/orders/0 at 0, 800 bytes" in result.stdout
    (command,) = next_commands(result)
    done = run(*command)
    assert done.stdout.splitlines()[0].startswith(f"{crashed}: recovered in ")
    again = run("recover", crashed)
    assert again.stdout.splitlines()[0] == f"{crashed}: nothing to do"
    assert next_commands(again) == []
    with lq.MessageStore.open(crashed, mode="rw") as writer:
        assert writer.queue_offsets("orders", 0).max == COUNT


def test_recover_as_a_document(crashed: Path) -> None:
    plan = document(run("recover", crashed, "--json", code=1))
    assert plan["needed"] is True and plan["applied"] is False and plan["mode"] == "safe"
    assert plan["store"] == str(crashed) and plan["refused"] is None
    assert {step["kind"] for step in plan["steps"]} >= {"build_queue", "remove"}
    done = document(run("recover", crashed, "--apply", "--json"))
    assert done["applied"] is True and done["steps"] == plan["steps"]
    after = document(run("recover", crashed, "--apply", "--json"))
    assert after["needed"] is after["applied"] is False and after["steps"] == []


def test_refused_and_unreadable(store: Path, tmp_path: Path) -> None:
    with lq.MessageStore.open(store, mode="rw"):
        for command in (["recover"], ["recover", "--apply"], ["rebuild", "--in-place", "--apply"]):
            result = run(command[0], store, *command[1:], code=4)
            assert result.stderr.startswith("error: ")
            assert f"this program (process {os.getpid()}) has the store open" in result.stderr
            assert not result.stdout
    for name in ("recover", "rebuild"):
        run(name, tmp_path / "nothing", code=3)
    run("diff", store, tmp_path / "nothing", code=3)


# ------------------------------------------------------------------------------------- rebuild
def test_rebuild_by_its_own_words(store: Path) -> None:
    harmed = store / "consumequeue" / "orders" / "0" / f"{0:020d}"
    sound = harmed.read_bytes()
    harmed.write_bytes(bytes(len(sound)))
    before = facts(store)
    result = run("rebuild", store)
    assert facts(store) == before
    first = result.stdout.splitlines()[0]
    assert first == (
        f"{store}: would rebuild consume queues and index from the log; nothing was changed"
    )
    check, _elsewhere, in_place = next_commands(result)
    assert check[0] == "verify"
    run(*check, code=1)
    done = run(*in_place)
    assert done.stdout.splitlines()[0] == f"{store}: consume queues and index rebuilt in place"
    assert f"{COUNT} messages" in done.stdout and "1 queue of 1 topic" in done.stdout
    assert f"{store}/.logquarry/quarantine/rebuild-" in done.stdout
    assert harmed.read_bytes() == sound
    (check,) = next_commands(done)
    run(*check)


@pytest.mark.parametrize(
    ("old", "option"),
    [
        (["consumequeue", "batchconsumequeue"], "--queues"),
        (["consumequeue_rocksdb"], "--queues"),
        (["index"], "--index"),
        (["consumequeue", "batchconsumequeue", "index"], None),
    ],
)
def test_next_steps_of_a_rebuild_keep_its_parts(
    old: list[str], option: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    report = RebuildReport(
        store="s",
        into=None,
        is_applied=False,
        is_live=False,
        has_abort=False,
        old=dict.fromkeys(old, FileCount(1, 20)),
        log_start=0,
    )
    _show_rebuild(Output(), report, "s", None)
    commands = re.findall(r"logquarry (rebuild .*)", capsys.readouterr().out)
    more = "" if option is None else f" {option}"
    assert commands == [f"rebuild s --into DIR{more}", f"rebuild s --in-place --apply{more}"]


@pytest.mark.parametrize(
    ("end", "words"),
    [(30, "it may have ended after queue offset 30"), (0, "its end cannot be kept")],
)
def test_a_rebuild_names_queues_whose_end_is_not_sure(
    end: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    report = RebuildReport(
        store="s",
        into=None,
        is_applied=True,
        is_live=False,
        has_abort=False,
        old={"consumequeue": FileCount(1, 20)},
        log_start=100,
        queues=(QueueReport("a", 1, end, end, 0, 0, is_taken_over=True, is_end_sure=False),),
    )
    _show_rebuild(Output(), report, "s", None)
    shown = capsys.readouterr().out
    assert "queues whose end is uncertain" in shown
    assert f"a/1: the old files are unusable, and {words}: new messages begin" in shown


def test_rebuild_as_a_document(store: Path, tmp_path: Path) -> None:
    dry = document(run("rebuild", store, "--json"))
    assert dry["applied"] is False and dry["messages"] is dry["queues"] is dry["index"] is None
    assert dry["old"]["consumequeue"] == {"files": 2, "bytes": 800}
    made = document(run("rebuild", store, "--into", tmp_path / "new", "--queues", "--json"))
    assert made["applied"] is True and made["into"] == str(tmp_path / "new")
    assert made["index"] is None and made["old"].keys() == {"consumequeue"}
    assert made["queues"] == [
        {
            "topic": "orders",
            "queue_id": 0,
            "min_offset": 0,
            "max_offset": COUNT,
            "fillers": 0,
            "restarts": 0,
            "harmed": 0,
            "taken_over": False,
            "end_sure": True,
        }
    ]
    with_index = document(run("rebuild", store, "--into", tmp_path / "new", "--index", "--json"))
    assert with_index["index"]["keys"] == COUNT
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["consumequeue", "index"]


@pytest.mark.parametrize(
    "options",
    [["--apply"], ["--into", "x", "--in-place"], ["--into", "x", "--apply"]],
)
def test_rebuild_takes_no_half_orders(store: Path, options: list[str]) -> None:
    before = facts(store)
    run("rebuild", store, *options, code=2)
    assert facts(store) == before


def test_rebuild_tells_of_damage_and_of_a_crash(store: Path) -> None:
    path = store / "commitlog" / f"{0:020d}"
    data = bytearray(path.read_bytes())
    with lq.MessageStore.open(store) as reader:
        lost = list(reader.scan())[7].physical_offset
    data[lost + 5] ^= 1
    path.write_bytes(data)
    (store / "abort").touch()
    result = run("rebuild", store, "--in-place", "--apply")
    assert "orders/0: the log has lost 1 message" in result.stdout
    assert f"{path} at {lost}, " in result.stdout
    (command,) = next_commands(result)
    assert command[0] == "recover"
    run(*command, code=1)


def test_hostile_names_stay_text(small_store: Path, tmp_path: Path) -> None:
    result = run("rebuild", small_store, "--into", tmp_path / "new")
    assert "\x1b" not in result.stdout and "\u202e" not in result.stdout
    # The topic has control characters, so it cannot be a folder name.
    assert "it holds a slash or a control character" in result.stdout
    shutil.copytree(small_store, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / "consumequeue" / EVIL_TOPIC)
    result = run("diff", small_store, tmp_path / "copy", code=1)
    assert "\x1b" not in result.stdout and "\u202e" not in result.stdout


# ---------------------------------------------------------------------------------------- diff
def test_diff_by_its_own_words(store: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(store, copy)
    result = run("diff", store, copy)
    assert result.stdout.startswith("equal: ")
    assert next_commands(result) == []
    with lq.MessageStore.open(store, mode="rw") as writer:
        writer.put(lq.Message("orders", b"one more"))
        message = writer.message_at(0)
    result = run("diff", store, copy)
    assert result.stdout.startswith("equal in the range that both have: ")
    assert "b ends at " in result.stdout
    path = copy / "commitlog" / f"{0:020d}"
    data = bytearray(path.read_bytes())
    data[message.size - 1] ^= 1
    path.write_bytes(data)
    result = run("diff", store, copy, code=1)
    assert result.stdout.startswith(f"diverged at physical offset {message.size - 1}: ")
    assert re.search(
        r"a  message at 0, \d+ bytes: orders, queue 0 offset 0, stored ", result.stdout
    )
    assert str(path) in result.stdout
    commands = next_commands(result)
    assert [command[0] for command in commands] == ["verify", "verify"]
    assert document(run("diff", store, copy, "--json", code=1))["verdict"] == "diverged"


def test_diff_as_a_document(store: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(store, copy)
    shutil.rmtree(copy / "consumequeue")
    found = document(run("diff", store, copy, "--json", code=1))
    assert found["a"] == str(store) and found["b"] == str(copy)
    assert found["verdict"] == "diverged" and found["divergence"] is None
    end = found["log"]["a"]["max_offset"]
    assert found["log"]["compared"] == [0, end]
    assert [part["different_bytes"] for part in found["log"]["parts"]] == [0, 0][
        : len(found["log"]["parts"])
    ]
    (queue,) = found["queues"]
    assert queue["state"] == "differs" and queue["b"] is None
    assert queue["difference"]["queue_offset"] == 0
    assert queue["difference"]["a"]["physical_offset"] == 0
    assert queue["difference"]["b"] is None


def test_a_broken_link_of_the_queues_ends_with_a_next_step(
    small_store: Path, tmp_path: Path
) -> None:
    shutil.rmtree(small_store / "consumequeue", ignore_errors=True)
    (small_store / "consumequeue").symlink_to(tmp_path / "missing")
    for command in ("verify", "recover", "info"):
        shown = run(command, small_store, code=3)
        assert f"next: do what the error says, then: logquarry {command}" in shown.output


@pytest.mark.parametrize("part", [(), ("--queues",)])
def test_a_folder_that_cannot_be_renamed_ends_with_the_next_step(
    small_store: Path, monkeypatch: pytest.MonkeyPatch, part: tuple[str, ...]
) -> None:
    before = Disk.rename

    def refuse(disk: Disk, path: Path, to: Path) -> None:
        if path == small_store / "consumequeue":
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        before(disk, path, to)

    monkeypatch.setattr(Disk, "rename", refuse)
    shown = run("rebuild", small_store, "--in-place", "--apply", *part, code=4)
    assert "consumequeue: it cannot be renamed (Device or resource busy)" in shown.stderr
    typed = " ".join(["logquarry rebuild", str(small_store), *part, "--into DIR"])
    assert shown.stderr.splitlines()[-1] == f"next: {typed}"
