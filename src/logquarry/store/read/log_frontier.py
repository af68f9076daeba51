"""Up to where the log of a store can be followed without a doubt, asked again and again.

For readers who come back for more, and must never have read what turns out to be no message:

- A store of ours: up to its durable mark, whatever stands behind that.
- A store that is being written, or may be: up to the end of the last whole frame of the chain. A
  frame that is not whole yet is looked at again the next time.
- A store that was not closed in order and that nobody writes: up to the end of its last frame.
- A store that was closed in order: as far as its queues say, and its chain goes on from there.

An answer costs what was written since the one before, and a listing of the log's folder.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from logquarry.files.filesystem import LocalFileSystem
from logquarry.files.layout import StoreFile, StoreLayout
from logquarry.scan.splits import log_extent
from logquarry.scan.walk import LogReader
from logquarry.store.read.log_bound import (
    consume_queues,
    last_entries,
    last_file_start,
    sound_bound,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Closed:
    """What a closed store's files looked like, and where its log ended then."""

    files: tuple[StoreFile, ...]
    checkpoint: object
    end: int


class LogFrontier:
    """Follows one log; :meth:`end_of` answers anew each time.

    Args:
        skips_damage: whether reading goes on behind damage. The end of a closed log is then the
            first break in its last file, for that is where RocketMQ would cut it.
    """

    def __init__(self, *, skips_damage: bool = False) -> None:
        self._skips_damage = skips_damage
        self._end = 0
        self._closed: _Closed | None = None
        self._searched: int | None = None

    def end_of(self, layout: StoreLayout, known: int | None = None) -> int:
        """Where the log ends, at the end of a frame, of a blank or of damage.

        Args:
            layout: the store's files as they are now.
            known: an offset up to which the log was followed before, by anyone.
        """
        log = layout.commit_log
        if not log.files:
            return log.start
        durable = layout.durable_end
        if durable is not None:
            return max(log.start, min(durable, log.end))
        is_live = layout.is_live()
        if not layout.has_abort and not is_live:
            end = self._end_of_closed(layout)
            if end is not None:
                return end
        self._end = self._chain_end(layout, max(known or 0, self._end), is_live=is_live)
        return self._end

    def _end_of_closed(self, layout: StoreLayout) -> int | None:
        """None where no queue says anything."""
        files = layout.commit_log.files
        try:
            checkpoint: object = layout.read_checkpoint()
        except ValueError:
            checkpoint = None
        seen = self._closed
        if (
            seen is not None
            and (seen.files, seen.checkpoint) == (files, checkpoint)
            # Files of a backup may change in place.
            and _follow(LogReader(layout), seen.end) == seen.end
        ):
            return seen.end
        entries = last_entries(layout, consume_queues(layout))
        if not entries:
            return None
        bound = entries[0].physical_offset + entries[0].size
        end: int | None = log_extent(layout, bound, bound).stop
        if self._skips_damage:
            end = sound_bound(layout, end)
        assert end is not None
        self._closed = _Closed(files, checkpoint, end)
        return end

    def _chain_end(self, layout: StoreLayout, known: int, *, is_live: bool) -> int:
        log = layout.commit_log
        reader = LogReader(layout, live=True)
        # What comes before the last file with a frame is there, or is damage: whoever reads it will
        # see. So a start far behind is not walked up from.
        start = last_file_start(layout)
        start = log.start if start is None else start
        at = known if start <= known < log.end else start
        while (end := _follow(reader, at)) == start and known < start and start > log.start:
            start = max(file.base for file in log.files if file.base < start)
            at = max(start, known)
        # Other machines' locks are not seen from here.
        if is_live or not isinstance(layout.filesystem, LocalFileSystem):
            if end == self._end and end != self._searched:
                self._searched = end
                self._warn(reader, end)
            return end
        while end != self._searched and (found := reader.find(end + 1, log.end)) is not None:
            end = _follow(reader, found)
        self._searched = end
        return end

    def _warn(self, reader: LogReader, end: int) -> None:
        """Tell of sound frames behind the end of a chain that stands still.

        They may be what RocketMQ's own recovery cut off, in memory only; to tell it from damage
        takes a file that was begun behind this one, and then it is read as damage.
        """
        found = reader.find(end + 1, reader.files.end)
        if found is not None:
            logger.warning(
                "%s: at offset %d: no frame, and sound ones from %d on: waiting for what the "
                "store's writer makes of it",
                reader.layout.log_path(end),
                end,
                found,
            )


def _follow(reader: LogReader, start: int) -> int:
    end = start
    for event in reader.chain(start):
        end = event.end
    return end
