"""The options of the source `rocketmq`, from text to values. Knows nothing of Spark.

Names are case-insensitive, as Spark hands them over in lower case. Lists are ``a,b`` or JSON
(``["a", "b"]``, for names with a comma in them). Whatever cannot be meant is a
:class:`~logquarry.errors.UsageError` that begins with the option's name.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from logquarry.config import StoreConfig
from logquarry.errors import UsageError
from logquarry.format import java
from logquarry.scan import schema
from logquarry.scan.batches import OnDamage
from logquarry.scan.filters import TAG_SEPARATOR, MessageFilter, tag_expression
from logquarry.values import byte_count, time_ms

DEFAULT_BATCH_BYTES: Final = 3 << 20
"""Bytes of log in one Arrow batch: measured, see docs/performance.md."""

ALIASES: Final = {"subscribe": "topics", "subscribepattern": "topicpattern"}
"""Kafka's names of options of ours; ``assign`` has a form of its own."""

_OURS: Final = (
    "path",
    "topics",
    "topicPattern",
    "queueIds",
    "tags",
    "keys",
    "columns",
    "startingOffsets",
    "endingOffsets",
    "startingQueueOffsets",
    "endingQueueOffsets",
    "startingTimestamp",
    "endingTimestamp",
    "splitSize",
    "minPartitions",
    "batchSize",
    "onDamage",
    "failOnDataLoss",
    "schema",
    "decompress",
    "config",
    "storageOptions",
    "includeHeaders",
    "maxBytesPerTrigger",
    "maxOffsetsPerTrigger",
)
_SPELLING: Final = {name.lower(): name for name in [*_OURS, "subscribe", "subscribePattern"]}
_KNOWN: Final = {name.lower() for name in _OURS} | set(ALIASES) | {"assign", "paths"}
_STREAM_ONLY: Final = ("maxbytespertrigger", "maxoffsetspertrigger")
LATER: Final = "comes with a later version"
"""What is said of options and uses that have their place already."""

_EARLIEST: Final = -2
_LATEST: Final = -1
_NAMED_OFFSETS: Final = {"earliest": _EARLIEST, "latest": _LATEST}

T = TypeVar("T")


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


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """What to read, and how. Picklable.

    Attributes:
        paths: paths, URLs and globs of stores.
        columns: columns in order; None for all.
        wanted: which messages.
        start: physical offset of the first byte that is wanted.
        stop: physical offset that is just too large.
        split_size: most bytes of log in one partition; None for what suits the machine.
        min_partitions: fewest partitions, if there is enough to read.
        batch_bytes: bytes of log in one Arrow batch, about.
        on_damage: see :data:`~logquarry.scan.batches.OnDamage`.
        fail_on_data_loss: whether a wanted start that retention has deleted is an error.
        decompress: whether ``body`` is the content instead of what is stored.
        config: what the files of the stores do not tell.
        storage_options: what the file system of a URL takes.
        remarks: what the user should be told, once: options that have no effect.
    """

    paths: tuple[str, ...]
    columns: tuple[str, ...] | None = None
    wanted: MessageFilter = field(default_factory=MessageFilter)
    start: OffsetLimit = field(default_factory=OffsetLimit)
    stop: OffsetLimit = field(default_factory=OffsetLimit)
    split_size: int | None = None
    min_partitions: int = 1
    batch_bytes: int = DEFAULT_BATCH_BYTES
    on_damage: OnDamage = "default"
    fail_on_data_loss: bool = True
    decompress: bool = False
    config: StoreConfig = field(default_factory=StoreConfig)
    storage_options: Mapping[str, Any] | None = None
    remarks: tuple[str, ...] = ()


