"""Gives replication the log as bytes: reads bytes for slaves, and appends bytes from a master."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from logquarry.disk.service import Refusal, RunningFlags
from logquarry.log.store_files import COMMIT_LOG, quarantine
from logquarry.store.log_growth import LogGrowth, Wakeable
from logquarry.store.store_files import StoreFiles
from logquarry.write.append import CommitLogWriter
from logquarry.write.dispatcher import Dispatcher, DispatchService
from logquarry.write.put_result import PutStatus, refusal
from logquarry.write.waits import ReplicaWait

_ADOPT_SECONDS = 1.0


@dataclass(eq=False, repr=False)
class LogFeed:
    """The log of an open store, for replication. Any thread may call the methods.

    Bytes of another store's log may end inside a frame. :meth:`vouch` sets the offset before which
    all frames are whole. The store dispatches only these frames, and keeps only these frames when
    it is opened again.
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
        """Bytes of each file of the log."""
        return self._log.file_size

    @property
    def min_offset(self) -> int:
        """Physical offset at which the first file begins; 0 if there are no files."""
        return max(0, self._log.min_offset)

    @property
    def max_offset(self) -> int:
        """Physical offset up to which bytes can be read and sent to other slaves.

        In a slave, the offset excludes bytes that the slave has not checked yet. The next opening
        of the store may cut off unchecked bytes. A slave that already has these bytes would then be
        ahead of its master, this store.
        """
        end, vouched = self._log.max_offset, self.dispatcher.limit
        return end if vouched is None else min(end, vouched)

    @property
    def wrote_offset(self) -> int:
        """Physical offset at which the written bytes end."""
        return self._log.wrote_offset

    @property
    def dispatched_offset(self) -> int:
        """Physical offset at which the dispatched frames end."""
        return self.dispatcher.offset

    def select(self, offset: int, most: int | None = None) -> memoryview | None:
        """Return at most ``most`` bytes from an offset to the end of the log or of its file.

        Return None if there are no such bytes. The bytes stay valid while the caller holds the
        view.
        """
        return self._log.select(offset, most=most)

    def sync(self) -> int:
        """Sync the log; return the physical offset up to which the log is on the disk."""
        return self._log.flush(0)

    def follow(self, flag: Wakeable) -> None:
        """Set a flag from now on whenever the log grows."""
        self.growth.follow(flag)

    def unfollow(self, flag: Wakeable) -> None:
        """Stop setting a flag."""
        self.growth.unfollow(flag)

    # ------------------------------------------------------------------------------------ append
    def append_data(self, offset: int, data: bytes | bytearray | memoryview) -> bool:
        """Append bytes of another store's log, without waking any follower of the log."""
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
        """State that the bytes before an offset are whole frames, and wake the dispatcher.

        From then on, the store dispatches only frames before that offset, and keeps only these
        frames when it is opened again.
        """
        self.dispatcher.limit = offset
        self.growth.wake()

    def keep(self, durably: bool) -> None:
        """Save the offset up to which vouched bytes are synced; a later opening keeps these bytes.

        With ``durably``, also sync the saved offset, so that the offset survives a power cut.
        ``durably`` is not needed if all frames are sound, because a recovery keeps sound frames.
        """
        # The log may have been synced before vouch() raised the limit of the durable offset.
        self.note_flushed(self._log.flushed_offset)
        if durably:
            self.files.durable.sync()

    def note_flushed(self, offset: int) -> None:
        """Raise the durable offset after a sync of the log up to an offset."""
        # Bytes of another store's log may end inside a frame. Dispatched bytes and vouched bytes
        # end between two frames.
        if self.writer.has_foreign:
            vouched = self.dispatcher.limit
            offset = min(offset, self.dispatcher.offset if vouched is None else vouched)
        self.files.durable.move(offset)

    def adopt(self) -> None:
        """Read the next queue offsets from the bytes that :meth:`append_data` appended.

        If the bytes end inside a frame, raise StoreUnavailable, because no put may follow them.
        """
        with self._adopting:
            if not self.writer.has_foreign:
                return
            end = self._log.wrote_offset
            # A listener runs in the dispatcher's thread, so a listener cannot wait for the
            # dispatcher.
            waits = not self.dispatching.is_current
            if not (waits and self.dispatching.wait_dispatched(end, _ADOPT_SECONDS)):
                raise refusal(
                    PutStatus.SERVICE_NOT_AVAILABLE,
                    f"{self.files.root}: the log ends inside a message of another store: its rest "
                    "has to come first",
                )
            self.writer.adopt(end, self.files.queues.next_offsets)

    def cut_unvouched(self) -> None:
        """Cut off the bytes of another store's log after the last offset given to :meth:`vouch`.

        The bytes usually end inside a message, and the zeros after them may seem to complete the
        message.
        """
        vouched = self.dispatcher.limit
        if vouched is None or vouched >= self._log.wrote_offset or not self.writer.has_foreign:
            return
        # If the log starts above 0, the vouched offset may be below the log's start.
        vouched = max(vouched, self._log.min_offset)
        file = self._log.last
        if file is not None and file.base <= vouched:
            file.clear_from(vouched - file.base)
        self._log.truncate_to(vouched, aside=quarantine(self.files.root, COMMIT_LOG))

    def require_open(self) -> None:
        """Raise StoreUnavailable if the store was closed."""
        if Refusal.CLOSED in self.flags.refusals:
            raise refusal(PutStatus.SERVICE_NOT_AVAILABLE, f"{self.files.root}: it is closed")
