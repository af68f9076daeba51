"""The read API of a store that this process writes.

Log and queues are read from the writer's own files, so a get finds a message as soon as it is
dispatched, without listing folders. Scans and queries read the files as any other process would,
up to the log's end at their start.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

from logquarry import arguments
from logquarry.disk.open_files import OpenFiles
from logquarry.errors import StoreUnavailable
from logquarry.format.properties import parse_tags
from logquarry.log.layout import StoreLayout
from logquarry.read.batch_queue import open_queue
from logquarry.read.get_message import GetResult
from logquarry.read.index import Index
from logquarry.read.live_read import LiveLog
from logquarry.read.queue import Queue
from logquarry.store.log_reads import get_arguments, no_queue
from logquarry.store.reads import StoreReads

if TYPE_CHECKING:
    from logquarry.log.walk import LogReader
    from logquarry.store.store_engine import StoreEngine

_monotonic = time.monotonic
_LEAST, _MOST, _MOST_COUNT = arguments.LONG_MIN, arguments.LONG_MAX, arguments.INT_MAX

KernelGet = Callable[[Queue, int, int, frozenset[str] | None], GetResult | None]


class LiveReads(StoreReads):
    """Reads a store that is written at the same time. Any thread may use it.

    Reads find messages in the log at once, and in the queues when they are dispatched.
    """

    def __init__(self, engine: StoreEngine, layout: StoreLayout, *, broker: str) -> None:
        self._engine = engine
        self._health = engine.health
        self._recorder = engine.recorder
        # First, because LiveLog may call _new_layout, which uses these two.
        self.layout, self.config = layout, layout.config
        self._live_log = LiveLog(engine.log, self._new_layout)
        super().__init__(layout, self._live_log, broker=broker)
        # Look these up once, for all gets.
        self._live_queues = engine.queues.live

    def _require_open(self) -> None:
        super()._require_open()
        self._health.require_readable()

    @property
    def max_offset(self) -> int:
        """Physical offset at which the log ends."""
        self._require_open()
        return self._engine.log.max_offset

    @property
    def bound(self) -> int | None:
        """The log's end if bytes of an earlier log follow it; else None: there is no bound."""
        return self._engine.log.max_offset if self._engine.files.keeps_tails else None

    @property
    def has_queue_files(self) -> bool:
        """True: the dispatcher makes queues of all messages in the log."""
        return True

    def queues(self) -> tuple[tuple[str, int], ...]:
        """(topic, queue id) of each queue, sorted."""
        self._require_open()
        return tuple(self._engine.queues.keys())

    def queue(self, topic: str, queue_id: int) -> Queue | None:
        """One queue; None if the store does not have it."""
        self._require_open()
        topic, queue_id = arguments.queue(topic, queue_id)
        try:
            return self._engine.queues.get(topic, queue_id)
        except StoreUnavailable:
            self._require_open()
            # It cannot be opened for writing: a sync has failed, or the disk is full. Its files
            # can still be read.
            return self._unopened_queue(topic, queue_id)

    def _queues_for_state(self) -> list[Queue]:
        """All queues. None is opened for writing, because there may be thousands."""
        engine, layout = self._engine, self._new_layout()
        found: list[Queue | None] = []
        for key in self.queues():
            if key in engine.queues.writers or engine.files.keeps_tails:
                found.append(self.queue(*key))
            else:
                found.append(self._unopened_queue(*key, layout))
        return [queue for queue in found if queue is not None]

    def _unopened_queue(
        self, topic: str, queue_id: int, layout: StoreLayout | None = None
    ) -> Queue | None:
        layout = layout or self._new_layout()
        return open_queue(layout, topic, queue_id, log_min_offset=self._log.min_offset)

    def get(
        self,
        topic: str,
        queue_id: int,
        offset: int = 0,
        max_count: int = 32,
        tag: str | None = None,
    ) -> GetResult:
        """See :meth:`StoreReads.get`."""
        began = _monotonic()
        if not (type(queue_id) is type(offset) is type(max_count) is int):
            topic, queue_id, offset, max_count, tag = get_arguments(
                topic, queue_id, offset, max_count, tag
            )
        wanted = None
        if tag is not None:
            wanted = parse_tags(arguments.text(tag, "tag"))
        queue: Queue | None = None
        if type(topic) is str:
            queue = self._live_queues.get((topic, queue_id))
        if queue is None or self._health.is_gone:
            queue = self.queue(topic, queue_id) or no_queue(topic, queue_id)
        result = None
        if _LEAST <= offset <= _MOST and 0 <= max_count <= _MOST_COUNT:
            result = self._kernel_get(queue, offset, max_count, wanted)
        if result is None:
            self._require_open()
            get_arguments(topic, queue_id, offset, max_count, tag)
            result = self._getter.reference(queue, offset, max_count, wanted)
        self._recorder.got(len(result.messages), _monotonic() - began)
        return result

    @cached_property
    def _kernel_get(self) -> KernelGet:
        return self._getter.kernel.get

    def _new_layout(self) -> StoreLayout:
        # Make a new layout for each use: a layout keeps its listing, and threads must not share it.
        layout = StoreLayout(self.layout.filesystem, self.config)
        layout.writer_end = self.bound
        return layout

    def _bulk_layout(self) -> tuple[StoreLayout, int | None]:
        layout, stop = self._new_layout(), self._engine.log.max_offset
        last = layout.commit_log.at(stop - 1) if stop > layout.commit_log.start else None
        if last is not None and last.base + last.size < stop:
            # Another program cut the file: its end is not a torn tail of this writer.
            layout.writer_end = stop
        return layout, stop

    def _index_now(self) -> Index:
        layout = self._new_layout()
        return Index(layout, files=OpenFiles(layout, is_strict=True))

    def _log_reader(self) -> LogReader:
        from logquarry.log.walk import LogReader

        return LogReader(self._new_layout(), bound=self.bound, live=True)
