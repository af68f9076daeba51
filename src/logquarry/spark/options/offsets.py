"""Where reading starts and ends: offsets by broker, and by queue in Kafka's form."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from logquarry.errors import UsageError
from logquarry.format import java
from logquarry.spark.options.given import Given, json_object, number

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
