"""Many keys at once give the same file as single keys."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import logquarry as lq
from logquarry.disk.disk import Disk
from logquarry.disk.page_file import CheckpointFile
from logquarry.errors import UsageError
from logquarry.format import index
from logquarry.format.index import HEADER, IndexHeader, IndexShape
from logquarry.write.index_writer import IndexFileWriter, IndexKeeper, IndexWriter, next_name
from tests.helpers.failing_disk import FaultyDisk
from tests.helpers.small_store import opened
from tests.helpers.store_maker import IndexMaker

SHAPE = IndexShape(slots=5, entries=8)
NOON = 1_700_000_000_000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "index"


def open_index(folder: Path, shape: IndexShape = SHAPE) -> IndexWriter:
    return IndexWriter(Disk(), folder, shape, clock=lambda: NOON)


def put(writer: IndexWriter, messages: list[tuple[int, int, list[str]]]) -> None:
    """Index the messages of one call: physical offset, store time, keys."""
    keyed = [(number, key) for number, (_, _, keys) in enumerate(messages) for key in keys]
    writer.put(
        np.array([offset for offset, _, _ in messages], np.int64),
        np.array([time for _, time, _ in messages], np.int64),
        np.array([index.key_hash("t", key) for _, key in keyed], np.int64),
        np.array([number for number, _ in keyed], np.int64),
    )


def contents(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(folder.iterdir())]


keys = st.lists(st.sampled_from("abcdefgh"), max_size=3)
gaps = st.integers(-5_000, 400_000)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.lists(st.tuples(gaps, keys), max_size=6), max_size=6),
    st.integers(1, 7),
    st.integers(2, 12),
)
def test_many_at_once_are_one_after_the_other(
    tmp_path_factory: pytest.TempPathFactory,
    calls: list[list[tuple[int, list[str]]]],
    slots: int,
    entries: int,
) -> None:
    folder = tmp_path_factory.mktemp("files") / "index"
    writer = open_index(folder, IndexShape(slots, entries))
    makers: list[IndexMaker] = []
    offset, time = 0, NOON
    for call in calls:
        messages = []
        for gap, words in call:
            offset, time = offset + 100, time + gap
            messages.append((offset, time, words))
            if not makers or makers[-1].is_full:
                makers.append(IndexMaker(slots, entries, makers[-1] if makers else None))
            for word in words:
                if makers[-1].is_full:
                    makers.append(IndexMaker(slots, entries, makers[-1]))
                makers[-1].put(f"t#{word}", offset, time)
        put(writer, messages)
    writer.close()
    expected = [maker.data() for maker in makers]
    found = contents(folder) if makers else []
    if found and len(makers[-1].rows) == 1:
        # Without a key the number of entries on disk is 0.
        assert found[-1][36:40] == bytes(4)
        found[-1] = found[-1][:36] + expected[-1][36:40] + found[-1][40:]
    assert found == expected


def test_a_message_without_a_key_makes_the_first_file(folder: Path) -> None:
    writer = open_index(folder)
    put(writer, [(700, NOON, [])])
    (data,) = contents(folder)
    assert data == bytes(SHAPE.file_size)


def test_a_message_without_a_key_makes_the_next_file(folder: Path) -> None:
    filled: list[IndexFileWriter] = []
    writer = IndexWriter(Disk(), folder, SHAPE, clock=lambda: NOON, filled=filled.append)
    put(writer, [(100 * n, NOON + n, ["k"]) for n in range(SHAPE.entries - 1)])
    first = writer.last
    assert first is not None and first.room == 0 and len(contents(folder)) == 1
    put(writer, [(900, NOON + 9, [])])
    assert filled == [first]
    assert index.decode_header(contents(folder)[1]) == IndexHeader(
        NOON + 6, NOON + 6, 600, 600, 0, 1
    )


def test_the_last_message_is_indexed_again(folder: Path) -> None:
    put(open_index(folder), [(100, NOON, ["a"]), (200, NOON, ["b", "c"])])
    again = open_index(folder)
    assert again.last is not None and again.last.header.entry_count == 4
    put(again, [(100, NOON, ["a"]), (200, NOON, ["b", "c"]), (300, NOON, ["d"])])
    assert again.last.header.entry_count == 7


def test_entries_behind_the_header_are_no_chain(folder: Path) -> None:
    writer = open_index(folder)
    put(writer, [(100, NOON, ["a"])])
    assert writer.last is not None
    # Slots that a crash left behind: they name entries that the header does not count.
    end = HEADER.size + 4 * SHAPE.slots
    writer.last.file.buffer[HEADER.size : end] = (99).to_bytes(4, "big") * SHAPE.slots
    put(writer, [(200, NOON, ["b"])])
    entry = index.decode_entry(contents(folder)[0], SHAPE.entry_position(2))
    assert (entry.physical_offset, entry.previous) == (200, 0)


def test_names_ascend() -> None:
    one = next_name("", NOON)
    assert len(one) == 17 and one.endswith("000")
    two = next_name(one, NOON)
    assert two == f"{one[:-3]}001"
    assert next_name(two, NOON - 3_600_000) == f"{one[:-3]}002"
    assert next_name("20231231235959999", 0) == "20240101000000000"
    assert next_name("98", 0) == "99"
    assert next_name("99", 0) == "990"
    assert next_name("20241399000000000", 0) == "20241399000000001"


def test_a_flush_takes_what_has_changed_since(folder: Path) -> None:
    writer = open_index(folder)
    for number in range(2):
        put(writer, [(100 * number, NOON, ["a"])])
        assert writer.last is not None
        writer.last.flush()
        assert writer.last.file.flushed == SHAPE.file_size


def test_the_checkpoint_tells_of_no_key_that_the_log_may_lose(tmp_path: Path) -> None:
    disk = FaultyDisk()
    checkpoint = CheckpointFile(disk, tmp_path / "checkpoint")
    keeper = IndexKeeper(
        *(disk, tmp_path, SHAPE, checkpoint, lambda: NOON),
        sync_log=lambda: disk.order.append("log"),
    )
    put(keeper.writer, [(100 * n, NOON + n, ["k"]) for n in range(SHAPE.entries)])
    disk.order.clear()
    keeper.flush(2)
    assert [call for call in disk.order if call in ("log", "fdatasync")] == [
        *("log", "fdatasync", "fdatasync")
    ]
    assert checkpoint.index_timestamp == NOON + 6
    keeper.close()
    checkpoint.close()


def test_an_index_file_without_room_is_refused(tmp_path: Path) -> None:
    """The first key would make the writer create index files without end."""
    with pytest.raises(UsageError, match="max_index_num is 1, and must be at least 2"):
        opened(tmp_path / "store", max_index_num=1)
    assert not (tmp_path / "store").exists()
    with opened(tmp_path / "store", max_index_num=2) as store:
        store.put(lq.Message("t", keys="a b c"))
        store.wait_dispatched(timeout=20)
        assert [len(store.query("t", key)) for key in "abc"] == [1, 1, 1]
