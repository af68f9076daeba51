"""Every kind of finding has a next step, and a report has one command."""

from __future__ import annotations

import pytest

from logquarry.repair.findings import (
    KINDS,
    Action,
    Next,
    VerifyReport,
    next_step,
)


def report(*kinds: str, store: str = "/data/store", recorded: bool = False) -> VerifyReport:
    made = VerifyReport(store, counts={"log_files": 1})
    for number, kind in enumerate(kinds):
        made.add(kind, "commitlog/0", number, "")
        if recorded:
            made.recorded.add(number)
    return made


def test_notes_are_no_damage() -> None:
    found = report("queue_filler", "bad_body_crc", "queue_missing", "live")
    assert (found.damage_count, found.has_damage) == (2, True)
    assert (report("live").damage_count, report("live").has_damage) == (0, False)


@pytest.mark.parametrize(
    "kind", [name for name, kind in KINDS.items() if kind.severity == "damage"]
)
def test_damage_always_has_a_command(kind: str) -> None:
    assert KINDS[kind].action is not Action.NOTHING
    assert next_step(report(kind)) is not None


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        (("bad_body_crc",), ("recover",)),
        (("bad_body_crc", "queue_missing"), ("recover",)),
        (("queue_missing",), ("rebuild", "--in-place", "--queues")),
        (("index_chain",), ("rebuild", "--in-place", "--index")),
        (("index_chain", "queue_hole"), ("rebuild", "--in-place")),
        (("queue_missing", "abort_file"), ("recover",)),
        (("abort_file",), ("recover",)),
        (("suspect_text",), ("messages", "--offset", "0")),
    ],
)
def test_the_command_of_a_report(kinds: tuple[str, ...], words: tuple[str, ...]) -> None:
    assert next_step(report(*kinds)) == Next(words)


def test_recorded_damage_leads_to_salvage() -> None:
    assert next_step(report("zeroed", recorded=True)) == Next(("salvage", "--into", "DIR"))


def test_notes_need_no_command() -> None:
    assert next_step(report("queue_filler", "index_gap")) is None
    assert next_step(report()) is None


def test_a_live_store_is_stopped_first() -> None:
    assert next_step(report("abort_file", "live")) is None
    found = next_step(report("zeroed", "live"))
    assert found == Next(("recover",), "stop the process that has the store open")


def test_a_store_at_a_url_is_salvaged() -> None:
    found = next_step(report("zeroed", store="s3://bucket/store"))
    assert found == Next(("salvage", "--into", "DIR"))


def test_a_log_without_files_is_not_mounted() -> None:
    made = report("missing_file")
    made.counts["log_files"] = 0
    found = next_step(made)
    assert found is not None and found.words == ("verify",) and "mount the disk" in found.before
