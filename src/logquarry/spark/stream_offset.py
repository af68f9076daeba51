"""The offsets of a stream.

This module also detects that a log was replaced, and finds the end of a batch whose bytes or
messages are limited.

Spark writes the offset into its checkpoint::

    {"broker-a": 1073741824, "broker-b": 52800}

Each value is a physical offset at which a frame, a blank (filler at a file's end) or damage ends.
When a query first starts, the options that set its start are recorded under the key ``/start``. No
broker can have this name. A restarted query uses the recorded options. The last frame before each
offset is recorded under ``/start`` too: earlier versions of logquarry ignore unknown names under
this key, but refuse an offset with other keys.

An older backup can replace a log, or a power cut can truncate the log. Then the log can grow past
the offset up to which it was read. The offset alone does not show that the log has changed, and the
next batch would miss the new messages before the offset. So a stream and an export record the last
frame before the offset, and the next batch checks that the log still has this frame.

For a limit of bytes, the planner reads only the part of the log near the batch's end. To limit the
number of messages, the planner reads the frame headers of all new messages.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import numpy as np

from logquarry.errors import UsageError
from logquarry.format import arrays as r
from logquarry.format.arrays import Int64
from logquarry.log.batches import MessageFilter
from logquarry.log.codec import Rows, Window
from logquarry.log.columns import Decoding, fixed_fields
from logquarry.log.layout import StoreLayout
from logquarry.log.splits import frame_start
from logquarry.log.walk import BlankSpan, LogEnd, LogReader, Run
from logquarry.spark.options import Queue

_FIELDS: Final = ("body_crc", "physical_offset", "born_timestamp", "store_timestamp")
"""Fields that the check sum covers. A broker writes these fields once, with the frame. Queue id and
queue offset are left out, because a salvage corrects damaged queue ids and queue offsets.
"""
_NEAR: Final = 64 << 10
_FARTHEST: Final = 64 << 20


class LastFrame(NamedTuple):
    """A frame that was read: its physical offset, and a CRC of its size and of `_FIELDS`."""

    offset: int
    check_sum: int


def last_frame(layout: StoreLayout, stop: int) -> LastFrame | None:
    """Return the last frame that ends at or before ``stop``.

    Return None if no sound frame is in the 64 MiB before ``stop``.
    """
    reader = LogReader(layout)
    back = _NEAR
    while stop > reader.files.start:
        start = max(reader.files.start, stop - back)
        found: LastFrame | None = None
        for event in reader.events(start, stop, resync=True):
            if not isinstance(event, Run):
                continue
            ends = event.rows[:, r.POSITION].astype(np.int64) + event.rows[:, r.SIZE]
            if len(rows := event.rows[event.window.base + ends <= stop]):
                place = event.window.base + int(rows[-1, r.POSITION])
                found = LastFrame(place, _check_sum(event.window, rows[-1:]))
        if found is not None:
            return found
        if start == reader.files.start or back >= _FARTHEST:
            return None
        back *= 4
    return None


def is_other_log(layout: StoreLayout, known: LastFrame) -> bool:
    """Return True only if it is certain that a log does not have the frame ``known``.

    The result is False if the log no longer has the bytes, or if they are damaged.
    """
    return _has_frame(layout, known) is False


def is_same_log(layout: StoreLayout, known: LastFrame) -> bool:
    """Return True only if it is certain that a log has the frame ``known``."""
    return _has_frame(layout, known) is True


def _has_frame(layout: StoreLayout, known: LastFrame) -> bool | None:
    """Return whether a log has the frame ``known``; None if its bytes are missing or damaged."""
    reader = LogReader(layout)
    place = known.offset
    if reader.files.at(place) is None:
        return None
    for event in reader.events(place, place + 1):
        if isinstance(event, Run):
            return _check_sum(event.window, event.rows[:1]) == known.check_sum
        if isinstance(event, BlankSpan):
            return False
        break
    # If another frame or a blank contains the offset, frame_start returns the start of this frame
    # or blank. In damage, frame_start returns the offset unchanged.
    return None if frame_start(layout, place) == place else False


def _check_sum(window: Window, rows: Rows) -> int:
    fields = fixed_fields(window, rows, _FIELDS)
    values = [int(rows[0, r.SIZE]), *(int(fields[name][0]) for name in _FIELDS)]
    return zlib.crc32(np.array(values, "<i8").tobytes())


START: Final = "/start"
_TIME, _QUEUES, _FIRST, _FRAMES = "timestamp", "queueOffsets", "offsets", "lastFrames"


@dataclass(frozen=True, kw_only=True)
class StreamOffset:
    """The offsets up to which a stream has read.

    Attributes:
        brokers: physical offset by broker. If a broker is missing, the stream has read nothing of
            its store.
        since_ms: smallest store timestamp to read, in milliseconds; None for all.
        queues: first queue offset to read, by broker and queue. If a queue is missing, the stream
            reads all of its messages.
        first: for each broker, the physical offset at which the query's first batch starts; None in
            later offsets. If the first batch fails, Spark requests the start again. The start is
            recorded because a second evaluation of "latest" would give a later offset.
        frames: for each broker, the last frame before its physical offset. A broker is missing if
            an earlier version wrote the checkpoint, or if no frame is near the offset.
    """

    brokers: Mapping[str, int] = field(default_factory=dict)
    since_ms: int | None = None
    queues: Mapping[str, Mapping[Queue, int]] = field(default_factory=dict)
    first: Mapping[str, int] | None = None
    frames: Mapping[str, LastFrame] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form for Spark; equal offsets have equal JSON."""
        start: dict[str, Any] = {}
        if self.since_ms is not None:
            start[_TIME] = self.since_ms
        if self.queues:
            start[_QUEUES] = {
                broker: _nested(queues) for broker, queues in sorted(self.queues.items())
            }
        if self.first is not None:
            start[_FIRST] = dict(sorted(self.first.items()))
        if self.frames:
            start[_FRAMES] = {broker: list(at) for broker, at in sorted(self.frames.items())}
        return dict(sorted(self.brokers.items())) | ({START: start} if start else {})

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> StreamOffset:
        """Parse the JSON form; raise UsageError if `document` is invalid."""
        try:
            start = document.get(START, {})
            time, first = start.get(_TIME), start.get(_FIRST)
            return cls(
                brokers=_offsets({k: v for k, v in document.items() if k != START}),
                since_ms=None if time is None else int(time),
                queues={
                    broker: {
                        (topic, int(queue)): int(offset)
                        for topic, by_queue in topics.items()
                        for queue, offset in by_queue.items()
                    }
                    for broker, topics in start.get(_QUEUES, {}).items()
                },
                first=None if first is None else _offsets(first),
                frames={
                    broker: LastFrame(*_numbers(offset, check_sum))
                    for broker, (offset, check_sum) in start.get(_FRAMES, {}).items()
                },
            )
        except (AttributeError, TypeError, ValueError) as error:
            raise UsageError(
                f"the checkpoint holds no offset of this source: {document!r}: {error}"
            ) from error

    def moved(self, brokers: Mapping[str, int]) -> StreamOffset:
        """Return a copy of this offset with new physical offsets for some brokers."""
        return replace(self, brokers={**self.brokers, **brokers})


