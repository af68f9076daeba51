"""`verify` finds in each golden store the damage that was done to it.

The table was derived by hand: the name of each `unclean` scenario says its damage. The offsets are
those of the store before the damage: the log ends at END, and the last message starts at LAST. The
damaged message in the middle of the last file starts at MIDDLE, the one in the third-last file at
OLD.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from logquarry.config import StoreConfig
from logquarry.log.layout import StoreLayout
from logquarry.repair.findings import VerifyReport
from logquarry.repair.verification import verify_store
from tests.conformance.golden_facts import SOUND, Scenario

END, LAST, MIDDLE, OLD = 82756, 82623, 78237, 36796
THIRD_BLANK, LAST_FILE = 73370, 73728

LOG2 = "commitlog/00000000000000024576"
LOG3 = "commitlog/00000000000000049152"
LOG4 = "commitlog/00000000000000073728"

ABORT = ("note", "abort_file", "abort", 0)
NO_INDEX = ("note", "index_missing", "index", 0)
LATE_CHECKPOINT = ("note", "checkpoint_ahead", "checkpoint", 0)
STALE_MIDDLE = ("note", "stale_frames", LOG4, MIDDLE + 636)


def queue_file(name: str, start: int) -> str:
    return f"consumequeue/{name}/{start:020d}"


def damage(kind: str, file: str, offset: int) -> tuple[str, str, str, int]:
    return "damage", kind, file, offset


GONE = [
    damage("queue_missing", f"consumequeue/Un{topic}/{queue}", 0)
    for topic in "ABC"
    for queue in (0, 1)
]
ONE_TOPIC_GONE = [damage("queue_missing", f"consumequeue/UnB/{queue}", 0) for queue in (0, 1)]
BEHIND = [
    # The last four entries of each last file were zeroed, but never its first entry.
    damage("queue_behind", queue_file("UnA/0", 1000), 260),
    damage("queue_behind", queue_file("UnA/1", 500), 0),
    damage("queue_behind", queue_file("UnB/0", 0), 400),
    damage("queue_behind", queue_file("UnB/1", 500), 60),
    damage("queue_behind", queue_file("UnC/0", 0), 140),
    damage("queue_behind", queue_file("UnC/1", 0), 200),
]

EXPECTED: dict[str, list[tuple[str, str, str, int]]] = {
    "abort-only": [ABORT],
    "checkpoint-gone": [("note", "checkpoint_missing", "checkpoint", 0), ABORT],
    "checkpoint-zero": [("note", "checkpoint_zero", "checkpoint", 0), ABORT],
    "checkpoint-old": [ABORT],
    "checkpoint-new": [damage("checkpoint_ahead", "checkpoint", 0), ABORT],
    "checkpoint-old-cq-gone": [*GONE, NO_INDEX, ABORT],
    "cq-and-index-gone": [*GONE, NO_INDEX, ABORT],
    "one-topic-gone": [*ONE_TOPIC_GONE, ABORT],
    "cq-behind": [*BEHIND, ABORT],
    "cq-ahead": [
        damage("queue_ahead", queue_file("UnA/0", 1000), 120),
        damage("index_ahead", "index/20261120114502396", 616),
        ABORT,
    ],
    "cq-wrong-size": [
        damage("wrong_file_size", queue_file("UnA/0", 1000), 0),
        damage("queue_behind", queue_file("UnA/0", 1000), 200),
        ABORT,
    ],
    "garbage-tail": [damage("torn_tail", LOG4, END), ABORT],
    "garbage-after-zeros": [damage("torn_tail", LOG4, END), ABORT],
    "half-frame": [damage("torn_tail", LOG4, LAST), ABORT],
    "frame-head-only": [damage("torn_tail", LOG4, LAST), ABORT],
    "crc-middle": [damage("bad_body_crc", LOG4, MIDDLE), ABORT],
    "magic-middle": [damage("bad_magic", LOG4, MIDDLE), ABORT],
    "body-length-middle": [damage("bad_body_length", LOG4, MIDDLE), ABORT],
    "total-size-middle": [damage("bad_length_sum", LOG4, MIDDLE), ABORT],
    "crc-third-last-file": [damage("bad_body_crc", LOG2, OLD), ABORT],
    "blank-lost": [damage("zeroed", LOG3, THIRD_BLANK), ABORT],
    "log-wrong-size": [damage("wrong_file_size", LOG4, LAST_FILE), ABORT],
    "last-log-gone": [damage("missing_file", LOG4, LAST_FILE), LATE_CHECKPOINT, ABORT],
    "log-gone": [damage("missing_file", f"commitlog/{0:020d}", 0), ABORT],
    "noabort-crc-middle": [damage("bad_body_crc", LOG4, MIDDLE), STALE_MIDDLE, LATE_CHECKPOINT],
    "noabort-garbage-tail": [damage("torn_tail", LOG4, END)],
    "noabort-half-frame": [damage("bad_length_sum", LOG4, LAST)],
    "noabort-cq-behind": BEHIND,
    "noabort-cq-ahead": [damage("zeroed", LOG4, MIDDLE), LATE_CHECKPOINT],
    "noabort-cq-and-index-gone": [*GONE, NO_INDEX],
    "noabort-crc-third-last-file": [damage("bad_body_crc", LOG2, OLD)],
    "noabort-last-log-gone": [damage("missing_file", LOG4, LAST_FILE), LATE_CHECKPOINT],
    "noabort-one-topic-gone": ONE_TOPIC_GONE,
}

NOTES_ALONE = {
    "abort-only",
    "checkpoint-gone",
    "checkpoint-zero",
    "checkpoint-old",
}


def found(report: VerifyReport) -> list[tuple[str, str, str, int]]:
    return [(f.severity, f.kind, f.file, f.offset) for f in report.findings]


@pytest.mark.parametrize("stated", [True, False], ids=["config", "no-config"])
@pytest.mark.parametrize("name", SOUND)
def test_sound_stores_have_no_findings(golden: Path, name: str, stated: bool) -> None:
    scenario = Scenario(golden / name)
    config = scenario.config if stated else StoreConfig()
    report = verify_store(StoreLayout.open(scenario.store, config))
    # RocketMQ records nowhere that its retention has deleted the first files.
    expired = {"log_start"} if report.counts["min_offset"] else set()
    assert {f.kind for f in report.findings} == expired
    assert report.counts["messages"] == len(scenario.expected)
    entries = sum(len(queue["entries"]) for queue in scenario.facts["queues"])
    assert report.counts["queue_entries"] <= entries
    blanks = scenario.facts["commitLog"]["blanks"]
    assert report.counts["blanks"] == len(blanks)
    assert report.counts["max_offset"] == scenario.facts["commitLog"]["maxOffset"]


def test_every_damaged_scenario_is_in_the_table(golden: Path) -> None:
    folders = {path.parent.name for path in golden.glob("unclean/*/store")}
    assert folders == set(EXPECTED)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_damaged_stores_have_the_findings_that_were_put_in(golden: Path, name: str) -> None:
    report = verify_store(StoreLayout.open(golden / "unclean" / name / "store"))
    # Queues name the messages that the damage has cost.
    told = [finding for finding in found(report) if finding[1] != "queue_in_damage"]
    assert told == EXPECTED[name]
    assert report.has_damage == (name not in NOTES_ALONE)


@pytest.mark.parametrize("name", ["crc-middle", "noabort-crc-middle", "crc-third-last-file"])
def test_what_recovery_left_behind_the_end_is_a_note(golden: Path, name: str) -> None:
    scenario = Scenario(golden / "unclean" / name, "store-recovered")
    report = verify_store(StoreLayout.open(scenario.store))
    assert report.counts["max_offset"] == scenario.facts["commitLog"]["maxOffset"]
    assert report.counts["messages"] == len(scenario.expected)
    notes = {f.kind for f in report.findings if f.severity == "note"}
    assert "stale_frames" in notes
    assert {f.kind for f in report.findings if f.severity == "damage"} == {"bad_body_crc"}


def test_queue_files_under_later_names_are_found_in_every_queue(
    golden: Path, tmp_path: Path
) -> None:
    scenario = Scenario(golden / "rollover")
    root = shutil.copytree(scenario.store, tmp_path / "store")
    room = scenario.config.queue_file_size
    assert room is not None
    queues = [folder for folder in (root / "consumequeue").glob("*/*") if any(folder.iterdir())]
    for folder in queues:
        for file in sorted(folder.iterdir(), reverse=True):
            file.rename(folder / f"{int(file.name) + 100 * room:020d}")
    report = verify_store(StoreLayout.open(root, scenario.config))
    moved = [f.file for f in report.findings if f.kind == "queue_misplaced"]
    assert sorted(str(Path(file).parent) for file in moved) == sorted(
        str(folder.relative_to(root)) for folder in queues
    )


def test_the_old_dialect_is_sound_too(golden: Path) -> None:
    for name in ("v3-transactions", "v3-transactions-odd", "v3-delay-unloaded"):
        report = verify_store(StoreLayout.open(golden / name / "store"))
        assert not report.has_damage, name
