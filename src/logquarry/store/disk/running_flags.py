"""What keeps a store from taking messages, or anything else does (``RunningFlags``).

Reads go on whatever stands here.
"""

from __future__ import annotations

import threading
from enum import Enum


class Refusal(Enum):
    """Why a store takes no messages: what is wrong, in words."""

    NOT_WRITEABLE = "it was told to take no messages"
    LOGICS_QUEUE_ERROR = "a consume queue could not be written"
    INDEX_FILE_ERROR = "an index file could not be written"
    DISK_FULL = "the disk is full"
    SLAVE = "it is a slave"
    CLOSED = "it is closed"


class RunningFlags:
    """The refusals of one store that are in force. Any thread may set, clear and ask.

    Attributes:
        refusals: those that are; replaced, never changed, so that asking takes no lock.
    """

    def __init__(self, *refusals: Refusal) -> None:
        self.refusals = frozenset(refusals)
        self._change = threading.Lock()

    def set(self, refusal: Refusal) -> None:
        """From now on the store takes no messages for this reason."""
        with self._change:
            self.refusals |= {refusal}

    def clear(self, refusal: Refusal) -> None:
        """This reason no longer holds."""
        with self._change:
            self.refusals -= {refusal}

    @property
    def is_writeable(self) -> bool:
        """Whether nothing keeps the store from taking messages."""
        return not self.refusals

    @property
    def why(self) -> str:
        """What keeps it from that, in words."""
        return "; ".join(refusal.value for refusal in Refusal if refusal in self.refusals)
