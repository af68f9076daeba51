"""Queue entries at wrong queue offsets: renamed, copied and lost files."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path

import pytest

from logquarry import MessageStore, salvage
from logquarry.format import queue_entry
from logquarry.format.frame import HEAD
from logquarry.log.layout import StoreLayout
from logquarry.read.log_queues import QueueKey
from logquarry.read.queue import ConsumeQueue, Queue
from logquarry.repair.audit.queues import QueuesAudit
from logquarry.repair.findings import Finding, VerifyReport, next_step
from logquarry.repair.rebuild.rebuild import rebuild
from logquarry.repair.recover.recover import recover
from logquarry.repair.verification import verify_store
from logquarry.testing.builder import StoreBuilder
from tests.helpers.files import overwrite
from tests.helpers.store_maker import StoreMaker


def check(root: Path) -> VerifyReport:
    return verify_store(StoreLayout.open(root))


def damage(report: VerifyReport) -> list[Finding]:
    return [finding for finding in report.findings if finding.severity == "damage"]


def queue_folder(root: Path) -> Path:
    return root / "consumequeue/T/0"


def in_queue(report: VerifyReport) -> list[tuple[str, str, int, int]]:
    return [(f.kind, Path(f.file).name, f.offset, f.length) for f in damage(report)]


def name(position: int) -> str:
    return f"{position:020d}"


@pytest.fixture
def one_log_file(tmp_path: Path) -> Path:
    """A queue of 50 units in three files of 20, and another one."""
    root = tmp_path / "store"
    with StoreBuilder(root, file_size=1 << 16, queue_file_size=400) as builder:
        for i in range(100):
            builder.put("T", b"body-%d" % i, queue_id=i % 2, store_timestamp=1_000 + i)
    assert not check(root).findings
    return root


@pytest.mark.parametrize("has_message", [False, True])
def test_a_filler_at_the_end_of_a_queue_is_a_note(one_log_file: Path, has_message: bool) -> None:
    """RocketMQ takes the end of the filler for the place up to which it has dispatched the log."""
    folder = queue_folder(one_log_file)
    if not has_message:
        folder = one_log_file / "consumequeue/other/0"
        folder.mkdir(parents=True)
        (folder / name(800)).write_bytes(bytes(400))
    overwrite(folder / name(800), 200, queue_entry.encode(queue_entry.FILLER) * 2)
    if not has_message:
        overwrite(folder / name(800), 0, queue_entry.encode(queue_entry.FILLER) * 10)
    found = [one for one in check(one_log_file).findings if one.kind == "queue_ends_in_filler"]
    assert [(one.severity, one.file[-24:], one.offset) for one in found] == [
        ("note", f"{folder.parent.name}/0/{name(800)}"[-24:], 220)
    ]


def test_queue_files_under_the_names_of_later_ones_are_found(one_log_file: Path) -> None:
    folder = queue_folder(one_log_file)
    for position in (800, 400, 0):
        (folder / name(position)).rename(folder / name(position + 2000))
    # All entries are there and name sound frames, but none is at its frame's queue offset.
    assert in_queue(check(one_log_file)) == [
        ("queue_head_missing", name(0), 0, 1000),
        ("queue_misplaced", name(2000), 0, 1000),
    ]


def test_the_only_file_of_a_queue_under_another_name_is_found(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with StoreBuilder(root) as builder:
        for i in range(5):
            builder.put("T", b"body", store_timestamp=i + 1)
    folder = queue_folder(root)
    (folder / name(0)).rename(folder / name(2000))
    report = check(root)
    assert ("queue_misplaced", name(2000), 0, 100) in in_queue(report)
    assert report.has_damage
    reason = next(f.reason for f in report.findings if f.kind == "queue_misplaced")
    assert reason == "entry 100 points to the message at 0, whose queue offset is 0, and 4 more"


def test_a_copy_of_a_queue_file_at_its_end_is_found(one_log_file: Path) -> None:
    folder = queue_folder(one_log_file)
    folder.joinpath(name(800)).write_bytes(folder.joinpath(name(800)).read_bytes()[:200] * 2)
    # The messages of entries 40 to 49 are also at 50 to 59.
    assert in_queue(check(one_log_file)) == [("queue_misplaced", name(800), 200, 200)]


def test_a_file_of_another_queue_is_found(one_log_file: Path) -> None:
    other = one_log_file / "consumequeue/T/1" / name(400)
    (queue_folder(one_log_file) / name(1200)).write_bytes(other.read_bytes())
    found = in_queue(check(one_log_file))
    assert ("queue_misplaced", name(1200), 0, 400) in found


def test_each_stretch_of_misplaced_units_is_told_once(one_log_file: Path) -> None:
    folder = queue_folder(one_log_file)
    data = (folder / name(0)).read_bytes()
    # Entries 0 to 2 are at 50 to 52, 13 and 14 at 53 and 54: moved by different distances.
    overwrite(folder / name(800), 200, data[:60] + data[260:300])
    assert in_queue(check(one_log_file)) == [
        ("queue_misplaced", name(800), 200, 60),
        ("queue_misplaced", name(800), 260, 40),
    ]


def test_stretches_without_number_end_in_one_finding(one_log_file: Path) -> None:
    file = queue_folder(one_log_file) / name(800)
    data = (queue_folder(one_log_file) / name(0)).read_bytes()
    overwrite(file, 200, b"".join(data[at : at + 20] for at in range(380, 180, -20)))
    far = queue_folder(one_log_file) / name(1200)
    far.write_bytes(b"".join(data[at : at + 20] for at in range(380, -20, -20)))
    found = [f for f in check(one_log_file).findings if f.kind == "queue_misplaced"]
    assert len(found) == 16
    assert sum(f.length for f in found) == 30 * 20


def test_a_stretch_goes_on_from_chunk_to_chunk(
    one_log_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("logquarry.repair.audit.queue_evidence._CHUNK", 7)
    test_queue_files_under_the_names_of_later_ones_are_found(one_log_file)


@pytest.fixture
def several_log_files(tmp_path: Path) -> Path:
    """A queue of 40 entries in two files of 20, and another one."""
    root = tmp_path / "store"
    with StoreBuilder(root, file_size=4096, queue_file_size=400) as builder:
        for i in range(80):
            builder.put("T", b"body" * 50, queue_id=i % 2, store_timestamp=1_000 + i)
    assert not check(root).findings
    return root


def test_a_queue_that_lost_its_first_file_is_found(several_log_files: Path) -> None:
    (queue_folder(several_log_files) / name(0)).unlink()
    # Also for the messages in the log's first file.
    expected = [("queue_head_missing", name(0), 0, 400)]
    assert in_queue(check(several_log_files)) == expected


def test_a_rebuild_restores_the_first_file_of_a_queue(several_log_files: Path) -> None:
    lost = queue_folder(several_log_files) / name(0)
    entries = lost.read_bytes()
    lost.unlink()
    rebuild(several_log_files, index=False, apply=True)
    assert lost.read_bytes() == entries
    assert not damage(check(several_log_files))


def test_a_recovery_restores_the_first_file_of_a_queue(several_log_files: Path) -> None:
    lost = queue_folder(several_log_files) / name(0)
    entries = lost.read_bytes()
    lost.unlink()
    recover(several_log_files, apply=True)
    assert lost.read_bytes() == entries
    assert not damage(check(several_log_files))


def test_a_retention_during_the_check_explains_missing_first_entries(
    several_log_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log file is deleted after its frames were read, the queue file before it is listed."""
    listed = QueuesAudit._queue

    def queue(audit: QueuesAudit, key: QueueKey) -> Queue:
        for file in several_log_files / "consumequeue/T/0" / name(0), *gone:
            file.unlink(missing_ok=True)
        return listed(audit, key)

    monkeypatch.setattr(QueuesAudit, "_queue", queue)
    log = sorted((several_log_files / "commitlog").iterdir())
    layout = StoreLayout.open(several_log_files)
    places = ConsumeQueue(layout, "T", 0).units(0, 20)["physical_offset"]
    gone = [file for file in log if int(file.name) + 4096 <= int(places[-1])]
    assert len(gone) > 1
    left = places >= int(gone[-1].name) + 4096
    found = in_queue(verify_store(layout))
    # The queue's first file also had entries of messages that the log still has.
    at = int(left.argmax())
    assert found == [("queue_head_missing", name(0), at * 20, int(left.sum()) * 20)]


