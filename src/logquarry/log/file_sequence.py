"""Files that form one offset space: those of the log, of a queue or of a table of 3.x."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class StoreFile:
    """One file of a file sequence.

    Attributes:
        base: offset of its first byte in the sequence (its name).
        size: its bytes on disk; may be fewer than ``file_size``.
        path: path below the store's root.
    """

    base: int
    size: int
    path: str


@dataclass(frozen=True, slots=True)
class FileSequence:
    """Files that form one offset space, each with room for ``file_size`` bytes.

    ``has_heads``: whether they are files of a DLedger log, in which a head precedes each frame.
    """

    files: tuple[StoreFile, ...]
    file_size: int
    has_heads: bool = False

    def index_of(self, offset: int) -> int | None:
        """Index of the file with room for ``offset``, None if there is none."""
        low, high = 0, len(self.files)
        while low < high:
            middle = (low + high) // 2
            if self.files[middle].base <= offset:
                low = middle + 1
            else:
                high = middle
        if low and offset < self.files[low - 1].base + self.file_size:
            return low - 1
        return None

    def at(self, offset: int) -> StoreFile | None:
        """The file with room for ``offset``, None if there is none."""
        index = self.index_of(offset)
        return None if index is None else self.files[index]

    @property
    def start(self) -> int:
        """Offset of the first byte, 0 without files."""
        return self.files[0].base if self.files else 0

    @property
    def end(self) -> int:
        """Offset after the room of the last file."""
        return self.files[-1].base + self.file_size if self.files else 0


def of_entries(files: tuple[StoreFile, ...], entry_size: int, stated: int | None) -> FileSequence:
    """The files of a queue or a table, with room for whole entries."""
    size = stated or size_of(files)
    # If the largest file holds no whole entry, a file has room for one.
    return FileSequence(files, max(entry_size, size // entry_size * entry_size))


def fits_files(size: int, sequences: Sequence[Sequence[StoreFile]]) -> bool:
    """Whether files may have been made with a size, also if some of them were damaged since.

    Args:
        size: bytes of a file, by a setting.
        sequences: the files of the log, or those of each queue.
    """
    sizes = {file.size for files in sequences for file in files if file.size}
    shown = shown_sizes(sequences)
    # Without such a size, it is one of the sizes, or all files were cut short.
    return not sizes or size in (shown or sizes) or (not shown and size > max(sizes))


def shown_sizes(sequences: Sequence[Sequence[StoreFile]]) -> set[int]:
    """The sizes of files that the names of their neighbours confirm."""
    sizes = {file.size for files in sequences for file in files if file.size}
    return sizes & {b.base - a.base for files in sequences for a, b in pairwise(files)}


def size_of(files: tuple[StoreFile, ...]) -> int:
    """Room of each file in bytes, inferred from the files."""
    largest = max((file.size for file in files), default=0)
    steps = [b.base - a.base for a, b in pairwise(files)]
    # Two neighbours give the exact size; a gap between files gives only a multiple.
    return min(steps) if steps and any(f.size == min(steps) for f in files) else largest
