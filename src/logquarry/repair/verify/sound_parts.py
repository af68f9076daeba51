"""Sound parts of a store, as Spark tasks report them to verify.

A task compares a part of the log with queues and index. For each series of frames without a
difference (a run), it reports a few numbers. It reports nothing else. Verify reads all other parts
itself, so the findings do not depend on the number of tasks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from logquarry.disk.open_files import OpenFiles
from logquarry.log.layout import StoreLayout
from logquarry.log.splits import STRETCH_BYTES, Stretch, StretchReader
from logquarry.read.index import Index
from logquarry.read.log_queues import QueueKey
from logquarry.read.queue import ConsumeQueue
from logquarry.read.store_sizes import with_entry_rules
from logquarry.repair.audit.index_entries import EntryStream, IndexEntries, Place
from logquarry.repair.audit.queues import has_entries
from logquarry.repair.audit.runs import FrameFacts


@dataclass(frozen=True, slots=True)
class SoundRun:
    """Frames without a gap between them whose queue entries and index entries are right.

    Attributes:
        start: physical offset of the first frame.
        end: physical offset after the last frame.
        count: number of frames.
        oversized: see :class:`FrameFacts`.
        suspects: see :class:`FrameFacts`.
        wrong_crcs: see :class:`FrameFacts`.
        queues: for each queue the run's first queue offset, and one past its last; without a gap.
        entries: the first index entry of the run's keys, and the place after the last one.
        last_keyed: physical offset of the last frame with keys, None if there is none.
        last_time: latest store time in milliseconds.
    """

    start: int
    end: int
    count: int
    oversized: tuple[tuple[int, int], ...]
    suspects: tuple[tuple[int, int], ...]
    wrong_crcs: tuple[tuple[int, int], ...]
    queues: dict[QueueKey, tuple[int, int]]
    entries: tuple[Place, Place]
    last_keyed: int | None
    last_time: int


@dataclass(frozen=True, slots=True)
class SoundParts:
    """Sound parts of one store.

    Attributes:
        runs: in the log's order.
        chains: paths of index files whose chains are right.
    """

    runs: tuple[SoundRun, ...] = ()
    chains: frozenset[str] = frozenset()


class SoundReader:
    """Finds the sound parts of a store. Not thread-safe.

    Args:
        layout: the store's files.
        stretch_bytes: bytes of the log that are read at once.
    """

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
        """The sound runs that begin between two physical offsets of one file."""
        found: list[SoundRun] = []
        for stretch, facts in self._reader.read_all(start, stop, self._bytes, self._facts):
            sound = self._sound(stretch, facts)
            if sound is not None:
                joined = _joined(found[-1], sound) if found else None
                if joined is None:
                    found.append(sound)
                else:
                    found[-1] = joined
        return found

    def _facts(self) -> FrameFacts:
        return FrameFacts(self.layout.config)

    def _sound(self, run: Stretch, facts: FrameFacts) -> SoundRun | None:
        """Return the run; None if queues or index differ from the log."""
        queues: dict[QueueKey, tuple[int, int]] = {}
        stream: EntryStream | None = None
        first = self._entries.first_from(run.start)
        last_keyed: int | None = None
        last_time = 0
        for followed, parts in facts.parts:
            for key, part in parts.items():
                queue = self._queue(key)
                if queue is None or not has_entries(queue, part):
                    return None
                start, stop = int(part.offsets[0]), int(part.offsets[-1]) + 1
                known = queues.get(key)
                if known is not None and known[1] != start:
                    return None
                queues[key] = start if known is None else known[0], stop
            requests = followed.requests
            if len(followed.key_hashes):
                stream = stream or EntryStream(self._entries, first)
                stream.take(requests.physical_offset[followed.key_numbers], followed.key_hashes)
                if stream.is_broken:
                    return None
            keyed = np.flatnonzero(requests.has_key)
            if len(keyed):
                last_keyed = int(requests.physical_offset[keyed[-1]])
            last_time = max(last_time, int(requests.store_timestamp.max()))
        return SoundRun(
            start=run.start,
            end=run.end,
            count=run.count,
            oversized=tuple(facts.oversized),
            suspects=tuple(facts.suspects),
            wrong_crcs=tuple(facts.wrong_crcs),
            queues=queues,
            entries=(first, first if stream is None else stream.place),
            last_keyed=last_keyed,
            last_time=last_time,
        )

    def _queue(self, key: QueueKey) -> ConsumeQueue | None:
        queue = self._queues.get(key)
        if queue is None and key in self._names:
            queue = ConsumeQueue(self.layout, *key, files=self._files, with_stale=True)
            self._queues[key] = queue
        return queue


def _joined(before: SoundRun, after: SoundRun) -> SoundRun | None:
    """Join two runs; None if there is a gap between them or between their entries."""
    if before.end != after.start or before.entries[1] != after.entries[0]:
        return None
    queues = dict(before.queues)
    for key, (start, stop) in after.queues.items():
        known = queues.get(key)
        if known is not None and known[1] != start:
            return None
        queues[key] = start if known is None else known[0], stop
    return replace(
        before,
        end=after.end,
        count=before.count + after.count,
        oversized=before.oversized + after.oversized,
        suspects=before.suspects + after.suspects,
        wrong_crcs=before.wrong_crcs + after.wrong_crcs,
        queues=queues,
        entries=(before.entries[0], after.entries[1]),
        last_keyed=before.last_keyed if after.last_keyed is None else after.last_keyed,
        last_time=max(before.last_time, after.last_time),
    )
