"""Finds the folders of a store's log if files of the log are outside ``commitlog/``.

RocketMQ 5 can write its log to several folders (``storePathCommitLog=a,b``). DLedger writes its log
to ``dledger-ID/data`` or to ``storePathDLedgerCommitLog``, with 48 bytes before each frame.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Final

from logquarry.config import StoreConfig
from logquarry.errors import StoreNotFound, UnsupportedStore
from logquarry.format import checkpoint, index
from logquarry.log.filesystem import Entry, FileSystem, LocalFileSystem
from logquarry.log.store_files import (
    BATCH_QUEUE,
    CHECKPOINT,
    COMMIT_LOG,
    CONSUME_QUEUE,
    INDEX,
    is_index_name,
    is_offset_name,
)
from logquarry.paths import is_folder

DLEDGER: Final = "dledger"
DLEDGER_FOLDER: Final = "dledger-"
"""Start of the name of the folder for a DLedger log. After it comes the id of a member of the
DLedger group.
"""
_DLEDGER_PATH: Final = "storePathDLedgerCommitLog"
SEVERAL_LOG_PATHS: Final = "several_log_paths"
LOG_ELSEWHERE: Final = "log_elsewhere"

_NO_LOG: Final = frozenset(
    {
        *("commitlog", "consumequeue", "consumequeue_ext", "consumequeue_rocksdb", "index"),
        *("batchconsumequeue", "config", "transaction", "timerlog", "compaction", "lost+found"),
        *("rocksdbstore", "kvStore", "tiered", ".logquarry", ".salvage"),
    }
)
"""Folders in a store's root that never hold files of the log, except ``commitlog``."""

_STATED: Final = ("storePathCommitLog", "readOnlyCommitLogStorePaths")
_NOTHING_READ: Final = "Nothing was read or changed."
_ADVICE: Final = {
    DLEDGER: (
        "logquarry reads a DLedger log only if it is the only log of the store: read the messages "
        "through a broker that runs with these files."
    ),
    SEVERAL_LOG_PATHS: (
        "A folder has no file of the log: is a disk not mounted? If the store is a copy, also copy "
        "these folders into it, under the same names."
    ),
    LOG_ELSEWHERE: (
        "Mount the disk, pass the broker's configuration with `--config`, or make commitlog/ a "
        "link to the broker's storePathCommitLog. If the log is lost, accept that with `logquarry "
        "recover --apply --accept-loss BYTES`, in Python with accept_loss=BYTES: the store is then "
        "empty."
    ),
}
_EMPTY_FOLDER: Final = (
    "Mount the disk. If the store is a copy, also copy these folders into it, under the same "
    "names. If the broker has no file there yet, or the files have expired, pass a "
    "`--config` whose storePathCommitLog names only the other folders."
)
_STATE_LEDGER: Final = (
    "Pass `--config broker.conf`, in Python config=StoreConfig.from_file(...): its setting "
    "storePathDLedgerCommitLog names the folder."
)
_TWICE: Final = "Compare the two, and move the one that is not the broker's out of the folder."


_Numbered = Callable[[str], Mapping[int, int]]
"""Returns the files of a folder whose names are offsets, as a dict: offset -> size."""


@dataclass(frozen=True, slots=True)
class LogPlace:
    """The place of a log that is completely or partly outside ``commitlog/``.

    ``evidence`` lists the folders, files or settings from which ``feature`` was inferred. The error
    message contains ``reason`` and ``advice``. ``reason`` is a clause. ``advice`` is the next step;
    None means the usual next step for the feature.
    """

    feature: str
    evidence: tuple[str, ...]
    reason: str
    advice: str | None = None

    def error(self, root: str) -> UnsupportedStore:
        """Make the error for a reader or writer that needs the log."""
        end = "" if self.reason.endswith("?") else "."
        return UnsupportedStore(
            f"{root}: {self.reason}{end} {_NOTHING_READ} {self.advice or _ADVICE[self.feature]}",
            feature=self.feature,
            evidence=self.evidence,
        )


