"""Transactions in dialect 3.1: this module begins, commits, rolls back and checks transactions, and
defines the rules for their frames.

To end a transaction, this module puts a COMMIT or a ROLLBACK message, as a broker of RocketMQ 3.x
does. This message contains the physical offset of the PREPARED message. A ROLLBACK also contains
the number of the PREPARED message's entry in the state table.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from logquarry import arguments
from logquarry.config import StoreConfig
from logquarry.dialect31.open_transactions import OpenTransaction
from logquarry.dialect31.state_table import StateTableKeeper
from logquarry.disk.mapped_file import MappedFile
from logquarry.disk.service import Health, Service
from logquarry.errors import LogquarryError, StoreUnavailable, UsageError
from logquarry.format import frame, java, sys_flag
from logquarry.format import properties as props
from logquarry.format.arrays import (
    BODY_AT,
    BODY_LENGTH,
    POSITION,
    PROPS_AT,
    PROPS_LENGTH,
    TOPIC_AT,
    TOPIC_LENGTH,
)
from logquarry.format.frame import Frame
from logquarry.log.layout import StoreLayout
from logquarry.log.walk import LogReader, Run
from logquarry.message import Message, require_message
from logquarry.stored_message import StoredMessage
from logquarry.write.encode import Encoded
from logquarry.write.log_appender import AppendRules, end_file
from logquarry.write.put_result import PutResult

logger = logging.getLogger(__name__)

_FIRST_CHECK_MS: Final = 60_000
_TRUE: Final = "true"
_FRESH_TABLE: Final = 16
_MS: Final = 1_000


class TransactionEnd(Enum):
    """The outcome of a transaction."""

    COMMIT = sys_flag.TRANSACTION_COMMIT
    ROLLBACK = sys_flag.TRANSACTION_ROLLBACK


class PreparedTransaction(NamedTuple):
    """An open transaction, as a listener receives it.

    Attributes:
        number: number of the transaction's entry in the state table.
        store_seconds: store time of the PREPARED message in whole seconds.
    """

    message: StoredMessage
    number: int
    store_seconds: int
    group_hash: int

    @property
    def physical_offset(self) -> int:
        """Physical offset of the PREPARED message, which identifies the transaction."""
        return self.message.physical_offset


Listener = Callable[[PreparedTransaction], TransactionEnd | None]


class PreparedTransactions:
    """Begins, ends and checks the transactions of a store in dialect 3.1. Thread-safe.

    Args:
        read: reads the frame at a physical offset; None if there is no readable frame.
        wait_dispatched: waits until the state table has an entry for each PREPARED message of the
            log.
        stored: converts a frame to the message that a listener receives.
        clock: returns the time of the store in milliseconds.
        least_age_ms: a transaction is checked only if its PREPARED message is at least this many
            milliseconds old.
    """

    def __init__(
        self,
        table: StateTableKeeper,
        *,
        put: Callable[[Message], PutResult],
        read: Callable[[int], Frame | None],
        wait_dispatched: Callable[[], object],
        stored: Callable[[Frame], StoredMessage],
        clock: Callable[[], int],
        least_age_ms: int,
    ) -> None:
        self._table = table
        self._put = put
        self._read = read
        self._wait_dispatched = wait_dispatched
        self._stored = stored
        self._clock = clock
        self._least_age_ms = least_age_ms
        self._listener: Listener | None = None
        self._lock = threading.Lock()
        self._ending: set[int] = set()
        self._has_failed = False

    def begin(self, message: Message, group: str | None = None) -> PutResult:
        """Begin a transaction: put its PREPARED message.

        Consumers receive the message only after a commit.

        Args:
            group: the name of the producer group; by default, the value of the message's property
                PGROUP.

        Returns:
            The result of the put. Its ``physical_offset`` identifies the transaction, and its
            ``queue_offset`` is the number of the entry in the state table.

        Raises:
            StoreUnavailable, MessageRejected: if the store cannot put the message.
            UsageError: if there is no producer group.
        """
        require_message(message, "begin")
        group = arguments.optional(arguments.text, group, "group")
        values = message.all_properties()
        if group is not None:
            values[props.PRODUCER_GROUP] = group
        if not values.get(props.PRODUCER_GROUP):
            # Require a group: if a PREPARED message has none, RocketMQ 3.1.3 does not start after a
            # crash.
            raise UsageError("a transaction needs a producer group (PGROUP)")
        values[props.TRANSACTION_PREPARED] = _TRUE
        flags = message.sys_flag & ~sys_flag.TRANSACTION_MASK | sys_flag.TRANSACTION_PREPARED
        return self._put(
            message._replace(
                properties=values,
                properties_string=None,
                tags=None,
                keys=None,
                delay_level=0,
                wait_store_ok=True,
                sys_flag=flags,
            )
        )

    def open(self) -> tuple[PreparedTransaction, ...]:
        """Return the open transactions whose messages can be read, sorted by number."""
        self._wait_dispatched()
        found = (self._prepared(known) for known in self._table.open_transactions())
        return tuple(transaction for transaction in found if transaction is not None)

    def commit(self, transaction: PreparedTransaction | int) -> PutResult:
        """Commit a transaction: put its message so that consumers receive it.

        Args:
            transaction: the transaction, or the physical offset of its PREPARED message.

        Raises:
            StoreUnavailable, MessageRejected: if the store cannot put the message.
            UsageError: if the transaction is not open.
        """
        return self.end(transaction, TransactionEnd.COMMIT)

    def rollback(self, transaction: PreparedTransaction | int) -> PutResult:
        """Roll a transaction back. The arguments and errors are those of :meth:`commit`."""
        return self.end(transaction, TransactionEnd.ROLLBACK)

    def end(self, transaction: PreparedTransaction | int, end: TransactionEnd) -> PutResult:
        """Commit a transaction, or roll it back. The errors are those of :meth:`commit`."""
        arguments.instance(end, "end", TransactionEnd, "a TransactionEnd")
        if isinstance(transaction, PreparedTransaction):
            transaction = transaction.physical_offset
        takes = "a PreparedTransaction, or the physical offset of its message"
        offset = arguments.integer(transaction, "transaction", least=0, takes=takes)
        self._wait_dispatched()
        with self._lock:
            if self._has_failed:
                # An earlier call of this method has failed. That call may have appended its message
                # after the wait above began. So wait a second time. The table then shows
                # whether that message ended the transaction.
                self._wait_dispatched()
                self._has_failed = False
            # Forget the transactions that the table no longer lists as open.
            self._ending = {place for place in self._ending if self._table.find(place) is not None}
            known = self._table.find(offset)
            if known is None or offset in self._ending:
                raise UsageError(f"there is no open transaction at {offset}")
            frame = self._read(offset)
            if frame is None:
                raise UsageError(f"the message of the transaction at {offset} cannot be read")
            self._ending.add(offset)
        try:
            return self._put(_end_of(frame, known.number, end))
        except BaseException:
            # After any exception, even KeyboardInterrupt, the user can try again to end the
            # transaction. If the put did append its message, the dispatcher marks the transaction
            # as ended, and the next call waits for this.
            with self._lock:
                self._ending.discard(offset)
                self._has_failed = True
            raise

    def _prepared(self, known: OpenTransaction) -> PreparedTransaction | None:
        frame = self._read(known.physical_offset)
        if frame is None:
            # The message was deleted by the retention, or is damaged.
            return None
        return PreparedTransaction(
            self._stored(frame), known.number, known.store_seconds, known.group_hash
        )

    # ----------------------------------------------------------------------------------- check
    def set_listener(self, listener: Listener | None) -> None:
        """Set the function that each check calls for each open transaction that is old enough
        (``gotoCheck``).

        The function returns the outcome of the transaction, or None if it does not know the outcome
        yet. The function may also end the transaction with :meth:`commit` or :meth:`rollback`.
        Exceptions that the function raises are logged.
        """
        self._listener = arguments.optional(arguments.function, listener, "listener")

    def check(self) -> int:
        """Call the listener for each open transaction that is old enough.

        Return the number of calls. The store calls this method every
        ``check_transaction_message_timer_interval`` ms.
        """
        listener = self._listener
        if listener is None:
            return 0
        asked = 0
        for transaction in self.open():
            # QUIRK: RocketMQ multiplies the seconds by 1000. The product overflows, so RocketMQ
            # checks transactions of any age.
            if self._clock() - transaction.store_seconds * _MS < self._least_age_ms:
                continue
            asked += 1
            try:
                end = listener(transaction)
                if end is not None:
                    self.end(transaction, end)
            except LogquarryError as error:
                logger.error(
                    "the transaction at %d stays open: %s", transaction.physical_offset, error
                )
            except Exception:
                logger.exception(
                    "the check of the transaction at %d failed", transaction.physical_offset
                )
        return asked


def _end_of(frame: Frame, number: int, end: TransactionEnd) -> Message:
    # The message is made as in EndTransactionProcessor of RocketMQ 3.x.
    values = props.decode_bytes(frame.properties)
    order = java.hash_map_order(values, _FRESH_TABLE)
    string = props.encode({name: values[name] for name in order}, is_closed=True)
    # The put of the COMMIT or ROLLBACK must ignore DELAY and WAIT, so remove them from ``values``.
    # Both properties stay in the property string, which is stored.
    values.pop(props.DELAY, None)
    values.pop(props.WAIT, None)
    is_commit = end is TransactionEnd.COMMIT
    return Message(
        frame.topic.decode("utf-8", java.UTF8_ERRORS),
        frame.body if is_commit else b"",
        queue_id=frame.queue_id,
        properties=values,
        properties_string=string,
        flag=frame.flag,
        sys_flag=frame.sys_flag & ~sys_flag.TRANSACTION_MASK | end.value,
        queue_offset=number,
        born_timestamp=frame.born_timestamp,
        born_host=frame.born_host,
        store_host=frame.store_host,
        reconsume_times=frame.reconsume_times,
        prepared_transaction_offset=frame.physical_offset,
    )


class CheckService(Service):
    """Checks the open transactions periodically, like the timer of RocketMQ's
    ``TransactionStateService``.

    The first check runs one minute after the start.
    """

    # A check waits for the dispatcher, which tries again after an error such as a full disk.
    retried = (StoreUnavailable,)

    def __init__(self, check: Callable[[], int], health: Health, interval_ms: int) -> None:
        super().__init__("transactions", health, interval_ms=_FIRST_CHECK_MS, is_timed=True)
        self._check = check
        self._pause_ms = interval_ms

    def run_once(self) -> None:
        """Run a check of all open transactions."""
        self.interval_ms = self._pause_ms
        self._check()


# --------------------------------------------------------------------------------------------------
# The rules of ``doAppend`` in RocketMQ 3.1.3

_SYS_FLAG: Final = frame.HEAD.offsets["sys_flag"]
_QUEUE_OFFSET: Final = frame.HEAD.offsets["queue_offset"]
_PARTS: Final = ((BODY_AT, BODY_LENGTH), (TOPIC_AT, TOPIC_LENGTH), (PROPS_AT, PROPS_LENGTH))
_BLANK: Final = frame.BLANK.size


class ScratchBuffer:
    """The buffer in which RocketMQ makes frames and blanks (``msgStoreItemMemory``).

    RocketMQ never clears this buffer, so a blank contains bytes of earlier frames. This class
    reproduces these bytes.
    """

    def __init__(self, max_message_size: int) -> None:
        self._data = bytearray(max_message_size + _BLANK)

    def take(self, data: bytes | bytearray | memoryview) -> None:
        """Copy bytes to the start of the buffer. The other bytes of the buffer stay as they are."""
        size = min(len(data), len(self._data))
        self._data[:size] = data[:size]

    def take_run(self, run: Run) -> None:
        """Copy the parts of each frame that a recovery of RocketMQ reads: body, topic and
        properties.

        QUIRK: RocketMQ's recovery reads these parts into the buffer that its puts use
        (test_dialect31.py: v3-blank/reopened).
        """
        rows = run.rows
        lengths = np.stack([rows[:, length] for _, length in _PARTS], axis=1).reshape(-1)
        starts = np.stack([rows[:, POSITION] + rows[:, at] for at, _ in _PARTS], axis=1).reshape(-1)
        # RocketMQ copies each part to the start of the buffer, in the order of the log. If a later
        # part is at least as long, it overwrites the earlier part completely. So copy only the
        # parts that are longer than all later parts.
        longest = np.maximum.accumulate(lengths[::-1])[::-1]
        behind = np.append(longest[1:], 0)
        for part in np.flatnonzero(lengths > behind).tolist():
            start = int(starts[part])
            self.take(run.window.data[start : start + int(lengths[part])].tobytes())

    def blank(self, size: int) -> bytes:
        """Return the bytes of a blank of ``size`` bytes.

        If the buffer is smaller, return the whole buffer.
        """
        self.take(frame.encode_blank(size))
        return bytes(self._data[:size])


class AppendRules31(AppendRules):
    """The rules for appending to the log in dialect 3.1.

    The appender calls the methods while it holds the log's lock. A PREPARED message gets the next
    number of the state table as its QUEUEOFFSET. A ROLLBACK gets the number of its transaction.
    ``next_in_table`` returns the next number. The appender calls ``next_in_table`` only when all
    messages of the log are dispatched to the table.
    """

    def __init__(self, scratch: ScratchBuffer, next_in_table: Callable[[], int]) -> None:
        self.next_number = next_in_table()
        self._next_in_table = next_in_table
        self._scratch = scratch

    def own_offset(self, encoded: Encoded) -> int:
        """See :meth:`AppendRules.own_offset`."""
        return self.next_number if _is_prepared(encoded.data) else encoded.own_offset

    def end_file(self, file: MappedFile) -> int:
        """See :meth:`AppendRules.end_file`."""
        left = file.room
        if left < _BLANK:
            return end_file(file)
        file.buffer[file.wrote : file.wrote + left] = self._scratch.blank(left).ljust(left, b"\0")
        file.advance(left)
        return left

    def appended(self, encoded: Encoded) -> None:
        """See :meth:`AppendRules.appended`."""
        data = encoded.data
        self._scratch.take(data)
        if _is_prepared(data):
            self.next_number = int.from_bytes(data[_QUEUE_OFFSET : _QUEUE_OFFSET + 8]) + 1

    def adopted(self) -> None:
        """See :meth:`AppendRules.adopted`."""
        self.next_number = self._next_in_table()


def _is_prepared(data: bytearray) -> bool:
    flags = int.from_bytes(data[_SYS_FLAG : _SYS_FLAG + 4])
    return sys_flag.transaction_type(flags) == sys_flag.TRANSACTION_PREPARED


_READ_FILES: Final = 3
"""When RocketMQ opens a store, it reads this many of the last log files through the buffer."""


def scratch_of(root: Path, config: StoreConfig, log_end: int) -> ScratchBuffer:
    """Return the buffer with the bytes that are in it after RocketMQ has opened the store."""
    scratch = ScratchBuffer(config.max_message_size)
    layout = StoreLayout.open(root, config)
    files = [file for file in layout.commit_log.files if file.base < log_end]
    if files:
        start = files[-_READ_FILES:][0].base
        for event in LogReader(layout, bound=log_end, check_crc=False).events(start, log_end):
            if isinstance(event, Run):
                scratch.take_run(event)
    return scratch
