"""Index entries compared with the keys of their messages."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import pytest

from logquarry.config import StoreConfig
from logquarry.format import index, java, sys_flag
from logquarry.log.layout import StoreLayout
from logquarry.message import Message
from logquarry.repair.audit.differences import EITHER
from logquarry.repair.findings import Finding
from logquarry.repair.verification import verify_store
from logquarry.store.message_store import StoreWriter
from tests.helpers.store_maker import StoreMaker

SHAPE = index.IndexShape(16, 50)
CONFIG = StoreConfig(max_hash_slot_num=16, max_index_num=50)
NO_CHECKPOINT = "checkpoint_missing"


def check(root: Path) -> list[Finding]:
    report = verify_store(StoreLayout.open(root, CONFIG))
    return [finding for finding in report.findings if finding.kind != NO_CHECKPOINT]


def kinds(root: Path) -> list[tuple[str, str]]:
    return [(finding.severity, finding.kind) for finding in check(root)]


def keys_of(number: int) -> list[str]:
    return [f"{number * 7919:x}key{n}" for n in range(1 + number % 3)]


@pytest.fixture
def maker() -> StoreMaker:
    """Twenty messages of one to three keys each, all in one index file."""
    made = StoreMaker()
    for number in range(20):
        made.put(keys=" ".join(keys_of(number)))
    return made


def entry(root: Path, number: int) -> index.IndexEntry:
    return index.decode_entry(index_file(root).read_bytes(), SHAPE.entry_position(number))


def index_file(root: Path) -> Path:
    return min((root / "index").iterdir())


def change(root: Path, number: int, **values: int) -> None:
    data = index.ENTRY.struct.pack(*entry(root, number)._replace(**values))
    with index_file(root).open("r+b") as file:
        file.seek(SHAPE.entry_position(number))
        file.write(data)


def test_a_sound_index_has_no_findings(maker: StoreMaker, tmp_path: Path) -> None:
    assert check(maker.write(tmp_path)) == []


def test_a_hash_in_the_right_chain_that_is_wrong_is_found(
    maker: StoreMaker, tmp_path: Path
) -> None:
    root = maker.write(tmp_path)
    before = entry(root, 7)
    change(root, 7, key_hash=before.key_hash ^ SHAPE.slots)
    now = entry(root, 7)
    assert now.key_hash != before.key_hash
    assert now.key_hash % SHAPE.slots == before.key_hash % SHAPE.slots
    (finding,) = check(root)
    assert (finding.severity, finding.kind) == ("damage", "index_entry_wrong")
    assert (finding.offset, finding.length) == (SHAPE.entry_position(7), 20)
    assert finding.file == f"index/{index_file(root).name}"
    assert finding.reason == (
        f"entry 7 points to {now.physical_offset}, "
        f"whose message has no key of the hash {now.key_hash}"
    ) + EITHER.format(now.physical_offset)


def test_entries_of_one_file_that_are_wrong_are_one_finding(
    maker: StoreMaker, tmp_path: Path
) -> None:
    root = maker.write(tmp_path)
    for number in (5, 6, 20):
        slot = entry(root, number).key_hash % SHAPE.slots
        change(root, number, key_hash=slot)
    (finding,) = check(root)
    assert (finding.offset, finding.length) == (SHAPE.entry_position(5), 60)
    assert finding.reason.endswith(", and 2 more")


def test_an_entry_that_points_at_another_message_is_found(
    maker: StoreMaker, tmp_path: Path
) -> None:
    root = maker.write(tmp_path)
    change(root, 9, physical_offset=maker.frames[3].physical_offset)
    assert ("damage", "index_entry_wrong") in kinds(root)


def test_a_hash_with_its_sign_is_sound_and_one_with_another_is_not(
    maker: StoreMaker, tmp_path: Path
) -> None:
    # 3.x stored hashes as they are.
    root = maker.write(tmp_path)
    texts = [f"orders#{key}" for number in range(20) for key in keys_of(number)]
    raw = {abs(java.hash_code(text)): java.hash_code(text) for text in texts}
    numbers = range(1, len(maker.index_files[0].rows))
    hashes = {number: raw[entry(root, number).key_hash] for number in numbers}
    assert min(hashes.values()) < 0 < max(hashes.values())
    for number, value in hashes.items():
        change(root, number, key_hash=value)
    assert check(root) == []
    turned = next(number for number, value in hashes.items() if value > 0)
    change(root, turned, key_hash=-hashes[turned])
    assert kinds(root) == [("damage", "index_entry_wrong")]


def test_an_entry_for_a_damaged_frame_is_not_to_blame(maker: StoreMaker, tmp_path: Path) -> None:
    root = maker.write(tmp_path)
    place = entry(root, 7).physical_offset
    (root / "abort").touch()
    with (root / "commitlog" / f"{place // 4096 * 4096:020d}").open("r+b") as file:
        file.seek(place % 4096 + 88)
        file.write(b"\xff")
    assert kinds(root) == [
        ("damage", "bad_body_crc"),
        ("note", "queue_in_damage"),
        ("note", "abort_file"),
    ]


# ------------------------------------------------------------------------------------- what lacks
def test_keys_that_are_not_in_the_index_are_a_note(tmp_path: Path) -> None:
    maker = StoreMaker()
    for number in range(9):
        maker.put(keys=f"key{number}")
        if number in (3, 4):
            # The maker indexes the given keys.
            maker.put(properties=b"KEYS\x01lost and gone gone\x02UNIQ_KEY\x01one")
    (finding,) = check(maker.write(tmp_path))
    assert (finding.severity, finding.kind, finding.offset) == ("note", "index_gap", 0)
    begin, end = maker.frames[0].physical_offset, maker.frames[-1].physical_offset
    text = f"8 keys of messages between {begin} and {end} have no entry"
    assert finding.reason == text


@pytest.mark.parametrize(
    ("flag", "properties"),
    [
        (sys_flag.TRANSACTION_ROLLBACK, b"KEYS\x01k"),
        (sys_flag.TRANSACTION_COMMIT, b"KEYS\x01k"),
        (0, b"KEYS\x01   "),
        (0, b"TAGS\x01k"),
    ],
    ids=["rollback", "commit", "spaces", "none"],
)
def test_messages_that_need_no_entry(tmp_path: Path, flag: int, properties: bytes) -> None:
    maker = StoreMaker()
    maker.put(keys="first")
    # 3.x did not index COMMIT messages, and nothing shows that a store is of 3.x.
    maker.put(sys_flag=flag, properties=properties, tags="k" if b"TAGS" in properties else "")
    maker.put(keys="last")
    assert check(maker.write(tmp_path)) == []


@pytest.mark.parametrize("chunk", [1, 2, 5, 1 << 18])
def test_keys_on_both_sides_of_a_files_end_are_there(
    tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("logquarry.repair.audit.index_entries._CHUNK", chunk)
    maker = StoreMaker()
    for number in range(60):
        maker.put(keys=f"a{number} b{number} a{number}")
    assert len(maker.index_files) == 4
    root = maker.write(tmp_path)
    assert check(root) == []
    slot = entry(root, 20).key_hash % SHAPE.slots
    change(root, 20, key_hash=slot)
    assert [(f.kind, f.offset) for f in check(root)] == [
        ("index_entry_wrong", SHAPE.entry_position(20))
    ]


def test_entries_out_of_order_tell_nothing_of_what_lacks(maker: StoreMaker, tmp_path: Path) -> None:
    root = maker.write(tmp_path)
    change(root, 9, physical_offset=0)
    assert "index_gap" not in {finding.kind for finding in check(root)}


def test_a_wrong_hash_in_a_real_store_is_found_without_its_shape(
    golden: Path, tmp_path: Path
) -> None:
    root = shutil.copytree(golden / "single" / "store", tmp_path / "store")
    shape = index.IndexShape(64, 256)
    position = shape.entry_position(7)
    value = struct.unpack_from(">i", index_file(root).read_bytes(), position)[0]
    with index_file(root).open("r+b") as file:
        file.seek(position)
        file.write(struct.pack(">i", value ^ 64))
    report = verify_store(StoreLayout.open(root))
    assert [(f.severity, f.kind, f.offset) for f in report.findings] == [
        ("damage", "index_entry_wrong", position)
    ]


def test_an_index_that_says_to_reach_further_than_its_entries_is_not_taken_as_whole(
    maker: StoreMaker, tmp_path: Path
) -> None:
    root = maker.write(tmp_path)
    data = bytearray(index_file(root).read_bytes())
    header = index.decode_header(bytes(data))
    lost = sum(len(keys_of(number)) for number in (17, 18, 19))
    header = header._replace(entry_count=header.entry_count - lost)
    data[: index.HEADER.size] = index.encode_header(header)
    index_file(root).write_bytes(data)
    assert ("damage", "index_header") in kinds(root)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_index_file_is_noted(tmp_path: Path, lost: int) -> None:
    maker = StoreMaker()
    for number in range(80):
        maker.put(keys=" ".join(keys_of(number)))
    root = maker.write(tmp_path)
    files = sorted((root / "index").iterdir())
    assert len(files) > 3
    files[lost].unlink()
    (finding,) = check(root)
    assert (finding.severity, finding.kind, finding.file) == ("note", "index_gap", "index")
    assert "an index file is missing" in finding.reason


def test_an_index_of_3_1_is_not_behind_without_keys_of_commit_messages(tmp_path: Path) -> None:
    config = StoreConfig(dialect="3.1", max_hash_slot_num=16, max_index_num=50)
    with StoreWriter.start(tmp_path, config=config) as store:
        store.put(Message("T", b"a", keys="first"))
        store.put(Message("T", b"b", keys="commit", sys_flag=sys_flag.TRANSACTION_COMMIT))
    assert check(tmp_path) == []


def test_an_index_without_some_keys_of_its_last_message_is_behind(tmp_path: Path) -> None:
    index_keys, log_keys = ["one two", "three"], ["one two", "three four five"]
    for name, keys in (("index", index_keys), ("log", log_keys)):
        made = StoreMaker()
        for text in keys:
            made.put(keys=text)
        made.write(tmp_path / name)
    shutil.copyfile(index_file(tmp_path / "index"), index_file(tmp_path / "log"))
    (found,) = check(tmp_path / "log")
    assert (found.severity, found.kind) == ("note", "index_behind")
    assert found.reason.startswith("lacks 2 keys of its last message")
