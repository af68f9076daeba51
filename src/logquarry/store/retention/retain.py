"""Carries out a retention, in a store that this process writes or that no process has open.

In an open store, other threads put, dispatch and read while the retention deletes files. The
retention deletes a log file only if the file is synced, dispatched, and not the last one, so no
other thread writes to this file. A reader that mapped the file into memory before its deletion can
still read it.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Final

from logquarry import arguments
from logquarry.arguments import Clock, Progress, now_ms
from logquarry.config import StoreConfig, settings_of
from logquarry.dialect31.state_table import StateTableKeeper
from logquarry.disk.config_file import consumer_offsets, delay_offsets
from logquarry.disk.disk import Disk
from logquarry.disk.folders import StoreLock, held_by
from logquarry.disk.log_files import log_paths
from logquarry.disk.mapped_file_queue import MappedFileQueue
from logquarry.disk.name_guard import NameGuard
from logquarry.disk.page_file import record_start
from logquarry.disk.service import Service
from logquarry.errors import CorruptFile, StoreError, StoreNotFound, StoreUnavailable
from logquarry.log.layout import StoreLayout
from logquarry.log.location import local_store
from logquarry.log.store_files import DURABLE, INDEX, REDO_LOG, STATE_TABLE
from logquarry.read.fence import Action, refusal, require
from logquarry.repair.recover.loss import missing_files
from logquarry.repair.recover.store_folders import check_entries
from logquarry.store.load.ledger import Ledger
from logquarry.store.retention.plan import RetentionPlan, plan_retention
from logquarry.store.retention.rules import (
    RetentionRules,
    delete_hours,
    least_used,
    require_rules,
    rules_due,
)
from logquarry.text import counted
from logquarry.write.index_writer import IndexKeeper
from logquarry.write.queue_table import QueueTable

logger = logging.getLogger(__name__)

_RECOVER: Final = "bring the file back, or run verify and recover the store first"


@dataclass(eq=False, repr=False)
class LiveRetention:
    """Plans and applies the retention of one store. A lock lets only one retention run at a time.

    After the deletion of log files, the retention calls ``removed``, which releases the store's
    views of these files.
    """

    disk: Disk
    root: Path
    config: StoreConfig
    _: KW_ONLY
    log: MappedFileQueue
    queues: QueueTable
    index: IndexKeeper | None
    transactions: StateTableKeeper | None
    begin_at: Callable[[int], None]
    dispatched: Callable[[], int]
    clock: Clock

    def __post_init__(self) -> None:
        self._working = threading.Lock()
        self._is_ended = False
        # The log's start at the last check of the files of queues and index.
        self._derived_at = -1
        self.removed: Callable[[], None] = lambda: None

    def plan(
        self, rules: RetentionRules, *, always_derived: bool = True, lists_unread: bool = True
    ) -> RetentionPlan:
        """Plan which files to delete now (:func:`plan_retention`).

        Raises:
            CorruptFile: if the intent of an unfinished load is unreadable.
            StoreNotFound: if a file cannot be read.
        """
        safe_end = min(self.log.flushed_offset, self.log.max_offset, self.dispatched())
        intent = Ledger(self.disk, self.root).intent()
        if intent is not None:
            # If a load is unfinished, keep the log from the load's start on, because a writer needs
            # this part to finish the load.
            safe_end = min(safe_end, intent.start)
        # Read `held` before the files are listed. A file that leaves `held` between these two
        # steps is kept until the next run. A file that has left `held` never enters it again.
        held = frozenset[str]() if self.index is None else self.index.held
        return plan_retention(
            StoreLayout.open(self.root, self.config),
            rules,
            now_ms=self.clock(),
            safe_end=safe_end,
            log_end=self.log.max_offset,
            held=frozenset(f"{INDEX}/{name}" for name in held),
            always_derived=always_derived,
            lists_unread=lists_unread,
        )

    def _plan_to_apply(self, rules: RetentionRules, *, lists_unread: bool) -> RetentionPlan:
        # Like RocketMQ, check queues and index only if the log's start has changed since the last
        # check.
        always_derived = self.log.min_offset != self._derived_at
        if lists_unread:
            try:
                return self.plan(rules, always_derived=always_derived)
            except StoreNotFound as error:
                # The offsets of the groups do not determine which files are deleted. So delete
                # files also if the offsets cannot be read. Otherwise the disk would fill up.
                logger.warning("%s; the plan lists no unread messages", error)
        return self.plan(rules, always_derived=always_derived, lists_unread=False)

    def run(
        self, rules: RetentionRules, *, pause_s: float = 0.0, lists_unread: bool = False
    ) -> RetentionPlan:
        """Delete the expired files; return the plan that was applied.

        Args:
            pause_s: seconds to wait between the deletions of two log files, so that the disk can do
                other work.
            lists_unread: whether the plan lists the unread messages, if they can be read.

        Raises:
            StoreUnavailable: if the store accepts no writes or was closed, or if the disk fails.
                Some of the files may be deleted then; the store is consistent.
        """
        with self._working:
            self.disk.health.require_writable()
            self._require_open()
            plan = self._plan_to_apply(rules, lists_unread=lists_unread)
            if plan.log:
                self.begin_at(plan.new_min_offset)
            try:
                for number, file in enumerate(plan.log):
                    if number and pause_s:
                        time.sleep(pause_s)
                    self._require_open()
                    logger.info("%s: deleted: %s", self.root / file.path, file.reason)
                    self.log.remove_first()
            finally:
                # Release the views even if a deletion failed: the files before it have been
                # deleted.
                self.removed()
            for key, files in plan.queues:
                self._require_open()
                writer = self.queues.writer(key)
                if writer is not None:
                    writer.files.remove_until(files[-1].base)
            for gone in plan.index:
                self.disk.remove(self.root / gone.path)
            self._cut_transactions(plan)
            self._derived_at = self.log.min_offset
            return dataclasses.replace(plan, applied=True)

    def _require_open(self) -> None:
        if self._is_ended:
            raise StoreUnavailable(f"{self.root}: the store was closed")

    def _cut_transactions(self, plan: RetentionPlan) -> None:
        for name in (STATE_TABLE, REDO_LOG):
            gone = [file.base for file in plan.transactions if file.path.startswith(f"{name}/")]
            # A writer opens the state table only in dialect 3.1. In dialect 4.9, the files of a
            # state table are kept.
            if gone and self.transactions is not None:
                self._require_open()
                self.transactions.remove_until(name, gone[-1])

    def end(self) -> None:
        """Refuse further deletions, and wait until the current retention has stopped.

        Called when the store is closed.
        """
        self._is_ended = True
        with self._working:
            logger.debug("%s: retention has ended", self.root)


class RetentionService(Service):
    """Deletes expired files periodically. Runs only if the store's configuration enables it."""

    retried = (StoreError,)

    def __init__(self, retention: LiveRetention) -> None:
        self._config = config = retention.config
        health = retention.disk.health
        super().__init__("retention", health, interval_ms=config.clean_resource_interval)
        # Parse the setting now, so that opening a store with an invalid setting fails.
        delete_hours(config.delete_when)
        self._retention = retention

    def due(self) -> RetentionRules | None:
        """Return the rules for this time and disk use; None if nothing must be deleted."""
        found = least_used(self._retention.log.folders)
        used_ratio = 0.0 if found is None else found.ratio
        return rules_due(self._config, self._retention.clock(), used_ratio)

    def run_once(self) -> bool:
        """Delete the expired files."""
        rules = self.due()
        if rules is None:
            return False
        pause_s = self._config.delete_commit_log_files_interval / 1_000
        plan = self._retention.run(rules, pause_s=pause_s)
        if plan.files:
            logger.warning(
                "%s: deleted %s of the log, %d of queues, %d of the index, %d of "
                "transactions: the log begins at %d",
                self._retention.root,
                counted(len(plan.log), "expired file"),
                sum(len(files) for _, files in plan.queues),
                len(plan.index),
                len(plan.transactions),
                plan.new_min_offset,
            )
        return True


