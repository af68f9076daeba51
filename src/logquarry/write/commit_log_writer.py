"""The writer of the commit log."""

from __future__ import annotations

from logquarry.config import StoreConfig
from logquarry.disk.mapped_file_queue import MappedFileQueue
from logquarry.disk.service import Health, RunningFlags
from logquarry.read.log_queues import QueueKey
from logquarry.units import Clock
from logquarry.write.frame_append import Settle
from logquarry.write.log_appender import AppendRules
from logquarry.write.put_batch_path import PutBatchPath
from logquarry.write.put_path import settle_nothing


class CommitLogWriter(PutBatchPath):
    """Puts messages into the log, like the put methods of ``CommitLog``. Any thread may put."""

    def __init__(
        self,
        files: MappedFileQueue,
        config: StoreConfig,
        *,
        clock: Clock,
        queue_offsets: dict[QueueKey, int] | None = None,
        flags: RunningFlags | None = None,
        health: Health | None = None,
        settle: Settle = settle_nothing,
        rules: AppendRules | None = None,
    ) -> None:
        super().__init__(
            files,
            config,
            clock,
            {} if queue_offsets is None else queue_offsets,
            flags or RunningFlags(),
            health or Health(),
            settle,
            rules,
        )
