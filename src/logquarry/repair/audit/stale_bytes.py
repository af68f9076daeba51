"""Recognizes stale bytes: bytes of earlier messages that a broker wrote after the log's end.

With ``writeWithoutMmap``, RocketMQ 5.5.0 copies an append into one of 16 shared buffers, and writes
the buffer up to the next page of the file (``DefaultMappedFile``). The broker never clears a
buffer. So the rest of the page receives bytes of earlier, longer appends::

    buffer   | last append | older append | append before that, longer | zeros
    file     | last frame  | stale bytes up to the end of the page     | next page

Byte k of the buffer is byte k of the latest append with more than k bytes. Stale bytes are never a
valid frame, because their PHYSICALOFFSET is that of the earlier message.
"""

from __future__ import annotations

import heapq
from typing import Final

import numpy as np

from logquarry.format.arrays import POSITION, SIZE, Bytes, Int64
from logquarry.log.layout import StoreLayout
from logquarry.log.walk import LogReader, Run

_PAGES: Final = (4 << 10, 16 << 10, 64 << 10)
"""Page sizes of the systems that run RocketMQ."""
_BACK: Final = 16 << 20
"""Number of bytes before the log's end to search for the earlier messages."""
_MOST_FRAMES: Final = 1 << 14
_MOST_BATCH: Final = 128
"""Maximum number of messages in the last append, which can be a batch."""
_CERTAIN: Final = 32
"""Number of bytes that suffice as evidence if the store was shut down cleanly."""


def are_stale_bytes(layout: StoreLayout, end: int, *, is_closed: bool) -> bool:
    """Whether the bytes after the log's end come from earlier messages in a reused buffer.

    The last frame must end at physical offset ``end``. If the store was shut down cleanly with
    complete queues, a match of the first bytes suffices, because earlier messages may have expired.
    """
    file = layout.commit_log.at(end)
    reader = LogReader(layout, check_crc=False)
    last = reader.data_end(end)
    if file is None or last <= end:
        return False
    at = end - file.base
    rests = [-at % page for page in _PAGES]
    rest = next((rest for rest in rests if last <= end + rest), None)
    if rest is None:
        return False
    if reader.find(end, end + rest) is not None:
        # These bytes are whole frames, which an earlier truncation left.
        return False
    window = reader.window(end, rest)
    tail = window.data[: min(rest, window.length)].copy()
    found = _Appends.before(reader, end)
    if found is None:
        return False
    enough = min(_CERTAIN, last - end) if is_closed else len(tail)
    return any(found.explained(tail, number) >= enough for number in found.last_appends())


class _Appends:
    def __init__(self, data: Bytes, starts: Int64) -> None:
        self._data = data
        self._starts = starts
        # An append ends with a frame; a batch is one append of several frames.
        self._is_end = np.zeros(len(data) + 1, np.bool_)
        self._is_end[starts] = True
        self._is_end[len(data)] = True

    @classmethod
    def before(cls, reader: LogReader, end: int) -> _Appends | None:
        pieces: list[Bytes] = []
        starts: list[Int64] = []
        length, reached = 0, 0
        first = max(reader.files.start, end - _BACK)
        for event in reader.events(first, end, resync=True):
            if not isinstance(event, Run):
                continue
            at = event.rows[:, POSITION].astype(np.int64)
            stop = int(at[-1]) + int(event.rows[-1, SIZE])
            pieces.append(event.window.data[int(at[0]) : stop].copy())
            starts.append(at - at[0] + length)
            length += len(pieces[-1])
            reached = event.end
        if reached != end:
            return None
        return cls(np.concatenate(pieces), np.concatenate(starts)[-_MOST_FRAMES:])

    def last_appends(self) -> range:
        count = len(self._starts)
        return range(count - 1, max(-1, count - 1 - _MOST_BATCH), -1)

    def explained(self, tail: Bytes, number: int) -> int:
        """Return how many bytes of ``tail`` come from appends before the last append.

        The last append begins with frame ``number``. ``tail`` ends with a page.
        """
        data, most = self._data, len(tail)
        from_buffer = len(data) - int(self._starts[number])
        nonzero = np.flatnonzero(tail)
        zeros_from = int(nonzero[-1]) + 1 if len(nonzero) else 0
        # For each position in the tail, the latest append that ends there.
        reached = {0: number}
        due, best = [0], 0
        while due:
            begin = heapq.heappop(due)
            if begin >= zeros_from:
                # No append was longer, so the rest of the buffer is zero.
                return most
            numbers = np.arange(reached[begin])
            for place in range(begin, most):
                sources = self._starts[numbers] + (from_buffer + place)
                is_inside = sources < len(data)
                numbers, sources = numbers[is_inside], sources[is_inside]
                if place > begin:
                    ends = numbers[self._is_end[sources]]
                    if len(ends):
                        if place not in reached:
                            heapq.heappush(due, place)
                        reached[place] = max(reached.get(place, -1), int(ends[-1]))
                numbers = numbers[data[sources] == tail[place]]
                if not len(numbers):
                    break
                best = max(best, place + 1)
            else:
                return most
        return best
