"""Reads the documents of ``config/``, from RocksDB if the broker keeps them there.

If a store has a RocksDB of a table, the JSON file of the table is not read: it is older, or a copy
that the broker exported.
"""

from __future__ import annotations

import logging
from typing import Final

from logquarry.errors import CorruptFile
from logquarry.format import rocksdb_config
from logquarry.format.rocksdb_config import FOLDER_V2, FOLDERS_V1
from logquarry.log.filesystem import FileSystem
from logquarry.log.rocksdb import RocksDb, is_there

logger = logging.getLogger(__name__)

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
    prefix = rocksdb_config.prefix_v2(file) if version == 2 else b""
    try:
        items = database.prefixed(_FAMILY, prefix)
        return rocksdb_config.document(file, items, version=version)
    except ValueError as error:
        raise CorruptFile(database.path, 0, str(error)) from error
