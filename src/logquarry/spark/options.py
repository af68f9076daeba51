"""The options of a read (batch or stream), and the parser that returns `ReadOptions`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Literal, TypeVar, get_args

from logquarry.config import StoreConfig
from logquarry.errors import UsageError
from logquarry.format import java
from logquarry.log import schema
from logquarry.log.batches import TAG_SEPARATOR, MessageFilter, OnDamage, tag_expression
from logquarry.log.location import absolute
from logquarry.log.schema import check_kafka_names, kafka_names
from logquarry.text import byte_count, nearest, time_ms

T = TypeVar("T")

FORMAT: Final = "rocketmq"
"""Name of the data source."""

ALIASES: Final = {"subscribe": "topics", "subscribepattern": "topicpattern"}
"""Kafka's names for options of logquarry. ``assign`` is not here: its format differs."""

_OURS: Final = (
    "path", "topics", "topicPattern", "queueIds", "tags", "keys", "columns",
    "startingOffsets", "endingOffsets", "startingQueueOffsets", "endingQueueOffsets",
    "startingTimestamp", "endingTimestamp", "splitSize", "minPartitions", "batchSize",
    "onDamage", "failOnDataLoss", "schema", "decompress", "config", "storageOptions",
    "includeHeaders", "maxBytesPerTrigger", "maxOffsetsPerTrigger", "quarantinePath",
)  # fmt: skip
_READS: Final = {n.lower(): n for n in (*_OURS, "subscribe", "subscribePattern", "assign")}
_SPARKS: Final = frozenset(
    {"path", "paths", "checkpointlocation", "queryname", "serialization.format"}
)
"""Options that Spark adds, for example when a query names a table in SQL."""
_STREAM_ONLY: Final = ("maxbytespertrigger", "maxoffsetspertrigger")
_NO_STREAM: Final = ("endingOffsets", "endingQueueOffsets", "endingTimestamp")


def is_read_option(name: str) -> bool:
    """Whether a read of stores has an option of this name; the case of letters is ignored."""
    return name.lower() in _READS


class Given:
    """The user's options: lower-case name -> text. Logquarry's names replace Kafka's names.

    `known` maps the lower-case name of each valid option to its usual spelling; by default, the
    options of a read are valid.
    """

    def __init__(self, options: Mapping[str, str], known: Mapping[str, str] = _READS) -> None:
        self._known = known
        self._values: dict[str, str] = {}
        self._spelling: dict[str, str] = {}
        for name, value in options.items():
            key = name.lower()
            if known is _READS:
                key = ALIASES.get(key, key)
            if key in self._values:
                raise UsageError(
                    f"{self._spelling[key]} and {name} are the same option: give one of them"
                )
            self._values[key] = value
            self._spelling[key] = known.get(name.lower(), name)

    def text(self, name: str) -> str | None:
        """Return an option's text, unparsed; None if the user did not give the option."""
        return self._values.get(name.lower())

    def parsed(self, name: str, parse: Callable[[str], T]) -> T | None:
        """Return the parsed value of an option; None if the user did not give it."""
        text = self.text(name)
        if text is None:
            return None
        try:
            return parse(text.strip())
        except ValueError as error:  # a UsageError is a ValueError
            raise UsageError(f"{self._spelling[name.lower()]}: {error}") from error

    def refuse_ends(self) -> None:
        """Raise UsageError for an option that sets the end of a read: a stream has no end."""
        for name in _NO_STREAM:
            if name.lower() in self._values:
                raise UsageError(
                    f"{self._spelling[name.lower()]}: a stream has no end: use a batch (spark.read)"
                )

    def refuse_unknown(self) -> None:
        """Raise UsageError for an unknown option: a misspelled filter would return every row.

        Options of Kafka's client and options that Spark adds are allowed.
        """
        found = []
        for name in sorted(self._spelling.values(), key=str.lower):
            key = name.lower()
            if key in self._known or key in _SPARKS or key.startswith("kafka."):
                continue
            near = nearest(name, self._known.values())
            found.append(f"{name} (did you mean {near}?)" if near else name)
        if found:
            names = ", ".join(found)
            raise UsageError(f"there is no option {names}: see docs/spark.md, docs/sink.md")

    def remarks(self, *, is_batch_read: bool) -> list[str]:
        """Return one warning for each kind of option that has no effect."""
        names = sorted(self._values)
        kafka = [self._spelling[name] for name in names if name.startswith("kafka.")]
        streaming = [self._spelling[n] for n in names if n in _STREAM_ONLY and is_batch_read]
        found: list[str] = []
        if kafka:
            found.append(f"options of Kafka's client have no effect: {', '.join(kafka)}")
        if streaming:
            found.append(f"options of a stream have no effect on a batch: {', '.join(streaming)}")
        return found


