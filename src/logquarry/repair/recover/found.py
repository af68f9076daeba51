"""What a store has when it is opened to be written: found by reading, before anything is changed.

A store that was closed in order, and whose log and queues agree, is taken as it is. Any other one
has to be recovered first (:mod:`.recovery`).

Where the log ends: at the message that the queues know to be the last, and what goes on behind it
without a break. What stands behind that is left over from an earlier recovery (formats.md, Stale
frames); it is made zeros, unless there are whole messages in it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final

from logquarry.config import StoreConfig
from logquarry.dialect31.open_transactions import TransactionsFound, find_transactions
from logquarry.disk.disk import Disk
from logquarry.disk.locks import AbortFile
from logquarry.disk.open_files import OpenFiles
from logquarry.errors import CorruptFile, StoreNotFound, StoreUnavailable
from logquarry.format.frame import Frame
from logquarry.log.layout import (
    ABORT,
    CHECKPOINT,
    COMMIT_LOG,
    CONFIG,
    CONSUME_QUEUE,
    DAMAGE,
    INDEX,
    LOCK,
    SIDECAR,
    TRANSACTION,
    StoreLayout,
)
from logquarry.log.walk import DamagedSpan, LogReader, Run
from logquarry.read.commit_log import CommitLog
from logquarry.read.consume_queue import ConsumeQueue
from logquarry.read.index import Index
from logquarry.read.log_end import (
    consume_queues,
    known_damage,
    last_entries,
    last_file_start,
    sound_bound,
)
from logquarry.read.log_queues import QueueKey
from logquarry.read.store_sizes import with_sizes
from logquarry.repair.recover.checks import QueueChecks, index_fault
from logquarry.repair.recover.rocketmq import RocketmqRefuses, RocketmqResult, recover_as_rocketmq
from logquarry.repair.recover.saved_units import sync_files

logger = logging.getLogger(__name__)

_READ_ONLY_HINT: Final = 'open it with mode="r"'
_CHECKED_FILES: Final = 3
"""The last files of the log, which RocketMQ reads when it opens a store (``recoverNormally``)."""
_OURS: Final = frozenset(
    {
        ABORT,
        CHECKPOINT,
        COMMIT_LOG,
        CONFIG,
        CONSUME_QUEUE,
        INDEX,
        LOCK,
        SIDECAR,
        TRANSACTION,
        "lost+found",
    }
)
"""What may be in the folder of a store that is to be made."""


@dataclass(frozen=True, slots=True)
class StoreFound:
    """What a store has.

    Attributes:
        config: its settings, with all sizes.
        log_end: where the log ends.
        pieces: the stretches of the log that are still to be dispatched, without the damage between
            them; all before the first one is in queues and index.
        queue_ends: one past the last offset of each queue.
        recovered: what RocketMQ's recovery did, where it was asked for.
        transactions: state table and redo log, in dialect 3.1.
    """

    config: StoreConfig
    log_end: int
    pieces: tuple[tuple[int, int], ...]
    queue_ends: Mapping[QueueKey, int]
    recovered: RocketmqResult | None = None
    transactions: TransactionsFound = field(default_factory=TransactionsFound)

    @property
    def keeps_tails(self) -> bool:
        """Whether files keep what stands behind their ends, as RocketMQ leaves it."""
        return self.recovered is not None


def check_folder(root: Path) -> None:
    """Look at nothing but names: may this folder be opened to be written?

    Raises:
        StoreNotFound: if it is no store, and holds other things: none is made among them.
    """
    try:
        if not root.exists():
            return
        if not root.is_dir():
            raise StoreNotFound(f"{root}: not a folder")
        names = {path.name for path in root.iterdir()}
    except OSError as error:
        raise StoreNotFound(f"{root}: cannot be read: {error.strerror}") from error
    if not names & {COMMIT_LOG, CONSUME_QUEUE} and names - _OURS:
        raise StoreNotFound(
            f"{root}: not a store, and not empty: it holds {min(names - _OURS)}, and no "
            f"{COMMIT_LOG}/"
        )


class NeedsRecovery(StoreUnavailable):
    """A store was not closed in order, or its parts do not agree."""


def find_store(root: Path, config: StoreConfig, *, is_recovered: bool = False) -> StoreFound:
    """What a store has; nothing is changed. To be asked with the lock held.

    Args:
        root: its folder.
        config: its settings.
        is_recovered: whether it was recovered just now, so that ``abort`` says nothing.

    Raises:
        NeedsRecovery: if it was not closed in order, or its parts do not agree.
        CorruptFile: if the files have other sizes than the settings say.
    """
    if not _is_store(root):
        return StoreFound(with_sizes(config, None), 0, (), {})
    layout = StoreLayout.open(root, config)
    files = OpenFiles(layout)
    queues = consume_queues(layout, files)
    queued = max((queue.last_physical_end or 0 for queue in queues), default=0)
    has_log = bool(layout.commit_log.files)
    settings = with_sizes(config, layout)
    _check_stated(layout, config)
    if layout.has_abort and not is_recovered and (has_log or queued):
        raise NeedsRecovery(f"it was not closed in order: {ABORT} is there")
    _check_sizes(layout, settings)
    ends = {(queue.topic, queue.queue_id): queue.max_offset for queue in queues}
    entries = last_entries(layout, queues)
    log = CommitLog(layout, files=files, last_entries=lambda: entries)
    end = log.max_offset
    sound = end
    if queued > log.min_offset:
        # Only the last file: damage before it stays what it is, whatever is put.
        sound = min(end, sound_bound(layout, queued) or 0)
    if sound < queued:
        raise NeedsRecovery(
            f"its queues reach up to {queued} of the log, which is sound only up to {sound}"
        )
    _check_rest(layout, end)
    if end > log.min_offset and not queues and layout.durable_end is None:
        raise NeedsRecovery("it has a log, and no queues that tell how far it was dispatched")
    start = max(queued, log.min_offset)
    if settings.message_index_enable:
        _check_index(layout, settings, end)
        start = max(start, _indexed(layout, log, files))
    last_file = last_file_start(layout) or log.min_offset
    before = (_CHECKED_FILES - 1) * layout.commit_log.file_size
    checked_from = max(log.min_offset, last_file - before)
    if not is_recovered:
        _check_queues(layout, settings, queues, checked_from, start)
    transactions = TransactionsFound()
    if settings.is_3_1:
        transactions = _find_transactions(
            layout, settings, end if is_recovered else checked_from, end
        )
    pieces = _pieces(layout, start, end)
    return StoreFound(settings, end, pieces, ends, transactions=transactions)


def _find_transactions(
    layout: StoreLayout, settings: StoreConfig, start: int, end: int
) -> TransactionsFound:
    """State table and redo log, which are to agree with the log from ``start`` on.

    Raises:
        NeedsRecovery: if they do not.
    """
    found = find_transactions(StoreLayout(layout.filesystem, settings), start, end)
    if isinstance(found, str):
        raise NeedsRecovery(found)
    return found


def _pieces(layout: StoreLayout, start: int, end: int) -> tuple[tuple[int, int], ...]:
    """The stretches of a part of the log, without the damage that a recovery has noted.

    A message whose body alone is bad has its place in a queue as any other.

    Raises:
        NeedsRecovery: if there is damage that none has noted.
    """
    if start >= end:
        return ()
    known = known_damage(layout)
    pieces: list[tuple[int, int]] = []
    position = start
    for event in LogReader(layout, bound=end, check_crc=False).events(start, end):
        if isinstance(event, DamagedSpan):
            if event.offset not in known:
                raise NeedsRecovery(f"{event.path}: at {event.offset}: {event.reason}")
            if position < event.offset:
                pieces.append((position, event.offset))
            position = event.offset + event.length
    if position < end:
        pieces.append((position, end))
    return tuple(pieces)


def _check_stated(layout: StoreLayout, config: StoreConfig) -> None:
    """See that stated sizes are those of some files: else the settings are of another store.

    Raises:
        CorruptFile: if no file has the stated size.
    """
    sequences = [(layout.commit_log.files, config.mapped_file_size_commit_log)]
    queue_files = tuple(file for name in layout.queue_names for file in layout.queue(*name).files)
    sequences.append((queue_files, config.queue_file_size))
    for files, size in sequences:
        sizes = [file.size for file in files if file.size]
        # A crash may leave the first file of all short.
        is_torn = layout.has_abort and len(sizes) == 1 and size is not None and sizes[0] < size
        if size is not None and sizes and size not in sizes and not is_torn:
            path = layout.filesystem.full_path(files[0].path)
            raise CorruptFile(path, 0, f"it has {sizes[0]} bytes, and the settings say {size}")


def recovered_store(
    root: Path, config: StoreConfig, disk: Disk, clock: Callable[[], int], abort: AbortFile
) -> StoreFound:
    """What a store has after it was recovered as RocketMQ does: any store, however it was closed.

    ``abort`` is there then. It is made before anything is changed, and taken away again if RocketMQ
    would not start on a store that was closed in order.

    Raises:
        StoreUnavailable: if RocketMQ would not start, or the disk fails.
    """
    if not _is_store(root):
        found = find_store(root, config)
        abort.make()
        return found
    is_clean = not abort.exists
    abort.make()
    try:
        result = recover_as_rocketmq(root, config, disk, clock=clock, is_clean=is_clean)
    except RocketmqRefuses:
        if is_clean:
            abort.remove()
        raise
    # What an earlier recovery noted is of another log, and the mark that is made next of this one.
    disk.remove(root / DAMAGE)
    plan = result.plan
    if not is_clean:
        # The mark says that it is on the disk; who wrote it may have died before that.
        sync_files(disk, root, write_from=plan.log_end, log_end=plan.log_end, parts=(COMMIT_LOG,))
    return StoreFound(plan.config, plan.log_end, (), plan.queue_ends, recovered=result)


def _is_store(root: Path) -> bool:
    return any((root / name).is_dir() for name in (COMMIT_LOG, CONSUME_QUEUE))


def _check_sizes(layout: StoreLayout, config: StoreConfig) -> None:
    """Each file is as large as the settings say, but for an empty last one (a crash leaves that).

    And each begins where the one before it ends.

    Raises:
        NeedsRecovery: if one is not (RocketMQ's load() says no).
    """
    sequences = [(layout.commit_log.files, config.mapped_file_size_commit_log)]
    queues = (layout.queue(*name).files for name in layout.queue_names)
    sequences += [(files, config.queue_file_size) for files in queues]
    for files, size in sequences:
        for file in files:
            if file.size != size and (file.size or file is not files[-1]):
                path = layout.filesystem.full_path(file.path)
                raise NeedsRecovery(f"{path} has {file.size} bytes, and {size} belong there")
        for before, after in pairwise(files):
            if after.base - before.base != size:
                path = layout.filesystem.full_path(after.path)
                raise NeedsRecovery(f"{path}: no file ends where it begins")


def _check_index(layout: StoreLayout, config: StoreConfig, end: int) -> None:
    """See that the index files are of this log, as their headers tell.

    Raises:
        NeedsRecovery: if one is not.
    """
    shape = config.index_shape
    fault = None if shape is None else index_fault(layout, shape, log_end=end)
    if fault is not None:
        raise NeedsRecovery(fault)


def _check_queues(
    layout: StoreLayout,
    config: StoreConfig,
    queues: Iterable[ConsumeQueue],
    start: int,
    stop: int,
) -> None:
    """See that a part of the log is sound, and that the queues have the messages in it.

    Java starts behind the message that any queue knows to be the last, and what another one lacks
    before that is lost to it (`noabort-cq-behind`, `noabort-one-topic-gone`).

    Raises:
        NeedsRecovery: if there is damage that no recovery has noted yet, or if a queue lacks
            messages. A topic that was deleted looks the same, and comes back.
    """
    if start >= stop:
        return
    known = known_damage(layout)
    checks = QueueChecks({(queue.topic, queue.queue_id): queue for queue in queues}, config, known)
    # Bounded: what stands behind was looked at already.
    reader = LogReader(layout, bound=stop, check_crc=config.check_crc_on_recover)
    for event in reader.events(start, stop):
        if isinstance(event, Run):
            checks.take(event)
        elif isinstance(event, DamagedSpan) and event.offset not in known:
            raise NeedsRecovery(f"{event.path}: at {event.offset}: {event.reason}")
    for check in checks:
        if check.difference is not None:
            topic, queue_id = check.key
            raise NeedsRecovery(f"queue {queue_id} of {topic}: {check.difference}")


def _indexed(layout: StoreLayout, log: CommitLog, files: OpenFiles) -> int:
    """What is before it was dispatched to the index, and so to the queues, which come first.

    0 where the index does not tell.

    To be asked of an index whose headers are in order.
    """
    found = Index(layout, files=files).files
    if not found or found[-1].is_empty:
        return 0
    last = found[-1].header.end_offset
    outcome = log.outcome_at(last, check_crc=False)
    return outcome.physical_offset + outcome.size if isinstance(outcome, Frame) else 0


def _check_rest(layout: StoreLayout, end: int) -> None:
    """See that nothing stands behind the log's end: what is written there next would join it.

    Raises:
        NeedsRecovery: if there is anything.
    """
    last = LogReader(layout).data_end(end)
    if last > end:
        raise NeedsRecovery(f"there are {last - end} bytes behind the log's end at {end}")
