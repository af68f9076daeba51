"""Answers the pulls of consumers, with long polling (``PullMessageProcessor``).

If a pull finds no message, the broker holds the pull: it keeps the pull in memory, without a thread
that waits. When a message arrives in the pull's queue, the broker reads the queue again. If no
message arrives before the pull's deadline, the broker answers PULL_NOT_FOUND.

If the filter of a held pull excludes all new messages, the broker continues to hold the pull, as
RocketMQ does (``PullRequestHoldService``). For a filter by tags, the broker compares the tags codes
of the queue entries. For an SQL92 filter, the broker reads the messages. At most six seconds after
excluded messages have arrived, the broker answers with the offset after them.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any, Final, TypeVar

from logquarry.broker.clients import BROADCASTING, parse_expression
from logquarry.broker.connection import Connection, Request
from logquarry.broker.core import BUSY, Core, Mailbox, Part, answers
from logquarry.broker.tables import READ
from logquarry.format import java
from logquarry.format.properties import parse_tags
from logquarry.protocol.remoting_codes import Refused, RequestCode, ResponseCode
from logquarry.read.get_message import GetMessageStatus, GetResult, frames_of, may_match
from logquarry.store.consumer.group import RETRY_PREFIX
from logquarry.store.consumer.sql_filter import SqlFilter
from logquarry.write.dispatcher import MessageArrival

_COMMITS, _SUSPENDS, _HAS_SUBSCRIPTION = 1, 2, 4
"""Bits in the field sysFlag of a pull (``PullSysFlag``)."""
_MOST_MESSAGES: Final = 32
_MOST_HELD: Final = 200_000
_MOST_HELD_OF_ONE: Final = 8_192
"""Maximum number of pulls that the broker holds for one client.

A client sends at most one pull for each of its queues.
"""
_PAUSE_SECONDS: Final = 0.001
_MOST_READS: Final = 8
"""Maximum number of one client's pulls that are read at the same time: each answer takes up to 256
KiB of memory.
"""
_LONGEST_HOLD_MS: Final = 120_000
_EXCLUDED_SECONDS: Final = 5.0
"""If new messages arrive, and the filter of a held pull excludes them, the broker holds the pull at
most for this many more seconds. The answer follows at the next full second.
"""
_LONGEST_CHECKED: Final = 128
"""Maximum length in characters of a filter that the event loop compares with new messages.

