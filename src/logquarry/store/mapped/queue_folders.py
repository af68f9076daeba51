"""Where the files of a queue are, and where the next ones go (``MultiPathMappedFileQueue``)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from pathlib import Path

from logquarry.errors import CorruptFile, UsageError
from logquarry.files.layout import LARGEST_BASE, NAME_DIGITS
from logquarry.store.disk.disk import Disk


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
