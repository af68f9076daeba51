"""Finds the folders of a queue of files, and protects the log by second names (hard links).

A RocketMQ broker that is started on a store in use notices the lock only after its recovery. This
recovery deletes files after the log's end, although this writer may have written messages to these
files meanwhile. So each file that is written has a hard link beside the log's folder:

    STORE/commitlog/00000000000000065536   STORE/.logquarry/names/commitlog/00000000000000065536

If another program deletes a file, the writer restores the name from the link: at the next check, at
shutdown, or at the opening after a crash. An opening does not restore an expired file, which a
broker's retention deleted. A clean shutdown removes the links.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

from logquarry.disk.disk import Disk
from logquarry.errors import CorruptFile, StoreUnavailable, UsageError
from logquarry.log.store_files import LARGEST_BASE, NAME_DIGITS, SIDECAR, is_offset_name

logger = logging.getLogger(__name__)

_NAMES: Final = "names"


class NameGuard:
    """The second names (hard links) of the files of one log."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._change = threading.Lock()
        self._paths: tuple[Path, ...] = ()
        self._folders: set[Path] = set()

    def guard(self, path: Path) -> None:
        """Give a file its second name. Without hard links, only a sync detects a lost file name."""
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
                # Another program deleted the file at this moment. The caller checks that.
                return
            except OSError as error:
                logger.info("%s: no second name: %s", path, error.strerror)
                return
            self._paths = (*self._paths, path)

    def release(self, path: Path) -> None:
        """Remove a second name durably: otherwise, after a crash, the file would be restored."""
        with self._change:
            link = link_of(path)
            with self._disk.refusing(link):
                is_gone = self._drop(path)
            if is_gone:
                self._disk.sync_names(link.parent)

    def check(self) -> list[Path]:
        """Restore lost first names of files. Return their paths. A failure poisons the store."""
        with self._change:
            lost = [path for path in self._paths if not path.exists()]
            for path in lost:
                link = link_of(path)
                if link.exists():
                    # The folder may have been deleted with the file.
                    self._disk.make_folders(path.parent)
                try:
                    self._disk.link(link, path)
                except OSError as error:
                    reason = f"{path}: another program deleted it, and it cannot be restored"
                    raise self._disk.health.poison(f"{reason}: {error.strerror}") from error
                self._disk.sync_names(path.parent)
                logger.warning("%s: another program deleted it; restored from its link", path)
            return lost

    def _drop(self, path: Path) -> bool:
        """Remove a second name. Return whether this name existed. May raise OSError."""
        self._paths = tuple(other for other in self._paths if other != path)
        try:
            self._disk.unlink(link_of(path))
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def close(self) -> None:
        """Check the names, then remove all second names durably.

        A second name that stays, or that a power cut restores, would bring back its file after a
        retention. So if a name cannot be removed, the shutdown is not clean. In a poisoned store
        all second names stay: the next opening restores lost names from them.

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
        for folder in sorted(changed):
            self._disk.sync_names(folder)

    def restore(self, folders: Sequence[Path]) -> list[Path]:
        """After a crash, restore the files that lost their first name. Return their paths.

        A file that was renamed in its folder is not restored, because a recovery renames this file
        back. Expired files are not restored. Afterwards no second name exists, and none reappears
        after a crash.

        Args:
            folders: all folders of the log, and possibly the folder of the index.
        """
        back = []
        expired = self._expired(folders)
        for folder in folders:
            second = _links_of(folder)
            named = _files_in(folder)
            self._paths = tuple(
                folder / name
                for name in self._disk.names_in(second)
                if folder / name not in expired and _file_at(second / name) not in named
            )
            back += self.check()
        self.discard(folders)
        return back

    def discard(self, folders: Iterable[Path]) -> None:
        """Remove all second names durably, and restore no file."""
        for folder in folders:
            second = _links_of(folder)
            names = self._disk.names_in(second)
            for name in names:
                self.release(folder / name)
            if not names and second.is_dir():
                self._disk.sync_names(second)

    def _expired(self, folders: Iterable[Path]) -> set[Path]:
        """Return the log files that a broker's retention deleted after the crash.

        These files are before the log's first file, and would leave a gap before it. A file that
        lost its name in the crash leaves no gap.
        """
        lost: dict[int, Path] = {}
        found: list[int] = []
        size = 0
        for folder in folders:
            for place in (folder, _links_of(folder)):
                for name in filter(is_offset_name, self._disk.names_in(place)):
                    with contextlib.suppress(OSError):
                        size = max(size, (place / name).stat().st_size)
                    if place == folder:
                        found.append(int(name))
                    else:
                        lost[int(name)] = folder / name
        first = min(found, default=0)
        for base in sorted(lost, reverse=True):
            if first - size <= base < first:
                first = base
        expired = {path for base, path in lost.items() if base < first}
        for path in sorted(expired):
            logger.warning("%s: not restored from its link: a retention deleted it", path)
        return expired


def _file_at(path: Path) -> tuple[int, int] | None:
    # Device and inode, None if the file is missing or cannot be read.
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
    """Return the path of a file's second name."""
    return _links_of(path.parent) / path.name


