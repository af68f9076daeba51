"""Recovery in the mode ``rocketmq``: makes the same changes as RocketMQ's load() and start().

The recovery follows the RocketMQ version that wrote the store, including its bugs. If the files do
not show the version, the recovery follows 4.9.3. As in Java, only the log's end in memory changes,
and the bytes after it stay in the file. Files that Java deletes are moved to quarantine. If Java
would fail on a store, the recovery raises an error.
"""

from __future__ import annotations

import dataclasses
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Final

from logquarry.arguments import Clock, now_ms
from logquarry.config import DIALECTS, StoreConfig
from logquarry.disk.disk import Disk
from logquarry.disk.page_file import CheckpointFile, DurableFile
from logquarry.errors import StoreError, StoreUnavailable, reason_of
from logquarry.format import checkpoint, index, java
from logquarry.format.checkpoint import Checkpoint, Offsets
from logquarry.format.queue_entry import UNIT_SIZE
from logquarry.log import store_files
from logquarry.log.filesystem import RestoredFileSystem
from logquarry.log.follow import dispatch_requests
from logquarry.log.readable import none_lost, rereads
from logquarry.log.walk import LogReader, Run
from logquarry.read.features import find_features
from logquarry.read.log_queues import QueueKey
from logquarry.read.store_sizes import with_sizes
from logquarry.repair.recover.apply import note_end
from logquarry.repair.recover.java_dispatch import JavaDispatch, JavaRules, rules_for
from logquarry.repair.recover.java_log import JavaLog
from logquarry.repair.recover.java_queues import (
    LARGEST_BASE,
    Applied,
    JavaFile,
    JavaQueue,
    JavaRefusal,
    Noted,
    Target,
    refuse_unreadable,
)
from logquarry.repair.recover.loss import LossSearch, missing_files
from logquarry.repair.recover.plan import RecoveryPlan, StepKind, Steps
from logquarry.repair.recover.store_folders import (
    check_entries,
    layout_with,
    status_of,
    sync_files,
)
from logquarry.repair.recover.wrong_names import refuse_wrong_names
from logquarry.text import counted
from logquarry.write.index_writer import IndexKeeper, IndexWriter

