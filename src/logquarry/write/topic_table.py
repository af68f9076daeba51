"""The topics of a store open for writing: ``config/topics.json`` (``TopicConfigManager``).

A broker serves a topic to clients only if this file lists it. The writer adds each topic that gets
a message, and raises the number of its queues if a message goes into a queue beyond them. It never
removes or lowers anything: another program may have configured the rest.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from logquarry.disk.config_file import TOPICS, config_file
from logquarry.disk.disk import Disk
from logquarry.errors import StoreUnavailable
from logquarry.format import broker_config
from logquarry.format.broker_config import TopicConfig, topic_entry
from logquarry.read.log_queues import QueueKey
from logquarry.units import Clock
from logquarry.write.dispatcher import queue_name_fault

logger = logging.getLogger(__name__)

_READ_AND_WRITE: Final = 6
_MADE_BY_BROKERS: Final = frozenset(
    {
        *("TBW102", "SELF_TEST_TOPIC", "BenchmarkTest", "OFFSET_MOVED_EVENT"),
        *("SCHEDULE_TOPIC_XXXX", "TRANS_CHECK_MAX_TIME_TOPIC"),
        *("RMQ_SYS_TRANS_HALF_TOPIC", "RMQ_SYS_TRANS_OP_HALF_TOPIC", "RMQ_SYS_TRACE_TOPIC"),
    }
)
_EMPTY: Final[Mapping[str, Any]] = {"dataVersion": {"counter": 0}, "topicConfigTable": {}}
_NOT_LISTED: Final = ("rmq_sys_", "%LMQ%")
"""Prefixes of further topics that brokers make at their start, and of queues without a topic."""


def is_listed(topic: str) -> bool:
    """Whether ``topics.json`` must list a topic: it has queues, and is not a system topic.

    A broker creates its system topics (``TopicValidator``) at each start, but an entry in the file
    would replace theirs.
    """
    if topic in _MADE_BY_BROKERS or topic.startswith(_NOT_LISTED):
        return False
    return queue_name_fault(topic) is None


def topics_of(queues: Iterable[QueueKey]) -> dict[str, TopicConfig]:
    """The topics of queues that ``topics.json`` has to list, with the number of their queues."""
    found: dict[str, int] = {}
    for topic, queue_id in queues:
        if is_listed(topic):
            found[topic] = max(found.get(topic, 0), queue_id + 1)
    return {
        topic: TopicConfig(topic, count, count, _READ_AND_WRITE, 0, False)
        for topic, count in sorted(found.items())
    }


class TopicTable:
    """Adds topics and queues to ``config/topics.json``.

    The dispatcher notes queues; a flush writes the file, before it syncs the queues.

    Args:
        disk: the store's disk.
        root: the store's folder.
        clock: gives the time of the table's version, in milliseconds.
        existing: gives the queues that the store already has. They are added if there is no file,
            or if the store was not shut down cleanly.
        batch_topics: topics with batch queues.
        was_unclean: whether the store was not shut down cleanly.
    """

    def __init__(
        self,
        disk: Disk,
        root: Path,
        clock: Clock,
        existing: Iterable[QueueKey],
        *,
        batch_topics: Collection[str] = (),
        was_unclean: bool = False,
    ) -> None:
        self._file = config_file(disk, root, TOPICS)
        self._clock = clock
        self._batch_topics = batch_topics
        self._lock = threading.Lock()
        loaded = self._file.load()
        self._document: dict[str, Any] | None = loaded.value
        # An unreadable file is not replaced: you may still be able to restore its content by hand.
        self._is_readable = loaded.value is not None or not loaded.problems
        self._noted: set[QueueKey] = set()
        self._new: set[QueueKey] = set()
        if loaded.value is None or was_unclean:
            self.note(list(existing))

    def note(self, queues: Collection[QueueKey]) -> None:
        """Add queues with the next flush; cheap if all were noted before."""
        if not self._noted.issuperset(queues):
            with self._lock:
                self._new.update(set(queues) - self._noted)
            self._noted.update(queues)

    def configs(self) -> dict[str, TopicConfig]:
        """The topics of the table by name, with those that the next flush adds."""
        with self._lock:
            document = self._with(topics_of(self._new)) or self._document
        return {} if document is None else broker_config.topics_of_document(document)

    def change(self, topics: Mapping[str, TopicConfig | None]) -> None:
        """Add, replace or remove topics, and write the file once.

        Args:
            topics: name -> settings; None removes the topic, and its messages stay in the log.

        Raises:
            StoreUnavailable: if the file cannot be read or written; nothing changes.
        """
        if not self._is_readable:
            raise StoreUnavailable(f"{self._file.path} cannot be read: restore or delete it")
        with self._lock:
            old = self._document or _EMPTY
            table = dict(old["topicConfigTable"])
            for name, topic in topics.items():
                if topic is None:
                    table.pop(name, None)
                else:
                    table[name] = {**table.get(name, {}), **broker_config.topic_entry(topic)}
            removed = {name for name, topic in topics.items() if topic is None}
            self._new = {key for key in self._new if key[0] not in removed}
            document = self._versioned(old, table)
            self._file.save(document)
            self._document = document

    def _versioned(self, old: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
        version = dict(old["dataVersion"])
        version["counter"] = int(version.get("counter", 0)) + 1
        version["timestamp"] = self._clock()
        return {**old, "dataVersion": version, "topicConfigTable": table}

    def flush(self, least_pages: int = 0) -> bool:
        """Add the noted queues that the file lacks; return whether the file was written.

        Args:
            least_pages: not used; see :class:`logquarry.write.flush.Flushable`.
        """
        if not self._new or not self._is_readable:
            return False
        with self._lock:
            new, self._new = self._new, set()
            document = self._with(topics_of(new))
            if document is None:
                return False
            try:
                self._file.save(document)
            except StoreUnavailable as error:
                # The messages are safe without it, and the next opening adds the topics.
                self._new |= new
                logger.warning("%s: topics were not added: %s", self._file.path, error)
                return False
            self._document = document
            return True

    def _with(self, topics: Mapping[str, TopicConfig]) -> dict[str, Any] | None:
        """The document with some topics and their queues; None if it has them already."""
        old = self._document or _EMPTY
        table = dict(old["topicConfigTable"])
        for name, topic in topics.items():
            entry = table.get(name)
            if entry is None:
                table[name] = topic_entry(topic, is_batch=name in self._batch_topics)
                continue
            counts = {"readQueueNums": topic.read_queues, "writeQueueNums": topic.write_queues}
            more = {
                member: count
                for member, count in counts.items()
                if int(entry.get(member, 0)) < count
            }
            if more:
                table[name] = {**entry, **more}
        if table == old["topicConfigTable"]:
            return None
        return self._versioned(old, table)
