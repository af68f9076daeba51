"""A slave's log: takes the master's bytes as they come, and vouches for no others.

What comes is appended, and walked over as soon as a frame is whole: its magic, lengths, CRC and
the place that it names. Transfers end anywhere in a frame, so that the verdict on the last one
mostly stays open; what is not judged is not acknowledged.

Before anything new is taken, the last bytes that the slave has, its last whole frame at least, are
asked for once more and compared. So a slave finds out that its log is no beginning of its master's,
whatever master that is; the protocol has nothing to ask that with. ::

    master  |=========================================|---- new ----...
    slave   |==========================[== compared ==]
                                       ^ what is asked for
"""

from __future__ import annotations

from typing import Final

from logquarry.errors import LogsDiverged, ProtocolViolation, ReplicationError
from logquarry.format.frame import BLANK as BLANK_LAYOUT
from logquarry.format.frame import DamageKind
from logquarry.format.rows import BLANK, NEED_MORE, POSITION, REACHED_STOP, TABLE_FULL
from logquarry.log import codec
from logquarry.store.log_feed import LogFeed

OVERLAP: Final = 64 * 1024
"""Bytes that are compared at the start of each connection. Frames carry times and offsets: logs
that went apart before are not alike in so many."""
_ROWS: Final = 4_096


class SpoiltReplica(ProtocolViolation):
    """What the master sent is no log, and stands at this one's end: it cannot be gone on with.

    None of it was acknowledged. Opening the store anew cuts it off.
    """


