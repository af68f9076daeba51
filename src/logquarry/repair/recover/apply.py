"""Applies the plan of a safe recovery. The caller holds the store's lock.

If the recovery is interrupted, it can be run again, because it changes the store in this order:

1. write the durable offset: once ``abort`` exists, only this offset shows where the log ends
2. create ``abort``
3. repair the log, then queues and index, and sync these files
4. write the durable offset again, in a record that is valid with the old and the new checkpoint
5. write the new checkpoint
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Final

import numpy as np

from logquarry.arguments import Progress
from logquarry.dialect31.state_table import make_units
from logquarry.disk.config_file import require_settings
from logquarry.disk.disk import Disk, free_path
from logquarry.disk.folders import AbortFile
from logquarry.disk.log_files import log_paths, open_log
from logquarry.disk.mapped_file_queue import MappedFileQueue
from logquarry.disk.page_file import CheckpointFile, DurableFile
from logquarry.errors import StoreUnavailable
from logquarry.format import frame, queue_entry
from logquarry.format.arrays import Int64
from logquarry.format.queue_entry import QueueEntry
from logquarry.log.follow import DispatchRequests
from logquarry.log.layout import StoreLayout
from logquarry.log.log_names import RENAMING, right_path
from logquarry.log.open_files import OpenFiles
from logquarry.log.readable import none_lost
from logquarry.log.store_files import (
    CHECKPOINT,
    COMMIT_LOG,
    CONSUME_QUEUE,
    DAMAGE,
    DURABLE,
    INDEX,
    SIDECAR,
    quarantine,
    queue_form,
)
from logquarry.log.walk import DamagedSpan
from logquarry.paths import exists, is_file, is_folder
from logquarry.read.log_end import DamageMap
from logquarry.read.log_queues import QueueKey
from logquarry.read.queue import ConsumeQueue
from logquarry.repair.audit.differences import names_damage
from logquarry.repair.audit.harmed_frames import placed
from logquarry.repair.audit.timer_files import mend_timer_files
from logquarry.repair.rebuild.build import replace_queues
from logquarry.repair.rebuild.queue_files import KeyThread
from logquarry.repair.recover.plan import (
    QueueAction,
    QueuePlan,
    Step,
    StepKind,
    load_kept,
    save_kept,
)
from logquarry.repair.recover.safe import SafePlan
from logquarry.repair.recover.store_folders import KEPT_ENTRIES, REPORT, sync_files
from logquarry.write.dispatcher import Dispatcher
from logquarry.write.index_writer import IndexKeeper
from logquarry.write.queue_table import QueueTable
from logquarry.write.queue_writer import MOST_GAP, ConsumeQueueWriter, Mending, with_queued

_COPY_BYTES: Final = 1 << 20
_UNSURE_BYTES: Final = 128 << 20
"""Without a durable offset, this number of bytes at the log's end is written again, because the
sync of another program may have failed. To write terabytes again would take too long.
"""


def apply_safe(
    plan: SafePlan, disk: Disk, clock: Callable[[], int], *, progress: Progress | None = None
) -> None:
    """Apply a plan. The caller must take the store's lock before it makes the plan, and hold the
    lock until this call returns. Then the caller removes ``abort``. If an error is raised, the
    store can be recovered again.

    Raises:
        StoreUnavailable: if the disk fails.
        UnreadableFile: if the disk no longer returns bytes that it returned for the plan.
    """
    with none_lost(str(plan.root)):
        _Work(plan, disk, clock, progress).run()


class _Work:
    def __init__(
        self,
        plan: SafePlan,
        disk: Disk,
        clock: Callable[[], int],
        progress: Progress | None,
    ) -> None:
        self._progress = progress
        self._plan = plan
        self._disk = disk
        self._clock = clock
        self._root = Path(plan.root)
        self._config = plan.config
        self._mendings: dict[QueueKey, Mending] = {}
        self._durable: DurableFile | None = None

    def run(self) -> None:
        layout = StoreLayout.open(self._root, self._config)
        durable_until, is_closed = layout.durable_end, not layout.has_abort
        checkpoint = CheckpointFile(self._disk, self._root / CHECKPOINT)
        try:
            if durable_until is not None:
                self._mark(checkpoint, durable_until)
            elif is_closed:
                self._mark(checkpoint, self._plan.log_end)
            AbortFile(self._disk, self._root).make()
            unsure = max(0, self._plan.log_end - _UNSURE_BYTES)
            self._mend(checkpoint, unsure if durable_until is None else durable_until)
        finally:
            checkpoint.close()
            if self._durable is not None:
                self._durable.close()

    def _mark(self, checkpoint: CheckpointFile, offset: int) -> None:
        """Write the durable offset. Each later write of ``checkpoint`` also updates the file of the
        durable offset, so that the durable offset stays valid.
        """
        if self._durable is not None:
            self._durable.close()
        path = self._root / DURABLE
        has_log = self._plan.log_start < self._plan.log_end
        self._durable = DurableFile(
            *(self._disk, path, offset, checkpoint.times),
            log_start=self._plan.log_start if has_log else -1,
        )
        checkpoint.before_write = self._durable.expect

    def _mend(self, checkpoint: CheckpointFile, durable_until: int) -> None:
        if self._plan.steps or self._plan.damage:
            disk_json(self._disk, quarantine(self._root) / REPORT, self._plan.to_json())
            # This recovery can be interrupted after it has moved all files of the index or of the
            # queues. Then only the record of the settings shows the file sizes.
            require_settings(self._disk, self._root, self._config)
        self._find_mendings()
        log = self._mend_log()
        try:
            if self._plan.damage or is_file(self._root / DAMAGE):
                note_end(self._disk, self._root, self._plan.log_end, self._plan.damage)
            self._mend_queues_and_index(log, checkpoint)
            if self._plan.rocksdb is not None:
                layout = StoreLayout.open(self._root, self._config)
                replace_queues(
                    *(layout, self._config, self._plan.rocksdb, self._plan.log_end),
                    *(self._disk, self._clock, self._progress),
                    place=partial(placed, found=self._plan.harmed_ids),
                    queued=partial(with_queued, harmed=self._plan.harmed_types),
                )
            log.flush(0)
            sync_files(
                self._disk,
                self._root,
                rewrite=(durable_until, self._plan.log_end),
                log=self._plan.log_folders.paths,
            )
            self._mark(checkpoint, self._plan.log_end)
            times = max(checkpoint.physic_timestamp, self._plan.last_timestamp)
            if any(step.kind is StepKind.WRITE_CHECKPOINT for step in self._plan.steps):
                times = self._plan.last_timestamp
                checkpoint.index_timestamp = min(checkpoint.index_timestamp, times)
            if not self._plan.message_count:
                # The log has no messages. With a time other than 0, the log would seem to have lost
                # files.
                times = checkpoint.index_timestamp = 0
            checkpoint.physic_timestamp = checkpoint.logics_timestamp = times
            # After a crash, a broker of 5.5 dispatches from these offsets on, so the offsets must
            # not be after the log's end.
            checkpoint.offsets = checkpoint.offsets.limited(self._plan.log_end)
            if self._plan.harmed_offset is not None:
                checkpoint.offsets = checkpoint.offsets._replace(logics_physical=0)
            checkpoint.flush()
            # The old timer wheel can point to lost messages. If a new message got the
            # physical offset of a lost message, a broker would deliver the new message.
            layout = StoreLayout.open(self._root, self._config)
            aside = quarantine(self._root)
            mend_timer_files(layout, self._disk, self._root, self._clock(), aside)
            self._disk.remove(self._kept_path)
        finally:
            log.close()

    def _mend_log(self) -> MappedFileQueue:
        plan, root = self._plan, self._root
        size = self._config.mapped_file_size_commit_log
        assert size is not None
        folders = log_paths(root, plan.log_folders)
        self._disk.make_folders(folders[0])
        links = {step.file for step in plan.steps if step.kind is StepKind.REMOVE}
        for name in plan.misnamed:
            if name in links:
                # The file stays under its right name.
                self._disk.remove(root / name)
            elif exists(root / name):
                self._disk.set_aside(root / name, quarantine(root, COMMIT_LOG))
        _rename_files(
            self._disk, root, [step for step in plan.steps if step.kind is StepKind.RENAME]
        )
        for step in plan.steps:
            path = root / step.file
            if step.kind is StepKind.PUT_BLANK:
                self._put_blank(path, size)
            elif step.kind is StepKind.ZERO:
                assert step.offset is not None and step.length is not None
                position = step.offset - int(path.name)
                self._save(path, position, step.length, COMMIT_LOG)
                self._zero(path, position, step.length)
            elif step.kind is StepKind.CUT and path.parent in folders:
                assert step.length is not None
                self._shorten(path, size, step.length)
            elif step.kind is StepKind.EXTEND:
                with self._disk.writing(path) as descriptor:
                    self._disk.allocate(descriptor, size)
        log = open_log(self._disk, root, plan.log_folders, size)
        log.load()
        if log.bases:
            log.truncate_to(plan.log_end)
        return log

    def _put_blank(self, path: Path, size: int) -> None:
        made = self._root / SIDECAR / path.name
        self._disk.remove(made)
        with self._disk.writing(made, size) as descriptor:
            blank = frame.BLANK.struct.pack(size, frame.MAGIC_BLANK)
            self._disk.write_all(descriptor, blank, 0)
        self._disk.move(made, path)

    def _zero(self, path: Path, position: int, length: int) -> None:
        with self._disk.writing(path) as descriptor:
            for done in range(0, length, _COPY_BYTES):
                zeros = bytes(min(_COPY_BYTES, length - done))
                self._disk.write_all(descriptor, zeros, position + done)

    def _shorten(self, path: Path, size: int, excess: int) -> None:
        """Cut a file that is too long: make a shorter copy, and rename the copy to the file's name.
        The rename replaces the file in one step. If a crash left the store without the file, the
        log would end before this file.
        """
        self._save(path, size, excess, COMMIT_LOG)
        made = self._root / SIDECAR / path.name
        self._disk.remove(made)
        self._disk.copy(path, 0, size, made)
        self._disk.move(made, path)

    def _save(self, path: Path, position: int, length: int, *folder: str) -> None:
        target = quarantine(self._root, *folder) / f"{path.name}.from-{position}"
        self._disk.copy(path, position, length, free_path(target))

    def _find_mendings(self) -> None:
        """Collect and save the entries that a later step cuts off: the entries of lost messages,
        and of frames with a harmed queue id or transaction type. Only these entries show the right
        queues.
        """
        layout = StoreLayout.open(self._root, self._config)
        files = OpenFiles(layout)
        damage = DamageMap(self._plan.damage)
        harmed = self._plan.harmed_ids.keys() | self._plan.harmed_types.keys()
        # An interrupted recovery may have cut the queues already, and saved these entries.
        noted = load_kept(self._kept_path)

        def is_kept(entry: QueueEntry) -> bool:
            return not entry.is_filler and (
                entry.physical_offset in harmed or names_damage(entry, damage)
            )

        for queue in self._plan.queues:
            if queue.resume_at is None:
                continue
            entries: Iterable[tuple[int, QueueEntry]] = noted.get(queue.key, {}).items()
            has_fillers = queue_form(self._config, queue.key[0]).root == CONSUME_QUEUE
            if has_fillers and (damage or harmed) and queue.had_until > queue.keep_until:
                start = self._plan.log_start
                disk = ConsumeQueue(layout, *queue.key, log_min_offset=start, files=files)
                entries = chain(entries, disk.entries(queue.keep_until, queue.end))
            kept = {
                offset: queue_entry.encode(entry)
                for offset, entry in entries
                if queue.keep_until <= offset < queue.end and is_kept(entry)
            }
            self._mendings[queue.key] = Mending(
                queue.resume_at, kept, queue.moved, max(MOST_GAP, queue.largest_gap)
            )
        save_kept(
            self._disk,
            self._kept_path,
            {key: mending.kept for key, mending in self._mendings.items()},
        )

    @property
    def _kept_path(self) -> Path:
        return quarantine(self._root) / KEPT_ENTRIES

    def _mend_queues_and_index(self, log: MappedFileQueue, checkpoint: CheckpointFile) -> None:
        plan, root, disk = self._plan, self._root, self._disk
        bridged = {
            self._entry_at(queue.key, 0)[0].parent: queue for queue in plan.queues if queue.bridges
        }
        # Move index files before the queues change. If this recovery is interrupted, the next one
        # must still find the fault of these files. Possibly only a comparison with the
        # unchanged queues shows that the index belongs to another log.
        for step in sorted(plan.steps, key=lambda step: (root / step.file).parent != root / INDEX):
            path = root / step.file
            if step.file == plan.rocksdb or step.file in plan.misnamed:
                # An earlier step has moved this file. Another file may have the name now.
                continue
            if step.kind is StepKind.SET_ASIDE and path.parent == root / CONSUME_QUEUE:
                # Move the folder too: a broker does not start if the folder is empty.
                if is_folder(path):
                    disk.set_aside(path, quarantine(root, CONSUME_QUEUE))
            elif step.kind is StepKind.SET_ASIDE and is_folder(path):
                aside = quarantine(root, *path.relative_to(root).parts)
                whole = bridged.pop(path, None)
                new = None if whole is None else self._replace_last(whole, aside)
                for name in disk.names_in(path):
                    if path / name != new:
                        disk.set_aside(path / name, aside)
            elif step.kind is StepKind.SET_ASIDE and is_file(path) and path.parent.name != SIDECAR:
                # The condition leaves out logquarry's own files, which an earlier step has already
                # moved. Files of the log have also been moved, and no longer exist.
                disk.set_aside(path, quarantine(root, path.parent.name))
        ends = {
            queue.key: 0 if queue.action is QueueAction.REBUILD else queue.keep_until
            for queue in plan.queues
        }
        for queue in plan.queues:
            if queue.action is QueueAction.CUT:
                self._save_entries(queue.key, queue.keep_until)
        for queue in bridged.values():
            for number, entry in queue.bridges.items():
                self._write_entry(queue.key, number, entry)
        # If the plan has no index, do not create its folder: the store would seem to have an index.
        for name in (CONSUME_QUEUE, *([] if plan.index is None else [INDEX])):
            disk.make_folders(root / name)
        queues = QueueTable(disk, root, self._config, ends, log, mendings=self._mendings)
        index = None
        if plan.index is not None and self._config.index_shape is not None:
            shape = self._config.index_shape
            if checkpoint.index_timestamp > plan.index.kept_timestamp:
                # New index files are not synced yet, so the checkpoint must not cover them.
                checkpoint.index_timestamp = plan.index.kept_timestamp
                checkpoint.flush()
            index = IndexKeeper(
                *(disk, root, shape, checkpoint, self._clock), counts_keys=self._config.is_3_1
            )
        try:
            self._dispatch(log, queues, index)
            for units in plan.transactions:
                make_units(disk, root, units)
            for queue in plan.queues:
                # Some queues in ``plan.queues`` are cut, but get no new entries.
                if not queue.is_sound:
                    queues.writer(queue.key)
            for files in queues:
                files.flush(0)
            if index is not None:
                index.flush(0)
        finally:
            queues.close()
            if index is not None:
                index.close()

    def _save_entries(self, key: QueueKey, start: int) -> None:
        path, at, folder = self._entry_at(key, start)
        if is_file(path) and at:
            size = queue_form(self._config, key[0]).file_size
            self._save(path, at, min(size, path.stat().st_size) - at, *folder)

    def _write_entry(self, key: QueueKey, number: int, entry: bytes) -> None:
        path, at, folder = self._entry_at(key, number)
        self._save(path, at, len(entry), *folder)
        with self._disk.writing(path) as descriptor:
            self._disk.write_all(descriptor, entry, at)

    def _replace_last(self, queue: QueuePlan, aside: Path) -> Path:
        """Replace the last file of a queue by a file with all bridges (see :class:`AuditedQueue`).
        Call this before the other files move to quarantine: if a crash left the queue without
        files, its end would be lost.
        """
        ((number, entries),) = queue.bridges.items()
        path, at, _ = self._entry_at(queue.key, number)
        made, disk = self._root / SIDECAR / path.name, self._disk
        disk.remove(made)
        with disk.writing(made, queue_form(self._config, queue.key[0]).file_size) as descriptor:
            disk.write_all(descriptor, entries, at)
        if os.path.lexists(path):
            disk.make_folders(aside)
            disk.keep(path, free_path(aside / path.name))
            disk.sync_names(aside)
        disk.move(made, path)
        return path

    def _entry_at(self, key: QueueKey, number: int) -> tuple[Path, int, tuple[str, ...]]:
        """Return the file of an entry, its position there, and the folder of the queue."""
        form = queue_form(self._config, key[0])
        folder = form.root, key[0], str(key[1])
        position = number * form.entry_size
        path = form.file_at(self._root.joinpath(*folder), position)
        return path, position % form.file_size, folder

    def _dispatch(
        self, log: MappedFileQueue, queues: QueueTable, index: IndexKeeper | None
    ) -> None:
        plan = self._plan
        starts = [found.resume_at for found in self._mendings.values()]
        keys, index_from, there = None, plan.log_end, 0
        if index is not None and plan.index is not None:
            keys = KeyThread(index.writer)
            index_from, there = plan.index.built_from, plan.index.keys_there
        start = min([index_from, *starts])

        def put_keys(offsets: Int64, times: Int64, hashes: Int64, numbers: Int64) -> None:
            assert keys is not None
            first = int(np.searchsorted(offsets, index_from))
            if first == len(offsets):
                return
            key = int(np.searchsorted(numbers, first))
            if key < len(numbers) and offsets[numbers[key]] == index_from:
                # The index already has some keys of this message: skip them.
                key += there
            keys.put(offsets[first:], times[first:], hashes[key:], numbers[key:] - first)

        def writer_of(key: QueueKey) -> ConsumeQueueWriter | None:
            return queues.writer(key) if key in self._mendings else None

        try:
            for begin, end in plan.pieces:
                if end <= start:
                    continue
                dispatcher = Dispatcher(
                    *(log, writer_of, None if keys is None else put_keys, self._config),
                    start=max(begin, start),
                    dispatched=self._dispatched,
                    place=partial(placed, found=plan.harmed_ids),
                )
                dispatcher.dispatch_piece(max(begin, start), end)
            if keys is not None:
                keys.wait()
        finally:
            if keys is not None:
                keys.end()
        if index is not None:
            index.guard()

    def _dispatched(self, requests: DispatchRequests, _: object) -> None:
        if self._progress is not None:
            first = self._plan.dispatch_from
            done = int(requests.physical_offset[-1]) + int(requests.size[-1])
            self._progress(done - first, self._plan.log_end - first)


def disk_json(disk: Disk, path: Path, document: object) -> None:
    """Write ``document`` as a JSON file in place of an older one, and sync the file."""
    text = json.dumps(document, ensure_ascii=False, indent=1)
    # A folder's name may be invalid UTF-8, which Python represents by surrogates: escape them.
    disk.replace(path, text.encode(errors="backslashreplace") + b"\n")


def note_end(disk: Disk, root: Path, log_end: int, damage: Iterable[DamagedSpan] = ()) -> None:
    """Record the log's end and its damage in a file, for later readers."""
    document = {"log_end": log_end, "damage": [span.to_json() for span in damage]}
    disk_json(disk, root / DAMAGE, document)


def _rename_files(disk: Disk, root: Path, steps: Sequence[Step]) -> None:
    """Carry out RENAME steps. If two files swap names, one first gets a temporary name, which
    contains its new name. Raises StoreUnavailable if another file already has one of the new names.
    """
    left: dict[Path, Path] = {}
    for step in steps:
        assert step.offset is not None
        left[root / step.file] = root / right_path(step.offset)
    while left:
        ready = [path for path, target in left.items() if not exists(target)]
        for path in ready:
            disk.move(path, left.pop(path))
        if ready:
            continue
        path, target = next(iter(left.items()))
        if not any(target == other for other in left):
            raise StoreUnavailable(f"{target}: it exists, so {path} cannot get its name")
        made = free_path(target.with_name(f"{target.name}{RENAMING}"))
        disk.move(path, made)
        left[made] = left.pop(path)
