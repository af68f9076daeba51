"""What can be done to a store that takes messages, and what any other store answers to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final, NoReturn

from logquarry.message import Message
from logquarry.store.log_growth import LogFeed
from logquarry.store.stats import StoreStats
from logquarry.write.dispatcher import MessageArrival
from logquarry.write.put_future import PutFuture
from logquarry.write.put_many import PutManyResult
from logquarry.write.put_result import PutResult, PutStatus, refusal

if TYPE_CHECKING:
    import pyarrow as pa

    from logquarry.dialect31.prepared import PreparedTransactions
    from logquarry.disk.config_file import ConfigTables
    from logquarry.store.retention.plan import RetentionPlan
    from logquarry.store.retention.rules import RetentionRules
    from logquarry.store.transaction.checks import CheckReport, Listener
    from logquarry.store.transaction.transaction import Transaction

DEFAULT_PRODUCER_GROUP: Final = "logquarry"
"""The producer group of a transaction's message that names none."""


class WriteApi:
    """The writing half of ``DefaultMessageStore``. A store that is open for reading refuses it."""

    @property
    def root(self) -> str:
        """Path or URL of the store."""
        raise NotImplementedError

    def put(self, message: Message) -> PutResult:
        """Put one message, and wait for flush and replica as the settings and its WAIT ask for.

        Returns:
            What stands in the log: where, and whether it is on the disk and at the replica.

        Raises:
            StoreUnavailable: if the store takes no messages now. Its ``status`` is RocketMQ's.
                Where a sync failed, nobody knows whether the message is on the disk.
            MessageRejected: if it does not take this one.
        """
        self._refuse()

    def put_async(self, message: Message) -> PutFuture:
        """Put one message; waiting for flush and replica is left to the future.

        When this returns the message is in the log, in the order of the calls, or the future has
        its error. Callbacks of the future run in the thread that syncs: they must be quick.
        """
        self._refuse()

    def put_batch(
        self,
        messages: Sequence[Message] | None = None,
        *,
        wire: bytes | None = None,
        message: Message | None = None,
    ) -> PutResult:
        """Put messages of one topic and queue, all of them or none (``putMessages``).

        Args:
            messages: the messages; or else
            wire: a client's wire form of them (``MessageDecoder.encodeMessages``),
            message: and what they share; its properties are added to theirs.

        Raises:
            StoreUnavailable: as for :meth:`put`.
            MessageRejected: likewise.
            UsageError: if the messages are not of one queue.
        """
        self._refuse()

    def put_many(self, messages: Iterable[Message] | pa.RecordBatch | pa.Table) -> PutManyResult:
        """Put messages of any topics and queues, in order, in bulk.

        What comes into the log is what single puts would have written; store times are those of
        chunks of about a mebibyte, between which others put. All messages are checked before the
        first is appended. Arrow columns have the names of the fields of
        :class:`~logquarry.message.Message`; those that a reader gets and nobody chooses (offsets,
        CRC) are passed over.

        Args:
            messages: the messages, all of which are held in memory, or Arrow columns of them.

        Returns:
            Where each stands, as arrays.

        Raises:
            StoreUnavailable: as for :meth:`put`; ``appended`` tells what is in the log, None if
                nothing is.
            MessageRejected: if one is not taken: ``index`` tells which. Nothing is appended.
            UsageError: if one makes no sense. Nothing is appended.
        """
        self._refuse()

    def append_data(self, offset: int, data: bytes | memoryview) -> bool:
        """Append bytes of another store's log that belong at an offset (``appendToCommitLog``).

        A slave takes them too. They may end within a frame; its rest has to come before anything
        else is put.

        Returns:
            Whether they were taken: the log has to end at that offset, or be empty and the offset
            a file's first.

        Raises:
            StoreUnavailable: if the store was closed, or the disk does not take them.
        """
        self._refuse()

    def flush(self) -> int:
        """Bring log, queues, index and checkpoint to the disk, in this order.

        Returns:
            The physical offset up to which the log is on the disk.

        Raises:
            StoreUnavailable: if a sync failed, now or before.
        """
        self._refuse()

    def wait_dispatched(self, offset: int | None = None, timeout: float | None = None) -> bool:
        """Wait until what is in the log before an offset is in queues and index.

        Args:
            offset: physical offset, such as ``result.end_offset`` (default: all there is now).
            timeout: in seconds (default: as long as it takes).

        Returns:
            Whether it is; False where the time was over, or the store was closed.

        Raises:
            StoreError: what keeps the log from being dispatched.
            UsageError: if a listener asks, whose thread is the one that dispatches.
        """
        self._refuse()

    def add_arrival_listener(self, listener: Callable[[MessageArrival], None]) -> None:
        """Have a function told of messages that can be had (``MessageArrivingListener``).

        It is called by the thread that dispatches, for each queue that has grown: it must be
        quick, and can wait for no dispatch. What it raises is logged.
        """
        self._refuse()

    def remove_arrival_listener(self, listener: Callable[[MessageArrival], None]) -> None:
        """Tell a function no more; nothing happens if it was never added."""
        self._refuse()

    def log_feed(self) -> LogFeed:
        """The log as bytes, for replication; see :mod:`logquarry.replication`."""
        self._refuse()

    def config_tables(self) -> ConfigTables:
        """What a slave has of its master's ``config/``; see :mod:`logquarry.replication`.

        Raises:
            UsageError: if the store is no slave.
        """
        self._refuse()

    def start_delivery(self) -> None:
        """Deliver delayed messages from now on, as a broker does, until the store is closed.

        Without this, or ``StoreConfig(deliver_delayed=True)``, they stay where they are. Nothing
        happens if it was called before.

        Raises:
            StoreUnavailable: if it cannot be saved how far delivery has come.
        """
        self._refuse()

    def deliver_due(self) -> int:
        """Deliver the delayed messages whose time has come by the store's clock, now.

        Returns:
            How many there were. They are in the log; queues follow (:meth:`wait_dispatched`).

        Raises:
            StoreUnavailable: if one could not be put. The next call goes on with it.
        """
        self._refuse()

    def transaction(self, message: Message, group: str = DEFAULT_PRODUCER_GROUP) -> Transaction:
        """A transaction: a message that is put for good when it is committed.

        ::

            with store.transaction(message) as t:
                ...                             # nobody can get the message yet
                t.commit()

        The block's beginning puts a half message. At its end, what was not committed is rolled
        back, whether something was raised or not. What a crash leaves open is for a check
        (:meth:`start_transaction_checks`).

        Args:
            message: what is to be put. It cannot be delayed.
            group: the producer group that a broker would ask, where the message has no PGROUP.

        Raises:
            UsageError: at the block's beginning, if the message cannot be one of a transaction.
            StoreUnavailable: if the half message cannot be put.
            MessageRejected: likewise.
        """
        self._refuse()

    def check_transactions(self, listener: Listener) -> CheckReport:
        """Look for transactions that nobody has ended, and have a function decide, now.

        Args:
            listener: gets an :class:`~logquarry.store.transaction.checks.OpenTransaction`, and
                says ``"commit"``, ``"rollback"`` or ``"unknown"``.

        Returns:
            What was done.

        Raises:
            StoreUnavailable: if something could not be put. The next check goes on with it.
        """
        self._refuse()

    def start_transaction_checks(self, listener: Listener) -> None:
        """The same every ``transaction_check_interval`` from now on, until the store is closed.

        Raises:
            UsageError: if that was asked for before.
        """
        self._refuse()

    @property
    def prepared_transactions(self) -> PreparedTransactions:
        """The transactions of a store in dialect 3.1 (docs/dialect-3.1.md).

        Raises:
            UsageError: in another dialect.
        """
        self._refuse()

    def retain(self, rules: RetentionRules, *, apply: bool = False) -> RetentionPlan:
        """Say what would go by some rules; with ``apply`` delete it. See docs/retention.md.

        Only what is on the disk and in the queues can go. Whoever reads it may go on. For a store
        that nobody has open there is :func:`logquarry.retain`.

        Args:
            rules: what may go.
            apply: whether to delete it.

        Raises:
            StoreUnavailable: if the store is closed, or with ``apply`` takes no writes.
        """
        self._refuse()

    def stats(self) -> StoreStats:
        """What this store object did since it was opened (``StoreStatsService``)."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise refusal(
            PutStatus.SERVICE_NOT_AVAILABLE,
            f'{self.root}: it is open for reading: open it with mode="rw"',
        )
