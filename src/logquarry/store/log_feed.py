"""The log of an open store as bytes, which replication reads and appends."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from logquarry.disk.service import Refusal, RunningFlags
from logquarry.store.writer_files import StoreFiles
from logquarry.write.commit_log_writer import CommitLogWriter
from logquarry.write.dispatcher import Dispatcher, DispatchService
from logquarry.write.put_result import PutStatus, ReplicaWait, refusal
from logquarry.write.settling import LogGrowth, Wakeable

_ADOPT_SECONDS = 1.0


@dataclass(eq=False, repr=False)
class LogFeed:
    """The log of an open store as bytes, for replication. Any thread may call the methods.

    Bytes that were copied from another store's log may end inside a frame. So the caller passes an
    offset to :meth:`vouch` after it has checked that all frames before this offset are whole. The
    store dispatches only frames before this offset. When the store is closed, it removes the bytes
    after this offset.
    """

    files: StoreFiles
    writer: CommitLogWriter
    dispatcher: Dispatcher
    dispatching: DispatchService
    growth: LogGrowth
    replicas: ReplicaWait
    flags: RunningFlags

    def __post_init__(self) -> None:
        self._log = self.files.log
        self._adopting = threading.Lock()

    # -------------------------------------------------------------------------------------- read
    @property
    def file_size(self) -> int:
        """Size of each file of the log in bytes."""
        return self._log.file_size

    @property
    def min_offset(self) -> int:
        """Physical offset at which the first file begins; 0 if there are no files."""
        return max(0, self._log.min_offset)

    @property
    def max_offset(self) -> int:
        """Physical offset up to which other processes may read the log's bytes, and slaves may copy
        them.

        In a slave, this offset is at most the last offset passed to :meth:`vouch`, because the
        slave has not checked later bytes. The next opening of the store may cut off these bytes.
        Another slave that had already copied them from this store would then have more bytes than
        its master.
        """
        end, vouched = self._log.max_offset, self.dispatcher.limit
        return end if vouched is None else min(end, vouched)

    @property
    def wrote_offset(self) -> int:
        """Physical offset of the end of the bytes that were written to the log."""
        return self._log.wrote_offset

    @property
    def dispatched_offset(self) -> int:
        """Physical offset up to which frames have been dispatched."""
        return self.dispatcher.offset

    def select(self, offset: int, most: int | None = None) -> memoryview | None:
        """Return at most ``most`` bytes from an offset on, up to the end of the log or of the file.

        Return None if the log has no byte at the offset. The caller must hold the view while it
        uses the bytes.
        """
        return self._log.select(offset, most=most)

    def sync(self) -> int:
        """Sync the log; return the physical offset up to which it is synced."""
        return self._log.flush(0)

    def follow(self, flag: Wakeable) -> None:
        """From now on, set a flag whenever the log grows."""
        self.growth.follow(flag)

    def unfollow(self, flag: Wakeable) -> None:
        """No longer set a flag when the log grows."""
        self.growth.unfollow(flag)

    # ------------------------------------------------------------------------------------ append
    def append_data(self, offset: int, data: bytes | bytearray | memoryview) -> bool:
        """Append bytes that were copied from another store's log. Do not wake any follower."""
        self.require_open()
        self.files.disk.health.require_writable()
        return self.writer.append_data(offset, data)

    def append_and_wake(self, offset: int, data: bytes | bytearray | memoryview) -> bool:
        """Append bytes, and wake the dispatcher, the flush service and the followers."""
        taken = self.append_data(offset, data)
        if taken:
            self.growth.wake_all()
        return taken

    def vouch(self, offset: int) -> None:
        """State that all frames before an offset are whole, and wake the dispatcher.

        After this call, the store dispatches only frames before this offset. When the store is
        closed, it removes the bytes after this offset.
        """
        self.dispatcher.limit = offset
        self.growth.wake()

    def keep(self, durably: bool) -> None:
        """Save the offset before which all bytes are synced and belong to whole frames
        (:meth:`vouch`). The next opening of the store keeps the bytes before this offset.

        With ``durably``, sync the saved offset too, so that it survives a power cut. This is not
        necessary if all frames are undamaged, because a recovery keeps undamaged frames anyway.
        """
        # vouch() may have raised the limit of the durable offset after the last sync, so apply the
        # synced offset again.
        self.note_flushed(self._log.flushed_offset)
        if durably:
            self.files.durable.sync()

    def note_flushed(self, offset: int) -> None:
        """After the log was synced up to an offset, raise the durable offset."""
        # Bytes of another store's log may end inside a frame, but the durable offset must lie
        # between two frames. So use the offset that vouch() was called with. Without such a call,
        # use the end of the last dispatched frame.
        if self.writer.has_foreign:
            vouched = self.dispatcher.limit
            offset = min(offset, self.dispatcher.offset if vouched is None else vouched)
        self.files.durable.move(offset)

    def adopt(self) -> None:
        """Continue the queue offsets after the messages that :meth:`append_data` appended, so that
        puts can follow these messages.

        Raise StoreUnavailable if the appended bytes end inside a frame, because no put may follow
        such bytes.
        """
        with self._adopting:
            if not self.writer.has_foreign:
                return
            end = self._log.wrote_offset
            # A listener that puts a message runs in the dispatcher's thread, so it cannot wait for
            # the dispatcher.
            waits = not self.dispatching.is_current
            if not (waits and self.dispatching.wait_dispatched(end, _ADOPT_SECONDS)):
                raise refusal(
                    PutStatus.SERVICE_NOT_AVAILABLE,
                    f"{self.files.root}: the log ends inside a message of another store: first "
                    "append the rest of this message",
                )
            self.writer.adopt(end, self.files.queues.next_offsets)

    def cut_unvouched(self) -> None:
        """Remove the copied bytes of another store's log that are after the last offset passed to
        :meth:`vouch`.

        These bytes usually end inside a message. The zeros after them in the file could be mistaken
        for the rest of the message.
        """
        vouched = self.dispatcher.limit
        if vouched is None or vouched >= self._log.wrote_offset or not self.writer.has_foreign:
            return
        # If the log starts above 0, the vouched offset may be lower than the log's start.
        vouched = max(vouched, self._log.min_offset)
        file = self._log.last
        if file is not None and file.base <= vouched:
            file.clear_from(vouched - file.base)
        self._log.truncate_to(vouched)

    def require_open(self) -> None:
        """Raise StoreUnavailable if the store was closed."""
        if Refusal.CLOSED in self.flags.refusals:
            raise refusal(PutStatus.SERVICE_NOT_AVAILABLE, f"{self.files.root}: it is closed")
