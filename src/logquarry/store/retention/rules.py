"""Computes what a retention depends on: the age of files, the use of the disk, and unread messages.

The age of a file is the time since its last message was stored. RocketMQ instead uses the file's
modification time, which changes if the store is copied, restored or touched (apache/rocketmq#4549).
As in RocketMQ, unread messages do not prevent a deletion; the plan only lists them.
"""

from __future__ import annotations

import logging
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Final

from logquarry import arguments
from logquarry.config import StoreConfig
from logquarry.dialect31.open_transactions import open_in, read_table
from logquarry.disk.config_file import consumer_offsets, delay_offsets
from logquarry.disk.name_guard import link_of
from logquarry.errors import UsageError
from logquarry.format import java, timer
from logquarry.format import properties as props
from logquarry.log.layout import StoreLayout
from logquarry.log.store_files import StoreFile
from logquarry.log.walk import LogReader, Run
from logquarry.paths import exists
from logquarry.read.commit_log import CommitLog
from logquarry.read.log_queues import QueueKey
from logquarry.read.queue import Queue
from logquarry.read.timers import QUEUE_ID, timers_of
from logquarry.store.consumer.group import RETRY_PREFIX
from logquarry.store.transaction.transaction import GROUP, HALF_TOPIC, OP_TOPIC, ended_by

DELAYED: Final = "(delayed messages that are not delivered)"
"""Value of :attr:`Unread.group` for delayed messages that were not delivered yet."""
OPEN: Final = "(transactions that are open)"
"""Value of :attr:`Unread.group` for open transactions (half or PREPARED messages)."""


@dataclass(frozen=True, slots=True)
class Unread:
    """Messages that a retention deletes although a consumer group has not read them.

    Attributes:
        group: name of the consumer group; DELAYED for delayed messages that are not delivered; OPEN
            for open transactions.
        offset: queue offset of the next message that the group would read. For OPEN, it is the
            queue offset of the first open half message, or the index of the first PREPARED
            message's entry in the state table.
    """

    topic: str
    queue_id: int
    group: str
    offset: int
    messages: int


def unread(
    layout: StoreLayout,
    log: CommitLog,
    queues: Sequence[Queue],
    firsts: Mapping[QueueKey, tuple[int, int]],
    start: int,
    cut: int,
) -> tuple[Unread, ...]:
    """List the groups that have not read all of the messages to delete.

    If a group has no known offset in a queue, all expiring messages of the queue are treated as
    unread.

    Args:
        firsts: for each queue from which messages are deleted, its first queue offset before and
            after the retention.
        start: the log's start before the retention.
        cut: the log's start after the retention.
    """
    # Log invalid files only at debug level, because a program can call this function often.
    consumed = consumer_offsets(layout, logging.DEBUG)
    levels = delay_offsets(layout, logging.DEBUG) or {}
    ends = {
        queue.queue_id: queue.max_offset for queue in queues if queue.topic == props.SCHEDULE_TOPIC
    }
    # If the saved offset is after the queue's end, the delivery ignores it and starts at the first
    # message.
    delivered = {
        level - 1: offset for level, offset in levels.items() if offset <= ends.get(level - 1, 0)
    }
    groups = {group for _, group in consumed} - {GROUP}
    readers = {name: offsets for name, offsets in consumed.items() if name[1] in groups}
    # Each consumer group also consumes its retry topic.
    readers = {(RETRY_PREFIX + group, group): {} for group in groups} | readers
    readers[props.SCHEDULE_TOPIC, DELAYED] = delivered
    by_topic: dict[str, list[int]] = defaultdict(list)
    for topic, queue_id in firsts:
        by_topic[topic].append(queue_id)
    found = []
    for (topic, group), offsets in sorted(readers.items()):
        for queue_id in sorted(by_topic[topic]):
            before, after = firsts[topic, queue_id]
            # A group without an offset in a queue starts at the first message.
            offset = offsets.get(queue_id, 0)
            lost = after - max(offset, before)
            if lost > 0:
                found.append(Unread(topic, queue_id, group, offset, lost))
    found += _timers(layout, firsts)
    found += _halves(log, queues, firsts, consumed)
    if layout.has_state_table and cut > start:
        found += _prepared(layout, log, start, cut)
    return tuple(found)


def _timers(layout: StoreLayout, firsts: Mapping[QueueKey, tuple[int, int]]) -> Iterator[Unread]:
    key = timer.TOPIC, QUEUE_ID
    if key in firsts:
        before, after = firsts[key]
        waiting = sorted(at for at in timers_of(layout).waiting if before <= at < after)
        if waiting:
            yield Unread(*key, DELAYED, waiting[0], len(waiting))