def retain(
    path: str | os.PathLike[str],
    rules: RetentionRules,
    *,
    apply: bool = False,
    config: StoreConfig | None = None,
    clock: Clock | None = None,
    disk: Disk | None = None,
    progress: Progress | None = None,
) -> RetentionPlan:
    """Plan which files of a store to delete. With ``apply``, also delete them.

    Without ``apply``, nothing is changed, so another program may have the store open. With
    ``apply``, the function locks the store before it makes the plan. If the call is interrupted,
    call it again: it deletes the remaining files.

    Args:
        config: the store's settings. File sizes that are not set are inferred from the files.
        clock: function that returns the current time in milliseconds, from which the files' ages
            are computed.
        progress: called with the number of deleted files, and the number of files to delete.

    Returns:
        The plan. If the plan cannot be applied now, :attr:`RetentionPlan.refused` gives the reason.

    Raises:
        StoreNotFound: if there is no store.
        UnsupportedStore: with ``apply``, if the store has a feature that a deletion would harm.
        StoreUnavailable: with ``apply``, if another program has the store open, if the store needs
            a recovery or has an unfinished load, or if the disk fails.
        UsageError: if the store is not local.
    """
    root = local_store(path)
    settings, rules = settings_of(config), require_rules(rules)
    apply = arguments.flag(apply, "apply")
    for name, value in (("clock", clock), ("progress", progress)):
        arguments.optional(arguments.function, value, name)
    arguments.optional(arguments.instance, disk, "disk", kind=Disk, takes="a Disk")
    clock = clock or now_ms
    # Open the layout first: without a store, this raises an error before a lock file is created.
    layout = StoreLayout.open(root, settings)
    if not apply:
        plan = _plan(layout, rules, clock)
        return dataclasses.replace(plan, refused=_refusal(layout, root))
    require(layout, Action.RETAIN)
    disk = disk or Disk()
    lock = StoreLock(disk, root)
    try:
        check_entries(root, settings)
        layout = StoreLayout.open(root, settings)
        refused = _refusal(layout, root, has_lock=True)
        if refused is not None:
            raise StoreUnavailable(f"{root}: {refused}")
        # When a writer changes a file of the log or of the index, the writer makes a hard link to
        # the file. A clean shutdown removes these links. If some links remain, delete them, because
        # the next opening would restore deleted files from them. Also delete a link whose file no
        # longer exists: the last shutdown was clean, so another program has deleted the file.
        NameGuard(disk).discard([*log_paths(root, layout.log_folders), root / INDEX])
        plan = _plan(layout, rules, clock)
        apply_retention(plan, disk, root, progress)
    finally:
        lock.release()
    return dataclasses.replace(plan, applied=True)


