"""The writer's API for listeners, retention, delayed delivery, transactions and ``config/``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from logquarry import arguments
from logquarry.message import Message

if TYPE_CHECKING:
    from logquarry.dialect31.prepared import PreparedTransactions
    from logquarry.disk.config_file import ConfigFile, ConfigTables, ConsumerOffsets
    from logquarry.store.retention.plan import RetentionPlan
    from logquarry.store.retention.rules import RetentionRules
    from logquarry.store.services import Services
    from logquarry.store.store_engine import StoreEngine
    from logquarry.store.transaction.checks import CheckReport, Listener
    from logquarry.store.transaction.transaction import Transaction, TransactionState
    from logquarry.write.dispatcher import MessageArrival
    from logquarry.write.put_future import PutFuture
    from logquarry.write.queue_table import TopicTable

DEFAULT_PRODUCER_GROUP: Final = "logquarry"
"""The producer group of a transaction whose message has no group."""


class ServiceCalls(ABC):
    """The methods of an open store that its services carry out."""

    _services: Services
    _engine: StoreEngine

    @abstractmethod
    def _require_open(self) -> None:
        """Raise StoreUnavailable if the store was closed."""

    @property
    def _open_services(self) -> Services:
        self._require_open()
        return self._services

    def add_arrival_listener(self, listener: Callable[[MessageArrival], None]) -> None:
        """Call a function when messages can be consumed (``MessageArrivingListener``).

        The dispatcher's thread calls the function for each queue that has grown. The function must
        be quick, and must not wait for the dispatcher. Its exceptions are logged.
        """
        self._require_open()
        self._engine.listeners.add(arguments.function(listener, "listener"))

    def remove_arrival_listener(self, listener: Callable[[MessageArrival], None]) -> None:
        """Stop calling a function. Do nothing if the function was never added."""
        self._engine.listeners.remove(arguments.function(listener, "listener"))

    def retain(self, rules: RetentionRules, *, apply: bool = False) -> RetentionPlan:
        """Plan which expired files to delete; with ``apply``, delete the files. See
        docs/retention.md.

        Only files that are on the disk and in the queues are deleted. Readers of the store may
        continue. For a store that no process has open, use :func:`logquarry.retain`.

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

        The start of the block puts a half message. If the transaction was not committed, the end of
        the block rolls the transaction back, with or without an exception. If a crash leaves a
        transaction open, a later check ends the transaction (:meth:`start_transaction_checks`).

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

        The producer ends the transaction with :meth:`end_transaction`. Until then, checks treat the
        half message like a half message that a crash left open.

        Args:
            message: see :meth:`transaction`.
            group: see :meth:`transaction`.

        Raises:
            UsageError, StoreUnavailable, MessageRejected: as :meth:`transaction`.
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
