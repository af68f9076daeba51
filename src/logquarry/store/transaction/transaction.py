"""Begins the transactions of this process, and commits them or rolls them back.

::

    begin       half message                      the message is not consumed yet
    commit      the message, then an op           in this order: after a crash between the two the
                                                  next check finds that the half has ended
    rollback    an op

This process commits a message at most once. If a check puts back a half message of a transaction
that is still in its block, the transaction continues with the copy.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Callable
from typing import Final, Self

from logquarry.disk.service import Clock, Health, Service, monotonic_ms
from logquarry.errors import LogquarryError, StoreUnavailable, UsageError
from logquarry.format import properties as props
from logquarry.format.frame import Frame
from logquarry.message import Message
from logquarry.store.transaction.half import commit_message, frame_of, half_message, op_message
from logquarry.write.put_result import PutResult
from logquarry.write.settling import PutFuture

logger = logging.getLogger(__name__)

Append = Callable[[Message], tuple[PutResult, PutFuture]]
"""Appends a message to the log.

Returns the result of the append, and a future for the result after the waits for the flush and for
a replica. Raises an error if the message was not appended.
"""
HalfKey = tuple[int, int]
"""Queue id and queue offset of a half message."""


class TransactionState(enum.StrEnum):
    """The state of a transaction (``LocalTransactionState``)."""

    COMMIT = "commit"
    ROLLBACK = "rollback"
    UNKNOWN = "unknown"


class Transaction:
    """A transaction with one message; made by ``store.transaction``.

    Only a commit puts the message into its topic. A transaction is a context manager. At the start
    of the ``with`` block, it puts the half message. When the block ends and the transaction is
    still open, it is rolled back, unless :meth:`leave_open` was called. If the process dies in the
    block, a later check of the half message ends the transaction.

    Attributes:
        state: the outcome of the transaction; UNKNOWN while it is open.
        half: the half message as it is in the log; None before the block begins.
    """

    def __init__(self, service: TransactionService, message: Message, group: str) -> None:
        self._service = service
        self._message = message
        self._group = group
        self._is_over = False
        self.state = TransactionState.UNKNOWN
        self.half: Frame | None = None

    def __enter__(self) -> Self:
        if self.half is not None:
            raise UsageError("a transaction can begin only once")
        service = self._service
        message = half_message(self._message, self._group)
        born, host = message.born_timestamp, message.store_host
        message = message._replace(
            born_timestamp=service.clock() if born is None else born,
            store_host=service.store_host if host is None else host,
        )
        with service.lock:
            result, future = service.append(message)
            self.half = frame_of(message, result)
            service.live[key_of(self.half)] = self
        try:
            future.result()
        except BaseException:
            self._leave()
            raise
        return self

    @property
    def transaction_id(self) -> str | None:
        """The UNIQ_KEY, which copies of the half message keep; None before the block begins."""
        if self.half is None:
            return None
        return props.decode_bytes(self.half.properties).get(props.UNIQ_KEY)

    def commit(self) -> PutResult:
        """Put the message. Wait for the flush and for a replica if the message requests this.

        Raises:
            StoreUnavailable: if the put failed. Then the transaction is still open. After a failed
                sync, it is unknown whether the message is on the disk.
            MessageRejected: if the store rejects the message.
            UsageError: if the transaction has ended already, or has not begun.
        """
        return self._end(TransactionState.COMMIT)

    def rollback(self) -> None:
        """End the transaction; the message is not put.

        Raises:
            StoreUnavailable: if the op message could not be put. Then the transaction is still
                open.
            UsageError: if the transaction has ended already, or has not begun.
        """
        self._end(TransactionState.ROLLBACK)

    def leave_open(self) -> None:
        """Let a later check end the transaction, because its outcome is unknown (``UNKNOW``)."""
        self._require_open()
        self._is_over = True
        self._leave()

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        if self._is_over:
            return
        try:
            self.rollback()
        except LogquarryError as failure:
            # A later check ends the transaction. If the block itself raised an exception, let that
            # one propagate instead.
            logger.error("the rollback of a transaction failed, it stays open: %s", failure)
            self._is_over = True
            self._leave()
            if error is None:
                raise

    def _end(self, state: TransactionState) -> PutResult:
        service = self._service
        with service.lock:
            half = self._require_open()
            future = service.end_half(half, state)
            service.live.pop(key_of(half), None)
            self._is_over, self.state = True, state
        return future.result()

    def _leave(self) -> None:
        """Give the transaction up in this process: a later check will end it."""
        service = self._service
        with service.lock:
            if self.half is not None:
                service.live.pop(key_of(self.half), None)

    def _require_open(self) -> Frame:
        if self.half is None:
            raise UsageError("the transaction has not begun: use `with store.transaction(...)`")
        if self._is_over:
            raise UsageError("the transaction has already ended")
        return self.half


class TransactionService:
    """The transactions of one open store. Thread-safe.

    Attributes:
        lock: held while a half message is put, committed or rolled back, and while a check puts a
            copy of a half message without asking the listener.
        live: the half messages of transactions whose ``with`` block is running.
        ended: the half messages that this process has ended, as long as no check has read their op
            messages.
        unnoted: those half messages in ``ended`` whose op message still has to be put, because its
            put failed.
    """

    def __init__(self, append: Append, *, clock: Callable[[], int], store_host: str) -> None:
        self.append = append
        self.clock = clock
        self.store_host = store_host
        self.lock = threading.Lock()
        self.live: dict[HalfKey, Transaction] = {}
        self.ended: set[HalfKey] = set()
        self.unnoted: list[HalfKey] = []

    def end_half(self, half: Frame, state: TransactionState) -> PutFuture:
        """Commit or roll back a half message; return the future of the put.

        The caller holds the lock.

        Raises:
            StoreUnavailable, MessageRejected: if the put failed. Then the half message is still
            open.
        """
        is_commit = state is TransactionState.COMMIT
        key = key_of(half)
        op = op_message(*key, self.store_host, waits=not is_commit)
        if not is_commit:
            _, future = self.append(op)
        else:
            _, future = self.append(commit_message(half))
            try:
                self.append(op)
            except LogquarryError as error:
                logger.warning("the op of a committed transaction is put later: %s", error)
                self.unnoted.append(key)
        self.ended.add(key)
        return future

    def note(self, key: HalfKey) -> None:
        """Put the op message of an ended half message."""
        self.append(op_message(*key, self.store_host, waits=False))
        self.ended.add(key)


def key_of(half: Frame) -> HalfKey:
    """Return the key that identifies a half message in this store."""
    return half.queue_id, half.queue_offset


# --------------------------------------------------------------------------------------------------
# The thread that checks transactions (``TransactionalMessageCheckService``)


_LOOK_MS: Final = 500
"""Pause, in ms, between two readings of the store's clock; short, because a test may advance it."""


class TransactionCheckService(Service):
    """Runs a check after each interval; the first check runs one interval after the start.

    An interval has ended if either the store's clock or the machine's monotonic clock shows this.
    The store's clock alone is not enough, because it may be set back.
    """

    retried = (StoreUnavailable,)

    def __init__(
        self, check: Callable[[], object], health: Health, *, interval_ms: int, clock: Clock
    ) -> None:
        super().__init__("transaction-check", health, interval_ms=min(interval_ms, _LOOK_MS))
        self._check = check
        self._pause_ms = interval_ms
        self._clocks = clock, monotonic_ms
        self._due = self._next()

    def _next(self) -> list[int]:
        return [clock() + self._pause_ms for clock in self._clocks]

    def run_once(self) -> bool:
        """Run a check if the interval has ended."""
        if all(clock() < due for clock, due in zip(self._clocks, self._due, strict=True)):
            return False
        self._due = self._next()
        self._check()
        return True
