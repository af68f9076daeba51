"""Checks consume queues against the log, run by run, in memory that does not grow with the log.

For each dispatched frame the unit at its queue offset must say the frame's place, size and tags
code. What does not fit is kept per queue until the queue's end is known, as only then it can be
told what it means: a queue that starts again (its topic was deleted and made anew) holds the
newest messages alone, and says nothing about the older ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from logquarry.disk.open_files import OpenFiles
from logquarry.format import delay, java
from logquarry.format.queue_entry import UNIT_SIZE
from logquarry.log.follow import Followed
from logquarry.log.layout import CONSUME_QUEUE, NAME_DIGITS, StoreLayout
from logquarry.read.consume_queue import ConsumeQueue, Units, is_written
from logquarry.read.fence import other_queues
from logquarry.read.log_end import consume_queues
from logquarry.read.log_queues import QueueKey
from logquarry.repair.verify.findings import VerifyReport
from logquarry.repair.verify.runs import units_stand
from logquarry.repair.verify.unasked import Excused, Mismatch, UnaskedUnits
from logquarry.write.queue_writer import QueuePart, parts_of

_MOST_GAPS = 1 << 12
"""Gaps in a queue's offsets that are known one by one."""
_COMPARED = ("queue_offset", "physical_offset", "size", "tags_code", "store_timestamp")

Int64 = npt.NDArray[np.int64]


@dataclass(slots=True)
class _State:
    """What the log told about one queue so far, of its newest epoch.

    ``gaps`` are the queue offsets between its first message and its last that no message has;
    ``missing_from`` is the place of the first message behind the queue's end, ``missing_since`` its
    store time.
    """

    queue: ConsumeQueue | None
    next_offset: int
    first_offset: int
    messages: int = 0
    epoch_start: int | None = None
    missing_from: int | None = None
    missing_since: int = 0
    mismatches: dict[str, Mismatch] = field(default_factory=dict)
    gaps: list[tuple[int, int]] = field(default_factory=list)

    def go_on(self, count: int) -> None:
        """As many messages more, each of which has its unit."""
        self.next_offset += count
        self.messages += count


