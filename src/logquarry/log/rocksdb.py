"""Opens a RocksDB folder of a store for reading, without writing to the store.

The package ``rocksdict`` writes a file into every folder that it opens. So the reader makes a
temporary folder with links to the store's files, and opens this folder. RocksDB then holds all
files open, so the reader removes the temporary folder before the first read.

A broker keeps the newest queue entries only in memory, because it does not use RocksDB's
write-ahead log. So while the broker runs, and after it was killed, the files may lack these
entries.

The module also parses the file MANIFEST, to find which table files a database lacks.
"""

from __future__ import annotations

import json
import shutil
import struct
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from enum import IntEnum
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from logquarry.errors import CorruptFile, LogquarryError, MissingExtra, UsageError
from logquarry.format import broker_json
from logquarry.format.broker_json import CONFIG_TABLES, FOLDER_SINGLE, FOLDER_V2
from logquarry.log.filesystem import FileSystem, LocalFileSystem
from logquarry.text import listed

if TYPE_CHECKING:
    from rocksdict import Rdict

CURRENT: Final = "CURRENT"
"""Name of a file that every RocksDB folder contains."""
_MANIFEST: Final = "MANIFEST-"
_DATA: Final = (".sst", ".log", ".blob")
_ATTEMPTS: Final = 3
_MOST_NAMES: Final = 3
_CONFIG: Final = "config"
_FAMILY: Final = "default"
_VERSION: Final = "kvDataVersion"
_VERSION_SUFFIX: Final = "Version"
_VERSION_KEY: Final = b"kvDataVersionKey"
_NO_VERSION: Final = (ValueError, TypeError, AttributeError, OverflowError, RecursionError)
"""Errors for a version that is not a JSON object, or that has no finite number as its time."""


def is_there(filesystem: FileSystem, folder: str) -> bool:
    """Whether a folder has a RocksDB database, even if the file CURRENT is missing."""
    return any(
        entry.name == CURRENT or entry.name.startswith(_MANIFEST) or entry.name.endswith(".sst")
        for entry in filesystem.list(folder)
        if not entry.is_dir
    )


class LostFiles(NamedTuple):
    """The missing files of a RocksDB folder, and the file in the folder that names them."""

    namer: str
    names: tuple[str, ...]
    state: str = "missing"

    def __str__(self) -> str:
        are = "are" if len(self.names) > 1 else "is"
        return f"{listed(self.names, _MOST_NAMES)}, which {self.namer} names, {are} {self.state}"


def lost_files(filesystem: FileSystem, folder: str) -> LostFiles | None:
    """Find the files (manifest or tables) that a RocksDB folder lacks; None if all files exist.

    If CURRENT cannot be read, or the manifest cannot be parsed, the result is None too.
    """
    named = _named_files(filesystem, folder)
    names = {entry.name for entry in filesystem.list(folder)}
    if named is None or named.state == "unreadable":
        return named
    lost = [name for name in named.names if name not in names]
    if not lost:
        return None
    # A live broker may have replaced files between the read of the manifest and the listing. So
    # read the manifest again, and keep only the files that it still names. RocksDB never uses a
    # name twice. So a file that both manifests name was also needed at the time of the listing.
    named = _named_files(filesystem, folder)
    left = () if named is None else tuple(name for name in lost if name in named.names)
    return named._replace(names=left) if named is not None and left else None


def _named_files(filesystem: FileSystem, folder: str) -> LostFiles | None:
    """Return the tables that the manifest names. If the manifest is missing or cannot be read,
    return the manifest itself. Return None if CURRENT cannot be read, or if the manifest cannot be
    parsed.
    """
    with suppress(FileNotFoundError, LogquarryError, ValueError):
        manifest = filesystem.read(f"{folder}/{CURRENT}").decode().strip()
        if not manifest.startswith(_MANIFEST) or "/" in manifest:
            return None
        try:
            tables = table_numbers(filesystem.read(f"{folder}/{manifest}"))
        except FileNotFoundError:
            return LostFiles(CURRENT, (manifest,))
        except LogquarryError:
            return LostFiles(CURRENT, (manifest,), "unreadable")
        return LostFiles(manifest, tuple(map(table_name, sorted(tables))))
    return None


def is_installed() -> bool:
    """Whether the package of the extra ``logquarry[rocksdb]`` is installed."""
    try:
        import rocksdict  # noqa: F401
    except ImportError:
        return False
    return True


