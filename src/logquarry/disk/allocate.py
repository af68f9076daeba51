"""Makes the log's next file while the one before it is written (``AllocateMappedFileService``).

A put that comes to a file's end then finds the next one made, allocated, durable and, by option,
warm. At the end the file that nobody took is deleted, as RocketMQ does.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from pathlib import Path
from typing import Final

from logquarry.disk.disk import Disk
from logquarry.disk.mapped_file import MappedFile, TransientStorePool
from logquarry.disk.service import Clock, Done, Service, monotonic_ms
from logquarry.errors import StoreUnavailable

logger = logging.getLogger(__name__)

WAIT_TIMEOUT_MS: Final = 5_000
_SLOW_MS: Final = 500


class _Request:
    """A file to be made: begun, then done; ``file`` or ``error`` is there then."""

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.size = size
        self.is_begun = False
        self.done = Done()
        self.file: MappedFile | None = None
        self.error: StoreUnavailable | None = None


class AllocateMappedFileService(Service):
    """Makes the files of commit logs, one ahead.

    Args:
        disk: what they are on.
        pool: gives the buffers that are written to first, in transient mode.
        warm: bring the pages of each file into memory (``warmMapedFileEnable``).
        fast_fail: make no file while no buffer is free (``fastFailIfNoBufferInStorePool``);
            otherwise a file without a buffer is written through its map.
        timeout_ms: how long :meth:`take` waits.
    """

    def __init__(
        self,
        disk: Disk,
        *,
        pool: TransientStorePool | None = None,
        warm: bool = False,
        fast_fail: bool = False,
        timeout_ms: int = WAIT_TIMEOUT_MS,
        clock: Clock = monotonic_ms,
    ) -> None:
        super().__init__("allocate", disk.health, interval_ms=None)
        self._disk = disk
        self._pool = pool
        self._warm = warm
        self._fast_fail = fast_fail
        self._timeout_ms = timeout_ms
        self._clock = clock
        self._change = threading.Lock()
        self._requests: dict[Path, _Request] = {}
        # The last one that was taken, until the next is.
        self._handed: _Request | None = None

    def take(self, path: Path, following: Path | None, size: int) -> MappedFile | None:
        """The file at a path; the one that follows is made next.

        Returns:
            None if it was not made in time (a later call finds it), or with ``fast_fail`` if no
            buffer is free.

        Raises:
            StoreUnavailable: if it cannot be made (the next call tries again: there may be room
                then), or the service was stopped.
        """
        self.health.require_writable()
        if self.is_stopping:
            raise StoreUnavailable(f"{path}: the store is being closed")
        handed = self._handed
        if handed is not None:
            if handed.path == path:
                # Whoever took it was interrupted (Ctrl-C) before it was a file of the queue.
                return handed.file
            self._requests.pop(handed.path, None)
        with self._change:
            request = self._requests.get(path)
            if request is not None and request.error is not None:
                # It failed when it was made ahead. That was then.
                request = None
            if request is None:
                if self._fast_fail and self._pool is not None and not self._pool.available:
                    logger.warning("%s: no buffer of the transient store pool is free", path)
                    return None
                request = self._ask_for(path, size)
            if following is not None and following not in self._requests and self._may_go_ahead():
                self._ask_for(following, size)
        self.wakeup()
        if not request.done.wait(self._timeout_ms / 1000):
            logger.warning("%s: not made in %d ms", path, self._timeout_ms)
            return None
        if request.error is None:
            self._handed = request
        with self._change:
            self._requests.pop(path, None)
        if request.error is not None:
            raise request.error
        return request.file

    def _ask_for(self, path: Path, size: int) -> _Request:
        # One step: Ctrl-C before or after it leaves nothing half asked for.
        request = self._requests[path] = _Request(path, size)
        return request

    def _not_begun(self) -> list[_Request]:
        return [request for request in self._requests.values() if not request.is_begun]

    def _may_go_ahead(self) -> bool:
        if not self._fast_fail or self._pool is None:
            return True
        return self._pool.available > len(self._not_begun())

    def run_once(self) -> None:
        """Make the files that were asked for."""
        while not self.is_stopping:
            with self._change:
                request = next(iter(self._not_begun()), None)
                if request is None:
                    return
                request.is_begun = True
            started = self._clock()
            try:
                request.file = MappedFile(
                    self._disk,
                    request.path,
                    int(request.path.name),
                    request.size,
                    pool=self._pool,
                    exclusive=True,
                )
                if self._warm:
                    request.file.warm()
            except StoreUnavailable as error:
                logger.warning("%s: cannot be made: %s", request.path, error)
                request.error = error
            except Exception as error:
                request.error = self.health.poison(f"{request.path}: cannot be made: {error!r}")
                raise
            finally:
                request.done.set()
            if (spent := self._clock() - started) > _SLOW_MS:
                logger.warning("%s: making it took %d ms", request.path, spent)

    def run_last(self) -> None:
        """Delete the files that nobody took."""
        self.discard()

    def discard(self) -> None:
        """Delete the files that nobody took, and forget what was asked for."""
        with self._change:
            requests = [r for r in self._requests.values() if r is not self._handed]
            self._handed = None
            not_begun = self._not_begun()
            self._requests.clear()
        for request in requests:
            if request in not_begun:
                request.error = StoreUnavailable(f"{request.path}: it is not needed any more")
                request.done.set()
            # One that is being made right now is soon there.
            elif not request.done.wait(self._timeout_ms / 1000):
                logger.warning("%s: left where it is, it takes too long to make", request.path)
            if request.file is None:
                continue
            if request.file.is_named():
                with contextlib.suppress(StoreUnavailable):
                    # In a poisoned store it stays, empty as it is.
                    request.file.delete()
            else:
                request.file.close()
