"""Lists the files of a store. :mod:`logquarry.log.store_files` defines their names."""

from __future__ import annotations

import copy
import json
import logging
import os
from collections.abc import Callable, Collection, KeysView, Mapping
from functools import cached_property
from typing import Any, Generic, TypeVar

from logquarry.config import StoreConfig, settings_of
from logquarry.errors import CorruptFile, StoreNotFound
from logquarry.format import batch, broker_json, checkpoint, java, queue_entry
from logquarry.log import earlier_writers, store_files
from logquarry.log.filesystem import Entry, FileSystem, FileView, LocalFileSystem
from logquarry.log.location import not_a_store, open_filesystem
from logquarry.log.log_names import (
    LogNames,
    contradicts_name,
    has_doubtful_name,
    identify_files,
    right_path,
)
from logquarry.log.log_place import LogFolders, LogPlace, find_log_folders, find_missing_log
from logquarry.log.rocksdb import read_config
from logquarry.log.store_files import FileSequence, StoreFile, StoreFolders

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


def _listing_settings(config: StoreConfig) -> tuple[object, ...]:
    """The settings that determine which files a layout lists."""
    return (
        config.broker_settings,
        config.mapped_file_size_commit_log,
        config.state_table_file_size,
        config.redo_log_file_size,
    )


class _listed(Generic[_T]):  # noqa: N801
    """A property of a layout whose value is cached until :meth:`StoreLayout.refresh`. If
    ``by_settings`` is true, layouts with different settings do not share the value.
    """

    def __init__(self, find: Callable[[StoreLayout], _T], *, by_settings: bool = False) -> None:
        self._find = find
        self._cache = "_sized" if by_settings else "_listing"
        self.__doc__ = find.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, layout: StoreLayout, owner: type) -> _T:
        cache: dict[str, _T] = getattr(layout, self._cache)
        if self._name not in cache:
            cache[self._name] = self._find(layout)
        return cache[self._name]


def _listed_by_settings(find: Callable[[StoreLayout], _T]) -> _listed[_T]:
    return _listed(find, by_settings=True)


