"""Writes the batch queues of RocketMQ 5 (``BatchConsumeQueue.putBatchMessagePositionInfo``).

If the log has lost messages of a queue, the entry of the next frame also covers their queue offsets
(:func:`without_gaps`). The broker looks for the last entry that begins at or before an offset, so a
consumer that asks for a lost message gets that frame. If a gap remained between two entries, the
consumer would get the frame before the gap again, possibly for ever.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from logquarry.disk.mapped_file_queue import MappedFileQueue
from logquarry.errors import CorruptFile
from logquarry.format.batch import ENTRY_SIZE, MOST_MESSAGES
from logquarry.read.batch_queue import BATCH_DTYPE, BatchEntries, is_batch_written
from logquarry.write.queue_writer import MOST_GAP, ConsumeQueueWriter, Int64, Mending, Offsets

_LAST: Final = -1


def without_gaps(entries: BatchEntries, expected: int) -> BatchEntries:
    """Entries that continue a queue without a gap in its queue offsets.

    An entry after a gap begins where the entry before it ended; its reserved field, which brokers
    ignore, gives the number of lost messages. If it would then hold more messages than its field
    can count, the frame gets several entries, of which the last one has its messages.

    Args:
        entries: ascending entries.
        expected: queue offset at which the queue ends.
    """
    starts = entries["base"].astype(np.int64)
    stops = starts + entries["count"]
    begins = np.append(expected, stops[:-1])[: len(stops)]
    if (begins == starts).all():
        return entries
    times = -(-(stops - begins) // MOST_MESSAGES)
    made = np.repeat(entries, times)
    after = np.repeat(np.cumsum(times), times) - np.arange(len(made)) - 1
    ends = np.repeat(stops, times) - after * MOST_MESSAGES
    made["base"] = np.maximum(np.repeat(begins, times), ends - MOST_MESSAGES)
    made["count"] = ends - made["base"]
    made["reserved"] = np.minimum(np.repeat(starts, times) - made["base"], made["count"])
    return made


def falls(starts: Int64, stops: Int64, expected: int) -> list[int]:
    """The entries whose queue offset is below the queue's end, because the topic was recreated."""
    return np.flatnonzero(starts < np.append(expected, stops[:-1])[: len(starts)]).tolist()


class BatchQueueWriter(ConsumeQueueWriter):
    """Appends entries to one batch queue.

    Args:
        files: the queue's files, which end with its last entry.
        name: the queue's name in errors.
        mending: what a recovery knows of the queue; None without a recovery. A recovery fills gaps,
            and empties the queue if its topic was recreated.
    """

    def __init__(self, files: MappedFileQueue, name: str, mending: Mending | None = None) -> None:
        self._next: int | None = None
        super().__init__(files, name)
        self._mending = mending
        if mending is not None:
            self.physical_end = mending.resume_at

    @property
    def next_offset(self) -> int | None:
        """The next queue offset; None while the queue is empty: any offset may be the first."""
        return self._next

    def append(self, offsets: Offsets, units: BatchEntries) -> int:
        """See :meth:`ConsumeQueueWriter.append`."""
        new = units[(units["physical_offset"] >= self.physical_end) & (units["base"] >= 0)]
        if not len(new):
            return 0
        starts = new["base"].astype(np.int64)
        expected = int(starts[0]) if self._next is None else self._next
        cuts = falls(starts, starts + new["count"], expected)
        for at, stop in zip([0, *cuts], [*cuts, len(new)], strict=True):
            if at < stop:
                self._append_run(int(starts[at]), new[at:stop])
        return len(new)

    def _append_run(self, offset: int, units: BatchEntries) -> int:
        expected = offset if self._next is None else self._next
        if offset < expected:
            if self._mending is None:
                # As in queues of 20-byte entries, entries that the queue already has are skipped.
                return 0
            if self.files.bases:
                # The topic was deleted and created again: the old entries no longer count.
                self.files.truncate_to(self.files.min_offset, aside=self._mending.aside)
            expected = offset
        made = without_gaps(units, expected)
        if made is not units and (
            self._mending is None or len(made) > len(units) + MOST_GAP // MOST_MESSAGES
        ):
            raise CorruptFile(
                self.name,
                self.files.wrote_offset,
                f"the log continues with other queue offsets after {expected}, and entries are "
                "missing: run logquarry recover",
                kind="queue_gap",
            )
        self._write(made.tobytes())
        self._note_last(made[_LAST])
        return len(units)

    def _note_last(self, last: np.void) -> None:
        self._next = int(last["base"]) + int(last["count"])
        self.physical_end = int(last["physical_offset"]) + int(last["size"])

    def _last_physical_end(self) -> int:
        end = self.files.wrote_offset
        if end > max(0, self.files.min_offset):
            data = self.files.select(end - ENTRY_SIZE, ENTRY_SIZE)
            if data is not None:
                entries = np.frombuffer(data, BATCH_DTYPE)
                if is_batch_written(entries)[0]:
                    self._note_last(entries[0])
                    return self.physical_end
        return 0
