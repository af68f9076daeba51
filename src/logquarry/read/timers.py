"""Finds the timer messages of RocketMQ 5 that are not delivered yet. The search reads the log. The
module can also count these messages with the timer wheel.

A timer message waits in the topic ``rmq_sys_wheel_timer`` until its time. The log and the queue of
this topic show which messages wait, even if the timer's own files are older than the log. Of the
timer's own files, the search reads only ``config/timercheck``::

    queue of rmq_sys_wheel_timer    a  b  c  d  e  f
                                             ^ timercheck.queue_offset: a, b and c are in the wheel
    in the wheel, slot before timercheck.read_time        was delivered
    put back into the queue (TIMER_ROLL_TIMES)            its later copy waits
    its delivered copy is in the log                      was delivered
    deleted by TIMER_DEL_UNIQKEY with the same slot       neither is delivered
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar

import numpy as np

from logquarry.errors import CorruptFile, UnreadableFile
from logquarry.format import java, timer
from logquarry.format import properties as props
from logquarry.format.arrays import Bools, Records
from logquarry.format.frame import Frame
from logquarry.format.queue_entry import QueueEntry
from logquarry.format.timer import TimerCheck
from logquarry.log.codec import first_frames
from logquarry.log.layout import StoreLayout
from logquarry.log.store_files import CONFIG
from logquarry.log.walk import LogReader, Run
from logquarry.read.commit_log import CommitLog
from logquarry.read.log_queues import QueueBuilder
from logquarry.read.queue import ConsumeQueue, Queue
from logquarry.read.rocksdb_queue import RocksQueue, derived_queues, rocksdb_folders
from logquarry.text import counted

CHECK: Final = f"{CONFIG}/{timer.CHECK_FILE}"
QUEUE_ID: Final = 0
_CLOCK_SLACK_MS: Final = 60_000
"""Milliseconds by which the broker's clock may have been set back between two messages."""

K = TypeVar("K", bytes, str)

_TOPIC: Final = timer.TOPIC.encode()
_CHANGES: Final = frozenset(
    (
        *(props.TIMER_ENQUEUE_MS, props.TIMER_DEQUEUE_MS, props.TIMER_ROLL_TIMES),
        *(props.REAL_TOPIC, props.REAL_QUEUE_ID, props.WAIT),
        *(props.INNER_MULTI_QUEUE_OFFSET, props.CRC_PREFIX[:-1].decode()),
    )
)
"""Properties that may differ between a timer message and the copy that the broker delivers."""


class Timer(NamedTuple):
    """A timer message that waits for its delivery time.

    Attributes:
        slot_time: time of the message's slot in the timer wheel (TIMER_OUT_MS), in ms since 1970.
            The broker delivers the message after the end of the slot.
        queue_offset: queue offset in ``rmq_sys_wheel_timer``.
        topic, queue_id: the queue to which the message will be delivered.
        rolled: how often the broker has put the message back into its queue (TIMER_ROLL_TIMES),
            because its time was too far away for the wheel.
        deletes: TIMER_DEL_UNIQKEY, the key of another message; the broker then delivers neither of
            the two messages.
    """

    slot_time: int
    queue_offset: int
    physical_offset: int
    size: int
    topic: str
    queue_id: int
    uniq_key: str | None
    keys: str | None
    rolled: int
    deletes: str | None
    store_timestamp: int


def timer_of(frame: Frame, queue_offset: int) -> Timer | None:
    """Decode a message of ``rmq_sys_wheel_timer``; None if it can never be delivered."""
    values = props.decode_bytes(frame.properties)
    out = java.digits(values.get(props.TIMER_OUT_MS, ""))
    topic = values.get(props.REAL_TOPIC)
    queue_id = props.parse_int(values.get(props.REAL_QUEUE_ID, ""))
    if frame.topic != _TOPIC or out == java.NO_NUMBER or topic is None or queue_id is None:
        return None
    return Timer(
        out,
        queue_offset,
        frame.physical_offset,
        frame.size,
        topic,
        queue_id,
        values.get(props.UNIQ_KEY),
        values.get(props.KEYS),
        props.parse_int(values.get(props.TIMER_ROLL_TIMES, "")) or 0,
        values.get(props.TIMER_DELETE_UNIQ_KEY),
        frame.store_timestamp,
    )


