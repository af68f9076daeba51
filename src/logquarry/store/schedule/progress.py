"""How far each delay level was delivered: ``config/delayOffset.json``, and a mark beside it.

The file is RocketMQ's, and says what RocketMQ's says: the next queue offset of each level. It is
written now and then only, so that after a crash it is behind. The mark (``.logquarry/delay.json``)
says up to where the log was known when the file was written: what was delivered since stands
behind that place, and can be found there. It counts only together with the file that it was
written for, and is of no use once another program has written that: then there is none.

Order: the log is synced, then the mark is written (with the one before, which is good until the
file is there), then the file. So the file never says of a delivery that the log may lose.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from logquarry.files.layout import CONFIG, SIDECAR, quarantine
from logquarry.format import broker_config
from logquarry.store.disk.config_file import ConfigFile
from logquarry.store.disk.disk import Disk

logger = logging.getLogger(__name__)

MARK_FILE: Final = "delay.json"
UNKNOWN: Final = -1
_FAR: Final = 64 << 20
"""Bytes of the log after which the mark is moved, though nothing was delivered."""


class Progress(NamedTuple):
    """How far delivery has come.

    Attributes:
        offsets: delay level -> next queue offset of its queue in the schedule topic.
        position: physical offset before which all those deliveries stand in the log, and behind
            which all others; UNKNOWN where nothing tells.
    """

    offsets: dict[int, int]
    position: int


class DelayProgress:
    """The two files of one store.

    Args:
        disk: what they are on.
        root: the store.
        sync_log: brings the log to the disk.
    """

    def __init__(self, disk: Disk, root: Path, sync_log: Callable[[], object]) -> None:
        self._disk = disk
        self._sync_log = sync_log
        self._file = ConfigFile(
            disk,
            root / CONFIG / broker_config.DELAY_OFFSET_FILE,
            broker_config.decode_delay_offsets,
            broker_config.encode_delay_offsets,
            aside=quarantine(root, CONFIG),
        )
        self._mark_path = root / SIDECAR / MARK_FILE
        self._saved: Progress | None = None
        """What the file says, with the place that belongs to it."""

    def load(self) -> Progress | None:
        """What was saved, None if nothing was.

        Where the file is lost or cannot be read, the mark tells the same.
        """
        loaded = self._file.load()
        marks = self._read_marks()
        if loaded.value is None:
            return marks[-1] if marks else None
        for mark in reversed(marks):
            if mark.offsets == loaded.value:
                self._saved = mark
                return mark
        return Progress(loaded.value, UNKNOWN)

    def save(self, progress: Progress) -> bool:
        """Write both files, durably; whether there was anything to write.

        Raises:
            StoreUnavailable: if that cannot be done; then what was saved before still counts.
        """
        saved = self._saved
        is_known = saved is not None and saved.offsets == progress.offsets
        # A place behind the log's end is of a log that was cut since.
        if saved is not None and is_known and 0 <= progress.position - saved.position < _FAR:
            return False
        self._sync_log()
        marks = [progress] if saved is None else [saved, progress]
        self._disk.replace(self._mark_path, _encode(marks))
        self._file.save(progress.offsets)
        self._saved = progress
        return True

    def _read_marks(self) -> list[Progress]:
        try:
            return _decode(self._mark_path.read_bytes())
        except FileNotFoundError:
            return []
        except (OSError, LookupError, ValueError, TypeError, AttributeError) as error:
            logger.warning("%s: %s: what it says does not count", self._mark_path, error)
            return []


def _encode(marks: list[Progress]) -> bytes:
    document = [{"position": mark.position, "offsets": mark.offsets} for mark in marks]
    return json.dumps(document).encode()


def _decode(data: bytes) -> list[Progress]:
    return [Progress(_offsets(mark["offsets"]), int(mark["position"])) for mark in json.loads(data)]


def _offsets(table: Mapping[str, Any]) -> dict[int, int]:
    return {int(level): int(offset) for level, offset in table.items()}
