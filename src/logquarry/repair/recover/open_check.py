"""Checks whether a store can be opened for writing without a recovery. Changes nothing.

To find the log's end, the check starts at the durable offset, or, without one, at the last message
to which a queue points. From there, the check follows the frames while each frame begins where the
previous one ends. Frames after this end are stale: an earlier truncation left them
(docs/reliability.md, "Where the log ends").
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from logquarry.config import StoreConfig
from logquarry.dialect31.open_transactions import TransactionsFound
from logquarry.dialect31.state_table import find_transactions
from logquarry.disk.disk import Disk
from logquarry.disk.folders import AbortFile
from logquarry.disk.name_guard import NameGuard, link_of
from logquarry.errors import CorruptFile, StoreError, StoreNotFound, StoreUnavailable, reason_of
from logquarry.format.frame import Frame
from logquarry.format.properties import INNER_MULTI_QUEUE_OFFSET
from logquarry.log import store_files
from logquarry.log.columns import rows_with_property
from logquarry.log.layout import StoreLayout
from logquarry.log.location import not_a_store
from logquarry.log.log_place import LogFolders
from logquarry.log.open_files import OpenFiles
from logquarry.log.walk import DamagedSpan, LogReader, Run
from logquarry.paths import exists, is_folder
from logquarry.read.batch_queue import BatchQueue, all_queues
from logquarry.read.commit_log import CommitLog
from logquarry.read.index import Index
from logquarry.read.log_end import (
    LastEntries,
    known_damage,
    last_entries,
    last_file_start,
    sound_bound,
)
from logquarry.read.log_queues import QueueKey
from logquarry.read.queue import ConsumeQueue, Queue
from logquarry.read.store_sizes import with_sizes
from logquarry.repair.audit.differences import FileFault, file_differences, queue_name
from logquarry.repair.audit.first_difference import QueueAudits
from logquarry.repair.audit.harmed_frames import HarmedIds, HarmedTypes
from logquarry.repair.audit.index import index_fault
from logquarry.repair.audit.log import are_stale_bytes
from logquarry.repair.recover.loss import require_consent
from logquarry.repair.recover.plan import RecoveryPlan
from logquarry.repair.recover.rocketmq import (
    NO_INDEX,
    RocketmqPlan,
    RocketmqRefuses,
    plan_rocketmq,
    recover_as_rocketmq,
)
from logquarry.repair.recover.safe import plan_safe
from logquarry.repair.recover.store_folders import (
    check_entries,
    check_listed,
    discard_names,
    named_folders,
    sync_files,
)
from logquarry.repair.recover.wrong_names import wrong_links
from logquarry.text import counted

logger = logging.getLogger(__name__)

_CHECKED_FILES: Final = 3
"""Number of files at the log's end that RocketMQ reads at its start (``recoverNormally``)."""
_NO_INDEX: Final = "it has no index of its messages"
"""The next message with a key makes an index file. After that, queries by key would not find the
older messages. So the store needs a recovery."""
_OURS: Final = frozenset(
    {
        store_files.ABORT,
        store_files.CHECKPOINT,
        store_files.COMMIT_LOG,
        store_files.CONFIG,
        store_files.CONSUME_QUEUE,
        store_files.INDEX,
        store_files.LOCK,
        store_files.SIDECAR,
        store_files.TRANSACTION,
        "lost+found",
    }
)
"""Names of files that may be in a folder before a new store is created in it."""


@dataclass(frozen=True, slots=True)
class StoreFound:
    """A store that can be opened for writing.

    Attributes:
        config: the settings of the caller, completed with the file sizes of the store.
        pieces: the undamaged parts of the log that are not dispatched yet, as (start, end).
        queue_ends: for each queue, the number of the first entry after its end.
        recovered: the plan that was carried out, if the store was just recovered in mode
            ``rocketmq``; else None.
        transactions: state table and redo log of a store in the format of RocketMQ 3.1.
    """

    config: StoreConfig
    log_end: int
    pieces: tuple[tuple[int, int], ...]
    queue_ends: Mapping[QueueKey, int]
    recovered: RocketmqPlan | None = None
    transactions: TransactionsFound = field(default_factory=TransactionsFound)
    log_folders: LogFolders = field(default_factory=LogFolders)

    @property
    def keeps_tails(self) -> bool:
        """Whether the writer leaves the bytes after the ends of log and queues as they are, as
        RocketMQ does.
        """
        return self.recovered is not None


