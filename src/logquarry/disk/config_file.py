"""The JSON files in ``config/`` of a store: consumer offsets, topics, delay offsets, groups.

Each write keeps the previous document in a second file, ``.bak``. RocketMQ's ``ConfigManager`` also
keeps a ``.bak`` file. Unlike RocketMQ, this module syncs both files. So after a power cut, at least
one of the two files is readable.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from logquarry.config import StoreConfig
from logquarry.disk.disk import Disk
from logquarry.errors import StoreNotFound, StoreUnavailable, reason_of
from logquarry.format import broker_json
from logquarry.log import earlier_writers
from logquarry.log.layout import StoreLayout
from logquarry.log.rocksdb import place_of, read_config
from logquarry.log.store_files import CONFIG, SETTINGS, quarantine
from logquarry.paths import ABSENT, exists, is_link
from logquarry.systems import read_file

logger = logging.getLogger(__name__)

BACKUP = ".bak"


class LoadedConfig(NamedTuple):
    """A document that was read from ``config/``. If neither the file nor ``.bak`` is readable,
    ``value`` and ``path`` are None.
    """

    value: Any
    path: Path | None
    problems: tuple[str, ...]


class ConfigTable(NamedTuple):
    """The name and the codec of a file in ``config/``.

    Attributes:
        decode: converts the bytes of a document to a value; raises ValueError if the document is
            invalid.
        member: the name of one member of the document. A save replaces only this member, and a
            slave copies only this member from its master, because RocketMQ 5 keeps several tables
            in one file. If None, a save replaces the whole document.
        decode_file: replaces ``decode`` for the store's own file, because this file may lack a
            version; None if ``decode`` also decodes the store's own file.
    """

    file: str
    decode: Callable[[bytes], Any]
    encode: Callable[[Any], str]
    member: str | None = None
    decode_file: Callable[[bytes], Any] | None = None


TOPICS: Final = ConfigTable(
    broker_json.TOPICS_FILE,
    broker_json.decode_topic_document,
    broker_json.encode,
    decode_file=partial(broker_json.decode_topic_document, needs_version=False),
)
CONSUMER_OFFSETS: Final = ConfigTable(
    broker_json.CONSUMER_OFFSET_FILE,
    broker_json.decode_consumer_offsets,
    broker_json.encode_consumer_offsets,
    broker_json.OFFSET_TABLE,
)
DELAY_OFFSETS: Final = ConfigTable(
    broker_json.DELAY_OFFSET_FILE,
    broker_json.decode_delay_offsets,
    broker_json.encode_delay_offsets,
    broker_json.OFFSET_TABLE,
)
SUBSCRIPTION_GROUPS: Final = ConfigTable(
    broker_json.SUBSCRIPTION_GROUP_FILE,
    broker_json.decode_subscription_group_document,
    broker_json.encode,
    decode_file=partial(broker_json.decode_subscription_group_document, needs_version=False),
)


class ConfigFile:
    """One file in ``config/``. No other object writes this file. Any thread may call :meth:`save`.

    If :meth:`load` finds that the file or ``.bak`` cannot be read or has an invalid document, the
    first save moves this file to quarantine.
    """

    def __init__(self, disk: Disk, root: Path, table: ConfigTable) -> None:
        self.path = root / CONFIG / table.file
        self._table = table
        self._document: str | None = None
        self._disk = disk
        self._aside = quarantine(root, CONFIG)
        self._saving = threading.Lock()
        self._last: bytes | None = None
        """The bytes of the file; None before the file was read, or if its document is invalid."""
        self._unreadable: list[Path] = []

    @property
    def backup(self) -> Path:
        """Path of the previous document."""
        return self.path.with_name(self.path.name + BACKUP)

    def load(self, *, skips_unopened: bool = False) -> LoadedConfig:
        """Read the file, or ``.bak`` if the file is unreadable. The method changes no file.

        Args:
            skips_unopened: whether to read ``.bak`` also if this process cannot open the file now.

        Raises:
            StoreNotFound: if this process cannot open the file now. Examples are a missing
                permission, no free descriptor, and a network file system that does not answer. The
                file can be sound, so the first save must not move it to quarantine.
        """
        problems: list[str] = []
        self._unreadable.clear()
        for path in (self.path, self.backup):
            try:
                data = read_file(path)
                value = (self._table.decode_file or self._table.decode)(data)
            except FileNotFoundError:
                problems += [problem for problem in _broken_links(path) if problem not in problems]
                continue
            # The store must open even if a document is invalid.
            except (OSError, ValueError, TypeError, RecursionError) as error:
                reason = reason_of(error) if isinstance(error, OSError) else error
                if not skips_unopened and _is_unopened(error):
                    raise StoreNotFound(f"{path}: cannot be read: {reason}") from error
                problems.append(f"{path}: {reason}")
                self._unreadable.append(path)
                continue
            if path == self.path:
                self._last = data
            self._document = data.decode("utf-8") if self._table.member is not None else None
            for problem in problems:
                logger.warning("%s; reading %s instead", problem, path)
            return LoadedConfig(value, path, tuple(problems))
        for problem in problems:
            logger.warning("%s", problem)
        return LoadedConfig(None, None, tuple(problems))

    def save(self, value: Any) -> bool:
        """Write a value durably. Return False if the file already has this value."""
        text = self._table.encode(value)
        with self._saving:
            member = self._table.member
            if member is not None and self._document is not None:
                text = broker_json.replace_member(self._document, member, text)
            # UTF-8 cannot encode a lone surrogate. JSON can contain a lone surrogate only as an
            # escape, so the surrogate is written as an escape.
            data = text.encode("utf-8", "backslashreplace")
            if data == self._last:
                return False
            for path in self._unreadable:
                with self._disk.refusing(path):
                    is_there = exists(path)
                if is_there:
                    self._disk.set_aside(path, self._aside)
            self._unreadable.clear()
            if self._last is not None:
                self._disk.replace(self.backup, self._last)
            self._disk.replace(self.path, data)
            self._last = data
            self._document = text
            return True


_UNREADABLE: Final = ABSENT | {errno.EIO, errno.EISDIR, errno.EINVAL, errno.ENXIO}
"""The errors that show that a file is missing or no plain file, or that the disk cannot read it.
``open`` raises ENXIO for a socket.
"""


def _is_unopened(error: BaseException | None) -> bool:
    # After any other error, the file can be sound. Examples are a missing permission, a limit of
    # the process, and a network file system that does not answer.
    return isinstance(error, OSError) and error.errno not in _UNREADABLE


def _broken_links(path: Path) -> list[str]:
    return [
        f"{place}: it is a link to a missing file or folder"
        for place in (path.parent, path)
        if is_link(place) and not exists(place)
    ]


# --------------------------------------------------------------------------------------------------
# Consumer offsets: ``config/consumerOffset.json`` (``ConsumerOffsetManager``)


class ConsumerOffsets:
    """The committed queue offsets of all consumer groups of a store. Any thread may use the object.

    If ``found`` is None and ``problems`` is not empty, the groups' offsets were lost. In this case
    a caller must not treat these groups as new groups.
    """

    def __init__(
        self, disk: Disk, root: Path, sync_log: Callable[[], object] | None = None
    ) -> None:
        self._sync_log = sync_log
        self._file = ConfigFile(disk, root, CONSUMER_OFFSETS)
        loaded = self._file.load()
        self.found = loaded.path
        self.problems = loaded.problems
        self._lock = threading.Lock()
        self._saving = threading.Lock()
        self._offsets: dict[tuple[str, str], dict[int, int]] = loaded.value or {}
        self._count = sum(map(len, self._offsets.values()))

    def of(self, topic: str, group: str) -> dict[int, int]:
        """Return queue id -> committed queue offset; empty for an unknown group."""
        with self._lock:
            return dict(self._offsets.get((topic, group), {}))

    def groups(self) -> dict[tuple[str, str], dict[int, int]]:
        """Return (topic, group) -> queue id -> committed queue offset."""
        with self._lock:
            return {key: dict(offsets) for key, offsets in self._offsets.items()}

    def commit(
        self, topic: str, group: str, queue_id: int, offset: int, *, most: int | None = None
    ) -> bool:
        """Record the next queue offset of a group, in memory.

        ``most`` is the largest allowed number of offsets in the store. If it is None, there is no
        limit. If the group has no offset in this queue yet, and the limit is already reached,
        record nothing and return False. Otherwise return True.
        """
        key = topic, group
        with self._lock:
            is_new = queue_id not in self._offsets.get(key, ())
            if is_new and most is not None and self._count >= most:
                return False
            self._offsets.setdefault(key, {})[queue_id] = offset
            self._count += is_new
            return True

    def update(self, offsets: Mapping[tuple[str, str], Mapping[int, int]]) -> None:
        """Replace the offsets of some groups, in memory."""
        with self._lock:
            self._offsets |= {key: dict(of_group) for key, of_group in offsets.items()}
            self._count = sum(map(len, self._offsets.values()))

    def remove(self, group: str) -> None:
        """Remove a group's offsets in all topics, in memory."""
        with self._lock:
            for key in [key for key in self._offsets if key[1] == group]:
                self._count -= len(self._offsets.pop(key))

    def save(self) -> bool:
        """Write all committed offsets durably. Return whether the file changed.

        The method syncs the log first, so that after a power cut no saved offset lies after the
        log's last message.
        """
        with self._saving:
            offsets = self.groups()
            if self._sync_log is not None:
                self._sync_log()
            return self._file.save(offsets)


