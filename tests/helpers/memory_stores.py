"""Stores in memory for the walker, and its events as tuples that compare."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hypothesis import reject

from logquarry.config import StoreConfig
from logquarry.errors import MisnamedFile
from logquarry.log.filesystem import Entry, FileSystem, FileView
from logquarry.log.layout import StoreLayout
from logquarry.log.walk import BlankSpan, DamagedSpan, Event, Run

Told = tuple[Any, ...]


class MemoryFile(FileView):
    """A file whose windows are as short as allowed or, if mapped, reach its end."""

    def __init__(self, path: str, data: bytes, *, least: int | None, page: int) -> None:
        self.path = path
        self.size = len(data)
        self.is_mapped = least is None
        self._data = data
        self._least = least
        self._page = page

    def window(self, start: int, length: int) -> memoryview:
        view = memoryview(self._data)[start:]
        return view if self._least is None else view[: max(length, self._least)]

    def next_data(self, position: int) -> int:
        """Behaves as SEEK_DATA on a disk with very small pages."""
        while position < self.size:
            page = position // self._page * self._page
            if any(self._data[page : page + self._page]):
                return position
            position = page + self._page
        return self.size


class MemoryFileSystem(FileSystem):
    """Files by path.

    Args:
        files: their bytes.
        least: fewest bytes of a window, as REMOTE_RANGE is; None for maps.
        page: bytes of a page of the disk; pages of zeros are holes.
    """

    root = "memory:"

    def __init__(
        self, files: Mapping[str, bytes], *, least: int | None = None, page: int = 4096
    ) -> None:
        self.files = dict(files)
        self._least = least
        self._page = page

    def list(self, path: str) -> list[Entry]:
        prefix = f"{path}/" if path else ""
        found: dict[str, Entry] = {}
        for name, data in self.files.items():
            if name.startswith(prefix):
                head, separator, _ = name.removeprefix(prefix).partition("/")
                found[head] = Entry(head, bool(separator), 0 if separator else len(data))
        return sorted(found.values())

    def open(self, path: str) -> MemoryFile:
        if path not in self.files:
            raise FileNotFoundError(path)
        return MemoryFile(path, self.files[path], least=self._least, page=self._page)

    def exists(self, path: str) -> bool:
        return path in self.files


def layout_of(
    files: Mapping[str, bytes],
    *,
    file_size: int | None = None,
    least: int | None = None,
    page: int = 4096,
) -> StoreLayout:
    """The layout of a store in memory; for Hypothesis, damage that makes a name wrong is no case.

    A copy of a file's beginning, some bytes later in the file, looks like a file of another offset.
    """
    config = StoreConfig(mapped_file_size_commit_log=file_size)
    layout = StoreLayout(MemoryFileSystem(files, least=least, page=page), config)
    try:
        layout.require_right_names()
    except MisnamedFile:
        reject()
    return layout


def told(events: Iterable[Event]) -> list[Told]:
    """Frames, blanks, damage and the end, independent of the runs of the walk."""
    return list(_told(events))


def _told(events: Iterable[Event]) -> Iterator[Told]:
    for event in events:
        if isinstance(event, Run):
            for row in event.rows.tolist():
                yield "frame", event.window.base + row[0], row[1]
        elif isinstance(event, BlankSpan):
            yield "blank", event.offset, event.length
        elif isinstance(event, DamagedSpan):
            yield "damage", event.offset, event.length, event.kind
        else:
            yield "end", event.offset


def frames_told(events: Iterable[Told]) -> list[Told]:
    """The frames of a walk."""
    return [event for event in events if event[0] == "frame"]
