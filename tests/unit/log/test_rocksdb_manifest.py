"""The table files that a manifest of RocksDB names."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from logquarry.log.rocksdb import table_name, table_numbers

BLOCK = 32_768
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def varint(number: int) -> bytes:
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes(found) + bytes([number])


def text(value: bytes) -> bytes:
    return varint(len(value)) + value


def new_file(number: int, *, key: bytes = b"key", tag: int = 103) -> bytes:
    found = varint(tag) + varint(6) + varint(number)
    # Only NEW_FILE_3 has the number of a folder here.
    found += varint(1) if tag == 102 else b""
    found += varint(1_449) + text(key) + text(b"last")
    found += varint(300) * (0 if tag == 7 else 2)
    # Of further fields only NEW_FILE_4 has some: a tag and a text each, and a tag that ends them.
    return found + (varint(5) + text(b"\1\2") + varint(1) if tag == 103 else b"")


def deleted_file(number: int) -> bytes:
    return varint(6) + varint(0) + varint(number)


def of_family(number: int) -> bytes:
    return varint(200) + varint(number)


def manifest(*edits: bytes) -> bytes:
    """A manifest with these edits, divided into records as RocksDB divides them."""
    found = bytearray()
    for edit in edits:
        rest, is_first = edit, True
        while rest or is_first:
            left = BLOCK - len(found) % BLOCK
            if left < 7:
                found += bytes(left)
                continue
            part, rest = rest[: left - 7], rest[left - 7 :]
            kind = (LAST if not rest else MIDDLE) if not is_first else FIRST if rest else FULL
            found += struct.pack("<IHB", 0, len(part), kind) + part
            is_first = False
    return bytes(found)


def test_tables_that_were_added_and_not_deleted() -> None:
    first = varint(1) + text(b"leveldb.BytewiseComparator") + varint(2) + varint(4)
    edits = [
        first + varint(3) + varint(9) + varint(4) + varint(0),
        *(new_file(number, tag=tag) for number, tag in ((5, 7), (6, 100), (7, 102), (8, 103))),
        deleted_file(5) + deleted_file(8) + new_file(300) + varint(5) + varint(1) + text(b"key"),
        varint(8_193) + text(b"an id that readers may skip") + varint(10) + varint(7),
    ]
    assert table_numbers(manifest(*edits)) == {6, 7, 300}
    assert table_name(300) == "000300.sst" and table_name(1_234_567) == "1234567.sst"


def test_a_file_that_moves_to_another_level_stays() -> None:
    assert table_numbers(manifest(new_file(9), deleted_file(9) + new_file(9))) == {9}


def test_a_dropped_column_family_has_no_tables() -> None:
    families = [of_family(1) + varint(201) + text(b"timer"), new_file(4) + of_family(1)]
    edits = [*families, new_file(5), of_family(1) + varint(202)]
    assert table_numbers(manifest(*edits)) == {5}


@pytest.mark.parametrize("length", [BLOCK, 3 * BLOCK, BLOCK - 32, BLOCK - 40])
def test_edits_that_cross_blocks(length: int) -> None:
    edits = [new_file(4, key=bytes(length)), new_file(5), new_file(6)]
    assert table_numbers(manifest(*edits)) == {4, 5, 6}


def test_an_edit_that_is_being_written_does_not_count() -> None:
    whole = manifest(new_file(4))
    for end in range(len(whole), len(manifest(new_file(4), new_file(5)))):
        assert table_numbers(manifest(new_file(4), new_file(5))[:end]) == {4}
    assert table_numbers(whole + bytes(100)) == {4}


@pytest.mark.parametrize("edit", [varint(77), new_file(4)[:-3], varint(3), b"\xff" * 11])
def test_an_invalid_edit(edit: bytes) -> None:
    with pytest.raises(ValueError, match="an edit of the manifest"):
        table_numbers(manifest(edit))


def test_the_manifests_of_rocksdb(tmp_path: Path) -> None:
    rocksdict = pytest.importorskip("rocksdict")
    options = rocksdict.Options(raw_mode=True)
    options.create_missing_column_families(True)
    database = rocksdict.Rdict(str(tmp_path), options, {"more": rocksdict.Options(raw_mode=True)})
    for number in range(5):
        for family in (database, database.get_column_family("more")):
            family[bytes([number])] = bytes(1_000)
            family.flush()
    database.compact_range(None, None)
    database.close()
    (name,) = tmp_path.glob("MANIFEST-*")
    there = {path.name for path in tmp_path.glob("*.sst")}
    assert there and set(map(table_name, table_numbers(name.read_bytes()))) == there
