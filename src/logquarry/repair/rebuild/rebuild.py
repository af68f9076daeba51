"""Rebuild: makes new consume queues and a new index from the log, in the store or in another
folder.

The new files are built in ``.logquarry/rebuild/``, synced, and moved into place by renames. The
file ``complete`` is made before the renames, and removed after them. If an interrupted rebuild has
left ``complete``, the next rebuild first finishes the renames. Then a rebuild in the store builds
all files again; if it is refused, its error names the finished folders. A rebuild into another
folder raises UsageError, because this folder then has the finished files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Container, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from logquarry import arguments
from logquarry.arguments import Clock, Progress, now_ms
from logquarry.config import StoreConfig, settings_of
from logquarry.disk.disk import Disk
from logquarry.disk.folders import StoreLock, alone_in
from logquarry.disk.page_file import DurableFile
from logquarry.errors import StoreUnavailable, UsageError
from logquarry.log.layout import StoreLayout
from logquarry.log.location import local_folder, local_store
from logquarry.log.open_files import OpenFiles
from logquarry.log.store_files import (
    BATCH_QUEUE,
    COMMIT_LOG,
    CONSUME_QUEUE,
    DURABLE,
    INDEX,
    NAME_DIGITS,
    REBUILD,
)
from logquarry.paths import exists, is_folder
from logquarry.read.batch_queue import BatchQueue, all_queues
from logquarry.read.commit_log import CommitLog
from logquarry.read.features import BATCH_QUEUES, ROCKSDB_QUEUES, other_queues
from logquarry.read.fence import Action, require
from logquarry.read.log_end import checkpoint_times, last_entries
from logquarry.read.log_queues import QueueKey
from logquarry.read.queue import ConsumeQueue, FileQueue
from logquarry.read.rocksdb_queue import rocksdb_folders
from logquarry.read.store_sizes import with_sizes
from logquarry.repair.audit.differences import queue_fault, unreadable_file
from logquarry.repair.audit.expired_queues import StandIn, bridges, stand_in
from logquarry.repair.audit.harmed_frames import HarmedIds, HarmedTypes
from logquarry.repair.audit.log import KnownBounds, LogAudit, find_bounds
from logquarry.repair.audit.timer_files import mend_timer_files
from logquarry.repair.rebuild.build import (
    Builder,
    BuildJob,
    FileCount,
    QueueReport,
    RebuildReport,
    build_here,
    check_into,
    finish_cut_off,
    made_of,
    sizes_below,
    write_note,
)
from logquarry.repair.rebuild.in_place import (
    COMPLETE,
    FixedFolder,
    bring_out_cut_off,
    built_folders,
    remove_empty,
    require_movable,
    swap,
)
from logquarry.repair.rebuild.other_queues import (
    BatchFiles,
    BuiltBatchQueue,
    RocksFiles,
    not_in_tasks,
    require_dispatched,
)
from logquarry.repair.rebuild.queue_files import BuiltQueue, OldQueues, QueueFiles
from logquarry.repair.recover.apply import note_end
from logquarry.repair.recover.loss import LossSearch, missing_files, require_consent
from logquarry.repair.recover.open_check import restored_files, settled_names
from logquarry.repair.recover.store_folders import (
    check_log,
    layout_with,
    sync_files,
)
from logquarry.repair.recover.wrong_names import check_file_size


def rebuild(
    path: str | os.PathLike[str],
    *,
    into: str | os.PathLike[str] | None = None,
    apply: bool = False,
    queues: bool = True,
    index: bool = True,
    config: StoreConfig | None = None,
    clock: Clock | None = None,
    disk: Disk | None = None,
    builder: Builder = build_here,
    progress: Progress | None = None,
    note: Path | None = None,
) -> RebuildReport:
    """Rebuild consume queues and index from the log.

    Args:
        into: a folder without queues and index, for the new files. Another process may write to
            the store during the call. The rebuild then stops at the end that the log had at the
            start of the call.
        apply: whether to replace the store's own files, if ``into`` is None. The store is locked,
            and the old files are moved to quarantine.
        config: settings of the store; missing sizes are inferred from the files.
        clock: the time in milliseconds, for the names of index files and the quarantine.
        progress: called with (bytes of the log read so far, bytes to read in total).
        note: path of a file in which the rebuild records the store and its settings, so that
            :func:`finish_into` can check them. Only with ``into``.

    Returns:
        The result. If ``into`` is None and ``apply`` is false, this is a preview, and nothing is
        written.

    Raises:
        StoreNotFound: if there is no store.
        UnsupportedStore: if logquarry cannot build the store's kind of queues or index.
        StoreUnavailable: if another process uses ``into``, if the size of the log's files cannot be
            right for the messages in them, or if the disk fails or is full. If ``into`` is None,
            the error is also raised if a process has the store open, or if a folder or a broken
            link has the name of a log file. The store is unchanged.
        LossRefused: if ``into`` is None (even for a preview), and the old queues show that the log
            has lost more than a small share of its messages. Recover the store first.
        UsageError: if a folder is invalid, or if the store's files have other sizes than ``config``
            gives.
    """
    root = local_store(path)
    arguments.optional(arguments.path, into, "into")
    for name, value in (("apply", apply), ("queues", queues), ("index", index)):
        arguments.flag(value, name)
    for name, called in (("clock", clock), ("progress", progress)):
        arguments.optional(arguments.function, called, name)
    arguments.optional(arguments.instance, disk, "disk", kind=Disk, takes="a Disk")
    names = [name for name, wanted in ((CONSUME_QUEUE, queues), (INDEX, index)) if wanted]
    if not names:
        raise UsageError("neither queues nor index: there is nothing to build")
    settings = settings_of(config)
    layout = StoreLayout.open(root, settings)
    if queues and (batch := other_queues(layout).batch):
        if builder is not build_here:
            what = f"topics {', '.join(sorted(batch))} have batch queues"
            raise not_in_tasks(str(root), what, BATCH_QUEUES, (f"{BATCH_QUEUE}/",))
        names.insert(1, BATCH_QUEUE)
    if queues and (folders := rocksdb_folders(layout)):
        if builder is not build_here:
            raise not_in_tasks(str(root), "its queues are in RocksDB", ROCKSDB_QUEUES, folders)
        names[:1] = dict.fromkeys((CONSUME_QUEUE, *folders))
    target = root if into is None else check_into(root, local_folder(into), names)
    for name, action in ((CONSUME_QUEUE, Action.REBUILD_QUEUES), (INDEX, Action.REBUILD_INDEX)):
        if name in names:
            require(layout, action)
    check_file_size(layout)
    if into is None:
        # Check only the log's folders and files. The rebuild moves the folders of queues and index
        # to quarantine, with any foreign files in them.
        check_log(root, settings)
    if into is None and CONSUME_QUEUE in names and not layout.is_live():
        restored = restored_files(layout, settings, disk or Disk())
        _require_files(layout_with(root, settings, restored | built_folders(root)))
    if into is None and apply:
        require_movable(root, names)
    if into is None and not apply:
        return _report(layout, None, names, is_live=layout.is_live())
    disk = disk or Disk()
    work = _Rebuild(root, target, names, settings, disk, clock or now_ms, builder, note)
    if into is not None:
        is_new = not exists(target)
        with alone_in(disk, target), contextlib.ExitStack() as held:
            if is_folder(target / COMMIT_LOG):
                held.callback(StoreLock(disk, target).release)
            try:
                finish_cut_off(target, names, disk)
                # Check again: another process may have used the folder before the lock.
                check_into(root, target, names)
                return work.run(progress)
            except BaseException:
                remove_empty(*([target] if is_new else []))
                raise
    lock = StoreLock(disk, root)
    try:
        return work.run(progress)
    finally:
        lock.release()


def _require_files(layout: StoreLayout) -> None:
    """Check for missing log files before the log is read, which can take hours. Raises LossRefused
    if the queues point to messages in a missing file.
    """
    end = layout.commit_log.end
    search = LossSearch(layout, end=end, damage=tuple(missing_files(layout, end)))
    require_consent(layout.root, search.loss(), None)


def _report(
    layout: StoreLayout, into: Path | None, names: list[str], *, is_live: bool
) -> RebuildReport:
    old = {}
    for name in names:
        sizes = sizes_below(Path(layout.root) / name)
        old[name] = FileCount(len(sizes), sum(sizes))
    return RebuildReport(
        store=layout.root,
        into=None if into is None else str(into),
        is_applied=False,
        is_live=is_live,
        has_abort=layout.has_abort and not is_live,
        old=old,
        log_start=layout.commit_log.start,
    )


@dataclass(frozen=True)
class _Rebuild:
    root: Path
    target: Path
    names: list[str]
    config: StoreConfig
    disk: Disk
    clock: Clock
    builder: Builder
    note: Path | None

    @property
    def _build(self) -> Path:
        return self.target / REBUILD

    def run(self, progress: Progress | None) -> RebuildReport:
        is_in_place = self.target == self.root
        names: AbstractContextManager[None] = contextlib.nullcontext()
        finished = ", ".join(built_folders(self.root)) if is_in_place else ""
        if is_in_place:
            bring_out_cut_off(self.root, self.disk)
            layout = StoreLayout.open(self.root, self.config)
            names = settled_names(layout, self.config, self.disk)
        if is_folder(self._build):
            shutil.rmtree(self._build)
        into = None if is_in_place else self.target
        try:
            with names:
                layout = StoreLayout.open(self.root, self.config)
                is_live = not is_in_place and layout.is_live()
                report = _report(layout, into, self.names, is_live=is_live)
                report = self._built(layout, report, progress)
            # Write this file only after the block has ended. At its end, the block removes the
            # store's hard links. If this removal fails, remove the build.
            self.disk.replace(self._build / COMPLETE, b"complete\n")
        except BaseException as error:
            shutil.rmtree(self._build, ignore_errors=True)
            remove_empty(self._build.parent)
            if finished and isinstance(error, StoreUnavailable):
                moved = f"Only the interrupted rebuild of {finished} was finished"
                error.args = (str(error).replace("Nothing was changed", moved),)
            raise
        if is_in_place:
            self._note_end(layout, report)
        try:
            aside, folder = swap(
                self._build, self.target, self.names, "rebuild", self.clock(), self.disk
            )
        except FixedFolder as error:
            if is_in_place and CONSUME_QUEUE in error.replaced:
                self._mend_timers(error.aside)
            raise
        if is_in_place and CONSUME_QUEUE in self.names and self._mend_timers(folder):
            aside = folder
        shutil.rmtree(self._build)
        remove_empty(self._build.parent)
        return dataclasses.replace(
            report, is_applied=True, quarantine=None if aside is None else str(aside)
        )

    def _mend_timers(self, aside: Path) -> bool:
        layout = StoreLayout.open(self.root, self.config)
        return mend_timer_files(layout, self.disk, self.root, self.clock(), aside)

    def _note_end(self, layout: StoreLayout, report: RebuildReport) -> None:
        """If the log has damage, and RocketMQ has shut down the store cleanly, record the log's end
        and this damage. Without the record, readers treat damage in the last file as the log's end.
        """
        if not report.damage or layout.has_abort or layout.durable_end is not None:
            return
        end, log = report.log_end, layout.commit_log
        assert end is not None
        sync_files(self.disk, self.root, log=layout.log_folders.paths, parts=())
        note_end(self.disk, self.root, end, report.damage)
        times = checkpoint_times(layout)
        DurableFile(self.disk, self.root / DURABLE, end, times, log_start=log.start).close()

    # ------------------------------------------------------------------------------------ build
    def _built(
        self, layout: StoreLayout, report: RebuildReport, progress: Progress | None
    ) -> RebuildReport:
        config = with_sizes(self.config, layout)
        queue_size, shape = config.queue_file_size, config.index_shape
        assert queue_size is not None and shape is not None
        batch = None
        if BATCH_QUEUE in self.names:
            assert config.batch_queue_file_size is not None
            folder = self._build / BATCH_QUEUE
            batch = BatchFiles(self.disk, folder, config.batch_queue_file_size)
        log, likely_end, found = self._audit(layout, queue_size, is_live=report.is_live)
        old: OldQueues = {}
        if not report.is_live:
            old = {key: one for key, one in found.items() if not isinstance(one, BatchQueue)}
        ids = HarmedIds(layout, found, found.get, is_3_1=config.is_3_1)
        job = BuildJob(
            layout=layout,
            config=config,
            disk=self.disk,
            clock=self.clock,
            folder=self._build,
            names=tuple(self.names),
            log=log,
            likely_end=likely_end,
            is_live=report.is_live,
            old=old,
            batch=batch,
            rocksdb=next(iter(rocksdb_folders(layout)), None),
            place=ids.place,
            queued=HarmedTypes(layout, found.get).queued,
        )
        built = self.builder(job, progress)
        queues = built.queues
        if self.target == self.root and queues is not None:
            # Only the old queues show which messages are lost, so search the old queues before the
            # rebuild moves them to quarantine.
            search = LossSearch(
                layout, end=log.end, damage=log.damage, last_timestamp=log.last_timestamp
            )
            require_consent(layout.root, search.loss(), None)
            require_dispatched(layout, log.end)
        if queues is not None:
            kinds: list[QueueFiles | BatchFiles] = [queues]
            if job.batch is not None:
                kinds.append(job.batch)
            made = [one for files in kinds for one in _reports(files.queues)]
            made += self._take_over(job, queues)
            made.sort(key=lambda queue: (queue.topic, queue.queue_id))
            left_out = tuple(one for files in kinds for one in files.left_out)
            report = dataclasses.replace(report, queues=tuple(made), left_out=left_out)
            self.disk.make_folders(self._build / CONSUME_QUEUE)
            roots = (CONSUME_QUEUE, BATCH_QUEUE)
            self.disk.sync_names(*(self._build / name for name in self.names if name in roots))
        if INDEX in self.names:
            count = FileCount(built.index_files, built.index_files * shape.file_size)
            report = dataclasses.replace(report, index=count, keys=built.keys)
        if self.note is not None:
            whose = made_of(str(self.root), self.names, config)
            write_note(self.note, whose, self.disk)
        return dataclasses.replace(
            report, log_end=log.end, messages=log.count, damage=tuple(log.damage)
        )

    def _audit(
        self, layout: StoreLayout, queue_size: int, *, is_live: bool
    ) -> tuple[LogAudit, int, OldQueues]:
        """Return the audit of the log, the log's likely end, and the usable old queues."""
        files = OpenFiles(layout)
        found = all_queues(layout, files)
        usable = [
            queue
            for queue in found
            if queue_fault(
                queue.files,
                queue.sequence.file_size if isinstance(queue, BatchQueue) else queue_size,
            )
            is None
        ]
        old = {queue.key: queue for queue in usable}
        if is_live:
            log = CommitLog(layout, files=files, last_entries=lambda: last_entries(layout, found))
            end = log.max_offset
            return LogAudit(layout, KnownBounds(), stop=end, is_live=True), end, old
        bounds = find_bounds(layout, usable)
        if bounds.queued is None:
            # No queue has an entry, so the queues do not show where the log ends: its last messages
            # may have no entries.
            bounds = dataclasses.replace(bounds, is_closed=False)
        return LogAudit(layout, bounds), bounds.likely_end or layout.commit_log.end, old

    def _take_over(self, job: BuildJob, queues: QueueFiles) -> Iterator[QueueReport]:
        """Keep the end of each old queue that has no message in the log any more. Otherwise, new
        messages would begin at queue offset 0. Consumers have higher offsets, so they would skip
        these messages.
        """
        # Take all sizes from the settings: the files of an unusable queue can show a wrong size.
        layout = StoreLayout.open(self.root, job.config)
        if isinstance(queues, RocksFiles):
            for name, end in queues.take_over(layout).items():
                yield QueueReport(*name, end, end, 0, 0, is_taken_over=True)
        yield from self._taken_over(layout, ConsumeQueue, queues.queues)
        if job.batch is not None:
            yield from self._taken_over(layout, BatchQueue, job.batch.queues)

    def _taken_over(
        self,
        layout: StoreLayout,
        kind: type[ConsumeQueue | BatchQueue],
        built: Container[QueueKey],
    ) -> Iterator[QueueReport]:
        files = OpenFiles(layout)
        for queue in kind.all_of(layout, files):
            # List the files of the layout, because a queue object leaves out files with impossible
            # names.
            key, is_batch = queue.key, queue.is_batch
            listed = layout.batch_queue(*key) if is_batch else layout.queue(*key)
            if key in built or not listed.files:
                continue
            size = listed.file_size
            if queue_fault(listed.files, size) or unreadable_file(listed.files, files):
                yield self._replaced(queue, stand_in(queue, layout, files, size), size)
            elif _has_expired(queue):
                report = self._copied(layout, queue)
                if report.max_offset:
                    yield report

    def _replaced(self, queue: FileQueue, made: StandIn, file_size: int) -> QueueReport:
        """Make a new queue with the same end as ``queue``. The files of ``queue`` are unusable, and
        all its messages have expired.
        """
        if made.entries:
            root = BATCH_QUEUE if queue.is_batch else CONSUME_QUEUE
            name = f"{made.number * queue.entry_size:0{NAME_DIGITS}d}"
            path = self._build / root / queue.topic / str(queue.queue_id) / name
            with self.disk.writing(path, file_size) as descriptor:
                self.disk.write_all(descriptor, made.entries, 0)
        end, is_sure = made.end, made.is_sure
        return QueueReport(*queue.key, end, end, 0, 0, is_taken_over=True, is_end_sure=is_sure)

    def _copied(self, layout: StoreLayout, queue: FileQueue) -> QueueReport:
        made, end = bridges(queue, layout.commit_log.start)
        for file in queue.files:
            data = bytearray(layout.filesystem.read(file.path))
            if not data:
                continue
            for number, entry in made.items():
                at = number * queue.entry_size - file.base
                if 0 <= at < len(data):
                    data[at : at + len(entry)] = entry
            with self.disk.writing(self._build / file.path, len(data)) as descriptor:
                self.disk.write_all(descriptor, memoryview(data), 0)
        stop = queue.max_offset if queue.is_batch else end
        return QueueReport(queue.topic, queue.queue_id, stop, stop, 0, 0, is_taken_over=True)


def _has_expired(queue: FileQueue) -> bool:
    """Whether the log has no message of a queue any more."""
    if queue.is_batch:
        end = queue.last_physical_end
        return end is not None and end <= queue.log_min_offset
    start = queue.files[0].base // queue.entry_size
    units = queue.units(start, queue.max_offset)
    return not (units["physical_offset"] >= queue.log_min_offset).any()


def _reports(built: Mapping[QueueKey, BuiltQueue | BuiltBatchQueue]) -> list[QueueReport]:
    return [
        QueueReport(
            *(*key, queue.first, queue.stop, queue.fillers, queue.restarts),
            harmed=len(queue.harmed),
        )
        for key, queue in built.items()
    ]
