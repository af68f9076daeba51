"""Finds the messages that a recovery would lose, and decides whether the user must accept the loss.

A message is lost if a queue, the index, the durable offset or the checkpoint shows that the message
existed, and the recovered log does not have the message. Two kinds of messages do not count as
lost: messages that retention deleted, and messages in damage that an earlier recovery recorded.

After a crash, it is normal that the newest messages are lost. So the decision considers only
messages that were certainly on the disk. The code calls such messages *vouched for*:

- With a durable offset: the messages before this offset, and the messages in each missing log file
  that lies before an existing log file.
- Without a durable offset, after a clean shutdown: the messages to which a queue or the index
  points.
- Without a durable offset, after a crash: the messages before the log's new end, the messages in
  later log files, and the messages in missing log files. In two cases, all lost messages are
  vouched for: valid frames follow the log's new end, or the checkpoint's time is later than the
  store time of the log's last message.

The user must consent to the loss (``accept_loss``) if log files are missing. The user must also
consent if log files were replaced by files of another store, because consumers would get the
messages of that store. In all other cases, the user must consent if both conditions are true:
at least two vouched-for messages are lost, and these are more than a small share of the log.
docs/recovery.md has a table of all cases.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, Final
from weakref import proxy

import numpy as np

from logquarry import text
from logquarry.errors import StoreUnavailable
from logquarry.format import java
from logquarry.format.arrays import Bools
from logquarry.log.layout import StoreLayout
from logquarry.log.walk import MISSING_FILE, DamagedSpan, LogReader, Span
from logquarry.read.batch_queue import all_queues
from logquarry.read.index_file import indexed_frames
from logquarry.read.log_end import checkpoint_times, known_damage
from logquarry.read.log_queues import QueueKey
from logquarry.read.queue import Queue
from logquarry.repair.audit.differences import SpanSet
from logquarry.repair.audit.log import NEVER_WRITTEN, never_written
from logquarry.repair.recover.replaced import Frames, ReplacedFiles, frames_of, in_order

_SMALL_BYTES: Final = 64 << 10
_SMALL_SHARE: Final = 10
"""A loss of at most 64 KiB needs no consent if it is at most a tenth of the log."""
_LARGE_BYTES: Final = 64 << 20
_LARGE_SHARE: Final = 100
"""A loss of at most 64 MiB needs no consent if it is at most a hundredth of the log."""
_MOST_COUNTED: Final = 20_000_000
"""Up to this number of lost entries, each lost message is counted once. If there are more lost
entries, a message with several entries is counted several times.
"""
_MOST_NAMED: Final = 2
"""Maximum number of missing parts of the log that the text of a reason lists."""
_LEAST_APART: Final = 2
"""If at least this number of entries point to log files that do not exist, all these entries prove
a loss. A single entry may be damaged. A single entry is ignored if it points beyond the file that
would follow the log's last file. To prove that a log file was replaced, at least the same number of
entries is necessary.
"""
_IF_FOREIGN: Final = ", or move this file out of the log's folder if it belongs to another store"


@dataclass(frozen=True, slots=True)
class Loss:
    """The messages that a recovery would lose.

    Attributes:
        messages: number of lost messages to which entries of queues or index point. A message with
            several entries is counted once, unless more than 20 million entries are lost.
        bytes: size of the lost messages; or the size of the missing files plus the missing bytes
            before the durable offset, if this is larger.
        known_bytes: number of bytes of the log that remain, plus the lost bytes.
    """

    messages: int
    bytes: int
    known_bytes: int
    reason: str
    needs_consent: bool

    def __str__(self) -> str:
        return self.words()

    def words(self, *, is_applied: bool = False) -> str:
        """Return a sentence that describes the loss."""
        verb = "lost" if is_applied else "would be lost"
        if not self.bytes:
            return f"messages {verb}, and their number is unknown: {self.reason}"
        count = text.plural(self.messages, "message")
        return f"{count} {verb}, {text.plural(self.bytes, 'byte')}: {self.reason}"

    def refusal(self, accept_loss: int | None, mode: str = "safe") -> str | None:
        """Return the reason why a recovery is refused, as text; None if it is allowed."""
        if not self.needs_consent or (accept_loss is not None and accept_loss >= self.bytes):
            return None
        option = " --mode rocketmq" if mode == "rocketmq" else ""
        return (
            f"{self}. Nothing was changed. Bring back the files that have these messages; or "
            f"accept the loss: `logquarry recover STORE --apply{option} --accept-loss "
            f"{self.bytes}`, in Python accept_loss={self.bytes}"
        )


class LossRefused(StoreUnavailable):
    """A recovery would lose more than the caller accepts. Nothing was changed."""

    def __init__(self, message: str, *, loss: Loss) -> None:
        super().__init__(message)
        self.loss = loss

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), loss=self.loss), (str(self),)


def require_consent(
    root: str, loss: Loss | None, accept_loss: int | None, mode: str = "safe"
) -> None:
    """Raise LossRefused if a recovery would lose more bytes than the user accepts."""
    reason = None if loss is None else loss.refusal(accept_loss, mode)
    if loss is not None and reason is not None:
        raise LossRefused(f"{root}: {reason}", loss=loss)


def replaced_files(layout: StoreLayout, frames: Frames) -> Iterator[tuple[str, Frames, str]]:
    """For each replaced log file, yield its path, the lost frames' offsets, and the reason."""
    bases = frames[:, 0] // layout.commit_log.file_size
    for base in np.unique(bases).tolist():
        inside = frames[bases == base]
        count = text.plural(int(inside[:, 2].sum()), "message")
        words = f"the queues point to {count} that this file does not have; it has other messages"
        places = inside[:, 0]
        reason = f"{words}: put the right file back{_IF_FOREIGN}"
        yield layout.log_file(int(places[0])), places, reason


