"""Plans a salvage: the frames to copy, and their places in the new log. Writes nothing.

Each file of the old log becomes one file of the new log. So if bytes are lost, only the later
frames of the same file get new places.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from logquarry.arguments import Progress
from logquarry.config import StoreConfig
from logquarry.errors import CorruptStore
from logquarry.format import sys_flag
from logquarry.format.arrays import POSITION, SIZE, Int32, Int64
from logquarry.format.frame import BLANK
from logquarry.format.properties import parse_levels
from logquarry.log import columns
from logquarry.log.earlier_writers import unproved_start
from logquarry.log.follow import DispatchRequests, Follower, follow_run
from logquarry.log.layout import StoreLayout
from logquarry.log.readable import rereads
from logquarry.log.store_files import CHECKPOINT
from logquarry.log.walk import MISSING_FILE, TORN_TAIL, LogReader, Run, Span
from logquarry.read.batch_queue import BatchQueue, all_queues
from logquarry.read.log_end import lost_messages, lost_tail
from logquarry.read.log_queues import QueueKey
from logquarry.read.queue import Queue
from logquarry.read.store_sizes import with_entry_rules, with_sizes
from logquarry.repair.audit.harmed_frames import HarmedIds, HarmedTypes, Moved
from logquarry.repair.audit.log import KnownBounds, LogAudit, are_stale_bytes, find_bounds
from logquarry.repair.audit.queue_evidence import HarmedProperties
from logquarry.repair.recover.loss import LossSearch, replaced_files
from logquarry.repair.salvage import losses
from logquarry.repair.salvage.places import Displaced, NewPlaces, Piece, find_displaced, in_place
from logquarry.write.queue_writer import QueuePart, parts_of, parts_with_copies


@dataclass(slots=True)
class StaleFrames:
    """Valid frames after the log's end, which an earlier truncation left there.

    Attributes:
        spans: physical offsets (start, end) of each part that has only such frames.
        moved: number of these frames that get a new queue offset, because another
            message has the old one.
    """

    messages: int = 0
    bytes: int = 0
    spans: list[losses.Range] = field(default_factory=list)
    included: bool = False
    moved: int = 0


@dataclass(slots=True)
class TopicCount:
    """Counts of one topic: saved messages, bytes of the saved messages, known lost messages."""

    messages: int = 0
    bytes: int = 0
    lost: int = 0


@dataclass(slots=True)
class SalvagePlan:
    """The plan of a salvage.

    Attributes:
        config: settings of the new store, with all sizes.
        looked_at: the facts that show the log's end, as text.
        start: physical offset of the new log's first byte.
        lost_messages: number of lost messages to which entries of queues or index point.
        queues: queue -> the queue offsets of its saved messages.
        queue_offsets: old physical offset -> new queue offset, for each frame whose queue offset
            changes.
        rotten_offsets: number of messages whose harmed queue offset is corrected.
        right_queues: old physical offset -> right queue, for each frame whose topic or queue id is
            harmed.
        right_types: old physical offset -> right transaction type, for each frame with a harmed
            transaction type.
        raised_times: number of messages that get the later store time of the previous message.
        lowered_times: old physical offset -> new store time, for each message that gets an earlier
            store time.
        ends: number of COMMIT and ROLLBACK messages whose half message is lost.
        wrong_crcs: physical offsets of saved frames with a wrong property CRC.
        contradicted: physical offsets of saved frames whose tags or keys do not match their entries
            in the old queues and index.
        displaced: the saved frames that lie at a wrong place in the old log.
        has_heads: whether the old log is a DLedger log, with a head before each frame.
        unproved_start: why messages before the log's start may be lost too, as text, or None.
    """

    store: str
    config: StoreConfig
    looked_at: list[str]
    start: int = 0
    pieces: list[Piece] = field(default_factory=list)
    lost: list[losses.LostSpan] = field(default_factory=list)
    lost_messages: int = 0
    queues: dict[QueueKey, losses.QueueStory] = field(default_factory=dict)
    topics: dict[str, TopicCount] = field(default_factory=dict)
    stale: StaleFrames = field(default_factory=StaleFrames)
    queue_offsets: dict[int, int] = field(default_factory=dict)
    rotten_offsets: int = 0
    right_queues: dict[int, QueueKey] = field(default_factory=dict)
    right_types: dict[int, int] = field(default_factory=dict)
    raised_times: int = 0
    lowered_times: dict[int, int] = field(default_factory=dict)
    ends: int = 0
    wrong_crcs: list[int] = field(default_factory=list)
    contradicted: list[int] = field(default_factory=list)
    displaced: list[Displaced] = field(default_factory=list)
    has_heads: bool = False
    unproved_start: str | None = None

    @property
    def messages(self) -> int:
        """Number of saved messages."""
        return sum(topic.messages for topic in self.topics.values())

    @property
    def bytes(self) -> int:
        """Number of bytes of the saved frames."""
        return sum(piece.stop - piece.start for piece in self.pieces)

    @property
    def is_whole(self) -> bool:
        """Whether the log has lost nothing."""
        return not self.lost


def settings_for(layout: StoreLayout, config: StoreConfig) -> StoreConfig:
    """Return the new store's settings, with the sizes and delay levels of the old store."""
    found = with_sizes(config, layout)
    elsewhere = {"storePathCommitLog", "readOnlyCommitLogStorePaths", "enableDLegerCommitLog"}
    kept = tuple(one for one in found.broker_settings if one[0] not in elsewhere)
    found = replace(found, broker_settings=kept)
    levels = layout.delay_levels_ms
    if levels != parse_levels(found.message_delay_level) and not any(ms % 1_000 for ms in levels):
        words = " ".join(f"{ms // 1_000}s" for ms in levels)
        found = replace(found, message_delay_level=words)
    return found


