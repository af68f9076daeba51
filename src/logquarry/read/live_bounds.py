"""The first and last queue offset of a queue that this process writes. The module is compiled if
possible.
"""

from __future__ import annotations

from logquarry.disk.file_place import FilePlace, LastFile
from logquarry.format.queue_entry import UNIT_SIZE

_UNIT = UNIT_SIZE


class LiveBounds:
    """The base class of :class:`~logquarry.read.live_read.LiveQueue`.

    Attributes:
        _files: the queue's files.
        _log: the log's files.
        _low: the list of the queue's files, the list of the log's files, and the min offset that
            was computed for these lists. A deletion of files replaces a list by a new list, so a
            changed list is recognized by its identity.
    """

    _files: LastFile
    _log: LastFile
    _low: tuple[object, object, int]

    def bounds(self) -> tuple[int, int]:
        """See :meth:`~logquarry.read.queue.Queue.bounds`."""
        files = self._files
        of_files, of_log, low = self._low
        if of_files is not files.bases or of_log is not self._log.bases:
            low = self._find_low()
        last: FilePlace | None = files.last
        # The max offset is the position of the last write. Every written entry can be read at once,
        # because queues, unlike the log, have no transient store pool.
        return low, 0 if last is None else (last.base + last.wrote) // _UNIT

    def _find_low(self) -> int:
        raise NotImplementedError
