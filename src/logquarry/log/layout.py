"""The files of a store directory, by their names and sizes.

::

    STORE/commitlog/00000000000000000000      names: physical offset of the first byte
    STORE/consumequeue/TOPIC/QUEUE/0000...    names: byte offset in the queue
    STORE/batchconsumequeue/TOPIC/QUEUE/0000...
    STORE/index/yyyyMMddHHmmssSSS
    STORE/transaction/statetable/0000...      names: byte offset in the table (3.x)
    STORE/config/*.json  checkpoint  abort  lock
"""

from __future__ import annotations

import copy
import json
import logging
import os
import re
from collections.abc import Container, Mapping
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from logquarry.config import StoreConfig, settings_of
from logquarry.errors import CorruptFile, StoreNotFound, UsageError
from logquarry.format import (
    batch_entry,
    broker_config,
    checkpoint,
    durable_mark,
    java,
    queue_entry,
    state_table,
)
from logquarry.format.rows import REACHED_STOP
from logquarry.log import kept_settings
from logquarry.log.delay_levels import levels_of
from logquarry.log.file_sequence import (
    FileSequence,
    StoreFile,
    fits_files,
    of_entries,
    shown_sizes,
    size_of,
)
from logquarry.log.filesystem import Entry, FileSystem, FileView, LocalFileSystem, open_filesystem
from logquarry.log.log_names import (
    LogFile,
    LogNames,
    contradicts_name,
    has_doubtful_name,
    identify_files,
    is_offset_name,
    right_path,
)
from logquarry.log.log_place import (
    LogFolders,
    LogPlace,
    find_log_folders,
    find_missing_log,
)
from logquarry.log.near_store import not_a_store
from logquarry.log.rocksdb_config import read_config

logger = logging.getLogger(__name__)

COMMIT_LOG = "commitlog"
CONSUME_QUEUE = "consumequeue"
BATCH_QUEUE = "batchconsumequeue"
COMPACTED_LOG = "compaction/compactionLog"
COMPACTED_QUEUE = "compaction/compactionCq"
INDEX = "index"
TRANSACTION = "transaction"
"""Folder of 3.x with its state table and redo log."""
STATE_TABLE = f"{TRANSACTION}/statetable"
REDO_LOG = f"{TRANSACTION}/redolog/TRANSACTION_REDOLOG_TOPIC_XXXX/0"
CONFIG = "config"
CHECKPOINT = "checkpoint"
ABORT = "abort"
LOCK = "lock"
SIDECAR = ".logquarry"
"""Our own folder in a store. RocketMQ does not know it."""
DURABLE = f"{SIDECAR}/durable"
LOADS = f"{SIDECAR}/loads"
INTENT = "intent.json"
DAMAGE = f"{SIDECAR}/damage.json"
SETTINGS = f"{SIDECAR}/settings.json"
"""The settings with which a writer of this library made or continued the store."""
SALVAGE = ".salvage"
"""Folder in which a salvage builds a store; the salvage removes it at its end."""

NAME_DIGITS = 20
LARGEST_BASE = java.LONG_MAX // 2
"""Files with larger names are skipped, so that offset arithmetic stays within 64 bits."""
_QUEUE_ID = re.compile("0|-?[1-9][0-9]{0,9}")
_LISTINGS = 3
_LOCK_PROBE = "F_OFD_GETLK"


def quarantine(root: Path, *parts: str) -> Path:
    """The folder for quarantined files of a store; ``parts`` name the part of the store."""
    return root.joinpath(SIDECAR, "quarantine", *parts)