class LossSearch:
    """Finds the messages of the store that the recovered log will lack.

    Args:
        layout: the store's files before the recovery. Log files with a wrong name must be left out.
        end: physical offset at which the log will end.
        last_timestamp: store time of the last message before ``end``, None if unknown.
        dropped: for each queue that differs from the log, the queue offset of the first entry that
            the recovery will drop. If ``dropped`` is None, a few entries of each queue are probed.
    """

    def __init__(
        self,
        layout: StoreLayout,
        *,
        end: int,
        damage: Sequence[DamagedSpan] = (),
        last_timestamp: int | None = None,
        dropped: Mapping[QueueKey, int] | None = None,
    ) -> None:
        self._layout = layout
        self._queues = all_queues(layout)
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
        self._flushed = checkpoint_times(layout).physic_timestamp

    def loss(self) -> Loss | None:
        """Return the lost messages, None if there are none."""
        lost = self._lost()
        vouched = lost[self._is_vouched(lost)]
        durable = self._durable or 0
        gone = max(0, durable - self._end)
        gone += sum(span.length for span in self._damage if span.kind == MISSING_FILE)
        count, size = int(lost[:, 2].sum()), max(int(lost[:, 1].sum()), gone)
        kept = self._end - self._log.start
        if not count and not gone:
            missing_log = None if kept else self._layout.missing_log
            if missing_log is None:
                return None
            reason = f"the log has no files, but {missing_log.evidence[0]} knows of messages"
            return Loss(0, 0, 0, f"{reason}: {_IS_MOUNTED}", needs_consent=True)
        missing = vouched[self._is_missing(vouched)]
        is_missing = len(missing) > 0 or self._lacks_file
        known = kept + size
        certain = max(int(vouched[:, 1].sum()), gone)
        lacks_file = is_missing or self._has_foreign_file(vouched)
        is_one = len(vouched) == 1 and gone <= int(vouched[0, 1])
        return Loss(
            messages=count,
            bytes=size,
            known_bytes=known,
            reason=self._reason(lost, missing if is_missing else None),
            needs_consent=lacks_file or not (is_one or _is_small(certain, known)),
        )

    @cached_property
    def replaced(self) -> Frames:
        """The lost frames of replaced log files, in the order of the log."""
        frames = self._replaced_files.frames(self._dropped)
        _, first = np.unique(frames[:, 0], return_index=True)
        return frames[first]

    @cached_property
    def _gaps(self) -> list[DamagedSpan]:
        """The missing log files that lie after the log's new end and before an existing log file. A
        writer syncs the name of a log file before it uses the file. So a crash alone cannot remove
        a log file if a later log file exists.
        """
        gaps = missing_files(self._layout, self._log.end)
        return [gap for gap in gaps if gap.offset >= self._end]

    @cached_property
    def _replaced_files(self) -> ReplacedFiles:
        search: LossSearch = proxy(self)

        def is_expected(frames: Frames) -> Bools:
            # Use a weak reference: in a cycle of references, the files would stay open until a
            # garbage collection.
            return search._is_expected(frames)

        return ReplacedFiles(self._layout, self._queues, is_expected, self._known)

    def _has_foreign_file(self, vouched: Frames) -> bool:
        """Whether there is a log file in which all messages are from another store. A file that
        also has messages of this store does not count: after a crash had lost messages, this store
        wrote new messages in their place.
        """
        places = np.intersect1d(vouched[:, 0], self.replaced[:, 0])
        bases, counts = np.unique(places - places % self._log.file_size, return_counts=True)
        return any(map(self._replaced_files.is_foreign, bases[counts >= _LEAST_APART].tolist()))

    def vouched_end(self) -> int:
        """Return the physical offset up to which the store certainly had messages."""
        lost = self._lost()
        vouched = lost[self._is_vouched(lost)]
        known = vouched[self._is_missing(vouched) | (vouched[:, 0] < self._log.end)]
        return max(self._end, int((known[:, 0] + known[:, 1]).max(initial=0)))

    @property
    def _files(self) -> list[Span]:
        return [Span(file.base, self._log.file_size) for file in self._log.files]

    @property
    def _lacks_file(self) -> bool:
        """Whether files of the log are certainly missing. The result does not depend on entries."""
        if any(span.kind == MISSING_FILE for span in self._damage):
            return True
        durable = self._durable or 0
        return durable > self._end and self._log.at(durable - 1) is None

    def _lost(self) -> Frames:
        lowest = min([self._end, *(span.offset for span in self._damage)])
        found = [self.replaced]
        for queue in self._queues:
            found += self._lost_of(queue, lowest)
        # Append the frames from the index last. If several frames have the same offset, only the
        # first of them is kept, and frames from the index have no size.
        found.append(self._lost_of_index(lowest))
        frames = np.concatenate(found)
        if len(frames) > _MOST_COUNTED:
            return frames
        _, first = np.unique(frames[:, 0], return_index=True)
        return frames[first]

    def _lost_of(self, queue: Queue, lowest: int) -> Iterator[Frames]:
        after: int | None = None
        for segment in reversed(list(queue.segments())):
            runs = queue.runs(segment.start, segment.start + segment.count)
            parts = [frames_of(units, is_batch=queue.is_batch) for _, units in runs]
            if not parts:
                continue
            frames = in_order(np.concatenate(parts), after)
            reaching = frames[frames[:, 0] + frames[:, 1] > lowest]
            lost = reaching[self._lacks(reaching)]
            if len(lost):
                yield lost
            if not len(reaching) and len(frames):
                return
            if len(frames):
                after = int(frames[0, 0])

    def _is_expected(self, frames: Frames) -> Bools:
        starts, ends = frames[:, 0], frames[:, 0] + frames[:, 1]
        inside: Bools = (starts >= self._log.start) & (ends <= self._end)
        for span in self._all_damage:
            inside &= (starts >= span.end) | (ends <= span.offset)
        return inside & ~np.isin(starts, list(self._never))

    def _lost_of_index(self, lowest: int) -> Frames:
        # RocketMQ keeps the index if the log is deleted. So if the log has no files, entries in the
        # index do not prove a loss.
        has_log = bool(self._log.files)
        least = lowest if has_log else java.LONG_MAX
        places, sizes = indexed_frames(self._layout, least, self._damage)
        frames = np.stack([places, sizes, np.ones(len(places), np.int64)], axis=1)
        return frames[self._lacks(frames)]

    def _lacks(self, frames: Frames) -> Bools:
        starts, ends = frames[:, 0], frames[:, 0] + frames[:, 1]
        lacking: Bools = ends > self._end
        for span in self._damage:
            lacking |= (starts < span.end) & (ends > span.offset)
        if self._durable is not None and self._is_closed:
            # At the last shutdown or recovery, the log ended at the durable offset. So entries of
            # later messages do not prove a loss.
            lacking &= starts < self._durable
        lacking &= ~np.isin(starts, list(self._never))
        return lacking & (starts >= self._start)

    def _is_vouched(self, lost: Frames) -> Bools:
        starts = lost[:, 0]
        if self._durable is not None:
            return (starts < self._durable) | SpanSet(self._gaps).mask(starts)
        if self._is_closed or not len(lost):
            return np.ones(len(lost), np.bool_)
        known = self._last_timestamp
        is_flushed = known is not None and 0 < known < self._flushed
        # If valid frames follow the log's new end, all messages before these frames were on the
        # disk.
        if is_flushed or LogReader(self._layout).find(self._end, self._log.end) is not None:
            return np.ones(len(lost), np.bool_)
        later = SpanSet(span for span in self._files if span.offset >= self._end).mask(starts)
        vouched: Bools = (starts < self._end) | later
        return vouched | self._is_missing(lost)

    def _is_missing(self, lost: Frames) -> Bools:
        missing = ~SpanSet(self._files).mask(lost[:, 0])
        if not self._log.files or np.count_nonzero(missing) >= _LEAST_APART:
            return missing
        return missing & (lost[:, 0] < self._log.end + self._log.file_size)

    def _reason(self, lost: Frames, missing: Frames | None) -> str:
        if not self._log.files:
            return f"the log has no files, but the queues point to them: {_IS_MOUNTED}"
        if missing is not None:
            found = list(self._missing_parts(missing))
            more = f"; and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
            return "; ".join(found[:_MOST_NAMED]) + more
        within = int(np.count_nonzero(lost[:, 0] < self._end))
        replaced = len(self.replaced)
        if replaced:
            first = int(self.replaced[0, 0])
            path = self._layout.log_path(first)
            words = f"{path} has other messages than the queues point to, from {first} on: put the "
            words += f"right file back{_IF_FOREIGN}"
            if len(lost) > replaced:
                words += f"; the log will end at {self._end}"
            return words
        if len(lost) and within == len(lost):
            return f"the log is damaged from {int(lost[0, 0])} on"
        words = f"the log will end at {self._end}"
        if within:
            before = text.plural(within, "message before that is", "messages before that are")
            words += f", and {before} damaged"
        return words

    def _missing_parts(self, missing: Frames) -> Iterator[str]:
        path_at = self._layout.log_file
        gaps = [gap for gap in self._gaps if SpanSet([gap]).mask(missing[:, 0]).any()]
        for span in (*self._damage, *gaps):
            file = self._log.at(span.offset)
            if span.kind != MISSING_FILE:
                continue
            if file is not None and file.size:
                yield f"{file.path} has a blank and no message"
            else:
                where = f"{span.offset} to {span.end}"
                words = f"the log has no file for {where}: {path_at(span.offset)} is missing"
                if span.offset < self._log.start:
                    # RocketMQ's retention leaves no trace in a store until the next put.
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
    """Yield the missing parts of the log between its files."""
    for file, following in pairwise(layout.commit_log.files):
        start = file.base + (layout.commit_log.file_size if file.size else 0)
        if start < following.base < end:
            yield missing_span(layout, start, following.base)


def missing_span(layout: StoreLayout, start: int, stop: int) -> DamagedSpan:
    """Return the :class:`DamagedSpan` of a part of the log that has no file."""
    path = layout.filesystem.full_path(layout.log_file(start))
    reason = "there is no file for this part of the log"
    return DamagedSpan(start, stop - start, MISSING_FILE, reason, path)


_IS_MOUNTED: Final = "a disk may not be mounted"


def _is_small(size: int, known: int) -> bool:
    """Whether the loss of ``size`` bytes is so small that it needs no consent. ``known`` is the
    number of all bytes of the log, including the lost bytes.
    """
    is_little = size <= _SMALL_BYTES and size * _SMALL_SHARE <= known
    return is_little or (size <= _LARGE_BYTES and size * _LARGE_SHARE <= known)
