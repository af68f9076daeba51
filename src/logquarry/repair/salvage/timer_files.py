"""Writes the timer wheel of a salvaged store, for the timer messages that wait (RocketMQ 5).

The wheel names physical offsets, and salvage may move frames. So salvage does not copy the wheel:
it finds the messages that wait in the new store, and writes a new wheel for them.
"""

from __future__ import annotations

from pathlib import Path

from logquarry.disk.disk import Disk
from logquarry.format import timer
from logquarry.log.layout import StoreLayout
from logquarry.read import timers
from logquarry.write.timer_files import timer_log_file_size, write_timer_files


def count_timers(layout: StoreLayout) -> int:
    """The number of messages in a store that wait for their time."""
    return len(timers.timers_of(layout).due())


def make_timer_files(layout: StoreLayout, disk: Disk, root: Path, now: int) -> int:
    """Write wheel, timer log and ``timercheck`` of a new store.

    Args:
        layout: the damaged store.
        disk: disk of the new store.
        root: its folder; log and queues are complete.
        now: the time in milliseconds.

    Returns:
        The number of messages that wait for their time.

    Raises:
        StoreUnavailable: if the disk fails or is full.
    """
    new = StoreLayout.open(root, layout.config)
    if (timer.TOPIC, timers.QUEUE_ID) not in new.queue_names:
        return 0
    check = timers.check_or_none(layout)
    found = timers.timers_of(new, check)
    write_timer_files(
        *(disk, root, found, now),
        file_size=timer_log_file_size(layout),
        precision_ms=timers.precision(layout, check.read_time),
    )
    return len(found.due())
