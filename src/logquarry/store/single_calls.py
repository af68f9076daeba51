"""Gets messages from a store that is open for writing, and puts one message or one batch into it.

The module is compiled at the installation if possible (``hatch_build.py``).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from logquarry import arguments
from logquarry.errors import LogquarryError
from logquarry.format.properties import parse_tags
from logquarry.message import Message, require_message, require_messages
from logquarry.read.get_kernel import KernelGet
from logquarry.read.log_queues import QueueKey, empty_queue
from logquarry.store.call_counts import CallCounter
from logquarry.store.log_reads import get_arguments
from logquarry.write.commit_log_writer import batch_size
from logquarry.write.frame_append import SLOW_PUT
from logquarry.write.put_future import PutFuture, failed_future
from logquarry.write.put_path import log_slow

if TYPE_CHECKING:
    from logquarry.disk.service import Health
    from logquarry.read.get_message import GetResult
    from logquarry.read.queue import Queue
    from logquarry.store.log_feed import LogFeed
    from logquarry.write.commit_log_writer import CommitLogWriter
    from logquarry.write.put_result import PutResult
    from logquarry.write.settling import LogGrowth

try:
    import cython
except ImportError:
    from logquarry import compiled as cython

_SLOW = SLOW_PUT
_monotonic = time.monotonic
_Message = Message
_LEAST, _MOST, _MOST_COUNT = arguments.LONG_MIN, arguments.LONG_MAX, arguments.INT_MAX


class _Count:
    """Counts a put when its final result is known."""

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
    # A list is not checked here: the code that encodes its messages checks each of them.
    if messages is not None and type(messages) is not list:
        messages = require_messages(messages, field)
    if wire is not None and type(wire) is not bytes:
        wire = bytes(arguments.data(wire, "wire"))
    return messages, wire


class SingleCalls:
    """The part of :class:`~logquarry.store.reader.LiveStore` that gets messages of a queue, and
    puts one message or one batch.
    """

    _live_queues: Mapping[QueueKey, Queue]
    _health: Health
    _counter: CallCounter
    _kernel: KernelGet | None
    _path: CommitLogWriter
    _feed: LogFeed
    _growth: LogGrowth

    def _start_puts(
        self, path: CommitLogWriter, counter: CallCounter, feed: LogFeed, growth: LogGrowth
    ) -> None:
        """Store the objects that each put uses in attributes, to avoid looking them up."""
        self._path = path
        self._counter = counter
        self._feed = feed
        self._growth = growth

    def get(
        self,
        topic: str,
        queue_id: int,
        offset: int = 0,
        max_count: int = 32,
        tag: str | None = None,
    ) -> GetResult:
        """See :meth:`~logquarry.store.reads.StoreReads.get`."""
        began = exact_ns() if cython.compiled else _monotonic()
        # Only the subclass has the attributes that are read through `store`.
        store: Any = self
        if not (type(queue_id) is int and type(offset) is int and type(max_count) is int):
            topic, queue_id, offset, max_count, tag = get_arguments(
                topic, queue_id, offset, max_count, tag
            )
        wanted = None
        if tag is not None:
            wanted = parse_tags(arguments.text(tag, "tag"))
        queue: Queue | None = None
        if type(topic) is str:
            queue = self._live_queues.get((topic, queue_id))
        if queue is None or self._health.is_gone:
            queue = store.queue(topic, queue_id) or empty_queue(topic, queue_id)
        result = None
        if _LEAST <= offset <= _MOST and 0 <= max_count <= _MOST_COUNT:
            kernel = self._kernel
            if kernel is None:
                kernel = self._kernel = store._getter.kernel
            result = kernel.get(queue, offset, max_count, wanted)
        if result is None:
            store._require_open()
            get_arguments(topic, queue_id, offset, max_count, tag)
            result = store._getter.reference(queue, offset, max_count, wanted)
        took = (exact_ns() - began) / 1e9 if cython.compiled else _monotonic() - began
        count = len(cython.cast(tuple, result)[1] if cython.compiled else result.messages)
        CallCounter.got(self._counter, count, took)
        return result

    def put(self, message: Message) -> PutResult:
        """Put one message.

        Wait for the flush and for a replica if the settings and the message's WAIT require this.

        Returns:
            The offsets of the message, and the status, which shows whether the message is synced
            and replicated.

        Raises:
            StoreUnavailable: if the store accepts no messages now. The attribute ``status`` of the
                error is the status that RocketMQ would return. After a failed sync, it is unknown
                whether the message is on the disk.
            MessageRejected: if the message violates a rule of the store, for example on its size.
            UsageError: if a number does not fit its field, or if ``message`` is not a Message.
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
            # Check the type only after a failure, to save the time of this check in all other puts.
            require_message(message)
            raise
        took = (ticks_ns() - began) / 1e9 if cython.compiled else _monotonic() - began
        if took > _SLOW:
            log_slow(took, len(message.body), result)
        # In compiled code, calling the method through the class is faster than through the object:
        # the call does not check whether a subclass overrides the method.
        CallCounter.put(self._counter, topic, result, took)
        return result

    def put_async(self, message: Message) -> PutFuture:
        """Put one message; return a future that is done when the waits for the flush and for a
        replica are over.

        When this method returns, the message is already in the log, or the future has an exception.
        In the log, the messages have the order of the calls. The thread that ends the last wait (by
        a sync, or by the acknowledgement of a slave) calls the callbacks of the future, so they
        must return quickly.
        """
        try:
            if type(message) is not _Message:
                require_message(message)
            return self._append(message)[1]
        except LogquarryError as error:
            return failed_future(error)

    def _append(self, message: Message) -> tuple[PutResult, PutFuture]:
        """Append a message; return its result, and a future that is done after the waits."""
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
        """Put several messages of one topic and queue: either all of them, or none
        (``putMessages``).

        Args:
            messages: the messages. Pass either ``messages``, or ``wire`` and ``message``.
            wire: the messages as a client sends them (``MessageDecoder.encodeMessages``).
            message: the fields that all messages in ``wire`` share. Its properties are added to the
                properties of each message.

        Raises:
            StoreUnavailable, MessageRejected: in the same cases as :meth:`put`.
            UsageError: if the messages do not all belong to the same queue.
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
        """Put a batch like :meth:`put_batch`, but return a future like :meth:`put_async`."""
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