def setting(config: StoreConfig, name: str) -> str:
    """Return a broker setting by its name in RocketMQ; empty if the setting is not configured."""
    return dict(config.broker_settings).get(name, "").strip()


def configured_folders(config: StoreConfig) -> list[str]:
    """Return the configured paths of the log's folders."""
    return [path for name in (*_STATED, _DLEDGER_PATH) for path in _paths(config, name)]


def is_on(config: StoreConfig, name: str) -> bool:
    """Whether the configuration switches a broker setting on."""
    return setting(config, name).lower() == "true"


@dataclass(frozen=True, slots=True)
class LogFolders:
    """The folders that hold the log, in the store's root or beside it.

    Attributes:
        feature: :data:`DLEDGER`, :data:`SEVERAL_LOG_PATHS` or :data:`LOG_ELSEWHERE`; None for
            ``commitlog`` alone.
        read_only: folders of the log in which a writer must create no file.
        missing: the place of a missing part of the log; None if there is no sign of such a part.
    """

    paths: tuple[str, ...] = (COMMIT_LOG,)
    feature: str | None = None
    read_only: frozenset[str] = frozenset()
    missing: LogPlace | None = None

    @property
    def has_heads(self) -> bool:
        """Whether the log is a DLedger log, in which heads precede frames."""
        return self.feature == DLEDGER


def find_log_folders(
    filesystem: FileSystem,
    names: Iterable[Entry],
    config: StoreConfig,
    durable_end: Callable[[], int | None] = lambda: None,
) -> LogFolders:
    """Find the folders of the log. Reads file names, file sizes and the durable offset, but no
    frames.

    - A DLedger log is accepted if the store has only one DLedger log, and ``commitlog/`` has no
      files.
    - Configured folders are accepted if each contains a log file. A folder may be at its configured
      path, or have the same name in the store's root.
    - If no folders are configured, other folders in the store are accepted if their files continue
      the log.
    - A configured folder without files is accepted if the files in the other folders reach the
      durable offset, because a recovery may have moved all files out of the folder.
    """
    folders = sorted(entry.name for entry in names if entry.is_dir)
    numbered = cache(partial(_numbered, filesystem))
    bases = numbered(COMMIT_LOG)
    own = (COMMIT_LOG,) if bases else ()
    ledgers = tuple(f"{name}/data" for name in folders if name.startswith(DLEDGER_FOLDER))
    if ledgers := tuple(filter(numbered, ledgers)):
        if len(ledgers) == 1 and not bases:
            return LogFolders(ledgers, DLEDGER)
        return _missing(DLEDGER, ledgers, f"its log is a DLedger log ({', '.join(ledgers)})")
    if not bases and is_on(config, "enableDLegerCommitLog"):
        path = setting(config, _DLEDGER_PATH).rstrip("/")
        ledger = _folder_of(filesystem, folders, path, numbered) if path else None
        if ledger is not None:
            return LogFolders((ledger,), DLEDGER)
        given = ("enableDLegerCommitLog",)
        return _missing(DLEDGER, given, "its configuration has enableDLegerCommitLog=true")
    stated, read_only = _stated_folders(filesystem, folders, config, numbered)
    if None in stated and any(stated):
        # Also accept folders without files.
        emptied, may_be_empty = _stated_folders(filesystem, folders, config, None)
        found = (_numbered(filesystem, path, must_read=True) for path in emptied if path)
        if None not in emptied and _reaches(found, durable_end()):
            stated, read_only = emptied, may_be_empty
    if stated and None not in stated:
        known = tuple(dict.fromkeys(path for path in stated if path is not None))
        if known == (COMMIT_LOG,):
            return LogFolders()
        # With these settings a broker does not read commitlog/, so a writer must not create files
        # there.
        also = own if COMMIT_LOG not in known else ()
        paths = (*also, *known)
        feature = SEVERAL_LOG_PATHS if len(paths) > 1 else LOG_ELSEWHERE
        return _twice(numbered, paths) or LogFolders(paths, feature, read_only | frozenset(also))
    writable = _paths(config, _STATED[0])
    if len(writable) > 1:
        reason = f"its configuration names {len(writable)} folders for the log ({_STATED[0]})"
        every = [*writable, *_paths(config, _STATED[1])]
        empty = [path for path, found in zip(every, stated, strict=True) if found is None]
        reason += ", and no file of the log is in "
        reason += f"{', '.join(empty)}: is a disk not mounted?"
        return _missing(SEVERAL_LOG_PATHS, _STATED[:1], reason, _EMPTY_FOLDER)
    # A folder is a copy, not a part of the log, if one of its files has the same name as a file of
    # the log.
    parts = tuple(
        name
        for name in folders
        if name not in _NO_LOG
        and not name.startswith(DLEDGER_FOLDER)
        and (own_bases := numbered(name))
        and (not bases or (bases.keys().isdisjoint(own_bases) and max(own_bases) > min(bases)))
    )
    is_whole = bool(bases) or len(parts) > 1
    if parts and not stated and (is_whole or _reaches(map(numbered, parts), durable_end())):
        return _twice(numbered, own + parts) or LogFolders(own + parts, SEVERAL_LOG_PATHS)
    if parts:
        shown = tuple(f"{name}/" for name in parts)
        if not bases and any(name.startswith(DLEDGER_FOLDER) for name in folders):
            reason = f"its log is a DLedger log in {', '.join(shown)}"
            return _missing(DLEDGER, shown, reason, _STATE_LEDGER)
        feature = SEVERAL_LOG_PATHS if bases or len(parts) > 1 else LOG_ELSEWHERE
        where = "also in" if bases else "in"
        return _missing(feature, shown, f"files of its log are {where} {', '.join(shown)}")
    return LogFolders()