def _halves(
    log: CommitLog,
    queues: Sequence[Queue],
    firsts: Mapping[QueueKey, tuple[int, int]],
    consumed: Mapping[tuple[str, str], Mapping[int, int]],
) -> Iterator[Unread]:
    passed = consumed.get((HALF_TOPIC, GROUP), {})
    passed_ops = consumed.get((OP_TOPIC, GROUP), {})
    for (topic, queue_id), (before, after) in sorted(firsts.items()):
        first = max(before, passed.get(queue_id, 0))
        if topic != HALF_TOPIC or first >= after:
            continue
        ops = next(
            (queue for queue in queues if (queue.topic, queue.queue_id) == (OP_TOPIC, queue_id)),
            None,
        )
        ended = ended_by(ops, log.sound_frame_at, passed_ops.get(queue_id, 0))
        still = [at for at in range(first, after) if at not in ended]
        if still:
            yield Unread(topic, queue_id, OPEN, still[0], len(still))


def _prepared(layout: StoreLayout, log: CommitLog, start: int, cut: int) -> Iterator[Unread]:
    numbers: dict[QueueKey, list[int]] = defaultdict(list)
    for offset, transaction in open_in(read_table(layout)).items():
        frame = log.sound_frame_at(offset) if start <= offset < cut else None
        if frame is not None:
            topic = frame.topic.decode("utf-8", java.UTF8_ERRORS)
            numbers[topic, frame.queue_id].append(transaction.number)
    for (topic, queue_id), found in sorted(numbers.items()):
        yield Unread(topic, queue_id, OPEN, min(found), len(found))


_FIRST_STEP: Final = 1 << 20
_GROWTH: Final = 8


def last_time_in(layout: StoreLayout, file: StoreFile) -> int | None:
    """Return the store time (ms) of the last message that starts in a file, or None."""
    start, stop = file.base, file.base + layout.commit_log.file_size
    step = _FIRST_STEP
    while True:
        begin = max(start, stop - step)
        found = _last_time(layout, begin, stop, resync=begin > start)
        if found is not None or begin == start:
            return found
        step *= _GROWTH


def first_time_from(layout: StoreLayout, start: int, stop: int) -> int | None:
    """Return the store time (ms) of the first message in a part of the log, or None."""
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
    # Import late, because the module imports pyarrow. The command for statistics does not need
    # pyarrow.
    from logquarry.log import columns

    rows = run.rows[at:] if at < 0 else run.rows[at : at + 1]
    return int(columns.fixed_fields(run.window, rows, ("store_timestamp",))["store_timestamp"][0])


# --------------------------------------------------------------------------------------------------
# Use of the disk

_BLOCK: Final = 512
"""Bytes in one unit of ``st_blocks``, on every disk."""


@dataclass(frozen=True, slots=True)
class DiskUse:
    """How full a disk is, in bytes.

    ``usable`` is the free space that users other than root can use.
    """

    used: int
    usable: int

    @property
    def ratio(self) -> float:
        """Used part of the disk, from 0 to 1. (RocketMQ rounds up to a whole percent.)"""
        whole = self.used + self.usable
        return self.used / whole if whole else 0.0

    def without(self, freed: int) -> DiskUse:
        """Return how full the disk is after ``freed`` more bytes become free."""
        freed = min(freed, self.used)
        return DiskUse(self.used - freed, self.usable + freed)


def disk_use(path: Path) -> DiskUse | None:
    """Return how full the disk is that holds a path; None if unknown."""
    try:
        found = os.statvfs(path)
    except (OSError, AttributeError):  # Windows has no statvfs
        return None
    used = (found.f_blocks - found.f_bfree) * found.f_frsize
    return DiskUse(used, found.f_bavail * found.f_frsize)


def least_used(paths: Iterable[Path]) -> DiskUse | None:
    """Of the disks that hold the paths, return the use of the least full one; None if unknown.

    As in RocketMQ, files are deleted to free space only if all disks of the log are too full
    (``CleanCommitLogService.isSpaceToDelete``).
    """
    found = [use for path in paths if (use := disk_use(path)) is not None]
    return min(found, key=lambda use: use.ratio, default=None)


def freed_bytes(path: Path) -> int:
    """Return how many bytes deleting a file frees; 0 if another hard link keeps the data."""
    try:
        status = path.stat()
        # A hard link that the writer made does not keep the data, because the writer deletes this
        # link together with the file.
        names = 1 + exists(link_of(path))
    except OSError:
        return 0
    return status.st_blocks * _BLOCK if status.st_nlink <= names else 0


# --------------------------------------------------------------------------------------------------
# The rules, and the times at which a running store applies them
#
# Unlike RocketMQ, logquarry deletes a log file only if *all* given rules allow the deletion.

HOUR_MS: Final = 3_600_000
FORCIBLY_RATIO: Final = 0.85
"""If more than this part of the disk is used, RocketMQ deletes even files that have not expired
(``rocketmq.broker.diskSpaceCleanForciblyRatio``).
"""

