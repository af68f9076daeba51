"""The services that bring a store's files to the disk, as its settings ask for.

::

    SYNC_FLUSH     GroupCommitService         puts wait for it
    ASYNC_FLUSH    FlushRealTimeService       at an interval
    with a pool    CommitRealTimeService      from memory to the files, before that
    always         FlushConsumeQueueService   queues, index, checkpoint
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from logquarry.config import StoreConfig
from logquarry.store.disk.checkpoint_file import CheckpointFile
from logquarry.store.disk.health import Health
from logquarry.store.flush.group_commit import GroupCommitService
from logquarry.store.flush.timed_flush import (
    CommitRealTimeService,
    Flushable,
    FlushConsumeQueueService,
    FlushRealTimeService,
)
from logquarry.store.mapped.mapped_file_queue import MappedFileQueue


class FlushServices:
    """Makes the services of one store; who has them starts and stops them.

    Args:
        log: the log's files.
        config: the store's settings.
        health: of the store.
        checkpoint: the checkpoint.
        has_pool: whether messages are put into memory first, and then committed to the files.
        committed: told of what was.
        flushables: gives what is flushed behind the log: queues, index.
        dispatched_timestamp: the store time of what was dispatched last, in milliseconds.

    Attributes:
        group: brings the log to the disk for puts that wait; None where none does.
        log: does so whoever waits: ``group``, or at an interval.
        commit: commits; None where messages are put into the files.
        after_put: what a put has to wake.
        queues: flushes queues, index and checkpoint.
    """

    def __init__(
        self,
        log: MappedFileQueue,
        config: StoreConfig,
        health: Health,
        *,
        checkpoint: CheckpointFile,
        has_pool: bool,
        committed: Callable[[], None],
        flushables: Callable[[], Iterable[Flushable]],
        dispatched_timestamp: Callable[[], int],
    ) -> None:
        self.group: GroupCommitService | None = None
        self.log: GroupCommitService | FlushRealTimeService
        if config.flush_disk_type == "SYNC_FLUSH":
            self.log = self.group = GroupCommitService(
                log,
                health,
                checkpoint=checkpoint,
                timeout_ms=config.sync_flush_timeout,
            )
        else:
            self.log = FlushRealTimeService(
                log,
                health,
                checkpoint=checkpoint,
                interval_ms=config.flush_interval_commit_log,
                least_pages=config.flush_commit_log_least_pages,
                thorough_interval_ms=config.flush_commit_log_thorough_interval,
                is_timed=config.flush_commit_log_timed,
            )
        self.commit: CommitRealTimeService | None = None
        if has_pool:
            self.commit = CommitRealTimeService(
                log,
                health,
                committed=committed,
                interval_ms=config.commit_interval_commit_log,
                least_pages=config.commit_commit_log_least_pages,
                thorough_interval_ms=config.commit_commit_log_thorough_interval,
            )
        self.after_put = self.log if self.commit is None else self.commit
        self.queues = FlushConsumeQueueService(
            flushables,
            health,
            log=log,
            checkpoint=checkpoint,
            dispatched_timestamp=dispatched_timestamp,
            interval_ms=config.flush_interval_consume_queue,
            least_pages=config.flush_consume_queue_least_pages,
            thorough_interval_ms=config.flush_consume_queue_thorough_interval,
        )
