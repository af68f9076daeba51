"""Checks the names of a store's files and folders before a recovery, and syncs the files.

A folder, a pipe or a broken link at the path of a file would stop a recovery after it has already
changed other files. If two paths led to the same file (a link), a recovery could overwrite bytes at
one path that it needs at the other.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Final, ParamSpec, TypeVar

from logquarry.config import StoreConfig
from logquarry.disk.disk import Disk
from logquarry.disk.log_files import log_paths
from logquarry.disk.name_guard import NameGuard, links_of
from logquarry.errors import LIMITS, StoreUnavailable, reason_of
from logquarry.log import store_files
from logquarry.log.filesystem import RestoredFileSystem
from logquarry.log.layout import StoreLayout
from logquarry.log.log_names import RENAMING
from logquarry.log.log_place import LogFolders
from logquarry.log.readable import BLOCK
from logquarry.paths import is_folder, is_link
from logquarry.repair.recover.wrong_names import wrong_links
from logquarry.systems import folders_below

P = ParamSpec("P")
T = TypeVar("T")

REPORT: Final = "recovery.json"
KEPT_ENTRIES: Final = "kept_units.json"
_FILES: Final = (store_files.ABORT, store_files.LOCK, store_files.CHECKPOINT)
_OWN_FILES: Final = (store_files.DURABLE, store_files.DAMAGE)
_QUEUES: Final = (f"{store_files.CONSUME_QUEUE}/", f"{store_files.BATCH_QUEUE}/")
_QUEUE_DEPTH: Final = 2
_CONFIG_ENDS: Final = (".json", ".bak")
_FOLDERS: Final = (
    store_files.COMMIT_LOG,
    store_files.CONSUME_QUEUE,
    store_files.BATCH_QUEUE,
    store_files.INDEX,
    store_files.CONFIG,
    store_files.SIDECAR,
    store_files.TRANSACTION,
    store_files.STATE_TABLE,
    store_files.REDO_LOG,
)


class WrongEntry(StoreUnavailable):
    """A store file is not a regular file, or another path of the store leads to the same file."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}. Nothing was changed")
        self.path, self.reason = path, reason

    def __reduce__(self) -> tuple[type[WrongEntry], tuple[Path, str]]:
        return type(self), (self.path, self.reason)