class Timers:
    """The timer messages that still wait in one store; ``waiting`` maps queue offsets to them.

    ``done`` has the slot times of the messages that wait no longer, by queue offset. ``stop`` is
    the queue offset after the last message that was added.
    """

    def __init__(self) -> None:
        self.done: dict[int, int] = {}
        self.stop = 0
        self.last: QueueEntry | None = None
        self.waiting: dict[int, Timer] = {}
        self._same: dict[bytes, list[int]] = {}
        self._contents: dict[int, bytes] = {}
        self._by_key: dict[str, list[int]] = {}

    def add(self, frame: Frame, queue_offset: int) -> Timer | None:
        """Add a message. If the message is a copy that was put back into the queue, it replaces the
        earlier copy. Return None if the message can never be delivered.
        """
        found = timer_of(frame, queue_offset)
        if found is None:
            return None
        content = _content(frame, found.topic, found.queue_id)
        if found.rolled:
            self._take(content, found.rolled - 1)
        self.waiting[queue_offset] = found
        self._contents[queue_offset] = content
        self._same.setdefault(content, []).append(queue_offset)
        if found.deletes is None and found.uniq_key is not None:
            self._by_key.setdefault(found.uniq_key, []).append(queue_offset)
        return found

    def delivered(self, frame: Frame) -> int | None:
        """Remove the timer message whose delivered copy is ``frame``. Return the queue offset of
        the timer message; None if the frame is not the copy of any waiting message.
        """
        topic = frame.topic.decode("utf-8", "replace")
        return self._take(_content(frame, topic, frame.queue_id), None)

    def remove(self, queue_offset: int) -> None:
        """Remove a message that no longer waits."""
        found = self.waiting.pop(queue_offset)
        self.done[queue_offset] = found.slot_time
        content = self._contents.pop(queue_offset)
        _drop(self._same, content, queue_offset)
        if found.deletes is None and found.uniq_key is not None:
            _drop(self._by_key, found.uniq_key, queue_offset)

    def deleted(self) -> set[int]:
        """Return the queue offsets of waiting messages that another waiting message deletes."""
        found: set[int] = set()
        for one in self.waiting.values():
            if one.deletes is not None:
                found.update(self.deleted_by(one))
        return found

    def deleted_by(self, one: Timer) -> Iterator[int]:
        """Yield the queue offsets of the waiting messages that a message deletes. All of them have
        the same slot and the same topic as this message.
        """
        assert one.deletes is not None
        for key in {one.deletes, one.deletes.removeprefix(timer.delete_key(one.topic, ""))}:
            for offset in self._by_key.get(key, ()):
                other = self.waiting[offset]
                if other.slot_time == one.slot_time and other.topic == one.topic:
                    yield offset

    def due(self) -> list[Timer]:
        """Return the messages that will be delivered, in the order of their slots."""
        gone = self.deleted()
        return sorted(
            one
            for one in self.waiting.values()
            if one.deletes is None and one.queue_offset not in gone
        )

    def _take(self, content: bytes, rolled: int | None) -> int | None:
        for offset in self._same.get(content, ()):
            if rolled is None or self.waiting[offset].rolled == rolled:
                self.remove(offset)
                return offset
        return None


def _drop(table: dict[K, list[int]], key: K, offset: int) -> None:
    table[key].remove(offset)
    if not table[key]:
        del table[key]