def check_folder(root: Path) -> None:
    """Raise StoreNotFound if a folder is no store, and no store can be created there."""
    try:
        if not exists(root):
            if any(part.startswith("~") for part in root.parts):
                raise not_a_store(str(root), f"{root}: ~ is not expanded here: give the full path")
            return
        if not is_folder(root):
            raise not_a_store(str(root), f"{root}: not a folder")
        names = {path.name for path in root.iterdir()}
    except OSError as error:
        raise StoreNotFound(f"{root}: cannot be read: {reason_of(error)}") from error
    if not names & {store_files.COMMIT_LOG, store_files.CONSUME_QUEUE} and names - _OURS:
        raise not_a_store(
            str(root),
            f"{root}: not a store, and not empty: it holds {min(names - _OURS)}, and no "
            f"{store_files.COMMIT_LOG}/",
        )


class NeedsRecovery(StoreUnavailable):
    """A store cannot be opened for writing without a recovery."""


def find_store(root: Path, config: StoreConfig, *, is_recovered: bool = False) -> StoreFound:
    """Check a store before it is opened for writing. The caller must hold the store's lock.

    ``is_recovered`` is True if the store was just recovered. In this case, ``abort`` can still
    exist.

    Raises:
        NeedsRecovery: if the store was not shut down cleanly, or its files do not agree.
        CorruptFile: if the sizes of the files differ from the sizes in the settings.
    """
    if not _is_store(root):
        return StoreFound(with_sizes(config, None), 0, (), {})
    layout = StoreLayout.open(root, config)
    by_content = layout.by_content()
    names = by_content.log_names
    if not names.are_right:
        raise NeedsRecovery(str(names.error(layout.filesystem)))
    for path, reason in wrong_links(by_content).items():
        raise NeedsRecovery(f"{path}: {reason}")
    if layout.lost_head is not None:
        raise NeedsRecovery(str(layout.lost_head))
    files = OpenFiles(layout)
    queues = all_queues(layout, files, with_stale=True)
    lasts: LastEntries = {queue: queue.last_entry for queue in queues}
    queued = max((last.end for last in lasts.values() if last is not None), default=0)
    has_log = bool(layout.commit_log.files)
    settings = with_sizes(config, layout, files, lasts)
    _check_stated(layout, config, queues)
    if layout.has_abort and not is_recovered and (has_log or queued):
        raise NeedsRecovery(f"it was not shut down cleanly: {store_files.ABORT} exists")
    _check_sizes(layout, settings, queues)
    ends = {queue.key: queue.entry_end for queue in queues}
    entries = last_entries(layout, queues, lasts)
    log = CommitLog(layout, files=files, last_entries=lambda: entries)
    end = log.max_offset
    sound = end
    if queued > log.min_offset:
        # Check only the last file: damage in earlier files does not prevent puts.
        sound = min(end, sound_bound(layout, queued) or 0)
    if sound < queued:
        raise NeedsRecovery(
            f"its queues point to messages up to physical offset {queued}, but the log is sound "
            f"only up to {sound}"
        )
    _check_rest(layout, end)
    if end > log.min_offset and not queues and layout.durable_end is None:
        raise NeedsRecovery("it has a log, but no queues that show how far the log was dispatched")
    start = max(queued, log.min_offset)
    if settings.message_index_enable:
        if end > log.min_offset and store_files.INDEX not in layout.folders:
            raise NeedsRecovery(_NO_INDEX)
        shape = settings.index_shape
        fault = None if shape is None else index_fault(layout, shape, log_end=end)
        if fault is not None:
            raise NeedsRecovery(fault)
        start = max(start, _indexed(layout, log, files))
    last_file = last_file_start(layout) or log.min_offset
    before = (_CHECKED_FILES - 1) * layout.commit_log.file_size
    checked_from = max(log.min_offset, last_file - before)
    if not is_recovered:
        has_keys = _check_queues(layout, settings, queues, checked_from, start)
        if has_keys and settings.message_index_enable and not layout.index_files:
            raise NeedsRecovery(_NO_INDEX)
    transactions = TransactionsFound()
    if settings.is_3_1:
        start_at = end if is_recovered else checked_from
        found = find_transactions(StoreLayout(layout.filesystem, settings), start_at, end)
        if isinstance(found, str):
            raise NeedsRecovery(found)
        transactions = found
    pieces, names_copies = _pieces(layout, start, end)
    if settings.enable_multi_dispatch is None:
        # The settings do not specify whether to make multi-dispatch copies. So make them only if
        # the log already has such copies.
        has_lmq = names_copies if settings.enable_lmq is None else settings.enable_lmq
        settings = replace(settings, enable_multi_dispatch=names_copies, enable_lmq=has_lmq)
    return StoreFound(
        *(settings, end, pieces, ends),
        transactions=transactions,
        log_folders=layout.log_folders,
    )


