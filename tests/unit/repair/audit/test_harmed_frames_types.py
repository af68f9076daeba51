"""Frames whose transaction type damage has changed. No CRC covers SYSFLAG, which has the type.

An entry of the queue shows that the message was of type NOT or COMMIT: it stays in its queue.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import logquarry as lq
from logquarry.format import batch, sys_flag
from logquarry.format.batch import INNER_BATCH, BatchItem
from logquarry.format.frame import HEAD
from logquarry.log.layout import StoreLayout
from logquarry.read.batch_queue import BATCH_DTYPE
from logquarry.repair.audit.differences import EitherMap
from logquarry.repair.audit.harmed_frames import KIND, HarmedTypes
from logquarry.repair.findings import Finding, next_step
from logquarry.repair.rebuild.rebuild import rebuild
from logquarry.repair.salvage.plan import right_flags
from logquarry.repair.salvage.salvage import salvage_store
from logquarry.repair.verification import verify_store
from logquarry.testing.builder import StoreBuilder
from tests.helpers.files import overwrite
from tests.helpers.harmed_store import (
    log_file,
    queue_bytes,
    require_any_interruption_is_harmless,
    served,
)
from tests.helpers.small_store import NOW, config, opened
from tests.helpers.store_maker import StoreMaker

COUNT = 12
NOT, PREPARED = sys_flag.TRANSACTION_NOT, sys_flag.TRANSACTION_PREPARED
COMMIT, ROLLBACK = sys_flag.TRANSACTION_COMMIT, sys_flag.TRANSACTION_ROLLBACK
HALF = 1_000
"""The physical offset of a half message, to which the COMMIT messages point."""
TAGS = "a"
CHANGES = [(NOT, PREPARED), (NOT, ROLLBACK), (COMMIT, PREPARED), (COMMIT, ROLLBACK)]


def store(root: Path, types: dict[int, int] | None = None, count: int = COUNT) -> list[int]:
    """Fill two queues of a topic in turn; return the physical offsets of the messages.

    ``types`` has the transaction type of some messages, by number.
    """
    with opened(root) as made:
        for number in range(count):
            kind = (types or {}).get(number, NOT)
            message = lq.Message(
                "t",
                b"%d" % number,
                tags=TAGS,
                queue_id=number % 2,
                sys_flag=kind,
                prepared_transaction_offset=HALF if kind in (COMMIT, ROLLBACK) else 0,
            )
            made.put(message)
        return [message.physical_offset for message in made.scan()]


def harm(root: Path, place: int, kind: int, other_bits: int = 0) -> None:
    overwrite(
        log_file(root), place + HEAD.offsets["sys_flag"], (kind | other_bits).to_bytes(4, "big")
    )


def findings(root: Path, stretch_bytes: int = 1 << 20) -> list[Finding]:
    layout = StoreLayout.open(root, config())
    return verify_store(layout, stretch_bytes=stretch_bytes).findings


def kinds(root: Path) -> list[str]:
    return [found.kind for found in findings(root) if found.severity == "damage"]


# ------------------------------------------------------------------------------------------ verify
@pytest.mark.parametrize("stretch_bytes", [1, 300, 1 << 20])
@pytest.mark.parametrize("stored", [PREPARED, ROLLBACK])
@pytest.mark.parametrize("number", [0, 1, 4, COUNT - 2, COUNT - 1])
def test_the_finding_names_place_and_types(
    number: int, stored: int, stretch_bytes: int, tmp_path: Path
) -> None:
    places = store(tmp_path)
    harm(tmp_path, places[number], stored)
    (found,) = findings(tmp_path, stretch_bytes=stretch_bytes)
    assert (found.kind, found.severity) == ("harmed_transaction_type", "damage")
    assert found.file == f"commitlog/{log_file(tmp_path).name}"
    assert found.offset == places[number]
    name = {PREPARED: "PREPARED", ROLLBACK: "ROLLBACK"}[stored]
    assert found.reason == (
        f"the frame has the transaction type {name}, but queue {number % 2} of t has the message "
        f"at {number // 2}: the right type is NOT or COMMIT"
    )


@pytest.mark.parametrize("stored", [PREPARED, ROLLBACK])
def test_the_right_type_of_a_transaction_is_commit(stored: int, tmp_path: Path) -> None:
    places = store(tmp_path, {4: COMMIT})
    assert not findings(tmp_path)
    harm(tmp_path, places[4], stored)
    (found,) = findings(tmp_path)
    assert found.reason.endswith("queue 0 of t has the message at 2: the right type is COMMIT")


def test_one_finding_for_each_queue(tmp_path: Path) -> None:
    places = store(tmp_path)
    for number in (2, 3, 4, 6):
        harm(tmp_path, places[number], PREPARED)
    assert [(one.offset, one.reason[-5:]) for one in findings(tmp_path)] == [
        (places[2], " more"),
        (places[3], "OMMIT"),
    ]


@pytest.mark.parametrize("stored", [PREPARED, ROLLBACK])
def test_all_types_of_a_queue_may_be_harmed(stored: int, tmp_path: Path) -> None:
    for place in store(tmp_path):
        harm(tmp_path, place, stored)
    found = findings(tmp_path)
    assert [one.kind for one in found] == ["harmed_transaction_type"] * 2
    assert found[0].reason.endswith(f", and {COUNT // 2 - 1} more")


def test_the_only_message_of_a_queue(tmp_path: Path) -> None:
    places = store(tmp_path, count=1)
    harm(tmp_path, places[0], ROLLBACK)
    assert kinds(tmp_path) == ["harmed_transaction_type"]


def test_the_next_step(tmp_path: Path) -> None:
    places = store(tmp_path)
    harm(tmp_path, places[3], PREPARED)
    step = next_step(verify_store(StoreLayout.open(tmp_path, config())))
    assert step is not None
    assert step.words == ("salvage", "--into", "DIR")


def test_other_bits_do_not_matter(tmp_path: Path) -> None:
    places = store(tmp_path)
    harm(tmp_path, places[3], PREPARED, sys_flag.MULTI_TAGS)
    assert kinds(tmp_path) == ["harmed_transaction_type"]


@pytest.mark.parametrize("counts", [[40] * 5, [1, 40, 40, 1, 40], [40, 1, 1], [40]])
def test_inner_batches_of_a_batch_queue(counts: list[int], tmp_path: Path) -> None:
    """The neighbour of an entry can be more than 16 messages away."""
    flags = INNER_BATCH | sys_flag.NEED_UNWRAP
    root = tmp_path / "store"
    maker, base = StoreMaker(log_file_size=1 << 16), 0
    entries = np.zeros(len(counts), BATCH_DTYPE)
    for count, entry in zip(counts, entries, strict=True):
        properties = f"INNER_BASE\x01{base}\x02INNER_NUM\x01{count}".encode()
        body = batch.encode([BatchItem(b"m")] * count)
        frame = maker.put("t", body=body, sys_flag=flags, queue_offset=base, properties=properties)
        values = frame.physical_offset, frame.size, 0, frame.store_timestamp, base, count, -1, 0
        for name, value in zip(BATCH_DTYPE.names or (), values, strict=True):
            entry[name] = value
        base += count
    maker.write(root)
    shutil.rmtree(root / "consumequeue")
    folder = root / "batchconsumequeue/t/0"
    folder.mkdir(parents=True)
    (folder / f"{0:020d}").write_bytes(entries.tobytes().ljust(46 * 100, b"\0"))
    sound = queue_bytes(root, "batchconsumequeue")
    assert not verify_store(StoreLayout.open(root)).has_damage
    for frame in maker.frames:
        harm(root, frame.physical_offset, PREPARED, flags)
        found = verify_store(StoreLayout.open(root)).findings
        assert [one.kind for one in found if one.severity == "damage"] == [KIND]
    rebuild(root, into=tmp_path / "new", clock=lambda: NOW)
    assert queue_bytes(tmp_path / "new", "batchconsumequeue") == sound
    lq.recover(root, apply=True)
    assert queue_bytes(root, "batchconsumequeue") == sound


# ------------------------------------------------------------------------------- what is no finding
def test_half_messages_and_rollbacks_are_no_damage(tmp_path: Path) -> None:
    """They are in no queue, and have the queue offset 0, which another message has."""
    store(tmp_path, {0: PREPARED, 3: ROLLBACK, 5: COMMIT, 6: PREPARED, COUNT - 1: ROLLBACK})
    assert not findings(tmp_path)


@pytest.mark.parametrize(("right", "stored"), [(NOT, COMMIT), (COMMIT, NOT)])
def test_a_type_with_the_same_entries_is_unknown(right: int, stored: int, tmp_path: Path) -> None:
    places = store(tmp_path, {4: right})
    harm(tmp_path, places[4], stored)
    assert not findings(tmp_path)


def test_a_message_without_an_entry_is_unknown(tmp_path: Path) -> None:
    places = store(tmp_path)
    harm(tmp_path, places[-1], PREPARED)
    file = tmp_path / "consumequeue/t/1" / f"{0:020d}"
    overwrite(file, (COUNT // 2 - 1) * 20, bytes(20))
    assert not findings(tmp_path)


@pytest.mark.parametrize("field", ["size", "tags_code", "place"])
def test_an_entry_of_another_message_proves_nothing(field: str, tmp_path: Path) -> None:
    """For example the entry of an earlier message at this physical offset, which was cut off."""
    places = store(tmp_path)
    harm(tmp_path, places[3], PREPARED)
    file = tmp_path / "consumequeue/t/1" / f"{0:020d}"
    at = {"place": 0, "size": 8, "tags_code": 12}[field]
    # Change the last byte of the field.
    end = 20 + at + {"place": 8, "size": 4, "tags_code": 8}[field] - 1
    overwrite(file, end, bytes([file.read_bytes()[end] ^ 1]))
    assert "harmed_transaction_type" not in kinds(tmp_path)


def test_an_entry_without_a_right_neighbour_proves_nothing(tmp_path: Path) -> None:
    places = store(tmp_path, count=8)
    harm(tmp_path, places[3], PREPARED)
    file = tmp_path / "consumequeue/t/1" / f"{0:020d}"
    for number in (0, 2, 3):
        overwrite(file, number * 20, (1 << 40).to_bytes(8))
    assert "harmed_transaction_type" not in kinds(tmp_path)


def test_a_retyped_half_message_seems_to_have_another_queue(tmp_path: Path) -> None:
    """A PREPARED message has the queue offset 0, so it has no place in its queue."""
    places = store(tmp_path, {6: PREPARED})
    harm(tmp_path, places[6], NOT)
    (found,) = findings(tmp_path)
    assert (found.kind, found.offset) == ("harmed_queue_id", places[6])
    assert found.reason.endswith("its queue id, queue offset or transaction type has changed")


# ----------------------------------------------------------------------------------------- repairs
@pytest.mark.parametrize("is_closed", [True, False])
@pytest.mark.parametrize(("right", "stored"), CHANGES)
@pytest.mark.parametrize("number", [0, 4, COUNT - 2, COUNT - 1])
def test_a_recovery_keeps_the_entry(
    number: int, right: int, stored: int, is_closed: bool, tmp_path: Path
) -> None:
    places = store(tmp_path, {number: right})
    entries = queue_bytes(tmp_path)
    harm(tmp_path, places[number], stored)
    if not is_closed:
        (tmp_path / "abort").touch()
    plan = lq.recover(tmp_path, apply=True, config=config())
    assert "1 frame had another transaction type: the entries stay" in plan.looked_at
    assert queue_bytes(tmp_path) == entries
    assert kinds(tmp_path) == ["harmed_transaction_type"]
    assert not lq.recover(tmp_path, config=config()).is_needed
    with opened(tmp_path) as made:
        for later in range(COUNT, COUNT + 2):
            made.put(lq.Message("t", b"%d" % later, queue_id=later % 2))
    assert served(tmp_path, 0) == list(range(0, COUNT + 2, 2))
    assert served(tmp_path, 1) == list(range(1, COUNT + 2, 2))


@pytest.mark.parametrize("stored", [PREPARED, ROLLBACK])
@pytest.mark.parametrize("number", [0, 4, COUNT - 1])
def test_an_opening_for_writing_keeps_the_entry(number: int, stored: int, tmp_path: Path) -> None:
    places = store(tmp_path)
    entries = queue_bytes(tmp_path)
    harm(tmp_path, places[number], stored)
    with opened(tmp_path):
        pass
    assert queue_bytes(tmp_path) == entries


def test_the_entry_stays_if_an_earlier_one_is_wrong(tmp_path: Path) -> None:
    """The recovery writes the queue again, beginning with the wrong entry."""
    places = store(tmp_path)
    entries = queue_bytes(tmp_path)
    harm(tmp_path, places[6], PREPARED)
    overwrite(tmp_path / "consumequeue/t/0" / f"{0:020d}", 20, bytes(range(20)))
    lq.recover(tmp_path, apply=True, config=config())
    assert queue_bytes(tmp_path) == entries
    assert kinds(tmp_path) == ["harmed_transaction_type"]


def test_an_interrupted_recovery_keeps_the_entry(tmp_path: Path) -> None:
    root = tmp_path / "store"
    places = store(root)
    entries = queue_bytes(root)
    harm(root, places[6], PREPARED)
    overwrite(root / "consumequeue/t/0" / f"{0:020d}", 20, bytes(range(20)))
    (root / "abort").touch()
    require_any_interruption_is_harmless(root, tmp_path, entries)


@pytest.mark.parametrize(("right", "stored"), CHANGES)
@pytest.mark.parametrize("number", [0, 4, COUNT - 1])
def test_a_rebuild_keeps_the_entry(number: int, right: int, stored: int, tmp_path: Path) -> None:
    root = tmp_path / "store"
    places = store(root, {number: right})
    entries = queue_bytes(root)
    harm(root, places[number], stored)
    rebuild(root, into=tmp_path / "new", config=config(), clock=lambda: NOW)
    assert queue_bytes(tmp_path / "new") == entries
    rebuild(root, apply=True, config=config(), clock=lambda: NOW)
    assert queue_bytes(root) == entries


@pytest.mark.parametrize(("right", "stored"), CHANGES)
@pytest.mark.parametrize("number", [0, 4, COUNT - 1])
def test_a_salvage_corrects_the_frame(number: int, right: int, stored: int, tmp_path: Path) -> None:
    root = tmp_path / "store"
    places = store(root, {number: right})
    log, entries = log_file(root).read_bytes(), queue_bytes(root)
    harm(root, places[number], stored)
    salvaged = salvage_store(StoreLayout.open(root, config()), tmp_path / "new")
    assert salvaged.is_whole
    assert salvaged.plan.right_types == {places[number]: right}
    assert salvaged.to_json()["rotten_transaction_types"] == 1
    if right == NOT:
        assert log_file(tmp_path / "new").read_bytes() == log
    assert queue_bytes(tmp_path / "new") == entries
    assert not kinds(tmp_path / "new")


# ------------------------------------------------------------------------------------------- parts
def test_frames_of_a_builder_have_no_harmed_type(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with StoreBuilder(root) as builder:
        for number in range(4):
            builder.put("T", b"body", store_timestamp=1_000 + number)
    assert not verify_store(StoreLayout.open(root)).findings


def test_the_map_has_the_bytes_of_the_found_frames(tmp_path: Path) -> None:
    store(tmp_path)
    types = HarmedTypes(StoreLayout.open(tmp_path, config()), lambda _: None)
    assert 5 not in types
    assert 5 in EitherMap(types, {5})
    assert 6 not in EitherMap(types, {5})


def test_right_flags_keep_the_other_bits() -> None:
    flags = np.array([PREPARED | 0x31, PREPARED, ROLLBACK], np.int32)
    found = right_flags(flags, np.array([10, 20, 30]), {10: NOT, 30: COMMIT})
    assert found.tolist() == [0x31, PREPARED, COMMIT]