def _content(frame: Frame, topic: str, queue_id: int) -> bytes:
    """Return a digest of the body and of those fields that are the same in a timer message and its
    delivered copy.
    """
    values = props.decode_bytes(frame.properties)
    kept = sorted(pair for pair in values.items() if pair[0] not in _CHANGES)
    fields = (topic, queue_id, frame.flag, frame.born_timestamp, frame.reconsume_times, kept)
    digest = hashlib.blake2b(repr(fields).encode("utf-8", "surrogatepass"), digest_size=16)
    digest.update(frame.body)
    return digest.digest()


class Known(NamedTuple):
    """The deliveries that a caller knows without reading the log.

    ``checks`` are contents of the file ``timercheck`` at different times. A message was delivered
    if one of these contents shows two facts: the message was in the wheel, and its slot is before
    the read time. ``delivered`` contains the queue offsets of further messages that were delivered.
    No message with a queue offset before ``first`` waits. If ``since`` is not None, the caller
    knows all deliveries whose copy is before this physical offset. Of messages that were in the
    wheel, the caller knows all deliveries whose copy is before the physical offset ``wheel_since``.
    """

    checks: Sequence[TimerCheck] = ()
    delivered: Set[int] = frozenset()
    first: int = 0
    since: int | None = None
    wheel_since: int = 0

    def counts(self, one: Timer) -> bool:
        """Whether ``checks`` or ``delivered`` shows that a message was delivered."""
        return one.queue_offset in self.delivered or any(
            one.queue_offset < check.enqueued and one.slot_time < check.read_time
            for check in self.checks
        )


def find_timers(
    queue: Queue | None,
    message: Callable[[int, int], Frame | None],
    runs: Callable[[int], Iterable[Run]],
    known: Known,
) -> Timers:
    """Find the timer messages that still wait in a store.

    ``queue`` is queue 0 of ``rmq_sys_wheel_timer``. ``message`` is a function that returns the
    frame with a given physical offset and size. ``runs`` is a function that reads the log from a
    physical offset on. This offset may be inside a frame.
    """
    found = Timers()
    if queue is None:
        return found
    found.stop = max(known.first, queue.min_offset)
    for offset, entry in queue.entries(found.stop):
        found.stop = offset + 1
        found.last = entry
        frame = None if entry.is_filler else message(entry.physical_offset, entry.size)
        one = None if frame is None else found.add(frame, offset)
        if one is not None and known.counts(one):
            found.remove(offset)
    if found.waiting:
        start = known.since
        if start is None:
            # In the log, a delivered copy is after its message. So no search is needed before the
            # first message that waits, or before wheel_since. There is one exception: the broker
            # may deliver a message directly, without the wheel. So the search starts at the first
            # message that is not in the wheel, even if it is before wheel_since.
            enqueued = max((check.enqueued for check in known.checks), default=0)
            places = [(o >= enqueued, one.physical_offset) for o, one in found.waiting.items()]
            late = [place for is_late, place in places if is_late]
            start = max(min(place for _, place in places), min([known.wheel_since, *late]))
        # Import here: the module loads pyarrow, which stores without timers do not need.
        from logquarry.log.columns import frames_with_property

        for frame in frames_with_property(runs(start), props.TIMER_OUT_MS):
            if frame.topic != _TOPIC:
                found.delivered(frame)
    return found


# --------------------------------------------------------------------------------------------------
# Timer messages of a store that is read from its files


def read_check(layout: StoreLayout) -> TimerCheck:
    """Read ``config/timercheck``; zeros if there is no such file.

    Raises ValueError if the file is too short, or has numbers that no broker writes.
    """
    try:
        check = timer.decode_check(layout.filesystem.read(CHECK))
    except FileNotFoundError:
        return TimerCheck()
    ahead = check.read_time - time.time_ns() // 1_000_000
    if min(check.read_time, check.log_end, check.enqueued) < 0 or ahead > timer.WHEEL_MS:
        # A read time in the far future is an error, because every message in the wheel would then
        # seem to be delivered.
        raise ValueError(f"its numbers are impossible: {check}")
    return check


