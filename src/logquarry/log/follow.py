"""Decodes dispatch requests: arrays with the fields from which the dispatcher makes the queue and
index entries of frames (RocketMQ's ``DispatchRequest``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from logquarry.config import IndexKeys
from logquarry.format import arrays as r
from logquarry.format import index, java, sys_flag
from logquarry.format import properties as props
from logquarry.format.arrays import Bools, Int32, Int64
from logquarry.format.frame import MAGIC_V1, Frame
from logquarry.log import codec, columns
from logquarry.log.codec import Rows, Window
from logquarry.log.columns_kernel import KernelColumns
from logquarry.log.frames import require_whole
from logquarry.log.walk import Run

_NUMBERS = ("queue_id", "queue_offset", "sys_flag", "store_timestamp")


@dataclass(frozen=True, slots=True)
class DispatchRequests:
    """The dispatch requests of a run of frames, one element per frame.

    Attributes:
        topic_ids: index of the frame's topic in ``topics``.
        store_timestamp: in milliseconds.
        is_dispatched: whether the dispatcher writes a queue entry for the frame. Only frames of the
            transaction types NOT and COMMIT get an entry.
        has_key: whether the dispatcher adds the frame's keys to the index: the frame has KEYS or
            UNIQ_KEY, and its transaction type is not ROLLBACK.
    """

    topic_ids: Int32
    topics: list[str]
    queue_id: Int64
    queue_offset: Int64
    physical_offset: Int64
    size: Int64
    store_timestamp: Int64
    tags_code: Int64
    is_dispatched: Bools
    has_key: Bools


def dispatch_requests(
    window: Window, rows: Rows, delay_levels_ms: tuple[int, ...]
) -> DispatchRequests:
    """Decode the dispatch requests of frames."""
    ids, topics = columns.topic_ids(window, rows)
    numbers = {
        name: values.astype(np.int64)
        for name, values in columns.fixed_fields(window, rows, _NUMBERS).items()
    }
    codes, has_key = columns.tags_codes(
        window, rows, columns.Decoding(delay_levels_ms=delay_levels_ms)
    )
    kinds = numbers["sys_flag"] & sys_flag.TRANSACTION_MASK
    return DispatchRequests(
        topic_ids=ids,
        topics=topics,
        queue_id=numbers["queue_id"],
        queue_offset=numbers["queue_offset"],
        physical_offset=rows[:, r.POSITION].astype(np.int64) + window.base,
        size=rows[:, r.SIZE].astype(np.int64),
        store_timestamp=numbers["store_timestamp"],
        tags_code=codes,
        is_dispatched=(kinds == sys_flag.TRANSACTION_NOT) | (kinds == sys_flag.TRANSACTION_COMMIT),
        has_key=has_key & (kinds != sys_flag.TRANSACTION_ROLLBACK),
    )


# --------------------------------------------------------------------------------------------------
# Index keys

_SHORTEST_KEY = 2
"""Bytes of a key of one character, and of the space after the key."""


def index_keys(
    window: Window,
    rows: Rows,
    *,
    raw: bool = False,
    only_keys: bool = False,
    tags: bool = False,
) -> tuple[Int64, Int64]:
    """Hash the index keys of frames. Return the hash of each key, and the index of the key's frame.

    The keys are in the order of ``IndexService.buildIndex``: for each frame, UNIQ_KEY, then the
    words of KEYS, then the tag. With ``raw``, a negative hash stays negative, as in RocketMQ 3.x.
    With ``only_keys``, UNIQ_KEY is skipped, because 3.x had no UNIQ_KEY. With ``tags``, the tag is
    added, as in RocketMQ 5.4.
    """
    fast = codec.kernels_if_worth(len(rows))
    if fast is None or fast.bad_utf8(window.address, rows, len(rows)):
        return _plain(window, rows, raw, only_keys, tags)
    rows = np.ascontiguousarray(rows)
    count = len(rows)
    starts, lengths = KernelColumns(window, rows).all_property_spans()
    if only_keys:
        lengths = lengths.copy()
        lengths[fast.UNIQ_KEY] = -1
    ids, topics = columns.topic_ids(window, rows)
    by_topic = [java.hash_code(index.key_text(topic, "")) for topic in topics]
    prefixes = np.array(by_topic, np.int64)[ids] if count else np.empty(0, np.int64)
    tag_prefixes = np.empty(0, np.int64)
    if tags and count:
        by_topic = [java.hash_code(index.tag_text(topic, "")) for topic in topics]
        tag_prefixes = np.array(by_topic, np.int64)[ids]
    most = 2 * count + int((np.maximum(lengths[fast.KEYS], 0) // _SHORTEST_KEY + 1).sum())
    hashes, numbers = np.empty(most, np.int64), np.empty(most, np.int64)
    used = fast.index_keys(
        *(window.address, count, starts, lengths, prefixes, tag_prefixes, hashes, numbers, raw)
    )
    return hashes[:used], numbers[:used]


def _plain(
    window: Window, rows: Rows, raw: bool, only_keys: bool, tags: bool
) -> tuple[Int64, Int64]:
    hash_of = java.hash_code if raw else java.positive_hash_code
    found: list[tuple[int, int]] = []
    for number, message in enumerate(columns.messages(window, rows, columns.Decoding())):
        keys = [] if message.uniq_key is None or only_keys else [message.uniq_key]
        keys += props.split_keys(message.keys or "")
        found += [(hash_of(index.key_text(message.topic, key)), number) for key in keys]
        if tags and message.tags:
            found.append((hash_of(index.tag_text(message.topic, message.tags)), number))
    table = np.array(found, np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


# --------------------------------------------------------------------------------------------------
# Following the log
#
# The kernel checks and decodes the frames of a run in one pass. If the kernel cannot decode one of
# the frames, the pure-Python reference decodes the whole run.

MOST_FRAMES: Final = 1 << 14
_MOST_TOPICS: Final = 1 << 9
_MOST_QUEUES: Final = 1 << 11
_MOST_KEYS: Final = 4 * MOST_FRAMES
_MOST_DIGITS: Final = 9
assert _MOST_KEYS > java.INT_MAX >> 16


@dataclass(frozen=True, slots=True)
class Followed:
    """A run of frames with its dispatch requests.

    Attributes:
        key_hashes: hashes of the index keys, in the order of the index.
        key_numbers: for each key, the index of the key's frame.
        table: the table that the kernel filled (:mod:`logquarry.format.arrays`); None if the
            pure-Python reference codec decoded the run instead.
        queues: (topic, queue id) of each queue; the table has indexes of this list.
    """

    rows: Rows
    requests: DispatchRequests
    key_hashes: Int64
    key_numbers: Int64
    table: Int64 | None = None
    queues: tuple[tuple[str, int], ...] = ()


class Follower:
    """Reads and decodes the frames of a log, run by run. Only one thread may use it at a time.

    With ``as_java``, a follower stops with the code ASK_JAVA before a frame that RocketMQ 4.9.3 may
    reject. Such a frame is a frame of 5.x, or a frame of the schedule topic whose DELAY is not one
    to nine digits.
    """

    def __init__(
        self,
        delay_levels_ms: tuple[int, ...],
        *,
        most_frames: int = MOST_FRAMES,
        check_crc: bool = False,
        as_java: bool = False,
        keys: IndexKeys = "4.9",
    ) -> None:
        self._keys = keys
        self._check_crc = check_crc
        self._as_java = as_java
        self._levels = delay_levels_ms
        self._level_array = np.array(delay_levels_ms, np.int64)
        self._rows = codec.empty_rows(most_frames)
        self._table = np.empty((r.FIELD_COUNT, most_frames), np.int64)
        self._topics = np.zeros((_MOST_TOPICS, 4), np.int64)
        self._queues = np.zeros((_MOST_QUEUES, 2), np.int64)
        self._topic_table = np.empty(4 * _MOST_TOPICS, np.int32)
        self._queue_table = np.empty(4 * _MOST_QUEUES, np.int32)
        self._hashes = np.empty(_MOST_KEYS, np.int64)
        self._numbers = np.empty(_MOST_KEYS, np.int64)

    def follow(self, window: Window, stop: int) -> tuple[Followed | None, int, int]:
        """Read and decode the frames that start before ``stop``. Return the run of these frames,
        the position after the run, and the code that tells why the run ends there.

        The run is None if it has no frames. The arrays of the run are valid until the next call.
        The code is ASK_JAVA or a code of :func:`logquarry.log.codec.walk`.
        """
        found, after, code = self._follow(window, stop)
        if found is not None and self._keys != "4.9":
            hashes, numbers = _other_keys(window, found.rows, self._keys)
            found = replace(found, key_hashes=hashes, key_numbers=numbers)
        return found, after, code

    def _follow(self, window: Window, stop: int) -> tuple[Followed | None, int, int]:
        if codec.kernels_if_worth() is None:
            crc = self._check_crc
            count, after, code = codec.walk(window, 0, stop, self._rows, check_crc=crc)
            sound = self._sound_to_java(window, count)
            if sound < count:
                count, after, code = sound, int(self._rows[sound, r.POSITION]), r.ASK_JAVA
            return self._by_reference(window, count), after, code
        return self._by_kernel(window, stop)

    def _sound_to_java(self, window: Window, count: int) -> int:
        """Return how many frames RocketMQ 4.9.3 certainly accepts before the first frame that it
        may reject.
        """
        if not self._as_java:
            return count
        for number, position in enumerate(self._rows[:count, r.POSITION].tolist()):
            found = window.decode(position, check_crc=False)
            assert isinstance(found, Frame)
            level = None
            if found.topic == props.SCHEDULE_TOPIC.encode():
                level = props.decode_bytes(found.properties).get(props.DELAY)
            plain = level is None or (level.isascii() and level.isdigit())
            if found.magic != MAGIC_V1 or not plain or len(level or "") > _MOST_DIGITS:
                return number
        return count

    def _by_reference(self, window: Window, count: int) -> Followed | None:
        if not count:
            return None
        rows = self._rows[:count]
        requests = dispatch_requests(window, rows, self._levels)
        keyed = np.flatnonzero(requests.has_key)
        hashes, numbers = index_keys(window, rows[keyed])
        return Followed(rows, requests, hashes, keyed[numbers])

    def _by_kernel(self, window: Window, stop: int) -> tuple[Followed | None, int, int]:
        kernels = codec.require_kernels()
        self._topic_table.fill(-1)
        self._queue_table.fill(-1)
        count, after, code, topics, queues, keys, odd = kernels.follow(
            *(window.address, 0, stop, window.length, window.end, window.base),
            *(codec.crc32_address(), self._check_crc, window.has_heads, self._as_java),
            *(self._level_array, self._rows, self._table),
            *(self._topic_table, self._topics, self._queue_table, self._queues),
            *(self._hashes, self._numbers),
        )
        if odd or not count:
            return self._by_reference(window, count), after, code
        table = self._table[:, :count].copy()
        names = [
            window.data[start - window.address :][:size].tobytes().decode()
            for start, size, *_ in self._topics[:topics].tolist()
        ]
        requests = DispatchRequests(
            topic_ids=table[r.TOPIC_ID].astype(np.int32),
            topics=names,
            queue_id=table[r.QUEUE_ID],
            queue_offset=table[r.QUEUE_OFFSET],
            physical_offset=table[r.PHYSICAL_OFFSET],
            size=table[r.FRAME_SIZE],
            store_timestamp=table[r.STORE_TIMESTAMP],
            tags_code=table[r.TAGS_CODE],
            is_dispatched=table[r.QUEUE] >= 0,
            has_key=table[r.HAS_KEY] != 0,
        )
        followed = Followed(
            self._rows[:count],
            requests,
            self._hashes[:keys],
            self._numbers[:keys],
            table,
            tuple((names[topic], queue) for topic, queue in self._queues[:queues].tolist()),
        )
        return followed, after, code


def _other_keys(window: Window, rows: Rows, keys: IndexKeys) -> tuple[Int64, Int64]:
    # RocketMQ 3.1.3 indexed KEYS if the type of the message was NOT or PREPARED; the hashes were
    # raw. RocketMQ 5.4 indexes UNIQ_KEY, KEYS and the tag, unless the type of the message is
    # ROLLBACK.
    flags = columns.fixed_fields(window, rows, ["sys_flag"])["sys_flag"]
    kinds = flags & sys_flag.TRANSACTION_MASK
    is_3_1 = keys == "3.1"
    left_out = [sys_flag.TRANSACTION_ROLLBACK, *[sys_flag.TRANSACTION_COMMIT] * is_3_1]
    keyed = np.flatnonzero(~np.isin(kinds, left_out))
    hashes, numbers = index_keys(window, rows[keyed], raw=is_3_1, only_keys=is_3_1, tags=not is_3_1)
    return hashes, keyed[numbers]


def follow_run(follower: Follower, run: Run) -> Iterator[tuple[Window, Followed]]:
    """Decode a run (consecutive frames that a walk has found) for the dispatcher, in parts.

    Yields the window and the decoded frames of each part. The arrays of a part are valid until the
    next part is made. Raises CorruptFrame if a frame was lost after the walk.
    """
    at, stop = int(run.rows[0, 0]), int(run.rows[0, 0]) + run.end - run.start
    while at < stop:
        part = run.window.after(at)
        found, after, _ = follower.follow(part, stop - at)
        require_whole(run)
        if found is None:
            raise AssertionError(f"no frame at {part.base}, although the walk found one")
        yield part, found
        at += after