def test_units_between_the_messages_of_a_queue_are_looked_at(tmp_path: Path) -> None:
    maker = StoreMaker(queue_file_units=10)
    for offset in (0, 1, 5, 6):
        maker.put(queue_offset=offset)
    units = maker.units["orders", 0]
    # No message has the queue offsets 2 to 4.
    units[2], units[3], units[4] = units[0], units[1], units[6]
    found = damage(check(maker.write(tmp_path / "store")))
    assert [(f.kind, f.offset, f.length) for f in found] == [
        ("queue_misplaced", 40, 40),
        ("queue_misplaced", 80, 20),
    ]


def test_copies_by_multi_dispatch_are_in_their_places(tmp_path: Path) -> None:
    maker = StoreMaker()
    text = b"INNER_MULTI_DISPATCH\x01%LMQ%a,copies\x02INNER_MULTI_QUEUE_OFFSET\x010,0"
    for _ in range(3):
        maker.put()
    last = maker.put(properties=text)
    unit = maker.units["orders", 0][3]
    for copies in (("%LMQ%a", 0), ("copies", 0), ("others", 0)):
        maker.units[copies][0] = unit
    found = damage(check(maker.write(tmp_path / "store")))
    # Only the queue that the message does not name must not have it.
    assert [(f.kind, f.file.split("/")[1]) for f in found] == [("queue_misplaced", "others")]
    where = f"entry 0 points to the message at {last.physical_offset}"
    assert found[0].reason == f"{where}, whose frame names another queue"


