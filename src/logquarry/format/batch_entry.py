"""The 46-byte entry of a batch queue of RocketMQ 5 (``BatchConsumeQueue``).

An entry names one frame and the queue offsets of its messages: ``[base, base + count)``. Its place
in the files is not a queue offset: readers search the base.
"""

from __future__ import annotations

from typing import Final

from logquarry.format.fields import Field, Layout

LAYOUT = Layout(
    "batch queue entry",
    Field("physical_offset", "q", "start of the frame in the log"),
    Field("size", "i", "TOTALSIZE of the frame; 0: empty entry"),
    Field("tags_code", "q", "hash of the frame's tags; 0 if only the messages inside have tags"),
    Field("store_timestamp", "q", "STORETIMESTAMP of the frame"),
    Field("base", "q", "msgBaseOffset: queue offset of the frame's first message"),
    Field("count", "h", "batchSize: messages in the frame"),
    Field("compacted_offset", "i", "offset in a compacted log; -1: none"),
    Field("reserved", "i", "0; logquarry: number of lost messages at the start of the entry"),
)
ENTRY_SIZE: Final = LAYOUT.size
assert ENTRY_SIZE == 46
DEFAULT_ENTRIES_PER_FILE: Final = 300_000
NOT_COMPACTED: Final = -1
"""Compacted offset of an entry that no compaction has seen."""
