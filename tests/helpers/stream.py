"""A stream without Spark: calls a planner in the order in which Spark calls it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from logquarry.log.batches import DamageLog
from logquarry.spark.options import ReadOptions, parse_read_options
from logquarry.spark.stream_offset import StreamOffset
from logquarry.spark.stream_planner import Limits, StreamPlanner
from logquarry.spark.tasks import plan_tasks, read_batches
from tests.helpers.store_maker import StoreMaker


class Stream:
    """One query: its checkpoint, and the rows of its batches so far.

    Args:
        path: of the stores.
        options: as for `readStream`.
    """

    def __init__(self, path: Path | str | list[str], **options: str) -> None:
        where = {"paths": json.dumps(path)} if isinstance(path, list) else {"path": str(path)}
        self.given = {**where, **options}
        self.rows: list[dict[str, Any]] = []
        self.batches: list[int] = []
        self.damage = DamageLog()
        self.at: StreamOffset | None = None
        self.planned: tuple[StreamOffset, StreamOffset] | None = None
        self.restart()

    def restart(self, **options: str) -> None:
        """Continue as another process with the same checkpoint."""
        self.given |= options
        self.options: ReadOptions = parse_read_options(self.given, is_stream=True)
        self.planner = StreamPlanner(self.options, self.options.names)

    @property
    def limits(self) -> Limits:
        return Limits(self.options.max_bytes, self.options.max_rows)

    def plan(self) -> bool:
        """Write the next batch into the offset log; return whether there is one."""
        start = through_json(self.planner.initial()) if self.at is None else self.at
        end = through_json(self.planner.latest(start, self.limits))
        if json.dumps(end.to_json()) == json.dumps(start.to_json()):
            return False
        self.planned = start, end
        return True

    def run(self) -> int:
        """Run the planned batch; return its number of rows."""
        assert self.planned is not None
        start, end = self.planned
        if self.at is None:
            # Spark also asks for the initial offset after a restart.
            start = through_json(self.planner.initial())
        found = list(self.read(start, end))
        self.rows += found
        self.batches.append(len(found))
        self.at, self.planned = end, None
        return len(found)

    def read(self, start: StreamOffset, end: StreamOffset) -> Iterator[dict[str, Any]]:
        for task in self.planner.tasks(start, end):
            for batch in read_batches(task, self.damage):
                yield from batch.to_pylist()

    def drain(self, most: int = 10_000) -> list[dict[str, Any]]:
        """Read all that is available, batch by batch."""
        for _ in range(most):
            if not self.plan():
                break
            self.run()
        return self.rows

    @property
    def places(self) -> list[tuple[str, int]]:
        """Broker and physical offset of each row, in order."""
        return sorted((row["broker"], row["physical_offset"]) for row in self.rows)


def through_json(offset: StreamOffset) -> StreamOffset:
    """Write an offset into Spark's checkpoint, and read it."""
    return StreamOffset.from_json(json.loads(json.dumps(offset.to_json())))


def batch_places(stream: Stream) -> list[tuple[str, int]]:
    """Return what a batch read with the same options returns."""
    return sorted(
        (row["broker"], row["physical_offset"])
        for task in plan_tasks(stream.options)
        for batch in read_batches(task)
        for row in batch.to_pylist()
    )


def made(root: Path, count: int = 60) -> StoreMaker:
    """Write a store of three topics with log files of 3,000 bytes."""
    maker = StoreMaker(log_file_size=3000)
    rng = random.Random(count)
    for n in range(count):
        maker.put(["a", "b", "c"][n % 3], n % 2, rng.randbytes(rng.randrange(500)), keys=f"k{n}")
    maker.write(root)
    return maker
