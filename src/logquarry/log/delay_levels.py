"""Finds the delay levels of a store from the entries of its schedule queues.

An entry of SCHEDULE_TOPIC_XXXX carries the delivery time of its message, and the message carries
its store time. The difference is the delay of the level. So the reader needs no broker
configuration for a store with its own levels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Protocol

from logquarry.config import StoreConfig
from logquarry.format import frame, queue_entry
from logquarry.format import properties as props
from logquarry.log.file_sequence import FileSequence
from logquarry.log.filesystem import FileView


class Schedule(Protocol):
    """The files of a store that show its delay levels: log and schedule queues."""

    config: StoreConfig

    @property
    def kept_settings(self) -> Mapping[str, Any]:
        """The settings that the store keeps."""

    @property
    def queue_names(self) -> tuple[tuple[str, int], ...]:
        """(topic, queue id) of each consume queue."""

    @property
    def commit_log(self) -> FileSequence:
        """The files of the commit log."""

    def queue(self, topic: str, queue_id: int) -> FileSequence:
        """The files of a consume queue."""

    def open_file(self, path: str) -> FileView:
        """Open a file below the root."""


_LONGEST_MS = 400 * 86_400_000
_SECOND_MS = 1_000
_MOST_LOOKED_AT = 9


def levels_of(layout: Schedule) -> tuple[int, ...]:
    """Delay of each level in milliseconds, level 1 first.

    If the configured levels differ from RocketMQ's defaults, they are used. Else each level comes
    from the first readable entries of its schedule queue, or is the default.
    """
    stated = layout.config.delay_levels_ms
    if stated not in map(props.parse_levels, (props.DEFAULT_LEVELS, props.LEVELS_3)):
        return stated
    kept = layout.kept_settings.get("message_delay_level")
    levels = list(stated if kept is None else props.parse_levels(kept))
    for topic, queue_id in layout.queue_names:
        if topic != props.SCHEDULE_TOPIC or not 0 <= queue_id < len(levels):
            continue
        told = _told_by(layout, queue_id)
        if told is not None:
            levels[queue_id] = told
    return tuple(levels)


def levels_text(levels_ms: tuple[int, ...]) -> str:
    """Format levels as ``messageDelayLevel``, in whole seconds.

    The delays are rounded because 3.x read the delivery time from its clock, some ms later.
    """
    return " ".join(f"{round(ms / _SECOND_MS)}s" for ms in levels_ms)


def _told_by(layout: Schedule, queue_id: int) -> int | None:
    """The most frequent delay among a queue's first entries: a single entry may be damaged."""
    told = Counter(islice(_delays(layout, queue_id), _MOST_LOOKED_AT))
    return told.most_common(1)[0][0] if told else None


def _delays(layout: Schedule, queue_id: int) -> Iterator[int]:
    log = layout.commit_log
    for file in layout.queue(props.SCHEDULE_TOPIC, queue_id).files:
        try:
            view = layout.open_file(file.path)
        except FileNotFoundError:
            continue
        data, start = memoryview(b""), 0
        for position in range(0, view.size - queue_entry.UNIT_SIZE + 1, queue_entry.UNIT_SIZE):
            if position - start + queue_entry.UNIT_SIZE > len(data):
                data, start = view.window(position, queue_entry.UNIT_SIZE), position
            entry = queue_entry.decode_at(data, position - start)
            if not entry.is_written:
                break
            at = log.at(entry.physical_offset)
            if entry.is_filler or at is None:
                continue
            found = _store_time(layout, at.path, at.base, entry)
            if found is not None and 0 < entry.tags_code - found <= _LONGEST_MS:
                yield entry.tags_code - found


def _store_time(
    layout: Schedule, path: str, base: int, entry: queue_entry.QueueEntry
) -> int | None:
    try:
        window = layout.open_file(path).window(entry.physical_offset - base, entry.size)
    except FileNotFoundError:
        return None
    data = bytes(window[: entry.size])
    outcome = frame.decode_at(data, 0, base=entry.physical_offset, check_crc=False)
    return outcome.store_timestamp if isinstance(outcome, frame.Frame) else None
