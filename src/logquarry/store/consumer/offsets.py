"""Determines where a consumer group continues in a queue, even if its offsets were lost."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from logquarry import arguments
from logquarry.disk.config_file import BACKUP, ConsumerOffsets
from logquarry.errors import UsageError
from logquarry.format import broker_json, java
from logquarry.log.store_files import CONFIG, quarantine
from logquarry.paths import is_file, is_folder
from logquarry.systems import read_file

if TYPE_CHECKING:
    # Importing asyncio takes 40 ms, which info and a writer without consumers do not need.
    from logquarry.store.consumer.source import QueueReader

from logquarry.store.consumer.group import dead_topic, retry_topic

logger = logging.getLogger(__name__)

STARTS: Final = ("earliest", "latest", "timestamp")


@dataclass(frozen=True, slots=True)
class Start:
    """Where a group without offsets starts: ``earliest``, ``latest``, or a ``timestamp`` in ms."""

    at: str
    timestamp_ms: int = 0

    @classmethod
    def of(cls, start: str | int | datetime, timestamp: int | str | date | None) -> Start:
        """Parse the start that the user gave: one of :data:`STARTS`, or a store time."""
        takes = "earliest, latest, timestamp or a store time (milliseconds, a datetime)"
        if not isinstance(start, str):
            if timestamp is not None:
                raise UsageError('timestamp= needs start="timestamp"')
            if not isinstance(start, datetime):
                return cls("timestamp", arguments.integer(start, "start", takes=takes))
            return cls("timestamp", arguments.time_ms(start, "start"))
        if start not in STARTS:
            raise UsageError(f"start takes {takes}, not {start!r}")
        if (start == "timestamp") != (timestamp is not None):
            raise UsageError(
                'start="timestamp" needs timestamp= (milliseconds); other starts take none'
            )
        found = arguments.optional(arguments.time_ms, timestamp, "timestamp")
        return cls(start, found or 0)


@dataclass(frozen=True, slots=True)
class _Beginning:
    """Where a group starts in the queues of a topic for which it has no committed offsets.

    Attributes:
        queue_ids: the queues that existed at the first call of ``begin``. In a queue that is
            created later, the group starts at the first message.
        start: the user's choice; None if the group must start at the first message of each queue,
            or at the estimate.
        saved_at: a pair: the time (milliseconds) at which the lost offsets were last written, and
            the file whose change time shows this. None if no offsets were lost, or if the time is
            unknown. If both ``start`` and ``saved_at`` have values, it is uncertain whether offsets
            were lost. The group then starts at the earlier of ``start`` and the estimate.
    """

    queue_ids: frozenset[int]
    start: Start | None = None
    saved_at: tuple[int, Path] | None = None


class Progress:
    """The offsets of all groups of one store, and estimates of lost offsets. Thread-safe."""

    def __init__(self, offsets: ConsumerOffsets, reader: QueueReader, lost: LostOffsets) -> None:
        self.offsets = offsets
        self._reader = reader
        self._lost = lost
        self._lock = threading.Lock()
        self._beginnings: dict[tuple[str, str], _Beginning] = {}
        self._estimates: dict[tuple[str, str, int], OffsetEstimate] = {}
        for topic, group, queue_id, offset, path in lost.entries():
            if queue_id not in offsets.of(topic, group):
                self._take(group, topic, queue_id, offset, f"found in the torn file {path}")

    def _take(self, group: str, topic: str, queue_id: int, offset: int, reason: str) -> None:
        self.offsets.commit(topic, group, queue_id, offset)
        estimate = OffsetEstimate(topic, queue_id, offset, reason)
        self._estimates[group, topic, queue_id] = estimate
        logger.warning(
            "group %s, queue %d of %s: its offset was lost; estimated as %d: %s",
            *(group, queue_id, topic, offset, reason),
        )

    def estimates(self, group: str, topics: Sequence[str]) -> tuple[OffsetEstimate, ...]:
        """Return the offsets of a group that were estimated since the store was opened."""
        with self._lock:
            return tuple(
                estimate
                for (name, topic, _), estimate in self._estimates.items()
                if name == group and topic in topics
            )

    def begin(self, group: str, topics: Sequence[str], start: Start) -> None:
        """Determine where a group starts in topics without offsets. For each topic, only the first
        call has an effect.
        """
        with self._lock:
            for topic in topics:
                if (group, topic) not in self._beginnings:
                    self._beginnings[group, topic] = self._beginning(group, topic, start)

    def _beginning(self, group: str, topic: str, start: Start) -> _Beginning:
        queue_ids = frozenset(self._reader.queue_ids(topic))
        of_group = {name for name, other in self.offsets.groups() if other == group}
        if topic in of_group:
            return _Beginning(queue_ids)
        if self._lost.is_lost(group, topic, has_others=bool(of_group)):
            if self._lost.saved_at is not None:
                return _Beginning(queue_ids, saved_at=self._lost.saved_at)
            logger.warning(
                "group %s: its offsets in %s are lost, and the time of their last write is "
                "unknown: the group starts at %s",
                *(group, topic, start.at),
            )
        if topic == retry_topic(group):
            # The retry topic has only messages that this group sent back, so skip none of them.
            return _Beginning(queue_ids)
        if start.at != "earliest" and self._lost.unread is not None:
            where = f"at its last write, unless {start.at} is earlier"
            if self._lost.saved_at is None:
                where = f"at {start.at}, because the time of its last write is unknown"
            logger.warning(
                "group %s: its offsets in %s may be lost, because %s cannot be read: the group "
                "starts %s. If no other group needs the file, delete it",
                *(group, topic, self._lost.unread, where),
            )
            return _Beginning(queue_ids, start, self._lost.saved_at)
        return _Beginning(queue_ids, start)

    def has_offset(self, group: str, topic: str, queue_id: int) -> bool:
        """Whether the group has a committed offset in a queue."""
        return queue_id in self.offsets.of(topic, group)

    def offset(self, group: str, topic: str, queue_id: int) -> int:
        """Return the queue offset at which a group continues.

        If the group has no committed offset in the queue, determine its start, and commit it.
        """
        with self._lock:
            known = self.offsets.of(topic, group).get(queue_id)
            if known is not None:
                return known
            beginning = self._beginnings[group, topic]
            offset, end = self._reader.bounds(topic, queue_id)
            is_new = queue_id not in beginning.queue_ids
            start = None if is_new else beginning.start
            saved = None if is_new else beginning.saved_at
            if start is not None and start.at == "latest":
                offset = end
            elif start is not None and start.at == "timestamp":
                offset = self._reader.first_since(topic, queue_id, start.timestamp_ms)
            if saved is not None:
                estimate = self._reader.first_since(topic, queue_id, saved[0] - BEFORE_MS)
                if start is None or estimate < offset:
                    offset = estimate
                    reason = (
                        f"messages stored from {BEFORE_MS // 1000} s before the last write of "
                        f"{saved[1]}"
                    )
                    self._take(group, topic, queue_id, offset, reason)
            self.offsets.commit(topic, group, queue_id, offset)
            return offset


# --------------------------------------------------------------------------------------------------
# Lost offsets: the remains of ``config/consumerOffset.json``
#
# A group with lost offsets must not start like a new group: ``latest`` would skip messages, and
# ``earliest`` would repeat all messages. The broker writes this file every 5 s. So the group
# continues at messages that were stored shortly before the last write of the file. If the file is
# torn (only partly written), the group continues at the offsets of its complete entries.

BEFORE_MS: Final = 10_000
"""An estimate starts this many ms before the last write: brokers write offsets every 5 s."""

_ENTRY: Final = re.compile(r'"([^"\\@]+)@([^"\\]+)"\s*:\s*\{([0-9:,\s]*)\}')
_PAIR: Final = re.compile(r"\s*([0-9]{1,9})\s*:\s*([0-9]{1,18})\s*")


class OffsetEstimate(NamedTuple):
    """An estimated queue offset: a group continues there because its committed offset was lost."""

    topic: str
    queue_id: int
    offset: int
    reason: str


class LostOffsets:
    """Finds a store's lost consumer offsets in torn and quarantined files, and the time of their
    last save.
    """

    def __init__(
        self, root: Path, *, has_offsets: bool, topics: Callable[[], Iterable[str]]
    ) -> None:
        config = root / CONFIG
        self._has_offsets = has_offsets
        self._topics = topics
        self._config = config
        name = broker_json.CONSUMER_OFFSET_FILE
        self._torn = [
            (path, text)
            for path in (config / name, config / f"{name}{BACKUP}")
            if (text := _torn_text(path)) is not None
        ]
        aside = quarantine(root, CONFIG)
        moved = aside.iterdir() if is_folder(aside) else ()
        self._aside = sorted(path for path in moved if path.name.startswith(name))
        # Read the time now, because later saves of the offsets change it.
        self.saved_at = self._find_saved_at()
        self.unread = self._find_unread(config / name)
        """An offset file that cannot be read, and may contain any group; None if there is none."""

    @property
    def files(self) -> list[Path]:
        """The invalid or unreadable offset files, and all offset files in quarantine."""
        return [path for path, _ in self._torn] + self._aside

    def entries(self) -> Iterator[tuple[str, str, int, int, Path]]:
        """Yield complete entries of torn files: topic, group, queue id, offset and file."""
        for path, text in self._torn:
            for topic, group, pairs in _ENTRY.findall(text):
                for pair in pairs.split(","):
                    match = _PAIR.fullmatch(pair)
                    if match is not None:
                        yield topic, group, int(match[1]), int(match[2]), path

    def is_lost(self, group: str, topic: str, *, has_others: bool) -> bool:
        """Whether a group's offsets in a topic are lost.

        The offsets are lost if a torn or quarantined offset file names the group and the topic. If
        the group has no offsets in other topics (``has_others`` is False), one trace of the group
        is enough. A trace is the group's retry or dead-letter topic, or the group's name in such a
        file or in the broker's list of groups.
        """
        if self._has_offsets and not self.files:
            return False
        texts = [text for _, text in self._torn]
        texts += [text for path in self._aside if (text := _text(path)) is not None]
        if any(f'"{topic}@{group}"' in text for text in texts):
            return True
        if has_others:
            return False
        if not {retry_topic(group), dead_topic(group)}.isdisjoint(self._topics()):
            return True
        if any(f'@{group}"' in text for text in texts):
            return True
        listed = _text(self._config / broker_json.SUBSCRIPTION_GROUP_FILE)
        return listed is not None and f'"{group}"' in listed

    def _find_unread(self, main: Path) -> Path | None:
        torn = [path for path, _ in self._torn]
        if main not in torn and is_file(main):
            # The main file is valid, so ignore a torn backup: its offsets are only older.
            torn = []
        return next((path for path in torn + self._aside if _text(path) is None), None)

    def _find_saved_at(self) -> tuple[int, Path] | None:
        """Return the time (ms) at which the lost offsets were last written, and a file.

        The time is the newest change time of ``files``, and the returned file has this change time.
        If ``files`` is empty, use the newest file of ``config/`` instead. Ignore ``topics.json``,
        because puts change this file.
        """
        paths = self.files
        if not paths and is_folder(self._config):
            paths = [
                path
                for path in self._config.iterdir()
                if is_file(path) and not path.name.startswith(broker_json.TOPICS_FILE)
            ]
        times = [(time, path) for path in paths if (time := _changed_at(path)) is not None]
        return max(times, default=None)


def _torn_text(path: Path) -> str | None:
    """Return the text of an invalid file; None if the file is valid or missing."""
    try:
        broker_json.decode_consumer_offsets(read_file(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, RecursionError):
        return _text(path) or ""
    return None


def _text(path: Path) -> str | None:
    try:
        return read_file(path).decode("utf-8", java.UTF8_ERRORS)
    except OSError:
        return None


def _changed_at(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns // 1_000_000
    except OSError:
        return None
