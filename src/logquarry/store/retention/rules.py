"""How old a file of the log is: when its last message was stored, as that message says.

RocketMQ takes the file's modification time, which a copy of the store, a backup that was put back
or a ``touch`` moves (apache/rocketmq#4549).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Any, Final

from logquarry.disk.queue_folders import link_of
from logquarry.errors import UsageError
from logquarry.log import columns
from logquarry.log.layout import StoreFile, StoreLayout
from logquarry.log.walk import LogReader, Run

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


# --------------------------------------------------------------------------------------------------
# How full the disk of a store is, and what deleting a file of it would free.

_BLOCK: Final = 512
"""What ``st_blocks`` counts, whatever blocks the disk has."""


@dataclass(frozen=True, slots=True)
class DiskUse:
    """A disk's bytes, as its users see them.

    Attributes:
        used: bytes that are taken.
        usable: bytes that are left to those who are not root.
    """

    used: int
    usable: int

    @property
    def ratio(self) -> float:
        """How full it is, from 0 to 1. (RocketMQ has whole percents, rounded up.)"""
        whole = self.used + self.usable
        return self.used / whole if whole else 0.0

    def without(self, freed: int) -> DiskUse:
        """The same once some bytes are free."""
        freed = min(freed, self.used)
        return DiskUse(self.used - freed, self.usable + freed)


def disk_use(path: Path) -> DiskUse | None:
    """How full the disk is that a path is on; None if nobody can tell."""
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    used = (found.f_blocks - found.f_bfree) * found.f_frsize
    return DiskUse(used, found.f_bavail * found.f_frsize)


def freed_bytes(path: Path) -> int:
    """What deleting a file frees: its blocks, or nothing where it has a name elsewhere."""
    try:
        status = path.stat()
        # The writer's own second name goes with the first.
        names = 1 + link_of(path).exists()
    except OSError:
        return 0
    return status.st_blocks * _BLOCK if status.st_nlink <= names else 0


# --------------------------------------------------------------------------------------------------
# What may go: the rules of a retention, and when a running store is to ask them.
#
# A file of the log goes only where *every* rule that is given lets it, so that one more rule never
# takes more away. (RocketMQ takes what expired, and what the disk has no room for besides.)

HOUR_MS: Final = 3_600_000
FORCIBLY_RATIO: Final = 0.85
"""How full a disk is on which RocketMQ deletes what has not expired
(``rocketmq.broker.diskSpaceCleanForciblyRatio``)."""

_UNITS_MS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "h": HOUR_MS, "d": 24 * HOUR_MS}
_HOURS: Final = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class RetentionRules:
    """What may go. At least one of the first three is given; all that are given have to agree.

    Attributes:
        older_than_ms: files whose last message was stored at least this long ago.
        max_disk_ratio: files as long as the disk is fuller than this part of it (0 to 1), the
            oldest first.
        keep_bytes: files of which nothing is among so many newest bytes of the log.
        most_files: no more files of the log than these at a time.

    Raises:
        UsageError: if one of them makes no sense, or nothing says what may go.
    """

    older_than_ms: int | None = None
    max_disk_ratio: float | None = None
    keep_bytes: int | None = None
    most_files: int | None = None

    def __post_init__(self) -> None:
        if self.older_than_ms is None and self.max_disk_ratio is None and self.keep_bytes is None:
            raise UsageError(
                "nothing says what may go: an age, how full the disk may be, or how many bytes stay"
            )
        # What is no number is neither below nor above: it must not let everything go.
        if self.older_than_ms is not None and not self.older_than_ms >= 0:
            raise UsageError(f"the age of what goes is {self.older_than_ms} ms, below 0")
        if self.max_disk_ratio is not None and not 0 < self.max_disk_ratio <= 1:
            raise UsageError(f"a disk is never {self.max_disk_ratio:.0%} full")
        if self.keep_bytes is not None and not self.keep_bytes >= 0:
            raise UsageError(f"{self.keep_bytes} bytes cannot stay")
        if self.most_files is not None and self.most_files < 1:
            raise UsageError(f"at most {self.most_files} files are none")

    def to_json(self) -> dict[str, Any]:
        """The same as a JSON document."""
        return {
            "older_than_ms": self.older_than_ms,
            "max_disk_ratio": self.max_disk_ratio,
            "keep_bytes": self.keep_bytes,
            "most_files": self.most_files,
        }


def duration_ms(text: str) -> int:
    """Milliseconds of ``72h``, ``3d``, ``90m``, ``30s``, ``500ms``; a bare number is hours.

    Hours, as ``fileReservedTime`` counts them.

    Raises:
        UsageError: if it is no such time.
    """
    match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?)\s*(ms|s|m|h|d|)", text.strip().lower(), re.A)
    if match is None:
        raise UsageError(f"takes a time such as 72h, 3d or 30m, not {text!r}")
    return round(float(match[1]) * _UNITS_MS[match[2] or "h"])


def disk_ratio(text: str) -> float:
    """The ratio of ``0.75``, ``75%``, or ``75`` as ``diskMaxUsedSpaceRatio`` has it.

    Raises:
        UsageError: if it is none above 0 and up to 1.
    """
    match = re.fullmatch(r"(\d{1,3}(?:\.\d{1,6})?)\s*(%?)", text.strip(), re.A)
    number = float(match[1]) if match else 0.0
    if match is not None and (match[2] or number > 1):
        number /= 100
    if not 0 < number <= 1:
        raise UsageError(f"takes a part of the disk such as 0.75 or 75%, not {text!r}")
    return number


def delete_hours(when: str) -> frozenset[int]:
    """The hours of ``deleteWhen``: ``04``, or several with ``;`` between them.

    Raises:
        UsageError: if one is no hour of a day.
    """
    hours = [part.strip() for part in when.split(";")]
    if not all(re.fullmatch("[0-9]{1,2}", hour) and int(hour) < _HOURS for hour in hours):
        raise UsageError(f"delete_when takes hours such as 04 or 04;16, not {when!r}")
    return frozenset(int(hour) for hour in hours)


def is_delete_hour(when: str, now_ms: int, zone: tzinfo | None = None) -> bool:
    """Whether a time is in one of the hours of ``deleteWhen`` (``UtilAll.isItTimeToDo``).

    Args:
        when: the hours.
        now_ms: the time.
        zone: whose hours they are (default: this machine's).
    """
    return datetime.fromtimestamp(now_ms / 1_000, zone).hour in delete_hours(when)


def rules_due(
    *,
    now_ms: int,
    delete_when: str,
    older_than_ms: int,
    max_disk_ratio: float,
    forcibly: bool,
    used_ratio: float,
    most_files: int,
    zone: tzinfo | None = None,
) -> RetentionRules | None:
    """What a running store is to do now, None for nothing (``CleanCommitLogService``).

    In the hours of ``delete_when`` everything goes that has expired; at any hour as much of it as
    brings a disk that is too full below its ratio; and ``forcibly``, where the disk is fuller than
    FORCIBLY_RATIO, also what has not expired.

    Args:
        now_ms: the time.
        delete_when: the hours in which files go.
        older_than_ms: the age at which they expire.
        max_disk_ratio: how full the disk may be before they go at any hour.
        forcibly: whether files that have not expired may go, too.
        used_ratio: how full the disk is.
        most_files: of one run.
        zone: whose hours they are (default: this machine's).
    """
    if forcibly and used_ratio > FORCIBLY_RATIO:
        return RetentionRules(max_disk_ratio=FORCIBLY_RATIO, most_files=most_files)
    if is_delete_hour(delete_when, now_ms, zone):
        return RetentionRules(older_than_ms=older_than_ms, most_files=most_files)
    if used_ratio > max_disk_ratio:
        return RetentionRules(
            older_than_ms=older_than_ms, max_disk_ratio=max_disk_ratio, most_files=most_files
        )
    return None