@rereads
def plan_salvage(
    layout: StoreLayout,
    *,
    include_stale: bool = False,
    progress: Progress | None = None,
) -> SalvagePlan:
    """Return the plan of a salvage. Raises CorruptStore if queue offsets are invalid and cannot be
    corrected.
    """
    planner = _Planner(layout, include_stale, progress)
    plan, displaced = planner.plan(), planner.displaced
    if displaced:
        plan = _Planner(in_place(layout, displaced), include_stale, progress).plan()
        saved = NewPlaces(plan.pieces).of(np.array([one.offset for one in displaced], np.int64))
        plan.displaced = [displaced[at] for at in np.flatnonzero(saved >= 0).tolist()]
    return plan


class _Planner:
    def __init__(self, layout: StoreLayout, include_stale: bool, progress: Progress | None) -> None:
        self._layout = layout
        self._progress = progress
        self._config = settings_for(layout, layout.config)
        size = self._config.mapped_file_size_commit_log
        assert size is not None
        self._size = size
        self._log = layout.commit_log
        rules = with_entry_rules(layout)
        keys = rules.config.index_keys
        self._follower = Follower(self._config.delay_levels_ms, keys=keys)
        self._queues = {queue.key: queue for queue in all_queues(layout)}
        files = {
            key: queue for key, queue in self._queues.items() if not isinstance(queue, BatchQueue)
        }
        self._files = files
        self.displaced: list[Displaced] = []
        self._ids = HarmedIds(layout, files, files.get, is_3_1=self._config.is_3_1)
        self._types = HarmedTypes(layout, self._queues.get)
        self._properties = HarmedProperties(rules, self._queues.get)
        self._notes: dict[QueueKey, losses.QueueNotes] = {}
        self._framed: dict[QueueKey, losses.Pairs] = {}
        self._halves: list[Int64] = []
        self._pieces: list[Piece] = []
        # Next physical offset in the new log, and start of the old log file that is read.
        self._start = self._log.start - self._log.start % size
        self._at = self._start
        self._base: int | None = None
        self._times = losses.StoreTimes()
        self._known_end = 0
        self._plan = SalvagePlan(layout.root, self._config, [])
        self._plan.stale.included = include_stale
        self._plan.has_heads = self._log.has_heads
        self._plan.unproved_start = unproved_start(layout.filesystem, self._log.files)

    def plan(self) -> SalvagePlan:
        plan = self._plan
        bounds = self._bounds()
        log = LogAudit(self._layout, bounds)
        for run in log.runs():
            damage = log.damage[-1] if log.damage else None
            if damage is not None and run.start < damage.end:
                self._note_framed(run)
            else:
                self._save(run)
            self._tell(run.end)
        plan.looked_at += log.words
        search = LossSearch(
            self._layout,
            end=log.end,
            damage=log.damage,
            last_timestamp=log.last_timestamp or None,
            # The frames of a DLedger log are not at the offsets in their entries.
            dropped={} if self._log.has_heads else None,
        )
        if self._log.files:
            self._stale(log.end)
            self._known_end = max(self._known_end, search.vouched_end())
        plan.lost = losses.lost_spans(self._layout, log.damage, log.end, self._known_end)
        # With ``open_view``, the layout already has the displaced frames at their places.
        if self._layout.open_view is None:
            self.displaced = find_displaced(
                self._layout, self._config, self._files, plan.lost, log.end
            )
        tail = lost_tail(self._layout, log.latest_timestamp)
        if tail is not None and self._known_end <= log.end:
            # Only the checkpoint shows the loss, so the size of the loss is unknown.
            plan.lost.append(losses.LostSpan(log.end, 0, "checkpoint_ahead", CHECKPOINT, tail))
        elif self._known_end <= log.end and (tail_end := self._foreign_end(log.end)) > log.end:
            path, length = self._layout.log_file(log.end), tail_end - log.end
            reason = "bytes after the log's end that are not frames"
            plan.lost.append(losses.LostSpan(log.end, length, TORN_TAIL, path, reason))
        missing = None if self._log.files or plan.lost else self._layout.missing_log
        if missing is not None:
            plan.lost.append(
                losses.LostSpan(0, 0, MISSING_FILE, missing.evidence[0], missing.reason)
            )
        losses.fill_messages(self._layout, plan.lost, self._framed)
        if plan.lost:
            plan.lost_messages = lost_messages(self._layout, plan.lost).messages
        plan.lost_messages += int(search.replaced[:, 2].sum())
        for file, places, reason in replaced_files(self._layout, search.replaced):
            messages = losses.queued_at(self._layout, places)
            lost = losses.LostSpan(int(places[0]), 0, MISSING_FILE, file, reason, messages)
            plan.lost.append(lost)
        self._finish(log.end)
        return plan

    def _tell(self, position: int) -> None:
        if self._progress is not None:
            self._progress(position - self._log.start, self._log.end - self._log.start)

    def _bounds(self) -> KnownBounds:
        layout = self._layout
        queues = list(self._queues.values())
        bounds = find_bounds(layout, queues, ignores_cut=True)
        queued = bounds.queued
        if not self._log.files:
            # `find_bounds` ignores queue entries that point far beyond the last log file, because
            # such entries may be damaged. Without log files, there is no such limit: use all
            # entries.
            queued = max((queue.last_physical_end or 0 for queue in queues), default=None)
        # If a queue has an entry, its message was once in the log, even if the store crashed later.
        self._known_end = max(bounds.durable or 0, queued or 0)
        # If there are neither queues nor a durable offset, the log's end is unknown, even after a
        # clean shutdown.
        is_closed = bounds.is_closed and (bounds.durable or queued) is not None
        return replace(bounds, queued=queued, is_closed=is_closed)

    # --------------------------------------------------------------------------------- one run
    def _save(self, run: Run) -> None:
        self._place(run)
        for window, followed in follow_run(self._follower, run):
            found = self._types.queued(followed)
            requests = found.requests
            parts = self._ids.place(parts_with_copies(window, found, self._config))
            self._properties.take(found, parts)
            _note(self._notes, parts, requests, self._ids.found)
            self._count(requests.topics, requests.topic_ids, requests.size)
            self._times.take(requests.physical_offset, requests.store_timestamp)
        fields = columns.fixed_fields(
            run.window, run.rows, ("sys_flag", "prepared_transaction_offset")
        )
        self._check_crcs(run)
        places = run.rows[:, POSITION].astype(np.int64) + run.window.base
        rights = {place: found.right for place, found in self._types.found.items()}
        kinds = right_flags(fields["sys_flag"], places, rights) & sys_flag.TRANSACTION_MASK
        ends = (kinds == sys_flag.TRANSACTION_COMMIT) | (kinds == sys_flag.TRANSACTION_ROLLBACK)
        if ends.any():
            self._halves.append(fields["prepared_transaction_offset"][ends].astype(np.int64))

    def _check_crcs(self, run: Run) -> None:
        self._plan.wrong_crcs += [
            run.window.base + int(run.rows[row, POSITION])
            for row in columns.wrong_property_crcs(run.window, run.rows)
        ]

    def _count(self, topics: list[str], ids: Int32, sizes: Int64) -> None:
        counts = np.bincount(ids, minlength=len(topics)).tolist()
        totals = np.bincount(ids, sizes, minlength=len(topics)).tolist()
        for topic, count, total in zip(topics, counts, totals, strict=True):
            if count:
                said = self._plan.topics.setdefault(topic, TopicCount())
                said.messages += count
                said.bytes += int(total)

    def _note_framed(self, run: Run) -> None:
        for _, found in follow_run(self._follower, run):
            for key, part in parts_of(found).items():
                places, offsets = self._framed.setdefault(key, ([], []))
                places += part.units["physical_offset"].tolist()
                offsets += part.offsets.tolist()

    # ------------------------------------------------------------------------------ new places
    def _place(self, run: Run) -> None:
        file = self._log.at(run.start)
        assert file is not None
        if self._base is not None and file.base != self._base:
            self._at += -(self._at - self._start) % self._size
        self._base = file.base
        if self._log.has_heads:
            # The new log has no DLedger heads. So the distance between a frame's old and new place
            # grows with each frame, and each frame needs its own piece.
            starts = run.rows[:, POSITION].astype(np.int64) + run.window.base
            stops = starts + run.rows[:, SIZE]
            for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
                self._add(start, stop)
        else:
            self._add(run.start, run.end)

    def _add(self, start: int, stop: int) -> None:
        last = self._pieces[-1] if self._pieces else None
        if last is not None and last.stop == start and self._at == last.to + start - last.start:
            self._pieces[-1] = Piece(last.start, stop, last.to)
        else:
            self._pieces.append(Piece(start, stop, self._at))
        self._at += stop - start

    # ---------------------------------------------------------------------------------- stale
    def _foreign_end(self, end: int) -> int:
        """Return the end of foreign bytes after the log's end: the position after the last byte
        that is not 0. Return ``end`` if the bytes are frames, or if a crash can have left them.
        """
        layout = self._layout
        if layout.has_abort or layout.cut_end is not None or self._plan.stale.spans:
            return end
        last = LogReader(layout).data_end(end)
        return end if last > end and are_stale_bytes(layout, end, is_closed=True) else last

    def _stale(self, end: int) -> None:
        stale = self._plan.stale
        for event in LogReader(self._layout).events(end, resync=True):
            if not isinstance(event, Run) or event.start < end:
                continue
            stale.messages += len(event.rows)
            stale.bytes += event.end - event.start
            if stale.spans and stale.spans[-1][1] == event.start:
                stale.spans[-1] = stale.spans[-1][0], event.end
            else:
                stale.spans.append((event.start, event.end))
            if stale.included:
                self._save_stale(event)

    def _save_stale(self, run: Run) -> None:
        for number in range(len(run.rows)):
            one = Run(run.window, run.rows[number : number + 1], run.path)
            self._place_behind(one)
            self._check_crcs(one)
            for _, found in follow_run(self._follower, one):
                self._count(found.requests.topics, found.requests.topic_ids, found.requests.size)
                self._times.take(found.requests.physical_offset, found.requests.store_timestamp)
                for key, part in parts_of(found).items():
                    notes = self._notes.get(key)
                    offset = int(part.offsets[0])
                    if notes is not None and offset < notes.next:
                        # This queue offset may be in use: use the queue's next queue offset.
                        offset = notes.next
                        self._plan.queue_offsets[one.start] = offset
                        self._plan.stale.moved += 1
                    offsets = np.array([offset], np.int64)
                    moved = QueuePart(part.rows, offsets, part.units)
                    _note(self._notes, {key: moved}, found.requests, {})

    def _place_behind(self, run: Run) -> None:
        left = self._size - (self._at - self._start) % self._size
        size = int(run.rows[0, SIZE])
        if size + BLANK.size > left:
            self._at += left
        self._pieces.append(Piece(run.start, run.end, self._at))
        self._at += size

    # ------------------------------------------------------------------------------------ ends
    def _finish(self, log_end: int) -> None:
        plan = self._plan
        self._times.finish()
        plan.raised_times, plan.lowered_times = self._times.raised, self._times.lowered
        plan.right_queues = {place: found.right for place, found in self._ids.found.items()}
        plan.right_types = {place: found.right for place, found in self._types.found.items()}
        try:
            for key, notes in self._notes.items():
                is_queued = partial(_is_queued, self._queues.get(key))
                story = plan.queues[key] = notes.story(is_queued=is_queued)
                plan.queue_offsets.update(story.mended)
                plan.rotten_offsets += len(story.mended)
        except ValueError as error:
            path = self._layout.filesystem.full_path(self._layout.log_file(self._log.start))
            raise CorruptStore(path, self._log.start, str(error), kind="queue_offset") from error
        shift = self._shift()
        plan.start = self._start + shift
        plan.pieces = [Piece(p.start, p.stop, p.to + shift) for p in self._pieces]
        places = NewPlaces(plan.pieces)
        plan.lost += losses.misnamed_messages(
            self._layout, plan.queues, lambda starts: places.of(starts) >= 0
        )
        plan.lost += losses.stray_messages(self._layout, plan.queues)
        plan.lost.sort(key=lambda span: span.offset)
        # A key's hash contains the topic. So the index entry of a frame with a harmed topic differs
        # from the frame, but is right.
        harmed = [Span(place, 1) for place in (*plan.right_queues, *(s.offset for s in plan.lost))]
        found = self._properties.finish(log_end, [*plan.lost, *harmed])
        plan.contradicted = found[places.of(found) >= 0].tolist()
        gaps = {key: story.gaps for key, story in plan.queues.items()}
        for (topic, _), ranges in losses.lost_by_queue(plan.lost, gaps).items():
            count = sum(stop - start for start, stop in ranges)
            plan.topics.setdefault(topic, TopicCount()).lost += count
        halves = np.concatenate(self._halves) if self._halves else np.empty(0, np.int64)
        halves = halves[halves >= self._log.start]
        plan.ends = int(np.count_nonzero(places.of(halves) < 0))

    def _shift(self) -> int:
        """Return the number of bytes to add to all physical offsets of the new log.

        QUIRK: a filler has physical offset 0. If the log begins at 0, and RocketMQ's getMessage
        reads a filler, getMessage treats the log's first file as deleted, and skips the messages of
        this file. So if the new queues have fillers, the new log begins one file later.
        """
        is_padded = any(
            story.is_padded and key[0] not in self._config.batch_topics
            for key, story in self._plan.queues.items()
        )
        return self._size if is_padded and self._start == 0 else 0


