"""Defines the names of a store's files, lists a store's folders, finds broken links in them, infers
the sizes of files, and logs each warning about a file once.

::

    STORE/commitlog/00000000000000000000      names: physical offset of the first byte
    STORE/consumequeue/TOPIC/QUEUE/0000...    names: byte offset in the queue
    STORE/batchconsumequeue/TOPIC/QUEUE/0000...
    STORE/index/yyyyMMddHHmmssSSS
    STORE/transaction/statetable/0000...      names: byte offset in the table (3.x)
    STORE/config/*.json  checkpoint  abort  lock
"""

from __future__ import annotations

import logging
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from operator import attrgetter
from pathlib import Path

from logquarry.config import StoreConfig
from logquarry.errors import LIMITS, StoreNotFound, reason_of
from logquarry.format import batch, java, queue_entry
from logquarry.log.filesystem import Entry, FileSystem
from logquarry.log.rocksdb import is_there
from logquarry.systems import is_locked

logger = logging.getLogger(__name__)


@lru_cache(256)
def _logged(about: str) -> list[str]:
    """Return the cached list of the warnings about a thing: one warning, or none."""
    return []


def warn_once(text: str, *, about: str | None = None) -> None:
    """Log a warning, unless the same warning was logged before.

    With ``about``, for example the path of a file, later warnings about the same thing are not
    logged, even if their texts differ.
    """
    logged = _logged(text if about is None else about)
    if not logged:
        logged.append(text)
        logger.warning("%s", text)


def is_in_use(lock: Path) -> bool:
    """Whether a process holds the lock of a store; also True if this process may not read the lock.

    A reader that takes an open store for closed reports the writer's unfinished work as damage.
    """
    try:
        return is_locked(lock)
    except OSError as error:
        if error.errno not in LIMITS:
            warn_once(_unread(lock, error))
        return True


def unread_lock(lock: Path) -> str | None:
    """Return a text that says why this process may not read the lock of a store; None if it may."""
    try:
        is_locked(lock)
    except OSError as error:
        return _unread(lock, error)
    return None


def _unread(lock: Path, error: OSError) -> str:
    step = "" if error.errno in LIMITS else ": run the command as the store's owner"
    return (
        f"a process may have the store open: {error.filename or lock} cannot be read: "
        f"{reason_of(error)}{step}"
    )


COMMIT_LOG = "commitlog"
CONSUME_QUEUE = "consumequeue"
BATCH_QUEUE = "batchconsumequeue"
COMPACTED = "compaction"
COMPACTED_LOG = "compaction/compactionLog"
COMPACTED_QUEUE = "compaction/compactionCq"
INDEX = "index"
TRANSACTION = "transaction"
"""Folder of RocketMQ 3.x for the state table and the redo log."""
STATE_TABLE = f"{TRANSACTION}/statetable"
REDO_LOG = f"{TRANSACTION}/redolog/TRANSACTION_REDOLOG_TOPIC_XXXX/0"
CONFIG = "config"
CHECKPOINT = "checkpoint"
ABORT = "abort"
LOCK = "lock"
OPEN = "a process has the store open and may be writing"
SIDECAR = ".logquarry"
"""Folder for logquarry's own files in a store. RocketMQ ignores this folder."""
DURABLE = f"{SIDECAR}/durable"
LOADS = f"{SIDECAR}/loads"
INTENT = "intent.json"
DAMAGE = f"{SIDECAR}/damage.json"
SETTINGS = f"{SIDECAR}/settings.json"
"""File with the settings that logquarry used when it last opened the store for writing."""
REBUILD = f"{SIDECAR}/rebuild"
"""Folder in which a rebuild makes new queues and a new index, before it moves them to their
places.
"""
SALVAGE = ".salvage"
"""Folder in which a salvage builds a store. The salvage removes the folder at its end."""

NAME_DIGITS = 20
LARGEST_BASE = java.LONG_MAX // 2
"""Largest offset that a file's name may have. Listings skip files with larger names, so that sums
of offsets fit into 64 bits.
"""

