"""A stream over a store without a writer gives what a batch gives, also if the log is damaged."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from logquarry.errors import CorruptFrame
from logquarry.spark.tasks import plan_tasks, read_batches
from tests.helpers.damage import damaged
from tests.helpers.hypothesis_profiles import costly
from tests.helpers.store_maker import StoreMaker
from tests.helpers.stream import Stream

Places = list[tuple[str, int]]
COLUMNS = "broker,physical_offset,body"


def _made(root: Path) -> dict[str, bytes]:
    rng = random.Random(8)
    maker = StoreMaker(log_file_size=1500)
    for n in range(22):
        maker.put("abc"[n % 3], n % 2, rng.randbytes(rng.randrange(300)))
    maker.write(root)
    return {path.name: path.read_bytes() for path in sorted((root / "commitlog").iterdir())}


def _batch(stream: Stream) -> Places | tuple[str, int]:
    try:
        return sorted(
            (row["broker"], row["physical_offset"])
            for task in plan_tasks(stream.options)
            for batch in read_batches(task)
            for row in batch.to_pylist()
        )
    except CorruptFrame as error:
        return error.path, error.offset


def _stream(stream: Stream) -> Places | tuple[str, int]:
    try:
        stream.drain()
    except CorruptFrame as error:
        return error.path, error.offset
    return stream.places


@costly()
@given(
    st.data(),
    st.booleans(),
    st.sampled_from(
        [
            {},
            {"maxBytesPerTrigger": "400"},
            {"maxOffsetsPerTrigger": "3"},
            {"maxBytesPerTrigger": "2k", "splitSize": "250"},
        ]
    ),
)
def test_like_a_batch(data: st.DataObject, abort: bool, limits: dict[str, str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "store"
        files = _made(root)
        harmed = data.draw(damaged(files))
        for name in files.keys() - harmed.keys():
            (root / "commitlog" / name).unlink()
        for name, content in harmed.items():
            (root / "commitlog" / name).write_bytes(content)
        if abort:
            (root / "abort").touch()
        for on_damage in ("skip", "fail"):
            stream = Stream(
                root, onDamage=on_damage, failOnDataLoss="false", columns=COLUMNS, **limits
            )
            assert _stream(stream) == _batch(stream)


def test_damage_before_lost_files_of_a_crashed_store(tmp_path: Path) -> None:
    """The last remaining file has a break: reads still give its other messages."""
    root = tmp_path / "store"
    _made(root)
    files = sorted((root / "commitlog").iterdir())
    files.pop().unlink()
    data = bytearray(files[-1].read_bytes())
    data[0] = 1
    files[-1].write_bytes(data)
    (root / "abort").touch()
    found = {}
    for on_damage in ("skip", "fail"):
        stream = Stream(root, onDamage=on_damage, failOnDataLoss="false", columns=COLUMNS)
        found[on_damage] = _batch(stream)
        assert _stream(stream) == found[on_damage]
    read = found["skip"]
    assert isinstance(read, list)
    assert read[-1][1] > int(files[-1].name)
    assert found["fail"] == (str(files[-1]), int(files[-1].name))
