"""Consumer groups: subscription, retry and dead-letter topics, assignment of queues, and offsets.

The assignment of queues follows RocketMQ's ``AllocateMessageQueueAveragely``.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from logquarry import arguments
from logquarry.disk.config_file import BACKUP, ConsumerOffsets
from logquarry.errors import UsageError
from logquarry.format import broker_json, java
from logquarry.format import properties as props
from logquarry.log.store_files import CONFIG, quarantine
from logquarry.message import Message
from logquarry.read.log_queues import QueueKey
from logquarry.store.consumer.sql_filter import SqlFilter
from logquarry.store.consumer.sql_parser import parse
from logquarry.stored_message import StoredMessage
from logquarry.systems import read_file
from logquarry.write.message_rules import BROKER_CHECK, LONGEST_TOPIC, name_fault

if TYPE_CHECKING:
    # Importing asyncio takes 40 ms, which info and a writer without consumers do not need.
    from logquarry.store.consumer.source import QueueReader

RETRY_PREFIX: Final = "%RETRY%"
DEAD_PREFIX: Final = "%DLQ%"

_LONGEST_GROUP: Final = LONGEST_TOPIC - len(RETRY_PREFIX)
MAX_RECONSUME_TIMES: Final = 16
"""The default of RocketMQ's ``SubscriptionGroupConfig.retryMaxTimes``."""

_FIRST_LEVEL: Final = 3
_FALSE: Final = "false"


def retry_topic(group: str) -> str:
    """Return the topic of messages that a group sent back (``MixAll.getRetryTopic``)."""
    return RETRY_PREFIX + group


def dead_topic(group: str) -> str:
    """Return the topic of messages that a group sent back too often (``MixAll.getDLQTopic``)."""
    return DEAD_PREFIX + group


@dataclass(frozen=True)
class Subscription:
    """A group, its topics, and its filter (tags or SQL92); :meth:`of` makes a subscription."""

    group: str
    topics: tuple[str, ...]
    tags: frozenset[str] | None
    sql: SqlFilter | None

    @classmethod
    def of(
        cls, group: str, topics: str | Iterable[str], tags: str | None, sql: str | None
    ) -> Subscription:
        """Check and parse a subscription.

        Raises:
            UsageError: if a broker rejects a name, or there is no topic, or tags and a filter.
            BadFilter: if the filter is invalid.
        """
        arguments.text(group, "group", takes="the name of a consumer group")
        arguments.optional(arguments.text, tags, "tags")
        arguments.optional(arguments.text, sql, "sql")
        fault = name_fault(group, BROKER_CHECK, longest=_LONGEST_GROUP)
        if fault is not None:
            raise UsageError(f"{group!r} is not a valid consumer group: {fault}")
        names = tuple(sorted(set(arguments.names(topics, "topics"))))
        if not names:
            raise UsageError("a consumer needs at least one topic")
        for name in names:
            fault = name_fault(name, BROKER_CHECK)
            if fault is not None:
                raise UsageError(f"{name!r} is not a topic that can be consumed: {fault}")
        if tags is not None and sql is not None:
            raise UsageError("give either tags or an SQL92 filter, not both")
        return cls(group, names, props.parse_tags(tags), None if sql is None else parse(sql))

    @property
    def all_topics(self) -> tuple[str, ...]:
        """The topics, and the group's retry topic."""
        return tuple(dict.fromkeys((*self.topics, retry_topic(self.group))))

    def tags_of(self, topic: str) -> frozenset[str] | None:
        """Return the tags to match; None for the retry topic: its messages matched before."""
        return None if self._is_retry(topic) else self.tags

    def filter_of(self, topic: str) -> SqlFilter | None:
        """Return the SQL92 filter for messages of a topic; None for the retry topic."""
        return None if self._is_retry(topic) else self.sql

    def _is_retry(self, topic: str) -> bool:
        return topic == retry_topic(self.group)


