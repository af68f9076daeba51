"""Puts one message or one batch into a store that is open for writing. Compiled if possible."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from logquarry import arguments
from logquarry.errors import LogquarryError
from logquarry.message import Message, require_message, require_messages
from logquarry.store.call_counts import CallCounter
from logquarry.store.single_get import SingleGet
from logquarry.write.frame_append import SLOW_PUT
from logquarry.write.put_batch_path import batch_size
from logquarry.write.put_future import PutFuture, failed_future
from logquarry.write.put_path import log_slow

if TYPE_CHECKING:
    from logquarry.store.log_growth import LogGrowth
    from logquarry.store.writer_files import LogFeed
    from logquarry.write.put_batch_path import PutBatchPath
    from logquarry.write.put_result import PutResult

try:
    import cython
except ImportError:
    from logquarry import uncompiled as cython

_SLOW = SLOW_PUT
_monotonic = time.monotonic
_Message = Message


class _Count:
    """Counts a put when its result is settled."""

    def __init__(self, counter: CallCounter, topic: str) -> None:
        self._counter = counter
        self._topic = topic
        self._began = ticks_ns() if cython.compiled else _monotonic()

    def settled(self, result: PutResult) -> None:
        if cython.compiled:
            self._counter.put(self._topic, result, (ticks_ns() - self._began) / 1e9)
        else:
            self._counter.put(self._topic, result, _monotonic() - self._began)

    def failed(self) -> None:
        self._counter.put_failed()


def _batch_arguments(
    messages: Sequence[Message] | None, wire: bytes | None, field: str
) -> tuple[Sequence[Message] | None, bytes | None]:
    # Do not check the messages of a list here: the code that encodes the list checks its messages.
    if messages is not None and type(messages) is not list:
        messages = require_messages(messages, field)
    if wire is not None and type(wire) is not bytes:
        wire = bytes(arguments.data(wire, "wire"))
    return messages, wire


class SinglePut(SingleGet):
    """The methods that put a message or a batch. A class can have only one compiled base."""

    _path: PutBatchPath
    _feed: LogFeed
    _growth: LogGrowth

    def _start_puts(
        self, path: PutBatchPath, counter: CallCounter, feed: LogFeed, growth: LogGrowth
    ) -> None:
        """Store the objects that each put needs, so that a put does not look them up."""
        self._path = path
        self._counter = counter
        self._feed = feed
        self._growth = growth

    def put(self, message: Message) -> PutResult:
        """Put one message; wait for flush and replica if the settings and its WAIT request it.

        Returns:
            The message's offsets, and whether the message is on the disk and at the replica.

        Raises:
            StoreUnavailable: if the store accepts no messages now. The error's ``status`` is the
                status that RocketMQ returns. If a sync failed, the message may or may not be on the
                disk.
            MessageRejected: if the store does not accept this message.
            UsageError: if a number does not fit its field, or ``message`` is not a Message.
        """
        began = ticks_ns() if cython.compiled else _monotonic()
        try:
            if self._path.bar is not None:
                self._path.check_status()
                self._feed.adopt()
            result = self._path.put_typed(message)
            topic = cython.cast(tuple, message)[0] if cython.compiled else message.topic
        except LogquarryError:
            self._counter.put_failed()
            raise
        except (AttributeError, TypeError, ValueError):
            # Check the type only after a failure, so that successful puts do not pay for the check.
            require_message(message)
            raise
        took = (ticks_ns() - began) / 1e9 if cython.compiled else _monotonic() - began
        if took > _SLOW:
            log_slow(took, len(message.body), result)
        # In compiled code, a call through the class is faster, because it does not search for an
        # override.
        CallCounter.put(self._counter, topic, result, took)
        return result

    def put_async(self, message: Message) -> PutFuture:
        """Put one message; return a future that is done after the waits for flush and replica.

        When this method returns, the message is in the log, or the future has an exception. The log
        has messages in the order of the calls. Callbacks of the future run in the thread that
        syncs, so callbacks must be quick.
        """
        try:
            if type(message) is not _Message:
                require_message(message)
            return self._append(message)[1]
        except LogquarryError as error:
            return failed_future(error)

    def _append(self, message: Message) -> tuple[PutResult, PutFuture]:
        """Append a message; return the append's result, and the future of its waits."""
        count = _Count(self._counter, message.topic)
        try:
            if self._path.bar is not None:
                self._path.check_status()
                self._feed.adopt()
            result, waits = self._path.append_message(message)
        except LogquarryError:
            count.failed()
            raise
        return result, self._growth.settle_later(result, waits, count.settled, count.failed)

    def put_batch(
        self,
        messages: Sequence[Message] | None = None,
        *,
        wire: bytes | None = None,
        message: Message | None = None,
    ) -> PutResult:
        """Put messages of one topic and queue, all of them or none (``putMessages``).

        Args:
            messages: the messages. Pass either ``messages``, or ``wire`` and ``message``.
            wire: a client's wire form of the messages (``MessageDecoder.encodeMessages``).
            message: the shared fields of the messages in ``wire``. The properties of ``message``
                are added to those of each message.

        Raises:
            StoreUnavailable, MessageRejected: as for :meth:`put`.
            UsageError: if the messages belong to several queues.
        """
        messages, wire = _batch_arguments(messages, wire, "put_batch")
        began = ticks_ns() if cython.compiled else _monotonic()
        try:
            if self._path.bar is not None:
                self._path.check_status()
                self._feed.adopt()
            result = self._path.put_batch(messages, wire=wire, message=message)
        except LogquarryError:
            self._counter.put_failed()
            raise
        took = (ticks_ns() - began) / 1e9 if cython.compiled else _monotonic() - began
        shared = message if message is not None else messages[0] if messages else None
        if took > _SLOW:
            log_slow(took, batch_size(messages, wire), result)
        if shared is not None:
            self._counter.put(shared.topic, result, took)
        return result

    def put_batch_async(
        self,
        messages: Sequence[Message] | None = None,
        *,
        wire: bytes | None = None,
        message: Message | None = None,
    ) -> PutFuture:
        """Put a batch as :meth:`put_batch` does; return a future as :meth:`put_async` does."""
        try:
            messages, wire = _batch_arguments(messages, wire, "put_batch_async")
            shared = message if message is not None else messages[0] if messages else None
            count = _Count(self._counter, getattr(shared, "topic", ""))
            try:
                if self._path.bar is not None:
                    self._path.check_status()
                    self._feed.adopt()
                result, waits = self._path.append_batch(messages, wire, message)
            except LogquarryError:
                count.failed()
                raise
            return self._growth.settle_later(result, waits, count.settled, count.failed)
        except LogquarryError as error:
            return failed_future(error)