def _pieces(layout: StoreLayout, start: int, end: int) -> tuple[tuple[tuple[int, int], ...], bool]:
    """Return the undamaged parts of the log, and whether any message has multi-dispatch copies.
    Raises NeedsRecovery for damage that is not recorded.
    """
    if start >= end:
        return (), False
    names_copies = False
    known = known_damage(layout)
    pieces: list[tuple[int, int]] = []
    position = start
    for event in LogReader(layout, bound=end, check_crc=False).events(start, end):
        if isinstance(event, DamagedSpan):
            if event.offset not in known:
                raise NeedsRecovery(f"{event.path}: at {event.offset}: {event.reason}")
            if position < event.offset:
                pieces.append((position, event.offset))
            position = event.end
        elif isinstance(event, Run) and not names_copies:
            named = rows_with_property(event.window, event.rows, INNER_MULTI_QUEUE_OFFSET)
            names_copies = bool(len(named))
    if position < end:
        pieces.append((position, end))
    return tuple(pieces), names_copies


def _check_stated(layout: StoreLayout, config: StoreConfig, queues: Iterable[Queue]) -> None:
    """Raise CorruptFile if the log or the queues have files, but none with the size in the
    settings.
    """
    sequences = [(layout.commit_log.files, config.mapped_file_size_commit_log)]
    if config.queue_file_size is not None:
        listed = (queue.listed for queue in queues if isinstance(queue, ConsumeQueue))
        queue_files = tuple(file for sequence in listed for file in sequence.files)
        sequences.append((queue_files, config.queue_file_size))
    for found, size in sequences:
        # Ignore empty files, which a crash can leave.
        files = [file for file in found if file.size]
        sizes = [file.size for file in files]
        # If the store has only one file, a crash can have left it too short.
        is_torn = layout.has_abort and len(sizes) == 1 and size is not None and sizes[0] < size
        if size is not None and sizes and size not in sizes and not is_torn:
            path = layout.filesystem.full_path(files[0].path)
            raise CorruptFile(path, 0, f"{counted(sizes[0], 'byte')}, but the settings give {size}")


