"""The names of options: logquarry's, Kafka's (of Spark's Kafka source), and Spark's.

Needs no PySpark.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final, TypeVar

from logquarry.errors import UsageError
from logquarry.text import nearest

T = TypeVar("T")

FORMAT: Final = "rocketmq"
"""Name of the data source."""

ALIASES: Final = {"subscribe": "topics", "subscribepattern": "topicpattern"}
"""Options of logquarry that have another name in Spark's Kafka source. ``assign`` is not here,
because its format differs.
"""

_OURS: Final = (
    "path", "topics", "topicPattern", "queueIds", "tags", "keys", "columns",
    "startingOffsets", "endingOffsets", "startingQueueOffsets", "endingQueueOffsets",
    "startingTimestamp", "endingTimestamp", "splitSize", "minPartitions", "batchSize",
    "onDamage", "failOnDataLoss", "schema", "decompress", "config", "storageOptions",
    "includeHeaders", "maxBytesPerTrigger", "maxOffsetsPerTrigger", "quarantinePath",
)  # fmt: skip
_SPELLING: Final = {name.lower(): name for name in [*_OURS, "subscribe", "subscribePattern"]}
_KNOWN: Final = {name.lower() for name in _OURS} | set(ALIASES) | {"assign", "paths"}
_SPARKS: Final = frozenset(
    {"path", "paths", "checkpointlocation", "queryname", "serialization.format"}
)
"""Options that Spark itself adds, for example if the user names a table in SQL."""
_STREAM_ONLY: Final = ("maxbytespertrigger", "maxoffsetspertrigger")
_NO_STREAM: Final = ("endingOffsets", "endingQueueOffsets", "endingTimestamp")


class Given:
    """The user's options by lower-case name; Kafka's names are replaced by those of logquarry."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._values: dict[str, str] = {}
        self._spelling: dict[str, str] = {}
        for name, value in options.items():
            key = ALIASES.get(name.lower(), name.lower())
            if key in self._values:
                raise UsageError(
                    f"{self._spelling[key]} and {name} are the same option: give one of them"
                )
            self._values[key] = value
            self._spelling[key] = _SPELLING.get(name.lower(), name)

    def text(self, name: str) -> str | None:
        """Return the value of an option as the user gave it."""
        return self._values.get(name.lower())

    def parsed(self, name: str, parse: Callable[[str], T]) -> T | None:
        """Return the parsed value of an option; None if the user did not give it.

        Raises:
            UsageError: if the value is invalid; the text begins with the option's name.
        """
        text = self.text(name)
        if text is None:
            return None
        try:
            return parse(text.strip())
        except ValueError as error:  # also a UsageError
            raise UsageError(f"{self._spelling[name.lower()]}: {error}") from error

    def refuse_ends(self) -> None:
        """Reject options that set the end of a read, because a stream has no end.

        Raises:
            UsageError: if the user gave one of them.
        """
        for name in _NO_STREAM:
            if name.lower() in self._values:
                raise UsageError(
                    f"{self._spelling[name.lower()]}: a stream has no end: use a batch (spark.read)"
                )

    def refuse_unknown(self) -> None:
        """Reject unknown options, because a misspelled filter would return every row.

        Raises:
            UsageError: if there are any; the text suggests the nearest known options.
        """
        refuse_unknown(self._spelling.values(), _KNOWN, {**_SPELLING, "assign": "assign"})

    def remarks(self, *, is_stream: bool) -> list[str]:
        """Return one warning for each kind of option that has no effect."""
        names = sorted(self._values)
        kafka = [self._spelling[name] for name in names if name.startswith("kafka.")]
        streaming = [self._spelling[n] for n in names if n in _STREAM_ONLY and not is_stream]
        found: list[str] = []
        if kafka:
            found.append(f"options of Kafka's client have no effect: {', '.join(kafka)}")
        if streaming:
            found.append(f"options of a stream have no effect on a batch: {', '.join(streaming)}")
        return found


def refuse_unknown(
    names: Iterable[str], known: Collection[str], spelling: Mapping[str, str]
) -> None:
    """Reject options that the reader or writer does not know.

    Options of Kafka's client are allowed, so that a query written for Kafka runs. The options that
    Spark itself adds are allowed too.

    Args:
        names: the options that the user gave.
        known: the options that exist, in lower case.
        spelling: the options to suggest, by lower-case name.

    Raises:
        UsageError: if an option is unknown; the text suggests the nearest known one.
    """
    found = []
    for name in sorted(names, key=str.lower):
        key = name.lower()
        if key in known or key in _SPARKS or key.startswith("kafka."):
            continue
        near = nearest(name, spelling.values())
        found.append(f"{name} (did you mean {near}?)" if near else name)
    if found:
        raise UsageError(f"there is no option {', '.join(found)}: see docs/spark.md, docs/sink.md")
