"""Runs, with the facts that an audit needs. A run is a part of the log with only valid frames.

Threads and Spark tasks read runs before an audit reaches them. The audit uses such a run only if
the run begins exactly where the audit is; otherwise, the audit reads this part of the log itself
(:func:`logquarry.log.frames.guided`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, Protocol, TypeVar

import numpy as np

from logquarry.config import StoreConfig
from logquarry.dialect31.open_transactions import TransactionFrame, transaction_frames
from logquarry.format.arrays import POSITION, SIZE
from logquarry.log import columns
from logquarry.log.codec import Window
from logquarry.log.follow import Followed, Follower, follow_run
from logquarry.log.layout import StoreLayout
from logquarry.log.open_files import OpenFiles
from logquarry.log.splits import STRETCH_BYTES, Stretch, StretchReader, stretches_ahead
from logquarry.log.walk import Run
from logquarry.read.index import Index
from logquarry.read.log_queues import QueueKey
from logquarry.read.queue import ConsumeQueue
from logquarry.read.store_sizes import with_entry_rules
from logquarry.repair.audit.index_entries import EntryStream, IndexEntries, Place
from logquarry.repair.audit.queue_evidence import has_entries
from logquarry.write.queue_writer import QueuePart, parts_with_copies

Parts = dict[QueueKey, QueuePart]
"""For each queue, the entries that some frames should have in it."""
FrameFaults = dict[str, list[tuple[int, int]]]


class Facts(Protocol):
    """Collects facts about the frames of one run."""

    first_time: int
    last_time: int

    def __call__(self, window: Window, followed: Followed) -> None:
        """Add the next frames. The arrays are valid only during the call."""


F = TypeVar("F", bound=Facts)


@dataclass(frozen=True, slots=True)
class AuditedRun(Generic[F]):
    """The facts about one run: ``count`` valid frames without a gap."""

    start: int
    end: int
    count: int
    facts: F

    @property
    def first_time(self) -> int:
        """Store time of the first frame in milliseconds."""
        return self.facts.first_time

    @property
    def last_time(self) -> int:
        """Store time of the last frame in milliseconds."""
        return self.facts.last_time


def runs_ahead(
    layout: StoreLayout, stretch_bytes: int, make: Callable[[], F]
) -> Generator[AuditedRun[F]]:
    """Yield the runs of a log, each of about ``stretch_bytes``. Threads read them in advance."""
    with closing(stretches_ahead(layout, stretch_bytes, make)) as ahead:
        for found, facts in ahead:
            yield AuditedRun(found.start, found.end, found.count, facts)


def audited(follower: Follower, run: Run, facts: F) -> AuditedRun[F]:
    """Return a run that the audit itself has read, with its facts."""
    for window, followed in follow_run(follower, run):
        facts(window, followed)
    return AuditedRun(run.start, run.end, len(run.rows), facts)


class FrameFacts:
    """Collects the facts about a run that verify needs: faulty frames, and the entries that queues
    and index should have.

    Attributes:
        faults: kind of finding -> (physical offset, size) of each frame with this fault.
        last_keyed: physical offset of the last frame with keys, None if there is none.
        latest_time: latest store time in milliseconds.
    """

    def __init__(self, config: StoreConfig) -> None:
        self.parts: list[tuple[Followed, Parts]] = []
        self.faults: FrameFaults = {}
        self.last_keyed: int | None = None
        self.latest_time = 0
        self.first_time = self.last_time = 0
        self._config = config

    def __call__(self, window: Window, followed: Followed) -> None:
        """Add the next frames."""
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
        keyed = np.flatnonzero(requests.has_key)
        if len(keyed):
            self.last_keyed = int(requests.physical_offset[keyed[-1]])
        times = requests.store_timestamp
        if not self.parts:
            self.first_time = int(times[0])
        self.last_time = int(times[-1])
        self.latest_time = max(self.latest_time, int(times.max()))
        # Copy the arrays, because the follower overwrites them with the data of the next frames.
        kept = replace(
            followed,
            rows=rows[:0],
            key_hashes=followed.key_hashes.copy(),
            key_numbers=followed.key_numbers.copy(),
        )
        self.parts.append((kept, parts_with_copies(window, followed, self._config)))


class EntryFacts:
    """Collects the facts about a run that recover needs: queue entries and transactions."""

    def __init__(self, config: StoreConfig, *, with_transactions: bool = False) -> None:
        self.parts: list[Parts] = []
        self.transactions: list[TransactionFrame] = []
        self.has_keys = False
        self.first_time = self.last_time = 0
        self._config = config
        self._with_transactions = with_transactions

    def __call__(self, window: Window, followed: Followed) -> None:
        """Add the next frames."""
        times = followed.requests.store_timestamp
        if not self.parts:
            self.first_time = int(times[0])
        self.last_time = int(times[-1])
        self.has_keys = self.has_keys or len(followed.key_numbers) > 0
        self.parts.append(parts_with_copies(window, followed, self._config))
        if self._with_transactions:
            self.transactions += transaction_frames(window, followed.rows)


# ---------------------------------------------------------------- sound parts, found by Spark tasks
# Spark tasks report only runs without any difference. Verify reads all other parts, so its findings
# do not depend on the number of tasks.
@dataclass(slots=True)
class SoundRun:
    """A run whose frames all have the right entries in queues and index.

    Attributes:
        queues: queue -> (first queue offset in the run, one past the last), without a gap.
        entries: place of the run's first index entry, and place after its last index entry.
        last_keyed: physical offset of the last frame with keys, None if there is none.
    """

    start: int
    end: int
    count: int
    faults: FrameFaults
    queues: dict[QueueKey, tuple[int, int]]
    entries: tuple[Place, Place]
    last_keyed: int | None
    latest_time: int

    def join(self, after: SoundRun) -> bool:
        """Add the next run, and return True; False if there is a gap between runs or entries."""
        joined = dict(self.queues)
        for key, (start, stop) in after.queues.items():
            first, end = joined.get(key, (start, start))
            if end != start:
                return False
            joined[key] = first, stop
        if self.end != after.start or self.entries[1] != after.entries[0]:
            return False
        for kind, found in after.faults.items():
            self.faults[kind] = self.faults[kind] + found
        self.end, self.count = after.end, self.count + after.count
        self.queues, self.entries = joined, (self.entries[0], after.entries[1])
        self.last_keyed = self.last_keyed if after.last_keyed is None else after.last_keyed
        self.latest_time = max(self.latest_time, after.latest_time)
        return True


@dataclass(frozen=True, slots=True)
class SoundParts:
    """The parts in which Spark tasks found no fault: runs in the log's order, and the paths of the
    index files whose chains are correct.
    """

    runs: tuple[SoundRun, ...] = ()
    chains: frozenset[str] = frozenset()


class SoundReader:
    """Finds the parts of a store that agree with each other. Not thread-safe."""

    def __init__(self, layout: StoreLayout, stretch_bytes: int = STRETCH_BYTES) -> None:
        self.layout = layout = with_entry_rules(layout)
        self._bytes = stretch_bytes
        self._reader = StretchReader(layout)
        self._files = OpenFiles(layout)
        self._names = set(layout.queue_names)
        self._queues: dict[QueueKey, ConsumeQueue] = {}
        index = Index(layout, files=self._files)
        self._entries = IndexEntries(index.files, self._files, layout.commit_log.start)

    def read(self, start: int, stop: int) -> list[SoundRun]:
        """Return the runs without a difference that begin in a range of one file."""
        found: list[SoundRun] = []
        make = partial(FrameFacts, self.layout.config)
        for stretch, facts in self._reader.read_all(start, stop, self._bytes, make):
            sound = self._sound(stretch, facts)
            if sound is not None and not (found and found[-1].join(sound)):
                found.append(sound)
        return found

    def _sound(self, run: Stretch, facts: FrameFacts) -> SoundRun | None:
        """Return the run, or None if an entry of the run is missing or wrong."""
        queues: dict[QueueKey, tuple[int, int]] = {}
        stream: EntryStream | None = None
        first = self._entries.first_from(run.start)
        for followed, parts in facts.parts:
            for key, part in parts.items():
                queue = self._queue(key)
                if queue is None or not has_entries(queue, part):
                    return None
                start, stop = int(part.offsets[0]), int(part.offsets[-1]) + 1
                start_before, end = queues.get(key, (start, start))
                if end != start:
                    return None
                queues[key] = start_before, stop
            if len(followed.key_hashes):
                stream = stream or EntryStream(self._entries, first)
                places = followed.requests.physical_offset[followed.key_numbers]
                stream.take(places, followed.key_hashes)
                if stream.is_broken:
                    return None
        return SoundRun(
            start=run.start,
            end=run.end,
            count=run.count,
            faults=facts.faults,
            queues=queues,
            entries=(first, first if stream is None else stream.place),
            last_keyed=facts.last_keyed,
            latest_time=facts.latest_time,
        )

    def _queue(self, key: QueueKey) -> ConsumeQueue | None:
        queue = self._queues.get(key)
        if queue is None and key in self._names:
            queue = ConsumeQueue(self.layout, *key, files=self._files, with_stale=True)
            self._queues[key] = queue
        return queue
