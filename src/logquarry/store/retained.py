"""Messages and bytes that the queues keep in the log, counted again only where that changed.

Nothing is counted when a message is put or dispatched. Whoever asks pays for the units that are new
since the last time, 20 bytes a message, and once the log begins elsewhere for those files of queues
that lost something.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from logquarry.store.queue.consume_queue import Queue
from logquarry.store.queue.log_queues import QueueKey
from logquarry.store.queue.unit_counts import UnitCount, count_units


class _Counted:
    """What is known of one queue: the counts of its files by their numbers, and up to where."""

    __slots__ = ("files", "until")

    def __init__(self) -> None:
        self.files: dict[int, UnitCount] = {}
        self.until = 0


class RetainedCounter:
    """Counts what the queues of one store keep. Any thread may ask."""

    def __init__(self) -> None:
        self._counting = threading.Lock()
        self._queues: dict[QueueKey, _Counted] = {}
        self._log_start = 0

    def count(
        self, queues: Iterable[Queue], log_start: int, log_end: int
    ) -> dict[QueueKey, UnitCount]:
        """What each queue keeps now.

        Args:
            queues: all queues of the store.
            log_start: where the log begins.
            log_end: where it ends.
        """
        with self._counting:
            has_moved, self._log_start = log_start != self._log_start, log_start
            found = {}
            for queue in queues:
                key = queue.topic, queue.queue_id
                known = self._queues.setdefault(key, _Counted())
                low, high = queue.bounds()
                if high < known.until:
                    # Another queue by the same name: its topic was deleted, and came again.
                    known = self._queues[key] = _Counted()
                if has_moved:
                    self._drop(queue, known, log_start, log_end)
                start = max(low, known.until)
                known.until = start + self._add(queue, known, start, high, log_start, log_end)
                total = UnitCount()
                for count in known.files.values():
                    total = total.plus(count)
                found[key] = total
            for key in self._queues.keys() - found.keys():
                del self._queues[key]
            return found

    @staticmethod
    def _add(
        queue: Queue, known: _Counted, start: int, stop: int, log_start: int, log_end: int
    ) -> int:
        """Count the units in a range; how many offsets of it are done with."""
        done = start
        for first, units in queue.runs(start, stop):
            # Of a log that somebody else writes the end may be known later than its queues.
            behind = units["physical_offset"] >= log_end
            count = int(behind.argmax()) if bool(behind.any()) else len(units)
            number = first // queue.units_per_file
            before = known.files.get(number, UnitCount())
            known.files[number] = before.plus(count_units(units[:count], log_start, log_end))
            done = first + count
            if count < len(units):
                break
        return done - start

    @staticmethod
    def _drop(queue: Queue, known: _Counted, log_start: int, log_end: int) -> None:
        """Count the first files again, up to one of which nothing is gone."""
        room = queue.units_per_file
        for number in sorted(known.files):
            start, stop = number * room, min((number + 1) * room, known.until)
            total, is_whole = UnitCount(), False
            for first, units in queue.runs(start, stop):
                is_whole = first == start and int(units["physical_offset"][0]) >= log_start
                total = total.plus(count_units(units, log_start, log_end))
            if total.messages:
                known.files[number] = total
            else:
                del known.files[number]
            if is_whole:
                break