def _is_queued(queue: Queue | None, place: int, offset: int) -> bool:
    entries = () if queue is None else queue.entries(offset, offset + 1)
    return any(entry.physical_offset == place for _, entry in entries)


def _note(
    notes: dict[QueueKey, losses.QueueNotes],
    parts: Mapping[QueueKey, QueuePart],
    requests: DispatchRequests,
    harmed: Mapping[int, Moved],
) -> None:
    """Record the queue offsets of some frames in the ``QueueNotes`` of their queues. ``harmed``
    contains the queues of each frame with a harmed topic or queue id. Such a frame also has an
    entry in its right queue, but this entry is not a multi-dispatch copy.
    """
    numbers: dict[str, int] = {}
    # Two topics that differ in bytes can be decoded to the same name: give both the same number.
    same = [numbers.setdefault(topic, number) for number, topic in enumerate(requests.topics)]
    topics = np.array(same, np.int64)[requests.topic_ids]
    for key, part in parts.items():
        known = notes.get(key)
        if known is None:
            known = notes[key] = losses.QueueNotes(int(part.offsets[0]))
        places = part.units["physical_offset"].astype(np.int64)
        rows = part.rows
        copies = requests.queue_id[rows] != key[1]
        copies |= topics[rows] != numbers.get(key[0], -1)
        for row in np.flatnonzero(copies).tolist() if harmed else ():
            found = harmed.get(int(places[row]))
            copies[row] = found is None or found.right != key
        known.take(places, part.offsets, part.counts, copies)


def right_flags(flags: Int32, places: Int64, rights: Mapping[int, int]) -> Int64:
    """Return the SYSFLAG of some frames, with the right transaction types. ``places`` contains the
    physical offsets of the frames; ``rights`` contains the right types, by physical offset.
    """
    right = flags.astype(np.int64)
    for row in np.flatnonzero(np.isin(places, list(rights))).tolist() if rights else ():
        kind = rights[int(places[row])]
        right[row] = right[row] & ~sys_flag.TRANSACTION_MASK | kind
    return right
