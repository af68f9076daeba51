"""Reads the documents of ``config/``, from RocksDB if the broker keeps them there.

If a store has a RocksDB of a table, the JSON file of the table is not read: it is older, or a copy
that the broker exported.
"""

from __future__ import annotations

from itertools import chain
from typing import Final

from logquarry.errors import CorruptFile, UsageError
from logquarry.format import rocksdb_config
from logquarry.format.rocksdb_config import FOLDER_V2, FOLDERS_V1
from logquarry.log.filesystem import FileSystem
from logquarry.log.rocksdb import RocksDb, is_there

_CONFIG: Final = "config"
_FAMILY: Final = "default"


def place_of(filesystem: FileSystem, file: str) -> str | None:
    """The RocksDB folder that has the table of a JSON file; None if there is none."""
    if file not in FOLDERS_V1:
        return None
    folders = (f"{_CONFIG}/{FOLDER_V2}", f"{_CONFIG}/{FOLDERS_V1[file]}")
    return next((folder for folder in folders if is_there(filesystem, folder)), None)


def read_config(filesystem: FileSystem, file: str) -> bytes:
    """A document of ``config/``, as a JSON document.

    Args:
        filesystem: the store's files.
        file: its name as a JSON file.

    Raises:
        FileNotFoundError: if the store has neither the file nor a RocksDB of this table.
        UsageError: if it is in RocksDB, and the package ``rocksdict`` is not installed.
        CorruptFile: if RocksDB cannot read it, or a record has an unknown layout.
    """
    folder = place_of(filesystem, file)
    if folder is None:
        return filesystem.read(f"{_CONFIG}/{file}")
    database = RocksDb(filesystem, folder)
    version = 2 if folder.endswith(FOLDER_V2) else 1
    prefixes = rocksdb_config.prefixes(file, version)
    try:
        items = chain.from_iterable(database.prefixed(_FAMILY, prefix) for prefix in prefixes)
        return rocksdb_config.document(file, items, version=version)
    except ValueError as error:
        raise CorruptFile(database.path, 0, str(error)) from error


def tables_in_rocksdb(filesystem: FileSystem) -> dict[str, bytes] | None:
    """JSON file -> document, of each table in RocksDB; None if one of them cannot be read."""
    found = [file for file in FOLDERS_V1 if place_of(filesystem, file) is not None]
    try:
        return {file: read_config(filesystem, file) for file in found}
    except (CorruptFile, UsageError):
        return None
