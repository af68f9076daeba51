"""Searches a queue for the message that was stored at a given time, as RocketMQ does."""

from __future__ import annotations

from collections.abc import Callable

from logquarry.format import java
from logquarry.format.arrays import Records

StoreTime = Callable[[int, int], int]
"""Function (physical offset, size) -> store time of the message in ms; -1 without a message."""


def search_time(
    units: Records, low: int, timestamp: int, store_time: StoreTime, log_min_offset: int
) -> int | None:
    """Find the index of the entry by the same binary search as Java.

    Return -1 if the log has none of the messages, and None if the search meets an unwritten entry.
    If the log lacks a message that the search reads, Java returns the queue offset 0. This function
    then returns a large negative index, which the caller turns into 0.
    """
    high = len(units) - 1
    left = right = left_time = right_time = -1
    while high >= low:
        middle = (low + high) // 2
        physical_offset, size, _ = units[middle].item()
        if size <= 0 or physical_offset < 0:
            return None
        if physical_offset < log_min_offset:
            # QUIRK: this step sets left, but not left_time. So left is the result only if a later
            # step sets left_time.
            low, left = middle + 1, middle
            continue
        found = store_time(physical_offset, size)
        if found < 0:
            return java.LONG_MIN
        if found == timestamp:
            return middle
        if found > timestamp:
            high, right, right_time = middle - 1, middle, found
        else:
            low, left, left_time = middle + 1, middle, found
    if left_time == -1:
        return right
    if right_time == -1:
        return left
    return right if abs(timestamp - left_time) > abs(timestamp - right_time) else left
