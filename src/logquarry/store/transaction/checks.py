"""Checks transactions that are still open (``TransactionalMessageServiceImpl``).

::

    half topic   | ended | open | ended | live | open | too young ...
                 ^ progress: consumerOffset.json, group CID_RMQ_SYS_TRANS
                   -> skipped -> put back at the end, then the listener is called; then skipped

If a half message is still open, a check puts a copy of it at the end of the half topic's queue.
Then the check moves its saved progress past the old half message, and asks the listener about the
transaction. The checks follow RocketMQ, except in cases in which RocketMQ would lose messages. The
rules are:

- A check asks about a half message if the half message is older than ``transaction_time_out``. If
  the half message has the property CHECK_IMMUNITY_TIME_IN_SECONDS, the value of the property
  replaces the timeout. If a half message is too young and has this property, a check puts the half
  message back. If a half message is too young and lacks this property, the check ends there.
- The ``with`` block of a transaction can still be running (``live``) when its half message is old
  enough. A check then puts the half message back without asking.
- If a half message was checked ``transaction_check_max`` times, or is older than
  ``file_reserved_time``, it is moved to TRANS_CHECK_MAX_TIME_TOPIC. RocketMQ also counts the times
  when it puts back a half message without asking. So RocketMQ may abandon a half message about
  which it never asked.

Even after a crash, no half message is committed twice. If a half message has several copies, only
the last copy is checked. For this purpose, the first check after the store was opened searches the
log for commits and copies. The log is synced before the progress is saved. So if the progress has
moved past a half message, a power cut cannot lose its copy.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Final, NamedTuple

import numpy as np

from logquarry.config import StoreConfig
from logquarry.disk.config_file import ConsumerOffsets
from logquarry.disk.service import Clock, Health, Service, monotonic_ms
from logquarry.errors import MessageRejected, StoreUnavailable, UsageError
from logquarry.format import java, sys_flag
from logquarry.format import properties as props
from logquarry.format.arrays import POSITION
from logquarry.format.frame import Frame
from logquarry.message import Message
from logquarry.read.live_read import ServedLog
from logquarry.read.queue import Queue
from logquarry.store.transaction.transaction import (
    GROUP,
    HALF_TOPIC,
    OP_TOPIC,
    Append,
    TransactionService,
    TransactionState,
    destination,
    ended_halves,
    frame_of,
    given_up,
    put_back,
)
from logquarry.stored_message import StoredMessage
from logquarry.text import counted
from logquarry.write.put_result import PutResult

logger = logging.getLogger(__name__)

_MS: Final = 1_000
_HOUR_MS: Final = 3_600_000
_LOOK_MS: Final = 500
"""Pause (ms) between two readings of the store's clock; short, as tests may advance the clock."""

_Identity = tuple[str | None, str | None]
"""Topic and UNIQ_KEY of the message for which a half message was put."""


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """An open transaction about which a check asks the listener.

    Attributes:
        topic: topic into which a commit puts the message.
        queue_id: queue of that topic into which a commit puts the message.
        message: the half message. The half message has the body and properties of the message to
            commit.
        check_times: how often the listener was asked about this transaction, including this time.
    """

    topic: str
    queue_id: int
    message: StoredMessage
    check_times: int


Listener = Callable[[OpenTransaction], TransactionState | str]
"""A function that decides whether a transaction is committed, rolled back, or still unknown."""


@dataclass(slots=True)
class CheckReport:
    """What one check did: the number of transactions with each outcome.

    Attributes:
        unknown: transactions about which the listener was asked, but which are still open.
        put_back: half messages that were put back without asking the listener.
        given_up: half messages that were abandoned, and moved to TRANS_CHECK_MAX_TIME_TOPIC.
        noted: half messages whose transaction had already ended, but without an op message; the
            check has put the op message.
        unreadable: half messages that are damaged, and were skipped.
    """

    committed: int = 0
    rolled_back: int = 0
    unknown: int = 0
    put_back: int = 0
    given_up: int = 0
    noted: int = 0
    unreadable: int = 0