def _missing(
    feature: str, evidence: tuple[str, ...], reason: str, advice: str | None = None
) -> LogFolders:
    return LogFolders(missing=LogPlace(feature, evidence, reason, advice))


def _twice(numbered: _Numbered, folders: Sequence[str]) -> LogFolders | None:
    """If two folders have files of the same name, return a result that reports them; else None."""
    seen: dict[int, str] = {}
    for folder in folders:
        for base in numbered(folder):
            if base in seen:
                given = tuple(f"{one}/{base:020d}" for one in (seen[base], folder))
                reason = f"two folders of its log have the same file: {given[0]} and {given[1]}"
                return _missing(SEVERAL_LOG_PATHS, given, reason, _TWICE)
            seen[base] = folder
    return None


def _paths(config: StoreConfig, name: str) -> list[str]:
    return [path.strip() for path in setting(config, name).split(",") if path.strip()]


def _reaches(folders: Iterable[Mapping[int, int]], end: int | None) -> bool:
    """Whether the files of the folders together are a log without gaps that contains the durable
    offset.
    """
    files = dict(sorted(file for folder in folders for file in folder.items()))
    bases = list(files)
    if end is None or not bases or not bases[0] <= end <= bases[-1] + files[bases[-1]]:
        return False
    return all(a + files[a] == b for a, b in pairwise(bases))


def _stated_folders(
    filesystem: FileSystem,
    folders: Sequence[str],
    config: StoreConfig,
    numbered: _Numbered | None,
) -> tuple[list[str | None], frozenset[str]]:
    """Return the configured folders (None for a folder without log files), and the set of those
    that are read-only.
    """
    found = {
        name: [
            _folder_of(filesystem, folders, path.rstrip("/"), numbered)
            for path in _paths(config, name)
        ]
        for name in _STATED
    }
    writable, read_only = (found[name] for name in _STATED)
    return [*writable, *read_only], frozenset(path for path in read_only if path is not None)


