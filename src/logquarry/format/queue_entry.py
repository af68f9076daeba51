"""The entries of consume queues: 20 bytes each in queue files, or keys and values in RocksDB. The
module also has the search for an entry by store time, and the entries of the transaction state
table of 3.x.

A queue file (``ConsumeQueue``) has entries of :data:`LAYOUT`. The other layouts describe RocksDB in
RocketMQ 5 (``RocksDBConsumeQueueStore``): column family ``default`` has the entries, and column
family ``offset`` has the first and the last queue offset of each queue. The key :data:`DISPATCHED`
in ``offset`` holds the physical offset up to which the broker has dispatched the log.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final, NamedTuple

from logquarry.format import java
from logquarry.format.arrays import Records
from logquarry.format.fields import Field, Layout
from logquarry.format.sys_flag import TRANSACTION_COMMIT, TRANSACTION_PREPARED, TRANSACTION_ROLLBACK

LAYOUT = Layout(
    "consume queue entry",
    Field("physical_offset", "q", "start of the frame in the log"),
    Field("size", "i", "TOTALSIZE of the frame; 0: empty entry"),
    Field("tags_code", "q", "hash of the tags; in the schedule topic: delivery time, ms"),
)
UNIT_SIZE: Final = LAYOUT.size
DEFAULT_UNITS_PER_FILE: Final = 300_000
assert UNIT_SIZE == 20

FILLER_SIZE: Final = java.INT_MAX
"""The value of the size field in filler entries. If the first entry of a queue has an offset above
0, fillers precede this entry in the queue's first file. A recovery also writes fillers in place of
lost messages. In the state table, an entry has this size if its message is no longer in the log.
"""


class QueueEntry(NamedTuple):
    """One entry of a consume queue."""

    physical_offset: int
    size: int
    tags_code: int

    @property
    def end(self) -> int:
        """Physical offset after the message."""
        return self.physical_offset + self.size

    @property
    def is_written(self) -> bool:
        """Whether RocketMQ treats the entry as written (``offset >= 0 && size > 0``)."""
        return self.physical_offset >= 0 and self.size > 0

    @property
    def is_filler(self) -> bool:
        """Whether the entry is a filler, which points to no message
        (``ConsumeQueue.fillPreBlank``).

        A filler has a size that no frame has. The physical offset in a filler is 0. Only a filler
        that a salvage wrote can have another offset; see docs/salvage.md.
        """
        return self.size == FILLER_SIZE


FILLER = QueueEntry(0, FILLER_SIZE, 0)


def encode(entry: QueueEntry) -> bytes:
    """Encode an entry."""
    return LAYOUT.struct.pack(*entry)


def decode_at(data: bytes | memoryview, position: int) -> QueueEntry:
    """Decode the entry at ``position``."""
    return QueueEntry(*LAYOUT.struct.unpack_from(data, position))


ENTRIES: Final = "default"
OFFSETS: Final = "offset"

ENTRY = Layout(
    "RocksDB queue entry",
    Field("physical_offset", "q", "start of the frame in the log"),
    Field("size", "i", "TOTALSIZE of the frame"),
    Field("tags_code", "q", "hash of the tags"),
    Field("store_timestamp", "q", "STORETIMESTAMP of the frame"),
)
BOUND = Layout(
    "RocksDB queue bound",
    Field("physical_offset", "q", "start of the frame in the log"),
    Field("queue_offset", "q", "first or last queue offset of the queue, inclusive"),
)
DISPATCHED_END = Layout(
    "RocksDB dispatched end",
    Field("physical_offset", "q", "end of the last frame that the broker has dispatched"),
)

MIN: Final = b"min"
MAX: Final = b"max"
_SEPARATOR: Final = b"\x01"
_LENGTH: Final = struct.Struct(">i")
_QUEUE_ID: Final = struct.Struct(">i")
_OFFSET: Final = struct.Struct(">q")
OFFSET_SIZE: Final = _OFFSET.size


class BoundKey(NamedTuple):
    """A key of the column family ``offset``; ``which`` is :data:`MIN` or :data:`MAX`."""

    topic: str
    which: bytes
    queue_id: int


def queue_prefix(topic: str, queue_id: int) -> bytes:
    """The prefix of the keys of a queue's entries; the queue offset follows the prefix."""
    return _SEPARATOR.join((_topic(topic), _QUEUE_ID.pack(queue_id), b""))


def entry_key(topic: str, queue_id: int, queue_offset: int) -> bytes:
    """The key of an entry."""
    return queue_prefix(topic, queue_id) + _OFFSET.pack(queue_offset)