# --------------------------------------------------------------------------------------------------
# The tables that a slave copies from its master (``SlaveSynchronize``)
#
# The code below follows the rules of RocketMQ's slave. If the master's topics or subscription
# groups have another version, the master's table replaces the slave's whole table. The master's
# consumer offsets replace only the offsets of the same groups. The master's delay offsets always
# replace the slave's table.


class ConfigTables:
    """The files in a slave's ``config/``. Any thread may store a table."""

    def __init__(
        self, disk: Disk, root: Path, consumer_offsets: Callable[[], ConsumerOffsets]
    ) -> None:
        self._disk = disk
        self._root = root
        self._consumer_offsets = consumer_offsets
        self._taking = threading.Lock()

    def take(self, table: ConfigTable, document: bytes) -> bool:
        """Store a master's table durably. Return whether a file changed.

        Raises ValueError, without a change, if the document is invalid.
        """
        came = table.decode(document)
        # Encode the table before any write: if the encoding fails, no file has changed.
        table.encode(came)
        with self._taking:
            self._disk.health.require_writable()
            if table is CONSUMER_OFFSETS:
                return self._take_consumer_offsets(came)
            file = ConfigFile(self._disk, self._root, table)
            loaded = file.load()
            if table is not DELAY_OFFSETS and _is_same_version(file, loaded, came):
                return False
            return file.save(came)

    def _take_consumer_offsets(self, came: dict[tuple[str, str], dict[int, int]]) -> bool:
        if not came:
            # The master sent no offsets. If the slave's store has none, too, a save would write a
            # file without offsets. With such a file, existing groups would start like new groups.
            return False
        offsets = self._consumer_offsets()
        offsets.update(came)
        return offsets.save()


