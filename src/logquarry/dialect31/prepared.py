"""Transactions in dialect 3.1: begin, commit, roll back and check; and the rules for their frames.

Like a broker of RocketMQ 3.x, this module puts a COMMIT or a ROLLBACK message to end a transaction.
Both messages contain the physical offset of the PREPARED message. A ROLLBACK also contains the
number of the transaction's entry in the state table.
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
from logquarry.errors import LogquarryError, UsageError
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
    """An open transaction.

    Attributes:
        number: number of the transaction's entry in the state table.
        store_seconds: store time of the PREPARED message in seconds.
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
    """The transactions of a store in dialect 3.1. Thread-safe.

    Args:
        read: reads the frame at a physical offset; None if there is no frame.
        wait_dispatched: waits until the state table has the entries of the whole log.
        stored: turns a frame into the message that users get.
        clock: returns the store's time in milliseconds.
        least_age_ms: minimum age, in milliseconds, at which a transaction is checked.
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
        """Put a PREPARED message. Consumers get the message after its commit.

        Args:
            group: the producer group; by default the message's property PGROUP.

        Returns:
            The result of the put: ``physical_offset`` identifies the transaction, ``queue_offset``
            is the number of the entry in the state table.

        Raises:
            StoreUnavailable, MessageRejected: if the store cannot put the message.
            UsageError: if there is no producer group.
        """
        require_message(message, "begin")
        arguments.optional(arguments.text, group, "group")
        values = message.all_properties()
        if group is not None:
            values[props.PRODUCER_GROUP] = group
        if not values.get(props.PRODUCER_GROUP):
            # If a PREPARED message has no producer group, RocketMQ 3.1.3 does not start after a
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
        """Return the open transactions, sorted by number, whose messages can be read."""
        self._wait_dispatched()
        found = (self._prepared(known) for known in self._table.open_transactions())
        return tuple(transaction for transaction in found if transaction is not None)

    def commit(self, transaction: PreparedTransaction | int) -> PutResult:
        """Commit a transaction: put its message to its queue.

        Args:
            transaction: the transaction, or the physical offset of its PREPARED message.

        Raises:
            StoreUnavailable, MessageRejected: if the store cannot put the message.
            UsageError: if the transaction is not open.
        """
        return self.end(transaction, TransactionEnd.COMMIT)

    def rollback(self, transaction: PreparedTransaction | int) -> PutResult:
        """Roll a transaction back. Arguments and errors are the same as for :meth:`commit`."""
        return self.end(transaction, TransactionEnd.ROLLBACK)

    def end(self, transaction: PreparedTransaction | int, end: TransactionEnd) -> PutResult:
        """Commit a transaction or roll it back. Errors are the same as for :meth:`commit`."""
        arguments.instance(end, "end", TransactionEnd, "a TransactionEnd")
        if isinstance(transaction, PreparedTransaction):
            transaction = transaction.physical_offset
        takes = "a PreparedTransaction, or the physical offset of its message"
        offset = arguments.integer(transaction, "transaction", least=0, takes=takes)
        self._wait_dispatched()
        with self._lock:
            if self._has_failed:
                # The message of the failed put may be in the log, after the offset for which this
                # call has waited.
                self._wait_dispatched()
                self._has_failed = False
            # Drop the offsets of transactions that are no longer open.
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
            # After any exception, also KeyboardInterrupt, the user may end the transaction again.
            # If the put has appended its message, the dispatcher ends the transaction in the table,
            # and the next call waits for the dispatcher.
            with self._lock:
                self._ending.discard(offset)
                self._has_failed = True
            raise

    def _prepared(self, known: OpenTransaction) -> PreparedTransaction | None:
        frame = self._read(known.physical_offset)
        if frame is None:
            # Retention has deleted the message, or the message is damaged.
            return None
        return PreparedTransaction(
            self._stored(frame), known.number, known.store_seconds, known.group_hash
        )

    # ----------------------------------------------------------------------------------- check
    def set_listener(self, listener: Listener | None) -> None:
        """Set the function that each check calls for open transactions (``gotoCheck``).

        The function returns the outcome of the transaction, or None if the outcome is not known
        yet. The function may also end the transaction itself. Errors of the function are logged.
        """
        self._listener = arguments.optional(arguments.function, listener, "listener")

    def check(self) -> int:
        """Call the listener for each open transaction that is old enough; return their number.

        The store calls this method every ``check_transaction_message_timer_interval``.
        """
        listener = self._listener
        if listener is None:
            return 0
        asked = 0
        for transaction in self.open():
            # QUIRK: in RocketMQ the seconds times 1000 overflow, so the age never prevents a check.
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
                logger.exception("checking the transaction at %d", transaction.physical_offset)
        return asked


def _end_of(frame: Frame, number: int, end: TransactionEnd) -> Message:
    # Follows EndTransactionProcessor of RocketMQ 3.x.
    values = props.decode_bytes(frame.properties)
    order = java.hash_map_order(values, _FRESH_TABLE)
    string = props.encode({name: values[name] for name in order}, is_closed=True)
    # DELAY and WAIT stay in the property string, but have no effect: a COMMIT is not delayed, and
    # its put waits like any other put.
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
    """Checks open transactions periodically (the timer of ``TransactionStateService``).

    The first check runs a minute after the start.
    """

    def __init__(self, check: Callable[[], int], health: Health, interval_ms: int) -> None:
        super().__init__("transactions", health, interval_ms=_FIRST_CHECK_MS, is_timed=True)
        self._check = check
        self._pause_ms = interval_ms

    def run_once(self) -> None:
        """Run a check."""
        self.interval_ms = self._pause_ms
        self._check()


# --------------------------------------------------------------------------------------------------
# The rules of ``doAppend`` in RocketMQ 3.1.3

_SYS_FLAG: Final = frame.HEAD.offsets["sys_flag"]
_QUEUE_OFFSET: Final = frame.HEAD.offsets["queue_offset"]
_PARTS: Final = ((BODY_AT, BODY_LENGTH), (TOPIC_AT, TOPIC_LENGTH), (PROPS_AT, PROPS_LENGTH))
_BLANK: Final = frame.BLANK.size


class ScratchBuffer:
    """The buffer for frames and blanks (``msgStoreItemMemory``).

    As in RocketMQ, the buffer keeps the bytes of earlier frames, and a blank contains these bytes.
    """

    def __init__(self, max_message_size: int) -> None:
        self._data = bytearray(max_message_size + _BLANK)

    def take(self, data: bytes | bytearray | memoryview) -> None:
        """Copy bytes to the start of the buffer; the rest of the buffer does not change."""
        size = min(len(data), len(self._data))
        self._data[:size] = data[:size]

    def take_run(self, run: Run) -> None:
        """Copy the parts of each frame that a recovery reads: body, topic and properties.

        QUIRK: RocketMQ's recovery reads these parts into this buffer (test_dialect31.py:
        v3-blank/reopened).
        """
        rows = run.rows
        lengths = np.stack([rows[:, length] for _, length in _PARTS], axis=1).reshape(-1)
        starts = np.stack([rows[:, POSITION] + rows[:, at] for at, _ in _PARTS], axis=1).reshape(-1)
        # RocketMQ copies each part to the start of the buffer. A later part that is longer
        # overwrites all bytes of an earlier part, so copy only parts that are longer than all later
        # parts.
        longest = np.maximum.accumulate(lengths[::-1])[::-1]
        behind = np.append(longest[1:], 0)
        for part in np.flatnonzero(lengths > behind).tolist():
            start = int(starts[part])
            self.take(run.window.data[start : start + int(lengths[part])].tobytes())

    def blank(self, size: int) -> bytes:
        """Return the bytes of a blank; the whole buffer if it is smaller than ``size``."""
        self.take(frame.encode_blank(size))
        return bytes(self._data[:size])


class AppendRules31(AppendRules):
    """The rules of dialect 3.1. The appender calls the rules under the log's lock.

    A PREPARED message gets the next number of the state table as QUEUEOFFSET; a ROLLBACK keeps the
    number of its transaction. ``next_in_table`` returns the table's next number; it is called only
    while the table has all messages of the log.
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
"""Number of log files that RocketMQ reads through the buffer when it opens a store."""


def scratch_of(root: Path, config: StoreConfig, log_end: int) -> ScratchBuffer:
    """Return the frame buffer with the bytes that RocketMQ's recovery leaves in the buffer."""
    scratch = ScratchBuffer(config.max_message_size)
    layout = StoreLayout.open(root, config)
    files = [file for file in layout.commit_log.files if file.base < log_end]
    if files:
        start = files[-_READ_FILES:][0].base
        for event in LogReader(layout, bound=log_end, check_crc=False).events(start, log_end):
            if isinstance(event, Run):
                scratch.take_run(event)
    return scratch
