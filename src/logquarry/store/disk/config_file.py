"""A small document in ``config/`` that is written again and again (``ConfigManager``).

RocketMQ writes such a file without a sync, and in steps between which there is none. Here the file
is replaced by a rename after its bytes are on the disk, and what it said before is kept as
``.bak``, where RocketMQ looks too: at any moment, and after any power cut, one of the two can be
read.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from logquarry.store.disk.disk import Disk

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
    """

    def __init__(
        self,
        disk: Disk,
        path: Path,
        decode: Callable[[bytes], T],
        encode: Callable[[T], str],
        *,
        aside: Path,
    ) -> None:
        self.path = path
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
        # A surrogate alone is read from an escape, and goes back into one: it has no bytes.
        data = self._encode(value).encode("utf-8", "backslashreplace")
        with self._saving:
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
            return True
