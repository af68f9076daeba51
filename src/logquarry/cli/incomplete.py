"""Reads a store for ``info`` and ``stats``, without the queues that cannot be read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

from logquarry import text
from logquarry.cli.exit_codes import ExitCode
from logquarry.cli.output import Output
from logquarry.errors import UnreadableFile

if TYPE_CHECKING:
    from logquarry.config import StoreConfig
    from logquarry.read.log_queues import QueueKey
    from logquarry.store.message_store import MessageStore

T = TypeVar("T")


def read_store(
    store: str, settings: StoreConfig | None, read: Callable[[MessageStore], T]
) -> tuple[T, Mapping[QueueKey, str]]:
    """Read an open store; if the disk fails for some queues, read the store without them.

    Returns:
        The result, and the queues that were left out, with the reasons.
    """
    from logquarry.read.batch_queue import unreadable_queues
    from logquarry.store.message_store import MessageStore

    left_out: Mapping[QueueKey, str] = {}
    with MessageStore.open(store, config=settings) as opened:
        try:
            return read(opened), left_out
        except UnreadableFile:
            left_out = unreadable_queues(opened.layout)
            if not left_out:
                raise
    with MessageStore.open(store, config=settings) as opened:
        opened.layout.left_out = left_out
        return read(opened), left_out


def queue_list(queues: Mapping[QueueKey, str]) -> list[dict[str, Any]]:
    """Return the queues that were left out, in the form of docs/json.md."""
    return [
        {"topic": topic, "queue_id": queue_id, "reason": reason}
        for (topic, queue_id), reason in sorted(queues.items())
    ]


def end_incomplete(out: Output, left_out: Mapping[QueueKey, str]) -> None:
    """Print the queues that were left out, and end with the exit code for findings."""
    for (topic, queue_id), reason in sorted(left_out.items()):
        out.warn(f"left out: {text.printable(topic)} queue {queue_id}: {text.printable(reason)}")
    if left_out:
        click.get_current_context().exit(ExitCode.FINDINGS)
