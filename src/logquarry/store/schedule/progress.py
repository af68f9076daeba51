"""What becomes of a delayed message when its time has come (``messageTimeup``).

It goes to the topic and queue that REAL_TOPIC and REAL_QID name, with body, flags, born time,
hosts and all of its properties, DELAY among them. That it is not delayed once more is a matter of
the put, not of the string. So a frame in the log tells whether it was delivered, and what it is
the delivery of (:mod:`logquarry.store.schedule.progress`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from logquarry.disk.config_file import ConfigFile
from logquarry.disk.disk import Disk
from logquarry.format import broker_config, delay
from logquarry.format import properties as props
from logquarry.format.frame import Frame
from logquarry.format.rows import POSITION, PROPS_AT, PROPS_LENGTH, SIZE
from logquarry.log.layout import CONFIG, SIDECAR, quarantine
from logquarry.log.walk import Run
from logquarry.message import Message
from logquarry.store.transaction.half import HALF_TOPIC
from logquarry.write.put_again import put_again


class Undeliverable(ValueError):
    """A message of the schedule topic that nothing can be made of; the text says why."""


def due_message(frame: Frame) -> Message:
    """The message to be put for one of the schedule topic.

    Raises:
        Undeliverable: if it does not say where it belongs, or may not go there.
    """
    values = props.decode_bytes(frame.properties)
    topic = values.get(props.REAL_TOPIC)
    if topic is None:
        raise Undeliverable("it has no property REAL_TOPIC")
    if topic == HALF_TOPIC:
        raise Undeliverable(f"its topic is {topic}: half messages are not delayed")
    queue_id = delay.parse_int(values.get(props.REAL_QUEUE_ID, ""))
    if queue_id is None:
        raise Undeliverable(f"its property REAL_QID is {values.get(props.REAL_QUEUE_ID)!r}")
    return put_again(frame, topic, queue_id, values, delays=False)


# --------------------------------------------------------------------------------------------------
# How far each delay level was delivered: ``config/delayOffset.json``, and a mark beside it.
#
# The file is RocketMQ's, and says what RocketMQ's says: the next queue offset of each level. It is
# written now and then only, so that after a crash it is behind. The mark
# (``.logquarry/delay.json``) says up to where the log was known when the file was written: what
# was delivered since stands behind that place, and can be found there. It counts only together
# with the file that it was written for, and is of no use once another program has written that:
# then there is none.
#
# Order: the log is synced, then the mark is written (with the one before, which is good until the
# file is there), then the file. So the file never says of a delivery that the log may lose.

logger = logging.getLogger(__name__)

MARK_FILE: Final = "delay.json"
UNKNOWN: Final = -1
_FAR: Final = 64 << 20
"""Bytes of the log after which the mark is moved, though nothing was delivered."""


class Progress(NamedTuple):
    """How far delivery has come.

    Attributes:
        offsets: delay level -> next queue offset of its queue in the schedule topic.
        position: physical offset before which all those deliveries stand in the log, and behind
            which all others; UNKNOWN where nothing tells.
    """

    offsets: dict[int, int]
    position: int


class DelayProgress:
    """The two files of one store.

    Args:
        disk: what they are on.
        root: the store.
        sync_log: brings the log to the disk.
    """

    def __init__(self, disk: Disk, root: Path, sync_log: Callable[[], object]) -> None:
        self._disk = disk
        self._sync_log = sync_log
        self._file = ConfigFile(
            disk,
            root / CONFIG / broker_config.DELAY_OFFSET_FILE,
            broker_config.decode_delay_offsets,
            broker_config.encode_delay_offsets,
            aside=quarantine(root, CONFIG),
            member=broker_config.OFFSET_TABLE,
        )
        self._mark_path = root / SIDECAR / MARK_FILE
        self._saved: Progress | None = None
        """What the file says, with the place that belongs to it."""

    def load(self) -> Progress | None:
        """What was saved, None if nothing was.

        Where the file is lost or cannot be read, the mark tells the same.
        """
        loaded = self._file.load()
        marks = self._read_marks()
        if loaded.value is None:
            return marks[-1] if marks else None
        for mark in reversed(marks):
            if mark.offsets == loaded.value:
                self._saved = mark
                return mark
        return Progress(loaded.value, UNKNOWN)

    def save(self, progress: Progress) -> bool:
        """Write both files, durably; whether there was anything to write.

        Raises:
            StoreUnavailable: if that cannot be done; then what was saved before still counts.
        """
        saved = self._saved
        is_known = saved is not None and saved.offsets == progress.offsets
        # A place behind the log's end is of a log that was cut since.
        if saved is not None and is_known and 0 <= progress.position - saved.position < _FAR:
            return False
        self._sync_log()
        marks = [progress] if saved is None else [saved, progress]
        self._disk.replace(self._mark_path, _encode(marks))
        self._file.save(progress.offsets)
        self._saved = progress
        return True

    def _read_marks(self) -> list[Progress]:
        try:
            return _decode(self._mark_path.read_bytes())
        except FileNotFoundError:
            return []
        except (OSError, LookupError, ValueError, TypeError, AttributeError) as error:
            logger.warning("%s: %s: what it says does not count", self._mark_path, error)
            return []


def _encode(marks: list[Progress]) -> bytes:
    document = [{"position": mark.position, "offsets": mark.offsets} for mark in marks]
    return json.dumps(document).encode()


def _decode(data: bytes) -> list[Progress]:
    return [Progress(_offsets(mark["offsets"]), int(mark["position"])) for mark in json.loads(data)]


def _offsets(table: Mapping[str, Any]) -> dict[int, int]:
    return {int(level): int(offset) for level, offset in table.items()}


# --------------------------------------------------------------------------------------------------
# What the log itself says was delivered since the progress was saved last.
#
# A frame outside the schedule topic that has DELAY, REAL_TOPIC and REAL_QID, and stands in the
# very queue that these name, is a delivery: a put with a DELAY goes to the schedule topic.
# Deliveries of one level stand in the log in the order of its queue, so that one walk over the
# log's end tells how far each level has come, message by message:
#
# ::
#
#     schedule queue, from the saved offset   a  b  c  d  e
#     log, from the place saved with it       ... a' ... b' ... c' |end
#                                             -> the next one is d
#
# Guarantees: a message counts as delivered only if a frame that is its delivery, byte for byte but
# for offsets and store time, stands in the log behind the place. So none is lost, and none
# delivered twice, whatever ended the process that delivered.

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
