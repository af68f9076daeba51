"""A store that is open to be written: what users do with it, over :mod:`.store_engine`."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from logquarry.config import StoreConfig
from logquarry.dialect31.prepared import PreparedTransactions
from logquarry.disk.config_file import ConfigTables
from logquarry.disk.disk import Disk, LocalDisk
from logquarry.disk.lifetime import close_at_exit, was_closed
from logquarry.disk.open_files import OpenFiles
from logquarry.errors import LogquarryError, StoreUnavailable, UsageError
from logquarry.format import tags
from logquarry.log.filesystem import local_folder
from logquarry.log.layout import LOADS, StoreLayout
from logquarry.message import Message
from logquarry.read.consume_queue import ConsumeQueue, Queue
from logquarry.read.get_message import GetResult
from logquarry.read.index import Index
from logquarry.read.live_read import LiveLog
from logquarry.read.log_end import last_store_timestamp
from logquarry.store.consuming import consumers_of_a_writer
from logquarry.store.load.ledger import LoadId
from logquarry.store.load.loading import Loaded
from logquarry.store.load.segment import Segment
from logquarry.store.log_growth import LogFeed
from logquarry.store.message_store import MessageStore
from logquarry.store.retention.plan import RetentionPlan
from logquarry.store.retention.rules import RetentionRules
from logquarry.store.services import ServedStore, Services
from logquarry.store.stats import StoreStats
from logquarry.store.store_engine import StoreEngine
from logquarry.store.store_state import StoreState, look_at
from logquarry.store.transaction.checks import CheckReport, Listener
from logquarry.store.transaction.transaction import Transaction
from logquarry.store.write_api import DEFAULT_PRODUCER_GROUP
from logquarry.units import Clock, now_ms
from logquarry.write.dispatcher import MessageArrival
from logquarry.write.put_future import PutFuture, failed_future
from logquarry.write.put_many import ManyWriter, PutManyResult
from logquarry.write.put_result import PutResult

if TYPE_CHECKING:
    import pyarrow as pa

    from logquarry.log.walk import LogReader
    from logquarry.store.consumer.consumers import Consumers

_monotonic = time.monotonic


class WritableStore(MessageStore):
    """A :class:`MessageStore` that takes messages. Any thread may use it.

    Reads see what is in the log, and in the queues what is dispatched
    (:meth:`wait_dispatched`). In a forked child all of it is refused.
    """

    def __init__(self, engine: StoreEngine, layout: StoreLayout, *, broker: str) -> None:
        super().__init__(layout, broker=broker)
        self._engine = engine
        self._writer = engine.writer
        self._many = ManyWriter(engine.writer)
        self._recorder = engine.recorder
        self._found_time: int | None = None
        self._health = engine.health
        self._log = self._live_log = LiveLog(engine.log, self._layout_now)
        # Looked up once, for all puts and gets.
        self._put = engine.writer.put
        self._count_put = engine.recorder.put
        self._settle_later = engine.growth.settle_later
        self._live_queues = engine.queues.live
        self._quick_get = self._quick.get
        engine.retention.removed = self._forget_removed
        self._services = Services(self._served(engine))
        self._services.start_prepared_checks()

    @classmethod
    def start(
        cls,
        path: str | os.PathLike[str],
        *,
        config: StoreConfig | None = None,
        clock: Clock | None = None,
        broker: str | None = None,
        disk: Disk | None = None,
    ) -> WritableStore:
        """Open the store at a path to write to it; see :meth:`MessageStore.open`.

        Args:
            path: its folder; made if it is not there.
            config: its settings.
            clock: gives store times, in milliseconds.
            broker: what messages carry as ``broker``.
            disk: what it is on.
        """
        # A program may change its folder while the store is open.
        root = local_folder(path, "only a local store can be written")
        engine = StoreEngine(
            root, config or StoreConfig(), clock=clock or now_ms, disk=disk or LocalDisk()
        )
        try:
            layout = StoreLayout.open(root, engine.config)
            store = cls(engine, layout, broker=root.name if broker is None else broker)
        except BaseException:
            # Nobody has it, and nobody else could end its threads.
            engine.close()
            raise
        close_at_exit(store)
        # A slave gets from its master what that delivers.
        if engine.config.deliver_delayed and engine.config.broker_role != "SLAVE":
            try:
                store.start_delivery()
            except BaseException:
                store.close()
                raise
        return store

    # ------------------------------------------------------------------------------------ write
    def put(self, message: Message) -> PutResult:
        """See :meth:`WriteApi.put`."""
        began = _monotonic()
        try:
            if self._writer.bar is not None:
                self._writer.check_status()
                self._engine.adopt()
            result = self._put(message)
        except LogquarryError:
            self._recorder.put_failed()
            raise
        self._count_put(message.topic, result, _monotonic() - began)
        return result

    def put_async(self, message: Message) -> PutFuture:
        """See :meth:`WriteApi.put_async`."""
        try:
            return self._append(message)[1]
        except LogquarryError as error:
            return failed_future(error)

    def _append(self, message: Message) -> tuple[PutResult, PutFuture]:
        """Where a message stands, and the future of the same once flush and replica are settled."""
        began = _monotonic()
        try:
            if self._writer.bar is not None:
                self._writer.check_status()
                self._engine.adopt()
            result, waits = self._writer.append_message(message)
        except LogquarryError:
            self._recorder.put_failed()
            raise
        count, topic = self._count_put, message.topic

        def settled(result: PutResult) -> None:
            count(topic, result, _monotonic() - began)

        failed = self._recorder.put_failed
        return result, self._settle_later(result, waits, settled, failed)

    def put_batch(
        self,
        messages: Sequence[Message] | None = None,
        *,
        wire: bytes | None = None,
        message: Message | None = None,
    ) -> PutResult:
        """See :meth:`WriteApi.put_batch`."""
        began = time.monotonic()
        try:
            if self._writer.bar is not None:
                self._writer.check_status()
                self._engine.adopt()
            result = self._writer.put_batch(messages, wire=wire, message=message)
        except LogquarryError:
            self._recorder.put_failed()
            raise
        shared = message if message is not None else messages[0] if messages else None
        if shared is not None:
            self._recorder.put(shared.topic, result, time.monotonic() - began)
        return result

    def put_many(self, messages: Iterable[Message] | pa.RecordBatch | pa.Table) -> PutManyResult:
        """See :meth:`WriteApi.put_many`."""
        return self._put_many(lambda: self._many.put_many(messages))

    def _put_many(self, put: Callable[[], PutManyResult]) -> PutManyResult:
        began = time.monotonic()
        try:
            if self._writer.bar is not None:
                self._engine.adopt()
            result = put()
        except LogquarryError as error:
            self._recorder.put_failed()
            appended = getattr(error, "appended", None)
            if appended is not None:
                self._recorder.put_many(appended, time.monotonic() - began)
            raise
        self._recorder.put_many(result, time.monotonic() - began)
        return result

    def put_stored(self, batch: pa.RecordBatch, *, keep_times: bool = False) -> PutManyResult:
        """Put messages that a store has had, as they were; see :meth:`ManyWriter.put_stored`.

        Args:
            batch: the messages.
            keep_times: whether they keep their store times, as far as these do not fall behind
                that of the log's last message.
        """
        least = self._last_time() if keep_times else None
        return self._put_many(lambda: self._many.put_stored(batch, least))

    def check_stored(self, batch: pa.RecordBatch) -> None:
        """Refuse what :meth:`put_stored` would refuse; see :meth:`ManyWriter.check_stored`."""
        self._many.check_stored(batch)

    def load_staged(self, load: LoadId, segments: Sequence[Segment], loads: str = LOADS) -> Loaded:
        """Append staged segments exactly once; see :meth:`logquarry.store.load.loading.Loads.load`.

        Args:
            load: which load it is.
            segments: in their order.
            loads: the folder that they are staged in, as seen from the store.
        """
        if self._engine.config.is_3_1:
            raise UsageError("staged segments are loaded in dialect 4.9 only")
        self._engine.adopt()
        return self._engine.loads.load(load, segments, loads)

    def _last_time(self) -> int:
        """The store time of the log's last message when this is first asked for, 0 without one.

        What is put later the writer knows of.
        """
        if self._found_time is None:
            self._engine.adopt()
            self._found_time = last_store_timestamp(self._layout_now(), self._engine.log.max_offset)
        return self._found_time

    def append_data(self, offset: int, data: bytes | memoryview) -> bool:
        """See :meth:`WriteApi.append_data`."""
        return self._engine.append_data(offset, data)

    def log_feed(self) -> LogFeed:
        """See :meth:`WriteApi.log_feed`."""
        self._require_open()
        return self._engine.feed()

    def config_tables(self) -> ConfigTables:
        """See :meth:`WriteApi.config_tables`."""
        self._require_open()
        return self._services.config_tables

    def flush(self) -> int:
        """See :meth:`WriteApi.flush`."""
        self._require_open()
        return self._engine.flush()

    def wait_dispatched(self, offset: int | None = None, timeout: float | None = None) -> bool:
        """See :meth:`WriteApi.wait_dispatched`."""
        self._require_open()
        return self._engine.wait_dispatched(offset, timeout)

    def add_arrival_listener(self, listener: Callable[[MessageArrival], None]) -> None:
        """See :meth:`WriteApi.add_arrival_listener`."""
        self._require_open()
        self._engine.listeners.add(listener)

    def remove_arrival_listener(self, listener: Callable[[MessageArrival], None]) -> None:
        """See :meth:`WriteApi.remove_arrival_listener`."""
        self._engine.listeners.remove(listener)

    # ------------------------------------------------------------------------------- services
    def start_delivery(self) -> None:
        """See :meth:`WriteApi.start_delivery`."""
        self._require_open()
        self._services.start_delivery()

    def deliver_due(self) -> int:
        """See :meth:`WriteApi.deliver_due`."""
        self._require_open()
        return self._services.deliver_due()

    def transaction(self, message: Message, group: str = DEFAULT_PRODUCER_GROUP) -> Transaction:
        """See :meth:`WriteApi.transaction`."""
        self._require_open()
        return self._services.transaction(message, group)

    def check_transactions(self, listener: Listener) -> CheckReport:
        """See :meth:`WriteApi.check_transactions`."""
        self._require_open()
        return self._services.check_transactions(listener)

    def start_transaction_checks(self, listener: Listener) -> None:
        """See :meth:`WriteApi.start_transaction_checks`."""
        self._require_open()
        self._services.start_transaction_checks(listener)

    @property
    def prepared_transactions(self) -> PreparedTransactions:
        """See :attr:`WriteApi.prepared_transactions`."""
        self._require_open()
        return self._services.prepared_transactions

    def _served(self, engine: StoreEngine) -> ServedStore:
        """What the services use of this store."""
        log, many = engine.log, self._many

        def sync_log() -> None:
            log.commit(0)
            log.flush(0)

        def wait_dispatched() -> bool:
            # What ends within a frame of another store's log would never be.
            engine.adopt()
            return engine.wait_dispatched(None, None)

        return ServedStore(
            config=engine.config,
            disk=engine.disk,
            folder=engine.root,
            broker=self.broker,
            commit_log=self._live_log,
            state_table=engine.transactions,
            clock=engine.writer.clock,
            log_end=lambda: log.wrote_offset,
            put=self.put,
            append=self._append,
            append_many=lambda some: self._put_many(lambda: many.put_many(some, wait=False)),
            queue=self.queue,
            queues=self.queues,
            frame_at=self._frame_in_log,
            stored=self._message,
            log_reader=self._log_reader,
            sync_log=sync_log,
            wait_dispatched=wait_dispatched,
        )

    def stats(self) -> StoreStats:
        """See :meth:`WriteApi.stats`."""
        log = self._engine.log
        end = log.wrote_offset
        dispatch = max(0, end - self._engine.dispatcher.offset)
        flush = max(0, end - log.flushed_offset)
        state: StoreState | None = None
        # Of a store that was closed only what it did is known.
        with contextlib.suppress(StoreUnavailable):
            state = look_at(
                self,
                self._retained,
                self._halves,
                self._writer.clock,
                queues=self._queues_as_they_are(),
                behind=(dispatch, flush),
            )
        return self._recorder.snapshot(
            dispatch_behind=dispatch,
            flush_behind=flush,
            delays=self._services.delays,
            state=state,
        )

    def retain(self, rules: RetentionRules, *, apply: bool = False) -> RetentionPlan:
        """See :meth:`WriteApi.retain`."""
        self._require_open()
        return self._engine.retention.run(rules) if apply else self._engine.retention.plan(rules)

    def _forget_removed(self) -> None:
        # The bytes at hand may be of a file that is gone, whose room nobody gets before.
        self._quick.forget()
        self._live_log.close()

    # ------------------------------------------------------------------------------ life and state
    def close(self) -> None:
        """Close the store; once more does nothing.

        No more is taken, and what was is dispatched and brought to the disk. Where that cannot be
        done ``abort`` stays, and the log says why.

        Raises:
            UsageError: if a listener of the store or a callback of a put calls it.
        """
        if not self._health.is_forked:
            # Refused before anything has ended, and before anybody waits for the caller.
            if self._services.is_current or self._engine.is_current:
                raise UsageError("a listener or callback cannot close the store that calls it")
            self._close_consumers()
            self._services.close()
        self._engine.close()
        was_closed(self)
        self._is_open = False
        self._forget_at_hand()
        self._live_log.close()
        self._files.close()

    def refresh(self) -> None:
        """Look again at the folder. What is put and dispatched is seen without it."""
        self._require_open()
        self.layout.refresh()

    def _require_open(self) -> None:
        super()._require_open()
        self._engine.health.require_readable()

    # ------------------------------------------------------------------------------------- read
    @property
    def max_offset(self) -> int:
        """Physical offset at which the log ends."""
        self._require_open()
        return self._engine.log.max_offset

    @property
    def bound(self) -> int | None:
        """Nothing bounds a log that is written, but where it keeps what is behind its end."""
        return self._engine.log.max_offset if self._engine.keeps_tails else None

    @property
    def has_queue_files(self) -> bool:
        """The dispatcher makes queues of whatever is in the log."""
        return True

    def queues(self) -> tuple[tuple[str, int], ...]:
        """(topic, queue id) of each queue, sorted."""
        self._require_open()
        return tuple(self._engine.queues.keys())

    def queue(self, topic: str, queue_id: int) -> Queue | None:
        """One queue, None if the store has none of that name."""
        self._require_open()
        try:
            return self._engine.queues.get(topic, queue_id)
        except StoreUnavailable:
            self._require_open()
            # It cannot be made ready to be written: a sync has failed, or the disk is full. Reads
            # go on, of what is there.
            return self._queue_as_it_is(topic, queue_id)

    def _queues_as_they_are(self) -> list[Queue]:
        """All queues, of which none is opened to be written for it: there may be thousands."""
        table, layout = self._engine.queues, self._layout_now()
        files = OpenFiles(layout)
        found: list[Queue | None] = []
        for key in self.queues():
            if key in table.writers or self._engine.keeps_tails:
                found.append(self.queue(*key))
            else:
                start = self._log.min_offset
                found.append(ConsumeQueue(layout, *key, log_min_offset=start, files=files))
        return [queue for queue in found if queue is not None]

    def _queue_as_it_is(self, topic: str, queue_id: int) -> Queue | None:
        layout = self._layout_now()
        if (topic, queue_id) not in layout.queue_names:
            return None
        return ConsumeQueue(
            layout,
            topic,
            queue_id,
            log_min_offset=self._log.min_offset,
            files=OpenFiles(layout),
        )

    def get(
        self,
        topic: str,
        queue_id: int,
        offset: int = 0,
        max_count: int = 32,
        tag: str | None = None,
    ) -> GetResult:
        """See :meth:`MessageStore.get`."""
        began = _monotonic()
        queue = self._live_queues.get((topic, queue_id))
        if queue is not None and not self._health.is_gone:
            wanted = None if tag is None else tags.parse(tag)
            result = self._quick_get(queue, offset, max_count, wanted)
            if result is not None:
                self._recorder.got(len(result.messages), _monotonic() - began)
                return result
        result = super().get(topic, queue_id, offset, max_count, tag)
        self._recorder.got(len(result.messages), _monotonic() - began)
        return result

    def _make_consumers(self) -> Consumers:
        return consumers_of_a_writer(
            self._queue_access,
            self._engine.listeners,
            self._services.consumer_offsets,
            self._engine.root,
            self.put,
            health=self._health,
            interval_ms=self.config.flush_consumer_offset_interval,
        )

    def _layout_now(self) -> StoreLayout:
        # An own one each time: a layout remembers what it saw, and threads do not share it.
        layout = StoreLayout(self.layout.filesystem, self.config)
        layout.writer_end = self.bound
        return layout

    def _bulk_layout(self) -> tuple[StoreLayout, int | None]:
        return self._layout_now(), self._engine.log.max_offset

    def _index_now(self) -> Index:
        return Index(self._layout_now())

    def _log_reader(self) -> LogReader:
        from logquarry.log.walk import LogReader

        return LogReader(self._layout_now(), bound=self.bound, live=True)
