"""Transactions of RocketMQ 4.x: this module makes their messages (``TransactionalMessageBridge``),
begins the transactions of this process, commits or rolls them back, and counts open half messages.

::

    half       RMQ_SYS_TRANS_HALF_TOPIC     the waiting message; REAL_TOPIC, REAL_QID: destination
    commit     its topic and queue          the message; SYSFLAG | COMMIT, and its half's offset
    op         RMQ_SYS_TRANS_OP_HALF_TOPIC  "the half at this queue offset has ended", either way
    put back   RMQ_SYS_TRANS_HALF_TOPIC     a copy of the half, when a check found it open
    given up   TRANS_CHECK_MAX_TIME_TOPIC   a copy of the half, checked too often or too old

The SYSFLAG of a half message has no transaction type. An op message only shows that a transaction
has ended, not whether by a commit or by a rollback.

A commit puts first the message, then the op message. So after a crash between the two, the next
check finds that the half message has ended. This process commits a message at most once. If a check
puts back a half message of a transaction that is still in its block, the transaction continues with
the copy.
"""

from __future__ import annotations

import enum
import logging
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Self

from logquarry import arguments
from logquarry.config import TOPIC_CHECKS
from logquarry.errors import LogquarryError, MessageRejected, UsageError
from logquarry.format import java, sys_flag
from logquarry.format import properties as props
from logquarry.format.frame import Frame
from logquarry.format.queue_entry import QueueEntry
from logquarry.message import Message, put_again, remade
from logquarry.read.queue import Queue
from logquarry.write.message_rules import (
    given_properties,
    host_fields,
    is_timed,
    topic_bytes,
    utf8,
)
from logquarry.write.put_result import PutResult
from logquarry.write.settling import PutFuture

logger = logging.getLogger(__name__)

HALF_TOPIC: Final = "RMQ_SYS_TRANS_HALF_TOPIC"
OP_TOPIC: Final = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
GIVEN_UP_TOPIC: Final = "TRANS_CHECK_MAX_TIME_TOPIC"
GROUP: Final = "CID_RMQ_SYS_TRANS"
"""The consumer group whose committed offsets record how far the checks have advanced."""
HALF_QUEUE: Final = 0
OP_TAG: Final = "d"
OP_SEPARATOR: Final = b","
"""Separator between the half messages that one op message lists (only in RocketMQ 5)."""

_TRUE: Final = "true"
_FALSE: Final = "false"


# ------------------------------------------------------------------------------------ messages
def half_message(message: Message, group: str) -> Message:
    """Return the half message to put for a message.

    Raises:
        UsageError: if the message cannot be part of a transaction.
        MessageRejected: if the message's topic is invalid.
    """
    # The put checks only the topic and the queue id of the half message. Check the topic and the
    # queue id of the message itself here. Without this check, an invalid value would cause an error
    # only at the commit, after the caller has done its own work.
    topic_bytes(message.topic, TOPIC_CHECKS[0])
    arguments.int32(message.queue_id, "queue_id")
    if message.sys_flag & sys_flag.TRANSACTION_MASK:
        raise UsageError("a message in a transaction must not have a transaction type in sys_flag")
    values = props.decode_bytes(given_properties(message))
    if props.DELAY in values or is_timed(values):
        # Reject a delay, because RocketMQ handles it badly: its client drops the delay without an
        # error, and its store would lose the half message.
        raise UsageError("a message in a transaction cannot be delayed")
    values.setdefault(props.TRANSACTION_PREPARED, _TRUE)
    values.setdefault(props.PRODUCER_GROUP, group)
    # Copies of the half message have other offsets, but the same UNIQ_KEY. So the UNIQ_KEY
    # identifies the transaction.
    values.setdefault(props.UNIQ_KEY, uuid.uuid4().hex.upper())
    values[props.REAL_TOPIC] = message.topic
    values[props.REAL_QUEUE_ID] = str(message.queue_id)
    return message._replace(
        topic=HALF_TOPIC,
        queue_id=HALF_QUEUE,
        tags=None,
        keys=None,
        properties=values,
        properties_string=remade(values),
        wait_store_ok=True,
        prepared_transaction_offset=0,
    )


