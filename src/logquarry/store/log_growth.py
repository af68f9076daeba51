"""What replication wants of a store that is written: its log as bytes, and nothing else of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from logquarry.disk.mapped_file_queue import MappedFileQueue
from logquarry.disk.service import Service
from logquarry.write.flush_wait import FlushWait, ReplicaWait
from logquarry.write.put_future import PutFuture
from logquarry.write.put_result import PutResult


class Wakeable(Protocol):
    """What is told that the log has grown (:class:`~logquarry.disk.service.Flag`)."""

    def is_unset(self) -> bool:
        """Whether it wants to be told. Asked for each put: it must be quick."""

    def set(self) -> None:
        """The log has grown."""


class LogFeed:
    """The log of an open store, for those who send it on, or bring it. Any thread may use it.

    Args:
        log: its files.
        replicas: hears of slaves.
        dispatched: gives the end of what is dispatched, which is where a frame ends.
        vouched: gives the end of what somebody vouched for, None where nobody has to.
        append: appends another store's bytes (``append_data``).
        vouch: lets those before an offset be dispatched.
        keep: has what was vouched for and synced stay when the store is opened anew.
        follow: has somebody told of all that comes to the log.
        unfollow: has them told no more.

    Attributes:
        replicas: whoever serves slaves tells it of them.
        append_data: appends another store's bytes, as
            :meth:`~logquarry.store.write_api.WriteApi.append_data` does, but tells nobody of them.
        vouch: says that what stands before an offset is whole frames, and tells of them. From the
            first word on nothing else is dispatched, or counts as the log's if the store is opened
            anew.
        keep: notes how far what was vouched for is on the disk: whatever it holds then stays when
            the store is opened anew. If that is to outlast a power cut, it brings the note to the
            disk too; sound frames do without that.
        follow: has somebody told of all that comes to the log,
        unfollow: and no more.
    """

    def __init__(
        self,
        log: MappedFileQueue,
        replicas: ReplicaWait,
        *,
        dispatched: Callable[[], int],
        vouched: Callable[[], int | None],
        append: Callable[[int, bytes | memoryview], bool],
        vouch: Callable[[int], None],
        keep: Callable[[bool], None],
        follow: Callable[[Wakeable], None],
        unfollow: Callable[[Wakeable], None],
    ) -> None:
        self.replicas = replicas
        self._log = log
        self._dispatched = dispatched
        self._vouched = vouched
        self.append_data = append
        self.vouch = vouch
        self.keep = keep
        self.follow = follow
        self.unfollow = unfollow

    @property
    def file_size(self) -> int:
        """Bytes of each file of the log."""
        return self._log.file_size

    @property
    def min_offset(self) -> int:
        """Where the first file begins; 0 without files."""
        return max(0, self._log.min_offset)

    @property
    def max_offset(self) -> int:
        """Where what can be read, and sent on, ends.

        What a slave took and did not judge yet is no part of it: opening the store anew may cut it
        off, and a slave of this slave would then be ahead of its master.
        """
        end, vouched = self._log.max_offset, self._vouched()
        return end if vouched is None else min(end, vouched)

    @property
    def wrote_offset(self) -> int:
        """Where what is written ends."""
        return self._log.wrote_offset

    @property
    def dispatched_offset(self) -> int:
        """Where what is dispatched ends: between two frames."""
        return self._dispatched()

    def select(self, offset: int) -> memoryview | None:
        """The bytes from an offset to where the log or its file ends; None where there are none.

        They are those of the map, and stay good as long as somebody holds them.

        Raises:
            StoreUnavailable: if the store was closed.
        """
        return self._log.select(offset)

    def sync(self) -> int:
        """Bring the log to the disk; up to where it is there.

        Raises:
            StoreUnavailable: if the sync failed, now or before.
        """
        return self._log.flush(0)


# --------------------------------------------------------------------------------------------------
# Who is told when the log has grown, and how a put is settled then.
#
# ::
#
#     a put's message is in the log --> the dispatcher, followers --> FlushWait
#                                                        '- where no put waits: whoever flushes


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
    ) -> PutFuture:
        """A future of the same; see :meth:`FlushWait.settle_later`."""
        asked = self._wait.asked(result, wait)
        self.tell()
        return self._wait.settle_later(result, wait, asked, done, failed)