def parse_read_options(options: Mapping[str, str]) -> ReadOptions:
    """The options of a batch read.

    Files are read only for ``config``; no store is looked at.

    Raises:
        UsageError: if an option's value cannot be meant, or a store is missing.
    """
    given = _Given(options)
    start, first_queues = _offsets(given, "startingOffsets", is_start=True)
    stop, last_queues = _offsets(given, "endingOffsets", is_start=False)
    first_queues |= _queue_offsets(given, "startingQueueOffsets", is_start=True)
    last_queues |= _queue_offsets(given, "endingQueueOffsets", is_start=False)
    assigned = given.parsed("assign", _assigned)
    topics = given.parsed("topics", _names)
    if assigned is not None:
        if topics is not None or given.text("topicPattern") is not None:
            raise UsageError("assign: goes with neither topics nor topicPattern")
        topics = frozenset(topic for topic, _ in assigned)
    since = given.parsed("startingTimestamp", time_ms)
    until = given.parsed("endingTimestamp", time_ms)
    if since is not None and until is not None and since > until:
        raise UsageError(f"startingTimestamp: {since} is later than endingTimestamp, {until}")
    _check_order(start, stop)
    wanted = MessageFilter(
        topics=topics,
        topic_pattern=given.parsed("topicPattern", _pattern),
        queue_ids=given.parsed("queueIds", _queue_ids),
        queues=assigned,
        tags=given.parsed("tags", _tags),
        keys=given.parsed("keys", _keys),
        since_ms=since,
        until_ms=until,
        queue_ranges=_ranges(first_queues, last_queues),
    )
    if (word := given.parsed("schema", _one_of("native", "kafka"))) == "kafka":
        raise UsageError(f"schema: {word!r} {LATER}")
    given.parsed("includeHeaders", _boolean)
    return ReadOptions(
        paths=_paths(given),
        columns=given.parsed("columns", _columns),
        wanted=wanted,
        start=start,
        stop=stop,
        split_size=given.parsed("splitSize", byte_count),
        min_partitions=given.parsed("minPartitions", _positive) or 1,
        batch_bytes=given.parsed("batchSize", byte_count) or DEFAULT_BATCH_BYTES,
        on_damage=given.parsed("onDamage", _on_damage) or "default",
        fail_on_data_loss=given.parsed("failOnDataLoss", _boolean) is not False,
        decompress=given.parsed("decompress", _boolean) or False,
        config=given.parsed("config", _config) or StoreConfig(),
        storage_options=given.parsed("storageOptions", _object),
        remarks=tuple(given.remarks()),
    )


class _Given:
    """What the user gave: by lower-case names, aliases resolved."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._values: dict[str, str] = {}
        self._said: dict[str, str] = {}
        for name, value in options.items():
            key = ALIASES.get(name.lower(), name.lower())
            if key in self._values:
                raise UsageError(f"{self._said[key]} and {name} are one option: give one of them")
            self._values[key] = value
            self._said[key] = _SPELLING.get(name.lower(), name)

    def text(self, name: str) -> str | None:
        return self._values.get(name.lower())

    def parsed(self, name: str, parse: Callable[[str], T]) -> T | None:
        """The value of an option; None if it is not given.

        Raises:
            UsageError: with the option's name, if it cannot be parsed.
        """
        text = self.text(name)
        if text is None:
            return None
        try:
            return parse(text.strip())
        except ValueError as error:
            # UsageError is one too.
            raise UsageError(f"{self._said[name.lower()]}: {error}") from error

    def remarks(self) -> list[str]:
        """What has no effect."""
        names = sorted(self._values)
        kafka = [self._said[name] for name in names if name.startswith("kafka.")]
        unknown = [self._said[n] for n in names if n not in _KNOWN and not n.startswith("kafka.")]
        streaming = [self._said[name] for name in names if name in _STREAM_ONLY]
        found: list[str] = []
        if kafka:
            found.append(f"options of Kafka's client have no effect here: {', '.join(kafka)}")
        found += [
            f"there is no option {name}{_nearest(name)}: it has no effect" for name in unknown
        ]
        if streaming:
            found.append(f"options for streams have no effect on a batch: {', '.join(streaming)}")
        return found


def _nearest(name: str) -> str:
    found = difflib.get_close_matches(name.lower(), [*_SPELLING, "assign"], n=1)
    return f" (is {_SPELLING.get(found[0], found[0])} meant?)" if found else ""


# ---------------------------------------------------------------------------------- single values
def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise UsageError(f"takes true or false, not {text!r}")
    return text.lower() == "true"


def _number(text: str) -> int:
    if re.fullmatch(r"-?\d+", text, re.ASCII) is None:
        raise UsageError(f"takes a whole number, not {text!r}")
    return int(text)


def _positive(text: str) -> int:
    if (number := _number(text)) < 1:
        raise UsageError(f"takes a number from 1 on, not {text!r}")
    return number


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise UsageError(f"takes a regular expression, not {text!r}: {error}") from error
    return text


def _one_of(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in words:
            raise UsageError(f"takes {' or '.join(words)}, not {text!r}")
        return text.lower()

    return parse


def _on_damage(text: str) -> OnDamage:
    word = _one_of("fail", "skip", "quarantine")(text)
    if word == "quarantine":
        raise UsageError(f"{word!r} {LATER}; this one takes fail or skip")
    # A torn tail is how a log ends that nobody closed: reading up to it is no failure.
    return "skip" if word == "skip" else "default"


def _config(text: str) -> StoreConfig:
    if text.startswith("{"):
        return StoreConfig.from_mapping(_object(text))
    return StoreConfig.from_file(text)


# ------------------------------------------------------------------------------------------ lists
def _words(text: str, separator: str = ",") -> list[str]:
    if text.startswith("["):
        try:
            words = json.loads(text)
        except ValueError:
            # A name may begin with a bracket; one that is JSON by chance is not to be feared.
            words = None
        if isinstance(words, list) and all(isinstance(word, str | int) for word in words):
            return [str(word) for word in words]
    return [word.strip() for word in re.split(separator, text) if word.strip()]


def _names(text: str) -> frozenset[str]:
    return frozenset(_some(_words(text), text))


def _queue_ids(text: str) -> frozenset[int]:
    return frozenset(_number(word) for word in _some(_words(text), text))


def _keys(text: str) -> frozenset[str]:
    # No key has a blank in it: RocketMQ joins keys with blanks.
    return frozenset(_some(_words(text, r"[,\s]"), text))


def _tags(text: str) -> frozenset[str] | None:
    if TAG_SEPARATOR in text or text == "*":
        return tag_expression(text, "it")
    return _names(text)


def _columns(text: str) -> tuple[str, ...]:
    return schema.check_names(_some(_words(text), text))


def _some(words: list[str], text: str) -> list[str]:
    if not words:
        raise UsageError(f"names nothing: {text!r}")
    return words


def _paths(given: _Given) -> tuple[str, ...]:
    """``load(a)`` comes as the option path, ``load([a, b])`` as JSON in the option paths."""
    several = given.parsed("paths", lambda text: tuple(_words(text)))
    one = given.text("path")
    paths = tuple(path for path in (*(several or ()), one) if path)
    if not paths:
        raise UsageError("path: there is no store to read: say load(path), or option path")
    return paths


# ---------------------------------------------------------------------------------------- offsets
Queue = tuple[str, int]


def _object(text: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except ValueError as error:
        raise UsageError(f"takes JSON, and {text!r} is none: {error}") from None
    if not isinstance(document, dict):
        raise UsageError(f"takes a JSON object, not {text!r}")
    return document


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


def _offsets(given: _Given, name: str, *, is_start: bool) -> tuple[OffsetLimit, dict[Queue, int]]:
    """Physical offsets by broker; in Kafka's form (topic -> partition -> offset) queue offsets."""

    def parse(text: str) -> tuple[OffsetLimit, dict[Queue, int]]:
        if re.fullmatch(r"-?\d+", text, re.A) or text.lower() in _NAMED_OFFSETS:
            value = _offset(text.lower() if text.lower() in _NAMED_OFFSETS else int(text))
            return OffsetLimit(default=_limit(value, is_start=is_start)), {}
        document = _object(text)
        if document and all(isinstance(value, dict) for value in document.values()):
            return OffsetLimit(), _by_queue(document)
        brokers = {b: _limit(_offset(v), is_start=is_start) for b, v in document.items()}
        return OffsetLimit(brokers=brokers), {}

    return given.parsed(name, parse) or (OffsetLimit(), {})