def frame_of(message: Message, result: PutResult) -> Frame:
    """Build a half message's frame from the result of its put, because the log may not be readable
    yet.
    """
    assert message.store_host is not None and message.born_timestamp is not None
    string = message.properties_string or ""
    hosts = host_fields(message.born_host, message.store_host, message.sys_flag)
    return Frame(
        topic=message.topic.encode(),
        body=arguments.as_bytes(message.body, "body"),
        properties=string if isinstance(string, bytes) else utf8(string),
        queue_id=message.queue_id,
        flag=message.flag,
        queue_offset=result.queue_offset,
        physical_offset=result.physical_offset,
        sys_flag=hosts.flags,
        born_timestamp=message.born_timestamp,
        born_host=hosts.born_host,
        store_timestamp=result.store_timestamp,
        store_host=hosts.store_host,
        reconsume_times=message.reconsume_times,
    ).with_crc()


def destination(half: Frame) -> tuple[str, int]:
    """Return topic and queue id to which a commit puts the message, or raise MessageRejected."""
    values = props.decode_bytes(half.properties)
    topic = values.get(props.REAL_TOPIC)
    queue_id = props.parse_int(values.get(props.REAL_QUEUE_ID, ""))
    if topic is None or queue_id is None:
        raise MessageRejected(
            f"the half message at {half.physical_offset} does not name its topic and queue",
            status="MESSAGE_ILLEGAL",
            reason="properties",
        )
    return topic, queue_id


def commit_message(half: Frame) -> Message:
    """Return the message that a commit puts (``endMessageTransaction``), or raise
    MessageRejected.
    """
    topic, queue_id = destination(half)
    return put_again(
        half,
        topic,
        queue_id,
        props.decode_bytes(half.properties),
        sys_flag=half.sys_flag & ~sys_flag.TRANSACTION_MASK | sys_flag.TRANSACTION_COMMIT,
        prepared_transaction_offset=half.physical_offset,
    )


def op_message(queue_id: int, queue_offset: int, host: str, *, waits: bool) -> Message:
    """Return the op message that records the end of a half message (``makeOpMessageInner``)."""
    values = {props.TAGS: OP_TAG, props.WAIT: _TRUE}
    return Message(
        OP_TOPIC,
        str(queue_offset).encode(),
        queue_id=queue_id,
        properties=values if waits else values | {props.WAIT: _FALSE},
        properties_string=remade(values),
        born_host=host,
        store_host=host,
    )


def ended_halves(op: Frame) -> list[int]:
    """Return the queue offsets of the half messages that an op message lists."""
    if props.decode_bytes(op.properties).get(props.TAGS) != OP_TAG:
        return []
    words = (java.digits(word.decode("latin-1")) for word in op.body.split(OP_SEPARATOR))
    return [offset for offset in words if offset != java.NO_NUMBER]


def put_back(
    half: Frame, *, check_times: int | None = None, first_offset: int | None = None
) -> Message:
    """Return the copy by which a check puts back a half message (``renewHalfMessageInner``).

    The copy keeps the flag and the reconsume times of the half message. RocketMQ drops them.

    Args:
        check_times: if the listener will be asked, the number of checks including this one.
        first_offset: if the listener is not asked, the half message's queue offset. The copy stores
            this offset. But if the half message already stores the offset of an original, the copy
            keeps that offset.
    """
    values = props.decode_bytes(half.properties)
    if check_times is not None:
        values[props.TRANSACTION_CHECK_TIMES] = str(check_times)
    if first_offset is not None:
        values.setdefault(props.TRANSACTION_PREPARED_QUEUE_OFFSET, str(first_offset))
    return put_again(half, HALF_TOPIC, half.queue_id, values, waits=False)


def given_up(half: Frame) -> Message:
    """Return a copy of an abandoned half message, to keep its content (``resolveDiscardMsg``)."""
    values = props.decode_bytes(half.properties)
    return put_again(half, GIVEN_UP_TOPIC, HALF_QUEUE, values, waits=False)


