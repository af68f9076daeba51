"""What a store that is written looks after once a second: that nobody took its files away.

A Java store that is opened on this one is refused by the lock, but only after it has acted
(reliability.md, rule 1): closing again it takes ``abort`` away, and index files before that.
"""

from __future__ import annotations

import logging
from typing import Final

from logquarry.disk.locks import AbortFile
from logquarry.disk.service import Health, Service
from logquarry.errors import StoreUnavailable
from logquarry.store.stats import StatsRecorder
from logquarry.write.index_writer import IndexKeeper

logger = logging.getLogger(__name__)

_INTERVAL_MS: Final = 1_000


class Housekeeping(Service):
    """Looks after ``abort`` and the index, and notes the counts for the rates."""

    def __init__(
        self,
        abort: AbortFile,
        index: IndexKeeper | None,
        recorder: StatsRecorder,
        health: Health,
    ) -> None:
        super().__init__("housekeeping", health, interval_ms=_INTERVAL_MS)
        self._abort = abort
        self._index = index
        self._recorder = recorder

    def run_once(self) -> None:
        """Look."""
        self._recorder.sample()
        if not self._abort.exists:
            logger.warning("%s: somebody deleted it while the store was open", self._abort.path)
            try:
                self._abort.make()
            except StoreUnavailable as error:
                # With a full disk, say: the next look tries again.
                self.health.require_writable()
                logger.warning("it cannot be made anew: %s", error)
        if self._index is not None:
            self._index.check()