def check_or_none(layout: StoreLayout) -> TimerCheck:
    """Read ``timercheck``; zeros if it is missing, unreadable or invalid. With zeros, deliveries
    are found only in the log.
    """
    try:
        return read_check(layout)
    except (ValueError, UnreadableFile):
        return TimerCheck()


def timer_queue(layout: StoreLayout) -> Queue | None:
    """Return queue 0 of ``rmq_sys_wheel_timer``; None if there is no such queue.

    If the queue has no files, it is made from RocksDB or the log. But if other queues have files,
    and the store has no queues in RocksDB, the result is None.
    """
    key = timer.TOPIC, QUEUE_ID
    if key in layout.queue_names:
        return ConsumeQueue(layout, *key, log_min_offset=layout.commit_log.start)
    if layout.queue_names and not rocksdb_folders(layout):
        return None
    return derived_queues(layout, LogReader(layout, check_crc=False))[0].get(key)


def timers_of(layout: StoreLayout, check: TimerCheck | None = None) -> Timers:
    """Find the timer messages that wait in a store. If ``check`` is given, it is used instead of
    the store's ``timercheck``.
    """
    check = check_or_none(layout) if check is None else check
    log = CommitLog(layout)
    queue = timer_queue(layout)

    def message(offset: int, size: int) -> Frame | None:
        found = log.outcome_at(offset)
        return found if isinstance(found, Frame) and found.size == size else None

    def runs(start: int) -> Iterator[Run]:
        events = LogReader(layout, check_crc=False).events(start, resync=True)
        return (event for event in events if isinstance(event, Run))

    known = known_by(layout, check)
    try:
        return find_timers(queue, message, runs, known)
    except CorruptFile:
        if not isinstance(queue, RocksQueue):
            raise
    # RocksDB cannot read a block of the queue, but the log has the queue's messages.
    builder = QueueBuilder(layout.config, layout.delay_levels_ms)
    made = builder.add(LogReader(layout, check_crc=False).events(resync=True)).queues()
    return find_timers(made.get(queue.key), message, runs, known)


def known_by(layout: StoreLayout, check: TimerCheck) -> Known:
    """Return the deliveries that ``timercheck`` shows."""
    return Known([check], wheel_since=delivered_since(layout, check))


def delivered_since(layout: StoreLayout, check: TimerCheck) -> int:
    """Return the physical offset at which to start a search for the delivered copies of messages in
    the wheel. For copies before this offset, ``timercheck`` already shows the delivery.

    The broker delivers the messages of a slot after the slot's time. So if a slot's time is the
    read time or later, the delivered copies of its messages were not stored before the read time.
    The result is the start of a log file.
    """
    for file in reversed(layout.commit_log.files):
        try:
            view = layout.open_file(file.path)
        except FileNotFoundError:
            # The file was deleted, or there is a folder or a link to a missing file in its place.
            continue
        for _, found in first_frames(view):
            if found.store_timestamp < check.read_time - _CLOCK_SLACK_MS:
                return file.base
            break
    return layout.commit_log.start


_SLOT: Final = timer.SLOT.dtype()
_SNAPSHOT: Final = f"{timer.WHEEL}."
_CHUNK: Final = 1 << 20
_PRECISIONS: Final = (1, 10, 100, 1000, 10_000)


@dataclass(frozen=True, slots=True)
class PendingTimers:
    """Numbers of timer messages that wait.

    ``in_wheel`` counts the messages in slots of the wheel that the broker has not delivered yet.
    ``in_queue`` counts the messages in the queue that the broker has not added to the wheel yet.
    """

    in_wheel: int
    in_queue: int
    evidence: tuple[str, ...]

    @property
    def detail(self) -> str:
        """The number of waiting messages, as a sentence for a user.

        If a message is not in the wheel, only the log shows whether it was delivered.
        """
        count = self.in_wheel + self.in_queue
        waits = counted(count, "timer message waits for its", "timer messages wait for their")
        return f"at most {waits} time" if self.in_queue else f"{waits} time"

    def __bool__(self) -> bool:
        return self.in_wheel + self.in_queue > 0


