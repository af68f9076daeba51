"""After an append, wakes the dispatcher, the flush service and replication, and settles the put.

A put is settled when it no longer waits for the flush or for the replica, so that its status is
final. The module is compiled at the installation if possible (``hatch_build.py``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from logquarry.disk.service import Service
from logquarry.write.put_future import PutFuture
from logquarry.write.put_parts import Wakes
from logquarry.write.put_result import PutResult
from logquarry.write.settling import FlushWait


class Wakeable(Protocol):
    """A flag to set when the log has grown (:class:`~logquarry.disk.service.Flag`)."""

    def is_unset(self) -> bool:
        """Whether the flag must be set. Each put calls this method, so it must be fast."""

    def set(self) -> None:
        """Set the flag: the log has grown."""


class LogGrowth:
    """Wakes the services that follow the log, and settles puts. Any thread may call the methods.

    ``flushing`` is the flush service: it syncs the messages of puts that do not wait for a sync. If
    the store's settings let no put wait for a flush or a replica, the put path uses ``settle_now``
    in place of :meth:`settle`.
    """

    def __init__(self, dispatching: Service, flushing: Service, wait: FlushWait) -> None:
        self._dispatching = dispatching
        self._flushing = flushing
        self._wait = wait
        self._change = threading.Lock()
        self.settle_now = Wakes()
        self._wake_followers = Wakes()
        self._set(())

    def follow(self, flag: Wakeable) -> None:
        """From now on, set a flag whenever the log grows."""
        with self._change:
            self._set((*self._followers, flag))

    def unfollow(self, flag: Wakeable) -> None:
        """No longer set a flag when the log grows."""
        with self._change:
            self._set(tuple(other for other in self._followers if other is not flag))

    def _set(self, followers: tuple[Wakeable, ...]) -> None:
        self._followers = followers
        dispatch, flush = self._dispatching.flag, self._flushing.flag
        after_append = followers if dispatch is None else (dispatch, *followers)
        self._wake_followers.use(after_append)
        self.settle_now.use(after_append if flush is None else (*after_append, flush))

    def wake(self) -> None:
        """Wake the dispatcher and all followers, after an append to the log."""
        self._wake_followers.wake()

    def wake_all(self) -> None:
        """Wake the flush service too: no put waits for the new bytes, so no put starts a flush."""
        self.wake()
        self._wait.appended()

    # ----------------------------------------------------------------------------------- settle
    def settle(self, result: PutResult, wait: bool) -> PutResult:
        """Settle a put after its message was written to the log; see :meth:`FlushWait.settle`."""
        asked = self._wait.asked(result, wait)
        self.wake()
        return self._wait.settle(result, wait, asked)

    def settle_later(
        self,
        result: PutResult,
        wait: bool,
        done: Callable[[PutResult], None],
        failed: Callable[[], None],
    ) -> PutFuture:
        """Return a future of the settled result; see :meth:`FlushWait.settle_later`."""
        asked = self._wait.asked(result, wait)
        self.wake()
        return self._wait.settle_later(result, wait, asked, done, failed)
