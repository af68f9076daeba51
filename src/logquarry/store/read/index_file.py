"""The index of keys: topic and key -> physical offsets, as ``IndexService`` reads it.

Guarantees: a query follows each chain at most once and only backwards, so that no damage makes it
loop; entries that lie beyond a short file are not there. Nothing raises on any bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import cached_property

from logquarry.files.layout import INDEX, StoreLayout
from logquarry.format import index, java
from logquarry.format.index import ENTRY, HEADER, SLOT, IndexEntry, IndexHeader, IndexShape
from logquarry.store.disk.open_files import OpenFiles
from logquarry.store.read.index_shape import infer_shape

logger = logging.getLogger(__name__)


class IndexFile:
    """One index file (``IndexFile``).

    Args:
        path: below the store's root.
        layout: the store's files.
        files: what reads them.
    """

    def __init__(self, path: str, layout: StoreLayout, files: OpenFiles) -> None:
        self.path = path
        self._layout = layout
        self._reader = files

    @property
    def header(self) -> IndexHeader:
        """The header, as it is now. Bytes that a short file lacks count as zeros."""
        # Java extends a short file when it opens it.
        data = bytes(self._reader.read(self.path, 0, HEADER.size))
        return index.decode_header(data.ljust(HEADER.size, b"\0"))

    @cached_property
    def shape(self) -> IndexShape | None:
        """Slots and entries: as stated, else as the contents tell; None where they do not."""
        stated = self._layout.config.index_shape
        if stated is not None:
            return stated
        view = self._reader.view(self.path)
        return None if view is None else infer_shape(view, self.header)

    @property
    def is_empty(self) -> bool:
        """Whether no key is in it."""
        return self.header.entry_count <= 1

    @property
    def is_usable(self) -> bool:
        """Whether its keys can be looked up."""
        return self.is_empty or self.shape is not None

    def is_time_matched(self, begin: int, end: int) -> bool:
        """Whether it may hold keys of messages stored from ``begin`` to ``end``."""
        header = self.header
        first, last = header.begin_timestamp, header.end_timestamp
        if begin < first and end > last:
            return True
        return first <= begin <= last or first <= end <= last

    def select_offsets(
        self, found: list[int], topic: str, key: str, max_count: int, begin: int, end: int
    ) -> None:
        """Add the offsets of a key, newest first, until there are ``max_count``.

        Hashes are compared, not keys. Times count in whole seconds from the file's first one, as
        the entries have them.
        """
        first = self.header.begin_timestamp
        hashes = _hashes(topic, key)
        if len(found) >= max_count:
            return
        for entry in self._chain(hashes[0]):
            time = first + entry.seconds * 1000
            if entry.key_hash in hashes and begin <= time <= end:
                found.append(entry.physical_offset)
            if len(found) >= max_count or time < begin:
                return

    def all_offsets(self, topic: str, key: str) -> list[int] | None:
        """All the offsets that the file has for a key, newest first; hashes are compared.

        None if the chain is not sound to its end, so that some may be missing.
        """
        hashes = _hashes(topic, key)
        header, shape = self.header, self.shape
        if shape is None:
            return None
        found: list[int] = []
        slot = shape.slot_position(hashes[0])
        number, upper = self._slot(shape, hashes[0]), header.entry_count
        newest = header.end_offset
        while number != 0:
            entry = self._entry(shape, number) if 0 < number < upper else None
            if entry is None or entry.seconds < 0:
                return None
            if shape.slot_position(entry.key_hash) != slot:
                return None
            # Messages are indexed in the order of the log.
            if not header.begin_offset <= entry.physical_offset <= newest:
                return None
            newest = entry.physical_offset
            if entry.key_hash in hashes:
                found.append(entry.physical_offset)
            number, upper = entry.previous, number
        return found

    def _chain(self, key_hash: int) -> Iterator[IndexEntry]:
        """The entries of the slot of a hash, newest first."""
        header = self.header
        # What a file's contents tell is kept: an empty one must not be asked for its shape.
        shape = self.shape if header.entry_count > 1 else None
        if shape is None:
            return
        number = self._slot(shape, key_hash)
        if number > header.entry_count:
            return
        while number > 0:
            entry = self._entry(shape, number)
            if entry is None or entry.seconds < 0:
                return
            yield entry
            # QUIRK: Java goes wherever an entry points but to itself; a torn chain that leads
            # forwards keeps it for ever (apache/rocketmq#8018).
            if entry.previous >= number:
                return
            number = entry.previous

    def _slot(self, shape: IndexShape, key_hash: int) -> int:
        data = self._reader.read(self.path, shape.slot_position(key_hash), SLOT.size)
        return int(SLOT.struct.unpack(data)[0]) if len(data) == SLOT.size else 0

    def _entry(self, shape: IndexShape, number: int) -> IndexEntry | None:
        data = self._reader.read(self.path, shape.entry_position(number), ENTRY.size)
        return index.decode_entry(data, 0) if len(data) == ENTRY.size else None


def _hashes(topic: str, key: str) -> tuple[int, int]:
    """What an entry of a key may carry; the first one leads to its slot."""
    # 3.x stored the hash raw. It had the same slot, and 4.9.3 never has a negative one.
    return index.key_hash(topic, key), java.hash_code(index.key_text(topic, key))


class Index:
    """All index files of a store (``IndexService``).

    Args:
        layout: the store's files.
        files: what reads them (default: an own one).
    """

    def __init__(self, layout: StoreLayout, *, files: OpenFiles | None = None) -> None:
        self._layout = layout
        self._reader = files or OpenFiles(layout)

    @cached_property
    def files(self) -> Sequence[IndexFile]:
        """The index files, oldest first."""
        return [
            IndexFile(f"{INDEX}/{entry.name}", self._layout, self._reader)
            for entry in self._layout.index_files
        ]

    def refresh(self) -> None:
        """Look again at which files there are."""
        self.__dict__.pop("files", None)

    @property
    def is_usable(self) -> bool:
        """Whether there is an index, and all of it can be read."""
        unusable = [file.path for file in self.files if not file.is_usable]
        for path in unusable:
            logger.warning(
                "%s: maxHashSlotNum and maxIndexNum cannot be told from what it holds",
                self._layout.filesystem.full_path(path),
            )
        return bool(self.files) and not unusable

    def query_offsets(
        self, topic: str, key: str, max_count: int, begin: int = 0, end: int = java.LONG_MAX
    ) -> list[int]:
        """Physical offsets that the index has for a key, newest first (``queryOffset``).

        Hash collisions are among them. ``begin`` and ``end`` are store times in milliseconds,
        both inclusive; at most ``maxMsgsNumBatch`` offsets come.
        """
        max_count = min(max_count, self._layout.config.max_msgs_num_batch)
        found: list[int] = []
        for file in reversed(self.files):
            if file.is_time_matched(begin, end):
                file.select_offsets(found, topic, key, max_count, begin, end)
            # QUIRK: a file without keys begins at 0, and hides the older ones from any query that
            # has a begin.
            if file.header.begin_timestamp < begin or len(found) >= max_count:
                break
        return found