def test_a_message_may_be_put_into_the_schedule_topic(tmp_path: Path) -> None:
    """Without a DELAY, its tags code is computed as in any topic."""
    store = tmp_path / "store"
    with StoreBuilder(store, file_size=4096, queue_file_size=400) as builder:
        for properties in ("", "TAGS\x01a", "TAGS\x01polygenelubricants"):
            builder.put("SCHEDULE_TOPIC_XXXX", b"x", queue_id=2, properties_string=properties)
    assert not check(store).findings
    overwrite(
        store / "consumequeue/SCHEDULE_TOPIC_XXXX/2" / name(0), 12, (-5).to_bytes(8, signed=True)
    )
    report = check(store)
    assert [kind for kind, *_ in in_queue(report)] == ["queue_entry_wrong"]
    # The entry can be right, and the message's properties wrong: a rebuild would trust them.
    (found,) = report.findings
    assert "read the message with `messages --offset 0` before a rebuild" in found.reason


def test_what_retention_deletes_during_the_check_is_nobodys_fault(tmp_path: Path) -> None:
    maker = StoreMaker(log_file_size=1024)
    for number in range(40):
        maker.put(keys=f"key{number}")
    root = maker.write(tmp_path / "store")
    layout = StoreLayout.open(root)
    first = layout.commit_log.files[0]
    (root / first.path).unlink()
    report = verify_store(layout)
    assert report.counts["messages"] < 40
    assert damage(report) == []


def harm(root: Path, place: int, value: int) -> None:
    """Change the queue offset in the frame at a physical offset."""
    log = root / "commitlog" / name(0)
    overwrite(log, place + HEAD.offsets["queue_offset"], value.to_bytes(8, "big", signed=True))


@pytest.mark.parametrize("value", [1_000, 3, 0, -5, 1 << 62])
@pytest.mark.parametrize("number", [0, 1, 24, 48, 49])
def test_a_harmed_queue_offset_is_named_and_salvage_corrects_it(
    number: int, value: int, one_log_file: Path, tmp_path: Path
) -> None:
    if value == number:
        return
    with MessageStore.open(one_log_file) as store:
        place = store.get("T", 0, number).messages[0].physical_offset
    harm(one_log_file, place, value)
    report = check(one_log_file)
    (found,) = report.findings
    assert (found.kind, found.offset) == ("harmed_queue_offset", place)
    reason = f"the frame has queue offset {value}, and queue 0 of T has the message at {number}"
    assert found.reason == reason
    assert not recover(one_log_file).is_needed
    step = next_step(report)
    assert step is not None and step.words[0] == "salvage"
    salvage(one_log_file, tmp_path / "new")
    assert not check(tmp_path / "new").has_damage


