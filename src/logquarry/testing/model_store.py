"""A store as a list: what was put, what was acknowledged, and what a real one must then have.

::

    model = ModelStore()
    put = model.attempt(message)          # before the real store is asked
    model.acked(put, store.put(message))  # and when it has answered
    ...
    model.check(Seen.of(store))           # [] or what is wrong with it

Bodies tell messages apart: no two that are put may have the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple, Self

from logquarry.errors import CorruptStore, UsageError
from logquarry.log.batches import OnDamage
from logquarry.message import Message, StoredMessage
from logquarry.store.message_store import MessageStore
from logquarry.write.put_result import PutResult, PutStatus

QueueKey = tuple[str, int]

_MOST_SHOWN = 24


class Wrong(Enum):
    """What can be wrong with a store."""

    LOST = "lost acked write"
    DUPLICATE = "duplicate"
    WRONG_OFFSET = "wrong offset"
    SKIP = "skip"
    WRONG_TOPIC = "wrong topic"
    REVIVED = "revived write"
    TORN = "half of it"
    UNKNOWN = "nobody put it"
    UNREADABLE = "cannot be read"


class Violation(NamedTuple):
    """One thing that is wrong.

    Attributes:
        kind: its class.
        reason: in words.
    """

    kind: Wrong
    reason: str

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.reason}"


class SeenMessage(NamedTuple):
    """A message as a store gave it.

    ``is_torn`` where topic or properties have bytes of 0: the CRC covers the body only, so that a
    frame of which a part never came to the disk may look sound.
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
        """The same of a message that was read."""
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
    """What a store has, read from it.

    Attributes:
        log: the messages of its log, in their order.
        queues: the messages of each queue as a consumer gets them; None where nobody looked.
        keyed: the bodies that each (topic, key) leads to; None where nobody looked.
        unreadable: what could not be read, in words.
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
        """Read all of a store.

        Args:
            store: is dispatched, if it is written.
            queues: whether to read the queues too: of one that was not closed in order they may be
                behind, or ahead.
            keys: whether to ask for each message by its keys.
            on_damage: ``stop`` where the log may end in a torn message.
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
        """The same with a log that ends before the first message that is torn.

        Args:
            known: bodies of torn messages that count as whole (:attr:`ModelStore.torn`).
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
            unreadable.append(f"{topic} {queue_id}: nothing at {at} of {end}: {answer.status}")
            return
        yield from (SeenMessage.of(message) for message in answer.messages)
        at = answer.next_offset


@dataclass(slots=True)
class Put:
    """A message that somebody tried to put.

    Attributes:
        message: the message.
        is_acked: whether the store said that it is in the log.
        is_durable: whether it said that it is on the disk.
        physical_offset: where it said that it is, None where it did not say.
        queue_offset: likewise.
        store_timestamp: likewise.
        body: the message's.
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
        return _named(self)


class Mark(NamedTuple):
    """The model at one moment, for the state of a disk at that moment.

    Attributes:
        attempted: how many puts were begun.
        durable: the bodies that must survive a power cut.
        acked: the bodies that must survive the death of the process.
        absent: the bodies that a read has proved to be absent.
    """

    attempted: int
    durable: frozenset[bytes]
    acked: frozenset[bytes]
    absent: frozenset[bytes] = frozenset()


