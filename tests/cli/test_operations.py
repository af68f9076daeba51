"""The rows of the operator's page: fault, commands, words of the output; and no dead ends."""

from __future__ import annotations

import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from click.testing import CliRunner, Result

from logquarry.cli.main import app
from tests.helpers.operator_faults import FAULTS, make_store

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"
_TITLE = "## What is wrong, what to type, what you will see"


class Row(NamedTuple):
    """One row of the page: each command with the text about its output."""

    fault: str
    steps: list[tuple[str, str]]


def page_rows() -> list[Row]:
    text = PAGE.read_text("utf-8").split(_TITLE, 1)[1].split("\n## ", 1)[0]
    lines = [line for line in text.splitlines() if line.startswith("| ")][1:]
    rows = []
    for line in lines:
        fault, commands, seen = (cell.strip() for cell in line.strip("| ").split(" | "))
        typed = [command.strip("`") for command in commands.split("<br>")]
        rows.append(Row(fault, list(zip(typed, seen.split("<br>"), strict=True))))
    return rows


ROWS = {row.fault: row for row in page_rows()}


@pytest.fixture(scope="module")
def sound_store() -> Iterator[Path]:
    # Another user must reach the store: pytest's own folders are private.
    folder = Path(tempfile.mkdtemp(prefix="operator-"))
    folder.chmod(0o755)
    yield make_store(folder / "store")
    shutil.rmtree(folder)


@pytest.fixture
def store(sound_store: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    place = sound_store.parent / "case"
    shutil.copytree(sound_store, place / "store")
    monkeypatch.chdir(place)
    yield place / "store"
    shutil.rmtree(place)


def typed(command: str) -> Result:
    words = shlex.split(command.replace("STORE", "store").replace("DIR", "saved"))
    assert words[0] == "logquarry"
    return CliRunner().invoke(app, words[1:])


def test_each_fault_has_a_row() -> None:
    assert ROWS.keys() == FAULTS.keys()
    assert len(ROWS) > 15


@pytest.mark.parametrize("fault", ROWS)
def test_a_row_says_what_happens(fault: str, store: Path) -> None:
    with FAULTS[fault](store):
        for command, seen in ROWS[fault].steps:
            result = typed(command)
            code = re.match(r"exit code (\d+)", seen)
            assert code is not None, seen
            assert result.exit_code == int(code[1]), (command, result.output)
            phrases = re.findall(r"`([^`]+)`", seen)
            assert phrases
            for phrase in phrases:
                words = phrase.replace("STORE", "store")
                # The name stays if the user has to replace it.
                words = words if "--into DIR" in words else words.replace("DIR", "saved")
                pattern = ".*".join(map(re.escape, words.split(" ... ")))
                given = result.output.replace("--into saved", "--into DIR")
                assert re.search(pattern, given), (command, phrase, result.output)


@pytest.mark.parametrize("fault", sorted(set(FAULTS) - {"the disk is full"}))
def test_the_next_steps_lead_to_a_store_without_damage(fault: str, store: Path) -> None:
    """Follow the line ``next:`` from verify on, until no step is left or only steps by hand are."""
    with FAULTS[fault](store):
        command = "logquarry verify store"
        seen = set()
        for _ in range(8):
            result = typed(command)
            lines = result.output.splitlines()
            # CliRunner puts the warnings of the standard error after the output.
            last = [line for line in lines if not line.startswith("warning: ")][-1]
            if not last.startswith("next: ") or ", then: " in last:
                break
            assert (command, result.output) not in seen, "a circle"
            seen.add((command, result.output))
            command = last.removeprefix("next: ")
        else:
            pytest.fail(f"no end: {command}")
        # A usage error (sizes that cannot be inferred) names the option in words.
        assert result.exit_code in (0, 2) or ", then: " in last or result.exit_code == 3