_UNITS_MS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "h": HOUR_MS, "d": 24 * HOUR_MS}
_HOURS: Final = 24
_PERCENT: Final = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class RetentionRules:
    """The rules that determine which log files may be deleted.

    At least one of the first three rules must be given. A file may be deleted only if all given
    rules allow it.

    Attributes:
        older_than_ms: minimum age in milliseconds: a file may be deleted if its last message was
            stored at least this long ago.
        max_disk_ratio: limit for the used part of the disk, from 0 to 1. While the used part is
            larger, the oldest file may be deleted.
        keep_bytes: number of bytes to keep at the log's end: files before these bytes may be
            deleted.
        most_files: maximum number of log files that one run deletes.

    Raises:
        UsageError: if a value is invalid, or no rule is given.
    """

    older_than_ms: int | None = None
    max_disk_ratio: float | None = None
    keep_bytes: int | None = None
    most_files: int | None = None

    def __post_init__(self) -> None:
        arguments.check_fields(self)
        if self.older_than_ms is None and self.max_disk_ratio is None and self.keep_bytes is None:
            raise UsageError(
                "no retention rule is given: give an age, a use of the disk, or bytes to keep"
            )
        arguments.optional(arguments.offset, self.older_than_ms, "older_than_ms")
        arguments.optional(arguments.offset, self.keep_bytes, "keep_bytes")
        arguments.optional(arguments.count, self.most_files, "most_files")
        # NaN is not in the range, so it is rejected. With NaN as the limit, every deletion would be
        # allowed.
        if self.max_disk_ratio is not None and not 0 < self.max_disk_ratio <= 1:
            raise UsageError(
                f"the use of the disk is {self.max_disk_ratio:.0%}, and must be in 0..100%"
            )


def require_rules(rules: object) -> RetentionRules:
    """Raise UsageError unless the argument is a RetentionRules object; return it."""
    takes = "RetentionRules, such as RetentionRules(older_than_ms=259_200_000)"
    return arguments.instance(rules, "rules", RetentionRules, takes)


def duration_ms(text: str) -> int:
    """Parse ``72h``, ``3d``, ``90m``, ``30s`` or ``500ms`` to ms; a number alone means hours."""
    match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?)\s*(ms|s|m|h|d|)", text.strip().lower(), re.A)
    if match is None:
        raise UsageError(f"takes a time such as 72h, 3d or 30m, not {text!r}")
    return round(float(match[1]) * _UNITS_MS[match[2] or "h"])


def disk_ratio(text: str) -> float:
    """Parse ``0.75``, ``75%``, or ``75`` (as in ``diskMaxUsedSpaceRatio``) to a ratio."""
    match = re.fullmatch(r"(\d{1,3}(?:\.\d{1,6})?)\s*(%?)", text.strip(), re.A)
    number = float(match[1]) if match else 0.0
    if match is not None and (match[2] or number > 1):
        number /= 100
    if not 0 < number <= 1:
        raise UsageError(f"takes a part of the disk such as 0.75 or 75%, not {text!r}")
    return number


def delete_hours(when: str) -> frozenset[int]:
    """Parse ``deleteWhen``, such as ``04`` or ``04;16``, to a set of hours."""
    hours = [part.strip() for part in when.split(";")]
    if not all(re.fullmatch("[0-9]{1,2}", hour) and int(hour) < _HOURS for hour in hours):
        raise UsageError(f"delete_when takes hours such as 04 or 04;16, not {when!r}")
    return frozenset(int(hour) for hour in hours)


def is_delete_hour(when: str, now_ms: int, zone: tzinfo | None = None) -> bool:
    """Whether a time is in one of the hours of ``deleteWhen`` (``UtilAll.isItTimeToDo``)."""
    return datetime.fromtimestamp(now_ms / 1_000, zone).hour in delete_hours(when)


def rules_due(
    config: StoreConfig, now_ms: int, used_ratio: float, zone: tzinfo | None = None
) -> RetentionRules | None:
    """Return the rules that a running store applies now; None if it deletes nothing
    (``CleanCommitLogService``).

    The first of these cases that applies determines the rules:

    1. The disk is fuller than FORCIBLY_RATIO, and ``clean_file_forcibly_enable`` is set: the oldest
       files can be deleted, expired or not, until the disk is less full.
    2. In the hours of ``delete_when``, all expired files can be deleted.
    3. The disk is fuller than ``disk_max_used_space_ratio``: expired files can be deleted until the
       disk is less full.

    Args:
        used_ratio: the used part of the disk now, from 0 to 1.
        zone: time zone of the hours in ``delete_when`` (default: this machine's time zone).
    """
    most_files = config.delete_files_batch_max
    if config.clean_file_forcibly_enable and used_ratio > FORCIBLY_RATIO:
        return RetentionRules(max_disk_ratio=FORCIBLY_RATIO, most_files=most_files)
    older_than_ms = config.file_reserved_time * HOUR_MS
    if is_delete_hour(config.delete_when, now_ms, zone):
        return RetentionRules(older_than_ms=older_than_ms, most_files=most_files)
    most = config.disk_max_used_space_ratio / _PERCENT
    if used_ratio > most:
        return RetentionRules(
            older_than_ms=older_than_ms, max_disk_ratio=most, most_files=most_files
        )
    return None
