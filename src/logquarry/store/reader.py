"""Reads an open store. Readers use :class:`BaseReader`, and writers use :class:`LiveStore`.

A reader neither creates nor locks nor changes a file, so it can run beside a live broker. If a
store has no queue files, the reader uses the queues in RocksDB. If RocksDB lacks entries, or the
store has no RocksDB, the reader computes the missing entries from the log and keeps them in memory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from logquarry import arguments
from logquarry.arguments import now_ms
from logquarry.config import StoreConfig
from logquarry.errors import LogquarryError, StoreUnavailable
from logquarry.format.properties import parse_tags
from logquarry.format.queue_entry import QueueEntry
from logquarry.log.filesystem import LocalFileSystem
from logquarry.log.layout import StoreLayout
from logquarry.log.location import absolute
from logquarry.log.open_files import OpenFiles
from logquarry.log.store_files import StoreFile, require_queue_links
from logquarry.log.walk import LogReader
from logquarry.message import Message
from logquarry.read.batch_queue import open_queue
from logquarry.read.commit_log import CommitLog
from logquarry.read.features import OtherQueues, other_queues
from logquarry.read.fence import require_queue
from logquarry.read.get_message import GetResult
from logquarry.read.index import Index
from logquarry.read.live_read import LiveLog
from logquarry.read.log_end import last_entries, log_bound, sound_bound
from logquarry.read.log_queues import QueueKey, empty_queue
from logquarry.read.queue import ConsumeQueue, FileQueue, Queue
from logquarry.read.rocksdb_queue import derived_queues, rocksdb_queues
from logquarry.read.store_sizes import require_log, with_entry_rules
from logquarry.store.log_reads import get_arguments
from logquarry.store.reads import StoreReads
from logquarry.store.single_calls import SingleCalls

if TYPE_CHECKING:
    from logquarry.store.consumer.registry import Consumers
    from logquarry.store.state import StateReader
    from logquarry.store.stats import StoreStats
    from logquarry.store.store_engine import StoreEngine
    from logquarry.write.put_many import ManyWriter, PutManyResult
    from logquarry.write.put_result import PutResult


class ReadOnlyStore(StoreUnavailable, AttributeError):
    """A method that writes was called on a store that is open for reading."""

    @classmethod
    def of(cls, root: str) -> ReadOnlyStore:
        """Make the error for a store, given its path or URL."""
        return cls(f'{root}: it is open for reading: open it with mode="rw"')


class BaseReader(StoreReads):
    """The methods of :class:`~logquarry.store.message_store.StoreReader`. Not thread-safe."""

    def __init__(self, layout: StoreLayout, *, broker: str) -> None:
        self._files = OpenFiles(layout, is_strict=True)
        self._queues: dict[tuple[str, int], FileQueue] = {}
        self._checked: dict[tuple[str, int], tuple[StoreFile, ...]] = {}
        log = CommitLog(layout, files=self._files, last_entries=self._last_entries)
        super().__init__(layout, log, broker=broker)
        self._index = Index(layout, files=self._files)
        self._found = _Found(self)

    @classmethod
    def start(
        cls,
        path: str | os.PathLike[str],
        *,
        config: StoreConfig | None = None,
        broker: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> Self:
        """Open the store at a path or URL; see :meth:`MessageStore.open`."""
        layout = StoreLayout.open(path, config, storage_options)
        require_log(layout)
        name = absolute(path).rstrip("/").rpartition("/")[2] or layout.root
        return cls(layout, broker=name if broker is None else broker)

    def close(self) -> None:
        """Close the files. Messages that were read before remain usable."""
        self._close_consumers()
        self._is_open = False
        self._release_bytes()
        self._log.close()
        self._files.close()

    def refresh(self) -> None:
        """List the folders again, because a live broker adds log files and deletes expired files.

        If you request an offset after the known files, the reader calls this method itself. But if
        the store has no queue files, the reader never calls this method, and you must call it to
        see new messages. After this call, a reader that computes the queues from the log reads the
        whole log again.

        Raises:
            StoreNotFound: if the store's folder is gone, for example if its disk was unmounted.
        """
        self._require_open()
        self.layout.refresh()
        if not self.layout.commit_log.files:
            self._require_folder()
        self._release_bytes()
        self._files.close()
        self._log.refresh()
        self._found = _Found(self)
        for queue in self._queues.values():
            queue.log_min_offset = self._log.min_offset
            queue.refresh()

    def stats(self) -> StoreStats:
        """Return the contents of the store, in the attribute ``state``.

        The counts of calls are 0, because a reader does not count its calls.
        """
        self._require_open()
        from logquarry.store.stats import StatsRecorder

        state = self._state.read(now_ms)
        return StatsRecorder().snapshot(
            dispatch_behind=state.dispatch_behind or 0,
            flush_behind=state.flush_behind or 0,
            state=state,
        )

    @cached_property
    def _state(self) -> StateReader:
        # Import late, because the import takes 0.1 s.
        from logquarry.store.state import StateReader

        return StateReader(self)

    # --------------------------------------------------------------------------------------- log
    @property
    def max_offset(self) -> int:
        """Physical offset at which the log ends."""
        self._require_open()
        if not self.has_queue_files:
            return self._found.log_queues[1]
        return self._log.max_offset

    @property
    def bound(self) -> int | None:
        """Physical offset at which a read of the log must end (:func:`sound_bound`), or None."""
        return self._found.bound

    def _log_reader(self) -> LogReader:
        return LogReader(self.layout, bound=self.bound, live=self.is_live)

    def _bulk_layout(self) -> tuple[StoreLayout, int | None]:
        return self.layout, None

    def _index_now(self) -> Index:
        return self._index

    # ------------------------------------------------------------------------------------ queues
    @property
    def has_queue_files(self) -> bool:
        """Whether any queue file has an entry.

        If no queue file has an entry, the reader uses the queues in RocksDB, or computes the queues
        from the log.
        """
        return self._found.has_queue_files

    def queues(self) -> tuple[tuple[str, int], ...]:
        """Return topic and queue id of each queue, sorted."""
        self._require_open()
        names = {*self.layout.queue_names, *self.layout.batch_queue_names}
        if self._found.has_other_queues:
            names |= self._found.log_queues[0].keys()
        return tuple(sorted(names))

    def queue(self, topic: str, queue_id: int) -> Queue | None:
        """Return one queue; None if the store has no such queue."""
        self._require_open()
        topic, queue_id = arguments.queue(topic, queue_id)
        if not self._found.has_queue_files:
            return self._found.log_queues[0].get((topic, queue_id))
        found = self._file_queue(topic, queue_id)
        filesystem, files = self.layout.filesystem, () if found is None else found.files
        # A get takes only a few microseconds, so check each list of queue files only once.
        if not files or filesystem.dead_links or self._checked.get((topic, queue_id)) is not files:
            require_queue_links(filesystem, topic, queue_id, files)
            self._checked[topic, queue_id] = files
        if self._found.has_other_queues:
            other = self._found.log_queues[0].get((topic, queue_id))
            # If a broker has moved its queues to RocksDB, the queue files lack the entries written
            # since then.
            if other is not None and (found is None or found.max_offset < other.max_offset):
                return other
        return found

    def _readable_queue(self, topic: str, queue_id: int) -> Queue | None:
        if self._found.other_queues:
            require_queue(self.layout, self._found.other_queues, topic)
        return self.queue(topic, queue_id)

    def _file_queue(self, topic: str, queue_id: int) -> FileQueue | None:
        found = self._queues.get((topic, queue_id))
        if found is None:
            start = self._log.min_offset
            found = open_queue(
                self.layout, topic, queue_id, log_min_offset=start, files=self._files
            )
            if found is not None:
                self._queues[topic, queue_id] = found
        return found

    def _file_queues(self) -> Iterator[FileQueue]:
        for topic, queue_id in {*self.layout.queue_names, *self.layout.batch_queue_names}:
            if (queue := self._file_queue(topic, queue_id)) is not None:
                yield queue

    def _last_entries(self) -> list[QueueEntry]:
        return last_entries(self.layout, self._stored_queues())

    def _stored_queues(self) -> Iterator[Queue]:
        yield from self._file_queues()
        yield from rocksdb_queues(self.layout)

    def get(
        self,
        topic: str,
        queue_id: int,
        offset: int = 0,
        max_count: int = 32,
        tag: str | None = None,
    ) -> GetResult:
        """See :meth:`StoreReads.get`."""
        topic, queue_id, offset, max_count, tag = get_arguments(
            topic, queue_id, offset, max_count, tag
        )
        queue = self._readable_queue(topic, queue_id)
        if self._found.has_queue_files and self._may_have_grown(queue, offset):
            self.refresh()
            queue = self.queue(topic, queue_id)
        if queue is None:
            queue = empty_queue(topic, queue_id)
        wanted = None if tag is None else parse_tags(tag)
        return self._getter.get(queue, offset, max_count, wanted)

    def _may_have_grown(self, queue: Queue | None, offset: int) -> bool:
        """Whether an entry at ``offset`` may have been added since the reader listed the files."""
        if queue is None:
            return True
        if offset < queue.max_offset or not isinstance(queue, FileQueue):
            return False
        self._getter.release()
        queue.refresh()
        if not queue.max_offset:
            self._require_folder()
        if isinstance(queue, ConsumeQueue) and offset == queue.max_offset:
            queue.warn_of_lost_end()
        return offset < queue.max_offset

    def _require_folder(self) -> None:
        """Raise StoreNotFound if the folder is gone, because its queues would seem empty."""
        StoreLayout(self.layout.filesystem, self.layout.config)

    def _make_consumers(self) -> Consumers:
        # Import late, because the imports take 0.1 s.
        from logquarry.disk.config_file import ConsumerOffsets, offsets_in_rocksdb
        from logquarry.disk.disk import Disk
        from logquarry.store.consumer.offsets import LostOffsets, Progress
        from logquarry.store.consumer.registry import Consumers
        from logquarry.store.consumer.source import PolledArrivals, PolledQueueReader

        # Keep the offsets in memory, because another process may write the store and its offset
        # file.
        disk, files = Disk(), self.layout.filesystem
        root = files.local_path("") if isinstance(files, LocalFileSystem) else Path(self.root)
        offsets = ConsumerOffsets(disk, root)
        known = offsets_in_rocksdb(self.layout)
        offsets.update(known or {})
        has_offsets = known is not None or offsets.found is not None
        lost = LostOffsets(root, has_offsets=has_offsets, topics=lambda: self.topics)
        reader = PolledQueueReader(self, self._bulk_getter)
        made = Consumers(
            reader,
            PolledArrivals(lambda: reader.look(made.topics)),
            Progress(offsets, reader, lost),
            put=self._refuse,
            health=disk.health,
            interval_ms=None,
        )
        return made

    def _refuse(self, _: Message) -> PutResult:
        raise ReadOnlyStore.of(self.root)


class _Found:
    """The results that a reader has cached. Each refresh replaces the object by a new one."""

    def __init__(self, store: BaseReader) -> None:
        self._store = store

    @cached_property
    def has_queue_files(self) -> bool:
        return any(queue.last_entry is not None for queue in self._store._file_queues())

    @cached_property
    def has_other_queues(self) -> bool:
        """Whether queues may exist that have no files, but are in RocksDB or only in the log."""
        return not self.has_queue_files or self.other_queues.has_rocksdb

    @cached_property
    def other_queues(self) -> OtherQueues:
        """The queues that are not stored as files of 20-byte entries."""
        return other_queues(self._store.layout)

    @cached_property
    def bound(self) -> int | None:
        layout = self._store.layout
        queues = self._store._stored_queues
        return sound_bound(layout, log_bound(layout, lambda: last_entries(layout, queues())))

    @cached_property
    def log_queues(self) -> tuple[Mapping[QueueKey, Queue], int]:
        """The queues, and the physical offset at which the log ends.

        The entries of the queues are read from RocksDB. The entries that RocksDB lacks are computed
        from the log. If the store has no RocksDB, the queues are computed from the whole log.
        """
        store = self._store
        made, found = derived_queues(with_entry_rules(store.layout), store._log_reader())
        end = store._log.min_offset if found is None else found
        store._log.set_end(end)
        return made, end


_monotonic = time.monotonic


class LiveStore(StoreReads, SingleCalls):
    """The methods with which a writer reads the store and puts messages.

    The writer's services also use these methods. Any thread may call them. A read by physical
    offset finds a message as soon as ``put`` has written it to the log. A read by queue offset
    finds a message as soon as the dispatcher has added its queue entry.
    """

    def __init__(self, engine: StoreEngine, layout: StoreLayout, *, broker: str) -> None:
        self._engine = engine
        self._health = engine.health
        self._recorder = engine.recorder
        # LiveLog may call _new_layout, which needs these two attributes, so set them first.
        self.layout, self.config = layout, layout.config
        self._live_log = LiveLog(engine.log, self._new_layout)
        super().__init__(layout, self._live_log, broker=broker)
        self._writer = engine.writer
        self._live_queues = engine.queues.live
        self._kernel = None
        self._start_puts(engine.writer, engine.recorder, engine.feed, engine.growth)

    def _require_open(self) -> None:
        super()._require_open()
        self._health.require_readable()

    @property
    def max_offset(self) -> int:
        """Physical offset at which the log ends."""
        self._require_open()
        return self._engine.log.max_offset

    @property
    def close_problem(self) -> str | None:
        """Why ``close()`` could not shut the store down cleanly, so that the store needs a
        recovery. None if the shutdown was clean, or if the store is open.
        """
        return self._engine.close_problem

    @property
    def bound(self) -> int | None:
        """Physical offset at which the log ends, if a recovery may have left stale frames after
        this offset; else None.
        """
        return self._engine.log.max_offset if self._engine.files.keeps_tails else None

    @property
    def has_queue_files(self) -> bool:
        """Always true, because the dispatcher writes the queues, so they are never computed from
        the log.
        """
        return True

    def queues(self) -> tuple[tuple[str, int], ...]:
        """Return topic and queue id of each queue, sorted."""
        self._require_open()
        return tuple(self._engine.queues.keys())

    def queue(self, topic: str, queue_id: int) -> Queue | None:
        """Return one queue; None if the store has no such queue."""
        self._require_open()
        topic, queue_id = arguments.queue(topic, queue_id)
        try:
            return self._engine.queues.get(topic, queue_id)
        except StoreUnavailable:
            self._require_open()
            # If a sync failed or the disk is full, a queue cannot be opened for writing. The
            # queue's files can still be read, so open them only for reading.
            return self._unopened_queue(topic, queue_id)

    def _queues_for_state(self) -> list[Queue]:
        """Return all queues. If a queue has no writer yet, do not create one, because a store may
        have thousands of queues.
        """
        engine, layout = self._engine, self._new_layout()
        found: list[Queue | None] = []
        for key in self.queues():
            if engine.queues.has_writer(key) or engine.files.keeps_tails:
                found.append(self.queue(*key))
            else:
                found.append(self._unopened_queue(*key, layout))
        return [queue for queue in found if queue is not None]

    def _unopened_queue(
        self, topic: str, queue_id: int, layout: StoreLayout | None = None
    ) -> Queue | None:
        layout = layout or self._new_layout()
        return open_queue(layout, topic, queue_id, log_min_offset=self._log.min_offset)

    # Without this line, Python would find the abstract method of StoreReads, the first base class.
    get = SingleCalls.get

    def _new_layout(self) -> StoreLayout:
        # Make a new layout for each call, because a layout caches the listing of its folders, and
        # two threads must not share this cache.
        layout = StoreLayout(self.layout.filesystem, self.config)
        layout.writer_end = self.bound
        return layout

    def _bulk_layout(self) -> tuple[StoreLayout, int | None]:
        layout, stop = self._new_layout(), self._engine.log.max_offset
        last = layout.commit_log.at(stop - 1) if stop > layout.commit_log.start else None
        if last is not None and last.base + last.size < stop:
            # The last file is too short, so another program has truncated it. So do not treat its
            # end as a tail that this writer left.
            layout.writer_end = stop
        return layout, stop

    def _index_now(self) -> Index:
        layout = self._new_layout()
        return Index(layout, files=OpenFiles(layout, is_strict=True))

    def _log_reader(self) -> LogReader:
        return LogReader(self._new_layout(), bound=self.bound, live=True)

    # ------------------------------------------------------------------------------------- puts
    @cached_property
    def _many(self) -> ManyWriter:
        from logquarry.write.put_many import ManyWriter

        return ManyWriter(self._writer)

    def _put_many(self, put: Callable[[], PutManyResult]) -> PutManyResult:
        began = _monotonic()
        try:
            if self._writer.bar is not None:
                self._engine.feed.adopt()
            result = put()
        except LogquarryError as error:
            self._recorder.put_failed()
            appended = getattr(error, "appended", None)
            if appended is not None:
                self._recorder.put_many(appended, _monotonic() - began)
            raise
        self._recorder.put_many(result, _monotonic() - began)
        return result

    def _append_many(self, messages: Sequence[Message]) -> PutManyResult:
        """Append messages in bulk. Do not wait for the flush or for replicas."""
        return self._put_many(lambda: self._many.put_many(messages, wait=False))
