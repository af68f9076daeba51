"""Appends the master's bytes to a slave's log, and checks the frames in them.

The replica checks the magic number, the lengths, the CRC and the physical offset of each frame as
soon as the frame is complete. A transfer can end in the middle of a frame.

RocketMQ's protocol has no message that compares two logs. So a newly connected slave requests some
bytes that it already has: the last part of its log. The slave compares the bytes that the master
sends with this part. If they differ, the logs have diverged, and the replication stops. ::

    master  |=========================================|---- new ----...
    slave   |==========================[== compared ==]
                                       ^ requested offset
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Final

from logquarry.errors import LogsDiverged, ProtocolViolation, ReplicationError
from logquarry.format.arrays import BLANK, NEED_MORE, POSITION, REACHED_STOP, TABLE_FULL
from logquarry.format.frame import BLANK as BLANK_LAYOUT
from logquarry.format.frame import DamageKind
from logquarry.log import codec
from logquarry.store.writer_files import LogFeed

OVERLAP: Final = 64 * 1024
"""Number of bytes that are compared at the start of a connection. The last bytes suffice: frames
contain times and offsets, so once two logs have diverged, all later frames differ too.
"""
_ROWS: Final = 4_096


class SpoiltReplica(ProtocolViolation):
    """The slave's log ends with invalid bytes that the master has sent. Replication ends.

    The invalid bytes are removed when the store is opened next.
    """


@dataclass(eq=False, repr=False)
class Replica:
    """The log of a slave. Only :meth:`sync` is thread-safe.

    Args:
        start: physical offset at which an empty log begins. If None, the master chooses this
            offset. A RocketMQ master chooses the start of its last file.
        check_crc: whether to check the CRC of bodies.
        overlap: number of bytes that are compared at the start of a connection.
        acknowledges_unchecked: whether the slave acknowledges bytes before they are checked.

    Attributes:
        checked: all bytes before this physical offset are valid frames.
        position: physical offset of the next byte to receive.
    """

    feed: LogFeed
    root: str
    _: KW_ONLY
    start: int | None = None
    check_crc: bool = True
    overlap: int = OVERLAP
    acknowledges_unchecked: bool = False

    def __post_init__(self) -> None:
        self._rows = codec.empty_rows(_ROWS)
        self._floor = 0
        self._last: int | None = None
        self._has_beaten = self._has_come = False
        # All dispatched frames were checked before, and the dispatched part ends at a frame's end.
        self.checked = min(self.feed.dispatched_offset, self.feed.wrote_offset)
        self.position = self._known_end = self.feed.wrote_offset
        self.feed.vouch(self.checked)
        self._vouched = self.checked
        # Call the compiled function that checks frames once now, because its first call is slow.
        codec.walk(codec.Window.of(bytes(8), 0), 0, 0, self._rows, check_crc=self.check_crc)

    def request(self) -> int:
        """Return the physical offset from which the slave requests the log. All bytes before it are
        valid and synced.

        Raises:
            SpoiltReplica: if the log's end is not a valid frame.
            StoreUnavailable: if the log cannot be synced.
        """
        self._has_beaten = self._has_come = False
        # An earlier process may have left bytes that are not dispatched. These bytes are checked
        # now, because this needs no master.
        self.check()
        wrote = self.feed.wrote_offset
        if not wrote:
            # If the slave requested offset 0, the master would choose the start. So a slave that
            # wants the whole log requests the bytes from offset 1 on. Byte 0 of a log is always 0,
            # because it is the highest byte of a frame's size.
            self.position = 0 if self.start is None else max(1, self.start)
            return self.position
        self.feed.sync()
        last = self._last_frame()
        # Compare at least one complete frame: frames of different logs have different times, but
        # blanks can be equal. Compare only bytes of the last file: the master may have deleted
        # earlier files.
        first = last - last % self.feed.file_size
        start = min(last, max(first, wrote - self.overlap))
        self.position = max(1, self.feed.min_offset, self._floor, start)
        return self.position

    def _last_frame(self) -> int:
        # Returns the physical offset of the last complete frame in the last file, or the file's
        # start if it has none.
        if self._last is None:
            self._last = self._find_last_frame()
        return self._last

    def _find_last_frame(self) -> int:
        size = self.feed.file_size
        before = max(0, self.checked - 1)
        base = max(self.feed.min_offset, before - before % size)
        data = self.feed.select(base)
        if data is None or self.checked <= base:
            return base
        window = codec.Window.of(data[: self.checked - base], base, size)
        back = OVERLAP
        while back < window.length:
            start = window.length - back
            at, code = codec.find_frame(window, start, window.length, check_crc=self.check_crc)
            last = self._last_from(window, at) if code == REACHED_STOP else None
            if last is not None:
                return base + last
            back *= 4
        return base + (self._last_from(window, 0) or 0)

    def _last_from(self, window: codec.Window, at: int) -> int | None:
        # Returns the position of the last frame. Returns None if there is no frame, or if there is
        # damage between ``at`` and the window's end.
        last: int | None = None
        code = TABLE_FULL
        while code == TABLE_FULL:
            count, at, code = codec.walk(window, at, window.length, self._rows, check_crc=False)
            if count:
                last = int(self._rows[count - 1, POSITION])
        return last if code in (REACHED_STOP, BLANK, NEED_MORE) else None

    def take(self, offset: int, data: memoryview) -> None:
        """Append the next bytes of the master's log. If this log already has these bytes, compare
        them instead. :meth:`check` checks the frames.

        Raises:
            LogsDiverged: if this log has other bytes at ``offset``.
            ReplicationError: if this log is empty, and cannot begin at ``offset``.
            StoreUnavailable: if the bytes cannot be written.
        """
        self._has_beaten = self._has_come = False
        wrote = self.feed.wrote_offset
        if not wrote:
            self._begin(offset, data)
        elif offset < wrote:
            known = data[: wrote - offset]
            self._compare(offset, known)
            if len(data) > len(known):
                self._append(wrote, data[len(known) :])
        else:
            self._append(offset, data)
        self.position = offset + len(data)

    def _begin(self, offset: int, data: memoryview) -> None:
        first: bytes | memoryview = data
        if self.start == 0 and offset == 1:
            offset, first = 0, b"\0" + bytes(data)
        if not self.feed.append_data(offset, first):
            raise ReplicationError(
                f"{self.root}: its log cannot begin at physical offset {offset}, which is not a "
                f"multiple of its file size, {self.feed.file_size} bytes. Begin at the start of "
                "one of the master's files, and set the master's mappedFileSizeCommitLog"
            )
        self.checked = self._vouched = offset
        self.feed.vouch(offset)

    def _append(self, offset: int, data: memoryview) -> None:
        taken = self.feed.append_data(offset, data)
        assert taken, f"the log ends at {self.feed.wrote_offset}, not at {offset}"

    def _compare(self, offset: int, data: memoryview) -> None:
        while data:
            own = self.feed.select(offset, len(data))
            part = data[: len(own)] if own is not None else data
            if own is None or own[: len(part)] != part:
                at = offset
                if own is not None:
                    pairs = enumerate(zip(own, part, strict=False))
                    at += next(number for number, (a, b) in pairs if a != b)
                raise LogsDiverged(
                    f"{self.root}: the log differs from its master's at physical offset {at}. "
                    f"{self._advice(at)}",
                    offset=at,
                )
            offset, data = offset + len(part), data[len(part) :]

    def _advice(self, offset: int) -> str:
        if offset >= self.checked:
            return (
                f"This concerns only an incomplete message at {self.checked}: start the slave "
                "again, the opening cuts it off"
            )
        return f"Compare the stores: logquarry diff MASTER-STORE {self.root}"

    def check(self) -> None:
        """Check the frames that are complete by now, and allow them to be dispatched.

        Raises:
            SpoiltReplica: if a frame is invalid.
        """
        before = self.checked
        try:
            self._walk()
        finally:
            if self.checked > before:
                self.feed.vouch(self.checked)
                self._vouched = self.checked

    def _walk(self) -> None:
        size = self.feed.file_size
        end = self.feed.wrote_offset
        while self.checked < end:
            room = size - self.checked % size
            data = self.feed.select(self.checked)
            if room < BLANK_LAYOUT.size and data is not None:
                # The bytes up to the file's end are too few for a blank, so skip them. RocketMQ
                # always leaves room for a blank, but other writers may not.
                if len(data) < room:
                    return
                self.checked += room
                continue
            if data is None or len(data) < BLANK_LAYOUT.size:
                return
            window = codec.Window.of(data, self.checked, room)
            count, after, code = codec.walk(
                window, 0, window.length, self._rows, check_crc=self.check_crc
            )
            if count:
                self._last = self.checked + int(self._rows[count - 1, POSITION])
                self.checked += after
            if code == BLANK:
                if self.checked - self.checked % size + size > end:
                    return
                self.checked += size - self.checked % size
            elif code == NEED_MORE:
                return
            elif code not in (REACHED_STOP, TABLE_FULL):
                self._spoilt(window, after if count else 0, code)

    def _spoilt(self, window: codec.Window, position: int, code: int) -> None:
        reason = codec.damage_reason(window, position, check_crc=self.check_crc)
        known = "acknowledged none of it"
        if self.acknowledges_unchecked:
            known = "may have acknowledged a part of it (acknowledge: received)"
        elif self.checked < self._known_end:
            known = "may have acknowledged a part of it in an earlier run (acknowledge: received)"
        advice = "The next opening of the store cuts it off"
        if code in (DamageKind.BAD_BLANK, DamageKind.BAD_SIZE):
            # This damage occurs if master and slave have log files of different sizes. Then a frame
            # does not fit into the slave's file, or a blank ends before the end of the slave's
            # file.
            advice += (
                f". Files of this log have {self.feed.file_size} bytes: if the master's have "
                "another size, replicate into an empty folder with its mappedFileSizeCommitLog"
            )
        raise SpoiltReplica(
            f"{self.root}: the master sent no valid frame at physical offset {self.checked}: "
            f"{DamageKind(code).label}: {reason}. The slave {known}. {advice}"
        )

    # ---------------------------------------------------------------------- the master's position
    def heartbeat(self, offset: int) -> None:
        """Process a heartbeat. ``offset`` is the physical offset of the next byte that the master
        will send.

        Raises:
            LogsDiverged: if this log is longer than the master's log.
        """
        if offset < self.feed.wrote_offset and self._has_beaten:
            # QUIRK: if no bytes were sent for some seconds, RocketMQ sends one heartbeat even if
            # data follows. So only two heartbeats in a row show that no data follows.
            self._ahead(offset)
        wrote = self.feed.wrote_offset
        # If no data follows, a slave with an empty log lacks nothing, because the slave's log will
        # begin at the end of the master's log.
        self._has_come = offset == wrote or (not wrote and self._has_beaten)
        self._has_beaten = True

    def elsewhere(self, offset: int) -> None:
        """Process the master's answer that its log does not have the requested offset.

        If the requested offset is before the start of the master's log, ``offset`` is this start.
        If it is after the end of the master's log, ``offset`` is this end. If the call raises
        nothing, the slave can connect again.

        Raises:
            LogsDiverged: if the master's log ends at ``offset``, and this log is not empty.
            ReplicationError: if the master's log begins at ``offset``, after the start of this
                log's last frame. The master has then deleted bytes that the slave needs or
                compares.
        """
        wrote = self.feed.wrote_offset
        if not wrote:
            if offset > self.position:
                self.start = offset
            # If the master's log ends before the requested offset, raise nothing: the slave
            # connects again, because the master's log may have grown.
        elif offset < self.position:
            self._ahead(offset)
        elif offset <= self._last_frame():
            self._floor = offset
        else:
            is_overlap = offset <= wrote
            gone = "messages needed to compare the two logs" if is_overlap else "bytes between"
            raise ReplicationError(
                f"{self.root}: its log ends at physical offset {wrote} and its master's begins at "
                f"{offset}: the master has deleted the {gone}. Replicate into an empty folder"
            )

    def _ahead(self, offset: int) -> None:
        raise LogsDiverged(
            f"{self.root}: the slave is ahead of its master: its log ends at physical offset "
            f"{self.feed.wrote_offset}, its master's at {offset}. {self._advice(offset)}",
            offset=offset,
        )

    @property
    def has_all(self) -> bool:
        """Whether the slave has the master's whole log. This is true if the master's last message
        was a heartbeat with the end offset of the slave's log, and if all frames are checked.
        """
        return self._has_come and self.checked == self.feed.wrote_offset

    # ----------------------------------------------------------------------------------- syncing
    def sync(self) -> int:
        """Sync the log. Return the physical offset before which all bytes are synced and checked.

        Raises:
            StoreUnavailable: if this sync or an earlier sync failed.
        """
        # Read this offset before the sync, because the sync may omit bytes that arrive while it
        # runs.
        vouched = self._vouched
        end = min(vouched, self.feed.sync())
        # Without CRC checks, the log may contain a frame with a wrong CRC. After a power cut, a
        # recovery would treat such a frame as incomplete, unless the durable offset on the disk is
        # after the frame.
        self.feed.keep(not self.check_crc)
        return end
