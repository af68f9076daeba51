"""Makes the copy that delivers a delayed message (``messageTimeup``), and saves the progress.

The message's properties REAL_TOPIC and REAL_QID name the topic and queue of the copy. The copy
keeps the property DELAY, so a search of the log can recognise it as a delivery.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from logquarry.disk.config_file import DELAY_OFFSETS, ConfigFile
from logquarry.disk.disk import Disk
from logquarry.format import properties as props
from logquarry.format.frame import Frame
from logquarry.log.columns import frames_with_property
from logquarry.log.store_files import SIDECAR
from logquarry.log.walk import Run
from logquarry.message import Message, put_again
from logquarry.store.transaction.transaction import HALF_TOPIC
from logquarry.systems import read_file


class Undeliverable(ValueError):
    """Raised if a message of the schedule topic cannot be delivered; the text gives the reason."""


def due_message(frame: Frame) -> Message:
    """Return the copy to put for a message of the schedule topic.

    Raises Undeliverable if its properties name no allowed topic and queue.
    """
    values = props.decode_bytes(frame.properties)
    topic = values.get(props.REAL_TOPIC)
    if topic is None:
        raise Undeliverable("it has no property REAL_TOPIC")
    if topic == HALF_TOPIC:
        raise Undeliverable(f"its topic is {topic}: half messages cannot be delayed")
    queue_id = props.parse_int(values.get(props.REAL_QUEUE_ID, ""))
    if queue_id is None:
        raise Undeliverable(f"its property REAL_QID is {values.get(props.REAL_QUEUE_ID)!r}")
    return put_again(frame, topic, queue_id, values, delays=False)


# --------------------------------------------------------------------------------------------------
# Progress files: RocketMQ's ``config/delayOffset.json`` and ``.logquarry/delay.json``
#
# ``delayOffset.json`` contains, for each level, the queue offset of the next message to deliver.
# ``delay.json`` also contains the log's end when it was written: all later deliveries are in the
# log after this position. If another program has written ``delayOffset.json`` since then, the
# offsets in the two files differ. The position in ``delay.json`` does not belong to the new
# offsets, so their position is unknown.
#
# To save the progress, first the log is synced, then ``delay.json`` is written, and last
# ``delayOffset.json``. A crash between the two writes leaves the old ``delayOffset.json``, so
# ``delay.json`` also keeps the previous offsets and position.

logger = logging.getLogger(__name__)

MARK_FILE: Final = "delay.json"
UNKNOWN: Final = -1
INVALID_JSON: Final = (
    LookupError,
    ValueError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""The errors of parsing a document that is not JSON, is nested too deeply, or has wrong types or
numbers.
"""
_FAR: Final = 64 << 20
"""If the log has grown by this many bytes, a save writes the new position even without new
deliveries.
"""


class Progress(NamedTuple):
    """How far the delivery of delayed messages has advanced.

    Attributes:
        offsets: for each delay level, the queue offset of the next message to deliver.
        position: physical offset of the log's end when ``offsets`` was determined; UNKNOWN if it is
            not known. So ``offsets`` takes into account exactly those deliveries that are in the
            log before this position.
    """

    offsets: dict[int, int]
    position: int


