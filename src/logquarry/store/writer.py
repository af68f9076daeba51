"""The methods of a store that is open for writing; they call ``store_engine`` and ``services``.

The code of a put is in ``SingleCalls.put``, ``CommitLogWriter.put`` and ``LogGrowth``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final, Self

from logquarry import arguments
from logquarry.arguments import Clock, now_ms
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

if TYPE_CHECKING:
    import pyarrow as pa

    from logquarry.dialect31.prepared import PreparedTransactions
    from logquarry.disk.config_file import ConfigFile, ConfigTables, ConsumerOffsets
    from logquarry.store.consumer.registry import Consumers
    from logquarry.store.load.ledger import LoadId
    from logquarry.store.load.loading import Loaded
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
    from logquarry.write.put_many import ArrowStream, PutManyResult
    from logquarry.write.queue_table import TopicTable
    from logquarry.write.settling import PutFuture


DEFAULT_PRODUCER_GROUP: Final = "logquarry"
"""The producer group of a transaction if neither the caller nor the message names one."""

# Readers also import this module, so modules that only writers need are imported in functions.


class BaseWriter(LiveStore):
    """The methods of :class:`~logquarry.store.message_store.StoreWriter`, for any thread.

    In a forked child process, every call raises StoreUnavailable.
    """

    _mode = "rw"

    def __init__(self, engine: StoreEngine, layout: StoreLayout, *, broker: str) -> None:
        from logquarry.store.services import Services
        from logquarry.store.state import StateReader

        super().__init__(engine, layout, broker=broker)
        self._found_time: int | None = None
        engine.retention.removed = self._release_views
        self._services = Services(engine, self)
        self._state = StateReader(self)
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

        The store makes all writes through ``disk`` (default: this machine's file system).
        """
        from logquarry.store.store_engine import StoreEngine

        # Use an absolute path, because the program may change its working folder while the store is
        # open.
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
        # A slave does not deliver delayed messages: its master delivers them, and the slave
        # receives the delivered messages.
        if engine.config.deliver_delayed and engine.config.broker_role != "SLAVE":
            try:
                store.start_delivery()
            except BaseException:
                store.close()
                raise
        return store

    # ------------------------------------------------------------------------------------ write
    def put_many(self, messages: Iterable[Message] | ArrowStream | pa.RecordBatch) -> PutManyResult:
        """Put many messages at once, in their order. Their topics and queues may differ.

        The log then contains the same bytes as after single puts, except that the messages of a
        chunk of about 1 MiB share one store time. Between two chunks, other threads can put
        messages. All messages are checked before the first message is appended. If ``messages`` is
        Arrow data, its columns have the names of the fields of :class:`~logquarry.message.Message`.
        Columns of values that the store sets (offsets, CRC) are ignored.

        Args:
            messages: Message objects, or any object that exports Arrow data
                (``__arrow_c_stream__``). For example, pass a table or reader of pyarrow, a
                DataFrame of Polars or pandas (2.2 or later), or a relation of DuckDB. The call
                holds all messages in memory.

        Returns:
            The offsets of all messages, as arrays.

        Raises:
            StoreUnavailable: in the same cases as :meth:`put`. The attribute ``appended`` of the
                error is the result for those messages that were appended before the error, or None.
            MessageRejected: if a message violates a rule of the store; the attribute ``index`` is
                its index, from 0. In most cases nothing is appended. But if multi-dispatch makes a
                message too large, the messages before it are appended, and ``appended`` is their
                result.
            UsageError: if a message is invalid. In this case nothing is appended.
        """
        return self._put_many(lambda: self._many.put_many(messages))

    def put_stored(self, batch: pa.RecordBatch, *, keep_times: bool = False) -> PutManyResult:
        """Put unchanged messages from another store; see :meth:`ManyWriter.put_stored`.

        With ``keep_times``, the messages keep their store times. Store times must not decrease in a
        log. A message with an earlier time gets the store time of the log's last message.
        """
        least = self._last_time() if keep_times else None
        return self._put_many(lambda: self._many.put_stored(batch, least))

    def check_stored(self, batch: pa.RecordBatch) -> None:
        """Check a batch as :meth:`put_stored` does, with the same errors, but put nothing."""
        self._many.check_stored(batch)

    def load_staged(self, load: LoadId, segments: Sequence[Segment], loads: str = LOADS) -> Loaded:
        """Append the segments of a load; see :meth:`logquarry.store.load.loading.Loads.load`."""
        if self._engine.config.is_3_1:
            raise UsageError("staged segments are loaded in dialect 4.9 only")
        self.free_room_at_close()
        self._engine.feed.adopt()
        return self._engine.loads.load(load, segments, loads)

    def free_room_at_close(self) -> None:
        """Let :meth:`close` free the unused disk space of each folder's last file."""
        self._engine.files.frees_room = True

    def _last_time(self) -> int:
        """Find the last message's store time (0 if none) once; later calls return this time."""
        if self._found_time is None:
            self._engine.feed.adopt()
            self._found_time = last_store_timestamp(self._new_layout(), self._engine.log.max_offset)
        return self._found_time

    def append_data(self, offset: int, data: bytes | bytearray | memoryview) -> bool:
        """Append bytes that were copied from another store's log (``appendToCommitLog``).

        The method also works in a slave. The bytes may end inside a frame. In this case, append the
        rest of the frame before any put.

        Returns:
            Whether the bytes were appended. The bytes are appended only if the log ends at
            ``offset``, or if the log is empty and ``offset`` is the start of a file.

        Raises:
            StoreUnavailable: if the store was closed, or the write failed.
        """
        offset = arguments.offset(offset)
        return self._engine.feed.append_and_wake(offset, arguments.data(data, "data"))

    def log_feed(self) -> LogFeed:
        """Return an object to read and append the log's bytes (:mod:`logquarry.replication`)."""
        self._require_open()
        return self._engine.feed

    def flush(self) -> int:
        """Sync the log, the queues, the index and the checkpoint, in this order.

        Return the physical offset up to which the log is synced.

        Raises:
            StoreUnavailable: if this or an earlier sync failed.
        """
        self._require_open()
        return self._engine.flush()

    def wait_dispatched(self, offset: int | None = None, timeout: float | None = None) -> bool:
        """Wait until the messages before an offset are dispatched (in queues and index).

        Args:
            offset: physical offset, such as the ``end_offset`` of a put's result (default: the
                log's end now).
            timeout: maximum wait in seconds (default: no limit).

        Returns:
            Whether the messages are dispatched; False if the timeout passed first, or if the store
            was closed.

        Raises:
            StoreError: the error that prevents the dispatch of the log.
            UsageError: if a listener calls this method. The dispatcher's thread runs the listener,
                so the thread would wait for itself.
        """
        self._require_open()
        offset = arguments.optional(arguments.offset, offset, "offset")
        timeout = arguments.optional(arguments.seconds, timeout, "timeout")
        return self._engine.wait_dispatched(offset, timeout)

    def _make_consumers(self) -> Consumers:
        from logquarry.store.consumer.offsets import LostOffsets, Progress
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
        # Release the views of deleted files, because a view keeps the file's disk space in use.
        self._release_bytes()
        self._live_log.close()

    # --------------------------------------------------------------------------------- services
    @property
    def _open_services(self) -> Services:
        self._require_open()
        return self._services

    def add_arrival_listener(self, listener: Callable[[MessageArrival], None]) -> None:
        """Call a function whenever new messages can be consumed (``MessageArrivingListener``).

        The dispatcher's thread calls the function once for each queue to which it has added
        messages. The function must return quickly, and must not wait for the dispatcher. If the
        function raises an exception, the dispatcher logs it and continues.
        """
        self._require_open()
        self._engine.listeners.add(arguments.function(listener, "listener"))

    def remove_arrival_listener(self, listener: Callable[[MessageArrival], None]) -> None:
        """Stop calling a function. Do nothing if the function was never added."""
        self._engine.listeners.remove(arguments.function(listener, "listener"))

    def retain(self, rules: RetentionRules, *, apply: bool = False) -> RetentionPlan:
        """Plan which expired files to delete; with ``apply``, also delete them.

        A log file is deleted only if it is synced and dispatched. Other processes may read the
        store meanwhile. For a store that no process has open, use :func:`logquarry.retain`.

        Raises:
            StoreNotFound: without ``apply``, if the groups' offsets cannot be read.
            StoreUnavailable: if the store is closed, or, with ``apply``, accepts no writes.
        """
        self._require_open()
        # Readers also import this module, but do not need the retention rules.
        from logquarry.store.retention.rules import require_rules

        rules, apply = require_rules(rules), arguments.flag(apply, "apply")
        retention = self._engine.retention
        return retention.run(rules, lists_unread=True) if apply else retention.plan(rules)

    def start_delivery(self) -> None:
        """Deliver delayed messages from now on, as a broker does, until the store is closed.

        Without this call, and without ``StoreConfig(deliver_delayed=True)``, delayed messages stay
        in the schedule topic. A second call does nothing.

        Raises:
            StoreUnavailable: if the progress of the delivery cannot be saved.
        """
        self._open_services.start_delivery()

    def deliver_due(self) -> int:
        """Deliver the delayed messages that are due by the store's clock; return their number.

        When the method returns, the delivered messages are in the log. The dispatcher adds them to
        their queues later (:meth:`BaseWriter.wait_dispatched`).

        Raises:
            StoreUnavailable: if a message could not be put. The next call continues with this
                message.
        """
        return self._open_services.deliver_due()

    def transaction(self, message: Message, group: str = DEFAULT_PRODUCER_GROUP) -> Transaction:
        """Return a transaction. Consumers get the transaction's message only after a commit.

        ::

            with store.transaction(message) as t:
                ...                             # no consumer gets the message yet
                t.commit()

        At the start of the ``with`` block, the transaction puts a half message, which consumers do
        not receive. If the block ends without a commit, the transaction is rolled back, even if
        there was no exception. If the process crashes in the block, a later check of the half
        message ends the transaction (:meth:`start_transaction_checks`).

        Args:
            message: the message to put at a commit. The message must not have a delay.
            group: producer group of the transaction, if the message has no property PGROUP. A
                broker asks this group how the transaction ended.

        Raises:
            UsageError: when the block begins, if the message cannot be part of a transaction.
            StoreUnavailable: if the half message cannot be put.
            MessageRejected: if the store rejects the half message.
        """
        return self._open_services.transaction(message, group)

    def put_half(self, message: Message, group: str) -> PutFuture:
        """Put the half message of a producer's transaction (``prepareMessage``).

        The producer later commits or rolls back with :meth:`end_transaction`. Until then, the
        checks treat this half message like any other open half message. The arguments and errors
        are those of :meth:`transaction`.
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
            physical_offset: physical offset of the half message.
            state: ``commit`` or ``rollback``.
            group: the producer group that the half message names.
            queue_offset: the expected queue offset of the half message. The call fails if the half
                message has another queue offset.

        Returns:
            The future of the put: a commit puts the message, and a rollback puts the op message.
            None if this process has already ended the transaction. But if a check has read the op
            message since then, a second call puts the message or op message again.

        Raises:
            UsageError: if there is no half message at ``physical_offset``, or if it has another
                group or queue offset.
            StoreUnavailable: if the put failed. Then the half message is still open.
            MessageRejected: if the store rejects the message. Then the half message is still open.
        """
        services = self._open_services
        queue_offset = arguments.optional(arguments.offset, queue_offset, "queue_offset")
        return services.end_transaction(physical_offset, state, group, queue_offset)

    @property
    def topic_table(self) -> TopicTable:
        """``config/topics.json``, the table of topics.

        Raises:
            UsageError: if the store is a slave's, because a slave copies this file from its master.
        """
        self._require_open()
        topics = self._engine.files.topics
        if topics is None:
            raise UsageError(f"{self._engine.root}: a slave gets its topics from its master")
        return topics

    @property
    def consumer_offsets(self) -> ConsumerOffsets:
        """``config/consumerOffset.json``: one object that all consumers of this process share."""
        return self._open_services.consumer_offsets

    @property
    def subscription_groups(self) -> ConfigFile:
        """``config/subscriptionGroup.json``. Each access to this property creates a new object."""
        self._require_open()
        from logquarry.disk.config_file import SUBSCRIPTION_GROUPS, ConfigFile

        return ConfigFile(self._engine.disk, self._engine.root, SUBSCRIPTION_GROUPS)

    def check_transactions(self, listener: Listener) -> CheckReport:
        """Ask a function about each open transaction that is older than its timeout.

        Args:
            listener: function that is called with an
                :class:`~logquarry.store.transaction.checks.OpenTransaction`, and returns
                ``"commit"``, ``"rollback"`` or ``"unknown"``.

        Raises:
            StoreUnavailable: if a message could not be put. The next check continues with this
                message.
        """
        return self._open_services.check_transactions(listener)

    def start_transaction_checks(self, listener: Listener) -> None:
        """Check open transactions every ``transaction_check_interval`` ms until the store is
        closed.

        Raises:
            UsageError: if the checks have already been started.
        """
        self._open_services.start_transaction_checks(listener)

    @property
    def prepared_transactions(self) -> PreparedTransactions:
        """The transactions of dialect 3.1 (docs/dialect-3.1.md); UsageError in another dialect."""
        return self._open_services.prepared_transactions

    def config_tables(self) -> ConfigTables:
        """Return the tables that a slave copies from its master; UsageError in other stores."""
        return self._open_services.config_tables

    # ------------------------------------------------------------------------------ life and state
    def close(self) -> None:
        """Close the store. A second call does nothing.

        The call first stops consumers and services, then the puts. Then the log is dispatched and
        synced, and ``abort`` is deleted. If one of these steps fails, ``abort`` is kept, and
        ``close_problem`` is the cause, which is also logged. The next opening then recovers the
        store.

        Raises:
            UsageError: if a listener of the store or a callback of a put calls this method. Its
                thread belongs to the store, and would wait for its own end.
        """
        if not self._health.is_forked:
            # Closing waits for the threads of the store, so none of these threads may close it.
            # Check the calling thread before anything is closed.
            if self._services.is_current or self._engine.is_current:
                raise UsageError("a listener or callback cannot close the store that calls it")
            self._close_consumers()
            self._services.close()
        # A file stays mapped into memory while a view of it exists. So release all views
        # before the engine unmaps the files.
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
        """Return the counts of calls since the opening, and the state (empty in a closed store)."""
        log = self._engine.log
        end = log.wrote_offset
        dispatch = max(0, end - self._engine.dispatcher.offset)
        flush = max(0, end - log.flushed_offset)
        state: StoreState | None = None
        with contextlib.suppress(StoreUnavailable):
            queues = self._queues_for_state()
            state = self._state.read(self._writer.clock, queues=queues, behind=(dispatch, flush))
        return self._recorder.snapshot(
            dispatch_behind=dispatch,
            flush_behind=flush,
            delays=self._services.delays,
            state=state,
        )
