"""The index file (``IndexFile``, ``IndexHeader``): a hash table of keys with backward chains.

::

    | header 40 | slots: slot_count x 4 | entries: max_entries x 20 |

Entries whose hashes have the same slot form a chain. The slot contains the number of the chain's
newest entry, and each entry contains the number of the previous entry of the chain. Number 0 means
that there is no entry. So entry 0 is never used, and the header's ``entry_count`` starts at 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from logquarry.format import java
from logquarry.format.fields import Field, Layout

HEADER = Layout(
    "index header",
    Field("begin_timestamp", "q", "store time of the first key's message, ms"),
    Field("end_timestamp", "q", "store time of the last key's message, ms"),
    Field("begin_offset", "q", "physical offset of the first key's message"),
    Field("end_offset", "q", "physical offset of the last key's message"),
    Field("slots_used", "i", "hash slot count: number of slots that have an entry"),
    Field("entry_count", "i", "index count: number of written entries plus one"),
)
SLOT = Layout("index slot", Field("newest", "i", "entry number of the slot's newest entry"))
ENTRY = Layout(
    "index entry",
    Field("key_hash", "i", "hash of topic#key"),
    Field("physical_offset", "q", "start of the frame in the log"),
    Field("seconds", "i", "store time: seconds since the header's begin_timestamp"),
    Field("previous", "i", "entry number of the slot's next older entry; 0: none"),
)
DEFAULT_SLOTS: Final = 5_000_000
DEFAULT_ENTRIES: Final = 20_000_000
assert HEADER.size == 40 and SLOT.size == 4 and ENTRY.size == 20


class IndexHeader(NamedTuple):
    """The header of an index file: its first 40 bytes."""

    begin_timestamp: int
    end_timestamp: int
    begin_offset: int
    end_offset: int
    slots_used: int
    entry_count: int


class IndexEntry(NamedTuple):
    """One key of one message."""

    key_hash: int
    physical_offset: int
    seconds: int
    previous: int


@dataclass(frozen=True, slots=True)
class IndexShape:
    """The number of slots (``maxHashSlotNum``) and entries (``maxIndexNum``) of an index file."""

    slots: int = DEFAULT_SLOTS
    entries: int = DEFAULT_ENTRIES

    @property
    def file_size(self) -> int:
        """Bytes of the whole file."""
        return HEADER.size + self.slots * SLOT.size + self.entries * ENTRY.size

    def slot_position(self, key_hash: int) -> int:
        """Return the position of the slot of a hash. The hash may be negative, because RocketMQ 3.x
        stored hashes with their sign.
        """
        return HEADER.size + abs(key_hash) % self.slots * SLOT.size

    def entry_position(self, number: int) -> int:
        """Return the position of the entry with a given number."""
        return HEADER.size + self.slots * SLOT.size + number * ENTRY.size


DEFAULT_SHAPE: Final = IndexShape()


def key_text(topic: str, key: str) -> str:
    """Return the text whose hash is stored for a key (``IndexService.buildKey``)."""
    return f"{topic}#{key}"


def tag_text(topic: str, tag: str) -> str:
    """Return the text whose hash RocketMQ 5.4 stores for a tag (``IndexService.buildKey`` with
    ``INDEX_TAG_TYPE``).
    """
    return f"{topic}#T#{tag}"


def key_hash(topic: str, key: str) -> int:
    """Return the hash that an entry contains for a key; never negative
    (``IndexFile.indexKeyHashMethod``).
    """
    return java.positive_hash_code(key_text(topic, key))


def decode_header(data: bytes | memoryview) -> IndexHeader:
    """Decode the header. If ``entry_count`` in the file is 0 or less, ``entry_count`` of the result
    is 1.
    """
    header = IndexHeader(*HEADER.struct.unpack_from(data, 0))
    # QUIRK: A file without keys contains the count 0, because IndexHeader.load() changes 0 to 1
    # only in memory.
    return header._replace(entry_count=max(1, header.entry_count))


def encode_header(header: IndexHeader) -> bytes:
    """Encode a header."""
    return HEADER.struct.pack(*header)


def decode_entry(data: bytes | memoryview, position: int) -> IndexEntry:
    """Decode the entry at a position in the file."""
    return IndexEntry(*ENTRY.struct.unpack_from(data, position))