# -------------------------------------------------------------------- transactions of this process
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
            # A later check ends the transaction. If the block itself raised an exception, do not
            # replace that exception with the one of the failed rollback.
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
        """No longer treat the transaction as running, so that a later check ends it."""
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
        ended: the half messages that this process has ended, and whose op messages no check has
            read yet.
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


# ------------------------------------------------------------------------ open half messages
FrameAt = Callable[[int], Frame | None]
"""A function that reads the frame at a physical offset; None if it is damaged or missing."""


def ended_by(ops: Queue | None, frame_at: FrameAt, start: int) -> set[int]:
    """Return the half messages (queue offsets) that op messages from ``start`` on list as ended."""
    ended: set[int] = set()
    for _, entry in () if ops is None else ops.entries(max(start, ops.min_offset)):
        op = None if entry.is_filler else frame_at(entry.physical_offset)
        ended.update(() if op is None else ended_halves(op))
    return ended


@dataclass(slots=True)
class _Known:
    """The result of earlier reads of one queue of the half topic and of its op queue.

    Attributes:
        halves: the next queue offset to read in the half topic.
        ops: the next queue offset to read in the op topic.
        last_half, last_op: the entries directly before these offsets; None if there is none.
        open: queue offset of each open half message -> the topic of its message.
        ended: queue offsets of half messages that were not read yet, but are listed in an op
            message that was read.
    """

    halves: int = 0
    ops: int = 0
    last_half: QueueEntry | None = None
    last_op: QueueEntry | None = None
    open: dict[int, str] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)


class HalfCounter:
    """Counts open half messages by topic; each count reads only new messages. Thread-safe."""

    def __init__(self) -> None:
        self._counting = threading.Lock()
        self._queues: dict[int, _Known] = {}

    def count(
        self, queues: Iterable[Queue], frame_at: FrameAt, passed: Mapping[int, int]
    ) -> Counter[str]:
        """Count the open half messages of each topic.

        ``passed`` is the progress of the checks: for each queue, the queue offset at which the
        count starts.
        """
        by_name = {(queue.topic, queue.queue_id): queue for queue in queues}
        total: Counter[str] = Counter()
        with self._counting:
            for (topic, queue_id), queue in by_name.items():
                if topic != HALF_TOPIC:
                    continue
                ops = by_name.get((OP_TOPIC, queue_id))
                known = self._queues.get(queue_id)
                if (
                    known is None
                    or _is_another(queue, known.halves, known.last_half)
                    or _is_another(ops, known.ops, known.last_op)
                ):
                    known = self._queues[queue_id] = _Known()
                _read(known, queue, ops, frame_at)
                first = max(queue.min_offset, passed.get(queue_id, 0))
                known.open = {at: name for at, name in known.open.items() if at >= first}
                total.update(known.open.values())
        return total


def _is_another(queue: Queue | None, end: int, last: QueueEntry | None) -> bool:
    """Whether a queue's topic was deleted and recreated since the queue was read up to ``end``."""
    if queue is None:
        return False
    low, high = queue.bounds()
    return high < end or (low < end and queue.entry_before(end) != last)


def _read(known: _Known, halves: Queue, ops: Queue | None, frame_at: FrameAt) -> None:
    """Read new half messages first, then new op messages, because op messages are put later."""
    stop = halves.max_offset
    for at, entry in halves.entries(max(known.halves, halves.min_offset), stop):
        half = None if entry.is_filler else frame_at(entry.physical_offset)
        if half is not None:
            known.open[at] = props.decode_bytes(half.properties).get(props.REAL_TOPIC, "")
    known.halves, known.last_half = stop, halves.entry_before(stop)
    if ops is not None:
        end = ops.max_offset
        known.ended |= ended_by(ops, frame_at, known.ops)
        known.ops, known.last_op = end, ops.entry_before(end)
    for at in known.ended & known.open.keys():
        del known.open[at]
    known.ended = {at for at in known.ended if at >= stop}