@dataclass(slots=True)
class ModelStore:
    """What a store should have. One thread at a time changes it.

    Attributes:
        puts: all that was tried, in order.
        absent: bodies that are not to come back.
        torn: bodies of messages that came back from a crash with torn properties, and stay so.
    """

    puts: list[Put] = field(default_factory=list)
    absent: set[bytes] = field(default_factory=set)
    torn: set[bytes] = field(default_factory=set)
    _by_body: dict[bytes, Put] = field(default_factory=dict)
    _mark: Mark | None = None

    # ------------------------------------------------------------------------------- what happened
    def attempt(self, message: Message) -> Put:
        """Note that a message is about to be put."""
        put = Put(message)
        if put.body in self._by_body:
            raise UsageError(f"two messages have the body {put.body[:_MOST_SHOWN]!r}")
        self._by_body[put.body] = put
        self.puts.append(put)
        self._mark = None
        return put

    def acked(self, put: Put, result: PutResult, *, is_durable: bool, number: int = 0) -> None:
        """Note that the store has it.

        Args:
            put: what was tried.
            result: what the store said; of a batch, of all of it.
            is_durable: whether the store is one that says so only when it is on the disk.
            number: its place in the batch.
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
        """The same in numbers."""
        put.physical_offset, put.queue_offset, put.store_timestamp = physical, queued, time
        put.is_acked = True
        put.is_durable = is_durable
        self._mark = None

    def flushed(self, offset: int) -> None:
        """Note that the store said that its log is on the disk up to an offset."""
        for put in self.puts:
            if put.physical_offset is not None and put.physical_offset < offset:
                put.is_durable = True
        self._mark = None

    def survived(self, seen: Seen) -> None:
        """Go on from what a recovered store has: what it has not is never to come back.

        What it has counts as durable from here on, as an answer to a reader made it known.
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
        """The model now, never to change. Cheap enough for each call of a disk."""
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
        """The model as it was at an earlier moment, to go on from there."""
        made = ModelStore(absent=set(mark.absent), torn=set(self.torn))
        for put in self.puts[: mark.attempted]:
            then = made.attempt(put.message)
            if put.body in mark.acked:
                assert put.physical_offset is not None and put.queue_offset is not None
                made.acked_at(
                    then,
                    put.physical_offset,
                    put.queue_offset,
                    put.store_timestamp or 0,
                    is_durable=put.body in mark.durable,
                )
        return made

    def queue(self, topic: str, queue_id: int) -> list[Put]:
        """What a queue should have, by what was acknowledged, in order."""
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
        """Compare a store with what it should have.

        Args:
            seen: what was read from it.
            must: bodies that have to be there (default: all that were acknowledged).
        """
        if must is None:
            must = self.mark().acked
        wrong = [Violation(Wrong.UNREADABLE, reason) for reason in seen.unreadable]
        wrong += self._check_messages(seen.log)
        present = {message.body for message in seen.log}
        wrong += [
            Violation(Wrong.LOST, f"{_named(self._by_body[body])}")
            for body in sorted(must)
            if body not in present
        ]
        by_queue: dict[QueueKey, list[SeenMessage]] = {}
        for message in seen.log:
            if message.is_torn and "\0" in message.topic:
                # No folder is made for such a name.
                continue
            by_queue.setdefault((message.topic, message.queue_id), []).append(message)
        for key, messages in by_queue.items():
            wrong += _check_offsets(key, [message.queue_offset for message in messages])
        if seen.queues is not None:
            for key in sorted({*seen.queues, *by_queue}):
                wrong += self._check_queue(key, seen.queues.get(key, ()), by_queue.get(key, []))
        if seen.keyed is not None:
            wrong += _check_keys(seen)
        return wrong

    def _check_messages(self, log: Iterable[SeenMessage]) -> list[Violation]:
        wrong: list[Violation] = []
        counts = Counter(message.body for message in log)
        for body, count in counts.items():
            if count > 1:
                wrong.append(Violation(Wrong.DUPLICATE, f"{body[:_MOST_SHOWN]!r}: {count} times"))
        for message in log:
            put = self._by_body.get(message.body)
            if message.is_torn:
                if message.body not in self.torn:
                    wrong.append(Violation(Wrong.TORN, f"{message}"))
                continue
            if put is None:
                wrong.append(Violation(Wrong.UNKNOWN, f"{message}"))
                continue
            if message.body in self.absent:
                wrong.append(Violation(Wrong.REVIVED, f"{_named(put)} is there again: {message}"))
            wrong += _check_put(put, message)
        return wrong

    def _check_queue(
        self, key: QueueKey, queued: Iterable[SeenMessage], logged: Iterable[SeenMessage]
    ) -> list[Violation]:
        """A queue against the log: each message of it once, in order, and no other."""
        queued = list(queued)
        wrong = [
            Violation(Wrong.WRONG_TOPIC, f"a read of {key} gave {message}")
            for message in queued
            if (message.topic, message.queue_id) != key
        ]
        offsets = [message.queue_offset for message in queued]
        wrong += _check_offsets(key, offsets)
        have = {message.body for message in queued}
        wrong += [
            Violation(Wrong.SKIP, f"a read of {key} does not give {message}")
            for message in logged
            if message.body not in have
        ]
        in_log = {message.body for message in logged}
        wrong += [
            Violation(Wrong.UNKNOWN, f"a read of {key} gave what is not in the log: {message}")
            for message in queued
            if message.body not in in_log
        ]
        return wrong


def _check_put(put: Put, message: SeenMessage) -> list[Violation]:
    wrong = []
    wanted = put.message
    if (message.topic, message.queue_id) != (wanted.topic, wanted.queue_id):
        wrong.append(Violation(Wrong.WRONG_TOPIC, f"{_named(put)} came as {message}"))
    if (message.tags, message.keys) != (wanted.tags, wanted.keys):
        wrong.append(Violation(Wrong.UNKNOWN, f"{_named(put)} has other properties: {message}"))
    said = put.physical_offset, put.queue_offset
    if put.is_acked and said != (message.physical_offset, message.queue_offset):
        wrong.append(Violation(Wrong.WRONG_OFFSET, f"{_named(put)} was to be at {said}: {message}"))
    return wrong


def _check_offsets(key: QueueKey, offsets: list[int]) -> list[Violation]:
    """Queue offsets in the log's order: from 0 on, none twice, none left out."""
    wrong = []
    for expected, offset in enumerate(offsets):
        if offset != expected:
            kind = Wrong.DUPLICATE if offset in offsets[:expected] else Wrong.SKIP
            wrong.append(Violation(kind, f"{key}: offset {offset} stands where {expected} belongs"))
            break
    return wrong


def _check_keys(seen: Seen) -> list[Violation]:
    assert seen.keyed is not None
    return [
        Violation(Wrong.SKIP, f"key {key!r} of {message.topic} does not lead to {message}")
        for message in seen.log
        for key in (message.keys or "").split()
        if message.body not in seen.keyed.get((message.topic, key), ())
    ]


def explain(wrong: Sequence[object], most: int = 5) -> str:
    """The first of what is wrong, a line each, and how much more there is."""
    lines = [str(found) for found in wrong[:most]]
    if len(wrong) > most:
        lines.append(f"and {len(wrong) - most} more")
    return "\n".join(lines)


def _named(put: Put) -> str:
    message = put.message
    return f"{message.topic} {message.queue_id} {put.body[:_MOST_SHOWN]!r}"
