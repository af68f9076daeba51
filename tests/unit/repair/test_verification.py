"""Each kind of finding, put into a small store on purpose."""

from __future__ import annotations

import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import logquarry as lq
from logquarry.format import index, queue_entry
from logquarry.log.layout import StoreLayout
from logquarry.repair.findings import KINDS, VerifyReport, markdown
from logquarry.repair.verification import verify_store
from logquarry.testing.builder import StoreBuilder
from tests.helpers import small_store
from tests.helpers.files import leaves_nothing_open, overwrite
from tests.helpers.small_store import held_by_a_broker

QUEUE = "consumequeue/T/0/00000000000000000000"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    root = tmp_path / "store"
    with StoreBuilder(root, file_size=4096, queue_file_size=400) as builder:
        for i in range(80):
            builder.put(
                "T",
                b"body-%d" % i,
                queue_id=i % 2,
                properties_string=f"KEYS\x01key{i}\x02TAGS\x01a",
                store_timestamp=1_700_000_000_000 + i,
            )
    return root


def check(root: Path) -> VerifyReport:
    return verify_store(StoreLayout.open(root))


def kinds(report: VerifyReport) -> list[str]:
    return [f.kind for f in report.findings if f.kind != "index_missing"]


def test_a_sound_store_has_no_findings_and_counts_all(store: Path) -> None:
    report = check(store)
    assert kinds(report) == []
    assert report.counts["messages"] == 80
    assert report.counts["queue_entries"] == 80


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_file_stays_open(store: Path) -> None:
    with leaves_nothing_open(store):
        check(store)


def zero_unit(root: Path) -> None:
    overwrite(root / QUEUE, 3 * 20, bytes(20))


def wrong_unit(root: Path) -> None:
    overwrite(root / QUEUE, 3 * 20 + 12, b"\x01")


def shifted_unit(root: Path) -> None:
    overwrite(root / QUEUE, 3 * 20, struct.pack(">q", 17))


def nul_in_properties(root: Path) -> None:
    path = root / "commitlog" / f"{0:020d}"
    at = path.read_bytes().index(b"key0")
    overwrite(path, at, b"\0")


def unknown_name(root: Path) -> None:
    (root / "commitlog" / "notes.txt").write_text("mine")


def empty_last_file(root: Path) -> None:
    last = sorted((root / "commitlog").iterdir())[-1]
    (root / "commitlog" / f"{int(last.name) + 4096:020d}").touch()


def short_checkpoint(root: Path) -> None:
    (root / "checkpoint").write_bytes(b"abc")


def bad_config(root: Path) -> None:
    (root / "config").mkdir()
    (root / "config" / "consumerOffset.json").write_text("")


def middle_file_gone(root: Path) -> None:
    sorted((root / "commitlog").iterdir())[1].unlink()


