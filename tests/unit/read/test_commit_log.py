"""The log's end without a read of the log, and the text about a place in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from logquarry.errors import CorruptFrame, MessageNotFound
from logquarry.log.layout import StoreLayout
from logquarry.read.commit_log import CommitLog
from logquarry.store.message_store import MessageStore
from tests.helpers.files import overwrite
from tests.helpers.store_maker import StoreMaker

SIZE = 1000


@pytest.fixture
def maker() -> StoreMaker:
    maker = StoreMaker(log_file_size=SIZE)
    for number in range(22):
        maker.put(queue_id=number % 3, body=bytes([number]) * 60)
    return maker


def end_of(maker: StoreMaker) -> int:
    return maker.frames[-1].physical_offset + maker.frames[-1].size


def harm(root: Path, offset: int, data: bytes) -> None:
    path = root / f"commitlog/{offset // SIZE * SIZE:020d}"
    overwrite(path, offset % SIZE, data)


def cut_queues(root: Path, count: int) -> None:
    """Leaves ``count`` units in the only file of each queue."""
    for path in (root / "consumequeue").rglob("0" * 20):
        path.write_bytes(path.read_bytes()[: 20 * count].ljust(200, b"\0"))


@pytest.mark.parametrize("abort", [False, True])
@pytest.mark.parametrize("queues", ["whole", "behind", "gone"])
def test_the_end(maker: StoreMaker, tmp_path: Path, abort: bool, queues: str) -> None:
    maker.write(tmp_path)
    if abort:
        (tmp_path / "abort").touch()
    if queues == "behind":
        cut_queues(tmp_path, 4)
    elif queues == "gone":
        cut_queues(tmp_path, 0)
    with MessageStore.open(tmp_path) as store:
        assert (store.min_offset, store.max_offset) == (0, end_of(maker))
        assert store.message_at(maker.frames[-1].physical_offset).frame == maker.frames[-1]


def test_the_end_is_behind_a_blank_too(tmp_path: Path) -> None:
    maker = StoreMaker(log_file_size=SIZE)
    while len(maker.log) < SIZE:
        maker.put(body=bytes(60))
    last = maker.frames.pop()
    maker.log = maker.log[: last.physical_offset]
    maker.units["orders", 0].pop(last.queue_offset)
    maker.write(tmp_path)
    with MessageStore.open(tmp_path) as store:
        assert store.max_offset == SIZE


@pytest.mark.parametrize("abort", [False, True])
def test_files_made_in_advance_hold_nothing(maker: StoreMaker, tmp_path: Path, abort: bool) -> None:
    maker.write(tmp_path)
    if abort:
        (tmp_path / "abort").touch()
    for number in (len(maker.log) // SIZE + 1, len(maker.log) // SIZE + 2):
        (tmp_path / f"commitlog/{number * SIZE:020d}").write_bytes(bytes(SIZE))
    with MessageStore.open(tmp_path) as store:
        assert store.max_offset == end_of(maker)


def test_after_a_crash_what_stands_behind_damage_counts(maker: StoreMaker, tmp_path: Path) -> None:
    maker.write(tmp_path)
    cut_queues(tmp_path, 4)
    harm(tmp_path, maker.frames[15].physical_offset + 90, b"\xff\xff")
    with MessageStore.open(tmp_path) as store:
        # In a cleanly closed store, the frames from the last queued one on determine the end.
        assert store.max_offset == maker.frames[15].physical_offset
    (tmp_path / "abort").touch()
    with MessageStore.open(tmp_path) as store:
        assert store.max_offset == end_of(maker)


def test_a_torn_tail_is_not_in_the_log(maker: StoreMaker, tmp_path: Path) -> None:
    maker.write(tmp_path)
    (tmp_path / "abort").touch()
    last = maker.frames[-1]
    harm(tmp_path, last.physical_offset + 50, bytes(last.size - 50))
    with MessageStore.open(tmp_path) as store:
        assert store.max_offset == last.physical_offset
        with pytest.raises(MessageNotFound):
            store.message_at(last.physical_offset)


def test_the_queue_is_ahead_of_a_log_that_lost_its_end(maker: StoreMaker, tmp_path: Path) -> None:
    maker.write(tmp_path)
    lost = maker.frames[-2]
    harm(tmp_path, lost.physical_offset, bytes(SIZE - lost.physical_offset % SIZE))
    with MessageStore.open(tmp_path) as store:
        assert store.max_offset == lost.physical_offset


def test_long_ends_are_followed_too(tmp_path: Path) -> None:
    maker = StoreMaker(log_file_size=100_000)
    for _ in range(600):
        maker.put(body=b"x")
    maker.write(tmp_path)
    for path in (tmp_path / "consumequeue").rglob("0*"):
        if path.is_file() and int(path.name) > 0:
            path.unlink()
    for abort in (False, True):
        if abort:
            (tmp_path / "abort").touch()
        with MessageStore.open(tmp_path) as store:
            assert store.max_offset == end_of(maker)


def test_without_files(tmp_path: Path) -> None:
    (tmp_path / "commitlog").mkdir()
    log = CommitLog(StoreLayout.open(tmp_path))
    assert (log.min_offset, log.max_offset) == (0, 0)
    assert log.frame_at(0, 100) is None
    assert log.store_time_at(0, 100) == -1
    with pytest.raises(MessageNotFound):
        log.message_at(0)


def test_a_slip_is_not_reported_as_damage(maker: StoreMaker, tmp_path: Path) -> None:
    maker.write(tmp_path)
    with MessageStore.open(tmp_path) as store:
        for made in maker.frames:
            for offset in (made.physical_offset + 1, made.physical_offset + made.size - 1):
                with pytest.raises(MessageNotFound, match=f"the one at {made.physical_offset}$"):
                    store.message_at(offset)
        blank = SIZE - 1
        with pytest.raises(MessageNotFound, match="a blank fills the file"):
            store.message_at(blank)
        for offset in (-1, end_of(maker), 1 << 60):
            with pytest.raises(MessageNotFound, match=f"from 0 to {end_of(maker)}"):
                store.message_at(offset)


def test_damage_is_reported_where_it_is(maker: StoreMaker, tmp_path: Path) -> None:
    maker.write(tmp_path)
    crc, magic = maker.frames[3], maker.frames[11]
    harm(tmp_path, crc.physical_offset + 90, b"\xff\xff")
    harm(tmp_path, magic.physical_offset + 4, b"\1\2\3\4")
    with MessageStore.open(tmp_path) as store:
        for made, kind in ((crc, "bad_body_crc"), (magic, "bad_magic")):
            with pytest.raises(CorruptFrame) as caught:
                store.message_at(made.physical_offset)
            assert caught.value.kind == kind
            assert caught.value.offset == made.physical_offset
            assert caught.value.path.endswith(f"{made.physical_offset // SIZE * SIZE:020d}")
        with pytest.raises(CorruptFrame, match=f"damaged bytes from {magic.physical_offset}"):
            store.message_at(magic.physical_offset + 20)
        # All other messages are read.
        for made in maker.frames:
            if made not in (crc, magic):
                assert store.message_at(made.physical_offset).frame == made


def test_a_missing_file_is_damage(maker: StoreMaker, tmp_path: Path) -> None:
    maker.write(tmp_path)
    (tmp_path / f"commitlog/{SIZE:020d}").unlink()
    with MessageStore.open(tmp_path) as store, pytest.raises(CorruptFrame, match="no file"):
        store.message_at(SIZE)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 90, 91, 150, 999])
def test_short_files(maker: StoreMaker, tmp_path: Path, size: int) -> None:
    maker.write(tmp_path)
    path = tmp_path / f"commitlog/{SIZE:020d}"
    path.write_bytes(path.read_bytes()[:size])
    inside = [f for f in maker.frames if f.physical_offset // SIZE == 1]
    with MessageStore.open(tmp_path) as store:
        assert store.max_offset == end_of(maker)
        for made in inside:
            if made.physical_offset + made.size <= SIZE + size:
                assert store.message_at(made.physical_offset).frame == made
            else:
                with pytest.raises(CorruptFrame):
                    store.message_at(made.physical_offset)


def test_links_that_lead_nowhere_are_lost_files(maker: StoreMaker, tmp_path: Path) -> None:
    maker.write(tmp_path)
    for base, target in ((0, f"{0:020d}"), (SIZE, "nowhere")):
        path = tmp_path / f"commitlog/{base:020d}"
        path.unlink()
        path.symlink_to(target)
    with MessageStore.open(tmp_path) as store:
        assert store.min_offset == 0
        with pytest.raises(CorruptFrame, match="which does not exist: mount that disk"):
            next(store.scan())
        assert next(store.scan(on_damage="skip")).physical_offset >= 2 * SIZE


def test_a_file_that_goes_while_it_is_read(maker: StoreMaker, tmp_path: Path) -> None:
    maker.write(tmp_path)
    with MessageStore.open(tmp_path) as store:
        assert store.max_offset == end_of(maker)
        (tmp_path / f"commitlog/{SIZE:020d}").unlink()
        inside = next(f for f in maker.frames if f.physical_offset >= SIZE)
        with pytest.raises(MessageNotFound, match=r"file was deleted .*: call refresh\(\)"):
            store.message_at(inside.physical_offset)
        result = store.get("orders", inside.queue_id, inside.queue_offset, 1)
        # The rest of the queue begins with the next file.
        assert result.messages[0].physical_offset >= 2 * SIZE
