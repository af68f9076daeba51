"""Delivers timer messages, for example those with the property TIMER_DELIVER_MS
(``TimerMessageStore``).

::

    queue of rmq_sys_wheel_timer    messages in the order of their puts
        | in memory: heap by slot
        v
    the span of the slot is over    -> put to the real topic and queue
        v
    .logquarry/timers.json          progress, written periodically and at the end
    timerwheel, timerlog/, config/timercheck    written at the end, for a broker

Each message is delivered once, and never before its time. If a message cannot be delivered, the
delivery logs an error and continues with the next one. After a crash, the delivery searches the log
for the messages that were delivered since the last save. A broker that opens the store after a
crash does not search the log. Such a broker continues from the files of the timer wheel, which are
older than the latest deliveries, and repeats these deliveries. To prevent this, open the store with
``StoreConfig(deliver_delayed=True)`` and close it again before the broker starts: the close then
writes a new timer wheel.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import partial
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import Any, Final

from logquarry.disk.disk import Disk
from logquarry.format import properties as props
from logquarry.format import timer
from logquarry.format.timer import TimerCheck
from logquarry.log.store_files import SIDECAR
from logquarry.message import Message, put_again
from logquarry.read.live_read import ServedLog
from logquarry.read.queue import Queue
from logquarry.read.timers import QUEUE_ID, Known, Timer, Timers, find_timers
from logquarry.repair.audit.timer_files import write_timer_files
from logquarry.store.schedule.delivery import AT_ONCE, BYTES_AT_ONCE, Delivery, PutInOrder
from logquarry.store.schedule.progress import INVALID_JSON
from logquarry.systems import read_file

logger = logging.getLogger(__name__)

PROGRESS_FILE: Final = "timers.json"
_FOREVER: Final = (1 << 63) - 1


class TimerDelivery(Delivery):
    """Delivers timer messages.

    ``known`` describes earlier deliveries, as read from the file ``timercheck``.
    """

    def __init__(
        self,
        log: ServedLog,
        put: PutInOrder,
        disk: Disk,
        root: Path,
        sync_log: Callable[[], object],
        known: Known,
        *,
        precision_ms: int,
        file_size: int,
    ) -> None:
        super().__init__(log, put)
        self._disk = disk
        self._root = root
        self._sync_log = sync_log
        self._precision = precision_ms
        self._file_size = file_size
        queue = self._queue
        known = self._with_progress(known, 0 if queue is None else queue.max_offset)
        self._timers: Timers = find_timers(queue, log.message, log.runs, known)
        self._heap = [_rank(one) for one in self._timers.waiting.values()]
        heapify(self._heap)
        self._is_saved = self._has_files = False
        self._last_left_out = -1
        """Delivered messages up to this slot may be missing in the saved list."""

    @property
    def waiting(self) -> int:
        """The number of messages that wait, in the part of the queue that was read so far."""
        return len(self._timers.waiting)

    @property
    def is_waiting(self) -> bool:
        """See :attr:`Delivery.is_waiting`."""
        return bool(self._timers.waiting)

    @property
    def _queue(self) -> Queue | None:
        return self._log.queue(timer.TOPIC, QUEUE_ID)

    # ------------------------------------------------------------------------------------- work
    def deliver(self, now: int, *, limit: int | None = None) -> int:
        """See :meth:`Delivery.deliver`."""
        count = 0
        with self._lock:
            self._read()
            while limit is None or count < limit:
                due = self._due(now, AT_ONCE if limit is None else min(AT_ONCE, limit - count))
                if not due:
                    break
                count += self._deliver(due, now)
        return count

    def _read(self) -> None:
        queue = self._queue
        timers = self._timers
        if queue is None or queue.max_offset <= timers.stop:
            return
        for offset, entry in queue.entries(max(timers.stop, queue.min_offset)):
            frame = None
            if not entry.is_filler:
                frame = self._log.message(entry.physical_offset, entry.size)
            one = None if frame is None else timers.add(frame, offset)
            timers.stop, timers.last = offset + 1, entry
            self._is_saved = self._has_files = False
            if one is not None:
                heappush(self._heap, _rank(one))

    def _due(self, now: int, limit: int) -> list[Timer]:
        heap, waiting = self._heap, self._timers.waiting
        found: list[Timer] = []
        room = BYTES_AT_ONCE
        while heap and len(found) < limit and room > 0:
            slot, _, offset = heap[0]
            if slot + self._precision > now:
                break
            heappop(heap)
            one = waiting.get(offset)
            if one is None:
                continue
            if one.deletes is not None:
                # Within a slot, the heap returns the deleting messages first. So the messages that
                # `one` deletes were not delivered yet.
                for target in list(self._timers.deleted_by(one)):
                    self._finish(waiting[target])
                self._finish(one)
                continue
            found.append(one)
            room -= one.size
        return found

    def _deliver(self, due: list[Timer], now: int) -> int:
        delivered = 0
        try:
            for one, _, why in self._put_due(due, partial(self._message, now)):
                self._finish(one)
                if why is None:
                    delivered += 1
                else:
                    logger.error(
                        "the timer message at physical offset %d (queue offset %d) cannot be "
                        "delivered: %s",
                        *(one.physical_offset, one.queue_offset, why),
                    )
        finally:
            # If an error stopped the put, return the undelivered messages to the heap, so that the
            # next call tries again.
            for one in due:
                if one.queue_offset in self._timers.waiting:
                    heappush(self._heap, _rank(one))
        return delivered

    def _message(self, now: int, one: Timer) -> Message:
        frame = self._frame(one.physical_offset, one.size)
        values = props.decode_bytes(frame.properties)
        values[props.TIMER_ENQUEUE_MS] = str(one.store_timestamp)
        values[props.TIMER_DEQUEUE_MS] = str(now)
        return put_again(frame, one.topic, one.queue_id, values, delays=False, waits=False)

    def _finish(self, one: Timer) -> None:
        self._timers.remove(one.queue_offset)
        self._is_saved = self._has_files = False

    # --------------------------------------------------------------------------------- progress
    # The progress file contains `read_time` and `enqueued` (for a `TimerCheck`), the log's end, and
    # the queue offset of the first waiting message (`first`). A reader of the file concludes that
    # messages before `first`, or with a slot before `read_time`, were delivered. `delivered` lists
    # all other delivered messages. The log is synced before the file is written, so a power cut
    # cannot remove a delivery that the file lists.

    def save(self) -> bool:
        """See :meth:`Delivery.save`."""
        with self._lock:
            return self._save()

    def _save(self) -> bool:
        timers = self._timers
        if self._is_saved or not timers.stop:
            return False
        waiting = timers.waiting.values()
        read_time = min((one.slot_time for one in waiting), default=_FOREVER)
        first = min(timers.waiting, default=timers.stop)
        # A reader of the file treats a message as delivered if its slot is before read_time, or if
        # it is before the first waiting message. So the file need not list such messages.
        if read_time <= self._last_left_out:
            # The clock was set back, so read_time is lower than at the last save. The last save may
            # have omitted delivered messages whose slot is now at or after read_time. So add the
            # delivered messages from `first` on to the list again.
            for offset in range(first, timers.stop):
                if offset not in timers.waiting:
                    timers.done.setdefault(offset, self._last_left_out)
            self._last_left_out = -1
        left_out = [slot for slot in timers.done.values() if slot < read_time]
        self._last_left_out = max([self._last_left_out, *left_out])
        timers.done = {
            offset: slot
            for offset, slot in timers.done.items()
            if slot >= read_time and offset >= first
        }
        document = {
            "position": self._log.end,
            "first": first,
            "enqueued": timers.stop,
            "read_time": read_time,
            "delivered": sorted(timers.done),
        }
        self._sync_log()
        self._disk.replace(self._progress_path, json.dumps(document).encode())
        self._is_saved = True
        return True

    def close(self, now: int) -> None:
        """Save the progress, and write a timer wheel from which a broker can continue.

        Raises:
            StoreUnavailable: if a write failed. Then the broker's timer wheel is old, and the
                broker delivers some messages again.
        """
        with self._lock:
            self._save()
            if self._timers.stop and not self._has_files:
                write_timer_files(
                    *(self._disk, self._root, self._timers, now),
                    file_size=self._file_size,
                    precision_ms=self._precision,
                )
                self._has_files = True

    @property
    def _progress_path(self) -> Path:
        return self._root / SIDECAR / PROGRESS_FILE

    def _with_progress(self, known: Known, queue_end: int) -> Known:
        try:
            saved: dict[str, Any] = json.loads(read_file(self._progress_path))
            position, first = int(saved["position"]), int(saved["first"])
            enqueued, read_time = int(saved["enqueued"]), int(saved["read_time"])
            delivered = frozenset(map(int, saved["delivered"]))
            if not (0 <= first <= enqueued and position >= 0 and abs(read_time) <= _FOREVER):
                # With a wrong `first`, waiting messages could be treated as delivered.
                raise ValueError("its numbers contradict each other")
        except FileNotFoundError:
            return known
        except (OSError, *INVALID_JSON) as error:
            logger.warning("%s: ignored: %s", self._progress_path, error)
            return known
        if position > self._log.end or enqueued > queue_end:
            return known
        check = TimerCheck(read_time, 0, enqueued, enqueued)
        checks = (*known.checks, check)
        return Known(checks, delivered, first, position, known.wheel_since)


def _rank(one: Timer) -> tuple[int, bool, int]:
    """Return the key that sorts the heap by slot.

    Within a slot, messages that delete another message come first.
    """
    return one.slot_time, one.deletes is None, one.queue_offset
