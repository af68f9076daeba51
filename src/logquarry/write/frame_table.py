"""The table of checked messages, from which a kernel makes the frames."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from logquarry.format import put_rows as r
from logquarry.format.arrays import Bytes, Int64
from logquarry.log import codec
from logquarry.read.log_queues import QueueKey

if TYPE_CHECKING:
    from logquarry.disk.mapped_file import MappedFile

_MANY_QUEUES: Final = 1 << 10


@dataclass(slots=True)
class FrameTable:
    """Checked messages, for the kernel (:mod:`logquarry.write.outgoing`).

    Attributes:
        rows: a column for each message; the columns of odd messages are not used.
        heads, head_facts: the distinct heads (the fields of a frame that depend on hosts and
            SYSFLAG).
        keep: the objects that own the bytes at the rows' addresses.
    """

    rows: r.PutRows = field(default_factory=lambda: r.empty_put_rows(0))
    queues: list[QueueKey] = field(default_factory=list)
    heads: Bytes = field(default_factory=lambda: np.zeros((0, 0), np.uint8))
    head_facts: Int64 = field(default_factory=lambda: np.zeros((0, r.HEAD_FACTS), np.int64))
    topics: Bytes = field(default_factory=lambda: np.zeros(0, np.uint8))
    topic_ends: Int64 = field(default_factory=lambda: np.zeros(1, np.int64))
    keep: tuple[object, ...] = ()

    def append(
        self,
        file: MappedFile,
        offsets: dict[QueueKey, int],
        start: int,
        stop: int,
        now: int,
        columns: Int64,
    ) -> int:
        """Append the frames of messages ``start`` to ``stop`` to a file, under the log's lock.

        Args:
            start, stop: a range of message numbers without an odd message.
            now: the store time in milliseconds; a row may have a later time.
            columns: four rows: physical offset, queue offset, store time and size. This method
                fills in the column of each message.

        Returns:
            The number of the first message that did not fit.
        """
        kernels = codec.require_kernels()
        next_offsets = np.zeros(len(self.queues), np.int64)
        used = self._used(start, stop)
        for queue in used:
            next_offsets[queue] = offsets.setdefault(self.queues[queue], 0)
        # The view keeps the file mapped while the kernel writes.
        view: Bytes = np.frombuffer(file.buffer, np.uint8)
        physical, queued, times, sizes = columns
        found, position = kernels.encode_frames(
            *(self.rows, start, stop),
            *(self.heads, self.head_facts, self.topics, self.topic_ends),
            *(view.ctypes.data, file.wrote, file.size, file.base, now, codec.crc32_address()),
            *(next_offsets, physical, queued, times),
        )
        at = int(found)
        if at > start:
            sizes[start:at] = self.rows[r.SIZE, start:at]
            told = {self.queues[queue]: int(next_offsets[queue]) for queue in used}
            advance(file, position, offsets, told)
        return at

    def _used(self, start: int, stop: int) -> list[int]:
        queues: Any = self.rows[r.QUEUE, start:stop]
        if len(self.queues) > _MANY_QUEUES:
            found = np.unique(queues)
        else:
            found = np.flatnonzero(np.bincount(queues, minlength=len(self.queues)))
        return [int(queue) for queue in found]


def advance(
    file: MappedFile, position: int, offsets: dict[QueueKey, int], told: dict[QueueKey, int]
) -> None:
    """Record that the frames before a position of a file, and their queue offsets, are used."""
    before = file.wrote
    try:
        file.advance(position - before)
        offsets.update(told)
    except BaseException:
        # Ctrl-C may arrive at any line. Messages in the log have used their queue offsets.
        if file.wrote > before:
            offsets.update(told)
        raise


@cache
def load_kernel() -> None:
    """Load or compile the kernel, which takes a moment. Call this before taking the lock."""
    kernels = codec.require_kernels()
    none, numbers = FrameTable(), np.zeros(0, np.int64)
    kernels.encode_frames(
        *(none.rows, 0, 0),
        *(none.heads, none.head_facts, none.topics, none.topic_ends),
        *(0, 0, 0, 0, 0, 0),
        *(numbers, numbers, numbers, numbers),
    )
