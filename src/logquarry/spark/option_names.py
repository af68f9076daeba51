"""The names of the options of logquarry, of Spark's Kafka source, and of Spark."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, TypeVar

from logquarry.errors import UsageError
from logquarry.text import nearest

T = TypeVar("T")

FORMAT: Final = "rocketmq"
"""Name of the data source."""

ALIASES: Final = {"subscribe": "topics", "subscribepattern": "topicpattern"}
"""Options with another name in Spark's Kafka source, except ``assign``, whose format differs."""

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
"""Options that Spark itself adds, for example if the user names a table in SQL."""
_STREAM_ONLY: Final = ("maxbytespertrigger", "maxoffsetspertrigger")
_NO_STREAM: Final = ("endingOffsets", "endingQueueOffsets", "endingTimestamp")


class Given:
    """The user's options by lower-case name; Kafka's names are replaced by logquarry's.

    `known` maps lower-case names to all valid options; the default is the options of a read.
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
        """Return the value of an option as the user gave it."""
        return self._values.get(name.lower())

    def parsed(self, name: str, parse: Callable[[str], T]) -> T | None:
        """Return the parsed value of an option; None if the user did not give it."""
        text = self.text(name)
        if text is None:
            return None
        try:
            return parse(text.strip())
        except ValueError as error:  # also a UsageError
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
