"""The methods of a store that is open for writing; ``store_engine`` and ``services`` do the work.

A put runs through ``SinglePut.put``, ``PutPath.put`` and ``LogGrowth``.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, Self

from logquarry import arguments
from logquarry.config import StoreConfig, settings_of
from logquarry.disk.disk import Disk
from logquarry.disk.service import close_at_exit, was_closed
from logquarry.errors import StoreUnavailable, UsageError
from logquarry.log.layout import StoreLayout
from logquarry.log.location import local_folder
from logquarry.log.store_files import LOADS
from logquarry.message import Message
from logquarry.read.log_end import last_store_timestamp
from logquarry.store.reader import LiveStore
from logquarry.units import Clock, now_ms

if TYPE_CHECKING:
    import pyarrow as pa

    from logquarry.dialect31.prepared import PreparedTransactions
    from logquarry.disk.config_file import ConfigFile, ConfigTables, ConsumerOffsets
    from logquarry.store.consumer.registry import Consumers
    from logquarry.store.load.loading import Loaded, LoadId
    from logquarry.store.load.segment import Segment
    from logquarry.store.retention.plan import RetentionPlan
    from logquarry.store.retention.rules import RetentionRules
    from logquarry.store.services import Services
    from logquarry.store.state import StoreState
    from logquarry.store.stats import StoreStats
    from logquarry.store.store_engine import StoreEngine
    from logquarry.store.transaction.checks import CheckReport, Listener
    from logquarry.store.transaction.transaction import Transaction, TransactionState
    from logquarry.store.writer_files import LogFeed
    from logquarry.write.dispatcher import MessageArrival
    from logquarry.write.put_future import PutFuture
    from logquarry.write.put_many import ArrowStream, PutManyResult
    from logquarry.write.queue_table import TopicTable


DEFAULT_PRODUCER_GROUP: Final = "logquarry"
"""The producer group of a transaction whose message has no group."""


# Readers also import this module, so functions import the modules that only writers need.

_monotonic = time.monotonic


class BaseWriter(LiveStore):
    """The methods of :class:`~logquarry.store.message_store.StoreWriter`.

    Any thread may call the methods. In a forked child, every call raises StoreUnavailable.
    """

    _mode = "rw"

    def __init__(self, engine: StoreEngine, layout: StoreLayout, *, broker: str) -> None:
        from logquarry.store.services import Services

        super().__init__(engine, layout, broker=broker)
        self._found_time: int | None = None
        engine.retention.removed = self._release_views
        self._services = Services(engine, self)
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
        accept_loss: int | None = None,
    ) -> Self:
        """Open the store at a path for writing; see :meth:`MessageStore.open`.

        ``disk`` is the disk of the store (default: the machine's).
        """
        from logquarry.store.store_engine import StoreEngine

        # Use an absolute path: the program may change its working folder while the store is open.
        root = local_folder(path, "only a local store can be written")
        engine = StoreEngine(
            root,
            settings_of(config),
            clock=clock or now_ms,
            disk=disk or Disk(),
            accept_loss=accept_loss,
        )
        try:
            layout = StoreLayout.open(root, engine.config)
            store = cls(engine, layout, broker=root.name if broker is None else broker)
        except BaseException:
            engine.close()
            raise
        close_at_exit(store)
        # A slave delivers no messages, because it gets delivered messages from its master.
        if engine.config.deliver_delayed and engine.config.broker_role != "SLAVE":
            try:
                store.start_delivery()
            except BaseException:
                store.close()
                raise
        return store

    # ------------------------------------------------------------------------------------ write
    def put_many(self, messages: Iterable[Message] | ArrowStream | pa.RecordBatch) -> PutManyResult:
        """Put messages of any topics and queues, in order, in bulk.

        The log gets the bytes that single puts would write, but the messages of a chunk of about 1
        MiB share one store time. Other threads can put between chunks. All messages are checked
        before the first message is appended. Arrow columns are named like the fields of
        :class:`~logquarry.message.Message`; columns that the store sets (offsets, CRC) are ignored.

        Args:
            messages: Message objects, or any object that exports Arrow data
                (``__arrow_c_stream__``). For example, pass a table or reader of pyarrow, a
                DataFrame of Polars or pandas (2.2 or later), or a relation of DuckDB. All messages
                stay in memory during the call.

        Returns:
            The offsets of each message, as arrays.

        Raises:
            StoreUnavailable: as for :meth:`put`. The error's ``appended`` is the result for the
                messages that are in the log; None if the log has no message of the call.
            MessageRejected: if a message is not accepted; ``index`` is its number. Nothing is
                appended, unless multi-dispatch makes the message too large; ``appended`` then has
                the result for the earlier messages.
            UsageError: if a message is invalid. Nothing is appended.
        """
        return self._put_many(lambda: self._many.put_many(messages))

    def put_stored(self, batch: pa.RecordBatch, *, keep_times: bool = False) -> PutManyResult:
        """Put messages of another store unchanged; see :meth:`ManyWriter.put_stored`.

        With ``keep_times``, the messages keep their store times. A time before the store time of
        the log's last message is raised to that time.
        """
        least = self._last_time() if keep_times else None
        return self._put_many(lambda: self._many.put_stored(batch, least))

    def check_stored(self, batch: pa.RecordBatch) -> None:
        """Raise the errors of :meth:`put_stored`, and put nothing."""
        self._many.check_stored(batch)

    def load_staged(self, load: LoadId, segments: Sequence[Segment], loads: str = LOADS) -> Loaded:
        """Append staged segments once; see :meth:`logquarry.store.load.loading.Loads.load`."""
        if self._engine.config.is_3_1:
            raise UsageError("staged segments are loaded in dialect 4.9 only")
        self.free_room_at_close()
        self._engine.feed.adopt()
        return self._engine.loads.load(load, segments, loads)

    def free_room_at_close(self) -> None:
        """When the store is closed, free the disk space of the unused parts of the last files."""
        self._engine.files.frees_room = True

    def _last_time(self) -> int:
        """Return the store time that the log's last message had at the first call, or 0."""
        if self._found_time is None:
            self._engine.feed.adopt()
            self._found_time = last_store_timestamp(self._new_layout(), self._engine.log.max_offset)
        return self._found_time

    def append_data(self, offset: int, data: bytes | bytearray | memoryview) -> bool:
        """Append bytes of another store's log at an offset (``appendToCommitLog``).

        The method also works in a slave. The bytes may end inside a frame; then append the rest of
        that frame before any put.

        Returns:
            Whether the bytes were appended. The log must end at ``offset``, or it must be empty and
            ``offset`` must be the start of a file.

        Raises:
            StoreUnavailable: if the store was closed, or the write failed.
        """
        offset = arguments.offset(offset)
        return self._engine.feed.append_and_wake(offset, arguments.data(data, "data"))

    def log_feed(self) -> LogFeed:
        """Return the log as bytes, for :mod:`logquarry.replication`."""
        self._require_open()
        return self._engine.feed

    def flush(self) -> int:
        """Sync log, queues, index and checkpoint, in this order.

        Return the physical offset up to which the log is on the disk.

        Raises:
            StoreUnavailable: if this or an earlier sync failed.
        """
        self._require_open()
        return self._engine.flush()

    def wait_dispatched(self, offset: int | None = None, timeout: float | None = None) -> bool:
        """Wait until the messages before an offset are in queues and index.

        Args:
            offset: physical offset, such as ``result.end_offset`` (default: the log's end now).
            timeout: in seconds (default: no limit).

        Returns:
            Whether the messages are in queues and index; False after the timeout, or if the store
            was closed.

        Raises:
            StoreError: the error that prevents the dispatch of the log.
            UsageError: if a listener calls this method in the dispatcher's thread.
        """
        self._require_open()
        offset = arguments.optional(arguments.offset, offset, "offset")
        timeout = arguments.optional(arguments.seconds, timeout, "timeout")
        return self._engine.wait_dispatched(offset, timeout)

    def _make_consumers(self) -> Consumers:
        from logquarry.store.consumer.group import LostOffsets, Progress
        from logquarry.store.consumer.registry import Consumers
        from logquarry.store.consumer.source import Arrivals, QueueReader

        engine, offsets = self._engine, self._services.consumer_offsets
        has_offsets = offsets.found is not None
        lost = LostOffsets(engine.root, has_offsets=has_offsets, topics=lambda: self.topics)
        arrivals = Arrivals()
        reader = QueueReader(self, self._bulk_getter)
        made = Consumers(
            reader,
            arrivals,
            Progress(offsets, reader, lost),
            put=self.put,
            health=self._health,
            interval_ms=self.config.flush_consumer_offset_interval,
        )

        def arrived(arrival: MessageArrival) -> None:
            if arrival.topic in made.topics:
                arrivals.wake()

        engine.listeners.add(arrived)
        return made

    def _release_views(self) -> None:
        # Release the views of deleted files: a view keeps the file's disk space in use.
        self._release_bytes()
        self._live_log.close()

    # --------------------------------------------------------------------------------- services
    @property
    def _open_services(self) -> Services:
        self._require_open()
        return self._services

    def add_arrival_listener(self, listener: Callable[[MessageArrival], None]) -> None:
        """Call a function when messages can be consumed (``MessageArrivingListener``).

        The dispatcher's thread calls the function for each queue that has grown. The function must
        be quick, and must not wait for the dispatcher. The dispatcher logs the function's
        exceptions.
        """
        self._require_open()
        self._engine.listeners.add(arguments.function(listener, "listener"))

    def remove_arrival_listener(self, listener: Callable[[MessageArrival], None]) -> None:
        """Stop calling a function. Do nothing if the function was never added."""
        self._engine.listeners.remove(arguments.function(listener, "listener"))

    def retain(self, rules: RetentionRules, *, apply: bool = False) -> RetentionPlan:
        """Plan which expired files to delete; with ``apply``, delete the files. See
        docs/retention.md.

        Only files that are on the disk and in the queues are deleted. Other processes may read the
        store meanwhile. For a store that no process has open, use :func:`logquarry.retain`.

        Raises:
            StoreUnavailable: if the store is closed, or if the store accepts no writes and
                ``apply`` is given.
        """
        self._require_open()
        # Readers also import this module, but do not need these rules.
        from logquarry.store.retention.rules import require_rules

        rules = require_rules(rules)
        apply = arguments.flag(apply, "apply")
        retention = self._engine.retention
        return retention.run(rules) if apply else retention.plan(rules)

    def start_delivery(self) -> None:
        """Deliver delayed messages from now on, as a broker does, until the store is closed.

        Without this call, or ``StoreConfig(deliver_delayed=True)``, delayed messages stay in the
        schedule topic. A second call does nothing.

        Raises:
            StoreUnavailable: if the progress of delivery cannot be saved.
        """
        self._open_services.start_delivery()

    def deliver_due(self) -> int:
        """Deliver the delayed messages that are due by the store's clock; return their number.

        The delivered messages are in the log. The dispatcher adds the messages to queues later
        (:meth:`BaseWriter.wait_dispatched`).

        Raises:
            StoreUnavailable: if a message could not be put. The next call continues with that
                message.
        """
        return self._open_services.deliver_due()

    def transaction(self, message: Message, group: str = DEFAULT_PRODUCER_GROUP) -> Transaction:
        """Return a transaction; its message can be consumed only after a commit.

        ::

            with store.transaction(message) as t:
                ...                             # no consumer gets the message yet
                t.commit()

        The start of the ``with`` block puts a half message. If the transaction was not committed,
        the end of the block rolls the transaction back, with or without an exception. If a crash
        leaves a transaction open, a later check ends the transaction
        (:meth:`start_transaction_checks`).

        Args:
            message: the message. A delay is not allowed.
            group: the producer group for a broker's check, if the message has no PGROUP.

        Raises:
            UsageError: at the start of the block, if the message cannot be part of a transaction.
            StoreUnavailable: if the half message cannot be put.
            MessageRejected: if the store rejects the half message.
        """
        return self._open_services.transaction(message, group)

    def put_half(self, message: Message, group: str) -> PutFuture:
        """Put the half message of a producer's transaction (``prepareMessage``).

        The producer ends the transaction with :meth:`end_transaction`. Until the producer ends the
        transaction, a check asks about the half message, as after a crash. Arguments and errors are
        those of :meth:`transaction`.
        """
        return self._open_services.put_half(message, group)

    def end_transaction(
        self,
        physical_offset: int,
        state: TransactionState | str,
        *,
        group: str,
        queue_offset: int | None = None,
    ) -> PutFuture | None:
        """Commit or roll back the half message at a physical offset (``EndTransaction``).

        Args:
            physical_offset: where the half message starts.
            state: ``commit`` or ``rollback``.
            group: the producer group of the half message.
            queue_offset: the half message's queue offset, to check that it is the right message.

        Returns:
            The future of the put: of the message for a commit, of the op message for a rollback.
            None if the transaction has ended already.

        Raises:
            UsageError: if there is no half message of that group and queue offset.
            StoreUnavailable: if the put failed; the half message is still open.
            MessageRejected: if the store rejects the message; the half message is still open.
        """
        services = self._open_services
        queue_offset = arguments.optional(arguments.offset, queue_offset, "queue_offset")
        return services.end_transaction(physical_offset, state, group, queue_offset)

    @property
    def topic_table(self) -> TopicTable:
        """``config/topics.json``.

        Raises:
            UsageError: if the store is a slave, whose master writes that file.
        """
        return self._open_services.topic_table

    @property
    def consumer_offsets(self) -> ConsumerOffsets:
        """``config/consumerOffset.json``, shared by all consumers of this process."""
        return self._open_services.consumer_offsets

    @property
    def subscription_groups(self) -> ConfigFile[dict[str, Any]]:
        """``config/subscriptionGroup.json``. Each access makes an object, so keep the first one."""
        return self._open_services.subscription_groups

    def check_transactions(self, listener: Listener) -> CheckReport:
        """Find the open transactions, and let a function decide about each transaction.

        Args:
            listener: gets an :class:`~logquarry.store.transaction.checks.OpenTransaction`, and
                returns ``"commit"``, ``"rollback"`` or ``"unknown"``.

        Raises:
            StoreUnavailable: if a message could not be put. The next check continues with that
                message.
        """
        return self._open_services.check_transactions(listener)

    def start_transaction_checks(self, listener: Listener) -> None:
        """Check every ``transaction_check_interval`` from now on, until the store is closed.

        Raises:
            UsageError: if checks were started before.
        """
        self._open_services.start_transaction_checks(listener)

    @property
    def prepared_transactions(self) -> PreparedTransactions:
        """The transactions of dialect 3.1 (docs/dialect-3.1.md); UsageError in another dialect."""
        return self._open_services.prepared_transactions

    def config_tables(self) -> ConfigTables:
        """Return the tables that a slave copies from its master's ``config/``; else UsageError."""
        return self._open_services.config_tables

    # ------------------------------------------------------------------------------ life and state
    def close(self) -> None:
        """Close the store; a second call does nothing.

        From this call on, the store accepts no messages. The store dispatches and syncs the
        messages in its log, and then deletes ``abort``. If the dispatch or a sync fails, ``abort``
        stays, and the store logs the cause.

        Raises:
            UsageError: if a listener of the store or a callback of a put calls this method.
        """
        if not self._health.is_forked:
            # Check the thread before closing anything: a thread of the store would wait for itself.
            if self._services.is_current or self._engine.is_current:
                raise UsageError("a listener or callback cannot close the store that calls it")
            self._close_consumers()
            self._services.close()
        # A view keeps its file mapped. Release all views, so that the engine can unmap all files.
        self._release_views()
        self._engine.close()
        was_closed(self)
        self._is_open = False
        self._release_views()

    def refresh(self) -> None:
        """List the folders of ``layout`` again. Reads find new messages without this call."""
        self._require_open()
        self.layout.refresh()

    def stats(self) -> StoreStats:
        """Return this object's counts since the store was opened, and the store's state.

        After the store was closed, ``state`` is empty.
        """
        log = self._engine.log
        end = log.wrote_offset
        dispatch = max(0, end - self._engine.dispatcher.offset)
        flush = max(0, end - log.flushed_offset)
        state: StoreState | None = None
        with contextlib.suppress(StoreUnavailable):
            state = self._state.read(
                self._writer.clock,
                queues=self._queues_for_state(),
                behind=(dispatch, flush),
            )
        return self._recorder.snapshot(
            dispatch_behind=dispatch,
            flush_behind=flush,
            delays=self._services.delays,
            state=state,
        )
