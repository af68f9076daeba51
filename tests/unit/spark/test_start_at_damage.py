"""A read or stream that starts at an offset at which the log is damaged reports the damage."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest

import logquarry as lq
from logquarry.spark.options import parse_read_options
from logquarry.spark.tasks import plan_tasks, read_batches
from tests.helpers.small_store import SMALL
from tests.helpers.stream import Stream

FILE_SIZE = SMALL["mapped_file_size_commit_log"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "store"
    with lq.MessageStore.open(path, mode="rw", config=lq.StoreConfig(**SMALL)) as store:
        for number in range(350):
            store.put(lq.Message(f"topic-{number % 5}", b"body" * 10, queue_id=0))
    return path


def messages(root: Path) -> list[lq.StoredMessage]:
    with lq.MessageStore.open(root) as store:
        return list(store.scan())


def overwrite(root: Path, offset: int, data: bytes) -> None:
    path = sorted((root / "commitlog").iterdir())[offset // FILE_SIZE]
    with path.open("r+b") as file:
        file.seek(offset % FILE_SIZE)
        file.write(data)


def offsets(root: Path, **options: Any) -> list[int]:
    given = {name: str(value) for name, value in options.items()}
    tasks = plan_tasks(parse_read_options({"path": str(root)} | given))
    batches = [batch for task in tasks for batch in read_batches(task)]
    return [number for b in batches for number in b.column("physical_offset").to_pylist()]


@pytest.mark.parametrize("before", [0, 1, 40])
@pytest.mark.parametrize("harm", ["magic", "body"])
@pytest.mark.parametrize("topics", [None, "topic-2"])
def test_the_first_wanted_frame_is_damaged(
    root: Path, topics: str | None, harm: str, before: int
) -> None:
    found = messages(root)
    start = found[42].physical_offset
    at = 4 if harm == "magic" else found[42].size - 20
    overwrite(root, start + at, b"\xff\xff\xff\xff")
    options = {"startingOffsets": start - before} | ({"topics": topics} if topics else {})
    with pytest.raises(lq.errors.CorruptFrame, match=f"at offset {start}:"):
        offsets(root, **options)
    left = [m.physical_offset for m in found[43:] if topics in (None, m.topic)]
    assert offsets(root, **options, onDamage="skip") == left
    stream = Stream(root, startingOffsets=json.dumps({"store": start - before}))
    assert stream.plan()
    with pytest.raises(lq.errors.CorruptFrame, match=f"at offset {start}:"):
        stream.run()


@pytest.mark.parametrize("number", [0, 1])
def test_the_start_lies_in_a_lost_file(root: Path, number: int) -> None:
    paths = sorted((root / "commitlog").iterdir())
    paths[number].unlink()
    with pytest.raises(lq.errors.CorruptFrame, match="missing_file"):
        offsets(root, startingOffsets=number * FILE_SIZE + 10)
    assert offsets(root, startingOffsets=(number + 1) * FILE_SIZE)[0] == (number + 1) * FILE_SIZE


def test_the_start_lies_behind_the_end_of_a_truncated_file(root: Path) -> None:
    path = sorted((root / "commitlog").iterdir())[1]
    os.truncate(path, 5_000)
    with pytest.raises(lq.errors.CorruptFrame):
        offsets(root, startingOffsets=FILE_SIZE + 6_000)


def test_a_start_inside_a_sound_frame_or_a_blank_is_no_damage(root: Path) -> None:
    for one, other in itertools.pairwise(messages(root)):
        here, there = one.physical_offset, other.physical_offset
        # The first frame, and the last frame of the first file with the blank after it.
        if here == 0 or here // FILE_SIZE < there // FILE_SIZE == 1:
            for start in (here + 1, there - 1, there):
                assert offsets(root, startingOffsets=start)[:1] == [there]
