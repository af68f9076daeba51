"""The log as verify wants it: what each run of frames means, made beside their use.

A sound log is cut into stretches that are followed apart from each other, by threads
(:func:`followed_ahead`) or by tasks of Spark (:mod:`.sound_runs`). These are guesses, which the
walk takes or does not (:mod:`logquarry.log.places`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Generic

import numpy as np

from logquarry.disk.open_files import OpenFiles
from logquarry.format.rows import POSITION, SIZE
from logquarry.log import columns
from logquarry.log.codec import Window
from logquarry.log.follow import Followed, Follower, follow_run
from logquarry.log.layout import StoreLayout
from logquarry.log.places import G, guided
from logquarry.log.splits import STRETCH_BYTES, Stretch, StretchReader, stretches_ahead
from logquarry.log.walk import BlankSpan, DamagedSpan, ExpiredSpan, LogEnd, LogReader, Run
from logquarry.read.consume_queue import ConsumeQueue
from logquarry.read.index import Index
from logquarry.read.index_tags import with_index_tags
from logquarry.read.log_queues import QueueKey
from logquarry.repair.verify.index_entries import EntryStream, IndexEntries, Place
from logquarry.write.queue_writer import QueuePart, parts_of


@dataclass(frozen=True, slots=True)
class CheckedRun:
    """Sound frames one after the other.

    Attributes:
        start: physical offset of the first,
        end: and behind the last.
        count: how many.
        parts: what they mean.
        oversized: physical offset and size of each that is larger than maxMessageSize,
        suspects: and of each whose topic or properties are no text.
    """

    start: int
    end: int
    count: int
    parts: tuple[Followed, ...]
    oversized: tuple[tuple[int, int], ...]
    suspects: tuple[tuple[int, int], ...]


Checked = CheckedRun | BlankSpan | DamagedSpan | ExpiredSpan | LogEnd


class CheckedRuns(Generic[G]):
    """Walks the log of a store, with its CRCs. For one walk.

    Args:
        layout: the store's files.
        bound: see :class:`LogReader`.
        live: whether a writer is at work.
        guesses: what was found apart from the walk, in the log's order.
        accept: whether a guess that begins where the walk is can be taken as it is.
    """

    def __init__(
        self,
        layout: StoreLayout,
        *,
        bound: int | None,
        live: bool,
        guesses: Iterable[G],
        accept: Callable[[G], bool],
    ) -> None:
        reader = LogReader(layout, bound=bound, live=live)
        self._events = guided(reader, () if live else guesses, accept)
        self._most = layout.config.max_message_size
        self._follower = Follower(layout.delay_levels_ms, keys=layout.config.index_keys)

    def events(self) -> Iterator[G | Checked]:
        """Everything from the log's start to its end, in order; see :meth:`LogReader.events`."""
        for event in self._events:
            yield self._checked(event) if isinstance(event, Run) else event

    def _checked(self, run: Run) -> CheckedRun:
        """A run of the walk, which has looked at the CRCs."""
        findings = Findings(self._most)
        for window, followed in follow_run(self._follower, run):
            findings(window, followed)
        return findings.run(Stretch(run.start, run.end, len(run.rows)))


class Findings:
    """Collects what frames mean, and what is odd about them. For one run.

    Args:
        most: bytes of the largest frame that is not odd.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._parts: list[Followed] = []
        self._oversized: list[tuple[int, int]] = []
        self._suspects: list[tuple[int, int]] = []

    def __call__(self, window: Window, followed: Followed) -> None:
        """Some more frames."""
        large = np.flatnonzero(followed.rows[:, SIZE] > self._most).tolist()
        self._oversized += _places(window, followed, large)
        self._suspects += _places(window, followed, columns.suspect_rows(window, followed.rows))
        self._parts.append(_kept(followed))

    def run(self, found: Stretch) -> CheckedRun:
        """All of it."""
        return CheckedRun(
            start=found.start,
            end=found.end,
            count=found.count,
            parts=tuple(self._parts),
            oversized=tuple(self._oversized),
            suspects=tuple(self._suspects),
        )


def _places(window: Window, followed: Followed, which: list[int]) -> list[tuple[int, int]]:
    rows = followed.rows
    return [(window.base + int(rows[row, POSITION]), int(rows[row, SIZE])) for row in which]


def _kept(followed: Followed) -> Followed:
    """What a follower gives is good until its next call."""
    return replace(
        followed,
        rows=followed.rows[:0],
        key_hashes=followed.key_hashes.copy(),
        key_numbers=followed.key_numbers.copy(),
    )


def followed_ahead(layout: StoreLayout, stretch_bytes: int = STRETCH_BYTES) -> Iterator[CheckedRun]:
    """The sound stretches of a log as threads find them; see :func:`stretches_ahead`."""
    most = layout.config.max_message_size

    def make() -> Findings:
        return Findings(most)

    for found, findings in stretches_ahead(layout, stretch_bytes, make):
        yield findings.run(found)


# --------------------------------------------------------------------------------------------------
# What is sound in a part of a store, in few words: found by a task, believed by the check.
#
# A task looks at a part of the log with its queues and its index, and says of each run of frames
# only that all is as it should be. Whatever is not sound it says nothing of, and the check of the
# store looks there itself: so that what is found is the same, however many have looked.


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
        self.layout = layout = with_index_tags(layout)
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
