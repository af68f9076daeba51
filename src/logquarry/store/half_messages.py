"""Lists the transactions of a store (``info --transactions``): committed, rolled back, open.

In a store of 4.x, a half message waits in RMQ_SYS_TRANS_HALF_TOPIC. When a half message is
committed or rolled back, the broker adds an op message to RMQ_SYS_TRANS_OP_HALF_TOPIC. The op
message has the tag ``d``, and its body is the queue offset of the half message. A commit also
leaves a COMMIT frame with the half message's physical offset. While a half message is open, the
broker's checker may put a copy of it at the end of the queue; the checker then advances its own
consumer offset past the original. So if a half message is before this consumer offset and has no op
message, the checker has replaced it by a copy, or has abandoned it: after too many checks, it puts
a copy into TRANS_CHECK_MAX_TIME_TOPIC, and no op message.

In a store of 3.x, a half message is a PREPARED frame in the log, and no queue has an entry for it.
The COMMIT or ROLLBACK frame contains the physical offset of the PREPARED frame
(docs/dialect-3.1.md).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from logquarry.dialect31.open_transactions import TransactionBook, transaction_frames
from logquarry.disk.config_file import consumer_offsets
from logquarry.format import frame, java, sys_flag
from logquarry.format import properties as props
from logquarry.log import columns
from logquarry.log.batches import MessageFilter, sound_runs
from logquarry.log.walk import LogReader, Run
from logquarry.read.commit_log import CommitLog
from logquarry.read.selection import Selection, plan_read, read_in_order
from logquarry.store.reads import StoreReads
from logquarry.store.transaction.half import GROUP, HALF_TOPIC, OP_TOPIC, ended_by


@dataclass(frozen=True, slots=True)
class HalfMessage:
    """An open half message.

    For a PREPARED message of 3.x, ``queue_offset`` is its state table number.
    """

    queue_id: int
    queue_offset: int
    physical_offset: int
    topic: str
    born_timestamp: int
    store_timestamp: int
    check_times: int


@dataclass(slots=True)
class Transactions:
    """The outcomes of the half messages of a store.

    Attributes:
        committed: number of half messages that were committed, and whose committed message is in
            the log.
        rolled_back: number of half messages with an op message, but without a committed message in
            the log.
        put_back: number of half messages that the checker replaced by a copy, or stopped checking.
        open: the half messages that have not ended.
        unreadable: number of queue entries of the half topic whose message in the log is damaged or
            deleted.
    """

    committed: int = 0
    rolled_back: int = 0
    put_back: int = 0
    open: list[HalfMessage] = field(default_factory=list)
    unreadable: int = 0


def transactions(store: StoreReads) -> Transactions:
    """Read the outcomes of the half messages in a store."""
    found = _prepared(store) if store.layout.has_state_table else Transactions()
    log = CommitLog(store.layout)
    checked = consumer_offsets(store.layout).get((HALF_TOPIC, GROUP), {})
    halves: dict[int, HalfMessage] = {}
    for topic, queue_id in store.queues():
        queue = store.queue(topic, queue_id) if topic == HALF_TOPIC else None
        if queue is None:
            continue
        ended = ended_by(store.queue(OP_TOPIC, queue_id), log.sound_frame_at, 0)
        for offset, entry in queue.entries():
            if entry.is_filler:
                continue
            half = log.sound_frame_at(entry.physical_offset)
            if half is None:
                found.unreadable += 1
                continue
            message = _half(queue_id, offset, half)
            if offset in ended:
                halves[half.physical_offset] = message
            elif offset < checked.get(queue_id, 0):
                found.put_back += 1
            else:
                found.open.append(message)
    committed = _committed(store, halves)
    found.committed += len(committed)
    found.rolled_back += len(halves) - len(committed)
    return found


def _prepared(store: StoreReads) -> Transactions:
    found = Transactions()
    book = TransactionBook()
    for event in LogReader(store.layout, bound=store.bound).events():
        if not isinstance(event, Run):
            continue
        for taken in transaction_frames(event.window, event.rows):
            change = book.take(taken)
            if change is not None and change.unit is None:
                found.committed += change.state == sys_flag.TRANSACTION_COMMIT
                found.rolled_back += change.state == sys_flag.TRANSACTION_ROLLBACK
    log = CommitLog(store.layout)
    for transaction in book:
        outcome = log.sound_frame_at(transaction.physical_offset)
        if outcome is None:
            found.unreadable += 1
            continue
        found.open.append(
            HalfMessage(
                queue_id=outcome.queue_id,
                queue_offset=transaction.number,
                physical_offset=outcome.physical_offset,
                topic=outcome.topic.decode("utf-8", java.UTF8_ERRORS),
                born_timestamp=outcome.born_timestamp,
                store_timestamp=outcome.store_timestamp,
                check_times=0,
            )
        )
    return found


def _half(queue_id: int, offset: int, half: frame.Frame) -> HalfMessage:
    properties = props.decode_bytes(half.properties)
    times = properties.get(props.TRANSACTION_CHECK_TIMES, "")
    return HalfMessage(
        queue_id=queue_id,
        queue_offset=offset,
        physical_offset=half.physical_offset,
        topic=properties.get(props.REAL_TOPIC, ""),
        born_timestamp=half.born_timestamp,
        store_timestamp=half.store_timestamp,
        check_times=max(0, java.digits(times)),
    )


def _committed(store: StoreReads, halves: dict[int, HalfMessage]) -> set[int]:
    if not halves:
        return set()
    topics = frozenset(half.topic for half in halves.values())
    selection = Selection(wanted=MessageFilter(topics=topics), start_offset=min(halves))
    plan = plan_read(store.layout, selection)
    events = read_in_order(store.layout, plan)
    found: set[int] = set()
    for run in sound_runs(events, "skip"):
        values = columns.fixed_fields(
            run.window, run.rows, ["sys_flag", "prepared_transaction_offset"]
        )
        ends = values["sys_flag"] & sys_flag.TRANSACTION_MASK == sys_flag.TRANSACTION_COMMIT
        found.update(values["prepared_transaction_offset"][ends].tolist())
    return found & halves.keys()