class StoreLayout:
    """The files of one store. A folder is listed when its files are used for the first time.

    Attributes:
        open_view: opens a file; None for ``filesystem.open``.
        left_out: (topic, queue id) of queues that this layout does not list.
        writer_end: the log's end that the writer states, if stale frames may follow this end, or if
            the last file is too short; else None.
    """

    def __init__(self, filesystem: FileSystem, config: StoreConfig | None = None) -> None:
        self.filesystem = filesystem
        self.open_view: Callable[[str], FileView] | None = None
        self.config = config or StoreConfig()
        self.writer_end: int | None = None
        self.left_out: Collection[tuple[str, int]] = ()
        self._goes_by_names = self._shows_lost_head = True
        self._folders = StoreFolders(filesystem, by_names=True)
        self._names = filesystem.list("")
        self.folders = present = frozenset(entry.name for entry in self._names if entry.is_dir)
        self.refresh()
        if store_files.SALVAGE in present:
            words = "an unfinished salvage is here: remove the folder and salvage again"
            raise StoreNotFound(f"{filesystem.root}: {words}")
        for name in (store_files.COMMIT_LOG, store_files.CONSUME_QUEUE):
            if name not in present:
                store_files.require_target(filesystem, name)
        if not present & {store_files.COMMIT_LOG, store_files.CONSUME_QUEUE}:
            error = not_a_store(
                filesystem.root,
                f"{filesystem.root}: not a store: it has no folder commitlog and no folder "
                "consumequeue. Give the broker's store directory (storePathRootDir)",
            )
            if error.suggestion is None:
                self._require_log_here()
            raise error

    @classmethod
    def open(
        cls,
        location: str | os.PathLike[str],
        config: StoreConfig | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> StoreLayout:
        """Open the layout of the store at a path or URL. Raises StoreNotFound if none exists."""
        try:
            return cls(open_filesystem(location, storage_options), settings_of(config))
        except PermissionError as error:
            raise StoreNotFound(f"{os.fsdecode(location)}: cannot be read: {error}") from error

    def with_config(self, config: StoreConfig) -> StoreLayout:
        """Make a layout of the same files with another configuration, and keep its cached lists."""
        other = copy.copy(self)
        other.config = config
        other.__dict__.pop("delay_levels_ms", None)
        if _listing_settings(config) != _listing_settings(self.config):
            other.__dict__.pop("log_folders", None)
            other._sized = {}
        return other

    def by_content(self, *, shows_lost_head: bool = True) -> StoreLayout:
        """Make a layout that determines the offset of each log file from its frames, not its name.

        ``verify``, the repairs, and the opening of a store for writing use such a layout. If the
        log has lost its first files, ``shows_lost_head`` lists one empty file in their place.
        """
        other = copy.copy(self)
        other._goes_by_names = False
        other._shows_lost_head = shows_lost_head
        other._folders = StoreFolders(self.filesystem, by_names=False)
        other.refresh()
        return other

    @property
    def ignored(self) -> list[str]:
        """Names in the store's folders that are not store files."""
        return self._folders.ignored

    @property
    def root(self) -> str:
        """Path or URL of the store."""
        return self.filesystem.root

    def refresh(self) -> None:
        """Drop the cached listings, because writers add files and retention deletes files."""
        self._listing: dict[str, Any] = {}
        self._sized: dict[str, Any] = {}
        self._given_log: FileSequence | None = None

    def use_commit_log(self, files: FileSequence) -> None:
        """Use given files as the commit log, instead of the listed files, until the next
        refresh.
        """
        self._given_log = files

    def open_file(self, path: str) -> FileView:
        """Open a file below the root. Raises MisnamedFile for a log file with a wrong name."""
        view = (self.open_view or self.filesystem.open)(path)
        folder, _, name = path.rpartition("/")
        is_log = folder == store_files.COMMIT_LOG and store_files.is_offset_name(name)
        if is_log and self._goes_by_names and contradicts_name(view, int(name)):
            self.require_right_names(path)
        return view

    @property
    def commit_log(self) -> FileSequence:
        """The files of the commit log.

        Raises UnsupportedStore if the log is at an unsupported place, and MisnamedFile if a name is
        wrong. Checks only the first and the last file, files before or after a gap, and files whose
        names are not offsets.
        """
        return self._given_log or self._listed_log

    @_listed_by_settings
    def _listed_log(self) -> FileSequence:
        files, folders = self._with_lost_head(self._log_files), self.log_folders
        self._require_log_here()
        # DLedger has a separate setting for the file size.
        stated = None if folders.has_heads else self.config.mapped_file_size_commit_log
        size = stated or store_files.size_of(files)
        if (
            self._goes_by_names
            and folders.feature is None
            and has_doubtful_name(self.filesystem, files, size)
        ):
            self.require_right_names()
        # A file has less than 2 GiB, because RocketMQ's file size is an int, and the kernels use
        # positions of 32 bits.
        return FileSequence(files, min(size, java.INT_MAX), folders.has_heads)

    @cached_property
    def log_folders(self) -> LogFolders:
        """The folders of the log."""
        return find_log_folders(self.filesystem, self._names, self.config, lambda: self.durable_end)

    def _require_log_here(self) -> None:
        if self.log_folders.missing is not None:
            raise self.log_folders.missing.error(self.root)

    @property
    def other_log(self) -> LogPlace | None:
        """The place of log files outside :attr:`log_folders`; None if there is no sign of them."""
        folders = self.log_folders
        if folders.missing is not None or folders.feature is not None:
            return folders.missing
        return None if self._log_files or self.log_names.files else self.missing_log

    @property
    def missing_log(self) -> LogPlace | None:
        """Evidence that an empty log once had messages; None if there is no evidence."""
        found = find_missing_log(self.filesystem, self._names, self.config)
        # List again, because a writer may have created the log's first file since the listing.
        has_bytes = found is not None and any(file.size for file in self.list_commit_log())
        return None if has_bytes else found

    def log_file(self, offset: int) -> str:
        """Return the path of an offset's log file, relative to the root. It need not exist."""
        log = self.commit_log
        file = log.at(offset)
        if file is not None:
            return file.path
        base = offset - offset % log.file_size if log.file_size else offset
        return f"{self.log_folders.paths[0]}/{base:0{store_files.NAME_DIGITS}d}"

    def why_no_log_file(self, path: str) -> str | None:
        """Explain why a log file's path is not a file; None if it is a file or does not exist."""
        target = self.filesystem.broken_link(path)
        if target is not None:
            return f"its file is a link to {target}, which does not exist: mount that disk"
        if self.filesystem.why_no_file(path) is not None:
            return "its file is not a plain file: move it out of the store"
        return "its file is a folder: move it out of the store" if path in self.ignored else None

    def right_path(self, file: StoreFile) -> str:
        """Return the path that a log file should have, according to its frames."""
        # Only names of files in commitlog/ are checked.
        return file.path if self.log_folders.feature is not None else right_path(file.base)

    def log_path(self, offset: int) -> str:
        """Return the full path of the log file at an offset, or else of the log's first folder."""
        file = self.commit_log.at(offset)
        return self.filesystem.full_path(self.log_folders.paths[0] if file is None else file.path)

    def list_commit_log(self) -> tuple[StoreFile, ...]:
        """List the files of the commit log again. If the log has lost its first files, the list
        begins with one empty file in their place.
        """
        named = self._files_by_name()
        return self._with_lost_head(named if self._goes_by_names else self._identify(named).files)

    def _with_lost_head(self, files: tuple[StoreFile, ...]) -> tuple[StoreFile, ...]:
        if not self._shows_lost_head:
            return files
        lost = earlier_writers.find_lost_head(self.filesystem, files)
        return files if lost is None else (lost.as_file(self.log_folders.paths[0]), *files)

    def present_start(self) -> int:
        """Return the log's current start. Since the log was listed, retention may have deleted
        files.

        Retention deletes a log file before the queue files of its messages. So queue files that
        were listed before this call have entries for all messages from the returned offset on.
        """
        log = self.commit_log
        exists = self.filesystem.exists
        return next((file.base for file in log.files if exists(file.path)), log.end)

    @_listed_by_settings
    def lost_head(self) -> earlier_writers.LostHead | None:
        """The missing start of the log; None if there is no sign that files are missing."""
        return earlier_writers.find_lost_head(self.filesystem, self._log_files)

    @_listed_by_settings
    def _log_files(self) -> tuple[StoreFile, ...]:
        return self._files_by_name() if self._goes_by_names else self.log_names.files

    def _files_by_name(self) -> tuple[StoreFile, ...]:
        files = [
            file for folder in self.log_folders.paths for file in self._folders.numbered(folder)
        ]
        return tuple(sorted(files, key=lambda file: file.base))

    @_listed_by_settings
    def log_names(self) -> LogNames:
        """The log's files with the offsets that their frames show, and the files to rename."""
        return self._identify(self._files_by_name())

    def _identify(self, named: tuple[StoreFile, ...]) -> LogNames:
        if self.log_folders.feature is not None:
            return LogNames(named)
        listed = {file.path for file in named}
        # A writer may have created a log file since ``named`` was listed. Leave this file out: its
        # offset is unknown here, so its name would seem wrong.
        entries = [
            entry
            for entry in self.filesystem.list(store_files.COMMIT_LOG)
            if not store_files.is_log_file(entry)
            or f"{store_files.COMMIT_LOG}/{entry.name}" in listed
        ]
        found = identify_files(self.filesystem, named, entries)
        known = listed | {one.path for one in found.renames}
        for entry in entries:
            if (path := f"{store_files.COMMIT_LOG}/{entry.name}") not in known:
                self._folders.ignore(path)
        return found

    def require_right_names(self, path: str | None = None) -> None:
        """Raise MisnamedFile if the log file at ``path`` has a wrong name. If ``path`` is None,
        check all log files.
        """
        if not self._goes_by_names:
            return
        names = self.log_names
        wrong = {one.path for one in names.renames} | {one for one, _ in names.doubts}
        if path in wrong or (path is None and wrong):
            raise names.error(self.filesystem, path)

    @property
    def queue_names(self) -> KeysView[tuple[str, int]]:
        """(topic, queue id) of each consume queue, sorted."""
        return self._without_left_out(self._queue_names)

    @property
    def batch_queue_names(self) -> KeysView[tuple[str, int]]:
        """(topic, queue id) of each batch queue of RocketMQ 5, sorted."""
        return self._without_left_out(self._batch_queue_names)

    def _without_left_out(self, names: KeysView[tuple[str, int]]) -> KeysView[tuple[str, int]]:
        if not self.left_out:
            return names
        return dict.fromkeys(name for name in names if name not in self.left_out).keys()

    # A store can have 100,000 queues. A dict keeps them sorted, and finds a single queue fast.
    @_listed
    def _queue_names(self) -> KeysView[tuple[str, int]]:
        return dict.fromkeys(self._folders.queue_names()).keys()

    @_listed
    def _batch_queue_names(self) -> KeysView[tuple[str, int]]:
        return dict.fromkeys(self._folders.queue_names(store_files.BATCH_QUEUE)).keys()

    def queue_files(self) -> list[FileSequence]:
        """Return the files of each consume queue."""
        return [self.queue(*name) for name in self.queue_names]

    def batch_queue_files(self) -> list[FileSequence]:
        """Return the files of each batch queue."""
        return [self.batch_queue(*name) for name in self.batch_queue_names]

    def queue(self, topic: str, queue_id: int) -> FileSequence:
        """Return the files of a consume queue; empty if the queue does not exist."""
        files = self._queue_files(store_files.CONSUME_QUEUE, topic, queue_id)
        return store_files.of_entries(files, queue_entry.UNIT_SIZE, self.config.queue_file_size)

    def batch_queue(self, topic: str, queue_id: int) -> FileSequence:
        """Return the files of a batch queue; empty if the queue does not exist."""
        files = self._queue_files(store_files.BATCH_QUEUE, topic, queue_id)
        return store_files.of_entries(files, batch.ENTRY_SIZE, self.config.batch_queue_file_size)

    def compacted_queue(self, topic: str, queue_id: int) -> FileSequence:
        """Return the queue files of a compaction topic in ``compaction/``; empty if none exist."""
        files = self._queue_files(store_files.COMPACTED_QUEUE, topic, queue_id)
        return store_files.of_entries(files, batch.ENTRY_SIZE, None)

    def compacted_log(self, topic: str, queue_id: int) -> FileSequence:
        """Return the files of a compaction topic's compacted log; empty if none exist."""
        files = self._queue_files(store_files.COMPACTED_LOG, topic, queue_id)
        return FileSequence(files, store_files.size_of(files))

    def _queue_files(self, root: str, topic: str, queue_id: int) -> tuple[StoreFile, ...]:
        named = store_files.is_folder_name(topic)
        return self._folders.numbered(f"{root}/{topic}/{queue_id}") if named else ()

    @property
    def has_state_table(self) -> bool:
        """Whether the store has the folder for the transactions of RocketMQ 3.x."""
        return store_files.TRANSACTION in self.folders

    @_listed_by_settings
    def state_table(self) -> FileSequence:
        """The files of the state table of 3.x."""
        return self._of_3_x(
            store_files.STATE_TABLE, queue_entry.STATE_SIZE, self.config.state_table_file_size
        )

    @_listed_by_settings
    def redo_log(self) -> FileSequence:
        """The files of the redo log of 3.x."""
        return self._of_3_x(
            store_files.REDO_LOG, queue_entry.UNIT_SIZE, self.config.redo_log_file_size
        )

    def _of_3_x(self, folder: str, entry_size: int, stated: int | None) -> FileSequence:
        return store_files.of_entries(
            self._folders.numbered(folder) if self.has_state_table else (), entry_size, stated
        )

    @_listed
    def index_files(self) -> tuple[Entry, ...]:
        """The index files, oldest first (sorted by name)."""
        return self._folders.index_files()

    @_listed
    def writer(self) -> earlier_writers.Writer:
        """The version of RocketMQ that wrote the store, by :func:`find_writer`."""
        return earlier_writers.find_writer(self.filesystem)

    @cached_property
    def delay_levels_ms(self) -> tuple[int, ...]:
        """Delay of each level in milliseconds, level 1 first; see :func:`levels_of`."""
        return earlier_writers.levels_of(self)

    @property
    def has_abort(self) -> bool:
        """Whether the file ``abort`` exists: the store is open, or was not shut down cleanly."""
        return self.filesystem.exists(store_files.ABORT)

    def is_live(self) -> bool:
        """Whether a process holds or may hold the store's lock; False for a remote store."""
        if not isinstance(self.filesystem, LocalFileSystem):
            return False
        return store_files.is_in_use(self.filesystem.local_path(store_files.LOCK))

    def read_checkpoint(self) -> checkpoint.Checkpoint | None:
        """Read the checkpoint; None if missing. Raises ValueError if the file is too short."""
        try:
            return checkpoint.decode(self.filesystem.read(store_files.CHECKPOINT))
        except FileNotFoundError:
            return None

    @cached_property
    def kept_settings(self) -> Mapping[str, Any]:
        """The settings that a writer recorded in the store; empty if there is no valid record."""
        if store_files.SIDECAR not in self.folders:
            return {}
        try:
            return earlier_writers.decode(self.filesystem.read(store_files.SETTINGS))
        except FileNotFoundError:
            return {}
        except (OSError, StoreNotFound, ValueError, RecursionError) as error:
            # verify reports the invalid record.
            logger.warning("%s: %s: %s", self.root, store_files.SETTINGS, error)
            return {}

    @_listed
    def durable_end(self) -> int | None:
        """The durable offset of the log; None if unknown."""
        found = earlier_writers.read_durable(self.filesystem)
        return None if found is None else found.end

    def is_sure_of(self, bound: int | None) -> bool:
        """Whether a broken frame before ``bound`` is certainly damage, and cannot be the log's end.

        If the result is False, the store may have been shut down cleanly, and RocketMQ's last
        recovery may have ended the log at this frame.
        """
        if bound is None:
            return False
        if self.durable_end is not None and bound <= self.durable_end:
            return True
        return self.has_abort and self.writer_end is None

    @property
    def cut_end(self) -> int | None:
        """The log's end that the last recovery recorded; None after the next write to the store.

        A recovery by RocketMQ's rules does not delete the bytes and queue entries after this end.
        """
        cut = self._noted_end
        return None if cut is None or self.has_abort else cut

    @_listed
    def _noted_end(self) -> int | None:
        try:
            noted = json.loads(self.filesystem.read(store_files.DAMAGE))["log_end"]
            return self.durable_end if noted == self.durable_end else None
        except (OSError, StoreNotFound, ValueError, TypeError, KeyError, RecursionError):
            # The code that reads the recorded damage reports an invalid file.
            return None

    def read_topics(self) -> dict[str, broker_json.TopicConfig]:
        """Read the topics from ``config/topics.json`` or RocksDB; empty if missing or invalid."""
        try:
            document = read_config(self.filesystem, broker_json.TOPICS_FILE)
            return broker_json.decode_topics(document)
        except FileNotFoundError:
            return {}
        except (CorruptFile, ValueError, TypeError) as error:
            logger.warning("%s: %s: %s", self.root, broker_json.TOPICS_FILE, error)
            return {}