class QueueChecker:
    """Compares queues with the log.

    Feed it what every run of the log means, in order, then :meth:`finish`.
    """

    def __init__(self, layout: StoreLayout, report: VerifyReport) -> None:
        self.layout = layout
        self.report = report
        self._files = OpenFiles(layout)
        self._states: dict[tuple[str, int], _State] = {}
        self._names = set(layout.queue_names)
        self.entries = 0
        self._is_explained = False
        self._other_queues = other_queues(layout)
        # While the log's first file is being removed, the queues are cut behind it.
        files = layout.commit_log.files
        self._kept = files[1].base if len(files) > 1 else layout.commit_log.start

    # ------------------------------------------------------------------------------ frame by frame
    def add(self, followed: Followed) -> None:
        """Compare the frames of a run with their units."""
        requests = followed.requests
        for key, part in parts_of(followed).items():
            state = self._state(key, int(part.offsets[0]))
            if not self._is_as_it_should(state, part):
                self._compare(key, {name: getattr(requests, name)[part.rows] for name in _COMPARED})

    def _is_as_it_should(self, state: _State, part: QueuePart) -> bool:
        """Whether a queue goes on with just the units that it should have."""
        if state.queue is None or int(part.offsets[0]) != state.next_offset:
            return False
        if not units_stand(state.queue, part):
            return False
        state.go_on(len(part.offsets))
        self.entries += len(part.offsets)
        return True

    def is_next(self, queues: Mapping[QueueKey, tuple[int, int]]) -> bool:
        """Whether queues go on at some offsets, without a gap and without a new epoch."""
        return all(
            key not in self._states or self._states[key].next_offset == first
            for key, (first, _) in queues.items()
        )

    def add_sound(self, queues: Mapping[QueueKey, tuple[int, int]]) -> None:
        """Queues have their units from one offset to another: somebody else has seen to it."""
        for key, (first, stop) in queues.items():
            self._state(key, first).go_on(stop - first)
            self.entries += stop - first

    def _state(self, key: tuple[str, int], first: int) -> _State:
        state = self._states.get(key)
        if state is None:
            queue = None
            if key in self._names:
                start = self.layout.commit_log.start
                queue = ConsumeQueue(self.layout, *key, log_min_offset=start, files=self._files)
            state = self._states[key] = _State(queue, first, first)
        return state

    def _compare(self, key: tuple[str, int], values: dict[str, Any]) -> None:
        offsets: Int64 = values["queue_offset"]
        state = self._state(key, int(offsets[0]))
        # Where an offset does not go up, a new epoch begins.
        falls = np.flatnonzero(np.diff(offsets, prepend=state.next_offset - 1) <= 0)
        starts = [0, *falls.tolist(), len(offsets)]
        for index, (start, stop) in enumerate(pairwise(starts)):
            if index:
                state.mismatches.clear()
                state.gaps.clear()
                state.messages = 0
                state.missing_from = None
                state.first_offset = int(offsets[start])
                state.epoch_start = int(values["physical_offset"][start])
            if stop > start:
                part = {name: column[start:stop] for name, column in values.items()}
                self._compare_epoch(key, state, offsets[start:stop], part)

    def _compare_epoch(
        self, key: tuple[str, int], state: _State, offsets: Int64, values: dict[str, Any]
    ) -> None:
        before = np.append(state.next_offset - 1, offsets[:-1])
        for at in np.flatnonzero(offsets - before > 1).tolist():
            gap = int(before[at]) + 1, int(offsets[at])
            if len(state.gaps) < _MOST_GAPS:
                state.gaps.append(gap)
            else:
                # What lies between is looked at twice, which tells nothing new.
                state.gaps[-1] = state.gaps[-1][0], gap[1]
        state.next_offset = int(offsets[-1]) + 1
        state.messages += len(offsets)
        if state.missing_from is None:
            # Offsets go up: what the queue lacks at its end comes last.
            end = 0 if state.queue is None else state.queue.max_offset
            first = int(np.searchsorted(offsets, end))
            if first < len(offsets):
                state.missing_from = int(values["physical_offset"][first])
                state.missing_since = int(values["store_timestamp"][first])
        if state.queue is None:
            return
        units = _units_at(state.queue, offsets)
        written = is_written(units)
        same = written & (units["physical_offset"] == values["physical_offset"])
        same &= units["size"] == values["size"]
        tags = units["tags_code"] == values["tags_code"]
        if key[0] == delay.SCHEDULE_TOPIC:
            # A time of delivery, by delay levels that need not be those we know.
            tags |= units["tags_code"] > 0
        # An address in ConsumeQueueExt stands in the place of the code.
        tags |= units["tags_code"] < java.INT_MIN
        self.entries += int(written.sum())
        end = state.queue.max_offset
        within = (offsets < end) & (offsets >= state.queue.min_offset)
        begin = state.queue.min_offset
        early = (offsets >= 0) & (offsets < begin) & (values["physical_offset"] >= self._kept)
        self._note(state, "queue_head_missing", offsets, early, f"is missing before {begin}")
        self._note(state, "queue_hole", offsets, ~written & within, "was never written")
        wrong = written & within & ~(same & tags)
        if wrong.any():
            i = int(np.flatnonzero(wrong)[0])
            unit, place = units[i], int(values["physical_offset"][i])
            reason = (
                f"says offset {unit['physical_offset']}, size {unit['size']}, tags code "
                f"{unit['tags_code']}; the message of that queue offset is at {place}, size "
                f"{values['size'][i]}, tags code {values['tags_code'][i]}"
            )
            self._note(state, "queue_entry_wrong", offsets, wrong, reason)

    @staticmethod
    def _note(
        state: _State, kind: str, offsets: Int64, which: npt.NDArray[np.bool_], reason: str
    ) -> None:
        found = np.flatnonzero(which)
        if not len(found):
            return
        known = state.mismatches.get(kind)
        if known is None:
            first = int(offsets[found[0]])
            state.mismatches[kind] = Mismatch(kind, first, len(found), reason)
        else:
            known.count += len(found)

    # ----------------------------------------------------------------------------------- the ends
    def finish(self, log_end: int, excused: Excused) -> None:
        """Tell what was found, now that the log's end is known.

        Args:
            log_end: where the log ends.
            excused: parts of the log that no queue is to blame for.
        """
        self._is_explained = self._explain(log_end)
        for key in sorted({*self._states, *self._names}):
            state = self._states.get(key)
            self._files_of(key)
            if state is None:
                start = self.layout.commit_log.start
                queue = ConsumeQueue(self.layout, *key, log_min_offset=start, files=self._files)
                state = _State(queue, queue.min_offset, queue.min_offset)
            self._finish_queue(key, state, log_end, excused)

    def _explain(self, log_end: int) -> bool:
        """Whether a crash explains what queues lack at their ends: notes, and no damage.

        It does if the dispatcher got to some place of the log, and every queue has what is before
        that. What the checkpoint says to be in the queues was there once.
        """
        if not self.layout.has_abort:
            return False
        try:
            checkpoint = self.layout.read_checkpoint()
        except ValueError:
            checkpoint = None
        known = 0 if checkpoint is None else checkpoint.logics_timestamp
        dispatched = 0
        for queue in consume_queues(self.layout, self._files):
            end = queue.last_physical_end
            if end is not None and end <= log_end:
                dispatched = max(dispatched, end)
            if any(file.size != queue.sequence.file_size for file in queue.files if file.size):
                return False
        behind = [state for state in self._states.values() if state.missing_from is not None]
        return all(
            state.missing_since > known and (state.missing_from or 0) >= dispatched
            for state in behind
        )

    def _finish_queue(
        self, key: tuple[str, int], state: _State, log_end: int, excused: Excused
    ) -> None:
        topic, queue_id = key
        folder = f"{CONSUME_QUEUE}/{topic}/{queue_id}"
        if state.epoch_start is not None:
            self.report.add(
                "new_epoch",
                self._log_file(state.epoch_start),
                state.epoch_start,
                f"queue {queue_id} of {topic} starts again at {state.first_offset}",
            )
        queue = state.queue
        if queue is None:
            self.report.add(
                "queue_missing",
                folder,
                0,
                f"{state.messages} messages of it are in the log",
                # Batch queues and queues in RocksDB are elsewhere, and not compared.
                is_explained=self._is_explained or self._other_queues.holds(topic),
            )
            return
        for mismatch in state.mismatches.values():
            self._tell(queue, mismatch)
        if state.messages and state.next_offset > queue.max_offset:
            first = max(queue.max_offset, state.first_offset)
            missing = state.next_offset - first
            file, position = unit_place(queue, first)
            self.report.add(
                "queue_behind",
                file,
                position,
                f"ends at {queue.max_offset}, and the log has messages up to {state.next_offset}",
                missing * UNIT_SIZE,
                is_explained=self._is_explained,
            )
        self._unasked(queue, state, log_end, excused)

    def _unasked(self, queue: ConsumeQueue, state: _State, log_end: int, excused: Excused) -> None:
        """Units that no message of the log asked for."""
        first, stop = queue.min_offset, queue.max_offset
        ranges = [(first, stop)]
        if state.messages:
            ranges = [(first, state.first_offset), *state.gaps, (state.next_offset, stop)]
        checker = UnaskedUnits(self.layout, queue, log_end, excused)
        begin = state.first_offset if state.messages else stop
        for mismatch in checker.judge([(max(first, a), min(b, stop)) for a, b in ranges], begin):
            self._tell(queue, mismatch)
        self.entries += checker.entries

    def _tell(self, queue: ConsumeQueue, mismatch: Mismatch) -> None:
        file, position = unit_place(queue, mismatch.offset)
        more = f", and {mismatch.count - 1} more" if mismatch.count > 1 else ""
        text = f"unit {mismatch.offset} {mismatch.reason}{more}"
        self.report.add(mismatch.kind, file, position, text, mismatch.count * UNIT_SIZE)

    def _files_of(self, key: tuple[str, int]) -> None:
        """Sizes and gaps of a queue's files."""
        sequence = self.layout.queue(*key)
        expected = sequence.file_size
        previous: int | None = None
        for index, file in enumerate(sequence.files):
            if file.size != expected:
                # QUIRK: an empty last file is left where a crash came between making it and
                # giving it its size; Java refuses to start, and nothing is lost.
                kind = "empty_file" if self._is_empty_tail(sequence.files, index) else None
                self.report.add(
                    kind or "wrong_file_size",
                    file.path,
                    0,
                    f"{file.size} bytes, and the queue's files have {expected}",
                )
            if previous is not None and file.base != previous + expected:
                missing = f"{CONSUME_QUEUE}/{key[0]}/{key[1]}/{previous + expected:0{NAME_DIGITS}d}"
                self.report.add(
                    "queue_file_missing", missing, 0, f"the next file there is {file.path}"
                )
            previous = file.base

    @staticmethod
    def _is_empty_tail(files: Any, index: int) -> bool:
        return index == len(files) - 1 and index > 0 and files[index].size == 0

    def _log_file(self, offset: int) -> str:
        file = self.layout.commit_log.at(offset)
        return file.path if file is not None else "commitlog"


def unit_place(queue: ConsumeQueue, offset: int) -> tuple[str, int]:
    """The file in which a unit stands or should stand, and its position there."""
    room = queue.sequence.file_size
    base = offset * UNIT_SIZE // room * room
    folder = f"{CONSUME_QUEUE}/{queue.topic}/{queue.queue_id}"
    return f"{folder}/{base:0{NAME_DIGITS}d}", offset * UNIT_SIZE - base


def _units_at(queue: ConsumeQueue, offsets: Int64) -> Units:
    """The units at some offsets, ascending; zeros beyond the queue's ends."""
    first, stop = int(offsets[0]), int(offsets[-1]) + 1
    result = np.zeros(len(offsets), dtype=queue.units(0, 0).dtype)
    for start, units in queue.runs(max(0, first), min(stop, queue.max_offset)):
        inside = (offsets >= start) & (offsets < start + len(units))
        result[inside] = units[offsets[inside] - start]
    return result
