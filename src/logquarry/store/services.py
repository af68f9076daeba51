"""The services of a store that is open for writing: delayed delivery, transactions, ``config/``.

A service is created when it is used for the first time, and stopped before the store is closed. No
service puts messages before a call or a setting has started it, because the store may be open only
to import messages.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Final, ParamSpec, TypeVar

from logquarry import arguments
from logquarry.dialect31.prepared import CheckService, PreparedTransactions
from logquarry.disk.config_file import (
    ConfigTables,
    ConsumerOffsets,
)
from logquarry.disk.mapped_file_queue import MappedFileQueue
from logquarry.disk.service import Service
from logquarry.errors import StoreUnavailable, UsageError
from logquarry.format import frame
from logquarry.format import properties as props
from logquarry.format.frame import Frame
from logquarry.log.batches import sound_runs
from logquarry.log.layout import StoreLayout
from logquarry.log.walk import Run
from logquarry.message import Message, require_message
from logquarry.read import timers
from logquarry.repair.audit.timer_files import timer_log_file_size
from logquarry.store.reader import LiveStore
from logquarry.store.schedule.delivery import DelayedDelivery, Delays, DeliveryService
from logquarry.store.schedule.progress import DelayProgress
from logquarry.store.schedule.timers import TimerDelivery
from logquarry.store.store_engine import StoreEngine
from logquarry.store.transaction.checks import (
    CheckReport,
    Listener,
    TransactionChecks,
    TransactionCheckService,
)
from logquarry.store.transaction.transaction import (
    HALF_TOPIC,
    Transaction,
    TransactionService,
    TransactionState,
    half_message,
    key_of,
)
from logquarry.write.settling import PutFuture

logger = logging.getLogger(__name__)

_PATIENCE_SECONDS: Final = 60.0

P = ParamSpec("P")
Part = TypeVar("Part")


class Services:
    """The services of one store. Any thread may call the methods."""

    def __init__(self, engine: StoreEngine, store: LiveStore) -> None:
        self._engine = engine
        self._store = store
        self._log = _ServedLog(store, engine.log)
        self._lock = threading.RLock()
        self._threads: list[Service] = []
        self._parts: dict[Callable[..., Any], Any] = {}
        self._made_deliveries: tuple[DelayedDelivery, TimerDelivery] | None = None
        self._delivering: DeliveryService | None = None
        self._checking: TransactionCheckService | None = None
        self._prepared = self._make_prepared()
        self._is_closed = False

    @property
    def consumer_offsets(self) -> ConsumerOffsets:
        """``config/consumerOffset.json``, shared by all consumers of this process."""
        engine = self._engine
        return self._once(ConsumerOffsets, engine.disk, engine.root, engine.sync_log)

    @property
    def config_tables(self) -> ConfigTables:
        """The tables that a slave copies from its master's ``config/``.

        Raises UsageError if the store is not a slave's.
        """
        if not self._is_slave:
            raise UsageError(
                f"{self._engine.root}: its broker_role is not SLAVE: only slaves copy config/"
            )
        engine = self._engine
        return self._once(ConfigTables, engine.disk, engine.root, lambda: self.consumer_offsets)

    @property
    def _is_slave(self) -> bool:
        return self._engine.config.broker_role == "SLAVE"

    # ---------------------------------------------------------------------------------- delay
    @property
    def deliveries(self) -> tuple[DelayedDelivery, TimerDelivery]:
        """The deliveries of delayed messages and of timer messages.

        Raises StoreUnavailable in a slave, because its master delivers the messages.
        """
        if self._is_slave:
            # A slave copies the progress of the delivery from its master, so it must not write its
            # own.
            raise StoreUnavailable(
                f"{self._engine.root}: it is a slave: its master delivers delayed messages"
            )
        if self._made_deliveries is None:
            # Do not hold the lock during this wait, because the dispatcher may call a listener that
            # needs the lock to use a service.
            self._wait_dispatched()
        with self._lock:
            self._require_open()
            if self._made_deliveries is None:
                self._made_deliveries = self._make_deliveries()
            return self._made_deliveries

    def _make_deliveries(self) -> tuple[DelayedDelivery, TimerDelivery]:
        engine, log, put = self._engine, self._log, self._store._append_many
        files = engine.disk, engine.root, engine.sync_log
        delayed = DelayedDelivery(log, put, engine.config.delay_levels_ms, DelayProgress(*files))
        # The delivery may have searched the log to find its progress. Save the progress now, so
        # that the next opening need not search again.
        delayed.save()
        layout = StoreLayout.open(engine.root, engine.config)
        check = timers.check_or_none(layout)
        return delayed, TimerDelivery(
            *(log, put, *files, timers.known_by(layout, check)),
            precision_ms=timers.precision(layout, check.read_time),
            file_size=timer_log_file_size(layout),
        )

    @property
    def delays(self) -> Mapping[str, Delays]:
        """Topic -> delays of its delivered messages; empty until the delivery is used."""
        made = self._made_deliveries
        return {} if made is None else made[0].delays

    def start_delivery(self) -> None:
        """Deliver delayed messages and timer messages from now on. A second call does nothing."""
        deliveries = self.deliveries
        with self._lock:
            self._require_open()
            if self._delivering is None:
                engine = self._engine
                self._delivering = DeliveryService(
                    deliveries,
                    engine.health,
                    clock=engine.clock,
                    dispatched=lambda: engine.dispatcher.offset,
                    save_interval_ms=engine.config.flush_delay_offset_interval,
                )
                self._start(self._delivering)

    def deliver_due(self) -> int:
        """Deliver the messages that are due now, and save the progress; return their number."""
        deliveries = self.deliveries
        self._wait_dispatched()
        now = self._engine.clock()
        count = sum(delivery.deliver(now) for delivery in deliveries)
        for delivery in deliveries:
            delivery.save()
        return count

    # --------------------------------------------------------------------------- transactions
    @property
    def transactions(self) -> TransactionService:
        """The transactions that this process has begun."""
        clock, host = self._engine.clock, self._engine.config.store_host
        return self._once(TransactionService, self._store._append, clock=clock, store_host=host)

    @property
    def checks(self) -> TransactionChecks:
        """The object that checks the transactions that are still open."""
        store = self._store
        return self._once(
            TransactionChecks,
            self._log,
            store._append,
            self.transactions,
            self.consumer_offsets,
            config=self._engine.config,
            sync_log=self._engine.sync_log,
            broker=store.broker,
        )

    def transaction(self, message: Message, group: str) -> Transaction:
        """Return a transaction, which begins when the caller enters its ``with`` block."""
        self._require_halves()
        require_message(message, "transaction")
        group = arguments.text(group, "group", takes="the name of a producer group")
        with self._lock:
            self._require_open()
            return Transaction(self.transactions, message, group)

    def check_transactions(self, listener: Listener) -> CheckReport:
        """Run one check now: ask ``listener`` about the open transactions that are old enough."""
        arguments.function(listener, "listener")
        checks = self.checks
        self._wait_dispatched()
        return checks.check(listener, self._engine.clock())

    def start_transaction_checks(self, listener: Listener) -> None:
        """Check the open transactions periodically from now on."""
        arguments.function(listener, "listener")
        with self._lock:
            self._require_open()
            if self._checking is not None:
                raise UsageError("transactions are checked already")
            self._checking = TransactionCheckService(
                lambda: self.check_transactions(listener),
                self._engine.health,
                interval_ms=self._engine.config.transaction_check_interval,
                clock=self._engine.clock,
            )
            self._start(self._checking)

    def put_half(self, message: Message, group: str) -> PutFuture:
        """Put the half message of a transaction that the producer commits or rolls back later."""
        self._require_halves()
        require_message(message, "message")
        return self._store._append(half_message(message, arguments.text(group, "group")))[1]

    def _require_halves(self) -> None:
        if self._prepared is not None:
            raise UsageError(
                "dialect 3.1 keeps transactions in its state table: prepared_transactions.begin"
            )

    def end_transaction(
        self,
        physical_offset: int,
        state: TransactionState | str,
        group: str,
        queue_offset: int | None,
    ) -> PutFuture | None:
        """Commit or roll back the half message at an offset.

        Return None if this process has already ended the transaction.
        """
        self._require_halves()
        at = arguments.offset(physical_offset, "physical_offset")
        state = TransactionState(arguments.choice(state, "state", ("commit", "rollback")))
        arguments.text(group, "group")
        half = self._store._frame_at(at)
        if half is None or half.topic != HALF_TOPIC.encode():
            raise UsageError(f"there is no half message at physical offset {physical_offset}")
        if props.decode_bytes(half.properties).get(props.PRODUCER_GROUP) != group:
            raise UsageError(
                f"the half message at physical offset {physical_offset} belongs to another group"
            )
        if queue_offset is not None and half.queue_offset != queue_offset:
            raise UsageError(
                f"the half message at physical offset {physical_offset} has the queue offset "
                f"{half.queue_offset}, not {queue_offset}"
            )
        transactions = self.transactions
        with transactions.lock:
            if key_of(half) in transactions.ended:
                return None
            return transactions.end_half(half, state)

    # ------------------------------------------------------------- transactions of dialect 3.1
    @property
    def prepared_transactions(self) -> PreparedTransactions:
        """The transactions of dialect 3.1; UsageError in another dialect."""
        if self._prepared is None:
            raise UsageError('a state table is kept only with StoreConfig(dialect="3.1")')
        return self._prepared

    def _make_prepared(self) -> PreparedTransactions | None:
        store, engine = self._store, self._engine
        table = engine.files.transactions
        if table is None:
            return None
        return PreparedTransactions(
            table,
            put=store.put,
            read=store._frame_at,
            wait_dispatched=self._wait_dispatched,
            stored=store._stored,
            clock=engine.clock,
            least_age_ms=engine.config.check_transaction_message_atleast_interval,
        )

    def start_prepared_checks(self) -> None:
        """Check the transactions of dialect 3.1 from now on; does nothing in another dialect."""
        if self._prepared is not None:
            interval = self._engine.config.check_transaction_message_timer_interval
            health = self._engine.health
            with self._lock:
                self._start(CheckService(self._prepared.check, health, interval))

    # ------------------------------------------------------------------------------------- life
    def _start(self, service: Service) -> None:
        service.start()
        self._threads.append(service)

    def _once(self, make: Callable[P, Part], *args: P.args, **named: P.kwargs) -> Part:
        with self._lock:
            self._require_open()
            if make not in self._parts:
                self._parts[make] = make(*args, **named)
            part: Part = self._parts[make]
            return part

    def _wait_dispatched(self) -> None:
        # Bytes that were copied from another store may end inside a frame. The wait below would
        # then never end, so adopt() raises an error in this case.
        self._engine.feed.adopt()
        self._engine.wait_dispatched(None, None)

    def _require_open(self) -> None:
        if self._is_closed:
            raise StoreUnavailable(f"{self._engine.root}: the store was closed")

    @property
    def is_current(self) -> bool:
        """Whether the caller is a thread of one of the services."""
        return any(service.is_current for service in self._threads)

    def close(self) -> None:
        """Stop all services, and save the deliveries' progress. A second call does nothing."""
        with self._lock:
            self._is_closed = True
            threads = self._threads[::-1]
        for service in threads:
            service.stop(_PATIENCE_SECONDS)
        if self._made_deliveries is None:
            return
        delayed, timers = self._made_deliveries
        for save in (delayed.save, partial(timers.close, self._engine.clock())):
            # If saving the progress of one delivery fails, still save that of the other delivery.
            try:
                save()
            except StoreUnavailable as error:
                logger.warning("the progress of delivery is not saved: %s", error)


class _ServedLog:
    def __init__(self, store: LiveStore, files: MappedFileQueue) -> None:
        self._store = store
        self._files = files
        self._log = log = store._live_log
        self.queue = store.queue
        self.frame_at = store._frame_at
        self.store_time_at = log.store_time_at

    def queue_ids(self, topic: str) -> Iterable[int]:
        return [queue_id for name, queue_id in self._store.queues() if name == topic]

    def message(self, offset: int, size: int) -> Frame | None:
        data = self._log.frame_at(offset, size)
        found = None if data is None else frame.decode_at(data, 0, base=offset)
        return found if isinstance(found, Frame) else None

    def runs(self, start: int) -> Iterator[Run]:
        return sound_runs(self._store._log_reader().events(start, resync=True), "skip")

    @property
    def start(self) -> int:
        return self._log.min_offset

    @property
    def end(self) -> int:
        return self._files.wrote_offset
