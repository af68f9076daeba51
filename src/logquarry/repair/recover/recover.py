"""Recovers a store that nobody has open: the plan, and what carries it out.

Opening a store to write it does the same where it has to (:mod:`.store_engine`). This is for those
who want to see first what will be done, or who give the store to a broker afterwards.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from logquarry.config import StoreConfig
from logquarry.disk.disk import Disk, LocalDisk
from logquarry.disk.locks import AbortFile, StoreLock
from logquarry.disk.queue_folders import NameGuard
from logquarry.errors import StoreUnavailable
from logquarry.log.filesystem import local_store
from logquarry.log.layout import ABORT, COMMIT_LOG, DAMAGE, INDEX, StoreLayout
from logquarry.read.fence import Action, refusal
from logquarry.read.log_end import known_damage
from logquarry.read.store_sizes import with_sizes
from logquarry.repair.recover.apply import apply_safe
from logquarry.repair.recover.entries import check_entries
from logquarry.repair.recover.found import find_store
from logquarry.repair.recover.plan import RecoveryMode, RecoveryPlan, Step, StepKind
from logquarry.repair.recover.rocketmq import RocketmqPlan, apply_rocketmq, plan_rocketmq
from logquarry.repair.recover.safe import SafePlan, plan_safe
from logquarry.units import Clock, Progress, now_ms


def recover(
    path: str | os.PathLike[str],
    *,
    mode: RecoveryMode = "safe",
    apply: bool = False,
    config: StoreConfig | None = None,
    clock: Clock | None = None,
    disk: Disk | None = None,
    progress: Progress | None = None,
) -> RecoveryPlan:
    """Say what a store needs before it can be written again; with ``apply`` do that too.

    Without ``apply`` nothing is touched. With it the store's lock is taken first, the plan is made
    under it, carried out, and the store is left as one that was closed in order. Whoever is
    interrupted begins again, and comes to the same.

    Args:
        path: the store's folder.
        mode: ``safe`` keeps what stands whole in the log; ``rocketmq`` does what RocketMQ would.
        apply: whether to carry the plan out.
        config: its settings; sizes that are not stated are read off the files.
        clock: names new index files, in milliseconds.
        disk: what it is on.
        progress: told of the bytes of the log that are done.

    Returns:
        The plan; :attr:`RecoveryPlan.is_needed` tells whether there is (or was) anything to do.

    Raises:
        StoreNotFound: if there is no store.
        UnsupportedStore: with ``apply``, if the store has a feature that recovery would harm.
        StoreUnavailable: if a process has it open; with ``apply`` also if the plan is refused or
            the disk fails.
        UsageError: for a store that is not local, and for settings that are not its own.
    """
    root = local_store(path)
    settings = config or StoreConfig()
    layout = StoreLayout.open(root, settings)
    unsupported = refusal(layout, Action.RECOVER, mode=mode)
    if not apply:
        if layout.is_live():
            raise StoreUnavailable(
                f"{root}: the store is open in another program: what it needs can be told once "
                "that has ended"
            )
        plan = _planned(root, mode, settings, progress)
        if unsupported is not None:
            reason = str(unsupported).removeprefix(f"{root}: ")
            plan = dataclasses.replace(plan, steps=(), refused=reason)
        return plan
    if unsupported is not None:
        raise unsupported
    disk = disk or LocalDisk()
    lock = StoreLock(disk, root)
    try:
        check_entries(root)
        # Files that a writer gave a second name before it crashed, which is their only one now.
        NameGuard(disk).restore([root / COMMIT_LOG, root / INDEX])
        plan = _planned(root, mode, settings, progress)
        if plan.refused is not None:
            raise StoreUnavailable(f"{root}: {plan.refused}")
        if plan.is_needed:
            abort = AbortFile(disk, root)
            _carry_out(plan, disk, abort, clock or now_ms, progress)
            abort.remove()
    finally:
        lock.release()
    return plan


def _planned(
    root: Path, mode: RecoveryMode, config: StoreConfig, progress: Progress | None
) -> RecoveryPlan:
    """The plan of a mode, with what belongs to every mode: how the store is left."""
    layout = StoreLayout.open(root, config)
    plan: RecoveryPlan
    if mode == "rocketmq":
        plan = plan_rocketmq(root, config)
        if plan.refused is not None:
            return plan
    else:
        plan = plan_safe(root, with_sizes(config, layout), progress=progress)
    steps = list(plan.steps)
    known = known_damage(layout)
    news = [span for span in plan.damage if span.offset not in known]
    if news:
        reason = f"the log is damaged at {news[0].offset}"
        if len(news) > 1:
            reason += f" and in {len(news) - 1} more places"
        steps.append(Step(StepKind.NOTE_DAMAGE, DAMAGE, None, None, reason))
    if layout.has_abort:
        reason = "the store was not closed in order"
        steps.append(Step(StepKind.REMOVE, ABORT, None, None, reason))
    return dataclasses.replace(plan, steps=tuple(steps))


def _carry_out(
    plan: RecoveryPlan, disk: Disk, abort: AbortFile, clock: Clock, progress: Progress | None
) -> None:
    """Do what a plan says, and see that the store is in order by the rules of its mode."""
    root = Path(plan.root)
    if isinstance(plan, RocketmqPlan):
        # Whether there was an `abort` says which way it goes.
        is_clean = not abort.exists
        abort.make()
        apply_rocketmq(plan, disk, is_clean=is_clean)
        return
    assert isinstance(plan, SafePlan)
    apply_safe(plan, disk, clock, progress=progress)
    # If this has an objection `abort` stays.
    find_store(root, plan.config, is_recovered=True)
