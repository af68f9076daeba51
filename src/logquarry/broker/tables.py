"""The tables that a broker keeps in memory: topics, subscription groups, offsets and counts.

If the store is open for writing, the broker saves topics, groups and offsets to the store's
``config/``, in RocketMQ's format. The counts are not saved.
"""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from logquarry.broker.acl import TRACE_TOPIC
from logquarry.broker.options import BrokerOptions
from logquarry.disk.config_file import (
    SUBSCRIPTION_GROUPS,
    TOPICS,
    ConfigFile,
    ConsumerOffsets,
)
from logquarry.disk.disk import Disk
from logquarry.errors import StoreUnavailable
from logquarry.format import broker_json, java
from logquarry.format.broker_json import TopicConfig
from logquarry.log.store_files import CONFIG
from logquarry.protocol.remoting_codes import Refused, ResponseCode
from logquarry.store.message_store import MessageStore, StoreWriter
from logquarry.text import counted
from logquarry.write.message_rules import BROKER_CHECK, name_fault
from logquarry.write.queue_table import topics_of

READ: Final = 4
WRITE: Final = 2
INHERIT: Final = 1
ANY: Final = READ | WRITE | INHERIT
DEFAULT_TOPIC: Final = "TBW102"
"""If a producer's topic does not exist yet, the producer requests the route of this topic instead.
"""
_BENCHMARK_QUEUES: Final = 1_024
_INT: Final = 1 << 31
_COUNTERS: Final = {"counter": 0}
_NEW_GROUP: Final[Mapping[str, Any]] = {
    "brokerId": 0,
    "consumeBroadcastEnable": True,
    "consumeEnable": True,
    "consumeFromMinEnable": True,
    "groupName": "",
    "notifyConsumerIdsChangedEnable": True,
    "retryMaxTimes": 16,
    "retryQueueNums": 1,
    "whichBrokerWhenConsumeSlowly": 1,
}
"""The settings with which a group is created (``SubscriptionGroupConfig``)."""


