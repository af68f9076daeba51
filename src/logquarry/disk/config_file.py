"""A small document in ``config/`` that is written again and again (``ConfigManager``).

RocketMQ writes such a file without a sync, and in steps between which there is none. Here the file
is replaced by a rename after its bytes are on the disk, and what it said before is kept as
``.bak``, where RocketMQ looks too: at any moment, and after any power cut, one of the two can be
read.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, NamedTuple, TypeVar

from logquarry.disk.disk import Disk
from logquarry.errors import StoreNotFound
from logquarry.format import broker_config, fastjson
from logquarry.log.layout import CONFIG, StoreLayout, quarantine

logger = logging.getLogger(__name__)

T = TypeVar("T")

BACKUP = ".bak"


@dataclass(frozen=True, slots=True)
class LoadedConfig(Generic[T]):
    """What a file in ``config/`` was found to say.

    Attributes:
        value: that; None where there is none, or nothing that can be read.
        path: the file that said it, None likewise.
        problems: what is wrong with each file that could not be read, with its name.
    """

    value: T | None
    path: Path | None
    problems: tuple[str, ...]


class ConfigFile(Generic[T]):
    """One file of ``config/``, which only this object writes. Any thread may save.

    Args:
        disk: what it is on.
        path: where it is; its folder is made when it is first saved.
        decode: reads the document; raises ValueError where it is none.
        encode: the document of a value.
        aside: folder for a file that cannot be read, before the first save takes its name.
        member: the one member of the document that ``encode`` writes. All others that are in the
            file stay in it: RocketMQ 5 has a version and more tables there.
    """

    def __init__(
        self,
        disk: Disk,
        path: Path,
        decode: Callable[[bytes], T],
        encode: Callable[[T], str],
        *,
        aside: Path,
        member: str | None = None,
    ) -> None:
        self.path = path
        self._member = member
        self._document: str | None = None
        """What was read or saved, of which all but that member stays."""
        self._disk = disk
        self._decode = decode
        self._encode = encode
        self._aside = aside
        self._saving = threading.Lock()
        self._last: bytes | None = None
        """What the file holds, where that is a document."""
        self._unreadable: list[Path] = []

    @property
    def backup(self) -> Path:
        """Where the document before the last one is kept."""
        return self.path.with_name(self.path.name + BACKUP)

    def load(self) -> LoadedConfig[T]:
        """Read the file, or ``.bak`` where it cannot be read. Nothing is changed."""
        problems: list[str] = []
        self._unreadable.clear()
        for path in (self.path, self.backup):
            try:
                data = path.read_bytes()
                value = self._decode(data)
            except FileNotFoundError:
                continue
            # The decoders check what they read, but no document is worth a store that stays shut.
            except (OSError, ValueError, TypeError, RecursionError) as error:
                problems.append(f"{path}: {error}")
                self._unreadable.append(path)
                continue
            if path == self.path:
                self._last = data
            self._document = data.decode("utf-8") if self._member is not None else None
            for problem in problems:
                logger.warning("%s; %s is read instead", problem, path)
            return LoadedConfig(value, path, tuple(problems))
        for problem in problems:
            logger.warning("%s", problem)
        return LoadedConfig(None, None, tuple(problems))

    def save(self, value: T) -> bool:
        """Write a value, durably; nothing is written where the file says that already.

        Returns:
            Whether something was written.

        Raises:
            StoreUnavailable: if that cannot be done; then what was saved before is still there.
        """
        text = self._encode(value)
        with self._saving:
            if self._member is not None and self._document is not None:
                text = fastjson.replace_member(self._document, self._member, text)
            # A surrogate alone is read from an escape, and goes back into one: it has no bytes.
            data = text.encode("utf-8", "backslashreplace")
            if data == self._last:
                return False
            for path in self._unreadable:
                if path.exists():
                    self._disk.set_aside(path, self._aside)
            self._unreadable.clear()
            if self._last is not None:
                self._disk.replace(self.backup, self._last)
            self._disk.replace(self.path, data)
            self._last = data
            self._document = text
            return True


# --------------------------------------------------------------------------------------------------
# How far each group has come in each queue: ``config/consumerOffset.json``.
#
# One table for everybody who keeps such progress: consumers, and the checks of transactions
# (``ConsumerOffsetManager``). What is committed is in memory; :meth:`ConsumerOffsets.save` brings
# it to the disk.


class ConsumerOffsets:
    """The offsets of all groups of one store. Any thread may use it.

    Args:
        disk: what the file is on.
        root: the store.
        sync_log: brings the log to the disk; None where nothing is saved, or nobody writes it.

    Attributes:
        found: the file that was read, None where there was none that can be read.
        problems: what is wrong with each file that could not be read. A store whose consumers
            have a past that nobody can read is not one whose consumers start anew.
    """

    def __init__(
        self, disk: Disk, root: Path, sync_log: Callable[[], object] | None = None
    ) -> None:
        self._sync_log = sync_log
        self._file = ConfigFile(
            disk,
            root / CONFIG / broker_config.CONSUMER_OFFSET_FILE,
            broker_config.decode_consumer_offsets,
            broker_config.encode_consumer_offsets,
            aside=quarantine(root, CONFIG),
            member=broker_config.OFFSET_TABLE,
        )
        loaded = self._file.load()
        self.found = loaded.path
        self.problems = loaded.problems
        self._lock = threading.Lock()
        self._saving = threading.Lock()
        self._offsets = loaded.value if loaded.value is not None else {}

    def of(self, topic: str, group: str) -> dict[int, int]:
        """Queue id -> next queue offset, as committed; none for a group that never was."""
        with self._lock:
            return dict(self._offsets.get((topic, group), {}))

    def groups(self) -> dict[tuple[str, str], dict[int, int]]:
        """(topic, group) -> the same, of all."""
        with self._lock:
            return {key: dict(offsets) for key, offsets in self._offsets.items()}

    def commit(self, topic: str, group: str, queue_id: int, offset: int) -> None:
        """Note, in memory, which queue offset is next."""
        with self._lock:
            self._offsets.setdefault((topic, group), {})[queue_id] = offset

    def update(self, offsets: Mapping[tuple[str, str], Mapping[int, int]]) -> None:
        """Have, in memory, the offsets of some groups in place of those that they had.

        Args:
            offsets: (topic, group) -> queue id -> next queue offset.
        """
        with self._lock:
            self._offsets |= {key: dict(of_group) for key, of_group in offsets.items()}

    def save(self) -> bool:
        """Write all that was committed, durably; whether there was something to write.

        The log is brought to the disk before, for what is committed by then: no offset on the disk
        leaves a message behind that a power cut could take.

        Raises:
            StoreUnavailable: if that cannot be done; then what was saved before is still there.
        """
        with self._saving:
            offsets = self.groups()
            if self._sync_log is not None:
                self._sync_log()
            return self._file.save(offsets)


# --------------------------------------------------------------------------------------------------
# The tables of ``config/`` that a slave has of its master (``SlaveSynchronize``).
#
# As RocketMQ's slave takes them: topics and subscription groups as a whole, where their version is
# another one; consumer offsets group by group, over those that are there; delay progress as a
# whole. What cannot be read replaces nothing.


class ConfigTable(NamedTuple):
    """One of them.

    Attributes:
        file: its name in ``config/``.
        decode: reads the document; raises ValueError where it is none.
        encode: the document of what was read.
        member: the one member that is taken; None for the whole document.
    """

    file: str
    decode: Callable[[bytes], Any]
    encode: Callable[[Any], str]
    member: str | None = None


TOPICS: Final = ConfigTable(
    broker_config.TOPICS_FILE, broker_config.decode_topic_document, fastjson.encode
)
CONSUMER_OFFSETS: Final = ConfigTable(
    broker_config.CONSUMER_OFFSET_FILE,
    broker_config.decode_consumer_offsets,
    broker_config.encode_consumer_offsets,
    broker_config.OFFSET_TABLE,
)
DELAY_OFFSETS: Final = ConfigTable(
    broker_config.DELAY_OFFSET_FILE,
    broker_config.decode_delay_offsets,
    broker_config.encode_delay_offsets,
    broker_config.OFFSET_TABLE,
)
SUBSCRIPTION_GROUPS: Final = ConfigTable(
    broker_config.SUBSCRIPTION_GROUP_FILE,
    broker_config.decode_subscription_group_document,
    fastjson.encode,
)


def config_file(disk: Disk, root: Path, table: ConfigTable) -> ConfigFile[Any]:
    """The file of a table in a store."""
    return ConfigFile(
        disk,
        root / CONFIG / table.file,
        table.decode,
        table.encode,
        aside=quarantine(root, CONFIG),
        member=table.member,
    )


class ConfigTables:
    """The tables of a slave's store. Any thread may bring them.

    Args:
        disk: what the store is on.
        root: its folder.
        consumer_offsets: gives the offsets that the store's own consumers go on with.
    """

    def __init__(
        self, disk: Disk, root: Path, consumer_offsets: Callable[[], ConsumerOffsets]
    ) -> None:
        self._disk = disk
        self._root = root
        self._consumer_offsets = consumer_offsets
        self._taking = threading.Lock()

    def take(self, table: ConfigTable, document: bytes) -> bool:
        """Have what a master's table says, durably; whether anything was written.

        Raises:
            ValueError: if the document is none of that table; nothing is changed.
            StoreUnavailable: if it cannot be written; then what was there is there still.
        """
        came = table.decode(document)
        # What cannot be encoded is to be found before a file is touched, too.
        table.encode(came)
        with self._taking:
            self._disk.health.require_writable()
            if table is CONSUMER_OFFSETS:
                return self._take_consumer_offsets(came)
            file = config_file(self._disk, self._root, table)
            loaded = file.load()
            if table is not DELAY_OFFSETS and _is_same_version(file, loaded, came):
                return False
            return file.save(came)

    def _take_consumer_offsets(self, came: dict[tuple[str, str], dict[int, int]]) -> bool:
        if not came:
            # A file that says nothing would say of groups whose offsets are lost that they are new.
            return False
        offsets = self._consumer_offsets()
        offsets.update(came)
        return offsets.save()


def _is_same_version(file: ConfigFile[Any], loaded: LoadedConfig[Any], came: Any) -> bool:
    version = broker_config.DATA_VERSION
    if loaded.value is None or loaded.path != file.path:
        return False
    return bool(loaded.value[version] == came[version])


# --------------------------------------------------------------------------------------------------
# How far consumers and deliveries are, as the files in ``config/`` of any store say.
#
# Read by whoever tells of it; who consumes or delivers keeps these files
# (:mod:`logquarry.disk.config_file`).


def consumer_offsets(
    layout: StoreLayout, level: int = logging.WARNING
) -> dict[tuple[str, str], dict[int, int]]:
    """(topic, group) -> queue id -> next queue offset; empty where no file tells.

    Args:
        layout: the store's files.
        level: at which it is logged that a file cannot be understood.
    """
    decode = broker_config.decode_consumer_offsets
    return _read(layout, broker_config.CONSUMER_OFFSET_FILE, decode, level) or {}


def delay_offsets(layout: StoreLayout, level: int = logging.WARNING) -> dict[int, int] | None:
    """Delay level -> next queue offset of its queue; None where no file tells.

    Args:
        layout: the store's files.
        level: at which it is logged that the file cannot be understood.
    """
    decode = broker_config.decode_delay_offsets
    return _read(layout, broker_config.DELAY_OFFSET_FILE, decode, level)


def _read(layout: StoreLayout, name: str, decode: Callable[[bytes], T], level: int) -> T | None:
    # The one before it is read where it cannot be, as by those who keep them.
    for path in (f"{CONFIG}/{name}", f"{CONFIG}/{name}{BACKUP}"):
        try:
            return decode(layout.filesystem.read(path))
        except (FileNotFoundError, StoreNotFound):
            continue
        except (ValueError, TypeError) as error:
            logger.log(level, "%s: %s", layout.filesystem.full_path(path), error)
    return None
