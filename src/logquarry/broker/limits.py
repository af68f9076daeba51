"""Limits that protect the broker from its clients: log lines, unread answers, and open files.

Without the limit of open files, the dispatcher could not open the files of a queue. The store would
then refuse all messages until its next opening. So the broker refuses connections, and messages for
new queues, before the process reaches its limit of open files.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import traceback
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

from logquarry.format import properties as props
from logquarry.protocol.remoting_codes import Refused, ResponseCode
from logquarry.systems import file_limit
from logquarry.text import counted

_INTERVAL_SECONDS: Final = 10.0
_MOST_LINES: Final = 5


class SparingLog:
    """Logs at most 5 lines in 10 seconds.

    Before the next line, it logs how many lines it left out. Thread-safe.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._until = 0.0
        self._lines = 0
        self._lock = threading.Lock()

    def warning(self, message: str, *values: object) -> None:
        """Log one line, or count it as left out."""
        now, left_out = time.monotonic(), 0
        with self._lock:
            if now >= self._until:
                left_out = max(0, self._lines - _MOST_LINES)
                self._until, self._lines = now + _INTERVAL_SECONDS, 0
            self._lines += 1
            is_logged = self._lines <= _MOST_LINES
        if left_out:
            lines = counted(left_out, "similar line was", "similar lines were")
            self._logger.warning("%s left out", lines)
        if is_logged:
            self._logger.warning(message, *values)


def line_of(error: BaseException) -> str:
    """Format an exception as one line, with the file and line at which it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{error!r}{where}"


_closings = SparingLog(logging.getLogger(__name__))

_MOST_UNREAD: Final = 1 << 30
_COUNTED_FROM: Final = 64 << 10
"""A connection with at most this many unread bytes is not counted: its client is probably reading.
"""


class Sender(Protocol):
    """A connection that sends answers."""

    address: str

    def unread(self) -> int:
        """Return the number of bytes that wait to be sent."""

    def abort(self) -> None:
        """Close the connection at once."""


class UnreadAnswers:
    """The connections with unread answers. Only the event loop uses this object."""

    def __init__(self, most: int = _MOST_UNREAD) -> None:
        self._most = most
        # Sorted by the time at which the client last read answers, or first had unread answers.
        self._bytes: dict[Sender, int] = {}
        self._total = 0

    def note(self, sender: Sender, count: int) -> None:
        """Record how many bytes the client of a connection has not read yet.

        If all connections together have too many unread bytes, close the connections whose clients
        have read nothing for the longest time.
        """
        self._set(sender, count)
        if self._total > self._most:
            self._reduce()

    def _set(self, sender: Sender, count: int) -> None:
        old = self._bytes.get(sender, 0)
        if count < old:
            # The client has read answers. If the client still has unread answers, move its
            # connection to the end of ``_bytes``, so that a slow client is not closed before a
            # client that reads nothing.
            del self._bytes[sender]
        if count > _COUNTED_FROM:
            self._bytes[sender] = count
            self._total += count - old
        else:
            self._total -= old

    def _reduce(self) -> None:
        # Clients may have read answers since the last call of note() for their connections.
        for sender in list(self._bytes):
            self._set(sender, sender.unread())
        while self._total > self._most:
            oldest = next(iter(self._bytes))
            _closings.warning(
                "%s: the connection is closed. All clients together have more than %d bytes of "
                "unread answers, and this client has read nothing for the longest time",
                *(oldest.address, self._most),
            )
            self._set(oldest, 0)
            oldest.abort()


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
    low if a file was closed and files with higher numbers are still open.
    """
    # From Linux 6.2 on, the size of this folder is the number of open files; before, it is 0. To
    # count the folder's entries would take milliseconds if thousands of files are open.
    with suppress(OSError):
        count = _OPEN_FILES.stat().st_size
        if count:
            return count
    return _next_number()


def _next_number() -> int:
    """Return the number that the next opened file would get. If no file can be opened, return the
    limit.
    """
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
        self._awaited: Counter[QueueKey] = Counter()
        """For each new queue whose files are not open yet, the number of messages that were sent to
        it. The files may be opened only hours later, when a delayed message is delivered or a
        transaction is committed.
        """

    def awaits_any(self) -> bool:
        """Whether there is a new queue to which a message was sent."""
        return bool(self._awaited)

    def require_room(self, topic: str, queue_id: int) -> None:
        """Raise Refused for a new queue if the process has three quarters of the allowed files
        open.

        The log, the index, the known queues and the connections use the rest.
        """
        key = topic, queue_id
        if key in self._known:
            return
        if key in self._awaited:
            self._awaited[key] += 1
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
        self._awaited[key] = 1

    def opened(self, key: QueueKey) -> None:
        """Record that a dispatch or a read has opened the files of a queue."""
        if key not in self._known:
            self._known.add(key)
            self._awaited.pop(key, None)

    def failed(self, topic: str, queue_id: int) -> None:
        """Record that a message for a new queue was not put. If there is no other message for the
        queue, no files of the queue will be opened.
        """
        key = topic, queue_id
        if self._awaited.get(key, 0) > 1:
            self._awaited[key] -= 1
        else:
            self._awaited.pop(key, None)

    def rolled_back(self, half: Mapping[str, str]) -> None:
        """Record that a transaction was rolled back. ``half`` has the properties of the half
        message. They name the queue to which a commit would have put the message.
        """
        queue_id = props.parse_int(half.get(props.REAL_QUEUE_ID, ""))
        if queue_id is not None:
            self.failed(half.get(props.REAL_TOPIC, ""), queue_id)