class Replica:
    """The log of a slave. For one thread, but for :meth:`sync`.

    Args:
        feed: the log.
        root: names the store in errors.
        start: where a log that is empty begins: a physical offset, or None for where the master
            says, which with RocketMQ is its last file.
        check_crc: whether bodies are compared with their CRC.
        overlap: bytes that are compared when a connection begins.

    Attributes:
        checked: what stands before it is whole frames.
        position: physical offset of the next byte to come.
    """

    def __init__(
        self,
        feed: LogFeed,
        root: str,
        *,
        start: int | None = None,
        check_crc: bool = True,
        overlap: int = OVERLAP,
    ) -> None:
        self._feed = feed
        self._root = root
        self._start = start
        self._check_crc = check_crc
        self._overlap = overlap
        self._rows = codec.empty_rows(_ROWS)
        self._floor = 0
        self._last: int | None = None
        self._has_beaten = self._has_come = False
        # What is dispatched ends between two frames.
        self.checked = min(feed.dispatched_offset, feed.wrote_offset)
        self.position = feed.wrote_offset
        feed.vouch(self.checked)
        self._vouched = self.checked
        # The first walk takes a while: what it is compiled to has to be loaded.
        codec.walk(codec.Window.of(bytes(8), 0), 0, 0, self._rows, check_crc=check_crc)

    def request(self) -> int:
        """Where a new connection is to ask from; all before it is on the disk, and was checked.

        Raises:
            SpoiltReplica: if what is there is no log.
            StoreUnavailable: if the log cannot be brought to the disk.
        """
        self._has_beaten = self._has_come = False
        # What was there before, and was not dispatched, is not to wait for a master's first word.
        self.check()
        wrote = self._feed.wrote_offset
        if not wrote:
            # 0 would mean "from where you like". A frame's first byte is the highest of its
            # size, which is 0: so a log from its very beginning is asked for from byte 1 on.
            self.position = 0 if self._start is None else max(1, self._start)
            return self.position
        self._feed.sync()
        last = self._last_frame()
        # A whole frame at least, with its times: the rest of a file may be the same in all logs.
        # Not into an earlier file than needed: a master may have deleted that.
        first = last - last % self._feed.file_size
        start = min(last, max(first, wrote - self._overlap))
        self.position = max(1, self._feed.min_offset, self._floor, start)
        return self.position

    def _last_frame(self) -> int:
        """Where the last whole frame begins, or its file, if that has none."""
        if self._last is None:
            self._last = self._find_last_frame()
        return self._last

    def _find_last_frame(self) -> int:
        size = self._feed.file_size
        before = max(0, self.checked - 1)
        base = max(self._feed.min_offset, before - before % size)
        data = self._feed.select(base)
        if data is None or self.checked <= base:
            return base
        window = codec.Window.of(data[: self.checked - base], base, size)
        back = OVERLAP
        while back < window.length:
            start = window.length - back
            at, code = codec.find_frame(window, start, window.length, check_crc=self._check_crc)
            last = self._last_from(window, at) if code == REACHED_STOP else None
            if last is not None:
                return base + last
            back *= 4
        return base + (self._last_from(window, 0) or 0)

    def _last_from(self, window: codec.Window, at: int) -> int | None:
        """The last frame of a chain; None if there is none, or it does not come to the end."""
        last: int | None = None
        code = TABLE_FULL
        while code == TABLE_FULL:
            count, at, code = codec.walk(window, at, window.length, self._rows, check_crc=False)
            if count:
                last = int(self._rows[count - 1, POSITION])
        return last if code in (REACHED_STOP, BLANK, NEED_MORE) else None

    def take(self, offset: int, data: memoryview) -> None:
        """Take bytes of the master's log, which follow what came before.

        They are not judged before :meth:`check`.

        Raises:
            LogsDiverged: if they are others than this log has there.
            ReplicationError: if this log cannot begin where they do.
            StoreUnavailable: if the disk does not take them.
        """
        self._has_beaten = self._has_come = False
        wrote = self._feed.wrote_offset
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
        if self._start == 0 and offset == 1:
            offset, first = 0, b"\0" + bytes(data)
        if not self._feed.append_data(offset, first):
            raise ReplicationError(
                f"{self._root}: its log cannot begin at {offset}, where no file of "
                f"{self._feed.file_size} bytes does: it must be the start of one of the master's "
                "files, and mappedFileSizeCommitLog the master's"
            )
        self.checked = self._vouched = offset
        self._feed.vouch(offset)

    def _append(self, offset: int, data: memoryview) -> None:
        taken = self._feed.append_data(offset, data)
        assert taken, f"the log ends at {self._feed.wrote_offset}, and not at {offset}"

    def _compare(self, offset: int, data: memoryview) -> None:
        while data:
            own = self._feed.select(offset)
            part = data[: len(own)] if own is not None else data
            if own is None or own[: len(part)] != part:
                at = offset if own is None else offset + _first_difference(own, part)
                raise LogsDiverged(
                    f"{self._root}: at offset {at} its log has other bytes than its master's. "
                    f"{self._advice(at)}",
                    offset=at,
                )
            offset, data = offset + len(part), data[len(part) :]

    def _advice(self, offset: int) -> str:
        if offset >= self.checked:
            return (
                f"Only a message that never came whole, at {self.checked}, is concerned: opening "
                "the store anew cuts it off, and it can go on"
            )
        return f"Where they part: logquarry diff MASTER-STORE {self._root}"

    def check(self) -> None:
        """Judge what has come and is whole, and vouch for it.

        Raises:
            SpoiltReplica: if it is no log.
        """
        before = self.checked
        try:
            self._walk()
        finally:
            if self.checked > before:
                self._feed.vouch(self.checked)
                self._vouched = self.checked

    def _walk(self) -> None:
        size = self._feed.file_size
        end = self._feed.wrote_offset
        while self.checked < end:
            room = size - self.checked % size
            data = self._feed.select(self.checked)
            if room < BLANK_LAYOUT.size and data is not None:
                # Too few bytes for a blank: RocketMQ never leaves so few, others may.
                if len(data) < room:
                    return
                self.checked += room
                continue
            if data is None or len(data) < BLANK_LAYOUT.size:
                return
            window = codec.Window.of(data, self.checked, room)
            count, after, code = codec.walk(
                window, 0, window.length, self._rows, check_crc=self._check_crc
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
        reason = codec.damage_reason(window, position, check_crc=self._check_crc)
        advice = "Opening the store anew cuts it off"
        if code in (DamageKind.BAD_BLANK, DamageKind.BAD_SIZE):
            # A frame that its file has no room for, or a blank within one.
            advice += (
                f". Files of the log have {self._feed.file_size} bytes here: where the master's "
                "have not, replicate into an empty folder, with its mappedFileSizeCommitLog"
            )
        raise SpoiltReplica(
            f"{self._root}: what the master sent is no frame at offset {self.checked}: "
            f"{DamageKind(code).label}: {reason}. None of it was acknowledged. {advice}"
        )

    # ------------------------------------------------------------------------ the master's words
    def heartbeat(self, offset: int) -> None:
        """The master has nothing more than what came before an offset, or is slow about it.

        Raises:
            LogsDiverged: if this log goes on behind it, and the master says nothing new of it.
        """
        if offset < self._feed.wrote_offset and self._has_beaten:
            # After seconds of silence RocketMQ says this first, whether or not more follows: at the
            # start, and where this side was slow. Two in a row are said where nothing follows.
            self._ahead(offset)
        wrote = self._feed.wrote_offset
        # One that has nothing may begin where the master's log ends, at the start of a file.
        self._has_come = offset == wrote or (not wrote and self._has_beaten)
        self._has_beaten = True

    def elsewhere(self, offset: int) -> None:
        """The master has nothing where it was asked, but begins or ends at an offset.

        Returns where another connection may go better.

        Raises:
            LogsDiverged: if the master ends there.
            ReplicationError: if it begins there, and this log ends before.
        """
        wrote = self._feed.wrote_offset
        if not wrote:
            if offset > self.position:
                self._start = offset
            # Else it may come to where it was asked from.
        elif offset < self.position:
            self._ahead(offset)
        elif offset <= self._last_frame():
            self._floor = offset
        elif offset <= wrote:
            raise ReplicationError(
                f"{self._root}: its log ends at {wrote}, and its master's begins at {offset}: "
                "the messages that both had, by which to tell that they are one log, are gone. "
                "Replicate into an empty folder"
            )
        else:
            raise ReplicationError(
                f"{self._root}: its log ends at {wrote}, and its master's begins at {offset}: "
                "what is between is gone. Replicate into an empty folder"
            )

    def _ahead(self, offset: int) -> None:
        raise LogsDiverged(
            f"{self._root}: its log goes on to {self._feed.wrote_offset}, and its master's ends "
            f"at {offset}: it is ahead of its master. {self._advice(offset)}",
            offset=offset,
        )

    @property
    def has_all(self) -> bool:
        """Whether the master's last word was that there is no more, and all of it is whole."""
        return self._has_come and self.checked == self._feed.wrote_offset

    # -------------------------------------------------------------------------------------- acks
    def sync(self) -> int:
        """Bring the log to the disk; what stands before the answer is there, and was checked.

        Raises:
            StoreUnavailable: if the sync failed, now or before.
        """
        # Before the sync: what is appended meanwhile may be on the disk or not.
        vouched = self._vouched
        end = min(vouched, self._feed.sync())
        # A body that does not match its CRC looks like what a crash has torn.
        self._feed.keep(not self._check_crc)
        return end

    @property
    def wrote(self) -> int:
        """Where the log ends."""
        return self._feed.wrote_offset


def _first_difference(one: memoryview, other: memoryview) -> int:
    for at, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return at
    raise AssertionError("they are alike")
