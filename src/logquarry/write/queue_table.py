"""Two tables of a store that is open for writing: the table of its consume queues, and the table of
its topics.

A broker serves a topic to clients only if ``config/topics.json`` (``TopicConfigManager``) lists the
topic. A store can have thousands of queues (``consumeQueueTable``). So the files of a queue are
opened and mapped only when the queue is first read or written.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from logquarry.arguments import Clock
from logquarry.config import StoreConfig
from logquarry.disk.config_file import TOPICS, ConfigFile
from logquarry.disk.disk import Disk
from logquarry.disk.folders import TopicFolders
from logquarry.disk.mapped_file import MappedFile
from logquarry.disk.mapped_file_queue import MappedFileQueue
from logquarry.errors import StoreUnavailable
from logquarry.format import broker_json, java
from logquarry.format.broker_json import TopicConfig, topic_entry
from logquarry.log.earlier_writers import find_writer
from logquarry.log.filesystem import LocalFileSystem
from logquarry.log.store_files import BATCH_QUEUE, CONSUME_QUEUE, quarantine, queue_form
from logquarry.paths import is_file
from logquarry.read.live_read import LiveBatchQueue, LiveQueue
from logquarry.read.log_queues import QueueKey
from logquarry.write.message_rules import queue_name_fault, reject_topic
from logquarry.write.queue_writer import (
    BatchQueueWriter,
    ConsumeQueueMender,
    ConsumeQueueWriter,
    Mending,
)

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
"""Prefixes of topics that are not listed in ``topics.json``: topics that a broker creates at its
start, and names of queues that have no topic.
"""


def is_listed(topic: str) -> bool:
    """Whether ``topics.json`` must list a topic. ``topics.json`` must list each topic that has
    consume queues, except system topics.

    A broker creates its system topics (``TopicValidator``) at each start. If the file had an entry
    for a system topic, this entry would override the broker's own settings.
    """
    if topic in _MADE_BY_BROKERS or topic.startswith(_NOT_LISTED):
        return False
    return queue_name_fault(topic) is None


def topics_of(queues: Iterable[QueueKey]) -> dict[str, TopicConfig]:
    """Return an entry for ``topics.json`` for each topic of the given queues. The entry has the
    topic's number of queues.
    """
    found: dict[str, int] = {}
    for topic, queue_id in queues:
        if is_listed(topic):
            found[topic] = max(found.get(topic, 0), queue_id + 1)
    return {
        topic: TopicConfig(topic, count, count, _READ_AND_WRITE, 0, False)
        for topic, count in sorted(found.items())
    }


class TopicTable:
    """Adds topics, and the numbers of their queues, to ``config/topics.json``.

    The dispatcher calls :meth:`note` with the queues of new messages. A flush adds these queues to
    the file, before the queues themselves are synced. A flush never removes a topic or lowers its
    number of queues, because another program may have configured the topic. If the file does not
    exist, or the store was not shut down cleanly, the first flush also adds the ``existing``
    queues.
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
        self._file = ConfigFile(disk, root, TOPICS)
        self._clock = clock
        self._batch_topics = batch_topics
        self._lock = threading.Lock()
        loaded = self._file.load()
        self._document: dict[str, Any] | None = loaded.value
        # If the file is unreadable, do not replace it, because the user may be able to restore its
        # content by hand.
        self._is_readable = loaded.value is not None or not loaded.problems
        self._noted: set[QueueKey] = set()
        self._new: set[QueueKey] = set()
        if loaded.value is None or was_unclean:
            self.note(list(existing))

    def note(self, queues: Collection[QueueKey]) -> None:
        """Remember queues for the next flush, which adds them to the file. If all
        queues are already known, the call takes almost no time.
        """
        if not self._noted.issuperset(queues):
            with self._lock:
                self._new.update(set(queues) - self._noted)
                self._noted.update(queues)

    def configs(self) -> dict[str, TopicConfig]:
        """Return name -> configuration of each topic, including topics that the next flush adds."""
        with self._lock:
            document = self._with(topics_of(self._new)) or self._document
        return {} if document is None else broker_json.topics_of_document(document)

    def change(self, topics: Mapping[str, TopicConfig | None]) -> None:
        """Add, replace or remove topics, and write the file once. None removes a topic from the
        file; its messages stay in the log.

        If the file cannot be read or written, raises StoreUnavailable and changes nothing.
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
                    table[name] = {**table.get(name, {}), **broker_json.topic_entry(topic)}
            removed = {name for name, topic in topics.items() if topic is None}
            document = self._versioned(old, table)
            self._file.save(document)
            self._document = document
            self._new = {key for key in self._new if key[0] not in removed}
            # Forget the queues of removed topics. If such a topic gets another message, the next
            # flush adds the topic again.
            self._noted = {key for key in self._noted if key[0] not in removed}

    def _versioned(self, old: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
        version = dict(old["dataVersion"])
        # RocketMQ's counter is an AtomicLong, which overflows to the lowest number.
        version["counter"] = java.to_long(int(version.get("counter", 0)) + 1)
        version["timestamp"] = self._clock()
        return {**old, "dataVersion": version, "topicConfigTable": table}

    def flush(self, least_pages: int = 0) -> bool:
        """Add the queues that :meth:`note` was called with, if the file does not have them yet.
        Return whether the file was written.
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
                # Only log the error: no message depends on this file, and the next flush tries
                # again.
                self._new |= new
                logger.warning("%s: topics were not added: %s", self._file.path, error)
                return False
            self._document = document
            return True

    def _with(self, topics: Mapping[str, TopicConfig]) -> dict[str, Any] | None:
        """Return the document of ``topics.json`` after topics were added; None if it already has
        these topics and queues.
        """
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


