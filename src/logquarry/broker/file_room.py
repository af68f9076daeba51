"""Refuses connections, and messages for new queues, before the process reaches its limit of open
files.

Without these checks, the dispatcher could not open the files of a queue. The store would then
refuse all messages until its next opening.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from logquarry.protocol.remoting_codes import Refused, ResponseCode
from logquarry.systems import file_limit
from logquarry.text import counted

QueueKey = tuple[str, int]

_OPEN_FILES: Final = Path("/proc/self/fd")
_FILES_OF_QUEUE: Final = 2
"""A queue with one file has at most this many open files."""


def is_near_limit(number: int) -> bool:
    """Whether the number of an open file is in the last eighth of the allowed numbers."""
    # A new file or socket gets the lowest free number. The broker closes each new socket whose
    # number is in the last eighth, so that the store can use these numbers for its files.
    return number > file_limit() // 8 * 7


def _open_files() -> int:
    """Count the open files of this process.

    Before Linux 6.2, and on other systems, the result is the lowest free number. This result is too
    low if a file was closed while files with higher numbers stay open.
    """
    # From Linux 6.2 on, the size of this folder is the number of open files; before, it is 0. To
    # count the folder's entries would take milliseconds if thousands of files are open.
    with suppress(OSError):
        count = _OPEN_FILES.stat().st_size
        if count:
            return count
    return _next_number()


def _next_number() -> int:
    """Return the number that the next opened file would get; the limit if no file can be opened."""
    try:
        descriptor = os.open(os.devnull, os.O_RDONLY)
    except OSError:
        return file_limit()
    os.close(descriptor)
    return descriptor


class NewQueues:
    """The queues whose files are open, and the new queues whose files will soon be opened.

    Only the event loop uses this object.
    """

    def __init__(self) -> None:
        self._known: set[QueueKey] = set()
        self._awaited: set[QueueKey] = set()
        """New queues to which a message was sent, but whose files are not open yet. This can take
        hours: until a delayed message is delivered, or until a transaction is committed.
        """

    def require_room(self, topic: str, queue_id: int) -> None:
        """Raise Refused for a new queue if the process has three quarters of the allowed files
        open.

        The log, the index, the known queues and the connections use the rest.
        """
        key = topic, queue_id
        if key in self._known or key in self._awaited:
            return
        most = file_limit()
        if _open_files() + _FILES_OF_QUEUE * (len(self._awaited) + 1) > most * 3 // 4:
            raise Refused(
                f"the message for queue {queue_id} of {topic[:200]!r} is refused: a new queue "
                f"needs open files, and the broker may have {counted(most, 'open file')} (ulimit "
                f"-n). It has {counted(len(self._known) + len(self._awaited), 'queue')} in use. "
                "Raise the limit, or use fewer queues",
                ResponseCode.NO_PERMISSION,
            )
        self._awaited.add(key)

    def opened(self, key: QueueKey) -> None:
        """Record that a dispatch or a read has opened the files of a queue."""
        if key not in self._known:
            self._known.add(key)
            self._awaited.discard(key)

    def failed(self, topic: str, queue_id: int) -> None:
        """Record that the message for a new queue was not put, so no files of the queue will be
        opened.
        """
        self._awaited.discard((topic, queue_id))