_QUEUE_ID = re.compile("0|-?[1-9][0-9]{0,9}")
_LISTINGS = 3
_QUEUE_DEPTH = 2


def is_offset_name(name: str) -> bool:
    """Whether a name consists of 20 digits, as the names of log files and queue files do."""
    return len(name) == NAME_DIGITS and name.isascii() and name.isdigit()


def is_log_file(entry: Entry) -> bool:
    """Whether an entry is a file whose name is the offset of a log file or a queue file."""
    return is_offset_name(entry.name) and not entry.is_dir and int(entry.name) <= LARGEST_BASE


def is_index_name(name: str) -> bool:
    """Whether a name has the form of an index file's name: the time of its creation."""
    return name.isascii() and name.isdigit()


def quarantine(root: Path, *parts: str) -> Path:
    """Return the quarantine folder for a part of the store; ``parts`` are folder names."""
    return root.joinpath(SIDECAR, "quarantine", *parts)


@dataclass(frozen=True, slots=True)
class QueueForm:
    """The folder of a topic's queues (``root``), and the sizes of an entry and of a queue file."""

    root: str
    entry_size: int
    file_size: int

    def file_at(self, folder: Path, position: int) -> Path:
        """Return the path of the queue file that contains a byte position in the queue. The file
        need not exist.
        """
        return folder / f"{position - position % self.file_size:0{NAME_DIGITS}d}"


def queue_form(config: StoreConfig, topic: str) -> QueueForm:
    """Return the form of a topic's queues. ``config`` must state the sizes of queue files."""
    if topic in config.batch_topics:
        assert config.batch_queue_file_size is not None
        return QueueForm(BATCH_QUEUE, batch.ENTRY_SIZE, config.batch_queue_file_size)
    assert config.queue_file_size is not None
    return QueueForm(CONSUME_QUEUE, queue_entry.UNIT_SIZE, config.queue_file_size)


@dataclass(frozen=True, slots=True)
class StoreFile:
    """One file of a file sequence.

    ``base`` is the offset of the first byte (the file's name). ``size`` is the number of bytes on
    the disk, which is less than the sequence's ``file_size`` if the file is short.
    """

    base: int
    size: int
    path: str


@dataclass(frozen=True, slots=True)
class FileSequence:
    """Files that follow each other: a log, a queue or a table. ``file_size`` is the number of bytes
    from a file's offset to the end of its range. ``has_heads`` marks a DLedger log, in which a head
    precedes each frame.
    """

    files: tuple[StoreFile, ...]
    file_size: int
    has_heads: bool = False

    def index_of(self, offset: int) -> int | None:
        """Return the index of the file whose range contains ``offset``; None if there is none."""
        index = bisect_right(self.files, offset, key=attrgetter("base")) - 1
        return index if index >= 0 and offset < self.files[index].base + self.file_size else None

    def at(self, offset: int) -> StoreFile | None:
        """Return the file whose range contains ``offset``; None if there is none."""
        index = self.index_of(offset)
        return None if index is None else self.files[index]

    def next_boundary(self, offset: int) -> int:
        """Return the end of the file, or of the gap between files, that contains an offset."""
        file = self.at(offset)
        if file is not None:
            return file.base + self.file_size
        return next((file.base for file in self.files if file.base > offset), java.LONG_MAX)

    @property
    def start(self) -> int:
        """Offset of the first byte, 0 if there are no files."""
        return self.files[0].base if self.files else 0

    @property
    def end(self) -> int:
        """Offset after the range of the last file."""
        return self.files[-1].base + self.file_size if self.files else 0


