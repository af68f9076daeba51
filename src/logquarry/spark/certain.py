"""Ranges of the log of which it is known that all of it is there.

A stream is planned up to an offset at which the log had been followed without a doubt. Whatever a
reader finds missing before that is damage, and never the log's end; whatever stands behind it is
the next batch's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from logquarry.scan.walk import DamagedSpan, Event, LogEnd

LOST_END: Final = "lost_end"
"""Kind of the bytes that were the log's when a batch of a stream was planned, and are no more."""


def certain_events(
    events: Iterable[Event], stop: int, path_at: Callable[[int], str]
) -> Iterator[Event]:
    """What stands in a part of the log whose end is known, as a reader tells it.

    Args:
        events: what a reader found, from any place before ``stop``.
        stop: physical offset up to which the log was there.
        path_at: the path of the file that holds an offset.
    """
    for event in events:
        if isinstance(event, LogEnd | DamagedSpan) and event.offset >= stop:
            return
        if isinstance(event, LogEnd) or (
            isinstance(event, DamagedSpan) and (event.is_tail or event.ends_log)
        ):
            # A log that lost its end to a power cut, or was replaced by another.
            why = "the log went on here when it was followed, and holds nothing whole any more"
            yield DamagedSpan(
                event.offset, stop - event.offset, LOST_END, why, path_at(event.offset)
            )
            return
        yield event