# ---------------------------------------------------------------------------------- single values
def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise UsageError(f"takes true or false, not {text!r}")
    return text.lower() == "true"


def whole_number(text: str, least: int | None = None, most: int | None = None) -> int:
    """Parse a whole number between `least` and `most`, both inclusive; None means no bound."""
    found = int(text) if re.fullmatch(r"-?\d{1,100}", text, re.ASCII) else None
    if found is None or (least is not None and found < least):
        bound = "" if least is None else f" >= {least}"
        raise UsageError(f"takes a whole number{bound}, not {text!r}")
    if most is not None and found > most:
        raise UsageError(f"takes at most {most}, not {text}")
    return found


def _positive(text: str) -> int:
    return whole_number(text, 1)


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise UsageError(f"takes a regular expression, not {text!r}: {error}") from error
    return text


def one_of(*words: T) -> Callable[[str], T]:
    """Make a parser that accepts `words` in upper or lower case."""
    known = {str(word).lower(): word for word in words}

    def parse(text: str) -> T:
        if text.lower() not in known:
            raise UsageError(f"takes {' or '.join(map(str, words))}, not {text!r}")
        return known[text.lower()]

    return parse


def store_config(text: str) -> StoreConfig:
    """Parse the settings of a store: a JSON object, or the path of a file."""
    if text.startswith("{"):
        return StoreConfig.from_mapping(_json_object(text))
    return StoreConfig.from_file(text)


def _json_object(text: str, *, has_secrets: bool = False) -> dict[str, Any]:
    """Parse a JSON object. With `has_secrets`, an error does not show the text."""
    shown = "this text" if has_secrets else repr(text)
    try:
        document = json.loads(text)
    except ValueError as error:
        raise UsageError(f"takes JSON, not {shown}: {error}") from None
    if not isinstance(document, dict):
        raise UsageError(f"takes a JSON object, not {shown}")
    return document


# ------------------------------------------------------------------------------------------ lists
def _words(text: str, separator: str = ",") -> list[str]:
    """Return the words of a text: a JSON list, or words separated by the pattern `separator`."""
    if text.startswith("["):
        try:
            found = json.loads(text)
        except ValueError:
            # The text is not JSON, but a list of words whose first word begins with a bracket.
            found = None
        for word in found if isinstance(found, list) else ():
            if type(word) not in (str, int):
                raise UsageError(
                    f"takes a list of texts or whole numbers, not {json.dumps(word)} in {text!r}: "
                    "write each text in quotes"
                )
        if isinstance(found, list):
            return [str(word) for word in found]
    return [word.strip() for word in re.split(separator, text) if word.strip()]


def _names(text: str) -> frozenset[str]:
    return frozenset(_some(_words(text), text))


def _queue_ids(text: str) -> frozenset[int]:
    return frozenset(whole_number(word) for word in _some(_words(text), text))


def _keys(text: str) -> frozenset[str]:
    # RocketMQ separates a message's keys by spaces, so a space separates keys here too.
    return frozenset(_some(_words(text, r"[,\s]"), text))


def _tags(text: str) -> frozenset[str] | None:
    """Parse a list of tags or RocketMQ's tag expression; None means all tags."""
    if TAG_SEPARATOR in text or text == "*":
        return tag_expression(text, "it")
    return _names(text)


def _some(found: list[str], text: str) -> list[str]:
    if not found:
        raise UsageError(f"is empty: {text!r}")
    return found


def _paths(given: Given) -> tuple[str, ...]:
    """Return the stores' locations.

    PySpark turns the paths of load([a, b]) into the option `paths`, a JSON list.
    """
    several = given.parsed("paths", lambda text: tuple(_words(text)))
    one = given.text("path")
    found = tuple(path for path in (*(several or ()), one) if path)
    if not found:
        raise UsageError("path: no store to read: give load(path) or the option path")
    return found


# ----------------------------------------------------------------------- where reading starts, ends

_EARLIEST: Final = -2
_LATEST: Final = -1
_NAMED_OFFSETS: Final = {"earliest": _EARLIEST, "latest": _LATEST}

Queue = tuple[str, int]
"""A topic and a queue id."""


@dataclass(frozen=True, kw_only=True)
class OffsetLimit:
    """The physical offset at which reading starts or ends, by broker.

    `default` applies to brokers that are not in `brokers`. None means the start or end of the log.
    """

    default: int | None = None
    brokers: Mapping[str, int | None] = field(default_factory=dict)

    def of(self, broker: str) -> int | None:
        """Return the offset at which reading starts or ends for one broker."""
        return self.brokers.get(broker, self.default)


