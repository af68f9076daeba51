"""Hard links that protect the files of a store that a writer has open.

If you start a RocketMQ broker on a store that a logquarry writer has open, the broker runs its
recovery before it takes the lock. This recovery deletes files after the log's end. So
:class:`NameGuard` makes a hard link to each log file and index file that a writer changes. If the
broker deletes the file's own name (its name in the store's folder), the writer restores this name
from the hard link.
"""

from __future__ import annotations

import contextlib
import filecmp
import logging
import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from logquarry.disk.disk import Disk
from logquarry.errors import StoreUnavailable
from logquarry.log.store_files import SIDECAR, is_offset_name, quarantine
from logquarry.paths import exists, is_folder

logger = logging.getLogger(__name__)

_NAMES: Final = "names"
_FIRST_BYTES: Final = 4_096


class NameGuard:
    """The hard links to the files of one log."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._change = threading.Lock()
        self._paths: tuple[Path, ...] = ()
        self._folders: set[Path] = set()

    def guard(self, path: Path) -> None:
        """Make the hard link to a file. On a file system without hard links, the method makes no
        link, and only a later sync detects that the file's own name was deleted.
        """
        with self._change:
            with contextlib.suppress(OSError):
                self._drop(path)
            link = link_of(path)
            try:
                if link.parent not in self._folders:
                    self._disk.make_folders(link.parent)
                    self._folders.add(link.parent)
                self._disk.link(path, link)
            except FileNotFoundError:
                # Another program has just deleted the file. The caller detects the deletion.
                return
            except OSError as error:
                logger.info("%s: no hard link: %s", path, error.strerror)
                return
            self._paths = (*self._paths, path)

    def release(self, path: Path) -> None:
        """Remove the hard link to a file durably. If the removal were not synced, the hard link
        could reappear after a crash. Then the next opening of the store would restore the deleted
        file.
        """
        with self._change:
            link = link_of(path)
            with self._disk.refusing(link):
                is_gone = self._drop(path)
            if is_gone:
                self._disk.sync_names(link.parent)

    def check(self) -> list[Path]:
        """Restore the files' own names that other programs deleted; return their paths. A failure
        poisons the store.
        """
        with self._change:
            lost = [path for path in self._paths if self._is_lost(path)]
            for path in lost:
                link = link_of(path)
                if exists(link):
                    # The folder may have been deleted with the file.
                    self._disk.make_folders(path.parent)
                try:
                    self._disk.link(link, path)
                except OSError as error:
                    reason = (
                        f"{path}: another program deleted it, or its disk was unmounted, and it "
                        "cannot be restored"
                    )
                    raise self._disk.health.poison(f"{reason}: {error.strerror}") from error
                self._disk.sync_names(path.parent)
                logger.warning("%s: another program deleted it; restored from its hard link", path)
            return lost

    def _is_lost(self, path: Path) -> bool:
        try:
            return not exists(path)
        except OSError as error:
            raise self._disk.failed(path, "its name cannot be checked", error) from error

    def _drop(self, path: Path) -> bool:
        """Remove the hard link to a file. Return whether the link existed. May raise OSError."""
        self._paths = tuple(other for other in self._paths if other != path)
        try:
            self._disk.unlink(link_of(path))
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def close(self) -> None:
        """Restore lost names, then remove all hard links durably.

        If a hard link stayed, or reappeared after a power cut, the next opening would restore a
        file that retention has deleted. So if a hard link cannot be removed, the error prevents a
        clean shutdown. If the store is poisoned, all hard links stay, because the next opening
        restores lost files from them.

        Raises:
            StoreUnavailable: if a name cannot be restored or removed.
        """
        try:
            self.check()
            with self._change:
                self._remove_all()
        except StoreUnavailable:
            if self._disk.health.reason is None:
                raise

    def _remove_all(self) -> None:
        self._disk.health.require_writable()
        changed = set()
        for path in self._paths:
            link = link_of(path)
            with self._disk.refusing(link):
                if self._drop(path):
                    changed.add(link.parent)
        self._disk.sync_names(*sorted(changed))

    def restore(self, folders: Sequence[Path]) -> list[Path]:
        """Restore lost names, and remove all hard links (:meth:`restored`)."""
        with self.restored(folders) as back:
            return back

    @contextlib.contextmanager
    def restored(
        self, folders: Sequence[Path], lost: Sequence[Path] | None = None
    ) -> Iterator[list[Path]]:
        """Context manager: after a crash, restore the own names that files have lost. Yield the
        restored paths.

        At the end of the block, remove all hard links durably. If the block fails or is
        interrupted, for example because a recovery is refused, remove the restored names instead,
        so that the store is unchanged. If the block has already removed a file's hard link, the
        file keeps its restored name.

        If a file was renamed in its folder, the method does not restore the previous name, because
        a recovery renames the file back. The method does not restore files that retention has
        deleted. If a log file differs in size from the log's other files, the file belongs to
        another store, and the method moves it to quarantine.

        Args:
            folders: all folders of the log, and possibly the folder of the index.
            lost: the result of :meth:`lost` for these folders, if the caller has it already.
        """
        foreign = self._of_other_size(folders)
        self._paths = tuple(self.lost(folders) if lost is None else lost)
        back = self.check()
        try:
            yield back
        except BaseException:
            for path in back:
                there = _file_at(link_of(path))
                if there is not None and there == _file_at(path):
                    self._disk.remove(path)
                    logger.warning("%s: removed again; the file is %s", path, link_of(path))
            raise
        for path in sorted(foreign):
            self._set_aside(path)
        self.discard(folders)

    def lost(self, folders: Sequence[Path]) -> list[Path]:
        """Return the deleted names of files that :meth:`restored` would restore."""
        left_out = self._expired(folders) | self._of_other_size(folders)
        found: list[Path] = []
        for folder in folders:
            links, named = links_of(folder), _files_in(folder)
            paths = (folder / name for name in self._disk.names_in(links))
            found += (
                path
                for path in paths
                if path not in left_out
                and _file_at(link_of(path)) not in named
                and self._is_lost(path)
            )
        return found

    def discard(self, folders: Sequence[Path], *, keeps_lost: bool = False) -> None:
        """Remove all hard links durably, without restoring files.

        ``cp -r`` does not keep hard links. So in a copy of an open store, the log file and the file
        in ``.logquarry/names/`` are separate files. If they differ, the file in
        ``.logquarry/names/`` is moved to quarantine, because it can contain messages that no other
        file has. With ``keeps_lost``, a file that has only its hard link is moved to
        quarantine too, unless the file is empty or retention has deleted the file's own name.
        """
        expired = self._expired(folders) if keeps_lost else set()
        for folder in folders:
            links = links_of(folder)
            names = self._disk.names_in(links)
            for name in names:
                path = folder / name
                is_kept = keeps_lost and path not in expired and _is_only_name(path)
                if is_kept or _differs(path, links / name):
                    self._set_aside(path)
                self.release(folder / name)
            if not names and is_folder(links):
                self._disk.sync_names(links)

    def _set_aside(self, path: Path) -> None:
        """Move the hard link to quarantine. ``path`` is the file's own name."""
        folder = quarantine(path.parent.parent, _NAMES, path.parent.name)
        self._disk.set_aside(link_of(path), folder)

    def _log_names(self, folders: Iterable[Path]) -> Iterator[tuple[Path, bool, int | None]]:
        """Yield the own names and the hard links of log files.

        For each name, yield three values: the path of the file's own name; True if the name is the
        hard link; the size of the file (None if the file cannot be read).
        """
        for folder in folders:
            for place in (folder, links_of(folder)):
                for name in filter(is_offset_name, self._disk.names_in(place)):
                    size = None
                    with contextlib.suppress(OSError):
                        size = (place / name).stat().st_size
                    yield folder / name, place != folder, size

    def _of_other_size(self, folders: Iterable[Path]) -> set[Path]:
        """Return the log files that have lost their own name, and are larger or smaller than every
        file that still has its own name. If only one file still has its own name, a crash can have
        left this file too short, so larger files are not returned. If no file has its own name, no
        file is returned.
        """
        sizes: list[int] = []
        lost: dict[Path, int] = {}
        for path, is_link, size in self._log_names(folders):
            if size is not None and not is_link:
                sizes.append(size)
            elif size is not None:
                with contextlib.suppress(OSError):
                    if not exists(path):
                        lost[path] = size
        largest = sizes[0] if len(sizes) == 1 else math.inf
        return {
            path for path, size in lost.items() if sizes and size not in sizes and size < largest
        }

    def _expired(self, folders: Iterable[Path]) -> set[Path]:
        """Return the log files that lack their own name because a broker's retention deleted them.

        Retention deletes the oldest files. So if a gap separates such a file from the log's first
        file, retention deleted it. A file without such a gap has only lost its own name.
        """
        lost: dict[int, Path] = {}
        found: list[int] = []
        largest = 0
        for path, is_link, size in self._log_names(folders):
            largest = max(largest, size or 0)
            if is_link:
                lost[int(path.name)] = path
            else:
                found.append(int(path.name))
        first = min(found, default=0)
        for base in sorted(lost, reverse=True):
            if first - largest <= base < first:
                first = base
        expired = {path for base, path in lost.items() if base < first}
        for path in sorted(expired):
            logger.warning(
                "%s: not restored from its hard link, because retention deleted it", path
            )
        return expired