@pytest.mark.parametrize("stretch_bytes", [1, 300, 1 << 20])
@pytest.mark.parametrize(
    ("queues", "offset"),
    [
        ([0, 1] * 6, 3),
        ([0, 1] * 6, 5),
        ([1] * 8 + [0, 1] * 3, 1),
        ([1] * 8 + [0, 1, 0, 1, 1, 0], 2),
        ([1] * 2 + [0] * 9 + [1] * 3, 8),
    ],
)
def test_a_harmed_queue_id_starts_no_new_epoch(
    queues: list[int], offset: int, stretch_bytes: int, tmp_path: Path
) -> None:
    """Damage changed the queue id of a frame from 0 to 1. No CRC covers the queue id."""
    root = tmp_path / "store"
    with StoreBuilder(root) as builder:
        for number, queue_id in enumerate(queues):
            builder.put("T", b"body", queue_id=queue_id, store_timestamp=1_000 + number)
    entries = (queue_folder(root) / name(0)).read_bytes()
    place = int.from_bytes(entries[offset * 20 : offset * 20 + 8])
    (log,) = (root / "commitlog").iterdir()
    overwrite(log, place + HEAD.offsets["queue_id"], (1).to_bytes(4))
    (found,) = verify_store(StoreLayout.open(root), stretch_bytes=stretch_bytes).findings
    # A rebuild could put the message into the wrong queue.
    assert (found.kind, found.offset) == ("harmed_queue_id", place)
    assert (
        found.reason
        == f"the frame names another queue, and queue 0 of T has the message at {offset}"
    )


@pytest.mark.parametrize("stretch_bytes", [1, 300, 1 << 20])
def test_a_frame_without_a_place_may_be_the_last_of_its_part(
    stretch_bytes: int, tmp_path: Path
) -> None:
    """The next message of the queue is in the next file, or another thread reads it."""
    root = tmp_path / "store"
    size, places = 700, list[tuple[int, int]]()
    with StoreBuilder(root, file_size=size) as builder:
        for number in range(40):
            queue_id = 1 if number < 20 else number % 2
            put = builder.put("T", b"body", queue_id=queue_id, store_timestamp=1_000 + number)
            places.append((put.physical_offset, queue_id))
    lasts = [
        place
        for (place, queue_id), (after, _) in pairwise(places)
        if queue_id == 0 and place // size != after // size
    ]
    assert lasts
    for place in lasts:
        harmed = tmp_path / str(place)
        shutil.copytree(root, harmed)
        log = harmed / "commitlog" / name(place // size * size)
        overwrite(log, place % size + HEAD.offsets["queue_id"], (1).to_bytes(4))
        shutil.rmtree(harmed / "consumequeue")
        rebuild(harmed, apply=True)
        report = verify_store(StoreLayout.open(harmed), stretch_bytes=stretch_bytes)
        found = [one for one in report.findings if one.kind != "queue_filler"]
        assert [(one.kind, one.offset) for one in found] == [("harmed_queue_id", place)]


@pytest.mark.parametrize("queue_id", [1, 7, -3])
def test_a_harmed_queue_id_gives_no_advice_to_rebuild(queue_id: int, tmp_path: Path) -> None:
    root = tmp_path / "store"
    with StoreBuilder(root) as builder:
        for number in range(12):
            builder.put("T", b"body", queue_id=number % 2, store_timestamp=1_000 + number)
    with MessageStore.open(root) as store:
        place = store.get("T", 0, 3).messages[0].physical_offset
    (log,) = (root / "commitlog").iterdir()
    overwrite(log, place + HEAD.offsets["queue_id"], queue_id.to_bytes(4, signed=True))
    report = verify_store(StoreLayout.open(root))
    assert [(one.kind, one.offset) for one in report.findings] == [("harmed_queue_id", place)]
    step = next_step(report)
    assert step is not None
    assert step.words == ("messages", "--offset", str(place))


def test_a_harmed_queue_offset_costs_no_other_finding(one_log_file: Path) -> None:
    """A rebuild does not correct the frame, so a lost entry needs a salvage, too."""
    with MessageStore.open(one_log_file) as store:
        place = store.get("T", 0, 20).messages[0].physical_offset
    harm(one_log_file, place, 2)
    overwrite(queue_folder(one_log_file) / name(400), 200, bytes(20))
    report = check(one_log_file)
    assert sorted(f.kind for f in damage(report)) == ["harmed_queue_offset", "queue_hole"]
    step = next_step(report)
    assert step is not None and step.words[0] == "salvage"
