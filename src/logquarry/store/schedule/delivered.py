"""What the log itself says was delivered since the progress was saved last.

A frame outside the schedule topic that has DELAY, REAL_TOPIC and REAL_QID, and stands in the very
queue that these name, is a delivery: a put with a DELAY goes to the schedule topic. Deliveries of
one level stand in the log in the order of its queue, so that one walk over the log's end tells how
far each level has come, message by message:

::

    schedule queue, from the saved offset   a  b  c  d  e
    log, from the place saved with it       ... a' ... b' ... c' |end
                                            -> the next one is d

Guarantees: a message counts as delivered only if a frame that is its delivery, byte for byte but
for offsets and store time, stands in the log behind the place. So none is lost, and none delivered
twice, whatever ended the process that delivered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

import numpy as np

from logquarry.format import delay
from logquarry.format import properties as props
from logquarry.format.frame import Frame
from logquarry.format.rows import POSITION, PROPS_AT, PROPS_LENGTH, SIZE
from logquarry.message import Message
from logquarry.scan.walk import Run
from logquarry.store.schedule.due_message import Undeliverable, due_message

Pending = Callable[[int, int], Iterator[tuple[int, Frame | None]]]
"""(level, queue offset) -> queue offset and message of each that is in its queue from there on."""

_SCHEDULE_TOPIC: Final = delay.SCHEDULE_TOPIC.encode()
_NEEDLE: Final = f"{props.DELAY}{props.NAME_VALUE_SEPARATOR}".encode()
_UNIQUE: Final = f"{props.UNIQ_KEY}{props.NAME_VALUE_SEPARATOR}".encode()
_LOOK_AHEAD: Final = 256
"""Messages that may have been passed over between two that were delivered."""


def advance(
    offsets: dict[int, int], runs: Iterable[Run], pending: Pending, *, unique: bool = False
) -> int:
    """Move the offset of each level behind what the log says was delivered.

    Args:
        offsets: level -> next queue offset; changed.
        runs: the log from the place on that was saved with them.
        pending: gives what is in a level's queue.
        unique: whether only messages with a UNIQ_KEY are known again: where the log is given from
            an earlier place on, deliveries that the offsets do know of may look like others.

    Returns:
        How many deliveries there were that the offsets did not know of.
    """
    found = 0
    waiting: dict[int, _Waiting] = {}
    for level, message in _deliveries(runs):
        if level not in waiting:
            waiting[level] = _Waiting(pending(level, offsets.get(level, 0)), unique)
        offset = waiting[level].take(message)
        if offset is not None:
            offsets[level] = offset + 1
            found += 1
    return found


class _Waiting:
    """The messages of one level that are not known to be delivered."""

    def __init__(self, pending: Iterator[tuple[int, Frame | None]], unique: bool) -> None:
        self._rest = pending
        self._unique = unique
        self._next: list[tuple[int, Message]] = []

    def take(self, delivered: Message) -> int | None:
        """The queue offset of the message that this is the delivery of; None if of none.

        Those before it are passed over: delivery keeps their order.
        """
        for number in range(_LOOK_AHEAD):
            if number == len(self._next) and not self._read():
                return None
            offset, message = self._next[number]
            if message == delivered:
                del self._next[: number + 1]
                return offset
        return None

    def _read(self) -> bool:
        """One more; whether there was one."""
        for offset, frame in self._rest:
            if frame is None or (self._unique and _UNIQUE not in frame.properties):
                continue
            try:
                self._next.append((offset, _seen(due_message(frame))))
            except Undeliverable:
                continue
            return True
        return False


def _deliveries(runs: Iterable[Run]) -> Iterator[tuple[int, Message]]:
    """(level, message) of each frame that is a delivery."""
    for run in runs:
        first, end = int(run.rows[0, POSITION]), int(run.rows[-1, POSITION] + run.rows[-1, SIZE])
        data = run.window.data[first:end].tobytes()
        starts = run.rows[:, POSITION] - first
        at = data.find(_NEEDLE)
        while at >= 0:
            number = int(np.searchsorted(starts, at, "right")) - 1
            row, start = run.rows[number], int(starts[number])
            begin = start + int(row[PROPS_AT])
            if data.find(_NEEDLE, begin, begin + int(row[PROPS_LENGTH])) >= 0:
                frame = run.window.decode(first + start)
                found = _delivery(frame) if isinstance(frame, Frame) else None
                if found is not None:
                    yield found
            at = data.find(_NEEDLE, start + int(row[SIZE]))


def _delivery(frame: Frame) -> tuple[int, Message] | None:
    if frame.topic == _SCHEDULE_TOPIC:
        return None
    values = props.decode_bytes(frame.properties)
    level = delay.parse_int(values.get(props.DELAY, ""))
    queue_id = delay.parse_int(values.get(props.REAL_QUEUE_ID, ""))
    topic = frame.topic.decode("utf-8", "replace")
    if level is None or queue_id != frame.queue_id or values.get(props.REAL_TOPIC) != topic:
        return None
    try:
        return level, _seen(due_message(frame))
    except Undeliverable:
        return None


def _seen(message: Message) -> Message:
    """A message as it is compared: without what serves the put only."""
    return Message._make(message._replace(properties=None))
