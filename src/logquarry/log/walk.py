"""Walks over the log, and reports frames, blanks, damage and the log's end as events.

If the walk finds bytes that are no valid frame, it searches for the next sound frame (resync).
If the walk finds a sound frame that belongs to the log, the bytes before this frame are damage, and
the walk continues at this frame. If there is no such frame, the bytes are a torn tail or stale
frames, and the log ends. Reads and verify decide in this way. A recovery decides by the rules in
:mod:`logquarry.repair.audit.log`. The search can recognize a frame, because each frame contains its
own physical offset.

Frames and blanks that follow each other without other bytes between them form a chain. ``bound`` is
an offset up to which the log is known to reach. After a clean shutdown, the log ends at the first
break of the chain at or after ``bound``, and sound frames after the end are stale. There is no
bound if a writer has the store open, or if the store crashed and has no durable offset
(:mod:`logquarry.format.checkpoint`). Then all sound frames belong to the log.

A break of the chain before the bound is damage inside the log in two cases: the durable offset is
at or above the bound, or the store crashed.

QUIRK: in the last file of a store that was shut down cleanly, a break of the chain is the log's
end, even if queue entries point to messages after the break. At such a break, RocketMQ's recovery
truncates the log only in memory: the later frames stay in the file. So the files do not show
whether RocketMQ has truncated the log, or the frame was damaged later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from logquarry.format.arrays import BLANK, NEED_MORE, REACHED_STOP, SIZE, TABLE_FULL
from logquarry.format.frame import BLANK as BLANK_LAYOUT
from logquarry.format.frame import FIXED_SIZE_V1, DamageKind
from logquarry.log import codec
from logquarry.log.filesystem import FileView, GoneFile
from logquarry.log.layout import StoreLayout
from logquarry.log.open_files import LogBytes
from logquarry.log.readable import UNREADABLE, Unreadable
from logquarry.log.store_files import StoreFile
from logquarry.text import document

DEFAULT_BATCH_BYTES = 4 << 20
_LEAST_ROWS = 1024
_TAIL_RETRIES = 3
_TAIL_RETRY_SECONDS = 0.01

MISSING_FILE = "missing_file"
NO_FILE = "there is no file for this part of the log"
"""Kind of damage: a part of the log has no file."""
TORN_TAIL = "torn_tail"
"""Kind of damage: bytes after the last sound frame that are neither a frame nor zeros."""


def _is_end(span: DamagedSpan) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive frames in one window.

    Attributes:
        rows: one row per frame (:mod:`logquarry.format.arrays`).
        view: the view of the mapped file, whose pages can be lost; None if the window is a copy.
        base: physical offset of the file's first byte.
        on_lost: called with a span of damage for each frame that became unreadable after the walk
            had checked it. The function returns whether the read continues without the frame.
    """

    window: codec.Window
    rows: codec.Rows
    path: str
    view: FileView | None = None
    base: int = 0
    on_lost: Callable[[DamagedSpan], bool] = _is_end

    @property
    def start(self) -> int:
        """Physical offset of the first frame."""
        return self.window.base + int(self.rows[0, 0])

    @property
    def end(self) -> int:
        """Physical offset after the last frame."""
        return self.window.base + int(self.rows[-1, 0]) + int(self.rows[-1, SIZE])


@dataclass(frozen=True, slots=True)
class Span:
    """A range of the log: the physical offset of its first byte, and its number of bytes."""

    offset: int
    length: int

    @property
    def end(self) -> int:
        """Physical offset after the range."""
        return self.offset + self.length


@dataclass(frozen=True, slots=True)
class BlankSpan(Span):
    """The blank that ends a file."""

    path: str


@dataclass(frozen=True, slots=True)
class DamagedSpan(Span):
    """Bytes within the log that are not frames.

    Attributes:
        length: bytes up to the next sound frame, the file's end or the log's end.
        kind: a :class:`DamageKind` label, MISSING_FILE or TORN_TAIL.
        ends_log: whether the log ends at this damage, although queue entries point to later
            messages.
    """

    kind: str
    reason: str
    path: str
    ends_log: bool = False

    @property
    def is_cut(self) -> bool:
        """Whether RocketMQ may have truncated the log at this damage; False if the bytes are
        unreadable.
        """
        return self.kind != UNREADABLE

    @property
    def is_tail(self) -> bool:
        """Whether the damage is a torn tail: no sound frame follows it."""
        return self.kind == TORN_TAIL

    def to_json(self) -> dict[str, object]:
        """Return the object that docs/json.md describes."""
        return {"file": self.path, **document(self, ("offset", "length", "kind", "reason"))}


