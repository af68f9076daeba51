"""Opens and closes the files of a store that is open for writing, and restores files that another
program deletes while the store is open.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from logquarry.arguments import Clock
from logquarry.dialect31.state_table import StateTableKeeper
from logquarry.disk.disk import Disk
from logquarry.disk.folders import AbortFile
from logquarry.disk.log_files import AllocateMappedFileService, free_room, open_log
from logquarry.disk.page_file import CheckpointFile, DurableFile
from logquarry.disk.service import Health, Service
from logquarry.disk.write_buffers import TransientStorePool
from logquarry.errors import StoreUnavailable
from logquarry.log import store_files as names
from logquarry.repair.recover.open_check import StoreFound
from logquarry.write.flush import Flushable
from logquarry.write.index_writer import IndexKeeper
from logquarry.write.queue_table import QueueTable, TopicTable

logger = logging.getLogger(__name__)

_WATCH_INTERVAL_MS: Final = 1_000


class StoreFiles:
    """The open files of one store.

    If opening one of them fails, those that are already open are closed.

    Attributes:
        config: the settings of the store, completed with the sizes of its files.
        keeps_tails: whether bytes of an earlier log may follow the log's end in its files.
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
