"""Ends an open store in forked children, and closes it when the interpreter exits.

A forked child has the store's objects, but neither its maps (``MADV_DONTFORK``) nor its threads,
and only the parent may write the files. So the child abandons the store: every call raises
StoreUnavailable, and the descriptors are closed. Among them is the lock's descriptor: the child
would hold the lock as long as it lives, even after the parent's death.

At interpreter exit stores that are still open are closed, so that the next opening needs no
recovery.
"""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from typing import Final, Protocol

logger = logging.getLogger(__name__)


class Abandonable(Protocol):
    """An object that must not be used in a forked child."""

    def abandon_in_child(self) -> None:
        """Release the parent's resources in the child. Must take no locks and not raise."""


class Closable(Protocol):
    """An object to close at exit."""

    def close(self) -> None:
        """Close it; further calls do nothing."""


_NOT_IN_CHILDREN: Final[weakref.WeakSet[Abandonable]] = weakref.WeakSet()
_OPEN: Final[dict[int, Closable]] = {}


def abandon_in_children(thing: Abandonable) -> None:
    """Abandon ``thing`` in each child that this process forks. Holds only a weak reference."""
    _NOT_IN_CHILDREN.add(thing)


def stays(thing: Abandonable) -> None:
    """Undo :func:`abandon_in_children`."""
    _NOT_IN_CHILDREN.discard(thing)


def close_at_exit(thing: Closable) -> None:
    """Close ``thing`` at interpreter exit, last registered first.

    Keeps ``thing`` alive until :func:`was_closed`.
    """
    _OPEN[id(thing)] = thing


def was_closed(thing: Closable) -> None:
    """Undo :func:`close_at_exit`: ``thing`` is closed."""
    _OPEN.pop(id(thing), None)


def _close_all() -> None:
    while _OPEN:
        _, thing = _OPEN.popitem()
        try:
            thing.close()
        except Exception:
            # The other stores must be closed too, and there is no caller to raise to.
            logger.exception("a store could not be closed cleanly at exit")


def _abandon_all() -> None:
    # The child's exit must not close the parent's stores.
    _OPEN.clear()
    for thing in list(_NOT_IN_CHILDREN):
        thing.abandon_in_child()
    _NOT_IN_CHILDREN.clear()


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)
