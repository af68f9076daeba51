"""Audit of the log for a repair: decides whether a break is the log's end or damage.
:mod:`logquarry.log.walk` makes the same decision for reads and for verify.

A break is a place at which no valid frame begins. It ends the log (torn tail or stale frames) if
one of these rules applies:

1. The break is at or after :attr:`KnownBounds.least`. ``least`` is the durable offset. In a store
   that was shut down cleanly, ``least`` is the higher one of two offsets: the durable offset, and
   the end of the last message in a queue.
2. The frame after the break is older than the frame before the break, and does not begin before the
   durable offset.
3. The store was shut down cleanly, and has no durable offset. Also, the frame after the break lies
   after the last message in a queue, or the frame is newer than the checkpoint. (In a store of
   RocketMQ 5.5, the checkpoint is not used.)
4. No frame follows.

Any other break is damage, and the log continues. If rules 2 to 4 end the log at a break before
``least``, the bytes up to ``least`` are damage, and the log ends at ``least``. There are two
exceptions. If the frame after the break begins before ``least``, an earlier recovery has cut the
frame off, although a queue still points to it. In this case, the rules use the durable offset in
place of ``least``. If there is no durable offset, the log can end before ``least``: zeros up to
``least`` count as damage only in a file that also has other damage.

Verify finds the log's end with :func:`logquarry.read.log_end.log_bound`. Verify uses these rules
only for the frames after this end.

:func:`are_stale_bytes` recognizes bytes of earlier messages after the log's end.
"""

from __future__ import annotations

import dataclasses
import heapq
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np

from logquarry.format.arrays import POSITION, SIZE, Bytes, Int64
from logquarry.format.frame import FIXED_SIZE_V1, DamageKind
from logquarry.log import codec
from logquarry.log.codec import Window
from logquarry.log.earlier_writers import ROCKSDB_STORE
from logquarry.log.frames import guided
from logquarry.log.layout import StoreLayout
from logquarry.log.walk import (
    MISSING_FILE,
    BlankSpan,
    DamagedSpan,
    Event,
    ExpiredSpan,
    LogEnd,
    LogReader,
    Run,
)
from logquarry.read.batch_queue import all_queues
from logquarry.read.commit_log import CommitLog
from logquarry.read.log_end import checkpoint_times, last_entries
from logquarry.read.queue import Queue
from logquarry.text import counted

if TYPE_CHECKING:
    # At run time, this import would load pyarrow, which slows down the start of quick commands.
    from logquarry.log.splits import Stretch

