"""Looks for half messages that nobody has ended, and asks (``TransactionalMessageServiceImpl``).

::

    half topic   | ended | open | ended | live | open | too young ...
                 ^ progress: consumerOffset.json, group CID_RMQ_SYS_TRANS
                   -> passed  -> put back at the end, and the listener is asked; then passed

What is open at the progress offset is put back as a new half message with TRANSACTION_CHECK_TIMES
one higher before anybody is asked, so that the progress can move on. Rules are RocketMQ's, with
its order, where this does not lose anything:

- asked for is what is older than the timeout, or than its CHECK_IMMUNITY_TIME_IN_SECONDS; a half
  message with that property is put back meanwhile, others keep those behind them waiting;
- what was asked for ``most_checks`` times, or is older than messages are kept, is moved to
  TRANS_CHECK_MAX_TIME_TOPIC. (RocketMQ counts immune ones too, and gives them up unasked.)

Guarantees: whatever ended the process before, a half message that was committed is not committed
again, and one that was put back is asked for once: what the log says of it counts, until the first
check has passed what it found at the opening. Progress is saved after the log was synced, so that
it never passes a half message whose successor may be lost.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

import numpy as np

from logquarry.disk.config_file import ConsumerOffsets
from logquarry.errors import MessageRejected, UsageError
from logquarry.format import java, sys_flag
from logquarry.format import properties as props
from logquarry.format.frame import Frame, Outcome
from logquarry.format.rows import POSITION
from logquarry.log.walk import Run
from logquarry.message import Message, StoredMessage
from logquarry.read.consume_queue import Queue
from logquarry.store.transaction import half as halves
from logquarry.store.transaction.half import GROUP, HALF_TOPIC, OP_TOPIC
from logquarry.store.transaction.transaction import Append, TransactionService, TransactionState
from logquarry.write.put_result import PutResult

logger = logging.getLogger(__name__)

_MS: Final = 1_000
_HOUR_MS: Final = 3_600_000

_Identity = tuple[str | None, str | None]
"""Topic and UNIQ_KEY of the message that a half message holds back."""


class CheckRules(NamedTuple):
    """When a half message is asked for.

    Attributes:
        timeout_ms: age from which on (``transactionTimeOut``).
        most_checks: how often (``transactionCheckMax``).
        kept_hours: age above which it is given up unasked (``fileReservedTime``).
    """

    timeout_ms: int
    most_checks: int
    kept_hours: int


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """A transaction that nobody has ended, as a listener is asked for it.

    Attributes:
        topic: topic of its message.
        queue_id: its queue there.
        message: the half message, with the message's body, tags, keys and properties.
        check_times: how often it was asked for, this time included.
    """

    topic: str
    queue_id: int
    message: StoredMessage
    check_times: int


Listener = Callable[[OpenTransaction], TransactionState | str]
"""Says whether a transaction was committed, rolled back, or is not known to be either."""


@dataclass(slots=True)
class CheckReport:
    """What one check did.

    Attributes:
        committed: transactions that the listener had committed,
        rolled_back: and rolled back.
        unknown: asked for, and still open.
        put_back: put back without being asked for.
        given_up: moved to TRANS_CHECK_MAX_TIME_TOPIC.
        noted: found to have ended before a crash.
        unreadable: half messages that are damaged.
    """

    committed: int = 0
    rolled_back: int = 0
    unknown: int = 0
    put_back: int = 0
    given_up: int = 0
    noted: int = 0
    unreadable: int = 0


class HalfLog(Protocol):
    """What checks read: the queues of half and op messages, and the log."""

    def queue_ids(self, topic: str) -> Iterable[int]:
        """The queues of a topic."""

    def queue(self, topic: str, queue_id: int) -> Queue | None:
        """One of them."""

    def outcome_at(self, offset: int) -> Outcome:
        """What stands at a place of the log."""

    def runs(self, start: int) -> Iterator[Run]:
        """The frames of the log from a place on."""


@dataclass(slots=True)
class _Round:
    """One check of one queue.

    Attributes:
        start: the first half message's queue offset.
        next: of the one to look at now; what is before it is passed.
        ops: queue offset of each half that an op names -> those of the ops.
        old: halves before ``start`` that ops name.
        op_start: the first op's queue offset.
        done: queue offsets of ops that are of no use any more.
    """

    queue_id: int
    start: int
    next: int
    op_start: int
    ops: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    old: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)

    def has_ended(self, offset: int) -> bool:
        return offset in self.ops or offset in self.old


class TransactionChecks:
    """The checks of one open store. Any thread may call; one check goes on at a time.

    Args:
        log: what is read.
        append: puts messages.
        transactions: those of this process.
        offsets: where progress is kept.
        rules: when a half message is asked for.
        sync_log: brings the log to the disk.
        broker: what messages for the listener carry.
    """

    def __init__(
        self,
        log: HalfLog,
        append: Append,
        transactions: TransactionService,
        offsets: ConsumerOffsets,
        *,
        rules: CheckRules,
        sync_log: Callable[[], object],
        broker: str,
    ) -> None:
        self._log = log
        self._append = append
        self._transactions = transactions
        self._offsets = offsets
        self._rules = rules
        self._sync_log = sync_log
        self._broker = broker
        self._lock = threading.Lock()
        self._checker: int | None = None
        # Of what stood in a queue at the first check: what has ended, or goes on elsewhere.
        self._before: dict[int, _Before] = {}

    def check(self, listener: Listener, now: int) -> CheckReport:
        """Look at each half message that was not passed yet, and ask for what is due.

        What the listener raises is logged, and the transaction stays open.

        Args:
            listener: decides.
            now: the time, in milliseconds.

        Raises:
            StoreUnavailable: if something could not be put. The next check goes on from there.
            UsageError: if a listener asks for it.
        """
        if self._checker == threading.get_ident():
            raise UsageError("a listener cannot check: it is asked by a check")
        report = CheckReport()
        with self._lock:
            self._checker = threading.get_ident()
            try:
                self._note_ended()
                for queue_id in self._log.queue_ids(HALF_TOPIC):
                    queue = self._log.queue(HALF_TOPIC, queue_id)
                    if queue is not None:
                        self._check_queue(queue, queue_id, listener, now, report)
            finally:
                self._checker = None
        return report

    def _check_queue(
        self, queue: Queue, queue_id: int, listener: Listener, now: int, report: CheckReport
    ) -> None:
        round_ = self._begin(queue, queue_id)
        try:
            self._look(queue, round_, listener, now, report)
        finally:
            self._commit(round_)
            self._offsets.save()

    # ------------------------------------------------------------------------- begin and end
    def _note_ended(self) -> None:
        with self._transactions.lock:
            waiting = self._transactions.unnoted
            while waiting:
                self._transactions.note(waiting[-1])
                waiting.pop()

    def _begin(self, queue: Queue, queue_id: int) -> _Round:
        start = self._known(HALF_TOPIC, queue_id, queue)
        ops = self._log.queue(OP_TOPIC, queue_id)
        op_start = 0 if ops is None else self._known(OP_TOPIC, queue_id, ops)
        found = _Round(queue_id, start, start, op_start)
        if ops is None:
            return found
        for op_offset, entry in ops.entries(op_start):
            op = self._log.outcome_at(entry.physical_offset)
            names = halves.ended_halves(op) if isinstance(op, Frame) else []
            for offset in names:
                if offset < start:
                    found.old.add(offset)
                    self._transactions.ended.discard((queue_id, offset))
                else:
                    found.ops[offset].append(op_offset)
            if all(offset < start for offset in names):
                found.done.add(op_offset)
        return found

    def _known(self, topic: str, queue_id: int, queue: Queue) -> int:
        low, high = queue.bounds()
        return min(max(self._offsets.of(topic, GROUP).get(queue_id, low), low), high)

    def _commit(self, round_: _Round) -> None:
        """Note the progress, once nothing of it can be lost."""
        op_end = round_.op_start
        while op_end in round_.done:
            op_end += 1
        if (round_.next, op_end) == (round_.start, round_.op_start):
            known = self._offsets.of(HALF_TOPIC, GROUP)
            if round_.queue_id in known:
                return
        self._sync_log()
        self._offsets.commit(HALF_TOPIC, GROUP, round_.queue_id, round_.next)
        self._offsets.commit(OP_TOPIC, GROUP, round_.queue_id, op_end)

    # ------------------------------------------------------------------------------- one queue
    def _look(
        self, queue: Queue, round_: _Round, listener: Listener, now: int, report: CheckReport
    ) -> None:
        queue_id, stop = round_.queue_id, queue.max_offset
        before = self._before.get(queue_id)
        if before is None:
            before = self._before[queue_id] = self._look_back(queue, round_, stop)
        for offset in range(round_.start, stop):
            if offset in round_.ops:
                round_.done.update(round_.ops[offset])
                self._transactions.ended.discard((queue_id, offset))
            elif not self._pass(queue, offset, round_, before, listener, now, report):
                return
            round_.next = offset + 1

    def _pass(
        self,
        queue: Queue,
        offset: int,
        round_: _Round,
        before: _Before,
        listener: Listener,
        now: int,
        report: CheckReport,
    ) -> bool:
        """Do what is to be done about one half message; whether it need not be looked at again."""
        half = self._half(queue, offset)
        if half is None:
            report.unreadable += 1
            return True
        if offset in before.moved:
            return True
        values = props.decode_bytes(half.properties)
        first = java.digits(values.get(props.TRANSACTION_PREPARED_QUEUE_OFFSET, ""))
        age = now - half.born_timestamp
        immunity = _immunity_ms(values)
        patience = self._rules.timeout_ms if immunity is None else immunity
        key = round_.queue_id, offset
        with self._transactions.lock:
            if key in self._transactions.ended:
                return True
            if half.physical_offset in before.committed or round_.has_ended(first):
                self._transactions.note(key)
                report.noted += 1
                return True
            owner = self._transactions.live.get(key)
            if owner is not None or (immunity is not None and age < patience):
                if owner is not None and immunity is None and 0 <= age < patience:
                    return False
                moved = self._put_back(half, first_offset=offset)
                if moved is None:
                    return False
                report.put_back += 1
                if owner is not None:
                    del self._transactions.live[key]
                    self._transactions.live[moved.queue_id, moved.queue_offset] = owner
                    owner.moved(moved)
                return True
        times = max(0, java.digits(values.get(props.TRANSACTION_CHECK_TIMES, "")))
        if times >= self._rules.most_checks or age > self._rules.kept_hours * _HOUR_MS:
            logger.error(
                "the transaction at %d of the log is given up: asked for %d times, %d ms old",
                *(half.physical_offset, times, age),
            )
            if self._append_half(half, halves.given_up(half)) is None:
                return False
            report.given_up += 1
            return True
        if half.store_timestamp >= now or (immunity is None and 0 <= age < patience):
            return False
        moved = self._put_back(half, check_times=times + 1)
        if moved is None:
            # It can be ended where it stands; until then it is not passed.
            return self._ask(half, half, times + 1, listener, report)
        # Whatever comes now, the one that was put back is the one to be asked for again.
        round_.next = offset + 1
        self._ask(half, moved, times + 1, listener, report)
        return True

    def _put_back(
        self, half: Frame, *, check_times: int | None = None, first_offset: int | None = None
    ) -> Frame | None:
        """It as it stands now; None where the store does not take it."""
        message = halves.put_back(half, check_times=check_times, first_offset=first_offset)
        result = self._append_half(half, message)
        return None if result is None else halves.frame_of(message, result)

    def _append_half(self, half: Frame, message: Message) -> PutResult | None:
        """Put a half message elsewhere; None where the store does not take it.

        By smaller limits than it was put with, or for want of room for one more property.
        """
        try:
            return self._append(message)[0]
        except MessageRejected as error:
            logger.error(
                "the half message at %d of the log cannot be moved on, and keeps those behind it "
                "waiting until it is ended: %s",
                *(half.physical_offset, error),
            )
            return None

    def _ask(
        self, half: Frame, moved: Frame, times: int, listener: Listener, report: CheckReport
    ) -> bool:
        """Ask, and do what is said; whether it has ended."""
        try:
            topic, queue_id = halves.destination(half)
        except MessageRejected as error:
            logger.error("nobody can be asked for a transaction: %s", error)
            report.unknown += 1
            return False
        message = StoredMessage(moved, broker=self._broker)
        try:
            state = TransactionState(listener(OpenTransaction(topic, queue_id, message, times)))
        except Exception:
            logger.exception("the listener failed for the transaction at %d", moved.physical_offset)
            state = TransactionState.UNKNOWN
        if state is not TransactionState.UNKNOWN:
            try:
                with self._transactions.lock:
                    self._transactions.end_half(moved, state)
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
            outcome = self._log.outcome_at(entry.physical_offset)
            if isinstance(outcome, Frame):
                return outcome
            logger.error(
                "the half message at %d of the log is damaged: nobody is asked for it",
                entry.physical_offset,
            )
        return None

    # ------------------------------------------------------------------------- after a crash
    def _look_back(self, queue: Queue, round_: _Round, stop: int) -> _Before:
        """What the log says of the open half messages that are there at the first check."""
        opened: dict[int, _Identity] = {}
        moved: set[int] = set()
        last: dict[object, int] = {}
        for offset in range(round_.start, stop):
            half = self._half(queue, offset)
            if half is None:
                continue
            values = props.decode_bytes(half.properties)
            # Without a UNIQ_KEY, which every client gives them, nothing tells it from others.
            unique = values.get(props.UNIQ_KEY)
            if offset not in round_.ops:
                opened[half.physical_offset] = values.get(props.REAL_TOPIC), unique
            if unique is not None:
                same = unique, half.born_timestamp, half.body_crc, len(half.body)
                if same in last:
                    moved.add(last[same])
                last[same] = offset
        return _Before(moved, self._committed(opened) if opened else set())

    def _committed(self, opened: dict[int, _Identity]) -> set[int]:
        """Those of some half messages (by physical offset) that a committed message names.

        What was committed and is put once more (sent back by a consumer, delayed, imported) is
        still of type COMMIT, and names no place (0) or one of another log: topic and UNIQ_KEY
        have to be those of the half message, too.
        """
        from logquarry.log import columns

        found: set[int] = set()
        for run in self._log.runs(min(opened)):
            values = columns.fixed_fields(
                run.window, run.rows, ["sys_flag", "prepared_transaction_offset"]
            )
            kinds = values["sys_flag"] & sys_flag.TRANSACTION_MASK
            ends = np.flatnonzero(kinds == sys_flag.TRANSACTION_COMMIT)
            places = values["prepared_transaction_offset"][ends].tolist()
            for row, place in zip(ends.tolist(), places, strict=True):
                if place in opened and place not in found:
                    frame = run.window.decode(int(run.rows[row, POSITION]))
                    if isinstance(frame, Frame) and _identity(frame) == opened[place]:
                        found.add(place)
        return found


class _Before(NamedTuple):
    """What was found at the first check.

    Attributes:
        moved: queue offsets of half messages that were put back, and go on further behind.
        committed: physical offsets of those that were committed.
    """

    moved: set[int]
    committed: set[int]


def _identity(committed: Frame) -> _Identity:
    unique = props.decode_bytes(committed.properties).get(props.UNIQ_KEY)
    return committed.topic.decode("utf-8", java.UTF8_ERRORS), unique


def _immunity_ms(values: dict[str, str]) -> int | None:
    """CHECK_IMMUNITY_TIME_IN_SECONDS in milliseconds, None without one (``getImmunityTime``)."""
    text = values.get(props.CHECK_IMMUNITY_TIME)
    seconds = java.NO_NUMBER if text is None else java.digits(text)
    return None if seconds == java.NO_NUMBER else seconds * _MS