Computing the codes of thousands of tags takes milliseconds, and a client can have thousands of held
pulls.
"""
_FILTERED_READS: Final = 8
"""Maximum number of reads for one pull with an SQL92 filter. If none of these reads finds
a match, the result is NO_MATCHED_MESSAGE.
"""

_S = GetMessageStatus
_C = ResponseCode
_CODES: Final = {
    _S.FOUND: _C.SUCCESS,
    _S.MESSAGE_WAS_REMOVING: _C.PULL_RETRY_IMMEDIATELY,
    _S.NO_MATCHED_MESSAGE: _C.PULL_RETRY_IMMEDIATELY,
    _S.OFFSET_FOUND_NULL: _C.PULL_RETRY_IMMEDIATELY,
    _S.OFFSET_OVERFLOW_ONE: _C.PULL_NOT_FOUND,
    _S.OFFSET_OVERFLOW_BADLY: _C.PULL_OFFSET_MOVED,
    _S.OFFSET_TOO_SMALL: _C.PULL_OFFSET_MOVED,
}

QueueKey = tuple[str, int]
_K = TypeVar("_K")


@dataclass(slots=True, eq=False)
class Pull:
    """A consumer's request for messages.

    Attributes:
        offset: queue offset of the first message to return.
        deadline: time on the event loop's clock until which the pull may be held; 0 if it must not
            be held.
        has_moved: whether ``offset`` was moved past messages that the filter excludes.
        awaited: the queue's known end, if the last read ended before this end, and the broker
            therefore reads again. In all other cases -1.
    """

    request: Request
    key: QueueKey
    offset: int
    count: int
    tags: str | None
    sql: SqlFilter | None
    deadline: float
    group: str
    was_held: bool = False
    has_moved: bool = False
    awaited: int = -1
    _codes: frozenset[int] | None = None

    @property
    def end(self) -> int:
        """The first full second at or after the deadline.

        All pulls that end in the same second are answered together.
        """
        return ceil(self.deadline)

    def excludes(self, codes: frozenset[int]) -> bool:
        """Whether the pull's tags exclude all messages that have one of these tags codes.

        For a long filter, the result is always False, and another thread reads the messages for the
        pull.
        """
        if self.tags is None or len(self.tags) > _LONGEST_CHECKED:
            return False
        if self._codes is None:
            tags = parse_tags(self.tags)
            assert tags is not None
            self._codes = frozenset(map(java.hash_code, tags))
        return not any(may_match(code, self._codes) for code in codes)

    def skip(self, after: int, now: float) -> None:
        """Move the offset past messages that the filter excludes, and limit how long the pull is
        held.
        """
        self.offset = after
        self.has_moved = True
        self.deadline = min(self.deadline, now + _EXCLUDED_SECONDS)


class Pulling(Part):
    """Answers pulls, and holds a pull while there is no message for it."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._ends: dict[QueueKey, tuple[int, int]] = {}
        """The first queue offset and the end of each queue, as far as they are known."""
        self._held: dict[QueueKey, set[Pull]] = {}
        self._held_of: dict[Connection, set[Pull]] = {}
        self._held_count = 0
        self._ending: dict[int, set[Pull]] = {}
        """The held pulls, by the second at which they are answered."""
        self._next_end = 0
        self._timer: asyncio.TimerHandle | None = None
        self._reads: Counter[Connection] = Counter()
        self._waiting: dict[Connection, deque[Pull]] = {}
        """Pulls that were not read yet, because their client has too many other pulls in progress,
        or does not read its answers.
        """
        self._arrivals: Mailbox[MessageArrival] = Mailbox(core.loop, self._take_arrival)
        self._is_closing = False
        if core.writer is not None:
            core.writer.add_arrival_listener(self._arrivals.post)

    @property
    def held_queues(self) -> list[QueueKey]:
        """The queues of all held pulls."""
        return list(self._held)

    @answers(RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE)
    def pull(self, request: Request) -> None:
        """Answer a pull, or hold it if the queue has no message for it."""
        core, fields = self._core, request.fields
        group, name, queue_id = fields["consumerGroup"], fields["topic"], fields["queueId"]
        flags = fields["sysFlag"]
        settings = core.require_group(group)
        if not settings.get("consumeEnable", True):
            raise Refused(f"subscription group no permission, {group}", _C.NO_PERMISSION)
        core.require_queue(name, queue_id, READ)
        tags, sql = self._filter(fields, group, name, settings)
        if flags & _COMMITS and fields["commitOffset"] > 0:
            core.tables.commit_offset(name, group, queue_id, fields["commitOffset"])
        wait = 0
        if flags & _SUSPENDS:
            wait = min(max(0, fields["suspendTimeoutMillis"]), _LONGEST_HOLD_MS)
        deadline = core.loop.time() + wait / 1_000 if wait else 0.0
        count = min(max(1, fields["maxMsgNums"]), _MOST_MESSAGES)
        offset = fields["queueOffset"]
        key = name, queue_id
        pull = Pull(request, key, offset, count, tags, sql, deadline, group)
        known = self._ends.get(key)
        if known is not None and offset == known[1] and deadline:
            # A consumer without new messages usually pulls at the queue's known end: hold its pull
            # at once, without a read.
            self._hold(pull)
        else:
            self._start(pull)

    def _filter(
        self, fields: Mapping[str, Any], group: str, topic: str, settings: Mapping[str, Any]
    ) -> tuple[str | None, SqlFilter | None]:
        if fields["sysFlag"] & _HAS_SUBSCRIPTION:
            if topic.startswith(RETRY_PREFIX):
                return None, None
            return parse_expression(fields["subscription"], fields["expressionType"])
        consumers = self._core.clients.consumers.get(group)
        known = None if consumers is None else consumers.filters.get(topic)
        if consumers is None or known is None:
            raise Refused(
                f"the consumer's subscription not exist: {group}, {topic}",
                _C.SUBSCRIPTION_NOT_EXIST,
            )
        if consumers.model == BROADCASTING and not settings.get("consumeBroadcastEnable", True):
            raise Refused(
                f"the consumer group[{group}] can not consume by broadcast way", _C.NO_PERMISSION
            )
        if known.version < fields["subVersion"]:
            raise Refused("the consumer's subscription not latest", _C.SUBSCRIPTION_NOT_LATEST)
        if topic.startswith(RETRY_PREFIX):
            return None, None
        return known.expression

    # ---------------------------------------------------------------------------------- the answer
    def _start(self, pull: Pull) -> None:
        connection = pull.request.connection
        if connection.is_open:
            self._waiting.setdefault(connection, deque()).append(pull)
            self._next(connection)

    def _next(self, connection: Connection) -> None:
        waiting = self._waiting.get(connection, deque())
        while waiting and connection.is_writable and self._reads[connection] < _MOST_READS:
            pull = waiting.popleft()
            job = partial(_get, self._core.store, pull)
            if self._core.lanes.gets.submit(job, partial(self._got, pull)):
                self._reads[connection] += 1
            else:
                pull.request.reply(_C.SYSTEM_BUSY, BUSY)
        if not waiting:
            self._waiting.pop(connection, None)
        elif not connection.is_writable and not self._reads[connection]:
            connection.when_writable(partial(self._next, connection))

    def disconnected(self, connection: Connection) -> None:
        """Forget the pulls of a client that has disconnected."""
        self._waiting.pop(connection, None)
        for pull in list(self._held_of.get(connection, ())):
            self._release(pull)

    def _got(self, pull: Pull, got: Any, error: BaseException | None) -> None:
        connection = pull.request.connection
        self._reads[connection] -= 1
        if not self._reads[connection]:
            del self._reads[connection]
        self._answer(pull, got, error)
        self._next(connection)

    def _answer(self, pull: Pull, got: Any, error: BaseException | None) -> None:
        if error is not None:
            pull.request.fail(error)
            return
        result: GetResult
        result, body = got
        # A message may have arrived during the read, so that the queue's known end is after the end
        # in the result.
        end = max(self.bounds_of(pull.key)[1], result.max_offset)
        self._ends[pull.key] = result.min_offset, end
        if result.max_offset:
            self._core.new_queues.opened(pull.key)
        now = self._core.loop.time()
        is_patient = pull.deadline > now and not self._is_closing
        if result.status is _S.NO_MATCHED_MESSAGE and pull.was_held and is_patient:
            pull.skip(result.next_offset, now)
            if end > pull.offset:
                self._start(pull)
            else:
                self._hold(pull)
            return
        code = _CODES.get(result.status)
        if code is None:
            # The status is NO_MESSAGE_IN_QUEUE: _CODES has all other statuses that a get returns.
            code = _C.PULL_OFFSET_MOVED if pull.offset else _C.PULL_NOT_FOUND
        if code is _C.PULL_NOT_FOUND and pull.deadline:
            if end > pull.offset and is_patient and end != pull.awaited:
                # A message has arrived during this read, so read again.
                pull.awaited = end
                self._core.loop.call_later(_PAUSE_SECONDS, self._start, pull)
                return
            if end == pull.awaited:
                # The second read did not reach the reported end either: the queue was deleted or
                # truncated, so use the end in the result.
                self._ends[pull.key] = result.min_offset, result.max_offset
            pull.awaited = -1
            if is_patient:
                self._hold(pull)
            else:
                self._not_found(pull)
            return
        if body:
            count = len(result.messages)
            self._core.counts.add_got(pull.key[0], pull.group, count, len(body))
        self._reply(pull, code, result.next_offset, result.min_offset, result.max_offset, body)

    def _not_found(self, pull: Pull) -> None:
        first, end = self._ends.get(pull.key, (0, 0))
        code = _C.PULL_RETRY_IMMEDIATELY if pull.has_moved else _C.PULL_NOT_FOUND
        self._reply(pull, code, pull.offset, first, end)

    def _reply(
        self, pull: Pull, code: int, after: int, first: int, end: int, body: bytes = b""
    ) -> None:
        pull.request.reply(
            code,
            None if code == _C.SUCCESS else _C(code).name,
            fields={
                "suggestWhichBrokerId": "0",
                "nextBeginOffset": str(after),
                "minOffset": str(first),
                "maxOffset": str(end),
            },
            body=body,
        )

    # -------------------------------------------------------------------------------- long polling
    def _hold(self, pull: Pull) -> None:
        connection = pull.request.connection
        if not connection.is_open:
            return
        held = self._held_of.get(connection, set())
        if len(held) >= _MOST_HELD_OF_ONE or self._held_count >= _MOST_HELD:
            # Do not answer PULL_NOT_FOUND, which would make the client pull again at once.
            pull.request.reply(_C.SYSTEM_BUSY, BUSY)
            return
        connection.hold()
        if not pull.was_held:
            pull.was_held = True
            # Drop the fields and the body of the request: they can take megabytes of memory while
            # the pull is held.
            command = pull.request.command
            pull.request.command = command._replace(remark=None, ext_fields={}, body=b"")
            pull.request.fields = {}
        self._held_count += 1
        self._held_of.setdefault(connection, held).add(pull)
        self._held.setdefault(pull.key, set()).add(pull)
        self._set_end(pull)

    def _set_end(self, pull: Pull) -> None:
        self._ending.setdefault(pull.end, set()).add(pull)
        if self._timer is None or pull.end < self._next_end:
            self._expire_at(pull.end)

    def _expire_at(self, second: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._next_end = second
        self._timer = self._core.loop.call_at(second, self._expire)

    def _expire(self) -> None:
        self._timer = None
        # The event loop may call this method slightly too early.
        now = self._core.loop.time() + _PAUSE_SECONDS
        for second in [second for second in self._ending if second <= now]:
            for pull in list(self._ending.pop(second)):
                self._release(pull)
                self._not_found(pull)
        if self._ending:
            self._expire_at(min(self._ending))

    def _release(self, pull: Pull) -> None:
        _discard(self._held, pull.key, pull)
        _discard(self._ending, pull.end, pull)
        _discard(self._held_of, pull.request.connection, pull)
        self._held_count -= 1
        pull.request.connection.unhold()

    def _take_arrival(self, arrival: MessageArrival) -> None:
        self._core.tables.note_message(arrival.topic, arrival.queue_id)
        key = arrival[:2]
        self._core.new_queues.opened(key)
        if key in self._held and arrival.tags_codes is not None:
            self._skip(key, arrival, arrival.tags_codes)
        self.arrived(key, arrival.next_offset)

    def _skip(self, key: QueueKey, arrival: MessageArrival, codes: frozenset[int]) -> None:
        # For held pulls whose tags exclude all of the new messages: move the pull's offset past
        # these messages.
        now, after = self._core.loop.time(), arrival.next_offset
        for pull in self._held[key]:
            # Only do this for a pull whose offset is among the new messages. For any other pull,
            # the filter may match messages before the new ones.
            is_next = after - arrival.messages <= pull.offset < after
            if is_next and pull.excludes(codes):
                _discard(self._ending, pull.end, pull)
                pull.skip(after, now)
                self._set_end(pull)

    def arrived(self, key: QueueKey, next_offset: int) -> None:
        """Read a queue that has grown, to answer its held pulls.

        If a pull's offset was already moved to the queue's new end, the pull stays held.
        """
        first, known = self._ends.get(key, (0, 0))
        end = max(known, next_offset)
        self._ends[key] = first, end
        for pull in list(self._held.get(key, ())):
            if not (pull.has_moved and pull.offset == end):
                self._release(pull)
                self._start(pull)

    def grown(self, key: QueueKey, end: int) -> None:
        """Record the end of a queue. If the end has changed, read the queue for the held pulls."""
        first, known = self._ends.get(key, (0, 0))
        if end < known:
            # The queue's end is lower than before. For example, the process that writes the store
            # has deleted the topic and created it again, or has truncated the log.
            self._ends[key] = min(first, end), end
        if end != known:
            self.arrived(key, end)

    def bounds_of(self, key: QueueKey) -> tuple[int, int]:
        """Return the known start and end of a queue; (0, 0) if they are not known."""
        return self._ends.get(key, (0, 0))

    def forget(self, topic: str) -> None:
        """Forget the known ends of a deleted topic's queues."""
        for key in [key for key in self._ends if key[0] == topic]:
            del self._ends[key]

    def close(self) -> None:
        """Answer all held pulls. Hold no pulls after this call."""
        self._is_closing = True
        if self._core.writer is not None:
            self._core.writer.remove_arrival_listener(self._arrivals.post)
        if self._timer is not None:
            self._timer.cancel()
        for pulls in list(self._held_of.values()):
            for pull in list(pulls):
                self._release(pull)
                self._not_found(pull)


def _discard(table: dict[_K, set[Pull]], key: _K, pull: Pull) -> None:
    found = table.get(key)
    if found is not None:
        found.discard(pull)
        if not found:
            del table[key]


def _get(store: Any, pull: Pull) -> tuple[GetResult, bytes]:
    sql, offset = pull.sql, pull.offset
    result: GetResult
    if sql is None:
        result = store.get(*pull.key, offset, pull.count, pull.tags)
        return result, result.frames
    for left in reversed(range(_FILTERED_READS)):
        result = store.get(*pull.key, offset, pull.count)
        if result.status is not GetMessageStatus.FOUND:
            return result, b""
        matching = tuple(m for m in result.messages if sql.matches(m.properties))
        if matching:
            return result._replace(messages=matching), frames_of(matching)
        offset = result.next_offset
        if not left or offset >= result.max_offset:
            break
    return result._replace(status=GetMessageStatus.NO_MATCHED_MESSAGE, messages=()), b""