@dataclass(eq=False, repr=False)
class QueueTable:
    """The queues of one store, with their writers. Any thread may call the methods, but only the
    dispatcher may write with a writer.

    Args:
        ends: the end of each existing queue: the end's position in the queue's files, divided by
            the size of an entry. In a queue of 20-byte entries, this is the queue offset after the
            last entry.
        keeps_tails: whether to keep the bytes after the end of a queue, and to accept a missing
            file between two other files, as RocketMQ does.
        log_end: the end of the log when the store was opened.

    Attributes:
        live: the queues that :meth:`get` has returned.
    """

    disk: Disk
    root: Path
    config: StoreConfig
    ends: Mapping[QueueKey, int]
    log: MappedFileQueue
    mendings: Mapping[QueueKey, Mending] | None = None
    _: KW_ONLY
    keeps_tails: bool = False
    log_end: int = java.LONG_MAX

    def __post_init__(self) -> None:
        self._opening = threading.Lock()
        self._writers: dict[QueueKey, ConsumeQueueWriter | None] = {}
        self._folders = {
            name: TopicFolders(self.disk, self.root / name) for name in (CONSUME_QUEUE, BATCH_QUEUE)
        }
        self.live: dict[QueueKey, LiveQueue | LiveBatchQueue] = {}

    def writer(self, key: QueueKey) -> ConsumeQueueWriter | None:
        """Return the writer of a queue; None if the topic is not a permitted folder name.

        A put refuses such a topic, but another program may have written it to the log.
        """
        try:
            return self._writers[key]
        except KeyError:
            with self._opening:
                if key not in self._writers:
                    self._writers[key] = self._opened(*key)
                return self._writers[key]

    def has_writer(self, key: QueueKey) -> bool:
        """Whether :meth:`writer` was called for a queue."""
        return key in self._writers

    @property
    def claim_topic(self) -> Callable[[str], None] | None:
        """A function that claims the folder of a topic for a put, and raises MessageRejected if
        another topic has this folder. None if each topic has its own folder.
        """
        blind = any(folders.ignores_case for folders in self._folders.values())
        return self._claim if blind else None

    def _claim(self, topic: str) -> None:
        form = queue_form(self.config, topic)
        other = self._folders[form.root].owner(topic)
        if other != topic:
            reject_topic(
                topic,
                f"topic {other} has the folder {self.root / form.root / topic}, because the file "
                "system ignores upper and lower case: choose another name, or copy the store to a "
                "file system that distinguishes them",
            )

    def _opened(self, topic: str, queue_id: int) -> ConsumeQueueWriter | None:
        fault = queue_name_fault(topic)
        if fault is not None:
            logger.error("topic %r gets no consume queue: %s", topic, fault)
            return None
        root = queue_form(self.config, topic).root
        self._folders[root].require_own(topic)
        files = self._open_files(topic, queue_id)
        mending = (self.mendings or {}).get((topic, queue_id))
        if topic in self.config.batch_topics:
            return BatchQueueWriter(files, f"{BATCH_QUEUE}/{topic}/{queue_id}", mending)
        name = f"{CONSUME_QUEUE}/{topic}/{queue_id}"
        if mending is not None:
            return ConsumeQueueMender(files, name, mending)
        writer = ConsumeQueueWriter(files, name)
        # After RocketMQ's recovery, a queue may still have entries that point beyond the log's end.
        # Without this line, the writer would skip new messages at these physical offsets.
        writer.physical_end = min(writer.physical_end, self.log_end)
        return writer

    def _open_files(self, topic: str, queue_id: int) -> MappedFileQueue:
        form = queue_form(self.config, topic)
        parts = form.root, topic, str(queue_id)
        files = MappedFileQueue(
            self.disk,
            self.root.joinpath(*parts),
            form.file_size,
            gaps=self.keeps_tails,
            aside=quarantine(self.root, *parts),
        )
        files.load()
        if files.bases:
            # A queue that is not in `ends` has no valid entry, so its end is 0, and all its entries
            # are removed.
            end = self.ends.get((topic, queue_id), 0) * form.entry_size
            if self.keeps_tails:
                files.end_at(end)
            else:
                files.truncate_to(max(end, files.min_offset))
        return files

    def keys(self) -> list[QueueKey]:
        """Return the topic and the id of each queue, sorted."""
        writers = list(self._writers.items())
        written = {key for key, writer in writers if writer is not None and writer.files.bases}
        return sorted(written.union(self.ends))

    def get(self, topic: str, queue_id: int) -> LiveQueue | LiveBatchQueue | None:
        """Return a queue for reading; None if the queue does not exist."""
        key = topic, queue_id
        found = self.live.get(key)
        if found is not None:
            return found
        # Any caller may pass any name. Only the names of existing queues may be used as paths.
        if key not in self.ends and key not in self._writers:
            return None
        writer = self.writer(key)
        if writer is None or not writer.files.bases:
            return None
        with self._opening:
            parts = topic, queue_id, writer.files, self.log
            if topic in self.config.batch_topics:
                return self.live.setdefault(key, LiveBatchQueue(*parts))
            return self.live.setdefault(key, LiveQueue(*parts, is_5=self._is_5))

    @cached_property
    def _is_5(self) -> bool:
        return find_writer(LocalFileSystem(self.root)).is_5

    def next_offsets(self) -> dict[QueueKey, int]:
        """Return the next offset of each queue (``recoverTopicQueueTable``)."""
        batch = [key for key in self.ends if key[0] in self.config.batch_topics]
        found = {key: end for key, end in self.ends.items() if key not in batch}
        for key in {*self._writers, *batch}:
            writer = self.writer(key)
            if writer is not None and writer.next_offset is not None:
                found[key] = writer.next_offset
        return found

    def __iter__(self) -> Iterator[MappedFileQueue]:
        return iter([w.files for w in list(self._writers.values()) if w is not None])

    def restore_lost(self) -> bool:
        """Restore files that another program deleted. Return whether all files exist now.

        If a RocketMQ broker is started on this store, its recovery deletes queue files whose
        entries point beyond the end of the log. The broker fails to take the lock only after this
        deletion.
        """
        found = [self._restored(file) for files in self for file in files.open_files]
        return all(found)

    def _restored(self, file: MappedFile) -> bool:
        try:
            if file.is_named():
                return True
        except OSError as error:
            logger.error("%s: cannot be checked: %s", file.path, error)
            return False
        logger.warning(
            "%s: another program deleted it, or its disk was unmounted; recreated",
            file.path,
        )
        disk = self.disk
        data = file.select(0) or b""
        try:
            if is_file(file.path):
                parent = file.path.relative_to(self.root).parent
                disk.set_aside(file.path, quarantine(self.root, *parent.parts))
            descriptor = disk.make_file(file.path, file.size)
            try:
                disk.write_all(descriptor, data, 0)
                disk.sync(descriptor, file.path)
            finally:
                disk.let_go(descriptor)
        except (OSError, StoreUnavailable) as error:
            logger.error("%s: cannot be created again: %s", file.path, error)
            return False
        return True

    def close(self) -> None:
        """Close all files."""
        for files in self:
            files.close()
