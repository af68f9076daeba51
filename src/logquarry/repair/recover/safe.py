"""The plan of a safe recovery: what stands whole in the log is kept, whatever RocketMQ would do.

Found in one walk over the log, by reading alone: where it ends, what in it is damage
(:mod:`.look`), and what each queue lacks (:mod:`.queue_check`). Nothing is deleted: what has to go
is moved to quarantine.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final

from logquarry.config import StoreConfig
from logquarry.dialect31.recovery import TransactionCheck, UnitsPlan, keeps_transactions
from logquarry.disk.open_files import OpenFiles
from logquarry.errors import StoreUnavailable
from logquarry.format.checkpoint import Checkpoint
from logquarry.format.queue_entry import UNIT_SIZE
from logquarry.log.layout import COMMIT_LOG, CONSUME_QUEUE, INDEX, StoreFile, StoreLayout
from logquarry.log.splits import STRETCH_BYTES
from logquarry.log.walk import LogReader
from logquarry.read.consume_queue import ConsumeQueue
from logquarry.read.log_end import DamageMap, consume_queues
from logquarry.read.log_queues import QueueKey
from logquarry.repair.recover.checks import IndexPlan, QueueChecks, plan_index, queued_ahead
from logquarry.repair.recover.entries import check_entries, leave_out, misnamed_files
from logquarry.repair.recover.look import KnownBounds, LogLook, find_bounds, made_whole, torn_end
from logquarry.repair.recover.plan import RecoveryPlan, Step, StepKind
from logquarry.repair.recover.queue_check import QueueAction, QueuePlan
from logquarry.units import Progress

_LEAST_FILES: Final = 2
"""Files that have to agree on a size before the settings count as wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SafePlan(RecoveryPlan):
    """What is to be done to a store so that nothing is lost.

    Attributes:
        config: its settings, with all sizes.
        queues: what becomes of each queue.
        index: what becomes of the index, None where the store keeps none.
        transactions: what becomes of the state table of 3.x and of its redo log, where there are
            such.
        last_timestamp: store time of the last message.
        message_count: messages that stand whole.
        pieces: the stretches of the log that frames stand in, one after the other.
        misnamed: paths of files in the log's folder that are none of it.
    """

    config: StoreConfig
    queues: tuple[QueuePlan, ...] = ()
    index: IndexPlan | None = None
    transactions: tuple[UnitsPlan, ...] = field(default=(), repr=False)
    last_timestamp: int = 0
    message_count: int = 0
    pieces: tuple[tuple[int, int], ...] = field(default=(), repr=False)
    misnamed: tuple[str, ...] = ()


def plan_safe(
    root: Path,
    config: StoreConfig,
    *,
    progress: Progress | None = None,
    stretch_bytes: int = STRETCH_BYTES,
) -> SafePlan:
    """What is to be done to a store; nothing is changed.

    Args:
        root: its folder.
        config: its settings, with all sizes (:func:`logquarry.read.store_sizes.with_sizes`).
        progress: told of the bytes of the log that are read.
        stretch_bytes: bytes of the log that one thread looks at in one go.

    Raises:
        StoreNotFound: if there is no store.
        StoreUnavailable: if a file of the log was renamed, or something else is in a file's place;
            for settings with the sizes of another store.
    """
    check_entries(root)
    return _Planner(StoreLayout.open(root, config), config).plan(progress, stretch_bytes)


