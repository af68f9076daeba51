"""Opens and closes all files of a store that is open for writing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from logquarry.dialect31.state_table import StateTableKeeper
from logquarry.disk.disk import Disk
from logquarry.disk.locks import AbortFile
from logquarry.disk.log_files import AllocateMappedFileService, free_room, open_log
from logquarry.disk.page_file import CheckpointFile, DurableFile
from logquarry.disk.service import Health, Service
from logquarry.disk.write_buffers import TransientStorePool
from logquarry.errors import StoreUnavailable
from logquarry.log import store_files as names
from logquarry.repair.recover.open_check import StoreFound
from logquarry.units import Clock
from logquarry.write.flush import Flushable
from logquarry.write.index_writer import IndexKeeper
from logquarry.write.queue_table import QueueTable, TopicTable

logger = logging.getLogger(__name__)

_WATCH_INTERVAL_MS: Final = 1_000


class StoreFiles:
    """The open files of one store. If opening a file fails, the earlier files are closed.

    Attributes:
        config: the settings, in which all file sizes are set.
        keeps_tails: whether bytes of an earlier log follow the log's end.
        pool: buffers for puts before the commit; None if puts write directly to the files.
        transactions: state table and redo log of dialect 3.1; None in another dialect.
        topics: the topics in ``config/``; None for a slave, which gets its master's topics.
        frees_room: whether :meth:`close` frees the disk space of unwritten parts of the last files.
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
        self._recovered = found.recovered
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
            )
            opened.callback(self.queues.close)
            self.log.load()
            if self.log.bases and found.keeps_tails:
                self.log.end_at(found.log_end)
            elif self.log.bases:
                self.log.truncate_to(found.log_end, aside=names.quarantine(root, names.COMMIT_LOG))
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
        """Yield the files that are made from the log: topics, queues, transactions, index."""
        if self.topics is not None:
            # Topics come first: a broker serves a queue only if the topic is listed.
            yield self.topics
        if self._recovered is not None:
            yield self._recovered.written
        yield from self.queues
        if self.transactions is not None:
            yield self.transactions
        if self.index is not None:
            yield self.index

    def close(self) -> None:
        """Close all files; a second call does nothing."""
        log, queues = self.log.last, self.root / names.CONSUME_QUEUE
        folders = [self.root / names.INDEX, *([] if log is None else [log.path.parent])]
        if self.frees_room:
            keys = self.queues.keys()
            folders += [queues.joinpath(topic, str(number)) for topic, number in keys]
        self._opened.close()
        if self.frees_room and self.disk.health.reason is None:
            free_room(self.disk, folders)


class Housekeeping(Service):
    """Once a second, restores ``abort`` and index files that another program has deleted.

    If a Java broker opens the same store, it cannot take the lock. But before the broker tries the
    lock, its recovery deletes index files; and when the broker ends, it deletes ``abort``.
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
        """Sample the counts, and restore missing files."""
        self._sample()
        if not self._abort.exists:
            logger.warning(
                "%s: another program deleted it while the store was open", self._abort.path
            )
            try:
                self._abort.make()
            except StoreUnavailable as error:
                # Restoring can fail on a full disk. The next run tries again.
                self.health.require_writable()
                logger.warning("it cannot be restored: %s", error)
        if self._index is not None:
            self._index.check()
