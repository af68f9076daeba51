"""Finds the messages that a recovery would lose, and whether the user must accept the loss.

A message is lost if a queue, the index, the durable offset or the checkpoint knows it, and the
recovered log does not have it, or has other messages in its place
(:mod:`logquarry.repair.recover.replaced`). Entries of messages before the log's first offset are
expired, not lost. Damage that an earlier recovery recorded was accepted then.

A crash normally loses messages; that is a fault only if a message was on the disk already. The
following facts show that a message was on the disk ("vouch for it"):

- the durable offset, for every message before it, and for no other message;
- without a durable offset, a clean shutdown, for every message that a queue names;
- after a crash without a durable offset: frames after the message that are sound, a whole file of
  zeros in its place, or a checkpoint that is later than the last message of the log.

The loss of such messages needs the user's consent (``accept_loss``) if it exceeds the limits of
:func:`_is_small`, or if files of the log that had them are missing. docs/recovery.md has a table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from logquarry import text
from logquarry.errors import StoreUnavailable
from logquarry.format import java
from logquarry.format.frame import FIXED_SIZE_V1
from logquarry.log.layout import StoreLayout
from logquarry.log.walk import MISSING_FILE, DamagedSpan, LogReader
from logquarry.read.batch_queue import all_queues, frames_in
from logquarry.read.index_file import LARGEST_MESSAGE, indexed_frames
from logquarry.read.log_end import known_damage
from logquarry.read.log_queues import QueueKey
from logquarry.read.queue import Queue, Units, has_message
from logquarry.repair.audit.log import NEVER_WRITTEN, never_written
from logquarry.repair.recover.replaced import ReplacedFiles, probes, without_frame

_SMALL_BYTES: Final = 64 << 10
_SMALL_SHARE: Final = 10
"""A loss of at most 64 KiB may be up to a tenth of the log."""
_LARGE_BYTES: Final = 64 << 20
_LARGE_SHARE: Final = 100
"""A larger loss may be up to a hundredth of the log, and at most 64 MiB."""
_MOST_COUNTED: Final = 20_000_000
"""Maximum number of lost entries that are compared to count a message of several queues once."""
_MOST_NAMED: Final = 2
"""Maximum number of missing parts of the log that a reason names."""
_LEAST_APART: Final = 2
"""Fewest entries with messages far after the log that count as a loss: one may be damaged."""

_Frames = npt.NDArray[np.int64]
"""Physical offset, size and number of messages of each frame."""


@dataclass(frozen=True, slots=True)
class Loss:
    """The messages that a recovery would lose.

    Attributes:
        messages: number of messages that queues name. A message that multi-dispatch put into
            several queues counts once, unless more than 20 million are lost.
        bytes: their bytes; with a durable offset, at least the missing bytes of the log before it.
        known_bytes: the bytes of the log that are known in total, lost ones included.
        reason: where the messages were, in words.
        needs_consent: whether the recovery needs ``accept_loss``.
    """

    messages: int
    bytes: int
    known_bytes: int
    reason: str
    needs_consent: bool

    def to_json(self) -> dict[str, Any]:
        """As an object of docs/json.md."""
        return asdict(self)

    def __str__(self) -> str:
        if not self.bytes:
            return f"messages would be lost, and their number is unknown: {self.reason}"
        count = text.plural(self.messages, "message")
        return f"{count} would be lost, {text.plural(self.bytes, 'byte')}: {self.reason}"

    def refusal(self, accept_loss: int | None) -> str | None:
        """Why the recovery is refused; None if it may continue.

        Args:
            accept_loss: the bytes whose loss the user accepts, None without consent.
        """
        if not self.needs_consent or (accept_loss is not None and accept_loss >= self.bytes):
            return None
        return (
            f"{self}. Nothing was changed. Bring back the files that have these messages; or "
            f"accept the loss: `logquarry recover STORE --apply --accept-loss {self.bytes}`, in "
            f"Python accept_loss={self.bytes}"
        )


class LossRefused(StoreUnavailable):
    """A recovery would lose messages, and the caller has not accepted that. Nothing was changed.

    Attributes:
        loss: the messages that would be lost.
    """

    def __init__(self, message: str, *, loss: Loss) -> None:
        super().__init__(message)
        self.loss = loss

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (str(self), self.loss)


def _rebuilt(message: str, loss: Loss) -> LossRefused:
    return LossRefused(message, loss=loss)


def require_consent(root: str, loss: Loss | None, accept_loss: int | None) -> None:
    """Refuse a recovery that would lose more than the user accepts.

    Args:
        root: the store's folder.
        loss: the loss, None if there is none.
        accept_loss: the bytes whose loss the user accepts, None without consent.

    Raises:
        LossRefused: if the loss needs consent.
    """
    reason = None if loss is None else loss.refusal(accept_loss)
    if loss is not None and reason is not None:
        raise LossRefused(f"{root}: {reason}", loss=loss)


def find_loss(
    layout: StoreLayout,
    *,
    end: int,
    damage: Sequence[DamagedSpan] = (),
    last_timestamp: int | None = None,
    dropped: Mapping[QueueKey, int] | None = None,
) -> Loss | None:
    """The loss: messages that the store knows of and the recovered log lacks; None without any.

    Reads the queues from their ends back to the first entry that is not lost, and the frames of the
    entries that are dropped.

    Args:
        layout: the store's files before the recovery; its log without misnamed files.
        end: physical offset at which the log will end.
        damage: damage within the log.
        last_timestamp: store time of the last message before ``end``, None if unknown.
        dropped: the queues that differ from the log, each with the queue offset of its first
            entry that is dropped. None if they were not compared: a few entries of each queue then
            show which queues differ.
    """
    return _Search(layout, end, damage, last_timestamp, dropped).loss()


def vouched_end(
    layout: StoreLayout, *, end: int, damage: Sequence[DamagedSpan], last_timestamp: int | None
) -> int:
    """Physical offset up to which the store certainly had messages; at least ``end``.

    The arguments are those of :func:`find_loss`.
    """
    return _Search(layout, end, damage, last_timestamp, {}).vouched_end()


class _Search:
    def __init__(
        self,
        layout: StoreLayout,
        end: int,
        damage: Sequence[DamagedSpan],
        last_timestamp: int | None,
        dropped: Mapping[QueueKey, int] | None,
    ) -> None:
        self._layout = layout
        self._dropped = dropped
        self._log = layout.commit_log
        self._end = max(end, self._log.start)
        self._all_damage = damage
        self._known = known = known_damage(layout)
        self._damage = [
            span for span in damage if span.offset not in known and span.reason != NEVER_WRITTEN
        ]
        has_never = any(span.reason == NEVER_WRITTEN for span in damage)
        self._never = never_written(layout) if has_never else set()
        self._start = self._log.start
        if layout.lost_head is not None and layout.lost_head.start < self._start:
            self._start = layout.lost_head.start
            self._damage.insert(0, missing_span(layout, *layout.lost_head))
        self._last_timestamp = last_timestamp
        self._durable = layout.durable_end
        self._is_closed = not layout.has_abort
        try:
            checkpoint = layout.read_checkpoint()
        except ValueError:
            checkpoint = None
        self._flushed = 0 if checkpoint is None else checkpoint.physic_timestamp

    def loss(self) -> Loss | None:
        lost = self._lost()
        vouched = lost[self._is_vouched(lost)]
        durable = self._durable or 0
        gone = max(0, durable - self._end)
        gone += sum(span.length for span in self._damage if span.kind == MISSING_FILE)
        count, size = int(lost[:, 2].sum()), max(int(lost[:, 1].sum()), gone)
        kept = self._end - self._log.start
        if not count and not gone:
            if kept or self._log.files or self._flushed <= 0:
                return None
            reason = "the log has no files, but the checkpoint knows of messages"
            return Loss(0, 0, 0, f"{reason}: {_IS_MOUNTED}", needs_consent=True)
        missing = vouched[self._is_missing(vouched)]
        is_missing = len(missing) > 0 or self._lacks_file
        known = kept + size
        certain = max(int(vouched[:, 1].sum()), gone)
        is_one = len(vouched) == 1 and gone <= int(vouched[0, 1])
        return Loss(
            messages=count,
            bytes=size,
            known_bytes=known,
            reason=self._reason(lost, missing if is_missing else None),
            needs_consent=is_missing or not (is_one or _is_small(certain, known)),
        )

    def vouched_end(self) -> int:
        lost = self._lost()
        vouched = lost[self._is_vouched(lost)]
        known = vouched[self._is_missing(vouched) | (vouched[:, 0] < self._log.end)]
        return max(self._end, int((known[:, 0] + known[:, 1]).max(initial=0)))

    @property
    def _lacks_file(self) -> bool:
        """Whether the log certainly had files that are missing, even if no entry names them."""
        if any(span.kind == MISSING_FILE for span in self._damage):
            return True
        durable = self._durable or 0
        return durable > self._end and self._log.at(durable - 1) is None

    # ---------------------------------------------------------------------------------- entries
    def _lost(self) -> _Frames:
        """The lost frames, in the order of the log."""
        lowest = min([self._end, *(span.offset for span in self._damage)])
        queues = all_queues(self._layout)
        replaced = self._replaced(queues)
        self._replaced_places = replaced[:, 0]
        found: list[_Frames] = [np.empty((0, 3), np.int64), replaced]
        for queue in queues:
            found += self._lost_of(queue, lowest)
        # The index comes after the queues, which have the sizes.
        found.append(self._lost_of_index(lowest))
        frames = np.concatenate(found)
        if len(frames) > _MOST_COUNTED:
            return frames
        _, first = np.unique(frames[:, 0], return_index=True)
        return frames[first]

    def _lost_of(self, queue: Queue, lowest: int) -> Iterator[_Frames]:
        after: int | None = None
        for segment in reversed(list(queue.segments())):
            runs = queue.runs(segment.start, segment.start + segment.count)
            parts = [_frames(units, is_batch=queue.is_batch) for _, units in runs]
            if not parts:
                continue
            frames = _in_order(np.concatenate(parts), after)
            reaching = frames[frames[:, 0] + frames[:, 1] > lowest]
            lost = reaching[self._lacks(reaching)]
            if len(lost):
                yield lost
            if not len(reaching) and len(frames):
                return
            if len(frames):
                after = int(frames[0, 0])

    def _replaced(self, queues: Sequence[Queue]) -> _Frames:
        """The frames within the log whose places hold other messages now."""
        dropped = self._differing(queues) if self._dropped is None else self._dropped
        found: list[_Frames] = [np.empty((0, 3), np.int64)]
        doubtful: set[QueueKey] = set()
        for queue in queues:
            key = queue.topic, queue.queue_id
            first = dropped.get(key)
            if first is None:
                continue
            runs = queue.runs(first, queue.max_offset)
            parts = [_frames(units, is_batch=queue.is_batch) for _, units in runs]
            if parts:
                frames = self._without_frame(_in_order(np.concatenate(parts), None))
                found.append(frames)
                if len(frames):
                    doubtful.add(key)
        frames = np.concatenate(found)
        if not len(frames):
            return frames
        return frames[ReplacedFiles(self._layout, queues, doubtful).holds(frames[:, 0])]

    def _differing(self, queues: Sequence[Queue]) -> Mapping[QueueKey, int]:
        """The queues with entries that name no frame, as far as a few entries show."""
        keys: list[QueueKey] = []
        parts: list[_Frames] = [np.empty((0, 3), np.int64)]
        for key, units in probes(queues):
            parts.append(_frames(units, is_batch=False))
            keys += [key] * len(parts[-1])
        frames = np.concatenate(parts)
        places = self._without_frame(frames)[:, 0]
        differing = np.flatnonzero(np.isin(frames[:, 0], places)).tolist()
        return {keys[number]: 0 for number in differing}

    def _without_frame(self, frames: _Frames) -> _Frames:
        """The frames that sound parts of the log do not have."""
        starts, ends = frames[:, 0], frames[:, 0] + frames[:, 1]
        inside = (starts >= self._log.start) & (ends <= self._end)
        for span in self._all_damage:
            inside &= (starts >= span.offset + span.length) | (ends <= span.offset)
        inside &= ~np.isin(starts, list(self._never))
        frames = frames[inside]
        frames = frames[without_frame(self._layout, frames[:, 0], frames[:, 1])]
        return frames[[place not in self._known for place in frames[:, 0].tolist()]]

    def _lost_of_index(self, lowest: int) -> _Frames:
        # RocketMQ keeps the index of an empty log, so that index shows no loss.
        has_log = bool(self._log.files)
        least = lowest if has_log else java.LONG_MAX
        places, sizes = indexed_frames(self._layout, least, self._damage)
        frames = np.stack([places, sizes, np.ones(len(places), np.int64)], axis=1)
        return frames[self._lacks(frames)]

    def _lacks(self, frames: _Frames) -> npt.NDArray[np.bool_]:
        """Which messages the recovered log does not have."""
        starts, ends = frames[:, 0], frames[:, 0] + frames[:, 1]
        lacking: npt.NDArray[np.bool_] = ends > self._end
        for span in self._damage:
            lacking |= (starts < span.offset + span.length) & (ends > span.offset)
        if self._durable is not None and self._is_closed:
            # An earlier recovery cut the log there; the entries after it are stale.
            lacking &= starts < self._durable
        lacking &= ~np.isin(starts, list(self._never))
        return lacking & (starts >= self._start)

    # ------------------------------------------------------------------------------- which count
    def _is_vouched(self, lost: _Frames) -> npt.NDArray[np.bool_]:
        """Which lost messages were on the disk for certain."""
        starts = lost[:, 0]
        if self._durable is not None:
            return starts < self._durable
        if self._is_closed or not len(lost):
            return np.ones(len(lost), np.bool_)
        known = self._last_timestamp
        is_flushed = known is not None and 0 < known < self._flushed
        if is_flushed or self._drops_frames():
            return np.ones(len(lost), np.bool_)
        vouched = starts < self._end
        for file in self._log.files:
            if file.base >= self._end:
                vouched |= (starts >= file.base) & (starts < file.base + self._log.file_size)
        return vouched | self._is_missing(lost)

    def _drops_frames(self) -> bool:
        """Whether sound frames follow the new end of the log."""
        return LogReader(self._layout).find(self._end, self._log.end) is not None

    def _is_missing(self, lost: _Frames) -> npt.NDArray[np.bool_]:
        """Which messages were in files that are missing."""
        missing = np.ones(len(lost), np.bool_)
        for file in self._log.files:
            missing &= (lost[:, 0] < file.base) | (lost[:, 0] >= file.base + self._log.file_size)
        if not self._log.files or np.count_nonzero(missing) >= _LEAST_APART:
            return missing
        return missing & (lost[:, 0] < self._log.end + self._log.file_size)

    def _reason(self, lost: _Frames, missing: _Frames | None) -> str:
        if not self._log.files:
            return f"the log has no files, but the queues point to them: {_IS_MOUNTED}"
        if missing is not None:
            found = list(self._missing_parts(missing))
            more = f"; and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
            return "; ".join(found[:_MOST_NAMED]) + more
        within = int(np.count_nonzero(lost[:, 0] < self._end))
        replaced = len(self._replaced_places)
        if replaced:
            first = int(self._replaced_places.min())
            path = self._layout.log_path(first)
            words = f"{path} has other messages than the queues name, from {first} on"
            if len(lost) > replaced:
                words += f"; the log will end at {self._end}"
            return words
        if len(lost) and within == len(lost):
            return f"the log is damaged from {int(lost[0, 0])} on"
        words = f"the log will end at {self._end}"
        if within:
            words += f", and {text.plural(within, 'message')} before that are damaged"
        return words

    def _missing_parts(self, missing: _Frames) -> Iterator[str]:
        """The parts of the log that have no file, or a file without a message."""
        path_at = self._layout.log_file
        for span in self._damage:
            file = self._log.at(span.offset)
            if span.kind != MISSING_FILE:
                continue
            if file is not None and file.size:
                yield f"{file.path} has a blank and no message"
            else:
                where = f"{span.offset} to {span.offset + span.length}"
                words = f"the log has no file for {where}: {path_at(span.offset)} is missing"
                if span.offset < self._log.start:
                    # A broker without a new message leaves no other trace.
                    words += (
                        " (if RocketMQ's retention deleted it, --accept-loss records the new start)"
                    )
                yield words
        after = missing[missing[:, 0] >= self._end]
        reached = max(self._durable or 0, int((after[:, 0] + after[:, 1]).max(initial=0)))
        if reached > self._log.end:
            first, last = path_at(self._log.end), path_at(reached - 1)
            files = f"{first} is" if first == last else f"{first} to {last} are"
            had = f"the log had messages up to {reached}, and its last file ends at {self._log.end}"
            yield f"{had}: {files} missing"
        elif reached > self._end:
            yield f"the log had messages up to {reached}, and ends at {self._end} now"


def missing_files(layout: StoreLayout, end: int) -> Iterator[DamagedSpan]:
    """The parts of a log without a file, between two files.

    Args:
        layout: the store's files.
        end: physical offset of the log's end.
    """
    for file, following in pairwise(layout.commit_log.files):
        start = file.base + (layout.commit_log.file_size if file.size else 0)
        if start < following.base < end:
            yield missing_span(layout, start, following.base)


def missing_span(layout: StoreLayout, start: int, stop: int) -> DamagedSpan:
    """A part of the log without a file."""
    path = layout.filesystem.full_path(layout.log_file(start))
    reason = "there is no file for this part of the log"
    return DamagedSpan(start, stop - start, MISSING_FILE, reason, path)


_IS_MOUNTED: Final = "a disk may not be mounted"


def _frames(units: Units, *, is_batch: bool) -> _Frames:
    """The frames of some entries, without impossible ones."""
    units = units[has_message(units)]
    places = units["physical_offset"].astype(np.int64)
    which, held = frames_in(places, is_batch=is_batch)
    frames = np.stack([places[which], units["size"].astype(np.int64)[which], held], axis=1)
    frames = frames[(frames[:, 1] >= FIXED_SIZE_V1) & (frames[:, 1] <= LARGEST_MESSAGE)]
    return frames[frames[:, 0] < np.iinfo(np.int64).max - LARGEST_MESSAGE]


def _in_order(frames: _Frames, after: int | None) -> _Frames:
    """The frames that a queue can have had.

    A queue's entries are in the order of the log: an entry that points after a later entry is
    damaged.
    """
    if not len(frames):
        return frames
    least = np.minimum.accumulate(frames[::-1, 0])[::-1]
    if after is not None:
        least = np.minimum(least, after)
    return frames[frames[:, 0] <= least]


def _is_small(size: int, known: int) -> bool:
    """Whether a loss is so small a part of the known bytes that it needs no consent."""
    is_little = size <= _SMALL_BYTES and size * _SMALL_SHARE <= known
    return is_little or (size <= _LARGE_BYTES and size * _LARGE_SHARE <= known)