def _check_order(start: OffsetLimit, stop: OffsetLimit) -> None:
    for broker in (None, *(start.brokers.keys() | stop.brokers.keys())):
        first = start.default if broker is None else start.of(broker)
        beyond = stop.default if broker is None else stop.of(broker)
        # The words latest and earliest are no numbers to compare: nothing is wanted, on purpose.
        if first is None or first == java.LONG_MAX or not beyond:
            continue
        if first > beyond:
            of = "" if broker is None else f" of {broker}"
            raise UsageError(f"startingOffsets: {first}{of} is beyond endingOffsets, {beyond}")


def _queue_offsets(given: _Given, name: str, *, is_start: bool) -> dict[Queue, int]:
    return given.parsed(name, lambda text: _by_queue(_object(text))) or {}


def _by_queue(document: Mapping[str, Any]) -> dict[Queue, int]:
    found: dict[Queue, int] = {}
    for topic, queues in document.items():
        if not isinstance(queues, dict):
            raise UsageError(f"takes JSON topic -> queue -> offset, not {queues!r} for a topic")
        for queue, offset in queues.items():
            found[topic, _number(queue)] = _offset(offset)
    return found


def _ranges(
    starts: Mapping[Queue, int], stops: Mapping[Queue, int]
) -> dict[Queue, tuple[int, int | None]] | None:
    for queue in starts.keys() & stops.keys():
        if 0 <= stops[queue] < starts[queue]:
            raise UsageError(
                f"startingQueueOffsets: {starts[queue]} of queue {queue[1]} of {queue[0]} is "
                f"beyond endingQueueOffsets, {stops[queue]}"
            )
    ranges = {
        queue: (
            _limit(starts.get(queue, _EARLIEST), is_start=True) or 0,
            _limit(stops.get(queue, _LATEST), is_start=False),
        )
        for queue in starts.keys() | stops.keys()
    }
    return ranges or None


def _assigned(text: str) -> frozenset[Queue]:
    """Kafka's ``assign``: JSON topic -> list of partitions."""
    found: set[Queue] = set()
    for topic, queues in _object(text).items():
        if not isinstance(queues, list) or not all(type(queue) is int for queue in queues):
            raise UsageError(f"takes JSON topic -> list of queues, not {queues!r} for a topic")
        found |= {(topic, queue) for queue in queues}
    if not found:
        raise UsageError(f"names nothing: {text!r}")
    return frozenset(found)