def _links_of(folder: Path) -> Path:
    return folder.parent / SIDECAR / _NAMES / folder.name


# --------------------------------------------------------------------------------------------------
# Folders of a queue of files (``MultiPathMappedFileQueue``)


class QueueFolders:
    """The folders of one queue of files. ``full_folders`` returns the folders without room."""

    def __init__(
        self,
        disk: Disk,
        folders: Path | Sequence[Path],
        *,
        read_only: Sequence[Path] = (),
        full_folders: Callable[[], Collection[Path]] = tuple,
    ) -> None:
        # QUIRK: Java sorts the paths as text, and takes the file's number modulo the number of
        # paths. So if the configuration adds a path, later files get other folders. Existing files
        # are always found.
        given = (folders,) if isinstance(folders, Path) else tuple(folders)
        self.folders = tuple(sorted(set(given), key=str))
        self._read_only = frozenset(read_only)
        self._full_folders = full_folders
        self._disk = disk

    def find(self, file_size: int, *, gaps: bool = False) -> dict[int, Path]:
        """Find the existing files, in the order of their bases. Other names are skipped.

        Raises CorruptFile if a file is longer than ``file_size``, if a file before the last file is
        shorter, or if a file is missing and ``gaps`` is not set.
        """
        found: dict[int, Path] = {}
        for folder in {*self.folders, *self._read_only}:
            for name in self._disk.names_in(folder):
                if is_offset_name(name) and int(name) <= LARGEST_BASE:
                    found[int(name)] = folder / name
        bases = sorted(found)
        for base in bases:
            with self._disk.refusing(found[base]):
                size = found[base].stat().st_size
            if size > file_size or (size < file_size and base != bases[-1]):
                reason = f"it has {size} bytes instead of {file_size}"
                raise CorruptFile(str(found[base]), 0, reason)
        for before, base in pairwise(bases):
            if base - before != file_size and not (gaps and base - before > file_size):
                reason = f"the file before it begins at {before}, not {file_size} bytes before"
                raise CorruptFile(str(found[base]), 0, reason)
        return {base: found[base] for base in bases}

    def path_of(self, base: int, file_size: int) -> Path:
        """Return the path for a new file that begins at ``base``."""
        name = f"{base:0{NAME_DIGITS}d}"
        if len(self.folders) == 1:
            return self.folders[0] / name
        full = set(self._full_folders())
        writable = [folder for folder in self.folders if folder not in self._read_only]
        usable = [folder for folder in writable if folder not in full] or writable
        if not usable:
            raise UsageError(f"all {len(self.folders)} folders of the log are read-only")
        return usable[base // file_size % len(usable)] / name
