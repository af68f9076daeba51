"""Takes inner batches of RocketMQ 5 apart: every bulk read gets one row per message.

A run of frames with an inner batch becomes runs of frames that stand alone
(:mod:`logquarry.format.inner_batch`), in a window of their own; filters and columns read these as
they read the log. A run without one is passed on as it is: the check of its flags is all it costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from logquarry.format import frame
from logquarry.format import rows as r
from logquarry.format.compression import DEFAULT_LIMIT, is_compressed
from logquarry.format.inner_batch import INNER_BATCH, OF_BATCH, unwrap
from logquarry.log import codec, columns
from logquarry.log.codec import Rows, Window
from logquarry.log.walk import Run

MOST_BYTES: Final = 8 << 20
"""Bytes of messages in one run, approximately. A batch of tiny messages grows tenfold."""

Bools = npt.NDArray[np.bool_]


def unwrapped(runs: Iterable[Run], *, limit: int = DEFAULT_LIMIT) -> Iterator[Run]:
    """The runs, with the messages of each inner batch in its place.

    Args:
        runs: runs of frames of the log.
        limit: maximum bytes of a decompressed batch; a larger one stays one row.
    """
    for run in runs:
        inner = inner_batches(run.window, run.rows)
        if inner is None:
            yield run
        else:
            yield from _unwrap(run, inner, limit)


def inner_batches(window: Window, rows: Rows) -> Bools | None:
    """Which frames are inner batches; None if no frame is one."""
    flags = columns.fixed_fields(window, rows, ["sys_flag"])["sys_flag"]
    found: Bools = flags & INNER_BATCH == INNER_BATCH
    return found if found.any() else None


def _unwrap(run: Run, inner: Bools, limit: int) -> Iterator[Run]:
    """Cut a run where the messages would take more than MOST_BYTES."""
    lengths = np.where(inner, run.rows[:, r.BODY_LENGTH].astype(np.int64), run.rows[:, r.SIZE])
    ends = np.cumsum(lengths) // MOST_BYTES
    cuts = np.flatnonzero(np.diff(ends)) + 1
    for part, marks in zip(np.split(run.rows, cuts), np.split(inner, cuts), strict=True):
        yield from _part(run, part, marks, limit)


def _part(run: Run, rows: Rows, inner: Bools, limit: int) -> Iterator[Run]:
    made = _Frames(run)
    for row, is_inner in zip(rows.tolist(), inner.tolist(), strict=True):
        start = row[r.POSITION]
        if not is_inner:
            made.copy(row, run.window.data[start : start + row[r.SIZE]].tobytes())
            continue
        found = run.window.decode(start, check_crc=False)
        if not isinstance(found, frame.Frame):
            raise AssertionError("the walk found a sound frame here, the reference does not")
        for message in unwrap(found, limit=limit):
            if made.is_full:
                yield made.take()
            made.add(message)
    if made.rows:
        yield made.take()


class _Frames:
    """Collects frames to a run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._data = bytearray()
        self.rows: list[list[int]] = []

    @property
    def is_full(self) -> bool:
        return len(self._data) >= MOST_BYTES

    def copy(self, row: list[int], data: bytes) -> None:
        """Add a frame of the log."""
        self.rows.append([len(self._data), *row[1:]])
        self._data += data

    def add(self, message: frame.Frame) -> None:
        """Add a message of a batch."""
        self.rows.append(list(codec.row_of(len(self._data), message)))
        self._data += frame.encode(message)

    def take(self) -> Run:
        """The run so far; the next one begins empty."""
        data, rows = bytes(self._data), np.array(self.rows, np.int32)
        self._data, self.rows = bytearray(), []
        window = replace(Window.of(data, self._run.window.base), is_unwrapped=True)
        return Run(window, rows, self._run.path)
