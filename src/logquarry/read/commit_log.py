"""The commit log, read at single places: one message, one frame, its first and last offset.

Whoever wants many messages follows :class:`logquarry.log.walk.LogReader` instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np

from logquarry.disk.open_files import OpenFiles
from logquarry.errors import CorruptFrame, MessageNotFound
from logquarry.format import frame
from logquarry.format.frame import Blank, Damage, DamageKind, Frame, Outcome
from logquarry.format.queue_entry import QueueEntry
from logquarry.log.layout import FileSequence, StoreLayout
from logquarry.read.log_end import last_file_start, sound_bound

if TYPE_CHECKING:
    from logquarry.log.walk import LogReader


logger = logging.getLogger(__name__)

_MAGICS: Final = (frame.MAGIC_V1, frame.MAGIC_V2)
_LONGEST_PLAIN_WALK: Final = 256
"""Frames that are followed one by one before the kernels, which take a moment to load, do it."""
_ZEROS_CHUNK: Final = 8 << 20
_NO_TIME: Final = -1
_NO_BYTES: Final = memoryview(b"")


class CommitLog:
    """The log of a store (``CommitLog``). Physical offsets throughout.

    Args:
        layout: the store's files.
        files: what reads them (default: an own one).
        last_entries: gives the last unit of each queue, the furthest first
            (:func:`logquarry.read.log_end.last_entries`). Only asked for the log's end.
    """

    def __init__(
        self,
        layout: StoreLayout,
        *,
        files: OpenFiles | None = None,
        last_entries: Callable[[], Sequence[QueueEntry]] = tuple,
    ) -> None:
        self._layout = layout
        self._reader = files or OpenFiles(layout)
        self._last_entries = last_entries
        # Bytes at hand, most likely those that are asked for next: offset, end, bytes.
        self._hot = (0, 0, _NO_BYTES)

    def refresh(self) -> None:
        """Look again at the files: a live writer appends and adds some, retention deletes some."""
        for name in ("files", "max_offset"):
            self.__dict__.pop(name, None)
        self._hot = (0, 0, _NO_BYTES)

    @cached_property
    def files(self) -> FileSequence:
        """The files of the log."""
        return self._layout.commit_log

    @property
    def min_offset(self) -> int:
        """Where the first file starts; 0 without files."""
        return self.files.start

    @cached_property
    def max_offset(self) -> int:
        """Where the log ends: the end of its last message, or of the blank behind it.

        Found from the message that the queues know to be the last, not by reading the log: what
        damage there is before it is not seen. Only where that message is not there is the last
        file read, and without queues the whole log.
        """
        if not self.files.files:
            return 0
        durable = self._layout.durable_end
        if durable is not None:
            position = self._follow(min(durable, self.files.end))
            if isinstance(self.outcome_at(position), Damage):
                return position
            return self._walked_end(position, durable)
        entries = self._last_entries()
        if not entries or self._layout.has_abort:
            points = (end for entry in entries if (end := self._chain_point(entry)) is not None)
            position = self._follow(next(points, self.min_offset))
            if self._only_zeros_from(position):
                return position
            return self._walked_end(position, None)
        bound = entries[0].physical_offset + entries[0].size
        if self._chain_point(entries[0]) is not None:
            position = self._follow(bound)
            if isinstance(self.outcome_at(position), Damage):
                return position
            return self._walked_end(position, bound)
        start = last_file_start(self._layout)
        return self._walked_end(
            self.min_offset if start is None else start, sound_bound(self._layout, bound)
        )

    # ----------------------------------------------------------------------------- single frames
    def frame_at(self, offset: int, size: int) -> memoryview | None:
        """The ``size`` bytes from an offset, None if they are not in one file (``getMessage``).

        QUIRK: for offset 0 Java answers with the first file's start where file 0 is deleted. Here
        what is deleted is not there.
        """
        start, end, data = self.window_at(offset, size)
        if size <= 0 or offset < start or offset + size > end:
            return None
        return data[offset - start : offset - start + size]

    def window_at(self, offset: int, size: int) -> tuple[int, int, memoryview]:
        """The bytes at hand around ``size`` bytes from an offset: start, end, and the bytes.

        Not all of those that were asked for need be there.
        """
        hot = self._hot
        if not (hot[0] <= offset and offset + size <= hot[1]):
            file = self.files.at(offset)
            if file is None:
                return 0, 0, _NO_BYTES
            position, data = self._reader.window(file.path, offset - file.base, size)
            # Beyond its room a file holds nothing of the log.
            data = data[: max(0, self.files.file_size - position)]
            start = file.base + position
            self._hot = hot = start, start + len(data), data
        return hot

    def store_time_at(self, offset: int, size: int) -> int:
        """The store timestamp of a message, -1 if it is not there (``pickupStoreTimestamp``)."""
        data = self.frame_at(offset, size)
        if data is None or size < frame.FIXED_SIZE_V1:
            return _NO_TIME
        _, magic, _, _, _, _, physical_offset, flags, _ = frame.HEAD.struct.unpack_from(data, 0)
        if magic not in _MAGICS or physical_offset != offset:
            return _NO_TIME
        at = frame.HEAD.size + frame.host_sizes(flags)[0]
        return int(frame.STORE_TIME.struct.unpack_from(data, at)[0])

    def outcome_at(self, offset: int, *, check_crc: bool = True) -> Outcome:
        """What stands at an offset. No more is read than a frame there would take."""
        file = self.files.at(offset)
        if file is None:
            return Damage(DamageKind.TRUNCATED, "there is no file for this part of the log")
        position = offset - file.base
        room = self.files.file_size - position
        data = self._reader.read(file.path, position, frame.BLANK.size)
        if len(data) < min(room, frame.BLANK.size):
            return Damage(
                DamageKind.TRUNCATED,
                f"the file ends after {file.size} of {self.files.file_size} bytes",
            )
        if len(data) == frame.BLANK.size:
            size, magic = frame.BLANK.struct.unpack(data)
            if magic in _MAGICS and frame.FIXED_SIZE_V1 <= size <= room:
                data = self._reader.read(file.path, position, size)
                if len(data) < size:
                    return Damage(
                        DamageKind.TRUNCATED, f"the file ends within a frame of {size} bytes"
                    )
        return frame.decode_at(data, 0, base=offset, end=room, check_crc=check_crc)

    def message_at(self, offset: int) -> Frame:
        """The message that starts at an offset, its CRC checked.

        Raises:
            MessageNotFound: if the offset lies outside the log, or within a message or a blank.
            CorruptFrame: if the place is damaged.
        """
        if not self.min_offset <= offset < self.max_offset:
            raise MessageNotFound(
                f"{self._layout.root}: no message at {offset}: the log reaches from "
                f"{self.min_offset} to {self.max_offset}"
            )
        outcome = self.outcome_at(offset)
        if isinstance(outcome, Frame):
            return outcome
        raise self._explained(offset, outcome)

    def corrupt(self, offset: int, damage: Damage) -> CorruptFrame:
        """The error that tells of damage at an offset."""
        return CorruptFrame(
            self._layout.log_path(offset), offset, damage.reason, kind=damage.kind.label
        )

    def _explained(self, offset: int, outcome: Blank | Damage) -> MessageNotFound | CorruptFrame:
        """Why no message starts at an offset within the log.

        Told by the chain from the start of the file, so that a slip of the user's is not
        reported as damage.
        """
        from logquarry.log.walk import BlankSpan, DamagedSpan, Run

        where = f"{self._layout.log_path(offset)}: no message starts at {offset}"
        start = max(file.base for file in self.files.files if file.base <= offset)
        for event in self._log_reader(None).events(start, offset + 1):
            if isinstance(event, Run) and event.start <= offset < event.end:
                starts = event.window.base + event.rows[:, 0].astype(np.int64)
                at = int(starts[np.searchsorted(starts, offset, "right") - 1])
                return MessageNotFound(f"{where}: it lies within the one at {at}")
            if isinstance(event, BlankSpan) and offset < event.offset + event.length:
                return MessageNotFound(f"{where}: a blank fills the file from {event.offset} on")
            if isinstance(event, DamagedSpan) and offset < event.offset + event.length:
                reason = event.reason
                if event.offset != offset:
                    reason = f"within {event.length} damaged bytes from {event.offset}: {reason}"
                return CorruptFrame(event.path, offset, reason, kind=event.kind)
        if isinstance(outcome, Blank):
            return MessageNotFound(f"{where}: a blank fills the file from there on")
        return self.corrupt(offset, outcome)

    # --------------------------------------------------------------------------------- log's end
    def _chain_point(self, entry: QueueEntry) -> int | None:
        """Where the message of a unit ends, None if it does not stand there whole."""
        outcome = self.outcome_at(entry.physical_offset)
        sound = isinstance(outcome, Frame) and outcome.size == entry.size
        return entry.physical_offset + entry.size if sound else None

    def _follow(self, position: int) -> int:
        """The end of the chain from a frame's end, or some place on the way of a long one."""
        for _ in range(_LONGEST_PLAIN_WALK):
            outcome = self.outcome_at(position)
            if isinstance(outcome, Damage):
                file = self.files.at(position)
                if file is None or position - file.base + frame.BLANK.size <= self.files.file_size:
                    break
                # Too few bytes are left for a blank: RocketMQ never leaves so few, others may.
                position = file.base + self.files.file_size
                continue
            position += outcome.size
        return position

    def _only_zeros_from(self, position: int) -> bool:
        """Whether nothing at all is written in the log from a place on: its plain end."""
        for file in self.files.files:
            at = max(0, position - file.base)
            stop = min(file.size, self.files.file_size)
            view = self._reader.view(file.path) if at < stop else None
            while view is not None and (at := view.next_data(at)) < stop:
                data = self._reader.read(file.path, at, min(_ZEROS_CHUNK, stop - at))
                if np.frombuffer(data, np.uint8).any():
                    return False
                at += max(1, len(data))
        return True

    def _walked_end(self, start: int, bound: int | None) -> int:
        from logquarry.log.walk import LogEnd

        for event in self._log_reader(bound).events(start):
            if isinstance(event, LogEnd):
                return event.offset
        return start

    def _log_reader(self, bound: int | None) -> LogReader:
        from logquarry.log.walk import LogReader

        return LogReader(self._layout, bound=bound, live=self._layout.is_live())
