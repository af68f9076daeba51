"""Finds messages by key, with the index (``IndexService``, ``queryMessage``) or by a search in the
log.

Since RocketMQ 5.4.0, ``IndexService.buildIndex`` adds three kinds of keys per message: UNIQ_KEY,
the words of KEYS, and ``topic#T#TAGS``.
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from logquarry.format import index, java, sys_flag
from logquarry.format import properties as props
from logquarry.format.arrays import POSITION
from logquarry.format.frame import Frame
from logquarry.log.earlier_writers import ROCKSDB_STORE
from logquarry.log.filesystem import Entry
from logquarry.log.layout import StoreLayout
from logquarry.log.open_files import OpenFiles
from logquarry.log.readable import rereads
from logquarry.log.store_files import INDEX
from logquarry.log.walk import Event, Run
from logquarry.read.commit_log import CommitLog
from logquarry.read.index_file import IndexFile
from logquarry.stored_message import StoredMessage

logger = logging.getLogger(__name__)

_MOST_ENTRIES: Final = 256
"""Maximum number of entries of the newest index file that :func:`find_tag_entries` reads."""

_MOST_OLDER_ENTRIES: Final = 32
"""The same for each older index file. This number is small, because the function reads all index
files if no message has a tag.
"""


class Index:
    """The index of a store: all its files together (``IndexService``)."""

    def __init__(self, layout: StoreLayout, *, files: OpenFiles | None = None) -> None:
        self._layout = layout
        self._reader = files or OpenFiles(layout)
        self._listed: tuple[Entry, ...] | None = None
        self._files: Sequence[IndexFile] = ()

    @property
    def files(self) -> Sequence[IndexFile]:
        """The index files in the layout's current listing, oldest first."""
        listed = self._layout.index_files
        if listed is not self._listed:
            self._files = [
                IndexFile(f"{INDEX}/{entry.name}", self._layout, self._reader) for entry in listed
            ]
            self._listed = listed
        return self._files

    @property
    def is_usable(self) -> bool:
        """Whether there is an index, and all its files can be read."""
        unusable = [file.path for file in self.files if not file.is_usable]
        for path in unusable:
            logger.warning(
                "%s: maxHashSlotNum and maxIndexNum cannot be inferred from its contents",
                self._layout.filesystem.full_path(path),
            )
        return bool(self.files) and not unusable

    def query_offsets(
        self, topic: str, key: str, max_count: int, begin: int = 0, end: int = java.LONG_MAX
    ) -> list[int]:
        """Return the physical offsets that the index has for a key, newest first (``queryOffset``).

        The offsets include messages whose key is different but has the same hash. The number of
        offsets is limited by ``max_count`` and by ``maxMsgsNumBatch``. ``begin`` and ``end`` are
        inclusive store times in milliseconds.
        """
        max_count = min(max_count, self._layout.config.max_msgs_num_batch)
        found: list[int] = []
        for number, file in enumerate(reversed(self.files)):
            if number and file.is_empty:
                # A broker starts the next file only when the file before it is full.
                file.warn_of_damage("the header has no entries, although a newer file follows")
            if file.is_time_matched(begin, end):
                file.select_offsets(found, topic, key, max_count, begin, end)
            # QUIRK: a file without keys has begin time 0. So a query with a later begin time stops
            # at such a file, and finds nothing in older files.
            if file.header.begin_timestamp < begin or len(found) >= max_count:
                break
        return found


@dataclass(frozen=True, slots=True)
class TagEntries:
    """Whether the index has entries for tags, and the path of the index file that shows this."""

    path: str
    has_tags: bool


def has_index_tags(layout: StoreLayout, files: OpenFiles) -> bool:
    """Determine whether the index has tags (the setting ``index_tags``).

    If none of the newest messages in the index has a tag, the setting recorded in the store is
    used. If no setting is recorded, the index is assumed to have tags if the store has the folder
    ``rocksdbstore/``. Brokers since 5.4.0 create this folder.
    """
    found = find_tag_entries(layout, files)
    if found is not None:
        return found.has_tags
    return bool(layout.kept_settings.get("index_tags", ROCKSDB_STORE in layout.folders))


