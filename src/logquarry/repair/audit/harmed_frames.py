"""Finds the frames in which damage has changed the topic, the queue id or the transaction type.

BODYCRC does not cover the topic and the queue id of a frame. The queue that the frame names is
called the *named queue* here. The frame's ids are called *harmed* if all these conditions are true:

- Another queue (the *other queue*) has the frame's entry: an entry at the frame's queue offset,
  with the frame's physical offset, size and tags code. The two queues have the same topic, or they
  have the same queue id and topics that differ in one character. The named queue lacks this entry.
- The other queue has an own entry near this entry. (An entry is an *own* entry if its message names
  the queue of the entry.) The search for an own entry goes in both directions, and stops in each
  direction at the first own entry. Exception: if the other queue has only this entry, the named
  queue must have no files. Then, if the configuration lists the frame's topic but not the other
  queue's topic, the ids are not harmed: the folder of the topic was renamed.
- At the frame's queue offset, the named queue has no entry for a message that names the other
  queue and this offset. (Such an entry would show that the files of the two queues were swapped.)
- The search meets no entry that points to a message of the named queue. Such an entry would show
  that a file lies in the folder of the wrong queue. Exception: such an entry is ignored if the
  named queue has its own message at the same queue offset.
- The log has no second frame that names the other queue and this queue offset. Such a frame would
  show that the entry has replaced the second frame's entry, for example because a queue file with
  one entry was moved to the other queue. To find a second frame, the audit reads the log between
  the messages of the own entries before and after the entry.

The audit treats a frame with harmed ids as a frame of the other queue.

No CRC covers SYSFLAG, which contains the transaction type. RocketMQ makes a queue entry for each
message of type NOT or COMMIT, and never for a message of type PREPARED or ROLLBACK. So the type of
a PREPARED or ROLLBACK frame is *harmed* if all these conditions are true:

- The queue that the frame names has an entry for the frame: an entry at the frame's queue offset,
  with the frame's physical offset, size and tags code.
- This entry has a neighbour: another entry, at most ``_MOST_NEIGHBOURS`` entries away, whose frame
  names this queue and the neighbour's queue offset. If the queue has only one entry, the entry
  needs no neighbour. The neighbour is required, because a recovery may have removed a message from
  the log, but not its entry. Without this rule, such an entry would seem to prove a harmed type.

PREPAREDTRANSACTIONOFFSET shows the right type: COMMIT if the field is not 0. If the field is 0, the
right type is NOT, or COMMIT for the delivered copy of a delayed message. Salvage then writes NOT.

Nothing in the store shows these changes, so the audit cannot find them:

- from NOT to COMMIT or back. Queues and index have the same entries for both types.
- from PREPARED to ROLLBACK or back. No queue has the message, with either type.
- to PREPARED or ROLLBACK, if the queue has no entry for the message, for example before a crash.

If damage changes PREPARED or ROLLBACK to NOT or COMMIT, the message has no place in the queue that
its frame names. Such a message is a stray (``SeenMessages.without_strays``). In a store of 3.x,
the state table and the redo log also show most changes (:mod:`logquarry.dialect31.state_table`).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np

from logquarry.dialect31.open_transactions import TransactionFrame
from logquarry.format import properties as props
from logquarry.format import sys_flag
from logquarry.format.arrays import POSITION, Bools, Int64, consecutive, joined_records
from logquarry.format.frame import Frame
from logquarry.format.queue_entry import QueueEntry
from logquarry.log import columns
from logquarry.log.follow import Followed
from logquarry.log.layout import StoreLayout
from logquarry.log.walk import LogReader, Run, Span
from logquarry.read.batch_queue import message_entries
from logquarry.read.commit_log import CommitLog
from logquarry.read.log_end import DamageMap
from logquarry.read.log_queues import LMQ_PREFIX, QueueKey
from logquarry.read.queue import Queue, Units
from logquarry.repair.audit.differences import TagsRule, and_more, queue_name, same_entries
from logquarry.repair.audit.queue_evidence import entries_at, has_entries
from logquarry.repair.findings import Finding, finding
from logquarry.write.queue_writer import QueuePart, is_batch, units_of, unqueued_parts, with_queued

NotedEntries = Mapping[QueueKey, Mapping[int, QueueEntry]]
"""For each queue, the entries that an interrupted recovery saved: queue offset -> entry."""

_MOST_NEIGHBOURS: Final = 16
"""Maximum number of entries to read on each side of an entry."""
_MOST_SEARCHED: Final = 1 << 24
"""Maximum work of one audit, in entries."""
_SEARCH: Final = 64
_READ: Final = 256
_PROBE: Final = 1_024
"""Work of each step, in entries. The steps are: search in one queue (``_SEARCH``), check the
neighbours of an entry (``_READ``), and search for similar topics (``_PROBE``).
"""


class Moved(NamedTuple):
    """The wrong queue in a harmed frame (``named``), and the right queue of this frame."""

    named: QueueKey
    right: QueueKey


class HarmedIds:
    """Assigns each harmed frame (whose topic or queue id is wrong) to the queue to which the frame
    belongs. The frames come in the order of the log.

    Args:
        names: the queues on the disk.
        queue_of: returns a queue; None if it has no usable files. It is called only if needed.
        noted: the entries that an interrupted recovery saved before it cut the queues.

    Attributes:
        found: physical offset -> (named queue, right queue), for each harmed frame so far.
        offsets: physical offset -> queue offset, for each harmed frame so far.
    """

    def __init__(
        self,
        layout: StoreLayout,
        names: Iterable[QueueKey],
        queue_of: Callable[[QueueKey], Queue | None],
        noted: NotedEntries | None = None,
        *,
        is_3_1: bool = False,
    ) -> None:
        self.found: dict[int, Moved] = {}
        self.offsets: dict[int, int] = {}
        self._layout = layout
        self._log = CommitLog(layout)
        self._queue_of = queue_of
        self._noted = noted or {}
        self._is_3_1 = is_3_1
        self._by_topic: dict[str, list[QueueKey]] = {}
        # Entries of batch queues have another format.
        batch_topics = {topic for topic, _ in layout.batch_queue_names}
        self._names = {key for key in (*names, *self._noted) if key[0] not in batch_topics}
        for key in sorted(self._names):
            self._by_topic.setdefault(key[0], []).append(key)
        # Salvage corrects a topic in its place, so its length in bytes must not change. LMQs have
        # no messages of their own.
        named = (topic for topic in self._by_topic if not topic.startswith(LMQ_PREFIX))
        self._topics = {topic for topic in named if topic.isascii()}
        self._letters = set().union(*self._topics)
        self._similar: dict[str, list[str]] = {}
        self._searched = 0

    def place(self, parts: Mapping[QueueKey, QueuePart]) -> Mapping[QueueKey, QueuePart]:
        """Return the entries of some frames, each in its right queue."""
        has_found = False
        for key, part in parts.items():
            if is_batch(part.units):
                continue
            queue = self._queue_of(key)
            if queue is None or not has_entries(queue, part):
                has_found = self._search(key, part) or has_found
        return placed(parts, self.found) if has_found else parts

    def _others(self, key: QueueKey) -> Iterator[QueueKey]:
        """Yield the possible right queues of a harmed frame that names the queue ``key``."""
        topic, queue_id = key
        yield from (other for other in self._by_topic.get(topic, ()) if other != key)
        for similar in self._similar_to(topic):
            if (similar, queue_id) in self._names:
                yield similar, queue_id

    def _similar_to(self, topic: str) -> list[str]:
        """Return the topics on the disk that differ from ``topic`` in one character."""
        if topic not in self._similar:
            self._searched += _PROBE
            changed = {
                topic[:at] + letter + topic[at + 1 :]
                for at in range(len(topic))
                for letter in self._letters
            }
            self._similar[topic] = sorted((changed & self._topics) - {topic})
        return self._similar[topic]

    def _search(self, key: QueueKey, part: QueuePart) -> bool:
        if self._searched >= _MOST_SEARCHED:
            return False
        left = np.flatnonzero(~self._same(key, part.offsets, part.units))
        has_found = False
        for other in self._others(key):
            if not len(left) or self._searched >= _MOST_SEARCHED:
                break
            self._searched += _SEARCH + len(left)
            same = self._same(other, part.offsets[left], part.units[left])
            for at in left[same].tolist():
                offset, entry = int(part.offsets[at]), QueueEntry(*part.units[at].item())
                if self._names_only(entry, key, other) and self._is_of(other, key, offset):
                    self.found[entry.physical_offset] = Moved(key, other)
                    self.offsets[entry.physical_offset] = offset
                    left, has_found = left[left != at], True
        return has_found

    def _names_only(self, entry: QueueEntry, key: QueueKey, other: QueueKey) -> bool:
        """Whether the frame of an entry names the queue ``key``, and does not list the queue
        ``other`` for multi-dispatch.
        """
        frame = self._log.frame_of(entry)
        return frame is not None and frame.queue_key == key and not frame.is_copied_to(other[0])

    def _same(self, key: QueueKey, offsets: Int64, units: Units) -> Bools:
        """Return a mask: for each entry, whether the queue has it at the given queue offset."""
        same = np.zeros(len(units), np.bool_)
        rule = TagsRule.of_writers(key, is_3_1=self._is_3_1)
        queue = self._queue_of(key)
        if queue is not None:
            for start, stop in consecutive(offsets):
                there = entries_at(queue, offsets[start:stop])
                same[start:stop] = same_entries(there, units[start:stop], rule)
        noted = self._noted.get(key, {})
        for at in np.flatnonzero(~same).tolist() if noted else ():
            same[at] = noted.get(int(offsets[at])) == QueueEntry(*units[at].item())
        return same

    def _is_of(self, key: QueueKey, named: QueueKey, offset: int) -> bool:
        """Whether the frame of an entry of queue ``key`` belongs to this queue, although the frame
        names the queue ``named``. The neighbours of the entry show this.
        """
        if offset in self._noted.get(key, {}):
            # The interrupted recovery has read the neighbouring entries. It may have cut these
            # entries off afterwards.
            return True
        self._searched += _READ
        if self._has_message_of(key, named, offset):
            return False
        queue = self._queue_of(key)
        if queue is not None and queue.max_offset - queue.min_offset == 1:
            is_renamed = named[0] in self._configured and key[0] not in self._configured
            if is_renamed or self._queue_of(named) is not None:
                return False
            return not self._is_in_log(key, offset, [None, None])
        # Physical offsets of the own entries before and after this entry.
        near: list[int | None] = [None, None]
        for step in (-1, 1):
            for at in range(offset + step, offset + step * (1 + _MOST_NEIGHBOURS), step):
                frame = self._frame(key, at)
                if frame is None or frame.queue_offset != at:
                    continue
                if frame.queue_key == named and not self._has_own(named, at):
                    return False
                if frame.queue_key == key:
                    near[step > 0] = frame.physical_offset
                    break
        return near != [None, None] and not self._is_in_log(key, offset, near)

    @cached_property
    def _configured(self) -> Container[str]:
        return self._layout.read_topics()

    def _is_in_log(self, key: QueueKey, offset: int, near: list[int | None]) -> bool:
        """Whether a frame of the log names a queue and a queue offset. ``near`` contains the
        physical offsets of messages of the queue before and after this queue offset; None if
        unknown. If the search needs too much work, return True.

        If one of these offsets is unknown, the search may have to read the whole log. So one search
        may use only half of the remaining work, to leave the other half to later searches.
        """
        start, stop = near
        if start is not None and stop is not None and start > stop:
            # The topic was deleted and created again.
            start = stop = None
        most = (self._searched + _MOST_SEARCHED) // 2
        reader = LogReader(self._layout, check_crc=False)
        for event in reader.events(start, stop):
            if not isinstance(event, Run):
                continue
            self._searched += len(event.rows)
            fields = columns.fixed_fields(event.window, event.rows, ("queue_id", "queue_offset"))
            same = (fields["queue_id"] == key[1]) & (fields["queue_offset"] == offset)
            for place in (event.window.base + event.rows[same, POSITION]).tolist():
                frame = self._log.sound_frame_at(place, check_crc=False)
                if frame is not None and frame.queue_key == key:
                    return True
            if self._searched >= most:
                return True
        return False

    def _has_own(self, key: QueueKey, offset: int) -> bool:
        """Whether the entry at an offset points to a message that names this queue and offset."""
        return self._has_message_of(key, key, offset)

    def _has_message_of(self, key: QueueKey, on_disk: QueueKey, offset: int) -> bool:
        """Whether the entry at an offset points to a message that names ``key`` and the offset."""
        frame = self._frame(on_disk, offset)
        return frame is not None and frame.queue_offset == offset and frame.queue_key == key

    def _frame(self, key: QueueKey, offset: int) -> Frame | None:
        """Return the frame to which the entry of a queue points; None if there is none."""
        queue = self._queue_of(key)
        if queue is None or offset < 0:
            return None
        for _, entry in queue.entries(offset, offset + 1):
            if not entry.is_filler:
                return self._log.frame_of(entry)
        return None


def placed(
    parts: Mapping[QueueKey, QueuePart], found: Mapping[int, Moved]
) -> Mapping[QueueKey, QueuePart]:
    """Move the entries of the frames in ``found`` (by physical offset) to the right queues."""
    if not found:
        return parts
    harmed = np.fromiter(found, np.int64, len(found))
    made = dict(parts)
    moved: dict[QueueKey, list[QueuePart]] = {}
    for key, part in parts.items():
        places = part.units["physical_offset"]
        # Entries that multi-dispatch has added to further queues stay there.
        rows = [
            (at, found[int(places[at])].right)
            for at in np.flatnonzero(np.isin(places, harmed)).tolist()
            if found[int(places[at])].named == key
        ]
        for at, right in rows:
            moved.setdefault(right, []).append(part[at : at + 1])
        if rows:
            stays = np.ones(len(places), np.bool_)
            stays[[at for at, _ in rows]] = False
            made[key] = part[stays]
    for key, some in moved.items():
        every = [*([made[key]] if key in made else []), *some]
        joined = QueuePart(
            np.concatenate([part.rows for part in every]),
            np.concatenate([part.offsets for part in every]),
            joined_records(*(part.units for part in every)),
        )
        made[key] = joined[np.argsort(joined.rows, kind="stable")]
    return {key: part for key, part in made.items() if len(part.rows)}


KIND: Final = "harmed_transaction_type"
NAMES: Final[Mapping[int, str]] = {
    sys_flag.TRANSACTION_NOT: "NOT",
    sys_flag.TRANSACTION_PREPARED: "PREPARED",
    sys_flag.TRANSACTION_COMMIT: "COMMIT",
    sys_flag.TRANSACTION_ROLLBACK: "ROLLBACK",
}
_MOST_SKIPPED: Final = 1 << 10
"""If two wanted entries are farther apart than this number of entries, they are read separately."""


class HarmedType(NamedTuple):
    """A frame with a harmed transaction type: its queue, its offsets, and both types."""

    key: QueueKey
    queue_offset: int
    physical_offset: int
    size: int
    stored: int
    right: int

    @property
    def text(self) -> str:
        """The text of a finding: both types, and the evidence."""
        right = "COMMIT" if self.right == sys_flag.TRANSACTION_COMMIT else "NOT or COMMIT"
        return (
            f"the frame has the transaction type {NAMES[self.stored]}, but {queue_name(self.key)} "
            f"has the message at {self.queue_offset}: the right type is {right}"
        )


class HarmedTypes:
    """Finds the frames of a store with a harmed transaction type.

    Args:
        queue_of: returns a queue; None if it has no usable files.
        noted: the entries that an interrupted recovery saved before it cut the queues.

    Attributes:
        found: physical offset -> the harmed frame, for each harmed frame so far.
    """

    def __init__(
        self,
        layout: StoreLayout,
        queue_of: Callable[[QueueKey], Queue | None],
        noted: NotedEntries | None = None,
    ) -> None:
        self.found: dict[int, HarmedType] = {}
        self._log = CommitLog(layout)
        self._levels = layout.delay_levels_ms
        self._queue_of = queue_of
        self._noted = noted or {}
        self._spans: list[Span] = []
        self._bytes = DamageMap(self._spans)

    def __contains__(self, offset: object) -> bool:
        """Whether a physical offset lies in one of the frames that :meth:`take` has found."""
        return offset in self._bytes

    def queued(self, followed: Followed) -> Followed:
        """Search for harmed frames. Return ``followed`` with queue entries for these frames."""
        self.take(unqueued_parts(followed))
        return with_queued(followed, self.found)

    def take(self, parts: Mapping[QueueKey, QueuePart]) -> None:
        """Search for harmed frames in ``parts``. The calls must follow the order of the log."""
        new = sorted(place for key, part in parts.items() for place in self._search(key, part))
        self._spans += [Span(place, self.found[place].size) for place in new]

    def _search(self, key: QueueKey, part: QueuePart) -> Iterator[int]:
        queue, noted = self._queue_of(key), self._noted.get(key, {})
        if queue is not None:
            order = np.argsort(part.offsets, kind="stable")
            order = order[part.offsets[order] < queue.max_offset]
            # Many half messages have the queue offset 0, and half messages of 3.1 leave gaps, so
            # read many entries at once.
            cuts = np.flatnonzero(np.diff(part.offsets[order]) > _MOST_SKIPPED) + 1
            for some in np.split(order, cuts) if len(order) else ():
                wanted, there = part.units[some], entries_at(queue, part.offsets[some])
                same = there["physical_offset"] == wanted["physical_offset"]
                for at in np.flatnonzero(same & (there["size"] == wanted["size"])).tolist():
                    offset = int(part.offsets[some[at]])
                    if self.check(queue, offset, QueueEntry(*there[at].item())):
                        yield int(wanted["physical_offset"][at])
        for offset, unit in zip(part.offsets.tolist(), part.units, strict=True) if noted else ():
            entry = noted.get(offset)
            if entry is not None and entry[:2] == unit.item()[:2]:
                frame = self._harmed(key, offset, entry)
                # The interrupted recovery has checked the entry's neighbours, and may have cut the
                # neighbours off.
                if frame is not None and entry.physical_offset not in self.found:
                    self._note(key, frame)
                    yield entry.physical_offset

    def check(self, queue: Queue, offset: int, entry: QueueEntry) -> bool:
        """Return whether an entry of a queue shows that its frame has a harmed type, and record
        such a frame.
        """
        frame = self._harmed(queue.key, offset, entry)
        if frame is None or not self._has_neighbour(queue, offset):
            return False
        self._note(queue.key, frame)
        return True

    def _note(self, key: QueueKey, frame: Frame) -> None:
        is_end = frame.prepared_transaction_offset != 0
        right = sys_flag.TRANSACTION_COMMIT if is_end else sys_flag.TRANSACTION_NOT
        stored = sys_flag.transaction_type(frame.sys_flag)
        place = frame.physical_offset
        self.found[place] = HarmedType(key, frame.queue_offset, place, frame.size, stored, right)

    def _harmed(self, key: QueueKey, offset: int, entry: QueueEntry) -> Frame | None:
        """Return the frame of an entry if the frame agrees with the entry except for its
        transaction type; else None.
        """
        frame = self._log.frame_of(entry)
        if frame is None or sys_flag.advances_queue(frame.sys_flag):
            return None
        if frame.queue_key != key or frame.queue_offset != offset:
            return None
        values = props.decode_bytes(frame.properties)
        code = props.tags_code(key[0], values, frame.store_timestamp, self._levels)
        there, wanted = (
            units_of(*(np.array([number], np.int64) for number in (*entry[:2], one)))
            for one in (entry.tags_code, code)
        )
        rule = TagsRule.of_readers(key[0])
        return frame if same_entries(there, wanted, rule)[0] else None

    def _has_neighbour(self, queue: Queue, offset: int) -> bool:
        """Whether the entry at an offset has a neighbour, or is the only entry of the queue. See
        the conditions in the module's docstring. The neighbour's own type may be harmed, too.
        """
        count = 1
        for _, rows in queue.rows(offset, offset + 1) if queue.is_batch else ():
            count = int(rows["count"][0])
        if queue.max_offset - queue.min_offset == count:
            return True
        first = max(queue.min_offset, offset - _MOST_NEIGHBOURS)
        stop = min(queue.max_offset, offset + count + _MOST_NEIGHBOURS)
        for at, entry in message_entries(queue, first, stop):
            if at != offset and not entry.is_filler:
                frame = self._log.frame_of(entry)
                if frame is not None and (frame.queue_key, frame.queue_offset) == (queue.key, at):
                    return True
        return False

    def differences(self, key: QueueKey, layout: StoreLayout) -> Iterator[Finding]:
        """Yield a finding for the harmed frames of one queue, if there are any."""
        some = sorted(place for place, one in self.found.items() if one.key == key)
        if some:
            first = self.found[some[0]]
            text = first.text + and_more(len(some))
            yield finding(KIND, layout.log_file(some[0]), some[0], text, first.size)


def corrected(
    frames: Iterable[TransactionFrame], found: Mapping[int, HarmedType]
) -> Iterator[TransactionFrame]:
    """Yield the transaction frames of 3.x with their right types. ``found`` contains the harmed
    frames by physical offset.
    """
    for frame in frames:
        harmed = found.get(frame.physical_offset)
        if harmed is None:
            yield frame
        elif harmed.right != sys_flag.TRANSACTION_NOT:
            yield frame._replace(kind=harmed.right)
