"""What is sound in a part of a store, in few words: found by a task, believed by the check.

A task looks at a part of the log with its queues and its index, and says of each run of frames
only that all is as it should be. Whatever is not sound it says nothing of, and the check of the
store looks there itself: so that what is found is the same, however many have looked.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from logquarry.files.layout import StoreLayout
from logquarry.scan.stretches import STRETCH_BYTES, StretchReader
from logquarry.store.disk.open_files import OpenFiles
from logquarry.store.dispatch.queue_units import QueuePart, parts_of
from logquarry.store.queue.consume_queue import ConsumeQueue
from logquarry.store.queue.log_queues import QueueKey
from logquarry.store.read.index_file import Index
from logquarry.verify.checked_runs import CheckedRun, Findings
from logquarry.verify.index_stream import EntryStream, IndexEntries, Place


@dataclass(frozen=True, slots=True)
class SoundRun:
    """Frames one after the other that are sound, as are their units and their index entries.

    Attributes:
        start: physical offset of the first,
        end: and behind the last.
        count: how many.
        oversized: see :class:`CheckedRun`,
        suspects: likewise.
        queues: of each queue that they have messages of: its first queue offset, and the one
            behind its last; there is no gap between.
        entries: the index entries of their keys: from one to another.
        last_keyed: physical offset of the last with keys; None where none has any.
        last_time: latest store time.
    """

    start: int
    end: int
    count: int
    oversized: tuple[tuple[int, int], ...]
    suspects: tuple[tuple[int, int], ...]
    queues: dict[QueueKey, tuple[int, int]]
    entries: tuple[Place, Place]
    last_keyed: int | None
    last_time: int


@dataclass(frozen=True, slots=True)
class SoundParts:
    """What tasks have found sound in one store.

    Attributes:
        runs: in the log's order.
        chains: paths of index files whose chains are sound.
    """

    runs: tuple[SoundRun, ...] = ()
    chains: frozenset[str] = frozenset()


class SoundReader:
    """Finds what is sound in parts of a store. For one thread.

    Args:
        layout: the store's files.
        stretch_bytes: what is looked at in one go.
    """

    def __init__(self, layout: StoreLayout, stretch_bytes: int = STRETCH_BYTES) -> None:
        self.layout = layout
        self._bytes = stretch_bytes
        self._reader = StretchReader(layout)
        self._files = OpenFiles(layout)
        self._names = set(layout.queue_names)
        self._queues: dict[QueueKey, ConsumeQueue] = {}
        index = Index(layout, files=self._files)
        self._entries = IndexEntries(index.files, self._files, layout.commit_log.start)

    def read(self, start: int, stop: int) -> list[SoundRun]:
        """The sound runs that begin between two places of one file of the log."""
        found: list[SoundRun] = []
        for stretch, findings in self._reader.read_all(start, stop, self._bytes, self._findings):
            sound = self._sound(findings.run(stretch))
            if sound is not None:
                joined = _joined(found[-1], sound) if found else None
                if joined is None:
                    found.append(sound)
                else:
                    found[-1] = joined
        return found

    def _findings(self) -> Findings:
        return Findings(self.layout.config.max_message_size)

    def _sound(self, run: CheckedRun) -> SoundRun | None:
        """What there is to say of a run, None where something of it is not as it should be."""
        queues: dict[QueueKey, tuple[int, int]] = {}
        stream: EntryStream | None = None
        first = self._entries.first_from(run.start)
        last_keyed: int | None = None
        last_time = 0
        for followed in run.parts:
            for key, part in parts_of(followed).items():
                queue = self._queue(key)
                if queue is None or not units_stand(queue, part):
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
            oversized=run.oversized,
            suspects=run.suspects,
            queues=queues,
            entries=(first, first if stream is None else stream.place),
            last_keyed=last_keyed,
            last_time=last_time,
        )

    def _queue(self, key: QueueKey) -> ConsumeQueue | None:
        queue = self._queues.get(key)
        if queue is None and key in self._names:
            start = self.layout.commit_log.start
            queue = ConsumeQueue(self.layout, *key, log_min_offset=start, files=self._files)
            self._queues[key] = queue
        return queue


def units_stand(queue: ConsumeQueue, part: QueuePart) -> bool:
    """Whether a queue has just the units that it should have there, byte for byte, in a row."""
    offsets = part.offsets
    first, stop = int(offsets[0]), int(offsets[-1]) + 1
    if stop - first != len(offsets) or first < queue.min_offset or stop > queue.max_offset:
        return False
    if len(offsets) > 1 and int(np.diff(offsets).min()) != 1:
        return False
    at = 0
    for start, there in queue.runs(first, stop):
        wanted = part.units[at : at + len(there)]
        if start != first + at or there.tobytes() != wanted.tobytes():
            return False
        at += len(there)
    return at == len(offsets)


def _joined(before: SoundRun, after: SoundRun) -> SoundRun | None:
    """Two runs as one; None where there is something between them."""
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
        queues=queues,
        entries=(before.entries[0], after.entries[1]),
        last_keyed=before.last_keyed if after.last_keyed is None else after.last_keyed,
        last_time=max(before.last_time, after.last_time),
    )
