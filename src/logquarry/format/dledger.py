"""An entry of a DLedger log (``DLedgerEntry``): a head of 48 bytes, then one frame.

PHYSICALOFFSET, consume queues and index point to the frame, after the head. DLedger writes an entry
that does not fit into a file to the next file. The rest of the first file then begins with eight
bytes: the magic -1 and the length of this unused rest.
"""

from __future__ import annotations

from typing import Final

from logquarry.format.fields import Field, Layout

HEAD = Layout(
    "DLedger entry head",
    Field("magic", "i", "1"),
    Field("size", "i", "bytes of the entry: head and frame"),
    Field("index", "q", "number of the entry, from 0"),
    Field("term", "q", "term of the leader that wrote it"),
    Field("position", "q", "position of the head in the log"),
    Field("channel", "i", "0"),
    Field("chain_crc", "i", "0"),
    Field("body_crc", "i", "0"),
    Field("body_size", "i", "bytes of the frame"),
)
assert HEAD.size == 48

MAGIC: Final = 1
MAGIC_BLANK: Final = -1
BLANK_SIZE: Final = 8
FOLDER: Final = "dledger-"
"""Start of the folder's name in the store; the id of the group's member follows."""


def has_head_reference(data: memoryview, position: int, *, base: int, left: int) -> bool:
    """Whether an entry's head is at a position; ``left`` counts the bytes to the file's end."""
    if len(data) - position < HEAD.size:
        return False
    magic, size, _, _, at, _, _, _, body_size = HEAD.struct.unpack_from(data, position)
    fits = HEAD.size < size <= left
    return bool(magic == MAGIC and fits and at == base + position and body_size == size - HEAD.size)


def starts_blank(data: memoryview, position: int) -> bool:
    """Whether the magic that marks the unused rest of a file is at a position."""
    return int.from_bytes(data[position : position + 4], "big", signed=True) == MAGIC_BLANK


def is_blank_reference(data: memoryview, position: int, *, left: int) -> bool:
    """Whether the unused rest of a file, with ``left`` bytes, begins at a position."""
    size = int.from_bytes(data[position + 4 : position + BLANK_SIZE], "big", signed=True)
    return starts_blank(data, position) and size == left
