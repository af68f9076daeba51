"""The services of a store that is open to be written: delivery of delayed messages, transactions.

They are made when they are first asked for, get what they use by name, and end before the store
does. None of them runs by itself unless the settings say so: a store is opened to be imported
into, looked at or repaired, too, and nothing may be put into it then.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from logquarry.config import StoreConfig
from logquarry.dialect31.prepared import CheckService, PreparedTransactions
from logquarry.dialect31.state_table import StateTableKeeper
from logquarry.disk.config_file import ConfigTables, ConsumerOffsets
from logquarry.disk.disk import Disk
from logquarry.disk.service import Service
from logquarry.errors import MessageRejected, StoreUnavailable, UsageError
from logquarry.format import delay, frame
from logquarry.format.frame import Frame
from logquarry.log.batches import sound_runs
from logquarry.log.walk import Run
from logquarry.message import Message, StoredMessage
from logquarry.read.commit_log import CommitLog
from logquarry.read.consume_queue import Queue
from logquarry.read.log_queues import QueueKey
from logquarry.store.schedule.delivery import DelayedDelivery, Delays, DeliveryService, Put
from logquarry.store.schedule.progress import DelayProgress
from logquarry.store.transaction.checks import CheckReport, CheckRules, Listener, TransactionChecks
from logquarry.store.transaction.transaction import (
    Append,
    Transaction,
    TransactionCheckService,
    TransactionService,
)
from logquarry.write.put_many import PutManyResult
from logquarry.write.put_result import PutResult

if TYPE_CHECKING:
    from logquarry.log.walk import LogReader

logger = logging.getLogger(__name__)

_PATIENCE_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedStore:
    """What services use of a store.

    Attributes:
        config: its settings.
        disk: what it is on.
        folder: where it is.
        broker: its name.
        commit_log: its log, to be read at single places.
        state_table: which transactions of dialect 3.1 are open; None in another one.
        clock: the time, in milliseconds.
        log_end: where the log ends that is written.
        put: puts a message, and waits as it asks for.
        append: appends a message: where it stands, and what settles flush and replica.
        append_many: appends messages, and waits for nothing.
        queue: one queue.
        queues: topic and number of each queue.
        frame_at: the frame at a place of the log, None if none stands there.
        stored: makes of a frame what users get.
        log_reader: what follows the log.
        sync_log: brings the log to the disk.
        wait_dispatched: waits until queues and index have what is in the log.
    """

    config: StoreConfig
    disk: Disk
    folder: Path
    broker: str
    commit_log: CommitLog
    state_table: StateTableKeeper | None
    clock: Callable[[], int]
    log_end: Callable[[], int]
    put: Callable[[Message], PutResult]
    append: Append
    append_many: Callable[[Sequence[Message]], PutManyResult]
    queue: Callable[[str, int], Queue | None]
    queues: Callable[[], tuple[QueueKey, ...]]
    frame_at: Callable[[int], Frame | None]
    stored: Callable[[Frame], StoredMessage]
    log_reader: Callable[[], LogReader]
    sync_log: Callable[[], object]
    wait_dispatched: Callable[[], object]


class Services:
    """The services of one store. Any thread may use them.

    Args:
        store: the store.
    """

    def __init__(self, store: ServedStore) -> None:
        self._store = store
        self._lock = threading.RLock()
        self._threads: list[Service] = []
        self._consumer_offsets: ConsumerOffsets | None = None
        self._config_tables = ConfigTables(store.disk, store.folder, lambda: self.consumer_offsets)
        self._delivery: DelayedDelivery | None = None
        self._transactions: TransactionService | None = None
        self._checks: TransactionChecks | None = None
        self._delivering: DeliveryService | None = None
        self._checking: TransactionCheckService | None = None
        self._prepared = self._make_prepared()
        self._is_closed = False

    @property
    def consumer_offsets(self) -> ConsumerOffsets:
        """``config/consumerOffset.json``, for everybody in this process."""
        with self._lock:
            if self._consumer_offsets is None:
                store = self._store
                self._consumer_offsets = ConsumerOffsets(store.disk, store.folder, store.sync_log)
            return self._consumer_offsets

    @property
    def config_tables(self) -> ConfigTables:
        """What a slave has of its master's ``config/``.

        Raises:
            UsageError: if the store is no slave: its own services write there.
        """
        with self._lock:
            self._require_open()
        if not self._is_slave:
            raise UsageError(
                f"{self._store.folder}: its broker_role is not SLAVE: its config/ is its own"
            )
        return self._config_tables

    @property
    def _is_slave(self) -> bool:
        return self._store.config.broker_role == "SLAVE"

    # ---------------------------------------------------------------------------------- delay
    @property
    def delivery(self) -> DelayedDelivery:
        """Delivers delayed messages.

        Raises:
            StoreUnavailable: if the store is a slave, which has what its master delivers.
        """
        if self._is_slave:
            # How far that is comes from the master too, and is not to be written over.
            raise StoreUnavailable(f"{self._store.folder}: it is a slave: its master delivers")
        if self._delivery is None:
            # Not with the lock: who dispatches may call a listener that asks for a service.
            self._store.wait_dispatched()
        with self._lock:
            self._require_open()
            if self._delivery is None:
                self._delivery = self._make_delivery()
            return self._delivery

    def _make_delivery(self) -> DelayedDelivery:
        store = self._store
        progress = DelayProgress(store.disk, store.folder, store.sync_log)
        levels = store.config.delay_levels_ms
        delivery = DelayedDelivery(_DueLog(store, levels), self._deliver, levels, progress)
        # What was found in the log need not be found once more.
        delivery.save()
        return delivery

    def _deliver(self, messages: Sequence[Message]) -> Put:
        try:
            return Put(self._store.append_many(messages).message_count, None)
        except (StoreUnavailable, MessageRejected) as error:
            appended = error.appended
            return Put(0 if appended is None else appended.message_count, error)

    @property
    def delays(self) -> Mapping[str, Delays]:
        """For how long what was delivered was delayed, by topic; nothing before delivery began."""
        delivery = self._delivery
        return {} if delivery is None else delivery.delays

    def start_delivery(self) -> None:
        """Deliver from now on; nothing happens if that is done already."""
        delivery = self.delivery
        with self._lock:
            self._require_open()
            if self._delivering is None:
                store = self._store
                interval = store.config.flush_delay_offset_interval
                self._delivering = DeliveryService(
                    delivery,
                    store.disk.health,
                    clock=store.clock,
                    save_interval_ms=interval,
                )
                self._start(self._delivering)

    def deliver_due(self) -> int:
        """Deliver what is due now, and save how far that has come; how many messages."""
        delivery = self.delivery
        self._store.wait_dispatched()
        count = delivery.deliver(self._store.clock())
        delivery.save()
        return count

    # --------------------------------------------------------------------------- transactions
    @property
    def transactions(self) -> TransactionService:
        """Transactions that this process begins."""
        with self._lock:
            if self._transactions is None:
                store = self._store
                self._transactions = TransactionService(
                    store.append, clock=store.clock, store_host=store.config.store_host
                )
            return self._transactions

    @property
    def checks(self) -> TransactionChecks:
        """Looks for transactions that nobody has ended."""
        with self._lock:
            self._require_open()
            if self._checks is None:
                self._checks = self._make_checks()
            return self._checks

    def _make_checks(self) -> TransactionChecks:
        store, config = self._store, self._store.config
        return TransactionChecks(
            _HalfLog(store),
            store.append,
            self.transactions,
            self.consumer_offsets,
            rules=CheckRules(
                timeout_ms=config.transaction_time_out,
                most_checks=config.transaction_check_max,
                kept_hours=config.file_reserved_time,
            ),
            sync_log=store.sync_log,
            broker=store.broker,
        )

    def transaction(self, message: Message, group: str) -> Transaction:
        """A transaction that begins with its block."""
        if self._prepared is not None:
            raise UsageError(
                "dialect 3.1 keeps transactions in its state table: prepared_transactions.begin"
            )
        with self._lock:
            self._require_open()
            return Transaction(self.transactions, message, group)

    def check_transactions(self, listener: Listener) -> CheckReport:
        """Check once, now."""
        checks = self.checks
        self._store.wait_dispatched()
        return checks.check(listener, self._store.clock())

    def start_transaction_checks(self, listener: Listener) -> None:
        """Check from now on."""
        with self._lock:
            self._require_open()
            if self._checking is not None:
                raise UsageError("transactions are checked already")
            self._checking = TransactionCheckService(
                lambda: self.check_transactions(listener),
                self._store.disk.health,
                interval_ms=self._store.config.transaction_check_interval,
            )
            self._start(self._checking)

    # ------------------------------------------------------------- transactions of dialect 3.1
    @property
    def prepared_transactions(self) -> PreparedTransactions:
        """The transactions of dialect 3.1.

        Raises:
            UsageError: in another dialect.
        """
        if self._prepared is None:
            raise UsageError('a state table is kept only with StoreConfig(dialect="3.1")')
        return self._prepared

    def _make_prepared(self) -> PreparedTransactions | None:
        store = self._store
        if store.state_table is None:
            return None
        return PreparedTransactions(
            store.state_table,
            put=store.put,
            read=store.frame_at,
            wait_dispatched=store.wait_dispatched,
            stored=store.stored,
            clock=store.clock,
            least_age_ms=store.config.check_transaction_message_atleast_interval,
        )

    def start_prepared_checks(self) -> None:
        """Check those from now on, if there are any in this dialect: nobody asks for it."""
        if self._prepared is not None:
            interval = self._store.config.check_transaction_message_timer_interval
            health = self._store.disk.health
            with self._lock:
                self._start(CheckService(self._prepared.check, health, interval))

    # ------------------------------------------------------------------------------------- life
    def _start(self, service: Service) -> None:
        service.start()
        self._threads.append(service)

    def _require_open(self) -> None:
        if self._is_closed:
            raise StoreUnavailable(f"{self._store.folder}: the store was closed")

    @property
    def is_current(self) -> bool:
        """Whether the caller is a thread of one of the services."""
        return any(service.is_current for service in self._threads)

    def close(self) -> None:
        """End all of them, and save how far they have come; once more does nothing."""
        with self._lock:
            self._is_closed = True
            threads = self._threads[::-1]
        for service in threads:
            service.stop(_PATIENCE_SECONDS)
        if self._delivery is not None:
            try:
                self._delivery.save()
            except StoreUnavailable as error:
                logger.warning("how far delivery has come is not saved: %s", error)


class _HalfLog:
    """What checks of transactions read of a store."""

    def __init__(self, store: ServedStore) -> None:
        self._store = store
        self.queue = store.queue
        self.outcome_at = store.commit_log.outcome_at

    def queue_ids(self, topic: str) -> Iterable[int]:
        return [queue_id for name, queue_id in self._store.queues() if name == topic]

    def runs(self, start: int) -> Iterator[Run]:
        reader = self._store.log_reader()
        return sound_runs(reader.events(start, resync=True), "skip")


class _DueLog:
    """What delivery reads of a store."""

    def __init__(self, store: ServedStore, levels: Sequence[int]) -> None:
        self._store = store
        log = _HalfLog(store)
        # Looked at ten times a second. Queues of further levels are of another table of levels.
        self._queue_ids = sorted({*range(len(levels)), *log.queue_ids(delay.SCHEDULE_TOPIC)})
        self.runs: Callable[[int], Iterator[Run]] = log.runs
        self._log = store.commit_log
        self.store_time_at = store.commit_log.store_time_at

    def schedule_queues(self) -> Iterable[int]:
        return [queue_id for queue_id in self._queue_ids if queue_id >= 0]

    def schedule_queue(self, queue_id: int) -> Queue | None:
        return self._store.queue(delay.SCHEDULE_TOPIC, queue_id)

    def message(self, offset: int, size: int) -> Frame | None:
        data = self._log.frame_at(offset, size)
        found = None if data is None else frame.decode_at(data, 0, base=offset)
        return found if isinstance(found, Frame) else None

    @property
    def start(self) -> int:
        return self._store.commit_log.min_offset

    @property
    def end(self) -> int:
        return self._store.log_end()