def _offsets(document: Mapping[str, Any]) -> dict[str, int]:
    _numbers(*document.values())
    return dict(document)


def _numbers(*values: Any) -> tuple[int, ...]:
    for value in values:
        if type(value) is not int or value < 0:
            raise ValueError(f"{value!r} is not a physical offset (a whole number >= 0)")
    return values


def _nested(queues: Mapping[Queue, int]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for (topic, queue_id), offset in sorted(queues.items()):
        found.setdefault(topic, {})[str(queue_id)] = offset
    return found


NEAR: Final = 16 << 20
"""To find where the last frame before an offset ends, the planner starts to read at a frame or a
file that begins at most this many bytes before the offset. If the planner finds no such start, it
searches four times as far back.
"""
MOST_COUNTED: Final = 1 << 30
"""Maximum bytes of each log in which the planner counts messages for one batch. Without this limit,
the planner would read the whole log for a topic with few messages.
"""


@dataclass(frozen=True, slots=True)
class Backlog:
    """The new part of a log: from ``start``, where a frame begins, to ``end``."""

    layout: StoreLayout
    start: int
    end: int


def by_bytes(backlogs: Mapping[str, Backlog], limit: int) -> dict[str, int]:
    """Return the end of a batch of at most `limit` bytes of log: a physical offset for each broker.

    Each broker gets an equal share of the limit. If the limit is too small for the next frame of
    any log, the batch takes one frame nevertheless, so that the stream advances.
    """
    shares = shared({name: log.end - log.start for name, log in backlogs.items()}, limit)
    ends: dict[str, int] = {}
    spare = limit
    for name, log in backlogs.items():
        ends[name] = boundary(log, log.start + shares[name])
        spare -= ends[name] - log.start
    # `spare` is the total of the bytes that the brokers have not used. Offer these bytes to one
    # broker after the other, beginning with the broker that has the smallest batch.
    for name in sorted(backlogs, key=lambda name: (ends[name] - backlogs[name].start, name)):
        log = backlogs[name]
        if ends[name] < log.end and spare > 0:
            more = boundary(Backlog(log.layout, ends[name], log.end), ends[name] + spare)
            spare -= more - ends[name]
            ends[name] = more
    if all(ends[name] == log.start for name, log in backlogs.items()):
        for name, log in backlogs.items():
            if log.start < log.end:
                ends[name] = _after_one(log)
                break
    return ends


def by_rows(
    backlogs: Mapping[str, Backlog], limit: int, wanted: Mapping[str, MessageFilter]
) -> dict[str, int]:
    """Return the end of a batch of at most `limit` messages: a physical offset for each broker."""
    counted = {name: _counted(log, wanted[name], limit) for name, log in backlogs.items()}
    shares = shared({name: len(found) for name, (found, _) in counted.items()}, limit)
    ends: dict[str, int] = {}
    for name, log in backlogs.items():
        found, upto = counted[name]
        take = shares[name]
        if take == len(found) and take < limit:
            ends[name] = upto
        else:
            ends[name] = int(found[take - 1]) if take else log.start
    return ends


def shared(wants: Mapping[str, int], limit: int) -> dict[str, int]:
    """Divide `limit` evenly among the names of `wants`.

    If a name wants less than its share, the rest of the share is divided among the other names.

    The sum of the shares is `limit`, or the sum of `wants` if that sum is less.
    """
    shares = dict.fromkeys(wants, 0)
    left = limit
    by_size = sorted(wants, key=lambda name: (wants[name], name))
    for done, name in enumerate(by_size):
        others = len(by_size) - done
        # Round up, so that the shares differ by at most one.
        shares[name] = min(wants[name], -(-left // others))
        left -= shares[name]
    return shares


def boundary(log: Backlog, upto: int) -> int:
    """Return the largest offset <= `upto` at which a frame, a blank or damage of the log ends.

    If there is no such offset, return ``log.start``.
    """
    if upto >= log.end:
        return log.end
    if upto <= log.start:
        return log.start
    reader = LogReader(log.layout)
    position = start = _place_near(reader, log.start, upto)
    for event in reader.events(start, upto):
        if isinstance(event, LogEnd):
            break
        end = event.end
        if end <= upto:
            position = end
            continue
        if isinstance(event, Run):
            # The run was read up to `upto`, so only its last frame can end after `upto`.
            position = event.window.base + int(event.rows[-1, r.POSITION])
        elif event.offset <= upto:
            position = event.offset
        break
    return max(log.start, position)


def _place_near(reader: LogReader, start: int, upto: int) -> int:
    """Return the start of a frame or a file shortly before `upto`."""
    back = NEAR
    while upto - start > back:
        file = reader.files.at(upto)
        if file is not None and file.base > start and upto - file.base <= back:
            return file.base
        found = reader.find(upto - back, upto)
        if found is not None:
            return found
        back *= 4
    return start


def _after_one(log: Backlog) -> int:
    """Return the physical offset at which the first new frame, blank or damage ends."""
    reader = LogReader(log.layout)
    for event in reader.events(log.start, log.end):
        if isinstance(event, Run):
            return event.window.base + int(event.rows[0, r.POSITION] + event.rows[0, r.SIZE])
        if isinstance(event, LogEnd):
            break
        return min(event.end, log.end)
    return log.end


def _counted(log: Backlog, wanted: MessageFilter, limit: int) -> tuple[Int64, int]:
    """Find the first `limit` wanted messages.

    Returns (physical offset at which each message ends, physical offset up to which the log was
    searched).
    """
    stop = log.end
    if stop - log.start > MOST_COUNTED:
        stop = boundary(log, log.start + MOST_COUNTED)
        stop = _after_one(log) if stop == log.start else stop
    reader = LogReader(log.layout, check_crc=False)
    decoding = Decoding(columns=())
    found: list[Int64] = []
    count = 0
    for event in reader.events(log.start, stop):
        if not isinstance(event, Run):
            continue
        rows = wanted.select(event.window, event.rows, decoding)
        ends = rows[:, r.POSITION].astype(np.int64) + rows[:, r.SIZE] + event.window.base
        found.append(ends[ends <= log.end])
        count += len(found[-1])
        if count >= limit:
            break
    return (np.concatenate(found)[:limit] if found else np.zeros(0, np.int64)), stop
