from __future__ import annotations

import ctypes
import gc
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logquarry.disk.mapped_file import MappedFile
from logquarry.disk.write_buffers import TransientStorePool
from logquarry.errors import StoreUnavailable
from logquarry.format.fields import PAGE_SIZE
from logquarry.log.readable import ReadableMap
from tests.helpers.failing_disk import EIO, FaultyDisk

SIZE = 8 * PAGE_SIZE


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()


def positions(file: MappedFile) -> tuple[int, int, int]:
    return file.flushed, file.committed, file.wrote


def test_append_and_flush(disk: FaultyDisk, tmp_path: Path) -> None:
    file = MappedFile(disk, tmp_path / "0", 1000, SIZE)
    assert (file.base, file.size, file.room, file.is_full) == (1000, SIZE, SIZE, False)
    assert file.append(b"abc") == 0
    assert file.append(memoryview(b"defg")) == 3
    assert positions(file) == (0, 7, 7)
    assert file.flush() == 7
    assert positions(file) == (7, 7, 7)
    assert file.append(bytes(SIZE)) is None
    assert file.append(bytes(SIZE - 7)) == 7
    assert file.is_full and file.room == 0
    assert file.append(b"") == SIZE
    assert file.append(b"x") is None
    file.close()
    assert (tmp_path / "0").read_bytes() == b"abcdefg" + bytes(SIZE - 7)


def test_a_kernel_writes_and_advances(disk: FaultyDisk, tmp_path: Path) -> None:
    file = MappedFile(disk, tmp_path / "0", 0, SIZE)
    file.append(b"ab")
    # Without a handler of SIGBUS the buffer is not the map, and the file has no address.
    address = file.address or np.frombuffer(file.buffer, np.uint8).ctypes.data
    ctypes.memmove(address + file.wrote, b"cde", 3)
    file.advance(3)
    file.buffer[file.wrote : file.wrote + 2] = b"fg"
    file.advance(2)
    data = file.select(0)
    assert data is not None and bytes(data) == b"abcdefg"
    with pytest.raises(AssertionError):
        file.advance(SIZE)
    file.close()


def test_many_bytes_are_written_by_a_call(disk: FaultyDisk, tmp_path: Path) -> None:
    file = MappedFile(disk, tmp_path / "0", 0, SIZE)
    pooled = MappedFile(disk, tmp_path / "1", 0, SIZE, pool=TransientStorePool(1, SIZE))
    disk.most_bytes_a_write = PAGE_SIZE
    for each in (file, pooled):
        each.append(b"ab")
        each.write(memoryview(bytes(PAGE_SIZE) + b"c"))
        each.append(b"d")
        each.commit()
        data = each.select(0)
        assert data is not None and bytes(data) == b"ab" + bytes(PAGE_SIZE) + b"cd"
    with pytest.raises(AssertionError):
        file.write(memoryview(bytes(SIZE)))
    before = positions(file)
    disk.failing["write"] = EIO
    with pytest.raises(StoreUnavailable, match="write failed"):
        file.write(memoryview(b"x"))
    assert positions(file) == before and disk.health.reason is not None
    file.close()
    pooled.close()


def test_a_call_does_not_extend_a_truncated_file(disk: FaultyDisk, tmp_path: Path) -> None:
    file = MappedFile(disk, tmp_path / "0", 0, SIZE)
    file.append(b"earlier messages")
    os.truncate(tmp_path / "0", 4)
    with pytest.raises(StoreUnavailable, match=f"truncated the file to 4 of {SIZE} bytes"):
        file.write(memoryview(b"x"))
    assert (tmp_path / "0").stat().st_size == 4
    file.close()


def test_select_gives_what_is_written_and_no_more(disk: FaultyDisk, tmp_path: Path) -> None:
    file = MappedFile(disk, tmp_path / "0", 0, SIZE)
    assert file.select(0) is None
    file.append(b"0123456789")
    whole, part = file.select(0), file.select(3, 4)
    assert whole is not None and bytes(whole) == b"0123456789"
    assert part is not None and bytes(part) == b"3456"
    assert part.readonly
    assert file.select(10) is None and file.select(-1) is None
    assert file.select(8, 3) is None and file.select(3, 0) is None
    file.close()


def test_what_was_selected_outlives_the_file(disk: FaultyDisk, tmp_path: Path) -> None:
    file = MappedFile(disk, tmp_path / "0", 0, SIZE)
    file.append(b"still here")
    data = file.select(0)
    file.delete()
    assert not (tmp_path / "0").exists()
    assert file.select(0) is None
    del file
    gc.collect()
    assert data is not None and bytes(data) == b"still here"