def _offset(value: Any) -> int:
    """Parse an offset: a number >= 0, "earliest" or -2, "latest" or -1 (the numbers of Kafka)."""
    if isinstance(value, str) and value.lower() in _NAMED_OFFSETS:
        return _NAMED_OFFSETS[value.lower()]
    if isinstance(value, bool) or not isinstance(value, int) or value < _EARLIEST:
        raise UsageError(f"takes offsets >= 0, earliest or latest, not {value!r}")
    return value


def _limit(value: int, *, is_start: bool) -> int | None:
    """Return a parsed offset as a limit.

    None means no limit; the start LONG_MAX is after all messages.
    """
    if value == _EARLIEST:
        return None if is_start else 0
    if value == _LATEST:
        return java.LONG_MAX if is_start else None
    return value


def _offsets(given: Given, name: str, *, is_start: bool) -> tuple[OffsetLimit, dict[Queue, int]]:
    """Parse physical offsets by broker, or, as in Kafka, queue offsets by topic and partition."""

    def parse(text: str) -> tuple[OffsetLimit, dict[Queue, int]]:
        if re.fullmatch(r"-?\d+", text, re.A) or text.lower() in _NAMED_OFFSETS:
            value = _offset(text.lower() if text.lower() in _NAMED_OFFSETS else whole_number(text))
            return OffsetLimit(default=_limit(value, is_start=is_start)), {}
        document = _json_object(text)
        if document and all(isinstance(value, dict) for value in document.values()):
            return OffsetLimit(), _by_queue(text)
        brokers = {b: _limit(_offset(v), is_start=is_start) for b, v in document.items()}
        return OffsetLimit(brokers=brokers), {}

    return given.parsed(name, parse) or (OffsetLimit(), {})


def _check_order(start: OffsetLimit, stop: OffsetLimit) -> None:
    for broker in (None, *(start.brokers.keys() | stop.brokers.keys())):
        first = start.default if broker is None else start.of(broker)
        beyond = stop.default if broker is None else stop.of(broker)
        # A read that starts at "latest" or ends at "earliest" is valid, and returns no messages.
        if first is None or first == java.LONG_MAX or not beyond:
            continue
        if first > beyond:
            of = "" if broker is None else f" of {broker}"
            raise UsageError(f"startingOffsets: {first}{of} is after endingOffsets, {beyond}")


def _by_queue(text: str) -> dict[Queue, int]:
    """Parse a JSON object of queue offsets: topic -> queue id -> offset."""
    document = _json_object(text)
    found: dict[Queue, int] = {}
    for topic, queues in document.items():
        if not isinstance(queues, dict):
            raise UsageError(f"takes JSON topic -> queue -> offset, not {queues!r} for a topic")
        for queue, offset in queues.items():
            found[topic, whole_number(queue)] = _offset(offset)
    return found


def _ranges(
    starts: Mapping[Queue, int], stops: Mapping[Queue, int]
) -> dict[Queue, tuple[int, int | None]] | None:
    for queue in starts.keys() & stops.keys():
        if 0 <= stops[queue] < starts[queue]:
            raise UsageError(
                f"startingQueueOffsets: {starts[queue]} of queue {queue[1]} of {queue[0]} is "
                f"after endingQueueOffsets, {stops[queue]}"
            )
    found = {
        queue: (
            _limit(starts.get(queue, _EARLIEST), is_start=True) or 0,
            _limit(stops.get(queue, _LATEST), is_start=False),
        )
        for queue in starts.keys() | stops.keys()
    }
    return found or None


def _assigned(text: str) -> frozenset[Queue]:
    """Parse Kafka's option ``assign``, a JSON object: topic -> list of partitions."""
    found: set[Queue] = set()
    for topic, queues in _json_object(text).items():
        if not isinstance(queues, list) or not all(type(queue) is int for queue in queues):
            raise UsageError(f"takes JSON topic -> list of queues, not {queues!r} for a topic")
        found |= {(topic, queue) for queue in queues}
    if not found:
        raise UsageError(f"is empty: {text!r}")
    return frozenset(found)


# -------------------------------------------------------------------------------------- ReadOptions

DEFAULT_BATCH_BYTES: Final = 3 << 20
"""Default for the bytes of log in one Arrow batch. docs/performance.md has the measurement."""