@dataclass(frozen=True, slots=True)
class LogEnd:
    """The log ends at this physical offset."""

    offset: int


@dataclass(frozen=True, slots=True)
class ExpiredSpan(Span):
    """A part of the log that a live broker deleted during the read. This is no damage."""


Event = Run | BlankSpan | DamagedSpan | ExpiredSpan | LogEnd


class LogReader(LogBytes):
    """Walks the commit log of a store.

    Args:
        bound: offset up to which the log is known to reach; None if unknown. In a store that was
            shut down cleanly, the bound is usually the largest end of a message that a queue entry
            points to.
        live: whether a writer has the store open. The walk then reads a torn tail again, because
            the writer may complete it.
    """

    def __init__(
        self,
        layout: StoreLayout,
        *,
        bound: int | None = None,
        check_crc: bool = True,
        batch_bytes: int = DEFAULT_BATCH_BYTES,
        live: bool = False,
    ) -> None:
        super().__init__(layout, check_crc=check_crc, batch_bytes=batch_bytes)
        self.bound = bound
        self.live = live
        self._is_sure = layout.is_sure_of(bound)
        self._searched: tuple[int, int | None] | None = None
        self._rows_hint = _LEAST_ROWS

    # ------------------------------------------------------------------------------ whole log
    def events(
        self, start: int | None = None, stop: int | None = None, *, resync: bool = False
    ) -> Iterator[Event]:
        """Walk from ``start`` to the log's end, in physical order.

        The last event is a :class:`LogEnd`, unless the walk reaches ``stop`` first. A walk over a
        range reports the frames that start in the range, and the damage or blank after each frame,
        even at the range's end. So of two walks over neighbouring ranges, only the first reports
        damage between them.

        A frame must begin at ``start``. With ``resync``, the walk begins at the next sound frame or
        file, and reports no event for the bytes between ``start`` and that position.
        """
        position = self.files.start if start is None else max(start, self.files.start)
        if resync and not self.is_boundary(position):
            limit = self.files.end if stop is None else stop
            here = min(self.files.next_boundary(position), self.files.end, limit)
            found = self.find(position, here)
            if found is None and here >= limit:
                return
            position = here if found is None else found
        torn: int | None = None
        while stop is None or position < stop:
            event, position = self._step(position, stop)
            if event is None:
                continue
            if isinstance(event, LogEnd):
                yield event if torn is None else LogEnd(torn)
                return
            yield event
            if isinstance(event, DamagedSpan):
                if event.ends_log:
                    yield LogEnd(event.offset)
                    return
                if event.is_tail and torn is None:
                    # The log ends here, because no sound frame follows. The walk still continues,
                    # because it must also report damaged data in the files after the torn tail.
                    torn = event.offset
        yield from self._behind(position)

    def chain(self, start: int) -> Iterator[Run | BlankSpan]:
        """Yield frames and blanks from ``start`` on, until neither a frame nor a blank follows."""
        position = start
        while True:
            event, position = self._step(position, None, look_ahead=False)
            if isinstance(event, Run | BlankSpan):
                yield event
            elif event is not None:
                return

    def chain_end(self, start: int) -> int:
        """Return the offset after the last frame or blank of :meth:`chain`; ``start`` if neither
        starts there.
        """
        end = start
        for event in self.chain(start):
            end = event.end
        return end

    def fault(self, offset: int, length: int) -> Unreadable | None:
        """Return the first unreadable range that overlaps a range of one log file."""
        file = self.files.at(offset)
        return None if file is None else self.fault_in(file, offset - file.base, length)

    def window(self, offset: int, length: int) -> codec.Window:
        """Return ``length`` bytes or more of the log from an offset on, but none after the end of
        the file that contains the offset.
        """
        file = self.files.at(offset)
        if file is None:
            raise ValueError(f"{self.layout.root}: no file of the log has offset {offset}")
        return self.window_of(file, offset - file.base, length)

    def _behind(self, position: int) -> Iterator[Event]:
        """Yield the damage or blank that begins at a range's end. A walk over the next range does
        not report it.
        """
        if self.is_boundary(position) or position >= self.files.end:
            return
        if self.bound is not None and position >= self.bound:
            return
        event, _ = self._step(position, position + 1)
        if isinstance(event, DamagedSpan | BlankSpan):
            yield event

    # ------------------------------------------------------------------------------- one step
    def _step(
        self, position: int, limit: int | None, *, look_ahead: bool = True
    ) -> tuple[Event | None, int]:
        """Read one event. Return the event and the position after it.

        Without ``look_ahead``, the event at the first break of the chain is always a LogEnd. The
        bytes after the break are not read.
        """

        def broken(kind: str, reason: str) -> tuple[Event, int]:
            return self._broken(position, kind, reason, look_ahead=look_ahead)

        file = self.files.at(position)
        if file is not None and self._is_expired(file):
            after = file.base + self.files.file_size
            return ExpiredSpan(position, after - position), after
        if file is None or position - file.base >= self.size(file):
            kind, reason = self._missing_reason(file)
            if file is None or not file.size:
                reason = self.layout.why_no_log_file(self.layout.log_file(position)) or reason
            return broken(kind, reason)
        at, path = position - file.base, self.layout.filesystem.full_path(file.path)
        rows = codec.empty_rows(self._rows_hint)
        end = self.files.file_size
        stop = min(end, at + self.batch_bytes)
        if limit is not None:
            stop = min(stop, limit - file.base)
        window = self.window_of(file, at, min(stop - at + FIXED_SIZE_V1, self.batch_bytes))
        count, after, code = codec.walk(window, 0, stop - at, rows, check_crc=self.check_crc)
        if count == 0 and code == NEED_MORE:
            window, code = self.whole_frame(file, at)
            if code == NEED_MORE:
                return broken(DamageKind.TRUNCATED.label, "the file ends early")
            count, after, code = codec.walk(window, 0, stop - at, rows, check_crc=self.check_crc)
        if count and (fault := self.fault_in(file, at, after)) is not None:
            ends = rows[:count, 0] + rows[:count, SIZE]
            count = int(np.searchsorted(ends, fault.offset - at, "right"))
            after = int(ends[count - 1]) if count else after
            if not count:
                return broken(UNREADABLE, fault.words)
        if count:
            # The next window will have about as many frames as this window. So make its table a
            # quarter larger than this window needs.
            self._rows_hint = max(_LEAST_ROWS, count * 2 if code == TABLE_FULL else count * 5 // 4)
            view = self.view(file)
            mapped = view if view.is_mapped else None
            return Run(window, rows[:count], path, mapped, file.base), window.base + after
        if code == BLANK:
            return BlankSpan(position, end - at, path), file.base + end
        if code in (REACHED_STOP, TABLE_FULL):
            # In a DLedger log, a head precedes each frame, so the limit may lie between the start
            # of the head and the start of the frame.
            is_limit = limit is not None and stop == limit - file.base
            return None, max(limit or 0, window.base + after) if is_limit else position
        damage = DamageKind(code)
        if damage is DamageKind.TRUNCATED and end - at == 0:
            return None, file.base + end
        if (fault := self.frame_fault(file, at)) is not None:
            return broken(UNREADABLE, fault.words)
        reason = codec.damage_reason(window, 0, check_crc=self.check_crc)
        return broken(damage.label, reason)

    def _is_expired(self, file: StoreFile) -> bool:
        """Whether retention deleted the file during the walk. The result is True only if all files
        before this file are deleted too, because retention deletes the oldest files first.
        """
        if not file.size or not isinstance(self.view(file), GoneFile):
            return False
        left = self.layout.list_commit_log()
        return bool(left) and left[0].base > file.base

    def _missing_reason(self, file: StoreFile | None) -> tuple[str, str]:
        if file is not None and file.size and isinstance(self.view(file), GoneFile):
            return MISSING_FILE, "the file was deleted while the log was read"
        if file is not None and (size := self.size(file)):
            return (
                DamageKind.TRUNCATED.label,
                f"the file ends after {size} of {self.files.file_size} bytes",
            )
        return MISSING_FILE, NO_FILE

    def _broken(
        self, position: int, kind: str, reason: str, *, look_ahead: bool
    ) -> tuple[Event, int]:
        """Determine whether the break of the chain at ``position`` is the log's end or damage."""
        if not look_ahead or (self.bound is not None and position >= self.bound):
            return LogEnd(position), position
        path = self.layout.log_path(position)

        def damage(end: int, *, ends_log: bool = False) -> tuple[Event, int]:
            found = DamagedSpan(position, end - position, kind, reason, path, ends_log)
            return found, position if ends_log else end

        # RocketMQ's recovery truncates the log only at a frame that RocketMQ can read.
        is_cut = kind != UNREADABLE and not self._is_sure
        if self.bound is not None and is_cut and not self._goes_on(position):
            return damage(self.bound, ends_log=True)
        found = self._next_sound(position + 1)
        # Do not read unreadable bytes again, because the page cache may deliver them later,
        # although the disk fails.
        may_heal = self.live and kind != UNREADABLE
        if may_heal and found is not None and (healed := self._healed(position)) is not None:
            return healed
        here = self.files.next_boundary(position)
        if found is not None:
            return damage(min(found, here))
        if self.bound is not None:
            if here < min(self.bound, self.files.end):
                return damage(here)
            return damage(self.bound, ends_log=is_cut)
        if self.live and (lost := self._synced_after(position)):
            if (healed := self._healed(position)) is not None:
                return healed
            return damage(min(position + lost, here))
        if self.data_end(position) <= position:
            # Only zeros follow the position, so this is the end of the log, not the torn start of a
            # frame.
            return LogEnd(position), position
        if may_heal and (healed := self._healed(position, retries=_TAIL_RETRIES)) is not None:
            return healed
        last = min(self.data_end(position), here)
        if kind == UNREADABLE:
            return damage(last)
        if kind == DamageKind.ZEROED.label:
            reason = "zeros, and then bytes that are not a frame"
        else:
            reason = f"{kind}: {reason}"
        return DamagedSpan(position, last - position, TORN_TAIL, reason, path), last

    def _synced_after(self, position: int) -> int:
        """Return the number of bytes from a position to the durable offset.

        These bytes were synced, and are missing now. If the writer has just created the file at the
        position, no byte is missing.
        """
        durable = self.layout.durable_end
        if durable is None or durable <= position:
            return 0
        listed = self.files.at(position)
        if listed is None or listed.size < self.files.file_size:
            # The file may be missing only because the writer created it after the listing. Then no
            # bytes are lost.
            now = {file.base: file.size for file in self.layout.list_commit_log()}
            if now.get(position - position % self.files.file_size, 0) >= self.files.file_size:
                return 0
        return durable - position

    def _healed(self, position: int, *, retries: int = 0) -> tuple[Event, int] | None:
        """Read the event at a position again. Return None if the writer has not completed the frame
        at this position since the first read.
        """
        for number in range(retries + 1):
            if number:
                time.sleep(_TAIL_RETRY_SECONDS)
            if self._is_whole(position):
                event, after = self._step(position, None)
                return None if event is None else (event, after)
        return None

    def _is_whole(self, position: int) -> bool:
        file = self.files.at(position)
        if file is None or file.size == 0:
            return False
        self.forget_copies(file)
        _, code = self.whole_frame(file, position - file.base)
        return code in (REACHED_STOP, BLANK)

    def _goes_on(self, position: int) -> bool:
        """Whether a later file has data. A file whose first bytes are zeros has no data yet."""
        size = BLANK_LAYOUT.size
        for file in reversed(self.files.files):
            if file.base <= position:
                return False
            if file.size >= size and any(self.view(file).window(0, size)[:size]):
                return True
        return False

    def _next_sound(self, start: int) -> int | None:
        """Return the offset of the first sound frame, or of the first file that begins with a
        blank.
        """
        if self._searched is not None:
            begun, found = self._searched
            if begun <= start and (found is None or start <= found):
                return found
        limit = self.files.end if self.bound is None else min(self.bound, self.files.end)
        found = self.find(start, limit)
        # Keep the result, so that a search over several damaged files runs only once.
        self._searched = None if self.live else (start, found)
        return found
