"""Where reading starts and ends: offsets by broker, and by queue in Kafka's form."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from logquarry.config import StoreConfig
from logquarry.errors import UsageError
from logquarry.format import java
from logquarry.log import kafka, schema
from logquarry.log.batches import OnDamage
from logquarry.log.filters import MessageFilter
from logquarry.log.store_names import absolute
from logquarry.spark.options import given as parse
from logquarry.spark.options.given import Given, json_object, number
from logquarry.text import byte_count, time_ms

_EARLIEST: Final = -2
_LATEST: Final = -1
_NAMED_OFFSETS: Final = {"earliest": _EARLIEST, "latest": _LATEST}

Queue = tuple[str, int]
"""A topic and one of its queues."""


@dataclass(frozen=True, kw_only=True)
class OffsetLimit:
    """A physical offset where reading starts or ends, by broker.

    Attributes:
        default: for brokers that are not named; None for the log's own start or end.
        brokers: for those that are.
    """

    default: int | None = None
    brokers: Mapping[str, int | None] = field(default_factory=dict)

    def of(self, broker: str) -> int | None:
        """The limit for one broker."""
        return self.brokers.get(broker, self.default)


def _offset(value: Any) -> int:
    """An offset of a JSON document: a number, Kafka's -2 and -1, or their names."""
    if isinstance(value, str) and value.lower() in _NAMED_OFFSETS:
        return _NAMED_OFFSETS[value.lower()]
    if isinstance(value, bool) or not isinstance(value, int) or value < _EARLIEST:
        raise UsageError(f"takes offsets from 0 on, earliest or latest, not {value!r}")
    return value


def _limit(value: int, *, is_start: bool) -> int | None:
    """An offset as a limit: None for no limit, beyond all messages where none are left."""
    if value == _EARLIEST:
        return None if is_start else 0
    if value == _LATEST:
        return java.LONG_MAX if is_start else None
    return value


def offsets(given: Given, name: str, *, is_start: bool) -> tuple[OffsetLimit, dict[Queue, int]]:
    """Physical offsets by broker; in Kafka's form (topic -> partition -> offset) queue offsets."""

    def parse(text: str) -> tuple[OffsetLimit, dict[Queue, int]]:
        if re.fullmatch(r"-?\d+", text, re.A) or text.lower() in _NAMED_OFFSETS:
            value = _offset(text.lower() if text.lower() in _NAMED_OFFSETS else int(text))
            return OffsetLimit(default=_limit(value, is_start=is_start)), {}
        document = json_object(text)
        if document and all(isinstance(value, dict) for value in document.values()):
            return OffsetLimit(), _by_queue(document)
        brokers = {b: _limit(_offset(v), is_start=is_start) for b, v in document.items()}
        return OffsetLimit(brokers=brokers), {}

    return given.parsed(name, parse) or (OffsetLimit(), {})


def check_order(start: OffsetLimit, stop: OffsetLimit) -> None:
    """Raises UsageError where a start lies behind its end."""
    for broker in (None, *(start.brokers.keys() | stop.brokers.keys())):
        first = start.default if broker is None else start.of(broker)
        beyond = stop.default if broker is None else stop.of(broker)
        # The words latest and earliest are no numbers to compare: nothing is wanted, on purpose.
        if first is None or first == java.LONG_MAX or not beyond:
            continue
        if first > beyond:
            of = "" if broker is None else f" of {broker}"
            raise UsageError(f"startingOffsets: {first}{of} is beyond endingOffsets, {beyond}")


def queue_offsets(given: Given, name: str) -> dict[Queue, int]:
    """An option of queue offsets: JSON topic -> queue -> offset."""
    return given.parsed(name, lambda text: _by_queue(json_object(text))) or {}


def _by_queue(document: Mapping[str, Any]) -> dict[Queue, int]:
    found: dict[Queue, int] = {}
    for topic, queues in document.items():
        if not isinstance(queues, dict):
            raise UsageError(f"takes JSON topic -> queue -> offset, not {queues!r} for a topic")
        for queue, offset in queues.items():
            found[topic, number(queue)] = _offset(offset)
    return found


