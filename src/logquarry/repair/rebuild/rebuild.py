"""Makes consume queues and index anew from the log, in place or in another folder.

New files are built beside first (``.logquarry/rebuild/``), brought to the disk, and then put in
place by renames. In place the old ones are moved to quarantine just before. Whoever is interrupted
begins again::

    building      the store is as it was; what was built is deleted at the next try
    swapping      what is complete (``complete`` stands beside it) is put in place at the next try
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from logquarry.config import StoreConfig
from logquarry.disk.disk import Disk, LocalDisk
from logquarry.disk.locks import StoreLock, alone_in
from logquarry.disk.open_files import OpenFiles
from logquarry.disk.queue_folders import NameGuard
from logquarry.errors import UsageError
from logquarry.format import index as index_format
from logquarry.format.checkpoint import Checkpoint
from logquarry.format.queue_entry import UNIT_SIZE
from logquarry.log.filesystem import local_folder, local_store
from logquarry.log.layout import (
    COMMIT_LOG,
    CONSUME_QUEUE,
    INDEX,
    SALVAGE,
    SIDECAR,
    StoreLayout,
    quarantine,
)
from logquarry.read.commit_log import CommitLog
from logquarry.read.fence import Action, require
from logquarry.read.log_end import consume_queues, last_entries
from logquarry.read.log_queues import QueueKey
from logquarry.read.store_sizes import with_sizes
from logquarry.repair.rebuild.build import (
    Builder,
    BuildJob,
    FileCount,
    QueueReport,
    RebuildReport,
    build_here,
    check_made_of,
    made_of,
    write_note,
)
from logquarry.repair.rebuild.queue_files import QueueFiles
from logquarry.repair.recover.look import KnownBounds, LogLook, find_bounds
from logquarry.repair.recover.safe import queue_fault
from logquarry.units import Clock, Progress, now_ms

_BUILD: Final = "rebuild"
_COMPLETE: Final = "complete"


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
    """Make consume queues and index anew from the log.

    Args:
        path: the store's folder.
        into: a folder that gets them, in which there are none yet; the store is only read then,
            also while somebody writes it: up to where its log ended at the start.
        apply: without ``into``: put them in place of the store's own, which are moved to
            quarantine. Takes the store's lock.
        queues: whether to make the queues.
        index: whether to make the index.
        config: its settings; sizes that are not stated are read off the files.
        clock: names index files and the quarantine, in milliseconds.
        disk: what it is on.
        builder: builds the files in their folder.
        progress: told of the bytes of the log that are read.
        note: with ``into``: a file that is to say whose they are, for :func:`finish_into`.

    Returns:
        What was done, or without ``into`` and ``apply`` what would be.

    Raises:
        StoreNotFound: if there is no store.
        UnsupportedStore: if the store has queues or an index of a kind that is not made here.
        StoreUnavailable: if a process has it open (in place), somebody else is at work in
            ``into``, or the disk fails or is full; the store is as it was.
        UsageError: for folders that cannot be meant, and for settings that are not the store's.
    """
    root = local_store(path)
    names = [name for name, wanted in ((CONSUME_QUEUE, queues), (INDEX, index)) if wanted]
    if not names:
        raise UsageError("neither queues nor index: there is nothing to make")
    target = root if into is None else check_into(root, local_folder(into), names)
    settings = config or StoreConfig()
    layout = StoreLayout.open(root, settings)
    for name, action in ((CONSUME_QUEUE, Action.REBUILD_QUEUES), (INDEX, Action.REBUILD_INDEX)):
        if name in names:
            require(layout, action)
    linked = [root / name for name in names if (root / name).is_symlink()]
    if into is None and apply and linked:
        raise UsageError(f"{linked[0]}: it is a link; make new ones elsewhere, with --into")
    if into is None and not apply:
        return _report(layout, None, names, is_live=layout.is_live())
    disk = disk or LocalDisk()
    work = _Rebuild(root, target, names, settings, disk, clock or now_ms, builder, note)
    if into is not None:
        is_new = not target.exists()
        with alone_in(disk, target), _store_lock(disk, target):
            try:
                _finish_cut_off(target, names, disk)
                # Others may have been at work there up to now.
                check_into(root, target, names)
                return work.run(progress)
            except BaseException:
                _remove_empty(*([target] if is_new else []))
                raise
    lock = StoreLock(disk, root)
    try:
        # Files that a writer gave a second name before it crashed, which is their only one now.
        NameGuard(disk).restore([root / COMMIT_LOG, root / INDEX])
        return work.run(progress)
    finally:
        lock.release()


@contextlib.contextmanager
def _store_lock(disk: Disk, target: Path) -> Iterator[None]:
    """The lock of a store, if a folder is one: of a copy of a log that gets its queues."""
    lock = StoreLock(disk, target) if (target / COMMIT_LOG).is_dir() else None
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def check_into(root: Path, target: Path, names: Iterable[str]) -> Path:
    """A folder that queues and index of a store are to be made in.

    Args:
        root: the store.
        target: the folder.
        names: of the folders that are wanted in it.

    Raises:
        UsageError: if they cannot be made there.
    """
    if target.resolve().is_relative_to(root.resolve()):
        raise UsageError(f"{target}: lies in the store, which is only read; --in-place is for that")
    if target.exists() and not target.is_dir():
        raise UsageError(f"{target}: it is no folder")
    if (target / SALVAGE).exists():
        raise UsageError(f"{target}: a salvage into it is not finished")
    if (target / SIDECAR / _BUILD / _COMPLETE).is_file():
        # What of it is there already is no obstacle to what brings out the rest.
        return target
    for name in names:
        if (target / name).exists():
            raise UsageError(f"{target / name}: it is there, and nothing is written over it")
    return target


def finish_into(
    path: str | os.PathLike[str],
    target: Path,
    names: Sequence[str],
    *,
    note: Path,
    config: StoreConfig | None = None,
    disk: Disk | None = None,
) -> bool:
    """Put in place what a rebuild that was cut off had complete; whether all of it is there.

    Args:
        path: the store's folder.
        target: the folder that the rebuild went into.
        names: of the folders that are wanted in it.
        note: says whose they are.
        config: the store's settings, as for :func:`rebuild`.
        disk: what it is on.

    Raises:
        StoreNotFound: if there is no store.
        StoreUnavailable: if somebody is at work there.
        UsageError: if what is there is of another store, or was made with other settings.
    """
    if not target.is_dir():
        return False
    root, disk = local_store(path), disk or LocalDisk()
    with alone_in(disk, target):
        _bring_out_cut_off(target, disk)
        there = [name for name in names if (target / name).exists()]
        layout = StoreLayout.open(root, config or StoreConfig())
        settings = _settings(layout, config or StoreConfig(), there)
        check_made_of(target, note, made_of(str(root), there, settings))
    return len(there) == len(names)


def _finish_cut_off(target: Path, names: Iterable[str], disk: Disk) -> None:
    """Have all of a rebuild in place of which some is.

    Raises:
        UsageError: if there was one.
    """
    is_begun = any((target / name).exists() for name in (CONSUME_QUEUE, INDEX))
    if is_begun and _bring_out_cut_off(target, disk):
        for name in names:
            if (target / name).exists():
                raise UsageError(
                    f"{target / name}: a rebuild that was cut off had it complete: it is in place "
                    "now, and nothing is written over it"
                )


def _bring_out_cut_off(target: Path, disk: Disk) -> bool:
    build = target / SIDECAR / _BUILD
    if not (build / _COMPLETE).is_file():
        return False
    _bring_out(build, target, disk)
    shutil.rmtree(build)
    _remove_empty(build.parent)
    return True


def _bring_out(build: Path, target: Path, disk: Disk) -> None:
    """Put in place what was built, as far as that is not done."""
    for name in (CONSUME_QUEUE, INDEX):
        if (build / name).is_dir() and not (target / name).exists():
            _rename(disk, build / name, target / name)


def _rename(disk: Disk, folder: Path, to: Path) -> None:
    try:
        disk.rename(folder, to)
    except OSError as error:
        raise disk.refused(to, error) from error
    disk.sync_names(to.parent)
    disk.sync_names(folder.parent)


def _report(
    layout: StoreLayout, into: Path | None, names: list[str], *, is_live: bool
) -> RebuildReport:
    """What there is before anything is done."""
    old = {}
    for name in names:
        found = _files_below(Path(layout.root) / name)
        old[name] = FileCount(len(found), sum(path.stat().st_size for path in found))
    return RebuildReport(
        store=layout.root,
        into=None if into is None else str(into),
        is_applied=False,
        is_live=is_live,
        has_abort=layout.has_abort and not is_live,
        old=old,
        log_start=layout.commit_log.start,
    )


def _settings(layout: StoreLayout, config: StoreConfig, names: Iterable[str]) -> StoreConfig:
    """The settings with all sizes."""
    if INDEX not in names and config.index_shape is None:
        # No index is made, so that nobody need know its shape.
        shape = index_format.DEFAULT_SHAPE
        config = dataclasses.replace(
            config, max_hash_slot_num=shape.slots, max_index_num=shape.entries
        )
    return with_sizes(config, layout)


def _files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


class _Rebuild:
    """One rebuild.

    Args:
        root: the store.
        target: the store, or the folder that gets the new files.
        names: the folders that are made.
        config: as stated.
        disk: what both are on.
        clock: names what is made.
        builder: builds the files.
        note: gets told whose they are; None for nothing.
    """

    def __init__(
        self,
        root: Path,
        target: Path,
        names: list[str],
        config: StoreConfig,
        disk: Disk,
        clock: Clock,
        builder: Builder,
        note: Path | None,
    ) -> None:
        self._note = note
        self._root = root
        self._target = target
        self._names = names
        self._config = config
        self._disk = disk
        self._clock = clock
        self._builder = builder
        self._build = target / SIDECAR / _BUILD

    def run(self, progress: Progress | None) -> RebuildReport:
        """Build, put in place, and tell."""
        is_in_place = self._target == self._root
        self._finish_swap()
        layout = StoreLayout.open(self._root, self._config)
        into = None if is_in_place else self._target
        # In place the lock is ours.
        is_live = not is_in_place and layout.is_live()
        report = _report(layout, into, self._names, is_live=is_live)
        try:
            report = self._built(layout, report, progress)
        except BaseException:
            shutil.rmtree(self._build, ignore_errors=True)
            _remove_empty(self._build.parent)
            raise
        aside = self._swap()
        shutil.rmtree(self._build)
        _remove_empty(self._build.parent)
        return dataclasses.replace(
            report, is_applied=True, quarantine=None if aside is None else str(aside)
        )

    # ------------------------------------------------------------------------------------ build
    def _built(
        self, layout: StoreLayout, report: RebuildReport, progress: Progress | None
    ) -> RebuildReport:
        config = _settings(layout, self._config, self._names)
        queue_size, shape = config.queue_file_size, config.index_shape
        assert queue_size is not None and shape is not None
        look, likely_end = self._look(layout, queue_size, is_live=report.is_live)
        job = BuildJob(
            layout=layout,
            config=config,
            disk=self._disk,
            clock=self._clock,
            folder=self._build,
            names=tuple(self._names),
            look=look,
            likely_end=likely_end,
            is_live=report.is_live,
        )
        built = self._builder(job, progress)
        queues = built.queues
        report = dataclasses.replace(
            report, log_end=look.end, messages=look.count, damage=tuple(look.damage)
        )
        if queues is not None:
            report = dataclasses.replace(
                report,
                queues=_queue_reports(queues, self._take_over(layout, queues, queue_size)),
                left_out=tuple(queues.left_out),
            )
            self._disk.sync_names(self._build / CONSUME_QUEUE)
        if INDEX in self._names:
            count = FileCount(built.index_files, built.index_files * shape.file_size)
            report = dataclasses.replace(report, index=count, keys=built.keys)
        if self._note is not None:
            whose = made_of(str(self._root), self._names, config)
            write_note(self._note, whose, self._disk)
        self._disk.replace(self._build / _COMPLETE, b"complete\n")
        return report

    def _look(self, layout: StoreLayout, queue_size: int, *, is_live: bool) -> tuple[LogLook, int]:
        """What walks the log, and about where that will end."""
        files = OpenFiles(layout)
        found = consume_queues(layout, files)
        if is_live:
            end = CommitLog(
                layout, files=files, last_entries=lambda: last_entries(layout, found)
            ).max_offset
            bounds = KnownBounds(
                durable=None, queued=None, is_closed=False, dispatched_timestamp=None
            )
            return LogLook(layout, bounds, stop=end, is_live=True), end
        usable = [queue for queue in found if queue_fault(queue.files, queue_size) is None]
        try:
            checkpoint = layout.read_checkpoint() or Checkpoint()
        except ValueError:
            checkpoint = Checkpoint()
        bounds = find_bounds(layout, usable, checkpoint)
        if bounds.queued is None:
            # Where no queue is left, that a message is in none says nothing of it.
            bounds = dataclasses.replace(bounds, is_closed=False)
        return LogLook(layout, bounds), bounds.likely_end or layout.commit_log.end

    def _take_over(
        self, layout: StoreLayout, queues: QueueFiles, file_size: int
    ) -> list[QueueReport]:
        """Copy queues whose messages have all been deleted from the log with its first files.

        A broker goes on where such a queue ends; without it its offsets would begin anew, and its
        consumers would be ahead of them.
        """
        taken = []
        for queue in consume_queues(layout, OpenFiles(layout)):
            key: QueueKey = queue.topic, queue.queue_id
            stop = queue.max_offset
            if key in queues.queues or not stop or queue_fault(queue.files, file_size):
                continue
            units = queue.units(queue.files[0].base // UNIT_SIZE, stop)
            if (units["physical_offset"] >= layout.commit_log.start).any():
                continue
            for file in queue.files:
                self._copy(layout, file.path)
            taken.append(QueueReport(*key, stop, stop, 0, 0, is_taken_over=True))
        return taken

    def _copy(self, layout: StoreLayout, path: str) -> None:
        made = self._build / path
        data = layout.filesystem.read(path)
        descriptor = self._disk.make_file(made, len(data))
        try:
            self._disk.write_all(descriptor, data, 0)
            self._disk.sync(descriptor, made)
        except OSError as error:
            raise self._disk.refused(made, error) from error
        finally:
            self._disk.close(descriptor)

    # ------------------------------------------------------------------------------------- swap
    def _finish_swap(self) -> None:
        """Do what is left of an earlier try: put in place what was complete, forget the rest."""
        if not self._build.is_dir():
            return
        if self._target == self._root and (self._build / _COMPLETE).is_file():
            _bring_out(self._build, self._root, self._disk)
        shutil.rmtree(self._build)

    def _swap(self) -> Path | None:
        """Put the new folders in place: where the old ones are, if there were any."""
        stamp = datetime.fromtimestamp(self._clock() / 1000, UTC)
        aside = first = quarantine(self._target, f"{stamp:rebuild-%Y%m%dT%H%M%SZ}")
        number = 0
        while aside.exists():
            number += 1
            aside = first.with_name(f"{first.name}.{number}")
        for name in self._names:
            place, old = self._target / name, aside / name
            has_old = place.exists()
            try:
                if has_old:
                    self._disk.make_folders(aside)
                    _rename(self._disk, place, old)
                _rename(self._disk, self._build / name, place)
            except BaseException:
                # Also Ctrl-C: all of it or nothing.
                if old.exists() and not place.exists():
                    _rename(self._disk, old, place)
                raise
        return aside if aside.exists() else None


def _queue_reports(built: QueueFiles, taken_over: Iterable[QueueReport]) -> tuple[QueueReport, ...]:
    made = [
        QueueReport(
            *key,
            queue.first,
            queue.stop,
            sum(stop - start for start, stop in queue.gaps),
            queue.restarts,
        )
        for key, queue in built.queues.items()
    ]
    return tuple(sorted((*made, *taken_over), key=lambda queue: (queue.topic, queue.queue_id)))


def _remove_empty(*folders: Path) -> None:
    """Take folders away that hold nothing."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()