def of_entries(files: tuple[StoreFile, ...], entry_size: int, stated: int | None) -> FileSequence:
    """Make the sequence of a queue or table. The file size is rounded down to whole entries."""
    size = stated or size_of(files)
    # If even the largest file has no room for a whole entry, use the size of one entry.
    return FileSequence(files, max(entry_size, size // entry_size * entry_size))


def fits_files(size: int, sequences: Sequence[Sequence[StoreFile]]) -> bool:
    """Whether a broker with this file size can have created the files. A file may be shorter now
    than when the broker created it.
    """
    sizes = {file.size for files in sequences for file in files if file.size}
    shown = shown_sizes(sequences)
    # If the names of the files do not show the full size, each size of a file can be the full size.
    # A larger size can be the full size too, because all files may be short.
    return not sizes or size in (shown or sizes) or (not shown and size > max(sizes))


def shown_sizes(sequences: Sequence[Sequence[StoreFile]]) -> set[int]:
    """Return the sizes of files that are probably their full sizes.

    The distance between the names of two neighbouring files is the full size of the first file. So
    return each size of a file that is also the distance between two neighbouring names.
    """
    sizes = {file.size for files in sequences for file in files if file.size}
    return sizes & {b.base - a.base for files in sequences for a, b in pairwise(files)}


def size_of(files: tuple[StoreFile, ...]) -> int:
    """Infer the regular size of the files of one sequence, from their names and sizes."""
    largest = max((file.size for file in files), default=0)
    steps = [b.base - a.base for a, b in pairwise(files)]
    shown = Counter(b.base - a.base for a, b in pairwise(files) if a.size == b.base - a.base)
    if shown:
        # A file of another store can have another size, and a name between the names of two files.
        return max(shown, key=lambda size: (shown[size], -size))
    # The distance between two files' names is the exact size if no file is missing between them. If
    # files are missing, the distance is a multiple of the size.
    return min(steps) if steps and any(f.size == min(steps) for f in files) else largest


class StoreFolders:
    """A store's folders. With ``by_names``, a file in ``commitlog/`` is a stray file (not a file of
    the store) if its name is not an offset.
    """

    def __init__(self, filesystem: FileSystem, *, by_names: bool) -> None:
        self.filesystem = filesystem
        self.ignored: list[str] = []
        self._goes_by_names = by_names

    def queue_names(self, root: str = CONSUME_QUEUE) -> tuple[tuple[str, int], ...]:
        """Return (topic, queue id) of each queue in a folder, sorted."""
        names: list[tuple[str, int]] = []
        topics = self.filesystem.list(root)
        if any(not topic.is_dir for topic in topics) and is_there(self.filesystem, root):
            # The queues are in RocksDB (storeType=defaultRocksDB). RocksDB's files are not stray.
            topics = [topic for topic in topics if topic.is_dir]
            depths: tuple[int, ...] = (_QUEUE_DEPTH,)
        else:
            depths = (1, _QUEUE_DEPTH)
        for topic in topics:
            folder = f"{root}/{topic.name}"
            queues = self.filesystem.list(folder) if topic.is_dir else []
            for queue in queues:
                if queue.is_dir and _is_queue_id(queue.name):
                    names.append((topic.name, int(queue.name)))
                else:
                    self.ignore(f"{folder}/{queue.name}")
            if not topic.is_dir:
                self.ignore(folder)
        for path in sorted(self.filesystem.dead_links):
            if path.startswith(f"{root}/") and path.count("/") in depths:
                self.ignore(path)
        return tuple(sorted(names))

    def index_files(self) -> tuple[Entry, ...]:
        """Return the index files, oldest first (sorted by name)."""
        found: list[Entry] = []
        for entry in self.filesystem.list(INDEX):
            if not entry.is_dir and is_index_name(entry.name):
                found.append(entry)
            else:
                self.ignore(f"{INDEX}/{entry.name}")
        return tuple(found)

    def numbered(self, folder: str) -> tuple[StoreFile, ...]:
        """Return the files of a folder whose names are offsets, sorted by offset."""
        files: dict[int, StoreFile] = {}
        for _ in range(_LISTINGS):
            # A listing can miss a file in the middle if a broker creates files at the same time. So
            # list again if there is a gap.
            files |= {file.base: file for file in self._list_numbered(folder)}
            found = [files[base] for base in sorted(files)]
            steps = {b.base - a.base for a, b in pairwise(found)}
            if len(steps) <= 1:
                break
        return tuple(files[base] for base in sorted(files))

    def _list_numbered(self, folder: str) -> list[StoreFile]:
        files: list[StoreFile] = []
        hidden: list[str] = []
        for entry in self.filesystem.list(folder):
            name = entry.name
            if is_log_file(entry):
                files.append(StoreFile(int(name), entry.size, f"{folder}/{name}"))
                continue
            if entry.is_dir and folder == COMMIT_LOG and is_offset_name(name):
                hidden.append(name)
            if folder != COMMIT_LOG or self._goes_by_names:
                self.ignore(f"{folder}/{name}")
        if files and folder == COMMIT_LOG:
            # If a folder, or a link to an unmounted disk, has the name of a log file, list it as an
            # empty file. Readers then report its messages as lost, not as expired.
            hidden += filter(is_offset_name, self.filesystem.broken_links(folder))
            names = [name for name in hidden if int(name) <= LARGEST_BASE]
            files += [StoreFile(int(name), 0, f"{folder}/{name}") for name in names]
        return files

    def ignore(self, path: str) -> None:
        """Add a file to the stray files, and log a warning."""
        # Log a warning, because RocketMQ refuses to start if there is a stray file.
        if path not in self.ignored:
            self.ignored.append(path)
            target = self.filesystem.broken_link(path)
            reason = (
                "not a store file" if target is None else f"a link to {target}, which is missing"
            )
            warn_once(f"{self.filesystem.full_path(path)}: {reason}, ignored")


def _is_queue_id(name: str) -> bool:
    # Accept only names as RocketMQ writes them: a folder ``00`` is not queue 0.
    return _QUEUE_ID.fullmatch(name) is not None and java.INT_MIN <= int(name) <= java.INT_MAX


# ------------------------------------------------------------------------------------ broken links
# If the target of a link is missing, for example because a disk is not mounted, the store looks
# like a store whose messages are missing or expired.
class BrokenLink(StoreNotFound):
    """A folder or file of a store is a link to a path that does not exist."""


def require_target(filesystem: FileSystem, path: str) -> None:
    """Raise BrokenLink if a path below the root is a link whose target does not exist."""
    target = filesystem.broken_link(path)
    if target is not None:
        raise BrokenLink(
            f"{filesystem.full_path(path)}: it is a link to {target}, which does not exist:"
            " mount that disk, or correct the link"
        )


def require_queue_links(
    filesystem: FileSystem, topic: str, queue_id: int, files: Iterable[StoreFile] = ()
) -> None:
    """Check a queue's folder and files for broken links and names that are not regular files.

    Raises BrokenLink if the folder or a listed file is a broken link, and StoreNotFound if one of
    ``files`` is not a regular file, for example a pipe.
    """
    for file in files:
        # If a path is not a regular file, the list of files shows it as an empty file.
        if not file.size and (wrong := filesystem.why_no_file(file.path)) is not None:
            path = filesystem.full_path(file.path)
            raise StoreNotFound(f"{path}: it {wrong}: move it out of the store")
    if not is_folder_name(topic):
        return
    for root in (CONSUME_QUEUE, BATCH_QUEUE):
        folder = f"{root}/{topic}/{queue_id}"
        for path in (f"{root}/{topic}", folder):
            require_target(filesystem, path)
        for path in sorted(filesystem.dead_links):
            parent, _, name = path.rpartition("/")
            if parent == folder and is_offset_name(name):
                require_target(filesystem, path)


def is_folder_name(topic: str) -> bool:
    """Whether a topic can be the name of a folder. The topic of an untrusted message must not lead
    out of the store.
    """
    return topic not in ("", ".", "..") and "/" not in topic and "\0" not in topic
