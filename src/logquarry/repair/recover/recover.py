"""Recover: makes and applies the recovery plan of a store that no process has open.

A store that needs a recovery is also recovered when it is opened for writing
(:mod:`logquarry.store.store_engine`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from logquarry import arguments, text
from logquarry.arguments import Clock, Progress, now_ms
from logquarry.config import RECOVERIES, StoreConfig, settings_of
from logquarry.disk.disk import Disk
from logquarry.disk.folders import AbortFile, StoreLock, held_by, is_lockable
from logquarry.errors import StoreNotFound, StoreUnavailable, UnreadableFile
from logquarry.log.layout import StoreLayout
from logquarry.log.location import local_store
from logquarry.log.store_files import ABORT, CHECKPOINT, DAMAGE, DURABLE, SETTINGS, quarantine
from logquarry.read.fence import Action, refusal
from logquarry.read.log_end import known_damage
from logquarry.repair.audit.log import are_stale_bytes
from logquarry.repair.rebuild.in_place import brought_out, built_folders
from logquarry.repair.recover.apply import apply_safe
from logquarry.repair.recover.loss import require_consent
from logquarry.repair.recover.open_check import find_store, restored_files, settled_names
from logquarry.repair.recover.plan import RecoveryMode, RecoveryPlan, StepKind, Steps
from logquarry.repair.recover.rocketmq import RocketmqPlan, apply_rocketmq, plan_rocketmq
from logquarry.repair.recover.safe import SafePlan, plan_safe
from logquarry.repair.recover.store_folders import check_entries, check_places, layout_with

_OWN_FILES: Final = (DURABLE, SETTINGS, DAMAGE)
"""Logquarry's own files that a recovery can make again if they cannot be read."""


def recover(
    path: str | os.PathLike[str],
    *,
    mode: RecoveryMode = "safe",
    apply: bool = False,
    accept_loss: int | None = None,
    config: StoreConfig | None = None,
    clock: Clock | None = None,
    disk: Disk | None = None,
    progress: Progress | None = None,
) -> RecoveryPlan:
    """Plan the recovery of a store, and carry it out if ``apply`` is true.

    Without ``apply``, nothing changes. With ``apply``, the call takes the store's lock, makes the
    plan and applies it. After that, the store can be opened like a store that was shut down
    cleanly. If the call is interrupted, call it again: the result is the same.

    Args:
        path: the store's folder.
        mode: ``safe`` keeps every complete message in the log. ``rocketmq`` changes the store as
            RocketMQ itself would.
        accept_loss: number of bytes of messages whose loss you accept. With None, the recovery is
            refused if it would lose more than a small share of the messages that were on the disk
            (:mod:`logquarry.repair.recover.loss`).
        config: settings of the store; missing sizes are inferred from the files.
        clock: the time in milliseconds, for the names of new index files.
        progress: called with (bytes of the log processed so far, bytes to process in total).

    Returns:
        The plan; :attr:`RecoveryPlan.is_needed` shows whether the store needs a recovery.

    Raises:
        StoreNotFound: if there is no store.
        UnsupportedStore: with ``apply``, if the store has a feature that a recovery would harm.
        LossRefused: with ``apply``, if the recovery would lose more than ``accept_loss`` allows.
        StoreUnavailable: if a process has the store open. With ``apply``, the call also raises this
            error if the store cannot be recovered in this mode, or if the disk fails.
        UsageError: if the store is not local, or the settings belong to another store.
    """
    root = local_store(path)
    settings = settings_of(config)
    arguments.choice(mode, "mode", RECOVERIES)
    apply = arguments.flag(apply, "apply")
    arguments.optional(arguments.count, accept_loss, "accept_loss", least=0)
    for name, value in (("clock", clock), ("progress", progress)):
        arguments.optional(arguments.function, value, name)
    arguments.optional(arguments.instance, disk, "disk", kind=Disk, takes="a Disk")
    layout = StoreLayout.open(root, settings).by_content()
    may_lack_log = accept_loss is not None
    unsupported = refusal(layout, Action.RECOVER, mode=mode, may_lack_log=may_lack_log)
    if not apply:
        if layout.is_live():
            raise StoreUnavailable(f"{root}: {held_by(root)}")
        check_places(root)
        restored = restored_files(layout, settings, disk or Disk()) | built_folders(root)
        plan = _planned(root, mode, settings, progress, restored)
        if unsupported is not None:
            reason = str(unsupported).removeprefix(f"{root}: ")
            plan = dataclasses.replace(plan, steps=(), refused=reason)
        elif plan.refused is None and plan.loss is not None:
            plan = dataclasses.replace(plan, refused=plan.loss.refusal(accept_loss, mode))
        return plan
    if unsupported is not None:
        raise unsupported
    disk = disk or Disk()
    if not is_lockable(root):
        # A refused recovery must not create the lock file: check first.
        check_entries(root, settings, removes_links=mode == "safe")
        _require_possible(_planned(root, mode, settings, None), accept_loss)
    lock = StoreLock(disk, root)
    try:
        check_entries(root, settings, removes_links=mode == "safe")
        with brought_out(root, disk), settled_names(layout, settings, disk):
            plan = _planned(root, mode, settings, progress)
            _require_possible(plan, accept_loss)
        if plan.is_needed:
            abort = AbortFile(disk, root)
            _carry_out(plan, disk, abort, clock or now_ms, progress)
            abort.remove()
            plan = dataclasses.replace(plan, applied=True)
    finally:
        lock.release()
    return plan


