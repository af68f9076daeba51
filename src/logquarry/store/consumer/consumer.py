"""One consumer of a group: reads messages from its queues, and commits the handled messages.

The consumer marks a message as handled when the caller requests the next message. Delivery is at
least once: offsets are written periodically, so after a crash the consumer receives again the
messages that it handled after the last write.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from itertools import compress
from typing import NamedTuple, Self

from logquarry import arguments
from logquarry.errors import StoreError, StoreUnavailable, UsageError
from logquarry.message import Message
from logquarry.read.log_queues import QueueKey
from logquarry.store.consumer.group import ConsumerGroup, Subscription, lag_of, sent_back
from logquarry.store.consumer.offsets import OffsetEstimate, Progress
from logquarry.store.consumer.source import MOST_AT_ONCE, Arrivals, QueueReader
from logquarry.stored_message import StoredMessage
from logquarry.write.put_result import PutResult

logger = logging.getLogger(__name__)

_NEW_QUEUES_SECONDS = 1.0
"""Seconds between two checks for new queues, if the consumer always finds messages."""
_MOST_READS = 64
"""If this many reads of a queue find no matching message, the consumer reads the next queue."""


class _Slot:
    """A queue that is assigned to the consumer.

    Attributes:
        done: all messages below this queue offset are handled.
        given: number of queue offsets, from ``done`` on, whose messages the caller is still
            handling.
        committed: the queue offset of the last explicit ``commit``. If ``committed`` is higher than
            ``done``, the consumer commits ``committed`` instead of ``done``.
    """

    __slots__ = ("committed", "done", "given", "key")

    def __init__(self, key: QueueKey, done: int) -> None:
        self.key = key
        self.done = self.committed = done
        self.given = 0


class _Found(NamedTuple):
    slot: _Slot
    messages: Sequence[StoredMessage]
    positions: Sequence[int]
    next_offset: int


class Consumer:
    """Consumes messages for a group, in the order of each queue; made by ``store.consumer(...)``.

    Use plain iteration, asynchronous iteration or :meth:`poll`, but only one at a time. Not
    thread-safe. The consumers of a group share the group's queues.

    Args:
        auto_commit: whether handled messages are committed automatically.
        timeout: if no message arrives for this many seconds, the iteration ends; None for an
            iteration without end.
        max_reconsume_times: how often a message can be sent back for another delivery. After that,
            sending the message back puts it into the dead-letter topic.
    """

    def __init__(
        self,
        subscription: Subscription,
        group: ConsumerGroup,
        *,
        reader: QueueReader,
        arrivals: Arrivals,
        progress: Progress,
        put: Callable[[Message], PutResult],
        save: Callable[[], None],
        closed: Callable[[Consumer], None],
        auto_commit: bool,
        timeout: float | None,
        max_reconsume_times: int,
    ) -> None:
        self.subscription = subscription
        self.topics = subscription.all_topics
        self._group = group
        self._reader = reader
        self._arrivals = arrivals
        self._progress = progress
        self._put = put
        self._save = save
        self._closed = closed
        self._auto_commit = auto_commit
        self._timeout = timeout
        self._max_reconsume_times = max_reconsume_times
        self._slots: dict[QueueKey, _Slot] = {}
        self._turns: list[_Slot] = []
        """The assigned queues: the consumer reads the last queue of the list next."""
        self._is_closed = False
        self._is_disturbed = False
        self._has_more = False
        """Whether the last search stopped before it reached the ends of all queues."""
        self._shared_version = -1
        self._look_again_at = 0.0
        self._messages: Iterator[StoredMessage] | None = None
        self._lock = threading.Lock()
        """Protects the slots, because other threads commit the offsets of the slots."""
        group.join(self)
        try:
            self._share()
        except BaseException:
            group.leave(self)
            raise

    # --------------------------------------------------------------------------------- state
    @property
    def group(self) -> str:
        """The group's name."""
        return self.subscription.group

    @property
    def is_closed(self) -> bool:
        """Whether the consumer was closed."""
        return self._is_closed

    @property
    def queues(self) -> tuple[QueueKey, ...]:
        """(topic, queue id) of the assigned queues, sorted."""
        return tuple(sorted(self._slots))

    @property
    def estimates(self) -> tuple[OffsetEstimate, ...]:
        """The offsets that were estimated because the group's committed offsets were lost."""
        return self._progress.estimates(self.group, self.topics)

    @property
    def problems(self) -> tuple[str, ...]:
        """The reasons why offset files were unreadable; empty if all files were readable."""
        return self._progress.offsets.problems

    def position(self, topic: str, queue_id: int) -> int:
        """Return the queue offset of the next message in an assigned queue.

        Raises:
            UsageError: if the queue is not assigned to the consumer.
        """
        slot = self._slot(topic, queue_id)
        return slot.done + slot.given

    def lag(self) -> int:
        """Count the messages after the consumer's positions (:meth:`position`).

        The result includes messages that the filter excludes, but no expired messages.
        """
        return sum(
            lag_of(*self._reader.bounds(*key), slot.done + slot.given)
            for key, slot in list(self._slots.items())
        )

    # ---------------------------------------------------------------------------------- reading
    def __iter__(self) -> Iterator[StoredMessage]:
        if self._messages is None:
            self._settle()
            self._messages = self._iterate()
        return self._messages

    def __next__(self) -> StoredMessage:
        try:
            return next(iter(self))
        except BaseException:
            self._messages = None
            raise

    def _iterate(self) -> Iterator[StoredMessage]:
        try:
            while (found := self._wait(MOST_AT_ONCE, self._timeout)) is not None:
                yield from self._give(found)
        finally:
            self._messages = None

    def __aiter__(self) -> AsyncIterator[StoredMessage]:
        return self._iterate_async()

    async def _iterate_async(self) -> AsyncIterator[StoredMessage]:
        self._settle()
        while not self._is_closed:
            seen = self._arrivals.version
            found = self._look(MOST_AT_ONCE)
            if found is not None:
                for message in self._give(found):
                    yield message
                # Let other tasks of the event loop run between batches.
                await asyncio.sleep(0)
            elif self._has_more:
                await asyncio.sleep(0)
            elif not await self._arrivals.wait_async(seen, self._timeout):
                return

    def _give(self, found: _Found) -> Iterator[StoredMessage]:
        slot = found.slot
        slot.given = 1
        for position, message in zip(found.positions, found.messages, strict=True):
            slot.done = position
            yield message
            if self._is_disturbed:
                slot.done = position + 1
                slot.given = 0
                return
        slot.given = 0
        slot.done = found.next_offset

    def poll(self, max_count: int = 32, timeout: float | None = 0.0) -> list[StoredMessage]:
        """Return messages of one queue, at most ``max_count``.

        The next call of ``poll`` marks the returned messages as handled.

        Args:
            timeout: seconds to wait for a message; None to wait without limit.

        Returns:
            The messages. The list is empty if no message arrived before the timeout, or if the
            consumer was closed during the wait.

        Raises:
            StoreUnavailable: if the consumer or the store is closed.
            CorruptFrame: if the next message of a queue is damaged. To skip the message, call
                :meth:`seek` with the offset after it.
        """
        max_count = arguments.count(max_count)
        timeout = arguments.optional(arguments.seconds, timeout, "timeout")
        if self._is_closed:
            raise StoreUnavailable(f"group {self.group}: the consumer is closed")
        self._settle()
        found = self._wait(min(max_count, MOST_AT_ONCE), timeout)
        if found is None:
            return []
        count = min(max_count, len(found.messages))
        is_all = count == len(found.messages)
        after = found.next_offset if is_all else found.positions[count - 1] + 1
        found.slot.given = after - found.slot.done
        return list(found.messages[:count])

    def _settle(self) -> None:
        """Mark all returned messages as handled."""
        messages, self._messages = self._messages, None
        if messages is not None:
            # Close the iterator, because it has read a batch ahead, and must not return the rest of
            # this batch.
            messages.close()  # type: ignore[attr-defined]
        for slot in list(self._slots.values()):
            # Set `given` to 0 before `done` increases. If another thread saves the offsets between
            # these two statements, it then writes the lower offset.
            given, slot.given = slot.given, 0
            slot.done += given

    def _wait(self, max_count: int, timeout: float | None) -> _Found | None:
        end = None if timeout is None else time.monotonic() + timeout
        while not self._is_closed:
            seen = self._arrivals.version
            found = self._look(max_count)
            if found is not None:
                return None if self.is_closed else found
            if self._has_more:
                continue
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                return None
            self._arrivals.wait(seen, left)
        return None

    def _look(self, max_count: int) -> _Found | None:
        """Read the queues in turn until a queue has messages that match; return these messages."""
        # If the assignment changes after the next line, `disturb` sets `_is_disturbed`. Then
        # `_give` discards the messages that this call has read and the caller has not received yet.
        self._is_disturbed = self._has_more = False
        if self._shared_version != self._group.version or time.monotonic() > self._look_again_at:
            self._share()
        found = self._look_at_slots(max_count)
        if found is None and self._share():
            found = self._look_at_slots(max_count)
        return found

    def _look_at_slots(self, max_count: int) -> _Found | None:
        turns = self._turns
        for _ in range(len(turns)):
            slot = turns.pop()
            turns.insert(0, slot)
            found = self._read(slot, max_count)
            if found is not None:
                return found
        return None

    def _read(self, slot: _Slot, max_count: int) -> _Found | None:
        topic, queue_id = slot.key
        tags, sql = self.subscription.filter_of(topic)
        for _ in range(_MOST_READS):
            _, end = self._reader.bounds(topic, queue_id)
            if slot.done == end:
                return None
            batch = self._reader.read(topic, queue_id, slot.done, max_count, tags)
            if batch.is_moved:
                logger.warning(
                    "group %s, queue %d of %s: no message at offset %d: it continues at %d",
                    *(self.group, queue_id, topic, slot.done, batch.next_offset),
                )
            messages, positions = batch.messages, batch.positions
            if sql is not None and messages:
                wanted = [sql.matches(message.properties) for message in messages]
                messages = list(compress(messages, wanted))
                positions = list(compress(positions, wanted))
            if messages:
                return _Found(slot, messages, positions, batch.next_offset)
            if batch.next_offset == slot.done:
                return None
            slot.done = batch.next_offset
        self._has_more = True
        return None

    # ------------------------------------------------------------------------------ assignment
    def disturb(self) -> None:
        """Implement :meth:`logquarry.store.consumer.group.Member.disturb`."""
        self._is_disturbed = True

    def _share(self) -> bool:
        """Release the queues that are no longer assigned, and claim the newly assigned queues.

        Return whether a queue was claimed.
        """
        group = self._group
        self._look_again_at = time.monotonic() + _NEW_QUEUES_SECONDS
        self._shared_version = group.version
        share = group.share_of(self)
        lost = self._slots.keys() - share
        wanted = share - self._slots.keys()
        if lost:
            self._give_up(lost)
        if not wanted:
            return False
        gained = group.claim(self, wanted)
        # The wanted queues that are not in `gained` still have owners. `group` has already asked
        # the owners to release these queues.
        is_new = not all(self._progress.has_offset(self.group, *key) for key in gained)
        with self._lock:
            for key in sorted(gained):
                slot = self._slots[key] = _Slot(key, self._progress.offset(self.group, *key))
                self._turns.insert(0, slot)
        if is_new:
            self._save_start()
        return bool(gained)

    def _save_start(self) -> None:
        """Write the offsets at which the group starts in new queues.

        Without this write, a crash before the first periodic save would lose the offsets. The group
        would then determine its start again, and this start could be after messages that the group
        has not handled.
        """
        try:
            self._save()
        except StoreError as error:
            logger.warning("group %s: start offsets not written: %s", self.group, error)

    def _give_up(self, keys: set[QueueKey]) -> None:
        with self._lock:
            self._commit_slots(keys)
            for key in keys:
                del self._slots[key]
            self._turns = [slot for slot in self._turns if slot.key not in keys]
        self._group.release(self, keys)

    def _slot(self, topic: str, queue_id: int) -> _Slot:
        slot = self._slots.get(arguments.queue(topic, queue_id))
        if slot is None:
            raise UsageError(
                f"group {self.group}: this consumer does not have queue {queue_id} of {topic}"
            )
        return slot

    def seek(self, topic: str, queue_id: int, offset: int) -> None:
        """Continue to read a queue at another queue offset, and commit this offset in memory.

        Raises:
            UsageError: if the queue is not assigned to the consumer, or ``offset`` is invalid.
        """
        # An invalid number would make the offset file unreadable for all groups.
        offset = arguments.offset(offset)
        old = self._slot(topic, queue_id)
        # Replace the slot, because a running iteration still changes the old slot.
        slot = _Slot(old.key, offset)
        with self._lock:
            self._slots[old.key] = slot
            self._turns = [slot if other is old else other for other in self._turns]
            # Take topic and queue id from `old.key`, because these values are checked. The caller
            # may have passed a NumPy integer, which cannot be written as JSON.
            topic, queue_id = old.key
            self._progress.offsets.commit(topic, self.group, queue_id, offset)
        self._is_disturbed = True

    # ----------------------------------------------------------------------------- commit, retry
    def commit(self) -> None:
        """Mark all returned messages as handled; write and sync the offsets.

        If another process writes the store, the offsets stay in memory.

        Raises:
            StoreUnavailable: if the offsets cannot be written. In that case the offsets stay
                committed in memory, and the next save writes them.
        """
        with self._lock:
            for slot in self._slots.values():
                slot.committed = slot.done + slot.given
                topic, queue_id = slot.key
                self._progress.offsets.commit(topic, self.group, queue_id, slot.committed)
        self._save()

    def commit_handled(self) -> None:
        """If the consumer commits automatically, commit the handled messages in memory."""
        with self._lock:
            self._commit_slots(self._slots)

    def _commit_slots(self, keys: set[QueueKey] | dict[QueueKey, _Slot]) -> None:
        if not self._auto_commit:
            return
        for key in keys:
            (topic, queue_id), slot = key, self._slots[key]
            handled = max(slot.done, slot.committed)
            self._progress.offsets.commit(topic, self.group, queue_id, handled)

    def retry(self, message: StoredMessage, delay_level: int | None = None) -> PutResult:
        """Send a message back.

        After a delay, the group receives the message again through its retry topic. The store puts
        a copy of the message. The copy has a ``reconsume_times`` that is higher by 1, and its
        properties ``RETRY_TOPIC`` and ``ORIGIN_MESSAGE_ID`` contain the original topic and message
        id. If ``reconsume_times`` has already reached ``max_reconsume_times``, the copy is put into
        ``%DLQ%group``.

        Args:
            delay_level: level of the delay until the group gets the message again. If
                ``delay_level`` is None or 0, the first delay is level 3 (10 s), and each further
                delay is one level higher. A level below 0 puts the message into ``%DLQ%group`` at
                once.

        Raises:
            StoreUnavailable: if the store accepts no messages.
        """
        limit = self._max_reconsume_times
        return self._put(sent_back(message, self.group, delay_level, limit))

    nack = retry

    # -------------------------------------------------------------------------------------- end
    def close(self) -> None:
        """Leave the group, and write the committed offsets.

        If the consumer commits automatically, commit the handled messages first. A second call does
        nothing. A message that the caller is still handling is not committed, unless :meth:`commit`
        was called.
        """
        with self._lock:
            if self._is_closed:
                return
            self._commit_slots(self._slots)
            self._is_closed = True
            self._is_disturbed = True
            self._slots = {}
            self._turns = []
        self._group.leave(self)
        self._closed(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
