"""A model of a store, with which tests find lost, doubled, misplaced and revived messages.

A test tells the model what it puts and what the store acknowledges, and later compares the store
with the model.

::

    model = ModelStore()
    put = model.attempt(message)                             # before the put
    model.acked(put, store.put(message), is_durable=False)   # after the put
    ...
    model.check(Seen.of(store))                              # [] or a list of Violation

The model identifies messages by their bodies, so all bodies must differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple, Self

from logquarry.errors import CorruptStore, UsageError
from logquarry.log.batches import OnDamage
from logquarry.message import Message
from logquarry.store.message_store import MessageStore
from logquarry.stored_message import StoredMessage
from logquarry.write.put_result import PutResult, PutStatus

QueueKey = tuple[str, int]

_MOST_SHOWN = 24


class Wrong(Enum):
    """The ways in which a store can differ from the model."""

    LOST = "lost acked write"
    DUPLICATE = "duplicate"
    WRONG_OFFSET = "wrong offset"
    SKIP = "skip"
    WRONG_TOPIC = "wrong topic"
    REVIVED = "revived write"
    TORN = "torn message"
    UNKNOWN = "never put"
    UNREADABLE = "cannot be read"


class Violation(NamedTuple):
    """A difference between a store and the model, with details as text."""

    kind: Wrong
    reason: str

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.reason}"


class SeenMessage(NamedTuple):
    """A message as a store returned it.

    ``is_torn``: whether the topic or the properties contain zero bytes. If a crash loses the page
    with the topic or the properties, the page contains only zeros afterwards. The frame still
    passes the check, because the CRC covers only the body.
    """

    topic: str
    queue_id: int
    queue_offset: int
    physical_offset: int
    store_timestamp: int
    body: bytes
    tags: str | None
    keys: str | None
    is_torn: bool = False

    def __str__(self) -> str:
        return (
            f"{self.topic}/{self.queue_id} offset {self.queue_offset} at {self.physical_offset} "
            f"{self.body[:_MOST_SHOWN]!r} tags {self.tags} keys {self.keys}"
        )

    @classmethod
    def of(cls, message: StoredMessage) -> Self:
        """Make a SeenMessage from a message of a store."""
        return cls(
            message.topic,
            message.queue_id,
            message.queue_offset,
            message.physical_offset,
            message.store_timestamp,
            bytes(message.body or b""),
            message.tags,
            message.keys,
            0 in message.frame.topic or 0 in message.frame.properties,
        )


@dataclass(frozen=True, slots=True)
class Seen:
    """The messages of a store, as read from the store.

    Attributes:
        queues: for each queue, the messages that a consumer reads; None if the queues were not
            read.
        keyed: (topic, key) -> bodies of the messages that a query for the key found; None if the
        keys were not queried.
    """

    log: tuple[SeenMessage, ...]
    queues: Mapping[QueueKey, tuple[SeenMessage, ...]] | None = None
    keyed: Mapping[tuple[str, str], frozenset[bytes]] | None = None
    unreadable: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        store: MessageStore,
        *,
        queues: bool = True,
        keys: bool = False,
        on_damage: OnDamage = "fail",
    ) -> Self:
        """Read a whole store.

        If the store is open for writing, its queues and index must already contain all messages of
        the log.

        Args:
            queues: whether to read the queues. Pass False after a crash, when the queues may lack
                messages or point to messages that the log has lost.
            keys: whether to query each message by its keys.
            on_damage: pass ``stop`` if the log can end in a torn message.
        """
        unreadable: list[str] = []
        log: list[SeenMessage] = []
        try:
            for message in store.scan(on_damage=on_damage):
                log.append(SeenMessage.of(message))
        except CorruptStore as error:
            unreadable.append(str(error))
        found: dict[QueueKey, tuple[SeenMessage, ...]] | None = None
        if queues:
            found = {key: tuple(_read_queue(store, *key, unreadable)) for key in store.queues()}
        keyed: dict[tuple[str, str], frozenset[bytes]] | None = None
        if keys:
            words = {(m.topic, key) for m in log for key in (m.keys or "").split()}
            keyed = {
                (topic, key): frozenset(
                    bytes(m.body or b"") for m in store.query(topic, key, max_count=64, exact=True)
                )
                for topic, key in sorted(words)
            }
        return cls(tuple(log), found, keyed, tuple(unreadable))

    def before_torn(self, known: Collection[bytes] = ()) -> Self:
        """Return the messages before the first torn message.

        Torn messages whose bodies are in ``known`` are ignored.
        """
        torn = (n for n, m in enumerate(self.log) if m.is_torn and m.body not in known)
        return replace(self, log=self.log[: next(torn, len(self.log))])


def _read_queue(
    store: MessageStore, topic: str, queue_id: int, unreadable: list[str]
) -> Iterable[SeenMessage]:
    at, end = store.queue_offsets(topic, queue_id)
    while at < end:
        try:
            answer = store.get(topic, queue_id, at)
        except CorruptStore as error:
            unreadable.append(str(error))
            return
        if not answer.messages:
            place = f"{topic} queue {queue_id} offset {at}"
            unreadable.append(f"{place}: no message, but the queue ends at {end}: {answer.status}")
            return
        yield from (SeenMessage.of(message) for message in answer.messages)
        at = answer.next_offset


@dataclass(slots=True)
class Put:
    """An attempted put. The offsets and the time are None until the store acknowledges the put.

    Attributes:
        is_acked: whether the store acknowledged that the message is in the log.
        is_durable: whether the store acknowledged that the message is durable.
    """

    message: Message
    is_acked: bool = False
    is_durable: bool = False
    physical_offset: int | None = None
    queue_offset: int | None = None
    store_timestamp: int | None = None
    body: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.body = bytes(self.message.body)

    def __str__(self) -> str:
        message = self.message
        return f"{message.topic} {message.queue_id} {self.body[:_MOST_SHOWN]!r}"


class Mark(NamedTuple):
    """The state of the model at one moment, to check a state of the disk from the same moment.

    Attributes:
        durable: bodies that must survive a power cut.
        acked: bodies that must survive the death of the process.
        absent: bodies that an earlier recovery dropped; they must not appear again.
    """

    attempted: int
    durable: frozenset[bytes]
    acked: frozenset[bytes]
    absent: frozenset[bytes] = frozenset()


@dataclass(slots=True)
class ModelStore:
    """The expected content of a store. Not thread-safe.

    Attributes:
        absent: bodies that must not appear again.
        torn: bodies of messages that a recovery kept with torn properties.
    """

    puts: list[Put] = field(default_factory=list)
    absent: set[bytes] = field(default_factory=set)
    torn: set[bytes] = field(default_factory=set)
    _by_body: dict[bytes, Put] = field(default_factory=dict)
    _mark: Mark | None = None

    # ------------------------------------------------------------------------------- what happened
    def attempt(self, message: Message) -> Put:
        """Record a put; call this method before the store gets the message.

        Raises:
            UsageError: if another message has the same body.
        """
        put = Put(message)
        if put.body in self._by_body:
            raise UsageError(
                f"two messages have the body {put.body[:_MOST_SHOWN]!r}: all bodies must differ"
            )
        self._by_body[put.body] = put
        self.puts.append(put)
        self._mark = None
        return put

    def acked(self, put: Put, result: PutResult, *, is_durable: bool, number: int = 0) -> None:
        """Record an acknowledgement.

        Args:
            result: the store's result; for a batch, the result of the whole batch.
            is_durable: whether PUT_OK means that the message is durable (SYNC_FLUSH).
            number: the message's position in the batch, from 0.
        """
        self.acked_at(
            put,
            result.physical_offset + result.starts[number],
            result.queue_offset + number,
            result.store_timestamp,
            is_durable=is_durable and result.status is PutStatus.PUT_OK,
        )

    def acked_at(
        self, put: Put, physical: int, queued: int, time: int, *, is_durable: bool
    ) -> None:
        """Record that the store acknowledged a message with these offsets and this store time."""
        put.physical_offset, put.queue_offset, put.store_timestamp = physical, queued, time
        put.is_acked = True
        put.is_durable = is_durable
        self._mark = None

    def flushed(self, offset: int) -> None:
        """Record that the store reported the log as durable up to a physical offset."""
        for put in self.puts:
            if put.physical_offset is not None and put.physical_offset < offset:
                put.is_durable = True
        self._mark = None

    def survived(self, seen: Seen) -> None:
        """Replace the expected content with the content of a recovered store.

        From now on, the store's messages must never be lost, because a reader has seen them. All
        other messages must never appear again.
        """
        by_body = {message.body: message for message in seen.log}
        self.torn.update(message.body for message in seen.log if message.is_torn)
        for put in self.puts:
            message = by_body.get(put.body)
            if message is None:
                self.absent.add(put.body)
                self._mark = None
            else:
                self.acked_at(
                    put,
                    message.physical_offset,
                    message.queue_offset,
                    message.store_timestamp,
                    is_durable=True,
                )

    def mark(self) -> Mark:
        """Return an immutable copy of the model's state.

        The copy is cheap: a test can make one at each disk call.
        """
        if self._mark is None:
            present = [put for put in self.puts if put.body not in self.absent]
            self._mark = Mark(
                len(self.puts),
                frozenset(put.body for put in present if put.is_durable),
                frozenset(put.body for put in present if put.is_acked),
                frozenset(self.absent),
            )
        return self._mark

    def at(self, mark: Mark) -> ModelStore:
        """Make a model with the state of an earlier moment."""
        made = ModelStore(absent=set(mark.absent), torn=set(self.torn))
        for put in self.puts[: mark.attempted]:
            then = Put(put.message)
            if put.body in mark.acked:
                then = replace(put, is_durable=put.body in mark.durable)
            made.puts.append(then)
            made._by_body[put.body] = then
        return made

    def queue(self, topic: str, queue_id: int) -> list[Put]:
        """Return the acknowledged puts of a queue, sorted by queue offset."""
        found = [
            put
            for put in self.puts
            if put.is_acked
            and put.body not in self.absent
            and (put.message.topic, put.message.queue_id) == (topic, queue_id)
        ]
        return sorted(found, key=lambda put: put.queue_offset or 0)

    # ------------------------------------------------------------------------------- what is wrong
    def check(self, seen: Seen, *, must: Collection[bytes] | None = None) -> list[Violation]:
        """Return the differences between a store and the model.

        ``must`` contains the bodies of the messages that the store must have; None means all
        acknowledged messages.
        """
        if must is None:
            must = self.mark().acked
        wrong = [Violation(Wrong.UNREADABLE, reason) for reason in seen.unreadable]
        wrong += self._check_messages(seen.log)
        present = {message.body for message in seen.log}
        wrong += [
            Violation(Wrong.LOST, str(self._by_body[body]))
            for body in sorted(must)
            if body not in present
        ]
        by_queue: dict[QueueKey, list[SeenMessage]] = {}
        for message in seen.log:
            if message.is_torn and "\0" in message.topic:
                # If a topic contains zero bytes, the store makes no queue.
                continue
            by_queue.setdefault((message.topic, message.queue_id), []).append(message)
        for key, messages in by_queue.items():
            wrong += _check_offsets(key, [message.queue_offset for message in messages])
        if seen.queues is not None:
            for key in sorted({*seen.queues, *by_queue}):
                wrong += _check_queue(key, seen.queues.get(key, ()), by_queue.get(key, []))
        if seen.keyed is not None:
            wrong += _check_keys(seen)
        return wrong

    def _check_messages(self, log: Iterable[SeenMessage]) -> Iterator[Violation]:
        for body, count in Counter(message.body for message in log).items():
            if count > 1:
                yield Violation(Wrong.DUPLICATE, f"{body[:_MOST_SHOWN]!r}: {count} times")
        for message in log:
            put = self._by_body.get(message.body)
            if message.is_torn:
                if message.body not in self.torn:
                    yield Violation(Wrong.TORN, f"{message}")
            elif put is None:
                yield Violation(Wrong.UNKNOWN, f"{message}")
            else:
                if message.body in self.absent:
                    yield Violation(Wrong.REVIVED, f"{put} appears again: {message}")
                yield from _check_put(put, message)


def _check_queue(
    key: QueueKey, queued: Sequence[SeenMessage], logged: Sequence[SeenMessage]
) -> Iterator[Violation]:
    # A queue must contain each of its messages in the log exactly once, in the log's order.
    for message in queued:
        if (message.topic, message.queue_id) != key:
            yield Violation(Wrong.WRONG_TOPIC, f"a read of {key} returned {message}")
    yield from _check_offsets(key, [message.queue_offset for message in queued])
    have, in_log = ({message.body for message in some} for some in (queued, logged))
    for message in logged:
        if message.body not in have:
            yield Violation(Wrong.SKIP, f"a read of {key} does not return {message}")
    for message in queued:
        if message.body not in in_log:
            reason = f"a read of {key} returned a message not in the log: {message}"
            yield Violation(Wrong.UNKNOWN, reason)


def _check_put(put: Put, message: SeenMessage) -> Iterator[Violation]:
    wanted = put.message
    if (message.topic, message.queue_id) != (wanted.topic, wanted.queue_id):
        yield Violation(Wrong.WRONG_TOPIC, f"{put} became {message}")
    if (message.tags, message.keys) != (wanted.tags, wanted.keys):
        yield Violation(Wrong.UNKNOWN, f"{put} has other properties: {message}")
    acked = put.physical_offset, put.queue_offset
    if put.is_acked and acked != (message.physical_offset, message.queue_offset):
        yield Violation(Wrong.WRONG_OFFSET, f"{put} was acknowledged at {acked}: {message}")


def _check_offsets(key: QueueKey, offsets: list[int]) -> Iterator[Violation]:
    # The list of queue offsets must be 0, 1, 2 and so on.
    for expected, offset in enumerate(offsets):
        if offset != expected:
            kind = Wrong.DUPLICATE if offset in offsets[:expected] else Wrong.SKIP
            yield Violation(kind, f"{key}: offset {offset} in the place of {expected}")
            return


def _check_keys(seen: Seen) -> list[Violation]:
    assert seen.keyed is not None
    return [
        Violation(Wrong.SKIP, f"key {key!r} of {message.topic} does not find {message}")
        for message in seen.log
        for key in (message.keys or "").split()
        if message.body not in seen.keyed.get((message.topic, key), ())
    ]


def explain(wrong: Sequence[object], most: int = 5) -> str:
    """Format the first violations, one per line, and count the others."""
    lines = [str(found) for found in wrong[:most]]
    if len(wrong) > most:
        lines.append(f"and {len(wrong) - most} more")
    return "\n".join(lines)