def find_tag_entries(layout: StoreLayout, files: OpenFiles) -> TagEntries | None:
    """Check whether the newest messages in the index have entries for their tags.

    The function begins with the newest index file and reads its last entries. If none of them
    belongs to a message with a tag, it continues with the next older file. Return None if it finds
    no such message.
    """
    log = CommitLog(layout, files=files)
    most = _MOST_ENTRIES
    for file in reversed(Index(layout, files=files).files):
        if file.is_empty or file.shape is None:
            continue
        count = file.header.entry_count
        first = max(1, count - most)
        most = _MOST_OLDER_ENTRIES
        data = file.read(file.shape.entry_position(first), (count - first) * index.ENTRY.size)
        hashes: dict[int, set[int]] = defaultdict(set)
        for at in range(0, len(data) - index.ENTRY.size + 1, index.ENTRY.size):
            entry = index.decode_entry(data, at)
            hashes[entry.physical_offset].add(entry.key_hash)
        # Skip the first message: the entry for its tag may be before the entries that were read.
        is_known = False
        for offset, found in list(hashes.items())[1:]:
            has_tag = _has_tag(log, offset, found)
            if has_tag:
                return TagEntries(file.path, True)
            is_known = is_known or has_tag is not None
        if is_known:
            return TagEntries(file.path, False)
    return None


def _has_tag(log: CommitLog, offset: int, hashes: set[int]) -> bool | None:
    """Return whether the hash of a message's tag is among ``hashes``. Return None if the log does
    not have the message, or if the message has no tag.
    """
    found = log.outcome_at(offset, check_crc=False)
    if not isinstance(found, Frame):
        return None
    if sys_flag.transaction_type(found.sys_flag) == sys_flag.TRANSACTION_ROLLBACK:
        return None
    tag = props.decode_bytes(found.properties).get(props.TAGS)
    if not tag:
        return None
    text = index.tag_text(found.topic.decode("utf-8", java.UTF8_ERRORS), tag)
    return java.positive_hash_code(text) in hashes


_ROUNDS: Final = 3
"""Maximum number of times that ``queryMessage`` reads the index for one query. Each time, it
searches for older messages than before.
"""

Lookup = Callable[[int], Frame | None]
"""Function that returns the sound frame at a physical offset; None if there is none."""


@rereads
def query_message(
    index: Index, lookup: Lookup, topic: str, key: str, max_count: int, begin: int, end: int
) -> list[Frame]:
    """Return the messages that the index finds for a key, in the order of the log.

    As in Java, the result includes messages whose key is different but has the same hash. A message
    with two entries in the index occurs twice. Messages that the log no longer has are omitted.
    """
    found: list[Frame] = []
    last_time = end
    for _ in range(_ROUNDS):
        offsets = index.query_offsets(topic, key, max_count, begin, last_time)
        if not offsets:
            break
        for number, offset in enumerate(sorted(offsets)):
            message = lookup(offset)
            if message is None:
                continue
            if number == 0:
                # QUIRK: if the log no longer has the oldest message that was found, last_time does
                # not change, so the next round finds the same offsets.
                last_time = message.store_timestamp
            found.append(message)
        if found or last_time < begin:
            break
    return found


def search_log(
    events: Iterable[Event], topic: str, key: str, max_count: int, begin: int, end: int
) -> list[Frame]:
    """Search the whole log for the newest messages with a key. Return them in the order of the
    log.
    """
    if not key or max_count <= 0:
        return []
    needle = key.encode("utf-8", "surrogatepass")
    newest: deque[Frame] = deque(maxlen=max_count)
    for event in events:
        if not isinstance(event, Run):
            continue
        starts = event.rows[:, POSITION]
        base = int(starts[0])
        data = event.window.data[base : event.end - event.window.base].tobytes()
        at = data.find(needle)
        while at >= 0:
            number = int(np.searchsorted(starts, base + at, "right")) - 1
            outcome = event.window.decode(int(starts[number]), check_crc=False)
            if (
                isinstance(outcome, Frame)
                and begin <= outcome.store_timestamp <= end
                and has_key(outcome, topic, key)
            ):
                newest.append(outcome)
            if number + 1 == len(starts):
                break
            at = data.find(needle, int(starts[number + 1]) - base)
    return list(newest)


def has_key(frame: Frame, topic: str, key: str) -> bool:
    """Whether a message has the topic, and the key is its UNIQ_KEY or a word of its KEYS. False for
    a ROLLBACK message, because RocketMQ does not index such messages.
    """
    message = StoredMessage(frame)
    if sys_flag.transaction_type(frame.sys_flag) == sys_flag.TRANSACTION_ROLLBACK:
        return False
    if message.topic != topic:
        return False
    return key == message.uniq_key or key in props.split_keys(message.keys or "")


def of_key(message: StoredMessage, key: str) -> tuple[StoredMessage, ...]:
    """Return the messages of an inner batch that have a key; if none has the key, all messages."""
    batch = message.unwrap()
    if len(batch) == 1:
        return batch
    found = tuple(
        one for one in batch if key == one.uniq_key or key in props.split_keys(one.keys or "")
    )
    return found or batch
