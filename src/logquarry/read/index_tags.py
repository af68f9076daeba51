"""Finds out whether the index of a store has an entry for each message's tag.

Since 5.4.0 ``IndexService.buildIndex`` puts ``topic#T#TAGS`` after UNIQ_KEY and the words of KEYS.
An entry holds only a hash, so only the message that it points to shows which text was hashed.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Final

from logquarry.disk.open_files import OpenFiles
from logquarry.format import index, java, sys_flag
from logquarry.format import properties as props
from logquarry.format.frame import Frame
from logquarry.log.layout import StoreLayout
from logquarry.read.commit_log import CommitLog
from logquarry.read.index import Index

_MOST_ENTRIES: Final = 256
ROCKSDB_STORE: Final = "rocksdbstore"


@dataclass(frozen=True, slots=True)
class TagEntries:
    """What the newest messages in the index show.

    Attributes:
        path: the index file that was read.
        has_tags: whether a message with a tag has an entry for it.
    """

    path: str
    has_tags: bool


def with_index_tags(layout: StoreLayout) -> StoreLayout:
    """The layout with a configuration that states whether the index has tags.

    If no message shows it, the store's record or the version decides: since 5.4.0 a broker makes
    ``rocksdbstore/``.
    """
    if layout.config.index_tags is not None:
        return layout
    found = find_tag_entries(layout)
    likely = layout.kept_settings.get("index_tags", ROCKSDB_STORE in layout.folders)
    has_tags = likely if found is None else found.has_tags
    return layout.with_config(replace(layout.config, index_tags=has_tags))


def tag_hash(topic: str, tag: str) -> int:
    """The hash in a tag's index entry (``IndexService.buildKey`` with an index type)."""
    return java.positive_hash_code(index.tag_text(topic, tag))


def find_tag_entries(layout: StoreLayout) -> TagEntries | None:
    """Whether the newest entries of the index name tags; None if no message there has a tag.

    Reads the last 256 entries of the newest index file that has any, and their frames.
    """
    files = OpenFiles(layout)
    log = CommitLog(layout, files=files)
    for file in reversed(Index(layout, files=files).files):
        if file.is_empty or file.shape is None:
            continue
        count = file.header.entry_count
        hashes: dict[int, set[int]] = defaultdict(set)
        for number in range(max(1, count - _MOST_ENTRIES), count):
            data = files.read(file.path, file.shape.entry_position(number), index.ENTRY.size)
            if len(data) == index.ENTRY.size:
                entry = index.decode_entry(data, 0)
                hashes[entry.physical_offset].add(entry.key_hash)
        # The first message may have further entries before those that were read.
        tagged = [_has_tag(log, offset, found) for offset, found in list(hashes.items())[1:]]
        known = [one for one in tagged if one is not None]
        if known:
            return TagEntries(file.path, any(known))
    return None


def _has_tag(log: CommitLog, offset: int, hashes: set[int]) -> bool | None:
    """Whether a message's tag is among its hashes; None if it has no tag, or is not in the log."""
    found = log.outcome_at(offset, check_crc=False)
    if not isinstance(found, Frame):
        return None
    if sys_flag.transaction_type(found.sys_flag) == sys_flag.TRANSACTION_ROLLBACK:
        return None
    tag = props.decode_bytes(found.properties).get(props.TAGS)
    if not tag:
        return None
    return tag_hash(found.topic.decode("utf-8", java.UTF8_ERRORS), tag) in hashes
