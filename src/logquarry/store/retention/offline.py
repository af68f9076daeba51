"""Retention of a store that is not open: plans, and with ``apply`` deletes expired files.

A writer runs the retention of its open store
(:meth:`logquarry.store.message_store.StoreWriter.retain`).
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from logquarry import arguments
from logquarry.config import StoreConfig, settings_of
from logquarry.disk.disk import Disk, LocalDisk
from logquarry.disk.locks import StoreLock
from logquarry.disk.page_file import record_start
from logquarry.errors import CorruptFile, StoreUnavailable
from logquarry.log.layout import StoreLayout
from logquarry.log.location import local_store
from logquarry.log.store_files import DURABLE
from logquarry.read.fence import Action, refusal, require
from logquarry.repair.recover.folder_check import check_entries
from logquarry.store.load.ledger import Ledger
from logquarry.store.retention.plan import RetentionPlan, plan_retention
from logquarry.store.retention.rules import RetentionRules, require_rules
from logquarry.units import Clock, Progress, now_ms


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
    """Plan which files of a store to delete; with ``apply`` delete them.

    Without ``apply`` nothing changes, and the store may be open in another program: the plan then
    shows what that program would delete now. With ``apply`` the store's lock is taken before the
    plan is made. An interrupted call can simply be repeated.

    Args:
        path: the store's folder.
        rules: which log files may be deleted.
        apply: whether to delete the files.
        config: the store's settings; missing sizes are inferred from the files.
        clock: gives the time for computing ages, in milliseconds.
        disk: the store's disk.
        progress: called with the number of deleted files.

    Returns:
        The plan; :attr:`RetentionPlan.refused` gives the reason if it cannot be applied now.

    Raises:
        StoreNotFound: if there is no store.
        UnsupportedStore: with ``apply``, if the store has a feature that a deletion would harm.
        StoreUnavailable: with ``apply``, if the store is open in another program, was not shut down
            cleanly, has an unfinished load, or if the disk fails.
        UsageError: if the store is not local.
    """
    root = local_store(path)
    settings, rules = settings_of(config), require_rules(rules)
    apply = arguments.flag(apply, "apply")
    clock = clock or now_ms
    # Before the lock file is created: there may be no store.
    layout = StoreLayout.open(root, settings)
    if not apply:
        plan = plan_retention(layout, rules, now_ms=clock())
        return dataclasses.replace(plan, refused=_refusal(layout, root))
    require(layout, Action.RETAIN)
    disk = disk or LocalDisk()
    lock = StoreLock(disk, root)
    try:
        check_entries(root, settings)
        layout = StoreLayout.open(root, settings)
        refused = _refusal(layout, root, has_lock=True)
        if refused is not None:
            raise StoreUnavailable(f"{root}: {refused}")
        plan = plan_retention(layout, rules, now_ms=clock())
        apply_retention(plan, disk, root, progress)
    finally:
        lock.release()
    return dataclasses.replace(plan, applied=True)


def _refusal(layout: StoreLayout, root: Path, *, has_lock: bool = False) -> str | None:
    """The reason why no file may be deleted now; None if deletion is possible."""
    unsupported = refusal(layout, Action.RETAIN)
    if unsupported is not None:
        return str(unsupported).removeprefix(f"{layout.root}: ")
    if not has_lock and layout.is_live():
        return "the store is open in another program: stop that program first"
    if layout.has_abort:
        return "the store was not shut down cleanly: recover it first"
    if layout.lost_head is not None:
        return f"{layout.lost_head}: recover the store first"
    try:
        intent = Ledger(LocalDisk(), root).intent()
    except CorruptFile as error:
        return f"the record of an unfinished load is unreadable: {error}"
    if intent is not None:
        return f"a load is unfinished: {intent.load}: open the store for writing to finish it"
    return None


# --------------------------------------------------------------------------------------------------
# Applying a plan
#
# The log's files are deleted first, from its start on, and each deletion is synced before the next.
# So a crash leaves a log that starts later, but never a log with a hole. Then the files of queues
# and index are deleted. Readers and RocketMQ skip their entries before the log's start, so after a
# crash nothing needs a repair, and the next retention finishes the work. In the opposite order a
# crash would leave messages in the log that no queue names.
#
# The log's end, the durable offset and the checkpoint do not change. The log's start is recorded
# before the first deletion: a log that starts later has lost files.


def apply_retention(
    plan: RetentionPlan, disk: Disk, root: Path, progress: Progress | None = None
) -> None:
    """Delete the files of a plan, durably. The caller holds the store's lock.

    Args:
        plan: made after the lock was taken.
        disk: the store's disk.
        root: its folder.
        progress: called with the number of deleted files.

    Raises:
        StoreUnavailable: if the disk fails. The store is then consistent, with some files deleted.
    """
    if plan.log:
        record_start(disk, root / DURABLE, plan.new_min_offset)
    for done, file in enumerate(plan.files, 1):
        disk.remove(root / file.path)
        if progress is not None:
            progress(done, len(plan.files))