def _is_same_version(file: ConfigFile, loaded: LoadedConfig, came: Any) -> bool:
    version = broker_json.DATA_VERSION
    if loaded.value is None or loaded.path != file.path:
        return False
    return bool(loaded.value[version] == came[version])


# --------------------------------------------------------------------------------------------------
# Functions that read the offsets of a store without a writer


def consumer_offsets(
    layout: StoreLayout, level: int = logging.WARNING
) -> dict[tuple[str, str], dict[int, int]]:
    """Read the consumer offsets: (topic, group) -> queue id -> next queue offset; empty if no file
    is readable. Raises StoreNotFound if this process cannot open a file now.

    If the offsets are in RocksDB, raises UsageError if ``rocksdict`` is missing, and CorruptFile if
    the offsets cannot be read. ``level`` is the log level for an invalid file.
    """
    found = offsets_in_rocksdb(layout)
    if found is not None:
        return found
    return _read(layout, CONSUMER_OFFSETS, level) or {}


def offsets_in_rocksdb(layout: StoreLayout) -> dict[tuple[str, str], dict[int, int]] | None:
    """Read consumer offsets from RocksDB; None if the store has no offsets in RocksDB."""
    name = broker_json.CONSUMER_OFFSET_FILE
    if place_of(layout.filesystem, name) is None:
        return None
    return broker_json.decode_consumer_offsets(read_config(layout.filesystem, name))


def delay_offsets(layout: StoreLayout, level: int = logging.WARNING) -> dict[int, int] | None:
    """Read delay level -> next queue offset; None if no file is readable."""
    found: dict[int, int] | None = _read(layout, DELAY_OFFSETS, level)
    return found


def _read(layout: StoreLayout, table: ConfigTable, level: int) -> Any:
    for path in (f"{CONFIG}/{table.file}", f"{CONFIG}/{table.file}{BACKUP}"):
        try:
            return table.decode(layout.filesystem.read(path))
        except FileNotFoundError:
            files = layout.filesystem
            if (wrong := files.why_no_file(CONFIG)) is not None:
                logger.log(level, "%s: it %s", files.full_path(CONFIG), wrong)
                break
            if (wrong := files.why_no_file(path)) is not None:
                logger.log(level, "%s: it %s", files.full_path(path), wrong)
        except StoreNotFound as error:
            if _is_unopened(error.__cause__):
                raise
            # The text of this error begins with the path.
            logger.log(level, "%s", error)
        except (ValueError, TypeError) as error:
            logger.log(level, "%s: %s", layout.filesystem.full_path(path), error)
    return None


def keep_settings(disk: Disk, root: Path, config: StoreConfig) -> None:
    """Call :func:`require_settings`, but only log a warning if the file cannot be written."""
    try:
        require_settings(disk, root, config)
    except StoreUnavailable as error:
        # The store can be used without this file, because readers infer most settings from the
        # store's other files.
        disk.health.require_writable()
        logger.warning("the settings of the store are not recorded: %s", error)


def require_settings(disk: Disk, root: Path, config: StoreConfig) -> None:
    """Write the settings of a store to its settings file, unless the file already has these
    settings. All file sizes in ``config`` must be known.

    Raises StoreUnavailable if this process cannot open the file now: the file may have settings
    that ``config`` lacks.
    """
    path, data = root / SETTINGS, earlier_writers.encode(config)
    try:
        if read_file(path) == data:
            return
    except OSError as error:
        if _is_unopened(error):
            raise StoreUnavailable(f"{path}: cannot be read: {reason_of(error)}") from error
    disk.replace(path, data)