def sent_back(
    message: StoredMessage, group: str, delay_level: int | None, max_reconsume_times: int
) -> Message:
    """Return the message to put if a consumer sends back ``message`` (``consumerSendMsgBack``).

    The new message is a delayed copy for the group's retry topic. If the message was sent back
    ``max_reconsume_times`` times before, the copy is for the dead-letter topic.

    Args:
        delay_level: None or 0 means level 3 (10 s) for the first retry, and one level higher for
            each further retry. A level below 0 means the dead-letter topic.
    """
    arguments.instance(message, "message", StoredMessage, "a StoredMessage of this consumer")
    delay_level = arguments.optional(arguments.int32, delay_level, "delay_level")
    properties = dict(message.properties)
    properties.setdefault(props.RETRY_TOPIC, message.topic)
    properties[props.WAIT] = _FALSE
    level = delay_level or java.to_int(_FIRST_LEVEL + message.reconsume_times)
    frame = message.frame
    topic = retry_topic(group)
    if (delay_level or 0) < 0 or message.reconsume_times >= max_reconsume_times:
        topic, level = dead_topic(group), 0
    properties[props.DELAY] = str(level)
    if not properties.get(props.ORIGIN_MESSAGE_ID, "").strip():
        properties[props.ORIGIN_MESSAGE_ID] = message.message_id
    # Insert the properties in the order of the message, as RocketMQ does: the order in Java's
    # HashMap depends on the order of insertion.
    order = java.hash_map_order(properties)
    return Message(
        topic,
        frame.body,
        properties_string=props.encode({name: properties[name] for name in order}),
        flag=frame.flag,
        sys_flag=frame.sys_flag,
        born_timestamp=frame.born_timestamp,
        born_host=frame.born_host,
        store_host=frame.store_host,
        reconsume_times=java.to_int(frame.reconsume_times + 1),
    )


def allocate(queue_ids: Sequence[int], count: int, number: int) -> Sequence[int]:
    """Return a member's part of the queues: two members' parts differ by at most one queue."""
    each, rest = divmod(len(queue_ids), count)
    start = number * each + min(number, rest)
    return queue_ids[start : start + each + (number < rest)]


# --------------------------------------------------------------------------------------------------
# The consumers of one group in one process
#
# A member claims only free queues, and the previous owner releases a queue between two messages. So
# no two consumers handle the same message, and the next owner starts after the last handled one.


class Member(Protocol):
    """The interface that a group requires of a consumer."""

    @property
    def topics(self) -> Sequence[str]:
        """The topics that the member consumes."""

    def disturb(self) -> None:
        """Make the consumer check, after the current message, which queues it has. Thread-safe."""


