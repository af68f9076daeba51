"""Restores files that another program deletes while a store is open."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from logquarry.disk.folders import AbortFile
from logquarry.disk.service import Health, Service
from logquarry.errors import StoreUnavailable
from logquarry.write.index_writer import IndexKeeper

logger = logging.getLogger(__name__)

_WATCH_INTERVAL_MS: Final = 1_000


class Housekeeping(Service):
    """Once a second, restores ``abort`` and index files that another program has deleted.

    If a Java broker opens the same store, its recovery deletes index files. Then the broker fails
    to take the lock, ends, and deletes ``abort``.
    """

    def __init__(
        self,
        abort: AbortFile,
        index: IndexKeeper | None,
        sample: Callable[[], None],
        health: Health,
    ) -> None:
        super().__init__("housekeeping", health, interval_ms=_WATCH_INTERVAL_MS)
        self._abort = abort
        self._index = index
        self._sample = sample

    def run_once(self) -> None:
        """Record the counts of calls, and restore missing files."""
        self._sample()
        if not self._abort.exists:
            logger.warning(
                "%s: another program deleted it while the store was open", self._abort.path
            )
            try:
                self._abort.make()
            except StoreUnavailable as error:
                # Creating it fails if the disk is full. The next run then tries again.
                self.health.require_writable()
                logger.warning("the file abort cannot be restored: %s", error)
        if self._index is not None:
            self._index.check()