class Tables:
    """The topics, groups and offsets of a broker. Only the event loop changes these tables."""

    def __init__(self, store: MessageStore, options: BrokerOptions) -> None:
        self._options = options
        self._writer = store if isinstance(store, StoreWriter) else None
        root = Path(store.root)
        self._groups_file: ConfigFile | None = None
        if self._writer is not None:
            self.offsets = self._writer.consumer_offsets
            _require_known(self.offsets)
            self._stored = self._writer.topic_table.configs()
            self._groups_file = self._writer.subscription_groups
            groups = self._groups_file.load().value
        else:
            disk = Disk()
            theirs = ConsumerOffsets(disk, root)
            self.offsets = theirs
            if options.offsets is not None:
                self.offsets = ConsumerOffsets(disk, options.offsets)
                kept = self.offsets.groups()
                # For a group that has no offsets in the folder ``options.offsets`` yet, start with
                # its offsets in the store.
                self.offsets.update({k: v for k, v in theirs.groups().items() if k not in kept})
            _require_known(self.offsets, theirs)
            document = ConfigFile(disk, root, TOPICS).load().value
            self._stored = broker_json.topics_of_document(document) if document else {}
            groups = ConfigFile(disk, root, SUBSCRIPTION_GROUPS).load().value
            # Call add_queues only for a reader. A writer's topic table already has the right
            # topics, and add_queues would also add deleted topics, because their queues still
            # exist.
            self.add_queues(store.queues())
        self._group_document: dict[str, Any] = groups or {
            "dataVersion": _COUNTERS,
            "subscriptionGroupTable": {},
        }
        self._changed: deque[str] = deque()
        """The topics that were changed since the last :meth:`save`."""
        self._removed: set[str] = set()
        """The topics that clients have removed. Late messages must not add these topics again."""
        self._version = self._saved_version = 0
        """How often groups were changed, and how many of these changes were saved."""
        self.groups: dict[str, dict[str, Any]] = dict(
            self._group_document["subscriptionGroupTable"]
        )
        self.system_topics = _system_topics(options)
        """The topics that exist in every broker."""

    # -------------------------------------------------------------------------------------- topics
    @property
    def topics(self) -> Mapping[str, TopicConfig]:
        """All topics, by name."""
        return self.system_topics | self._stored

    def topic(self, name: str) -> TopicConfig | None:
        """Return a topic by its name, or None."""
        return self._stored.get(name) or self.system_topics.get(name)

    def add_queues(self, queues: Iterable[tuple[str, int]]) -> None:
        """Add the topics of the queues, if ``config/`` does not list these topics."""
        for name, topic in topics_of(queues).items():
            known = self._stored.get(name)
            if known is None or known.read_queues < topic.read_queues:
                self._stored[name] = topic

    def note_message(self, topic: str, queue_id: int) -> None:
        """Add the topic and the queue of a new message, if the table lacks them."""
        # A topic can be missing because the program that runs the broker also puts messages
        # directly into the store. But do not add a topic that a client has removed: the dispatcher
        # may report the topic's last messages after the removal.
        known = self.topic(topic)
        if (known is None or known.read_queues <= queue_id) and topic not in self._removed:
            self.add_queues([(topic, queue_id)])

    def set_topic(self, topic: TopicConfig) -> None:
        """Add or change a topic in memory; the next :meth:`save` writes it."""
        self.require_writer()
        fault = name_fault(topic.name, BROKER_CHECK)
        if fault is not None or topic.name in self.system_topics:
            reason = fault or "it is a system topic"
            raise Refused(f"the topic {topic.name[:200]!r} is illegal: {reason}")
        self._stored[topic.name] = topic
        self._removed.discard(topic.name)
        self._changed.append(topic.name)

    def create_topic(self, name: str, queues: int) -> None:
        """Create a topic that a client needs, in memory; the next :meth:`save` writes it."""
        self._require_room(len(self._stored), "topic", name)
        self.set_topic(TopicConfig(name, queues, queues, READ | WRITE, 0, False))

    def remove_topic(self, name: str) -> None:
        """Remove a topic from memory; the next :meth:`save` writes the change."""
        self.require_writer()
        if self._stored.pop(name, None) is not None:
            if len(self._removed) >= self._options.most_created:
                self._removed.clear()
            self._removed.add(name)
            self._changed.append(name)

    def _require_room(self, count: int, kind: str, name: str) -> None:
        if count >= self._options.most_created:
            raise Refused(
                f"the {kind} {name[:200]!r} is not created: the broker has {counted(count, kind)} "
                f"already (most_created); delete some {kind}s, or create it with mqadmin",
                ResponseCode.NO_PERMISSION,
            )

    # -------------------------------------------------------------------------------------- groups
    def create_group(self, name: str) -> dict[str, Any]:
        """Create a group that a client needs, in memory; the next :meth:`save` writes it."""
        self._require_room(len(self.groups), "group", name)
        return self.set_group({"groupName": name})

    def set_group(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Add or change a group in memory; return its settings. The next :meth:`save` writes it."""
        try:
            # Refuse NaN and 1e999: Python can parse these numbers, but a JSON file cannot contain
            # them.
            json.dumps(settings, allow_nan=False)
        except ValueError as error:
            raise Refused(f"the group is illegal: {error}") from error
        name = str(settings.get("groupName", ""))
        fault = name_fault(name, BROKER_CHECK)
        if fault is not None:
            raise Refused(f"the group {name[:200]!r} is illegal: {fault}")
        found = {**_NEW_GROUP, "groupName": name}
        for key, value in settings.items():
            kind = type(found.get(key))
            if kind is int and not (type(value) is int and -_INT <= value < _INT):
                raise Refused(f"{key} of a group must be a 32-bit integer")
            if kind is bool and type(value) is not bool:
                raise Refused(f"{key} of a group must be true or false")
            found[key] = value
        found["groupName"] = name
        self.groups[name] = found
        self._version += 1
        return found

    def remove_group(self, name: str, *, with_offsets: bool) -> None:
        """Remove a group from memory; the next :meth:`save` writes the change."""
        self.require_writer()
        self.groups.pop(name, None)
        if with_offsets:
            self.offsets.remove(name)
        self._version += 1

    def commit_offset(self, topic: str, group: str, queue_id: int, offset: int) -> None:
        """Record the offset of a group in a queue, in memory; :meth:`save_offsets` writes it.

        Raise Refused if the offset is the first of the group in this queue, and the broker has too
        many offsets already.
        """
        most = self._options.most_offsets
        if not self.offsets.commit(topic, group, queue_id, offset, most=most):
            raise Refused(
                f"the offset of the group {group[:200]!r} in queue {queue_id} of {topic[:200]!r} "
                f"is not recorded: the broker already has {counted(most, 'consumer offset')} "
                "(most_offsets); delete unused groups with their offsets (mqadmin deleteSubGroup "
                "-r true)",
                ResponseCode.NO_PERMISSION,
            )

    def group_document(self) -> dict[str, Any]:
        """Return the document to write to ``subscriptionGroup.json``. Thread-safe."""
        old = self._group_document["dataVersion"]
        # As in RocketMQ, the counter overflows to the lowest number.
        counter = java.to_long(int(old.get("counter", 0)) + self._version)
        version = {**old, "counter": counter}
        if self._version:
            version["timestamp"] = int(time.time() * 1_000)
        return {
            **self._group_document,
            "dataVersion": version,
            "subscriptionGroupTable": dict(self.groups),
        }

    def save(self) -> None:
        """Write and sync changed topics and groups. The thread for slow calls runs this method."""
        names = [self._changed.popleft() for _ in range(len(self._changed))]
        if names and self._writer is not None:
            try:
                self._writer.topic_table.change({name: self._stored.get(name) for name in names})
            except BaseException:
                self._changed.extend(names)
                raise
        version = self._version
        if self._groups_file is not None and version != self._saved_version:
            self._groups_file.save(self.group_document())
            self._saved_version = version

    def save_offsets(self) -> None:
        """Write and sync the offsets. Do nothing if the broker keeps the offsets only in memory.

        Thread-safe.
        """
        if self._writer is not None or self._options.offsets is not None:
            if self._options.offsets is not None:
                (self._options.offsets / CONFIG).mkdir(parents=True, exist_ok=True)
            self.offsets.save()

    def require_writer(self) -> StoreWriter:
        """Return the store if it is open for writing; raise Refused if the broker is read-only."""
        if self._writer is None:
            raise Refused(
                "the broker is read-only, and refuses this change", ResponseCode.NO_PERMISSION
            )
        return self._writer


def _require_known(*tables: ConsumerOffsets) -> None:
    """Raise StoreUnavailable if the offsets of the groups cannot be read.

    If one of the tables was read, the tables after this table are not checked. RocketMQ's broker
    does not start with an unreadable file of offsets either: without its offset, a group could
    start at the end of its queues, and skip messages.
    """
    for table in tables:
        if table.found is not None:
            return
        if table.problems:
            raise StoreUnavailable(
                f"{'; '.join(table.problems)}: the offsets of the consumer groups are unknown. Put "
                "the file back from a backup. Or move the file and its .bak out of config/: then "
                "all groups start as new groups"
            )


def _system_topics(options: BrokerOptions) -> dict[str, TopicConfig]:
    both = READ | WRITE
    made = {
        DEFAULT_TOPIC: (options.queues, both | INHERIT),
        "SELF_TEST_TOPIC": (1, both),
        "BenchmarkTest": (_BENCHMARK_QUEUES, both),
        "OFFSET_MOVED_EVENT": (1, both),
        "SCHEDULE_TOPIC_XXXX": (18, both),
        "RMQ_SYS_TRANS_HALF_TOPIC": (1, both),
        "RMQ_SYS_TRANS_OP_HALF_TOPIC": (1, both),
        "TRANS_CHECK_MAX_TIME_TOPIC": (1, both),
        TRACE_TOPIC: (1, both),
        f"{options.cluster}_REPLY_TOPIC": (1, both),
        options.cluster: (16, both | INHERIT),
        options.name: (1, both | INHERIT),
    }
    if not options.create_topics:
        del made[DEFAULT_TOPIC]
    return {
        name: TopicConfig(name, count, count, perm, 0, False)
        for name, (count, perm) in made.items()
    }


_Key = TypeVar("_Key")


@dataclass(slots=True)
class Counts:
    """Counts since the broker's start, for metrics and mqadmin.

    - ``put`` and ``put_bytes``: messages that were put, and the bytes of their frames, by topic.
    - ``got`` and ``got_bytes``: messages that were sent to consumers, and the bytes of their
      frames, by topic and group.
    - ``sent_back``: messages that consumers sent back, by topic and group.
    - ``requests``: requests, by code.
    - ``refused``: sends that the broker answered with SYSTEM_BUSY.

    A count stays even if its topic or group is deleted. Clients can cause any number of pairs of a
    topic and a group, so each of these counts has at most ``most`` keys (``most_counts``). If a
    count has this many keys, all new keys share one more key: empty names, or the code -1 for
    ``requests``.
    """

    most: int

    put: Counter[str] = field(default_factory=Counter)
    put_bytes: Counter[str] = field(default_factory=Counter)
    got: Counter[tuple[str, str]] = field(default_factory=Counter)
    got_bytes: Counter[tuple[str, str]] = field(default_factory=Counter)
    sent_back: Counter[tuple[str, str]] = field(default_factory=Counter)
    requests: Counter[int] = field(default_factory=Counter)
    refused: int = 0

    def add_put(self, topic: str, messages: int, size: int) -> None:
        """Count messages that were put into a topic."""
        key = self._known(self.put, topic, "")
        self.put[key] += messages
        self.put_bytes[key] += size

    def add_got(self, topic: str, group: str, messages: int, size: int) -> None:
        """Count messages of a topic that were sent to consumers of a group."""
        key = self._known(self.got, (topic, group), ("", ""))
        self.got[key] += messages
        self.got_bytes[key] += size

    def add_sent_back(self, topic: str, group: str) -> None:
        """Count a message of a topic that a consumer of a group sent back."""
        self.sent_back[self._known(self.sent_back, (topic, group), ("", ""))] += 1

    def add_request(self, code: int) -> None:
        """Count a request."""
        self.requests[self._known(self.requests, code, -1)] += 1

    def _known(self, counts: Counter[_Key], key: _Key, others: _Key) -> _Key:
        return key if key in counts or len(counts) < self.most else others
