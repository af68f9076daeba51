"""Makes the package `pyiceberg` sync the metadata files that it writes to a local disk.

`pyiceberg` itself syncs no file, but a catalog in SQLite syncs each commit. So without this module,
after a power cut the catalog could name a metadata file that is empty. Then no program could open
the table.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

from pyiceberg.io.pyarrow import PyArrowFile, PyArrowFileIO

from logquarry.systems import fcntl, sync_path

_FOLDERS: Final = 3
"""Number of folders to sync: ``metadata``, the folder of the table, and the destination."""


class SyncedFiles(PyArrowFileIO):
    """The files of `pyiceberg`; syncs each new local file, and the folders that contain it."""

    def new_output(self, location: str) -> PyArrowFile:
        """Return a file that does not exist yet."""
        scheme, netloc, path = self.parse_location(location, self.properties)
        if scheme != "file" or fcntl is None:  # Windows cannot open a folder to sync it
            return super().new_output(location)
        return _SyncedFile(location, path, self.fs_by_scheme(scheme, netloc))


class _SyncedFile(PyArrowFile):
    def create(self, overwrite: bool = False) -> Any:
        return _SyncedStream(super().create(overwrite), Path(self._path))


class _SyncedStream:
    def __init__(self, stream: Any, path: Path) -> None:
        self._stream = stream
        self._path = path

    def write(self, data: bytes) -> int:
        return int(self._stream.write(data))

    def tell(self) -> int:
        return int(self._stream.tell())

    def close(self) -> None:
        if self._stream.closed:
            return
        self._stream.close()
        for place in (self._path, *list(self._path.parents)[:_FOLDERS]):
            sync_path(os.fspath(place))

    def __enter__(self) -> _SyncedStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