@dataclass(slots=True)
class _Round:
    """The state of one check of one queue of the half topic.

    Attributes:
        start: queue offset of the half message at which this check began.
        next: queue offset of the first half message that this check has not finished.
        ended: queue offsets of half messages at or after ``start`` that are listed in op messages.
        lasts: for the queue offset of each op message, the last half message in its list. If this
            check has passed that half message, later checks need not read the op message.
        old: queue offsets of half messages before ``start`` that are listed in op messages.
        op_start: queue offset of the op message at which this check began.
    """

    queue: Queue
    listener: Listener
    now: int
    report: CheckReport
    start: int
    next: int
    op_start: int
    ended: set[int] = field(default_factory=set)
    lasts: dict[int, int] = field(default_factory=dict)
    old: set[int] = field(default_factory=set)


@dataclass(eq=False, repr=False)
class TransactionChecks:
    """The checks of one open store. Thread-safe: a lock lets one check run at a time."""

    log: ServedLog
    append: Append
    transactions: TransactionService
    offsets: ConsumerOffsets
    _: KW_ONLY
    config: StoreConfig
    sync_log: Callable[[], object]
    broker: str

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._checker: int | None = None
        # For each queue of the half topic, the result of the first check's search of the log.
        self._before: dict[int, _Before] = {}

    def check(self, listener: Listener, now: int) -> CheckReport:
        """Check the half messages that are after the saved progress.

        If the listener raises an exception, the check logs it and leaves the transaction open.

        Raises:
            StoreUnavailable: if a put failed. The next check continues with the half message for
                which the put failed.
            UsageError: if a listener calls this method during a check.
        """
        if self._checker == threading.get_ident():
            raise UsageError("a listener cannot start a check: a check is calling it")
        report = CheckReport()
        with self._lock:
            self._checker = threading.get_ident()
            try:
                self._note_ended()
                for queue_id in self.log.queue_ids(HALF_TOPIC):
                    queue = self.log.queue(HALF_TOPIC, queue_id)
                    if queue is not None:
                        round_ = self._begin(queue, listener, now, report)
                        try:
                            self._look(round_)
                        finally:
                            self._commit(round_)
                            self.offsets.save()
            finally:
                self._checker = None
        return report

    # ---------------------------------------------------------------------------- progress
    def _note_ended(self) -> None:
        with self.transactions.lock:
            waiting = self.transactions.unnoted
            while waiting:
                self.transactions.note(waiting[-1])
                waiting.pop()

    def _begin(self, queue: Queue, listener: Listener, now: int, report: CheckReport) -> _Round:
        queue_id = queue.queue_id
        start, ops = self._known(queue), self.log.queue(OP_TOPIC, queue_id)
        op_start = 0 if ops is None else self._known(ops)
        found = _Round(queue, listener, now, report, start, start, op_start)
        if ops is None:
            return found
        for op_offset, entry in ops.entries(op_start):
            op = self.log.frame_at(entry.physical_offset)
            names = [] if op is None else ended_halves(op)
            for offset in names:
                if offset < start:
                    found.old.add(offset)
                    self.transactions.ended.discard((queue_id, offset))
                else:
                    found.ended.add(offset)
            found.lasts[op_offset] = max(names, default=-1)
        # A listed half message that is not in the queue will never be passed. Read the queue's end
        # after the op messages, because a half message is in its queue before its op message.
        end = queue.max_offset - 1
        found.lasts = {op_offset: min(last, end) for op_offset, last in found.lasts.items()}
        return found

    def _known(self, queue: Queue) -> int:
        low, high = queue.bounds()
        known = self.offsets.of(queue.topic, GROUP).get(queue.queue_id, low)
        return min(max(known, low), high)

    def _commit(self, round_: _Round) -> None:
        """Sync the log, then commit the progress, which must never be ahead of the synced log."""
        op_end, queue_id = round_.op_start, round_.queue.queue_id
        while round_.lasts.get(op_end, round_.next) < round_.next:
            op_end += 1
        has_moved = (round_.next, op_end) != (round_.start, round_.op_start)
        if not has_moved and queue_id in self.offsets.of(HALF_TOPIC, GROUP):
            return
        self.sync_log()
        self.offsets.commit(HALF_TOPIC, GROUP, queue_id, round_.next)
        self.offsets.commit(OP_TOPIC, GROUP, queue_id, op_end)

    # ------------------------------------------------------------------------------- one queue
    def _look(self, round_: _Round) -> None:
        queue_id, stop = round_.queue.queue_id, round_.queue.max_offset
        before = self._before.get(queue_id)
        if before is None:
            before = self._before[queue_id] = self._look_back(round_, stop)
        for offset in range(round_.start, stop):
            if offset in round_.ended:
                self.transactions.ended.discard((queue_id, offset))
            elif not self._pass(round_, offset, before):
                return
            round_.next = offset + 1

    def _pass(self, round_: _Round, offset: int, before: _Before) -> bool:
        """Check a half message if it is old enough; return whether the progress can pass it."""
        now, report, config = round_.now, round_.report, self.config
        half = self._half(round_.queue, offset)
        if half is None:
            report.unreadable += 1
            return True
        if offset in before.moved:
            return True
        values = props.decode_bytes(half.properties)
        first = java.digits(values.get(props.TRANSACTION_PREPARED_QUEUE_OFFSET, ""))
        age = now - half.born_timestamp
        immunity = _immunity_ms(values)
        patience = config.transaction_time_out if immunity is None else immunity
        key = round_.queue.queue_id, offset
        with self.transactions.lock:
            if key in self.transactions.ended:
                return True
            has_ended = first in round_.ended or first in round_.old
            if has_ended or half.physical_offset in before.committed:
                self.transactions.note(key)
                report.noted += 1
                return True
            owner = self.transactions.live.get(key)
            if owner is not None or (immunity is not None and age < patience):
                if owner is not None and immunity is None and 0 <= age < patience:
                    return False
                moved = self._put_back(half, first_offset=offset)
                if moved is None:
                    return False
                report.put_back += 1
                if owner is not None:
                    del self.transactions.live[key]
                    self.transactions.live[moved.queue_id, moved.queue_offset] = owner
                    owner.half = moved
                return True
        times = max(0, java.digits(values.get(props.TRANSACTION_CHECK_TIMES, "")))
        if (
            times >= self.config.transaction_check_max
            or age > self.config.file_reserved_time * _HOUR_MS
        ):
            logger.error(
                "abandoned the transaction at physical offset %d: checked %s, %d ms old",
                *(half.physical_offset, counted(times, "time"), age),
            )
            if self._append_half(half, given_up(half)) is None:
                return False
            report.given_up += 1
            return True
        if half.store_timestamp >= now or (immunity is None and 0 <= age < patience):
            return False
        moved = self._put_back(half, check_times=times + 1)
        if moved is None:
            # The store rejected the copy, so the progress cannot move past the half message until
            # its transaction has ended.
            return self._ask(round_, half, half, times + 1)
        round_.next = offset + 1
        self._ask(round_, half, moved, times + 1)
        return True

    def _put_back(
        self, half: Frame, *, check_times: int | None = None, first_offset: int | None = None
    ) -> Frame | None:
        message = put_back(half, check_times=check_times, first_offset=first_offset)
        result = self._append_half(half, message)
        return None if result is None else frame_of(message, result)

    def _append_half(self, half: Frame, message: Message) -> PutResult | None:
        """Put a copy of a half message; None if the store rejects it, for example because of its
        size.
        """
        try:
            return self.append(message)[0]
        except MessageRejected as error:
            logger.error(
                "the half message at physical offset %d cannot be copied, and blocks later ones "
                "until it is ended: %s",
                *(half.physical_offset, error),
            )
            return None

    def _ask(self, round_: _Round, half: Frame, moved: Frame, times: int) -> bool:
        """Ask the listener, and do what it decides; return whether the transaction has ended."""
        report = round_.report
        try:
            topic, queue_id = destination(half)
        except MessageRejected as error:
            logger.error("a transaction cannot be checked: %s", error)
            report.unknown += 1
            return False
        message = StoredMessage(moved, broker=self.broker)
        try:
            state = TransactionState(
                round_.listener(OpenTransaction(topic, queue_id, message, times))
            )
        except Exception:
            logger.exception("the listener failed for the transaction at %d", moved.physical_offset)
            state = TransactionState.UNKNOWN
        if state is not TransactionState.UNKNOWN:
            try:
                with self.transactions.lock:
                    self.transactions.end_half(moved, state)
            except MessageRejected as error:
                logger.error("a transaction cannot be committed: %s", error)
                state = TransactionState.UNKNOWN
        if state is TransactionState.COMMIT:
            report.committed += 1
        elif state is TransactionState.ROLLBACK:
            report.rolled_back += 1
        else:
            report.unknown += 1
        return state is not TransactionState.UNKNOWN

    def _half(self, queue: Queue, offset: int) -> Frame | None:
        for _, entry in queue.entries(offset, offset + 1):
            half = self.log.frame_at(entry.physical_offset)
            if half is not None:
                return half
            logger.error(
                "the half message at physical offset %d is damaged: it is not checked",
                entry.physical_offset,
            )
        return None

    # ------------------------------------------------------------------------- first check
    def _look_back(self, round_: _Round, stop: int) -> _Before:
        opened: dict[int, _Identity] = {}
        sound: set[int] = set()
        moved: set[int] = set()
        last: dict[object, int] = {}
        for offset in range(round_.start, stop):
            half = self._half(round_.queue, offset)
            if half is None:
                continue
            sound.add(half.physical_offset)
            values = props.decode_bytes(half.properties)
            # A half message without UNIQ_KEY has no recognisable copies, but every client sets
            # UNIQ_KEY.
            unique = values.get(props.UNIQ_KEY)
            if offset not in round_.ended:
                opened[half.physical_offset] = values.get(props.REAL_TOPIC), unique
            if unique is not None:
                same = unique, half.born_timestamp, half.body_crc, len(half.body)
                if same in last:
                    moved.add(last[same])
                last[same] = offset
        return _Before(moved, self._committed(opened, sound) if opened else set())

    def _committed(self, opened: dict[int, _Identity], sound: set[int]) -> set[int]:
        """Return the physical offsets of the half messages in ``opened`` that were committed.

        A COMMIT frame alone does not prove the commit: a copy of a committed message (sent back,
        delayed, imported) is a COMMIT frame too. The PREPAREDTRANSACTIONOFFSET of the copy may
        belong to another log. So the topic and the UNIQ_KEY of the half message must also match
        those of the COMMIT frame. A commit names a half message by its physical offset. This half
        message can be a copy that a check put, and a power cut can lose the copy but keep the
        commit. ``sound`` contains the physical offsets of the half messages that can be read. If
        the named offset is not in ``sound``, the original half message is treated as committed.
        """
        # Import late: the module imports pyarrow, which is not needed for stores without
        # transactions.
        from logquarry.log import columns

        found: set[int] = set()
        originals = {identity: at for at, identity in opened.items() if identity[1] is not None}
        for run in self.log.runs(first := min(opened)):
            values = columns.fixed_fields(
                run.window, run.rows, ["sys_flag", "prepared_transaction_offset"]
            )
            kinds = values["sys_flag"] & sys_flag.TRANSACTION_MASK
            ends = np.flatnonzero(kinds == sys_flag.TRANSACTION_COMMIT)
            places = values["prepared_transaction_offset"][ends].tolist()
            for row, place in zip(ends.tolist(), places, strict=True):
                is_lost = place > first and place not in sound
                frame = None
                if place in opened or is_lost:
                    frame = run.window.decode(int(run.rows[row, POSITION]))
                if not isinstance(frame, Frame):
                    continue
                half = originals.get(_identity(frame), place) if is_lost else place
                if half <= place < frame.physical_offset and opened.get(half) == _identity(frame):
                    found.add(half)
        return found


class _Before(NamedTuple):
    """What the log shows: the queue offsets of half messages with a later copy, and the physical
    offsets of committed half messages.
    """

    moved: set[int]
    committed: set[int]


def _identity(committed: Frame) -> _Identity:
    unique = props.decode_bytes(committed.properties).get(props.UNIQ_KEY)
    return committed.topic.decode("utf-8", java.UTF8_ERRORS), unique


def _immunity_ms(values: dict[str, str]) -> int | None:
    """Return CHECK_IMMUNITY_TIME_IN_SECONDS in ms, or None without it (``getImmunityTime``)."""
    text = values.get(props.CHECK_IMMUNITY_TIME)
    seconds = java.NO_NUMBER if text is None else java.digits(text)
    return None if seconds == java.NO_NUMBER else seconds * _MS


class TransactionCheckService(Service):
    """The thread that runs a check after each interval (``TransactionalMessageCheckService``). The
    first check runs one interval after the start.

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
