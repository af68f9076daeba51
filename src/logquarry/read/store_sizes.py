"""The sizes of a store's files: from the settings, or from the files."""

from __future__ import annotations

import dataclasses
from collections import Counter

from logquarry.config import DEFAULT_COMMIT_LOG_FILE, StoreConfig
from logquarry.errors import UsageError
from logquarry.format import index, java, queue_entry, state_table
from logquarry.format.index import IndexShape
from logquarry.log.layout import StoreLayout, levels_text
from logquarry.read.index import Index
from logquarry.read.index_tags import with_index_tags


def with_sizes(config: StoreConfig, layout: StoreLayout | None) -> StoreConfig:
    """Complete the settings: missing sizes come from the files, else from RocketMQ's defaults.

    Delay levels too: with other levels, the delivery times in the schedule queues would look wrong.

    Raises:
        UsageError: if the settings lack the shape of the index and its files do not determine it.
    """
    log_size = queue_size = table_size = redo_size = 0
    if config.is_3_1 or (layout is not None and layout.has_state_table):
        table_size = state_table.DEFAULT_UNITS_PER_FILE * state_table.UNIT_SIZE
        redo_size = state_table.DEFAULT_UNITS_PER_FILE * queue_entry.UNIT_SIZE
    shape = config.index_shape
    if layout is not None:
        log_size = layout.commit_log.file_size
        queue_size = _common_size(layout)
        table_size = layout.state_table.file_size if layout.state_table.files else table_size
        redo_size = layout.redo_log.file_size if layout.redo_log.files else redo_size
        shape = shape or _shape_of(layout)
        if layout.delay_levels_ms != config.delay_levels_ms:
            levels = levels_text(layout.delay_levels_ms)
            config = dataclasses.replace(config, message_delay_level=levels)
        if config.index_tags is None:
            config = dataclasses.replace(
                config, index_tags=with_index_tags(layout).config.index_tags
            )
    shape = shape or index.DEFAULT_SHAPE
    return dataclasses.replace(
        config,
        mapped_file_size_commit_log=(
            config.mapped_file_size_commit_log or log_size or DEFAULT_COMMIT_LOG_FILE
        ),
        mapped_file_size_consume_queue=config.queue_file_size
        or queue_size
        or queue_entry.DEFAULT_UNITS_PER_FILE * queue_entry.UNIT_SIZE,
        tran_state_table_mapped_file_size=config.state_table_file_size or table_size or None,
        tran_redo_log_mapped_file_size=config.redo_log_file_size or redo_size or None,
        max_hash_slot_num=shape.slots,
        max_index_num=shape.entries,
    )


def _common_size(layout: StoreLayout) -> int:
    """The most frequent size of a queue file; 0 without files. Single files may be damaged."""
    sizes = Counter(
        file.size
        for topic, queue_id in layout.queue_names
        for file in layout.queue(topic, queue_id).files
        if 0 < file.size <= java.INT_MAX and file.size % queue_entry.UNIT_SIZE == 0
    )
    return max(sizes, key=lambda size: (sizes[size], size), default=0)


def _shape_of(layout: StoreLayout) -> IndexShape | None:
    found = Index(layout).files
    for file in found:
        if file.shape is not None:
            return file.shape
    if found:
        raise UsageError(
            f"{layout.root}: the sizes of its index files cannot be inferred: give "
            "max_hash_slot_num and max_index_num in the configuration"
        )
    return None