def bound_key(topic: str, which: bytes, queue_id: int) -> bytes:
    """The key of a queue's first or last queue offset."""
    return _SEPARATOR.join((_topic(topic), which, _QUEUE_ID.pack(queue_id)))


def decode_bound_key(key: bytes) -> BoundKey | None:
    """Decode a key of the column family ``offset``; None for other keys."""
    if len(key) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(key)
    at = _LENGTH.size + len(_SEPARATOR)
    if length < 0 or len(key) != len(bound_key("", MIN, 0)) + length:
        return None
    topic = key[at : at + length].decode("utf-8", java.UTF8_ERRORS)
    at += length + len(_SEPARATOR)
    which = key[at : at + len(MIN)]
    (queue_id,) = _QUEUE_ID.unpack(key[-_QUEUE_ID.size :])
    found = BoundKey(topic, which, queue_id)
    return found if which in (MIN, MAX) and bound_key(*found) == key else None


def _topic(topic: str) -> bytes:
    name = topic.encode()
    return _SEPARATOR.join((_LENGTH.pack(len(name)), name))


DISPATCHED: Final = bound_key("CHECKPOINT_TOPIC", MAX, 0)


# --------------------------------------------------------------------------------------------------
# The 24-byte entry of the transaction state table of 3.x (``TransactionStateService``). Each
# PREPARED message has one entry, whose number is the message's QUEUEOFFSET. Entries are never
# removed.

STATE_LAYOUT: Final = Layout(
    "state table entry",
    Field("physical_offset", "q", "start of the PREPARED frame in the log"),
    Field("size", "i", "TOTALSIZE of the frame; 0: empty entry"),
    Field("store_seconds", "i", "STORETIMESTAMP of the frame, in seconds"),
    Field("group_hash", "i", "hash of the producer group (PGROUP)"),
    Field("state", "i", "4: prepared, 8: committed, 12: rolled back"),
)
STATE_SIZE: Final = STATE_LAYOUT.size
STATE_AT: Final = STATE_LAYOUT.offsets["state"]
DEFAULT_STATES_PER_FILE: Final = 2_000_000
assert STATE_SIZE == 24
assert STATE_AT == 20

STATES: Final = (TRANSACTION_PREPARED, TRANSACTION_COMMIT, TRANSACTION_ROLLBACK)


class StateUnit(NamedTuple):
    """One entry of the state table."""

    physical_offset: int
    size: int
    store_seconds: int
    group_hash: int
    state: int

    @property
    def is_sound(self) -> bool:
        """Whether RocketMQ treats the entry as written."""
        return self.physical_offset >= 0 and self.size > 0 and self.state in STATES

    @property
    def is_open(self) -> bool:
        """Whether the transaction is open: not committed, and not rolled back."""
        return self.state == TRANSACTION_PREPARED


def encode_state(unit: StateUnit) -> bytes:
    """Encode an entry."""
    return STATE_LAYOUT.struct.pack(*unit)


def decode_state_at(data: bytes | memoryview, position: int) -> StateUnit:
    """Decode the entry at ``position``."""
    return StateUnit(*STATE_LAYOUT.struct.unpack_from(data, position))


def group_hash(group: str | None) -> int:
    """Return the hash of a producer group that an entry contains (``String.hashCode``); 0 if there
    is no group.
    """
    return java.hash_code(group or "")


StoreTime = Callable[[int, int], int]
"""Function (physical offset, size) -> store time of the message in ms; -1 without a message."""


def search_time(
    units: Records, low: int, timestamp: int, store_time: StoreTime, log_min_offset: int
) -> int | None:
    """Find the index of the entry by the same binary search as Java.

    Return -1 if the log has none of the messages, and None if the search meets an unwritten entry.
    If the search needs a message that is not in the log, Java returns the queue offset 0. In this
    case this function returns a large negative index, and the caller replaces it by the offset 0.
    """
    high = len(units) - 1
    left = right = left_time = right_time = -1
    while high >= low:
        middle = (low + high) // 2
        physical_offset, size, _ = units[middle].item()
        if size <= 0 or physical_offset < 0:
            return None
        if physical_offset < log_min_offset:
            # QUIRK: this step sets left, but not left_time. The result can be left only if a later
            # step sets left_time.
            low, left = middle + 1, middle
            continue
        found = store_time(physical_offset, size)
        if found < 0:
            return java.LONG_MIN
        if found == timestamp:
            return middle
        if found > timestamp:
            high, right, right_time = middle - 1, middle, found
        else:
            low, left, left_time = middle + 1, middle, found
    if left_time == -1:
        return right
    if right_time == -1:
        return left
    return right if abs(timestamp - left_time) > abs(timestamp - right_time) else left
