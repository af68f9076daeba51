"""What happens to an open store when its process forks, or the interpreter ends.

A forked child has the store's objects, and neither its maps (``MADV_DONTFORK``) nor its threads,
and the files are its parent's to write. So in a child all of it is ended: each question raises
StoreUnavailable, and the descriptors go, the lock's among them: it would hold the lock as long as
the child lives, also when the parent is dead.

When the interpreter ends, stores that nobody closed are closed, so that nothing has to be
recovered the next time.
"""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from typing import Final, Protocol

logger = logging.getLogger(__name__)


class Abandonable(Protocol):
    """What is of no use in a forked child."""

    def abandon_in_child(self) -> None:
        """Let go, in the child, of what is the parent's. Must take no locks, and not raise."""


class Closable(Protocol):
    """What is to be closed."""

    def close(self) -> None:
        """Close it; once more does nothing."""


_NOT_IN_CHILDREN: Final[weakref.WeakSet[Abandonable]] = weakref.WeakSet()
_OPEN: Final[dict[int, Closable]] = {}


def abandon_in_children(thing: Abandonable) -> None:
    """Have something abandoned in each child that this process forks. Keeps nothing alive."""
    _NOT_IN_CHILDREN.add(thing)


def stays(thing: Abandonable) -> None:
    """Take back :func:`abandon_in_children`."""
    _NOT_IN_CHILDREN.discard(thing)


def close_at_exit(thing: Closable) -> None:
    """Have something closed when the interpreter ends; kept alive until :func:`was_closed`.

    What was registered last is closed first.
    """
    _OPEN[id(thing)] = thing


def was_closed(thing: Closable) -> None:
    """Say that it need not be closed any more."""
    _OPEN.pop(id(thing), None)


def _close_all() -> None:
    while _OPEN:
        _, thing = _OPEN.popitem()
        try:
            thing.close()
        except Exception:
            # The others are to be closed too, and nobody is left to be told.
            logger.exception("a store was not closed in order")


def _abandon_all() -> None:
    # The exit of a child is none of the parent's.
    _OPEN.clear()
    for thing in list(_NOT_IN_CHILDREN):
        thing.abandon_in_child()
    _NOT_IN_CHILDREN.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_abandon_all)