NO_INDEX: Final = (
    "all files of the index are missing, and RocketMQ does not index old messages again: after the "
    "next message with a key, queries by key do not find the old messages. A recovery in mode safe "
    "builds the index"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RocketmqPlan(RecoveryPlan):
    """The plan of a recovery by RocketMQ's rules.

    Attributes:
        queue_ends: for each queue, the position of its end divided by the size of an entry.
        checkpoint: the checkpoint that RocketMQ would write at its shutdown.
        has_log: whether the log still has a file.
        dispatched_timestamp: store time of the last message with a queue entry that the recovery
            dispatched, in milliseconds; 0 if there is none.
    """

    config: StoreConfig
    rules: JavaRules
    queue_ends: Mapping[QueueKey, int]
    checkpoint: Checkpoint
    offsets: Offsets
    has_log: bool
    dispatched_timestamp: int


@rereads
def plan_rocketmq(
    root: Path, config: StoreConfig, restored: Mapping[str, str] = MappingProxyType({})
) -> RocketmqPlan:
    """Return the plan for a store. The plan keeps all new queue entries in memory (20 bytes each).
    ``restored`` contains the missing files that the recovery restores first: see
    :class:`RestoredFileSystem`.

    Raises:
        StoreUnavailable: if a log file has a wrong name, or is a folder or a broken link.
        UsageError: if the sizes of the index files are not given, and cannot be inferred.
    """
    return _Recovery(root, config, Noted(root, restored), restored=restored).plan()


def apply_rocketmq(
    plan: RocketmqPlan, disk: Disk, *, clock: Clock = now_ms, is_clean: bool | None = None
) -> RocketmqPlan:
    """Apply a plan and sync all changes; return the plan that was carried out.

    The caller must hold the lock, and must have created ``abort``. ``is_clean`` is True if the
    store was shut down cleanly, so that it had no ``abort`` before. None has the same effect as
    False.

    Raises:
        StoreUnavailable: if the plan is refused, or the disk fails.
    """
    if plan.refused is not None:
        raise StoreUnavailable(f"{plan.root}: {plan.refused}")
    root = Path(plan.root)
    # Remove these files: they describe the log before the recovery, and readers would still use
    # them.
    disk.remove(root / store_files.DURABLE)
    disk.remove(root / store_files.DAMAGE)
    loss = plan.loss
    plan = recover_as_rocketmq(root, plan.config, disk, clock=clock, is_clean=is_clean, syncs=False)
    sync_files(disk, root)
    file = CheckpointFile(disk, root / store_files.CHECKPOINT)
    try:
        file.physic_timestamp, file.logics_timestamp, _ = plan.checkpoint
        file.offsets = plan.offsets
        if not plan.has_log:
            # The store has no log. With a time other than 0, it would seem to have lost its log
            # files.
            file.physic_timestamp = file.logics_timestamp = file.index_timestamp = 0
        file.flush()
        if plan.has_log:
            note_end(disk, root, plan.log_end, plan.damage)
            path, start = root / store_files.DURABLE, plan.log_start
            DurableFile(disk, path, plan.log_end, file.times, log_start=start).close()
    finally:
        file.close()
    return dataclasses.replace(plan, loss=loss)


def recover_as_rocketmq(
    root: Path,
    config: StoreConfig,
    disk: Disk,
    *,
    clock: Clock = now_ms,
    is_clean: bool | None = None,
    syncs: bool = True,
) -> RocketmqPlan:
    """Recover a store as RocketMQ does, and return the plan that was carried out. The caller must
    hold the lock. If ``syncs`` is False, the caller must sync the files of queues and index.

    Raises:
        RocketmqRefuses: if RocketMQ would not start.
        StoreUnavailable: if the disk fails. Queues and index can then already be changed, and log
            files after the log's end can be in quarantine. No message of the log is changed.
    """
    target = Applied(root, disk)
    recovery = _Recovery(root, config, target, disk=disk, clock=clock, is_clean=is_clean)
    try:
        with none_lost(str(root)):
            plan = recovery.plan()
        if syncs and plan.refused is None:
            recovery.sync_index(0)
            target.sync()
    finally:
        recovery.close()
        target.close()
    if plan.refused is not None:
        raise RocketmqRefuses(f"{root}: {plan.refused}")
    return plan


class RocketmqRefuses(StoreUnavailable):
    """RocketMQ would not start on a store."""


class _Recovery:
    def __init__(
        self,
        root: Path,
        config: StoreConfig,
        target: Target,
        *,
        disk: Disk | None = None,
        clock: Clock = now_ms,
        is_clean: bool | None = None,
        restored: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        check_entries(root, config)
        layout = layout_with(root, config, restored)
        refuse_wrong_names(layout)
        self._is_clean = not layout.has_abort if is_clean is None else is_clean
        self._rules = rules_for(find_features(layout).writer)
        # RocketMQ 4.9 and this recovery treat a store of 3.x like a store of 4.x.
        self.config = with_sizes(config.in_dialect(config.dialect or DIALECTS[0]), layout)
        self.root = root
        self._restored = restored
        self._place = RestoredFileSystem(root, restored).local_path
        self._layout = layout
        self._target = target
        self._disk = disk
        self._clock = clock
        self._keeper: IndexKeeper | None = None
        self._checkpoint_file: CheckpointFile | None = None
        self._looked_at: list[str] = []
        self._steps = Steps()
        self._log = JavaLog(self._place, [], 1, ())
        self._dispatch_from = 0
        self._indexed_from = java.LONG_MAX
        self._dispatch = JavaDispatch({}, self.config, target, self._index, self._rules)
        self._times = Checkpoint()
        self._offsets = Offsets()

    def plan(self) -> RocketmqPlan:
        refused = None
        try:
            self._run()
        except JavaRefusal as refusal:
            refused = str(refusal)
        self._tell_of_queues()
        queues = self._dispatch.queues
        end = self._log.max_offset
        gaps = tuple(missing_files(self._layout, end))
        # After the steps were carried out, the changed queues no longer show which messages were
        # lost.
        shows_loss = refused is None and self._disk is None
        search = LossSearch(self._layout, end=end, damage=gaps) if shows_loss else None
        return RocketmqPlan(
            root=str(self.root),
            mode="rocketmq",
            looked_at=tuple(self._looked_at),
            log_start=max(0, self._log.min_offset),
            log_end=end,
            dispatch_from=self._dispatch_from,
            steps=() if refused else tuple(self._steps),
            refused=refused,
            damage=gaps,
            loss=None if search is None else search.loss(),
            config=self.config,
            rules=self._rules,
            queue_ends={
                key: queue.wrote_offset // UNIT_SIZE for key, queue in sorted(queues.items())
            },
            checkpoint=self._times,
            offsets=self._offsets,
            has_log=bool(self._log.files),
            dispatched_timestamp=self._dispatch.store_timestamp or 0,
        )

    def close(self) -> None:
        if self._keeper is not None:
            self._keeper.close()
        if self._checkpoint_file is not None:
            self._checkpoint_file.close()

    def _run(self) -> None:
        """Do what ``load()`` does, and the parts of ``start()`` that change files."""
        config, target = self.config, self._target
        log_size, queue_size = config.mapped_file_size_commit_log, config.queue_file_size
        assert log_size is not None and queue_size is not None
        files = self._load(store_files.COMMIT_LOG, log_size)
        queues = self._dispatch.queues
        for topic, queue_id in self._layout.queue_names:
            found = self._load(f"{store_files.CONSUME_QUEUE}/{topic}/{queue_id}", queue_size)
            queues[topic, queue_id] = JavaQueue((topic, queue_id), found, queue_size, target)
        rules = self._rules, config.index_keys
        log = self._log = JavaLog(
            self._place, files, log_size, config.delay_levels_ms, self.sync_index, *rules
        )
        self._times = self._read_checkpoint()
        is_clean = self._is_clean
        state = "was shut down cleanly"
        if not is_clean:
            state = f"was not shut down cleanly: {store_files.ABORT} exists"
        self._say(f"the store {state}")
        self._load_index(is_clean)
        for queue in queues.values():
            queue.recover()
        known = self._known
        self._say(
            f"the queues ({len(queues)}) point to messages up to physical offset {max(0, known)}"
        )
        if files:
            self._recover_log(is_clean, known)
        else:
            self._say("there is no log: all queues are set aside")
            for queue in queues.values():
                queue.destroy()
        start = max([0, log.min_offset, self._known])
        if self._rules.is_5:
            # QUIRK: RocketMQ 5 dispatches from the log's end on, even if the queues lack messages.
            start = log.max_offset
        if is_clean or not files:
            self._dispatch_from = min(start, log.max_offset)
        self._indexed_from = min(self._indexed_from, start)
        if start < log.max_offset:
            self._say(f"the messages from {start} on are in no queue: they are dispatched")
            log.dispatch_rest(start, self._dispatch)
        self.sync_index()
        if self._lacks_index():
            self._say(NO_INDEX)
        if self._dispatch.store_timestamp is not None:
            self._times = self._times._replace(logics_timestamp=self._dispatch.store_timestamp)
        if self._rules.is_5:
            self._offsets = self._new_offsets()

    def _lacks_index(self) -> bool:
        """Whether the store has no index, and messages in the log's first file have keys. If the
        recovery has dispatched these messages, they have an index again.
        """
        layout, start = self._layout, max(0, self._log.min_offset)
        stop = min(self._indexed_from, start + self._log.file_size)
        if not self.config.message_index_enable or layout.index_files or start >= stop:
            return False
        levels = layout.delay_levels_ms
        # If the log cannot be read there, only the warning is left out: this recovery need not read
        # these messages.
        with suppress(StoreError):
            found = LogReader(layout, bound=stop, check_crc=False).events(start, stop)
            runs = (event for event in found if isinstance(event, Run))
            each = (dispatch_requests(run.window, run.rows, levels) for run in runs)
            return any(requests.has_key.any() for requests in each)
        return False

    def _new_offsets(self) -> Offsets:
        log, last = self._log, self._dispatch.physical_offset
        found = self._offsets.limited(log.max_offset)
        if log.files and log.last_message is not None:
            found = found._replace(confirm=log.last_message)
        if self._rules.starts_by_offset and last is not None:
            found = found._replace(logics_physical=last)
        return found

    @property
    def _known(self) -> int:
        """Physical offset after the last message in any queue, -1 if no queue has an entry."""
        return max((queue.max_physical for queue in self._dispatch.queues.values()), default=-1)

    def _recover_log(self, is_clean: bool, known: int) -> None:
        """Find the log's end, and cut it there (``recoverNormally``, ``recoverAbnormally``)."""
        config, log, rules = self.config, self._log, self._rules
        by_index = bool(config.message_index_enable and config.message_index_safe)
        check_crc = config.check_crc_on_recover
        if is_clean:
            limit = self._times.index_timestamp if by_index else None
            start = log.first_normally(known, index_limit=limit, check_crc=check_crc)
            self._say(
                f"the log is read from {log.files[start].base} on, as RocketMQ {rules.name} does"
            )
        else:
            start = log.recent(self._times, self._offsets, index_safe=by_index, check_crc=check_crc)
            base = self._dispatch_from = log.files[start].base
            times = ", ".join(map(str, self._times))
            covered = f"the messages before {base}" if start else "no whole file"
            self._say(
                f"the checkpoint ({times}) covers {covered}: dispatch starts at physical offset "
                f"{base}"
            )
        dispatches = rules.is_5 or not is_clean
        if dispatches:
            self._indexed_from = log.files[start].base
        end = log.find_end(
            start,
            self._dispatch if dispatches else None,
            check_crc=check_crc,
            known=known if is_clean else -1,
        )
        if log.stopped_by is not None:
            self._say(f"the log ends at {end}: {log.stopped_by}")
            path = next(file.path for file in reversed(log.files) if file.base <= end)
            self._steps.add(StepKind.CUT, path, log.stopped_by, offset=end)
        for file in reversed(log.cut(end)):
            self._target.set_aside(file.path)
            self._steps.add(StepKind.SET_ASIDE, file.path, f"it lies after the log's end at {end}")
        if (self._known if rules.starts_by_frame else known) >= end:
            for queue in self._dispatch.queues.values():
                queue.truncate_dirty(end)

    def _load(self, folder: str, size: int) -> list[JavaFile]:
        """Return the files of a queue or of the log, as RocketMQ's ``MappedFileQueue.load`` finds
        them. Raise JavaRefusal if RocketMQ would refuse a file.
        """
        names = {p.name for p in map(PurePosixPath, self._restored) if str(p.parent) == folder}
        place = self._place(folder)
        try:
            with os.scandir(place) as entries:
                names.update(entry.name for entry in entries)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            raise StoreUnavailable(f"{place}: cannot be read: {reason_of(error)}") from error
        # Keep this call out of the ``try`` above: a broken link also raises FileNotFoundError, but
        # Java refuses the link.
        found = [(name, status_of(self._place(f"{folder}/{name}"))) for name in sorted(names)]
        files = []
        for name, status in found:
            path, length = f"{folder}/{name}", status.st_size
            if self._rules.is_5 and stat.S_ISDIR(status.st_mode):
                continue
            if self._rules.is_5 and not length and name == found[-1][0]:
                self._target.set_aside(path)
                self._steps.add(StepKind.SET_ASIDE, path, "the last file is empty")
                continue
            is_file = stat.S_ISREG(status.st_mode)
            if length != size or not is_file:
                what = counted(length, "byte") if is_file else "not a file"
                raise JavaRefusal(f"{path}: {what}, instead of a file of {size} bytes")
            base = int(name) if store_files.is_offset_name(name) else -1
            if base % size or not 0 <= base <= LARGEST_BASE:
                raise JavaRefusal(f"{path}: no file of {size} bytes can have this name")
            files.append(JavaFile(base, path, size))
        return files

    def _read_checkpoint(self) -> Checkpoint:
        try:
            data = self._layout.filesystem.read(store_files.CHECKPOINT)
        except FileNotFoundError:
            self._say("there is no checkpoint")
            return Checkpoint()
        self._offsets = checkpoint.decode_offsets(data)
        return checkpoint.decode(
            data[: checkpoint.LAYOUT.size].ljust(checkpoint.LAYOUT.size, b"\0")
        )

    def _load_index(self, is_clean: bool) -> None:
        """Set aside the index files that ``IndexService.load`` deletes, and extend short files."""
        shape = self.config.index_shape
        assert shape is not None
        limit = self._times.index_timestamp
        for entry in self._layout.index_files:
            path = f"{store_files.INDEX}/{entry.name}"
            if int(entry.name) > java.LONG_MAX:
                continue
            view = self._layout.open_file(path)
            data = bytes(view.head(index.HEADER.size))
            refuse_unreadable(view, index.HEADER.size)
            header = index.decode_header(data.ljust(index.HEADER.size, b"\0"))
            if not is_clean and header.end_timestamp > limit:
                reason = (
                    f"its last message is of {header.end_timestamp}, and the checkpoint covers the "
                    f"index up to {limit}"
                )
                self._target.set_aside(path)
                self._steps.add(StepKind.SET_ASIDE, path, reason)
            elif entry.size < shape.file_size:
                self._target.extend(path, shape.file_size)
                length = shape.file_size - entry.size
                reason = f"{counted(entry.size, 'byte')} instead of {shape.file_size}"
                self._steps.add(StepKind.EXTEND, path, reason, offset=entry.size, length=length)

    def _index(self) -> IndexWriter | None:
        if self._disk is None or not self.config.message_index_enable:
            return None
        shape = self.config.index_shape
        assert shape is not None
        self._checkpoint_file = CheckpointFile(self._disk, self.root / store_files.CHECKPOINT)
        self._keeper = IndexKeeper(self._disk, self.root, shape, self._checkpoint_file, self._clock)
        return self._keeper.writer

    def sync_index(self, least_pages: int = 1) -> None:
        """Sync the index files that are full. RocketMQ syncs these files in a background thread.
        With ``least_pages`` 0, also sync the last index file.
        """
        if self._keeper is not None:
            self._keeper.guard()
            self._keeper.flush(least_pages)

    def _say(self, text: str) -> None:
        self._looked_at.append(text)

    def _tell_of_queues(self) -> None:
        for _, queue in sorted(self._dispatch.queues.items()):
            for path, reason in queue.set_aside:
                self._steps.add(StepKind.SET_ASIDE, path, reason)
            if queue.cut is not None:
                reason = "its messages from there on are after the log's end"
                self._steps.add(StepKind.CUT, queue.folder, reason, offset=queue.cut)
            if queue.put_units:
                reason = "the log has messages that it lacks"
                length = queue.put_units * UNIT_SIZE
                self._steps.add(
                    StepKind.BUILD_QUEUE, queue.folder, reason, offset=queue.put_from, length=length
                )
        if self._dispatch.keys and self.config.message_index_enable:
            reason = (
                counted(self._dispatch.messages, "message is", "messages are") + " dispatched again"
            )
            self._steps.add(
                StepKind.BUILD_INDEX, store_files.INDEX, reason, offset=self._dispatch_from
            )
