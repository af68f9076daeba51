"""The disk does not deliver a block of one file, for each kind: what the commands show and mend."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from logquarry.log.layout import StoreLayout
from tests.fuzz.faulty_stores import FaultyStore
from tests.fuzz.templates import Template
from tests.helpers import operator_faults
from tests.helpers.command import ended as run

QUEUE = "consumequeue/orders/0/00000000000000000000"
QUEUE_END = "consumequeue/orders/0/00000000000000000400"
NOTE = ".logquarry/damage.json"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Template:
    root = operator_faults.make_store(tmp_path_factory.mktemp("made") / "store")
    (root / NOTE).write_text('{"log_end": 5, "damage": []}')
    return Template("sound", root, {})


@pytest.fixture
def with_bad_block(made: Template, tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Makes a store of which one file has an unreadable first block."""
    store = FaultyStore(made, tmp_path / "faulty")
    with store.probed():

        def spoil(name: str) -> Path:
            path = store.root / name
            store.bad.add(next(path.iterdir()) if path.is_dir() else path, 0)
            return store.root

        yield spoil


FILES = ("checkpoint", ".logquarry/durable", ".logquarry/settings.json", NOTE, QUEUE, "index")


@pytest.mark.parametrize("name", FILES)
def test_recover_replaces_the_file(with_bad_block: Callable[[str], Path], name: str) -> None:
    root = with_bad_block(name)
    found = run("verify", root)
    assert found.exit_code == 1
    assert "unreadable" in found.output
    assert f"next: logquarry recover {root}" in found.output
    assert run("recover", root).exit_code == 1
    assert run("recover", root, "--apply").exit_code == 0
    assert "nothing to do" in run("recover", root).output
    assert run("verify", root).exit_code == 0
    assert len(run("messages", root, "--jsonl").stdout.splitlines()) == operator_faults.COUNT


def test_mode_rocketmq_refuses_an_unreadable_queue(with_bad_block: Callable[[str], Path]) -> None:
    root = with_bad_block(QUEUE)
    (root / "abort").touch()
    shown = run("recover", root, "--apply", "--mode", "rocketmq")
    assert shown.exit_code == 4
    assert "a recovery with `--mode safe` makes the file again" in shown.output
    assert (root / "abort").exists()


@pytest.mark.parametrize("name", ["checkpoint", ".logquarry/durable"])
def test_a_writer_replaces_the_file(with_bad_block: Callable[[str], Path], name: str) -> None:
    import logquarry as lq

    root = with_bad_block(name)
    with lq.MessageStore.open(root, mode="rw") as store:
        store.put(lq.Message("orders", b"new"))
    assert (root / ".logquarry/quarantine" / Path(name).name).is_file()
    assert run("verify", root).exit_code == 0


def test_configuration_comes_from_a_backup(with_bad_block: Callable[[str], Path]) -> None:
    root = with_bad_block("config/topics.json")
    assert "next: put config/topics.json back from a backup" in run("verify", root).output


@pytest.mark.parametrize("name", [QUEUE, QUEUE_END])
@pytest.mark.parametrize("command", ["info", "info --exact", "stats"])
def test_the_rest_is_shown(with_bad_block: Callable[[str], Path], name: str, command: str) -> None:
    root = with_bad_block(name)
    word, *options = command.split()
    shown = run(word, root, *options)
    assert shown.exit_code == 1
    assert "left out: orders queue 0:" in shown.stderr
    assert name in shown.stderr
    assert "log" in shown.stdout and "0 to 56929" in shown.stdout
    document = json.loads(run(word, root, *options, "--json").stdout)
    (left_out,) = document["unreadable"]
    assert (left_out["topic"], left_out["queue_id"]) == ("orders", 0)


def test_metrics_of_the_rest(with_bad_block: Callable[[str], Path]) -> None:
    shown = run("stats", with_bad_block(QUEUE_END), "--prometheus")
    assert shown.exit_code == 1
    assert 'topic="orders"' in shown.stdout


def test_report_of_the_rest(with_bad_block: Callable[[str], Path], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    shown = run("report", with_bad_block(QUEUE_END), "--html", page)
    assert shown.exit_code == 1
    assert page.is_file()


@pytest.fixture(params=["lock", "."])
def refuse_lock(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[int], Path]:
    """Makes a store of which this process may not open the lock, or the folder with the mark."""
    store = operator_faults.make_store(tmp_path / "store")
    refused, before = store / request.param, os.open

    def refuse_with(number: int) -> Path:
        def refuse(at: Any, *more: Any, **options: Any) -> int:
            if str(at) == str(refused):
                raise OSError(number, os.strerror(number), str(at))
            return before(at, *more, **options)

        monkeypatch.setattr(os, "open", refuse)
        return store

    return refuse_with


UNREAD = [errno.EACCES, errno.EMFILE]


@pytest.mark.parametrize("number", UNREAD)
@pytest.mark.parametrize("command", ["info", "stats", "messages", "verify"])
def test_a_reader_takes_a_store_with_an_unreadable_lock_for_open(
    refuse_lock: Callable[[int], Path], command: str, number: int
) -> None:
    store = refuse_lock(number)
    shown = run(command, store)
    assert shown.exit_code == 0
    assert StoreLayout.open(store).is_live()
    warning = f" cannot be read: {os.strerror(number)}: run the command as the store's owner"
    assert shown.stderr.count(warning) == (number != errno.EMFILE)
    if command == "verify":
        assert "a process may have the store open: " in shown.stdout
        assert f"cannot be read: {os.strerror(number)}" in shown.stdout


@pytest.mark.parametrize("number", UNREAD)
@pytest.mark.parametrize("command", ["salvage", "recover"])
def test_a_repair_refuses_a_store_with_an_unreadable_lock(
    refuse_lock: Callable[[int], Path], command: str, number: int
) -> None:
    store = refuse_lock(number)
    before = sorted(store.rglob("*"))
    shown = run(command, store)
    assert (shown.exit_code, shown.stdout) == (4, "")
    step = "raise the process's" if number == errno.EMFILE else "run the command as the store's"
    assert f"cannot be read: {os.strerror(number)}: {step}" in shown.stderr
    assert shown.stderr.splitlines()[-1].startswith("next: do what the error says, then: ")
    assert sorted(store.rglob("*")) == before


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ELOOP, errno.EIO])
def test_a_missing_or_damaged_lock_does_not_prevent_a_repair(
    refuse_lock: Callable[[int], Path], number: int
) -> None:
    shown = run("salvage", refuse_lock(number))
    assert shown.exit_code == 0


@pytest.mark.parametrize(
    "command", ["stats", "stats --prometheus", "retain --older-than 1h --apply"]
)
@pytest.mark.parametrize("number", [errno.EACCES, errno.EMFILE])
def test_offsets_that_this_process_may_not_open_are_no_missing_offsets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, number: int
) -> None:
    store = operator_faults.make_store(tmp_path / "store")
    path = store / "config/consumerOffset.json"
    path.write_text('{"offsetTable": {"orders@g": {"0": 3}}}')
    before = os.open

    def refuse(at: Any, *more: Any, **options: Any) -> int:
        if at == str(path):
            raise OSError(number, os.strerror(number), at)
        return before(at, *more, **options)

    word, *options = command.split()
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse)
        shown = run(word, store, *options)
    assert (shown.exit_code, shown.stdout) == (3 if number == errno.EACCES else 4, "")
    assert f"{path}: cannot be read: {os.strerror(number)}" in shown.stderr
    assert "next: " in shown.stderr