_PAGES: Final = (4 << 10, 16 << 10, 64 << 10)
"""Page sizes, in bytes, of the systems on which RocketMQ runs."""
_SECTOR: Final = 512  # A disk writes these bytes whole or not at all.
_ZEROS: Final = re.compile(rb"\0+")
_BACK: Final = 16 << 20
"""Number of bytes before the log's end in which the source of stale bytes is searched."""
_MOST_FRAMES: Final = 1 << 14
_MOST_BATCH: Final = 128
"""Maximum number of messages in the last append, as assumed here. One append can be a batch."""
_CERTAIN: Final = 32
"""Number of bytes that must match earlier messages if the store was shut down cleanly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownBounds:
    """The evidence for a log's end: from the queues, the checkpoint and the durable offset.

    ``queued`` is the physical offset after the last message in a queue. ``dispatched_timestamp`` is
    the store time of the last dispatched message in the checkpoint; None if it is unknown, or if
    the store may be of RocketMQ 5.5.
    """

    durable: int | None = None
    queued: int | None = None
    is_closed: bool = False
    dispatched_timestamp: int | None = None

    @property
    def likely_end(self) -> int | None:
        """Physical offset that the log has probably reached, None if unknown."""
        return max(self.durable or 0, self.queued or 0) or None

    @property
    def least(self) -> int | None:
        """Physical offset that the log has certainly reached, None if unknown."""
        queued = self.queued if self.is_closed else None
        return max((known for known in (self.durable, queued) if known is not None), default=None)


def find_bounds(
    layout: StoreLayout, queues: Iterable[Queue], *, ignores_cut: bool = False
) -> KnownBounds:
    """Return the known bounds. If the last recovery has recorded the log's end, entries that point
    after this end are ignored, unless ``ignores_cut`` is true.
    """
    entries = last_entries(layout, queues)
    # RocketMQ 5.5 updates the dispatch time in the checkpoint only when it syncs the queues, and
    # not at a clean shutdown.
    may_lag = ROCKSDB_STORE in layout.folders
    queued = entries[0].end if entries else None
    cut = None if ignores_cut else layout.cut_end
    return KnownBounds(
        durable=layout.durable_end,
        queued=queued if cut is None or queued is None else min(queued, cut),
        is_closed=not layout.has_abort,
        dispatched_timestamp=None if may_lag else checkpoint_times(layout).logics_timestamp or None,
    )


S = TypeVar("S", bound="Stretch")


class LogAudit:
    """Reads a log once, from its start to its end.

    Read the attributes only after :meth:`runs` or :meth:`guided_runs` has ended.

    Attributes:
        start: physical offset at which the audit begins; always the first byte of a file.
        last_timestamp: store time of the last message in milliseconds, 0 if there is none.
        latest_timestamp: latest store time; later than ``last_timestamp`` if a clock was set back.
        words: reasons for the log's end, as text.
    """

    def __init__(
        self,
        layout: StoreLayout,
        bounds: KnownBounds,
        *,
        start: int | None = None,
        stop: int | None = None,
        is_live: bool = False,
    ) -> None:
        self.start = layout.commit_log.start if start is None else start
        self.end = self.start
        self.damage: list[DamagedSpan] = []
        self.last_timestamp = 0
        self.latest_timestamp = 0
        self.count = 0
        self.words: list[str] = []
        self._layout = layout
        self._bounds = bounds
        self._stop = stop
        self._is_live = is_live
        self._log = CommitLog(layout)

    def runs(self) -> Iterator[Run]:
        """Yield all frames in order. A frame whose only damage is in its body is included."""
        return self._runs(self._reader().events(self.start, self._stop))

    def guided_runs(self, guesses: Iterable[S]) -> Iterator[Run | S]:
        """Yield all frames in order, in runs that threads or tasks have read. No writer may run."""
        assert not self._is_live
        return (
            self.runs() if self._stop is not None else self._runs(guided(self._reader(), guesses))
        )

    def _reader(self) -> LogReader:
        return LogReader(self._layout, live=self._is_live)

    def _runs(self, events: Iterable[Event | S]) -> Iterator[Run | S]:
        broken: list[DamagedSpan] = []
        least, stale = self._bounds.least, None
        for event in events:
            if isinstance(event, LogEnd):
                break
            if isinstance(event, ExpiredSpan):
                continue
            if isinstance(event, DamagedSpan):
                if not broken and least is not None and event.offset >= least:
                    self.words.append(f"the log ends at {event.offset}: {event.reason}")
                    break
                broken.append(event)
                continue
            if broken and isinstance(event, BlankSpan):
                broken.append(self._lost_file(event))
                continue
            if broken:
                assert not isinstance(event, BlankSpan)
                stale = self._why_stale(event)
                if stale is not None:
                    # An earlier recovery cut these frames off. So a queue entry that points to such
                    # a frame does not prove that the log reaches up to the frame.
                    if least is not None and least > event.start:
                        least = self._bounds.durable
                    break
                yield from self._confirmed(broken)
                broken = []
            if isinstance(event, BlankSpan):
                # A writer begins each file with a message. If a file begins with a blank, a repair
                # has created it in place of a lost file. Exception: see never_written.
                file = self._layout.commit_log.at(event.offset)
                if file is not None and file.base == event.offset:
                    self.damage.append(self._lost_file(event))
            else:
                # Use the store time of the last message, and not the latest store time. Otherwise,
                # frames that were stored after a clock was set back would seem to be stale.
                self.last_timestamp = self._times(event)[1]
                self.latest_timestamp = max(self.latest_timestamp, self.last_timestamp)
                self.count += len(event.rows) if isinstance(event, Run) else event.count
                yield event
            self.end = event.end
        if least is not None and least > self.end:
            yield from self._rest(broken, least)
        elif broken and stale is None:
            self.words.append(f"the log ends at {self.end}: {broken[0].reason}")
        if stale is not None:
            self.words.append(f"the log ends at {self.end}: {stale}")

    def _lost_file(self, blank: BlankSpan) -> DamagedSpan:
        reason = "the file has a blank and no message: the blank replaces a lost file"
        if blank.offset in self._never_written:
            reason = NEVER_WRITTEN
        return DamagedSpan(blank.offset, blank.length, MISSING_FILE, reason, blank.path)

    @cached_property
    def _never_written(self) -> set[int]:
        return never_written(self._layout)

    def _why_stale(self, event: Run | Stretch) -> str | None:
        bounds = self._bounds
        if event.start < (bounds.durable or 0):
            return None
        where = f"the frames from {event.start} on"
        least = bounds.least
        if bounds.durable is None and least is not None and event.start >= least:
            return f"{where} are in no queue"
        stored, _ = self._times(event)
        if stored < self.last_timestamp:
            return f"{where} are older: an earlier recovery left them"
        known = bounds.dispatched_timestamp
        # If the checkpoint is older than the last frame before the damage, the checkpoint is wrong,
        # and does not count as evidence.
        is_known = known is not None and known >= self.last_timestamp
        if bounds.is_closed and bounds.durable is None and is_known and stored > (known or 0):
            return f"{where} are newer than the last dispatched message in the checkpoint"
        return None

    def _times(self, event: Run | Stretch) -> tuple[int, int]:
        if isinstance(event, Run):
            return self._time_of(event, 0), self._time_of(event, -1)
        return event.first_time, event.last_time

    def _time_of(self, run: Run, row: int) -> int:
        at, size = run.window.base + int(run.rows[row, 0]), int(run.rows[row, SIZE])
        return self._log.store_time_at(at, size)

    def _confirmed(self, broken: list[DamagedSpan]) -> Iterator[Run]:
        for span in broken:
            self.damage.append(span)
            yield from framed(self._layout, span)
            self.end = max(self.end, span.end)

    def _rest(self, broken: list[DamagedSpan], least: int) -> Iterator[Run]:
        kept = []
        for span in broken:
            if span.offset < least and self._layout.commit_log.at(span.offset) is not None:
                length = min(span.length, least - span.offset)
                kept.append(DamagedSpan(span.offset, length, span.kind, span.reason, span.path))
        if kept or self._bounds.durable is not None:
            kept = self._with_zeros(kept, least)
        yield from self._confirmed(kept)
        if self.end < least:
            self.words.append(
                f"the log reached {least} once and ends at {self.end} now: "
                f"{counted(least - self.end, 'byte is', 'bytes are')} lost"
            )

    def _with_zeros(self, broken: list[DamagedSpan], least: int) -> list[DamagedSpan]:
        """Add spans for the zeros and the missing files between damaged spans, and between the last
        damaged span and ``least``. If there is no durable offset, add spans only in damaged files.
        """
        files = self._layout.commit_log
        found: list[DamagedSpan] = []
        end = self.end
        for file in files.files:
            stop = min(file.base + files.file_size, least)
            here = [span for span in broken if file.base <= span.offset < stop]
            if not here:
                stop = min(stop, self._bounds.durable or 0)
            if stop <= end:
                continue
            path = self._layout.filesystem.full_path(file.path)
            if end < file.base:
                reason = "there is no file for this part of the log"
                found.append(DamagedSpan(end, file.base - end, MISSING_FILE, reason, path))
                end = file.base
            if not here or end < here[0].offset:
                until = here[0].offset if here else stop
                kind, reason = DamageKind.ZEROED.label, "zeros in place of a frame"
                found.append(DamagedSpan(end, until - end, kind, reason, path))
            nexts = [span.offset for span in here[1:]] + [stop]
            found += [
                dataclasses.replace(span, length=until - span.offset)
                for span, until in zip(here, nexts, strict=False)
            ]
            end = stop
        return found


NEVER_WRITTEN: Final = (
    "the file has a blank and no message: RocketMQ 3 acknowledged a message larger than a file, "
    "and never wrote it"
)


def never_written(layout: StoreLayout) -> set[int]:
    """Return the physical offsets of the blanks that RocketMQ 3 wrote in place of huge messages.

    QUIRK: For a message larger than a file, RocketMQ 3 fills two files with blanks and answers
    PUT_OK. The queue entry points to the second file. The size in the entry is the size of a log
    file. No message has this size.
    """
    size = layout.commit_log.file_size
    found: set[int] = set()
    for queue in all_queues(layout):
        for segment in queue.segments():
            for _, units in queue.runs(segment.start, segment.start + segment.count):
                found.update(units["physical_offset"][units["size"] == size].tolist())
    return found


def framed(layout: StoreLayout, span: DamagedSpan) -> Iterator[Run]:
    """Yield the frames at the start of a damaged span, if their only damage is in the body."""
    files = layout.commit_log
    file = files.at(span.offset)
    if file is None or not file.size:
        return
    at = span.offset - file.base
    data = layout.open_file(file.path).window(at, span.length)[: span.length]
    window = Window.of(data, span.offset, files.file_size - at, has_heads=files.has_heads)
    rows = codec.empty_rows(max(1, span.length // FIXED_SIZE_V1 + 1))
    count, _, _ = codec.walk(window, 0, span.length, rows, check_crc=False)
    if count and (fault := LogReader(layout).fault(span.offset, span.length)) is not None:
        ends = rows[:count, POSITION] + rows[:count, SIZE] + at
        count = int(np.searchsorted(ends, fault.offset, "right"))
    if count:
        yield Run(window, rows[:count], span.path)


def torn_end(layout: StoreLayout, bounds: KnownBounds) -> int | None:
    """Return the physical offset of the log's last message if it is incomplete, else None.

    The message is checked only after a crash, and only if it is after the durable offset. A torn
    page or a crashed replica can leave zeros in the topic and the properties, which no CRC covers.
    A message is incomplete if its properties lack whole sectors, or if they (without properties,
    the topic) end in a zero byte. If the message has a queue entry, a zero byte at the end of its
    properties may be right. Then only the end of the topic is checked for a zero byte.
    """
    if bounds.durable is None or bounds.is_closed:
        return None
    last: Run | None = None
    for event in LogReader(layout, check_crc=False).events(bounds.durable):
        if isinstance(event, Run):
            last = event
        elif not isinstance(event, BlankSpan):
            break
    if last is None:
        return None
    at = int(last.rows[-1, POSITION])
    frame = last.window.frame_at(at)
    has_entry = last.window.base + at < (bounds.queued or 0)
    text = frame.topic if has_entry else frame.properties or frame.topic
    end = (last.window.base + at + frame.size) % layout.commit_log.file_size
    is_torn = text.endswith(b"\0") or _has_lost_sector(frame.properties, end)
    return last.window.base + at if is_torn else None


def _has_lost_sector(text: bytes, end: int) -> bool:
    """Whether zeros in a text begin and end exactly where sectors do, as in a text that lost these
    sectors. ``end`` is the position of the text's end in its file.
    """
    bounds = {*range(-(end - len(text)) % _SECTOR, len(text), _SECTOR), len(text)}
    return any({*zeros.span()} <= bounds for zeros in _ZEROS.finditer(text))


def are_stale_bytes(layout: StoreLayout, end: int, *, is_closed: bool) -> bool:
    """Whether the bytes after the log's end come from earlier messages in a reused buffer.

    With ``writeWithoutMmap``, RocketMQ 5.5.0 copies each append into one of 16 shared buffers.
    RocketMQ then writes bytes of the buffer to the file until the file's current page is full
    (``DefaultMappedFile``). The broker never clears a buffer. So the rest of the page receives
    bytes of earlier, longer appends::

        buffer   | last append | older append | append before that, longer | zeros
        file     | last frame  | stale bytes up to the end of the page     | next page

    Byte k of the buffer is byte k of the latest append with more than k bytes. Stale bytes never
    form a valid frame, because their PHYSICALOFFSET is that of the earlier message.

    The last frame must end at physical offset ``end``. If ``is_closed`` (the store was shut down
    cleanly), only the first bytes must match earlier messages, because the messages with the later
    bytes may have expired.
    """
    file = layout.commit_log.at(end)
    reader = LogReader(layout, check_crc=False)
    last = reader.data_end(end)
    if file is None or last <= end:
        return False
    at = end - file.base
    rests = [-at % page for page in _PAGES]
    rest = next((rest for rest in rests if last <= end + rest), None)
    if rest is None:
        return False
    if reader.find(end, end + rest) is not None:
        # These bytes contain whole frames, so they come from a truncated log and not from a buffer.
        return False
    window = reader.window(end, rest)
    tail = window.data[: min(rest, window.length)].copy()
    found = _Appends.before(reader, end)
    if found is None:
        return False
    enough = min(_CERTAIN, last - end) if is_closed else len(tail)
    return any(found.explained(tail, number) >= enough for number in found.last_appends())


class _Appends:
    def __init__(self, data: Bytes, starts: Int64) -> None:
        self._data = data
        self._starts = starts
        # An append can end at each frame's end. A batch is one append of several frames.
        self._is_end = np.zeros(len(data) + 1, np.bool_)
        self._is_end[starts] = True
        self._is_end[len(data)] = True

    @classmethod
    def before(cls, reader: LogReader, end: int) -> _Appends | None:
        pieces: list[Bytes] = []
        starts: list[Int64] = []
        length, reached = 0, 0
        first = max(reader.files.start, end - _BACK)
        for event in reader.events(first, end, resync=True):
            if not isinstance(event, Run):
                continue
            at = event.rows[:, POSITION].astype(np.int64)
            stop = int(at[-1]) + int(event.rows[-1, SIZE])
            pieces.append(event.window.data[int(at[0]) : stop].copy())
            starts.append(at - at[0] + length)
            length += len(pieces[-1])
            reached = event.end
        if reached != end:
            return None
        return cls(np.concatenate(pieces), np.concatenate(starts)[-_MOST_FRAMES:])

    def last_appends(self) -> range:
        count = len(self._starts)
        return range(count - 1, max(-1, count - 1 - _MOST_BATCH), -1)

    def explained(self, tail: Bytes, number: int) -> int:
        """Return how many bytes of ``tail`` come from appends before the last append. ``tail`` is
        the part of the last page after the log's end. The last append begins with frame ``number``.
        """
        data, most = self._data, len(tail)
        from_buffer = len(data) - int(self._starts[number])
        nonzero = np.flatnonzero(tail)
        zeros_from = int(nonzero[-1]) + 1 if len(nonzero) else 0
        # Position in the tail -> number of the latest frame with which an append can end there.
        reached = {0: number}
        due, best = [0], 0
        while due:
            begin = heapq.heappop(due)
            if begin >= zeros_from:
                # No append was longer, so the rest of the buffer is zero.
                return most
            numbers = np.arange(reached[begin])
            for place in range(begin, most):
                sources = self._starts[numbers] + (from_buffer + place)
                is_inside = sources < len(data)
                numbers, sources = numbers[is_inside], sources[is_inside]
                if place > begin:
                    ends = numbers[self._is_end[sources]]
                    if len(ends):
                        if place not in reached:
                            heapq.heappush(due, place)
                        reached[place] = max(reached.get(place, -1), int(ends[-1]))
                numbers = numbers[data[sources] == tail[place]]
                if not len(numbers):
                    break
                best = max(best, place + 1)
            else:
                return most
        return best
