"""Reads single frames of the commit log by physical offset, finds the log's start and end, and
checks with samples whether the consume queues belong to the log.

If a log file was replaced by a file of another store, its frames can by chance begin at the
physical offsets in the queue entries. But these frames then have other topics than the queues.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np

from logquarry.disk.file_place import LastFile
from logquarry.errors import CorruptFrame, MessageNotFound
from logquarry.format import frame, java
from logquarry.format.frame import Blank, Damage, DamageKind, Frame, Outcome
from logquarry.format.queue_entry import QueueEntry
from logquarry.log.layout import StoreLayout
from logquarry.log.open_files import OpenFiles
from logquarry.log.store_files import FileSequence, StoreFile, warn_once
from logquarry.log.walk import (
    MISSING_FILE,
    NO_FILE,
    BlankSpan,
    DamagedSpan,
    LogEnd,
    LogReader,
    Run,
)
from logquarry.read.log_end import last_file_start, sound_bound
from logquarry.text import counted

if TYPE_CHECKING:
    # Importing batches imports pyarrow, which a program that only opens a store does not need.
    from logquarry.log.batches import MessageFilter
    from logquarry.read.queue import ConsumeQueue, Units

_LONGEST_CHAIN: Final = 256
"""To find the end of the log, at most this number of frames is read one by one in pure Python. If
more frames follow, loading the compiled kernels is worth its time.
"""
_ZEROS_CHUNK: Final = 8 << 20
_NO_TIME: Final = -1
_NO_BYTES: Final = memoryview(b"")
_LEFT_OUT: Final = "its messages are left out"


class CommitLog:
    """The log of a store (RocketMQ's ``CommitLog``). All offsets are physical offsets.

    ``last_entries`` returns the last entries of the queues. ``last_entries`` is called only when
    the log's end is needed.

    Attributes:
        may_shrink: whether another program may truncate the files.
        live_files: the writer's files, if this process writes the log; else None.
    """

    may_shrink = True
    live_files: LastFile | None = None

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
        self._end: int | None = None
        # The view that the last read used, as (offset, end, bytes). This view is cached, because
        # the next read often needs it too.
        self._hot = (0, 0, _NO_BYTES)
        self._hot_file: StoreFile | None = None

    def refresh(self) -> None:
        """Discard the cached log end and the cached view. The caller must also refresh the
        layout.
        """
        self._end = None
        self.close()

    def close(self) -> None:
        """Release the view that the last read used, because the view keeps its file mapped."""
        self._hot = (0, 0, _NO_BYTES)

    @property
    def files(self) -> FileSequence:
        """The files of the log."""
        return self._layout.commit_log

    @property
    def min_offset(self) -> int:
        """Physical offset of the first file's start; 0 if there are no files."""
        return self.files.start

    @property
    def max_offset(self) -> int:
        """Physical offset after the last message, or after the blank that follows the last message.

        The search starts at the durable offset. If there is none, it starts at the last message
        that a queue entry points to. If the log does not have this message, the start depends on
        the last shutdown. After a clean shutdown, the search starts at the last file with a frame.
        After a crash (there is an ``abort`` file), it starts at the last message of another queue.
        If there is no such message, or if no queue has an entry, the search reads the whole log.
        The search does not find damage before its start.
        """
        if self._end is None:
            self._end = self._find_end()
        return self._end

    def set_end(self, offset: int) -> None:
        """Set the log's end, which the caller found by a walk over the whole log."""
        self._end = offset

    def _find_end(self) -> int:
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
        bound = entries[0].end
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
        """Return ``size`` bytes that start at a physical offset; None if they are not all in one
        file.

        QUIRK: if the log's file 0 was deleted, Java's ``getMessage`` reads the bytes for offset 0
        from the start of the first existing file. This method returns None.
        """
        start, end, data = self.window_at(offset, size)
        if size <= 0 or offset < start or offset + size > end:
            return None
        return data[offset - start : offset - start + size]

    def window_at(self, offset: int, size: int) -> tuple[int, int, memoryview]:
        """Return the start, the end and the bytes of a view that contains ``offset``. After
        ``offset``, the view may have fewer than ``size`` bytes. The view is empty if no file has
        the offset.
        """
        hot = self._hot
        is_hot = hot[0] <= offset and offset + size <= hot[1]
        if not is_hot or not self.reaches(offset + size):
            file = self.files.at(offset)
            if file is None:
                return 0, 0, _NO_BYTES
            position, data = self._reader.window(file.path, offset - file.base, size)
            # Bytes after a file's regular size are not part of the log.
            data = data[: max(0, self.files.file_size - position)]
            start = file.base + position
            self._hot = hot = start, start + len(data), data
            self._hot_file = file
        return hot

    def reaches(self, end: int) -> bool:
        """Whether the log file that was read last still reaches to the physical offset ``end``.

        If the file is shorter, another program has truncated it. Reading the missing bytes through
        the view would raise SIGBUS.
        """
        file = self._hot_file
        return file is None or self._reader.reaches(file.path, end - file.base)

    def unreadable_at(self, offset: int, size: int) -> Damage | None:
        """Return UNREADABLE damage if an earlier read found unreadable bytes in the range; else
        None.
        """
        file = self.files.at(offset)
        fault = None if file is None else self._reader.fault(file.path, offset - file.base, size)
        return None if fault is None else Damage(DamageKind.UNREADABLE, fault.words)

    def store_time_at(self, offset: int, size: int) -> int:
        """The store time of a message; -1 if there is no message (``pickupStoreTimestamp``)."""
        data = self.frame_at(offset, size)
        if data is None or size < frame.FIXED_SIZE_V1 or self.unreadable_at(offset, size):
            return _NO_TIME
        _, magic, _, _, _, _, physical_offset, flags, _ = frame.HEAD.struct.unpack_from(data, 0)
        if magic not in frame.MAGICS or physical_offset != offset:
            return _NO_TIME
        at = frame.HEAD.size + frame.host_sizes(flags)[0]
        return int(frame.STORE_TIME.struct.unpack_from(data, at)[0])

    def outcome_at(self, offset: int, *, check_crc: bool = True) -> Outcome:
        """Decode the frame at an offset. Only the bytes of that frame are read."""
        file = self.files.at(offset)
        if file is None:
            return Damage(DamageKind.TRUNCATED, NO_FILE)
        position = offset - file.base
        room = self.files.file_size - position
        needed = min(room, frame.BLANK.size)
        data = self._reader.read_from(file.path, position, needed)
        found: Outcome
        reason = f"the file ends after {file.size} of {self.files.file_size} bytes"
        if len(data) >= frame.BLANK.size:
            size, magic = frame.BLANK.struct.unpack_from(data)
            if magic in frame.MAGICS and frame.FIXED_SIZE_V1 <= size <= room:
                needed = size
                if len(data) < size:
                    data = self._reader.read_from(file.path, position, size)
                    reason = f"the file ends within a frame of {size} bytes"
        data = data[:needed]
        if len(data) < needed:
            found = Damage(DamageKind.TRUNCATED, reason)
        else:
            found = frame.decode_at(data, 0, base=offset, end=room, check_crc=check_crc)
        # Check for unreadable bytes last: a page can become unreadable while the frame is read.
        return self.unreadable_at(offset, len(data)) or found

    def sound_frame_at(self, offset: int, *, check_crc: bool = True) -> Frame | None:
        """The sound frame at an offset; None if there is none."""
        outcome = self.outcome_at(offset, check_crc=check_crc)
        return outcome if isinstance(outcome, Frame) else None

    def frame_of(self, entry: QueueEntry) -> Frame | None:
        """Return the frame to which a queue entry points, if the frame has the size in the entry;
        else None. The CRC is not checked.
        """
        found = self.sound_frame_at(entry.physical_offset, check_crc=False)
        return found if found is not None and found.size == entry.size else None

    def message_at(self, offset: int) -> Frame:
        """The message that starts at an offset; its CRC is checked.

        Raises:
            MessageNotFound: if the offset lies outside the log, or within a message or a blank.
            CorruptFrame: if there is damage at the offset.
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

    def missing_file(self, offset: int) -> CorruptFrame | None:
        """Return an error if the log file for an offset is not a file; else None.

        For example, the file's path can lead to a pipe, a folder or a missing disk.
        """
        file = self.files.at(offset)
        # In the list of files, such a path has the size 0.
        reason = self._layout.why_no_log_file(file.path) if file and not file.size else None
        if file is None or reason is None:
            return None
        path = self._layout.filesystem.full_path(file.path)
        return CorruptFrame(path, offset, reason, kind=MISSING_FILE)

    def missing_message(self, offset: int, size: int) -> CorruptFrame | Damage | None:
        """Return the reason why a read did not find the message to which a queue entry points. The
        reason is the error of :meth:`missing_file`, or the damage to the entry or to the log.
        Return None if there is no damage.

        If the message is lost, but is not in a damaged part of the log, log a warning and return
        None. In this case the log file is missing or too short, or the log ends before the message.
        If the message has expired, return None without a warning.
        """
        error, file = self.missing_file(offset), self.files.at(offset)
        if error is not None:
            return error
        whole = self.files.file_size
        if file is not None and file.size < min(whole, offset - file.base + size):
            reason = f"the file ends after {file.size} of {whole} bytes: {_LEFT_OUT}"
        elif file is not None and offset - file.base + size > whole:
            words = f"a message of {size} bytes, which does not fit into the file"
            return Damage(DamageKind.BAD_SIZE, words)
        elif file is not None and self.frame_at(offset, size) is None:
            # Retention has deleted the file since the folder was listed.
            return None
        elif file is not None and offset < self.max_offset:
            return Damage(DamageKind.ZEROED, "zeros: nothing was written here")
        elif file is not None:
            reason = (
                "the log ends in this file, but queues have entries for later messages: these "
                "messages are left out"
            )
        elif self._layout.commit_log is self.files and offset >= self.min_offset:
            reason = f"{NO_FILE}: {_LEFT_OUT}"
        else:
            return None
        path = self._layout.log_file(offset) if file is None else file.path
        warn_once(f"{self._layout.filesystem.full_path(path)}: {reason}")
        return None

    def end_of_lost_file(self, offset: int) -> int | None:
        """Return the end of the log file that should contain an offset, if this file is missing or
        too short.

        Return None if the log has the offset, or if the offset is after the last file.
        """
        whole = max(1, self.files.file_size)
        if offset >= self.files.end or self.frame_at(offset, 1) is not None:
            return None
        return offset + whole - offset % whole

    def corrupt(self, offset: int, damage: Damage) -> CorruptFrame:
        """The error for damage at an offset."""
        return CorruptFrame(
            self._layout.log_path(offset), offset, damage.reason, kind=damage.kind.label
        )

    def _explained(self, offset: int, outcome: Blank | Damage) -> MessageNotFound | CorruptFrame:
        # Either there is damage at the offset, or the offset is wrong because it is inside a sound
        # frame. To find out which is true, walk from the file's start.
        if (missing := self.missing_file(offset)) is not None:
            return missing
        where = f"{self._layout.log_path(offset)}: no message starts at {offset}"
        file = self.files.at(offset)
        if file is not None and not self._layout.filesystem.exists(file.path):
            # Retention may have deleted the file since this reader has listed the folder.
            return MessageNotFound(
                f"{where}: the file was deleted after the store was opened: call refresh(), or "
                "open the store again"
            )
        start = max(file.base for file in self.files.files if file.base <= offset)
        # In a DLedger log, 48 bytes (a head) precede each frame.
        head = frame.ENTRY_HEAD.size if self.files.has_heads else 0
        for event in self._log_reader(None).events(start, offset + 1 + head):
            if isinstance(event, Run) and event.start - head <= offset < event.start:
                return MessageNotFound(f"{where}: the next one starts at {event.start}")
            if isinstance(event, Run) and event.start <= offset < event.end:
                starts = event.window.base + event.rows[:, 0].astype(np.int64)
                at = int(starts[np.searchsorted(starts, offset, "right") - 1])
                return MessageNotFound(f"{where}: it lies within the one at {at}")
            if isinstance(event, BlankSpan) and offset < event.end:
                return MessageNotFound(f"{where}: a blank fills the file from {event.offset} on")
            if isinstance(event, DamagedSpan) and offset < event.end:
                reason = event.reason
                if event.offset != offset:
                    length = counted(event.length, "damaged byte")
                    reason = f"within {length} from {event.offset}: {reason}"
                return CorruptFrame(event.path, offset, reason, kind=event.kind)
        if isinstance(outcome, Blank):
            return MessageNotFound(f"{where}: a blank fills the file from there on")
        return self.corrupt(offset, outcome)

    # --------------------------------------------------------------------------------- log's end
    def _chain_point(self, entry: QueueEntry) -> int | None:
        outcome = self.outcome_at(entry.physical_offset)
        sound = isinstance(outcome, Frame) and outcome.size == entry.size
        return entry.end if sound else None

    def _follow(self, position: int) -> int:
        for _ in range(_LONGEST_CHAIN):
            outcome = self.outcome_at(position)
            if isinstance(outcome, Damage):
                file = self.files.at(position)
                if file is None or position - file.base + frame.BLANK.size <= self.files.file_size:
                    break
                # There are too few bytes before the file's end for a blank. RocketMQ always leaves
                # enough bytes for a blank, but other programs may not.
                position = file.base + self.files.file_size
                continue
            position += outcome.size
        return position

    def _only_zeros_from(self, position: int) -> bool:
        for file in self.files.files:
            at = max(0, position - file.base)
            stop = min(file.size, self.files.file_size)
            view = self._reader.view(file.path) if at < stop else None
            while view is not None and (at := view.next_data(at)) < stop:
                length = min(_ZEROS_CHUNK, stop - at)
                data = self._reader.read_from(file.path, at, length)[:length]
                if np.frombuffer(data, np.uint8).any():
                    return False
                at += max(1, len(data))
        return True

    def _walked_end(self, start: int, bound: int | None) -> int:
        for event in self._log_reader(bound).events(start):
            if isinstance(event, LogEnd):
                return event.offset
        return start

    def _log_reader(self, bound: int | None) -> LogReader:
        return LogReader(self._layout, bound=bound, live=self._layout.is_live())


T = TypeVar("T")
_MOST_FRAMES: Final = 32
"""A check reads at most this number of frames for the wanted queues, and as many for the log files.
"""


def do_queues_fit(
    layout: StoreLayout,
    units: Mapping[ConsumeQueue, Units],
    wanted: MessageFilter,
    within: tuple[int, int],
) -> bool:
    """Whether frames have the topic and the queue id of the queues that point to them.

    The function reads the frames of the first and the last entry of the ``wanted`` queues, and the
    frame of the first entry in each log file. If there are too many such frames, the function reads
    some of them. It ignores damaged frames, because a read reports them.

    Args:
        units: the entries of each queue, in the order of the log.
        within: the range of the log that is read. Entries that point outside of this range are not
            checked.
    """
    start, stop = within
    units = {queue: _between(found, start, stop) for queue, found in units.items()}
    files = [file for file in layout.commit_log.files if file.base + file.size > start]
    files = [file for file in files if file.base < stop]
    chosen = [queue for queue in units if wanted.takes_queue(queue.topic, queue.queue_id)]
    places = [
        (queue, int(units[queue]["physical_offset"][at]))
        for queue in _some(chosen, _MOST_FRAMES // 2)
        for at in (0, -1)
        if len(units[queue])
    ]
    places += _first_in_files(_some(files, _MOST_FRAMES), units)
    log = CommitLog(layout)
    for queue, offset in dict.fromkeys(places):
        found = log.outcome_at(offset, check_crc=False)
        if isinstance(found, Frame) and not _belongs(found, queue):
            return False
    return True


def _between(units: Units, start: int, stop: int) -> Units:
    first, end = np.searchsorted(units["physical_offset"], (start, stop)).tolist()
    return units[first:end]


def _belongs(frame: Frame, queue: ConsumeQueue) -> bool:
    own = frame.topic.decode("utf-8", java.UTF8_ERRORS), frame.queue_id
    return own == queue.key or frame.is_copied_to(queue.topic)


def _first_in_files(
    files: Sequence[StoreFile], units: Mapping[ConsumeQueue, Units]
) -> list[tuple[ConsumeQueue, int]]:
    """Return the first entry in each file: its queue, and its physical offset."""
    bases = np.array([file.base for file in files], np.int64)
    ends = np.array([file.base + file.size for file in files], np.int64)
    firsts = ends
    found: list[ConsumeQueue | None] = [None] * len(files)
    for queue, one in units.items():
        offsets = one["physical_offset"].astype(np.int64)
        after = np.searchsorted(offsets, bases)
        candidates = np.append(offsets, np.iinfo(np.int64).max)[after]
        for i in np.flatnonzero(candidates < firsts).tolist():
            found[i] = queue
        firsts = np.minimum(firsts, candidates)
    return [
        (queue, int(first)) for queue, first in zip(found, firsts, strict=True) if queue is not None
    ]


def _some(items: Sequence[T], most: int) -> Sequence[T]:
    """Return at most ``most`` items, evenly distributed and including the first and the last."""
    if len(items) <= most:
        return items
    return [items[i * (len(items) - 1) // (most - 1)] for i in range(most)]
