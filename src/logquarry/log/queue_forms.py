"""The two forms of queue files: folder, entry size and file size of each topic's queues."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from logquarry.config import StoreConfig
from logquarry.format import batch_entry, queue_entry
from logquarry.log.store_files import BATCH_QUEUE, CONSUME_QUEUE, NAME_DIGITS


@dataclass(frozen=True, slots=True)
class QueueForm:
    """The folder of a topic's queues, and the sizes of their files and entries.

    Attributes:
        root: folder below the store's folder, with TOPIC/QUEUE/FILE.
        entry_size: bytes of an entry.
        file_size: bytes of a file.
    """

    root: str
    entry_size: int
    file_size: int

    def file_at(self, folder: Path, position: int) -> Path:
        """The file of a queue's folder that has, or would have, a position in the queue."""
        return folder / f"{position - position % self.file_size:0{NAME_DIGITS}d}"


def queue_form(config: StoreConfig, topic: str) -> QueueForm:
    """The form of a topic's queues.

    Args:
        config: settings of the store, with all sizes.
        topic: the topic.
    """
    if topic in config.batch_topics:
        assert config.batch_queue_file_size is not None
        return QueueForm(BATCH_QUEUE, batch_entry.ENTRY_SIZE, config.batch_queue_file_size)
    assert config.queue_file_size is not None
    return QueueForm(CONSUME_QUEUE, queue_entry.UNIT_SIZE, config.queue_file_size)