def ranges(
    starts: Mapping[Queue, int], stops: Mapping[Queue, int]
) -> dict[Queue, tuple[int, int | None]] | None:
    """First queue offsets and those just too large, by queue; None if there are none."""
    for queue in starts.keys() & stops.keys():
        if 0 <= stops[queue] < starts[queue]:
            raise UsageError(
                f"startingQueueOffsets: {starts[queue]} of queue {queue[1]} of {queue[0]} is "
                f"beyond endingQueueOffsets, {stops[queue]}"
            )
    found = {
        queue: (
            _limit(starts.get(queue, _EARLIEST), is_start=True) or 0,
            _limit(stops.get(queue, _LATEST), is_start=False),
        )
        for queue in starts.keys() | stops.keys()
    }
    return found or None


def assigned(text: str) -> frozenset[Queue]:
    """Kafka's ``assign``: JSON topic -> list of partitions."""
    found: set[Queue] = set()
    for topic, queues in json_object(text).items():
        if not isinstance(queues, list) or not all(type(queue) is int for queue in queues):
            raise UsageError(f"takes JSON topic -> list of queues, not {queues!r} for a topic")
        found |= {(topic, queue) for queue in queues}
    if not found:
        raise UsageError(f"names nothing: {text!r}")
    return frozenset(found)


# --------------------------------------------------------------------------------------------------
# The options of a read, batch or stream, from text to values. Knows nothing of Spark.

DEFAULT_BATCH_BYTES: Final = 3 << 20
"""Bytes of log in one Arrow batch: measured, see docs/performance.md."""

Schema = Literal["native", "kafka"]
"""Which table messages are shown as: ours, or that of Spark's Kafka source."""


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """What to read, and how. Picklable.

    Attributes:
        paths: paths, URLs and globs of stores.
        schema: which table they are shown as.
        include_headers: whether Kafka's table has the headers.
        columns: columns in order; None for all.
        wanted: which messages.
        start: physical offset of the first byte that is wanted.
        stop: physical offset that is just too large.
        split_size: most bytes of log in one partition; None for what suits the machine.
        min_partitions: fewest partitions, if there is enough to read.
        batch_bytes: bytes of log in one Arrow batch, about.
        on_damage: see :data:`~logquarry.log.batches.OnDamage`.
        fail_on_data_loss: whether a wanted start that retention has deleted is an error.
        quarantine_path: folder that damage is copied to, where it is passed over; None for none.
        decompress: whether ``body`` is the content instead of what is stored.
        config: what the files of the stores do not tell.
        storage_options: what the file system of a URL takes.
        max_bytes: most bytes of log in one batch of a stream; None for any.
        max_rows: most messages in one batch of a stream; None for any.
        remarks: what the user should be told, once: options that have no effect.
    """

    paths: tuple[str, ...]
    schema: Schema = "native"
    include_headers: bool = False
    columns: tuple[str, ...] | None = None
    wanted: MessageFilter = field(default_factory=MessageFilter)
    start: OffsetLimit = field(default_factory=OffsetLimit)
    stop: OffsetLimit = field(default_factory=OffsetLimit)
    split_size: int | None = None
    min_partitions: int = 1
    batch_bytes: int = DEFAULT_BATCH_BYTES
    on_damage: OnDamage = "default"
    fail_on_data_loss: bool = True
    quarantine_path: str | None = None
    decompress: bool = False
    config: StoreConfig = field(default_factory=StoreConfig)
    storage_options: Mapping[str, Any] | None = None
    max_bytes: int | None = None
    max_rows: int | None = None
    remarks: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The columns that are shown, in order."""
        if self.columns is not None:
            return self.columns
        return kafka.names(headers=self.include_headers) if self.is_kafka else schema.NAMES

    @property
    def is_kafka(self) -> bool:
        """Whether messages are shown as Kafka's source shows them."""
        return self.schema == "kafka"

    def check_names(self, names: Iterable[str]) -> tuple[str, ...]:
        """Some columns of the table that is shown.

        Raises:
            UsageError: if there is none, one is no column, or one comes twice.
        """
        if self.is_kafka:
            return kafka.check_names(names, headers=self.include_headers)
        return schema.check_names(names)