class _Checks:
    """Calls checks, and raises the first WrongEntry."""

    def run(self, check: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Call a check, and return its result."""
        return check(*args, **kwargs)


class _AllChecks(_Checks):
    """Collects each WrongEntry. The check of such a path returns None."""

    def __init__(self) -> None:
        self.wrong: list[WrongEntry] = []

    def run(self, check: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        try:
            return check(*args, **kwargs)
        except WrongEntry as error:
            self.wrong.append(error)
            return None


def check_entries(root: Path, config: StoreConfig, *, removes_links: bool = False) -> None:
    """Raise WrongEntry if a store file is not a regular file, or if two paths lead to it.

    A missing file is accepted. If the caller removes the hard links that :func:`wrong_links`
    returns, ``removes_links`` must be True. These hard links are then accepted too.
    """
    _check_entries(root, config, _Checks(), removes_links=removes_links)


def wrong_entries(root: Path, config: StoreConfig) -> list[WrongEntry]:
    """Return all errors of :func:`check_entries` with ``removes_links``."""
    checks = _AllChecks()
    _check_entries(root, config, checks, removes_links=True)
    return checks.wrong


def _check_entries(
    root: Path, config: StoreConfig, checks: _Checks, *, removes_links: bool
) -> None:
    aside = store_files.quarantine(root)
    check_places(root, checks)
    places = check_log(root, config, checks, removes_links=removes_links)
    for path in (aside / REPORT, aside / KEPT_ENTRIES):
        checks.run(_check, path)
    for name in (store_files.STATE_TABLE, store_files.REDO_LOG):
        for path in _entries(root / name):
            checks.run(_check_numbered, path, places)
    for topic in (
        *_entries(root / store_files.CONSUME_QUEUE),
        *_entries(root / store_files.BATCH_QUEUE),
    ):
        checks.run(_found, topic)
        for queue in _entries(topic):
            found = checks.run(_found, queue)
            # If a file has the path of a queue's folder, readers ignore it, so skip it.
            if found is not None and stat.S_ISDIR(found.st_mode):
                checks.run(_check_once, queue, found, places)
            for path in _entries(queue):
                checks.run(_check_numbered, path, places)
    for path in _index_files(root):
        checks.run(_check_once, path, checks.run(_check, path), places)


def named_folders(root: Path, log_folders: LogFolders) -> list[Path]:
    """Return the folders whose files can have hard links in ``.logquarry/names/``."""
    return [*log_paths(root, log_folders), root / store_files.INDEX]


def layout_with(root: Path, config: StoreConfig, restored: Mapping[str, str]) -> StoreLayout:
    """Make the layout that the store will have after the files ``restored`` were restored from
    their hard links; see :class:`RestoredFileSystem`.
    """
    if not restored:
        return StoreLayout.open(root, config)
    return StoreLayout(RestoredFileSystem(root, restored), config)


def discard_names(root: Path, log_folders: LogFolders, disk: Disk) -> None:
    """Remove the hard links of a store that needs no recovery, without restoring files.

    A sound store lacks no file. So if only the hard link of a file is left, this file belongs to
    another state of the store, or to another store, and is moved to quarantine. For example, the
    user has restored the store's files from a backup, but has kept `.logquarry/`.
    """
    folders = named_folders(root, log_folders)
    if any(disk.names_in(links_of(folder)) for folder in folders):
        NameGuard(disk).discard(folders, keeps_lost=True)


def check_places(root: Path, checks: _Checks | None = None) -> None:
    """Raise WrongEntry if one of the store's main folders is not a folder, or if the checkpoint or
    another single file is not a regular file.
    """
    checks = checks or _Checks()
    for name in _FOLDERS:
        checks.run(_check, root / name, is_folder=True)
    for path in (*(root / name for name in _FILES), *_index_files(root)):
        checks.run(_check, path)
    for name in _OWN_FILES:
        checks.run(_check_opens, root / name)
    for name in (store_files.COMMIT_LOG, store_files.INDEX):
        checks.run(_check_links_of, root / name)


def _check_links_of(folder: Path) -> None:
    """Check that the hard links to a folder's files can be listed.

    Recovery and retention list and remove these hard links before they change other files. A
    recovery's plan has no step for this removal.
    """
    links = links_of(folder)
    for path in (links.parent, links):
        _check(path, is_folder=True)
    try:
        os.scandir(links).close()
    except (FileNotFoundError, NotADirectoryError):
        pass  # A folder above the store is a file: opening the store reports this file.
    except OSError as error:
        if error.errno in LIMITS:
            raise StoreUnavailable(f"{links}: cannot be read: {reason_of(error)}") from error
        reason = f"it cannot be read: {error.strerror}: make it readable, or move it away"
        raise WrongEntry(links, reason) from error


def check_config_links(root: Path) -> None:
    """Raise WrongEntry for a broken link in ``config/``.

    A writer would treat the file as missing: consumer groups would start again as new groups, and
    the next save would replace the link.
    """
    for path in _entries(root / store_files.CONFIG):
        if path.suffix in _CONFIG_ENDS:
            _found(path)


def check_log(
    root: Path,
    config: StoreConfig,
    checks: _Checks | None = None,
    *,
    removes_links: bool = False,
) -> dict[tuple[int, int], Path]:
    """Check the paths of the log's folders and files, and of the quarantine folder, as
    :func:`check_entries` does. Return (device, inode) -> path for each file of the log.
    """
    checks = checks or _Checks()
    places: dict[tuple[int, int], Path] = {}
    layout = StoreLayout.open(root, config)

    def is_removed(*paths: Path) -> bool:
        links = {root / name: reason for name, reason in wrong_links(layout.by_content()).items()}
        wrong = next((path for path in paths if path in links), None)
        if wrong is not None and not removes_links:
            step = f"`logquarry recover {root} --apply` in mode safe removes this link"
            raise WrongEntry(wrong, f"{links[wrong]}: {step}")
        return wrong is not None

    checks.run(_check, store_files.quarantine(root), is_folder=True)
    for folder in log_paths(root, layout.log_folders):
        checks.run(_check, folder, is_folder=True)
        checks.run(_check_links_of, folder)
        for path in _entries(folder):
            # An interrupted recovery can leave a second name with this suffix.
            if store_files.is_offset_name(path.name.partition(RENAMING)[0]):
                found = checks.run(_check, path)
                checks.run(_check_once, path, found, places, is_removed)
    return places


def check_queue_folder(folder: Path) -> None:
    """Raise WrongEntry if a file has the path of a queue's or topic's folder.

    Readers ignore such a file, but a recovery would have to create the folder there.
    """
    for path in (folder.parent, folder):
        _check(path, is_folder=True)


def check_listed(layout: StoreLayout, empty: Iterable[str]) -> None:
    """Raise WrongEntry for a pipe, a device or a broken link in the listed folders of the queues.

    To save time, only paths with unexpected names and the files ``empty``, which have no bytes, are
    checked.
    """
    for name in sorted({*layout.ignored, *layout.filesystem.dead_links, *empty}):
        path, in_queue = Path(layout.root, name), name.count("/") > _QUEUE_DEPTH
        if not name.startswith(_QUEUES) or (in_queue and not store_files.is_offset_name(path.name)):
            continue
        found = _found(path)
        if found is not None and not stat.S_ISDIR(found.st_mode):
            _check(path)


def status_of(path: Path) -> os.stat_result:
    """Return the status of an existing path. Raises WrongEntry for a broken link, and
    StoreUnavailable if the path cannot be read.
    """
    try:
        return _found(path) or path.stat()
    except OSError as error:
        raise StoreUnavailable(f"{path}: cannot be read: {reason_of(error)}") from error


def _check_numbered(path: Path, places: dict[tuple[int, int], Path]) -> None:
    if store_files.is_offset_name(path.name):
        _check_once(path, _check(path), places)


def _check(path: Path, *, is_folder: bool = False) -> os.stat_result | None:
    found = _found(path)
    is_right = stat.S_ISDIR if is_folder else stat.S_ISREG
    if found is not None and not is_right(found.st_mode):
        is_one = "is a folder" if stat.S_ISDIR(found.st_mode) else "is not a plain file"
        what = "is not a folder" if is_folder else is_one
        raise WrongEntry(path, f"it {what}: move it out of the store")
    return found


def _found(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError as error:
        try:
            if not is_link(path):
                return None
            where = path.readlink()
        except OSError as failed:
            reason = f"cannot be read: {reason_of(failed)}"
            raise StoreUnavailable(f"{path}: {reason}") from failed
        reason = (
            f"it is a link to {where}, which does not exist: mount that disk, or correct the link"
        )
        raise WrongEntry(path, reason) from error


def _check_opens(path: Path) -> None:
    """Check that a file can be opened. The recovery replaces this file after it has changed other
    files. An error at that point would be too late.
    """
    if _check(path) is None:
        return
    try:
        os.close(os.open(path, os.O_RDONLY))
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno in LIMITS:
            raise StoreUnavailable(f"{path}: cannot be read: {reason_of(error)}") from error
        reason = (
            f"it cannot be opened: {error.strerror}: make it readable, or move it out of the store"
        )
        raise WrongEntry(path, reason) from error


def _check_once(
    path: Path,
    found: os.stat_result | None,
    places: dict[tuple[int, int], Path],
    is_accepted: Callable[[Path, Path], bool] = lambda path, other: False,
) -> None:
    if found is None:
        return
    other = places.setdefault((found.st_dev, found.st_ino), path)
    if other != path and not is_accepted(path, other):
        reason = f"it is the same file as {other}: remove one of the two paths, or make a copy"
        raise WrongEntry(path, reason)


def _index_files(root: Path) -> Iterator[Path]:
    for path in _entries(root / store_files.INDEX):
        # Skip folders: readers ignore a folder with the name of an index file.
        if store_files.is_index_name(path.name) and not _is_folder(path):
            yield path


def _is_folder(path: Path) -> bool:
    try:
        return is_folder(path)
    except OSError:
        return False


def _entries(folder: Path) -> Iterator[Path]:
    """Yield the paths in a folder, sorted. Yield nothing if the folder is unreadable: a later step
    reports this.
    """
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = sorted(entry.name for entry in os.scandir(folder))
    for name in names:
        yield folder / name


# ------------------------------------------------------------------------------------------- syncs
# If the last sync of a writer failed, the system marks the pages as written, and another sync would
# not write them. So the recovery rewrites the last bytes of the log (``rewrite``).
_PARTS: Final = (
    store_files.CONSUME_QUEUE,
    store_files.BATCH_QUEUE,
    store_files.INDEX,
    store_files.TRANSACTION,
)
_COPY_BYTES: Final = 1 << 20


def sync_files(
    disk: Disk,
    root: Path,
    *,
    rewrite: tuple[int, int] = (0, 0),
    log: tuple[str, ...] = (store_files.COMMIT_LOG,),
    parts: tuple[str, ...] = _PARTS,
) -> None:
    """Sync the files of a store and their names.

    ``rewrite`` is a range of physical offsets. Before the sync, the function writes the bytes of
    the log in this range again.
    """
    for part in (*log, *parts):
        again = rewrite if part in log else (0, 0)
        for folder, names in folders_below(root / part, partial(_refuse, disk)):
            for name in names:
                if name.isascii() and name.isdigit():
                    _sync_file(disk, folder / name, *again)
            disk.sync_names(folder)
    disk.sync_names(root)
    disk.sync_parent(root)


def _refuse(disk: Disk, folder: Path, error: OSError) -> None:
    # Ignore a folder that the user may not list, for example lost+found. The user can list every
    # folder that belongs to the store.
    if not isinstance(error, PermissionError):
        raise disk.refused(folder, error) from error


def _sync_file(disk: Disk, path: Path, start: int, stop: int) -> None:
    base = int(path.name)
    with disk.writing(path) as descriptor:
        _write_again(disk, descriptor, start - base, stop - base)


def _write_again(disk: Disk, descriptor: int, start: int, stop: int) -> None:
    """Read a range of a file, and write the same bytes again. Skip blocks that cannot be read."""
    position, stop = max(0, start), min(disk.size(descriptor), stop)
    most = _COPY_BYTES
    while position < stop:
        block_end = (position // BLOCK + 1) * BLOCK
        try:
            data = disk.read(descriptor, min(most, stop - position), position)
        except OSError:
            if most > block_end - position:
                most = block_end - position
                continue
            # The block is not in memory, so no writer has changed it: there is nothing to write.
            position = block_end
            continue
        if not data:
            break
        disk.write_all(descriptor, data, position)
        position += len(data)
        # After the first unreadable block, read only one block at a time.
        most = most if most == _COPY_BYTES else BLOCK
