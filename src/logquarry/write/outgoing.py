"""Checks the messages of a bulk put column by column. A kernel then makes the frames.

A message is common if no check fails and the store changes nothing in its properties. A common
message becomes a row of :class:`FrameTable`. Any other message is *odd*: the encoder of single puts
(the *reference*) makes its frame, or rejects it. Kernel and reference write the same bytes. All
messages are checked before the first append.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from logquarry.config import StoreConfig
from logquarry.errors import MessageRejected, UsageError
from logquarry.format import frame, java
from logquarry.format import put_frames as r
from logquarry.format.arrays import Bools, Bytes, Int64
from logquarry.log import codec
from logquarry.log.columns_kernel import interned
from logquarry.message import Message
from logquarry.read.log_queues import QueueKey
from logquarry.write.common_frames import CommonFrames
from logquarry.write.encode import Encoded
from logquarry.write.message_rules import LONGEST_PROPERTIES, HostFields, host_fields, topic_bytes

if TYPE_CHECKING:
    from logquarry.disk.mapped_file import MappedFile


_MANY_QUEUES: Final = 1 << 10


@dataclass(slots=True)
class FrameTable:
    """Checked messages, in the form that the kernel reads.

    Attributes:
        rows: one column per message. The columns of odd messages are unused, because the kernel
            does not write odd messages.
        heads, head_facts: for each combination of hosts and SYSFLAG, the start of a frame, and
            numbers that describe this start (:mod:`logquarry.format.put_frames`).
        keep: the objects that own the memory at the addresses in the rows.
    """

    rows: r.PutRows
    queues: list[QueueKey]
    heads: Bytes
    head_facts: Int64
    topics: Bytes
    topic_ends: Int64
    keep: tuple[object, ...]

    def append(
        self,
        file: MappedFile,
        offsets: dict[QueueKey, int],
        start: int,
        stop: int,
        now: int,
        columns: Int64,
    ) -> int:
        """Append the frames of messages ``start`` to ``stop`` to a file, under the log's lock.

        Args:
            start, stop: a range of message numbers (from 0) that contains no odd message.
            now: the store time in milliseconds; a row may have a later time.
            columns: four rows: physical offset, queue offset, store time and size. The method fills
                in the columns of these messages.

        Returns:
            The number of the first message that did not fit, or ``stop``.
        """
        kernels = codec.require_kernels()
        next_offsets = np.zeros(len(self.queues), np.int64)
        used = self._used(start, stop)
        for queue in used:
            next_offsets[queue] = offsets.setdefault(self.queues[queue], 0)
        # The view keeps the file mapped while the kernel writes.
        view: Bytes = np.frombuffer(file.buffer, np.uint8)
        physical, queued, times, sizes = columns
        found, position = kernels.encode_frames(
            *(self.rows, start, stop),
            *(self.heads, self.head_facts, self.topics, self.topic_ends),
            *(view.ctypes.data, file.wrote, file.size, file.base, now, codec.crc32_address()),
            *(next_offsets, physical, queued, times),
        )
        at = int(found)
        if at > start:
            sizes[start:at] = self.rows[r.SIZE, start:at]
            told = {self.queues[queue]: int(next_offsets[queue]) for queue in used}
            advance(file, position, offsets, told)
        return at

    def _used(self, start: int, stop: int) -> list[int]:
        queues: Any = self.rows[r.QUEUE, start:stop]
        if len(self.queues) > _MANY_QUEUES:
            found = np.unique(queues)
        else:
            found = np.flatnonzero(np.bincount(queues, minlength=len(self.queues)))
        return [int(queue) for queue in found]


def advance(
    file: MappedFile,
    position: int,
    offsets: dict[QueueKey, int],
    told: dict[QueueKey, int],
    data: memoryview | None = None,
) -> None:
    """Advance the log's end to a position of a file, and set the next offset of each queue that has
    messages in the appended frames.

    If ``data`` is given, it has the frames, and the function first writes them to the file.
    """
    before = file.wrote
    try:
        if data is None:
            file.advance(position - before)
        else:
            file.write(data)
        offsets.update(told)
    except BaseException:
        # Ctrl-C can come at any line. The queue offset of a message that is already in the log must
        # not be used again.
        if file.wrote > before:
            offsets.update(told)
        raise


@cache
def load_kernel() -> None:
    """Load or compile the kernel. Loading takes a moment, so call this function before taking the
    log's lock.
    """
    numbers, facts = np.zeros(0, np.int64), np.zeros((0, r.HEAD_FACTS), np.int64)
    codec.require_kernels().encode_frames(
        *(r.empty_put_rows(0), 0, 0),
        *(facts.astype(np.uint8), facts, numbers.astype(np.uint8), numbers),
        *(0, 0, 0, 0, 0, 0),
        *(numbers, numbers, numbers, numbers),
    )


Encode = Callable[[Message], Encoded]
"""Makes the frame of an odd message; rejects a message whose frame no file could hold."""

_LOW: Final = 0xFFFFFFFF


@dataclass(slots=True)
class Spans:
    """For each message, the address and the length of a byte string; length -1 means no string."""

    at: Int64
    length: Int64
    keep: tuple[object, ...] = ()


@dataclass(slots=True)
class Columns:
    """The fields of many messages as columns, before any check.

    Attributes:
        topic_ids: for each message, the index of its topic in ``topics``.
        hosts: the distinct pairs of born host and store host.
        host_ids: for each message, the index of its pair in ``hosts``.
        numbers: the other fields of the frame by their names in :class:`Message`, int64. Stored
            messages also have ``queue_offset`` and ``store_timestamp``.
        first: number of the first message, for the texts of errors.
    """

    count: int
    topics: list[str]
    topic_ids: Int64
    hosts: list[tuple[str | bytes, str | bytes | None]]
    host_ids: Int64
    numbers: dict[str, Int64]
    bodies: Spans
    properties: Spans
    odd: Bools
    message: Callable[[int], Message]
    first: int = 0


@dataclass(slots=True)
class Outgoing:
    """Checked messages, ready for the log.

    Attributes:
        sizes: bytes of each frame; only an estimate if the message has further queues.
        odd: the frames of odd messages, by message number.
        store_host_ids: for each message, the index of its host in ``store_hosts``.
        named: the distinct topics of the messages, as the caller gave them. For a delayed message,
            this is not the schedule topic.
        named_ids: for each message, the index of its topic in ``named``.
        times: the earliest allowed store time of each message; None if all messages get the time of
            the put.
        frames: makes the frames of the common messages; None if kernels are not used.
    """

    sizes: Int64
    odd: dict[int, Encoded]
    store_hosts: list[bytes]
    store_host_ids: Int64
    named: list[str]
    named_ids: Int64
    times: Int64 | None = None
    frames: CommonFrames | FrameTable | None = None

    @property
    def count(self) -> int:
        """The number of messages."""
        return len(self.sizes)

    @property
    def waits(self) -> bool:
        """Whether any message requests that the put waits for flush and replica."""
        return len(self.odd) < self.count or any(encoded.wait for encoded in self.odd.values())

    def add_odd(self) -> Outgoing:
        """Set the sizes and hosts of the odd messages."""
        hosts = {host: number for number, host in enumerate(self.store_hosts)}
        for number, encoded in self.odd.items():
            # With multi-dispatch, the appender makes the frame later. So only estimate its size.
            self.sizes[number] = len(encoded.data) or frame.FIXED_SIZE_V1 + encoded.body_size
            self.store_host_ids[number] = hosts.setdefault(encoded.hosts.store_host, len(hosts))
        self.store_hosts = list(hosts)
        return self


def outgoing_reference(
    messages: Iterable[Message], encode: Encode, first: int = 0, times: Int64 | None = None
) -> Outgoing:
    """Check messages, and make all frames with the encoder of single puts.

    ``times`` contains the earliest allowed store times. Errors (MessageRejected, UsageError) name a
    message by its number. The first message has the number ``first``.
    """
    odd: dict[int, Encoded] = {}
    topics: dict[str, int] = {}
    named = []
    for number, message in enumerate(messages):
        odd[number] = _encoded(message, first + number, encode)
        named.append(topics.setdefault(message.topic, len(topics)))
    sizes, hosts = np.zeros((2, len(odd)), np.int64)
    return Outgoing(sizes, odd, [], hosts, list(topics), np.array(named, np.int64), times).add_odd()


def outgoing_frames(frames: CommonFrames, encode: Encode) -> Outgoing:
    """Make the frames of the odd messages. ``frames`` contains the frames of all other messages.

    Raises the errors of :func:`outgoing_reference`.
    """
    columns = np.empty((3, frames.count), np.int64)
    frames.fill_columns(columns)
    sizes, named_ids, host_ids = columns
    odd = {number: _encoded(message, number, encode) for number, message in frames.odd.items()}
    hosts, named = list(frames.hosts), list(frames.topics)
    return Outgoing(sizes, odd, hosts, host_ids, named, named_ids, frames=frames).add_odd()


def outgoing_kernel(
    columns: Columns,
    encode: Encode,
    config: StoreConfig,
    largest: int,
    refused: dict[int, str] | None = None,
) -> Outgoing:
    """Check messages; make the table for the kernel, and the frames of the odd messages.

    ``largest`` is the size of the largest frame that a file can hold. If ``refused`` is given, an
    invalid message raises no MessageRejected or UsageError. Instead, the function adds the
    message's number and the reason to ``refused``, and makes no frame and no row for the message.
    """
    numbers, odd = columns.numbers, columns.odd
    rows = r.empty_put_rows(columns.count)
    for row, name in (
        (r.QUEUE_ID, "queue_id"),
        (r.FLAG, "flag"),
        (r.RECONSUME_TIMES, "reconsume_times"),
    ):
        rows[row] = numbers[name]
        _mark_large(odd, numbers[name])
    rows[r.BORN_TIMESTAMP] = numbers["born_timestamp"]
    rows[r.PREPARED_OFFSET] = numbers["prepared_transaction_offset"]
    times = numbers.get("store_timestamp")
    rows[r.STORE_TIMESTAMP] = r.ANY_TIME if times is None else times
    rows[r.QUEUE_OFFSET] = numbers.get("queue_offset", 0)
    rows[r.TOPIC] = columns.topic_ids
    rows[r.BODY_AT], rows[r.BODY_LENGTH] = columns.bodies.at, columns.bodies.length
    rows[r.PROPS_AT], rows[r.PROPS_LENGTH] = columns.properties.at, columns.properties.length
    topics = [_topic_bytes(topic, config) for topic in columns.topics]  # with their length
    _mark(odd, columns.topic_ids, [topic is None for topic in topics])
    heads = _heads(columns, rows, config, odd)
    fixed = np.array([0 if head is None else head.fixed_size for head in heads], np.int64)
    lengths = np.array([len(topic or b"") for topic in topics], np.int64)
    sizes = rows[r.SIZE]
    np.add(rows[r.BODY_LENGTH], rows[r.PROPS_LENGTH], out=sizes)
    sizes += _each(fixed, rows[r.HEAD])
    sizes += _each(lengths, columns.topic_ids)
    for values, most in (
        (sizes, min(config.max_message_size, largest)),
        (rows[r.PROPS_LENGTH], LONGEST_PROPERTIES),
    ):
        if values.max() > most:
            odd |= values > most
    queues = _queues(columns, rows)
    found: dict[int, Encoded] = {}
    for number in np.flatnonzero(odd).tolist():
        try:
            message = columns.message(number)
            found[number] = _encoded(message, columns.first + number, encode)
        except (MessageRejected, UsageError) as error:
            if refused is None:
                raise
            refused[number] = without_number(error)
    hosts: dict[bytes, int] = {}
    by_head = [
        hosts.setdefault(b"" if head is None else head.store_host, len(hosts)) for head in heads
    ]
    head_bytes, head_facts = _head_table(heads)
    written = [topic or b"" for topic in topics]
    table = FrameTable(
        rows,
        queues,
        head_bytes,
        head_facts,
        # An array made from a bytes object is read-only. Kernels need writable arrays, so copy the
        # array.
        np.frombuffer(b"".join(written) or b"\0", np.uint8).copy(),
        np.cumsum([0, *map(len, written)], dtype=np.int64),
        (columns.bodies, columns.properties),
    )
    return Outgoing(
        sizes,
        found,
        list(hosts),
        np.array(by_head, np.int64)[rows[r.HEAD]],
        columns.topics,
        columns.topic_ids,
        times,
        table,
    ).add_odd()


# ---------------------------------------------------------------------------------- odd messages
def _encoded(message: Message, number: int, encode: Encode) -> Encoded:
    try:
        return encode(message)
    except MessageRejected as error:
        raise error.of_message(number) from error
    except UsageError as error:
        raise UsageError(f"message {number}: {error}") from error


def without_number(error: MessageRejected | UsageError) -> str:
    """Return the text of an error without the number of the message."""
    return re.sub(r"\Amessage \d+: ", "", str(error))


def _mark(odd: Bools, ids: Int64, is_odd: list[bool]) -> None:
    if any(is_odd):
        odd |= np.array(is_odd)[ids]


def _each(values: Int64, ids: Any) -> Any:
    return values[0] if len(values) == 1 else values[ids]


def _mark_large(odd: Bools, values: Int64) -> None:
    if values.max() > java.INT_MAX or values.min() < java.INT_MIN:
        odd |= (values > java.INT_MAX) | (values < java.INT_MIN)


def _topic_bytes(topic: str, config: StoreConfig) -> bytes | None:
    try:
        return topic_bytes(topic, config.topic_check)
    except MessageRejected:
        return None


# ---------------------------------------------------------------------------------------- tables
def distinct(values: Int64) -> tuple[list[int], Int64]:
    """Return the distinct values in order of appearance, and each value's index among these."""
    count = len(values)
    if not count or (values == values[0]).all():
        return values[:1].tolist(), np.zeros(count, np.int64)
    kernels = codec.require_kernels()
    return interned(count, lambda *tables: kernels.intern_numbers(values, *tables))