def recovered_store(
    root: Path,
    config: StoreConfig,
    disk: Disk,
    clock: Callable[[], int],
    abort: AbortFile,
    accept_loss: int | None,
) -> StoreFound:
    """Recover a store as RocketMQ does, so that it can be opened. The function creates ``abort``.
    If the store was shut down cleanly, and RocketMQ would not start on it, the function removes
    ``abort`` before it raises the error.

    Raises:
        StoreUnavailable: if RocketMQ would not start, or the disk fails.
        LossRefused: if the recovery would lose more than ``accept_loss`` allows.
    """
    if not _is_store(root):
        found = find_store(root, config)
        abort.make()
        return found
    check_entries(root, config)
    with settled_names(StoreLayout.open(root, config), config, disk):
        check_before_lock(root, config, accept_loss)
    is_clean = not abort.exists
    abort.make()
    try:
        plan = recover_as_rocketmq(root, config, disk, clock=clock, is_clean=is_clean)
    except RocketmqRefuses:
        if is_clean:
            abort.remove()
        raise
    if NO_INDEX in plan.looked_at:
        logger.warning("%s: %s", root, NO_INDEX)
    # Remove the record of the damage, because it describes the log before this recovery.
    disk.remove(root / store_files.DAMAGE)
    if not is_clean:
        # The next durable offset covers the whole log, so sync the log first.
        sync_files(disk, root, parts=())
    return StoreFound(plan.config, plan.log_end, (), plan.queue_ends, recovered=plan)


@contextlib.contextmanager
def settled_names(layout: StoreLayout, config: StoreConfig, disk: Disk) -> Iterator[None]:
    """Context manager: restore missing files of the log and the index from their hard links.

    While a store is open, each file of its log, and each index file that is not yet full and
    synced, also has a hard link in ``.logquarry/``. After a crash, the file may be missing, and
    only the hard link may be left. At the end of the block, all these hard links are removed:
    otherwise, a file that a recovery moves to quarantine would be restored later. If the block
    raises an error or is interrupted, files and hard links are as they were before the block.

    The caller must hold the store's lock.
    """
    root, guard = Path(layout.root), NameGuard(disk)
    folders = named_folders(root, layout.log_folders)
    lost = guard.lost(folders)
    if _are_foreign(layout, config, lost):
        yield
        discard_names(root, layout.log_folders, disk)
    else:
        with guard.restored(folders, lost):
            yield


def restored_files(layout: StoreLayout, config: StoreConfig, disk: Disk) -> dict[str, str]:
    """Return the files that :func:`settled_names` would restore: path of the file -> path of its
    hard link. Both paths are below the store's folder. The store is not changed.
    """
    root = Path(layout.root)
    lost = NameGuard(disk).lost(named_folders(root, layout.log_folders))
    if _are_foreign(layout, config, lost):
        return {}
    return {str(path.relative_to(root)): str(link_of(path).relative_to(root)) for path in lost}


def _are_foreign(layout: StoreLayout, config: StoreConfig, lost: Sequence[Path]) -> bool:
    """Whether the missing files ``lost`` belong to another store, or to another state of this
    store. Only their hard links are left.

    After a crash, the queues may not show yet that a missing file has messages. But the writer
    begins a log file only after the previous file is full. So if the log ends inside one of its
    files, and only zeros follow, then later files belong to another state of the store, or to
    another store.
    """
    root = Path(layout.root)
    if not lost:
        return False
    try:
        plan = plan_safe(root, config)
    except StoreError:
        # The plan may have failed because of the missing files, so they may belong to the store.
        return False
    if plan.refused is not None or plan.loss is not None:
        return False
    end = plan.log_end
    bases = [int(path.name) for path in lost if store_files.is_offset_name(path.name)]
    is_last = end < layout.commit_log.end and LogReader(layout).data_end(end) <= end
    return not layout.has_abort or (is_last and min(bases, default=0) > end)


def check_before_lock(root: Path, config: StoreConfig, accept_loss: int | None) -> None:
    """Before the lock is taken, raise an error if the store cannot be opened or recovered."""
    if not _is_store(root):
        return
    plan: RecoveryPlan
    if config.recovery == "rocketmq":
        plan = plan_rocketmq(root, config)
        if plan.refused is not None:
            raise RocketmqRefuses(f"{root}: {plan.refused}")
    else:
        try:
            find_store(root, config)
            return
        except NeedsRecovery:
            plan = plan_safe(root, config)
    require_consent(plan.root, plan.loss, accept_loss, plan.mode)


