"""Looks a log through: where it ends, and what in it is damage.

A break of the chain is either the end of the log (what a crash tears, and what lies behind it) or
damage within it (rot, a lost page). In this order, it is the end

1. from the durable mark on, where there is one: what was on the disk had no break,
2. in a store that was closed in order, from the last queued message on,
3. where the frame behind it is older than the one before it: what an earlier recovery left over (in
   a store that was closed in order also where it is newer than the checkpoint knows),
4. where no frame is behind it.

Anywhere else it is damage, and what stands behind it is kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

from logquarry.format.checkpoint import Checkpoint
from logquarry.format.frame import FIXED_SIZE_V1, DamageKind, Frame
from logquarry.format.rows import POSITION, REACHED_STOP, SIZE
from logquarry.log import codec
from logquarry.log.codec import Window
from logquarry.log.layout import StoreFile, StoreLayout
from logquarry.log.places import guided
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
from logquarry.read.commit_log import CommitLog
from logquarry.read.consume_queue import ConsumeQueue
from logquarry.read.log_end import last_entries


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownBounds:
    """What is known of a log before it is read.

    Attributes:
        durable: the durable mark, if it speaks of this log.
        queued: where the last queued message ends, if there is any.
        is_closed: whether the store was closed in order.
        dispatched_timestamp: store time of the last message in the queues, as the checkpoint of a
            closed store says; None where nothing does.
    """

    durable: int | None
    queued: int | None
    is_closed: bool
    dispatched_timestamp: int | None

    @property
    def likely_end(self) -> int | None:
        """About where the log ends; None where nothing tells."""
        return max(self.durable or 0, self.queued or 0) or None

    @property
    def least(self) -> int | None:
        """The log reached at least up to here."""
        queued = self.queued if self.is_closed else None
        return max((known for known in (self.durable, queued) if known is not None), default=None)


def find_bounds(
    layout: StoreLayout, queues: Iterable[ConsumeQueue], checkpoint: Checkpoint
) -> KnownBounds:
    """What is known of a log, by the marks that are there and its queues.

    Args:
        layout: the store's files.
        queues: the queues whose files can be used.
        checkpoint: as the store has it; all zeros without one.
    """
    entries = last_entries(layout, queues)
    return KnownBounds(
        durable=layout.durable_end,
        queued=entries[0].physical_offset + entries[0].size if entries else None,
        is_closed=not layout.has_abort,
        dispatched_timestamp=checkpoint.logics_timestamp or None,
    )


class Found(Protocol):
    """Frames one after the other that were found apart from the walk.

    Their bodies are what their CRCs say. Times are store times in milliseconds.
    """

    @property
    def start(self) -> int:
        """Physical offset of the first."""

    @property
    def end(self) -> int:
        """Physical offset behind the last."""

    @property
    def count(self) -> int:
        """How many."""

    @property
    def first_time(self) -> int:
        """Of the first."""

    @property
    def last_time(self) -> int:
        """Of the last."""


F = TypeVar("F", bound=Found)


class LogLook:
    """One walk over a log.

    Args:
        layout: the store's files.
        bounds: what is known of it.
        stop: no frame that starts at or beyond it is taken.
        is_live: whether somebody writes it meanwhile.

    Attributes:
        start: physical offset of the log's first byte.
        end: where the log ends; final once :meth:`runs` is through, as are the others.
        damage: bytes within the log that are no messages.
        last_timestamp: store time of the last message, 0 without one.
        count: messages that stand whole.
        words: what was seen, in words.
    """

    def __init__(
        self,
        layout: StoreLayout,
        bounds: KnownBounds,
        *,
        stop: int | None = None,
        is_live: bool = False,
    ) -> None:
        self.start = layout.commit_log.start
        self.end = self.start
        self.damage: list[DamagedSpan] = []
        self.last_timestamp = 0
        self.count = 0
        self.words: list[str] = []
        self._layout = layout
        self._bounds = bounds
        self._stop = stop
        self._is_live = is_live
        self._log = CommitLog(layout)

    def runs(self) -> Iterator[Run]:
        """The frames of the log in order, also those that only their body's CRC tells from sound.

        The latter have their places in queues, and keep them.
        """
        return self._runs(self._reader().events(stop=self._stop))

    def guided_runs(self, guesses: Iterable[F]) -> Iterator[Run | F]:
        """The same, some of them as others have found them, if it is all of the log. Not live."""
        assert not self._is_live
        return (
            self.runs() if self._stop is not None else self._runs(guided(self._reader(), guesses))
        )

    def _reader(self) -> LogReader:
        return LogReader(self._layout, live=self._is_live)

    def _runs(self, events: Iterable[Event | F]) -> Iterator[Run | F]:
        broken: list[DamagedSpan] = []
        for event in events:
            if isinstance(event, LogEnd):
                break
            if isinstance(event, ExpiredSpan):
                continue
            if isinstance(event, DamagedSpan):
                if not broken and self._ends_at(event.offset):
                    self.words.append(f"the log ends at {event.offset}: {event.reason}")
                    break
                broken.append(event)
                continue
            if broken and isinstance(event, BlankSpan):
                # It says nothing of what stands before it: the next frame does.
                broken.append(_lost_file(event))
                continue
            if broken:
                assert not isinstance(event, BlankSpan)
                stale = self._why_stale(event)
                if stale is not None:
                    # What the queues know of it is left over as well.
                    self.words.append(stale)
                    return
                yield from self._confirmed(broken)
                broken = []
            if isinstance(event, BlankSpan):
                if self._stands_for_file(event):
                    self.damage.append(_lost_file(event))
            else:
                # Not the latest: a clock that was set back would make all behind a break stale.
                self.last_timestamp = self._times(event)[1]
                self.count += len(event.rows) if isinstance(event, Run) else event.count
                yield event
            self.end = event.end
        yield from self._rest(broken)

    def _stands_for_file(self, blank: BlankSpan) -> bool:
        """Whether it was put there by a recovery: no writer leaves a file without a message."""
        file = self._layout.commit_log.at(blank.offset)
        return file is not None and file.base == blank.offset

    def _ends_at(self, offset: int) -> bool:
        least = self._bounds.least
        return least is not None and offset >= least

    def _why_stale(self, event: Run | Found) -> str | None:
        """Why what stands behind a break is no part of the log, None if it is."""
        bounds = self._bounds
        if event.start < (bounds.durable or 0):
            return None
        where = f"the log ends at {self.end}: what stands from {event.start} on"
        least = bounds.least
        if bounds.durable is None and least is not None and event.start >= least:
            return f"{where} is in no queue"
        stored, _ = self._times(event)
        if stored < self.last_timestamp:
            return f"{where} is older: an earlier recovery left it there"
        known = bounds.dispatched_timestamp
        # A checkpoint that does not even know what stands before the break is wrong.
        is_known = known is not None and known >= self.last_timestamp
        if bounds.is_closed and bounds.durable is None and is_known and stored > (known or 0):
            return f"{where} is newer than what the checkpoint knows to be dispatched"
        return None

    def _times(self, event: Run | Found) -> tuple[int, int]:
        """The store times of the first message and of the last."""
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
            self.end = max(self.end, span.offset + span.length)

    def _rest(self, broken: list[DamagedSpan]) -> Iterator[Run]:
        """What stands behind the last sound frame, as far as the log is known to have reached."""
        least = self._bounds.least
        if least is None or least <= self.end:
            if broken:
                self.words.append(f"the log ends at {self.end}: {broken[0].reason}")
            return
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
                f"the log was known to reach up to {least}, and nothing of it stands behind "
                f"{self.end}: {least - self.end} bytes are lost"
            )

    def _with_zeros(self, broken: list[DamagedSpan], least: int) -> list[DamagedSpan]:
        """The spans, and the zeros between and behind them: those were no zeros once.

        Without a durable mark only those of the files that have other bytes as well.
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
                kind, reason = DamageKind.ZEROED.label, "zeros, where something was written"
                found.append(DamagedSpan(end, until - end, kind, reason, path))
            nexts = [span.offset for span in here[1:]] + [stop]
            found += [
                dataclasses.replace(span, length=until - span.offset)
                for span, until in zip(here, nexts, strict=False)
            ]
            end = stop
        return found


