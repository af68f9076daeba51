"""What a check says of a store's state: crashes, lost messages, sidecar files."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.format.broker_json import TopicConfig, encode_topics
from logquarry.format.checkpoint import Checkpoint
from logquarry.format.checkpoint import encode as encode_checkpoint
from logquarry.log.layout import StoreLayout
from logquarry.log.store_files import DAMAGE, DURABLE, INTENT, LOADS
from logquarry.repair.findings import VerifyReport
from logquarry.repair.salvage.salvage import salvage_store
from logquarry.repair.verification import verify_store
from tests.helpers.small_store import config, opened
from tests.helpers.store_maker import FIRST_TIME, StoreMaker


def check(root: Path, **settings: int) -> VerifyReport:
    stated = lq.StoreConfig(**settings)  # type: ignore[arg-type]
    return verify_store(StoreLayout.open(root, stated))


def told(report: VerifyReport) -> list[tuple[str, str]]:
    return [(finding.severity, finding.kind) for finding in report.findings]


@pytest.fixture
def maker() -> StoreMaker:
    made = StoreMaker(log_file_size=1 << 16)
    for number in range(12):
        made.put("a" if number % 3 else "b", body=b"%d" % number)
    return made


def write(maker: StoreMaker, root: Path, without: int, *, dispatched: int = 0) -> Path:
    """The store of a writer that crashed with its last messages not dispatched."""
    for frame in maker.frames[-without:]:
        del maker.units[frame.topic.decode(), 0][frame.queue_offset]
    maker.write(root)
    (root / "abort").touch()
    (root / "checkpoint").write_bytes(encode_checkpoint(Checkpoint(0, dispatched, 0)))
    return root


def test_what_was_not_dispatched_at_a_crash_is_a_note(maker: StoreMaker, tmp_path: Path) -> None:
    root = write(maker, tmp_path / "store", 5, dispatched=FIRST_TIME)
    assert told(check(root)) == [
        ("note", "queue_behind"),
        ("note", "queue_behind"),
        ("note", "abort_file"),
    ]
    (root / "abort").unlink()
    assert [kind for kind in told(check(root)) if kind[0] == "damage"] == [
        ("damage", "queue_behind")
    ] * 2


def test_a_queue_that_came_after_the_last_dispatched_message_is_a_note(tmp_path: Path) -> None:
    maker = StoreMaker()
    for topic in "aab":
        maker.put(topic)
    root = write(maker, tmp_path / "store", 1)
    assert told(check(root))[0] == ("note", "queue_missing")


@pytest.mark.parametrize(
    ("changed", "listed", "severity"),
    [(1 << 50, "a", "note"), (1 << 50, "b", "damage"), (FIRST_TIME - 1, "a", "damage")],
)
def test_a_deleted_topic_has_no_queue(
    changed: int, listed: str, severity: str, maker: StoreMaker, tmp_path: Path
) -> None:
    """An older topics.json can come from a backup that does not have the topic yet."""
    maker.write(tmp_path)
    shutil.rmtree(tmp_path / "consumequeue/b")
    topics = {name: TopicConfig(name, 1, 1, 6, 0, False) for name in ("a", listed)}
    (tmp_path / "config").mkdir(exist_ok=True)
    (tmp_path / "config/topics.json").write_text(encode_topics(topics, timestamp_ms=changed))
    assert told(check(tmp_path))[0] == (severity, "queue_missing")


@pytest.mark.parametrize("without_queue", ["deleted", "../no folder"])
def test_a_topic_that_needs_no_queue_makes_no_damage_of_a_crash(
    without_queue: str, tmp_path: Path
) -> None:
    """The entries of such a topic are not missing, although its messages are the oldest ones."""
    maker = StoreMaker()
    for topic in (without_queue, "a", "a", "b"):
        maker.put(topic)
    del maker.units[without_queue, 0]
    root = write(maker, tmp_path / "store", 1, dispatched=FIRST_TIME)
    topics = {name: TopicConfig(name, 1, 1, 6, 0, False) for name in "ab"}
    (root / "config").mkdir(exist_ok=True)
    (root / "config/topics.json").write_text(encode_topics(topics, timestamp_ms=1 << 50))
    assert told(check(root)) == [
        ("note", "queue_missing"),
        ("note", "queue_missing"),
        ("note", "abort_file"),
    ]


def test_a_queue_that_lacks_what_another_one_has_is_damage(
    maker: StoreMaker, tmp_path: Path
) -> None:
    root = write(maker, tmp_path / "store", 1)
    units = sorted((root / "consumequeue/a/0").iterdir())[-1]
    # Seven units of a are left; the last two go, before which b has some.
    units.write_bytes(units.read_bytes()[: 5 * 20].ljust(200, b"\0"))
    kinds = told(check(root))
    assert ("damage", "queue_behind") in kinds and ("note", "queue_behind") not in kinds


def test_a_queue_that_lacks_what_the_checkpoint_knows_is_damage(
    maker: StoreMaker, tmp_path: Path
) -> None:
    root = write(maker, tmp_path / "store", 5, dispatched=maker.frames[-1].store_timestamp)
    assert ("damage", "queue_behind") in told(check(root))


@pytest.mark.parametrize("milliseconds", [80, 300])
def test_a_writer_that_was_killed_leaves_no_damage(tmp_path: Path, milliseconds: int) -> None:
    code = (
        "import sys; from pathlib import Path; from tests.helpers.small_store import opened\n"
        "import logquarry as lq\n"
        "store = opened(Path(sys.argv[1]), mapped_file_size_commit_log=1 << 20)\n"
        "print(flush=True)\n"
        "for n in range(1 << 30): store.put(lq.Message('t%d' % (n % 5), b'x' * 200, keys='k'))\n"
    )
    writer = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "store")], stdout=subprocess.PIPE
    )
    assert writer.stdout is not None
    writer.stdout.readline()
    time.sleep(milliseconds / 1_000)
    os.kill(writer.pid, signal.SIGKILL)
    writer.wait()
    writer.stdout.close()
    report = verify_store(
        StoreLayout.open(tmp_path / "store", config(mapped_file_size_commit_log=1 << 20))
    )
    assert ("note", "abort_file") in told(report)
    assert [f for f in report.findings if f.severity == "damage" and "queue" in f.kind] == []


def test_units_for_lost_messages_are_a_note(tmp_path: Path) -> None:
    maker = StoreMaker()
    for number in range(6):
        maker.put(body=b"%d" % number)
    root = maker.write(tmp_path / "store")
    path = root / "commitlog" / "0".zfill(20)
    data = bytearray(path.read_bytes())
    data[maker.frames[2].physical_offset + 88] ^= 1
    path.write_bytes(data)
    (root / "abort").touch()
    report = check(root)
    assert told(report) == [
        ("damage", "bad_body_crc"),
        ("note", "queue_in_damage"),
        ("note", "checkpoint_missing"),
        ("note", "abort_file"),
    ]
    assert report.findings[1].offset == 2 * 20
    found = salvage_store(StoreLayout.open(root), tmp_path / "new")
    report = verify_store(StoreLayout.open(tmp_path / "new", found.plan.config))
    assert told(report) == [("note", "queue_filler")]
    assert (report.findings[0].offset, report.findings[0].length) == (2 * 20, 20)


def test_units_that_pad_the_beginning_of_a_queue_are_no_finding(tmp_path: Path) -> None:
    maker = StoreMaker()
    for number in range(6):
        maker.put(queue_offset=3 + number)
    assert told(check(maker.write(tmp_path / "store")))[:-1] == []


def test_a_frame_that_an_old_broker_would_reject_is_a_note(
    maker: StoreMaker, tmp_path: Path
) -> None:
    large = maker.put("a", body=bytes(400))
    root = maker.write(tmp_path / "store")
    report = check(root, max_message_size=large.size - 1)
    (found,) = (f for f in report.findings if f.kind == "oversized")
    assert (found.severity, found.offset, found.length) == (
        "note",
        large.physical_offset,
        large.size,
    )
    assert found.reason == (
        f"{large.size} bytes are more than maxMessageSize, {large.size - 1}: RocketMQ 4.9.3 and "
        "earlier versions would reject it; RocketMQ 5 compares only the body with maxMessageSize"
    )
    assert "oversized" not in check(root, max_message_size=large.size).by_kind


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    with opened(tmp_path / "ours") as store:
        for number in range(8):
            store.put(lq.Message("t", b"%d" % number, keys="k"))
    assert verify_store(StoreLayout.open(tmp_path / "ours", config())).findings == []
    return tmp_path / "ours"


def kinds_of_ours(root: Path) -> list[tuple[str, str]]:
    return told(verify_store(StoreLayout.open(root, config())))


def test_a_torn_durable_mark_is_a_note(ours: Path) -> None:
    data = bytearray((ours / DURABLE).read_bytes())
    data[9] ^= 1
    (ours / DURABLE).write_bytes(data)
    assert kinds_of_ours(ours) == [("note", "durable_mark_invalid")]


def test_a_durable_mark_from_before_another_program_is_a_note(ours: Path) -> None:
    (ours / "checkpoint").write_bytes(encode_checkpoint(Checkpoint(5, 6, 7)))
    assert kinds_of_ours(ours) == [("note", "durable_mark_foreign")]


def test_a_log_that_ends_before_its_durable_mark(ours: Path) -> None:
    path = ours / "commitlog" / "0".zfill(20)
    data = bytearray(path.read_bytes())
    end = len(data.rstrip(b"\0"))
    data[end - 90 : end] = bytes(90)
    path.write_bytes(data)
    kinds = kinds_of_ours(ours)
    assert ("note", "durable_mark_ahead") in kinds
    assert any(severity == "damage" for severity, _ in kinds)


def test_damage_that_a_recovery_has_noted_says_so(ours: Path) -> None:
    with lq.MessageStore.open(ours) as store:
        place = next(iter(store.scan())).physical_offset
    path = ours / "commitlog" / "0".zfill(20)
    data = bytearray(path.read_bytes())
    data[place + 88] ^= 1
    path.write_bytes(data)
    (first, *_) = verify_store(StoreLayout.open(ours, config())).findings
    assert (first.severity, first.kind) == ("damage", "bad_body_crc")
    assert "noted" not in first.reason
    with opened(ours):
        pass
    assert (ours / DAMAGE).is_file()
    (first, *_) = verify_store(StoreLayout.open(ours, config())).findings
    assert (first.severity, first.kind) == ("damage", "bad_body_crc")
    assert "a recovery has recorded it" in first.reason


def test_what_interrupted_work_has_left_is_a_note(ours: Path) -> None:
    (ours / ".logquarry/rebuild/consumequeue").mkdir(parents=True)
    assert kinds_of_ours(ours) == [("note", "leftover")]


def test_an_interrupted_load_is_told(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        store.put(lq.Message("t", b"one"))
    (tmp_path / LOADS).mkdir()
    (tmp_path / LOADS / INTENT).write_text("{}")
    shape = {"max_hash_slot_num": 50, "max_index_num": 200}
    assert told(check(tmp_path, **shape)) == [("note", "unfinished_load")]
