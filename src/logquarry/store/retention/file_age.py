"""How old a file of the log is: when its last message was stored, as that message says.

RocketMQ takes the file's modification time, which a copy of the store, a backup that was put back
or a ``touch`` moves (apache/rocketmq#4549).
"""

from __future__ import annotations

from typing import Final

from logquarry.files.layout import StoreFile, StoreLayout
from logquarry.scan import columns
from logquarry.scan.walk import LogReader, Run

_FIRST_STEP: Final = 1 << 20
_GROWTH: Final = 8


def last_time_in(layout: StoreLayout, file: StoreFile) -> int | None:
    """The store time of the last message that begins in a file, in milliseconds; None without one.

    Mostly reads the file's last mebibyte: a frame names the place where it stands, so that a walk
    may begin anywhere.
    """
    start, stop = file.base, file.base + layout.commit_log.file_size
    step = _FIRST_STEP
    while True:
        begin = max(start, stop - step)
        found = _last_time(layout, begin, stop, resync=begin > start)
        if found is not None or begin == start:
            return found
        step *= _GROWTH


def first_time_from(layout: StoreLayout, start: int, stop: int) -> int | None:
    """The store time of the first message in a part of the log; None without one."""
    for event in LogReader(layout, check_crc=False, batch_bytes=1).events(start, stop):
        if isinstance(event, Run) and len(event.rows):
            return _time(event, 0)
    return None


def _last_time(layout: StoreLayout, start: int, stop: int, *, resync: bool) -> int | None:
    last: Run | None = None
    for event in LogReader(layout, check_crc=False).events(start, stop, resync=resync):
        if isinstance(event, Run) and len(event.rows):
            last = event
    return None if last is None else _time(last, -1)


def _time(run: Run, at: int) -> int:
    rows = run.rows[at:] if at < 0 else run.rows[at : at + 1]
    return int(columns.fixed_fields(run.window, rows, ("store_timestamp",))["store_timestamp"][0])