def _lost_file(blank: BlankSpan) -> DamagedSpan:
    reason = "a blank stands for a file of the log that was lost"
    return DamagedSpan(blank.offset, blank.length, MISSING_FILE, reason, blank.path)


def framed(layout: StoreLayout, span: DamagedSpan) -> Iterator[Run]:
    """The frames of a damaged span whose framing is sound, from its start on."""
    files = layout.commit_log
    file = files.at(span.offset)
    if file is None or not file.size:
        return
    at = span.offset - file.base
    data = layout.open_file(file.path).window(at, span.length)[: span.length]
    window = Window.of(data, span.offset, files.file_size - at)
    rows = codec.empty_rows(max(1, span.length // FIXED_SIZE_V1 + 1))
    count, _, _ = codec.walk(window, 0, span.length, rows, check_crc=False)
    if count:
        yield Run(window, rows[:count], span.path)


def torn_end(layout: StoreLayout, bounds: KnownBounds) -> int | None:
    """The last message of the log, where it has zeros in place of its end, and nobody knows it.

    No CRC covers topic and properties. What comes of a master may end within them, and a crash
    leaves it so: with the zeros of its file behind it, it seems to be whole.

    Args:
        layout: the store's files.
        bounds: what is known of the log. What stands before its durable mark, or in a queue, was
            whole once.

    Returns:
        Its physical offset; None where there is none.
    """
    if bounds.durable is None or bounds.is_closed:
        return None
    last: Run | None = None
    known = max(bounds.durable, bounds.queued or 0)
    for event in LogReader(layout, check_crc=False).events(known):
        if isinstance(event, Run):
            last = event
        elif not isinstance(event, BlankSpan):
            break
    if last is None:
        return None
    at = int(last.rows[-1, POSITION])
    frame = last.window.decode(at, check_crc=False)
    assert isinstance(frame, Frame), "a row stands for a frame that was found sound"
    text = frame.properties or frame.topic
    return last.window.base + at if text.endswith(b"\0") else None


def made_whole(layout: StoreLayout, file: StoreFile, look: LogLook) -> int | None:
    """The message within which a file of the log ends, if zeros behind it would make it whole.

    No CRC covers properties: a message that has lost the end of them would be served without.

    Args:
        layout: the store's files.
        file: one that is too short.
        look: a walk over the log, which is through.

    Returns:
        Its physical offset; None where there is none.
    """
    stop, room = file.base + file.size, layout.commit_log.file_size
    spans = [span for span in look.damage if span.offset < stop <= span.offset + span.length]
    start = max(file.base, min([look.end, *(span.offset for span in spans)]))
    if start >= stop:
        return None
    data = layout.open_file(file.path).window(start - file.base, stop - start)[: stop - start]
    window = Window.of(bytes(data).ljust(file.base + room - start, b"\0"), start)
    at = 0
    while at < stop - start:
        at, code = codec.find_frame(window, at, stop - start, check_crc=True)
        if code != REACHED_STOP:
            return None
        _, after, _ = codec.walk(window, at, at + 1, codec.empty_rows(1), check_crc=False)
        if after > stop - start:
            return start + at
        at = after
    return None