def parse_read_options(options: Mapping[str, str], *, is_stream: bool = False) -> ReadOptions:
    """The options of a read.

    Files are read only for ``config``; no store is looked at.

    Args:
        options: by name, in any case.
        is_stream: whether it is ``readStream`` that they are given to.

    Raises:
        UsageError: if an option's value cannot be meant, or a store is missing.
    """
    given = Given(options)
    if is_stream:
        given.refuse_ends()
    start, first_queues = offsets(given, "startingOffsets", is_start=True)
    stop, last_queues = offsets(given, "endingOffsets", is_start=False)
    first_queues |= queue_offsets(given, "startingQueueOffsets")
    last_queues |= queue_offsets(given, "endingQueueOffsets")
    single_queues = given.parsed("assign", assigned)
    topics = given.parsed("topics", parse.names)
    if single_queues is not None:
        if topics is not None or given.text("topicPattern") is not None:
            raise UsageError("assign: goes with neither topics nor topicPattern")
        topics = frozenset(topic for topic, _ in single_queues)
    since = given.parsed("startingTimestamp", time_ms)
    until = given.parsed("endingTimestamp", time_ms)
    if since is not None and until is not None and since > until:
        raise UsageError(f"startingTimestamp: {since} is later than endingTimestamp, {until}")
    check_order(start, stop)
    wanted = MessageFilter(
        topics=topics,
        topic_pattern=given.parsed("topicPattern", parse.pattern),
        queue_ids=given.parsed("queueIds", parse.queue_ids),
        queues=single_queues,
        tags=given.parsed("tags", parse.tags),
        keys=given.parsed("keys", parse.keys),
        since_ms=since,
        until_ms=until,
        queue_ranges=ranges(first_queues, last_queues),
    )
    found = ReadOptions(
        paths=parse.paths(given),
        wanted=wanted,
        start=start,
        stop=stop,
        split_size=given.parsed("splitSize", byte_count),
        min_partitions=given.parsed("minPartitions", parse.positive) or 1,
        batch_bytes=given.parsed("batchSize", byte_count) or DEFAULT_BATCH_BYTES,
        fail_on_data_loss=given.parsed("failOnDataLoss", parse.boolean) is not False,
        decompress=given.parsed("decompress", parse.boolean) or False,
        config=given.parsed("config", parse.config) or StoreConfig(),
        storage_options=given.parsed("storageOptions", parse.json_object),
        remarks=tuple(given.remarks(is_stream=is_stream)),
    )
    found = _with_table(found, given)
    found = _with_damage(found, given)
    if is_stream:
        found = replace(
            found,
            max_bytes=given.parsed("maxBytesPerTrigger", byte_count),
            max_rows=given.parsed("maxOffsetsPerTrigger", parse.positive),
        )
    return found


def _with_table(options: ReadOptions, given: Given) -> ReadOptions:
    word = given.parsed("schema", parse.one_of("native", "kafka"))
    headers = given.parsed("includeHeaders", parse.boolean) or False
    table: Schema = "kafka" if word == "kafka" else "native"
    options = replace(options, schema=table, include_headers=headers)
    return replace(options, columns=given.parsed("columns", _columns(options)))


def _columns(options: ReadOptions) -> Callable[[str], tuple[str, ...]]:
    return lambda text: options.check_names(parse.some(parse.words(text), text))


def _with_damage(options: ReadOptions, given: Given) -> ReadOptions:
    word = given.parsed("onDamage", parse.one_of("fail", "skip", "quarantine"))
    path = given.text("quarantinePath")
    if word != "quarantine":
        if path is not None:
            raise UsageError("quarantinePath: goes with onDamage=quarantine alone")
        # A torn tail is how a log ends that nobody closed: reading up to it is no failure.
        return replace(options, on_damage="skip" if word == "skip" else "default")
    if not path:
        raise UsageError(
            "onDamage: quarantine wants a folder for what is damaged: give quarantinePath"
        )
    return replace(options, on_damage="skip", quarantine_path=absolute(path))
