"""Audit of the consume queues. It finds every difference between the queues and the log.

The audit reports differences after it has read the whole log, because a topic may have been deleted
and created again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property
from itertools import pairwise
from weakref import proxy

import numpy as np

from logquarry.errors import CorruptFile, UsageError
from logquarry.format import broker_json
from logquarry.format.arrays import Bools, Int64
from logquarry.format.queue_entry import FILLER_SIZE, UNIT_SIZE
from logquarry.log.follow import DispatchRequests, Followed
from logquarry.log.layout import StoreLayout
from logquarry.log.open_files import OpenFiles
from logquarry.log.rocksdb import read_config
from logquarry.log.store_files import CONSUME_QUEUE, NAME_DIGITS
from logquarry.read.features import OtherQueues, other_queues
from logquarry.read.log_end import checkpoint_times
from logquarry.read.log_queues import QueueKey
from logquarry.read.queue import ConsumeQueue, FileQueue, Queue, Units, is_written
from logquarry.repair.audit.differences import (
    EITHER,
    EntryGroup,
    SpanSet,
    TagsRule,
    and_more,
    entry_text,
    queue_file_differences,
    queue_name,
    same_entries,
)
from logquarry.repair.audit.expired_queues import holes
from logquarry.repair.audit.harmed_frames import HarmedIds, HarmedTypes
from logquarry.repair.audit.queue_evidence import (
    SeenMessages,
    SpareEntries,
    entries_at,
    has_entries,
)
from logquarry.repair.findings import Finding, finding
from logquarry.text import counted
from logquarry.write.dispatcher import RUN_SPAN
from logquarry.write.message_rules import queue_name_fault
from logquarry.write.queue_table import is_listed
from logquarry.write.queue_writer import QueuePart, is_batch


class QueuesAudit:
    """Compares all queues of a store with its log: :meth:`add` takes each run, in order."""

    def __init__(self, layout: StoreLayout) -> None:
        self.layout = layout
        self.entries = 0
        self._files = OpenFiles(layout)
        self._seen: dict[QueueKey, SeenMessages] = {}
        self._names = self._find_names()
        self._queues: dict[QueueKey, Queue] = {}
        audit: QueuesAudit = proxy(self)

        def queue_of(key: QueueKey) -> Queue | None:
            # Use a weak reference: in a cycle of references, the files would stay open until a
            # garbage collection.
            return audit._on_disk(key)

        self._ids = HarmedIds(layout, self._names, queue_of, is_3_1=layout.config.is_3_1)
        self.types = HarmedTypes(layout, queue_of)

    def add(self, followed: Followed, parts: Mapping[QueueKey, QueuePart]) -> None:
        """Compare the frames of a run with their entries."""
        requests = followed.requests
        own = {key: part for key, part in parts.items() if not is_batch(part.units)}
        next_parts = {key for key, part in own.items() if self._is_next_part(key, part)}
        placed = own if len(next_parts) == len(own) else self._ids.place(own)
        for key, part in placed.items():
            if key in next_parts and part is own[key]:
                self._advance(key, part)
                self._check_times(key, part, requests)
            else:
                self._add(key, part, requests)

    def _add(self, key: QueueKey, part: QueuePart, requests: DispatchRequests) -> None:
        seen = self._of(key, int(part.offsets[0]))
        if seen.queue is not None:
            if not seen.messages and len(part.rows) > 1:
                self._add(key, part[:1], requests)
                self._add(key, part[1:], requests)
                return
            part = seen.corrected(part)
            self._settle(seen, int(part.offsets[0]))
            part = seen.without_strays(part)
            if seen.ends_in_doubt(part):
                seen.held = part[-1:], requests.store_timestamp[part.rows[-1:]]
                part = part[:-1]
        if len(part.rows):
            self._compare(seen, part, requests.store_timestamp[part.rows])
            self._check_times(key, part, requests)

    def _settle(self, seen: SeenMessages, following: int | None = None) -> None:
        """Decide whether the held frame of a queue has a place in it. ``following`` is the queue
        offset of the next message, None at the log's end.
        """
        held, seen.held = seen.held, None
        if held is None:
            return
        if following == seen.next_offset:
            seen.add_stray(held[0])
        else:
            self._compare(seen, *held)

    def settle(self) -> None:
        """Compare the held frames of the queues; call this after the whole log is read."""
        for seen in self._seen.values():
            self._settle(seen)

    def _check_times(self, key: QueueKey, part: QueuePart, requests: DispatchRequests) -> None:
        """Compare the store times of entries; only entries in RocksDB have a store time."""

    def is_next(self, queues: Mapping[QueueKey, tuple[int, int]]) -> bool:
        """Whether the ranges in ``queues`` continue the queues: each range must begin one queue
        offset after the last message of its queue. A queue without messages so far can begin at any
        offset.
        """
        return all(
            key not in self._seen or self._seen[key].next_offset == first
            for key, (first, _) in queues.items()
        )

    def add_sound(self, queues: Mapping[QueueKey, tuple[int, int]]) -> None:
        """Count these entries as right: a Spark task has already compared them."""
        for key, (first, stop) in queues.items():
            self._of(key, first).advance(stop - first)
            self.entries += stop - first

    def sound_ranges(
        self, run: Iterable[Mapping[QueueKey, QueuePart]]
    ) -> dict[QueueKey, tuple[int, int]] | None:
        """Return the queue offsets of a run in each queue, as (first, one past the last). Return
        None if a queue does not have exactly the entries of the run. The call first deletes what
        the audit has recorded about earlier runs.
        """
        self._seen.clear()
        for parts in run:
            for key, part in parts.items():
                if not self._is_next_part(key, part):
                    return None
                self._advance(key, part)
        return {key: (seen.first_offset, seen.next_offset) for key, seen in self._seen.items()}

    def _of(self, key: QueueKey, first: int) -> SeenMessages:
        seen = self._seen.get(key)
        if seen is None:
            seen = self._seen[key] = SeenMessages(self._on_disk(key), first, first)
        return seen

    def _on_disk(self, key: QueueKey) -> Queue | None:
        """Return a queue of the store, None if the store does not have it."""
        if key in self._names and key not in self._queues:
            self._queues[key] = self._queue(key)
        return self._queues.get(key)

    def _find_names(self) -> set[QueueKey]:
        return set(self.layout.queue_names)

    def _queue(self, key: QueueKey) -> Queue:
        return ConsumeQueue(self.layout, *key, files=self._files, with_stale=True)

    def _is_next_part(self, key: QueueKey, part: QueuePart) -> bool:
        seen, first = self._seen.get(key), int(part.offsets[0])
        if seen is not None and first != seen.next_offset:
            return False
        queue = self._on_disk(key)
        return queue is not None and has_entries(queue, part)

    def _advance(self, key: QueueKey, part: QueuePart) -> None:
        self._of(key, int(part.offsets[0])).advance(len(part.offsets))
        self.entries += len(part.offsets)

    def _compare(self, seen: SeenMessages, part: QueuePart, times: Int64) -> None:
        offsets = part.offsets
        # If a queue offset does not increase, the topic was deleted and created again.
        falls = np.flatnonzero(np.diff(offsets, prepend=seen.next_offset - 1) <= 0)
        starts = [0, *falls.tolist(), len(offsets)]
        for number, (start, stop) in enumerate(pairwise(starts)):
            if number:
                seen.restart(int(offsets[start]), int(part.units["physical_offset"][start]))
            if stop > start:
                units = part.units[start:stop]
                self._compare_epoch(seen, offsets[start:stop], units, times[start:stop])

    def _compare_epoch(
        self, seen: SeenMessages, offsets: Int64, wanted: Units, times: Int64
    ) -> None:
        seen.add_gaps(np.append(seen.next_offset, offsets[:-1] + 1), offsets)
        seen.next_offset = int(offsets[-1]) + 1
        seen.messages += len(offsets)
        places = wanted["physical_offset"].astype(np.int64)
        if seen.missing_from is None:
            end = 0 if seen.queue is None else seen.queue.max_offset
            first = int(np.searchsorted(offsets, end))
            if first < len(offsets):
                seen.missing_from = int(places[first])
                seen.missing_since = int(times[first])
        queue = seen.queue
        if queue is None:
            return
        there = entries_at(queue, offsets)
        written = is_written(there)
        self.entries += int(written.sum())
        begin, end = queue.min_offset, queue.max_offset
        inside = (offsets < end) & (offsets >= begin)
        self._note_head(seen, offsets, (offsets >= 0) & (offsets < begin), places)
        seen.note("queue_hole", offsets, ~written & inside, "was never written")
        wrong = written & inside & ~same_entries(there, wanted, TagsRule.of_readers(queue.topic))
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            has, right = map(entry_text, (there[at], wanted[at]))
            reason = f"points to {has}; the message of that queue offset is {right}"
            place = int(wanted["physical_offset"][at])
            if (place, wanted["size"][at]) == (there["physical_offset"][at], there["size"][at]):
                reason += EITHER.format(place)
            seen.note("queue_entry_wrong", offsets, wrong, reason)

    def _note_head(self, seen: SeenMessages, offsets: Int64, early: Bools, places: Int64) -> None:
        """Record the messages that lie before the queue's first entry, although the log still has
        them.
        """
        if seen.queue is None or not early.any():
            return
        if seen.log_start is None:
            seen.log_start = self.layout.present_start()
        early &= places >= seen.log_start
        seen.note(
            "queue_head_missing", offsets, early, f"is missing before {seen.queue.min_offset}"
        )

    def differences(self, log_end: int, lost: SpanSet, *, is_explained: bool) -> Iterator[Finding]:
        """Yield all differences, queue by queue. Call :meth:`settle` first. ``is_explained`` says
        whether a crash explains missing entries.
        """
        for key in sorted({*self._seen, *self._names}):
            folder = self._folder(key)
            if key[0] in self._others.batch:
                reason = "the topic has batch queues: a broker does not start on this folder"
                if self._others.has_rocksdb and not self.layout.filesystem.list(folder):
                    reason = (
                        "the topic has batch queues (queue.type=BatchCQ), but the store has its "
                        "queues in RocksDB, which cannot hold them: a broker does not serve the "
                        "topic"
                    )
                yield finding("queue_misplaced", folder, 0, reason)
                continue
            seen = self._seen.get(key) or SeenMessages(self._queue(key), 0, 0)
            if isinstance(seen.queue, FileQueue):
                yield from queue_file_differences(folder, seen.queue.listed)
            yield from self._queue_differences(key, seen, log_end, lost, is_explained=is_explained)

    def is_crash(self, log_end: int) -> bool:
        """Whether a crash explains that the queues lack the entries of the newest messages.

        Every queue must have all messages before the physical offset that the dispatcher had
        reached. (Logquarry dispatches a part of the log one queue after another. So in a store of
        logquarry, queues may lack messages in the last ``RUN_SPAN`` bytes before this offset.)
        Every missing message must be newer than the checkpoint. Every queue file that is not empty
        must have the right size.
        """
        if not self.layout.has_abort:
            return False
        known = checkpoint_times(self.layout).logics_timestamp
        dispatched = 0
        for queue in ConsumeQueue.all_of(self.layout, self._files):
            end = queue.last_physical_end
            if end is not None and end <= log_end:
                dispatched = max(dispatched, end)
            if any(file.size != queue.sequence.file_size for file in queue.files if file.size):
                return False
        if self.layout.kept_settings:
            dispatched -= RUN_SPAN
        return self._is_dispatched(dispatched, known)

    def _is_dispatched(self, dispatched: int, known: int) -> bool:
        return all(
            seen.missing_since > known and (seen.missing_from or 0) >= dispatched
            for key, seen in self._seen.items()
            if seen.missing_from is not None and not self._has_no_queue(key, seen)
        )

    def _has_no_queue(self, key: QueueKey, seen: SeenMessages) -> bool:
        """Whether it is no damage that the store lacks a queue whose messages are in the log."""
        # If a topic's name cannot be a folder name, the dispatcher makes no queue for it.
        return seen.queue is None and (
            self._is_deleted(key[0], seen.missing_since) or queue_name_fault(key[0]) is not None
        )

    def _queue_differences(
        self,
        key: QueueKey,
        seen: SeenMessages,
        log_end: int,
        lost: SpanSet,
        *,
        is_explained: bool,
    ) -> Iterator[Finding]:
        if seen.epoch_start is not None:
            at, reason = seen.epoch_start, f"{queue_name(key)} starts again at {seen.first_offset}"
            yield finding("new_epoch", self.layout.log_file(at), at, reason)
        queue = seen.queue
        if queue is None:
            if not seen.messages:
                return
            reason = f"the log has {counted(seen.messages, 'message')} of it"
            if self._is_deleted(key[0], seen.missing_since):
                reason, is_explained = f"{reason}, but topics.json no longer lists the topic", True
            yield from self._missing(key, reason, is_explained=is_explained)
            return
        if seen.harmed_count:
            at, size, text = seen.harmed
            file, text = self.layout.log_file(at), text + and_more(seen.harmed_count)
            yield finding("harmed_queue_offset", file, at, text, size)
        for place, offset in seen.strays[:1]:
            text = (
                f"another message has offset {offset} in {queue_name(key)}, so this one is in no "
                "queue: its queue id, queue offset or transaction type has changed"
                f"{and_more(len(seen.strays))}"
            )
            yield finding("harmed_queue_id", self.layout.log_file(place), place, text)
        for group in seen.groups.values():
            yield self._difference(queue, group)
        if seen.messages and seen.next_offset > queue.max_offset:
            first = max(queue.max_offset, seen.first_offset)
            yield finding(
                "queue_behind",
                *self._place(queue, first),
                f"ends at {queue.max_offset}, and the log has messages up to {seen.next_offset}",
                0 if queue.is_batch else (seen.next_offset - first) * UNIT_SIZE,
                is_explained=is_explained,
            )
        if not seen.messages and isinstance(queue, FileQueue):
            yield from holes(queue, self._folder(key), self.layout.commit_log.start)
        yield from self._spare(queue, seen, log_end, lost)
        yield from self.types.differences(key, self.layout)
        for place in self._moved.get(key, ())[:1]:
            text = f"the frame names another queue, and {queue_name(key)} has the message at "
            text += f"{self._ids.offsets[place]}{and_more(len(self._moved[key]))}"
            yield finding("harmed_queue_id", self.layout.log_file(place), place, text)
        if isinstance(queue, ConsumeQueue) and log_end < FILLER_SIZE:
            yield from self._last_filler(queue)  # QUIRK: see expired_queues.stand_in

    @property
    def harmed_topics(self) -> list[int]:
        """The physical offsets of the frames whose topic is harmed."""
        found = self._ids.found.items()
        return [place for place, moved in found if moved.named[0] != moved.right[0]]

    @cached_property
    def _moved(self) -> dict[QueueKey, list[int]]:
        """For each queue, the physical offsets of its harmed frames."""
        moved: dict[QueueKey, list[int]] = {}
        for place, found in self._ids.found.items():
            moved.setdefault(found.right, []).append(place)
        return moved

    def _last_filler(self, queue: ConsumeQueue) -> Iterator[Finding]:
        number = max(queue.max_offset - 1, 0)
        if queue.units(number, number + 1)["size"].tolist() == [FILLER_SIZE]:
            place, reason = self._place(queue, number), "the last entry is a filler"
            yield finding("queue_ends_in_filler", *place, reason)

    def _spare(
        self, queue: Queue, seen: SeenMessages, log_end: int, lost: SpanSet
    ) -> Iterator[Finding]:
        first, stop = queue.min_offset, queue.max_offset
        ranges = [(first, stop)]
        if seen.messages:
            ranges = [(first, seen.first_offset), *seen.gaps, (seen.next_offset, stop)]
        spare = SpareEntries(self.layout, queue, log_end, lost)
        begin = seen.first_offset if seen.messages else stop
        for group in spare.check([(max(first, a), min(b, stop)) for a, b in ranges], begin):
            yield self._difference(queue, group)
        for offset in spare.unqueued:
            for _, entry in queue.entries(offset, offset + 1):
                self.types.check(queue, offset, entry)
        self.entries += spare.entries

    def _is_deleted(self, topic: str, stored: int) -> bool:
        """Whether an administrator deleted a topic; ``stored`` is the store time of one of its
        messages.

        A broker adds a topic to ``config/topics.json`` before its first message, and writes the
        time of each change (``DataVersion``). So a topic was
        deleted if the file lacks the topic, and the last change is later than the message. For a
        topic that brokers do not list there (:func:`is_listed`), the result is False.
        """
        topics, changed = self._topics
        return changed > stored and topic not in topics and is_listed(topic)

    @cached_property
    def _topics(self) -> tuple[Collection[str], int]:
        """The listed topics, and the time of the last change in milliseconds; 0 if unknown."""
        try:
            text = read_config(self.layout.filesystem, broker_json.TOPICS_FILE)
            document = broker_json.decode_topic_document(text)
            changed = broker_json.whole(
                document[broker_json.DATA_VERSION]["timestamp"], "timestamp"
            )
            return document["topicConfigTable"], changed
        except (FileNotFoundError, CorruptFile, UsageError, ValueError, TypeError, KeyError):
            # The check of the configuration files reports an invalid file.
            return (), 0

    def _missing(self, key: QueueKey, reason: str, *, is_explained: bool) -> Iterator[Finding]:
        # If a topic's name cannot be a folder name, the dispatcher makes no queue for it.
        is_explained = is_explained or queue_name_fault(key[0]) is not None
        if not self._others.has_rocksdb:
            place = self._folder(key)
            yield finding("queue_missing", place, 0, reason, is_explained=is_explained)

    @cached_property
    def _others(self) -> OtherQueues:
        """The queues of the store that this audit does not compare."""
        return other_queues(self.layout)

    def _folder(self, key: QueueKey) -> str:
        return f"{CONSUME_QUEUE}/{key[0]}/{key[1]}"

    def _place(self, queue: Queue, offset: int) -> tuple[str, int]:
        room = self.layout.queue(*queue.key).file_size
        base = offset * UNIT_SIZE // room * room
        folder = self._folder(queue.key)
        return f"{folder}/{base:0{NAME_DIGITS}d}", offset * UNIT_SIZE - base

    def _difference(self, queue: Queue, group: EntryGroup) -> Finding:
        return group.at(*self._place(queue, group.number), UNIT_SIZE)