def test_a_file_that_is_closed_during_a_select(
    disk: FaultyDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    MappedFile(disk, tmp_path / "0", 0, SIZE).close()
    file = MappedFile(disk, tmp_path / "0", 0, SIZE)
    file.set_positions(SIZE)

    def close(_: ReadableMap, chunk: int) -> tuple[int, int]:
        file.close()
        return 0, SIZE

    monkeypatch.setattr(ReadableMap, "_good_range", close)
    assert file.select(0) is None or not file.address


def test_closing_gives_everything_back(disk: FaultyDisk, tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    file = MappedFile(disk, tmp_path / "0", 0, SIZE)
    file.append(b"x")
    file.close()
    file.close()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_least_pages_count_pages_begun(disk: FaultyDisk, tmp_path: Path) -> None:
    file = MappedFile(disk, tmp_path / "0", 0, SIZE)
    file.append(bytes(PAGE_SIZE - 1))
    assert file.flush(1) == 0
    # One more byte completes a page.
    file.append(b"x")
    assert file.flush(2) == 0
    assert file.flush(1) == PAGE_SIZE
    file.append(b"x")
    assert file.flush(1) == PAGE_SIZE
    assert file.flush(0) == PAGE_SIZE + 1
    file.advance(file.room)
    assert file.flush(100) == SIZE, "a full file is flushed whatever it takes"
    assert disk.counts["fdatasync"] == 3
    file.flush(0)
    assert disk.counts["fdatasync"] == 3, "nothing to sync"
    file.close()


def test_a_failed_sync_keeps_the_position(disk: FaultyDisk, tmp_path: Path) -> None:
    file = MappedFile(disk, tmp_path / "0", 0, SIZE)
    file.append(b"abc")
    disk.failing["fdatasync"] = EIO
    with pytest.raises(StoreUnavailable):
        file.flush()
    disk.failing.clear()
    with pytest.raises(StoreUnavailable):
        file.flush()
    assert file.flushed == 0
    assert disk.counts["fdatasync"] == 1
    data = file.select(0)
    assert data is not None and bytes(data) == b"abc"
    file.close()


def test_what_no_name_leads_to_is_not_flushed(disk: FaultyDisk, tmp_path: Path) -> None:
    file = MappedFile(disk, tmp_path / "0", 0, SIZE)
    file.append(b"abc")
    file.guards_name = True
    (tmp_path / "0").unlink()
    assert not file.is_named()
    with pytest.raises(StoreUnavailable, match="deleted"):
        file.flush()
    assert file.flushed == 0
    file.close()


def test_the_flushed_time_is_of_what_was_flushed(disk: FaultyDisk, tmp_path: Path) -> None:
    file = MappedFile(disk, tmp_path / "0", 0, SIZE)
    file.append(b"abc")
    file.store_timestamp = 5
    assert file.flushed_timestamp == 0
    file.flush()
    file.append(b"abc")
    file.store_timestamp = 6
    assert file.flushed_timestamp == 5
    file.close()


def test_opening_again_finds_the_bytes(disk: FaultyDisk, tmp_path: Path) -> None:
    (tmp_path / "0").write_bytes(b"abc")
    file = MappedFile(disk, tmp_path / "0", 0, SIZE)
    assert (tmp_path / "0").stat().st_size == SIZE
    file.set_positions(3)
    assert positions(file) == (3, 3, 3)
    assert file.append(b"def") == 3
    file.close()
    assert (tmp_path / "0").read_bytes()[:7] == b"abcdef\0"
    with pytest.raises(StoreUnavailable, match="exists"):
        MappedFile(disk, tmp_path / "0", 0, SIZE, exclusive=True)


def test_clearing_touches_only_what_is_not_zero(disk: FaultyDisk, tmp_path: Path) -> None:
    (tmp_path / "0").write_bytes(b"x" * 100 + bytes(SIZE - 200) + b"y" * 100)
    file = MappedFile(disk, tmp_path / "0", 0, SIZE)
    assert file.holds_data()
    assert file.clear_from(50)
    assert disk.counts["fdatasync"] == 1
    assert (tmp_path / "0").read_bytes() == b"x" * 50 + bytes(SIZE - 50)
    assert not file.clear_from(50)
    assert disk.counts["fdatasync"] == 1
    file.clear_from(0)
    assert not file.holds_data()
    file.close()


def test_a_sparse_file_gets_its_blocks(disk: FaultyDisk, tmp_path: Path) -> None:
    with (tmp_path / "0").open("wb") as sparse:
        sparse.truncate(1 << 20)
    file = MappedFile(disk, tmp_path / "0", 0, 1 << 20)
    file.allocate()
    assert (tmp_path / "0").stat().st_blocks * 512 >= 1 << 20
    file.close()


def test_warm_files_are_in_memory(disk: FaultyDisk, tmp_path: Path) -> None:
    file = MappedFile(disk, tmp_path / "0", 0, SIZE)
    file.warm()
    file.append(b"abc")
    file.unlock()
    assert not file.is_locked_in_memory
    file.close()
    assert (tmp_path / "0").read_bytes() == b"abc" + bytes(SIZE - 3)


# ------------------------------------------------------------------------------------- transient
def test_a_commit_moves_the_buffer_to_the_file(disk: FaultyDisk, tmp_path: Path) -> None:
    pool = TransientStorePool(2, SIZE)
    file = MappedFile(disk, tmp_path / "0", 0, SIZE, pool=pool)
    assert (pool.available, file.is_transient, file.address) == (1, True, 0)
    file.append(b"abc")
    file.store_timestamp = 7
    assert positions(file) == (0, 0, 3)
    assert file.select(0) is None
    assert file.flush() == 0
    assert file.commit() == 3
    file.append(b"de")
    file.store_timestamp = 8
    assert positions(file) == (0, 3, 5)
    data = file.select(0)
    assert data is not None and bytes(data) == b"abc"
    assert file.flush() == 3 and file.flushed_timestamp == 7
    file.advance(file.room)
    disk.most_bytes_a_write = PAGE_SIZE
    assert file.commit(100) == SIZE
    assert (pool.available, file.is_transient, file.buffer.readonly) == (2, False, False)
    assert file.flush(100) == SIZE
    file.close()
    assert (tmp_path / "0").read_bytes()[:6] == b"abcde\0"


def test_commit_counts_pages_as_flush_does(disk: FaultyDisk, tmp_path: Path) -> None:
    file = MappedFile(disk, tmp_path / "0", 0, SIZE, pool=TransientStorePool(1, SIZE))
    file.append(bytes(PAGE_SIZE - 1))
    assert file.commit(1) == 0
    file.append(b"x")
    assert file.commit(1) == PAGE_SIZE
    file.append(b"x")
    assert file.commit(1) == PAGE_SIZE
    file.close()


def test_without_a_free_buffer_the_map_is_written(disk: FaultyDisk, tmp_path: Path) -> None:
    pool = TransientStorePool(1, SIZE)
    first = MappedFile(disk, tmp_path / "0", 0, SIZE, pool=pool)
    second = MappedFile(disk, tmp_path / "1", SIZE, SIZE, pool=pool)
    assert first.is_transient and not second.is_transient
    second.append(b"abc")
    assert second.commit() == second.committed == 3
    first.append(b"closing commits")
    first.close()
    second.close()
    assert pool.available == 1
    assert (tmp_path / "0").read_bytes().startswith(b"closing commits")


def test_a_failed_commit_poisons(disk: FaultyDisk, tmp_path: Path) -> None:
    file = MappedFile(disk, tmp_path / "0", 0, SIZE, pool=TransientStorePool(1, SIZE))
    file.append(b"abc")
    disk.failing["write"] = EIO
    with pytest.raises(StoreUnavailable, match="commit failed"):
        file.commit()
    assert positions(file) == (0, 0, 3)
    assert disk.health.reason is not None
    file.close()


steps = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, 2 * PAGE_SIZE)),
        st.tuples(st.sampled_from(["commit", "flush"]), st.integers(0, 3)),
    ),
    max_size=30,
)


@given(steps=steps, is_transient=st.booleans())
def test_positions_are_in_order_and_bytes_where_they_belong(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]], is_transient: bool
) -> None:
    path = tmp_path_factory.mktemp("file") / "0"
    pool = TransientStorePool(1, SIZE) if is_transient else None
    file = MappedFile(FaultyDisk(), path, 0, SIZE, pool=pool)
    written = b""
    for number, (step, count) in enumerate(steps):
        if step == "append":
            data = bytes([1 + number]) * count
            at = file.append(data)
            assert at == (len(written) if len(written) + count <= SIZE else None)
            written += data if at is not None else b""
        elif step == "commit":
            assert file.commit(count) == file.committed
        else:
            assert file.flush(count) == file.flushed
        assert 0 <= file.flushed <= file.committed <= file.wrote == len(written) <= SIZE
        assert bytes(file.select(0) or b"") == written[: file.committed]
    file.close()
    assert path.read_bytes() == written.ljust(SIZE, b"\0")
