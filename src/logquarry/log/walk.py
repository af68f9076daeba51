"""The one walker over the log: frames, blanks, damage and the log's end, as values.

Reading, splits, verify and export all follow the log through :class:`LogReader`. It never raises
on damage: it says where it is, finds the next sound frame (resync: a frame names the place where
it stands) and goes on. What to do about damage is for the caller to decide.

Where the log ends: at the end of the unbroken chain, or at ``bound`` where that lies further on
and the store was closed in order. Sound frames beyond the end are stale, left over by an earlier
recovery: they are no messages. Without a bound (after a crash, or beside a live writer)
everything that certifies itself counts.

Where the bound does not lie beyond the durable mark (:mod:`logquarry.format.durable_mark`), any
break before it is damage within the log, and the log goes on from there for as long as its chain
does.

QUIRK: a break of the chain in the last file of a store that was closed in order is the log's end,
though the queues may name messages beyond it: RocketMQ's recovery cuts the log there, in memory
only, and what it leaves on disk is byte for byte what a sound store with that damage is.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from logquarry.format.frame import BLANK as BLANK_LAYOUT
from logquarry.format.frame import FIXED_SIZE_V1, DamageKind
from logquarry.format.rows import BLANK, NEED_MORE, REACHED_STOP, SIZE, TABLE_FULL
from logquarry.log import codec
from logquarry.log.codec import Rows, Window
from logquarry.log.filesystem import FileView, GoneFile
from logquarry.log.layout import StoreFile, StoreLayout

DEFAULT_BATCH_BYTES = 4 << 20
_SEARCH_BYTES = 1 << 20
_LEAST_ROWS = 1024
_TAIL_RETRIES = 3
_TAIL_RETRY_SECONDS = 0.01

MISSING_FILE = "missing_file"
"""Kind of a span for which there is no file."""
TORN_TAIL = "torn_tail"
"""Kind of the bytes after the last sound frame that are neither a frame nor zeros."""


@dataclass(frozen=True, slots=True)
class Run:
    """Frames one after the other, all in one window.

    Attributes:
        window: their bytes.
        rows: a row a frame (:mod:`logquarry.format.rows`).
        path: the file, for messages.
    """

    window: Window
    rows: Rows
    path: str

    @property
    def start(self) -> int:
        """Physical offset of the first frame."""
        return self.window.base + int(self.rows[0, 0])

    @property
    def end(self) -> int:
        """Physical offset behind the last frame."""
        return self.window.base + int(self.rows[-1, 0]) + int(self.rows[-1, SIZE])


@dataclass(frozen=True, slots=True)
class BlankSpan:
    """The blank that ends a file."""

    offset: int
    length: int
    path: str

    @property
    def end(self) -> int:
        """Physical offset behind it."""
        return self.offset + self.length


@dataclass(frozen=True, slots=True)
class DamagedSpan:
    """Bytes within the log that are no frames.

    Attributes:
        offset: physical offset of the first.
        length: how many, up to the next sound frame or the log's end. No span goes on beyond the
            end of its file: what begins a file is judged anew, by whoever reads from there.
        kind: a :class:`DamageKind` label, MISSING_FILE or TORN_TAIL.
        reason: in words.
        path: the file.
        ends_log: whether the log ends here, although the queues name messages further on.
    """

    offset: int
    length: int
    kind: str
    reason: str
    path: str
    ends_log: bool = False

    @property
    def is_tail(self) -> bool:
        """Whether this is a torn tail: nothing sound comes after it."""
        return self.kind == TORN_TAIL


@dataclass(frozen=True, slots=True)
class LogEnd:
    """The log ends at this physical offset."""

    offset: int


@dataclass(frozen=True, slots=True)
class ExpiredSpan:
    """A stretch of the log that a live broker deleted while it was read: no damage."""

    offset: int
    length: int


Event = Run | BlankSpan | DamagedSpan | ExpiredSpan | LogEnd


@dataclass(frozen=True, slots=True)
class _OpenFile:
    file: StoreFile
    view: FileView


class LogReader:
    """Walks the commit log of a store.

    Args:
        layout: the store's files.
        bound: offset below which the log is known to reach (largest end of a queued message of a
            store that was closed in order); None where nothing bounds it.
        check_crc: whether bodies are compared with their CRC.
        batch_bytes: bytes of frames in one :class:`Run`, about.
        live: whether a writer is at work: a torn tail is then looked at again before it is told.
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
        self.layout = layout
        self.files = layout.commit_log
        self.bound = bound
        self.check_crc = check_crc
        self.batch_bytes = max(1, batch_bytes)
        self.live = live
        self._open_file: _OpenFile | None = None
        durable = None if bound is None else layout.durable_end
        self._is_durable = bound is not None and durable is not None and bound <= durable
        self._searched: tuple[int, int | None] | None = None
        self._rows_hint = _LEAST_ROWS

    # ------------------------------------------------------------------------------ whole log
    def events(
        self, start: int | None = None, stop: int | None = None, *, resync: bool = False
    ) -> Iterator[Event]:
        """Everything from ``start`` to the log's end, in physical order.

        Args:
            start: where to begin (default: the first file); a frame must start there.
            stop: no frame that starts at or beyond it is taken.
            resync: ``start`` may lie anywhere; the first sound frame or file from it on begins
                the walk, and what lies before that is passed over in silence.

        The last event is a :class:`LogEnd`, unless ``stop`` comes first. A range that ends within
        a file still tells of damage or a blank right behind its last frame, so that of two
        neighbouring ranges exactly one tells of it: each owns the frames that start in it, and
        what follows them up to the next frame or file.
        """
        position = self.files.start if start is None else max(start, self.files.start)
        if resync and not self._begins_stretch(position):
            limit = self.files.end if stop is None else stop
            here = min(self._stretch_end(position), limit)
            found = self._find(position, here)
            if found is None and here >= limit:
                return
            position = here if found is None else found
        broken = False
        torn: int | None = None
        while stop is None or position < stop:
            if broken and self.bound is not None and position >= self.bound:
                yield LogEnd(position)
                return
            event, position = self._step(position, stop if not broken else self._cap(stop))
            if event is None:
                continue
            if isinstance(event, LogEnd):
                yield event if torn is None else LogEnd(torn)
                return
            yield event
            if isinstance(event, DamagedSpan):
                broken = not self._is_durable
                if event.ends_log:
                    yield LogEnd(event.offset)
                    return
                if event.is_tail and torn is None:
                    # Other files may hold more such bytes, and no frame.
                    torn = event.offset
        yield from self._behind(position)

    def chain(self, start: int) -> Iterator[Run | BlankSpan]:
        """The frames and blanks from ``start`` up to the first place that is neither."""
        position = start
        while True:
            event, position = self._step(position, None, look_ahead=False)
            if isinstance(event, Run | BlankSpan):
                yield event
            elif event is not None:
                return

    def data_end(self, start: int, stop: int | None = None) -> int:
        """One past the last byte that is not zero, ``start`` if all are.

        Args:
            start: physical offset of the first byte that is looked at.
            stop: where to stop (default: behind the last file).
        """
        last = start
        for file in self.files.files:
            if file.base + self.files.file_size <= start:
                continue
            if stop is not None and file.base >= stop:
                break
            at = max(0, start - file.base)
            end_at = min(self._size(file), self.files.file_size)
            if stop is not None:
                end_at = min(end_at, stop - file.base)
            view = self._view(file)
            while at < end_at:
                at = view.next_data(at)
                if at >= end_at:
                    break
                window = self._window(file, at, _SEARCH_BYTES)
                piece = min(window.length, end_at - at, _SEARCH_BYTES)
                end = codec.last_nonzero(window, 0, piece)
                if end:
                    last = max(last, file.base + at + end)
                at += piece
        return last

    @property
    def forgets_damage(self) -> bool:
        """Whether what is said of a place never depends on damage before it, a torn tail aside."""
        return self.bound is None or self._is_durable

    def find(self, start: int, stop: int) -> int | None:
        """The first sound frame, or file that begins with a blank, between two offsets."""
        return self._find(start, stop)

    def window(self, offset: int, length: int) -> Window:
        """Bytes of the log from an offset on, up to the end of their file at most.

        Raises:
            ValueError: if there is no file for that offset.
        """
        file = self.files.at(offset)
        if file is None:
            raise ValueError(f"{self.layout.root}: no file of the log holds offset {offset}")
        return self._window(file, offset - file.base, length)

    def _cap(self, limit: int | None) -> int | None:
        if self.bound is None:
            return limit
        return self.bound if limit is None else min(limit, self.bound)

    def _behind(self, position: int) -> Iterator[Event]:
        """Damage or a blank where a range ends; the next range resyncs over it in silence."""
        if self._begins_stretch(position) or position >= self.files.end:
            return
        if self.bound is not None and position >= self.bound:
            return
        event, _ = self._step(position, position + 1)
        if isinstance(event, DamagedSpan | BlankSpan):
            yield event

    def _begins_stretch(self, offset: int) -> bool:
        """Whether a file begins here, or a gap between two."""
        file = self.files.at(offset)
        if file is not None:
            return file.base == offset
        return self.files.at(offset - 1) is not None

    # ------------------------------------------------------------------------------- one step
    def _step(
        self, position: int, limit: int | None, *, look_ahead: bool = True
    ) -> tuple[Event | None, int]:
        """What stands at ``position``, and where to go on.

        Without ``look_ahead`` the end of the chain comes as a LogEnd, whatever follows it.
        """
        file = self.files.at(position)
        if file is not None and self._is_expired(file):
            after = file.base + self.files.file_size
            return ExpiredSpan(position, after - position), after
        if file is None or position - file.base >= self._size(file):
            return self._broken(position, self._missing_reason(file), look_ahead=look_ahead)
        at = position - file.base
        rows = codec.empty_rows(self._rows_hint)
        end = self.files.file_size
        stop = min(end, at + self.batch_bytes)
        if limit is not None:
            stop = min(stop, limit - file.base)
        window = self._window(file, at, min(stop - at + FIXED_SIZE_V1, self.batch_bytes))
        shift = window.base - file.base
        count, after, code = codec.walk(
            window, at - shift, stop - shift, rows, check_crc=self.check_crc
        )
        if count == 0 and code == NEED_MORE:
            window, code = self._grown(file, at)
            if code == NEED_MORE:
                why = (DamageKind.TRUNCATED.label, "the file ends early")
                return self._broken(position, why, look_ahead=look_ahead)
            shift = window.base - file.base
            count, after, code = codec.walk(
                window, at - shift, stop - shift, rows, check_crc=self.check_crc
            )
        if count:
            # Frames of a log are much alike: room for a quarter more than the last run had.
            self._rows_hint = max(_LEAST_ROWS, count * 2 if code == TABLE_FULL else count * 5 // 4)
            run = Run(window, rows[:count], self.layout.filesystem.full_path(file.path))
            return run, window.base + after
        if code == BLANK:
            length = end - at
            path = self.layout.filesystem.full_path(file.path)
            return BlankSpan(position, length, path), file.base + end
        if code in (REACHED_STOP, TABLE_FULL):
            return None, position
        kind = DamageKind(code)
        if kind is DamageKind.TRUNCATED and end - at == 0:
            return None, file.base + end
        reason = codec.damage_reason(window, at - shift, check_crc=self.check_crc)
        return self._broken(position, (kind.label, reason), look_ahead=look_ahead)

    def _is_expired(self, file: StoreFile) -> bool:
        """Whether a file went, and all before it: retention deletes from the start."""
        if not file.size or not isinstance(self._view(file), GoneFile):
            return False
        left = self.layout.list_commit_log()
        return bool(left) and left[0].base > file.base

    def _missing_reason(self, file: StoreFile | None) -> tuple[str, str]:
        if file is not None and file.size and isinstance(self._view(file), GoneFile):
            return MISSING_FILE, "the file was deleted while the log was read"
        if file is not None and (size := self._size(file)):
            return (
                DamageKind.TRUNCATED.label,
                f"the file ends after {size} of {self.files.file_size} bytes",
            )
        return MISSING_FILE, "there is no file for this part of the log"

    def _broken(
        self, position: int, why: tuple[str, str], *, look_ahead: bool = True
    ) -> tuple[Event, int]:
        """The chain ends at ``position``: is it the log's end, or damage within the log?"""
        if not look_ahead:
            return LogEnd(position), position
        if self.bound is not None and position >= self.bound:
            return LogEnd(position), position
        kind, reason = why
        path = self._path_at(position)
        if self.bound is not None and not self._is_durable and not self._goes_on(position):
            length = self.bound - position
            return DamagedSpan(position, length, kind, reason, path, ends_log=True), position
        found = self._next_sound(position + 1)
        if self.live and found is not None and self._is_whole(position):
            # It was being written when it was looked at, and frames behind it were since.
            event, after = self._step(position, None)
            if event is not None:
                return event, after
        here = self._stretch_end(position)
        if found is not None:
            after = min(found, here)
            return DamagedSpan(position, after - position, kind, reason, path), after
        if self.bound is not None:
            if here < min(self.bound, self.files.end):
                return DamagedSpan(position, here - position, kind, reason, path), here
            length = self.bound - position
            if self._is_durable:
                return DamagedSpan(position, length, kind, reason, path), self.bound
            return DamagedSpan(position, length, kind, reason, path, ends_log=True), position
        if self.data_end(position) <= position:
            # Nothing was begun there: no writer to wait for.
            return LogEnd(position), position
        if self.live and self._heals(position):
            event, after = self._step(position, None)
            if event is not None:
                return event, after
        last = min(self.data_end(position), here)
        if kind == DamageKind.ZEROED.label:
            reason = "zeros, and then bytes that are no frame"
        else:
            reason = f"{kind}: {reason}"
        return DamagedSpan(position, last - position, TORN_TAIL, reason, path), last

    def _heals(self, position: int) -> bool:
        """Whether a frame that a live writer is writing right now becomes whole."""
        for _ in range(_TAIL_RETRIES):
            time.sleep(_TAIL_RETRY_SECONDS)
            if self._is_whole(position):
                return True
        return False

    def _is_whole(self, position: int) -> bool:
        """Whether a frame that is whole, or a blank, stands at ``position`` now."""
        file = self.files.at(position)
        if file is None or file.size == 0:
            return False
        _, code = self._grown(file, position - file.base)
        return code in (REACHED_STOP, BLANK)

    def _goes_on(self, position: int) -> bool:
        """Whether a file behind the one of ``position`` holds anything of the log.

        One that begins with zeros was only made in advance.
        """
        size = BLANK_LAYOUT.size
        for file in reversed(self.files.files):
            if file.base <= position:
                return False
            if file.size >= size and any(self._view(file).window(0, size)[:size]):
                return True
        return False

    def _next_sound(self, start: int) -> int | None:
        """The first place from ``start`` on where a sound frame or a file with a blank begins."""
        if self._searched is not None:
            begun, found = self._searched
            if begun <= start and (found is None or start <= found):
                return found
        limit = self.files.end if self.bound is None else min(self.bound, self.files.end)
        found = self._find(start, limit)
        # Several files without any frame are not searched again for each of them.
        self._searched = None if self.live else (start, found)
        return found

    def _stretch_end(self, position: int) -> int:
        """Where the file of ``position`` ends, or the gap between two."""
        file = self.files.at(position)
        if file is not None:
            return file.base + self.files.file_size
        return next((f.base for f in self.files.files if f.base > position), self.files.end)

    def _path_at(self, position: int) -> str:
        file = self.files.at(position)
        return self.layout.filesystem.full_path(file.path if file else "commitlog")

    # ---------------------------------------------------------------------------- bytes and files
    def _view(self, file: StoreFile) -> FileView:
        if self._open_file is None or self._open_file.file is not file:
            # One map at a time; earlier ones live as long as somebody holds a window of theirs.
            try:
                view = self.layout.open_file(file.path)
            except FileNotFoundError:
                # A live broker deletes what expired, also between a listing and a look.
                view = GoneFile(self.layout.filesystem.full_path(file.path))
            self._open_file = _OpenFile(file, view)
        return self._open_file.view

    def _size(self, file: StoreFile) -> int:
        """Bytes that the file has still."""
        return min(file.size, self._view(file).size) if file.size else 0

    def _window(self, file: StoreFile, at: int, length: int) -> Window:
        data = self._view(file).window(at, length)
        # Beyond its room a file holds nothing of the log.
        data = data[: max(0, self.files.file_size - at)]
        return Window.of(data, file.base + at, self.files.file_size - at)

    def _grown(self, file: StoreFile, at: int) -> tuple[Window, int]:
        """A window that holds the whole frame at ``at``, and the verdict on it."""
        window = self._window(file, at, FIXED_SIZE_V1)
        size = 0
        if window.length >= BLANK_LAYOUT.size:
            size, _ = BLANK_LAYOUT.struct.unpack_from(window.data.data, 0)
        window = self._window(file, at, max(FIXED_SIZE_V1, min(size, self.files.file_size - at)))
        _, _, code = codec.walk(window, 0, 1, codec.empty_rows(1), check_crc=self.check_crc)
        return window, code

    def _find(self, start: int, limit: int) -> int | None:
        """The first sound frame or blank-started file in ``[start, limit)``: resync."""
        for index, file in enumerate(self.files.files):
            if file.base + self.files.file_size <= start or self._size(file) == 0:
                continue
            if file.base >= limit:
                break
            at = max(0, start - file.base)
            if at == 0 and index and self._starts_with_blank(file):
                return file.base
            found = self._find_in(file, at, min(limit - file.base, self._size(file)))
            if found is not None:
                return file.base + found
        return None

    def _starts_with_blank(self, file: StoreFile) -> bool:
        _, code = self._grown(file, 0)
        return code == BLANK

    def _find_in(self, file: StoreFile, at: int, stop: int) -> int | None:
        view = self._view(file)
        while at < stop:
            # Back by the bytes of a head that may end in a hole: it has zeros of its own.
            data = view.next_data(at)
            if data >= stop:
                return None
            at = max(at, data - FIXED_SIZE_V1)
            window = self._window(file, at, min(stop - at + FIXED_SIZE_V1, self.batch_bytes))
            # A piece at a time, so that holes further on are skipped too.
            piece = min(stop - at, _SEARCH_BYTES)
            place, code = codec.find_frame(window, 0, piece, check_crc=self.check_crc)
            if code == REACHED_STOP:
                return at + place
            if code != NEED_MORE:
                at += piece
                continue
            if window.length == self._view(file).size - at:
                # All of the file is in the window: what goes on beyond it is not there.
                at += place + 1
                continue
            if place == 0:
                window, code = self._grown(file, at)
                if code == REACHED_STOP:
                    return at
                at += 1
            else:
                at += place
        return None
