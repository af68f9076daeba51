"""``retain``: lists expired files, and deletes exactly them with ``--apply``."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

import logquarry as lq
from tests.helpers.command import run
from tests.helpers.small_store import facts, opened

COUNT = 200


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with opened(tmp_path / "a store") as writer:
        for number in range(COUNT):
            writer.put(lq.Message("orders", b"%d" % number * 100, keys=f"k{number}"))
    return tmp_path / "a store"


def test_first_it_only_says(store: Path) -> None:
    before = facts(store)
    result = run("retain", store, "--older-than", "0", "--keep-bytes", "16k")
    first = result.stdout.splitlines()[0]
    assert first.startswith(f"{store}: ")
    assert first.endswith("; nothing was changed")
    assert "commitlog/00000000000000000000  16.0 KiB: its last message was stored" in result.stdout
    assert facts(store) == before
    (command,) = re.findall(r"^next: (logquarry .*)$", result.stdout, re.MULTILINE)
    done = run(*shlex.split(command)[1:])
    assert " deleted, " in done.stdout.splitlines()[0]
    assert not (store / "commitlog" / f"{0:020d}").exists()
    again = run("retain", store, "--older-than", "0", "--keep-bytes", "16k")
    assert again.stdout.splitlines()[0] == f"{store}: nothing has expired"
    assert "next:" not in again.stdout
    run("verify", store)


def test_as_a_document(store: Path) -> None:
    plan = json.loads(
        run("retain", store, "--keep-bytes", "16k", "--max-files", 1, "--json").stdout
    )
    assert plan["rules"] == {
        "older_than_ms": None,
        "max_disk_ratio": None,
        "keep_bytes": 16_384,
        "most_files": 1,
    }
    assert [file["path"] for file in plan["log"]] == [f"commitlog/{0:020d}"]
    assert set(plan["log"][0]) == {"path", "size", "last_timestamp", "reason"}
    assert plan["min_offset"] == 0
    assert plan["new_min_offset"] == 16_384
    assert plan["messages"]["orders"] > 10
    assert not plan["applied"]
    assert plan["refused"] is None
    names = ["store", "rules", "now", "min_offset", "new_min_offset", "max_offset", "log", "queues"]
    names += [
        "index",
        "transactions",
        "bytes",
        "stays_because",
        "disk_ratio",
        "messages",
        "unread",
        "refused",
    ]
    assert list(plan) == [*names, "applied"]
    done = json.loads(
        run("retain", store, "--keep-bytes", "16k", "--max-files", 1, "--json", "--apply").stdout
    )
    assert done["applied"]
    assert done["log"] == plan["log"]


def test_a_disk_that_has_room(store: Path) -> None:
    result = run("retain", store, "--max-disk-ratio", "100%", "--apply")
    assert "nothing has expired" in result.stdout
    assert "100.0% are allowed" in result.stdout


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--apply"],
        ["--max-files", "3"],
        ["--older-than", "soon"],
        ["--max-disk-ratio", "200"],
        ["--keep-bytes", "-3"],
        ["--older-than", "1h", "--max-files", "0"],
    ],
)
def test_what_makes_no_sense(store: Path, words: list[str]) -> None:
    before = facts(store)
    result = run("retain", store, *words, code=2)
    assert "--" in result.stderr
    assert facts(store) == before


def test_refusals(store: Path, tmp_path: Path) -> None:
    with opened(store):
        result = run("retain", store, "--older-than", "0", "--apply", code=4)
        assert "open for writing already" in result.stderr
        looked = run("retain", store, "--older-than", "0")
        assert "--apply is not possible now" in looked.stderr
        assert "next:" not in looked.stdout
    (store / "abort").touch()
    result = run("retain", store, "--older-than", "0", "--apply", code=4)
    assert "recover it first" in result.stderr
    run("retain", tmp_path / "none", "--older-than", "0", code=3)


def test_who_has_not_read_it(store: Path) -> None:
    folder = store / "config"
    folder.mkdir(exist_ok=True)
    table = {"offsetTable": {"orders@bil\x1bling": {"0": 7}}}
    (folder / "consumerOffset.json").write_text(json.dumps(table))
    result = run("retain", store, "--keep-bytes", "16k")
    assert "not read yet by these consumer groups" in result.stdout
    assert "\x1b" not in result.stdout


@pytest.mark.parametrize("name", ["consumerOffset.json", "delayOffset.json"])
@pytest.mark.parametrize("options", [[], ["--apply"]])
def test_a_plan_without_the_offsets_of_groups_warns(
    store: Path, name: str, options: list[str]
) -> None:
    path = store / "config" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text('{"offsetTable": {"orders@g": {"0": 7')
    result = run("retain", store, "--keep-bytes", "16k", *options)
    assert f"warning: {path}: " in result.stderr
