"""How far a stream has read: what Spark writes into its checkpoint.

::

    {"broker-a": 1073741824, "broker-b": 52800}

Each is a physical offset at which a frame, a blank or damage ends. What the options said about the
start of a new query, and still matters, travels along under ``/start`` (no broker has that name):
a query that is started again keeps it, whatever its options say then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from logquarry.errors import UsageError
from logquarry.format import rows as r
from logquarry.log.columns import Decoding
from logquarry.log.filters import MessageFilter
from logquarry.log.layout import StoreLayout
from logquarry.log.walk import LogEnd, LogReader, Run

START: Final = "/start"
_TIME, _QUEUES, _FIRST = "timestamp", "queueOffsets", "offsets"

Queue = tuple[str, int]
"""A topic and one of its queues."""


@dataclass(frozen=True, kw_only=True)
class StreamOffset:
    """How far a stream has read.

    Attributes:
        brokers: physical offset by broker. One that is not named has not been read at all.
        since_ms: least store time that the query wants; None for any.
        queues: by broker the first queue offsets that the query wants, where it says so.
        first: where the query's first batch begins; None in all later ones. Spark asks a query
            that failed in its first batch for a start once more, and ``latest`` may have moved on.
    """

    brokers: Mapping[str, int] = field(default_factory=dict)
    since_ms: int | None = None
    queues: Mapping[str, Mapping[Queue, int]] = field(default_factory=dict)
    first: Mapping[str, int] | None = None

    def to_json(self) -> dict[str, Any]:
        """As a document for Spark, the same for the same offset."""
        start: dict[str, Any] = {}
        if self.since_ms is not None:
            start[_TIME] = self.since_ms
        if self.queues:
            start[_QUEUES] = {
                broker: _nested(queues) for broker, queues in sorted(self.queues.items())
            }
        if self.first is not None:
            start[_FIRST] = dict(sorted(self.first.items()))
        return dict(sorted(self.brokers.items())) | ({START: start} if start else {})

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> StreamOffset:
        """The offset that a document stands for.

        Raises:
            UsageError: if it is none of ours, as with the checkpoint of another source.
        """
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
            )
        except (AttributeError, TypeError, ValueError) as error:
            raise UsageError(
                f"the checkpoint holds no offsets of this source: {document!r}: {error}"
            ) from error

    def moved(self, brokers: Mapping[str, int]) -> StreamOffset:
        """This offset with other places in some stores' logs."""
        return replace(self, brokers={**self.brokers, **brokers})


def _offsets(document: Mapping[str, Any]) -> dict[str, int]:
    for value in document.values():
        if type(value) is not int or value < 0:
            raise ValueError(f"{value!r} is no physical offset")
    return dict(document)


def _nested(queues: Mapping[Queue, int]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for (topic, queue_id), offset in sorted(queues.items()):
        found.setdefault(topic, {})[str(queue_id)] = offset
    return found


# --------------------------------------------------------------------------------------------------
# How much of the log one batch of a stream takes: at most so many bytes, or so many messages.
#
# A batch ends where a frame ends, so that the next one begins with a frame. Where that is, is found
# near the end of what is taken; what comes before it is not looked at. Messages have to be counted:
# their heads are walked, of new messages only.

NEAR: Final = 16 << 20
"""Bytes that are walked from a known place, rather than searched for a nearer one."""
MOST_COUNTED: Final = 1 << 30
"""Bytes of one log in which messages are counted for one batch: a rare topic fills it slowly."""

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Backlog:
    """What of one log may be taken: from ``start``, where a frame begins, up to ``end``."""

    layout: StoreLayout
    start: int
    end: int


def by_bytes(backlogs: Mapping[str, Backlog], limit: int) -> dict[str, int]:
    """Where a batch of at most ``limit`` bytes of log ends, by broker.

    No broker waits for another that has more. Where not a single frame is small enough, one is
    taken all the same: a stream gets on.
    """
    shares = shared({name: log.end - log.start for name, log in backlogs.items()}, limit)
    ends: dict[str, int] = {}
    spare = limit
    for name, log in backlogs.items():
        ends[name] = boundary(log, log.start + shares[name])
        spare -= ends[name] - log.start
    # Shares that no frame fits into are of use together. Those who got nothing come first.
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
    """Where a batch of at most ``limit`` messages ends, by broker.

    Args:
        backlogs: what may be taken.
        limit: most messages that pass the filters.
        wanted: which count, by broker.
    """
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
    """What each gets of ``limit``: what it wants, or as much as any other that gets less than that.

    Nothing is left over while anybody wants more.
    """
    shares = dict.fromkeys(wants, 0)
    left = limit
    by_size = sorted(wants, key=lambda name: (wants[name], name))
    for done, name in enumerate(by_size):
        others = len(by_size) - done
        # Rounded up: who is served last gets what is left, and that is as much within one.
        shares[name] = min(wants[name], -(-left // others))
        left -= shares[name]
    return shares


def boundary(log: Backlog, upto: int) -> int:
    """The last place from ``log.start`` on and not behind ``upto`` where something of the log ends.

    ``log.start`` itself if nothing fits.
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
        end = event.end if isinstance(event, Run) else event.offset + event.length
        if end <= upto:
            position = end
            continue
        if isinstance(event, Run):
            # Only the last frame that starts before a place can end behind it.
            position = event.window.base + int(event.rows[-1, r.POSITION])
        elif event.offset <= upto:
            position = event.offset
        break
    return max(log.start, position)


def _place_near(reader: LogReader, start: int, upto: int) -> int:
    """A place before ``upto``, and near it, where a frame or a file begins."""
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
    """Where the first frame, blank or damage ends."""
    reader = LogReader(log.layout)
    for event in reader.events(log.start, log.end):
        if isinstance(event, Run):
            return event.window.base + int(event.rows[0, r.POSITION] + event.rows[0, r.SIZE])
        if isinstance(event, LogEnd):
            break
        return min(event.offset + event.length, log.end)
    return log.end


def _counted(log: Backlog, wanted: MessageFilter, limit: int) -> tuple[Int64, int]:
    """Where the first wanted messages end, and up to where the log was looked at."""
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
