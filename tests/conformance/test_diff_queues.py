"""``diff`` of batch queues and of queues in RocksDB, in stores that brokers wrote."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from logquarry.format.batch import ENTRY, ENTRY_SIZE
from logquarry.log.layout import StoreLayout
from logquarry.repair.queue_diff import QueueDiff
from logquarry.repair.store_diff import StoreDiff, compare_stores
from tests.conformance.rocketmq5 import Copied, state_of
from tests.conformance.rocksdb import change
from tests.helpers.command import run
from tests.helpers.golden_data import copy_store

SEPARATE = "consumequeue_rocksdb"


def compared(a: Path, b: Path) -> StoreDiff:
    """Compare in both directions, which must swap the results of a and b."""
    before = state_of(a), state_of(b)
    found, other = (compare_stores(*map(StoreLayout.open, paths)) for paths in ((a, b), (b, a)))
    assert (state_of(a), state_of(b)) == before
    assert found.verdict == other.verdict
    assert [(q.state, q.a, q.b) for q in found.queues] == [
        (q.state, q.b, q.a) for q in other.queues
    ]
    return found


def the_difference(found: StoreDiff) -> QueueDiff:
    assert found.verdict == "diverged" and found.divergence is None
    (queue,) = [queue for queue in found.queues if queue.state != "equal"]
    assert queue.state == "differs" and queue.difference is not None
    return queue


@pytest.fixture
def batches(copied: Copied, tmp_path: Path) -> tuple[Path, Path]:
    a = copied("5.5.0-batchcq")
    return a, copy_store(a, tmp_path / "b")


@pytest.fixture
def rocks(copied: Copied, tmp_path: Path) -> tuple[Path, Path]:
    a = copied("5.5.0-rocksdb-separate")
    return a, copy_store(a, tmp_path / "b")


# ---------------------------------------------------------------------------------- batch queues
def test_equal_batch_queues(batches: tuple[Path, Path]) -> None:
    found = compared(*batches)
    assert found.verdict == "equal"
    (queue,) = [q for q in found.queues if (q.topic, q.queue_id) == ("BatchCq", 0)]
    assert queue.a == queue.b and queue.a is not None and queue.a.max_offset > 100


@pytest.mark.parametrize("kind", ["tags_code", "store_timestamp", "physical_offset", "count"])
def test_an_entry_of_a_batch_queue_differs(kind: str, batches: tuple[Path, Path]) -> None:
    path = batches[1] / "batchconsumequeue" / "BatchCq" / "1" / f"{0:020d}"
    data = bytearray(path.read_bytes())
    names = [field.name for field in ENTRY.fields]
    values = list(ENTRY.struct.unpack_from(data, 5 * ENTRY_SIZE))
    base = values[names.index("base")]
    values[names.index(kind)] += 1 if kind != "count" else -1
    ENTRY.struct.pack_into(data, 5 * ENTRY_SIZE, *values)
    path.write_bytes(data)
    queue = the_difference(compared(*batches))
    assert (queue.topic, queue.queue_id) == ("BatchCq", 1)
    assert queue.difference is not None and queue.difference.queue_offset == base
    assert kind != "store_timestamp" or queue.reason == f"entry {base} differs: store time"


@pytest.mark.parametrize("lost", ["queue", "file"])
def test_a_batch_queue_lacks_messages(lost: str, batches: tuple[Path, Path]) -> None:
    folder = batches[1] / "batchconsumequeue" / "BatchCq" / "0"
    if lost == "queue":
        shutil.rmtree(folder)
    else:
        (folder / f"{0:020d}").unlink()
    queue = the_difference(compared(*batches))
    assert queue.reason.startswith("b lacks entry 0, but its log has the message at ")
    assert queue.difference is not None and queue.difference.b is None


def test_a_damaged_batch_entry_is_no_endless_queue(batches: tuple[Path, Path]) -> None:
    path = max((batches[1] / "batchconsumequeue" / "BatchCq" / "0").iterdir())
    data = bytearray(path.read_bytes())
    values = list(ENTRY.struct.unpack_from(data))
    values[[field.name for field in ENTRY.fields].index("base")] = 1 << 61
    ENTRY.struct.pack_into(data, 0, *values)
    path.write_bytes(data)
    the_difference(compared(*batches))


# --------------------------------------------------------------------------------- RocksDB queues
def test_equal_queues_in_rocksdb(rocks: tuple[Path, Path]) -> None:
    found = compared(*rocks)
    assert found.verdict == "equal" and len(found.queues) > 5 and not found.unread
    assert all(queue.a == queue.b is not None for queue in found.queues)


@pytest.mark.parametrize(
    ("kind", "number", "reason"),
    [
        ("hole", 7, "RocksDB: b lacks entry 7, but its log has the message at "),
        ("place", 7, "RocksDB: entry 7 differs"),
        ("tags", 7, "RocksDB: entry 7 differs"),
        ("time", 7, "RocksDB: entry 7 differs: store time"),
        ("end", None, "RocksDB: b lacks entry "),
        ("surplus", None, "RocksDB: a lacks entry "),
        ("missing", 0, "RocksDB: b lacks entry 0, but its log has the message at "),
    ],
)
def test_an_entry_in_rocksdb_differs(
    kind: str, number: int | None, reason: str, rocks: tuple[Path, Path]
) -> None:
    change(rocks[1] / SEPARATE, kind)
    queue = the_difference(compared(*rocks))
    assert (queue.topic, queue.queue_id) == ("Orders", 0) and queue.reason.startswith(reason)
    assert queue.difference is not None
    assert number is None or queue.difference.queue_offset == number


@pytest.mark.parametrize("form", ["files", "RocksDB"])
def test_each_form_of_a_queue_is_compared(form: str, copied: Copied, tmp_path: Path) -> None:
    a = copied("5.5.0-rocksdb-double")
    b = copy_store(a, tmp_path / "b")
    assert compared(a, b).verdict == "equal"
    if form == "files":
        path = b / "consumequeue" / "Orders" / "0" / f"{0:020d}"
        data = bytearray(path.read_bytes())
        data[7 * 20 + 7] ^= 1
        path.write_bytes(data)
    else:
        folder = next(p.parent for p in b.rglob("CURRENT") if "consumequeue" in str(p.parent))
        change(folder, "place")
    queue = the_difference(compared(a, b))
    assert queue.difference is not None and queue.difference.queue_offset == 7
    assert queue.reason == ("RocksDB: " if form == "RocksDB" else "") + "entry 7 differs"


def test_queues_in_files_and_in_rocksdb_are_equal(copied: Copied, tmp_path: Path) -> None:
    a = copied("5.5.0-rocksdb-double")
    b, c = (copy_store(a, tmp_path / name) for name in "bc")
    (folder,) = (p.parent for p in b.rglob("CURRENT") if "consumequeue" in str(p.parent))
    shutil.rmtree(folder)
    for queue in (c / "consumequeue").iterdir():
        if queue.is_dir():
            shutil.rmtree(queue)
    for one in (a, b, c):
        for other in (a, b, c):
            found = compared(one, other)
            assert found.verdict == "equal" and len(found.queues) > 5
    change(c / folder.relative_to(b), "place")
    assert the_difference(compared(b, c)).reason == "RocksDB: entry 7 differs"


def test_a_killed_broker_had_not_written_its_last_entries(copied: Copied, tmp_path: Path) -> None:
    a = copied("5.5.0-kill-rocksdb")
    b = copy_store(a, tmp_path / "b")
    run("recover", b, "--apply", code=None)
    shutil.rmtree(b / "commitlog")
    shutil.copytree(a / "commitlog", b / "commitlog")
    found = compared(a, b)
    assert found.verdict in ("equal", "prefix")
    assert {queue.state for queue in found.queues} == {"behind"}
    assert "a lacks entry 0 so far; the broker had not written it" in found.queues[0].reason
    assert found.log_a == found.log_b
    assert any(note.endswith("different ends") for note in found.notes)
    # After a clean shutdown, nothing explains it.
    (a / "abort").unlink()
    assert compared(a, b).verdict == "diverged"


@pytest.mark.parametrize("why", ["no package", "damage"])
def test_queues_that_cannot_be_read(
    why: str, rocks: tuple[Path, Path], request: pytest.FixtureRequest
) -> None:
    a, b = rocks
    if why == "no package":
        request.getfixturevalue("no_package")
    else:
        for path in (b / SEPARATE).glob("*.sst"):
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    found = compared(a, b)
    assert found.verdict == "incomplete" and not found.has_diverged
    assert found.unread == (("a", "b") if why == "no package" else ("b",))
    assert any(f"b: the queues in {SEPARATE} (RocksDB) were not" in note for note in found.notes)
    if why == "damage":
        shown = run("diff", a, b, code=1)
        assert shown.stdout.startswith("not all queues were compared; equal: ")
        assert f"next: logquarry verify {b}" in shown.stdout
        document = json.loads(run("diff", a, b, "--json", code=1).stdout)
        assert (document["verdict"], document["unread"]) == ("incomplete", ["b"])


def test_a_damaged_block_of_rocksdb(rocks: tuple[Path, Path]) -> None:
    for path in (rocks[1] / SEPARATE).glob("*.sst"):
        data = bytearray(path.read_bytes())
        if b"Orders" in data:
            data[data.index(b"Orders")] ^= 1
            path.write_bytes(data)
    found = compared(*rocks)
    assert (found.verdict, found.unread) == ("incomplete", ("b",))
    assert any(f"b: the queues in {SEPARATE}" in note for note in found.notes)
