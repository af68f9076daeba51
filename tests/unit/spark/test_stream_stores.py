"""Stores and log files that appear, expire or vanish while a stream reads them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from logquarry.errors import CorruptFrame, MessageNotFound, StoreNotFound, UsageError
from logquarry.spark.tasks import read_batches
from tests.helpers.files import zero
from tests.helpers.stream import Stream, made


def test_several_brokers_and_those_that_come_later(tmp_path: Path) -> None:
    one = made(tmp_path / "b1" / "store", 40)
    stream = Stream(f"{tmp_path}/*/store", maxBytesPerTrigger="3k", startingOffsets="latest")
    stream.drain()
    assert stream.rows == []
    two = made(tmp_path / "b2" / "store", 50)
    stream.drain()
    # A store that appears during the query is read from its start.
    assert stream.places == [("b2", f.physical_offset) for f in two.frames]
    one.put(body=b"new")
    one.write(tmp_path / "b1" / "store")
    stream.drain()
    assert len(stream.rows) == 51
    assert stream.at is not None
    assert stream.at.brokers.keys() == {"b1", "b2"}


def test_a_store_without_files_yet(tmp_path: Path) -> None:
    (tmp_path / "store" / "commitlog").mkdir(parents=True)
    stream = Stream(tmp_path / "store")
    assert stream.drain() == []
    maker = made(tmp_path / "store", 10)
    assert len(stream.drain()) == len(maker.frames)


def test_stores_of_one_name_under_several_globs(tmp_path: Path) -> None:
    made(tmp_path / "x" / "b1", 3)
    made(tmp_path / "y" / "b1", 3)
    with pytest.raises(UsageError, match="would both be called 'b1'"):
        Stream([f"{tmp_path}/x/*", f"{tmp_path}/y/*"]).drain()
    stream = Stream(f"{tmp_path}/*/b*")
    stream.drain()
    assert {broker for broker, _ in stream.places} == {"x/b1", "y/b1"}


def test_a_store_that_went(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made(tmp_path / "b1", 20)
    made(tmp_path / "b2", 20)
    stream = Stream(f"{tmp_path}/b*")
    stream.drain()
    shutil.rmtree(tmp_path / "b1")
    with pytest.raises(MessageNotFound, match="the store of broker 'b1' no longer exists"):
        stream.plan()
    stream.restart(failOnDataLoss="false")
    assert not stream.plan()
    assert not stream.plan()
    assert len([r for r in caplog.records if "b1" in r.getMessage()]) == 1
    shutil.rmtree(tmp_path / "b2")
    with pytest.raises(StoreNotFound):
        stream.plan()


@pytest.mark.parametrize("fails", ["true", "false"])
def test_a_store_whose_name_has_changed(fails: str, tmp_path: Path) -> None:
    """A stream would read the store again from its start."""
    store, link = tmp_path / "b1" / "store", tmp_path / "store"
    maker = made(store, 20)
    made(tmp_path / "b2" / "store", 25)
    stream = Stream(store, failOnDataLoss=fails, maxOffsetsPerTrigger="15")
    stream.drain(1)
    assert stream.plan()
    stream.restart(path=f"{tmp_path}/b*/store")
    for step in (stream.run, stream.plan):
        with pytest.raises(UsageError, match=r"as broker 'store', .* is 'b1' now"):
            step()
    link.symlink_to(store.rename(tmp_path / "b1" / "copy"))
    stream.restart(path=str(link))
    stream.drain()
    assert stream.places == [("store", f.physical_offset) for f in maker.frames]


def test_files_that_expire_ahead_of_the_stream(tmp_path: Path) -> None:
    maker = made(tmp_path / "store", 60)
    stream = Stream(tmp_path / "store", maxOffsetsPerTrigger="5")
    stream.drain(2)
    files = sorted((tmp_path / "store" / "commitlog").iterdir())
    for path in files[:3]:
        path.unlink()
    assert stream.plan()
    with pytest.raises(
        MessageNotFound, match="the log starts at physical offset 9000, but the stream"
    ):
        stream.run()
    stream.restart(failOnDataLoss="false")
    stream.drain()
    left = [f.physical_offset for f in maker.frames if f.physical_offset >= 9000]
    first = [f.physical_offset for f in maker.frames[:10]]
    assert [offset for _, offset in stream.places] == first + left


def test_files_that_expire_behind_the_stream(tmp_path: Path) -> None:
    maker = made(tmp_path / "store", 60)
    stream = Stream(tmp_path / "store", maxOffsetsPerTrigger="5")
    while stream.plan():
        stream.run()
        assert stream.at is not None
        for path in sorted((tmp_path / "store" / "commitlog").iterdir()):
            if int(path.name) + 3000 <= stream.at.brokers["store"]:
                path.unlink()
    assert len(stream.rows) == len(maker.frames)


def test_files_that_expire_between_plan_and_read(tmp_path: Path) -> None:
    made(tmp_path / "store", 60)
    for fail in (True, False):
        stream = Stream(tmp_path / "store", failOnDataLoss=str(fail))
        assert stream.plan() and stream.planned is not None
        tasks = stream.planner.tasks(*stream.planned)
        oldest = min((tmp_path / "store" / "commitlog").iterdir())
        oldest.rename(tmp_path / oldest.name)
        if fail:
            with pytest.raises(MessageNotFound, match="were deleted during the read"):
                list(read_batches(tasks[0]))
            (tmp_path / oldest.name).rename(oldest)
        else:
            rows = [row for t in tasks for b in read_batches(t) for row in b.to_pylist()]
            assert min(row["physical_offset"] for row in rows) == 3000


def test_a_log_that_lost_its_end(tmp_path: Path) -> None:
    made(tmp_path / "store", 60)
    stream = Stream(tmp_path / "store")
    stream.drain()
    shutil.rmtree(tmp_path / "store")
    made(tmp_path / "store", 10)
    with pytest.raises(MessageNotFound, match="it was truncated or replaced"):
        stream.plan()


def test_what_was_followed_and_is_gone_is_damage(tmp_path: Path) -> None:
    maker = made(tmp_path / "store", 30)
    (tmp_path / "store" / "abort").touch()
    stream = Stream(tmp_path / "store")
    assert stream.plan()
    lost = maker.frames[25].physical_offset
    path = tmp_path / "store" / "commitlog" / f"{lost // 3000 * 3000:020d}"
    zero(path, lost % 3000)
    for later in sorted(path.parent.iterdir()):
        if int(later.name) > int(path.name):
            later.write_bytes(bytes(3000))
    with pytest.raises(CorruptFrame, match="the log had whole frames here") as caught:
        stream.run()
    assert (caught.value.offset, caught.value.kind) == (lost, "lost_end")
