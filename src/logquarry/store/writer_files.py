"""Opens and closes the files of a store that is open for writing.

The module also restores files that another program deletes while the store is open, and lets the
replication read and append the bytes of the log.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from logquarry.arguments import Clock
from logquarry.dialect31.state_table import StateTableKeeper
from logquarry.disk.disk import Disk
from logquarry.disk.folders import AbortFile
from logquarry.disk.log_files import AllocateMappedFileService, free_room, open_log
from logquarry.disk.page_file import CheckpointFile, DurableFile
from logquarry.disk.service import Health, Refusal, RunningFlags, Service
from logquarry.disk.write_buffers import TransientStorePool
from logquarry.errors import StoreUnavailable
from logquarry.log import store_files as names
from logquarry.repair.recover.open_check import StoreFound
from logquarry.write.commit_log_writer import CommitLogWriter
from logquarry.write.dispatcher import Dispatcher, DispatchService
from logquarry.write.flush import Flushable
from logquarry.write.index_writer import IndexKeeper
from logquarry.write.put_result import PutStatus, ReplicaWait, refusal
from logquarry.write.queue_table import QueueTable, TopicTable
from logquarry.write.settling import LogGrowth, Wakeable

logger = logging.getLogger(__name__)

_WATCH_INTERVAL_MS: Final = 1_000


class StoreFiles:
    """The open files of one store.

    If opening one of them fails, those that are already open are closed.

    Attributes:
        config: the settings of the store, completed with the sizes of its files.
        keeps_tails: whether stale frames, which a recovery left, may follow the log's end in its
        files.
        pool: memory into which puts write before the commit copies it to the files; None if puts
            write directly to the files.
        transactions: the state table and redo log, which only dialect 3.1 has; None in another
            dialect.
        topics: the table of topics in ``config/``; None in a slave, which copies the table from its
            master.
        frees_room: whether :meth:`close` frees the disk space that the last files reserve but do
            not use.
    """

    def __init__(
        self,
        disk: Disk,
        root: Path,
        found: StoreFound,
        clock: Clock,
        *,
        was_unclean: bool,
    ) -> None:
        self.disk = disk
        self.root = root
        self.config = config = found.config
        self.keeps_tails = found.keeps_tails
        self.frees_room = False
        with ExitStack() as opened:
            for name in (found.log_folders.paths[0], names.CONSUME_QUEUE, names.INDEX):
                disk.make_folders(root / name)
            self.pool = self._open_pool(opened)
            self.allocator = AllocateMappedFileService(
                disk,
                pool=self.pool,
                warm=config.warm_mapped_file_enable,
                fast_fail=config.fast_fail_if_no_buffer_in_store_pool,
            )
            log_size = config.mapped_file_size_commit_log
            assert log_size is not None
            self.log = open_log(
                *(disk, root, found.log_folders, log_size),
                allocator=self.allocator,
                gaps=found.keeps_tails,
            )
            opened.callback(self.log.close)
            self.checkpoint = CheckpointFile(disk, root / names.CHECKPOINT)
            opened.callback(self.checkpoint.close)
            self.queues = QueueTable(
                disk,
                root,
                config,
                found.queue_ends,
                self.log,
                keeps_tails=found.keeps_tails,
                log_end=found.log_end,
            )
            opened.callback(self.queues.close)
            self.log.load()
            if self.log.bases and found.keeps_tails:
                self.log.end_at(found.log_end)
            elif self.log.bases:
                self.log.truncate_to(found.log_end)
            self.durable = DurableFile(
                *(disk, root / names.DURABLE, found.log_end, self.checkpoint.times),
                log_start=self.log.min_offset,
            )
            self.durable.find_start = lambda: self.log.min_offset
            self.checkpoint.before_write = self.durable.expect
            opened.callback(self.durable.close)
            self.index = self._open_index(clock)
            if self.index is not None:
                opened.callback(self.index.close)
            self.transactions: StateTableKeeper | None = None
            if config.is_3_1:
                self.transactions = StateTableKeeper(
                    disk, root, config, found.transactions, found.log_end
                )
                opened.callback(self.transactions.close)
            self.topics = (
                None
                if config.broker_role == "SLAVE"
                else TopicTable(
                    *(disk, root, clock, self.queues.keys()),
                    batch_topics=config.batch_topics,
                    was_unclean=was_unclean,
                )
            )
            self._opened = opened.pop_all()

    def _open_pool(self, opened: ExitStack) -> TransientStorePool | None:
        config = self.config
        log_size = config.mapped_file_size_commit_log
        if not config.uses_transient_pool or log_size is None:
            return None
        pool = TransientStorePool(config.transient_store_pool_size, log_size)
        opened.callback(pool.close)
        return pool

    def _open_index(self, clock: Clock) -> IndexKeeper | None:
        if not self.config.message_index_enable:
            return None
        shape = self.config.index_shape
        assert shape is not None
        return IndexKeeper(
            *(self.disk, self.root, shape, self.checkpoint, clock),
            sync_log=lambda: self.log.flush(0),
            counts_keys=self.config.is_3_1,
        )

    def derived(self) -> Iterator[Flushable]:
        """Yield the parts whose content comes from the log: topics, queues, transactions, index."""
        if self.topics is not None:
            # Sync the topics first, because a broker serves a queue only if its topic is in the
            # table.
            yield self.topics
        yield from self.queues
        if self.transactions is not None:
            yield self.transactions
        if self.index is not None:
            yield self.index

    def close(self) -> None:
        """Close all files. A second call does nothing."""
        frees_room, self.frees_room = self.frees_room, False
        keys, queues = self.queues.keys() if frees_room else (), self.root / names.CONSUME_QUEUE
        folders = {queues.joinpath(topic, str(number)): 0 for topic, number in keys}
        folders[self.root / names.INDEX] = 0
        if (log := self.log.last) is not None:
            folders[log.path.parent] = log.wrote
        self._opened.close()
        if frees_room and self.disk.health.reason is None:
            free_room(self.disk, folders)


class Housekeeping(Service):
    """Once a second, restores ``abort`` and index files that another program has deleted.

    If a Java broker opens the same store, its recovery deletes index files. Then the broker fails
    to take the lock, ends, and deletes ``abort``.
    """

    def __init__(
        self,
        abort: AbortFile,
        index: IndexKeeper | None,
        sample: Callable[[], None],
        health: Health,
    ) -> None:
        super().__init__("housekeeping", health, interval_ms=_WATCH_INTERVAL_MS)
        self._abort = abort
        self._index = index
        self._sample = sample

    def run_once(self) -> None:
        """Record the counts of calls, and restore missing files."""
        self._sample()
        if not self._abort.exists:
            logger.warning(
                "%s: another program deleted it, or its disk was unmounted",
                self._abort.path,
            )
            try:
                self._abort.make()
            except StoreUnavailable as error:
                # The creation of the file fails if the disk is full. Then the next run tries again.
                self.health.require_writable()
                logger.warning("the file abort cannot be restored: %s", error)
        if self._index is not None:
            self._index.check()


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
        slave has not checked later bytes. The next opening of the store may cut off later bytes.
        If another slave had copied the later bytes from this store, its log would then be longer
        than its master's log.
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
        """Return the bytes from an offset to the end of its file or of the log, at most ``most``.

        Return None if the log has no byte at the offset. The result is a view of the file in
        memory, so the caller must keep the view as long as it uses the bytes.
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
        """Save the durable offset. All bytes before this offset are synced, and belong to whole
        frames (:meth:`vouch`). The next opening of the store keeps these bytes.

        With ``durably``, sync the saved offset too, so that it survives a power cut. If all frames
        are undamaged, this sync is not necessary, because a recovery keeps undamaged frames.
        """
        # The durable offset is at most the offset that was last passed to vouch(). If vouch() was
        # called after the last sync, raise the durable offset now, without a new sync.
        self.note_flushed(self._log.flushed_offset)
        if durably:
            self.files.durable.sync()

    def note_flushed(self, offset: int) -> None:
        """After the log was synced up to an offset, raise the durable offset."""
        # Bytes of another store's log may end inside a frame, but the durable offset must lie
        # between two frames. So use the offset that was passed to vouch(). If vouch() was not
        # called, use the end of the last dispatched frame.
        if self.writer.has_foreign:
            vouched = self.dispatcher.limit
            offset = min(offset, self.dispatcher.offset if vouched is None else vouched)
        self.files.durable.move(offset)

    def adopt(self) -> None:
        """Prepare the store for puts after :meth:`append_data`: set the next queue offset of each
        queue to the offset after the appended messages.

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

        The copied bytes usually end inside a message. The zeros after them in the file could be
        mistaken for the rest of the message.
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