@pytest.mark.parametrize(
    ("harm", "expected"),
    [
        (zero_unit, ["queue_hole"]),
        (wrong_unit, ["queue_entry_wrong"]),
        (shifted_unit, ["queue_entry_wrong"]),
        (nul_in_properties, ["suspect_text"]),
        (unknown_name, ["unknown_file"]),
        (empty_last_file, ["empty_file"]),
        (short_checkpoint, ["checkpoint_short"]),
        (bad_config, ["bad_config"]),
        # The finding of the lost file covers its entries, so the entries have no further findings.
        (middle_file_gone, ["missing_file", "queue_in_damage", "queue_in_damage"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_harm_is_found(store: Path, harm: Callable[[Path], None], expected: list[str]) -> None:
    harm(store)
    report = check(store)
    assert kinds(report) == expected
    finding = next(f for f in report.findings if f.kind == expected[0])
    assert finding.severity == KINDS[expected[0]].severity
    assert finding.reason


def test_a_unit_of_the_middle_names_its_file_and_position(store: Path) -> None:
    wrong_unit(store)
    finding = check(store).findings[0]
    assert (finding.file, finding.offset, finding.length) == (QUEUE, 60, 20)


def test_a_topic_that_was_made_anew_is_a_note(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with StoreBuilder(root, file_size=1 << 16, queue_file_size=400) as builder:
        for i in range(5):
            builder.put("T", b"old", store_timestamp=i + 1)
        builder.forget_queue("T", 0)
        for i in range(3):
            builder.put("T", b"new", store_timestamp=i + 10)
    report = check(root)
    assert kinds(report) == ["new_epoch"]
    assert not report.has_damage


def test_beside_a_live_writer_a_torn_tail_is_a_note(store: Path) -> None:
    last = sorted((store / "commitlog").iterdir())[-1]
    end = len(last.read_bytes().rstrip(b"\0"))
    overwrite(last, end + 3, b"half a frame")
    (store / "abort").touch()
    (store / "lock").write_bytes(b"lock")
    assert check(store).has_damage
    with held_by_a_broker(store):
        report = check(store)
        assert not report.has_damage
        assert {"torn_tail", "live"} <= set(kinds(report))


@pytest.fixture
def indexed(golden: Path, tmp_path: Path) -> tuple[Path, Path]:
    import shutil

    root = tmp_path / "store"
    shutil.copytree(golden / "single" / "store", root)
    return root, sorted((root / "index").iterdir())[0]


SHAPE = index.IndexShape(64, 256)


def test_a_chain_that_leads_nowhere_is_found(indexed: tuple[Path, Path]) -> None:
    root, file = indexed
    overwrite(file, SHAPE.entry_position(100) + 16, struct.pack(">i", 250))
    report = check(root)
    assert kinds(report) == ["index_chain"]
    assert report.findings[0].offset == SHAPE.entry_position(100)


def test_a_slot_that_leads_past_its_chain_is_found(indexed: tuple[Path, Path]) -> None:
    root, file = indexed
    position = next(
        p
        for p in range(40, 40 + 64 * 4, 4)
        if struct.unpack_from(">i", file.read_bytes(), p)[0] > 1
    )
    overwrite(file, position, struct.pack(">i", 1))
    assert "index_chain" in kinds(check(root))


def test_an_entry_that_points_at_no_frame_is_found(indexed: tuple[Path, Path]) -> None:
    root, file = indexed
    entry = index.decode_entry(file.read_bytes(), SHAPE.entry_position(7))
    moved = index.ENTRY.struct.pack(*entry._replace(physical_offset=entry.physical_offset + 1))
    overwrite(file, SHAPE.entry_position(7), moved)
    report = check(root)
    assert kinds(report) == ["index_entry"]


def test_fillers_of_a_queue_that_begins_late_are_no_harm(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with StoreBuilder(root, queue_file_size=400) as builder:
        builder.queue_start("T", 0, 25)
        for i in range(4):
            builder.put("T", b"x", store_timestamp=i + 1)
    data = (root / "consumequeue/T/0" / f"{400:020d}").read_bytes()
    assert queue_entry.decode_at(data, 0).is_filler
    assert kinds(check(root)) == []


def test_the_kinds_have_a_table_for_the_docs() -> None:
    assert all(f"| {kind} |" in markdown() for kind in KINDS)


def test_a_queue_file_far_away_does_not_hold_up_the_check(store: Path) -> None:
    folder = store / "consumequeue/T/0"
    far = folder / f"{4_000_000_000_000_000_000:020d}"
    far.write_bytes(queue_entry.encode(queue_entry.QueueEntry(10, 200, 0)).ljust(400, b"\0"))
    assert "queue_file_missing" in kinds(check(store))
    assert sum(1 for _ in lq.MessageStore.open(store).scan("T")) == 80


def test_numbers_of_thousands_of_digits_are_no_numbers(tmp_path: Path) -> None:
    with StoreBuilder(tmp_path / "store") as builder:
        properties = f"DELAY\x01{'9' * 5000}\x02TAGS\x01a"
        builder.put("SCHEDULE_TOPIC_XXXX", b"", properties_string=properties)
    with lq.MessageStore.open(tmp_path / "store") as opened:
        assert opened.to_arrow(columns=["tags_code"]).read_all()["tags_code"].to_pylist() == [97]


def test_what_retention_deletes_while_it_is_read_is_no_damage(store: Path) -> None:
    with lq.MessageStore.open(store) as opened:
        before = [message.physical_offset for message in opened.scan()]
        files = sorted((store / "commitlog").iterdir())
        files[0].unlink()
        kept = [message.physical_offset for message in opened.scan()]
    assert kept == [offset for offset in before if offset >= int(files[1].name)]


def test_a_torn_index_chain_makes_a_key_search_read_the_log(indexed: tuple[Path, Path]) -> None:
    root, _ = indexed
    with lq.MessageStore.open(root) as opened:
        keyed = [m for m in opened.scan() if m.uniq_key]
        wanted = keyed[0].uniq_key
        assert wanted is not None
    for file in (root / "index").iterdir():
        for number in range(1, 250):
            overwrite(file, SHAPE.entry_position(number) + 12, struct.pack(">i", -1))
    with lq.MessageStore.open(root) as opened:
        found = [m.physical_offset for m in opened.scan(keys=wanted)]
    assert found == [m.physical_offset for m in keyed if m.uniq_key == wanted]


def test_frames_that_a_recovery_keeps_are_not_lost(store: Path) -> None:
    """Readers of a closed store of RocketMQ end at damage in the last file; a recovery keeps the
    frames after it."""
    last = sorted((store / "commitlog").iterdir())[-1]
    overwrite(last, 300, bytes(700))
    report, loss = check(store), lq.recover(store).loss
    assert loss is not None
    assert report.counts["lost_messages"] == loss.messages
    assert report.counts["lost_bytes"] == loss.bytes
    [stale] = [one for one in report.findings if one.kind == "stale_frames"]
    assert "`logquarry recover` keeps" in stale.reason
    lq.recover(store, apply=True)
    assert check(store).counts["messages"] == 80 - loss.messages


def test_messages_that_only_the_index_names_count_as_lost(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with small_store.opened(root) as store:
        for number in range(40):
            store.put(lq.Message("T", b"body", keys=f"k{number}"))
    shutil.rmtree(root / ".logquarry")
    shutil.rmtree(root / "consumequeue")
    overwrite(root / "commitlog" / f"{0:020}", 1_000, bytes(1_000))
    report, loss = check(root), lq.recover(root).loss
    assert loss is not None
    assert loss.messages > 0
    assert report.counts["lost_messages"] == loss.messages
    assert report.counts["lost_bytes"] == loss.bytes


def test_a_nul_byte_that_a_property_crc_covers_is_no_finding(tmp_path: Path) -> None:
    settings = {"enabledAppendPropCRC": "true", "mappedFileSizeCommitLog": "16384"}
    config = lq.StoreConfig.from_mapping(settings)
    with lq.MessageStore.open(tmp_path, mode="rw", config=config) as store:
        store.put(lq.Message("T", b"x", properties={"a": "before\0after"}))
    assert not verify_store(StoreLayout.open(tmp_path, config)).has_damage
    path = tmp_path / "commitlog" / f"{0:020d}"
    with path.open("rb") as file:
        at = file.read(1000).index(b"before")
    overwrite(path, at, b"\0")
    found = {finding.kind for finding in verify_store(StoreLayout.open(tmp_path, config)).findings}
    assert {"suspect_text", "bad_property_crc"} <= found


def test_one_of_a_thing_is_no_plural(tmp_path: Path) -> None:
    with small_store.opened(tmp_path) as writer:
        writer.put(lq.Message("t", b"x", keys="k"))
    shutil.rmtree(tmp_path / "consumequeue" / "t")
    [index_file] = (tmp_path / "index").iterdir()
    index_file.unlink()
    found = {one.kind: one.reason for one in check(tmp_path).findings}
    assert found["queue_missing"] == "the log has 1 message of it"
    lq.rebuild(tmp_path, apply=True, config=small_store.config())
    [queue_file] = (tmp_path / "consumequeue/t/0").iterdir()
    queue_file.write_bytes(queue_file.read_bytes()[:1])
    (tmp_path / "checkpoint").write_bytes(b"x")
    found = {one.kind: one.reason for one in check(tmp_path).findings}
    assert found["wrong_file_size"].startswith("1 byte instead of ")
    assert found["checkpoint_short"].startswith("1 byte instead of ")
    assert all("1 bytes" not in reason for reason in found.values())
