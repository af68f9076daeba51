"""Run facts: what an audit needs to know about a run, a part of the log with only valid frames.

Threads and Spark tasks read runs before an audit reaches them. The audit uses such a run only if
the run begins exactly where the audit is; otherwise, the audit reads this part of the log itself
(:func:`logquarry.log.frames.guided`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np

from logquarry.config import StoreConfig
from logquarry.dialect31.open_transactions import TransactionFrame, transaction_frames
from logquarry.format.arrays import POSITION, SIZE
from logquarry.log import columns
from logquarry.log.codec import Window
from logquarry.log.follow import Followed, Follower, follow_run
from logquarry.log.layout import StoreLayout
from logquarry.log.open_files import OpenFiles
from logquarry.log.splits import STRETCH_BYTES, Stretch, StretchReader
from logquarry.log.walk import Run
from logquarry.read.index import Index
from logquarry.read.log_queues import QueueKey
from logquarry.read.store_sizes import with_entry_rules
from logquarry.repair.audit.index_entries import EntryStream, IndexEntries
from logquarry.repair.audit.queues import QueuesAudit
from logquarry.write.queue_writer import QueuePart, parts_with_copies, unqueued_parts

Parts = dict[QueueKey, QueuePart]
"""Queue -> the entries that this queue should have for some frames."""
S = TypeVar("S", bound=Stretch)


def audited(follower: Follower, run: Run, facts: S) -> S:
    """Add the frames of a run to ``facts``, and return ``facts``."""
    for window, followed in follow_run(follower, run):
        facts(window, followed)
    return facts


@dataclass(frozen=True, slots=True)
class SoundEntries:
    """The queue entries and index entries of a run, if all of them are right.

    Attributes:
        queues: queue -> (first queue offset in the run, queue offset after the last), without a
            gap.
        index: number of the run's first index entry, and number after its last index entry.
    """

    queues: dict[QueueKey, tuple[int, int]]
    index: tuple[int, int]


class FrameFacts(Stretch):
    """Collects the facts about a run that verify needs: faulty frames, and the entries that queues
    and index should have.

    Attributes:
        parts: the frames with their queue entries; empty if ``sound`` is set.
        sound: the entries, if a Spark task has found that they are all right; else None.
        faults: kind of finding -> (physical offset, size) of each frame with this fault.
        last_keyed: physical offset of the last frame with keys for the index, None if there is
            none.
        latest_time: latest store time in milliseconds.
    """

    def __init__(self, config: StoreConfig) -> None:
        super().__init__()
        self.parts: list[tuple[Followed, Parts]] = []
        self.sound: SoundEntries | None = None
        self.faults: dict[str, list[tuple[int, int]]] = {}
        self.last_keyed: int | None = None
        self.latest_time = 0
        self._config = config

    def __call__(self, window: Window, followed: Followed) -> None:
        """Add the next frames."""
        super().__call__(window, followed)
        rows = followed.rows
        large = np.flatnonzero(rows[:, SIZE] > self._config.max_message_size).tolist()
        for kind, which in (
            ("oversized", large),
            ("suspect_text", columns.suspect_rows(window, rows)),
            ("bad_property_crc", columns.wrong_property_crcs(window, rows)),
        ):
            found = [(window.base + int(rows[n, POSITION]), int(rows[n, SIZE])) for n in which]
            self.faults[kind] = self.faults.get(kind, []) + found
        requests = followed.requests
        # Count only keys that the store's broker indexes: RocketMQ 3.x leaves out COMMIT messages.
        if len(followed.key_numbers):
            self.last_keyed = int(requests.physical_offset[followed.key_numbers.max()])
        self.latest_time = max(self.latest_time, int(requests.store_timestamp.max()))
        # Copy the arrays, because the follower overwrites them with the data of the next frames.
        kept = replace(
            followed,
            rows=rows[:0],
            key_hashes=followed.key_hashes.copy(),
            key_numbers=followed.key_numbers.copy(),
        )
        self.parts.append((kept, parts_with_copies(window, followed, self._config)))

    def join(self, after: FrameFacts) -> bool:
        """Add the next run, and return True. If there is a gap between the runs or between their
        entries, add nothing, and return False. Both runs must have sound entries.
        """
        mine, others = self.sound, after.sound
        assert mine is not None and others is not None
        queues = dict(mine.queues)
        for key, (start, stop) in others.queues.items():
            first, end = queues.get(key, (start, start))
            if end != start:
                return False
            queues[key] = first, stop
        if self.end != after.start or mine.index[1] != others.index[0]:
            return False
        self.sound = SoundEntries(queues, (mine.index[0], others.index[1]))
        self.end, self.count = after.end, self.count + after.count
        self.last_time = after.last_time
        for kind, found in after.faults.items():
            self.faults[kind] = self.faults[kind] + found
        self.last_keyed = self.last_keyed if after.last_keyed is None else after.last_keyed
        self.latest_time = max(self.latest_time, after.latest_time)
        return True


class EntryFacts(Stretch):
    """Collects the facts about a run that recover needs: queue entries and transactions.

    ``unqueued`` contains the frames with the transaction type PREPARED or ROLLBACK.
    """

    def __init__(self, config: StoreConfig, *, with_transactions: bool = False) -> None:
        super().__init__()
        self.parts: list[Parts] = []
        self.unqueued: list[Parts] = []
        self.transactions: list[TransactionFrame] = []
        self.has_keys = False
        self._config = config
        self._with_transactions = with_transactions

    def __call__(self, window: Window, followed: Followed) -> None:
        """Add the next frames."""
        super().__call__(window, followed)
        self.has_keys = self.has_keys or len(followed.key_numbers) > 0
        self.parts.append(parts_with_copies(window, followed, self._config))
        unqueued = unqueued_parts(followed)
        if unqueued:
            self.unqueued.append(unqueued)
        if self._with_transactions:
            self.transactions += transaction_frames(window, followed.rows)


# ---------------------------------------------------------------- sound parts, found by Spark tasks
# Spark tasks report only runs without any difference. Verify reads all other parts, so its findings
# do not depend on the number of tasks.
@dataclass(frozen=True, slots=True)
class SoundParts:
    """The parts in which Spark tasks found no fault: runs in the log's order, and the paths of the
    index files whose chains are correct.
    """

    runs: tuple[FrameFacts, ...] = ()
    chains: frozenset[str] = frozenset()


class SoundReader:
    """Finds the runs whose entries in queues and index are all right. Not thread-safe."""

    def __init__(self, layout: StoreLayout, stretch_bytes: int = STRETCH_BYTES) -> None:
        self.layout = layout = with_entry_rules(layout)
        self._bytes = stretch_bytes
        self._reader = StretchReader(layout)
        self._queues = QueuesAudit(layout)
        files = OpenFiles(layout)
        index = Index(layout, files=files)
        self._entries = IndexEntries(index.files, files, layout.commit_log.start)

    def read(self, start: int, stop: int) -> list[FrameFacts]:
        """Return the runs without a difference that begin in a range of one file."""
        found: list[FrameFacts] = []
        make = partial(FrameFacts, self.layout.config)
        for run in self._reader.read_all(start, stop, self._bytes, make):
            run.sound = self._sound(run)
            run.parts.clear()
            if run.sound is not None and not (found and found[-1].join(run)):
                found.append(run)
        return found

    def _sound(self, run: FrameFacts) -> SoundEntries | None:
        """Return the entries of a run; None if an entry is missing or wrong."""
        queues = self._queues.sound_ranges(parts for _, parts in run.parts)
        if queues is None:
            return None
        first = self._entries.first_from(run.start)
        stream = EntryStream(self._entries, first)
        for followed, _ in run.parts:
            places = followed.requests.physical_offset[followed.key_numbers]
            stream.take(places, followed.key_hashes)
            if stream.is_broken:
                return None
        return SoundEntries(queues, (first, stream.place))
