"""The settings that determine the bytes of a store's files: file sizes and kinds of entries."""

from __future__ import annotations

from dataclasses import dataclass, fields

from logquarry import arguments
from logquarry.format import batch, index, java, queue_entry


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutConfig:
    """Settings that determine the bytes of files.

    None means that the value is inferred from existing files.

    Attributes:
        mapped_file_size_commit_log: bytes of a commit log file (RocketMQ: 1 GiB).
        mapped_file_size_consume_queue: bytes of a queue file, rounded up to whole entries
            (RocketMQ: 6,000,000).
        mapper_file_size_batch_consume_queue: bytes of a batch queue file (RocketMQ 5: 13,800,000).
            "mapper" is RocketMQ's spelling.
        batch_topics: the topics with batch queues, found in the store's files; never configured.
        max_hash_slot_num: slots of an index file (RocketMQ: 5,000,000).
        max_index_num: entries of an index file, including the unused entry 0
            (RocketMQ: 20,000,000).
        tran_state_table_mapped_file_size: bytes of a file of the 3.x state table
            (RocketMQ: 48,000,000).
        tran_redo_log_mapped_file_size: bytes of a file of the 3.x redo log (RocketMQ: 40,000,000).
        index_tags: whether the index has an entry for each message's tag (RocketMQ 5.4 and later).
            A new store has no tag entries.
        enable_multi_dispatch: whether a message with the property INNER_MULTI_DISPATCH also gets
            entries in the queues that the property names (in a new store: no). If the setting is
            unknown, a message gets such entries only if it has the property
            INNER_MULTI_QUEUE_OFFSET.
        enable_lmq: whether multi-dispatch uses the queue id 0 for all queues whose names start with
            ``%LMQ%``.
        message_index_enable: whether to index keys (in a new store: yes).
        mapped_file_size_timer_log: bytes of a file of the timer log (RocketMQ 5: 100 MiB).
        timer_precision_ms: milliseconds of a slot of the timer wheel (RocketMQ 5: 1,000).
    """

    mapped_file_size_commit_log: int | None = None
    mapped_file_size_consume_queue: int | None = None
    mapper_file_size_batch_consume_queue: int | None = None
    batch_topics: frozenset[str] = frozenset()
    max_hash_slot_num: int | None = None
    max_index_num: int | None = None
    tran_state_table_mapped_file_size: int | None = None
    tran_redo_log_mapped_file_size: int | None = None
    index_tags: bool | None = None
    enable_multi_dispatch: bool | None = None
    enable_lmq: bool | None = None
    message_index_enable: bool | None = None
    mapped_file_size_timer_log: int | None = None
    timer_precision_ms: int | None = None

    def __post_init__(self) -> None:
        arguments.check_fields(self)
        for field in fields(LayoutConfig):
            value = getattr(self, field.name)
            if field.type == "int | None" and value is not None:
                # Limit the sizes: in RocketMQ they are Java ints, and calculations with offsets
                # must stay within 64 bits.
                arguments.integer(value, field.name, least=1, most=java.INT_MAX)

    @property
    def queue_file_size(self) -> int | None:
        """Bytes of a queue file, rounded up to entries (``getMappedFileSizeConsumeQueue``)."""
        return _whole_entries(self.mapped_file_size_consume_queue, queue_entry.UNIT_SIZE)

    @property
    def batch_queue_file_size(self) -> int | None:
        """Bytes of a batch queue file, rounded up to whole entries."""
        return _whole_entries(self.mapper_file_size_batch_consume_queue, batch.ENTRY_SIZE)

    @property
    def state_table_file_size(self) -> int | None:
        """Bytes of a state table file, rounded up to whole entries."""
        return _whole_entries(self.tran_state_table_mapped_file_size, queue_entry.STATE_SIZE)

    @property
    def redo_log_file_size(self) -> int | None:
        """Bytes of a redo log file, rounded up to whole entries."""
        return _whole_entries(self.tran_redo_log_mapped_file_size, queue_entry.UNIT_SIZE)

    @property
    def index_shape(self) -> index.IndexShape | None:
        """Slots and entries of an index file; None if both settings are None."""
        if self.max_hash_slot_num is None and self.max_index_num is None:
            return None
        return index.IndexShape(
            self.max_hash_slot_num or index.DEFAULT_SLOTS,
            self.max_index_num or index.DEFAULT_ENTRIES,
        )


def _whole_entries(size: int | None, entry_size: int) -> int | None:
    return None if size is None else -(-size // entry_size) * entry_size
