"""Whether a store may still be written: one answer for all of its parts.

A sync that failed leaves nobody knowing what is on the disk: the kernel marks the pages clean and
the next sync says "all is well". So the first failure ends writing for good (reliability.md,
rule 4): all waiters and all later writes fail, nothing is synced again, reads go on. Only opening
the store anew, which reads what the disk really has, starts afresh.
"""

from __future__ import annotations

import logging

from logquarry.errors import StoreUnavailable

logger = logging.getLogger(__name__)


class Health:
    """What keeps a store from being written, if anything does.

    Attributes:
        reason: why nothing may be written any more, None while all is well. Writers look at this
            before each write.
        is_gone: whether reads are over too: the store was closed, or this is a forked child, in
            which the maps are not there.
        is_forked: whether this is a forked child, in which locks may be held for ever.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self.is_gone = False
        self.is_forked = False

    def poison(self, reason: str) -> StoreUnavailable:
        """End writing, for good; the first reason stays. Returns the error to raise."""
        if self.reason is None:
            self.reason = reason
            logger.error("the store takes no more writes: %s", reason)
        return self.error()

    def end_reads(self) -> None:
        """End reading: the files are about to be closed, and what one finds then is no answer."""
        self.is_gone = True

    def end(self, reason: str) -> None:
        """End reading and writing: the store was closed, or belongs to another process."""
        self.reason = reason
        self.is_gone = True

    def abandon_in_child(self) -> None:
        """See :mod:`logquarry.store.disk.lifetime`."""
        self.is_forked = True
        self.end("the store belongs to the process that this one was forked from")

    def error(self) -> StoreUnavailable:
        """The error that says why; only where there is a reason."""
        return StoreUnavailable(self.reason or "the store cannot be written")

    def require_writable(self) -> None:
        """Raise StoreUnavailable unless the store may be written."""
        if self.reason is not None:
            raise self.error()

    def require_readable(self) -> None:
        """Raise StoreUnavailable unless the store may be read."""
        if self.is_gone:
            raise StoreUnavailable(self.reason or "the store was closed")