def distinct_spans(spans: Spans) -> tuple[list[int], Int64]:
    """Return the distinct byte strings of messages, and for each message the index of its string.

    A distinct string is given as the number of the first message with this string. All messages
    without a byte string share one index.
    """
    kernels = codec.require_kernels()
    at, length = spans.at, spans.length
    return interned(len(at), lambda *tables: kernels.intern_spans(at, length, *tables))


def _pairs(high: Int64, low: Int64) -> tuple[list[tuple[int, int]], Int64]:
    values, ids = distinct((high << 32) | (low & _LOW))
    return [(value >> 32, java.to_int(value)) for value in values], ids


def _queues(columns: Columns, rows: r.PutRows) -> list[QueueKey]:
    pairs, ids = _pairs(columns.topic_ids, rows[r.QUEUE_ID])
    rows[r.QUEUE] = ids
    return [(columns.topics[topic], queue_id) for topic, queue_id in pairs]


def _heads(
    columns: Columns, rows: r.PutRows, config: StoreConfig, odd: Bools
) -> list[HostFields | None]:
    """Return the host fields of each pair of hosts and SYSFLAG; None if the fields are rejected."""
    flags = columns.numbers["sys_flag"]
    _mark_large(odd, flags)
    pairs, ids = _pairs(columns.host_ids, flags)
    heads: list[HostFields | None] = []
    for host_id, flag in pairs:
        born, store = columns.hosts[host_id]
        try:
            heads.append(host_fields(born, config.store_host if store is None else store, flag))
        except MessageRejected:
            heads.append(None)
    rows[r.HEAD] = ids
    _mark(odd, ids, [head is None for head in heads])
    return heads


def _head_table(heads: list[HostFields | None]) -> tuple[Bytes, Int64]:
    widest = max((len(head.template) for head in heads if head is not None), default=0)
    table = np.zeros((len(heads), widest), np.uint8)
    facts = np.zeros((len(heads), r.HEAD_FACTS), np.int64)
    for number, head in enumerate(heads):
        if head is None:
            continue
        size = len(head.template)
        table[number, :size] = np.frombuffer(head.template, np.uint8)
        facts[number, r.HEAD_SIZE] = size
        facts[number, r.TIME_AT] = head.store_time_at
        facts[number, r.ADVANCES] = head.advances
    return table, facts