def pending(layout: StoreLayout) -> PendingTimers:
    """Count the messages that a store still has to deliver.

    The broker does not set the count of a delivered slot to 0, so slots before the read time of
    ``timercheck`` are ignored. Messages from timercheck's queue offset on are not in the wheel yet,
    and are counted in the queue.
    """
    check = check_or_none(layout)
    in_queue = 0
    if (timer.TOPIC, QUEUE_ID) in layout.queue_names:
        start = layout.commit_log.start
        queue = ConsumeQueue(layout, timer.TOPIC, QUEUE_ID, log_min_offset=start)
        in_queue = max(0, queue.max_offset - max(check.enqueued, queue.min_offset))
    in_wheel = _in_wheel(layout, check.read_time)
    evidence = ((timer.WHEEL,) if in_wheel else ()) + (
        (f"consumequeue/{timer.TOPIC}/{QUEUE_ID}",) if in_queue else ()
    )
    return PendingTimers(in_wheel, in_queue, evidence)


def used_slots(layout: StoreLayout) -> Records:
    """Return the slots of the file ``timerwheel`` that have ever had a message; none if there is no
    wheel.

    With ``timerWheelSnapshotFlush``, a broker also writes the wheel to files
    ``timerwheel.POSITION``. If a slot is both in ``timerwheel`` and in the newest of these files,
    the function uses the version whose last entry is later.
    """
    names = {entry.name for entry in layout.filesystem.list("")}
    snapshots = {
        java.digits(name.removeprefix(_SNAPSHOT)): name
        for name in names
        if name.startswith(_SNAPSHOT)
    }
    newest = max(snapshots, default=java.NO_NUMBER)
    chosen = [] if newest == java.NO_NUMBER else [snapshots[newest]]
    chosen += [timer.WHEEL] if timer.WHEEL in names else []
    slots = np.concatenate([np.empty(0, _SLOT), *(_slots_of(layout, name) for name in chosen)])
    order = np.lexsort((-slots["last"].astype(np.int64), slots["time"]))
    slots = slots[order]
    first: Bools = np.append(True, np.diff(slots["time"].astype(np.int64)) != 0)
    return slots[first[: len(slots)]]


def _slots_of(layout: StoreLayout, name: str) -> Records:
    found = [np.empty(0, _SLOT)]
    try:
        view = layout.open_file(name)
    except FileNotFoundError:
        # The broker has deleted the file since the listing.
        return found[0]
    position = 0
    while (position := view.next_data(position)) < view.size:
        position -= position % _SLOT.itemsize
        length = min(_CHUNK, view.size - position)
        length -= length % _SLOT.itemsize
        if length <= 0:
            break
        slots = np.frombuffer(view.window(position, length)[:length], _SLOT)
        found.append(slots[slots["time"] > 0])
        position += length
    return np.concatenate(found)


def _in_wheel(layout: StoreLayout, read_time: int) -> int:
    slots = used_slots(layout)
    if not len(slots):
        return 0
    times = slots["time"].astype(np.int64) * precision(layout, read_time, slots)
    return int(slots["count"][times >= read_time].clip(0).sum())


def precision(layout: StoreLayout, read_time: int, slots: Records | None = None) -> int:
    """Return the length of a slot in ms (``timerPrecisionMs``). If this length is not configured,
    infer it from the wheel.
    """
    if layout.config.timer_precision_ms is not None:
        return layout.config.timer_precision_ms
    slots = used_slots(layout) if slots is None else slots
    if read_time <= 0 or not len(slots):
        return timer.PRECISION_MS
    time = int(slots["time"].max())
    return min(_PRECISIONS, key=lambda one: abs(time * one - read_time))
