"""A log that was replaced or truncated, and has grown past the offset up to which it was read."""

from __future__ import annotations

import logging
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from logquarry.errors import MessageNotFound
from logquarry.log.layout import StoreLayout
from logquarry.spark.stream_offset import LastFrame, is_other_log, last_frame
from tests.helpers.files import flip, zero
from tests.helpers.lake import Lake
from tests.helpers.store_maker import StoreMaker
from tests.helpers.stream import Stream
from tests.unit.spark.test_stream_unlimited import UnlimitedStream

SIZES = [
    pytest.param(0, id="frames of the same sizes"),
    pytest.param(7, id="the offset is inside a frame"),
]


def written(root: Path, count: int, *, of_backup: int = 0, longer: int = 0) -> StoreMaker:
    """Write `count` messages. After the first 10, a store of a backup has other messages."""
    maker = StoreMaker(log_file_size=3000)
    for number in range(count):
        is_other = of_backup and number >= 10
        text = f"{number:03d}" + ("x" * (20 + longer) if is_other else "." * 20)
        maker.put("orders", number % 2, text.encode())
    shutil.rmtree(root, ignore_errors=True)
    maker.write(root)
    return maker


@pytest.mark.parametrize("kind", [Stream, UnlimitedStream])
@pytest.mark.parametrize("longer", SIZES)
def test_a_backup_that_grew_past_the_checkpoint(
    tmp_path: Path, kind: type[Stream], longer: int, caplog: pytest.LogCaptureFixture
) -> None:
    stream = kind(tmp_path / "store")
    written(tmp_path / "store", 60)
    stream.drain(2)
    assert stream.at is not None
    read_to = stream.at.brokers["store"]
    maker = written(tmp_path / "store", 100, of_backup=1, longer=longer)
    stream.restart()
    assert stream.plan()
    with pytest.raises(MessageNotFound, match="is not the one that the stream has read: the log"):
        stream.run()
    stream.restart(failOnDataLoss="false")
    with caplog.at_level(logging.WARNING):
        stream.drain(3)
    assert "the log was truncated or replaced" in caplog.text
    later = [f.physical_offset for f in maker.frames if f.physical_offset >= read_to]
    assert [row["physical_offset"] for row in stream.rows[60:]] == later
    # Later batches find the log that the last batch has read.
    caplog.clear()
    stream.restart(failOnDataLoss="true")
    written(tmp_path / "store", 110, of_backup=1, longer=longer)
    stream.drain(3)
    assert stream.rows[-1]["body"].startswith(b"109")
    assert len(stream.rows) == 60 + len(later) + 10


@pytest.mark.parametrize("kind", [Stream, UnlimitedStream])
def test_a_checkpoint_of_an_earlier_version(tmp_path: Path, kind: type[Stream]) -> None:
    stream = kind(tmp_path / "store")
    written(tmp_path / "store", 20)
    stream.drain(2)
    assert stream.at is not None and stream.at.frames
    stream.at = replace(stream.at, frames={})
    written(tmp_path / "store", 30)
    stream.restart()
    stream.drain(3)
    assert len(stream.rows) == 30
    assert stream.at.frames


@pytest.mark.parametrize("table", ["delta", "iceberg"])
@pytest.mark.parametrize("longer", SIZES)
def test_a_backup_that_grew_past_the_offset_of_a_table(
    tmp_path: Path, table: str, longer: int
) -> None:
    lake = Lake(table, tmp_path / "lake")
    written(tmp_path / "store", 60)
    lake.export(tmp_path / "store")
    written(tmp_path / "store", 80)
    lake.export(tmp_path / "store")
    maker = written(tmp_path / "store", 100, of_backup=1, longer=longer)
    with pytest.raises(MessageNotFound, match="the log was truncated or replaced"):
        lake.export(tmp_path / "store")
    assert len(lake.bodies()) == 80
    lake.export(tmp_path / "store", {"failOnDataLoss": "false"})
    assert lake.bodies()[-1] == max(f.body for f in maker.frames)
    written(tmp_path / "store", 110, of_backup=1, longer=longer)
    lake.export(tmp_path / "store")
    assert sum(body.startswith(b"109") for body in lake.bodies()) == 1


def test_the_same_log_is_accepted(tmp_path: Path) -> None:
    root = tmp_path / "store"
    maker = written(root, 100)
    layout = StoreLayout.open(root)
    log = layout.commit_log
    frames = {f.physical_offset: f.physical_offset + f.size for f in maker.frames}
    for place, end in frames.items():
        found = last_frame(layout, end)
        assert found is not None and found.offset == place
        assert not is_other_log(layout, found)
        # A blank, or the start of a frame, follows.
        assert last_frame(layout, end + 3) == found
        other = LastFrame(place, found.check_sum ^ 1)
        assert is_other_log(layout, other)
        assert is_other_log(layout, LastFrame(place + 5, 0))
    assert last_frame(layout, log.start) is None
    # Damage and deleted files show nothing.
    last = max(place for place in frames if place < 3000)
    known = last_frame(layout, frames[last])
    assert known is not None
    zero(root / "commitlog" / f"{0:020d}", last, last + 60)
    assert not is_other_log(StoreLayout.open(root), known)
    (root / "commitlog" / f"{0:020d}").unlink()
    assert not is_other_log(StoreLayout.open(root), known)


def test_damage_in_the_head_of_the_frame_is_not_another_log(tmp_path: Path) -> None:
    """Also a salvage changes queue ids and queue offsets."""
    root = tmp_path / "store"
    last = written(root, 20).frames[-1]
    file = root / "commitlog" / f"{0:020d}"
    known = last_frame(StoreLayout.open(root), last.physical_offset + last.size)
    assert known is not None and known.offset == last.physical_offset
    fields = {"size": 0, "magic": 4, "body_crc": 8, "queue_id": 12, "queue_offset": 20, "body": 88}
    for at in fields.values():
        flip(file, last.physical_offset + at + 3)
        assert not is_other_log(StoreLayout.open(root), known)
        flip(file, last.physical_offset + at + 3)
    flip(file, last.physical_offset + 56 + 7)
    assert is_other_log(StoreLayout.open(root), known)
