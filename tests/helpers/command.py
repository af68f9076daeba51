"""Runs commands in this process, and compares messages with those of golden stores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from logquarry.cli.main import app
from tests.conformance.golden_facts import OUR_NAMES

NAMES = OUR_NAMES | {
    "bornHost": "born_host",
    "storeHost": "store_host",
    "propertiesString": "properties_string",
    "body": "body",
}
"""Golden name -> our name, for fields with equal values."""


def run(*arguments: object, code: int | None = 0) -> Result:
    """Run a command line, and check its exit code if one is given."""
    result = ended(*arguments)
    assert code in (None, result.exit_code), (result.exit_code, result.stdout, result.stderr)
    return result


def jsonl(*arguments: object, code: int = 0) -> list[dict[str, Any]]:
    """The messages that ``messages ... --jsonl`` prints."""
    result = run("messages", *arguments, "--jsonl", code=code)
    return [json.loads(line) for line in result.stdout.splitlines()]


def expected_messages(scenario: Path) -> list[dict[str, Any]]:
    """The messages of a golden store, with our field names."""
    found = []
    for line in (scenario / "expected.jsonl").read_text("utf-8").splitlines():
        golden = json.loads(line)
        message = {ours: golden[name] for name, ours in NAMES.items()}
        # For a missing property Java returns '' here and null elsewhere.
        message["keys"] = golden["keys"] or None
        message["uniq_key"] = golden["properties"].get("UNIQ_KEY")
        message["tags"] = golden["properties"].get("TAGS")
        found.append(message)
    return found


def same_as_golden(ours: list[dict[str, Any]], scenario: Path) -> None:
    """Compare messages field by field."""
    expected = expected_messages(scenario)
    assert len(ours) == len(expected)
    for mine, theirs in zip(ours, expected, strict=True):
        assert {name: mine[name] for name in theirs} == theirs


def ended(*arguments: object) -> Result:
    """Run a command line that may end with any exit code."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result