def _plan(layout: StoreLayout, rules: RetentionRules, clock: Clock) -> RetentionPlan:
    # If an offset file is invalid, the plan's list of unread messages may be incomplete.
    # plan_retention logs this only at debug level. So first call these two functions: they log a
    # warning for an invalid file.
    consumer_offsets(layout)
    delay_offsets(layout)
    return plan_retention(layout, rules, now_ms=clock())


def _refusal(layout: StoreLayout, root: Path, *, has_lock: bool = False) -> str | None:
    """Return why no file may be deleted now; None if deletion is possible."""
    unsupported = refusal(layout, Action.RETAIN)
    if unsupported is not None:
        return str(unsupported).removeprefix(f"{layout.root}: ")
    if not has_lock and layout.is_live():
        return held_by(root)
    if layout.has_abort:
        return "the store was not shut down cleanly: recover it first"
    if layout.lost_head is not None:
        return f"{layout.lost_head}: recover the store first"
    missing = next(missing_files(layout, layout.commit_log.end), None)
    if missing is not None:
        end = missing.offset + missing.length
        return f"{missing.path}: the log has no file for {missing.offset} to {end}: {_RECOVER}"
    try:
        intent = Ledger(Disk(), root).intent()
    except CorruptFile as error:
        return f"the record of an unfinished load is unreadable: {error}"
    if intent is not None:
        return f"a load is unfinished: {intent.load}: open the store for writing to finish it"
    return None


# --------------------------------------------------------------------------------------------------
# Applying a plan
#
# A retention deletes log files before all other files. The retention starts with the oldest log
# file, and syncs each deletion before the next. So a crash can leave a log that starts at a later
# file than before, but never a log with a hole. The queues and the index may then still have
# entries of deleted messages, but readers and RocketMQ skip these entries. So no repair is
# necessary after a crash, and the next retention deletes the remaining files. If queue files were
# deleted first, a crash would leave messages in the log that are in no queue.
#
# Before the first deletion, the log's new start is recorded. If the log later starts after the
# recorded offset, log files were lost.


def apply_retention(
    plan: RetentionPlan, disk: Disk, root: Path, progress: Progress | None = None
) -> None:
    """Delete the files of a plan, and sync the folders that contained them.

    Before the plan is made, the caller must lock the store, and remove the hard links that a writer
    made (:class:`NameGuard`).

    Raises:
        StoreUnavailable: if the disk fails. In this case some of the files are deleted, and the
            store is consistent.
    """
    if plan.log:
        record_start(disk, root / DURABLE, plan.new_min_offset)
    for done, file in enumerate(plan.files, 1):
        disk.remove(root / file.path)
        if progress is not None:
            progress(done, len(plan.files))