def _folder_of(
    filesystem: FileSystem, folders: Sequence[str], path: str, numbered: _Numbered | None
) -> str | None:
    # If the store was copied, the folder may be in the store's root instead of at the configured
    # path. If ``numbered`` is None, a folder that has no files is accepted too.
    places = [path.rpartition("/")[2]] if path.rpartition("/")[2] in folders else []
    if isinstance(filesystem, LocalFileSystem):
        root = filesystem.local_path("")
        places += [os.path.relpath(root.parent / path, root)]

    def accepts(place: str) -> bool:
        if numbered is None:
            return is_folder(Path(filesystem.full_path(place)))
        return bool(numbered(place))

    return next(filter(accepts, places), None)


def find_missing_log(
    filesystem: FileSystem, names: Iterable[Entry], config: StoreConfig
) -> LogPlace | None:
    """Find evidence that a store without log files has its log in another folder; None if the store
    is new.

    A store is new if no queue has an entry and the checkpoint has no store time. Without a
    checkpoint, the index must be empty too.
    """
    known = _known_message(filesystem, [entry.name for entry in names if entry.is_dir])
    if known is None:
        return None
    path = setting(config, "storePathCommitLog")
    where = f" (storePathCommitLog={path})" if path else ""
    reason = f"there is no file in {COMMIT_LOG}/, and {known} knows of messages{where}"
    return LogPlace(LOG_ELSEWHERE, (known,), reason)


def _numbered(filesystem: FileSystem, folder: str, *, must_read: bool = False) -> dict[int, int]:
    """Return offset -> size of the files in a folder whose names are offsets."""
    try:
        entries = filesystem.list(folder)
    except StoreNotFound:
        if must_read:
            raise
        # The user has no permission to read the folder, for example lost+found.
        return {}
    return {int(e.name): e.size for e in entries if not e.is_dir and is_offset_name(e.name)}


def _known_message(filesystem: FileSystem, folders: Sequence[str]) -> str | None:
    """Return a file as evidence that the log had messages: a queue file or the checkpoint.

    If there is no checkpoint, an index file is evidence too. Return None if there is no evidence.
    """
    for root in (name for name in (CONSUME_QUEUE, BATCH_QUEUE) if name in folders):
        for topic in filesystem.list(root):
            for queue in filesystem.list(f"{root}/{topic.name}") if topic.is_dir else ():
                folder = f"{root}/{topic.name}/{queue.name}"
                for file in filesystem.list(folder) if queue.is_dir else ():
                    path = f"{folder}/{file.name}"
                    if not file.is_dir and file.size and _has_bytes(filesystem, path):
                        return path
    try:
        times = checkpoint.decode(filesystem.read(CHECKPOINT))
    except (FileNotFoundError, ValueError):
        return _known_entry(filesystem) if INDEX in folders else None
    return CHECKPOINT if times.physic_timestamp > 0 else None


def _known_entry(filesystem: FileSystem) -> str | None:
    # Call this function only if there is no checkpoint. In a store with a checkpoint, index entries
    # do not prove that the log is elsewhere: a recovery in mode ``rocketmq`` may have kept the
    # index after the loss of the log.
    for entry in filesystem.list(INDEX):
        path = f"{INDEX}/{entry.name}"
        if not is_index_name(entry.name):
            continue
        size = index.HEADER.size
        head = b"" if entry.is_dir else bytes(filesystem.open(path).window(0, size))
        has_entry = len(head) >= size and index.decode_header(head).entry_count > 1
        if entry.is_dir or has_entry:
            return path
    return None


def _has_bytes(filesystem: FileSystem, path: str) -> bool:
    # Bytes 8 to 11 are the SIZE field of the first entry. A written entry never has SIZE 0. Entries
    # of batch queues begin with offset and size too.
    try:
        return bool(bytes(filesystem.open(path).window(0, 20)[8:12]).strip(b"\0"))
    except FileNotFoundError:
        return False
