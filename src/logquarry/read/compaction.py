"""Reads messages from the compaction topics of RocketMQ 5 (``CompactionStore.getMessage``).

In ``compaction/``, the broker keeps the newest message of each key of such a topic::

    compactionLog/TOPIC/QUEUE/ frames; their PHYSICALOFFSET is their offset in this log
    compactionCq/TOPIC/QUEUE/ entries of batch queues; each file is named like its log file

Messages that the broker has not compacted yet are only in ``commitlog/``. To find these messages, a
get reads the consume queue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from logquarry.format.frame import Frame
from logquarry.log.earlier_writers import topic_attributes
from logquarry.log.layout import StoreLayout
from logquarry.log.open_files import OpenFiles
from logquarry.log.store_files import COMPACTED_LOG, COMPACTED_QUEUE, FileSequence
from logquarry.read.batch_queue import BatchQueue
from logquarry.read.commit_log import CommitLog
from logquarry.read.features import CLEANUP, COMPACTION_POLICY
from logquarry.read.get_message import GetMessageStatus, GetResult, TransferLimits, get_message
from logquarry.read.log_queues import QueueKey
from logquarry.stored_message import StoredMessage

if TYPE_CHECKING:
    from logquarry.format.frame import Damage
    from logquarry.read.queue import Queue


def compacted_topics(layout: StoreLayout) -> frozenset[str]:
    """Return the topics with a folder in ``compaction/compactionCq/``. Topics that now have another
    cleanup policy than COMPACTION are omitted.
    """
    if COMPACTED_QUEUE.partition("/")[0] not in layout.folders:
        return frozenset()
    names = {entry.name for entry in layout.filesystem.list(COMPACTED_QUEUE) if entry.is_dir}
    stated = topic_attributes(layout.filesystem) if names else {}
    return frozenset(
        name
        for name in names
        if stated.get(name, {}).get(CLEANUP, COMPACTION_POLICY) == COMPACTION_POLICY
    )


class CompactedLog(CommitLog):
    """The compacted log of one queue."""

    def __init__(self, layout: StoreLayout, key: QueueKey, files: OpenFiles) -> None:
        super().__init__(layout, files=files)
        self._sequence = layout.compacted_log(*key)

    @property
    def files(self) -> FileSequence:
        """The files of the compacted log."""
        return self._sequence

    @property
    def max_offset(self) -> int:
        """The end of the last file."""
        return self._sequence.end


class CompactedQueue(BatchQueue):
    """The entries of one queue in ``compactionCq/``."""

    def _listed(self) -> FileSequence:
        return self._layout.compacted_queue(self.topic, self.queue_id)

    def warn_of_gap(self, offset: int) -> None:
        """Do nothing: a gap is no damage, because compaction removes messages and their entries."""


class CompactedGets:
    """Answers the gets of compaction topics."""

    def __init__(
        self,
        layout: StoreLayout,
        limits: TransferLimits,
        read: Callable[[bytes, int], StoredMessage | Damage | None],
    ) -> None:
        self.topics = compacted_topics(layout)
        self._layout = layout
        self._limits = limits
        self._read = read
        self._files = OpenFiles(layout)
        self._known: dict[QueueKey, tuple[CompactedQueue, CompactedLog]] = {}

    def get(
        self, queue: Queue, offset: int, max_count: int, tags: frozenset[str] | None
    ) -> GetResult | None:
        """Return the messages that start at a queue offset. Return None if the compacted queue ends
        at or before this offset.

        Raises CorruptFrame if the first message is damaged.
        """
        compacted, log = self._opened(queue)
        end = compacted.max_offset
        if offset >= end:
            return None
        # Compaction leaves gaps between queue offsets. As in the broker, a get continues after a
        # gap, however large the gap is.
        offset = max(offset, compacted.min_offset)
        while True:
            found = get_message(
                log, compacted, offset, max_count, tags=tags, limits=self._limits, read=self._read
            )
            if found.messages or not offset < found.next_offset < end:
                break
            offset = found.next_offset
        low, high = self.bounds(queue)
        status = found.status if found.messages else GetMessageStatus.NO_MATCHED_MESSAGE
        return found._replace(min_offset=low, max_offset=high, status=status)

    def bounds(self, queue: Queue) -> tuple[int, int]:
        """The queue's first queue offset, and the queue offset after its last message."""
        compacted, _ = self._opened(queue)
        low, high = queue.bounds()
        if compacted.max_offset:
            low = min(low, compacted.min_offset) if high else compacted.min_offset
        return low, max(high, compacted.max_offset)

    def queue_at(self, queue: Queue, offset: int) -> Queue:
        """Return the queue that a get at this queue offset reads. It is the compacted queue if that
        queue ends after the offset, else the consume queue.
        """
        compacted, _ = self._opened(queue)
        return compacted if offset < compacted.max_offset else queue

    def _opened(self, queue: Queue) -> tuple[CompactedQueue, CompactedLog]:
        key = queue.topic, queue.queue_id
        if key not in self._known:
            found = CompactedQueue(self._layout, *key, log_min_offset=0, files=self._files)
            self._known[key] = found, CompactedLog(self._layout, key, self._files)
        return self._known[key]

    def release(self) -> None:
        """Close the files, because the broker replaces them at each compaction."""
        self._known = {}
        self._files = OpenFiles(self._layout)


class CompactionFault(NamedTuple):
    """A damaged or missing message of a compacted log.

    An entry points to ``size`` bytes at the physical offset ``offset`` of the compacted log.
    ``path`` is the file with this offset; the log's folder if there is no such file.
    """

    path: str
    offset: int
    size: int
    reason: str


def compaction_faults(layout: StoreLayout) -> Iterator[CompactionFault]:
    """Yield the damaged or missing messages that entries in ``compaction/`` point to."""
    files = OpenFiles(layout)
    for topic in sorted(compacted_topics(layout)):
        for folder in layout.filesystem.list(f"{COMPACTED_QUEUE}/{topic}"):
            if not (folder.is_dir and folder.name.isdecimal()):
                continue
            key = topic, int(folder.name)
            log = CompactedLog(layout, key, files)
            queue = CompactedQueue(layout, *key, log_min_offset=0, files=files)
            for offset, units in queue.runs(0, queue.max_offset):
                for number, (place, size, _) in enumerate(units.tolist()):
                    found = log.outcome_at(place)
                    wanted = offset + number
                    if isinstance(found, Frame):
                        if (found.size, found.queue_offset) == (size, wanted):
                            continue
                        reason = f"a message of {found.size} bytes with offset {found.queue_offset}"
                    else:
                        reason = getattr(found, "reason", "a blank")
                    file = log.files.at(place)
                    path = f"{COMPACTED_LOG}/{topic}/{folder.name}" if file is None else file.path
                    reason += f" (offset {wanted} of queue {key[1]} points here)"
                    yield CompactionFault(path, place, size, reason)
