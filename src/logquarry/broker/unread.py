"""Limits the total size of the answers that the clients of all connections have not read yet."""

from __future__ import annotations

import logging
from typing import Final, Protocol

from logquarry.broker.sparing_log import SparingLog

_closings = SparingLog(logging.getLogger(__name__))

_MOST: Final = 1 << 30
_COUNTED_FROM: Final = 64 << 10
"""A connection with at most this many unread bytes does not count: it is probably reading."""


class Sender(Protocol):
    """A connection that sends answers."""

    address: str

    def unread(self) -> int:
        """Return the number of bytes that wait to be sent."""

    def abort(self) -> None:
        """Close the connection at once."""


class UnreadAnswers:
    """The connections with unread answers. Only the event loop uses this object."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        # Sorted by the time at which the client last read answers, or first had unread answers.
        self._bytes: dict[Sender, int] = {}
        self._total = 0

    def note(self, sender: Sender, count: int) -> None:
        """Record the unread bytes of a connection.

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
            # connection to the end, so that a slow client is not closed before a client that reads
            # nothing.
            del self._bytes[sender]
        if count > _COUNTED_FROM:
            self._bytes[sender] = count
            self._total += count - old
        else:
            self._total -= old

    def _reduce(self) -> None:
        # Some of these clients may have read answers since the last call of note() for them.
        for sender in list(self._bytes):
            self._set(sender, sender.unread())
        while self._total > self._most:
            oldest = next(iter(self._bytes))
            _closings.warning(
                "%s: all clients together have more than %d bytes of answers that they do not "
                "read; the connection is closed, because this client has read nothing for the "
                "longest time",
                *(oldest.address, self._most),
            )
            self._set(oldest, 0)
            oldest.abort()