def needs_package(what: str) -> MissingExtra:
    """Make the error for a missing package. ``what`` is the start of the message, which continues
    with "in RocksDB".
    """
    return MissingExtra(
        f"{what} in RocksDB, and the package rocksdict is not installed: "
        "pip install 'logquarry[rocksdb]'"
    )


class RocksDb:
    """A snapshot of a RocksDB database. The constructor raises MissingExtra if ``rocksdict`` is
    not installed, and CorruptFile if RocksDB cannot read the folder.
    """

    def __init__(self, filesystem: FileSystem, folder: str) -> None:
        self.path = filesystem.full_path(folder)
        for left in reversed(range(_ATTEMPTS)):
            before = filesystem.list(folder)
            self._links = self._make_folder()
            try:
                self._db, self.families = _open(filesystem, folder, self._links)
                return
            except UsageError:
                raise
            # rocksdict raises plain ``Exception``.
            except Exception as error:
                # A live broker may have replaced files while the links were made. Then try again.
                if not left or filesystem.list(folder) == before:
                    raise self._failed(error) from error

    def _make_folder(self) -> str:
        try:
            return tempfile.mkdtemp(prefix="logquarry-rocksdb-")
        except OSError as error:
            reason = f"no temporary folder can be made to read it: {error.strerror}: set TMPDIR"
            raise CorruptFile(self.path, 0, f"{reason} to a folder with room") from error

    def get(self, family: str, key: bytes) -> bytes | None:
        """Return the value of a key; None if the database has no such key."""
        if family not in self.families:
            return None
        try:
            found: bytes | None = self._db.get_column_family(family).get(key)
        except Exception as error:
            raise self._failed(error) from error
        return found

    def items(
        self, family: str, start: bytes = b"", stop: bytes | None = None
    ) -> Iterator[tuple[bytes, bytes]]:
        """Yield the keys in ``[start, stop)`` with their values, in order."""
        if family not in self.families:
            return
        try:
            found = self._db.get_column_family(family).iter()
            found.seek(start)
            while found.valid():
                key = found.key()
                if stop is not None and key >= stop:
                    return
                yield key, found.value()
                found.next()
            # The iterator becomes invalid after the last key, but also at damage. status() raises
            # an exception in the second case.
            found.status()
        except Exception as error:
            raise self._failed(error) from error

    def prefixed(self, family: str, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield the keys that begin with a prefix, with their values, in order."""
        for key, value in self.items(family, prefix):
            if not key.startswith(prefix):
                return
            yield key, value

    def _failed(self, error: Exception) -> CorruptFile:
        reason = str(error).replace(self._links, self.path)
        return CorruptFile(self.path, 0, f"RocksDB cannot read it: {reason}")


def _open(filesystem: FileSystem, folder: str, links: str) -> tuple[Rdict, tuple[str, ...]]:
    try:
        try:
            from rocksdict import AccessType, Options, Rdict
        except ImportError as error:
            raise needs_package(f"{filesystem.full_path(folder)}: its data are") from error
        # Copy CURRENT first, because it names the manifest, which names the other files. A copy
        # made later could name files that have no link.
        Path(links, CURRENT).write_bytes(filesystem.read(f"{folder}/{CURRENT}"))
        for entry in filesystem.list(folder):
            named = entry.name.startswith(_MANIFEST) or entry.name.endswith(_DATA)
            if named and not entry.is_dir:
                _link(filesystem, f"{folder}/{entry.name}", Path(links, entry.name))
        families = tuple(Rdict.list_cf(links))
        options: Any = {name: Options(raw_mode=True) for name in families}
        mode = AccessType.read_only(error_if_log_file_exist=False)
        return Rdict(links, Options(raw_mode=True), options, access_type=mode), families
    finally:
        shutil.rmtree(links, ignore_errors=True)


def _link(filesystem: FileSystem, path: str, link: Path) -> None:
    if isinstance(filesystem, LocalFileSystem):
        link.symlink_to(filesystem.open(path).path)
    else:
        link.write_bytes(filesystem.read(path))


def place_of(filesystem: FileSystem, file: str) -> str | None:
    """Return the RocksDB folder in which RocketMQ 5 keeps the content of a JSON file of
    ``config/``; None if there is no such folder.
    """
    if file not in CONFIG_TABLES:
        return None
    there = {entry.name for entry in filesystem.list(_CONFIG) if entry.is_dir}
    # A broker that begins to use the single database copies the folders of version 1 into it, and
    # does not delete these folders. If the setting is switched off later, the broker uses the
    # folders of version 1 again, and does not delete the single database.
    names = [FOLDER_SINGLE, CONFIG_TABLES[file].folder]
    if there.issuperset(names) and _is_single_older(filesystem):
        names.reverse()
    names.insert(0, FOLDER_V2)
    folders = (f"{_CONFIG}/{name}" for name in names if name in there)
    return next((folder for folder in folders if is_there(filesystem, folder)), None)


def _is_single_older(filesystem: FileSystem) -> bool:
    """Whether the folders of version 1 have a newer change than the single database. False if one
    of the two times of change is unknown.
    """
    if not is_installed():
        return False
    times = []
    for in_single in (True, False):
        found = 0
        for table in CONFIG_TABLES.values():
            folder = f"{_CONFIG}/{FOLDER_SINGLE if in_single else table.folder}"
            family = f"{table.family}{_VERSION_SUFFIX}" if in_single else _VERSION
            with suppress(LogquarryError, *_NO_VERSION):
                version = RocksDb(filesystem, folder).get(family, _VERSION_KEY)
                found = max(found, int(json.loads(version or b"{}").get("timestamp", 0)))
        times.append(found)
    single, first = times
    return 0 < single < first


def read_config(filesystem: FileSystem, file: str) -> bytes:
    """Read a document of ``config/``, from RocksDB if the broker keeps this document there.

    ``file`` is the name of the JSON file. If RocksDB has the document, a JSON file is ignored,
    because the JSON file is older or an export. Raises FileNotFoundError if the document is neither
    in RocksDB nor in a file, and the errors of :class:`RocksDb`.
    """
    folder = place_of(filesystem, file)
    if folder is None:
        return filesystem.read(f"{_CONFIG}/{file}")
    database = RocksDb(filesystem, folder)
    version = 2 if folder.endswith(FOLDER_V2) else 1
    family = CONFIG_TABLES[file].family if folder.endswith(FOLDER_SINGLE) else _FAMILY
    older = f"{_CONFIG}/{CONFIG_TABLES[file].folder}"
    if family not in database.families and is_there(filesystem, older):
        # QUIRK: 5.5.0 does not copy consumer offsets into the single database. The column family of
        # the offsets exists only after the first commit; until then, the older folder has the
        # offsets.
        database, family = RocksDb(filesystem, older), _FAMILY
    prefixes = broker_json.prefixes(file, version)
    try:
        items = chain.from_iterable(database.prefixed(family, prefix) for prefix in prefixes)
        return broker_json.document(file, items, version=version)
    except ValueError as error:
        raise CorruptFile(database.path, 0, str(error)) from error


def tables_in_rocksdb(filesystem: FileSystem) -> dict[str, bytes] | None:
    """Return all documents that RocksDB has, as a dict from the name of the JSON file to the
    document. Return None if a document cannot be read.
    """
    found = [file for file in CONFIG_TABLES if place_of(filesystem, file) is not None]
    try:
        return {file: read_config(filesystem, file) for file in found}
    except (CorruptFile, UsageError):
        return None


# ---------------------------------------------------------------------------------- file MANIFEST
# A manifest is a list of edits, one for each change of the database. An edit adds and deletes table
# files.
#
#     block of 32 KiB    [record]...
#     record             [CRC 4][length 2][type 1][bytes ``length``]      little-endian
#     edit               [tag][values]...                                 numbers are varints
#
# Long edits are divided into several records. RocksDB's sources: ``log_format.h``,
# ``version_edit.cc``.
_BLOCK: Final = 32_768
_HEAD: Final = struct.Struct("<IHB")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_LARGEST_SHIFT: Final = 63
_IGNORABLE: Final = 1 << 13
"""A tag with this bit is followed by a text, and readers may skip it."""


class _Tag(IntEnum):
    """Tags of an edit."""

    COMPARATOR = 1
    LOG_NUMBER = 2
    NEXT_FILE_NUMBER = 3
    LAST_SEQUENCE = 4
    COMPACT_CURSOR = 5
    DELETED_FILE = 6
    NEW_FILE = 7
    PREVIOUS_LOG_NUMBER = 9
    LEAST_LOG_NUMBER = 10
    NEW_FILE_2 = 100
    NEW_FILE_3 = 102
    NEW_FILE_4 = 103
    FAMILY = 200
    FAMILY_ADDED = 201
    FAMILY_DROPPED = 202
    LARGEST_FAMILY = 203
    IN_ATOMIC_GROUP = 300


_NUMBERS: Final = frozenset(
    {
        *(_Tag.LOG_NUMBER, _Tag.NEXT_FILE_NUMBER, _Tag.LAST_SEQUENCE, _Tag.PREVIOUS_LOG_NUMBER),
        *(_Tag.LEAST_LOG_NUMBER, _Tag.LARGEST_FAMILY, _Tag.IN_ATOMIC_GROUP),
    }
)
"""Tags with one number."""
_TEXTS: Final = frozenset({_Tag.COMPARATOR, _Tag.FAMILY_ADDED})
"""Tags with one text."""
_NUMBERS_OF_FILE: Final = {
    _Tag.NEW_FILE: (3, 0),
    _Tag.NEW_FILE_2: (3, 2),
    _Tag.NEW_FILE_3: (4, 2),
    _Tag.NEW_FILE_4: (3, 2),
}
"""Tag of a new file -> how many numbers are before the two keys of the file (smallest and largest),
and how many are after the keys. The second number before the keys is the number of the file.
"""
_LAST_FIELD: Final = 1
"""The number that ends the list of further fields of a new file."""


def table_name(number: int) -> str:
    """Return the name of a table file."""
    return f"{number:06d}.sst"


def table_numbers(data: bytes) -> frozenset[int]:
    """Return the file numbers of the table files that the database uses.

    The function applies the edits before the first incomplete record, because a running broker may
    still be writing the last record. Raises ValueError if an edit has an unknown tag or is cut off.
    """
    tables: dict[int, int] = {}
    for edit in _edits(data):
        family, is_dropped, added, deleted = _Edit(edit).parse()
        for number in deleted:
            tables.pop(number, None)
        tables.update(dict.fromkeys(added, family))
        if is_dropped:
            tables = {number: one for number, one in tables.items() if one != family}
    return frozenset(tables)


def _edits(data: bytes) -> Iterator[bytes]:
    parts: list[bytes] = []
    position = 0
    while position + _HEAD.size <= len(data):
        if _BLOCK - position % _BLOCK < _HEAD.size:
            position += _BLOCK - position % _BLOCK
            continue
        _, length, kind = _HEAD.unpack_from(data, position)
        start = position + _HEAD.size
        position = start + length
        if not _FULL <= kind <= _LAST or position > len(data):
            return
        if kind in (_FULL, _FIRST):
            parts = []
        parts.append(data[start:position])
        if kind in (_FULL, _LAST):
            yield b"".join(parts)


class _Edit:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    def parse(self) -> tuple[int, bool, list[int], list[int]]:
        """Return the id of the column family, whether the edit drops this family, the file numbers
        of the added files, and the file numbers of the deleted files.
        """
        family, is_dropped = 0, False
        added: list[int] = []
        deleted: list[int] = []
        while self._position < len(self._data):
            tag = self._number()
            if tag & _IGNORABLE or tag in _TEXTS:
                self._text()
            elif tag in _NUMBERS:
                self._number()
            elif tag == _Tag.FAMILY:
                family = self._number()
            elif tag == _Tag.FAMILY_DROPPED:
                is_dropped = True
            elif tag == _Tag.COMPACT_CURSOR:
                self._number()
                self._text()
            elif tag == _Tag.DELETED_FILE:
                self._number()
                deleted.append(self._number())
            elif tag in _NUMBERS_OF_FILE:
                added.append(self._new_file(_Tag(tag)))
            else:
                raise ValueError(f"an edit of the manifest has the unknown tag {tag}")
        return family, is_dropped, added, deleted

    def _new_file(self, tag: _Tag) -> int:
        before, after = _NUMBERS_OF_FILE[tag]
        number = [self._number() for _ in range(before)][1]
        for _ in range(2):
            self._text()
        for _ in range(after):
            self._number()
        while tag == _Tag.NEW_FILE_4 and self._number() != _LAST_FIELD:
            self._text()
        return number

    def _number(self) -> int:
        found = shift = 0
        while True:
            if self._position >= len(self._data) or shift > _LARGEST_SHIFT:
                raise ValueError("an edit of the manifest is cut off")
            byte = self._data[self._position]
            self._position += 1
            found |= (byte & 0x7F) << shift
            if byte < 1 << 7:
                return found
            shift += 7

    def _text(self) -> None:
        length = self._number()
        self._position += length
        if self._position > len(self._data):
            raise ValueError("an edit of the manifest is cut off")
