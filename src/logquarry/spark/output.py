"""The folder that an export goes to: on a disk, or behind an object store."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

from logquarry.disk.locks import lock_folder
from logquarry.log.filesystem import arrow_folder
from logquarry.log.store_names import absolute

if TYPE_CHECKING:
    from pyarrow import fs as pafs


class OutputFolder:
    """A folder to write to; paths are below it. Picklable.

    Attributes:
        location: its path or URL.
        storage_options: what the file system of a URL takes.
    """

    def __init__(
        self, location: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
    ) -> None:
        self.location = absolute(location)
        self.storage_options = storage_options

    def __reduce__(self) -> tuple[Any, ...]:
        return OutputFolder, (self.location, self.storage_options)

    @property
    def is_local(self) -> bool:
        """Whether it is on a disk that this machine mounts."""
        return "://" not in self.location

    @cached_property
    def _opened(self) -> tuple[pafs.FileSystem, str]:
        from pyarrow import fs as pafs

        if self.is_local:
            return pafs.LocalFileSystem(), self.location
        filesystem, base = arrow_folder(self.location, self.storage_options)
        return filesystem, base.rstrip("/")

    @property
    def _fs(self) -> pafs.FileSystem:
        return self._opened[0]

    def _full(self, path: str) -> str:
        return f"{self._opened[1]}/{path}" if path else self._opened[1]

    def lock(self) -> int | None:
        """A lock on the folder, held until the descriptor is closed; None where there are none.

        It is taken before anything is looked at: what another export puts in place meanwhile
        would stay beside what this one writes.

        Raises:
            StoreUnavailable: if another export has it.
        """
        if not self.is_local:
            return None
        while True:
            try:
                return lock_folder(self.location, "another export is at work there")
            except FileNotFoundError:
                self.make()

    def files(self, path: str = "") -> Iterator[str]:
        """Paths of all files in a folder and below it; none if it is not there."""
        from pyarrow import fs as pafs

        start = len(self._full("")) + 1
        selector = pafs.FileSelector(self._full(path), recursive=True, allow_not_found=True)
        for info in self._fs.get_file_info(selector):
            if info.type != pafs.FileType.Directory:
                yield info.path[start:]

    def names(self) -> list[tuple[str, bool]]:
        """What is directly in the folder: (name, whether it is a folder)."""
        from pyarrow import fs as pafs

        selector = pafs.FileSelector(self._full(""), allow_not_found=True)
        found = self._fs.get_file_info(selector)
        return sorted((info.base_name, info.type == pafs.FileType.Directory) for info in found)

    def size(self, path: str) -> int:
        """Bytes of a file."""
        return int(self._fs.get_file_info(self._full(path)).size)

    def make(self, path: str = "") -> None:
        """Make a folder, and those above it."""
        self._fs.create_dir(self._full(path), recursive=True)

    def create(self, path: str) -> Any:
        """A file to be written, open; what was there is replaced."""
        return self._fs.open_output_stream(self._full(path))

    def open(self, path: str) -> Any:
        """A file to be read, open."""
        return self._fs.open_input_file(self._full(path))

    def sync(self, path: str) -> None:
        """Have a file on the disk, and its name; an object store has what it has taken."""
        if not self.is_local:
            return
        for place in (self._full(path), os.path.dirname(self._full(path))):  # noqa: PTH120
            descriptor = os.open(place, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def move(self, source: str, target: str) -> None:
        """Move a file, within the file system; what was there is replaced."""
        if not self.is_local:
            # Not every one of them replaces a file by moving another over it.
            self.remove(target)
        self._fs.move(self._full(source), self._full(target))

    def remove(self, path: str) -> None:
        """Remove a file, if it is there."""
        from pyarrow import fs as pafs

        if self._fs.get_file_info(self._full(path)).type != pafs.FileType.NotFound:
            self._fs.delete_file(self._full(path))

    def remove_folder(self, path: str) -> None:
        """Remove a folder with everything in it, if it is there."""
        with suppress(FileNotFoundError):
            self._fs.delete_dir(self._full(path))

    def remove_if_empty(self, path: str) -> bool:
        """Remove a folder that has nothing in it; whether it went."""
        from pyarrow import fs as pafs

        selector = pafs.FileSelector(self._full(path), allow_not_found=True)
        if self._fs.get_file_info(selector):
            return False
        self.remove_folder(path)
        return True

    def read_json(self, path: str) -> Any:
        """A JSON document; None if it is not there.

        Raises:
            ValueError: if it is none.
        """
        try:
            with self._fs.open_input_stream(self._full(path)) as source:
                return json.loads(source.read())
        except FileNotFoundError:
            return None

    def write_json(self, path: str, document: Any, *, by_way_of: str) -> None:
        """A JSON document, there whole or not at all: written to ``by_way_of`` and moved."""
        with self.create(by_way_of) as sink:
            sink.write(json.dumps(document, indent=1).encode())
        self.move(by_way_of, path)
