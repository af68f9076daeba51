"""How far each group has come in each queue: ``config/consumerOffset.json``.

One table for everybody who keeps such progress: consumers, and the checks of transactions
(``ConsumerOffsetManager``). What is committed is in memory; :meth:`ConsumerOffsets.save` brings it
to the disk.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from logquarry.files.layout import CONFIG, quarantine
from logquarry.format import broker_config
from logquarry.store.disk.config_file import ConfigFile
from logquarry.store.disk.disk import Disk


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
