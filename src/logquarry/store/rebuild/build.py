"""Builds consume queues and index in a folder that nobody else knows: here, in one walk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from logquarry.config import StoreConfig
from logquarry.files.layout import CONSUME_QUEUE, INDEX, StoreLayout
from logquarry.scan.ahead import ahead
from logquarry.scan.follow import Follower, follow_run
from logquarry.store.disk.disk import Disk
from logquarry.store.dispatch.queue_units import parts_with_copies
from logquarry.store.rebuild.index_files import IndexFiles
from logquarry.store.rebuild.queue_files import QueueFiles
from logquarry.store.recovery.look import LogLook
from logquarry.units import Progress


@dataclass(frozen=True, kw_only=True)
class BuildJob:
    """What is to be built.

    Attributes:
        layout: the store's files.
        config: its settings, with all sizes.
        disk: what the folder is on.
        clock: names index files, in milliseconds.
        folder: gets ``consumequeue/`` and ``index/``.
        names: which of them.
        look: walks the log; through once it is built.
        likely_end: about where the log ends.
        is_live: whether somebody writes the store meanwhile.
    """

    layout: StoreLayout
    config: StoreConfig
    disk: Disk
    clock: Callable[[], int]
    folder: Path
    names: tuple[str, ...]
    look: LogLook
    likely_end: int
    is_live: bool

    def queue_files(self) -> QueueFiles | None:
        """The queues to be; None where none are made."""
        if CONSUME_QUEUE not in self.names:
            return None
        assert self.config.queue_file_size is not None
        return QueueFiles(self.disk, self.folder / CONSUME_QUEUE, self.config.queue_file_size)


@dataclass(frozen=True, slots=True)
class Built:
    """What was built, all of it on the disk.

    Attributes:
        queues: the queues; None where none were to be made.
        index_files: files of the index,
        keys: and keys in them.
    """

    queues: QueueFiles | None
    index_files: int = 0
    keys: int = 0


Builder = Callable[[BuildJob, "Progress | None"], Built]


def build_here(job: BuildJob, progress: Progress | None) -> Built:
    """Build all of it in one walk over the log.

    Raises:
        StoreUnavailable: if the disk fails, or is full.
    """
    look, shape = job.look, job.config.index_shape
    assert shape is not None
    queues, index = job.queue_files(), None
    if INDEX in job.names:
        is_3_1 = job.config.is_3_1
        index = IndexFiles(job.disk, job.folder / INDEX, shape, job.clock, counts_keys=is_3_1)
    follower = Follower(job.config.delay_levels_ms, keys_of_3_1=job.config.is_3_1)
    try:
        for run in ahead(look.runs()):
            for window, found in follow_run(follower, run):
                if index is not None:
                    index.add(found)
                if queues is not None:
                    queues.add(parts_with_copies(window, found, job.config))
            if progress is not None:
                progress(run.end - look.start, max(run.end, job.likely_end) - look.start)
        if queues is not None:
            queues.finish()
        if index is not None:
            index.finish()
    finally:
        if index is not None:
            index.close()
    return Built(queues) if index is None else Built(queues, index.files, index.keys)
