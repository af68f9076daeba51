"""The delay of each level, as a store's own schedule queues tell it.

A unit of ``SCHEDULE_TOPIC_XXXX`` carries its message's delivery time, and the message its store
time: the difference is the level's delay. So a store with levels of its own is read right without
its broker's configuration.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

from logquarry.format import delay, frame, queue_entry

if TYPE_CHECKING:
    from logquarry.files.layout import StoreLayout

_LONGEST_MS = 400 * 86_400_000
_SECOND_MS = 1_000
_MOST_LOOKED_AT = 9


def levels_of(layout: StoreLayout) -> tuple[int, ...]:
    """Delay of each level in milliseconds, level 1 first.

    As stated where the configuration differs from RocketMQ's default; else as the first readable
    units of each schedule queue tell, and the default where none does.
    """
    stated = layout.config.delay_levels_ms
    if stated != delay.parse_levels(delay.DEFAULT_LEVELS):
        return stated
    levels = list(stated)
    for topic, queue_id in layout.queue_names:
        if topic != delay.SCHEDULE_TOPIC or not 0 <= queue_id < len(levels):
            continue
        told = _told_by(layout, queue_id)
        if told is not None:
            levels[queue_id] = told
    return tuple(levels)


def levels_text(levels_ms: tuple[int, ...]) -> str:
    """Levels as ``messageDelayLevel`` states them, in whole seconds.

    3.x took the time of delivery from its clock, some milliseconds later.
    """
    return " ".join(f"{round(ms / _SECOND_MS)}s" for ms in levels_ms)


def _told_by(layout: StoreLayout, queue_id: int) -> int | None:
    """What most of a queue's first units say: a single one may be harmed."""
    told = Counter(islice(_delays(layout, queue_id), _MOST_LOOKED_AT))
    return told.most_common(1)[0][0] if told else None


def _delays(layout: StoreLayout, queue_id: int) -> Iterator[int]:
    log = layout.commit_log
    for file in layout.queue(delay.SCHEDULE_TOPIC, queue_id).files:
        try:
            data = layout.open_file(file.path).window(0, file.size)
        except FileNotFoundError:
            continue
        for position in range(0, len(data) - queue_entry.UNIT_SIZE + 1, queue_entry.UNIT_SIZE):
            unit = queue_entry.decode_at(data, position)
            if not unit.is_written:
                break
            at = log.at(unit.physical_offset)
            if unit.is_filler or at is None:
                continue
            found = _store_time(layout, at.path, at.base, unit)
            if found is not None and 0 < unit.tags_code - found <= _LONGEST_MS:
                yield unit.tags_code - found


def _store_time(
    layout: StoreLayout, path: str, base: int, unit: queue_entry.QueueEntry
) -> int | None:
    try:
        window = layout.open_file(path).window(unit.physical_offset - base, unit.size)
    except FileNotFoundError:
        return None
    data = bytes(window[: unit.size])
    outcome = frame.decode_at(data, 0, base=unit.physical_offset, check_crc=False)
    return outcome.store_timestamp if isinstance(outcome, frame.Frame) else None