Schema = Literal["native", "kafka"]
"""The table's columns: logquarry's own (native), or the columns of Spark's Kafka source."""


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """The options of a read. Picklable.

    Attributes:
        paths: paths, URLs and globs of stores.
        include_headers: whether to add the column `headers` to a table of Kafka's columns.
        columns: names of the columns to read, in order; None for all.
        start: physical offset of the first byte to read.
        stop: physical offset after the last byte to read.
        split_size: maximum bytes of log in one partition; None to choose by the number of cores.
        min_partitions: minimum number of partitions, if the stores have enough bytes.
        batch_bytes: approximate bytes of log in one Arrow batch.
        fail_on_data_loss: whether to fail, instead of logging a warning, if retention has deleted
            messages after the wanted start.
        quarantine_path: folder for copies of skipped damage; None to copy nothing.
        max_bytes: maximum bytes of log in one batch of a stream; None for no limit.
        max_rows: maximum number of messages in one batch of a stream; None for no limit.
        remarks: warnings about options that have no effect.
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
        """Names of the table's columns, in order."""
        if self.columns is not None:
            return self.columns
        return kafka_names(headers=self.include_headers) if self.is_kafka else schema.NAMES

    @property
    def is_kafka(self) -> bool:
        """Whether the table has the columns of Spark's Kafka source."""
        return self.schema == "kafka"

    def check_names(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the names as the table spells them; raise UsageError if a name is not a column."""
        if self.is_kafka:
            return check_kafka_names(names, headers=self.include_headers)
        return schema.check_names(schema.spelled(names, schema.NAMES))


def parse_read_options(options: Mapping[str, str], *, is_stream: bool = False) -> ReadOptions:
    """Parse the options of a read. Opens no store; reads a file only for ``config``."""
    given = Given(options)
    given.refuse_unknown()
    if is_stream:
        given.refuse_ends()
    start, first_queues = _offsets(given, "startingOffsets", is_start=True)
    stop, last_queues = _offsets(given, "endingOffsets", is_start=False)
    first_queues |= given.parsed("startingQueueOffsets", _by_queue) or {}
    last_queues |= given.parsed("endingQueueOffsets", _by_queue) or {}
    single_queues = given.parsed("assign", _assigned)
    topics = given.parsed("topics", _names)
    if single_queues is not None:
        if topics is not None or given.text("topicPattern") is not None:
            raise UsageError("assign: cannot be combined with topics or topicPattern")
        topics = frozenset(topic for topic, _ in single_queues)
    since = given.parsed("startingTimestamp", time_ms)
    until = given.parsed("endingTimestamp", time_ms)
    if since is not None and until is not None and since > until:
        raise UsageError(f"startingTimestamp: {since} is later than endingTimestamp, {until}")
    _check_order(start, stop)
    wanted = MessageFilter(
        topics=topics,
        topic_pattern=given.parsed("topicPattern", _pattern),
        queue_ids=given.parsed("queueIds", _queue_ids),
        queues=single_queues,
        tags=given.parsed("tags", _tags),
        keys=given.parsed("keys", _keys),
        since_ms=since,
        until_ms=until,
        queue_ranges=_ranges(first_queues, last_queues),
    )
    on_damage, quarantine = _damage(given)
    found = ReadOptions(
        paths=_paths(given),
        schema=given.parsed("schema", one_of(*get_args(Schema))) or "native",
        include_headers=given.parsed("includeHeaders", _boolean) or False,
        wanted=wanted,
        start=start,
        stop=stop,
        split_size=given.parsed("splitSize", byte_count),
        min_partitions=given.parsed("minPartitions", _positive) or 1,
        batch_bytes=given.parsed("batchSize", byte_count) or DEFAULT_BATCH_BYTES,
        on_damage=on_damage,
        quarantine_path=quarantine,
        fail_on_data_loss=given.parsed("failOnDataLoss", _boolean) is not False,
        decompress=given.parsed("decompress", _boolean) or False,
        config=given.parsed("config", store_config) or StoreConfig(),
        storage_options=given.parsed("storageOptions", partial(_json_object, has_secrets=True)),
        max_bytes=given.parsed("maxBytesPerTrigger", byte_count) if is_stream else None,
        max_rows=given.parsed("maxOffsetsPerTrigger", _positive) if is_stream else None,
        remarks=tuple(given.remarks(is_batch_read=not is_stream)),
    )
    columns = given.parsed("columns", lambda text: found.check_names(_some(_words(text), text)))
    return replace(found, columns=columns)


def _damage(given: Given) -> tuple[OnDamage, str | None]:
    """Return (what to do at damage, folder for copies of skipped damage)."""
    word = given.parsed("onDamage", one_of("fail", "skip", "quarantine"))
    path = given.text("quarantinePath")
    if word == "quarantine":
        if not path:
            raise UsageError(
                "onDamage: quarantine needs a folder for the damaged bytes: give quarantinePath"
            )
        return "skip", absolute(path)
    if path is not None:
        raise UsageError("quarantinePath: needs onDamage=quarantine")
    # By default a read skips a torn tail, which is incomplete bytes at the log's end. The log of an
    # open or crashed store often has such a tail.
    return "skip" if word == "skip" else "default", None
