"""Who is told when the log has grown, and how a put is settled then.

::

    a put's message is in the log --> the dispatcher, followers --> FlushWait
                                                       '- where no put waits: whoever flushes
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from logquarry.store.disk.service import Service
from logquarry.store.flush.put_future import FlushWait
from logquarry.store.log_feed import Wakeable
from logquarry.store.put.put_result import PutResult


class LogGrowth:
    """Tells those who live off the log. Any thread may use it.

    Args:
        dispatching: dispatches what comes.
        flushing: brings to the disk what nobody waits for.
        wait: settles puts that wait for disk or slave.
    """

    def __init__(self, dispatching: Service, flushing: Service, wait: FlushWait) -> None:
        self._dispatching = dispatching
        self._flushing = flushing
        self._wait = wait
        self._change = threading.Lock()
        self._set(())

    def follow(self, flag: Wakeable) -> None:
        """Have somebody told of all that comes to the log."""
        with self._change:
            self._set((*self._followers, flag))

    def unfollow(self, flag: Wakeable) -> None:
        """And no more."""
        with self._change:
            self._set(tuple(other for other in self._followers if other is not flag))

    def _set(self, followers: tuple[Wakeable, ...]) -> None:
        self._followers = followers
        dispatch, flush = self._dispatching.flag, self._flushing.flag
        # What is told of each message in the log, and what besides where no put waits for anything.
        self._after_append = followers if dispatch is None else (dispatch, *followers)
        self._after_put = self._after_append if flush is None else (*self._after_append, flush)

    # ------------------------------------------------------------------------------------- tell
    def tell(self) -> None:
        """There is more in the log."""
        # Mostly they know already, and then a look takes less than a call.
        for flag in self._after_append:
            if flag.is_unset():
                flag.set()

    def tell_all(self) -> None:
        """There is more in the log, which is to get to the disk; nobody waits for that."""
        self.tell()
        self._wait.appended()

    # ----------------------------------------------------------------------------------- settle
    def settle(self, result: PutResult, wait: bool) -> PutResult:
        """The result of a put that is in the log, settled; see :meth:`FlushWait.settle`.

        Raises:
            StoreUnavailable: if the sync failed: nobody knows what the disk has.
        """
        asked = self._wait.asked(result, wait)
        self.tell()
        return self._wait.settle(result, wait, asked)

    def settle_now(self, result: PutResult, wait: bool) -> PutResult:
        """The same where no put waits for anything."""
        for flag in self._after_put:
            if flag.is_unset():
                flag.set()
        return result

    def settle_later(
        self,
        result: PutResult,
        wait: bool,
        done: Callable[[PutResult], None],
        failed: Callable[[], None],
    ) -> Future[PutResult]:
        """A future of the same; see :meth:`FlushWait.settle_later`."""
        asked = self._wait.asked(result, wait)
        self.tell()
        return self._wait.settle_later(result, wait, asked, done, failed)
