"""Index files of any shape, given or inferred, sound or damaged."""

from __future__ import annotations

import random
import struct
import time
from pathlib import Path

import pytest

from logquarry.config import StoreConfig
from logquarry.format import index, java
from logquarry.format.index import IndexShape
from logquarry.log.layout import StoreLayout
from logquarry.read.index import Index
from tests.helpers.store_maker import IndexMaker

TIME = 1_700_000_000_000


def index_of(root: Path, config: StoreConfig | None = None) -> Index:
    (root / "commitlog").mkdir(exist_ok=True)
    return Index(StoreLayout.open(root, config))


def write(root: Path, *files: bytes) -> Path:
    (root / "index").mkdir(exist_ok=True)
    for number, data in enumerate(files):
        (root / "index" / str(20240101000000000 + number)).write_bytes(data)
    return root


def filled(slots: int, entries: int, keys: int, *, seed: int = 0, first: int = 0) -> IndexMaker:
    rng = random.Random(seed)
    maker = IndexMaker(slots, entries)
    offset = first
    for number in range(keys):
        maker.put(f"orders#key{number % 7}", offset, TIME + 300 * number)
        offset += rng.choice([0, 150, 2000])
    return maker


@pytest.mark.parametrize("seed", range(60))
def test_the_shape_is_told_by_the_contents(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    slots, entries = rng.randint(1, 400), rng.randint(2, 300)
    keys = rng.choice([1, 2, entries - 1, rng.randint(1, entries - 1)])
    maker = filled(slots, entries, min(keys, entries - 1), seed=seed, first=rng.choice([0, 1234]))
    (file,) = index_of(write(tmp_path, maker.data())).files
    assert file.shape == IndexShape(slots, entries)
    assert file.is_usable


def test_the_shape_of_a_file_that_is_being_written(tmp_path: Path) -> None:
    """A torn header counts fewer entries than the file has, and no setting gives the shape."""
    maker = filled(50, 200, 120, first=7)
    data = bytearray(maker.data())
    header = index.decode_header(bytes(data))
    earlier = maker.rows[100]
    before = header._replace(entry_count=101, end_offset=earlier[1])
    data[:40] = index.encode_header(before)
    (file,) = index_of(write(tmp_path, bytes(data))).files
    assert file.shape == IndexShape(50, 200)


@pytest.mark.parametrize("counts_keys", [False, True])
def test_the_shape_without_the_last_entry(counts_keys: bool, tmp_path: Path) -> None:
    """The end offset in the header is wrong, and bytes follow the last entry. Only a search through
    the possible numbers of slots finds the shape. The number of used slots narrows the search,
    unless RocketMQ before 4.7 counted keys there.
    """
    slots, entries, keys = (300, 2_000, 1_000) if counts_keys else (110_000, 15_004, 15_000)
    maker = IndexMaker(slots, entries)
    for number in range(keys):
        maker.put(f"orders#key{number % 50 if counts_keys else number}", 100 + number * 100, TIME)
    data = bytearray(maker.data())
    header = index.decode_header(bytes(data))
    used = keys if counts_keys else header.slots_used
    data[:40] = index.encode_header(
        header._replace(end_offset=header.end_offset + 1, slots_used=used)
    )
    data[-4:] = b"\xff" * 4
    (file,) = index_of(write(tmp_path, bytes(data))).files
    assert file.shape == IndexShape(slots, entries)


def test_a_stated_shape_counts(tmp_path: Path) -> None:
    config = StoreConfig(max_hash_slot_num=3, max_index_num=9)
    (file,) = index_of(write(tmp_path, filled(50, 200, 120).data()), config).files
    assert file.shape == IndexShape(3, 9)


@pytest.mark.parametrize("seed", range(20))
def test_garbage_has_no_shape_and_makes_the_index_unusable(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    data = rng.randbytes(rng.choice([41, 64, 65, 1000, 20_000]))
    found = index_of(write(tmp_path, filled(9, 30, 20).data(), data))
    if not found.files[1].is_empty:
        assert not found.is_usable
    assert isinstance(found.query_offsets("orders", "key1", 32), list)


@pytest.mark.parametrize("size", [0, 1, 39, 40, 41, 59, 100])
def test_short_files_hold_what_they_hold(tmp_path: Path, size: int) -> None:
    data = filled(9, 30, 20).data()
    found = index_of(write(tmp_path, data, data[:size]))
    assert isinstance(found.query_offsets("orders", "key1", 32), list)
    assert found.files[1].is_empty == (size < 40)
    stated = StoreConfig(max_hash_slot_num=9, max_index_num=30)
    cut = index_of(write(tmp_path, data[: 40 + 36 + 20 * 10]), stated)
    # A chain that leads past the end may have lost entries: a query does not return a part of it.
    assert cut.files[0].all_offsets("orders", "no key") is None


def test_no_files_no_index(tmp_path: Path) -> None:
    assert not index_of(tmp_path).is_usable
    assert index_of(tmp_path).query_offsets("orders", "key1", 32) == []
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "not a number").write_bytes(b"")
    assert not index_of(tmp_path).is_usable


def test_queries(tmp_path: Path) -> None:
    first = filled(20, 60, 59, first=1000)
    second = IndexMaker(20, 60, first)
    second.put("orders#key3", 500_000, TIME + 30_000)
    found = index_of(write(tmp_path, first.data(), second.data()))
    assert found.is_usable
    expected = [row[1] for n, row in enumerate(first.rows) if n and (n - 1) % 7 == 3]
    newest_first = [500_000, *reversed(expected)]
    assert found.query_offsets("orders", "key3", 64) == newest_first
    assert found.query_offsets("orders", "key3", 3) == newest_first[:3]
    assert found.query_offsets("orders", "key3", 0) == []
    assert found.query_offsets("orders", "other", 64) == []
    # Times count in seconds after the file's first: key 3 is put 900 ms after it, and later.
    assert found.query_offsets("orders", "key3", 64, TIME, TIME + 999) == expected[:1]
    assert found.query_offsets("orders", "key3", 64, TIME + 25_000) == [500_000]
    assert found.files[0].all_offsets("orders", "key3") == newest_first[1:]


def test_at_most_max_msgs_num_batch_offsets(tmp_path: Path) -> None:
    maker = IndexMaker(4, 200)
    for number in range(150):
        maker.put("orders#k", 100 * number, TIME)
    found = index_of(write(tmp_path, maker.data()))
    assert len(found.query_offsets("orders", "k", 1000)) == 64
    config = StoreConfig(max_msgs_num_batch=100)
    assert len(index_of(tmp_path, config).query_offsets("orders", "k", 1000)) == 100


def test_collisions_come_along(tmp_path: Path) -> None:
    maker = IndexMaker(4, 10)
    maker.put("orders#Aa", 100, TIME)
    maker.put("orders#BB", 200, TIME)
    found = index_of(write(tmp_path, maker.data()))
    assert found.query_offsets("orders", "Aa", 32) == [200, 100]


def test_a_file_without_keys_hides_the_older_ones(tmp_path: Path) -> None:
    """QUIRK: queryOffset stops at the first file that begins before the wanted time."""
    empty = IndexMaker(20, 60).data()
    found = index_of(write(tmp_path, filled(20, 60, 30).data(), empty))
    assert found.is_usable
    assert len(found.query_offsets("orders", "key1", 32)) > 0
    assert found.query_offsets("orders", "key1", 32, begin=1) == []


def test_the_count_of_an_empty_file_is_zero_on_disk(tmp_path: Path) -> None:
    data = IndexMaker(20, 60).data()
    data = data[:36] + struct.pack(">i", 0) + data[40:]
    (file,) = index_of(write(tmp_path, data)).files
    assert file.header.entry_count == 1
    assert file.is_empty


@pytest.mark.parametrize("target", [5, 6, 30, 0x7FFFFFFF, -1])
def test_cycles_and_links_that_lead_nowhere(tmp_path: Path, target: int) -> None:
    maker = IndexMaker(1, 40)
    for number in range(20):
        maker.put("orders#k", 100 * number, TIME)
    hashed, offset, seconds, _ = maker.rows[5]
    maker.rows[5] = (hashed, offset, seconds, target)
    config = StoreConfig(max_hash_slot_num=1, max_index_num=40)
    found = index_of(write(tmp_path, maker.data()), config)
    assert found.query_offsets("orders", "k", 64) == [100 * n for n in range(19, 3, -1)]


def test_negative_seconds_end_a_chain(tmp_path: Path) -> None:
    maker = IndexMaker(1, 40)
    for number in range(5):
        maker.put("orders#k", 100 * number, TIME)
    hashed, offset, _, previous = maker.rows[3]
    maker.rows[3] = (hashed, offset, -1, previous)
    config = StoreConfig(max_hash_slot_num=1, max_index_num=40)
    found = index_of(write(tmp_path, maker.data()), config)
    assert found.query_offsets("orders", "k", 64) == [400, 300]


def test_queries_warn_of_damage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = StoreConfig(max_hash_slot_num=50, max_index_num=200)
    shape = IndexShape(50, 200)
    older, newer = filled(50, 200, 190), filled(50, 200, 190, first=10**6)
    root = write(tmp_path, older.data(), newer.data())
    assert index_of(root, config).query_offsets("orders", "key3", 64)
    assert not caplog.messages
    # A lost page: the entries in it are zeros.
    start = shape.entry_position(150)
    data = bytearray(newer.data())
    data[start : start + 512] = bytes(512)
    harmed = bytearray(older.data())
    harmed[:40] = bytes(40)
    write(tmp_path, bytes(harmed), bytes(data))
    index_of(root, config).query_offsets("orders", "key3", 64)
    texts = [text.partition(": a query by key can lack messages")[0] for text in caplog.messages]
    first, second = (tmp_path / "index" / str(20240101000000000 + n) for n in range(2))
    assert any(text.startswith(f"{second}: entry ") for text in texts)
    assert f"{first}: the header has no entries, although a newer file follows" in texts


def test_raw_hashes_of_3x(tmp_path: Path) -> None:
    """3.x stored a negative hash as it is, in the slot of its absolute value."""
    key = next(f"k{n}" for n in range(100) if java.hash_code(f"orders#k{n}") < 0)
    maker = IndexMaker(16, 40)
    maker.put(f"orders#{key}", 500, TIME)
    hashed, offset, seconds, previous = maker.rows[1]
    maker.rows[1] = (-hashed, offset, seconds, previous)
    found = index_of(write(tmp_path, maker.data()))
    assert found.query_offsets("orders", key, 32) == [500]


def test_a_sparse_file_of_the_default_size_is_quick(tmp_path: Path) -> None:
    shape = IndexShape()
    path = tmp_path / "index" / "20240101000000000"
    path.parent.mkdir()
    hashed = index.key_hash("orders", "k")
    with path.open("wb") as file:
        file.truncate(shape.file_size)
        file.write(index.encode_header(index.IndexHeader(TIME, TIME, 77, 77, 1, 2)))
        file.seek(shape.slot_position(hashed))
        file.write(struct.pack(">i", 1))
        file.seek(shape.entry_position(1))
        file.write(struct.pack(">iqii", hashed, 77, 0, 0))
    # The CPU time of this thread alone: other processes may use the cores.
    started = time.thread_time()
    assert index_of(tmp_path).query_offsets("orders", "k", 32) == [77]
    assert time.thread_time() - started < 0.5


@pytest.mark.parametrize("seed", range(100))
def test_random_harm_raises_nothing(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    data = bytearray(filled(8, 40, rng.randint(1, 39)).data())
    for _ in range(rng.randint(1, 30)):
        data[rng.randrange(len(data))] = rng.choice([0, 1, 0x7F, 0x80, 0xFF])
    config = rng.choice([None, StoreConfig(max_hash_slot_num=8, max_index_num=40)])
    found = index_of(write(tmp_path, bytes(data)), config)
    assert found.is_usable in (True, False)
    for number in range(7):
        assert len(found.query_offsets("orders", f"key{number}", 64)) <= 40
