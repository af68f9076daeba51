"""What the user gave as options, by name, and how single values are parsed.

Names are case-insensitive, as Spark hands them over in lower case. Lists are ``a,b`` or JSON
(``["a", "b"]``, for names with a comma in them). Whatever cannot be meant is a
:class:`~logquarry.errors.UsageError`; :meth:`Given.parsed` puts the option's name before it.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from logquarry.config import StoreConfig
from logquarry.errors import UsageError
from logquarry.log.filters import TAG_SEPARATOR, tag_expression

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
    "quarantinePath",
)
_SPELLING: Final = {name.lower(): name for name in [*_OURS, "subscribe", "subscribePattern"]}
_KNOWN: Final = {name.lower() for name in _OURS} | set(ALIASES) | {"assign", "paths"}
_STREAM_ONLY: Final = ("maxbytespertrigger", "maxoffsetspertrigger")
_NO_STREAM: Final = ("endingOffsets", "endingQueueOffsets", "endingTimestamp")

T = TypeVar("T")


class Given:
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
        """The value of an option as it was given."""
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

    def refuse_ends(self) -> None:
        """Options that say where a read ends make no sense for a stream.

        Raises:
            UsageError: if there is one.
        """
        for name in _NO_STREAM:
            if name.lower() in self._values:
                raise UsageError(
                    f"{self._said[name.lower()]}: a stream has no end; a batch (spark.read) has"
                )

    def remarks(self, *, is_stream: bool) -> list[str]:
        """What has no effect."""
        names = sorted(self._values)
        kafka = [self._said[name] for name in names if name.startswith("kafka.")]
        unknown = [self._said[n] for n in names if n not in _KNOWN and not n.startswith("kafka.")]
        streaming = [self._said[n] for n in names if n in _STREAM_ONLY and not is_stream]
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
def boolean(text: str) -> bool:
    """True or false."""
    if text.lower() not in ("true", "false"):
        raise UsageError(f"takes true or false, not {text!r}")
    return text.lower() == "true"


def number(text: str) -> int:
    """A whole number."""
    if re.fullmatch(r"-?\d+", text, re.ASCII) is None:
        raise UsageError(f"takes a whole number, not {text!r}")
    return int(text)


def positive(text: str) -> int:
    """A whole number from 1 on."""
    if (found := number(text)) < 1:
        raise UsageError(f"takes a number from 1 on, not {text!r}")
    return found


def pattern(text: str) -> str:
    """A regular expression, as it is."""
    try:
        re.compile(text)
    except re.error as error:
        raise UsageError(f"takes a regular expression, not {text!r}: {error}") from error
    return text


def one_of(*words: str) -> Callable[[str], str]:
    """A parser that takes some words, in any case."""

    def parse(text: str) -> str:
        if text.lower() not in words:
            raise UsageError(f"takes {' or '.join(words)}, not {text!r}")
        return text.lower()

    return parse


def config(text: str) -> StoreConfig:
    """A store's configuration: JSON, or the path of a file."""
    if text.startswith("{"):
        return StoreConfig.from_mapping(json_object(text))
    return StoreConfig.from_file(text)


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        document = json.loads(text)
    except ValueError as error:
        raise UsageError(f"takes JSON, and {text!r} is none: {error}") from None
    if not isinstance(document, dict):
        raise UsageError(f"takes a JSON object, not {text!r}")
    return document


# ------------------------------------------------------------------------------------------ lists
def words(text: str, separator: str = ",") -> list[str]:
    """The words of a list."""
    if text.startswith("["):
        try:
            found = json.loads(text)
        except ValueError:
            # A name may begin with a bracket; one that is JSON by chance is not to be feared.
            found = None
        if isinstance(found, list) and all(isinstance(word, str | int) for word in found):
            return [str(word) for word in found]
    return [word.strip() for word in re.split(separator, text) if word.strip()]


def names(text: str) -> frozenset[str]:
    """A list of names."""
    return frozenset(some(words(text), text))


def queue_ids(text: str) -> frozenset[int]:
    """A list of numbers of queues."""
    return frozenset(number(word) for word in some(words(text), text))


def keys(text: str) -> frozenset[str]:
    """A list of keys."""
    # No key has a blank in it: RocketMQ joins keys with blanks.
    return frozenset(some(words(text, r"[,\s]"), text))


def tags(text: str) -> frozenset[str] | None:
    """A list of tags, or RocketMQ's expression; None for all."""
    if TAG_SEPARATOR in text or text == "*":
        return tag_expression(text, "it")
    return names(text)


def some(found: list[str], text: str) -> list[str]:
    """The words of a list, if there are any."""
    if not found:
        raise UsageError(f"names nothing: {text!r}")
    return found


def paths(given: Given) -> tuple[str, ...]:
    """Where the stores are.

    ``load(a)`` comes as the option path, ``load([a, b])`` as JSON in the option paths.
    """
    several = given.parsed("paths", lambda text: tuple(words(text)))
    one = given.text("path")
    found = tuple(path for path in (*(several or ()), one) if path)
    if not found:
        raise UsageError("path: there is no store to read: say load(path), or option path")
    return found