def _require_possible(plan: RecoveryPlan, accept_loss: int | None) -> None:
    if plan.refused is not None:
        raise StoreUnavailable(f"{plan.root}: {plan.refused}")
    require_consent(plan.root, plan.loss, accept_loss, plan.mode)


def _planned(
    root: Path,
    mode: RecoveryMode,
    config: StoreConfig,
    progress: Progress | None,
    restored: Mapping[str, str] = MappingProxyType({}),
) -> RecoveryPlan:
    """Return the plan of a mode, including the steps that both modes have. ``restored`` contains
    the files that are first restored from their hard links (:func:`restored_files`).
    """
    layout = layout_with(root, config, restored).by_content()
    plan: RecoveryPlan
    if mode == "rocketmq":
        plan = plan_rocketmq(root, config, restored)
        if plan.refused is not None:
            return plan
        if layout.cut_end == plan.log_end and all(s.kind is StepKind.CUT for s in plan.steps):
            # RocketMQ cuts the log only in memory, so the cuts appear in each new plan. They are
            # not needed, because the last recovery has already recorded this end.
            plan = dataclasses.replace(plan, steps=())
    else:
        plan = plan_safe(root, config, progress=progress, restored=restored)
        if _only_stale_bytes(layout, plan):
            # The old bytes after the end can stay: brokers overwrite them, and logquarry's writer
            # zeroes them.
            plan = dataclasses.replace(plan, steps=())
    steps = Steps()
    for path, link in restored.items():
        reason = f"only its hard link is left: {link}"
        if path in layout.folders:
            reason = f"an interrupted rebuild made it: {link}"
        steps.add(StepKind.RESTORE, path, reason)
    steps += plan.steps
    try:
        if layout.read_checkpoint() is None and layout.missing_log is not None:
            reason = "it is missing: without it, an empty log would seem to have lost its files"
            steps.add(StepKind.WRITE_CHECKPOINT, CHECKPOINT, reason)
    except ValueError as error:
        steps.add(StepKind.WRITE_CHECKPOINT, CHECKPOINT, str(error))
    for name in _OWN_FILES:
        with contextlib.suppress(FileNotFoundError, StoreNotFound):
            try:
                layout.filesystem.read(name)
            except UnreadableFile as error:
                steps.add(StepKind.SET_ASIDE, name, str(error))
    if layout.lost_head is not None:
        steps.add(StepKind.NOTE_DAMAGE, DURABLE, str(layout.lost_head), offset=plan.log_start)
    known = known_damage(layout)
    news = [span for span in plan.damage if span.offset not in known]
    if news:
        reason = f"the log is damaged at {news[0].offset}"
        if len(news) > 1:
            reason += f" and in {text.plural(len(news) - 1, 'more place')}"
        steps.add(StepKind.NOTE_DAMAGE, DAMAGE, reason)
    if layout.has_abort:
        reason = "the store was not shut down cleanly"
        steps.add(StepKind.REMOVE, ABORT, reason)
    return dataclasses.replace(plan, steps=tuple(steps))


def _only_stale_bytes(layout: StoreLayout, plan: RecoveryPlan) -> bool:
    """Whether a plan only zeroes old bytes after the log's end. A sound store can contain such
    bytes.
    """
    found = [(step.kind, step.offset) for step in plan.steps]
    return (
        found == [(StepKind.ZERO, plan.log_end)]
        and not layout.has_abort
        and are_stale_bytes(layout, plan.log_end, is_closed=True)
    )


def _carry_out(
    plan: RecoveryPlan, disk: Disk, abort: AbortFile, clock: Clock, progress: Progress | None
) -> None:
    """Apply a plan, and check that the store can be opened."""
    root = Path(plan.root)
    for step in plan.steps:
        if step.kind is StepKind.SET_ASIDE and step.file in _OWN_FILES:
            disk.set_aside(root / step.file, quarantine(root))
    if isinstance(plan, RocketmqPlan):
        # RocketMQ's rules depend on whether `abort` existed, so check this before creating `abort`.
        is_clean = not abort.exists
        abort.make()
        apply_rocketmq(plan, disk, clock=clock, is_clean=is_clean)
        return
    assert isinstance(plan, SafePlan)
    apply_safe(plan, disk, clock, progress=progress)
    # The caller removes `abort` after this check. If the check raises an error, `abort` stays.
    find_store(root, plan.config, is_recovered=True)