class ConsumerGroup:
    """The members of one group. Thread-safe. ``version`` increases at each new assignment."""

    def __init__(
        self, name: str, queue_ids: Callable[[str], Sequence[int]], wake: Callable[[], None]
    ) -> None:
        self.name = name
        self.version = 0
        self._queue_ids = queue_ids
        self._wake = wake
        self._lock = threading.Lock()
        self._members: list[Member] = []
        self._owners: dict[QueueKey, Member] = {}

    def join(self, member: Member) -> None:
        """Add a member."""
        with self._lock:
            self._members = [*self._members, member]
        self.share_out()

    def leave(self, member: Member) -> None:
        """Remove a member, and release the member's queues."""
        with self._lock:
            self._members = [other for other in self._members if other is not member]
            self._owners = {key: who for key, who in self._owners.items() if who is not member}
        self.share_out()

    def share_out(self) -> None:
        """Make all members check which queues are assigned to them."""
        with self._lock:
            self.version += 1
            members = self._members
        for member in members:
            member.disturb()
        self._wake()

    def share_of(self, member: Member) -> set[QueueKey]:
        """Return the queues assigned to a member, even if other members still own some of them."""
        members = self._members
        share: set[QueueKey] = set()
        for topic in member.topics:
            others = [other for other in members if topic in other.topics]
            if member in others:
                ids = allocate(self._queue_ids(topic), len(others), others.index(member))
                share |= {(topic, queue_id) for queue_id in ids}
        return share

    def release(self, member: Member, keys: set[QueueKey]) -> None:
        """Give up queues, so that others can claim them. The caller has committed its messages."""
        with self._lock:
            for key in keys:
                if self._owners.get(key) is member:
                    del self._owners[key]
            self.version += 1
        self._wake()

    def claim(self, member: Member, keys: set[QueueKey]) -> set[QueueKey]:
        """Claim queues that are free or that the member already owns; return these queues."""
        with self._lock:
            if member not in self._members:
                return set()
            free = {key for key in keys if self._owners.get(key, member) is member}
            self._owners |= dict.fromkeys(free, member)
            return free


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
        start: the user's choice; None if the group must start at the first message of each queue.
        saved_at: time (milliseconds) at which the lost offsets were last written, and the file with
            this change time; None if no offsets were lost.
    """

    queue_ids: frozenset[int]
    start: Start | None = None
    saved_at: tuple[int, Path] | None = None


class Progress:
    """The offsets of all groups of one store, and estimates of lost offsets. Thread-safe."""

    def __init__(
        self, offsets: ConsumerOffsets, reader: QueueReader, lost: LostOffsets | None
    ) -> None:
        self.offsets = offsets
        self._reader = reader
        self._lost = lost
        self._lock = threading.Lock()
        self._beginnings: dict[tuple[str, str], _Beginning] = {}
        self._estimates: dict[tuple[str, str, int], OffsetEstimate] = {}
        if lost is not None:
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
        """Return the estimates made since the opening of the store for a group's lost offsets."""
        with self._lock:
            return tuple(
                estimate
                for (name, topic, _), estimate in self._estimates.items()
                if name == group and topic in topics
            )

    def begin(self, group: str, topics: Sequence[str], start: Start) -> None:
        """Determine where a group starts in topics without offsets. Later calls change nothing."""
        with self._lock:
            for topic in topics:
                if (group, topic) not in self._beginnings:
                    self._beginnings[group, topic] = self._beginning(group, topic, start)

    def _beginning(self, group: str, topic: str, start: Start) -> _Beginning:
        queue_ids = frozenset(self._reader.queue_ids(topic))
        of_group = {name for name, other in self.offsets.groups() if other == group}
        if topic in of_group:
            return _Beginning(queue_ids)
        lost = self._lost
        if lost is not None and lost.is_lost(group, topic, has_others=bool(of_group)):
            saved_at = lost.saved_at
            if saved_at is not None:
                return _Beginning(queue_ids, saved_at=saved_at)
            logger.warning(
                "group %s: its offsets in %s are lost, and when they were last written is unknown: "
                "it starts at %s",
                *(group, topic, start.at),
            )
        if topic == retry_topic(group):
            # The retry topic has only messages that this group sent back, so skip none of them.
            return _Beginning(queue_ids)
        return _Beginning(queue_ids, start)

    def offset(self, group: str, topic: str, queue_id: int) -> int:
        """Return the queue offset at which a group continues. If it has none, commit one."""
        with self._lock:
            known = self.offsets.of(topic, group).get(queue_id)
            if known is not None:
                return known
            beginning = self._beginnings[group, topic]
            offset = self._reader.bounds(topic, queue_id)[0]
            if queue_id in beginning.queue_ids and beginning.saved_at is not None:
                saved_at, path = beginning.saved_at
                offset = self._reader.first_since(topic, queue_id, saved_at - BEFORE_MS)
                reason = (
                    f"messages stored from {BEFORE_MS // 1000} s before the last write of {path}"
                )
                self._take(group, topic, queue_id, offset, reason)
            elif queue_id in beginning.queue_ids and beginning.start is not None:
                offset = self._first(topic, queue_id, beginning.start)
            self.offsets.commit(topic, group, queue_id, offset)
            return offset

    def _first(self, topic: str, queue_id: int, start: Start) -> int:
        low, high = self._reader.bounds(topic, queue_id)
        if start.at == "latest":
            return high
        if start.at == "timestamp":
            return self._reader.first_since(topic, queue_id, start.timestamp_ms)
        return low


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
    """Reads what is left of a store's lost offsets: torn and quarantined files, and file times."""

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
        self._aside = sorted(aside.glob(f"{name}*")) if aside.is_dir() else []
        # Read the time now: later saves of the offsets change it.
        self.saved_at = self._find_saved_at()

    @property
    def files(self) -> list[Path]:
        """The invalid or unreadable offset files in ``config/``, and all those in quarantine."""
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

        If the offset file is missing, the group existed if the store has its retry topic or its
        dead-letter topic, or if the broker's list of groups has its name.
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

    def _find_saved_at(self) -> tuple[int, Path] | None:
        """Return when (ms) the lost offsets were last written, and the file with this change time.

        If there is no offset file, use the newest file of ``config/`` instead. Ignore
        ``topics.json``, because puts change this file.
        """
        paths = self.files
        if not paths and self._config.is_dir():
            paths = [
                path
                for path in self._config.iterdir()
                if path.is_file() and not path.name.startswith(broker_json.TOPICS_FILE)
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
