"""Second names for the log's files, so that none of them is lost with its first.

A Java store that is opened on a store in use is refused by the lock, but only after its recovery
has acted (reliability.md, rule 1): it lists the log's files, walks them to their end, and deletes
those behind it, among them the one that was made ahead and was empty when it looked. By the time
it deletes it, this writer may be writing to it, and have acknowledged what it wrote.

So each file that is written to has a hard link in ``.logquarry/names/``, beside the log's folder:

    STORE/commitlog/00000000000000065536   STORE/.logquarry/names/commitlog/00000000000000065536

A file whose first name is gone gets it back, the same file with all that is in it: at the next
check, at the end, or when the store is opened after a crash. A store that is closed in order has no
such links.
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
from logquarry.log.layout import LARGEST_BASE, NAME_DIGITS, SIDECAR

logger = logging.getLogger(__name__)

_NAMES: Final = "names"


class NameGuard:
    """The second names of the files of one log."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._change = threading.Lock()
        self._paths: tuple[Path, ...] = ()
        self._folders: set[Path] = set()

    def guard(self, path: Path) -> None:
        """Give a file its second name, in place of a file that had it.

        Where the file system knows no hard links the file stays as it is: a sync then tells when
        it has lost its name.
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
                # Deleted in this moment: the caller looks whether it is there.
                return
            except OSError as error:
                logger.info("%s: it gets no second name: %s", path, error.strerror)
                return
            self._paths = (*self._paths, path)

    def release(self, path: Path) -> None:
        """Take the second name away, durably: the file is to be deleted, or nobody can lose it.

        Raises:
            StoreUnavailable: if the disk fails: with a second name that comes back after a crash
                the file would too.
        """
        with self._change:
            link = link_of(path)
            try:
                is_gone = self._drop(path)
            except OSError as error:
                raise self._disk.refused(link, error) from error
            if is_gone:
                self._disk.sync_names(link.parent)

    def check(self) -> list[Path]:
        """Give files that lost their first name that name back: which ones.

        Raises:
            StoreUnavailable: if that cannot be done; the store is poisoned then.
        """
        with self._change:
            lost = [path for path in self._paths if not path.exists()]
            for path in lost:
                link = link_of(path)
                if link.exists():
                    # With the file its folder may have gone.
                    self._disk.make_folders(path.parent)
                try:
                    self._disk.link(link, path)
                except OSError as error:
                    reason = f"{path}: somebody deleted it, and it cannot come back"
                    raise self._disk.health.poison(f"{reason}: {error.strerror}") from error
                self._disk.sync_names(path.parent)
                logger.warning("%s: somebody deleted it while it was in use; it is back", path)
            return lost

    def _drop(self, path: Path) -> bool:
        """Take a second name away; whether there was one. Raises OSError if it stays."""
        self._paths = tuple(other for other in self._paths if other != path)
        try:
            self._disk.unlink(link_of(path))
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def close(self) -> None:
        """Check, and take all second names away.

        Where the check fails they stay, for the next opening.
        """
        with contextlib.suppress(StoreUnavailable):
            self.check()
            for path in self._paths:
                # Not durably: one that comes back is that of a file which is there.
                with contextlib.suppress(OSError):
                    self._drop(path)

    def restore(self, folders: Iterable[Path]) -> list[Path]:
        """Finish what a crash left: files that have only their second name get the first back.

        Returns:
            Which ones.

        Raises:
            StoreUnavailable: if that cannot be done.
        """
        back = []
        for folder in folders:
            second = link_of(folder / "any").parent
            names = self._disk.names_in(second)
            self._paths = tuple(folder / name for name in names)
            back += self.check()
            for name in names:
                self.release(folder / name)
        return back


def link_of(path: Path) -> Path:
    """Where the second name of a file is, if it has one."""
    folder = path.parent
    return folder.parent / SIDECAR / _NAMES / folder.name / path.name


# --------------------------------------------------------------------------------------------------
# Where the files of a queue are, and where the next ones go (``MultiPathMappedFileQueue``).


class QueueFolders:
    """The folders of one queue of files, mostly one.

    Args:
        disk: what they are on.
        folders: where files are found and made.
        read_only: folders with files that are read, and never added to.
        full_folders: says which folders have no room for another file.

    Attributes:
        folders: where files are found and made, sorted.
    """

    def __init__(
        self,
        disk: Disk,
        folders: Path | Sequence[Path],
        *,
        read_only: Sequence[Path] = (),
        full_folders: Callable[[], Collection[Path]] = tuple,
    ) -> None:
        # QUIRK: Java sorts the paths as text and takes the file's number modulo their count, so
        # that one more path moves where the next files go. What is there is found anyway.
        given = (folders,) if isinstance(folders, Path) else tuple(folders)
        self.folders = tuple(sorted(set(given), key=str))
        self._read_only = frozenset(read_only)
        self._full_folders = full_folders
        self._disk = disk

    def find(self, file_size: int, *, gaps: bool = False) -> dict[int, Path]:
        """The files that are there, by their bases in order. Other names are passed over.

        Args:
            file_size: bytes of each.
            gaps: whether files may be missing between others.

        Raises:
            CorruptFile: if a file is longer than ``file_size``, or shorter and not the last, or
                if there is a gap between them.
            StoreUnavailable: if a folder or file cannot be looked at.
        """
        found: dict[int, Path] = {}
        for folder in {*self.folders, *self._read_only}:
            for name in self._disk.names_in(folder):
                is_numbered = len(name) == NAME_DIGITS and name.isascii() and name.isdigit()
                if is_numbered and int(name) <= LARGEST_BASE:
                    found[int(name)] = folder / name
        bases = sorted(found)
        for base in bases:
            try:
                size = found[base].stat().st_size
            except OSError as error:
                raise self._disk.refused(found[base], error) from error
            if size > file_size or (size < file_size and base != bases[-1]):
                reason = f"it has {size} bytes, and {file_size} belong there"
                raise CorruptFile(str(found[base]), 0, reason)
        for before, base in pairwise(bases):
            if base - before != file_size and not (gaps and base - before > file_size):
                reason = f"the file before it begins at {before}, not {file_size} bytes before"
                raise CorruptFile(str(found[base]), 0, reason)
        return {base: found[base] for base in bases}

    def path_of(self, base: int, file_size: int) -> Path:
        """Where the file that begins at ``base`` is to be made."""
        name = f"{base:0{NAME_DIGITS}d}"
        if len(self.folders) == 1:
            return self.folders[0] / name
        full = set(self._full_folders())
        writable = [folder for folder in self.folders if folder not in self._read_only]
        usable = [folder for folder in writable if folder not in full] or writable
        if not usable:
            raise UsageError(f"all {len(self.folders)} folders of the log are read-only")
        return usable[base // file_size % len(usable)] / name
