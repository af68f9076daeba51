"""Audit of the consume queues: every difference between the queues and the log.

The audit reports differences after it has read the whole log, because a topic may have been deleted
and created again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any, Final

import numpy as np

from logquarry.errors import CorruptFile, UsageError
from logquarry.format import broker_json
from logquarry.format.arrays import Bools, Int64
from logquarry.format.queue_entry import FILLER_SIZE, UNIT_SIZE
from logquarry.log.follow import DispatchRequests, Followed
from logquarry.log.layout import StoreLayout
from logquarry.log.open_files import OpenFiles
from logquarry.log.rocksdb import read_config
from logquarry.log.store_files import CONSUME_QUEUE, NAME_DIGITS, FileSequence
from logquarry.read.fence import OtherQueues, other_queues
from logquarry.read.log_end import checkpoint_times
from logquarry.read.log_queues import QueueKey
from logquarry.read.queue import ConsumeQueue, FileQueue, Queue, Units, is_written
from logquarry.repair.audit.differences import (
    Difference,
    EntryGroup,
    LostSpans,
    TagsRule,
    and_more,
    queue_file_differences,
    queue_name,
    same_entries,
)
from logquarry.repair.audit.expired_queues import holes
from logquarry.repair.audit.queue_evidence import (
    HarmedOffsets,
    SpareEntries,
    entries_at,
    has_entries,
)
from logquarry.write.dispatcher import RUN_SPAN
from logquarry.write.message_rules import queue_name_fault
from logquarry.write.queue_table import is_listed
from logquarry.write.queue_writer import QueuePart, is_batch, units_of

_COLUMNS: Final = ("queue_offset", "physical_offset", "size", "tags_code", "store_timestamp")
MOST_GAPS: Final = 1 << 12
"""Maximum number of gaps to record for one queue; the last record covers all further gaps."""
_MOST_SEARCHES: Final = 1 << 14
"""Maximum number of entries to read in other queues, for frames that may belong there."""


@dataclass(slots=True)
class SeenMessages:
    """The messages of one queue that were read so far, since its topic was last created again.

    Attributes:
        epoch_start: physical offset of the first message of a recreated topic; else None.
        missing_from: physical offset of the first message after the queue's end.
        missing_since: store time of that message, in milliseconds.
        gaps: (start, stop) of missing queue offsets between the first and the last message.
        log_start: start of the log, read after the queue's files were listed; None if not yet read.
        harmed: the frames with a wrong queue offset; None if the queue has no files.
        strays: (physical offset, queue offset) of the frames that have no place in the queue.
    """

    queue: Queue | None
    first_offset: int
    next_offset: int
    messages: int = 0
    epoch_start: int | None = None
    missing_from: int | None = None
    missing_since: int = 0
    groups: dict[str, EntryGroup] = field(default_factory=dict)
    gaps: list[tuple[int, int]] = field(default_factory=list)
    log_start: int | None = None
    harmed: HarmedOffsets | None = None
    strays: list[tuple[int, int]] = field(default_factory=list)

    def note(self, kind: str, offsets: Int64, which: Bools, reason: str) -> None:
        """Record the entries that differ in one way; ``reason`` describes the first such entry."""
        if which.any():
            first = int(offsets[int(which.argmax())])
            group = self.groups.setdefault(kind, EntryGroup(kind, first, reason))
            group.count += int(which.sum())

    def add_gaps(self, ends: Int64, starts: Int64) -> None:
        """Record the gap before each message; ``ends`` are the ends of the previous messages."""
        for at in np.flatnonzero(starts > ends).tolist():
            start, stop = int(ends[at]), int(starts[at])
            if len(self.gaps) < MOST_GAPS:
                self.gaps.append((start, stop))
            else:
                # The joined gap also covers right entries, which are then checked again.
                self.gaps[-1] = self.gaps[-1][0], stop

    def restart(self, first: int, place: int) -> None:
        """Forget the earlier messages: the topic was created again at physical offset ``place``."""
        self.groups.clear()
        self.gaps.clear()
        self.messages = 0
        self.first_offset, self.epoch_start, self.missing_from = first, place, None

    def begin_at(self, first: int) -> None:
        """Correct the queue offset of the only message so far; its entry is right."""
        self.groups.clear()
        self.first_offset, self.next_offset, self.missing_from = first, first + 1, None

    def advance(self, count: int) -> None:
        """Count messages whose entries are right."""
        self.next_offset += count
        self.messages += count


class QueuesAudit:
    """Compares all queues of a store with its log: :meth:`add` takes each run, in order."""

    def __init__(self, layout: StoreLayout) -> None:
        self.layout = layout
        self.entries = 0
        self._files = OpenFiles(layout)
        self._seen: dict[QueueKey, SeenMessages] = {}
        self._names = self._find_names()
        self._sorted = sorted(self._names)
        self._by_topic: dict[str, list[QueueKey]] = {
            topic: list(keys) for topic, keys in groupby(self._sorted, itemgetter(0))
        }
        # A queue's last message so far if the queue lacks its entry; the next one decides about it.
        self._held: dict[QueueKey, dict[str, Any]] = {}
        self._searches = 0

    def add(self, followed: Followed, parts: Mapping[QueueKey, QueuePart]) -> None:
        """Compare the frames of a run with their entries."""
        for key, part in parts.items():
            if not is_batch(part.units):
                self._add(key, part, followed.requests)

    def _add(self, key: QueueKey, part: QueuePart, requests: DispatchRequests) -> QueuePart:
        """Compare a part with its queue; return the part with the right queue offsets."""
        seen = self._of(key, int(part.offsets[0]))
        if self._is_next_part(key, seen, part):
            return part
        if seen.harmed is not None:
            if not seen.messages and len(part.rows) > 1:
                self._add(key, part.between(0, 1), requests)
                return self._add(key, part.between(1, None), requests)
            first = seen.harmed.right_first(part, seen.messages)
            if first is not None:
                seen.begin_at(first)
            held = self._held.get(key)
            following = seen.next_offset if held is None else int(held["queue_offset"][0]) + 1
            part = replace(part, offsets=seen.harmed.right(part, following))
        values = {name: getattr(requests, name)[part.rows] for name in _COLUMNS}
        # A multi-dispatch copy has another queue offset than the message itself.
        values["queue_offset"] = part.offsets
        self._compare(key, self._own_messages(key, seen, values, is_end=False))
        return part

    def _own_messages(
        self, key: QueueKey, seen: SeenMessages, values: dict[str, Any], *, is_end: bool
    ) -> dict[str, Any]:
        """Leave out the frames of other queues, whose topic or queue id damage has changed, and the
        frames that have no place in the queue.

        A frame is left out if this queue lacks its entry, another queue has the entry, and the
        messages before and after the frame have consecutive queue offsets. Two cases do not need
        the third condition, but the other queue must be of the same topic: a queue without files,
        and the queue's last message in the log (``is_end``). If this last message does not continue
        the queue offsets, the other queue can be of any topic. If this queue lacks the entry of the
        last message in ``values``, the method holds the message back until the next call.

        A frame has no place if the messages before and after it have consecutive queue offsets, its
        own queue offset is lower, and the queue lacks its entry. Rebuild and recover write no entry
        for such a frame (:mod:`.right_offsets`).
        """
        held = self._held.pop(key, None)
        if held is not None:
            values = {name: np.append(held[name], column) for name, column in values.items()}
        if seen.queue is None:
            if key[0] not in self._by_topic or self._searches == _MOST_SEARCHES:
                return values
            every = range(len(values["queue_offset"]))
            # Only the queue id can be harmed: a queue of another topic can have a copy by
            # multi-dispatch.
            names = self._by_topic[key[0]]
            found = (not self._is_of_another(key, seen, values, at, names) for at in every)
            own = np.fromiter(found, np.bool_)
            return {name: column[own] for name, column in values.items()}
        if seen.harmed is None or not seen.messages:
            return values
        offsets: Int64 = values["queue_offset"]
        expected = np.append(seen.next_offset, offsets[:-1] + 1)
        stays = np.ones(len(offsets), np.bool_)
        doubtful = np.flatnonzero(offsets[1:] == expected[:-1]).tolist()
        last = len(offsets) - 1
        doubtful += [last] if is_end else []
        for at in doubtful:
            # A copy in another topic (multi-dispatch) counts only at a break in the queue offsets.
            is_next = at == last and offsets[last] == expected[last]
            names = self._by_topic.get(key[0], []) if is_next else self._sorted
            stays[at] = not self._is_of_another(key, seen, values, at, names)
            is_lower = at != last and offsets[at] < expected[at]
            if stays[at] and is_lower and not seen.harmed.has(*_entry_of(values, at)):
                stays[at] = False
                seen.strays.append((int(values["physical_offset"][at]), int(offsets[at])))
        if not is_end and stays[last] and not seen.harmed.has(*_entry_of(values, last)):
            stays[last] = False
            self._held[key] = {name: column[last:] for name, column in values.items()}
        return {name: column[stays] for name, column in values.items()}

    def _is_of_another(
        self,
        key: QueueKey,
        seen: SeenMessages,
        values: dict[str, Any],
        at: int,
        names: list[QueueKey],
    ) -> bool:
        offset, entry = _entry_of(values, at)
        if offset < 0 or (seen.harmed is not None and seen.harmed.has(offset, entry)):
            return False
        for name in names:
            if name == key:
                continue
            if self._searches == _MOST_SEARCHES:
                return False
            self._searches += 1
            known = self._seen.get(name)
            queue = self._queue(name) if known is None or known.queue is None else known.queue
            if HarmedOffsets(queue).has(offset, entry):
                return True
        return False

    def _has_entry(self, key: QueueKey, offset: int, place: int) -> bool:
        if key not in self._names or offset < 0:
            return False
        return any(
            entry.physical_offset == place
            for _, entry in self._queue(key).entries(offset, offset + 1)
        )

    def is_next(self, queues: Mapping[QueueKey, tuple[int, int]]) -> bool:
        """Whether the given first queue offset of each queue continues the messages so far."""
        return all(
            key not in self._seen or self._seen[key].next_offset == first
            for key, (first, _) in queues.items()
        )

    def add_sound(self, queues: Mapping[QueueKey, tuple[int, int]]) -> None:
        """Count these entries as right: a Spark task has already compared them."""
        for key, (first, stop) in queues.items():
            self._of(key, first).advance(stop - first)
            self.entries += stop - first

    def _of(self, key: QueueKey, first: int) -> SeenMessages:
        seen = self._seen.get(key)
        if seen is None:
            queue = self._queue(key) if key in self._names else None
            harmed = None if queue is None else HarmedOffsets(queue)
            seen = self._seen[key] = SeenMessages(queue, first, first, harmed=harmed)
        return seen

    def _find_names(self) -> set[QueueKey]:
        return set(self.layout.queue_names)

    def _queue(self, key: QueueKey) -> Queue:
        return ConsumeQueue(self.layout, *key, files=self._files, with_stale=True)

    def _sequence(self, key: QueueKey) -> FileSequence:
        return self.layout.queue(*key)

    def _is_next_part(self, key: QueueKey, seen: SeenMessages, part: QueuePart) -> bool:
        if seen.queue is None or int(part.offsets[0]) != seen.next_offset:
            return False
        if key in self._held:
            return False
        if not has_entries(seen.queue, part):
            return False
        seen.advance(len(part.offsets))
        self.entries += len(part.offsets)
        return True

    def _compare(self, key: QueueKey, values: dict[str, Any]) -> None:
        offsets: Int64 = values["queue_offset"]
        if not len(offsets):
            return
        seen = self._of(key, int(offsets[0]))
        # If a queue offset does not increase, the topic was deleted and created again.
        falls = np.flatnonzero(np.diff(offsets, prepend=seen.next_offset - 1) <= 0)
        starts = [0, *falls.tolist(), len(offsets)]
        for number, (start, stop) in enumerate(pairwise(starts)):
            if number:
                seen.restart(int(offsets[start]), int(values["physical_offset"][start]))
            if stop > start:
                part = {name: column[start:stop] for name, column in values.items()}
                self._compare_epoch(key, seen, offsets[start:stop], part)

    def _compare_epoch(
        self, key: QueueKey, seen: SeenMessages, offsets: Int64, values: dict[str, Any]
    ) -> None:
        seen.add_gaps(np.append(seen.next_offset, offsets[:-1] + 1), offsets)
        seen.next_offset = int(offsets[-1]) + 1
        seen.messages += len(offsets)
        places: Int64 = values["physical_offset"]
        if seen.missing_from is None:
            end = 0 if seen.queue is None else seen.queue.max_offset
            first = int(np.searchsorted(offsets, end))
            if first < len(offsets):
                seen.missing_from = int(places[first])
                seen.missing_since = int(values["store_timestamp"][first])
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
        wanted = units_of(places, values["size"], values["tags_code"])
        wrong = written & inside & ~same_entries(there, wanted, TagsRule.of_readers(key[0]))
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            entry = there[at]
            reason = (
                f"points to {entry['size']} bytes at {entry['physical_offset']} with tags code "
                f"{entry['tags_code']}; the message of that queue offset is {values['size'][at]} "
                f"bytes at {places[at]} with tags code {values['tags_code'][at]}"
            )
            seen.note("queue_entry_wrong", offsets, wrong, reason)

    def _note_head(self, seen: SeenMessages, offsets: Int64, early: Bools, places: Int64) -> None:
        """Record messages before the queue's first entry that retention has not deleted."""
        if seen.queue is None or not early.any():
            return
        if seen.log_start is None:
            seen.log_start = self.layout.present_start()
        early &= places >= seen.log_start
        seen.note(
            "queue_head_missing", offsets, early, f"is missing before {seen.queue.min_offset}"
        )

    def differences(
        self, log_end: int, lost: LostSpans, *, is_explained: bool
    ) -> Iterator[Difference]:
        """Yield all differences, queue by queue, after the whole log is read. ``is_explained`` is
        the result of :meth:`is_crash`.
        """
        for key, values in list(self._held.items()):
            none = {name: column[:0] for name, column in values.items()}
            self._compare(key, self._own_messages(key, self._seen[key], none, is_end=True))
        for key in sorted({*self._seen, *self._names}):
            folder = self._folder(key)
            if key[0] in self._others.batch:
                reason = "the topic has batch queues: a broker does not start on this folder"
                yield Difference("queue_misplaced", folder, 0, reason)
                continue
            yield from queue_file_differences(folder, self._sequence(key))
            seen = self._seen.get(key) or SeenMessages(self._queue(key), 0, 0)
            yield from self._queue_differences(key, seen, log_end, lost, is_explained=is_explained)

    def is_crash(self, log_end: int) -> bool:
        """Whether a crash explains that the queues lack the entries of the newest messages.

        Every queue must have all messages before the physical offset that the dispatcher had
        reached. (logquarry dispatches a part of the log one queue after another, so its last part
        does not count as reached.) Every missing message must be newer than the checkpoint. Every
        queue file that is not empty must have the right size.
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
        behind = [seen for seen in self._seen.values() if seen.missing_from is not None]
        return all(
            seen.missing_since > known and (seen.missing_from or 0) >= dispatched for seen in behind
        )

    def _queue_differences(
        self,
        key: QueueKey,
        seen: SeenMessages,
        log_end: int,
        lost: LostSpans,
        *,
        is_explained: bool,
    ) -> Iterator[Difference]:
        if seen.epoch_start is not None:
            at, reason = seen.epoch_start, f"{queue_name(key)} starts again at {seen.first_offset}"
            yield Difference("new_epoch", self.layout.log_file(at), at, reason)
        queue = seen.queue
        if queue is None:
            if not seen.messages:
                return
            reason = f"the log has {seen.messages} messages of it"
            if self._is_deleted(key[0], seen.missing_since):
                reason, is_explained = f"{reason}, but topics.json no longer lists the topic", True
            yield from self._missing(key, reason, is_explained=is_explained)
            return
        if seen.harmed is not None and seen.harmed.count:
            yield seen.harmed.difference(self.layout)
        for place, offset in seen.strays[:1]:
            text = (
                f"another message has offset {offset} in {queue_name(key)}, so this one is in no "
            )
            text += f"queue: its queue id or queue offset has changed{and_more(len(seen.strays))}"
            yield Difference("harmed_queue_id", self.layout.log_file(place), place, text)
        for group in seen.groups.values():
            yield self._difference(queue, group)
        if seen.messages and seen.next_offset > queue.max_offset:
            first = max(queue.max_offset, seen.first_offset)
            yield Difference(
                "queue_behind",
                *self._place(queue, first),
                f"ends at {queue.max_offset}, and the log has messages up to {seen.next_offset}",
                0 if queue.is_batch else (seen.next_offset - first) * UNIT_SIZE,
                is_explained,
            )
        if not seen.messages and isinstance(queue, FileQueue):
            yield from holes(queue, self._folder(key), self.layout.commit_log.start)
        yield from self._spare(queue, seen, log_end, lost)
        if isinstance(queue, ConsumeQueue) and log_end < FILLER_SIZE:
            yield from self._last_filler(queue)  # QUIRK: see expired_queues.stand_in

    def _last_filler(self, queue: ConsumeQueue) -> Iterator[Difference]:
        number = max(queue.max_offset - 1, 0)
        if queue.units(number, number + 1)["size"].tolist() == [FILLER_SIZE]:
            place, reason = self._place(queue, number), "the last entry is a filler"
            yield Difference("queue_ends_in_filler", *place, reason)

    def _spare(
        self, queue: Queue, seen: SeenMessages, log_end: int, lost: LostSpans
    ) -> Iterator[Difference]:
        first, stop = queue.min_offset, queue.max_offset
        ranges = [(first, stop)]
        if seen.messages:
            ranges = [(first, seen.first_offset), *seen.gaps, (seen.next_offset, stop)]
        has_entry = self._has_entry if seen.messages else None
        spare = SpareEntries(self.layout, queue, log_end, lost, has_entry)
        begin = seen.first_offset if seen.messages else stop
        for group in spare.check([(max(first, a), min(b, stop)) for a, b in ranges], begin):
            yield self._difference(queue, group)
        yield from spare.harmed()
        self.entries += spare.entries

    def _is_deleted(self, topic: str, stored: int) -> bool:
        """Whether an administrator deleted a topic; ``stored`` is the store time of one of its
        messages.

        A broker adds a topic to ``config/topics.json`` before its first message, and writes the
        time of each change (``DataVersion``). So a topic is deleted if a later change left it out.
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

    def _missing(self, key: QueueKey, reason: str, *, is_explained: bool) -> Iterator[Difference]:
        # If a topic's name cannot be a folder name, the dispatcher makes no queue for it.
        is_explained = is_explained or queue_name_fault(key[0]) is not None
        if not self._others.has_rocksdb:
            place = self._folder(key)
            yield Difference("queue_missing", place, 0, reason, is_explained=is_explained)

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

    def _difference(self, queue: Queue, group: EntryGroup) -> Difference:
        return group.at(*self._place(queue, group.number), UNIT_SIZE)


def _entry_of(values: dict[str, Any], at: int) -> tuple[int, Units]:
    entry = units_of(
        *(values[name][at : at + 1] for name in ("physical_offset", "size", "tags_code"))
    )
    return int(values["queue_offset"][at]), entry
