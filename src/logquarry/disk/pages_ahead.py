"""Loads the pages of the log that puts write next, so that a put does not wait for page faults.

The first write to a page costs a page fault: about half of the time of a put in a batch. This
service takes the faults in its thread, many at once (``MADV_POPULATE_WRITE``, Linux 5.14; elsewhere
it does nothing). The pages stay zero until a put writes them.

A flush also writes the loaded pages that no put has used. So the service loads few if puts are
rare, and a store does not use it if each put waits for a flush.
"""

from __future__ import annotations

from mmap import PAGESIZE
from typing import Final

from logquarry.disk.mapped_file import MappedFile
from logquarry.disk.mapped_file_queue import MappedFileQueue
from logquarry.disk.open_files import populate
from logquarry.disk.service import Health, Service

_LEAST: Final = 256 << 10
_MOST: Final = 8 << 20
_RUNS_AHEAD: Final = 4


class PagesAhead(Service):
    """Loads pages after the log's end.

    Args:
        log: the log's files. Puts write to their maps, not to a pool's buffers.
        health: the store's health.
    """

    def __init__(self, log: MappedFileQueue, health: Health) -> None:
        super().__init__("pages ahead", health, interval_ms=None)
        self._log = log
        self._file: MappedFile | None = None
        self._seen = 0
        self._loaded = 0
        self._refill = 0
        self._is_possible = True

    def grown(self) -> None:
        """Load pages if few are left; called when the log has grown, in any thread."""
        file = self._log.last
        if file is None or not self._is_possible:
            return
        if file is not self._file or file.wrote + self._refill > self._loaded:
            self.wakeup()

    def run_once(self) -> None:
        """Load the pages of the next puts."""
        file = self._log.last
        address = 0 if file is None else file.address
        if file is None or not address or not self._is_possible:
            # If the address is 0, puts do not write to the map.
            return
        wrote = file.wrote
        if file is not self._file:
            self._file, self._seen, self._loaded = file, wrote, 0
        ahead = min(_MOST, max(_LEAST, _RUNS_AHEAD * (wrote - self._seen)))
        self._seen, self._refill = wrote, ahead // 2
        start = max(self._loaded, wrote) // PAGESIZE * PAGESIZE
        stop = min(file.size, wrote + ahead)
        # While the view exists, a close in another thread does not unmap the pages.
        pages = file.buffer[start:stop]
        if pages:
            # If the disk is full or fails, pages cannot be loaded. The next put reports the reason.
            self._is_possible = populate(address + start, len(pages))
        self._loaded = stop
        if stop == file.size:
            self._refill = 0