def _is_store(root: Path) -> bool:
    try:
        return any(
            is_folder(root / name) for name in (store_files.COMMIT_LOG, store_files.CONSUME_QUEUE)
        )
    except OSError as error:
        raise StoreNotFound(f"{root}: cannot be read: {reason_of(error)}") from error


def _check_sizes(layout: StoreLayout, config: StoreConfig, queues: Iterable[Queue]) -> None:
    """Check for missing files and wrong sizes, as RocketMQ's ``load()`` does. Unlike RocketMQ 4.9,
    accept an empty last file. Raises NeedsRecovery, or WrongEntry for a pipe or a broken link.
    """
    sequences = [(layout.commit_log.files, config.mapped_file_size_commit_log)]
    sizes = (ConsumeQueue, config.queue_file_size), (BatchQueue, config.batch_queue_file_size)
    for kind, size in sizes:
        sequences += [(queue.listed.files, size) for queue in queues if isinstance(queue, kind)]
    twice = {topic for topic, _ in layout.queue_names} & config.batch_topics
    if twice:
        raise NeedsRecovery(f"topic {min(twice)} has batch queues and other queues")
    empty: list[str] = []
    for files, size in sequences:
        assert size is not None
        for found in file_differences(files, size):
            if found.fault in (FileFault.SIZE, FileFault.GAP):
                raise NeedsRecovery(found.reason(layout.filesystem.full_path(found.file.path)))
            if found.fault is FileFault.EMPTY_LAST:
                empty.append(found.file.path)
    check_listed(layout, empty)


def _check_queues(
    layout: StoreLayout,
    config: StoreConfig,
    queues: Iterable[Queue],
    start: int,
    stop: int,
) -> bool:
    """Return whether a message has keys.

    Raise NeedsRecovery if a part of the log has unrecorded damage, if a queue lacks a message, or
    if a queue has entries after its last message.

    After a clean shutdown, Java dispatches only messages after the last message in any queue. So
    Java never adds an entry of an earlier message (test stores `noabort-cq-behind`,
    `noabort-one-topic-gone`).
    """
    if start >= stop:
        return False
    known = known_damage(layout)
    there = {queue.key: queue for queue in queues}
    ids = HarmedIds(layout, there, there.get, is_3_1=config.is_3_1)
    types = HarmedTypes(layout, there.get)
    audits = QueueAudits(there, config, known, ids=ids, types=types)
    # Read only up to ``stop``: the caller has already checked the bytes after it.
    reader = LogReader(layout, bound=stop, check_crc=config.check_crc_on_recover)
    for event in reader.events(start, stop):
        if isinstance(event, Run):
            audits.take(event)
        elif isinstance(event, DamagedSpan) and event.offset not in known:
            raise NeedsRecovery(f"{event.path}: at {event.offset}: {event.reason}")
    for audit in audits:
        difference = audit.difference or audit.surplus
        if difference is not None:
            raise NeedsRecovery(f"{queue_name(audit.key)}: {difference.reason}")
    return audits.has_keys


def _indexed(layout: StoreLayout, log: CommitLog, files: OpenFiles) -> int:
    """Return the physical offset after the last message that the index has, 0 if unknown."""
    found = Index(layout, files=files).files
    if not found or found[-1].is_empty:
        return 0
    last = found[-1].header.end_offset
    outcome = log.outcome_at(last, check_crc=False)
    return outcome.physical_offset + outcome.size if isinstance(outcome, Frame) else 0


def _check_rest(layout: StoreLayout, end: int) -> None:
    """Raise NeedsRecovery if the log has bytes other than zeros after its end: readers could later
    read them as frames. A broker with ``writeWithoutMmap`` leaves such bytes at a clean shutdown.
    These are accepted, because the writer zeroes them.
    """
    last = LogReader(layout).data_end(end)
    is_closed = not layout.has_abort
    if last > end and not (is_closed and are_stale_bytes(layout, end, is_closed=True)):
        are = "is" if last - end == 1 else "are"
        count = counted(last - end, "byte")
        raise NeedsRecovery(f"there {are} {count} after the log's end at {end}")
