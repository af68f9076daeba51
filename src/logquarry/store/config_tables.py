"""The tables of ``config/`` that a slave has of its master (``SlaveSynchronize``).

As RocketMQ's slave takes them: topics and subscription groups as a whole, where their version is
another one; consumer offsets group by group, over those that are there; delay progress as a whole.
What cannot be read replaces nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from logquarry.files.layout import CONFIG, quarantine
from logquarry.format import broker_config, fastjson
from logquarry.store.disk.config_file import ConfigFile, LoadedConfig
from logquarry.store.disk.consumer_offsets import ConsumerOffsets
from logquarry.store.disk.disk import Disk


class ConfigTable(NamedTuple):
    """One of them.

    Attributes:
        file: its name in ``config/``.
        decode: reads the document; raises ValueError where it is none.
        encode: the document of what was read.
    """

    file: str
    decode: Callable[[bytes], Any]
    encode: Callable[[Any], str]


TOPICS: Final = ConfigTable(
    broker_config.TOPICS_FILE, broker_config.decode_topic_document, fastjson.encode
)
CONSUMER_OFFSETS: Final = ConfigTable(
    broker_config.CONSUMER_OFFSET_FILE,
    broker_config.decode_consumer_offsets,
    broker_config.encode_consumer_offsets,
)
DELAY_OFFSETS: Final = ConfigTable(
    broker_config.DELAY_OFFSET_FILE,
    broker_config.decode_delay_offsets,
    broker_config.encode_delay_offsets,
)
SUBSCRIPTION_GROUPS: Final = ConfigTable(
    broker_config.SUBSCRIPTION_GROUP_FILE,
    broker_config.decode_subscription_group_document,
    fastjson.encode,
)


def config_file(disk: Disk, root: Path, table: ConfigTable) -> ConfigFile[Any]:
    """The file of a table in a store."""
    return ConfigFile(
        disk, root / CONFIG / table.file, table.decode, table.encode, aside=quarantine(root, CONFIG)
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
