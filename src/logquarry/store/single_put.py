"""The ``put`` of a store that is open for writing. Compiled if possible."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from logquarry.errors import LogquarryError
from logquarry.message import Message, require_message
from logquarry.write.put_path import SLOW_PUT, log_slow

if TYPE_CHECKING:
    from logquarry.store.call_counts import CallCounter
    from logquarry.store.log_feed import LogFeed
    from logquarry.write.put_path import PutPath
    from logquarry.write.put_result import PutResult

try:
    import cython
except ImportError:
    from logquarry import uncompiled as cython

_SLOW = SLOW_PUT
_monotonic = time.monotonic


class SinglePut:
    """The put of one message; :class:`~logquarry.store.writer.BaseWriter` has it."""

    _path: PutPath
    _counter: CallCounter
    _feed: LogFeed

    def _start_puts(self, path: PutPath, counter: CallCounter, feed: LogFeed) -> None:
        """Look up once what each put needs.

        Args:
            path: puts into the log.
            counter: counts the puts.
            feed: adopts the bytes of a master before the first put after them.
        """
        self._path = path
        self._counter = counter
        self._feed = feed

    def put(self, message: Message) -> PutResult:
        """Put one message, and wait for flush and replica if settings and its WAIT request it.

        Returns:
            The message's offsets, and whether it is on the disk and at the replica.

        Raises:
            StoreUnavailable: if the store accepts no messages now. The error's ``status`` is
                RocketMQ's. If a sync failed, the message may or may not be on the disk.
            MessageRejected: if the store does not accept this message.
            UsageError: if a number does not fit its field, or ``message`` is no Message.
        """
        began = ticks_ns() if cython.compiled else _monotonic()
        try:
            if self._path.bar is not None:
                self._path.check_status()
                self._feed.adopt()
            result = self._path.put(message)
            topic = cython.cast(tuple, message)[0] if cython.compiled else message.topic
        except LogquarryError:
            self._counter.put_failed()
            raise
        except (AttributeError, TypeError, ValueError):
            # A put pays for this check only if it failed.
            require_message(message)
            raise
        took = (ticks_ns() - began) / 1e9 if cython.compiled else _monotonic() - began
        if took > _SLOW:
            log_slow(took, len(message.body), result)
        self._counter.put(topic, result, took)
        return result