class DelayProgress:
    """Reads and writes the two progress files of one store."""

    def __init__(self, disk: Disk, root: Path, sync_log: Callable[[], object]) -> None:
        self._disk = disk
        self._sync_log = sync_log
        self._file = ConfigFile(disk, root, DELAY_OFFSETS)
        self._mark_path = root / SIDECAR / MARK_FILE
        self._saved: Progress | None = None

    def load(self) -> Progress | None:
        """Return the saved progress, or None.

        If RocketMQ's file ``delayOffset.json`` is lost, use logquarry's file ``delay.json``.
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
        """If the progress changed, write and sync the files; return whether files were written."""
        saved = self._saved
        is_known = saved is not None and saved.offsets == progress.offsets
        # If the saved position is after the log's end, the log was truncated after the save. In
        # this case, save again, even if the offsets are the same.
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
            return _decode(read_file(self._mark_path))
        except FileNotFoundError:
            return []
        except (OSError, *INVALID_JSON) as error:
            logger.warning("%s: ignored: %s", self._mark_path, error)
            return []


def _encode(marks: list[Progress]) -> bytes:
    document = [{"position": mark.position, "offsets": mark.offsets} for mark in marks]
    return json.dumps(document).encode()


def _decode(data: bytes) -> list[Progress]:
    return [Progress(_offsets(mark["offsets"]), int(mark["position"])) for mark in json.loads(data)]


def _offsets(table: Mapping[str, Any]) -> dict[int, int]:
    return {int(level): int(offset) for level, offset in table.items()}


# --------------------------------------------------------------------------------------------------
# Finding deliveries in the log
#
# A frame outside the schedule topic is a delivery if it has DELAY, REAL_TOPIC and REAL_QID and is
# in the queue that REAL_TOPIC and REAL_QID name. In the log, the deliveries of one level have the
# same order as the messages in the level's queue. So one pass over the log finds the first
# undelivered message of each level:
#
# ::
#
#     schedule queue, from the saved offset   a  b  c  d  e
#     log, from the saved position            ... a' ... b' ... c' |end
#                                             -> the next message is d
#
# A delivery must equal its message in all bytes except for offsets and store time. So after a
# crash, the delivery neither skips nor repeats a message.

Pending = Callable[[int, int], Iterator[tuple[int, Frame | None]]]
"""A function of a level and a queue offset.

For each entry of the level's queue from that offset on, it yields the queue offset and the message.
"""

_SCHEDULE_TOPIC: Final = props.SCHEDULE_TOPIC.encode()
_UNIQUE: Final = f"{props.UNIQ_KEY}{props.NAME_VALUE_SEPARATOR}".encode()
_LOOK_AHEAD: Final = 256
"""A delivered message is compared with at most this many of the next waiting messages, because the
delivery service may have skipped messages.
"""


def advance(
    offsets: dict[int, int], runs: Iterable[Run], pending: Pending, *, unique: bool = False
) -> int:
    """Advance each level's offset past the deliveries found in the log; return their number.

    Args:
        offsets: for each level, the queue offset of the next message to deliver; changed in place.
        runs: the frames of the log from the saved position on.
        unique: whether to match only messages with a UNIQ_KEY. Pass True if ``runs`` starts before
            the saved position. An old delivery without a UNIQ_KEY could be mistaken for the
            delivery of an equal message that still waits.
    """
    found = 0
    waiting: dict[int, _Waiting] = {}
    for frame in frames_with_property(runs, props.DELAY):
        delivered = _delivery(frame)
        if delivered is None:
            continue
        level, message = delivered
        if level not in waiting:
            waiting[level] = _Waiting(pending(level, offsets.get(level, 0)), unique)
        offset = waiting[level].take(message)
        if offset is not None:
            offsets[level] = offset + 1
            found += 1
    return found


class _Waiting:
    def __init__(self, pending: Iterator[tuple[int, Frame | None]], unique: bool) -> None:
        self._rest = pending
        self._unique = unique
        self._next: list[tuple[int, Message]] = []

    def take(self, delivered: Message) -> int | None:
        """Find a delivered message among the waiting messages; return its queue offset, or None.

        The found message and all earlier messages are removed from the waiting messages.
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
        for offset, frame in self._rest:
            if frame is None or (self._unique and _UNIQUE not in frame.properties):
                continue
            try:
                self._next.append((offset, _seen(due_message(frame))))
            except Undeliverable:
                continue
            return True
        return False


def _delivery(frame: Frame) -> tuple[int, Message] | None:
    """If a frame is a delivery, return its level and message; None for any other frame."""
    if frame.topic == _SCHEDULE_TOPIC:
        return None
    values = props.decode_bytes(frame.properties)
    level = props.parse_int(values.get(props.DELAY, ""))
    queue_id = props.parse_int(values.get(props.REAL_QUEUE_ID, ""))
    topic = frame.topic.decode("utf-8", "replace")
    if level is None or queue_id != frame.queue_id or values.get(props.REAL_TOPIC) != topic:
        return None
    try:
        return level, _seen(due_message(frame))
    except Undeliverable:
        return None


def _seen(message: Message) -> Message:
    return message._replace(properties=None)