class StoreLayout:
    """The files of one store, as listed when they are first needed.

    Attributes:
        filesystem: the store's folder.
        config: the user's settings.
        ignored: names in the store's folders that are no store files.
        left_out: (topic, queue id) of queues that no reader of this object sees.
        writer_end: the log's end that a reader found while a writer had the store open, if stale
            frames follow that end; else None.
    """

    def __init__(self, filesystem: FileSystem, config: StoreConfig | None = None) -> None:
        self.filesystem = filesystem
        self.config = config or StoreConfig()
        self.ignored: list[str] = []
        self.writer_end: int | None = None
        self.left_out: Container[tuple[str, int]] = ()
        self._goes_by_names = True
        self._names = filesystem.list("")
        present = {entry.name for entry in self._names if entry.is_dir}
        if SALVAGE in present:
            raise StoreNotFound(
                f"{filesystem.root}: an unfinished salvage is here: remove the folder and salvage "
                "again"
            )
        for name in (COMMIT_LOG, CONSUME_QUEUE):
            target = None if name in present else filesystem.broken_link(name)
            if target is not None:
                raise StoreNotFound(
                    f"{filesystem.full_path(name)}: it is a link to {target}, which does not exist:"
                    " mount that disk, or correct the link"
                )
        if not present & {COMMIT_LOG, CONSUME_QUEUE}:
            error = not_a_store(
                filesystem.root,
                f"{filesystem.root}: not a store: it has no folder {COMMIT_LOG} and no folder "
                f"{CONSUME_QUEUE}. Give the broker's store directory (storePathRootDir)",
            )
            if error.suggestion is None:
                self._require_log_here()
            raise error
        self.folders = frozenset(present)
        self._listing = _Listing(self)

    @classmethod
    def open(
        cls,
        location: str | os.PathLike[str],
        config: StoreConfig | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> StoreLayout:
        """The layout of the store at a path or URL.

        Raises:
            StoreNotFound: if there is no store.
        """
        config = settings_of(config)
        try:
            return cls(open_filesystem(location, storage_options), config)
        except PermissionError as error:
            raise StoreNotFound(f"{os.fsdecode(location)}: cannot be read: {error}") from error

    def with_config(self, config: StoreConfig) -> StoreLayout:
        """The same files as another configuration describes them."""
        other = copy.copy(self)
        other.config = config
        return other

    def by_content(self) -> StoreLayout:
        """The same store, with the offsets of its log files by their frames, not by their names.

        Verify, recover and salvage use it. The files keep their paths. Other readers refuse a log
        with wrong names.
        """
        other = copy.copy(self)
        other._goes_by_names = False
        other.ignored = []
        other._listing = _Listing(other)
        return other

    @property
    def root(self) -> str:
        """Path or URL of the store."""
        return self.filesystem.root

    def refresh(self) -> None:
        """Drop the listings: a live writer adds files, retention deletes files."""
        self._listing = _Listing(self)

    def use_commit_log(self, files: FileSequence) -> None:
        """Use these files as the commit log, until the next refresh."""
        self._listing.commit_log = files

    def open_file(self, path: str) -> FileView:
        """Open a file below the root; see :meth:`FileSystem.open`.

        Raises:
            MisnamedFile: if it is a file of the log and has the name of another one.
        """
        view = self.filesystem.open(path)
        folder, _, name = path.rpartition("/")
        is_log = folder == COMMIT_LOG and is_offset_name(name)
        if is_log and self._goes_by_names and contradicts_name(view, int(name)):
            self.require_right_names(path)
        return view

    @property
    def commit_log(self) -> FileSequence:
        """The files of the commit log.

        Raises:
            UnsupportedStore: if files of the log are in other folders of the store.
            MisnamedFile: if the first or the last file, or one beside a gap, has a wrong name. The
                names of the others are checked when they are opened.
        """
        return self._listing.commit_log

    @cached_property
    def log_folders(self) -> LogFolders:
        """The folders of the log."""
        return find_log_folders(self.filesystem, self._names, self.config, lambda: self.durable_end)

    def _find_commit_log(self) -> FileSequence:
        files, folders = self.list_commit_log(), self.log_folders
        self._require_log_here()
        # DLedger has its own setting for the size of its files.
        stated = None if folders.has_heads else self.config.mapped_file_size_commit_log
        size = stated or size_of(files)
        if (
            self._goes_by_names
            and folders.feature is None
            and has_doubtful_name(self.filesystem, [(file.path, file.base) for file in files], size)
        ):
            self.require_right_names()
        # RocketMQ's file size is an int, and positions in a file are 32 bits wide here too: bytes
        # beyond that are no part of a log.
        return FileSequence(files, min(size, java.INT_MAX), folders.has_heads)

    def _require_log_here(self) -> None:
        if self.log_folders.missing is not None:
            raise self.log_folders.missing.error(self.root)

    @property
    def other_log(self) -> LogPlace | None:
        """The place of the log if its folders do not hold all of it; else None."""
        folders = self.log_folders
        if folders.missing is not None or folders.feature is not None:
            return folders.missing
        has_files = self.list_commit_log() or self._files_by_content()
        return None if has_files else self.missing_log

    @property
    def missing_log(self) -> LogPlace | None:
        """If the log has no byte: the evidence that it had messages, None without any."""
        found = find_missing_log(self.filesystem, self._names, self.config)
        # A writer that has just begun may have made its first file after the log was listed.
        has_bytes = found is not None and any(file.size for file in self.list_commit_log())
        return None if has_bytes else found

    def require_stated_size(self) -> None:
        """Refuse a size of the log's files that the files contradict: most would look damaged.

        Raises:
            UsageError: if the configuration gives such a size; it names both.
        """
        stated, files = self.config.mapped_file_size_commit_log, self.commit_log.files
        if stated is None or fits_files(stated, [files]):
            return
        if shown_sizes([files]) or any(self._has_message_behind(file, stated) for file in files):
            raise UsageError(
                f"{self.filesystem.full_path(COMMIT_LOG)}: its files have {size_of(files)} bytes, "
                f"but mappedFileSizeCommitLog in the configuration is {stated}: leave the setting "
                "out"
            )

    def _has_message_behind(self, file: StoreFile, size: int) -> bool:
        """Whether a log file has a message that begins or ends after its first bytes."""
        # Only needed if a size was given that is not the one of the files.
        from logquarry.log import codec

        if file.size <= size:
            return False
        view = self.open_file(file.path)
        stop = min(view.size, java.INT_MAX)
        data = view.window(0, stop)[:stop]
        window = codec.Window.of(data, file.base, stop)
        for start in (size, 0):
            position, code = codec.find_frame(window, start, stop, check_crc=True)
            end = position + int.from_bytes(data[position : position + 4], "big")
            if code == REACHED_STOP and end > size:
                return True
        return False

    def log_file(self, offset: int) -> str:
        """Path below the root of the log file that has, or would have, a physical offset."""
        log = self.commit_log
        file = log.at(offset)
        if file is not None:
            return file.path
        base = offset - offset % log.file_size if log.file_size else offset
        return f"{self.log_folders.paths[0]}/{base:0{NAME_DIGITS}d}"

    def right_path(self, file: StoreFile) -> str:
        """Path that a file of the log has, or gets if its name is wrong."""
        # Names in several folders are not compared with frames.
        return file.path if self.log_folders.feature is not None else right_path(file.base)

    def log_path(self, offset: int) -> str:
        """Full path of the log file with room for a physical offset, else of the log's folder."""
        file = self.commit_log.at(offset)
        return self.filesystem.full_path(self.log_folders.paths[0] if file is None else file.path)

    def list_commit_log(self) -> tuple[StoreFile, ...]:
        """List the files of the commit log again."""
        return self._files_by_name() if self._goes_by_names else self._files_by_content()

    def _files_by_name(self) -> tuple[StoreFile, ...]:
        files = [file for folder in self.log_folders.paths for file in self._numbered(folder)]
        return tuple(sorted(files, key=lambda file: file.base))

    @property
    def log_names(self) -> LogNames:
        """The files of the log by their content, with those that have wrong names."""
        return self._listing.log_names

    def _find_log_names(self) -> LogNames:
        named = self._files_by_name()
        if self.log_folders.feature is not None:
            return LogNames(tuple(LogFile(file.path, file.size, file.base) for file in named))
        files = [(file.path, file.base, file.size) for file in named]
        found = identify_files(self.filesystem, files, largest=LARGEST_BASE)
        known = {path for path, _, _ in files} | {one.path for one in found.renames}
        for entry in self.filesystem.list(COMMIT_LOG):
            if (path := f"{COMMIT_LOG}/{entry.name}") not in known:
                self._ignore(path)
        return found

    def _files_by_content(self) -> tuple[StoreFile, ...]:
        files = self._find_log_names().files
        return tuple(StoreFile(file.base, file.size, file.path) for file in files)

    def require_right_names(self, path: str | None = None) -> None:
        """Refuse a log with wrong names; with ``path``, only if that file has one.

        Reads the first bytes of every file. Does nothing for a layout :meth:`by_content`.

        Raises:
            MisnamedFile: if a file has a wrong name.
        """
        if not self._goes_by_names:
            return
        names = self.log_names
        wrong = {one.path for one in names.renames} | {one for one, _ in names.doubts}
        if path in wrong or (path is None and wrong):
            raise names.error(self.filesystem, path)

    @property
    def queue_names(self) -> tuple[tuple[str, int], ...]:
        """(topic, queue id) of each consume queue, sorted."""
        return tuple(name for name in self._listing.queue_names if name not in self.left_out)

    @property
    def batch_queue_names(self) -> tuple[tuple[str, int], ...]:
        """(topic, queue id) of each batch queue of RocketMQ 5, sorted."""
        return tuple(name for name in self._listing.batch_queue_names if name not in self.left_out)

    def _find_queue_names(self, root: str = CONSUME_QUEUE) -> tuple[tuple[str, int], ...]:
        names: list[tuple[str, int]] = []
        topics = self.filesystem.list(root)
        if any(topic.name == "CURRENT" and not topic.is_dir for topic in topics):
            # The queues are in RocksDB (storeType=defaultRocksDB): its files are not stray files.
            topics = [topic for topic in topics if topic.is_dir]
        for topic in topics:
            folder = f"{root}/{topic.name}"
            queues = self.filesystem.list(folder) if topic.is_dir else []
            for queue in queues:
                if queue.is_dir and _is_queue_id(queue.name):
                    names.append((topic.name, int(queue.name)))
                else:
                    self._ignore(f"{folder}/{queue.name}")
            if not topic.is_dir:
                self._ignore(folder)
        return tuple(sorted(names))

    def queue(self, topic: str, queue_id: int) -> FileSequence:
        """The files of a consume queue; none if there is no such queue."""
        files = self._queue_files(CONSUME_QUEUE, topic, queue_id)
        return of_entries(files, queue_entry.UNIT_SIZE, self.config.queue_file_size)

    def batch_queue(self, topic: str, queue_id: int) -> FileSequence:
        """The files of a batch queue; none if there is no such queue."""
        files = self._queue_files(BATCH_QUEUE, topic, queue_id)
        return of_entries(files, batch_entry.ENTRY_SIZE, self.config.batch_queue_file_size)

    def compacted_queue(self, topic: str, queue_id: int) -> FileSequence:
        """The files of a compaction topic's queue in ``compaction/``; none without such a queue."""
        files = self._queue_files(COMPACTED_QUEUE, topic, queue_id)
        return of_entries(files, batch_entry.ENTRY_SIZE, None)

    def compacted_log(self, topic: str, queue_id: int) -> FileSequence:
        """The files of a compaction topic's compacted log; none without one."""
        files = self._queue_files(COMPACTED_LOG, topic, queue_id)
        return FileSequence(files, size_of(files))

    def _queue_files(self, root: str, topic: str, queue_id: int) -> tuple[StoreFile, ...]:
        # The topic may come from a message; it must not lead to a path outside the store.
        named = topic not in ("", ".", "..") and "/" not in topic and "\0" not in topic
        return self._numbered(f"{root}/{topic}/{queue_id}") if named else ()

    @property
    def has_state_table(self) -> bool:
        """Whether the store has the transactions of 3.x."""
        return TRANSACTION in self.folders

    @property
    def state_table(self) -> FileSequence:
        """The files of the transaction state table."""
        return self._listing.state_table

    def _find_state_table(self) -> FileSequence:
        return self._of_3_x(STATE_TABLE, state_table.UNIT_SIZE, self.config.state_table_file_size)

    @property
    def redo_log(self) -> FileSequence:
        """The files of the transaction redo log."""
        return self._listing.redo_log

    def _find_redo_log(self) -> FileSequence:
        return self._of_3_x(REDO_LOG, queue_entry.UNIT_SIZE, self.config.redo_log_file_size)

    def _of_3_x(self, folder: str, entry_size: int, stated: int | None) -> FileSequence:
        return of_entries(
            self._numbered(folder) if self.has_state_table else (), entry_size, stated
        )

    @property
    def index_files(self) -> tuple[Entry, ...]:
        """The index files by name, oldest first."""
        return self._listing.index_files

    def _find_index_files(self) -> tuple[Entry, ...]:
        found: list[Entry] = []
        for entry in self.filesystem.list(INDEX):
            if not entry.is_dir and entry.name.isascii() and entry.name.isdigit():
                found.append(entry)
            else:
                self._ignore(f"{INDEX}/{entry.name}")
        return tuple(found)

    @cached_property
    def delay_levels_ms(self) -> tuple[int, ...]:
        """Delay of each level in ms, level 1 first; see :func:`levels_of`."""
        return levels_of(self)

    @property
    def has_abort(self) -> bool:
        """Whether the store was not shut down cleanly (or is open now)."""
        return self.filesystem.exists(ABORT)

    def is_live(self) -> bool:
        """Whether a process holds the store's lock; False for a store that is not local."""
        if not isinstance(self.filesystem, LocalFileSystem):
            return False
        return _is_locked(Path(self.filesystem.root) / LOCK)

    def read_checkpoint(self) -> checkpoint.Checkpoint | None:
        """The checkpoint, None if there is none.

        Raises:
            ValueError: if it is shorter than a checkpoint.
        """
        try:
            return checkpoint.decode(self.filesystem.read(CHECKPOINT))
        except FileNotFoundError:
            return None

    @cached_property
    def kept_settings(self) -> Mapping[str, Any]:
        """The settings that a writer recorded in the store; empty if there is no record."""
        if SIDECAR not in self.folders:
            return {}
        try:
            return kept_settings.decode(self.filesystem.read(SETTINGS))
        except FileNotFoundError:
            return {}
        except (OSError, StoreNotFound, ValueError, RecursionError) as error:
            # verify reports it. The files show most settings.
            logger.warning("%s: %s: %s", self.root, SETTINGS, error)
            return {}

    @property
    def durable_end(self) -> int | None:
        """The durable offset of the log, None if it is not known.

        See :mod:`logquarry.format.durable_mark`.
        """
        return self._listing.durable_end

    def _find_durable_end(self) -> int | None:
        try:
            mark = durable_mark.decode(self.filesystem.read(DURABLE))
            found = self.read_checkpoint()
        except (OSError, ValueError):
            return None
        if mark is None or found is None or not mark.speaks_of(found):
            return None
        return mark.offset

    @property
    def cut_end(self) -> int | None:
        """The log's end by the last recovery; None if nothing shows that the log still ends there.

        RocketMQ's rules leave the bytes and the queue entries after that end in the files. The note
        is void once a writer moves the durable offset on, or another program writes the checkpoint.
        """
        cut = self._listing.cut_end
        return None if cut is None or self.has_abort else cut

    def _find_cut_end(self) -> int | None:
        try:
            noted = json.loads(self.filesystem.read(DAMAGE))["log_end"]
            return self.durable_end if noted == self.durable_end else None
        except (OSError, StoreNotFound, ValueError, TypeError, KeyError, RecursionError):
            # The readers of the noted damage report a file that is no such note.
            return None

    def read_topics(self) -> dict[str, broker_config.TopicConfig]:
        """Topics by ``config/topics.json`` or RocksDB; empty if they are missing or unreadable."""
        try:
            document = read_config(self.filesystem, broker_config.TOPICS_FILE)
            return broker_config.decode_topics(document)
        except FileNotFoundError:
            return {}
        except (CorruptFile, ValueError, TypeError) as error:
            logger.warning("%s: %s: %s", self.root, broker_config.TOPICS_FILE, error)
            return {}

    def _numbered(self, folder: str) -> tuple[StoreFile, ...]:
        """The files of a folder whose names are offsets, sorted by offset."""
        files: dict[int, StoreFile] = {}
        for _ in range(_LISTINGS):
            # A listing taken while a broker creates files may miss one in the middle.
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
            numbered = is_offset_name(name)
            # Offset arithmetic from any accepted base stays within 64 bits.
            if numbered and not entry.is_dir and int(name) <= LARGEST_BASE:
                files.append(StoreFile(int(name), entry.size, f"{folder}/{name}"))
                continue
            if numbered and entry.is_dir and folder == COMMIT_LOG:
                hidden.append(name)
            if folder != COMMIT_LOG or self._goes_by_names:
                self._ignore(f"{folder}/{name}")
        if files and folder == COMMIT_LOG:
            # A folder, or a link to a disk that is not mounted, has the name of a file of the log:
            # its messages are lost, not expired.
            hidden += filter(is_offset_name, self.filesystem.broken_links(folder))
            names = [name for name in hidden if int(name) <= LARGEST_BASE]
            files += [StoreFile(int(name), 0, f"{folder}/{name}") for name in names]
        return files

    def _ignore(self, path: str) -> None:
        # A stray file makes RocketMQ refuse to start; here it only causes a warning.
        if path not in self.ignored:
            self.ignored.append(path)
            logger.warning("%s: not a store file, ignored", self.filesystem.full_path(path))


class _Listing:
    """The contents of a store's folders; each folder is listed once, when it is first needed.

    :meth:`StoreLayout.refresh` replaces the whole listing.
    """

    def __init__(self, layout: StoreLayout) -> None:
        self._layout = layout

    @cached_property
    def commit_log(self) -> FileSequence:
        return self._layout._find_commit_log()

    @cached_property
    def log_names(self) -> LogNames:
        return self._layout._find_log_names()

    @cached_property
    def queue_names(self) -> tuple[tuple[str, int], ...]:
        return self._layout._find_queue_names()

    @cached_property
    def batch_queue_names(self) -> tuple[tuple[str, int], ...]:
        return self._layout._find_queue_names(BATCH_QUEUE)

    @cached_property
    def state_table(self) -> FileSequence:
        return self._layout._find_state_table()

    @cached_property
    def redo_log(self) -> FileSequence:
        return self._layout._find_redo_log()

    @cached_property
    def index_files(self) -> tuple[Entry, ...]:
        return self._layout._find_index_files()

    @cached_property
    def durable_end(self) -> int | None:
        return self._layout._find_durable_end()

    @cached_property
    def cut_end(self) -> int | None:
        return self._layout._find_cut_end()


def _is_queue_id(name: str) -> bool:
    # Only the spelling that RocketMQ writes: a folder 00 is not the queue of a folder 0.
    return _QUEUE_ID.fullmatch(name) is not None and java.INT_MIN <= int(name) <= java.INT_MAX


def _is_locked(path: Path) -> bool:
    import struct

    from logquarry.systems import READ_ONLY, fcntl, read_at

    try:
        descriptor = os.open(path, READ_ONLY)
    except OSError:
        return False
    command = getattr(fcntl, _LOCK_PROBE, None)
    try:
        if fcntl is None:
            # On Windows no other process can read a byte that a process has locked.
            read_at(descriptor, 1, 0)
            return False
        if command is None:
            return False
        # struct flock: type, whence, start, length, pid. Java's tryLock(0, 1) locks byte 0.
        request = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
        answer = fcntl.fcntl(descriptor, command, request)
        return bool(struct.unpack_from("h", answer)[0] != fcntl.F_UNLCK)
    except OSError as error:
        return fcntl is None and isinstance(error, PermissionError)
    finally:
        os.close(descriptor)