class _Planner:
    """Makes one plan."""

    def __init__(self, layout: StoreLayout, config: StoreConfig) -> None:
        self._layout = layout
        self._config = config
        self._is_closed = not layout.has_abort
        self._files = OpenFiles(layout)
        self._steps: list[Step] = []
        self._words: list[str] = []
        self._unusable: dict[QueueKey, str] = {}

    def plan(self, progress: Progress | None, stretch_bytes: int) -> SafePlan:
        layout, config = self._layout, self._config
        misnamed = misnamed_files(layout)
        leave_out(layout, misnamed)
        for file, reason in misnamed:
            self._step(StepKind.SET_ASIDE, file.path, None, None, reason)
        try:
            checkpoint = layout.read_checkpoint()
        except ValueError:
            checkpoint = None
        self._find_queues()
        bounds = self._bounds(checkpoint or Checkpoint())
        torn = torn_end(layout, bounds)
        if torn is not None:
            self._words.append(f"the log ends at {torn}: zeros seem to be the rest of a message")
        look = LogLook(layout, bounds, stop=torn)
        damage = DamageMap(look.damage)
        kept = TransactionCheck() if keeps_transactions(layout, config) else None
        checks = QueueChecks(self._queues, config, damage, kept)
        pieces: list[tuple[int, int]] = []
        likely_end = bounds.likely_end or layout.commit_log.end
        with closing(queued_ahead(layout, config, stretch_bytes)) as guesses:
            for run in look.guided_runs(guesses):
                checks.take(run)
                if progress is not None:
                    progress(run.end - look.start, max(run.end, likely_end) - look.start)
                if pieces and pieces[-1][1] == run.start:
                    pieces[-1] = pieces[-1][0], run.end
                else:
                    pieces.append((run.start, run.end))
        self._words += look.words
        self._check_log_files(look)
        self._plan_log(look)
        queues = tuple(check.plan(look.start, look.end) for check in checks)
        self._plan_queues(queues)
        transactions = self._plan_transactions(kept)
        index = self._plan_index(look, checkpoint or Checkpoint(), checks.has_keys)
        starts = [queue.resume_at for queue in queues if queue.resume_at is not None]
        if index is not None:
            starts.append(max(look.start, index.built_from))
        return SafePlan(
            root=layout.root,
            mode="safe",
            looked_at=tuple(self._words),
            log_start=look.start,
            log_end=look.end,
            dispatch_from=min(starts, default=look.end),
            damage=tuple(look.damage),
            steps=tuple(self._steps),
            config=config,
            queues=queues,
            index=index,
            transactions=transactions,
            last_timestamp=look.last_timestamp,
            message_count=look.count,
            pieces=tuple(pieces),
            misnamed=tuple(file.path for file, _ in misnamed),
        )

    def _bounds(self, checkpoint: Checkpoint) -> KnownBounds:
        usable = [queue for queue in self._queues.values() if queue is not None]
        bounds = find_bounds(self._layout, usable, checkpoint)
        self._words.append(
            "the store was closed in order" if self._is_closed else "the store was not closed"
        )
        if bounds.durable is not None:
            self._words.append(
                f"the log was on the disk up to {bounds.durable}, says the durable mark"
            )
        if bounds.queued is not None:
            self._words.append(f"the queues know of messages up to {bounds.queued} of the log")
        return bounds

    # -------------------------------------------------------------------------------------- log
    def _check_log_files(self, look: LogLook) -> None:
        """Files of another name or size than the settings say, and files that are not there."""
        files, size = self._layout.commit_log.files, self._layout.commit_log.file_size
        for file in files:
            if file.size < size:
                torn = made_whole(self._layout, file, look)
                if torn is not None:
                    self._step(
                        StepKind.ZERO,
                        file.path,
                        torn,
                        file.base + file.size - torn,
                        "the file ends within this message, and zeros would seem to be the rest",
                    )
                self._step(
                    StepKind.EXTEND,
                    file.path,
                    file.base + file.size,
                    size - file.size,
                    f"it has {file.size} bytes, and {size} belong there",
                )
            elif file.size > size:
                self._step(
                    StepKind.CUT,
                    file.path,
                    file.base + size,
                    file.size - size,
                    f"it has {file.size} bytes, and {size} belong there",
                )
        for before, after in pairwise(files):
            for base in range(before.base + size, after.base, size):
                self._step(
                    StepKind.PUT_BLANK,
                    f"{COMMIT_LOG}/{base:020d}",
                    base,
                    size,
                    "there is no file for this part of the log",
                )

    def _plan_log(self, look: LogLook) -> None:
        """What stands behind the log's end."""
        reader = LogReader(self._layout)
        if reader.data_end(look.end) <= look.end:
            return
        room = self._layout.commit_log.file_size
        for file in self._layout.commit_log.files:
            if file.base + room <= look.end:
                continue
            last = reader.data_end(file.base, file.base + room)
            if last <= max(look.end, file.base):
                continue
            if file.base < look.end or file is self._layout.commit_log.files[0]:
                at = max(look.end, file.base)
                reason = "what stands behind the log's end must not come back"
                self._step(StepKind.ZERO, file.path, at, last - at, reason)
            else:
                reason = "all of it lies behind the log's end"
                self._step(StepKind.SET_ASIDE, file.path, None, None, reason)

    # ----------------------------------------------------------------------------------- queues
    def _find_queues(self) -> None:
        """The queues whose files can be used; the others are made anew."""
        size = self._config.queue_file_size
        assert size is not None
        self._queues: dict[QueueKey, ConsumeQueue | None] = {}
        self._check_queue_size(size)
        for queue in consume_queues(self._layout, self._files):
            key = queue.topic, queue.queue_id
            # The queue itself passes over names that are no offset of a unit.
            reason = queue_fault(self._layout.queue(*key).files, size)
            if reason is not None:
                self._unusable[key] = reason
            self._queues[key] = queue if reason is None else None

    def _check_queue_size(self, size: int) -> None:
        """See that the size of queue files is theirs, where all of them agree on another one.

        Raises:
            StoreUnavailable: if it is not: the settings are of another store.
        """
        layout = self._layout
        files = [file for name in layout.queue_names for file in layout.queue(*name).files]
        sizes = {file.size for file in files if file.size}
        if len(files) >= _LEAST_FILES and len(sizes) == 1 and size not in sizes:
            raise StoreUnavailable(
                f"{layout.filesystem.full_path(files[0].path)}: it has {files[0].size} bytes, as "
                f"all files of queues have, and the settings say {size}. Nothing was changed"
            )

    def _plan_queues(self, queues: tuple[QueuePlan, ...]) -> None:
        for queue in queues:
            topic, queue_id = queue.key
            folder = f"{CONSUME_QUEUE}/{topic}/{queue_id}"
            unusable = self._unusable.get(queue.key)
            if unusable is not None:
                self._step(StepKind.SET_ASIDE, folder, None, None, unusable)
            elif queue.action is QueueAction.REBUILD and queue.had_until:
                self._step(StepKind.SET_ASIDE, folder, None, None, queue.reason)
            elif queue.action is QueueAction.CUT:
                at = queue.keep_until * UNIT_SIZE
                length = (queue.had_until - queue.keep_until) * UNIT_SIZE
                self._step(StepKind.CUT, folder, at, length, queue.reason)
            if queue.resume_at is not None:
                lacking = (queue.end - queue.keep_until) * UNIT_SIZE
                self._step(
                    StepKind.BUILD_QUEUE,
                    folder,
                    queue.keep_until * UNIT_SIZE,
                    lacking,
                    queue.reason,
                )

    def _plan_transactions(self, kept: TransactionCheck | None) -> tuple[UnitsPlan, ...]:
        if kept is None:
            return ()
        plans = kept.plan(self._layout, self._config)
        for plan in plans:
            if plan.reason is None:
                continue
            if plan.had:
                self._step(StepKind.SET_ASIDE, plan.folder, None, None, plan.reason)
            if plan.units:
                kind, length = StepKind.BUILD_TRANSACTIONS, len(plan.units)
                self._step(kind, plan.folder, plan.start, length, plan.reason)
        return plans

    # ------------------------------------------------------------------------------------ index
    def _plan_index(
        self, look: LogLook, checkpoint: Checkpoint, has_keys: bool
    ) -> IndexPlan | None:
        config = self._config
        shape = config.index_shape
        if not config.message_index_enable or shape is None:
            return None
        found = plan_index(
            self._layout,
            shape,
            log_start=look.start,
            log_end=look.end,
            is_closed=self._is_closed,
            synced_timestamp=checkpoint.index_timestamp,
        )
        # The last one first: an interrupt between two of them leaves the bad one, and not the ones
        # behind it, which would seem to be all that there was.
        for name, reason in reversed(found.set_aside):
            self._step(StepKind.SET_ASIDE, f"{INDEX}/{name}", None, None, reason)
        left = len(self._layout.index_files) - len(found.set_aside)
        if found.set_aside or (has_keys and (not left or not self._is_closed)):
            reason = "keys of messages from this place of the log on may be missing"
            at = max(look.start, found.built_from)
            self._step(StepKind.BUILD_INDEX, INDEX, at, None, reason)
        return found

    def _step(
        self, kind: StepKind, file: str, offset: int | None, length: int | None, reason: str
    ) -> None:
        self._steps.append(Step(kind, file, offset, length, reason))


def queue_fault(files: tuple[StoreFile, ...], size: int) -> str | None:
    """Why the files of a queue cannot be used, None if they can."""
    for file in files:
        if file.size != size and (file.size or file is not files[-1]):
            return f"{file.path} has {file.size} bytes, and {size} belong there"
        if file.base % size:
            return f"{file.path} is no place where a file of {size} bytes begins"
    for before, after in pairwise(files):
        if after.base - before.base != size:
            return f"a file is missing between {before.path} and {after.path}"
    return None
