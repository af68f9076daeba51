"""Plans a safe recovery, which keeps every complete message in the log.

The planner reads the log once, and compares it with the queues (:mod:`logquarry.repair.audit.log`,
:mod:`logquarry.repair.audit.first_difference`). Of the store's files, a recovery deletes only
``abort``, files that contain only zeros, and hard links that give a log file a wrong name. It moves
bad files to quarantine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

from logquarry.arguments import Progress
from logquarry.config import StoreConfig
from logquarry.dialect31.state_table import TransactionCheck, UnitsPlan, keeps_transactions
from logquarry.errors import StoreUnavailable
from logquarry.format.arrays import REACHED_STOP
from logquarry.log import codec
from logquarry.log.earlier_writers import OFFSET_AT, harmed_offset
from logquarry.log.layout import StoreLayout
from logquarry.log.log_place import LogFolders
from logquarry.log.open_files import OpenFiles
from logquarry.log.readable import rereads
from logquarry.log.splits import STRETCH_BYTES, stretches_ahead
from logquarry.log.store_files import (
    BATCH_QUEUE,
    CHECKPOINT,
    CONSUME_QUEUE,
    INDEX,
    StoreFile,
    quarantine,
    queue_form,
)
from logquarry.log.walk import LogReader
from logquarry.read.batch_queue import all_queues
from logquarry.read.log_end import DamageMap, checkpoint_times, lost_tail
from logquarry.read.log_queues import QueueKey
from logquarry.read.queue import FileQueue, Queue
from logquarry.read.rocksdb_queue import RocksQueue
from logquarry.read.store_sizes import with_sizes
from logquarry.repair.audit.differences import (
    AuditedQueue,
    FileFault,
    file_differences,
    queue_fault,
    queue_name,
    unreadable_file,
)
from logquarry.repair.audit.expired_queues import end_words, stand_in
from logquarry.repair.audit.first_difference import QueueAudits
from logquarry.repair.audit.harmed_frames import HarmedIds, HarmedType, HarmedTypes, Moved
from logquarry.repair.audit.log import KnownBounds, LogAudit, find_bounds, torn_end
from logquarry.repair.audit.runs import EntryFacts
from logquarry.repair.rebuild.build import folder_to_recover, why_replaced
from logquarry.repair.rebuild.other_queues import why_not_built
from logquarry.repair.recover.loss import LossSearch
from logquarry.repair.recover.plan import (
    IndexPlan,
    QueueAction,
    QueuePlan,
    RecoveryPlan,
    StepKind,
    Steps,
    load_kept,
    plan_index,
    plan_queue,
)
from logquarry.repair.recover.replaced import Frames
from logquarry.repair.recover.store_folders import (
    KEPT_ENTRIES,
    check_entries,
    check_queue_folder,
    layout_with,
)
from logquarry.repair.recover.wrong_names import leave_out, misnamed_files, wrong_links
from logquarry.text import counted, plural


@dataclass(frozen=True, slots=True, kw_only=True)
class SafePlan(RecoveryPlan):
    """The plan of a safe recovery.

    Attributes:
        config: settings of the store, with all sizes.
        transactions: the plans for state table and redo log of a store of 3.x.
        last_timestamp: store time of the last message in milliseconds.
        message_count: number of messages in the log after the recovery.
        pieces: the undamaged parts of the log, as physical offsets (start, end).
        misnamed: paths of the files in the log's folder that do not belong to the log.
        rocksdb: folder of the queues in RocksDB, if they must be built again.
        harmed_ids: physical offset -> (queue in the frame, right queue), for each frame with a
            harmed topic or queue id.
        harmed_types: physical offset -> (queue, offsets, type in the frame, right type), for each
            frame with a harmed transaction type.
        harmed_offset: the harmed offset in the checkpoint, which the recovery sets to 0; or None.
    """

    config: StoreConfig
    queues: tuple[QueuePlan, ...] = ()
    index: IndexPlan | None = None
    transactions: tuple[UnitsPlan, ...] = field(default=(), repr=False)
    last_timestamp: int = 0
    message_count: int = 0
    log_folders: LogFolders = field(default_factory=LogFolders, repr=False)
    pieces: tuple[tuple[int, int], ...] = field(default=(), repr=False)
    misnamed: tuple[str, ...] = ()
    rocksdb: str | None = None
    harmed_ids: Mapping[int, Moved] = field(default_factory=dict)
    harmed_types: Mapping[int, HarmedType] = field(default_factory=dict)
    harmed_offset: int | None = None


@rereads
def plan_safe(
    root: Path,
    config: StoreConfig,
    *,
    progress: Progress | None = None,
    stretch_bytes: int = STRETCH_BYTES,
    mends: bool = True,
    end: int | None = None,
    restored: Mapping[str, str] = MappingProxyType({}),
) -> SafePlan:
    """Return the plan for a store. The store is not changed.

    Args:
        config: settings of the store; missing sizes are inferred from the files.
        restored: the files that get their names back before the plan is applied
            (:func:`layout_with`).
        mends: whether to correct harmed queue offsets. False for a log that salvage has written.
            The queue offsets of such a log are right. But they have gaps for lost messages, and the
            gaps would seem wrong, because the log itself has no damage at these places.
        end: physical offset at which to end the log; by default, it ends after its last message.

    Raises:
        StoreUnavailable: if the place of a log file is unknown, if a folder or a link has the name
            of a file, or if the settings have the sizes of another store.
    """
    config = with_sizes(config, layout_with(root, config, restored).by_content())
    check_entries(root, config, removes_links=True)
    layout = layout_with(root, config, restored).by_content(shows_lost_head=False)
    return _Planner(layout, config, mends=mends, end=end).plan(progress, stretch_bytes)


class _Planner:
    def __init__(
        self, layout: StoreLayout, config: StoreConfig, *, mends: bool, end: int | None = None
    ) -> None:
        self._end = end
        self._layout = layout
        self._mends = mends
        self._config = config
        self._is_closed = not layout.has_abort
        self._files = OpenFiles(layout)
        self._steps = Steps()
        self._words: list[str] = []
        # The queues with unusable files, each with the reason.
        self._unusable: dict[QueueKey, tuple[FileQueue, str]] = {}
        self._rocksdb = folder_to_recover(layout)

    def plan(self, progress: Progress | None, stretch_bytes: int) -> SafePlan:
        layout, config = self._layout, self._config
        links = wrong_links(layout)
        misnamed = misnamed_files(layout, links)
        leave_out(layout, misnamed)
        for file, reason in misnamed:
            if file.path in links:
                self._steps.add(StepKind.REMOVE, file.path, links[file.path])
            else:
                self._steps.add(StepKind.SET_ASIDE, file.path, reason)
        for one in layout.log_names.renames:
            if one.path not in links:
                self._steps.add(StepKind.RENAME, one.path, one.reason, offset=one.base)
        self._find_queues()
        bounds = self._bounds()
        torn = torn_end(layout, bounds)
        if torn is not None:
            self._words.append(f"the log ends at {torn}: the message there lacks bytes")
        # Stop at the end that an earlier recovery recorded, if the store has not changed since.
        ends = (layout.cut_end if torn is None else torn, self._end)
        stop = min((end for end in ends if end is not None), default=None)
        log = LogAudit(layout, bounds, stop=stop)
        damage = DamageMap(log.damage)
        is_3_1 = keeps_transactions(layout, config)
        transactions = TransactionCheck() if is_3_1 else None
        noted = load_kept(quarantine(Path(layout.root)) / KEPT_ENTRIES)
        ids = HarmedIds(
            *(layout, self._queues, self._queues.get, noted), is_3_1=is_3_1 or config.is_3_1
        )
        types = HarmedTypes(layout, self._queues.get, noted)
        audits = QueueAudits(
            *(self._queues, config, damage, transactions), mends=self._mends, ids=ids, types=types
        )
        pieces: list[tuple[int, int]] = []
        likely_end = bounds.likely_end or layout.commit_log.end
        facts = partial(EntryFacts, config, with_transactions=is_3_1)
        with closing(stretches_ahead(layout, stretch_bytes, facts)) as guesses:
            for run in log.guided_runs(guesses):
                audits.take(run)
                if progress is not None:
                    progress(run.end - log.start, max(run.end, likely_end) - log.start)
                if pieces and pieces[-1][1] == run.start:
                    pieces[-1] = pieces[-1][0], run.end
                else:
                    pieces.append((run.start, run.end))
        self._words += log.words
        self._check_log_files(log)
        self._plan_log(log)
        audited = [self._with_end(audit.finish(log.start)) for audit in audits]
        in_rocksdb, refused = self._plan_rocksdb(audited, log.end)
        queues = tuple(map(plan_queue, audited)) if self._rocksdb is None else ()
        self._plan_queues(queues)
        plans = self._plan_transactions(transactions)
        search = LossSearch(
            layout,
            end=log.end,
            damage=log.damage,
            last_timestamp=log.last_timestamp,
            dropped=self._dropped(audited),
        )
        index = self._plan_index(log, audits.has_keys, search.replaced)
        if ids.found:
            frames = plural(len(ids.found), "frame")
            self._words.append(f"{frames} named a wrong queue: the entries show the right one")
        if types.found:
            frames = plural(len(types.found), "frame")
            self._words.append(f"{frames} had another transaction type: the entries stay")
        tail = lost_tail(layout, log.latest_timestamp)
        if tail is not None:
            self._words.append(tail)
            self._steps.add(StepKind.WRITE_CHECKPOINT, CHECKPOINT, "it covers lost messages")
        harmed = harmed_offset(layout.filesystem)
        if harmed is not None:
            reason = f"{harmed} is not the offset that a broker of 5.5 writes there"
            self._steps.add(
                *(StepKind.WRITE_CHECKPOINT, CHECKPOINT, reason), offset=OFFSET_AT, length=8
            )
        starts = [queue.resume_at for queue in queues if queue.resume_at is not None]
        if index is not None:
            starts.append(max(log.start, index.built_from))
        if in_rocksdb is not None:
            starts.append(log.start)
        return SafePlan(
            root=layout.root,
            mode="safe",
            looked_at=tuple(self._words),
            log_start=log.start,
            log_end=log.end,
            dispatch_from=min(starts, default=log.end),
            damage=tuple(log.damage),
            steps=tuple(self._steps),
            loss=search.loss(),
            config=config,
            queues=queues,
            index=index,
            transactions=plans,
            last_timestamp=log.last_timestamp,
            message_count=log.count,
            log_folders=layout.log_folders,
            pieces=tuple(pieces),
            misnamed=tuple(file.path for file, _ in misnamed),
            rocksdb=in_rocksdb,
            harmed_ids=ids.found,
            harmed_types=types.found,
            harmed_offset=harmed,
            refused=refused,
        )

    def _bounds(self) -> KnownBounds:
        usable = [queue for queue in self._queues.values() if queue is not None]
        bounds = find_bounds(self._layout, usable)
        self._words.append(
            "the store was shut down cleanly"
            if self._is_closed
            else "the store was not shut down cleanly"
        )
        if bounds.durable is not None:
            self._words.append(f"the durable offset of the log is {bounds.durable}")
        if bounds.queued is not None:
            self._words.append(
                f"the queues point to messages up to physical offset {bounds.queued}"
            )
        return bounds

    def _check_log_files(self, log: LogAudit) -> None:
        size = self._layout.commit_log.file_size
        found = list(file_differences(self._layout.commit_log.files, size))
        for one in found:
            if one.fault not in (FileFault.SIZE, FileFault.EMPTY_LAST):
                continue
            file, reason = one.file, f"{counted(one.file.size, 'byte')} instead of {size}"
            path = self._layout.right_path(file)
            end = file.base + min(file.size, size)
            if file.size < size:
                torn = _made_whole(self._layout, file, log)
                if torn is not None:
                    why = "the file ends within this message, and zeros would make it look whole"
                    self._steps.add(StepKind.ZERO, path, why, offset=torn, length=end - torn)
                self._steps.add(StepKind.EXTEND, path, reason, offset=end, length=size - file.size)
            else:
                self._steps.add(StepKind.CUT, path, reason, offset=end, length=file.size - size)
        for one in found:
            if one.fault is FileFault.GAP:
                for base in one.missing:
                    path = self._layout.log_file(base)
                    reason = "this part of the log has no file"
                    self._steps.add(StepKind.PUT_BLANK, path, reason, offset=base, length=size)

    def _plan_log(self, log: LogAudit) -> None:
        reader = LogReader(self._layout)
        if reader.data_end(log.end) <= log.end:
            return
        room = self._layout.commit_log.file_size
        for file in self._layout.commit_log.files:
            if file.base + room <= log.end:
                continue
            at, path = max(log.end, file.base), self._layout.right_path(file)
            length = reader.data_end(file.base, file.base + room) - at
            if length <= 0:
                continue
            if file.base < log.end or file is self._layout.commit_log.files[0]:
                self._require_writable(reader, at, length)
                reason = "bytes after the log's end must not become messages again"
                self._steps.add(StepKind.ZERO, path, reason, offset=at, length=length)
            else:
                reason = "the whole file lies after the log's end"
                self._steps.add(StepKind.SET_ASIDE, path, reason)

    def _require_writable(self, reader: LogReader, offset: int, length: int) -> None:
        # A recovery first copies the bytes to quarantine, so it must be able to read them.
        fault = reader.fault(offset, length)
        if fault is not None:
            raise StoreUnavailable(
                f"{self._layout.log_path(offset)}: the bytes after the log's end at {offset} "
                f"cannot be overwritten: {fault.words}. Nothing was changed. Copy the store to a "
                "sound disk, or save its messages with `logquarry salvage STORE --into DIR`"
            )

    def _dropped(self, audited: Sequence[AuditedQueue]) -> dict[QueueKey, int]:
        """Return, for each queue, the queue offset of the first entry that the recovery drops."""
        found: dict[QueueKey, int] = {}
        for one in audited:
            queue = self._queues.get(one.key)
            first = one.kept_until if one.difference is None else one.difference.offset
            if queue is None or first < one.had_until:
                # In a batch queue, ``first`` is an entry number and not a queue offset, so use 0.
                found[one.key] = 0 if queue is None or queue.is_batch else first
        return found

    def _find_queues(self) -> None:
        self._queues: dict[QueueKey, Queue | None] = {}
        for queue in all_queues(self._layout, self._files, with_stale=True):
            key = queue.key
            if isinstance(queue, RocksQueue):
                self._queues[key] = queue
                continue
            form = queue_form(self._config, queue.topic)
            is_batch = form.root == BATCH_QUEUE
            if is_batch != queue.is_batch:
                why = "the topic has batch queues: a broker does not start on these files"
                folder = f"{CONSUME_QUEUE}/{key[0]}"
                if all(step.file != folder for step in self._steps):
                    self._steps.add(StepKind.SET_ASIDE, folder, why)
                continue
            # A queue object leaves out files with impossible names, so list the layout's files.
            sequence = self._layout.batch_queue(*key) if is_batch else self._layout.queue(*key)
            files = sequence.files
            reason = queue_fault(files, form.file_size) or unreadable_file(files, self._files)
            if reason is not None:
                self._unusable[key] = queue, reason
            self._queues[key] = queue if reason is None else None

    def _with_end(self, found: AuditedQueue) -> AuditedQueue:
        """If all messages of a queue with unusable files have expired, keep the queue's end."""
        if found.end is not None or found.key not in self._unusable:
            return found
        queue, _ = self._unusable[found.key]
        file_size = queue_form(self._config, queue.topic).file_size
        made = stand_in(queue, self._layout, self._files, file_size)
        if not made.is_sure:
            name, words = queue_name(found.key), end_words(made.end)
            self._words.append(f"the files of {name} are unusable, and {words}")
        if not made.entries:
            return found
        end = made.number + len(made.entries) // queue.entry_size
        bridges = {made.number: made.entries}
        return replace(found, had_until=end, kept_until=end, bridges=bridges)

    def _plan_rocksdb(
        self, queues: Sequence[AuditedQueue], log_end: int
    ) -> tuple[str | None, str | None]:
        """Return (folder of the RocksDB to build again, reason why it cannot be built). Both can be
        None.
        """
        folder = self._rocksdb
        if folder is None:
            return None, None
        reason = why_replaced(self._layout, folder, queues, log_end)
        if reason is None:
            return None, None
        self._steps.add(StepKind.SET_ASIDE, folder, reason)
        self._steps.add(StepKind.BUILD_QUEUE, folder, reason)
        return folder, why_not_built(queues)

    def _plan_queues(self, queues: tuple[QueuePlan, ...]) -> None:
        for queue in queues:
            topic, queue_id = queue.key
            form = queue_form(self._config, topic)
            folder, entry_size = f"{form.root}/{topic}/{queue_id}", form.entry_size
            unusable = self._unusable.get(queue.key)
            if unusable is not None:
                self._steps.add(StepKind.SET_ASIDE, folder, unusable[1])
            elif queue.action is QueueAction.REBUILD and queue.had_until:
                self._steps.add(StepKind.SET_ASIDE, folder, queue.reason)
            elif queue.action is QueueAction.CUT:
                at = queue.keep_until * entry_size
                length = (queue.had_until - queue.keep_until) * entry_size
                self._steps.add(StepKind.CUT, folder, queue.reason, offset=at, length=length)
            if queue.bridges:
                reason = "entries that were never written, and whose messages have expired"
                at, length = min(queue.bridges) * entry_size, sum(map(len, queue.bridges.values()))
                self._steps.add(StepKind.BUILD_QUEUE, folder, reason, offset=at, length=length)
            if queue.resume_at is not None:
                check_queue_folder(Path(self._layout.root, folder))
                lacking = (queue.end - queue.keep_until) * entry_size
                self._steps.add(
                    StepKind.BUILD_QUEUE,
                    folder,
                    queue.reason,
                    offset=queue.keep_until * entry_size,
                    length=lacking,
                )

    def _plan_transactions(self, check: TransactionCheck | None) -> tuple[UnitsPlan, ...]:
        if check is None:
            return ()
        plans = check.plan(self._layout, self._config)
        for plan in plans:
            if plan.reason is None:
                continue
            if plan.had:
                self._steps.add(StepKind.SET_ASIDE, plan.folder, plan.reason)
            if plan.units:
                kind, length = StepKind.BUILD_TRANSACTIONS, len(plan.units)
                self._steps.add(kind, plan.folder, plan.reason, offset=plan.start, length=length)
        return plans

    def _plan_index(self, log: LogAudit, has_keys: bool, replaced: Frames) -> IndexPlan | None:
        config = self._config
        shape = config.index_shape
        if not config.message_index_enable or shape is None:
            return None
        found = plan_index(
            self._layout,
            shape,
            log_start=log.start,
            log_end=log.end,
            is_closed=self._is_closed,
            synced_timestamp=checkpoint_times(self._layout).index_timestamp,
            replaced_from=int(replaced[0, 0]) if len(replaced) else None,
        )
        # Move the file with the fault last: if this recovery is interrupted, the next recovery
        # must still find the fault.
        for name, reason in reversed(found.set_aside):
            self._steps.add(StepKind.SET_ASIDE, f"{INDEX}/{name}", reason)
        left = len(self._layout.index_files) - len(found.set_aside)
        if found.set_aside or (has_keys and (not left or not self._is_closed)):
            reason = "keys of messages from this physical offset on may be missing"
            at = max(log.start, found.built_from)
            self._steps.add(StepKind.BUILD_INDEX, INDEX, reason, offset=at)
        return found


def _made_whole(layout: StoreLayout, file: StoreFile, log: LogAudit) -> int | None:
    """Return the physical offset of the last message in a file if it is incomplete, but would seem
    valid after the recovery; else None. The recovery appends zeros to a file that is too short.
    With these zeros, such a message can seem valid, because no CRC covers the properties.
    """
    stop, room = file.base + file.size, layout.commit_log.file_size
    spans = [span for span in log.damage if span.offset < stop <= span.end]
    start = max(file.base, min([log.end, *(span.offset for span in spans)]))
    if start >= stop:
        return None
    data = layout.open_file(file.path).window(start - file.base, stop - start)[: stop - start]
    window = codec.Window.with_zeros(data, start, file.base + room - start)
    at = 0
    while at < stop - start:
        at, code = codec.find_frame(window, at, stop - start, check_crc=True)
        if code != REACHED_STOP:
            return None
        _, after, _ = codec.walk(window, at, at + 1, codec.empty_rows(1), check_crc=False)
        if after > stop - start:
            return start + at
        at = after
    return None
