"""Transactions of this process: begun with a half message, ended with a commit or a rollback.

::

    begin       half message                      nobody can get the message yet
    commit      the message itself, then an op    in this order: a crash between them leaves a half
                                                  that has ended, which the next check sees
    rollback    an op

Guarantees: a message is committed at most once by this process, and an open half message of it is
never taken for one that a crash left behind: a check that has to move it on tells its owner where
it stands then.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from logquarry.disk.service import Health, Service
from logquarry.errors import LogquarryError, StoreUnavailable, UsageError
from logquarry.format import properties as props
from logquarry.format.frame import Frame
from logquarry.message import Message
from logquarry.store.transaction.half import commit_message, frame_of, half_message, op_message
from logquarry.write.put_future import PutFuture
from logquarry.write.put_result import PutResult

logger = logging.getLogger(__name__)

Append = Callable[[Message], tuple[PutResult, PutFuture]]
"""Appends a message: where it stands, and the future of the same once flush and replica are
settled. Raises what keeps the message out of the log."""
HalfKey = tuple[int, int]
"""Queue id and queue offset of a half message."""


class TransactionState(enum.StrEnum):
    """How a transaction stands (``LocalTransactionState``)."""

    COMMIT = "commit"
    ROLLBACK = "rollback"
    UNKNOWN = "unknown"


class Transaction:
    """One message that is put for good, or not at all. Made by ``store.transaction``.

    A context manager: its half message is put at the block's beginning. At its end, a transaction
    that was neither committed nor left open is rolled back, whether by an exception or because
    nobody said anything. Once the process is gone, a check has to end it.

    Attributes:
        state: UNKNOWN until it has ended.
        half: the half message as it stands in the log, None before the block.
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
            raise UsageError("a transaction begins once")
        self._service.begin(self, self._message, self._group)
        return self

    @property
    def transaction_id(self) -> str | None:
        """Its UNIQ_KEY, the same wherever its half message is put; None before the block."""
        if self.half is None:
            return None
        return props.decode_bytes(self.half.properties).get(props.UNIQ_KEY)

    def commit(self) -> PutResult:
        """Put the message, and wait for flush and replica as it asks for.

        Returns:
            Where it stands.

        Raises:
            StoreUnavailable: if it could not be put; then the transaction is still open. Where a
                sync failed, nobody knows whether it is on the disk.
            MessageRejected: if the store does not take it.
            UsageError: if the transaction has ended, or not begun.
        """
        return self._service.end(self, TransactionState.COMMIT)

    def rollback(self) -> None:
        """End it without the message.

        Raises:
            StoreUnavailable: if that could not be noted; then the transaction is still open.
            UsageError: if it has ended, or not begun.
        """
        self._service.end(self, TransactionState.ROLLBACK)

    def leave_open(self) -> None:
        """Leave it to the checks: whether it is to be committed is not known (``UNKNOW``)."""
        self._require_open()
        self._is_over = True
        self._service.leave(self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_over:
            return
        try:
            self.rollback()
        except LogquarryError as failure:
            # It is the check's then. What the block raised, if anything, is told instead.
            logger.error("a transaction is left open: it could not be rolled back: %s", failure)
            self._is_over = True
            self._service.leave(self)
            if error is None:
                raise

    def _require_open(self) -> Frame:
        if self.half is None:
            raise UsageError("a transaction begins with the block: `with store.transaction(...)`")
        if self._is_over:
            raise UsageError("the transaction is over already")
        return self.half

    # What the service does to it, with its lock held.
    def moved(self, half: Frame) -> None:
        """Its half message stands elsewhere now."""
        self.half = half

    def require_open(self) -> Frame:
        """Its half message; UsageError unless it is open."""
        return self._require_open()

    def over(self, state: TransactionState) -> None:
        """It has ended."""
        self._is_over, self.state = True, state


class TransactionService:
    """The transactions of one open store. Any thread may use it.

    Args:
        append: puts messages.
        clock: the time, in milliseconds.
        store_host: the store's host, for messages that name none.

    Attributes:
        lock: held while a half message is ended or put back.
        live: the half messages of transactions that are in their blocks.
        ended: half messages that this process has ended, and whose op no check has met yet.
        unnoted: of those, the ones whose op could not be put.
    """

    def __init__(self, append: Append, *, clock: Callable[[], int], store_host: str) -> None:
        self._append = append
        self._clock = clock
        self._store_host = store_host
        self.lock = threading.Lock()
        self.live: dict[HalfKey, Transaction] = {}
        self.ended: set[HalfKey] = set()
        self.unnoted: list[HalfKey] = []

    def begin(self, transaction: Transaction, message: Message, group: str) -> None:
        """Put the half message of a transaction; see :meth:`Transaction.__enter__`."""
        half = half_message(message, group)
        born = self._clock() if half.born_timestamp is None else half.born_timestamp
        host = self._store_host if half.store_host is None else half.store_host
        half = Message._make(half._replace(born_timestamp=born, store_host=host))
        with self.lock:
            result, future = self._append(half)
            stands = frame_of(half, result)
            transaction.moved(stands)
            self.live[key_of(stands)] = transaction
        try:
            future.result()
        except BaseException:
            self.leave(transaction)
            raise

    def end(self, transaction: Transaction, state: TransactionState) -> PutResult:
        """End a transaction; see :meth:`Transaction.commit`."""
        with self.lock:
            half = transaction.require_open()
            future = self.end_half(half, state)
            self.live.pop(key_of(half), None)
            transaction.over(state)
        return future.result()

    def end_half(self, half: Frame, state: TransactionState) -> PutFuture:
        """End a half message, with the lock held.

        Returns:
            The put that makes the difference: the message's, or the op's of a rollback.

        Raises:
            StoreUnavailable, MessageRejected: if that could not be put: the half is open still.
        """
        is_commit = state is TransactionState.COMMIT
        key = key_of(half)
        op = op_message(*key, self._store_host, waits=not is_commit)
        if not is_commit:
            _, future = self._append(op)
        else:
            _, future = self._append(commit_message(half))
            try:
                self._append(op)
            except LogquarryError as error:
                logger.warning("that a transaction was committed is noted later: %s", error)
                self.unnoted.append(key)
        self.ended.add(key)
        return future

    def note(self, key: HalfKey) -> None:
        """Note that a half message has ended.

        Raises:
            StoreUnavailable: if that cannot be done.
        """
        self._append(op_message(*key, self._store_host, waits=False))
        self.ended.add(key)

    def leave(self, transaction: Transaction) -> None:
        """A transaction is nobody's any more, and the checks' to end."""
        with self.lock:
            if transaction.half is not None:
                self.live.pop(key_of(transaction.half), None)


def key_of(half: Frame) -> HalfKey:
    """What names a half message."""
    return half.queue_id, half.queue_offset


# --------------------------------------------------------------------------------------------------
# The thread that checks transactions (``TransactionalMessageCheckService``).


class TransactionCheckService(Service):
    """Checks at an interval; the first time after one.

    Args:
        check: does it.
        health: of the store.
        interval_ms: the pause.
    """

    def __init__(self, check: Callable[[], object], health: Health, *, interval_ms: int) -> None:
        super().__init__("transaction-check", health, interval_ms=interval_ms)
        self._check = check

    def run_once(self) -> None:
        """Check."""
        try:
            self._check()
        except StoreUnavailable as error:
            self.health.require_writable()
            logger.warning("transactions could not be checked: %s", error)
