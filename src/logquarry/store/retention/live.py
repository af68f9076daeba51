"""The retention of a store that this process writes.

Files go while others put, dispatch and read. Of the log only what is on the disk and in the queues
may go, and never the last file, so that no writer is near it. A reader keeps what it holds: the
file's name goes, its map stays until the last view of it does, in this process and in any other.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from logquarry.config import StoreConfig
from logquarry.dialect31.state_table import StateTableKeeper
from logquarry.disk.disk import Disk
from logquarry.disk.mapped_file_queue import MappedFileQueue
from logquarry.disk.service import Health, Service
from logquarry.errors import StoreError, StoreUnavailable
from logquarry.log.layout import COMMIT_LOG, INDEX, REDO_LOG, STATE_TABLE, StoreLayout
from logquarry.read.log_queues import QueueKey
from logquarry.store.load.ledger import Ledger
from logquarry.store.retention.plan import RetentionPlan, plan_retention
from logquarry.store.retention.rules import (
    HOUR_MS,
    DiskUse,
    RetentionRules,
    delete_hours,
    disk_use,
    rules_due,
)
from logquarry.units import Clock
from logquarry.write.index_writer import IndexKeeper
from logquarry.write.queue_table import QueueTable

logger = logging.getLogger(__name__)

_PERCENT: Final = 100


class LiveRetention:
    """Plans and applies retentions of one store, one at a time.

    Args:
        disk: what the store is on.
        root: its folder.
        layout: gives its files as they are now.
        log: its log.
        queues: its queues.
        index: its index, None where it keeps none.
        transactions: its state table and redo log, None where it keeps none.
        dispatched: up to where the log is in queues and index.
        clock: gives the time, in milliseconds.

    Attributes:
        removed: told when files of the log have gone, whose bytes somebody may still hold on to.
    """

    def __init__(
        self,
        disk: Disk,
        root: Path,
        layout: Callable[[], StoreLayout],
        *,
        log: MappedFileQueue,
        queues: QueueTable,
        index: IndexKeeper | None,
        transactions: StateTableKeeper | None,
        dispatched: Callable[[], int],
        clock: Clock,
    ) -> None:
        self._disk = disk
        self._root = root
        self._layout = layout
        self._log = log
        self._queues = queues
        self._index = index
        self._transactions = transactions
        self._dispatched = dispatched
        self._clock = clock
        self._working = threading.Lock()
        self._is_ended = False
        # Where the log began when queues and index were looked at last.
        self._derived_at = -1
        self.removed: Callable[[], None] = lambda: None

    def plan(self, rules: RetentionRules, *, always_derived: bool = True) -> RetentionPlan:
        """What would go now. Nothing is changed.

        Args:
            rules: what may go.
            always_derived: see :func:`plan_retention`.

        Raises:
            CorruptFile: if what a load is about cannot be told.
        """
        safe_end = min(self._log.flushed_offset, self._log.max_offset, self._dispatched())
        intent = Ledger(self._disk, self._root).intent()
        if intent is not None:
            # Whoever finishes a load that dies looks for its messages from there on.
            safe_end = min(safe_end, intent.start)
        # Asked for before the files are looked at: what is not held then never is again.
        held = frozenset[str]() if self._index is None else self._index.held
        return plan_retention(
            self._layout(),
            rules,
            now_ms=self._clock(),
            safe_end=safe_end,
            log_end=self._log.max_offset,
            held=frozenset(f"{INDEX}/{name}" for name in held),
            always_derived=always_derived,
        )

    def run(self, rules: RetentionRules, *, pause_s: float = 0.0) -> RetentionPlan:
        """Delete what may go: what that was.

        Args:
            rules: what may go.
            pause_s: between two files of the log, so that the disk has time for others.

        Raises:
            StoreUnavailable: if the store takes no writes, or the disk fails; what is gone is
                gone, and all of the rest is in order.
        """
        with self._working:
            self._disk.health.require_writable()
            self._require_open()
            # As RocketMQ looks at its queues: when the log has begun to begin elsewhere.
            plan = self.plan(rules, always_derived=self._log.min_offset != self._derived_at)
            try:
                for number, file in enumerate(plan.log):
                    if number and pause_s:
                        time.sleep(pause_s)
                    self._require_open()
                    logger.info("%s: deleted: %s", self._root / file.path, file.reason)
                    self._log.remove_first()
            finally:
                # Also of those that went before one that did not.
                self.removed()
            for key, files in plan.queues:
                self._require_open()
                self._cut_queue(key, files[-1].base)
            for gone in plan.index:
                self._disk.remove(self._root / gone.path)
            self._cut_transactions(plan)
            self._derived_at = self._log.min_offset
            return plan

    def _require_open(self) -> None:
        if self._is_ended:
            raise StoreUnavailable(f"{self._root}: the store was closed")

    def _cut_queue(self, key: QueueKey, last_base: int) -> None:
        writer = self._queues.writers.get(key)
        if writer is not None:
            writer.files.remove_until(last_base)

    def _cut_transactions(self, plan: RetentionPlan) -> None:
        for name in (STATE_TABLE, REDO_LOG):
            gone = [file.base for file in plan.transactions if file.path.startswith(f"{name}/")]
            # Of a store in another dialect nobody has them open, and they are left alone.
            if gone and self._transactions is not None:
                self._require_open()
                self._transactions.remove_until(name, gone[-1])

    def end(self) -> None:
        """The store is being closed: wait for what is going on, and do no more."""
        self._is_ended = True
        with self._working:
            logger.debug("%s: nothing is deleted any more", self._root)


class RetentionService(Service):
    """Deletes what has expired, as RocketMQ does, in a store that was asked to.

    Args:
        retention: does it.
        config: says when, and what.
        root: the store's folder.
        health: of the store.
        clock: gives the time, in milliseconds.
        use: tells how full the disk is.
    """

    def __init__(
        self,
        retention: LiveRetention,
        config: StoreConfig,
        root: Path,
        health: Health,
        *,
        clock: Clock,
        use: Callable[[Path], DiskUse | None] = disk_use,
    ) -> None:
        super().__init__("retention", health, interval_ms=config.clean_resource_interval)
        # Refused when the store is opened, and not once the hour has come.
        delete_hours(config.delete_when)
        self._retention = retention
        self._config = config
        self._root = root
        self._clock = clock
        self._use = use

    def due(self) -> RetentionRules | None:
        """What is to be done now, None for nothing."""
        config = self._config
        found = self._use(self._root / COMMIT_LOG)
        return rules_due(
            now_ms=self._clock(),
            delete_when=config.delete_when,
            older_than_ms=config.file_reserved_time * HOUR_MS,
            max_disk_ratio=config.disk_max_used_space_ratio / _PERCENT,
            forcibly=config.clean_file_forcibly_enable,
            used_ratio=0.0 if found is None else found.ratio,
            most_files=config.delete_files_batch_max,
        )

    def run_once(self) -> None:
        """Do what is due."""
        rules = self.due()
        if rules is None:
            return
        try:
            plan = self._retention.run(
                rules, pause_s=self._config.delete_commit_log_files_interval / 1_000
            )
        except StoreError as error:
            # Unless the store is poisoned the next run tries again.
            self.health.require_writable()
            logger.warning("%s: nothing more is deleted now: %s", self._root, error)
            return
        if plan.files:
            logger.warning(
                "%s: %d files of the log, %d of queues, %d of the index, %d of transactions have "
                "expired, and are deleted: the log begins at %d",
                self._root,
                len(plan.log),
                sum(len(files) for _, files in plan.queues),
                len(plan.index),
                len(plan.transactions),
                plan.new_min_offset,
            )
