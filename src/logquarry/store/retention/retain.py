"""Deletes what has expired of a store that nobody has open: the plan, and what carries it out.

A store that is open to be written does it itself, if it is asked to
(:meth:`logquarry.store.message_store.StoreWriter.retain`).
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from logquarry.config import StoreConfig
from logquarry.disk.disk import Disk, LocalDisk
from logquarry.disk.locks import StoreLock
from logquarry.errors import CorruptFile, StoreUnavailable
from logquarry.log.filesystem import local_store
from logquarry.log.layout import StoreLayout
from logquarry.repair.recover.entries import check_entries
from logquarry.store.load.ledger import Ledger
from logquarry.store.retention.plan import RetentionPlan, apply_retention, plan_retention
from logquarry.store.retention.rules import RetentionRules
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
    """Say what of a store would go by some rules; with ``apply`` delete it.

    Without ``apply`` nothing is touched, and the store may be open in another program: then the
    plan is what would go if that one did it now. With it the store's lock is taken first, and the
    plan is made under it. Whoever is interrupted begins again, and comes to the same.

    Args:
        path: the store's folder.
        rules: what may go.
        apply: whether to delete it.
        config: its settings; sizes that are not stated are read off the files.
        clock: gives the time that ages are reckoned from, in milliseconds.
        disk: what the store is on.
        progress: told of the files that are gone.

    Returns:
        The plan; :attr:`RetentionPlan.refused` tells why it could not be applied now.

    Raises:
        StoreNotFound: if there is no store.
        StoreUnavailable: with ``apply``, if a process has it open, it was not closed in order, a
            load was not finished, or the disk fails.
        UsageError: for a store that is not local.
    """
    root = local_store(path)
    settings = config or StoreConfig()
    clock = clock or now_ms
    # Before a lock is made: there may be no store.
    layout = StoreLayout.open(root, settings)
    if not apply:
        plan = plan_retention(layout, rules, now_ms=clock())
        return dataclasses.replace(plan, refused=_refusal(layout, root))
    disk = disk or LocalDisk()
    lock = StoreLock(disk, root)
    try:
        check_entries(root)
        layout = StoreLayout.open(root, settings)
        refused = _refusal(layout, root, has_lock=True)
        if refused is not None:
            raise StoreUnavailable(f"{root}: {refused}")
        plan = plan_retention(layout, rules, now_ms=clock())
        apply_retention(plan, disk, root, progress)
    finally:
        lock.release()
    return plan


def _refusal(layout: StoreLayout, root: Path, *, has_lock: bool = False) -> str | None:
    """Why nothing of a store may be deleted now, None if it may."""
    if not has_lock and layout.is_live():
        return "the store is open in another program: stop that one first"
    if layout.has_abort:
        return "the store was not closed in order: recover it first"
    try:
        intent = Ledger(LocalDisk(), root).intent()
    except CorruptFile as error:
        return f"what a load was about cannot be told: {error}"
    if intent is not None:
        return f"a load was not finished: {intent.load}: open the store to write it first"
    return None