def _differs(path: Path, link: Path) -> bool:
    # Whether ``link`` is the only name of its file, and ``path`` is a different file with other
    # bytes.
    try:
        return (
            link.stat().st_nlink == 1
            and not path.samefile(link)
            and not filecmp.cmp(path, link, shallow=False)
        )
    except OSError:
        # Only the hard link of the file is left, or the disk cannot read one of the two files.
        return False


def _is_only_name(path: Path) -> bool:
    # Whether a file has lost its own name, has no other name than its hard link, and is not empty.
    # The first bytes of a log file or index file are zeros until the file is used.
    try:
        link = link_of(path)
        if exists(path) or link.stat().st_nlink != 1:
            return False
        with link.open("rb") as file:
            return any(file.read(_FIRST_BYTES))
    except OSError:
        # The disk cannot read the file.
        return True


def _file_at(path: Path) -> tuple[int, int] | None:
    # Return the device and inode numbers of a file; None if the file is missing or cannot be read.
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _files_in(folder: Path) -> set[tuple[int, int] | None]:
    try:
        return {_file_at(path) for path in (*folder.glob("*"), *folder.glob("*/*"))} - {None}
    except OSError:
        return set()


def link_of(path: Path) -> Path:
    """Return the path of the hard link to a file."""
    return links_of(path.parent) / path.name


def links_of(folder: Path) -> Path:
    """Return the folder with the hard links to a folder's files."""
    return folder.parent / SIDECAR / _NAMES / folder.name
