"""Rules of the read API that reader and writer share: arguments of a get, names, missing queues."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Final

from logquarry import arguments
from logquarry.errors import UsageError
from logquarry.read.queue import Queue

NOT_FOR_USERS: Final = frozenset(
    (
        "bound",
        "check_stored",
        "config_tables",
        "has_queue_files",
        "load_staged",
        "log_feed",
        "put_stored",
        "start",
    )
)
"""Methods for other parts of this package; ``dir()`` of a store leaves them out."""


def get_arguments(
    topic: str, queue_id: int, offset: int, max_count: int, tag: str | None
) -> tuple[str, int, int, int, str | None]:
    """The checked arguments of a ``get``.

    RocketMQ answers a negative offset (OFFSET_TOO_SMALL) and gives one message for a count below 1.
    """
    return (
        *arguments.queue(topic, queue_id),
        arguments.integer(offset, "offset"),
        arguments.integer(max_count, "max_count", least=arguments.INT_MIN, most=arguments.INT_MAX),
        arguments.optional(arguments.text, tag, "tag"),
    )


def renamed_topic(
    topic: str | Iterable[str], topics: str | Iterable[str] | None
) -> str | Iterable[str]:
    """The topics of a ``scan`` with the argument's previous name."""
    if topics is not None:
        raise UsageError("give topics; topic is its previous name")
    warnings.warn("scan(topic=...) is now scan(topics=...)", DeprecationWarning, stacklevel=3)
    return topic


def no_queue(topic: str, queue_id: int) -> Queue:
    """A queue without messages, for a name that the store does not have."""
    from logquarry.read.log_queues import empty_queue

    return empty_queue(topic, queue_id)
